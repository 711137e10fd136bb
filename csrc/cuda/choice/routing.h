/* Load of experts, as it is expected of uniform routing. */
#ifndef MOQ_CUDA_CHOICE_ROUTING_H
#define MOQ_CUDA_CHOICE_ROUTING_H

#include "core/moe.h"

#include <math.h>

/* Slots of the experts that are here. */
static inline double moq_expected_slots(const moq_moe_spec *spec, int64_t tokens) {
    return (double)tokens * spec->top_k * spec->experts / spec->global_experts;
}

/* Weights of an expert. */
static inline double moq_expert_weights(const moq_moe_spec *spec) {
    return (double)spec->w13.in_features * (double)spec->w13.out_features +
           (double)spec->w2.in_features * (double)spec->w2.out_features;
}

/* Experts that have a slot. */
static inline double moq_active_experts(const moq_moe_spec *spec, int64_t tokens) {
    double share = (double)spec->top_k / spec->global_experts;
    return fmax(1, spec->experts * (1 - pow(share < 1 ? 1 - share : 0, (double)tokens)));
}

/* Tiles of up to `most` rows of an expert that has so many rows in the mean, as chance spreads
 * them.
 */
static inline double moq_expected_tiles(double rows, double most) {
    double spread = 1.2 * sqrt(rows), sum = 0;
    for (int i = -1; i <= 1; i++)
        sum += ceil(fmax(1, rows + i * spread) / most);
    return sum / 3;
}

#endif
