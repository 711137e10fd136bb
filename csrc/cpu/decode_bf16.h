/* Weights and activations as bfloat16 with AVX-512: what the two bfloat16 kernels share. Include it
 * only from files compiled for AVX512-BF16.
 *
 * e4m3 has 4 significant bits and e2m1 times e4m3 at most 6, so bfloat16's 8 hold both exactly. The
 * order of the columns is whatever decodes fastest, the same for weights and activations:
 *   e4m3, of each 64: eights 0 2 4 6, then 1 3 5 7 (bytes interleave within 16-byte lanes);
 *   e2m1, of each 16: the even columns, then the odd ones (low nibbles, high nibbles);
 *   a few rows of x with e2m1, of each 64: the even columns, then the odd ones. */
#ifndef MOQ_CPU_DECODE_BF16_H
#define MOQ_CPU_DECODE_BF16_H

#include "core/linear.h"

#include <immintrin.h>

/* bfloat16 of the e4m3 code i without sign: normal numbers change bias, the subnormals m 2^-9 are
 * written out. */
#define BF16_OF_E4M3(i)                                                                            \
    ((i) > 7    ? ((i) << 4) + 0x3c00                                                              \
     : (i) == 0 ? 0                                                                                \
     : (i) < 4  ? 0x3ac0 + ((i) << 6) + ((i) == 1 ? 0 : 0x40)                                      \
                : 0x3b80 + ((i) << 5))
#define BYTE_OF(i, shift) (char)(BF16_OF_E4M3(i) >> (shift))
#define BYTES_8(i, shift)                                                                          \
    BYTE_OF(i, shift), BYTE_OF((i) + 1, shift), BYTE_OF((i) + 2, shift), BYTE_OF((i) + 3, shift),  \
        BYTE_OF((i) + 4, shift), BYTE_OF((i) + 5, shift), BYTE_OF((i) + 6, shift),                 \
        BYTE_OF((i) + 7, shift)
#define BYTES_64(i, shift)                                                                         \
    BYTES_8(i, shift), BYTES_8((i) + 8, shift), BYTES_8((i) + 16, shift),                          \
        BYTES_8((i) + 24, shift), BYTES_8((i) + 32, shift), BYTES_8((i) + 40, shift),              \
        BYTES_8((i) + 48, shift), BYTES_8((i) + 56, shift)

static const char E4M3_LOW[128] = {BYTES_64(0, 0), BYTES_64(64, 0)};
static const char E4M3_HIGH[128] = {BYTES_64(0, 8), BYTES_64(64, 8)};

typedef struct {
    __m512i low[2], high[2];
} e4m3_tables;

static inline e4m3_tables load_e4m3_tables(void) {
    return (e4m3_tables){{_mm512_loadu_si512(E4M3_LOW), _mm512_loadu_si512(E4M3_LOW + 64)},
                         {_mm512_loadu_si512(E4M3_HIGH), _mm512_loadu_si512(E4M3_HIGH + 64)}};
}

/* 64 codes to two vectors of bfloat16. */
static inline void decode_64(const e4m3_tables *t, __m512i code, __m512i *first, __m512i *second) {
    __m512i low = _mm512_permutex2var_epi8(t->low[0], code, t->low[1]);
    __m512i high = _mm512_permutex2var_epi8(t->high[0], code, t->high[1]);
    /* high | (code & 0x80) */
    high = _mm512_ternarylogic_epi64(high, code, _mm512_set1_epi8((char)0x80), 0xf8);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

static inline __m512i load_codes(const uint8_t *codes, int64_t left) {
    if (left >= 64)
        return _mm512_loadu_si512(codes);
    return _mm512_maskz_loadu_epi8(_cvtu64_mask64(~0ull >> (64 - left)), codes);
}

static inline void decode_e4m3(const uint8_t *codes, int64_t n, void *out) {
    const e4m3_tables tables = load_e4m3_tables();
    uint16_t *values = out;
    for (int64_t i = 0; i < n; i += 64) {
        __m512i first, second;
        decode_64(&tables, load_codes(codes + i, n - i), &first, &second);
        _mm512_storeu_si512(values + i, first);
        _mm512_storeu_si512(values + i + 32, second);
    }
}

/* 2^8 times 16 block scales as float32; only `mask` of them are read. */
static inline __m512 scales_of(const uint8_t *scales, __mmask16 mask) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, scales));
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7));
}

/* The 16 values of e2m1, twice: the low four bits of a word index it. */
static inline __m512i e2m1_table(void) {
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
        (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
}

/* 16 bytes, of two groups: 32 words that hold a code each in the order of the columns, in their low
 * four bits. */
static inline __m512i spread_nibbles(__m128i bytes) {
    /* Byte i of a group in words i and i + 8 of its half; what lies above it does not count. */
    const __m512i places =
        _mm512_set_epi8(0, 15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 15, 0, 14, 0, 13,
                        0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1,
                        0, 0, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0);
    const __m512i shifts = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0,
                                             0x0004000400040004, 0x0004000400040004);
    return _mm512_srlv_epi16(_mm512_permutexvar_epi8(places, _mm512_castsi128_si512(bytes)),
                             shifts);
}

/* A mask of the groups, of 16, or of the bytes, of 8 of each of 2 groups, that lie before the end.
 */
static inline __mmask16 first_of(int64_t count) {
    return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
}

/* Reads the scales of `groups` groups, of 16, from `scales`, where every `repeat` groups share one.
 */
static inline __m512 group_scales(const uint8_t *scales, int64_t first, int64_t groups,
                                  int64_t repeat) {
    if (repeat == 1)
        return scales_of(scales + first, first_of(groups - first));
    const __m512i halves = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512 values = scales_of(scales + first / 2, first_of((groups - first + 1) / 2) & 0xff);
    return _mm512_permutexvar_ps(halves, values);
}

/* 16 block scales s as pairs of bfloat16, s / 2 and 3 s / 4, in the unit of scales_of: every e2m1
 * value is one of the two times a power of two. */
static inline __m512i halves_of(__m512 scales) {
    __m512i half = _mm512_castps_si512(_mm512_mul_ps(scales, _mm512_set1_ps(0.5f)));
    __m512i more = _mm512_castps_si512(_mm512_mul_ps(scales, _mm512_set1_ps(0.75f)));
    /* (half >> 16) | (more & 0xffff0000) */
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(half, 16), more,
                                     _mm512_set1_epi32((int)0xffff0000), 0xf8);
}

#define EIGHT_TWICE(a, b, c, d, e, f, g, h, s)                                                     \
    h + s, g + s, f + s, e + s, d + s, c + s, b + s, a + s, h, g, f, e, d, c, b, a

/* 32 codes of two groups, the pairs p and p + 1 of `halves`, scaled. The 16 values of each group
 * are made of its pair, in the order of the codes 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, by
 * adding to the exponent; the codes are indices to them. */
static inline __m512i decode_pair(__m128i bytes, __m512i halves, int p) {
    const __m512i which = _mm512_set_epi16(EIGHT_TWICE(2, 2, 2, 3, 2, 3, 2, 3, 0),
                                           EIGHT_TWICE(0, 0, 0, 1, 0, 1, 0, 1, 0));
    const __m512i exponent = _mm512_broadcast_i64x4(
        _mm256_set_epi16(EIGHT_TWICE(0, 0, 0x80, 0x80, 0x100, 0x100, 0x180, 0x180, (short)0x8000)));
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __mmask32 not_zero = 0xfefefefe; /* codes 0 and 8 */
    __m512i base = _mm512_permutexvar_epi16(
        _mm512_add_epi16(which, _mm512_set1_epi16((short)(2 * p))), halves);
    __mmask32 values_are = _mm512_mask_test_epi16_mask(not_zero, base, base);
    __m512i values = _mm512_maskz_add_epi16(values_are, base, exponent);
    /* (word & 15) | second */
    __m512i index =
        _mm512_ternarylogic_epi64(spread_nibbles(bytes), _mm512_set1_epi16(15), second, 0xea);
    return _mm512_permutexvar_epi16(index, values);
}

static inline void decode_e2m1(const uint8_t *codes, const uint8_t *scales, int64_t n,
                               int64_t group, void *out) {
    int64_t groups = n / 16, first = 0;
    uint16_t *values = out;
    for (; first + 16 <= groups; first += 16) {
        __m512i halves = halves_of(group_scales(scales, first, groups, group / 16));
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)(codes + 8 * (first + i)));
            _mm512_storeu_si512(values + 16 * (first + i), decode_pair(bytes, halves, i));
        }
    }
    if (first == groups)
        return;
    __m512i halves = halves_of(group_scales(scales, first, groups, group / 16));
    for (int i = 0; 16 * (first + i) < (n + 63) / 64 * 64; i += 2) {
        int64_t left = groups - first - i;
        __mmask16 mask = left > 1 ? 0xffff : left == 1 ? 0x00ff : 0;
        __m128i bytes = _mm_maskz_loadu_epi8(mask, codes + 8 * (first + i));
        _mm512_storeu_si512(values + 16 * (first + i), decode_pair(bytes, halves, i));
    }
}

/* Writes the words of a and b, those with an even index, then those with an odd one, of all 64. */
static inline void split_even_odd(__m512i a, __m512i b, uint16_t *out) {
    const __m512i step =
        _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                         24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i odd = _mm512_add_epi16(step, _mm512_set1_epi16(1));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, step, b));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(a, odd, b));
}

/* Sorts each 16 words of a vector: those with an even index, then those with an odd one. */
static inline __m512i split_sixteens(__m512i a) {
    const __m512i order =
        _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 30, 28, 26, 24, 22, 20, 18, 16, 15, 13, 11,
                         9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_epi16(order, a);
}

/* Sorts each 8 words of a vector: 0 and 4, 1 and 5, 2 and 6, 3 and 7. */
static inline __m512i split_eights(__m512i a) {
    const __m512i order =
        _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16, 15, 11, 14,
                         10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    return _mm512_permutexvar_epi16(order, a);
}

/* A row of x, `padded` values (a multiple of 64) that bfloat16 holds exactly. */
static inline void convert(const float *row, int64_t padded, moq_order order, void *out) {
    uint16_t *values = out;
    for (int64_t i = 0; i < padded; i += 64) {
        __m512i a =
            (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + i + 16), _mm512_loadu_ps(row + i));
        __m512i b = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + i + 48),
                                                 _mm512_loadu_ps(row + i + 32));
        if (order == MOQ_ORDER_DECODE) {
            split_even_odd(a, b, values + i);
        } else if (order == MOQ_ORDER_MEDIUM) {
            _mm512_storeu_si512(values + i, split_eights(a));
            _mm512_storeu_si512(values + i + 32, split_eights(b));
        } else if (order == MOQ_ORDER_E2M1) {
            _mm512_storeu_si512(values + i, split_sixteens(a));
            _mm512_storeu_si512(values + i + 32, split_sixteens(b));
        } else {
            _mm512_storeu_si512(values + i, _mm512_shuffle_i64x2(a, b, 0x88));
            _mm512_storeu_si512(values + i + 32, _mm512_shuffle_i64x2(a, b, 0xdd));
        }
    }
}

#endif
