/* Operation qk_norm_rope: heads of q and k normed and turned in their place, and k and v stored. */
#ifndef MOQ_OPS_HEADS_CALL_H
#define MOQ_OPS_HEADS_CALL_H

#include "core/heads.h"

typedef struct {
    const moq_tensor *x, *positions, *table;
    const moq_tensor *weight[MOQ_HEADS_KINDS];   /* NULL: no norm */
    const moq_tensor *cache[MOQ_CACHES], *slots; /* all or none are NULL */
    int64_t heads[MOQ_HEADS_KINDS];
    double eps;
} moq_heads_given;

/* Checks the tensors, all of them on one CUDA device, and the numbers of heads. */
moq_status moq_plan_heads(const moq_heads_given *given, moq_heads *plan, moq_err *err);
/* Queues the work on `stream`. */
moq_status moq_run_heads(const moq_heads *plan, void *stream, moq_err *err);

#endif
