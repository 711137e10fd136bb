/* Quantization of activations on the CPU: rows, then whole tensors.
 *
 * All arithmetic is float32, each operation rounded once, in the order the formulas give, so that
 * the codes are the same on every machine. Nothing hides a NaN: it makes the amax, the dynamic
 * scale and every code under it NaN (+6 under a NaN block scale in NVFP4, whose 4 bits have none);
 * under a given FP8 scale its own code is one. Codes under a NaN scale are 0x7f. An infinity makes
 * a dynamic scale infinite, its finite neighbours 0 and itself NaN; under a given scale it
 * saturates, as does the block scale of NVFP4 over it. */
#ifndef MOQ_CPU_CPU_QUANTIZE_H
#define MOQ_CPU_CPU_QUANTIZE_H

#include "core/tensor.h"

/* Smallest scale of a token: 1 / (448 * 512). */
#define MOQ_FP8_TOKEN_MIN_SCALE (1.0f / (448.0f * 512.0f))
/* Smallest amax of a group. */
#define MOQ_FP8_GROUP_MIN_AMAX 1e-10f

/* The scales of a whole tensor found from its amax. 1 where the quotient is too small to be used:
 * a tensor of zeros, or one whose amax is below any that a scale can bring into range. */
float moq_fp8_dynamic_scale(float amax);   /* amax / 448; its reciprocal is finite */
float moq_nvfp4_dynamic_scale(float amax); /* amax / 2688 */

/* Largest magnitude of a tensor of 16 or 32-bit floats, 0 when it is empty; NaN when one of its
 * values is. */
float moq_cpu_amax(const moq_tensor *x);

/* The row functions take n values in x and write n codes. */

/* code = e4m3(x * inverse), inverse = float32(1 / scale) */
void moq_quantize_row_fp8_static(const float *x, int64_t n, float inverse, uint8_t *codes);
/* scale = max(amax / 448, 1 / (448 * 512)); code = e4m3(x / scale). Returns the scale. */
float moq_quantize_row_fp8_token(const float *x, int64_t n, uint8_t *codes);
/* Quantizes groups of `group` values, the last one as long as it is: scale = max(amax, 1e-10) /
 * 448; code = e4m3(x / scale). */
void moq_quantize_row_fp8_group(const float *x, int64_t n, int64_t group, uint8_t *codes,
                                float *scales);
/* Quantizes groups of 16 values, n a multiple of 16: block scale = e4m3(amax / float32(6 *
 * scale_2)), kept where it is subnormal and saturated at 448; code = e2m1(x / float32(block scale *
 * scale_2)), or 0 where that product is 0. Writes n / 2 bytes, the even value in the low nibble. */
void moq_quantize_row_nvfp4(const float *x, int64_t n, float scale_2, uint8_t *packed,
                            uint8_t *block_scales);

/* Whole tensors x [..., K] of 16 or 32-bit floats with any strides; outputs are contiguous. Large
 * tensors are quantized by all threads. */
void moq_cpu_quantize_fp8_tensor(const moq_tensor *x, float scale, uint8_t *codes);
void moq_cpu_quantize_fp8_token(const moq_tensor *x, uint8_t *codes, float *scales);
void moq_cpu_quantize_fp8_group(const moq_tensor *x, int64_t group, uint8_t *codes, float *scales);
void moq_cpu_quantize_nvfp4(const moq_tensor *x, float scale_2, uint8_t *packed,
                            uint8_t *block_scales);

/* The scale of a row of int8 codes: its largest magnitude / 127, or 1 where that is below the
 * normal numbers. */
float moq_int8_scale(const float *row, int64_t n);

/* Rounds a row to the values of its int8 codes, row * inverse to the nearest even of -128 to 127.
 * NaN stays. */
void moq_round_row_int8(float *row, int64_t n, float inverse);

#endif
