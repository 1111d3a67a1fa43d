/* CUDA runtime: devices, errors, versions, kernels (accepted and not run). */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUDA_VERSION_TOLD 13000
#define MULTIPROCESSORS 132

_Thread_local int current_ordinal;
_Thread_local cudaError_t last_error;

int current_device(void) { return gpuless_visible(current_ordinal); }

cudaError_t told(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

static cudaError_t error_named(const char *name) {
    if (strcmp(name, "OUT_OF_MEMORY") == 0) return cudaErrorMemoryAllocation;
    int number = atoi(name);
    return number ? (cudaError_t)number : cudaErrorUnknown;
}

static const struct gpuless_device *facts(int ordinal) {
    int device = gpuless_visible(ordinal);
    return device < 0 ? NULL : &gpuless_state(gpuless_mine(0))->devices[device];
}

cudaError_t begin(const char *call) {
    if (gpuless_forked()) return cudaErrorInitializationError;
    if (gpuless_visible_count() == 0) return cudaErrorNoDevice;
    int device = current_device();
    if (device < 0) return cudaErrorInvalidDevice;
    struct gpuless_fault fault = call ? gpuless_fault(call, device) : (struct gpuless_fault){GPULESS_FINE, ""};
    if (fault.kind == GPULESS_ERROR) return error_named(fault.error);
    return gpuless_context(device) == GPULESS_CONTEXT_OK ? cudaSuccess : cudaErrorMemoryAllocation;
}

/* --- errors and versions --------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct { cudaError_t code; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

static int row_of(cudaError_t code) {
    int last = sizeof errors / sizeof *errors - 1;
    for (int i = 0; i < last; i++)
        if (errors[i].code == code) return i;
    return last;
}

EXPORT const char *cudaGetErrorName(cudaError_t code) { return errors[row_of(code)].name; }

EXPORT const char *cudaGetErrorString(cudaError_t code) { return errors[row_of(code)].text; }

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_TOLD;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_TOLD;
    return cudaSuccess;
}

/* --- devices ----------------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (gpuless_forked()) return told(cudaErrorInitializationError);
    *count = gpuless_visible_count();
    return *count ? cudaSuccess : told(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int *ordinal) {
    if (gpuless_forked()) return told(cudaErrorInitializationError);
    *ordinal = current_ordinal;
    return cudaSuccess;
}

/* Begins a context, as from CUDA 12 on. */
EXPORT cudaError_t cudaSetDevice(int ordinal) {
    if (gpuless_forked()) return told(cudaErrorInitializationError);
    if (gpuless_visible(ordinal) < 0) return told(cudaErrorInvalidDevice);
    current_ordinal = ordinal;
    return told(begin("cudaSetDevice"));
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    TRY(begin("cudaDeviceSynchronize"));
    TRY(unsafe_in_capture());
    complete_all();
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int ordinal) {
    const struct gpuless_device *device = facts(ordinal);
    if (!device) return told(cudaErrorInvalidDevice);
    snprintf(text, length, "%s", device->bus_id + 4); /* CUDA's form has a domain of four digits, NVML's of eight */
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal) {
    if (!facts(ordinal)) return told(cudaErrorInvalidDevice);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
        case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrManagedMemory:
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

/* The sixteen bytes of a UUID as written in hexadecimal. */
static void read_uuid(const char *text, char *bytes) {
    const char *digits = strchr(text, '-');
    for (int i = 0; digits && i < 16; i++) {
        unsigned byte;
        digits += strspn(digits, "-");
        if (sscanf(digits, "%2x", &byte) != 1) return;
        bytes[i] = (char)byte;
        digits += 2;
    }
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int ordinal) {
    const struct gpuless_device *device = facts(ordinal);
    if (!device) return told(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", device->name);
    read_uuid(device->uuid, properties->uuid.bytes);
    unsigned domain = 0, bus = 0, slot = 0;
    sscanf(device->bus_id, "%x:%x:%x", &domain, &bus, &slot);
    properties->pciDomainID = (int)domain;
    properties->pciBusID = (int)bus;
    properties->pciDeviceID = (int)slot;
    properties->totalGlobalMem = device->capacity_bytes;
    properties->major = 9;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->warpSize = 32;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
    properties->memoryPoolsSupported = 1;
    properties->isMultiGpuBoard = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
    *can = ordinal != peer;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)peer, (void)flags;
    return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* --- kernels -------------------------------------------------------------------------------------------------------------- */

static int anything; /* what a handle points at whose content nobody reads */

EXPORT void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *handle = &anything;
    return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

EXPORT void __cudaRegisterFunction(void) {}

EXPORT void __cudaRegisterVar(void) {}

EXPORT void __cudaRegisterManagedVar(void) {}

EXPORT char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

static _Thread_local struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

static cudaError_t launch(cudaStream_t stream) {
    TRY(begin(NULL)); /* a fault is not looked for at each of thousands */
    enqueue(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    return launch(stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared;
    return launch(stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    (void)function, (void)arguments;
    return launch(config->stream);
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    TRY(begin(NULL));
    enqueue(stream);
    call(data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    (void)flags;
    TRY(begin(NULL));
    enqueue(stream);
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    (void)function, (void)size, (void)shared;
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                          size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                                   int ordinal) {
    (void)kernel, (void)attribute, (void)value, (void)ordinal;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options,
                                       void **values, unsigned count, enum cudaLibraryOption *library_options,
                                       void **library_values, unsigned library_count) {
    (void)code, (void)options, (void)values, (void)count, (void)library_options, (void)library_values, (void)library_count;
    *library = (cudaLibrary_t)&anything;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    (void)library, (void)name;
    *kernel = (cudaKernel_t)&anything;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
    (void)library;
    return cudaSuccess;
}

/* Constants in device memory have no place here: one page for all of them, so that copies to them go well. */
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    (void)symbol;
    static char constants[1 << 16];
    *address = constants;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t size, size_t offset,
                                      enum cudaMemcpyKind kind) {
    (void)symbol, (void)source, (void)size, (void)offset, (void)kind;
    return told(begin("cudaMemcpyToSymbol"));
}
