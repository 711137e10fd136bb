/* Operation quantize: see quantize.h. */
#include "ops/quantize.h"

#include "core/formats.h"
#include "core/swizzle.h"
#include "cpu/cpu_activation.h"
#include "cpu/cpu_layout.h"
#include "cpu/cpu_quantize.h"
#include "cpu/cpu_rows.h"
#include "cpu/float_mode.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_quantize.h"
#include "ops/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const NAMES[] = {
    [MOQ_QUANTIZE_FP8_TENSOR] = "fp8_tensor",         [MOQ_QUANTIZE_FP8_TOKEN] = "fp8_token",
    [MOQ_QUANTIZE_FP8_GROUP] = "fp8_group",           [MOQ_QUANTIZE_NVFP4] = "nvfp4",
    [MOQ_QUANTIZE_NVFP4_SWIZZLED] = "nvfp4_swizzled",
};

moq_status moq_quantize_scheme_from_name(const char *name, moq_quantize_scheme *out, moq_err *err) {
    for (int i = 0; i < (int)(sizeof NAMES / sizeof *NAMES); i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            *out = (moq_quantize_scheme)i;
            return MOQ_OK;
        }
    }
    return moq_fail_of(err, MOQ_ERR_VALUE, "scheme",
                       "expected 'fp8_tensor', 'fp8_token', 'fp8_group', 'nvfp4' or "
                       "'nvfp4_swizzled', got '%s'",
                       name);
}

static moq_status resolve_group(moq_quantize_scheme scheme, int64_t group_size, int64_t *out,
                                moq_err *err) {
    MOQ_TRY(moq_check_group_size(group_size, err));
    if (moq_quantizes_to_nvfp4(scheme)) {
        *out = MOQ_NVFP4_GROUP;
        if (group_size && group_size != MOQ_NVFP4_GROUP)
            return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "%s has groups of 16, got %lld",
                               NAMES[scheme], (long long)group_size);
        return MOQ_OK;
    }
    *out = group_size ? group_size : MOQ_FP8_BLOCK;
    if (group_size && scheme != MOQ_QUANTIZE_FP8_GROUP)
        return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "%s has no groups, got %lld",
                           NAMES[scheme], (long long)group_size);
    return MOQ_OK;
}

/* A scale that stays on the device: all but its value. */
static moq_status check_device_scale(const moq_tensor *scale, moq_device device, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_device(scale, "scale", device, err));
    if (scale->dtype != MOQ_DT_F32)
        return moq_fail_of(err, MOQ_ERR_TYPE, "scale", "expected float32, got %s",
                           moq_dtype_name(scale->dtype));
    if (moq_tensor_numel(scale) != 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, "scale", "expected one element, got shape %s",
                           moq_shape_text(scale, shape, sizeof shape));
    return MOQ_OK;
}

/* The result's shape, on the device of x. */
static moq_tensor result_of(const moq_tensor *x, moq_dtype dtype, int32_t ndim,
                            const int64_t *shape) {
    moq_tensor t = moq_describe(dtype, ndim, shape);
    t.device = x->device;
    return t;
}

/* The shape of row-major scales in swizzled order: one matrix, whatever axes the rows have. */
static moq_tensor swizzled(const moq_tensor *scale) {
    int64_t columns = moq_row_length(scale);
    int64_t shape[2] = {moq_swizzle_down(moq_row_count(scale)) * MOQ_SWIZZLE_ROWS,
                        moq_swizzle_across(columns) * MOQ_SWIZZLE_COLUMNS};
    return result_of(scale, scale->dtype, 2, shape);
}

/* The plan for values that are on a device that can be used. */
static moq_status plan_values(moq_quantize_scheme scheme, const moq_tensor *x,
                              const moq_tensor *scale, int64_t group_size, moq_quantize_plan *plan,
                              moq_err *err) {
    char shape[128];
    int64_t group = 0, extent[MOQ_MAX_NDIM];
    int last = x->ndim - 1;
    MOQ_TRY(resolve_group(scheme, group_size, &group, err));
    *plan = (moq_quantize_plan){.scheme = scheme, .x = *x, .group = group};
    plan->given.ndim = -1;
    if (scheme == MOQ_QUANTIZE_NOTHING) {
        plan->codes = result_of(x, x->dtype, x->ndim, x->shape);
        return MOQ_OK;
    }
    if (scale != NULL) {
        if (scheme == MOQ_QUANTIZE_FP8_TOKEN || scheme == MOQ_QUANTIZE_FP8_GROUP)
            return moq_fail_of(err, MOQ_ERR_VALUE, "scale",
                               "%s computes its own scales, got one; only fp8_tensor and nvfp4 "
                               "take one",
                               NAMES[scheme]);
        plan->given = *scale;
        if (scale->device.kind == MOQ_CUDA)
            MOQ_TRY(check_device_scale(scale, x->device, err));
    }
    if (scheme == MOQ_QUANTIZE_FP8_TENSOR) {
        plan->codes = result_of(x, MOQ_DT_E4M3, x->ndim, x->shape);
        plan->scale = result_of(x, MOQ_DT_F32, 0, NULL);
        return MOQ_OK;
    }
    if (last < 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x",
                           "expected at least one dimension for %s, got none", NAMES[scheme]);
    memcpy(extent, x->shape, sizeof extent);
    if (!moq_quantizes_to_nvfp4(scheme)) {
        plan->codes = result_of(x, MOQ_DT_E4M3, x->ndim, extent);
        extent[last] = scheme == MOQ_QUANTIZE_FP8_TOKEN
                           ? 1
                           : x->shape[last] / group + (x->shape[last] % group != 0);
        plan->scale = result_of(x, MOQ_DT_F32, x->ndim, extent);
        return MOQ_OK;
    }
    if (x->shape[last] % MOQ_NVFP4_GROUP != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x",
                           "expected a last extent divisible by 16 for %s, got shape %s",
                           NAMES[scheme], moq_shape_text(x, shape, sizeof shape));
    extent[last] = x->shape[last] / 2;
    plan->codes = result_of(x, MOQ_DT_U8, x->ndim, extent);
    extent[last] = x->shape[last] / MOQ_NVFP4_GROUP;
    plan->scale = result_of(x, MOQ_DT_E4M3, x->ndim, extent);
    if (scheme == MOQ_QUANTIZE_NVFP4_SWIZZLED)
        plan->scale = swizzled(&plan->scale);
    plan->scale_2 = result_of(x, MOQ_DT_F32, 0, NULL);
    return MOQ_OK;
}

moq_status moq_plan_quantize(moq_quantize_scheme scheme, const moq_tensor *x,
                             const moq_tensor *scale, int64_t group_size, moq_quantize_plan *plan,
                             moq_err *err) {
    MOQ_TRY(moq_check_activation(x, "x", err));
    return plan_values(scheme, x, scale, group_size, plan, err);
}

/* ---- activations ---- */

static moq_status check_weight(const moq_activation *a, int64_t k, moq_err *err) {
    const moq_tensor *weight = &a->weight;
    char shape[128];
    if (weight->dtype != a->x.dtype && weight->dtype != MOQ_DT_F32)
        return moq_fail_of(err, MOQ_ERR_TYPE, "weight", "expected %s or float32, got %s",
                           moq_dtype_name(a->x.dtype), moq_dtype_name(weight->dtype));
    if (weight->ndim != 1 || weight->shape[0] != k)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight", "expected shape [%lld], got %s",
                           (long long)k, moq_shape_text(weight, shape, sizeof shape));
    return moq_check_device(weight, "weight", a->x.device, err);
}

static moq_status check_residual(const moq_activation *a, moq_err *err) {
    const moq_tensor *residual = &a->residual;
    char expected[128], got[128];
    if (residual->ndim < 0)
        return MOQ_OK;
    if (residual->dtype != a->x.dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "residual", "expected %s as x, got %s",
                           moq_dtype_name(a->x.dtype), moq_dtype_name(residual->dtype));
    if (!moq_same_shape(residual, &a->x))
        return moq_fail_of(err, MOQ_ERR_VALUE, "residual", "expected shape %s, got %s",
                           moq_shape_text(&a->x, expected, sizeof expected),
                           moq_shape_text(residual, got, sizeof got));
    return moq_check_device(residual, "residual", a->x.device, err);
}

static moq_status check_norm(const moq_activation *a, int64_t k, moq_err *err) {
    if (!(a->eps >= 0.0f) || isinf(a->eps))
        return moq_fail_of(err, MOQ_ERR_VALUE, "eps", "expected a finite number from 0 on, got %g",
                           (double)a->eps);
    if (a->x.device.kind == MOQ_CUDA && k > MOQ_CUDA_NORM_COLUMNS)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x",
                           "rms_norm on a CUDA device takes rows of up to %d values, got %lld",
                           MOQ_CUDA_NORM_COLUMNS, (long long)k);
    MOQ_TRY(check_weight(a, k, err));
    return check_residual(a, err);
}

moq_status moq_plan_activation(moq_quantize_scheme scheme, const moq_activation *activation,
                               const moq_tensor *scale, moq_quantize_plan *plan, moq_err *err) {
    const moq_tensor *x = &activation->x;
    int last = x->ndim - 1;
    char shape[128];
    MOQ_TRY(moq_check_activation(x, "x", err));
    if (last < 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x", "expected at least one dimension, got none");
    moq_tensor values = result_of(x, x->dtype, x->ndim, x->shape);
    if (activation->kind == MOQ_RMS_NORM)
        MOQ_TRY(check_norm(activation, x->shape[last], err));
    else if (x->shape[last] % 2 != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x",
                           "expected an even last extent, gate and up, got shape %s",
                           moq_shape_text(x, shape, sizeof shape));
    else
        values.shape[last] /= 2;
    moq_tensor_set_contiguous(&values);
    MOQ_TRY(plan_values(scheme, &values, scale, 0, plan, err));
    plan->activation = *activation;
    return MOQ_OK;
}

/* ---- running ---- */

static moq_status read_given(const moq_quantize_plan *plan, float *out, moq_err *err) {
    MOQ_TRY(moq_read_scale(&plan->given, "scale", out, err));
    if (plan->scheme == MOQ_QUANTIZE_FP8_TENSOR && !(*out > MOQ_DIVISOR_ABOVE))
        return moq_fail_of(err, MOQ_ERR_VALUE, "scale",
                           "expected a number whose reciprocal is a float32, got %g", (double)*out);
    return MOQ_OK;
}

/* The tensors that a plan reads, some of which may be NULL. */
enum { INPUTS = 4 };

static void list_inputs(const moq_quantize_plan *plan, const moq_tensor **inputs) {
    const moq_activation *a = &plan->activation;
    bool plain = a->kind == MOQ_ACTIVATION_NONE, norm = a->kind == MOQ_RMS_NORM;
    inputs[0] = plain ? &plan->x : &a->x;
    inputs[1] = plan->given.ndim >= 0 ? &plan->given : NULL;
    inputs[2] = norm ? &a->weight : NULL;
    inputs[3] = norm && a->residual.ndim >= 0 ? &a->residual : NULL;
}

static moq_status check_results(const moq_quantize_plan *plan, const moq_quantize_call *call,
                                moq_err *err) {
    const moq_tensor *other[INPUTS + 4] = {NULL};
    int count = INPUTS;
    list_inputs(plan, other);
    const moq_tensor *residual = other[3], *z = call->residual_out;
    if (z != NULL) {
        if (z->data == residual->data)
            other[3] = NULL; /* in place */
        moq_tensor expected = result_of(residual, residual->dtype, residual->ndim, residual->shape);
        MOQ_TRY(moq_check_output(z, "residual_out", &expected, other, count, err));
        other[3] = residual;
        other[count++] = z;
    }
    if (call->value_out != NULL)
        MOQ_TRY(moq_check_output(call->value_out, "value_out", &plan->x, other, count, err));
    other[count++] = call->value_out;
    MOQ_TRY(moq_check_output(call->codes, "out", &plan->codes, other, count, err));
    other[count++] = call->codes;
    if (call->scale != NULL)
        MOQ_TRY(moq_check_output(call->scale, "scale_out", &plan->scale, other, count, err));
    other[count++] = call->scale;
    if (call->scale_2 != NULL)
        MOQ_TRY(moq_check_output(call->scale_2, "scale_2", &plan->scale_2, other, count, err));
    return MOQ_OK;
}

static void quantize_values(const moq_quantize_plan *plan, const moq_tensor *x,
                            const moq_quantize_call *call, float given, void *scales) {
    float value = given;
    bool fixed = plan->given.ndim >= 0;
    switch (plan->scheme) {
    case MOQ_QUANTIZE_FP8_TENSOR:
        if (!fixed) {
            value = moq_fp8_dynamic_scale(moq_cpu_amax(x));
            memcpy(scales, &value, sizeof value);
        }
        moq_cpu_quantize_fp8_tensor(x, value, call->codes->data);
        break;
    case MOQ_QUANTIZE_FP8_TOKEN:
        moq_cpu_quantize_fp8_token(x, call->codes->data, scales);
        break;
    case MOQ_QUANTIZE_FP8_GROUP:
        moq_cpu_quantize_fp8_group(x, plan->group, call->codes->data, scales);
        break;
    default:
        if (!fixed) {
            value = moq_nvfp4_dynamic_scale(moq_cpu_amax(x));
            memcpy(call->scale_2->data, &value, sizeof value);
        }
        moq_cpu_quantize_nvfp4(x, value, call->codes->data, scales);
        break;
    }
}

static moq_status no_memory(size_t bytes, moq_err *err) {
    return moq_fail(err, MOQ_ERR_MEMORY, "no memory for %zu bytes of values", bytes);
}

/* Block scales are found in the order of the rows. */
static moq_status quantize_and_swizzle(const moq_quantize_plan *plan, const moq_tensor *x,
                                       const moq_quantize_call *call, float given, moq_err *err) {
    int64_t shape[2] = {moq_row_count(x), moq_row_length(x) / MOQ_NVFP4_GROUP};
    moq_tensor scales = moq_describe(MOQ_DT_E4M3, 2, shape);
    size_t bytes = (size_t)moq_tensor_numel(&scales);
    scales.data = malloc(bytes ? bytes : 1);
    if (!scales.data)
        return no_memory(bytes, err);
    quantize_values(plan, x, call, given, scales.data);
    moq_cpu_swizzle(&scales, call->scale->data);
    free(scales.data);
    return MOQ_OK;
}

static moq_status quantize_on_cpu(const moq_quantize_plan *plan, const moq_tensor *x,
                                  const moq_quantize_call *call, float given, moq_err *err) {
    if (plan->scheme == MOQ_QUANTIZE_NVFP4_SWIZZLED)
        return quantize_and_swizzle(plan, x, call, given, err);
    quantize_values(plan, x, call, given, call->scale ? call->scale->data : NULL);
    return MOQ_OK;
}

/* The activation, if there is one, is written down before it is quantized. */
static moq_status run_on_cpu(const moq_quantize_plan *plan, const moq_quantize_call *call,
                             float given, moq_err *err) {
    moq_activation a = plan->activation;
    moq_tensor values = plan->x;
    if (a.kind == MOQ_ACTIVATION_NONE)
        return quantize_on_cpu(plan, &values, call, given, err);
    if (call->residual_out)
        a.residual_out = *call->residual_out;
    if (plan->scheme == MOQ_QUANTIZE_NOTHING)
        return moq_cpu_activate(&a, call->codes, err);
    size_t bytes = (size_t)moq_tensor_numel(&values) * moq_dtype_size(values.dtype);
    void *room = call->value_out ? NULL : malloc(bytes ? bytes : 1);
    values.data = call->value_out ? call->value_out->data : room;
    if (!values.data && bytes)
        return no_memory(bytes, err);
    moq_status status = moq_cpu_activate(&a, &values, err);
    if (status == MOQ_OK)
        status = quantize_on_cpu(plan, &values, call, given, err);
    free(room);
    return status;
}

static const moq_input_mode MODE[] = {
    [MOQ_QUANTIZE_FP8_TENSOR] = MOQ_INPUT_E4M3_TENSOR,
    [MOQ_QUANTIZE_FP8_TOKEN] = MOQ_INPUT_E4M3_TOKEN,
    [MOQ_QUANTIZE_FP8_GROUP] = MOQ_INPUT_E4M3_GROUP,
    [MOQ_QUANTIZE_NVFP4] = MOQ_INPUT_NVFP4,
    [MOQ_QUANTIZE_NVFP4_SWIZZLED] = MOQ_INPUT_NVFP4,
    [MOQ_QUANTIZE_NOTHING] = MOQ_INPUT_AS_IS,
};

/* The plan without its results. */
static moq_cuda_quantize cuda_call(const moq_quantize_plan *plan) {
    const moq_tensor *codes = &plan->codes, *scale = &plan->scale;
    bool plain = plan->activation.kind == MOQ_ACTIVATION_NONE;
    moq_cuda_quantize q = {.x = plain ? &plan->x : &plan->activation.x,
                           .activation = plain ? NULL : &plan->activation,
                           .mode = MODE[plan->scheme],
                           .group = (int)plan->group,
                           .code_stride = codes->ndim > 0 ? codes->shape[codes->ndim - 1] : 1,
                           .scale_row = scale->ndim > 0 ? scale->shape[scale->ndim - 1] : 1,
                           .scale_group = 1};
    q.code_columns = q.code_stride;
    if (plan->scheme == MOQ_QUANTIZE_NOTHING)
        q.code_stride *= (int64_t)moq_dtype_size(codes->dtype);
    q.next_is_busy = !plain; /* mostly a linear, which asks for its weights first */
    if (plan->scheme == MOQ_QUANTIZE_NVFP4_SWIZZLED)
        q.scale_tiles = scale->shape[1] / MOQ_SWIZZLE_COLUMNS;
    if (plan->given.ndim >= 0 && plan->given.device.kind == MOQ_CUDA)
        q.given = plan->given.data;
    else if (plan->given.ndim >= 0)
        q.scale = 1.0f; /* until it is read */
    return q;
}

int64_t moq_quantize_workspace(const moq_quantize_plan *plan) {
    moq_cuda_quantize q = cuda_call(plan);
    return plan->x.device.kind == MOQ_CUDA ? moq_cuda_quantize_workspace(&q) : 0;
}

/* Zeros where swizzled scales are more than there are groups. */
static moq_status clear_padding(const moq_quantize_plan *plan, const moq_quantize_call *call,
                                moq_err *err) {
    int64_t bytes =
        plan->scheme == MOQ_QUANTIZE_NVFP4_SWIZZLED ? moq_tensor_numel(&plan->scale) : 0;
    if (bytes * MOQ_NVFP4_GROUP <= 2 * moq_tensor_numel(&plan->codes))
        return MOQ_OK;
    return moq_cuda_fill(call->scale->data, 0, (size_t)bytes, call->stream, err);
}

static moq_status run_on_cuda(const moq_quantize_plan *plan, const moq_quantize_call *call,
                              float given, moq_err *err) {
    bool entered;
    moq_cuda_quantize q = cuda_call(plan);
    moq_activation a = plan->activation;
    if (call->residual_out)
        a.residual_out = *call->residual_out;
    if (call->value_out)
        a.value_out = *call->value_out;
    if (q.activation)
        q.activation = &a;
    q.scale = given;
    q.codes = call->codes->data;
    q.scales = call->scale ? call->scale->data : NULL;
    q.scale_2 = call->scale_2 ? call->scale_2->data : NULL;
    q.workspace = call->workspace;
    q.stream = call->stream;
    MOQ_TRY(moq_cuda_enter(plan->x.device.index, &entered, err));
    moq_status status = clear_padding(plan, call, err);
    if (status == MOQ_OK)
        status = moq_cuda_quantize_rows(&q, err);
    moq_cuda_leave(entered);
    return status;
}

static moq_status run(const moq_quantize_plan *plan, const moq_quantize_call *call, moq_err *err) {
    float given = 0.0f;
    MOQ_TRY(check_results(plan, call, err));
    if (plan->given.ndim >= 0 && plan->given.device.kind == MOQ_CPU)
        MOQ_TRY(read_given(plan, &given, err));
    if (plan->x.device.kind == MOQ_CUDA)
        return run_on_cuda(plan, call, given, err);
    return run_on_cpu(plan, call, given, err);
}

/* A scale may be subnormal, and is no zero. */
moq_status moq_run_quantize(const moq_quantize_plan *plan, const moq_quantize_call *call,
                            moq_err *err) {
    unsigned flushes = moq_enter_float_mode();
    moq_status status = run(plan, call, err);
    moq_leave_float_mode(flushes);
    return status;
}
