/* Conversion between number formats by way of float32, a piece at a time: see convert.h. */
#include "ops/convert.h"

#include "core/formats.h"

/* Values that pass through the stack at once; even, so that fp4 pairs stay whole. */
#define PIECE 1024

/* Values to a storage unit. */
static int64_t values_per_unit(moq_dtype dtype) {
    return dtype == MOQ_DT_E2M1X2 ? 2 : 1;
}

moq_status moq_describe_convert(const moq_tensor *x, const char *name, moq_dtype dtype,
                                moq_tensor *result, moq_err *err) {
    char shape[128];
    int64_t from = values_per_unit(x->dtype), to = values_per_unit(dtype);
    int last = x->ndim - 1;
    *result = *x;
    result->dtype = dtype;
    if (from != to) {
        if (last < 0 || x->shape[last] > INT64_MAX / from || x->shape[last] * from % to != 0)
            return moq_fail(err, MOQ_ERR_VALUE,
                            "%s: pairs of fp4 run along the last axis, which must be there and "
                            "even, got shape %s",
                            name, moq_shape_text(x, shape, sizeof shape));
        result->shape[last] = x->shape[last] * from / to;
    }
    moq_tensor_set_contiguous(result);
    return MOQ_OK;
}

static moq_status check_memory(const moq_tensor *t, const char *name, moq_err *err) {
    if (t->device.kind != MOQ_CPU)
        return moq_fail(err, MOQ_ERR_BUFFER, "%s: expected a tensor in host memory", name);
    if (!moq_tensor_is_contiguous(t))
        return moq_fail(err, MOQ_ERR_BUFFER, "%s: expected a row-major tensor without gaps", name);
    return MOQ_OK;
}

static moq_status check_result(const moq_tensor *x, const char *name, const moq_tensor *result,
                               moq_err *err) {
    char want[128], got[128];
    moq_tensor expected;
    MOQ_TRY(check_memory(result, "out", err));
    MOQ_TRY(moq_describe_convert(x, name, result->dtype, &expected, err));
    bool same = expected.ndim == result->ndim;
    for (int i = 0; same && i < expected.ndim; i++)
        same = expected.shape[i] == result->shape[i];
    if (!same)
        return moq_fail(err, MOQ_ERR_VALUE, "out: expected shape %s, got %s",
                        moq_shape_text(&expected, want, sizeof want),
                        moq_shape_text(result, got, sizeof got));
    if (moq_tensor_overlap(x, result))
        return moq_fail(err, MOQ_ERR_BUFFER, "out: its memory overlaps that of %s", name);
    return MOQ_OK;
}

moq_status moq_run_convert(const moq_tensor *x, const char *name, const moq_tensor *result,
                           moq_err *err) {
    if (!moq_dtype_is_float(x->dtype) || !moq_dtype_is_float(result->dtype))
        return moq_fail(err, MOQ_ERR_TYPE, "%s: no conversion from %s to %s", name,
                        moq_dtype_name(x->dtype), moq_dtype_name(result->dtype));
    MOQ_TRY(check_memory(x, name, err));
    MOQ_TRY(check_result(x, name, result, err));
    const char *src = x->data;
    char *dst = result->data;
    int64_t left = moq_tensor_numel(x) * values_per_unit(x->dtype);
    float piece[PIECE];
    while (left > 0) {
        int64_t n = left < PIECE ? left : PIECE;
        moq_decode_row(x->dtype, src, n, piece);
        moq_encode_row(result->dtype, piece, n, dst);
        src += n / values_per_unit(x->dtype) * (int64_t)moq_dtype_size(x->dtype);
        dst += n / values_per_unit(result->dtype) * (int64_t)moq_dtype_size(result->dtype);
        left -= n;
    }
    return MOQ_OK;
}
