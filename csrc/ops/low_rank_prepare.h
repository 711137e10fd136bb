/* The low-rank pairs of a linear, prepared: float32 on the device of the weight, the pair of each
 * partition behind that of the partition before. */
#ifndef MOQ_OPS_LOW_RANK_PREPARE_H
#define MOQ_OPS_LOW_RANK_PREPARE_H

#include "ops/weight_mode.h"

/* Pairs on the host, one block of memory: lora_a [partitions * rank, K], then lora_b [N, rank]. */
typedef struct {
    float *memory;
} moq_low_rank_values;

/* Reads and checks the pairs, of any type that scales are stored in, on the host or the device: a
 * tensor for all partitions or one for each. The caller frees values->memory, also where this
 * fails; it is NULL for a weight without pairs. */
moq_status moq_low_rank_read(const moq_weight *weight, const moq_weight_sources *sources,
                             void *stream, moq_low_rank_values *values, moq_err *err);
/* Writes the pairs to their prepared tensors; on CUDA the stream is waited for. */
moq_status moq_low_rank_write(const moq_weight *weight, const moq_low_rank_values *values,
                              void *stream, moq_params *params, moq_err *err);

#endif
