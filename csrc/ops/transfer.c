/* Tensors between the host and a CUDA device: see transfer.h. */
#include "ops/transfer.h"

#include "core/scales.h"
#include "cpu/cpu_rows.h"
#include "cuda/cuda.h"
#include "ops/check.h"

#include <string.h>

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
        return moq_fail_of(err, MOQ_ERR_BUFFER, "x", "expected a tensor %s, got one on %s",
                           up ? "in host memory" : "on a CUDA device",
                           moq_device_text(x->device, device, sizeof device));
    if (!moq_tensor_is_contiguous(x))
        return moq_fail_of(err, MOQ_ERR_BUFFER, "x", "expected a contiguous tensor");
    if (bytes == 0)
        return MOQ_OK;
    MOQ_TRY(moq_cuda_enter(up ? out->device.index : x->device.index, &entered, err));
    moq_status status = up ? to_device(out, x, bytes, err)
                           : moq_cuda_download(out->data, x->data, bytes, stream, err);
    moq_cuda_leave(entered);
    return status;
}

/* n codes of `size` bytes, or numbers of any type that scales are stored in as float32, from and to
 * addresses that are so many elements apart. */
static void copy_row(const moq_tensor *x, const char *src, const moq_tensor *out, char *dst) {
    int64_t n = moq_row_length(x), from = x->ndim ? x->stride[x->ndim - 1] : 1;
    int64_t to = out->ndim ? out->stride[out->ndim - 1] : 1;
    size_t size = moq_dtype_size(x->dtype), each = moq_dtype_size(out->dtype);
    bool numbers = out->dtype == MOQ_DT_F32 && x->dtype != MOQ_DT_F32;
    if (!numbers && to == 1) {
        moq_gather(src, from, size, n, dst);
        return;
    }
    for (int64_t i = 0; i < n; i++, src += from * (int64_t)size, dst += to * (int64_t)each) {
        if (numbers)
            moq_decode_scales(x->dtype, src, 1, (float *)dst);
        else
            memcpy(dst, src, size);
    }
}

static void copy_rows(const moq_tensor *x, const moq_tensor *out) {
    for (int64_t row = 0, rows = moq_row_count(x); row < rows; row++)
        copy_row(
            x, (const char *)x->data + moq_row_offset(x, row) * (int64_t)moq_dtype_size(x->dtype),
            out,
            (char *)out->data + moq_row_offset(out, row) * (int64_t)moq_dtype_size(out->dtype));
}

/* A copy has the bits of x, or numbers that become float32. */
moq_status moq_check_copy(const moq_tensor *x, const char *name, const moq_tensor *out,
                          moq_err *err) {
    char expected[128], got[128];
    bool same = x->dtype == out->dtype;
    bool numbers = out->dtype == MOQ_DT_F32 && moq_is_scale_dtype(x->dtype);
    if (!same && !numbers)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s, got %s",
                           moq_dtype_name(out->dtype), moq_dtype_name(x->dtype));
    if (!moq_same_shape(x, out))
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected shape %s, got %s",
                           moq_shape_text(out, expected, sizeof expected),
                           moq_shape_text(x, got, sizeof got));
    if (out->device.kind == MOQ_CUDA && !moq_tensor_is_contiguous(out))
        return moq_fail_of(err, MOQ_ERR_BUFFER, "out", "expected a contiguous tensor");
    if (out->device.kind == MOQ_CUDA && !same)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s, got %s",
                           moq_dtype_name(out->dtype), moq_dtype_name(x->dtype));
    return moq_check_host(x, name, err);
}

moq_status moq_run_copy(const moq_tensor *x, const char *name, const moq_tensor *out,
                        moq_err *err) {
    MOQ_TRY(moq_check_copy(x, name, out, err));
    if (moq_tensor_numel(x) == 0)
        return MOQ_OK;
    if (out->device.kind == MOQ_CUDA)
        return moq_run_transfer(x, NULL, out, err);
    copy_rows(x, out);
    return MOQ_OK;
}
