/* Row kernels for AVX2 with F16C: see cpu_convert.h. */
#ifdef __AVX2__
#include <immintrin.h>

#define LANES         8
#define KERNELS       moq_row_kernels_avx2
#define V(op)         _mm256_##op
#define V_BITS(op)    _mm256_##op##_si256
#define BITS(x)       _mm256_castps_si256(x)
#define FLOATS(x)     _mm256_castsi256_ps(x)
#define HALF(op)      _mm_##op
#define HALF_LOAD     _mm_loadu_si128
#define HALF_STORE    _mm_storeu_si128
#define HALF_OR       _mm_or_si128
#define HALF_AND      _mm_and_si128
#define QUARTER(p)    _mm_loadl_epi64((const __m128i *)(p))
#define LOWER(v)      _mm256_castsi256_si128(v)
#define UPPER(v)      _mm256_extracti128_si256(v, 1)
#define BROADCAST_128 _mm256_broadcastsi128_si256

typedef __m256 vec_f;
typedef __m256i vec_i;
typedef __m128i half_i;

/* a > b ? yes : no, signed. */
static inline vec_i where_greater(vec_i a, vec_i b, vec_i yes, vec_i no) {
    return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b));
}

/* x + (a > b) */
static inline vec_i count_greater(vec_i x, vec_i a, vec_i b) {
    return _mm256_sub_epi32(x, _mm256_cmpgt_epi32(a, b));
}

static inline vec_i add_where_equal_16(vec_i x, vec_i a, vec_i b, vec_i more) {
    return _mm256_add_epi16(x, _mm256_and_si256(_mm256_cmpeq_epi16(a, b), more));
}

static inline int any_nan(vec_f x) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* In-lane packing of four vectors to bytes leaves 4-byte pieces of a, b, c, d side by side. */
static inline vec_i order_bytes(vec_i v) {
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* In-lane packing of two vectors to words leaves 8-byte pieces of a and b side by side. */
static inline vec_i order_words(vec_i v) {
    return _mm256_permute4x64_epi64(v, 0xd8);
}

/* The low bytes of words that hold no more. */
static inline half_i narrow_words(vec_i v) {
    return _mm_packus_epi16(LOWER(v), UPPER(v));
}

static inline __m128i fold_max_16(vec_i v) {
    return _mm_max_epu16(LOWER(v), UPPER(v));
}

static inline __m128i fold_max_32(vec_i v) {
    return _mm_max_epu32(LOWER(v), UPPER(v));
}

#include "cpu/cpu_convert_vector.h"
#endif
