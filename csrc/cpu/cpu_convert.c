/* The portable row kernels, and the choice of a level: see cpu_convert.h. Values pass through
 * float32 a piece at a time, by the definitions of core/formats.h. */
#include "cpu/cpu_convert.h"

#include "core/formats.h"
#include "cpu/isa.h"
#include "cpu/scale_row.h"

#include <math.h>
#include <string.h>

/* Values that pass through the stack at once; whole groups of NVFP4. */
#define PIECE 512

static void decode_int8(const int8_t *src, int64_t n, float *dst) {
    for (int64_t i = 0; i < n; i++)
        dst[i] = src[i];
}

static void decode_int4(const uint8_t *src, int shift, int64_t n, float *dst) {
    for (int64_t i = 0; i < n; i++)
        dst[i] = (float)((((src[i] >> shift) & 15) ^ 8) - 8);
}

static void multiply_groups(float *values, int64_t n, int64_t group, const float *factors) {
    for (int64_t i = 0; i < n; i++)
        values[i] *= factors[i / group];
}

static float amax_of_floats(const float *x, int64_t n) {
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(x[i]))
            return NAN;
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    }
    return largest;
}

static float amax_of_row(moq_dtype dtype, const char *src, int64_t n) {
    float values[PIECE], largest = 0.0f;
    for (int64_t at = 0, count; at < n; at += count) {
        count = n - at < PIECE ? n - at : PIECE;
        moq_decode_row(dtype, src + (size_t)at * moq_dtype_size(dtype), count, values);
        float most = amax_of_floats(values, count);
        largest = most <= largest ? largest : most;
        if (isnan(largest))
            break;
    }
    return largest;
}

static void amax(moq_dtype dtype, const void *src, int64_t n, int64_t group, float *most) {
    for (int64_t at = 0; at < n; at += group)
        *most++ = amax_of_row(dtype, (const char *)src + (size_t)at * moq_dtype_size(dtype),
                              n - at < group ? n - at : group);
}

static float multiply(float x, float factor) {
    return x * factor;
}

static float divide(float x, float scale) {
    return x / scale;
}

/* codes = e4m3(combine(x, y)) */
static inline void encode_combined(moq_dtype dtype, const char *src, int64_t n,
                                   float (*combine)(float, float), float y, uint8_t *codes) {
    float values[PIECE];
    if (isnan(y)) {
        memset(codes, 0x7f, (size_t)n);
        return;
    }
    for (int64_t at = 0, count; at < n; at += count) {
        count = n - at < PIECE ? n - at : PIECE;
        moq_decode_row(dtype, src + (size_t)at * moq_dtype_size(dtype), count, values);
        for (int64_t i = 0; i < count; i++)
            values[i] = combine(values[i], y);
        moq_encode_row(MOQ_DT_E4M3, values, count, codes + at);
    }
}

static void multiply_e4m3(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes) {
    encode_combined(dtype, src, n, multiply, factor, codes);
}

static void divide_e4m3(moq_dtype dtype, const void *src, int64_t n, int64_t group,
                        const float *scales, uint8_t *codes) {
    for (int64_t at = 0; at < n; at += group)
        encode_combined(dtype, (const char *)src + (size_t)at * moq_dtype_size(dtype),
                        n - at < group ? n - at : group, divide, *scales++, codes + at);
}

/* Divides the values of one group by its step; returns the block scale. */
static uint8_t scale_group(float *x, float scale_2) {
    float largest = MOQ_E2M1_MAX * scale_2;
    uint8_t block_scale = moq_e4m3_encode(amax_of_floats(x, MOQ_NVFP4_GROUP) / largest);
    float step = moq_e4m3_decode(block_scale) * scale_2;
    for (int i = 0; i < MOQ_NVFP4_GROUP; i++)
        x[i] = step == 0.0f ? 0.0f : x[i] / step;
    return block_scale;
}

static void nvfp4(moq_dtype dtype, const void *src, int64_t n, float scale_2, uint8_t *packed,
                  uint8_t *block_scales) {
    const char *from = src;
    float values[PIECE];
    while (n > 0) {
        int64_t count = n < PIECE ? n : PIECE;
        moq_decode_row(dtype, from, count, values);
        for (int64_t at = 0; at < count; at += MOQ_NVFP4_GROUP)
            *block_scales++ = scale_group(values + at, scale_2);
        moq_encode_row(MOQ_DT_E2M1X2, values, count, packed);
        from += (size_t)count * moq_dtype_size(dtype);
        packed += count / 2;
        n -= count;
    }
}

const moq_row_kernels moq_row_kernels_portable = {
    moq_decode_row, moq_encode_row, decode_int8,   decode_int4, multiply_groups,
    scale,          amax,           multiply_e4m3, divide_e4m3, nvfp4,
};

const moq_row_kernels *moq_cpu_row_kernels(void) {
#ifdef __x86_64__
    moq_isa isa = moq_cpu_isa();
    if (isa >= MOQ_ISA_AVX512)
        return &moq_row_kernels_avx512;
    if (isa >= MOQ_ISA_AVX2)
        return &moq_row_kernels_avx2;
#endif
    return &moq_row_kernels_portable;
}

void moq_round_row(moq_dtype dtype, float *values, int64_t n) {
    const moq_row_kernels *kernels = moq_cpu_row_kernels();
    uint16_t codes[PIECE];
    if (dtype == MOQ_DT_F32)
        return;
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t count = n - at < PIECE ? n - at : PIECE;
        kernels->encode(dtype, values + at, count, codes);
        kernels->decode(dtype, codes, count, values + at);
    }
}
