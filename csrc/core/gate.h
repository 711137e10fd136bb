/* The logits of a router: products of every token with the row of every expert.
 *
 *   y[t, e] = rounded(sum over k of x[t, k] * w[e, k])
 *
 * Products are exact and summed in float32, in one order for a number of columns, however many
 * tokens there are; "rounded" is once, to the dtype of y: that of x, or float32. */
#ifndef MOQ_CORE_GATE_H
#define MOQ_CORE_GATE_H

#include "core/tensor.h"

typedef struct {
    moq_tensor x;      /* [T, K] of bfloat16 or float16; K a multiple of 32, rows without gaps */
    moq_tensor weight; /* [E, K] of the dtype of x, rows without gaps */
    moq_dtype dtype;   /* of y [T, E] */
} moq_gate;

#endif
