/* Launching: see launch.h. */
#include "cuda/launch.h"

#include <stdlib.h>

/* More dynamic shared memory than this has to be asked for, kernel by kernel. */
#define SHARED_WITHOUT_ASKING (48 * 1024)

moq_status moq_cuda_check(cudaError_t status, const char *what, moq_err *err) {
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s: %s (%s)", what, cudaGetErrorString(status),
                    cudaGetErrorName(status));
}

static bool wants_sync(void) {
    const char *text = getenv("MOQEXT_SYNC");
    return text && *text && *text != '0';
}

moq_status moq_cuda_settle(cudaStream_t stream, const char *what, moq_err *err) {
    if (!wants_sync() || moq_cuda_is_capturing(stream))
        return MOQ_OK;
    cudaError_t status = cudaStreamSynchronize(stream);
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL,
                    "%s: %s (%s); it may come from earlier work on this device", what,
                    cudaGetErrorString(status), cudaGetErrorName(status));
}

moq_status moq_cuda_launch(const moq_launch *launch, void **args, moq_err *err) {
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = launch->grid;
    config.blockDim = launch->block;
    config.dynamicSmemBytes = launch->shared;
    config.stream = launch->stream;
    config.attrs = &attribute;
    config.numAttrs = launch->overlap ? 1 : 0;
    if (launch->shared > SHARED_WITHOUT_ASKING)
        MOQ_TRY(moq_cuda_check(cudaFuncSetAttribute(launch->kernel,
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)launch->shared),
                               launch->what, err));
    MOQ_TRY(moq_cuda_check(cudaLaunchKernelExC(&config, launch->kernel, args), launch->what, err));
    return moq_cuda_settle(launch->stream, launch->what, err);
}
