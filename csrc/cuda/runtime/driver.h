/* Functions of the CUDA driver, found by entry point: nothing is linked with it. */
#ifndef MOQ_CUDA_RUNTIME_DRIVER_H
#define MOQ_CUDA_RUNTIME_DRIVER_H

#include "core/status.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>

/* X(member, name, version): each as the driver of that version had it. */
#define MOQ_DRIVER_FUNCTIONS(X)                                                                    \
    X(init, cuInit, 2000)                                                                          \
    X(device, cuDeviceGet, 2000)                                                                   \
    X(primary_context, cuDevicePrimaryCtxRetain, 7000)                                             \
    X(current_context, cuCtxGetCurrent, 4000)                                                      \
    X(current_device, cuCtxGetDevice, 2000)                                                        \
    X(push_context, cuCtxPushCurrent, 4000)                                                        \
    X(pop_context, cuCtxPopCurrent, 4000)                                                          \
    X(launch, cuLaunchKernelEx, 11060)                                                             \
    X(capture_info, cuStreamGetCaptureInfo, 12030)                                                 \
    X(encode_tiled, cuTensorMapEncodeTiled, 12000)

typedef struct {
#define MOQ_DRIVER_MEMBER(member, name, version) PFN_##name##_v##version member;
    MOQ_DRIVER_FUNCTIONS(MOQ_DRIVER_MEMBER)
#undef MOQ_DRIVER_MEMBER
} moq_driver;

/* The driver, ready for use; any thread may ask. MOQ_ERR_INTERNAL where there is none. */
moq_status moq_cuda_find_driver(const moq_driver **driver, moq_err *err);

/* The number of the current device, without a question to the runtime between moq_cuda_enter and
 * moq_cuda_leave. */
cudaError_t moq_cuda_current_device(int *device);

/* MOQ_ERR_INTERNAL naming the operation, where `result` is an error. */
moq_status moq_cuda_check_driver(CUresult result, const char *what, moq_err *err);

#endif
