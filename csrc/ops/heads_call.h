/* Operation turn_heads: heads of q and k normed and turned in their place. */
#ifndef MOQ_OPS_HEADS_CALL_H
#define MOQ_OPS_HEADS_CALL_H

#include "core/heads.h"

/* Checks the tensors, all of them on one CUDA device, and the numbers of heads. A weight that is
 * NULL is none. */
moq_status moq_plan_heads(const moq_tensor *x, const moq_tensor *positions, const moq_tensor *table,
                          const moq_tensor *const weights[MOQ_HEADS_KINDS],
                          const int64_t heads[MOQ_HEADS_KINDS], double eps, moq_heads *plan,
                          moq_err *err);
/* Queued on `stream`. */
moq_status moq_run_heads(const moq_heads *plan, void *stream, moq_err *err);

#endif
