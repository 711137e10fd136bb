/* Measuring which kernel is fastest for a number of tokens, instead of estimating it.
 *
 * Tuning is asked for, never done on the way: it takes memory and time, and waits for the device.
 * It changes which kernel runs, hence at most the last bits of results, or with compute "auto" what
 * is multiplied. */
#ifndef MOQ_OPS_TUNE_H
#define MOQ_OPS_TUNE_H

#include "ops/linear.h"

/* Variants of a kernel that are measured. */
#define MOQ_MAX_VARIANTS 64
#define MOQ_MAX_TIMINGS  (MOQ_MAX_KERNELS * MOQ_MAX_VARIANTS)

typedef struct {
    moq_linear_choice choice;
    double seconds; /* of a call, the median */
} moq_linear_timing;

/* Times every kernel of the plan that can serve m > 0 rows, and all of its variants, on random x,
 * and writes them, at most MOQ_MAX_TIMINGS, the fastest first. On CUDA calls are replayed from
 * graphs, each with another copy of the weight, so that it comes from memory; not within a capture.
 */
moq_status moq_linear_measure(const moq_linear_spec *spec, const moq_linear_plan *plan,
                              const moq_linear_params *params, int64_t m,
                              moq_linear_timing *timings, int *count, moq_err *err);

#endif
