/* Activations quantized by every scheme, from tensors of any shape and strides: no code further
 * from its value than rounding allows, and dequantized exactly as codes and scales say.
 *
 * Case: scheme, dtype, shape, strides and the given scale, then the bytes of the tensor. */
#include "fuzz.h"

#include "core/formats.h"
#include "ops/dequantize.h"
#include "ops/quantize.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#define ROUNDINGS 0x1p-21 /* of the quotient in float32, relative; generous */

typedef struct {
    moq_quantize_plan plan;
    fuzz_tensor codes, scale, scale_2;
    float given; /* 0 without */
} outcome;

/* The scale of the i-th element: of its tensor, row or group. */
static float scale_of(const outcome *o, int64_t i) {
    const moq_tensor *x = &o->plan.x;
    const int64_t n = x->ndim > 0 ? x->shape[x->ndim - 1] : 1;
    const int64_t groups = (n + o->plan.group - 1) / o->plan.group;
    switch (o->plan.scheme) {
    case MOQ_QUANTIZE_FP8_TENSOR:
        return o->given > 0 ? o->given : fuzz_element(&o->scale.view, 0);
    case MOQ_QUANTIZE_FP8_TOKEN:
        return fuzz_element(&o->scale.view, i / n);
    default:
        return fuzz_element(&o->scale.view, i / n * groups + i % n / o->plan.group);
    }
}

static bool is_normal_scale(float scale) {
    return scale > 0x1p-100f && scale < 0x1p+100f;
}

/* e4m3 has a step of an eighth of the power of two below, and of 2^-9 near zero. */
static void check_fp8(const outcome *o) {
    const int64_t count = moq_tensor_numel(&o->plan.x);
    for (int64_t i = 0; i < count; i++) {
        const double value = fuzz_element(&o->plan.x, i), scale = scale_of(o, i);
        const double code = fuzz_element(&o->codes.view, i), wanted = value / scale;
        if (isnan(value) || !is_normal_scale((float)scale))
            continue;
        if (isinf(value)) {
            FUZZ_CHECK(fabs(code) == MOQ_E4M3_MAX && (code < 0) == (value < 0), "%g", code);
            continue;
        }
        const double bounded = fmax(fmin(wanted, MOQ_E4M3_MAX), -(double)MOQ_E4M3_MAX);
        const double step = fmax(exp2(floor(log2(fabs(bounded) + 0x1p-20))) / 8, 0x1p-9);
        FUZZ_CHECK(fabs(code - bounded) <= step / 2 + fabs(bounded) * ROUNDINGS,
                   "%a under scale %a became %g", value, scale, code);
    }
}

static double nearest_e2m1(double value) {
    double best = INFINITY;
    for (int code = 0; code < 16; code++)
        best = fmin(best, fabs(value - (double)moq_e2m1_decode((uint8_t)code)));
    return best;
}

static void check_nvfp4_group(const outcome *o, int64_t group, float scale_2) {
    const float block = fuzz_element(&o->scale.view, group), step = block * scale_2;
    float amax = 0;
    for (int64_t i = group * MOQ_NVFP4_GROUP; i < (group + 1) * MOQ_NVFP4_GROUP; i++) {
        const float value = fuzz_element(&o->plan.x, i);
        if (!isfinite(value))
            return;
        amax = fmaxf(amax, fabsf(value));
    }
    const uint8_t wanted = moq_e4m3_encode(amax / (6.0f * scale_2));
    FUZZ_CHECK(moq_e4m3_decode(wanted) == block, "amax %a under %a: %g", amax, scale_2, block);
    for (int64_t i = group * MOQ_NVFP4_GROUP; i < (group + 1) * MOQ_NVFP4_GROUP; i++) {
        const moq_tensor *codes = &o->codes.view;
        const uint8_t byte = ((const uint8_t *)codes->data)[i / 2];
        const double code = moq_e2m1_decode(i % 2 ? byte >> 4 : byte);
        const double value = fuzz_element(&o->plan.x, i);
        if (step == 0.0f)
            FUZZ_CHECK(code == 0, "%a under a step of 0 became %g", value, code);
        else
            FUZZ_CHECK(fabs(code - value / step) <=
                           nearest_e2m1(value / step) + fabs(value / step) * ROUNDINGS,
                       "%a under step %a became %g", value, step, code);
    }
}

static void check_nvfp4(const outcome *o) {
    const float scale_2 = o->given > 0 ? o->given : fuzz_element(&o->scale_2.view, 0);
    if (!is_normal_scale(scale_2))
        return;
    for (int64_t g = 0; g < moq_tensor_numel(&o->plan.x) / MOQ_NVFP4_GROUP; g++)
        check_nvfp4_group(o, g, scale_2);
}

/* The stored form back to numbers, where the shapes are those of a weight: exactly the product. */
static void check_back(outcome *o) {
    const bool nvfp4 = o->plan.scheme == MOQ_QUANTIZE_NVFP4;
    const bool token = o->plan.scheme == MOQ_QUANTIZE_FP8_TOKEN;
    moq_dequantize_plan back;
    moq_err err;
    moq_tensor codes = o->codes.view, given = {.dtype = MOQ_DT_F32, .data = &o->given};
    if (codes.ndim != 2 || (!nvfp4 && !token))
        return;
    codes.dtype = nvfp4 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3;
    const moq_tensor *scale_2 = o->given > 0 ? &given : &o->scale_2.view;
    const moq_status status =
        moq_plan_dequantize(nvfp4 ? "NVFP4" : "fp8_per_channel_per_token", &codes, &o->scale.view,
                            nvfp4 ? scale_2 : NULL, 0, MOQ_DT_F32, &back, &err);
    FUZZ_CHECK(status == MOQ_OK, "%s", err.text);
    fuzz_tensor out = fuzz_result(&back.out, 0xa5);
    FUZZ_CHECK(moq_run_dequantize(&back, &out.view, &err) == MOQ_OK, "%s", err.text);
    for (int64_t i = 0; i < moq_tensor_numel(&out.view); i++) {
        const double scale = scale_of(o, i), second = nvfp4 ? fuzz_element(scale_2, 0) : 1;
        const double product = fuzz_element(&codes, i) * scale * second;
        const float wanted = scale == 0 || second == 0 ? 0.0f : (float)product;
        const float got = fuzz_element(&out.view, i);
        FUZZ_CHECK(got == wanted || (isnan(got) && isnan(wanted)), "%a, expected %a", got, wanted);
    }
    fuzz_free(&out);
}

static void run(outcome *o) {
    const moq_quantize_plan *plan = &o->plan;
    const bool fixed = plan->given.ndim >= 0, nvfp4 = plan->scheme == MOQ_QUANTIZE_NVFP4;
    moq_err err;
    o->codes = fuzz_result(&plan->codes, 0xa5);
    o->scale = fuzz_result(&plan->scale, 0xa5);
    o->scale_2 = fuzz_result(&plan->scale_2, 0xa5);
    o->codes.view.dtype = plan->codes.dtype;
    const bool no_scale = plan->scheme == MOQ_QUANTIZE_FP8_TENSOR && fixed;
    const moq_quantize_call call = {.codes = &o->codes.view,
                                    .scale = no_scale ? NULL : &o->scale.view,
                                    .scale_2 = nvfp4 && !fixed ? &o->scale_2.view : NULL};
    const moq_status status = moq_run_quantize(plan, &call, &err);
    if (status != MOQ_OK) {
        FUZZ_CHECK(fixed, "%s", err.text);
        fuzz_check_error(status, &err);
    } else {
        if (nvfp4)
            check_nvfp4(o);
        else
            check_fp8(o);
        check_back(o);
    }
    fuzz_free(&o->codes);
    fuzz_free(&o->scale);
    fuzz_free(&o->scale_2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const moq_dtype DTYPES[] = {MOQ_DT_F32, MOQ_DT_BF16, MOQ_DT_F16, MOQ_DT_F32,
                                       MOQ_DT_F32, MOQ_DT_BF16, MOQ_DT_F16, MOQ_DT_I32};
    fuzz_input in = {data, size};
    const moq_quantize_scheme scheme = (moq_quantize_scheme)fuzz_range(&in, 0, 3);
    const moq_dtype dtype = DTYPES[fuzz_range(&in, 0, 7)];
    const int32_t ndim = (int32_t)fuzz_range(&in, 0, 4);
    int64_t shape[4];
    for (int i = 0; i < ndim; i++)
        shape[i] = i + 1 < ndim ? fuzz_range(&in, 0, 3) : fuzz_range(&in, 0, ndim > 2 ? 60 : 300);
    if (ndim > 0 && scheme == MOQ_QUANTIZE_NVFP4 && fuzz_range(&in, 0, 15) > 0)
        shape[ndim - 1] = shape[ndim - 1] / MOQ_NVFP4_GROUP * MOQ_NVFP4_GROUP;
    const int64_t group = fuzz_range(&in, 0, 3) ? 0 : (int64_t)(int16_t)fuzz_bits(&in, 2);
    outcome o = {.given = fuzz_flag(&in) ? fuzz_scale(&in) : 0};
    moq_tensor given = {.dtype = MOQ_DT_F32, .data = &o.given};
    moq_err err;
    fuzz_tensor x = fuzz_make(&in, dtype, ndim, shape, fuzz_flag(&in));
    const moq_status status =
        moq_plan_quantize(scheme, &x.view, o.given != 0 ? &given : NULL, group, &o.plan, &err);
    if (status == MOQ_OK)
        run(&o);
    else
        fuzz_check_error(status, &err);
    fuzz_free(&x);
    return 0;
}
