/* The portable row kernels, and the choice of a level: see convert.h. Values pass through float32
 * a piece at a time, by the definitions of core/formats.h. */
#include "cpu/convert.h"

#include "core/formats.h"
#include "cpu/isa.h"

#include <math.h>

/* Values that pass through the stack at once; whole groups of NVFP4. */
#define PIECE 512

static float amax(moq_dtype dtype, const void *src, int64_t n) {
    const char *from = src;
    float values[PIECE], largest = 0.0f;
    while (n > 0) {
        int64_t count = n < PIECE ? n : PIECE;
        moq_decode_row(dtype, from, count, values);
        for (int64_t i = 0; i < count; i++) {
            if (isnan(values[i]))
                return NAN;
            largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
        }
        from += (size_t)count * moq_dtype_size(dtype);
        n -= count;
    }
    return largest;
}

static void multiply_e4m3(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes) {
    const char *from = src;
    float values[PIECE];
    while (n > 0) {
        int64_t count = n < PIECE ? n : PIECE;
        moq_decode_row(dtype, from, count, values);
        for (int64_t i = 0; i < count; i++)
            values[i] *= factor;
        moq_encode_row(MOQ_DT_E4M3, values, count, codes);
        from += (size_t)count * moq_dtype_size(dtype);
        codes += count;
        n -= count;
    }
}

static void divide_e4m3(moq_dtype dtype, const void *src, int64_t n, float scale, uint8_t *codes) {
    const char *from = src;
    float values[PIECE];
    while (n > 0) {
        int64_t count = n < PIECE ? n : PIECE;
        moq_decode_row(dtype, from, count, values);
        for (int64_t i = 0; i < count; i++)
            values[i] /= scale;
        moq_encode_row(MOQ_DT_E4M3, values, count, codes);
        from += (size_t)count * moq_dtype_size(dtype);
        codes += count;
        n -= count;
    }
}

/* Divides the values of one group by its step; returns the block scale. */
static uint8_t scale_group(float *x, float scale_2) {
    float largest = MOQ_E2M1_MAX * scale_2;
    uint8_t block_scale = moq_e4m3_encode(amax(MOQ_DT_F32, x, MOQ_NVFP4_GROUP) / largest);
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
    moq_decode_row, moq_encode_row, amax, multiply_e4m3, divide_e4m3, nvfp4,
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
