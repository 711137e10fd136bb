/* Operation route: router logits to the experts of every token and their weights. */
#ifndef MOQ_OPS_ROUTE_CALL_H
#define MOQ_OPS_ROUTE_CALL_H

#include "core/route.h"

typedef struct {
    moq_route route;
    moq_tensor weights; /* shapes and dtypes of the results; no memory */
    moq_tensor ids;
} moq_route_plan;

/* "softmax", "topk_softmax", "sigmoid", "sqrtsoftplus" */
moq_status moq_route_scoring_from_name(const char *name, moq_route_scoring *out, moq_err *err);
/* Checks what is asked for, all of it but `experts`, which the logits tell, and describes the
 * results; top_groups 0 stands for not given. */
moq_status moq_plan_route(const moq_route *asked, moq_route_plan *plan, moq_err *err);
/* Checks the results and routes, on the device of the logits; on a CUDA device that is one kernel,
 * queued on `stream`. */
moq_status moq_run_route(const moq_route_plan *plan, const moq_tensor *weights,
                         const moq_tensor *ids, void *stream, moq_err *err);

#endif
