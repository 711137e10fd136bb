/* exp(-h) and the logistic function in float32, as core/activation.h defines them: without a
 * branch, so that loops over rows become vectors. */
#ifndef MOQ_CPU_SIGMOID_H
#define MOQ_CPU_SIGMOID_H

#include "core/activation.h"

#include <math.h>
#include <string.h>

/* exp(-h) for MOQ_SILU_LEAST <= h <= MOQ_SILU_MOST. */
static inline float moq_exp_of_minus(float h) {
    float shifted = fmaf(h, MOQ_MINUS_LOG2E, MOQ_RINT_MAGIC), n = shifted - MOQ_RINT_MAGIC;
    float f = fmaf(h, MOQ_MINUS_LOG2E, -n), p = MOQ_EXP2_C5;
    uint32_t bits, exponent;
    p = fmaf(p, f, MOQ_EXP2_C4);
    p = fmaf(p, f, MOQ_EXP2_C3);
    p = fmaf(p, f, MOQ_EXP2_C2);
    p = fmaf(p, f, MOQ_EXP2_C1);
    p = fmaf(p, f, 1.0f);
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;
    memcpy(&p, &bits, sizeof p);
    return p;
}

/* 1 / (1 + exp(-z)), with z between the two ends; what a NaN gives is nobody's business, since
 * whoever asks multiplies with z. */
static inline float moq_sigmoid(float z) {
    float h = z < MOQ_SILU_LEAST ? MOQ_SILU_LEAST : z;
    return 1.0f / (1.0f + moq_exp_of_minus(h > MOQ_SILU_MOST ? MOQ_SILU_MOST : h));
}

#endif
