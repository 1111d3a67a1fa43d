/* What the stand-ins share: a directory with the state of the pretend devices, and what each process holds of them.
 *
 * $GPULESS_DIR/state   mmapped by everyone; behind one robust lock, so that a process that is killed leaves nothing locked
 * $GPULESS_DIR/alive   byte N is locked (fcntl, by the kernel given up with the process) while the process of slot N lives
 * $GPULESS_DIR/faults  what goes wrong now, a line each (see faults.c); $GPULESS_FAULTS likewise, for one process
 *
 * Device numbers here are NVML's, and an instance of MIG has one too. What CUDA calls device 0: see devices.c.
 */
#ifndef GPULESS_H
#define GPULESS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define GPULESS_DEVICES 64
#define GPULESS_PROCESSES 256
#define GPULESS_PAGE ((uint64_t)2 << 20)  /* the driver's page: what is charged is a multiple of it */
#define EXPORT __attribute__((visibility("default")))

struct gpuless_device {
    char name[96];
    char uuid[96];           /* GPU-…, or MIG-… for an instance */
    char bus_id[32];         /* 00000000:01:00.0 */
    uint64_t capacity_bytes; /* what CUDA tells as the total */
    uint64_t driver_bytes;   /* the driver's own: what NVML's total has more */
    int32_t cuda_rank;       /* place in CUDA's own order (fastest first) */
    int32_t parent;          /* the device whose instance of MIG this is; -1: a whole one */
    int32_t instance;        /* the number of the instance; -1: a whole one */
};

struct gpuless_process {
    int32_t pid;                          /* 0: the slot is empty */
    int32_t lasting;                      /* made up by a test: stays whether or not there is such a process */
    uint64_t used_bytes[GPULESS_DEVICES]; /* its context among them */
};

struct gpuless_state {
    uint64_t layout; /* sizeof this struct: what was built differently does not mix */
    pthread_mutex_t lock;
    int32_t device_count;
    uint64_t context_bytes; /* what a process's context takes on each device that it uses */
    struct gpuless_device devices[GPULESS_DEVICES];
    struct gpuless_process processes[GPULESS_PROCESSES];
};

/* --- state.c: each takes the lock itself --------------------------------------------------------------------------- */

struct gpuless_rig;
/* The rig in $GPULESS_DIR; NULL: none. `again` looks whether that is another one by now. */
EXPORT struct gpuless_rig *gpuless_mine(int again);
EXPORT struct gpuless_rig *gpuless_open(const char *directory);
EXPORT struct gpuless_state *gpuless_state(struct gpuless_rig *);
EXPORT const char *gpuless_directory(struct gpuless_rig *);
EXPORT const struct gpuless_device *gpuless_device(struct gpuless_rig *, int device);
/* Take so many bytes of the device for this process; 0: it has not so many left. */
EXPORT int gpuless_charge(struct gpuless_rig *, int device, uint64_t bytes);
EXPORT void gpuless_refund(struct gpuless_rig *, int device, uint64_t bytes);
/* What all processes hold of it together; the dead hold nothing. */
EXPORT uint64_t gpuless_used(struct gpuless_rig *, int device);
/* The processes that hold some of it: how many, of which at most `room` are told. */
EXPORT int gpuless_holders(struct gpuless_rig *, int device, int room, int32_t *pids, uint64_t *used_bytes);
/* For a test: a new state; a device more (its number); what a made-up process holds (0: it is gone). -1: not so. */
EXPORT int gpuless_make(const char *directory, uint64_t context_bytes);
EXPORT int gpuless_add_device(struct gpuless_rig *, const struct gpuless_device *);
EXPORT int gpuless_make_up(struct gpuless_rig *, int pid, int device, uint64_t used_bytes);

/* --- devices.c ------------------------------------------------------------------------------------------------------ */

/* How many devices CUDA shows this process, and which one its Nth is. */
EXPORT int gpuless_visible_count(void);
EXPORT int gpuless_visible(int ordinal);

/* --- faults.c ------------------------------------------------------------------------------------------------------- */

enum gpuless_fault_kind { GPULESS_FINE, GPULESS_ERROR, GPULESS_UNAVAILABLE };
struct gpuless_fault {
    enum gpuless_fault_kind kind;
    char error[64]; /* its name or number, as written */
};
/* What is to go wrong in this call (its name without a version suffix) about this device (-1: about none). A call that
 * is to take long has taken long when this returns. */
EXPORT struct gpuless_fault gpuless_fault(const char *call, int device);

/* --- addresses.c: this process's device addresses --------------------------------------------------------------------- */

enum gpuless_use { GPULESS_MALLOC, GPULESS_RESERVED, GPULESS_POOL };
struct gpuless_range {
    uintptr_t address;
    uint64_t size;
    enum gpuless_use use;
    int device;
    uint64_t charged_bytes;
};
/* The lowest gap that fits; 0: none. */
EXPORT uintptr_t gpuless_take(uint64_t size, enum gpuless_use use, int device, uint64_t charged_bytes);
/* Forget the range that starts here, and tell what it was; 0: there is none. */
EXPORT int gpuless_give_back(uintptr_t address, struct gpuless_range *was);
/* The range that this address lies in; 0: none. */
EXPORT int gpuless_find(uintptr_t address, struct gpuless_range *found);
/* Zero these bytes, holding no memory for them. */
EXPORT void gpuless_zero(void *start, uint64_t size);
/* Copy; of device memory only what was ever written, so that copies of pretend gigabytes hold none. */
EXPORT void gpuless_copy(void *target, const void *source, uint64_t size);

/* --- context.c ------------------------------------------------------------------------------------------------------ */

enum gpuless_context { GPULESS_CONTEXT_OK, GPULESS_CONTEXT_FORKED, GPULESS_CONTEXT_NO_MEMORY };
/* Begin a context on the device, where this process has none yet. */
EXPORT enum gpuless_context gpuless_context(int device);
EXPORT int gpuless_has_context(int device);
/* Whether this process was forked from one that had a context: CUDA refuses it everything. */
EXPORT int gpuless_forked(void);

#endif
