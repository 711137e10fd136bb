/* Operation dequantize: the stored weight of a layer back to numbers, for every weight format. */
#ifndef MOQ_OPS_DEQUANTIZE_H
#define MOQ_OPS_DEQUANTIZE_H

#include "core/tensor.h"
#include "cpu/cpu_dequantize.h"

typedef struct {
    moq_tensor weight;
    moq_tensor scale;
    moq_tensor scale_2; /* ndim -1 where there is none */
    moq_dequantize_job job;
    moq_tensor out; /* shape and dtype of the result; no memory */
} moq_dequantize_plan;

/* Resolves the layout of a stored weight from the algorithm's name (any spelling a configuration
 * may have) and the shapes, and checks all of it. An absent scale is NULL. `group_size` is checked
 * against the shapes, is the edge of a tile for FP8_PB_WO, means nothing to formats without groups,
 * and is 0 where not known.
 */
moq_status moq_plan_dequantize(const char *algo, const moq_tensor *weight, const moq_tensor *scale,
                               const moq_tensor *scale_2, int64_t group_size, moq_dtype out_dtype,
                               moq_dequantize_plan *plan, moq_err *err);
/* Runs a plan into `out`, a contiguous tensor as plan->out describes it. */
moq_status moq_run_dequantize(const moq_dequantize_plan *plan, const moq_tensor *out, moq_err *err);

#endif
