/* Device memory and copies for the host's part of an operation. See cuda.h.
 *
 * Allocations use the relaxed capture mode: a capture in another thread must not see them. */
#include "cuda/runtime/launch.h"

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
    return moq_cuda_wait(stream, err);
}

extern "C" moq_status moq_cuda_copy(void *out, const void *memory, size_t bytes, void *stream,
                                    moq_err *err) {
    return moq_cuda_check(
        cudaMemcpyAsync(out, memory, bytes, cudaMemcpyDefault, (cudaStream_t)stream),
        "a copy on the device", err);
}

extern "C" moq_status moq_cuda_fill(void *out, int byte, size_t bytes, void *stream, moq_err *err) {
    return moq_cuda_check(cudaMemsetAsync(out, byte, bytes, (cudaStream_t)stream),
                          "filling device memory", err);
}

/* Memory of a device, or of the host for it. */
typedef enum { ON_DEVICE, PINNED } memory_kind;

static moq_status make(memory_kind kind, int32_t device, size_t bytes, void **out, moq_err *err) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    moq_cuda_device found;
    bool entered;
    MOQ_TRY(moq_cuda_query_device(device, &found, err));
    MOQ_TRY(moq_cuda_enter(device, &entered, err));
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t status =
        kind == PINNED ? cudaHostAlloc(out, bytes, cudaHostAllocPortable) : cudaMalloc(out, bytes);
    cudaThreadExchangeStreamCaptureMode(&mode);
    moq_cuda_leave(entered);
    if (status == cudaErrorMemoryAllocation && kind == PINNED)
        return moq_fail(err, MOQ_ERR_MEMORY, "the system locks no %zu bytes of memory", bytes);
    if (status == cudaErrorMemoryAllocation)
        return moq_fail(err, MOQ_ERR_MEMORY, "no %zu bytes are free on cuda:%d", bytes,
                        (int)device);
    return moq_cuda_check(status, kind == PINNED ? "cudaHostAlloc" : "cudaMalloc", err);
}

static void end(memory_kind kind, int32_t device, void *memory) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    bool entered;
    moq_err err;
    if (!memory || moq_cuda_enter(device, &entered, &err) != MOQ_OK)
        return;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (kind == PINNED)
        cudaFreeHost(memory);
    else
        cudaFree(memory);
    cudaThreadExchangeStreamCaptureMode(&mode);
    moq_cuda_leave(entered);
}

extern "C" moq_status moq_cuda_new(int32_t device, size_t bytes, void **out, moq_err *err) {
    return make(ON_DEVICE, device, bytes, out, err);
}

extern "C" void moq_cuda_delete(int32_t device, void *memory) {
    end(ON_DEVICE, device, memory);
}

extern "C" moq_status moq_cuda_new_pinned(int32_t device, size_t bytes, void **out, moq_err *err) {
    return make(PINNED, device, bytes, out, err);
}

extern "C" void moq_cuda_delete_pinned(int32_t device, void *memory) {
    end(PINNED, device, memory);
}

extern "C" moq_status moq_cuda_wait(void *stream, moq_err *err) {
    return moq_cuda_check(cudaStreamSynchronize((cudaStream_t)stream), "waiting for a stream", err);
}
