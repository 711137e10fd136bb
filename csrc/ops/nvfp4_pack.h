/* NVFP4 weights to the packed layout (core/nvfp4_packed.h) and back, wherever the tensors are. */
#ifndef MOQ_OPS_NVFP4_PACK_H
#define MOQ_OPS_NVFP4_PACK_H

#include "core/tensor.h"

/* weight e2m1 [N, K / 2] and scale e4m3 [N, K / 16] or [N, K / 32], contiguous rows -> units. With
 * [E, ...] of both, each expert after the one before. */
moq_status moq_describe_pack_nvfp4(const moq_tensor *weight, const moq_tensor *scale,
                                   moq_tensor *expected, moq_err *err);
moq_status moq_run_pack_nvfp4(const moq_tensor *weight, const moq_tensor *scale, void *stream,
                              const moq_tensor *out, moq_err *err);

/* The inverse of packing, for a layer of shape [N, K], or [E, N, K] where ndim is 3. */
moq_status moq_describe_unpack_nvfp4(const moq_tensor *packed, int32_t ndim, const int64_t *shape,
                                     int64_t group_size, moq_tensor *weight, moq_tensor *scale,
                                     moq_err *err);
moq_status moq_run_unpack_nvfp4(const moq_tensor *packed, int32_t ndim, const int64_t *shape,
                                int64_t group_size, void *stream, const moq_tensor *weight,
                                const moq_tensor *scale, moq_err *err);

#endif
