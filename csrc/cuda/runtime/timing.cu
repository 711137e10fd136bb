/* Timing of work on the device. It is recorded into a graph, so that the host's time between
 * launches does not count. See cuda.h. */
#include "cuda/runtime/launch.h"

extern "C" moq_status moq_cuda_make_stream(void **stream, moq_err *err) {
    MOQ_TRY(moq_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", err));
    return moq_cuda_check(cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking),
                          "cudaStreamCreate", err);
}

extern "C" void moq_cuda_end_stream(void *stream) {
    if (!stream)
        return;
    cudaStreamSynchronize((cudaStream_t)stream);
    cudaStreamDestroy((cudaStream_t)stream);
}

extern "C" moq_status moq_cuda_record(void *stream, moq_status (*work)(void *data, moq_err *err),
                                      void *data, void **graph, moq_err *err) {
    cudaGraph_t recorded = NULL;
    cudaStream_t s = (cudaStream_t)stream;
    MOQ_TRY(moq_cuda_check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal),
                           "cudaStreamBeginCapture", err));
    moq_status status = work(data, err);
    cudaError_t ended = cudaStreamEndCapture(s, &recorded);
    if (status == MOQ_OK)
        status = moq_cuda_check(ended, "cudaStreamEndCapture", err);
    if (status == MOQ_OK)
        status = moq_cuda_check(cudaGraphInstantiate((cudaGraphExec_t *)graph, recorded, 0),
                                "cudaGraphInstantiate", err);
    if (recorded)
        cudaGraphDestroy(recorded);
    return status;
}

static cudaError_t replay(cudaGraphExec_t graph, cudaStream_t stream, cudaEvent_t begin,
                          cudaEvent_t end, float *milliseconds) {
    cudaError_t status = cudaEventRecord(begin, stream);
    if (status == cudaSuccess)
        status = cudaGraphLaunch(graph, stream);
    if (status == cudaSuccess)
        status = cudaEventRecord(end, stream);
    if (status == cudaSuccess)
        status = cudaEventSynchronize(end);
    return status == cudaSuccess ? cudaEventElapsedTime(milliseconds, begin, end) : status;
}

extern "C" moq_status moq_cuda_replay(void *graph, void *stream, double *seconds, moq_err *err) {
    cudaEvent_t begin = NULL, end = NULL;
    float milliseconds = 0;
    cudaError_t status = cudaEventCreate(&begin);
    if (status == cudaSuccess)
        status = cudaEventCreate(&end);
    if (status == cudaSuccess)
        status = replay((cudaGraphExec_t)graph, (cudaStream_t)stream, begin, end, &milliseconds);
    if (begin)
        cudaEventDestroy(begin);
    if (end)
        cudaEventDestroy(end);
    *seconds = 1e-3 * milliseconds;
    return moq_cuda_check(status, "a timed replay", err);
}

extern "C" void moq_cuda_forget(void *graph) {
    if (graph)
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
}
