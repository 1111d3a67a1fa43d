/* A pluggable allocator (torch.cuda.memory.CUDAPluggableAllocator): every tensor is a cudaMalloc of its own. */
#include <cuda_runtime_api.h>
#include <sys/types.h>

#include "gpuless.h"

EXPORT void *gpuless_malloc(ssize_t size, int device, cudaStream_t stream) {
    void *address = NULL;
    (void)device, (void)stream;
    return cudaMalloc(&address, (size_t)size) == cudaSuccess ? address : NULL;
}

EXPORT void gpuless_free(void *address, ssize_t size, int device, cudaStream_t stream) {
    (void)size, (void)device, (void)stream;
    cudaFree(address);
}
