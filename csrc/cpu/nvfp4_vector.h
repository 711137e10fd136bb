/* NVFP4 in terms of vectors: a part of cpu_convert_vector.h, included at its end.
 *
 * In every group of 16 the largest magnitude is found, the block scale it makes, and the step,
 * block scale times tensor scale, that values are divided by and rounded. For 64 groups at a time;
 * those with a zero, a NaN or an overflow go the portable way, by 8 groups.
 *
 * A value of 16 bits is never divided. Its code is the number of those among seven middles between
 * e2m1 numbers that the quotient has passed, and so, quotients being in the order of the values,
 * the number of seven least values that it has reached. Where a step is a normal number of the
 * dtype, 2.5 and 5 times it have the significand of 1.25 times, 3.5 that of 1.75 times, so four of
 * the seven suffice, found with one division each for the group: 16 values of 16 bits then take 9
 * instructions of a vector where dividing and rounding took 30 and two divisions.
 *
 * Bound by arithmetic: of some 30 instructions for 16 values half find the scale. Vectors are of
 * 256 bits at every level, as a broadcast of 32 bits from memory to one costs nothing beside its
 * load. */

/* Groups whose scales are found together; a multiple of 8. */
#define GROUPS 64

INLINE __m256i larger(moq_dtype dtype, __m256i a, __m256i b) {
    return dtype == MOQ_DT_F32 ? _mm256_max_epu32(a, b) : _mm256_max_epu16(a, b);
}

INLINE __m256i halve_128(moq_dtype dtype, __m256i a, __m256i b) {
    return larger(dtype, _mm256_permute2x128_si256(a, b, 0x20),
                  _mm256_permute2x128_si256(a, b, 0x31));
}

INLINE __m256i halve_64(moq_dtype dtype, __m256i a, __m256i b) {
    return larger(dtype, _mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

INLINE __m256i halve_32(moq_dtype dtype, __m256i a, __m256i b) {
    __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return larger(dtype, _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                  _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
}

/* Magnitudes of a group; of two float32 the larger. */
INLINE __m256i load_group(moq_dtype dtype, const void *src, int64_t group) {
    const __m256i *x = element(dtype, src, group * MOQ_NVFP4_GROUP);
    if (dtype != MOQ_DT_F32)
        return _mm256_and_si256(_mm256_loadu_si256(x), _mm256_set1_epi16(0x7fff));
    __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return _mm256_max_epu32(_mm256_and_si256(_mm256_loadu_si256(x), mask),
                            _mm256_and_si256(_mm256_loadu_si256(x + 1), mask));
}

/* The largest magnitudes of 8 groups: vectors of two groups become one of both until each group is
 * 32 bits. */
INLINE __m256 amax_of_groups(moq_dtype dtype, const void *src, int64_t first) {
    __m256i v[8];
    for (int g = 0; g < 8; g++)
        v[g] = load_group(dtype, src, first + g);
    for (int g = 0; g < 4; g++)
        v[g] = halve_128(dtype, v[2 * g], v[2 * g + 1]);
    for (int g = 0; g < 2; g++)
        v[g] = halve_64(dtype, v[2 * g], v[2 * g + 1]);
    __m256i most = halve_32(dtype, v[0], v[1]);
    most = _mm256_permutevar8x32_epi32(most, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (dtype == MOQ_DT_F32)
        return _mm256_castsi256_ps(most);
    most = _mm256_max_epu16(most, _mm256_slli_epi32(most, 16));
    most = _mm256_and_si256(most, _mm256_set1_epi32((int)0xffff0000));
    if (dtype == MOQ_DT_BF16)
        return _mm256_castsi256_ps(most);
    most = _mm256_srli_epi32(most, 16);
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1)));
}

/* A plain step is one under which no quotient is a NaN or out of the reach of narrow(). */
INLINE __m256 plain_steps(__m256 ratio, __m256 step) {
    __m256 in_reach = _mm256_cmp_ps(ratio, _mm256_set1_ps(0x1p64f), _CMP_LE_OQ);
    __m256 positive = _mm256_cmp_ps(step, _mm256_setzero_ps(), _CMP_GT_OQ);
    __m256 finite = _mm256_cmp_ps(step, _mm256_set1_ps(FLT_MAX), _CMP_LE_OQ);
    return _mm256_and_ps(in_reach, _mm256_and_ps(positive, finite));
}

/* The block scales of `groups` groups, a multiple of 8 and at most GROUPS, and the steps they make.
 * Returns a bit for each 8 groups, set where all steps are plain. */
INLINE unsigned find_steps(moq_dtype dtype, const void *src, int64_t groups, float scale_2,
                           uint8_t *block_scales, float *steps) {
    float ratio[GROUPS];
    unsigned plain = 0;
    __m256 largest = _mm256_set1_ps(MOQ_E2M1_MAX * scale_2), second = _mm256_set1_ps(scale_2);
    for (int64_t g = 0; g < groups; g += 8)
        _mm256_storeu_ps(ratio + g, _mm256_div_ps(amax_of_groups(dtype, src, g), largest));
    encode(MOQ_DT_E4M3, ratio, groups, block_scales);
    decode(MOQ_DT_E4M3, block_scales, groups, steps);
    for (int64_t g = 0; g < groups; g += 8) {
        __m256 step = _mm256_mul_ps(_mm256_loadu_ps(steps + g), second);
        __m256 all = plain_steps(_mm256_loadu_ps(ratio + g), step);
        plain |= (unsigned)(_mm256_movemask_ps(all) == 0xff) << (g / 8);
        _mm256_storeu_ps(steps + g, step);
    }
    return plain;
}

/* n is a multiple of BLOCK. */
INLINE void divide_groups(moq_dtype dtype, const void *src, int64_t n, const float *steps,
                          uint8_t *packed) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        code_words words[2];
        for (int w = 0; w < 2; w++) {
            int64_t at = i + w * 2 * LANES;
            const float *step = steps + at / MOQ_NVFP4_GROUP;
            vec_f a = V(div_ps)(load(dtype, src, at), V(set1_ps)(step[0]));
            vec_f b = V(div_ps)(load(dtype, src, at + LANES), V(set1_ps)(step[LANES / 16]));
            words[w] = e2m1_words(a, b);
        }
        HALF_STORE((half_i *)(packed + i / 2), pack_nibbles(words[0], words[1]));
    }
}

/* -------------------------------------------------------------------- codes of values of 16 bits
 */

/* Bounds of codes for each group, in both halves of 32 bits: the magnitudes before the least ones
 * of code 1 and code 2, and an exponent less than the least ones of code 3 and code 4. */
typedef struct {
    uint32_t one[GROUPS], two[GROUPS], three[GROUPS], four[GROUPS];
} bounds;

/* The magnitude before the least one whose quotient by the step is greater than `middle`
 * (_CMP_GT_OQ) or at least that (_CMP_GE_OQ). The product, rounded, is within half a last place of
 * float32 of the true one, the quotient as well: with two places more, cut off to 16 bits, it is
 * that least magnitude or the one before, and its own quotient tells. */
INLINE __m256i before_least(moq_dtype dtype, __m256 step, float middle, const int compare) {
    __m256 limit = _mm256_set1_ps(middle), candidate;
    __m256i bits = _mm256_castps_si256(_mm256_mul_ps(step, limit)), magnitude;
    bits = _mm256_add_epi32(bits, _mm256_set1_epi32(2));
    if (dtype == MOQ_DT_BF16) {
        magnitude = _mm256_srli_epi32(bits, 16);
        candidate = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 16));
    } else {
        __m128i half = _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_ZERO);
        magnitude = _mm256_cvtepu16_epi32(half);
        candidate = _mm256_cvtph_ps(half);
    }
    __m256 quotient = _mm256_div_ps(candidate, step);
    __m256 reached = compare == _CMP_GT_OQ ? _mm256_cmp_ps(quotient, limit, _CMP_GT_OQ)
                                           : _mm256_cmp_ps(quotient, limit, _CMP_GE_OQ);
    return _mm256_add_epi32(magnitude, _mm256_castps_si256(reached));
}

INLINE void store_twice(uint32_t *to, __m256i words) {
    _mm256_storeu_si256((__m256i *)to, _mm256_or_si256(words, _mm256_slli_epi32(words, 16)));
}

/* Finds the bounds of `groups` groups. Returns a bit for each 8, set where their steps are normal
 * numbers of the dtype. */
INLINE unsigned find_bounds(moq_dtype dtype, const float *steps, int64_t groups, bounds *to) {
    __m256 normal = _mm256_set1_ps(dtype == MOQ_DT_BF16 ? FLT_MIN : 0x1p-14f);
    __m256i below = _mm256_set1_epi32(dtype == MOQ_DT_BF16 ? (1 << 7) - 1 : (1 << 10) - 1);
    unsigned all = 0;
    for (int64_t g = 0; g < groups; g += 8) {
        __m256 step = _mm256_loadu_ps(steps + g);
        __m256i three = before_least(dtype, step, 1.25f, _CMP_GT_OQ);
        __m256i four = before_least(dtype, step, 1.75f, _CMP_GE_OQ);
        store_twice(to->one + g, before_least(dtype, step, 0.25f, _CMP_GT_OQ));
        store_twice(to->two + g, before_least(dtype, step, 0.75f, _CMP_GE_OQ));
        store_twice(to->three + g, _mm256_sub_epi32(three, below));
        store_twice(to->four + g, _mm256_sub_epi32(four, below));
        __m256 enough = _mm256_cmp_ps(step, normal, _CMP_GE_OQ);
        all |= (unsigned)(_mm256_movemask_ps(enough) == 0xff) << (g / 8);
    }
    return all;
}

INLINE __m256i spread(const uint32_t *words) {
    return _mm256_set1_epi32((int)*words);
}

/* The number of octaves, begun ones counted, that magnitudes are above `base`. */
INLINE __m256i octaves(moq_dtype dtype, __m256i magnitudes, __m256i base) {
    return _mm256_srli_epi16(_mm256_subs_epu16(magnitudes, base), dtype == MOQ_DT_BF16 ? 7 : 10);
}

/* Codes of a group in words, those above 7 left to the caller. */
INLINE __m256i count_codes(moq_dtype dtype, __m256i x, const bounds *b, int64_t g) {
    __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7fff));
    __m256i odd = octaves(dtype, magnitude, spread(b->three + g));
    __m256i even = octaves(dtype, magnitude, spread(b->four + g));
    __m256i one = _mm256_cmpgt_epi16(magnitude, spread(b->one + g)); /* -1 */
    __m256i two = _mm256_cmpgt_epi16(magnitude, spread(b->two + g));
    return _mm256_sub_epi16(_mm256_add_epi16(odd, even), _mm256_add_epi16(one, two));
}

/* Quantizes two groups of 16 to words of two codes; halves of 4 words take turns. */
INLINE __m256i code_pairs(moq_dtype dtype, const __m256i *src, const bounds *b, int64_t g) {
    __m256i x = _mm256_loadu_si256(src), y = _mm256_loadu_si256(src + 1);
    __m256i codes =
        _mm256_packus_epi16(count_codes(dtype, x, b, g), count_codes(dtype, y, b, g + 1));
    __m256i signs = _mm256_srli_epi16(_mm256_packs_epi16(x, y), 4);
    codes = _mm256_or_si256(_mm256_min_epu8(codes, _mm256_set1_epi8(7)),
                            _mm256_and_si256(signs, _mm256_set1_epi8(8)));
    return _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
}

/* `groups` is a multiple of 4. */
INLINE void count_groups(moq_dtype dtype, const void *src, int64_t groups, const bounds *b,
                         int64_t first, uint8_t *packed) {
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t g = 0; g < groups; g += 4) {
        const __m256i *x = element(dtype, src, g * MOQ_NVFP4_GROUP);
        __m256i bytes = _mm256_packus_epi16(code_pairs(dtype, x, b, first + g),
                                            code_pairs(dtype, x + 2, b, first + g + 2));
        _mm256_storeu_si256((__m256i *)(packed + g * MOQ_NVFP4_GROUP / 2),
                            _mm256_permutevar8x32_epi32(bytes, order));
    }
}

/* ---------------------------------------------------------------------------------- whole rows */

/* Quantizes at most GROUPS groups, a multiple of 8. */
INLINE void nvfp4_piece(moq_dtype dtype, const void *src, int64_t n, float scale_2, uint8_t *packed,
                        uint8_t *block_scales) {
    float steps[GROUPS];
    bounds found;
    int64_t groups = n / MOQ_NVFP4_GROUP, count = 8 * MOQ_NVFP4_GROUP;
    unsigned plain = find_steps(dtype, src, groups, scale_2, block_scales, steps);
    unsigned counted = dtype == MOQ_DT_F32 ? 0 : plain & find_bounds(dtype, steps, groups, &found);
    for (int64_t g = 0; g < groups; g += 8) {
        const void *x = element(dtype, src, g * MOQ_NVFP4_GROUP);
        uint8_t *to = packed + g * MOQ_NVFP4_GROUP / 2;
        if (counted >> (g / 8) & 1)
            count_groups(dtype, x, 8, &found, g, to);
        else if (plain >> (g / 8) & 1)
            divide_groups(dtype, x, count, steps + g, to);
        else
            portable->nvfp4(dtype, x, count, scale_2, to, block_scales + g);
    }
}

INLINE int64_t nvfp4_from(moq_dtype dtype, const void *src, int64_t n, float scale_2,
                          uint8_t *packed, uint8_t *block_scales) {
    int64_t whole = n - n % (8 * MOQ_NVFP4_GROUP), most = GROUPS * MOQ_NVFP4_GROUP;
    for (int64_t at = 0; at < whole; at += most) {
        int64_t left = whole - at;
        nvfp4_piece(dtype, element(dtype, src, at), left < most ? left : most, scale_2,
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
