/* Linear kernel for AVX-512 (F, BW, DQ, VL, VBMI), in float32. See cpu/cpu_linear.h.
 *
 * Decoding as for AVX2, twice as wide; the 16 values of e2m1 are a register that a permute indexes,
 * and one multishift spreads 64 nibbles over 64 bytes. 32 registers hold 4 x 6 sums: 24 FMAs for 10
 * loads. Serves what bfloat16 cannot hold: float16 and float32 activations. */
#include "cpu/cpu_linear.h"

#include "core/formats.h"
#include "cpu/store_avx512.h"

#include <immintrin.h>
#include <string.h>

#define unit_t float
#define vec_t  __m512
#define acc_t  __m512
#define STEP   16
#define WIDE   6
#define NARROW 3
#define TALL   8

static inline __m512 acc_zero(void) {
    return _mm512_setzero_ps();
}

static inline __m512 load(const float *p) {
    return _mm512_loadu_ps(p);
}

static inline __m512 muladd(__m512 acc, __m512 a, __m512 b) {
    return _mm512_fmadd_ps(a, b, acc);
}

static inline float reduce(__m512 v) {
    return _mm512_reduce_add_ps(v);
}

#include "cpu/cpu_linear_tile.h"

static void decode_e4m3(const uint8_t *codes, int64_t n, void *out) {
    float *values = out;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)));
        __m512i half = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(wide, 8), 1),
                                        _mm512_set1_epi16((short)0xbfff));
        _mm512_storeu_ps(values + i, _mm512_cvtph_ps(_mm512_castsi512_si256(half)));
        _mm512_storeu_ps(values + i + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)));
    }
    for (; i < n; i++)
        values[i] = moq_e4m3_decode(codes[i]) * 0x1p-8f;
    moq_pad_floats(values, n);
}

static void decode_e2m1(const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t group,
                        void *out) {
    const __m512 table =
        _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m128i shifts = _mm_set1_epi64x(0x1c1814100c080400);
    float *values = out;
    for (int64_t i = 0; i < n; i += 16) { /* n is a multiple of the group, 16 or 32 */
        __m128i dwords = _mm_cvtepu32_epi64(_mm_loadl_epi64((const __m128i *)(codes + i / 2)));
        __m128i nibbles = _mm_multishift_epi64_epi8(shifts, dwords); /* the low four bits count */
        __m512 value = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles), table);
        __m128i half = _mm_cvtsi32_si128((scales[i / group] & 0x7f) << 7);
        __m512 scale = _mm512_broadcastss_ps(_mm_cvtph_ps(half));
        _mm512_storeu_ps(values + i, _mm512_mul_ps(value, scale));
    }
    moq_pad_floats(values, n);
}

static void convert(const float *row, int64_t padded, moq_order order, void *out) {
    (void)order;
    memcpy(out, row, (size_t)padded * sizeof *row);
}

const moq_linear_tiles moq_linear_avx512 = {
    .name = "avx512",
    .isa = MOQ_ISA_AVX512,
    .unit = sizeof(float),
    .e4m3_unit = 0x1p8f,
    .e2m1_unit = 0x1p8f,
    .pad_rows = 1,
    .tile_columns = 512,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .multiply = multiply,
    .add_scaled = add_scaled_avx512,
    .store = store_avx512,
    .speed = {.decode = 1.5e-10, .few = 1.5e-10, .product = 1.3e-11},
};
