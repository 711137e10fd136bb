/* Rotary embedding: the two halves of a head's values are turned against each other.
 *
 *   y[d] = rounded(rounded(x[d] * cos[d]) + rounded(other[d] * sin[d])), where other[d] is
 *   -x[d + D / 2] in the first half, and x[d - D / 2] in the second.
 *
 * Arithmetic is float32, each operation rounded once, and "rounded" is to the dtype of x, as by a
 * model that writes each step to memory. */
#ifndef MOQ_CORE_ROTARY_H
#define MOQ_CORE_ROTARY_H

#include "core/tensor.h"

typedef struct {
    moq_tensor x;        /* [B, T, H, D] of 16 or 32-bit floats, any strides */
    moq_tensor cos, sin; /* [B, T, 1, D] of the dtype of x: what all of B share has a stride of 0 */
} moq_rotary;

#endif
