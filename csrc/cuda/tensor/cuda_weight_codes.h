/* Weights to codes and scales on the device: core/weight_codes.h has the formulas, and the bits are
 * those of cpu/cpu_weight_codes.h, sums of a search among them. */
#ifndef MOQ_CUDA_TENSOR_CUDA_WEIGHT_CODES_H
#define MOQ_CUDA_TENSOR_CUDA_WEIGHT_CODES_H

#include "core/status.h"
#include "core/weight_codes.h"

#ifdef __cplusplus
extern "C" {
#endif

/* *bits = those of the largest magnitude of `count` values without gaps; NaN is above all others.
 * `bits` is on the device. */
moq_status moq_cuda_find_amax(const void *values, moq_dtype dtype, int64_t count, uint32_t *bits,
                              void *stream, moq_err *err);

/* Launches on the current device: one kernel, two with a search. Groups of E4M3 and E8M0 scales are
 * 16 or 32 columns of one row. Fastest if weight and codes begin at multiples of 16 bytes. */
moq_status moq_cuda_weight_codes(const moq_weight_codes *w, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
