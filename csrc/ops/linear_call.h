/* The call of a linear: validated and planned, still without Python. Everything is checked before
 * the first byte is written. */
#ifndef MOQ_OPS_LINEAR_CALL_H
#define MOQ_OPS_LINEAR_CALL_H

#include "core/low_rank.h"
#include "ops/job.h"
#include "ops/linear_kernels.h"
#include "ops/params.h"
#include "ops/plan.h"

/* A call and the kernel that is to run it. Points into itself: not to be copied. */
typedef struct {
    moq_job job; /* first: ops/job.h */
    moq_linear_call call;
    moq_linear_spec spec; /* the call's, where the absence of a scale changes what becomes of x */
    const moq_linear_kernel *kernel;
    moq_matrix x, y;
    moq_low_rank low_rank;       /* of a layer that has one */
    int64_t inner_at, addend_at; /* its sums in the workspace */
} moq_linear_job;

/* Checks y = x W^T + bias and picks the kernel. x is [..., in_features] with any strides, y [...,
 * out_features] with contiguous rows; bias, of x's dtype or float32, may be NULL. The job refers to
 * the plan's problem, x and y. */
moq_status moq_linear_open(moq_plan *plan, const moq_params *params, const moq_tensor *x,
                           const moq_tensor *bias, const moq_tensor *y, moq_linear_job *job,
                           moq_err *err);

/* Opens a call that was checked, of m > 0 rows, for a kernel that can run as many. */
moq_status moq_linear_open_choice(const moq_linear_spec *spec, const moq_params *params,
                                  const moq_tensor *x, const moq_tensor *bias, const moq_tensor *y,
                                  int64_t m, moq_choice choice, moq_linear_job *job, moq_err *err);

/* The shape of y for an x; fails as moq_linear_open would. */
moq_status moq_linear_output_shape(const moq_linear_spec *spec, const moq_tensor *x, int64_t *shape,
                                   moq_err *err);

/* Times all kernels of the plan: moq_operation.measure. */
moq_status moq_linear_measure(const moq_plan *plan, const moq_params *params, int64_t m,
                              const moq_choice *only, moq_timing *timings, int *count,
                              moq_err *err);

#endif
