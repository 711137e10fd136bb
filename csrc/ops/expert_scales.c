/* Stacks of experts and their scales as engines keep them: see expert_scales.h. */
#include "ops/expert_scales.h"

#include "core/formats.h"
#include "cpu/cpu_rows.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_layout.h"
#include "ops/check.h"

#include <math.h>
#include <string.h>

/* ---- gate and up exchanged ---- */

moq_status moq_describe_swap_gate_up(const moq_tensor *stack, moq_tensor *expected, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_usable(stack, "stack", err));
    if (stack->dtype == MOQ_DT_BOOL)
        return moq_fail_of(err, MOQ_ERR_TYPE, "stack",
                           "expected codes, scales or biases, got bool");
    /* bytes become an axis of their own */
    if (stack->ndim < 2 || stack->ndim >= MOQ_MAX_NDIM || stack->shape[1] % 2 != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "stack",
                           "expected 2 to %d dimensions, the second one even, got shape %s",
                           MOQ_MAX_NDIM - 1, moq_shape_text(stack, shape, sizeof shape));
    *expected = moq_describe(stack->dtype, stack->ndim, stack->shape);
    return MOQ_OK;
}

/* One half of one expert as bytes. */
static moq_tensor half_of(const moq_tensor *stack, int64_t expert, int64_t half) {
    int64_t size = (int64_t)moq_dtype_size(stack->dtype), rows = stack->shape[1] / 2;
    int64_t at = expert * stack->stride[0] + half * rows * stack->stride[1];
    moq_tensor part = {
        .data = (uint8_t *)stack->data + at * size,
        .dtype = MOQ_DT_U8,
        .device = stack->device,
        .ndim = stack->ndim,
    };
    for (int32_t i = 0; i + 1 < stack->ndim; i++) {
        part.shape[i] = i ? stack->shape[i + 1] : rows;
        part.stride[i] = stack->stride[i + 1] * size;
    }
    part.shape[stack->ndim - 1] = size;
    part.stride[stack->ndim - 1] = 1;
    return part;
}

/* Rows without gaps are one long row. */
static void join_bytes(moq_tensor *part) {
    int32_t last = part->ndim - 1;
    while (last > 0 && part->stride[last - 1] == part->shape[last]) {
        part->shape[last - 1] *= part->shape[last];
        part->stride[last - 1] = 1;
        last--;
    }
    part->ndim = last + 1;
}

static void copy_on_cpu(const moq_tensor *part, uint8_t *out) {
    int64_t n = moq_row_length(part);
    moq_pace pace = {0};
    for (int64_t row = 0; row < moq_row_count(part) && !moq_stops(&pace, n); row++)
        memcpy(out + row * n, (const uint8_t *)part->data + moq_row_offset(part, row), (size_t)n);
}

static moq_status swap_gate_up(const moq_tensor *stack, void *stream, uint8_t *out, moq_err *err) {
    moq_code_table same;
    for (int code = 0; code < 256; code++)
        same.to[code] = (uint8_t)code;
    for (int64_t e = 0; e < stack->shape[0]; e++) {
        for (int64_t half = 0; half < 2; half++) {
            moq_tensor part = half_of(stack, e, 1 - half);
            int64_t size = moq_tensor_numel(&part);
            join_bytes(&part);
            uint8_t *to = out + (2 * e + half) * size;
            if (stack->device.kind == MOQ_CUDA)
                MOQ_TRY(moq_cuda_translate(&part, &same, to, stream, err));
            else
                copy_on_cpu(&part, to);
        }
    }
    return MOQ_OK;
}

moq_status moq_run_swap_gate_up(const moq_tensor *stack, void *stream, const moq_tensor *out,
                                moq_err *err) {
    moq_tensor expected;
    bool entered;
    MOQ_TRY(moq_describe_swap_gate_up(stack, &expected, err));
    expected.device = stack->device;
    MOQ_TRY(moq_check_output(out, "out", &expected, &stack, 1, err));
    if (moq_tensor_numel(stack) == 0)
        return MOQ_OK;
    if (stack->device.kind != MOQ_CUDA)
        return swap_gate_up(stack, stream, out->data, err);
    MOQ_TRY(moq_cuda_enter(stack->device.index, &entered, err));
    moq_status status = swap_gate_up(stack, stream, out->data, err);
    moq_cuda_leave(entered);
    return status;
}

/* ---- scales ---- */

static int64_t parts_of(const moq_tensor *scale) {
    return scale->ndim == 2 ? scale->shape[1] : 1;
}

static float scale_at(const moq_tensor *scale, int64_t expert, int64_t part) {
    int64_t at = expert * scale->stride[0] + (scale->ndim == 2 ? part * scale->stride[1] : 0);
    return ((const float *)scale->data)[at];
}

/* float32 [E] or [E, P] in host memory, each value finite and at least 0. */
static moq_status check_scales(const moq_tensor *scale, const char *name, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_dtype(scale, name, MOQ_DT_F32, err));
    if (scale->ndim < 1 || scale->ndim > 2 || moq_tensor_numel(scale) == 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected one value or more of each expert, got shape %s",
                           moq_shape_text(scale, shape, sizeof shape));
    for (int64_t e = 0; e < scale->shape[0]; e++) {
        for (int64_t p = 0; p < parts_of(scale); p++) {
            float value = scale_at(scale, e, p);
            if (!(value >= 0.0f) || isinf(value))
                return moq_fail_of(err, MOQ_ERR_VALUE, name,
                                   "expected finite numbers of at least 0, got %g of expert %lld",
                                   (double)value, (long long)e);
        }
    }
    return MOQ_OK;
}

moq_status moq_check_input_scales(const moq_tensor *scale, moq_err *err) {
    return check_scales(scale, "input_scale", err);
}

static float largest_of(const moq_tensor *scale, int64_t expert) {
    float largest = 0.0f;
    for (int64_t p = 0; p < parts_of(scale); p++) {
        float value = scale_at(scale, expert, p);
        largest = value > largest ? value : largest;
    }
    return largest;
}

moq_status moq_describe_expert_input_scale(const moq_tensor *scale, moq_tensor *expected,
                                           moq_err *err) {
    MOQ_TRY(moq_check_input_scales(scale, err));
    *expected = moq_describe(MOQ_DT_F32, 1, scale->shape);
    return MOQ_OK;
}

moq_status moq_run_expert_input_scale(const moq_tensor *scale, void *stream, const moq_tensor *out,
                                      moq_err *err) {
    moq_tensor expected;
    (void)stream;
    MOQ_TRY(moq_describe_expert_input_scale(scale, &expected, err));
    MOQ_TRY(moq_check_output(out, "out", &expected, &scale, 1, err));
    for (int64_t e = 0; e < scale->shape[0]; e++)
        ((float *)out->data)[e] = largest_of(scale, e);
    return MOQ_OK;
}

moq_status moq_run_shared_input_scale(const moq_tensor *scale, const moq_tensor *expected,
                                      const moq_tensor *out, moq_err *err) {
    float largest = 0.0f;
    MOQ_TRY(moq_check_output(out, "out", expected, &scale, 1, err));
    for (int64_t e = 0; e < scale->shape[0]; e++) {
        float value = largest_of(scale, e);
        largest = value > largest ? value : largest;
    }
    for (int64_t i = 0; i < moq_tensor_numel(expected); i++)
        ((float *)out->data)[i] = largest;
    return MOQ_OK;
}

/* ---- factors of NVFP4 products ---- */

moq_status moq_describe_expert_alphas(const moq_tensor *input_scale,
                                      const moq_tensor *weight_scale_2, moq_tensor *expected,
                                      moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_input_scales(input_scale, err));
    MOQ_TRY(check_scales(weight_scale_2, "weight_scale_2", err));
    if (input_scale->ndim != 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, "input_scale",
                           "expected one value an expert, got %s",
                           moq_shape_text(input_scale, shape, sizeof shape));
    if (weight_scale_2->shape[0] != input_scale->shape[0])
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale_2",
                           "expected %lld experts, got shape %s", (long long)input_scale->shape[0],
                           moq_shape_text(weight_scale_2, shape, sizeof shape));
    for (int64_t e = 0; e < input_scale->shape[0]; e++) {
        float value = scale_at(input_scale, e, 0);
        if (!(value > MOQ_DIVISOR_ABOVE))
            return moq_fail_of(err, MOQ_ERR_VALUE, "input_scale",
                               "its reciprocal must be a float32, got %g of expert %lld",
                               (double)value, (long long)e);
    }
    *expected = moq_describe(MOQ_DT_F32, 1, input_scale->shape);
    return MOQ_OK;
}

moq_status moq_run_expert_alphas(const moq_tensor *input_scale, const moq_tensor *weight_scale_2,
                                 const moq_tensor *alpha, const moq_tensor *reciprocal,
                                 moq_err *err) {
    const moq_tensor *inputs[] = {input_scale, weight_scale_2, alpha};
    moq_tensor expected;
    MOQ_TRY(moq_describe_expert_alphas(input_scale, weight_scale_2, &expected, err));
    MOQ_TRY(moq_check_output(alpha, "out", &expected, inputs, 2, err));
    MOQ_TRY(moq_check_output(reciprocal, "scale_out", &expected, inputs, 3, err));
    unsigned flushes = moq_enter_float_mode();
    for (int64_t e = 0; e < input_scale->shape[0]; e++) {
        float scale = scale_at(input_scale, e, 0);
        ((float *)alpha->data)[e] = scale * scale_at(weight_scale_2, e, 0);
        ((float *)reciprocal->data)[e] = 1.0f / scale;
    }
    moq_leave_float_mode(flushes);
    return MOQ_OK;
}
