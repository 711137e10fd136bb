/* Operations that rearrange stored tensors: see layout.h. */
#include "ops/layout.h"

#include "core/formats.h"
#include "core/sizes.h"
#include "cpu/cpu_layout.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_layout.h"
#include "ops/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- checks ---- */

static bool on_device(const moq_tensor *t) {
    return t->device.kind == MOQ_CUDA;
}

/* One-byte elements whatever they mean. */
static moq_status check_bytes(const moq_tensor *t, const char *name, moq_err *err) {
    if (moq_dtype_size(t->dtype) != 1 || t->dtype == MOQ_DT_BOOL)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected a dtype of one byte, got %s",
                           moq_dtype_name(t->dtype));
    return moq_check_usable(t, name, err);
}

static moq_status check_output(const moq_tensor *out, const moq_tensor *expected,
                               const moq_tensor *input, moq_err *err) {
    moq_tensor there = *expected;
    there.device = input->device;
    return moq_check_output(out, "out", &there, &input, 1, err);
}

/* ---- one tensor to another ---- */

typedef moq_status (*device_work)(const moq_tensor *in, uint8_t *out, void *stream, moq_err *err);

/* Queues the work with the device of `in` current. */
static moq_status run_on_device(device_work work, const moq_tensor *in, void *stream,
                                const moq_tensor *out, moq_err *err) {
    bool entered;
    MOQ_TRY(moq_cuda_enter(in->device.index, &entered, err));
    moq_status status = work(in, out->data, stream, err);
    moq_cuda_leave(entered);
    return status;
}

static moq_tensor swizzled_shape(const moq_tensor *scale) {
    int32_t n = scale->ndim;
    int64_t shape[3];
    memcpy(shape, scale->shape, (size_t)n * sizeof *shape);
    shape[n - 2] = round_up(shape[n - 2], MOQ_SWIZZLE_ROWS);
    shape[n - 1] = round_up(shape[n - 1], MOQ_SWIZZLE_COLUMNS);
    return moq_describe(scale->dtype, n, shape);
}

static moq_status check_matrices(const moq_tensor *t, const char *name, moq_err *err) {
    char shape[128];
    if (t->ndim != 2 && t->ndim != 3)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected 2 or 3 dimensions, got shape %s",
                           moq_shape_text(t, shape, sizeof shape));
    return MOQ_OK;
}

moq_status moq_describe_swizzle(const moq_tensor *scale, moq_tensor *expected, moq_err *err) {
    MOQ_TRY(check_bytes(scale, "scale", err));
    MOQ_TRY(check_matrices(scale, "scale", err));
    *expected = swizzled_shape(scale);
    return MOQ_OK;
}

moq_status moq_run_swizzle(const moq_tensor *scale, void *stream, const moq_tensor *out,
                           moq_err *err) {
    moq_tensor expected = swizzled_shape(scale);
    MOQ_TRY(check_output(out, &expected, scale, err));
    if (on_device(scale))
        return run_on_device(moq_cuda_swizzle, scale, stream, out, err);
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
        return moq_fail_of(err, MOQ_ERR_VALUE, "swizzled", "expected shape %s, got %s",
                           moq_shape_text(&padded, want, sizeof want),
                           moq_shape_text(swizzled, got, sizeof got));
    if (!moq_tensor_is_contiguous(swizzled))
        return moq_fail_of(err, MOQ_ERR_VALUE, "swizzled",
                           "expected a row-major tensor without gaps, got other strides");
    return MOQ_OK;
}

moq_status moq_run_unswizzle(const moq_tensor *swizzled, const moq_tensor *expected, void *stream,
                             const moq_tensor *out, moq_err *err) {
    MOQ_TRY(check_output(out, expected, swizzled, err));
    if (on_device(swizzled)) {
        moq_tensor result = *expected;
        result.data = out->data;
        result.device = swizzled->device;
        return run_on_device(moq_cuda_unswizzle, &result, stream, swizzled, err);
    }
    moq_cpu_unswizzle(swizzled->data, expected, out->data);
    return MOQ_OK;
}

/* Codes of four bits, one or two to a byte: 8-bit floats are no such codes. */
static moq_status check_fp4(const moq_tensor *t, const char *name, moq_dtype dtype, moq_err *err) {
    MOQ_TRY(check_bytes(t, name, err));
    if (t->dtype != MOQ_DT_I8)
        MOQ_TRY(moq_check_holds(t, name, dtype, err));
    if (t->ndim < 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected at least one dimension, got none");
    return MOQ_OK;
}

moq_status moq_describe_pack_fp4(const moq_tensor *codes, moq_tensor *expected, moq_err *err) {
    char shape[128];
    MOQ_TRY(check_fp4(codes, "codes", MOQ_DT_U8, err));
    *expected = moq_describe(MOQ_DT_U8, codes->ndim, codes->shape);
    if (codes->shape[codes->ndim - 1] % 2 != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "codes",
                           "expected an even last extent, got shape %s",
                           moq_shape_text(codes, shape, sizeof shape));
    expected->shape[codes->ndim - 1] /= 2;
    moq_tensor_set_contiguous(expected);
    return MOQ_OK;
}

moq_status moq_run_pack_fp4(const moq_tensor *codes, void *stream, const moq_tensor *out,
                            moq_err *err) {
    moq_tensor expected;
    MOQ_TRY(moq_describe_pack_fp4(codes, &expected, err));
    MOQ_TRY(check_output(out, &expected, codes, err));
    if (on_device(codes))
        return run_on_device(moq_cuda_pack_fp4, codes, stream, out, err);
    moq_cpu_pack_fp4(codes, out->data);
    return MOQ_OK;
}

moq_status moq_describe_unpack_fp4(const moq_tensor *packed, moq_tensor *expected, moq_err *err) {
    MOQ_TRY(check_fp4(packed, "packed", MOQ_DT_E2M1X2, err));
    *expected = moq_describe(MOQ_DT_U8, packed->ndim, packed->shape);
    expected->shape[packed->ndim - 1] *= 2;
    moq_tensor_set_contiguous(expected);
    return MOQ_OK;
}

moq_status moq_run_unpack_fp4(const moq_tensor *packed, void *stream, const moq_tensor *out,
                              moq_err *err) {
    moq_tensor expected;
    MOQ_TRY(moq_describe_unpack_fp4(packed, &expected, err));
    MOQ_TRY(check_output(out, &expected, packed, err));
    if (on_device(packed))
        return run_on_device(moq_cuda_unpack_fp4, packed, stream, out, err);
    moq_cpu_unpack_fp4(packed, out->data);
    return MOQ_OK;
}

/* ---- requantize ---- */

/* Rows of a matrix, or of each expert of a stack. */
static int64_t rows_of(const moq_tensor *weight) {
    return weight->shape[weight->ndim - 2];
}

static int64_t experts_of(const moq_tensor *weight) {
    return weight->ndim == 3 ? weight->shape[0] : 1;
}

static moq_status check_partitions(const int64_t *partitions, int64_t count, int64_t expected,
                                   moq_err *err) {
    int64_t rows = 0;
    if (count < 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, "partitions", "expected at least one, got none");
    for (int64_t i = 0; i < count; i++) {
        if (partitions[i] < 0 || partitions[i] > expected - rows)
            return moq_fail_of(err, MOQ_ERR_VALUE, "partitions",
                               "expected row counts that sum to %lld, got %lld at index %lld",
                               (long long)expected, (long long)partitions[i], (long long)i);
        rows += partitions[i];
    }
    if (rows != expected)
        return moq_fail_of(err, MOQ_ERR_VALUE, "partitions",
                           "expected a sum of %lld rows, got %lld", (long long)expected,
                           (long long)rows);
    return MOQ_OK;
}

/* A stack of one partition may leave its extent out. */
static moq_status check_scale_shape(const moq_tensor *scale, const moq_tensor *weight,
                                    int64_t count, moq_err *err) {
    char shape[128];
    long long experts = experts_of(weight);
    if (weight->ndim == 2) {
        if (moq_tensor_numel(scale) == 1 || (scale->ndim == 1 && scale->shape[0] == count))
            return MOQ_OK;
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale",
                           "expected one element or shape [%lld], got shape %s", (long long)count,
                           moq_shape_text(scale, shape, sizeof shape));
    }
    if (scale->ndim >= 1 && scale->ndim <= 2 && scale->shape[0] == experts &&
        (scale->ndim == 2 ? scale->shape[1] : 1) == count)
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale", "expected shape [%lld, %lld], got %s",
                       experts, (long long)count, moq_shape_text(scale, shape, sizeof shape));
}

moq_status moq_describe_requantize(const moq_tensor *weight, const moq_tensor *scale,
                                   const int64_t *partitions, int64_t count, moq_tensor *expected,
                                   moq_err *err) {
    char shape[128];
    moq_device host = {MOQ_CPU, 0};
    MOQ_TRY(moq_check_holds(weight, "weight", MOQ_DT_E4M3, err));
    MOQ_TRY(moq_check_holds(scale, "weight_scale", MOQ_DT_F32, err));
    MOQ_TRY(moq_check_usable(weight, "weight", err));
    MOQ_TRY(moq_check_device(scale, "weight_scale", on_device(scale) ? weight->device : host, err));
    if (weight->ndim != 2 && weight->ndim != 3)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight", "expected 2 or 3 dimensions, got shape %s",
                           moq_shape_text(weight, shape, sizeof shape));
    MOQ_TRY(check_partitions(partitions, count, rows_of(weight), err));
    MOQ_TRY(check_scale_shape(scale, weight, count, err));
    *expected = moq_describe(MOQ_DT_E4M3, weight->ndim, weight->shape);
    return MOQ_OK;
}

/* The scales that one matrix is requantized from: of each partition, on the host, and the largest.
 */
typedef struct {
    const float *of; /* [count] */
    float largest;
    bool stays; /* codes are copied as they are */
} scale_list;

static moq_status read_from_device(const moq_tensor *scale, void *stream, float *out,
                                   moq_err *err) {
    int64_t columns = scale->ndim > 1 ? moq_row_length(scale) : moq_tensor_numel(scale);
    int64_t rows = scale->ndim > 1 ? moq_row_count(scale) : 1;
    if (moq_cuda_is_capturing(stream))
        return moq_fail_of(err, MOQ_ERR_INTERNAL, "requantize_to_max",
                           "its stream is being captured into a CUDA graph, but "
                           "weight_scale has to be read back");
    if (moq_tensor_is_contiguous(scale))
        return moq_cuda_download(out, scale->data, (size_t)(rows * columns) * sizeof *out, stream,
                                 err);
    int64_t step = scale->stride[scale->ndim - 1];
    for (int64_t i = 0; i < rows * columns; i++) {
        int64_t row = scale->ndim > 1 ? moq_row_offset(scale, i / columns) : 0;
        const float *from = (const float *)scale->data + row + i % columns * step;
        MOQ_TRY(moq_cuda_download(out + i, from, sizeof *out, stream, err));
    }
    return MOQ_OK;
}

/* Reads all scales in row-major order; one element is the scale of each of `total`. */
static moq_status read_scales(const moq_tensor *scale, int64_t total, void *stream, float *out,
                              moq_err *err) {
    int64_t given = moq_tensor_numel(scale);
    if (on_device(scale)) {
        MOQ_TRY(read_from_device(scale, stream, out, err));
    } else {
        for (int64_t row = 0, n = moq_row_length(scale); row < moq_row_count(scale); row++)
            moq_gather((const float *)scale->data + moq_row_offset(scale, row),
                       scale->ndim ? scale->stride[scale->ndim - 1] : 1, sizeof *out, n,
                       out + row * n);
    }
    for (int64_t i = given; i < total; i++)
        out[i] = out[0];
    return MOQ_OK;
}

/* Lists the scales of a matrix, which is alone or of an expert. A fused matrix of equal scales
 * stays as it is; an expert moves through float16 all the same, as vLLM has it. */
static moq_status list_scales(const float *of, int64_t count, bool alone, scale_list *scales,
                              moq_err *err) {
    bool equal = true;
    *scales = (scale_list){.of = of, .largest = of[0]};
    for (int64_t i = 0; i < count; i++) {
        if (!(of[i] >= 0.0f) || isinf(of[i]))
            return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale",
                               "expected finite numbers of at least 0, got %g", (double)of[i]);
        equal = equal && of[i] == of[0];
        scales->largest = of[i] > scales->largest ? of[i] : scales->largest;
    }
    scales->stays = alone ? equal : count == 1;
    if (!scales->stays && !(scales->largest > MOQ_DIVISOR_ABOVE) && scales->largest > 0.0f)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale",
                           "expected the largest above %g, so that its reciprocal is "
                           "a float32, got %g",
                           (double)MOQ_DIVISOR_ABOVE, (double)scales->largest);
    return MOQ_OK;
}

static void requantize_on_cpu(const moq_tensor *weight, const scale_list *scales,
                              const int64_t *partitions, int64_t count, uint8_t *out) {
    int64_t row = 0, columns = weight->shape[1];
    moq_pace pace = {0};
    for (int64_t i = 0; i < count && columns > 0; row += partitions[i++]) {
        if (!scales->stays) {
            moq_cpu_requantize_rows(weight, row, partitions[i], scales->of[i], scales->largest,
                                    out);
            continue;
        }
        for (int64_t r = row; r < row + partitions[i] && !moq_stops(&pace, columns); r++)
            moq_gather((const uint8_t *)weight->data + moq_row_offset(weight, r), weight->stride[1],
                       1, columns, out + r * columns);
    }
}

static moq_status requantize_on_device(const moq_tensor *weight, const scale_list *scales,
                                       const int64_t *partitions, int64_t count, void *stream,
                                       uint8_t *out, moq_err *err) {
    int64_t row = 0;
    for (int64_t i = 0; i < count; row += partitions[i++]) {
        moq_code_table table;
        moq_tensor part = *weight;
        part.data = (uint8_t *)weight->data + row * weight->stride[0];
        part.shape[0] = partitions[i];
        if (!scales->stays)
            moq_requantize_table(scales->of[i], scales->largest, table.to);
        for (int code = 0; code < 256 && scales->stays; code++)
            table.to[code] = (uint8_t)code;
        MOQ_TRY(moq_cuda_translate(&part, &table, out + row * weight->shape[1], stream, err));
    }
    return MOQ_OK;
}

/* One expert of a stack, or a matrix itself. */
static moq_tensor matrix_of(const moq_tensor *weight, int64_t expert) {
    moq_tensor matrix = *weight;
    if (weight->ndim == 2)
        return matrix;
    matrix.ndim = 2;
    matrix.data = (uint8_t *)weight->data + expert * weight->stride[0];
    for (int i = 0; i < 2; i++) {
        matrix.shape[i] = weight->shape[i + 1];
        matrix.stride[i] = weight->stride[i + 1];
    }
    return matrix;
}

/* `room` holds the scales of all partitions, and after them the largest one of each expert. Nothing
 * is written before all scales are known to be right. */
static moq_status requantize(const moq_tensor *weight, const moq_tensor *scale,
                             const int64_t *partitions, int64_t count, void *stream,
                             const moq_tensor *out, const moq_tensor *max_scale, float *room,
                             moq_err *err) {
    int64_t experts = experts_of(weight), size = rows_of(weight) * weight->shape[weight->ndim - 1];
    float *largest = room + experts * count;
    bool alone = weight->ndim == 2;
    scale_list scales;
    MOQ_TRY(read_scales(scale, experts * count, stream, room, err));
    for (int64_t e = 0; e < experts; e++) {
        moq_status status = list_scales(room + e * count, count, alone, &scales, err);
        if (status != MOQ_OK && !alone && err)
            err->expert = e;
        MOQ_TRY(status);
        largest[e] = scales.largest;
    }
    for (int64_t e = 0; e < experts; e++) {
        moq_tensor matrix = matrix_of(weight, e);
        uint8_t *to = (uint8_t *)out->data + e * size;
        MOQ_TRY(list_scales(room + e * count, count, alone, &scales, err));
        if (on_device(weight))
            MOQ_TRY(requantize_on_device(&matrix, &scales, partitions, count, stream, to, err));
        else
            requantize_on_cpu(&matrix, &scales, partitions, count, to);
    }
    size_t bytes = (size_t)experts * sizeof *largest;
    if (on_device(max_scale) && experts > 0)
        return moq_cuda_upload(max_scale->data, largest, bytes, stream, err);
    if (experts > 0)
        memcpy(max_scale->data, largest, bytes);
    return MOQ_OK;
}

moq_status moq_run_requantize(const moq_tensor *weight, const moq_tensor *scale,
                              const int64_t *partitions, int64_t count, void *stream,
                              const moq_tensor *out, const moq_tensor *max_scale, moq_err *err) {
    moq_tensor expected;
    const moq_tensor *inputs[] = {weight, scale};
    bool entered = false;
    MOQ_TRY(moq_describe_requantize(weight, scale, partitions, count, &expected, err));
    expected.device = weight->device;
    MOQ_TRY(moq_check_output(out, "out", &expected, inputs, 2, err));
    int64_t total = experts_of(weight) * (count + 1);
    float *room = malloc((size_t)(total + 1) * sizeof *room);
    if (!room)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for %lld scales", (long long)total);
    moq_status status =
        on_device(weight) ? moq_cuda_enter(weight->device.index, &entered, err) : MOQ_OK;
    if (status == MOQ_OK) {
        status = requantize(weight, scale, partitions, count, stream, out, max_scale, room, err);
        if (on_device(weight))
            moq_cuda_leave(entered);
    }
    free(room);
    return status;
}
