/* Operation quantize: see quantize.h. */
#include "ops/quantize.h"

#include "core/formats.h"
#include "cpu/quantize.h"
#include "cuda/cuda.h"
#include "cuda/quantize.h"
#include "ops/check.h"

#include <math.h>
#include <string.h>

static const char *const NAMES[] = {
    [MOQ_QUANTIZE_FP8_TENSOR] = "fp8_tensor",
    [MOQ_QUANTIZE_FP8_TOKEN] = "fp8_token",
    [MOQ_QUANTIZE_FP8_GROUP] = "fp8_group",
    [MOQ_QUANTIZE_NVFP4] = "nvfp4",
};

moq_status moq_quantize_scheme_from_name(const char *name, moq_quantize_scheme *out, moq_err *err) {
    for (int i = 0; i < (int)(sizeof NAMES / sizeof *NAMES); i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            *out = (moq_quantize_scheme)i;
            return MOQ_OK;
        }
    }
    return moq_fail(err, MOQ_ERR_VALUE,
                    "scheme: expected 'fp8_tensor', 'fp8_token', 'fp8_group' or 'nvfp4', got '%s'",
                    name);
}

static moq_status resolve_group(moq_quantize_scheme scheme, int64_t group_size, int64_t *out,
                                moq_err *err) {
    MOQ_TRY(moq_check_group_size(group_size, err));
    if (scheme == MOQ_QUANTIZE_NVFP4) {
        *out = MOQ_NVFP4_GROUP;
        if (group_size && group_size != MOQ_NVFP4_GROUP)
            return moq_fail(err, MOQ_ERR_VALUE, "group_size: nvfp4 has groups of 16, got %lld",
                            (long long)group_size);
        return MOQ_OK;
    }
    *out = group_size ? group_size : MOQ_FP8_BLOCK;
    if (group_size && scheme != MOQ_QUANTIZE_FP8_GROUP)
        return moq_fail(err, MOQ_ERR_VALUE, "group_size: %s has no groups, got %lld", NAMES[scheme],
                        (long long)group_size);
    return MOQ_OK;
}

/* A scale that stays on the device: all but its value. */
static moq_status check_device_scale(const moq_tensor *scale, moq_device device, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_device(scale, "scale", device, err));
    if (scale->dtype != MOQ_DT_F32)
        return moq_fail(err, MOQ_ERR_TYPE, "scale: expected float32, got %s",
                        moq_dtype_name(scale->dtype));
    if (moq_tensor_numel(scale) != 1)
        return moq_fail(err, MOQ_ERR_VALUE, "scale: expected one element, got shape %s",
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

moq_status moq_plan_quantize(moq_quantize_scheme scheme, const moq_tensor *x,
                             const moq_tensor *scale, int64_t group_size, moq_quantize_plan *plan,
                             moq_err *err) {
    char shape[128];
    int64_t group = 0, extent[MOQ_MAX_NDIM];
    int last = x->ndim - 1;
    MOQ_TRY(moq_check_activation(x, "x", err));
    MOQ_TRY(resolve_group(scheme, group_size, &group, err));
    *plan = (moq_quantize_plan){.scheme = scheme, .x = *x, .group = group};
    plan->given.ndim = -1;
    if (scale != NULL) {
        if (scheme == MOQ_QUANTIZE_FP8_TOKEN || scheme == MOQ_QUANTIZE_FP8_GROUP)
            return moq_fail(err, MOQ_ERR_VALUE,
                            "scale: %s computes its own scales, got one; only fp8_tensor and nvfp4 "
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
        return moq_fail(err, MOQ_ERR_VALUE, "x: expected at least one dimension for %s, got none",
                        NAMES[scheme]);
    memcpy(extent, x->shape, sizeof extent);
    if (scheme != MOQ_QUANTIZE_NVFP4) {
        plan->codes = result_of(x, MOQ_DT_E4M3, x->ndim, extent);
        extent[last] = scheme == MOQ_QUANTIZE_FP8_TOKEN
                           ? 1
                           : x->shape[last] / group + (x->shape[last] % group != 0);
        plan->scale = result_of(x, MOQ_DT_F32, x->ndim, extent);
        return MOQ_OK;
    }
    if (x->shape[last] % MOQ_NVFP4_GROUP != 0)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "x: expected a last extent divisible by 16 for nvfp4, got shape %s",
                        moq_shape_text(x, shape, sizeof shape));
    extent[last] = x->shape[last] / 2;
    plan->codes = result_of(x, MOQ_DT_U8, x->ndim, extent);
    extent[last] = x->shape[last] / MOQ_NVFP4_GROUP;
    plan->scale = result_of(x, MOQ_DT_E4M3, x->ndim, extent);
    plan->scale_2 = result_of(x, MOQ_DT_F32, 0, NULL);
    return MOQ_OK;
}

static moq_status read_given(const moq_quantize_plan *plan, float *out, moq_err *err) {
    MOQ_TRY(moq_read_scale(&plan->given, "scale", out, err));
    if (plan->scheme == MOQ_QUANTIZE_FP8_TENSOR && isinf(1.0f / *out))
        return moq_fail(err, MOQ_ERR_VALUE,
                        "scale: expected a number whose reciprocal is a float32, got %g",
                        (double)*out);
    return MOQ_OK;
}

static moq_status check_results(const moq_quantize_plan *plan, const moq_quantize_call *call,
                                moq_err *err) {
    const moq_tensor *inputs[] = {&plan->x, plan->given.ndim >= 0 ? &plan->given : NULL,
                                  call->codes, call->scale};
    MOQ_TRY(moq_check_output(call->codes, "out", &plan->codes, inputs, 2, err));
    if (call->scale != NULL)
        MOQ_TRY(moq_check_output(call->scale, "scale_out", &plan->scale, inputs, 3, err));
    if (call->scale_2 != NULL)
        MOQ_TRY(moq_check_output(call->scale_2, "scale_2", &plan->scale_2, inputs, 4, err));
    return MOQ_OK;
}

static void run_on_cpu(const moq_quantize_plan *plan, const moq_quantize_call *call, float given) {
    const moq_tensor *x = &plan->x;
    float value = given;
    bool fixed = plan->given.ndim >= 0;
    switch (plan->scheme) {
    case MOQ_QUANTIZE_FP8_TENSOR:
        if (!fixed) {
            value = moq_fp8_dynamic_scale(moq_cpu_amax(x));
            memcpy(call->scale->data, &value, sizeof value);
        }
        moq_cpu_quantize_fp8_tensor(x, value, call->codes->data);
        break;
    case MOQ_QUANTIZE_FP8_TOKEN:
        moq_cpu_quantize_fp8_token(x, call->codes->data, call->scale->data);
        break;
    case MOQ_QUANTIZE_FP8_GROUP:
        moq_cpu_quantize_fp8_group(x, plan->group, call->codes->data, call->scale->data);
        break;
    case MOQ_QUANTIZE_NVFP4:
        if (!fixed) {
            value = moq_nvfp4_dynamic_scale(moq_cpu_amax(x));
            memcpy(call->scale_2->data, &value, sizeof value);
        }
        moq_cpu_quantize_nvfp4(x, value, call->codes->data, call->scale->data);
        break;
    }
}

static const moq_input_mode MODE[] = {
    [MOQ_QUANTIZE_FP8_TENSOR] = MOQ_INPUT_E4M3_TENSOR,
    [MOQ_QUANTIZE_FP8_TOKEN] = MOQ_INPUT_E4M3_TOKEN,
    [MOQ_QUANTIZE_FP8_GROUP] = MOQ_INPUT_E4M3_GROUP,
    [MOQ_QUANTIZE_NVFP4] = MOQ_INPUT_NVFP4,
};

/* The plan without its results. */
static moq_cuda_quantize cuda_call(const moq_quantize_plan *plan) {
    const moq_tensor *codes = &plan->codes, *scale = &plan->scale;
    moq_cuda_quantize q = {.x = &plan->x,
                           .mode = MODE[plan->scheme],
                           .group = (int)plan->group,
                           .code_stride = codes->ndim > 0 ? codes->shape[codes->ndim - 1] : 1,
                           .scale_row = scale->ndim > 0 ? scale->shape[scale->ndim - 1] : 1,
                           .scale_group = 1};
    q.code_columns = q.code_stride;
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

static moq_status run_on_cuda(const moq_quantize_plan *plan, const moq_quantize_call *call,
                              float given, moq_err *err) {
    int32_t previous, device = plan->x.device.index;
    moq_cuda_quantize q = cuda_call(plan);
    q.scale = given;
    q.codes = call->codes->data;
    q.scales = call->scale ? call->scale->data : NULL;
    q.scale_2 = call->scale_2 ? call->scale_2->data : NULL;
    q.workspace = call->workspace;
    q.stream = call->stream;
    MOQ_TRY(moq_cuda_enter(device, &previous, err));
    moq_status status = moq_cuda_quantize_rows(&q, err);
    moq_cuda_leave(device, previous);
    return status;
}

moq_status moq_run_quantize(const moq_quantize_plan *plan, const moq_quantize_call *call,
                            moq_err *err) {
    float given = 0.0f;
    MOQ_TRY(check_results(plan, call, err));
    if (plan->given.ndim >= 0 && plan->given.device.kind == MOQ_CPU)
        MOQ_TRY(read_given(plan, &given, err));
    if (plan->x.device.kind == MOQ_CUDA)
        return run_on_cuda(plan, call, given, err);
    run_on_cpu(plan, call, given);
    return MOQ_OK;
}
