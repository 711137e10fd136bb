/* The prepared tensors of a layer, by what they are, and their check against the layer's list. */
#ifndef MOQ_OPS_PARAMS_H
#define MOQ_OPS_PARAMS_H

#include "core/linear.h"

/* Contiguous tensors of the shapes in the layer's list of prepared parameters; dtype MOQ_DT_NONE
 * marks one that is absent. */
typedef struct {
    moq_tensor of[MOQ_PARAM_PLACES];
} moq_params;

/* Places [first, end) absent. Their shapes are not written, which no one reads then and a call has
 * no time for. */
static inline void moq_params_clear(moq_params *params, int first, int end) {
    for (int i = first; i < end; i++) {
        params->of[i].dtype = MOQ_DT_NONE;
        params->of[i].data = NULL;
    }
}

/* Dtypes, shapes and layouts of the `count` tensors that are `wanted`; `mapping` is the argument
 * that holds them. */
moq_status moq_check_params(const moq_param_spec *wanted, int count, const moq_params *params,
                            const char *mapping, moq_err *err);

#endif
