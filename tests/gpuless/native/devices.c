/* Which devices CUDA shows a process, and in which order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, as the CUDA C++
 * Programming Guide (CUDA Environment Variables) has them. The list ends before the first entry that names no device; an
 * entry that comes twice leaves none. Of MIG, one instance is shown at most (NVIDIA Multi-Instance GPU User Guide, CUDA Device
 * Enumeration): the first that is named, or that a named device has. */
#include "gpuless.h"

#include <stdlib.h>
#include <string.h>

static int visible[GPULESS_DEVICES], visible_count;

/* Where a device is in MIG mode; else itself. */
static int first_instance(const struct gpuless_state *state, int device) {
    for (int i = 0; i < state->device_count; i++)
        if (state->devices[i].parent == device) return i;
    return device;
}

static int is_whole(const struct gpuless_state *state, int device) { return state->devices[device].parent < 0; }

/* The whole devices, in CUDA's order. */
static int in_order(const struct gpuless_state *state, int *ordered) {
    const char *order = getenv("CUDA_DEVICE_ORDER");
    int by_bus = order && strcmp(order, "PCI_BUS_ID") == 0, count = 0;
    for (int i = 0; i < state->device_count; i++) {
        if (!is_whole(state, i)) continue;
        int at = count++;
        for (; at > 0 && !by_bus && state->devices[ordered[at - 1]].cuda_rank > state->devices[i].cuda_rank; at--)
            ordered[at] = ordered[at - 1];
        ordered[at] = i;
    }
    return count;
}

static int by_uuid(const struct gpuless_state *state, const char *entry, size_t length) {
    int found = -1;
    for (int i = 0; i < state->device_count; i++) {
        if (strncmp(state->devices[i].uuid, entry, length) != 0) continue;
        if (found >= 0) return -1; /* a prefix of two */
        found = i;
    }
    return found;
}

/* The device that this entry names; -1: none. */
static int named(const struct gpuless_state *state, const char *entry, const int *ordered, int count) {
    while (*entry == ' ') entry++;
    size_t length = strcspn(entry, ", ");
    if (strncmp(entry, "GPU-", 4) == 0 || strncmp(entry, "MIG-", 4) == 0) return by_uuid(state, entry, length);
    char *end;
    long number = strtol(entry, &end, 10);
    return end != entry && number >= 0 && number < count ? ordered[number] : -1;
}

static int is_shown(int device) {
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == device) return 1;
    return 0;
}

static int is_instance_shown(const struct gpuless_state *state) {
    return visible_count && !is_whole(state, visible[visible_count - 1]);
}

/* One more, or what an instance of it is; whether others may follow. */
static int show(const struct gpuless_state *state, int device) {
    device = first_instance(state, device);
    if (is_shown(device)) visible_count = 0;
    else visible[visible_count++] = device;
    return visible_count && !is_instance_shown(state);
}

static void show_all(const struct gpuless_state *state, const int *ordered, int count) {
    for (int i = 0; i < count; i++)
        if (!show(state, ordered[i])) return;
}

static void show_named(const struct gpuless_state *state, const char *entry, const int *ordered, int count) {
    for (;; entry++) {
        int device = named(state, entry, ordered, count);
        if (device < 0 || !show(state, device)) return;
        entry += strcspn(entry, ",");
        if (!*entry) return;
    }
}

static void look(void) {
    struct gpuless_rig *rig = gpuless_mine(0);
    if (!rig) return;
    const struct gpuless_state *state = gpuless_state(rig);
    int ordered[GPULESS_DEVICES], count = in_order(state, ordered);
    const char *entry = getenv("CUDA_VISIBLE_DEVICES");
    if (entry) show_named(state, entry, ordered, count);
    else show_all(state, ordered, count);
}

static void look_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, look);
}

int gpuless_visible_count(void) {
    look_once();
    return visible_count;
}

int gpuless_visible(int ordinal) {
    look_once();
    return ordinal >= 0 && ordinal < visible_count ? visible[ordinal] : -1;
}
