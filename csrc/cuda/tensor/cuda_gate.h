/* Logits of a router on the device (core/gate.h). */
#ifndef MOQ_CUDA_TENSOR_CUDA_GATE_H
#define MOQ_CUDA_TENSOR_CUDA_GATE_H

#include "core/gate.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the logits of at least one token and expert. Rows of x and of the weight begin at multiples
 * of 16 bytes, `out` has no gaps. MOQ_ERR_UNSUPPORTED before compute capability 9.0. Queued on
 * `stream` of the current device; may overlap with its neighbours there (PDL). */
moq_status moq_cuda_gate(const moq_gate *gate, void *out, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
