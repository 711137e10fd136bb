/* Functions of the CUDA driver, looked up by name: nothing is linked with it. */
#ifndef MOQ_CUDA_RUNTIME_DRIVER_H
#define MOQ_CUDA_RUNTIME_DRIVER_H

#include "core/status.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>

/* List of functions as X(member, name, version): each as the driver of that version had it. */
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

/* Returns the driver, ready for use, in any thread. MOQ_ERR_INTERNAL without a driver. */
moq_status moq_cuda_find_driver(const moq_driver **driver, moq_err *err);

/* Returns the number of the current device; between moq_cuda_enter and moq_cuda_leave the CUDA
 * runtime is not asked. */
cudaError_t moq_cuda_current_device(int *device);

/* Returns MOQ_ERR_INTERNAL naming the operation if `result` is an error. */
moq_status moq_cuda_check_driver(CUresult result, const char *what, moq_err *err);

#endif
