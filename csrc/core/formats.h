/* Number formats and block layouts: defined here once, for CPU code, CUDA code and tests.
 *
 * Encoding rounds to nearest, ties to even. The storage formats of at most 8 bits saturate to their
 * largest finite value, infinities included; bf16 and fp16 are what layers compute with and convert
 * as IEEE 754 says, so overflow is an infinity. A NaN stays a NaN where the format has one, with
 * its sign. Facts: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2) and OCP Microscaling
 * Formats 1.0 (E2M1, E8M0). */
#ifndef MOQ_CORE_FORMATS_H
#define MOQ_CORE_FORMATS_H

#include "core/tensor.h"

/* E4M3: bias 7, no infinity, NaN 0x7f and 0xff. */
#define MOQ_E4M3_MAX           448.0f
#define MOQ_INT8_MAX           127.0f
#define MOQ_E4M3_MIN_SUBNORMAL 0x1p-9f
/* E2M1: {0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives. */
#define MOQ_E2M1_MAX 6.0f
/* NVFP4: second-level scale = amax / 2688, so that the largest block scale is 448. */
#define MOQ_NVFP4_MAX (MOQ_E2M1_MAX * MOQ_E4M3_MAX)
/* A scale that values are divided by is greater than this, 2.9e-39: E4M3 codes per tensor are made
 * with its reciprocal, and that of 2^-128 is 2^128, which float32 does not hold. Zeros times an
 * infinity would be NaN. */
#define MOQ_DIVISOR_ABOVE 0x1p-128f
/* The largest weight_scale_2 whose block scales can be folded into E4M3 codes: outputs are scaled
 * by its product with a power of two of their row, at most 8 (6 * 448 becomes a code up to 448). */
#define MOQ_FOLDED_MOST 0x1p124f
#define MOQ_NVFP4_GROUP 16
#define MOQ_MX_GROUP    32
#define MOQ_FP8_BLOCK   128
#define MOQ_INT4_GROUP  128

#ifdef __cplusplus
extern "C" {
#endif

/* Exact: every value of every format is a float. */
float moq_e4m3_decode(uint8_t code);
float moq_e5m2_decode(uint8_t code);
/* E2M1; only the low nibble of the code counts. */
float moq_e2m1_decode(uint8_t nibble);
/* E8M0: 2^(code - 127); 255 is NaN. */
float moq_e8m0_decode(uint8_t code);
float moq_bf16_decode(uint16_t code);
float moq_fp16_decode(uint16_t code);

uint8_t moq_e4m3_encode(float value);
uint8_t moq_e5m2_encode(float value);
/* A nibble. A NaN, which E2M1 has no code for, becomes +6, as with cvt.rn.satfinite of PTX. */
uint8_t moq_e2m1_encode(float value);
/* Nearest power of two, ties up; zero and anything negative give code 0, NaN gives 255. */
uint8_t moq_e8m0_encode(float value);
/* A NaN keeps the upper bits of its payload and becomes quiet. */
uint16_t moq_bf16_encode(float value);
uint16_t moq_fp16_encode(float value);

/* True for the dtypes the row conversions take: F16, BF16, F32, E4M3, E5M2, E8M0 and E2M1X2. */
bool moq_dtype_is_float(moq_dtype dtype);
/* n consecutive values of a dtype moq_dtype_is_float accepts, to float and back. For E2M1X2, n
 * counts values: value i is in byte i / 2, the even one in the low nibble; encoding an odd n clears
 * the last high nibble. Source and destination do not overlap. */
void moq_decode_row(moq_dtype dtype, const void *src, int64_t n, float *dst);
void moq_encode_row(moq_dtype dtype, const float *src, int64_t n, void *dst);

#ifdef __cplusplus
}
#endif
#endif
