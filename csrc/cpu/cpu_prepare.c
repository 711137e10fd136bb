/* Weight processing on the CPU: see cpu_prepare.h. Bound by memory bandwidth except for the
 * folding. */
#include "cpu/cpu_prepare.h"

#include "core/formats.h"

#include <math.h>

int64_t moq_cpu_find_e4m3_nan(const uint8_t *codes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if ((codes[i] & 0x7f) == 0x7f)
            return i;
    }
    return -1;
}

int64_t moq_cpu_find_e4m3_value(const uint8_t *codes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if ((codes[i] & 0x7f) != 0 && (codes[i] & 0x7f) != 0x7f)
            return i;
    }
    return -1;
}

int64_t moq_cpu_find_e2m1_value(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                                int32_t group) {
    for (int64_t k = 0; k < columns; k++) {
        uint8_t scale = scales[k / group] & 0x7f;
        if (scale != 0 && scale != 0x7f && (codes[k / 2] >> (4 * (k & 1)) & 7) != 0)
            return k;
    }
    return -1;
}

int64_t moq_cpu_find_bad_block_scale(const uint8_t *scales, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (scales[i] >= 0x7f && scales[i] != 0x80)
            return i;
    }
    return -1;
}

/* The power of two 2^ceil(log2(largest / 448)), or 1 for a row of zeros. */
static double fold_factor(double largest) {
    int exponent = 0;
    double mantissa = frexp(largest / (double)MOQ_E4M3_MAX, &exponent);
    if (mantissa == 0.5) /* frexp gives [0.5, 1): an exact power of two needs no larger one */
        exponent--;
    return largest > 0 ? ldexp(1.0, exponent) : 1.0;
}

float moq_cpu_fold_e2m1_row(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                            int32_t group, uint8_t *out) {
    float largest = 0;
    for (int64_t k = 0; k < columns; k++) {
        float value =
            moq_e2m1_decode(codes[k / 2] >> (4 * (k & 1))) * moq_e4m3_decode(scales[k / group]);
        largest = fmaxf(largest, fabsf(value));
    }
    float r = (float)fold_factor(largest);
    for (int64_t k = 0; k < columns; k++) {
        float value =
            moq_e2m1_decode(codes[k / 2] >> (4 * (k & 1))) * moq_e4m3_decode(scales[k / group]);
        out[k] = moq_e4m3_encode(value / r);
    }
    return r;
}

float moq_cpu_fold_mx_row(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                          int32_t group, uint8_t *out) {
    double largest = 0;
    for (int64_t k = 0; k < columns; k++)
        largest =
            fmax(largest, ldexp(fabs((double)moq_e4m3_decode(codes[k])), scales[k / group] - 127));
    double r = fold_factor(largest);
    for (int64_t k = 0; k < columns; k++)
        out[k] = moq_e4m3_encode(
            (float)(ldexp((double)moq_e4m3_decode(codes[k]), scales[k / group] - 127) / r));
    return (float)r;
}
