/* Weight processing: the tensors of a checkpoint to the ones that kernels read, for a matrix or for
 * all experts of a stack at once. Everything is checked before the first byte is written. */
#ifndef MOQ_OPS_WEIGHT_PREPARE_H
#define MOQ_OPS_WEIGHT_PREPARE_H

#include "ops/weight_mode.h"

/* Bytes of device memory to work in; 0 on the CPU. */
int64_t moq_prepare_workspace(const moq_weight *weight, bool fresh);

/* Turns checkpoint tensors into prepared ones. On CUDA, codes are on the weight's device, scales of
 * any other kind there or on the host. What lies in one expert of a stack is refused with its
 * number. */
moq_status moq_weight_prepare(const moq_weight *weight, const moq_weight_sources *sources,
                              moq_prepare_mode mode, moq_params *params, moq_err *err);

#endif
