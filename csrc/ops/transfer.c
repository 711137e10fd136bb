/* Tensors between the host and a CUDA device: see transfer.h. */
#include "ops/transfer.h"

#include "cuda/cuda.h"

static moq_status to_device(const moq_tensor *out, const moq_tensor *x, size_t bytes,
                            moq_err *err) {
    MOQ_TRY(moq_cuda_upload(out->data, x->data, bytes, NULL, err));
    return moq_cuda_wait(NULL, err);
}

moq_status moq_run_transfer(const moq_tensor *x, void *stream, const moq_tensor *out,
                            moq_err *err) {
    bool up = out->device.kind == MOQ_CUDA;
    size_t bytes = (size_t)moq_tensor_numel(x) * moq_dtype_size(x->dtype);
    char device[32];
    bool entered;
    if (up == (x->device.kind == MOQ_CUDA))
        return moq_fail(err, MOQ_ERR_BUFFER, "x: expected a tensor %s, got one on %s",
                        up ? "in host memory" : "on a CUDA device",
                        moq_device_text(x->device, device, sizeof device));
    if (!moq_tensor_is_contiguous(x))
        return moq_fail(err, MOQ_ERR_BUFFER, "x: expected a contiguous tensor");
    if (bytes == 0)
        return MOQ_OK;
    MOQ_TRY(moq_cuda_enter(up ? out->device.index : x->device.index, &entered, err));
    moq_status status = up ? to_device(out, x, bytes, err)
                           : moq_cuda_download(out->data, x->data, bytes, stream, err);
    moq_cuda_leave(entered);
    return status;
}
