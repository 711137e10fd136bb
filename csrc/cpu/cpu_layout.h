/* Rearranging codes and scales on the CPU: fp4 packing, the swizzled order of block scales, and
 * FP8 codes moved to another scale. */
#ifndef MOQ_CPU_CPU_LAYOUT_H
#define MOQ_CPU_CPU_LAYOUT_H

#include "core/swizzle.h"
#include "core/tensor.h"

/* scale [M, K] or [B, M, K] of one-byte elements, any strides, to matrices in the order of
 * core/swizzle.h, with M padded to 128 and K to 4 by zeros. */
void moq_cpu_swizzle(const moq_tensor *scale, uint8_t *out);
/* The inverse of moq_cpu_swizzle, for the matrices that `logical` describes; out is row-major,
 * without padding. */
void moq_cpu_unswizzle(const uint8_t *swizzled, const moq_tensor *logical, uint8_t *out);

/* Codes [..., K], one in the low nibble of each byte, to bytes [..., K / 2] with the even column in
 * the low nibble, and back. K is even. */
void moq_cpu_pack_fp4(const moq_tensor *codes, uint8_t *packed);
void moq_cpu_unpack_fp4(const moq_tensor *packed, uint8_t *codes);

/* moved[c]: what becomes of the e4m3 code c, which means c * scale, for codes that mean c * target.
 */
void moq_requantize_table(float scale, float target, uint8_t moved[256]);

/* `rows` rows of e4m3 codes [N, K] from row `first`, which mean code * scale, to codes that mean
 * code * target, through fp16:
 *   code' = e4m3(float32(fp16(code * scale)) * float32(1 / target)),
 * and 0 where scale is 0. Written to the same rows of out, row-major. */
void moq_cpu_requantize_rows(const moq_tensor *codes, int64_t first, int64_t rows, float scale,
                             float target, uint8_t *out);

#endif
