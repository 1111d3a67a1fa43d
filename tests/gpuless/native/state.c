/* The state file: devices, processes, and who holds how much. */
#define _GNU_SOURCE
#include "gpuless.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct gpuless_rig {
    char directory[4000];
    struct gpuless_state *state;
    int alive; /* the file of that name */
    int slot;  /* this process's, -1: none yet */
    pid_t slot_pid;
};

static int open_in(const char *directory, const char *name, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return open(path, flags | O_CLOEXEC, 0666);
}

static struct gpuless_state *map_state(const char *directory, int flags) {
    int file = open_in(directory, "state", O_RDWR | flags);
    if (file < 0) return NULL;
    struct gpuless_state *found = MAP_FAILED;
    if (ftruncate(file, sizeof *found) == 0)
        found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return found == MAP_FAILED ? NULL : found;
}

struct gpuless_rig *gpuless_open(const char *directory) {
    struct gpuless_state *state = map_state(directory, 0);
    if (!state || state->layout != sizeof *state) {
        fprintf(stderr, "gpuless: no state of this version of the rig in %s; make it anew\n", directory);
        return NULL;
    }
    struct gpuless_rig *rig = calloc(1, sizeof *rig);
    snprintf(rig->directory, sizeof rig->directory, "%s", directory);
    rig->state = state;
    rig->alive = open_in(directory, "alive", O_RDWR | O_CREAT); /* never closed: that would give up its locks */
    rig->slot = -1;
    return rig;
}

struct gpuless_rig *gpuless_mine(int again) {
    static struct gpuless_rig *mine;
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    if (mine && !again) return mine;
    pthread_mutex_lock(&opening);
    const char *directory = getenv("GPULESS_DIR");
    if (directory && !(mine && strcmp(mine->directory, directory) == 0)) mine = gpuless_open(directory);
    pthread_mutex_unlock(&opening);
    return mine;
}

struct gpuless_state *gpuless_state(struct gpuless_rig *rig) { return rig->state; }

const char *gpuless_directory(struct gpuless_rig *rig) { return rig->directory; }

const struct gpuless_device *gpuless_device(struct gpuless_rig *rig, int device) { return &rig->state->devices[device]; }

static struct gpuless_state *lock(struct gpuless_rig *rig) {
    /* Where its owner died: a figure is one word, and the dead one's own are given back by bury_the_dead. */
    if (pthread_mutex_lock(&rig->state->lock) == EOWNERDEAD) pthread_mutex_consistent(&rig->state->lock);
    return rig->state;
}

static void unlock(struct gpuless_rig *rig) { pthread_mutex_unlock(&rig->state->lock); }

/* --- who lives ------------------------------------------------------------------------------------------------------ */

static struct flock byte_of(int slot) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
}

static int lives(const struct gpuless_rig *rig, int slot) {
    const struct gpuless_process *process = &rig->state->processes[slot];
    if (process->lasting || process->pid == getpid()) return 1; /* a process's own locks do not stop it */
    struct flock byte = byte_of(slot);
    return fcntl(rig->alive, F_GETLK, &byte) == 0 && byte.l_type != F_UNLCK;
}

static void bury_the_dead(struct gpuless_rig *rig) {
    for (int i = 0; i < GPULESS_PROCESSES; i++) {
        struct gpuless_process *process = &rig->state->processes[i];
        if (process->pid && !lives(rig, i)) memset(process, 0, sizeof *process);
    }
}

static int slot_of(struct gpuless_state *state, int pid) {
    for (int i = 0; i < GPULESS_PROCESSES; i++)
        if (state->processes[i].pid == pid) return i;
    return -1;
}

/* This process's own figures; NULL: there are too many processes. */
static struct gpuless_process *mine(struct gpuless_rig *rig) {
    if (rig->slot >= 0 && rig->slot_pid == getpid()) return &rig->state->processes[rig->slot];
    bury_the_dead(rig);
    int slot = slot_of(rig->state, 0);
    struct flock byte = byte_of(slot);
    if (slot < 0 || fcntl(rig->alive, F_SETLK, &byte) != 0) return NULL;
    rig->slot = slot;
    rig->slot_pid = getpid();
    rig->state->processes[slot] = (struct gpuless_process){.pid = rig->slot_pid};
    return &rig->state->processes[slot];
}

/* --- who holds how much ------------------------------------------------------------------------------------------------ */

static uint64_t used(const struct gpuless_state *state, int device) {
    uint64_t sum = 0;
    for (int i = 0; i < GPULESS_PROCESSES; i++) sum += state->processes[i].used_bytes[device];
    return sum;
}

static int fits(const struct gpuless_state *state, int device, uint64_t bytes) {
    uint64_t capacity_bytes = state->devices[device].capacity_bytes, used_bytes = used(state, device);
    return used_bytes <= capacity_bytes && bytes <= capacity_bytes - used_bytes;
}

int gpuless_charge(struct gpuless_rig *rig, int device, uint64_t bytes) {
    struct gpuless_state *state = lock(rig);
    struct gpuless_process *me = mine(rig);
    if (me && !fits(state, device, bytes)) bury_the_dead(rig);
    int taken = me && fits(state, device, bytes);
    if (taken) me->used_bytes[device] += bytes;
    unlock(rig);
    return taken;
}

void gpuless_refund(struct gpuless_rig *rig, int device, uint64_t bytes) {
    lock(rig);
    struct gpuless_process *me = mine(rig);
    if (me) me->used_bytes[device] -= bytes;
    unlock(rig);
}

uint64_t gpuless_used(struct gpuless_rig *rig, int device) {
    struct gpuless_state *state = lock(rig);
    bury_the_dead(rig);
    uint64_t used_bytes = used(state, device);
    unlock(rig);
    return used_bytes;
}

int gpuless_holders(struct gpuless_rig *rig, int device, int room, int32_t *pids, uint64_t *used_bytes) {
    struct gpuless_state *state = lock(rig);
    bury_the_dead(rig);
    int found = 0;
    for (int i = 0; i < GPULESS_PROCESSES; i++) {
        const struct gpuless_process *process = &state->processes[i];
        if (!process->pid || !process->used_bytes[device]) continue;
        if (found < room) {
            pids[found] = process->pid;
            used_bytes[found] = process->used_bytes[device];
        }
        found++;
    }
    unlock(rig);
    return found;
}

/* --- for a test ----------------------------------------------------------------------------------------------------------- */

int gpuless_make(const char *directory, uint64_t context_bytes) {
    struct gpuless_state *made = map_state(directory, O_CREAT | O_EXCL);
    if (!made) return -1;
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&made->lock, &shared);
    made->context_bytes = context_bytes;
    made->layout = sizeof *made;
    munmap(made, sizeof *made);
    return 0;
}

int gpuless_add_device(struct gpuless_rig *rig, const struct gpuless_device *device) {
    struct gpuless_state *state = lock(rig);
    int number = state->device_count < GPULESS_DEVICES ? state->device_count : -1;
    if (number >= 0) {
        state->devices[number] = *device;
        state->device_count++;
    }
    unlock(rig);
    return number;
}

int gpuless_make_up(struct gpuless_rig *rig, int pid, int device, uint64_t used_bytes) {
    struct gpuless_state *state = lock(rig);
    bury_the_dead(rig);
    int slot = slot_of(state, pid);
    if (slot < 0) slot = slot_of(state, 0);
    if (slot >= 0) {
        struct gpuless_process *process = &state->processes[slot];
        process->pid = pid;
        process->lasting = 1;
        process->used_bytes[device] = used_bytes;
    }
    unlock(rig);
    return slot >= 0 ? 0 : -1;
}
