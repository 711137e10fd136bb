/* Operation quantize_weight: a weight to the codes and scales of an algorithm, as ModelOpt's
 * exporter stores them. */
#ifndef MOQ_OPS_QUANTIZE_WEIGHT_H
#define MOQ_OPS_QUANTIZE_WEIGHT_H

#include "core/tensor.h"
#include "cpu/cpu_weight_codes.h"

typedef struct {
    moq_weight_codes job;
    moq_tensor codes, scales; /* shapes and dtypes of the results; no memory */
    float second;             /* weight_scale_2, or 0 where the algorithm has none */
    moq_device device;        /* of the weight and the results */
} moq_quantize_weight_plan;

/* MOQ_ERR_VALUE for a text that names no search. */
moq_status moq_scale_search_from_name(const char *name, moq_scale_search *out, moq_err *err);

/* The largest magnitude of a weight of any shape that is not empty, without gaps; NaN if one is
 * NaN. On a device it waits for the stream. */
moq_status moq_weight_amax(const moq_tensor *weight, void *stream, float *amax, moq_err *err);

/* Resolves what is written. `amax` is the largest magnitude of all weights that share a scale with
 * this one, negative for its own; it counts where one scale, or second-level scale, is the whole
 * weight's, and its own is found by moq_weight_amax(). `group_size` is 0 for that of the algorithm.
 */
moq_status moq_plan_quantize_weight(const char *algo, const moq_tensor *weight, float amax,
                                    int64_t group_size, moq_scale_search search, void *stream,
                                    moq_quantize_weight_plan *plan, moq_err *err);
/* Runs a plan into contiguous tensors of plan->codes and plan->scales, on a device in the order of
 * the stream. */
moq_status moq_run_quantize_weight(const moq_quantize_weight_plan *plan, const moq_tensor *codes,
                                   const moq_tensor *scales, void *stream, moq_err *err);

#endif
