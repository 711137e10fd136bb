/* Operation rotary_embedding: the values of heads turned by the angles of their tokens. */
#ifndef MOQ_OPS_ROTARY_CALL_H
#define MOQ_OPS_ROTARY_CALL_H

#include "core/rotary.h"

/* Checks x [B, T, H, D], D even, and cos and sin [B or 1, T, D] of its dtype, all on one device,
 * and resolves what the result is. */
moq_status moq_plan_rotary(const moq_tensor *x, const moq_tensor *cos, const moq_tensor *sin,
                           moq_rotary *plan, moq_err *err);
/* Checks `out`, of the shape and dtype of x without gaps, and writes it; on a CUDA device that is
 * queued on `stream`. */
moq_status moq_run_rotary(const moq_rotary *plan, const moq_tensor *out, void *stream,
                          moq_err *err);

#endif
