/* Operations that rearrange stored tensors: swizzled block scales, fp4 packing, and fused FP8
 * weights requantized to their largest scale. Each has a function that checks the inputs and
 * describes the result, and one that writes it, where the input is: CUDA work is queued on
 * `stream`, which the host has none of. */
#ifndef MOQ_OPS_LAYOUT_H
#define MOQ_OPS_LAYOUT_H

#include "core/tensor.h"

/* scale [M, K] or [B, M, K] of one-byte elements -> the same rank, M padded to 128, K to 4. */
moq_status moq_describe_swizzle(const moq_tensor *scale, moq_tensor *expected, moq_err *err);
moq_status moq_run_swizzle(const moq_tensor *scale, void *stream, const moq_tensor *out,
                           moq_err *err);
/* The inverse: `shape` is that of the scales before. */
moq_status moq_describe_unswizzle(const moq_tensor *swizzled, int32_t ndim, const int64_t *shape,
                                  moq_tensor *expected, moq_err *err);
moq_status moq_run_unswizzle(const moq_tensor *swizzled, const moq_tensor *expected, void *stream,
                             const moq_tensor *out, moq_err *err);

/* codes [..., K], one to a byte -> [..., K / 2] */
moq_status moq_describe_pack_fp4(const moq_tensor *codes, moq_tensor *expected, moq_err *err);
moq_status moq_run_pack_fp4(const moq_tensor *codes, void *stream, const moq_tensor *out,
                            moq_err *err);
/* packed [..., K / 2] -> [..., K] */
moq_status moq_describe_unpack_fp4(const moq_tensor *packed, moq_tensor *expected, moq_err *err);
moq_status moq_run_unpack_fp4(const moq_tensor *packed, void *stream, const moq_tensor *out,
                              moq_err *err);

/* weight [N, K] e4m3 whose rows fall into `count` partitions, scale of one element or one for each
 * partition -> codes for the largest scale, which is written to max_scale (float32, one element).
 * Nothing changes when the scales are equal. Scales may be on the host where the weight is on a
 * device; those on a device are read back, not within a capture.
 *
 * A stack [E, N, K] with scales [E, count] (or [E] for one) has the largest scale of each expert,
 * max_scale [E]; only one partition leaves an expert as it is. */
moq_status moq_describe_requantize(const moq_tensor *weight, const moq_tensor *scale,
                                   const int64_t *partitions, int64_t count, moq_tensor *expected,
                                   moq_err *err);
moq_status moq_run_requantize(const moq_tensor *weight, const moq_tensor *scale,
                              const int64_t *partitions, int64_t count, void *stream,
                              const moq_tensor *out, const moq_tensor *max_scale, moq_err *err);

#endif
