/* Block scales of MX as those of NVFP4: see cpu_mx_scales.h. Codes are looked at only in rows where
 * some groups may have no say. */
#include "cpu/cpu_mx_scales.h"

#include <string.h>

/* True if all e2m1 codes of a group are zeros, of either sign. */
static bool is_zero(const uint8_t *codes, int64_t group) {
    uint64_t half[2];
    memcpy(half, codes + group * (MOQ_MX_GROUP / 2), sizeof half);
    return ((half[0] | half[1]) & 0x7777777777777777u) == 0;
}

static void widen(moq_mx_range *range, int exponent) {
    range->least = exponent < range->least ? exponent : range->least;
    range->most = exponent > range->most ? exponent : range->most;
}

/* The exponents of all groups, which there are. */
static moq_mx_range range_of_all(const uint8_t *exponents, int64_t groups) {
    moq_mx_range range = {-1, exponents[0], exponents[0], true};
    for (int64_t i = 0; i < groups; i++)
        widen(&range, exponents[i]);
    for (int64_t i = 0; i < groups && range.most == MOQ_MX_NAN && range.nan < 0; i++)
        range.nan = exponents[i] == MOQ_MX_NAN ? i : -1;
    return range;
}

moq_mx_range moq_cpu_find_mx_range(const uint8_t *exponents, const uint8_t *codes, int64_t groups) {
    moq_mx_range all = range_of_all(exponents, groups);
    if (all.nan >= 0 || moq_mx_holds_all(all.least, all.most))
        return all;
    moq_mx_range range = {-1, MOQ_MX_NAN, -1, false};
    for (int64_t i = 0; i < groups; i++) {
        if (!is_zero(codes, i))
            widen(&range, exponents[i]);
    }
    if (range.most < 0)
        range.least = range.most = MOQ_MX_ONE;
    return range;
}

float moq_cpu_write_mx_row(const uint8_t *exponents, const uint8_t *codes, int64_t groups,
                           moq_mx_range range, uint8_t *scales) {
    for (int64_t i = 0; i < groups; i++) {
        bool counts = range.all || !is_zero(codes, i);
        scales[i] = counts ? moq_mx_scale(exponents[i], range.most) : 0;
    }
    uint32_t bits = moq_mx_factor_bits(range.most);
    float factor;
    memcpy(&factor, &bits, sizeof factor);
    return factor;
}
