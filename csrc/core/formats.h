/* Number formats and block layouts: defined here once, for CPU code, CUDA code and tests.
 *
 * Encoding rounds to nearest even and saturates to the largest finite value (infinities too); a NaN
 * stays a NaN where the format has one. Facts: OCP 8-bit Floating Point Specification 1.0 (E4M3,
 * E5M2) and OCP Microscaling Formats 1.0 (E2M1, E8M0). */
#ifndef MOQ_CORE_FORMATS_H
#define MOQ_CORE_FORMATS_H

#include "core/tensor.h"

/* E4M3: bias 7, no infinity, NaN 0x7f and 0xff. */
#define MOQ_E4M3_MAX           448.0f
#define MOQ_E4M3_MIN_SUBNORMAL 0x1p-9f
/* E2M1: {0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives. */
#define MOQ_E2M1_MAX 6.0f
/* NVFP4: second-level scale = amax / 2688, so that the largest block scale is 448. */
#define MOQ_NVFP4_MAX   (MOQ_E2M1_MAX * MOQ_E4M3_MAX)
#define MOQ_NVFP4_GROUP 16
#define MOQ_MX_GROUP    32
#define MOQ_FP8_BLOCK   128
#define MOQ_INT4_GROUP  128

float moq_e4m3_decode(uint8_t code);
float moq_e5m2_decode(uint8_t code);
/* Only the low nibble counts. */
float moq_e2m1_decode(uint8_t nibble);
/* 2^(code - 127); 255 is NaN. */
float moq_e8m0_decode(uint8_t code);
float moq_bf16_decode(uint16_t code);
float moq_fp16_decode(uint16_t code);

uint8_t moq_e4m3_encode(float value);
uint8_t moq_e5m2_encode(float value);
/* A NaN, which E2M1 has no code for, becomes +0, as the cvt instruction of the hardware does not
 * promise more. */
uint8_t moq_e2m1_encode(float value);
/* Nearest power of two; anything not positive gives code 0, NaN gives 255. */
uint8_t moq_e8m0_encode(float value);
uint16_t moq_bf16_encode(float value);
uint16_t moq_fp16_encode(float value);

#endif
