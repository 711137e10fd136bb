/* Number formats by bit manipulation: see formats.h. No tables and no branches on data, so the
 * row conversions vectorise; nothing depends on the flush-to-zero and denormals-are-zero modes that
 * frameworks switch on, since no subnormal float is ever the operand of an arithmetic operation
 * whose result could differ. */
#include "core/formats.h"

#include <string.h>

/* binary32: sign, 8 bits of exponent biased by 127, 23 bits of significand. */
#define F32_SIGN     0x80000000u
#define F32_INF      0x7f800000u
#define F32_BIAS     127
#define F32_FRACTION 23

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Widens the magnitude bits of a format with `fraction` bits of significand and the given bias:
 * moves the fields into place and rebiases; below the smallest normal number the code counts
 * multiples of the smallest subnormal one. */
static inline uint32_t widen(uint32_t magnitude, int fraction, int bias) {
    uint32_t normal =
        (magnitude << (F32_FRACTION - fraction)) + ((uint32_t)(F32_BIAS - bias) << F32_FRACTION);
    float unit = float_of((uint32_t)(F32_BIAS + 1 - bias - fraction) << F32_FRACTION);
    uint32_t subnormal = bits_of((float)magnitude * unit);
    return magnitude >> fraction ? normal : subnormal;
}

/* The inverse of widen(), rounding to nearest even; the exponent range is unbounded upwards, so the
 * caller saturates. Normal numbers: add just under half of the last place kept, and one more where
 * that place is odd. Subnormal ones: an addition with 2^23 times the smallest subnormal number
 * leaves the rounded multiple in the last bits of the sum. */
static inline uint32_t narrow(uint32_t magnitude, int fraction, int bias) {
    int drop = F32_FRACTION - fraction;
    uint32_t round = (1u << (drop - 1)) - 1 + ((magnitude >> drop) & 1);
    uint32_t normal = ((magnitude + round) >> drop) - ((uint32_t)(F32_BIAS - bias) << fraction);
    uint32_t grid = (uint32_t)(F32_BIAS + 1 - bias - fraction + F32_FRACTION) << F32_FRACTION;
    uint32_t subnormal = bits_of(float_of(magnitude) + float_of(grid)) - grid;
    return magnitude < ((uint32_t)(F32_BIAS + 1 - bias) << F32_FRACTION) ? subnormal : normal;
}

static inline uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static inline float e4m3_decode(uint8_t code) {
    uint32_t magnitude = code & 0x7fu;
    uint32_t bits = magnitude == 0x7f ? F32_INF | 0x400000u : widen(magnitude, 3, 7);
    return float_of((code & 0x80u) << 24 | bits);
}

static inline float fp16_decode(uint16_t code) {
    uint32_t magnitude = code & 0x7fffu;
    uint32_t special = F32_INF | magnitude << 13;
    uint32_t bits = magnitude >= 0x7c00 ? special : widen(magnitude, 10, 15);
    return float_of((code & 0x8000u) << 16 | bits);
}

/* E5M2 is the upper byte of fp16. */
static inline float e5m2_decode(uint8_t code) {
    return fp16_decode((uint16_t)(code << 8));
}

static inline float e2m1_decode(uint8_t nibble) {
    return float_of((nibble & 8u) << 28 | widen(nibble & 7u, 1, 1));
}

static inline float e8m0_decode(uint8_t code) {
    uint32_t bits = code == 0 ? 0x00400000u : (uint32_t)code << F32_FRACTION;
    return float_of(code == 0xff ? F32_INF | 0x400000u : bits);
}

static inline float bf16_decode(uint16_t code) {
    return float_of((uint32_t)code << 16);
}

static inline uint8_t e4m3_encode(float value) {
    uint32_t magnitude = bits_of(value) & ~F32_SIGN;
    uint32_t code = magnitude > F32_INF ? 0x7f : smaller(narrow(magnitude, 3, 7), 0x7e);
    return (uint8_t)((bits_of(value) & F32_SIGN) >> 24 | code);
}

static inline uint8_t e5m2_encode(float value) {
    uint32_t magnitude = bits_of(value) & ~F32_SIGN;
    uint32_t code = magnitude > F32_INF ? 0x7f : smaller(narrow(magnitude, 2, 15), 0x7b);
    return (uint8_t)((bits_of(value) & F32_SIGN) >> 24 | code);
}

static inline uint8_t e2m1_encode(float value) {
    uint32_t magnitude = bits_of(value) & ~F32_SIGN;
    uint32_t sign = magnitude > F32_INF ? 0 : bits_of(value) & F32_SIGN;
    return (uint8_t)(sign >> 28 | smaller(narrow(magnitude, 1, 1), 7));
}

static inline uint8_t e8m0_encode(float value) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & ~F32_SIGN;
    uint32_t normal = smaller((magnitude + 0x400000u) >> F32_FRACTION, 0xfe);
    uint32_t subnormal = magnitude >= 0x600000u; /* 2^-127 or 2^-126 */
    uint32_t code = magnitude < 0x800000u ? subnormal : normal;
    code = bits & F32_SIGN ? 0 : code;
    return (uint8_t)(magnitude > F32_INF ? 0xff : code);
}

static inline uint16_t bf16_encode(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1);
    return (uint16_t)(((bits & ~F32_SIGN) > F32_INF ? bits | 0x400000u : rounded) >> 16);
}

static inline uint16_t fp16_encode(float value) {
    uint32_t magnitude = bits_of(value) & ~F32_SIGN;
    uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
    uint32_t code = magnitude > F32_INF ? nan : smaller(narrow(magnitude, 10, 15), 0x7c00);
    return (uint16_t)((bits_of(value) & F32_SIGN) >> 16 | code);
}

float moq_e4m3_decode(uint8_t code) {
    return e4m3_decode(code);
}

float moq_e5m2_decode(uint8_t code) {
    return e5m2_decode(code);
}

float moq_e2m1_decode(uint8_t nibble) {
    return e2m1_decode(nibble);
}

float moq_e8m0_decode(uint8_t code) {
    return e8m0_decode(code);
}

float moq_bf16_decode(uint16_t code) {
    return bf16_decode(code);
}

float moq_fp16_decode(uint16_t code) {
    return fp16_decode(code);
}

uint8_t moq_e4m3_encode(float value) {
    return e4m3_encode(value);
}

uint8_t moq_e5m2_encode(float value) {
    return e5m2_encode(value);
}

uint8_t moq_e2m1_encode(float value) {
    return e2m1_encode(value);
}

uint8_t moq_e8m0_encode(float value) {
    return e8m0_encode(value);
}

uint16_t moq_bf16_encode(float value) {
    return bf16_encode(value);
}

uint16_t moq_fp16_encode(float value) {
    return fp16_encode(value);
}

bool moq_dtype_is_float(moq_dtype dtype) {
    switch (dtype) {
    case MOQ_DT_F16:
    case MOQ_DT_BF16:
    case MOQ_DT_F32:
    case MOQ_DT_E4M3:
    case MOQ_DT_E5M2:
    case MOQ_DT_E8M0:
    case MOQ_DT_E2M1X2:
        return true;
    default:
        return false;
    }
}

/* One loop per format, over storage units of one value each. */
#define DEFINE_ROWS(format, unit)                                                                  \
    static void format##_decode_row(const unit *restrict src, int64_t n, float *restrict dst) {    \
        for (int64_t i = 0; i < n; i++)                                                            \
            dst[i] = format##_decode(src[i]);                                                      \
    }                                                                                              \
    static void format##_encode_row(const float *restrict src, int64_t n, unit *restrict dst) {    \
        for (int64_t i = 0; i < n; i++)                                                            \
            dst[i] = format##_encode(src[i]);                                                      \
    }

DEFINE_ROWS(e4m3, uint8_t)
DEFINE_ROWS(e5m2, uint8_t)
DEFINE_ROWS(e8m0, uint8_t)
DEFINE_ROWS(bf16, uint16_t)
DEFINE_ROWS(fp16, uint16_t)

static void e2m1x2_decode_row(const uint8_t *restrict src, int64_t n, float *restrict dst) {
    for (int64_t i = 0; i + 1 < n; i += 2) {
        dst[i] = e2m1_decode(src[i / 2]);
        dst[i + 1] = e2m1_decode(src[i / 2] >> 4);
    }
    if (n & 1)
        dst[n - 1] = e2m1_decode(src[n / 2]);
}

static void e2m1x2_encode_row(const float *restrict src, int64_t n, uint8_t *restrict dst) {
    for (int64_t i = 0; i + 1 < n; i += 2)
        dst[i / 2] = (uint8_t)(e2m1_encode(src[i]) | e2m1_encode(src[i + 1]) << 4);
    if (n & 1)
        dst[n / 2] = e2m1_encode(src[n - 1]);
}

void moq_decode_row(moq_dtype dtype, const void *src, int64_t n, float *dst) {
    switch (dtype) {
    case MOQ_DT_F32:
        memcpy(dst, src, (size_t)n * sizeof *dst);
        break;
    case MOQ_DT_F16:
        fp16_decode_row(src, n, dst);
        break;
    case MOQ_DT_BF16:
        bf16_decode_row(src, n, dst);
        break;
    case MOQ_DT_E4M3:
        e4m3_decode_row(src, n, dst);
        break;
    case MOQ_DT_E5M2:
        e5m2_decode_row(src, n, dst);
        break;
    case MOQ_DT_E8M0:
        e8m0_decode_row(src, n, dst);
        break;
    case MOQ_DT_E2M1X2:
        e2m1x2_decode_row(src, n, dst);
        break;
    default: /* excluded by the contract */
        break;
    }
}

void moq_encode_row(moq_dtype dtype, const float *src, int64_t n, void *dst) {
    switch (dtype) {
    case MOQ_DT_F32:
        memcpy(dst, src, (size_t)n * sizeof *src);
        break;
    case MOQ_DT_F16:
        fp16_encode_row(src, n, dst);
        break;
    case MOQ_DT_BF16:
        bf16_encode_row(src, n, dst);
        break;
    case MOQ_DT_E4M3:
        e4m3_encode_row(src, n, dst);
        break;
    case MOQ_DT_E5M2:
        e5m2_encode_row(src, n, dst);
        break;
    case MOQ_DT_E8M0:
        e8m0_encode_row(src, n, dst);
        break;
    case MOQ_DT_E2M1X2:
        e2m1x2_encode_row(src, n, dst);
        break;
    default: /* excluded by the contract */
        break;
    }
}
