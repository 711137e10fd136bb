/* Operation router_logits: products of tokens with the rows of experts. */
#ifndef MOQ_OPS_GATE_CALL_H
#define MOQ_OPS_GATE_CALL_H

#include "core/gate.h"

/* Checks the tensors, on one CUDA device, and describes the result; `dtype` is that of x, or
 * float32. */
moq_status moq_plan_gate(const moq_tensor *x, const moq_tensor *weight, moq_dtype dtype,
                         moq_gate *plan, moq_err *err);
/* Checks `out`, [T, E], and queues the kernel on `stream`. */
moq_status moq_run_gate(const moq_gate *plan, const moq_tensor *out, void *stream, moq_err *err);

#endif
