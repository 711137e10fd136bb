/* Operations that rearrange stored tensors: see layout.h. */
#include "ops/layout.h"

#include "cpu/layout.h"
#include "cpu/rows.h"
#include "ops/check.h"

#include <math.h>
#include <string.h>

/* One-byte elements whatever they mean. */
static moq_status check_bytes(const moq_tensor *t, const char *name, moq_err *err) {
    if (moq_dtype_size(t->dtype) != 1 || t->dtype == MOQ_DT_BOOL)
        return moq_fail(err, MOQ_ERR_TYPE, "%s: expected a dtype of one byte, got %s", name,
                        moq_dtype_name(t->dtype));
    return moq_check_host(t, name, err);
}

static moq_status check_output(const moq_tensor *out, const moq_tensor *expected,
                               const moq_tensor *input, moq_err *err) {
    return moq_check_output(out, "out", expected, &input, 1, err);
}

static moq_tensor swizzled_shape(const moq_tensor *scale) {
    int32_t n = scale->ndim;
    int64_t shape[3];
    memcpy(shape, scale->shape, (size_t)n * sizeof *shape);
    shape[n - 2] = moq_round_up(shape[n - 2], MOQ_SWIZZLE_ROWS);
    shape[n - 1] = moq_round_up(shape[n - 1], MOQ_SWIZZLE_COLUMNS);
    return moq_describe(scale->dtype, n, shape);
}

static moq_status check_matrices(const moq_tensor *t, const char *name, moq_err *err) {
    char shape[128];
    if (t->ndim != 2 && t->ndim != 3)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: expected 2 or 3 dimensions, got shape %s", name,
                        moq_shape_text(t, shape, sizeof shape));
    return MOQ_OK;
}

moq_status moq_describe_swizzle(const moq_tensor *scale, moq_tensor *expected, moq_err *err) {
    MOQ_TRY(check_bytes(scale, "scale", err));
    MOQ_TRY(check_matrices(scale, "scale", err));
    *expected = swizzled_shape(scale);
    return MOQ_OK;
}

moq_status moq_run_swizzle(const moq_tensor *scale, const moq_tensor *out, moq_err *err) {
    moq_tensor expected = swizzled_shape(scale);
    MOQ_TRY(check_output(out, &expected, scale, err));
    moq_cpu_swizzle(scale, out->data);
    return MOQ_OK;
}

moq_status moq_describe_unswizzle(const moq_tensor *swizzled, int32_t ndim, const int64_t *shape,
                                  moq_tensor *expected, moq_err *err) {
    char want[128], got[128];
    MOQ_TRY(check_bytes(swizzled, "swizzled", err));
    *expected = moq_describe(swizzled->dtype, ndim, shape);
    MOQ_TRY(check_matrices(expected, "shape", err));
    moq_tensor padded = swizzled_shape(expected);
    if (swizzled->ndim != ndim || memcmp(swizzled->shape, padded.shape, (size_t)ndim * 8) != 0)
        return moq_fail(err, MOQ_ERR_VALUE, "swizzled: expected shape %s, got %s",
                        moq_shape_text(&padded, want, sizeof want),
                        moq_shape_text(swizzled, got, sizeof got));
    if (!moq_tensor_is_contiguous(swizzled))
        return moq_fail(err, MOQ_ERR_VALUE,
                        "swizzled: expected a row-major tensor without gaps, got other strides");
    return MOQ_OK;
}

moq_status moq_run_unswizzle(const moq_tensor *swizzled, const moq_tensor *expected,
                             const moq_tensor *out, moq_err *err) {
    MOQ_TRY(check_output(out, expected, swizzled, err));
    moq_cpu_unswizzle(swizzled->data, expected, out->data);
    return MOQ_OK;
}

static moq_status check_rows(const moq_tensor *t, const char *name, moq_err *err) {
    MOQ_TRY(check_bytes(t, name, err));
    if (t->ndim < 1)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: expected at least one dimension, got none", name);
    return MOQ_OK;
}

moq_status moq_describe_pack_fp4(const moq_tensor *codes, moq_tensor *expected, moq_err *err) {
    char shape[128];
    MOQ_TRY(check_rows(codes, "codes", err));
    *expected = moq_describe(MOQ_DT_U8, codes->ndim, codes->shape);
    if (codes->shape[codes->ndim - 1] % 2 != 0)
        return moq_fail(err, MOQ_ERR_VALUE, "codes: expected an even last extent, got shape %s",
                        moq_shape_text(codes, shape, sizeof shape));
    expected->shape[codes->ndim - 1] /= 2;
    moq_tensor_set_contiguous(expected);
    return MOQ_OK;
}

moq_status moq_run_pack_fp4(const moq_tensor *codes, const moq_tensor *out, moq_err *err) {
    moq_tensor expected;
    MOQ_TRY(moq_describe_pack_fp4(codes, &expected, err));
    MOQ_TRY(check_output(out, &expected, codes, err));
    moq_cpu_pack_fp4(codes, out->data);
    return MOQ_OK;
}

moq_status moq_describe_unpack_fp4(const moq_tensor *packed, moq_tensor *expected, moq_err *err) {
    MOQ_TRY(check_rows(packed, "packed", err));
    *expected = moq_describe(MOQ_DT_U8, packed->ndim, packed->shape);
    expected->shape[packed->ndim - 1] *= 2;
    moq_tensor_set_contiguous(expected);
    return MOQ_OK;
}

moq_status moq_run_unpack_fp4(const moq_tensor *packed, const moq_tensor *out, moq_err *err) {
    moq_tensor expected;
    MOQ_TRY(moq_describe_unpack_fp4(packed, &expected, err));
    MOQ_TRY(check_output(out, &expected, packed, err));
    moq_cpu_unpack_fp4(packed, out->data);
    return MOQ_OK;
}

static float scale_of(const moq_tensor *scale, int64_t partition) {
    int64_t step = scale->ndim == 1 && scale->shape[0] > 1 ? scale->stride[0] : 0;
    return ((const float *)scale->data)[partition * step];
}

moq_status moq_describe_requantize(const moq_tensor *weight, const moq_tensor *scale,
                                   const int64_t *partitions, int64_t count, moq_tensor *expected,
                                   moq_err *err) {
    char shape[128];
    int64_t rows = 0;
    MOQ_TRY(moq_check_dtype(weight, "weight", MOQ_DT_E4M3, err));
    MOQ_TRY(moq_check_dtype(scale, "weight_scale", MOQ_DT_F32, err));
    if (count < 1)
        return moq_fail(err, MOQ_ERR_VALUE, "partitions: expected at least one, got none");
    if (weight->ndim != 2)
        return moq_fail(err, MOQ_ERR_VALUE, "weight: expected 2 dimensions, got shape %s",
                        moq_shape_text(weight, shape, sizeof shape));
    for (int64_t i = 0; i < count; i++) {
        if (partitions[i] < 0 || partitions[i] > weight->shape[0] - rows)
            return moq_fail(
                err, MOQ_ERR_VALUE,
                "partitions: expected row counts that sum to %lld, got %lld at index %lld",
                (long long)weight->shape[0], (long long)partitions[i], (long long)i);
        rows += partitions[i];
    }
    if (rows != weight->shape[0])
        return moq_fail(err, MOQ_ERR_VALUE, "partitions: expected a sum of %lld rows, got %lld",
                        (long long)weight->shape[0], (long long)rows);
    if (moq_tensor_numel(scale) != 1 && (scale->ndim != 1 || scale->shape[0] != count))
        return moq_fail(err, MOQ_ERR_VALUE,
                        "weight_scale: expected one element or shape [%lld], got shape %s",
                        (long long)count, moq_shape_text(scale, shape, sizeof shape));
    *expected = moq_describe(MOQ_DT_E4M3, 2, weight->shape);
    return MOQ_OK;
}

/* The largest scale, and whether they all are the same. */
static moq_status reduce_scales(const moq_tensor *scale, int64_t count, float *largest, bool *equal,
                                moq_err *err) {
    *largest = scale_of(scale, 0);
    *equal = true;
    for (int64_t i = 0; i < count; i++) {
        float value = scale_of(scale, i);
        if (!(value >= 0.0f) || isinf(value))
            return moq_fail(err, MOQ_ERR_VALUE,
                            "weight_scale: expected finite numbers of at least 0, got %g",
                            (double)value);
        *equal = *equal && value == scale_of(scale, 0);
        *largest = value > *largest ? value : *largest;
    }
    return MOQ_OK;
}

moq_status moq_run_requantize(const moq_tensor *weight, const moq_tensor *scale,
                              const int64_t *partitions, int64_t count, const moq_tensor *out,
                              const moq_tensor *max_scale, moq_err *err) {
    const moq_tensor *inputs[] = {weight, scale};
    moq_tensor expected;
    float largest;
    bool equal;
    MOQ_TRY(moq_describe_requantize(weight, scale, partitions, count, &expected, err));
    MOQ_TRY(moq_check_output(out, "out", &expected, inputs, 2, err));
    MOQ_TRY(reduce_scales(scale, count, &largest, &equal, err));
    int64_t row = 0, columns = weight->shape[1];
    for (int64_t i = 0; i < count; i++) {
        if (!equal) {
            moq_cpu_requantize_rows(weight, row, partitions[i], scale_of(scale, i), largest,
                                    out->data);
        } else {
            for (int64_t r = row; r < row + partitions[i]; r++)
                moq_gather((const uint8_t *)weight->data + moq_row_offset(weight, r),
                           weight->stride[1], 1, columns, (uint8_t *)out->data + r * columns);
        }
        row += partitions[i];
    }
    memcpy(max_scale->data, &largest, sizeof largest);
    return MOQ_OK;
}
