/* The call of experts: validated and planned, still without Python. Everything is checked before
 * the first byte is written. */
#ifndef MOQ_OPS_MOE_CALL_H
#define MOQ_OPS_MOE_CALL_H

#include "core/moe.h"
#include "ops/job.h"
#include "ops/moe_kernels.h"
#include "ops/params.h"
#include "ops/plan.h"

/* The tensors and options of a call beside parameters. */
typedef struct {
    const moq_tensor *x;          /* [..., H] of the layer's dtype, or codes; any strides */
    const moq_tensor *x_scale;    /* [..., moq_moe_x_scales] where that is not 0, else NULL */
    const moq_tensor *weights;    /* [..., top_k] */
    const moq_tensor *ids;        /* [..., top_k] */
    const moq_tensor *expert_map; /* [global_experts], or NULL */
    const moq_tensor *y;          /* [..., H], contiguous rows */
    bool weights_on_input;
    bool accumulate;
} moq_moe_inputs;

/* A call and the kernel that is to run it. Points into itself: not to be copied. */
typedef struct {
    moq_job job; /* first: ops/job.h */
    moq_moe_call call;
    moq_moe_spec spec; /* the call's, where the absence of a scale changes what becomes of x */
    const moq_moe_kernel *kernel;
    moq_matrix x, y;
} moq_moe_job;

/* Checks a call and picks the kernel. The job refers to the plan's problem and to the inputs. */
moq_status moq_moe_open(moq_plan *plan, const moq_params *params, const moq_moe_inputs *inputs,
                        moq_moe_job *job, moq_err *err);

/* Opens a call that was checked, of one token or more, for a kernel that can run as many. */
moq_status moq_moe_open_choice(const moq_moe_spec *spec, const moq_params *params,
                               const moq_moe_inputs *inputs, moq_choice choice, moq_moe_job *job,
                               moq_err *err);

/* Times all kernels of the plan: moq_operation.measure. */
moq_status moq_moe_measure(const moq_plan *plan, const moq_params *params, int64_t tokens,
                           const moq_choice *only, moq_timing *timings, int *count, moq_err *err);

#endif
