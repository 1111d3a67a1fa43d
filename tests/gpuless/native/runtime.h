/* What the files of the CUDA runtime's stand-in share. */
#ifndef GPULESS_RUNTIME_H
#define GPULESS_RUNTIME_H

#include <cuda_runtime_api.h>

#include "gpuless.h"

/* The calling thread's device, as CUDA counts, and the last error, which cudaGetLastError tells and forgets. */
extern _Thread_local int current_ordinal;
extern _Thread_local cudaError_t last_error;

/* NVML's number of the calling thread's device. */
int current_device(void);
/* Remember an error. */
cudaError_t told(cudaError_t error);
/* What every call that needs the device does first: a context on it; and what a test wants to go wrong. */
cudaError_t begin(const char *call);
/* Whether a stream capture forbids this thread a call that is not safe in one; if so, the capture is spoilt. */
cudaError_t unsafe_in_capture(void);
/* All work of one stream (0: of all of this device) is done. */
void complete(cudaStream_t stream);
void complete_all(void);
/* One operation more in this stream. */
void enqueue(cudaStream_t stream);

#define TRY(call)                                   \
    do {                                            \
        cudaError_t error_ = (call);                \
        if (error_ != cudaSuccess) return told(error_); \
    } while (0)

#endif
