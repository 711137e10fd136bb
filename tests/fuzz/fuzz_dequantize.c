/* Stored weights of every format back to numbers: any algorithm with any dtypes and shapes is
 * refused, or gives the product of codes and scales.
 *
 * Case: algorithm, dtypes and shapes, each the usual one with a chance of another, then bytes. */
#include "fuzz.h"

#include "core/algo.h"
#include "core/formats.h"
#include "ops/dequantize.h"

#include <math.h>
#include <string.h>

typedef struct {
    int32_t ndim;
    int64_t shape[MOQ_MAX_NDIM];
} extents;

static const char *algo_name(fuzz_input *in, moq_algo *algo) {
    const int choice = (int)fuzz_range(in, 0, 31);
    *algo = choice < MOQ_ALGO_COUNT ? (moq_algo)choice : MOQ_ALGO_NVFP4;
    return choice == 31 ? "" : choice == 30 ? "NVFP5" : choice ? moq_algo_name(*algo) : "none";
}

static bool has_fp4(moq_algo algo) {
    return moq_text_find((moq_text){moq_algo_name(algo), strlen(moq_algo_name(algo))},
                         MOQ_TEXT("FP4")) != SIZE_MAX;
}

static moq_dtype code_dtype(moq_algo algo) {
    switch (algo) {
    case MOQ_ALGO_FP8:
    case MOQ_ALGO_FP8_PER_CHANNEL_PER_TOKEN:
    case MOQ_ALGO_FP8_PB_WO:
    case MOQ_ALGO_MXFP8:
        return MOQ_DT_E4M3;
    case MOQ_ALGO_W8A8_SQ_PER_CHANNEL:
    case MOQ_ALGO_W8A16:
        return MOQ_DT_I8;
    default:
        return MOQ_DT_U8;
    }
}

static moq_dtype scale_dtype(fuzz_input *in, moq_algo algo) {
    static const moq_dtype FLOATS[] = {MOQ_DT_F32, MOQ_DT_BF16, MOQ_DT_F16, MOQ_DT_F32};
    if (algo == MOQ_ALGO_MXFP8 || algo == MOQ_ALGO_MXFP4 || algo == MOQ_ALGO_W4A8_MXFP4_FP8)
        return MOQ_DT_U8;
    return has_fp4(algo) ? MOQ_DT_E4M3 : FLOATS[fuzz_range(in, 0, 3)];
}

/* One in sixteen is any dtype at all. */
static moq_dtype or_any(fuzz_input *in, moq_dtype usual) {
    const int choice = (int)fuzz_range(in, 0, 255);
    return choice < 16 ? (moq_dtype)(1 + choice % (MOQ_DT_COUNT - 1)) : usual;
}

/* Shapes that scales have: of the weight, divided along an axis, with axes of 1, in any rank. */
static extents scale_shape(fuzz_input *in, const extents *weight) {
    static const int64_t DIVISORS[] = {1, 2, 8, 16, 32, 64, 128};
    extents s = *weight;
    const int kind = (int)fuzz_range(in, 0, 7);
    const int axis = weight->ndim > 0 ? (int)fuzz_range(in, 0, weight->ndim - 1) : 0;
    const int64_t divisor = DIVISORS[fuzz_range(in, 0, 6)];
    if (kind == 0 || weight->ndim == 0) {
        s.ndim = (int32_t)fuzz_range(in, 0, 3);
        for (int i = 0; i < s.ndim; i++)
            s.shape[i] = fuzz_range(in, 0, 15) ? 1 : fuzz_range(in, 0, 20);
    } else if (kind < 4) {
        s.shape[axis] = (s.shape[axis] + divisor - 1) / divisor;
        s.shape[s.ndim - 1] *= fuzz_flag(in) ? 2 : 1;
    } else if (kind == 4) {
        for (int i = 0; i < s.ndim; i++)
            s.shape[i] = (s.shape[i] + divisor - 1) / divisor;
    } else if (kind == 5) { /* [rows, 1, columns, 1], perhaps of experts */
        const int first = weight->ndim - 2 > 0 ? weight->ndim - 2 : 0;
        s.ndim = first;
        for (int i = first; i < weight->ndim; i++) {
            s.shape[s.ndim++] = (weight->shape[i] + divisor - 1) / divisor;
            s.shape[s.ndim++] = 1;
        }
    } else if (kind == 6) {
        s.shape[axis] = 1;
    } else {
        s.ndim = axis + 1;
    }
    return s;
}

/* The code of value (e, r, c), by the packing the plan found. */
static double code_at(const moq_dequantize_job *job, const int64_t at[3]) {
    const bool rows = job->kind == MOQ_CODE_E2M1_ROWS || job->kind == MOQ_CODE_INT4_ROWS;
    const bool columns = job->kind == MOQ_CODE_E2M1_COLUMNS;
    const int64_t offset = at[0] * job->code_stride[0] +
                           (rows ? at[1] / 2 : at[1]) * job->code_stride[1] +
                           (columns ? at[2] / 2 : at[2]) * job->code_stride[2];
    const uint8_t byte = ((const uint8_t *)job->codes)[offset];
    const int high = rows ? at[1] % 2 : columns ? at[2] % 2 : 0;
    const int nibble = high ? byte >> 4 : byte & 15;
    switch (job->kind) {
    case MOQ_CODE_E4M3:
        return moq_e4m3_decode(byte);
    case MOQ_CODE_INT8:
        return (int8_t)byte;
    case MOQ_CODE_INT4_ROWS:
        return nibble < 8 ? nibble : nibble - 16;
    default:
        return moq_e2m1_decode((uint8_t)nibble);
    }
}

static double scale_at(const moq_block_scale *s, const int64_t at[3]) {
    int64_t offset = 0;
    float value;
    for (int i = 0; i < 3; i++)
        offset += at[i] / s->block[i] * s->stride[i];
    moq_decode_row(s->dtype, (const char *)s->data + offset * (int64_t)moq_dtype_size(s->dtype), 1,
                   &value);
    return value;
}

/* No code of a 16-bit format next to the one written is nearer to the exact value. */
static void check_rounding(const moq_tensor *out, int64_t i, double exact) {
    const uint16_t code = ((const uint16_t *)out->data)[i];
    const double got = fuzz_element(out, i);
    for (int side = -1; side <= 1; side += 2) {
        const uint16_t next = (uint16_t)(code + side);
        float other;
        moq_decode_row(out->dtype, &next, 1, &other);
        if (isfinite(other) && (next & 0x8000) == (code & 0x8000))
            FUZZ_CHECK(isfinite(got) ? fabs(got - exact) <= fabs((double)other - exact)
                                     : fabs(exact) > fabs((double)other),
                       "%a became %a, %a is nearer", exact, got, (double)other);
    }
}

static void check_values(const moq_dequantize_plan *plan, const moq_tensor *out) {
    const moq_dequantize_job *job = &plan->job;
    for (int64_t i = 0; i < moq_tensor_numel(out); i++) {
        const int64_t n = job->shape[2], m = job->shape[1];
        const int64_t at[3] = {i / n / m, i / n % m, i % n};
        const double first = scale_at(&job->scale[0], at), second = scale_at(&job->scale[1], at);
        const double exact = first == 0 || second == 0 ? 0 : code_at(job, at) * first * second;
        const float got = fuzz_element(out, i);
        if (out->dtype != MOQ_DT_F32 && isfinite(exact))
            check_rounding(out, i, exact);
        else
            FUZZ_CHECK(got == (float)exact || (isnan(got) && isnan(exact)), "%a, expected %a", got,
                       exact);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const moq_dtype OUT[] = {MOQ_DT_F32, MOQ_DT_F32, MOQ_DT_BF16, MOQ_DT_F16};
    fuzz_input in = {data, size};
    moq_algo algo;
    const char *name = algo_name(&in, &algo);
    const bool usual = fuzz_range(&in, 0, 15) > 0;
    extents w = {.ndim = (int32_t)fuzz_range(&in, usual ? 2 : 0, usual ? 3 : 5)};
    for (int i = 0; i < w.ndim; i++)
        w.shape[i] = i + 2 < w.ndim ? fuzz_range(&in, 0, 3) : fuzz_range(&in, 0, 9) * 16;
    if (w.ndim > 0 && fuzz_flag(&in))
        w.shape[w.ndim - 1] = fuzz_range(&in, 0, 150);
    if (w.ndim > 1 && w.shape[w.ndim - 2] * w.shape[w.ndim - 1] > 1024) /* for speed */
        w.shape[w.ndim - 1 - (int)(fuzz_bits(&in, 1) & 1)] = 4;
    fuzz_tensor second = {.memory = NULL};
    const moq_dtype code = or_any(&in, algo == MOQ_ALGO_NONE ? MOQ_DT_U8 : code_dtype(algo));
    fuzz_tensor weight = fuzz_make(&in, code, w.ndim, w.shape, fuzz_range(&in, 0, 3) == 0);
    const moq_dtype kind = or_any(&in, algo == MOQ_ALGO_NONE ? MOQ_DT_U8 : scale_dtype(&in, algo));
    const extents s = scale_shape(&in, &w);
    fuzz_tensor scale = fuzz_make(&in, kind, s.ndim, s.shape, fuzz_range(&in, 0, 3) == 0);
    const bool nvfp4 = algo != MOQ_ALGO_NONE && kind == MOQ_DT_E4M3;
    const bool has_second = fuzz_range(&in, 0, 15) ? nvfp4 : fuzz_flag(&in);
    if (has_second) {
        extents e = {.ndim = (int32_t)fuzz_range(&in, 0, 3), .shape = {1, 1, 1}};
        if (w.ndim == 3 && e.ndim > 0)
            e.shape[0] = w.shape[0];
        if (e.ndim == 2)
            e.shape[1] = fuzz_range(&in, 0, 3);
        const moq_dtype dtype = or_any(&in, MOQ_DT_F32);
        second = fuzz_make(&in, dtype, e.ndim, e.shape, fuzz_flag(&in));
    }
    const int64_t group = fuzz_range(&in, 0, 3) ? 0 : (int64_t)(int16_t)fuzz_bits(&in, 2);
    moq_dequantize_plan plan;
    moq_err err;
    const moq_tensor *given = fuzz_range(&in, 0, 31) ? &scale.view : NULL;
    moq_status status =
        moq_plan_dequantize(name, &weight.view, given, has_second ? &second.view : NULL, group,
                            OUT[fuzz_range(&in, 0, 3)], &plan, &err);
    if (status == MOQ_OK) {
        fuzz_tensor out = fuzz_result(&plan.out, 0xa5);
        status = moq_run_dequantize(&plan, &out.view, &err);
        FUZZ_CHECK(status == MOQ_OK, "%s", err.text);
        check_values(&plan, &out.view);
        fuzz_free(&out);
    } else {
        fuzz_check_error(status, &err);
    }
    fuzz_free(&weight);
    fuzz_free(&scale);
    fuzz_free(&second);
    return 0;
}
