/* Row kernels for AVX-512 (F, BW, DQ, VL): see cpu_convert.h. */
#ifdef __AVX512BW__
#include <immintrin.h>

#define LANES         16
#define KERNELS       moq_row_kernels_avx512
#define V(op)         _mm512_##op
#define V_BITS(op)    _mm512_##op##_si512
#define BITS(x)       _mm512_castps_si512(x)
#define FLOATS(x)     _mm512_castsi512_ps(x)
#define HALF(op)      _mm256_##op
#define HALF_LOAD     _mm256_loadu_si256
#define HALF_STORE    _mm256_storeu_si256
#define HALF_OR       _mm256_or_si256
#define HALF_AND      _mm256_and_si256
#define QUARTER(p)    _mm_loadu_si128((const __m128i *)(p))
#define LOWER(v)      _mm512_castsi512_si256(v)
#define UPPER(v)      _mm512_extracti64x4_epi64(v, 1)
#define BROADCAST_128 _mm512_broadcast_i32x4

typedef __m512 vec_f;
typedef __m512i vec_i;
typedef __m256i half_i;

/* a > b ? yes : no, signed. */
static inline vec_i where_greater(vec_i a, vec_i b, vec_i yes, vec_i no) {
    return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, b), no, yes);
}

/* x + (a > b) */
static inline vec_i count_greater(vec_i x, vec_i a, vec_i b) {
    return _mm512_mask_add_epi32(x, _mm512_cmpgt_epi32_mask(a, b), x, _mm512_set1_epi32(1));
}

static inline vec_i add_where_equal_16(vec_i x, vec_i a, vec_i b, vec_i more) {
    return _mm512_mask_add_epi16(x, _mm512_cmpeq_epi16_mask(a, b), x, more);
}

static inline int any_nan(vec_f x) {
    return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
}

/* In-lane packing of four vectors to bytes leaves 4-byte pieces of a, b, c, d side by side. */
static inline vec_i order_bytes(vec_i v) {
    vec_i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, v);
}

/* In-lane packing of two vectors to words leaves 8-byte pieces of a and b side by side. */
static inline vec_i order_words(vec_i v) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
}

/* The low bytes of words that hold no more. */
static inline half_i narrow_words(vec_i v) {
    return _mm512_cvtepi16_epi8(v);
}

static inline __m128i fold_max_16(vec_i v) {
    __m256i half = _mm256_max_epu16(LOWER(v), UPPER(v));
    return _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

static inline __m128i fold_max_32(vec_i v) {
    __m256i half = _mm256_max_epu32(LOWER(v), UPPER(v));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

#include "cpu/cpu_convert_vector.h"
#endif
