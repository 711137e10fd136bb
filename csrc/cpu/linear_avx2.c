/* Linear kernel for AVX2 with FMA and F16C, in float32. See cpu/linear.h.
 *
 * e4m3 shifted by seven bits is a float16 of 2^-8 times the value, subnormals included, so the
 * float16 conversion decodes it; e2m1 codes index a table of doubled values in a byte shuffle. Both
 * powers of two are left to the row's factor.
 * 16 registers hold 4 x 3 sums: 12 FMAs for 7 loads. Decoding takes about 0.6 instructions a weight
 * for e4m3 and 0.8 for e2m1; a single row of x is bound by memory from about two cores on. */
#include "cpu/linear.h"

#include "core/formats.h"

#include <immintrin.h>
#include <string.h>

#define unit_t float
#define vec_t  __m256
#define acc_t  __m256
#define STEP   8
#define WIDE   3
#define NARROW 2
#define TALL   8

static inline __m256 acc_zero(void) {
    return _mm256_setzero_ps();
}

static inline __m256 load(const float *p) {
    return _mm256_loadu_ps(p);
}

static inline __m256 muladd(__m256 acc, __m256 a, __m256 b) {
    return _mm256_fmadd_ps(a, b, acc);
}

static inline float reduce(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

#include "cpu/linear_tile.h"

static void decode_e4m3(const uint8_t *codes, int64_t n, void *out) {
    float *values = out;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + i)));
        __m256i half = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1),
                                        _mm256_set1_epi16((short)0xbfff));
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm256_castsi256_si128(half)));
        _mm256_storeu_ps(values + i + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
    }
    for (; i < n; i++)
        values[i] = moq_e4m3_decode(codes[i]) * 0x1p-8f;
    moq_pad_floats(values, n);
}

static inline void store_scaled(float *out, __m128i doubled, __m256 scale) {
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(doubled));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(doubled, 8)));
    _mm256_storeu_ps(out, _mm256_mul_ps(low, scale));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(high, scale));
}

static void decode_e2m1(const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t group,
                        void *out) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(15);
    float *values = out;
    for (int64_t i = 0; i < n; i += 16) { /* n is a multiple of the group, 16 or 32 */
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i / 2));
        __m128i even = _mm_and_si128(bytes, nibble);
        __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
        __m128i doubled = _mm_shuffle_epi8(table, _mm_unpacklo_epi8(even, odd));
        __m128i half = _mm_cvtsi32_si128((scales[i / group] & 0x7f) << 7);
        __m256 scale = _mm256_broadcastss_ps(_mm_cvtph_ps(half));
        store_scaled(values + i, doubled, scale);
    }
    moq_pad_floats(values, n);
}

static void convert(const float *row, int64_t padded, moq_order order, void *out) {
    (void)order;
    memcpy(out, row, (size_t)padded * sizeof *row);
}

const moq_linear_tiles moq_linear_avx2 = {
    .name = "avx2",
    .isa = MOQ_ISA_AVX2,
    .unit = sizeof(float),
    .e4m3_unit = 0x1p8f,
    .e2m1_unit = 0x1p7f,
    .pad_rows = 1,
    .tile_columns = 512,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .multiply = multiply,
};
