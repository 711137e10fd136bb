/* The low-rank part of a linear on the device: core/low_rank.h. */
#ifndef MOQ_CUDA_LINEAR_CUDA_LOW_RANK_H
#define MOQ_CUDA_LINEAR_CUDA_LOW_RANK_H

#include "core/low_rank.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of low_rank->inner: its sums, once for each of the parts that K is split into. */
int64_t moq_cuda_low_rank_bytes(const moq_low_rank *low_rank);
/* Queues both products on the stream of the current device. */
moq_status moq_cuda_low_rank(const moq_low_rank *low_rank, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
