/* Conversion between number formats by way of float32, a piece at a time: see convert.h. */
#include "ops/convert.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "ops/check.h"

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
    int64_t extent[MOQ_MAX_NDIM] = {0};
    for (int i = 0; i < x->ndim; i++)
        extent[i] = x->shape[i];
    if (from != to) {
        if (last < 0 || extent[last] > INT64_MAX / from || extent[last] * from % to != 0)
            return moq_fail_of(err, MOQ_ERR_VALUE, name,
                               "pairs of fp4 run along the last axis, which must be there and "
                               "even, got shape %s",
                               moq_shape_text(x, shape, sizeof shape));
        extent[last] = extent[last] * from / to;
    }
    *result = moq_describe(dtype, x->ndim, extent);
    return MOQ_OK;
}

/* Converts `units` storage units that lie `stride` apart; returns where the next ones go. */
static char *convert_units(const moq_tensor *x, const char *src, int64_t stride, int64_t units,
                           moq_dtype dtype, char *dst, moq_pace *pace) {
    const moq_row_kernels *kernels = moq_cpu_row_kernels();
    float gathered[PIECE], values[PIECE];
    int64_t size = (int64_t)moq_dtype_size(x->dtype), each = values_per_unit(x->dtype);
    while (units > 0 && !moq_stops(pace, PIECE)) {
        int64_t n = units < PIECE / each ? units : PIECE / each;
        moq_gather(src, stride, (size_t)size, n, gathered);
        kernels->decode(x->dtype, gathered, n * each, values);
        kernels->encode(dtype, values, n * each, dst);
        src += n * stride * size;
        dst += n * each / values_per_unit(dtype) * (int64_t)moq_dtype_size(dtype);
        units -= n;
    }
    return dst;
}

moq_status moq_run_convert(const moq_tensor *x, const char *name, const moq_tensor *result,
                           moq_err *err) {
    moq_tensor expected;
    if (!moq_dtype_is_float(x->dtype) || !moq_dtype_is_float(result->dtype))
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "no conversion from %s to %s",
                           moq_dtype_name(x->dtype), moq_dtype_name(result->dtype));
    MOQ_TRY(moq_check_host(x, name, err));
    MOQ_TRY(moq_describe_convert(x, name, result->dtype, &expected, err));
    MOQ_TRY(moq_check_output(result, "out", &expected, &x, 1, err));
    if (moq_tensor_numel(x) == 0)
        return MOQ_OK;
    moq_pace pace = {0};
    if (moq_tensor_is_contiguous(x)) {
        convert_units(x, x->data, 1, moq_tensor_numel(x), result->dtype, result->data, &pace);
        return MOQ_OK;
    }
    int64_t rows = moq_row_count(x), length = moq_row_length(x), stride = x->stride[x->ndim - 1];
    char *dst = result->data;
    for (int64_t row = 0; row < rows; row++) {
        const char *src = x->data;
        src += moq_row_offset(x, row) * (int64_t)moq_dtype_size(x->dtype);
        dst = convert_units(x, src, stride, length, result->dtype, dst, &pace);
    }
    return MOQ_OK;
}
