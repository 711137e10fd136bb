/* The row kernels in terms of vectors, compiled once for each width: included at the end of
 * convert_<isa>.c, which says what a vector is. Not a header for anybody else.
 *
 * LANES floats are a vector (vec_f, as bits vec_i); half_i holds as many values of 16 bits. A block
 * is four vectors of values. What is left over when a row is cut into blocks goes the portable way.
 * Functions with a dtype among their arguments are inlined where it is a constant.
 *
 * Bound by the arithmetic of rounding, about 15 instructions a vector, and by the divider. A
 * division stays one: a product with the reciprocal would round differently. */
#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/scale_row.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define BLOCK     (4 * LANES)
#define MAGNITUDE V(set1_epi32)(0x7fffffff)
#define INFINITE  V(set1_epi32)(0x7f800000)
#define AND       V_BITS(and)
#define OR        V_BITS(or)
#define XOR       V_BITS(xor)
#define INLINE    static inline __attribute__((always_inline))

static const moq_row_kernels *const portable = &moq_row_kernels_portable;

/* Element i of a row of F32, BF16 or F16. */
INLINE const void *element(moq_dtype dtype, const void *src, int64_t i) {
    return (const char *)src + i * (dtype == MOQ_DT_F32 ? 4 : 2);
}

/* ------------------------------------------------------------------------------ loads, as float */

INLINE vec_f load_bf16(const uint16_t *src) {
    return FLOATS(V(slli_epi32)(V(cvtepu16_epi32)(HALF_LOAD((const half_i *)src)), 16));
}

/* Quiets signalling NaN. */
INLINE vec_f load_f16(const uint16_t *src) {
    return V(cvtph_ps)(HALF_LOAD((const half_i *)src));
}

INLINE vec_f load(moq_dtype dtype, const void *src, int64_t i) {
    if (dtype == MOQ_DT_BF16)
        return load_bf16((const uint16_t *)src + i);
    if (dtype == MOQ_DT_F16)
        return load_f16((const uint16_t *)src + i);
    return V(loadu_ps)((const float *)src + i);
}

/* ------------------------------------------------------------------------------------- rounding */

/* The excess that narrow() leaves in a code: the exponent of the smallest normal number, in its
 * place. */
#define CODE_OFFSET(fraction, bias) ((128 - (bias)) << (fraction))

/* The code of a magnitude below 2^100 in a format with `fraction` bits of significand and the given
 * bias, not saturated and CODE_OFFSET too large; see narrow() of core/formats.c, which this must
 * equal. The last place of the code is worth 2^(e - fraction), e being the exponent of the
 * magnitude or, below it, that of the smallest normal number; adding 2^23 times as much leaves the
 * rounded multiple in the last bits of the sum. */
INLINE vec_i narrow(vec_i magnitude, int fraction, int bias) {
    vec_i lowest = V(set1_epi32)((128 - bias) << 23);
    vec_i exponent = V(max_epi32)(AND(magnitude, INFINITE), lowest);
    vec_i grid = V(add_epi32)(exponent, V(set1_epi32)((23 - fraction) << 23));
    vec_i sum = BITS(V(add_ps)(FLOATS(magnitude), FLOATS(grid)));
    vec_i above = V(srli_epi32)(exponent, 23 - fraction);
    return V(add_epi32)(V(sub_epi32)(sum, grid), above);
}

INLINE vec_i magnitude_of(vec_f x) {
    return AND(BITS(x), MAGNITUDE);
}

/* Codes of two vectors without their signs in words, and words with the signs of x, which
 * saturation keeps. Made by twos so that the constants stay in registers. */
typedef struct {
    vec_i codes, signs;
} code_words;

INLINE code_words make_words(vec_i code_a, vec_i code_b, int offset, vec_f a, vec_f b) {
    vec_i codes = V(packus_epi32)(code_a, code_b);
    return (code_words){V(sub_epi16)(codes, V(set1_epi16)((short)offset)),
                        V(packs_epi32)(BITS(a), BITS(b))};
}

/* Codes of magnitudes of at most 448. */
INLINE code_words e4m3_words_in_range(vec_f a, vec_f b) {
    vec_i code_a = narrow(magnitude_of(a), 3, 7), code_b = narrow(magnitude_of(b), 3, 7);
    return make_words(code_a, code_b, CODE_OFFSET(3, 7), a, b);
}

INLINE vec_i e4m3_saturated(vec_f x) {
    vec_i magnitude = magnitude_of(x), most = V(set1_epi32)(0x43e00000); /* 448 */
    return count_greater(narrow(V(min_epi32)(magnitude, most), 3, 7), magnitude, INFINITE);
}

INLINE code_words e4m3_words(vec_f a, vec_f b) {
    return make_words(e4m3_saturated(a), e4m3_saturated(b), CODE_OFFSET(3, 7), a, b);
}

/* Codes of magnitudes below 2^100; codes above 7 are left to pack_nibbles. */
INLINE code_words e2m1_words(vec_f a, vec_f b) {
    vec_i code_a = narrow(magnitude_of(a), 1, 1), code_b = narrow(magnitude_of(b), 1, 1);
    return make_words(code_a, code_b, CODE_OFFSET(1, 1), a, b);
}

/* Bytes of a block: codes with the sign in the highest bit. */
INLINE vec_i pack_signed(code_words low, code_words high) {
    vec_i codes = V(packus_epi16)(low.codes, high.codes);
    vec_i signs = V(packs_epi16)(low.signs, high.signs);
    return order_bytes(OR(codes, AND(signs, V(set1_epi8)((char)0x80))));
}

/* Two values to a byte, the even one in the low nibble. */
INLINE half_i pack_nibbles(code_words low, code_words high) {
    vec_i codes = V(min_epu8)(V(packus_epi16)(low.codes, high.codes), V(set1_epi8)(7));
    vec_i signs = V(srli_epi16)(V(packs_epi16)(low.signs, high.signs), 4);
    vec_i nibbles = OR(codes, AND(signs, V(set1_epi8)(8)));
    return narrow_words(V(maddubs_epi16)(order_bytes(nibbles), V(set1_epi16)(0x1001)));
}

/* ---------------------------------------------------------------------------------- conversions */

static void decode_bf16(const uint16_t *src, int64_t n, float *dst) {
    for (int64_t i = 0; i < n; i += LANES)
        V(storeu_ps)(dst + i, load_bf16(src + i));
}

static void decode_f16(const uint16_t *src, int64_t n, float *dst) {
    for (int64_t i = 0; i < n; i += LANES) {
        vec_f x = load_f16(src + i);
        V(storeu_ps)(dst + i, x);
        if (any_nan(x)) /* keeps the signalling ones */
            portable->decode(MOQ_DT_F16, src + i, LANES, dst + i);
    }
}

INLINE void store_words_as_floats(vec_i halves, float scale, float *dst) {
    V(storeu_ps)(dst, V(mul_ps)(V(cvtph_ps)(LOWER(halves)), V(set1_ps)(scale)));
    V(storeu_ps)(dst + LANES, V(mul_ps)(V(cvtph_ps)(UPPER(halves)), V(set1_ps)(scale)));
}

/* A code whose exponent is moved to the place of fp16's is the fp16 number 2^8 times smaller. */
static void decode_e4m3(const uint8_t *src, int64_t n, float *dst) {
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        vec_i code = V(cvtepu8_epi16)(HALF_LOAD((const half_i *)(src + i)));
        vec_i half = AND(V(srai_epi16)(V(slli_epi16)(code, 8), 1), V(set1_epi16)((short)0xbf80));
        vec_i magnitude = AND(half, V(set1_epi16)(0x7fff));
        half = add_where_equal_16(half, magnitude, V(set1_epi16)(0x3f80), /* 0x7f: NaN */
                                  V(set1_epi16)(0x7e00 - 0x3f80));
        store_words_as_floats(half, 256.0f, dst + i);
    }
}

/* The upper bytes of the eight magnitudes as fp16, whose lower bytes are 0, then the negatives. */
static void decode_e2m1(const uint8_t *src, int64_t n, float *dst) {
    vec_i table = BROADCAST_128(_mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, //
                                              (char)0x80, (char)0xb8, (char)0xbc, (char)0xbe,
                                              (char)0xc0, (char)0xc2, (char)0xc4, (char)0xc6));
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        half_i pairs = HALF(cvtepu8_epi16)(QUARTER(src + i / 2));
        half_i nibbles = HALF_AND(HALF_OR(pairs, HALF(slli_epi16)(pairs, 4)), HALF(set1_epi8)(15));
        vec_i index = V(slli_epi16)(V(cvtepu8_epi16)(nibbles), 8);
        store_words_as_floats(V(shuffle_epi8)(table, index), 1.0f, dst + i);
    }
}

static void decode_int8(const int8_t *src, int64_t n, float *dst) {
    int64_t whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        V(storeu_ps)(dst + i, V(cvtepi32_ps)(V(cvtepi8_epi32)(QUARTER(src + i))));
    portable->decode_int8(src + whole, n - whole, dst + whole);
}

/* The sign bit of four moves to where subtraction takes it for one of more. */
static void decode_int4(const uint8_t *src, int shift, int64_t n, float *dst) {
    int64_t whole = n - n % LANES;
    vec_i eight = V(set1_epi32)(8), four_bits = V(set1_epi32)(15);
    for (int64_t i = 0; i < whole; i += LANES) {
        vec_i bytes = V(srl_epi32)(V(cvtepu8_epi32)(QUARTER(src + i)), _mm_cvtsi32_si128(shift));
        vec_i code = V(sub_epi32)(XOR(AND(bytes, four_bits), eight), eight);
        V(storeu_ps)(dst + i, V(cvtepi32_ps)(code));
    }
    portable->decode_int4(src + whole, shift, n - whole, dst + whole);
}

static void multiply_groups(float *values, int64_t n, int64_t group, const float *factors) {
    for (int64_t at = 0; at < n; at += group, factors++) {
        int64_t count = n - at < group ? n - at : group, whole = count - count % LANES;
        for (int64_t i = at; i < at + whole; i += LANES)
            V(storeu_ps)(values + i, V(mul_ps)(V(loadu_ps)(values + i), V(set1_ps)(*factors)));
        for (int64_t i = at + whole; i < at + count; i++)
            values[i] *= *factors;
    }
}

INLINE vec_i bf16_word(vec_f x) {
    vec_i bits = BITS(x), one = V(set1_epi32)(1);
    vec_i odd = AND(V(srli_epi32)(bits, 16), one);
    vec_i rounded = V(add_epi32)(V(add_epi32)(bits, V(set1_epi32)(0x7fff)), odd);
    vec_i quiet = OR(bits, V(set1_epi32)(0x400000));
    vec_i word = where_greater(AND(bits, MAGNITUDE), INFINITE, quiet, rounded);
    return V(srli_epi32)(word, 16);
}

static void encode_bf16(const float *src, int64_t n, uint16_t *dst) {
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        vec_i low = bf16_word(V(loadu_ps)(src + i)), high = bf16_word(V(loadu_ps)(src + i + LANES));
        V_BITS(storeu)((vec_i *)(dst + i), order_words(V(packus_epi32)(low, high)));
    }
}

static void encode_f16(const float *src, int64_t n, uint16_t *dst) {
    for (int64_t i = 0; i < n; i += LANES)
        HALF_STORE((half_i *)(dst + i),
                   V(cvtps_ph)(V(loadu_ps)(src + i), _MM_FROUND_TO_NEAREST_INT));
}

static void encode_e4m3(const float *src, int64_t n, uint8_t *dst) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        code_words words[2];
        for (int w = 0; w < 2; w++) {
            const float *x = src + i + w * 2 * LANES;
            words[w] = e4m3_words(V(loadu_ps)(x), V(loadu_ps)(x + LANES));
        }
        V_BITS(storeu)((vec_i *)(dst + i), pack_signed(words[0], words[1]));
    }
}

/* A NaN becomes +6, and what is greater may as well become 2^64. */
INLINE vec_f load_for_e2m1(const float *src) {
    vec_i bits = V_BITS(loadu)((const vec_i *)src), most = V(set1_epi32)(0x5f800000);
    vec_i magnitude = AND(bits, MAGNITUDE);
    vec_i sign = where_greater(magnitude, INFINITE, V_BITS(setzero)(), XOR(bits, magnitude));
    return FLOATS(OR(V(min_epi32)(magnitude, most), sign));
}

static void encode_e2m1(const float *src, int64_t n, uint8_t *dst) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        code_words words[2];
        for (int w = 0; w < 2; w++) {
            const float *x = src + i + w * 2 * LANES;
            words[w] = e2m1_words(load_for_e2m1(x), load_for_e2m1(x + LANES));
        }
        HALF_STORE((half_i *)(dst + i / 2), pack_nibbles(words[0], words[1]));
    }
}

static void decode(moq_dtype dtype, const void *src, int64_t n, float *dst) {
    int64_t whole = n - n % (2 * LANES);
    const char *rest = (const char *)src + (size_t)whole * moq_dtype_size(dtype);
    switch (dtype) {
    case MOQ_DT_BF16:
        decode_bf16(src, whole, dst);
        break;
    case MOQ_DT_F16:
        decode_f16(src, whole, dst);
        break;
    case MOQ_DT_E4M3:
        decode_e4m3(src, whole, dst);
        break;
    case MOQ_DT_E2M1X2:
        decode_e2m1(src, whole, dst);
        rest = (const char *)src + whole / 2;
        break;
    default:
        whole = 0;
        rest = src;
    }
    portable->decode(dtype, rest, n - whole, dst + whole);
}

static void encode(moq_dtype dtype, const float *src, int64_t n, void *dst) {
    int64_t whole = n - n % BLOCK;
    char *rest = (char *)dst + (size_t)whole * moq_dtype_size(dtype);
    switch (dtype) {
    case MOQ_DT_BF16:
        encode_bf16(src, whole, dst);
        break;
    case MOQ_DT_F16:
        encode_f16(src, whole, dst);
        break;
    case MOQ_DT_E4M3:
        encode_e4m3(src, whole, dst);
        break;
    case MOQ_DT_E2M1X2:
        encode_e2m1(src, whole, dst);
        rest = (char *)dst + whole / 2;
        break;
    default:
        whole = 0;
        rest = dst;
    }
    portable->encode(dtype, src + whole, n - whole, rest);
}

/* ----------------------------------------------------------------------------- largest magnitude
 * As integers, magnitudes are in the order of their values, and those of NaN are the largest. */

INLINE uint32_t largest_16(__m128i v) {
    __m128i ones = _mm_set1_epi16(-1); /* there is a horizontal minimum only */
    return 0xffffu & ~(uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(v, ones)));
}

INLINE uint32_t largest_32(__m128i v) {
    v = _mm_max_epu32(v, _mm_shuffle_epi32(v, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(v, _mm_shuffle_epi32(v, 0xb1)));
}

INLINE float number(moq_dtype dtype, uint32_t magnitude) {
    float value;
    if (dtype == MOQ_DT_F16)
        value = _cvtsh_ss((unsigned short)magnitude);
    else {
        magnitude <<= dtype == MOQ_DT_BF16 ? 16 : 0;
        memcpy(&value, &magnitude, sizeof value);
    }
    return isnan(value) ? NAN : value;
}

INLINE vec_i larger_of(moq_dtype dtype, vec_i a, vec_i b) {
    return dtype == MOQ_DT_F32 ? V(max_epu32)(a, b) : V(max_epu16)(a, b);
}

/* The largest magnitude of whole vectors of 128 bits. */
INLINE uint32_t amax_of_narrow(moq_dtype dtype, const void *src, int64_t n) {
    bool wide = dtype == MOQ_DT_F32;
    __m128i mask = wide ? _mm_set1_epi32(0x7fffffff) : _mm_set1_epi16(0x7fff);
    __m128i most = _mm_setzero_si128();
    for (int64_t i = 0; i < n; i += wide ? 4 : 8) {
        __m128i x = _mm_and_si128(_mm_loadu_si128(element(dtype, src, i)), mask);
        most = wide ? _mm_max_epu32(most, x) : _mm_max_epu16(most, x);
    }
    return wide ? largest_32(most) : largest_16(most);
}

INLINE float amax_from(moq_dtype dtype, const void *src, int64_t n) {
    int64_t step = dtype == MOQ_DT_F32 ? LANES : 2 * LANES, i = 0;
    if (n < 4 * step && n % 8 == 0)
        return number(dtype, amax_of_narrow(dtype, src, n));
    vec_i mask = dtype == MOQ_DT_F32 ? MAGNITUDE : V(set1_epi16)(0x7fff);
    vec_i most[4] = {V_BITS(setzero)(), V_BITS(setzero)(), V_BITS(setzero)(), V_BITS(setzero)()};
    for (; i + 4 * step <= n; i += 4 * step) {
        for (int v = 0; v < 4; v++) {
            vec_i x = V_BITS(loadu)((const vec_i *)element(dtype, src, i + v * step));
            most[v] = larger_of(dtype, most[v], AND(x, mask));
        }
    }
    vec_i all =
        larger_of(dtype, larger_of(dtype, most[0], most[1]), larger_of(dtype, most[2], most[3]));
    float head = number(dtype, dtype == MOQ_DT_F32 ? largest_32(fold_max_32(all))
                                                   : largest_16(fold_max_16(all)));
    if (i == n)
        return head;
    float tail;
    portable->amax(dtype, element(dtype, src, i), n - i, n - i, &tail);
    return tail <= head || isnan(head) ? head : tail;
}

INLINE void amax_of_each(moq_dtype dtype, const void *src, int64_t n, int64_t group, float *most) {
    for (int64_t at = 0; at < n; at += group)
        *most++ = amax_from(dtype, element(dtype, src, at), n - at < group ? n - at : group);
}

static void amax(moq_dtype dtype, const void *src, int64_t n, int64_t group, float *most) {
    switch (dtype) {
    case MOQ_DT_BF16:
        amax_of_each(MOQ_DT_BF16, src, n, group, most);
        break;
    case MOQ_DT_F16:
        amax_of_each(MOQ_DT_F16, src, n, group, most);
        break;
    default:
        amax_of_each(MOQ_DT_F32, src, n, group, most);
    }
}

/* ------------------------------------------------------------------------------------ FP8 codes */

INLINE void multiply_from(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        code_words words[2];
        for (int w = 0; w < 2; w++) {
            int64_t at = i + w * 2 * LANES;
            vec_f a = V(mul_ps)(load(dtype, src, at), V(set1_ps)(factor));
            vec_f b = V(mul_ps)(load(dtype, src, at + LANES), V(set1_ps)(factor));
            words[w] = e4m3_words(a, b);
        }
        V_BITS(storeu)((vec_i *)(codes + i), pack_signed(words[0], words[1]));
    }
}

INLINE void divide_from(moq_dtype dtype, const void *src, int64_t n, float scale, uint8_t *codes) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        code_words words[2];
        for (int w = 0; w < 2; w++) {
            int64_t at = i + w * 2 * LANES;
            vec_f a = V(div_ps)(load(dtype, src, at), V(set1_ps)(scale));
            vec_f b = V(div_ps)(load(dtype, src, at + LANES), V(set1_ps)(scale));
            words[w] = e4m3_words_in_range(a, b);
        }
        V_BITS(storeu)((vec_i *)(codes + i), pack_signed(words[0], words[1]));
    }
}

/* A scale of infinity or NaN is left to the portable kernel. */
INLINE void divide_each(moq_dtype dtype, const void *src, int64_t n, int64_t group,
                        const float *scales, uint8_t *codes) {
    for (int64_t at = 0; at < n; at += group, scales++) {
        int64_t count = n - at < group ? n - at : group;
        int64_t whole = *scales <= FLT_MAX ? count - count % BLOCK : 0, rest = count - whole;
        divide_from(dtype, element(dtype, src, at), whole, *scales, codes + at);
        if (rest > 0)
            portable->divide_e4m3(dtype, element(dtype, src, at + whole), rest, rest, scales,
                                  codes + at + whole);
    }
}

static void multiply_e4m3(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes) {
    int64_t whole = isnan(factor) ? 0 : n - n % BLOCK;
    switch (dtype) {
    case MOQ_DT_BF16:
        multiply_from(MOQ_DT_BF16, src, whole, factor, codes);
        break;
    case MOQ_DT_F16:
        multiply_from(MOQ_DT_F16, src, whole, factor, codes);
        break;
    default:
        multiply_from(MOQ_DT_F32, src, whole, factor, codes);
    }
    portable->multiply_e4m3(dtype, element(dtype, src, whole), n - whole, factor, codes + whole);
}

static void divide_e4m3(moq_dtype dtype, const void *src, int64_t n, int64_t group,
                        const float *scales, uint8_t *codes) {
    switch (dtype) {
    case MOQ_DT_BF16:
        divide_each(MOQ_DT_BF16, src, n, group, scales, codes);
        break;
    case MOQ_DT_F16:
        divide_each(MOQ_DT_F16, src, n, group, scales, codes);
        break;
    default:
        divide_each(MOQ_DT_F32, src, n, group, scales, codes);
    }
}

#include "cpu/nvfp4_vector.h"

const moq_row_kernels KERNELS = {decode, encode, decode_int8,   decode_int4, multiply_groups,
                                 scale,  amax,   multiply_e4m3, divide_e4m3, nvfp4};
