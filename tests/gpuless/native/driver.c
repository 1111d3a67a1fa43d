/* A libcuda.so.1: what PyTorch links to or asks the runtime for. The virtual memory of expandable segments is real in its
 * account; modules and kernels are accepted and not run. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include "gpuless.h"

#define MAPPINGS 65536

static _Thread_local int current_ordinal = -1; /* what a context handle stands for: the ordinal + 1 */

static CUcontext context_of(int ordinal) { return (CUcontext)(uintptr_t)(ordinal + 1); }

static CUresult fault_of(const char *call, int device) {
    struct gpuless_fault fault = gpuless_fault(call, device);
    if (fault.kind != GPULESS_ERROR) return CUDA_SUCCESS;
    if (strcmp(fault.error, "OUT_OF_MEMORY") == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    return atoi(fault.error) ? (CUresult)atoi(fault.error) : CUDA_ERROR_UNKNOWN;
}

/* --- virtual memory: granules are charged when made, and given back when neither held nor mapped ----------------------------- */

struct granule {
    int device;
    uint64_t size;
    int references;
};
struct mapping {
    CUdeviceptr address;
    struct granule *granule;
};

static struct mapping mappings[MAPPINGS];
static int mapping_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void release(struct granule *granule) {
    if (--granule->references) return;
    gpuless_refund(gpuless_mine(0), granule->device, granule->size);
    free(granule);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags how) {
    (void)properties, (void)how;
    *bytes = GPULESS_PAGE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wished,
                                    unsigned long long flags) {
    (void)alignment, (void)wished, (void)flags;
    *address = gpuless_take(size, GPULESS_RESERVED, gpuless_visible(0), 0);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    (void)size;
    struct gpuless_range was;
    return gpuless_give_back(address, &was) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    (void)flags;
    int device = gpuless_visible(properties->location.id);
    if (device < 0 || size % GPULESS_PAGE) return CUDA_ERROR_INVALID_VALUE;
    CUresult fault = fault_of("cuMemCreate", device);
    if (fault) return fault;
    if (gpuless_context(device) != GPULESS_CONTEXT_OK) return CUDA_ERROR_NOT_INITIALIZED;
    if (!gpuless_charge(gpuless_mine(0), device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct granule *granule = malloc(sizeof *granule);
    *granule = (struct granule){device, size, 1};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)granule;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    release((struct granule *)(uintptr_t)handle);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    (void)size, (void)offset, (void)flags;
    struct granule *granule = (struct granule *)(uintptr_t)handle;
    CUresult fault = fault_of("cuMemMap", granule->device);
    if (fault) return fault;
    pthread_mutex_lock(&lock);
    int has_room = mapping_count < MAPPINGS;
    if (has_room) {
        granule->references++;
        mappings[mapping_count++] = (struct mapping){address, granule};
    }
    pthread_mutex_unlock(&lock);
    return has_room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&lock);
    for (int i = mapping_count - 1; i >= 0; i--) {
        if (mappings[i].address - address >= size) continue;
        release(mappings[i].granule);
        mappings[i] = mappings[--mapping_count];
    }
    pthread_mutex_unlock(&lock);
    gpuless_zero((void *)address, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    (void)address, (void)size, (void)count;
    return fault_of("cuMemSetAccess", gpuless_visible(access->location.id));
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < mapping_count && result; i++) {
        if ((CUdeviceptr)address - mappings[i].address >= mappings[i].granule->size) continue;
        mappings[i].granule->references++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)mappings[i].granule;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Between processes nothing is shared. */
EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    (void)shareable, (void)handle, (void)type, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                               CUmemAllocationHandleType type) {
    (void)handle, (void)shareable, (void)type;
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
    struct gpuless_range range;
    if (!gpuless_find(address, &range)) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = range.address;
    if (size) *size = range.size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    struct gpuless_range range;
    if (!gpuless_find(address, &range)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = address;
    else return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

/* --- devices and contexts ------------------------------------------------------------------------------------------------------ */

EXPORT CUresult cuInit(unsigned flags) {
    (void)flags;
    if (gpuless_forked()) return CUDA_ERROR_NOT_INITIALIZED;
    return gpuless_visible_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = gpuless_visible_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return gpuless_visible(ordinal) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    int known = gpuless_visible(device);
    *active = known >= 0 && gpuless_has_context(known);
    return gpuless_forked() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    int known = gpuless_visible(device);
    if (known < 0) return CUDA_ERROR_INVALID_DEVICE;
    *context = context_of(device);
    switch (gpuless_context(known)) {
        case GPULESS_CONTEXT_OK: return CUDA_SUCCESS;
        case GPULESS_CONTEXT_FORKED: return CUDA_ERROR_NOT_INITIALIZED;
        default: return CUDA_ERROR_OUT_OF_MEMORY;
    }
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    int ordinal = current_ordinal;
    for (int i = 0; ordinal < 0 && i < gpuless_visible_count(); i++)
        if (gpuless_has_context(gpuless_visible(i))) ordinal = i;
    *context = ordinal < 0 ? NULL : context_of(ordinal);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    current_ordinal = (int)(uintptr_t)context - 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_ordinal < 0 ? 0 : current_ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS ? "no error" : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "unknown error";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_SUCCESS ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

/* --- modules: one handle for all of them ------------------------------------------------------------------------------ */

static int anything;

static CUresult give_handle(void *handle) {
    *(void **)handle = &anything;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return (void)path, give_handle(module); }

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) { return (void)image, give_handle(module); }

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return (void)image, (void)count, (void)options, (void)values, give_handle(module);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return (void)module, (void)name, give_handle(function);
}

EXPORT CUresult cuLinkCreate(unsigned count, CUjit_option *options, void **values, CUlinkState *state) {
    return (void)count, (void)options, (void)values, give_handle(state);
}

EXPORT CUresult cuLinkComplete(CUlinkState state, void **image, size_t *size) {
    *size = sizeof anything;
    return (void)state, give_handle(image);
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    *blocks = 2;
    return (void)function, (void)size, (void)shared, CUDA_SUCCESS;
}
