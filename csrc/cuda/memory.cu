/* Device memory and copies for the host's side of an operation. See cuda.h. */
#include "cuda/launch.h"

extern "C" moq_status moq_cuda_allocate(size_t bytes, void *stream, void **out, moq_err *err) {
    return moq_cuda_check(cudaMallocAsync(out, bytes, (cudaStream_t)stream), "cudaMallocAsync",
                          err);
}

extern "C" void moq_cuda_release(void *memory, void *stream) {
    if (memory)
        cudaFreeAsync(memory, (cudaStream_t)stream);
}

extern "C" moq_status moq_cuda_upload(void *out, const void *host, size_t bytes, void *stream,
                                      moq_err *err) {
    return moq_cuda_check(
        cudaMemcpyAsync(out, host, bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream),
        "a copy to the device", err);
}

extern "C" moq_status moq_cuda_download(void *host, const void *memory, size_t bytes, void *stream,
                                        moq_err *err) {
    cudaStream_t s = (cudaStream_t)stream;
    MOQ_TRY(moq_cuda_check(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, s),
                           "a copy from the device", err));
    return moq_cuda_check(cudaStreamSynchronize(s), "a copy from the device", err);
}

extern "C" moq_status moq_cuda_copy(void *out, const void *memory, size_t bytes, void *stream,
                                    moq_err *err) {
    return moq_cuda_check(
        cudaMemcpyAsync(out, memory, bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)stream),
        "a copy on the device", err);
}

extern "C" moq_status moq_cuda_fill(void *out, int byte, size_t bytes, void *stream, moq_err *err) {
    return moq_cuda_check(cudaMemsetAsync(out, byte, bytes, (cudaStream_t)stream),
                          "filling device memory", err);
}
