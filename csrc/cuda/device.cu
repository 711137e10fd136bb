/* Device query: how many devices the driver offers and what each is. See cuda.h.
 *
 * The runtime is linked statically, so this works, and fails with a reason, without a driver. */
#include "cuda/cuda.h"

#include <cuda_runtime.h>
#include <stdio.h>

extern "C" bool moq_cuda_built(void) {
    return true;
}

extern "C" moq_status moq_cuda_device_count(int *count, moq_err *err) {
    cudaError_t status = cudaGetDeviceCount(count);
    if (status == cudaSuccess && *count > 0)
        return MOQ_OK;
    *count = 0;
    return moq_fail(err, MOQ_ERR_INTERNAL, "no CUDA device: %s",
                    status == cudaSuccess ? "the driver reports none" : cudaGetErrorString(status));
}

extern "C" moq_status moq_cuda_query_device(int index, moq_cuda_device *out, moq_err *err) {
    cudaDeviceProp prop;
    cudaError_t status = cudaGetDeviceProperties(&prop, index);
    if (status != cudaSuccess)
        return moq_fail(err, MOQ_ERR_INTERNAL, "CUDA device %d cannot be queried: %s", index,
                        cudaGetErrorString(status));
    snprintf(out->name, sizeof out->name, "%s", prop.name);
    out->major = prop.major;
    out->minor = prop.minor;
    out->sm_count = prop.multiProcessorCount;
    out->memory = prop.totalGlobalMem;
    return MOQ_OK;
}
