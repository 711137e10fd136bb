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
#include "cpu/convert.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define BLOCK     (4 * LANES)
#define MAGNITUDE V(set1_epi32)(0x7fffffff)
#define INFINITE  V(set1_epi32)(0x7f800000)
#define INLINE    static inline __attribute__((always_inline))

/* Pieces of a row of NVFP4 whose scales are found together. */
#define GROUPS 64

static const moq_row_kernels *const portable = &moq_row_kernels_portable;

static inline const void *element(moq_dtype dtype, const void *src, int64_t i) {
    return (const char *)src + (size_t)i * moq_dtype_size(dtype);
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

/* The code of a finite magnitude in a format with `fraction` bits of significand and the given
 * bias; see narrow() of core/formats.c, which this must equal. The last place of the code is worth
 * 2^(e - fraction), e being the exponent of the magnitude or, below it, that of the smallest normal
 * number; adding 2^23 times as much leaves the rounded multiple in the last bits of the sum. */
INLINE vec_i narrow(vec_i magnitude, int fraction, int bias) {
    vec_i lowest = V(set1_epi32)((128 - bias) << 23);
    vec_i exponent = V(max_epi32)(V_BITS (and)(magnitude, INFINITE), lowest);
    vec_i grid = V(add_epi32)(exponent, V(set1_epi32)((23 - fraction) << 23));
    vec_i sum = BITS(V(add_ps)(FLOATS(magnitude), FLOATS(grid)));
    vec_i above = V(srli_epi32)(V(sub_epi32)(exponent, lowest), 23 - fraction);
    return V(add_epi32)(V(sub_epi32)(sum, grid), above);
}

/* The code without its sign. */
INLINE vec_i e4m3_magnitude(vec_f x, bool may_be_nan) {
    vec_i magnitude = V_BITS (and)(BITS(x), MAGNITUDE);
    vec_i code = narrow(V(min_epi32)(magnitude, V(set1_epi32)(0x43e00000)), 3, 7); /* 448 */
    return may_be_nan ? count_greater(code, magnitude, INFINITE) : code;
}

INLINE vec_i e2m1_magnitude(vec_f x) {
    vec_i magnitude = V_BITS (and)(BITS(x), MAGNITUDE);
    return narrow(V(min_epi32)(magnitude, V(set1_epi32)(0x40c00000)), 1, 1); /* 6 */
}

/* Bytes of a block: codes below 128, and above them the signs of x, which survive saturation. */
INLINE vec_i pack_signed(const vec_i code[4], const vec_f x[4]) {
    vec_i codes =
        V(packus_epi16)(V(packus_epi32)(code[0], code[1]), V(packus_epi32)(code[2], code[3]));
    vec_i signs = V(packs_epi16)(V(packs_epi32)(BITS(x[0]), BITS(x[1])),
                                 V(packs_epi32)(BITS(x[2]), BITS(x[3])));
    return order_bytes(V_BITS(or)(codes, V_BITS (and)(signs, V(set1_epi8)((char)0x80))));
}

INLINE vec_i encode_e4m3_block(const vec_f x[4], bool may_be_nan) {
    vec_i code[4];
    for (int v = 0; v < 4; v++)
        code[v] = e4m3_magnitude(x[v], may_be_nan);
    return pack_signed(code, x);
}

/* Two values to a byte, the even one in the low nibble. */
INLINE half_i encode_e2m1_block(const vec_f x[4]) {
    vec_i code[4];
    for (int v = 0; v < 4; v++)
        code[v] = e2m1_magnitude(x[v]);
    vec_i bytes = pack_signed(code, x);
    vec_i sign = V_BITS (and)(V(srli_epi16)(bytes, 4), V(set1_epi8)(8));
    vec_i nibbles = V_BITS(or)(V_BITS (and)(bytes, V(set1_epi8)(7)), sign);
    return narrow_words(V(maddubs_epi16)(nibbles, V(set1_epi16)(0x1001)));
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

/* With its exponent moved to the place of fp16's, a code is the fp16 number 2^8 times smaller. */
static void decode_e4m3(const uint8_t *src, int64_t n, float *dst) {
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        vec_i code = V(cvtepu8_epi16)(HALF_LOAD((const half_i *)(src + i)));
        vec_i half =
            V_BITS (and)(V(srai_epi16)(V(slli_epi16)(code, 8), 1), V(set1_epi16)((short)0xbf80));
        vec_i magnitude = V_BITS (and)(half, V(set1_epi16)(0x7fff));
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

INLINE vec_i bf16_word(vec_f x) {
    vec_i bits = BITS(x), one = V(set1_epi32)(1);
    vec_i odd = V_BITS (and)(V(srli_epi32)(bits, 16), one);
    vec_i rounded = V(add_epi32)(V(add_epi32)(bits, V(set1_epi32)(0x7fff)), odd);
    vec_i quiet = V_BITS(or)(bits, V(set1_epi32)(0x400000));
    vec_i word = where_greater(V_BITS (and)(bits, MAGNITUDE), INFINITE, quiet, rounded);
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

INLINE void load_block(moq_dtype dtype, const void *src, int64_t i, vec_f x[4]) {
    for (int v = 0; v < 4; v++)
        x[v] = load(dtype, src, i + v * LANES);
}

static void encode_e4m3(const float *src, int64_t n, uint8_t *dst) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        vec_f x[4];
        load_block(MOQ_DT_F32, src, i, x);
        V_BITS(storeu)((vec_i *)(dst + i), encode_e4m3_block(x, true));
    }
}

/* A NaN becomes +6, as infinity does. */
static void encode_e2m1(const float *src, int64_t n, uint8_t *dst) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        vec_f x[4];
        load_block(MOQ_DT_F32, src, i, x);
        for (int v = 0; v < 4; v++) {
            vec_i magnitude = V_BITS (and)(BITS(x[v]), MAGNITUDE);
            x[v] = FLOATS(where_greater(magnitude, INFINITE, INFINITE, BITS(x[v])));
        }
        HALF_STORE((half_i *)(dst + i / 2), encode_e2m1_block(x));
    }
}

static void decode(moq_dtype dtype, const void *src, int64_t n, float *dst) {
    int64_t whole = n - n % (2 * LANES);
    const char *rest = element(dtype, src, whole);
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

INLINE float amax_of(moq_dtype dtype, const void *src, int64_t n) {
    int64_t step = dtype == MOQ_DT_F32 ? LANES : 2 * LANES, i = 0;
    vec_i mask = dtype == MOQ_DT_F32 ? MAGNITUDE : V(set1_epi16)(0x7fff);
    vec_i most[4] = {V_BITS(setzero)(), V_BITS(setzero)(), V_BITS(setzero)(), V_BITS(setzero)()};
    for (; i + 4 * step <= n; i += 4 * step) {
        for (int v = 0; v < 4; v++) {
            vec_i x = V_BITS(loadu)((const vec_i *)element(dtype, src, i + v * step));
            x = V_BITS (and)(x, mask);
            most[v] = dtype == MOQ_DT_F32 ? V(max_epu32)(most[v], x) : V(max_epu16)(most[v], x);
        }
    }
    for (int v = 1; v < 4; v++)
        most[0] =
            dtype == MOQ_DT_F32 ? V(max_epu32)(most[0], most[v]) : V(max_epu16)(most[0], most[v]);
    float head = number(dtype, dtype == MOQ_DT_F32 ? largest_32(fold_max_32(most[0]))
                                                   : largest_16(fold_max_16(most[0])));
    if (i == n)
        return head;
    float tail = portable->amax(dtype, element(dtype, src, i), n - i);
    return tail <= head || isnan(head) ? head : tail;
}

static float amax(moq_dtype dtype, const void *src, int64_t n) {
    switch (dtype) {
    case MOQ_DT_BF16:
        return amax_of(MOQ_DT_BF16, src, n);
    case MOQ_DT_F16:
        return amax_of(MOQ_DT_F16, src, n);
    default:
        return amax_of(MOQ_DT_F32, src, n);
    }
}

/* ------------------------------------------------------------------------------------ FP8 codes */

INLINE void multiply_from(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        vec_f x[4];
        load_block(dtype, src, i, x);
        for (int v = 0; v < 4; v++)
            x[v] = V(mul_ps)(x[v], V(set1_ps)(factor));
        V_BITS(storeu)((vec_i *)(codes + i), encode_e4m3_block(x, true));
    }
}

INLINE void divide_from(moq_dtype dtype, const void *src, int64_t n, float scale, uint8_t *codes) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        vec_f x[4];
        load_block(dtype, src, i, x);
        for (int v = 0; v < 4; v++)
            x[v] = V(div_ps)(x[v], V(set1_ps)(scale));
        V_BITS(storeu)((vec_i *)(codes + i), encode_e4m3_block(x, false));
    }
}

static void multiply_e4m3(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes) {
    int64_t whole = n - n % BLOCK;
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

static void divide_e4m3(moq_dtype dtype, const void *src, int64_t n, float scale, uint8_t *codes) {
    int64_t whole = scale <= FLT_MAX ? n - n % BLOCK : 0;
    switch (dtype) {
    case MOQ_DT_BF16:
        divide_from(MOQ_DT_BF16, src, whole, scale, codes);
        break;
    case MOQ_DT_F16:
        divide_from(MOQ_DT_F16, src, whole, scale, codes);
        break;
    default:
        divide_from(MOQ_DT_F32, src, whole, scale, codes);
    }
    portable->divide_e4m3(dtype, element(dtype, src, whole), n - whole, scale, codes + whole);
}

/* ---------------------------------------------------------------------------------------- NVFP4 */

INLINE float amax_of_group(moq_dtype dtype, const void *src) {
    if (dtype == MOQ_DT_F32) {
        const float *x = src;
        __m256i mask = _mm256_set1_epi32(0x7fffffff);
        __m256i a = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x)), mask);
        __m256i b = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + 8)), mask);
        __m256i most = _mm256_max_epu32(a, b);
        return number(dtype, largest_32(_mm_max_epu32(_mm256_castsi256_si128(most),
                                                      _mm256_extracti128_si256(most, 1))));
    }
    __m256i x = _mm256_and_si256(_mm256_loadu_si256(src), _mm256_set1_epi16(0x7fff));
    return number(dtype, largest_16(_mm_max_epu16(_mm256_castsi256_si128(x),
                                                  _mm256_extracti128_si256(x, 1))));
}

/* The block scales and the steps they make of up to GROUPS groups. */
INLINE void find_steps(moq_dtype dtype, const void *src, int64_t groups, float scale_2,
                       uint8_t *block_scales, float *steps) {
    float ratio[GROUPS], largest = MOQ_E2M1_MAX * scale_2;
    for (int64_t g = 0; g < groups; g++)
        ratio[g] = amax_of_group(dtype, element(dtype, src, g * MOQ_NVFP4_GROUP));
    for (int64_t g = 0; g < groups; g++)
        ratio[g] /= largest;
    encode(MOQ_DT_E4M3, ratio, groups, block_scales);
    decode(MOQ_DT_E4M3, block_scales, groups, steps);
    for (int64_t g = 0; g < groups; g++)
        steps[g] *= scale_2;
}

/* A step of 0, infinity or NaN is left to the portable kernel; under any other, x holds no NaN. */
INLINE bool are_plain(const float *steps) {
    bool plain = true;
    for (int g = 0; g < BLOCK / MOQ_NVFP4_GROUP; g++)
        plain &= steps[g] > 0.0f && steps[g] <= FLT_MAX;
    return plain;
}

/* groups * 16 is a multiple of BLOCK. */
INLINE void nvfp4_piece(moq_dtype dtype, const void *src, int64_t groups, float scale_2,
                        uint8_t *packed, uint8_t *block_scales) {
    float steps[GROUPS];
    find_steps(dtype, src, groups, scale_2, block_scales, steps);
    for (int64_t i = 0; i < groups * MOQ_NVFP4_GROUP; i += BLOCK) {
        const float *step = steps + i / MOQ_NVFP4_GROUP;
        if (!are_plain(step)) {
            portable->nvfp4(dtype, element(dtype, src, i), BLOCK, scale_2, packed + i / 2,
                            block_scales + i / MOQ_NVFP4_GROUP);
            continue;
        }
        vec_f x[4];
        load_block(dtype, src, i, x);
        for (int v = 0; v < 4; v++)
            x[v] = V(div_ps)(x[v], V(set1_ps)(step[v * LANES / MOQ_NVFP4_GROUP]));
        HALF_STORE((half_i *)(packed + i / 2), encode_e2m1_block(x));
    }
}

INLINE int64_t nvfp4_from(moq_dtype dtype, const void *src, int64_t n, float scale_2,
                          uint8_t *packed, uint8_t *block_scales) {
    int64_t whole = n - n % BLOCK;
    for (int64_t at = 0; at < whole; at += GROUPS * MOQ_NVFP4_GROUP) {
        int64_t groups = (whole - at) / MOQ_NVFP4_GROUP;
        nvfp4_piece(dtype, element(dtype, src, at), groups < GROUPS ? groups : GROUPS, scale_2,
                    packed + at / 2, block_scales + at / MOQ_NVFP4_GROUP);
    }
    return whole;
}

static void nvfp4(moq_dtype dtype, const void *src, int64_t n, float scale_2, uint8_t *packed,
                  uint8_t *block_scales) {
    int64_t done;
    switch (dtype) {
    case MOQ_DT_BF16:
        done = nvfp4_from(MOQ_DT_BF16, src, n, scale_2, packed, block_scales);
        break;
    case MOQ_DT_F16:
        done = nvfp4_from(MOQ_DT_F16, src, n, scale_2, packed, block_scales);
        break;
    default:
        done = nvfp4_from(MOQ_DT_F32, src, n, scale_2, packed, block_scales);
    }
    portable->nvfp4(dtype, element(dtype, src, done), n - done, scale_2, packed + done / 2,
                    block_scales + done / MOQ_NVFP4_GROUP);
}

const moq_row_kernels KERNELS = {decode, encode, amax, multiply_e4m3, divide_e4m3, nvfp4};
