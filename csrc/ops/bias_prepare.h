/* The biases of a stack of experts, prepared: float32 on the device of the weight. */
#ifndef MOQ_OPS_BIAS_PREPARE_H
#define MOQ_OPS_BIAS_PREPARE_H

#include "ops/weight_mode.h"

/* Writes bias [E, N], on the host or beside the weight, to `out`, float32 without gaps. The host's
 * may be of any type that scales are stored in, the device's of 16 or 32-bit floats; both have any
 * strides. On CUDA the work goes to the stream of `mode`, which is waited for. */
moq_status moq_bias_prepare(const moq_weight *weight, const moq_tensor *bias, moq_prepare_mode mode,
                            const moq_tensor *out, moq_err *err);

#endif
