/* CUDA runtime: memory. Taken from the state's account, addressed by addresses.c, copied by the CPU. */
#define _GNU_SOURCE
#include "runtime.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t whole(uint64_t size, uint64_t unit) { return (size + unit - 1) / unit * unit; }

static struct gpuless_rig *rig(void) { return gpuless_mine(0); }

/* --- cudaMalloc ---------------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaMalloc(void **address, size_t size) {
    *address = NULL;
    TRY(begin("cudaMalloc"));
    TRY(unsafe_in_capture());
    if (!size) return cudaSuccess;
    int device = current_device();
    uint64_t bytes = whole(size, GPULESS_PAGE);
    if (bytes < size || !gpuless_charge(rig(), device, bytes)) return told(cudaErrorMemoryAllocation);
    *address = (void *)gpuless_take(size, GPULESS_MALLOC, device, bytes);
    if (*address) return cudaSuccess;
    gpuless_refund(rig(), device, bytes);
    return told(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaFree(void *address) {
    TRY(begin("cudaFree"));
    TRY(unsafe_in_capture());
    if (!address) return cudaSuccess;
    struct gpuless_range was;
    if (!gpuless_find((uintptr_t)address, &was) || was.use == GPULESS_RESERVED) return told(cudaErrorInvalidValue);
    if (was.use == GPULESS_POOL) return cudaFreeAsync(address, 0);
    if (!gpuless_give_back((uintptr_t)address, &was)) return told(cudaErrorInvalidValue);
    gpuless_refund(rig(), was.device, was.charged_bytes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    TRY(begin("cudaMemGetInfo"));
    TRY(unsafe_in_capture());
    int device = current_device();
    uint64_t capacity_bytes = gpuless_state(rig())->devices[device].capacity_bytes, used_bytes = gpuless_used(rig(), device);
    *total_bytes = capacity_bytes;
    *free_bytes = used_bytes < capacity_bytes ? capacity_bytes - used_bytes : 0;
    return cudaSuccess;
}

/* --- cudaMallocAsync: one pool a device, which grows by whole chunks and keeps what it has until told otherwise ------------ */

#define CHUNK_BYTES ((uint64_t)32 << 20)

struct pool {
    uint64_t reserved_bytes, reserved_high_bytes, used_bytes, used_high_bytes, threshold_bytes;
};
static struct pool pools[GPULESS_DEVICES];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

static int grow(struct pool *pool, int device) {
    uint64_t needed = whole(pool->used_bytes, CHUNK_BYTES);
    if (needed <= pool->reserved_bytes) return 1;
    if (!gpuless_charge(rig(), device, needed - pool->reserved_bytes)) return 0;
    pool->reserved_bytes = needed;
    pool->reserved_high_bytes = larger(pool->reserved_high_bytes, needed);
    return 1;
}

static void trim(struct pool *pool, int device, uint64_t keep_bytes) {
    uint64_t kept = whole(larger(pool->used_bytes, keep_bytes < pool->reserved_bytes ? keep_bytes : pool->reserved_bytes),
                          CHUNK_BYTES);
    if (kept >= pool->reserved_bytes) return;
    gpuless_refund(rig(), device, pool->reserved_bytes - kept);
    pool->reserved_bytes = kept;
}

static int device_of(cudaMemPool_t pool) { return (int)((struct pool *)pool - pools); }

EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) {
    *address = NULL;
    TRY(begin("cudaMallocAsync"));
    if (!size) return cudaSuccess;
    int device = current_device();
    struct pool *pool = &pools[device];
    enqueue(stream);
    pthread_mutex_lock(&pool_lock);
    pool->used_bytes += whole(size, 512);
    if (grow(pool, device)) *address = (void *)gpuless_take(size, GPULESS_POOL, device, whole(size, 512));
    if (*address) pool->used_high_bytes = larger(pool->used_high_bytes, pool->used_bytes);
    else pool->used_bytes -= whole(size, 512);
    pthread_mutex_unlock(&pool_lock);
    return *address ? cudaSuccess : told(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    TRY(begin("cudaFreeAsync"));
    struct gpuless_range was;
    if (!address) return cudaSuccess;
    if (!gpuless_give_back((uintptr_t)address, &was)) return told(cudaErrorInvalidValue);
    enqueue(stream);
    pthread_mutex_lock(&pool_lock);
    pools[was.device].used_bytes -= was.charged_bytes;
    pthread_mutex_unlock(&pool_lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int ordinal) {
    int device = gpuless_visible(ordinal);
    if (device < 0) return told(cudaErrorInvalidDevice);
    *pool = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

static uint64_t *attribute_of(struct pool *pool, enum cudaMemPoolAttr attribute) {
    switch (attribute) {
        case cudaMemPoolAttrReleaseThreshold: return &pool->threshold_bytes;
        case cudaMemPoolAttrReservedMemCurrent: return &pool->reserved_bytes;
        case cudaMemPoolAttrReservedMemHigh: return &pool->reserved_high_bytes;
        case cudaMemPoolAttrUsedMemCurrent: return &pool->used_bytes;
        case cudaMemPoolAttrUsedMemHigh: return &pool->used_high_bytes;
        default: return NULL;
    }
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    pthread_mutex_lock(&pool_lock);
    uint64_t *found = attribute_of((struct pool *)handle, attribute);
    if (found) *(uint64_t *)value = *found;
    else *(int *)value = 1; /* the ways of reuse */
    pthread_mutex_unlock(&pool_lock);
    return cudaSuccess;
}

/* A high-water mark can only be set to zero, which means: to what is now. */
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    struct pool *pool = (struct pool *)handle;
    pthread_mutex_lock(&pool_lock);
    if (attribute == cudaMemPoolAttrReleaseThreshold) pool->threshold_bytes = *(uint64_t *)value;
    if (attribute == cudaMemPoolAttrReservedMemHigh) pool->reserved_high_bytes = pool->reserved_bytes;
    if (attribute == cudaMemPoolAttrUsedMemHigh) pool->used_high_bytes = pool->used_bytes;
    pthread_mutex_unlock(&pool_lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep_bytes) {
    TRY(begin("cudaMemPoolTrimTo"));
    pthread_mutex_lock(&pool_lock);
    trim((struct pool *)handle, device_of(handle), keep_bytes);
    pthread_mutex_unlock(&pool_lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    (void)pool, (void)access, (void)count;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int ordinal, enum cudaGraphMemAttributeType attribute, void *value) {
    (void)ordinal, (void)attribute;
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int ordinal, enum cudaGraphMemAttributeType attribute, void *value) {
    (void)ordinal, (void)attribute, (void)value;
    return cudaSuccess;
}

/* --- pinned host memory ------------------------------------------------------------------------------------------------------ */

struct pinned {
    char *start;
    size_t size;
    struct pinned *next;
};
static struct pinned *pinned;
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;

static void pin(void *start, size_t size) {
    struct pinned *one = malloc(sizeof *one);
    pthread_mutex_lock(&pinned_lock);
    *one = (struct pinned){start, size, pinned};
    pinned = one;
    pthread_mutex_unlock(&pinned_lock);
}

/* How large what starts here was; 0: nothing does. */
static size_t unpin(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&pinned_lock);
    for (struct pinned **link = &pinned; *link; link = &(*link)->next) {
        struct pinned *one = *link;
        if (one->start != start) continue;
        size = one->size;
        *link = one->next;
        free(one);
        break;
    }
    pthread_mutex_unlock(&pinned_lock);
    return size;
}

static int is_pinned(const void *address) {
    int found = 0;
    pthread_mutex_lock(&pinned_lock);
    for (struct pinned *one = pinned; one && !found; one = one->next)
        found = (size_t)((const char *)address - one->start) < one->size;
    pthread_mutex_unlock(&pinned_lock);
    return found;
}

EXPORT cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
    (void)flags;
    *start = NULL;
    TRY(begin("cudaHostAlloc"));
    TRY(unsafe_in_capture());
    if (!size) return cudaSuccess;
    void *got = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return told(cudaErrorMemoryAllocation);
    pin(got, size);
    *start = got;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *start) {
    if (!start) return cudaSuccess;
    size_t size = unpin(start);
    if (!size) return told(cudaErrorInvalidValue);
    munmap(start, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    (void)flags;
    TRY(begin("cudaHostRegister"));
    pin(start, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *start) { return unpin(start) ? cudaSuccess : told(cudaErrorInvalidValue); }

static int ordinal_of(int device) {
    for (int i = 0; i < gpuless_visible_count(); i++)
        if (gpuless_visible(i) == device) return i;
    return -1;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct gpuless_range range;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2; /* cudaInvalidDeviceId */
    if (gpuless_find((uintptr_t)address, &range)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = ordinal_of(range.device);
        attributes->devicePointer = (void *)address;
    } else if (is_pinned(address)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->device = current_ordinal;
        attributes->devicePointer = attributes->hostPointer = (void *)address;
    }
    return cudaSuccess;
}

/* --- copies ------------------------------------------------------------------------------------------------------------------ */

EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    (void)kind;
    TRY(begin(NULL));
    enqueue(stream);
    gpuless_copy(target, source, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    TRY(unsafe_in_capture());
    TRY(cudaMemcpyAsync(target, source, size, kind, 0));
    complete(0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *target, int target_ordinal, const void *source, int source_ordinal, size_t size,
                                       cudaStream_t stream) {
    (void)target_ordinal, (void)source_ordinal;
    return cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    TRY(begin(NULL));
    enqueue(stream);
    for (size_t row = 0; row < height; row++)
        gpuless_copy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
    TRY(begin(NULL));
    enqueue(stream);
    if (value == 0) gpuless_zero(start, size);
    else memset(start, value, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, 0); }

/* --- between processes: the account is true (who opens, holds nothing), the content is not shared --------------------------- */

struct ipc {
    uint64_t size;
    int32_t device;
};

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
    struct gpuless_range range;
    if (!gpuless_find((uintptr_t)address, &range)) return told(cudaErrorInvalidValue);
    memset(handle, 0, sizeof *handle);
    *(struct ipc *)handle = (struct ipc){range.size, range.device};
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags) {
    (void)flags;
    TRY(begin("cudaIpcOpenMemHandle"));
    struct ipc shared;
    memcpy(&shared, &handle, sizeof shared);
    *address = (void *)gpuless_take(shared.size, GPULESS_MALLOC, shared.device, 0);
    return *address ? cudaSuccess : told(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *address) {
    struct gpuless_range was;
    return gpuless_give_back((uintptr_t)address, &was) ? cudaSuccess : told(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    (void)event;
    memset(handle, 0, sizeof *handle);
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    (void)handle;
    return cudaEventCreateWithFlags(event, cudaEventDisableTiming);
}
