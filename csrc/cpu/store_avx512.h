/* Sums scaled, and sums to outputs with AVX-512: the end of every tile of the kernels at that
 * level. Include it only from files compiled for AVX-512. See moq_store in cpu/cpu_linear.h. */
#ifndef MOQ_CPU_STORE_AVX512_H
#define MOQ_CPU_STORE_AVX512_H

#include "cpu/cpu_linear.h"

#include <immintrin.h>

static inline void add_scaled_avx512(const moq_scaled *s) {
    const __m512 scale = _mm512_set1_ps(s->scale);
    for (int64_t m = 0; m < s->m; m += 16) {
        __mmask16 mask = s->m - m >= 16 ? 0xffff : (__mmask16)((1u << (s->m - m)) - 1);
        __m512 factor = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, s->scales + m), scale);
        for (int64_t n = 0; n < s->rows; n++) {
            float *sums = s->sums + n * s->stride + m;
            __m512 part = _mm512_maskz_loadu_ps(mask, s->part + n * s->stride + m);
            __m512 sum = _mm512_maskz_loadu_ps(mask, sums);
            _mm512_mask_storeu_ps(sums, mask, _mm512_fmadd_ps(part, factor, sum));
        }
    }
}

/* Lane i of r[4 j + n] becomes lane j of r[4 i + n]. */
static inline void transpose_quarters(__m512 *r) {
    __m512 t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* 16 rows of 16 become 16 columns: pairs of floats, pairs of pairs, then the 4 x 4 quarters. */
static inline void transpose_16x16(__m512 *r) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    transpose_quarters(r);
}

/* 16 floats to bfloat16 bits, to nearest even; a NaN becomes the quiet one of its upper half. */
static inline __m256i bf16_of(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

static inline void put(const moq_store *s, int64_t m, int64_t n, __mmask16 mask, __m512 value) {
    char *row = s->row[m];
    if (s->dtype == MOQ_DT_BF16)
        _mm256_mask_storeu_epi16((uint16_t *)row + n, mask, bf16_of(value));
    else if (s->dtype == MOQ_DT_F16)
        _mm256_mask_storeu_epi16((uint16_t *)row + n, mask, _mm512_cvtps_ph(value, 0));
    else
        _mm512_mask_storeu_ps((float *)row + n, mask, value);
}

static inline void store_avx512(const moq_store *s) {
    for (int64_t n = 0; n < s->rows; n += 16) {
        __mmask16 mask = s->rows - n >= 16 ? 0xffff : (__mmask16)((1u << (s->rows - n)) - 1);
        __m512 factor = _mm512_maskz_loadu_ps(mask, s->factor + n);
        __m512 bias = _mm512_maskz_loadu_ps(mask, s->bias + n);
        for (int64_t m = 0; m < s->m; m += 16) {
            int64_t count = s->m - m < 16 ? s->m - m : 16;
            __mmask16 columns = (__mmask16)((1u << count) - 1);
            __m512 tile[16];
            for (int64_t i = 0; i < 16; i++)
                tile[i] =
                    n + i < s->rows
                        ? _mm512_maskz_loadu_ps(columns, s->sums + (n + i) * s->sums_stride + m)
                        : _mm512_setzero_ps();
            transpose_16x16(tile);
            for (int64_t j = 0; j < count; j++) {
                __m512 scale = _mm512_mul_ps(factor, _mm512_set1_ps(s->row_factor[m + j]));
                put(s, m + j, n, mask, _mm512_add_ps(_mm512_mul_ps(tile[j], scale), bias));
            }
        }
    }
}

#endif
