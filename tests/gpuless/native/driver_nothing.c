/* The driver's functions that do nothing, well; without its header, since none looks at its arguments. */
#include "gpuless.h"

#define NOTHING(name) EXPORT int name(void) { return 0; }

NOTHING(cuModuleUnload)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkDestroy)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxSetLimit)
NOTHING(cuCtxSynchronize)
NOTHING(cuStreamSynchronize)
NOTHING(cuMemsetD32Async)
NOTHING(cuLogsRegisterCallback)
NOTHING(cuLogsUnregisterCallback)
