/* Quantization of activations on the CPU: see cpu_quantize.h. Values go from the tensor to codes in
 * one step; where they are not next to each other, a piece at a time is gathered first. */
#include "cpu/cpu_quantize.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cpu/threads.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

/* Values gathered at once; whole groups of NVFP4. */
#define PIECE 512
/* Values next to each other that are taken at once: a row may be as long as a tensor. */
#define LONG_PIECE 65536
/* Values of a unit of work where rows can be cut; a member's share of a team at least; and what a
 * value takes, roughly: 0.2 with vectors, 2 and more without. */
#define SPAN         4096
#define THREAD_SHARE 8192
#define NANOSECONDS  0.5

/* The larger of a and b; a when it is NaN, which fmaxf would drop. */
static float at_least(float a, float b) {
    return a < b ? b : a;
}

float moq_fp8_dynamic_scale(float amax) {
    float scale = amax / MOQ_E4M3_MAX;
    return scale < FLT_MIN ? 1.0f : scale;
}

float moq_nvfp4_dynamic_scale(float amax) {
    float scale = amax / MOQ_NVFP4_MAX;
    return scale == 0.0f ? 1.0f : scale;
}

/* ----------------------------------------------------------------------- values a stride apart */

typedef struct {
    const moq_row_kernels *kernels;
    const char *data;
    int64_t stride;
    moq_dtype dtype;
} source;

static source from_floats(const float *x) {
    return (source){moq_cpu_row_kernels(), (const char *)x, 1, MOQ_DT_F32};
}

/* Finds the next at most n values and returns how many; `buffer` has room for PIECE. */
static int64_t take(source *s, int64_t n, float *buffer, const void **piece) {
    int64_t size = (int64_t)moq_dtype_size(s->dtype), most = s->stride == 1 ? LONG_PIECE : PIECE;
    n = n < most ? n : most;
    *piece = s->data;
    if (s->stride != 1) {
        moq_gather(s->data, s->stride, (size_t)size, n, buffer);
        *piece = buffer;
    }
    s->data += n * s->stride * size;
    return n;
}

static float amax_of(source s, int64_t n) {
    float buffer[PIECE], amax = 0.0f, most;
    const void *piece;
    moq_pace pace = {0};
    while (n > 0) {
        int64_t count = take(&s, n, buffer, &piece);
        if (moq_stops(&pace, count))
            break;
        s.kernels->amax(s.dtype, piece, count, count, &most);
        amax = most <= amax || isnan(amax) ? amax : most;
        n -= count;
    }
    return amax;
}

static void multiply(source s, int64_t n, float factor, uint8_t *codes) {
    float buffer[PIECE];
    const void *piece;
    while (n > 0) {
        int64_t count = take(&s, n, buffer, &piece);
        s.kernels->multiply_e4m3(s.dtype, piece, count, factor, codes);
        codes += count;
        n -= count;
    }
}

static void divide(source s, int64_t n, float scale, uint8_t *codes) {
    float buffer[PIECE];
    const void *piece;
    moq_pace pace = {0};
    while (n > 0) {
        int64_t count = take(&s, n, buffer, &piece);
        if (moq_stops(&pace, count))
            break;
        s.kernels->divide_e4m3(s.dtype, piece, count, count, &scale, codes);
        codes += count;
        n -= count;
    }
}

static float quantize_token(source s, int64_t n, uint8_t *codes) {
    float scale = at_least(amax_of(s, n) / MOQ_E4M3_MAX, MOQ_FP8_TOKEN_MIN_SCALE);
    divide(s, n, scale, codes);
    return scale;
}

static float group_scale(float amax) {
    return at_least(amax, MOQ_FP8_GROUP_MIN_AMAX) / MOQ_E4M3_MAX;
}

static void quantize_groups(source s, int64_t n, int64_t group, uint8_t *codes, float *scales) {
    int64_t groups = n / group + (n % group != 0), size = (int64_t)moq_dtype_size(s.dtype);
    if (s.stride == 1 && group <= LONG_PIECE) {
        s.kernels->amax(s.dtype, s.data, n, group, scales);
        for (int64_t g = 0; g < groups; g++)
            scales[g] = group_scale(scales[g]);
        s.kernels->divide_e4m3(s.dtype, s.data, n, group, scales, codes);
        return;
    }
    for (int64_t g = 0; g < groups; g++) {
        int64_t length = n < group ? n : group;
        scales[g] = group_scale(amax_of(s, length));
        divide(s, length, scales[g], codes + g * group);
        s.data += group * s.stride * size;
        n -= group;
    }
}

static void quantize_nvfp4(source s, int64_t n, float scale_2, uint8_t *packed,
                           uint8_t *block_scales) {
    float buffer[PIECE];
    const void *piece;
    while (n > 0) {
        int64_t count = take(&s, n, buffer, &piece);
        s.kernels->nvfp4(s.dtype, piece, count, scale_2, packed, block_scales);
        packed += count / 2;
        block_scales += count / MOQ_NVFP4_GROUP;
        n -= count;
    }
}

void moq_quantize_row_fp8_static(const float *x, int64_t n, float inverse, uint8_t *codes) {
    multiply(from_floats(x), n, inverse, codes);
}

float moq_quantize_row_fp8_token(const float *x, int64_t n, uint8_t *codes) {
    return quantize_token(from_floats(x), n, codes);
}

void moq_quantize_row_fp8_group(const float *x, int64_t n, int64_t group, uint8_t *codes,
                                float *scales) {
    quantize_groups(from_floats(x), n, group, codes, scales);
}

void moq_quantize_row_nvfp4(const float *x, int64_t n, float scale_2, uint8_t *packed,
                            uint8_t *block_scales) {
    quantize_nvfp4(from_floats(x), n, scale_2, packed, block_scales);
}

/* -------------------------------------------------------------------------------- whole tensors */

/* A tensor cut into spans of a row, in row-major order, and what is made of them. */
typedef struct {
    const moq_row_kernels *kernels;
    moq_tensor x;
    int64_t length;  /* of a row */
    int64_t span;    /* values of a span; the last one of a row may be shorter */
    int64_t per_row; /* spans */
    int64_t group;
    float scale;
    uint8_t *codes;
    void *scales;
    atomic_uint amax; /* its bits, which are in the order of the magnitudes, NaN at the end */
} job;

typedef struct {
    source values;
    int64_t row, at, n;
} span;

/* A tensor whose rows can be cut at multiples of `group`. Without gaps and with whole groups in its
 * rows, it is as good as one long row. */
static job cut(const moq_tensor *x, int64_t group) {
    job j = {.kernels = moq_cpu_row_kernels(), .x = *x, .group = group};
    j.length = moq_row_length(x);
    if (moq_tensor_is_contiguous(x) && j.length % group == 0) {
        j.length = moq_tensor_numel(x);
        j.x.ndim = 1;
        j.x.shape[0] = j.length;
        j.x.stride[0] = 1;
    }
    j.span = group < SPAN ? SPAN / group * group : group;
    j.per_row = j.length / j.span + (j.length % j.span != 0);
    return j;
}

static span span_at(const job *j, int64_t index) {
    const moq_tensor *x = &j->x;
    int64_t stride = x->ndim > 0 ? x->stride[x->ndim - 1] : 1;
    span s = {.row = index / j->per_row, .at = index % j->per_row * j->span};
    int64_t offset = moq_row_offset(x, s.row) + s.at * stride;
    s.n = j->length - s.at < j->span ? j->length - s.at : j->span;
    s.values =
        (source){j->kernels, (const char *)x->data + offset * (int64_t)moq_dtype_size(x->dtype),
                 stride, x->dtype};
    return s;
}

static void run(job *j, moq_work work) {
    int64_t span = j->span > 0 ? j->span : 1; /* rows without values have an amax all the same */
    moq_shares shares = {.count = moq_row_count(&j->x) * j->per_row,
                         .grain = span < THREAD_SHARE ? THREAD_SHARE / span : 1,
                         .nanoseconds = NANOSECONDS * (double)moq_tensor_numel(&j->x)};
    moq_parallel_for(&shares, work, j);
}

static void amax_work(void *context, int64_t begin, int64_t end) {
    job *j = context;
    unsigned most = 0, bits;
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, j->span); i++) {
        span s = span_at(j, i);
        float amax = amax_of(s.values, s.n);
        memcpy(&bits, &amax, sizeof bits);
        most = bits > most ? bits : most;
    }
    bits = atomic_load(&j->amax);
    while (bits < most && !atomic_compare_exchange_weak(&j->amax, &bits, most)) {
    }
}

float moq_cpu_amax(const moq_tensor *x) {
    job j = cut(x, 1);
    float amax;
    run(&j, amax_work);
    unsigned bits = atomic_load(&j.amax);
    memcpy(&amax, &bits, sizeof amax);
    return amax;
}

static void tensor_work(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, j->span); i++) {
        span s = span_at(j, i);
        multiply(s.values, s.n, 1.0f / j->scale, j->codes + s.row * j->length + s.at);
    }
}

void moq_cpu_quantize_fp8_tensor(const moq_tensor *x, float scale, uint8_t *codes) {
    job j = cut(x, 1);
    j.scale = scale;
    j.codes = codes;
    run(&j, tensor_work);
}

static void token_work(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, j->span); i++) {
        span s = span_at(j, i);
        ((float *)j->scales)[i] = quantize_token(s.values, s.n, j->codes + i * j->length);
    }
}

void moq_cpu_quantize_fp8_token(const moq_tensor *x, uint8_t *codes, float *scales) {
    int64_t length = moq_row_length(x);
    job j = {.kernels = moq_cpu_row_kernels(),
             .x = *x,
             .length = length,
             .span = length,
             .per_row = 1,
             .codes = codes,
             .scales = scales};
    run(&j, token_work);
}

static void group_work(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    int64_t groups = j->length / j->group + (j->length % j->group != 0);
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, j->span); i++) {
        span s = span_at(j, i);
        quantize_groups(s.values, s.n, j->group, j->codes + s.row * j->length + s.at,
                        (float *)j->scales + s.row * groups + s.at / j->group);
    }
}

void moq_cpu_quantize_fp8_group(const moq_tensor *x, int64_t group, uint8_t *codes, float *scales) {
    job j = cut(x, group);
    j.codes = codes;
    j.scales = scales;
    run(&j, group_work);
}

static void nvfp4_work(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, j->span); i++) {
        span s = span_at(j, i);
        int64_t at = s.row * j->length + s.at;
        quantize_nvfp4(s.values, s.n, j->scale, j->codes + at / 2,
                       (uint8_t *)j->scales + at / MOQ_NVFP4_GROUP);
    }
}

void moq_cpu_quantize_nvfp4(const moq_tensor *x, float scale_2, uint8_t *packed,
                            uint8_t *block_scales) {
    job j = cut(x, MOQ_NVFP4_GROUP);
    j.scale = scale_2;
    j.codes = packed;
    j.scales = block_scales;
    run(&j, nvfp4_work);
}

/* ---- int8 ---- */

float moq_int8_scale(const float *row, int64_t n) {
    float amax;
    moq_cpu_row_kernels()->amax(MOQ_DT_F32, row, n, n, &amax);
    float scale = amax / MOQ_INT8_MAX;
    return scale < FLT_MIN ? 1.0f : scale;
}

void moq_round_row_int8(float *row, int64_t n, float inverse) {
    for (int64_t i = 0; i < n; i++) {
        float value = rintf(row[i] * inverse);
        row[i] = value > 127 ? 127 : value < -128 ? -128 : value;
    }
}
