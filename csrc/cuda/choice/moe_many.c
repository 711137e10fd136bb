/* Experts of many tokens on Hopper: see moe_many.h. */
#include "cuda/choice/moe_many.h"

#include "cuda/choice/chip.h"

#include <math.h>

/* Experts that have a slot, as they are expected of a router that likes all. */
static double active_experts(const moq_moe_spec *spec, double tokens) {
    double all = spec->experts, share = (double)spec->top_k / spec->global_experts;
    return all * (1 - pow(share < 1 ? 1 - share : 0, tokens));
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    const moq_target *target = &w13->target;
    bool packed = w13->weight == MOQ_WEIGHT_E2M1_PACKED;
    double slots = (double)tokens * spec->top_k * spec->experts / spec->global_experts;
    double active = fmax(1, active_experts(spec, (double)tokens));
    double rows = slots / active;
    double most = 64 << row;
    double weights = (double)w13->in_features * (double)w13->out_features +
                     (double)w2->in_features * (double)w2->out_features;
    double read = active * weights * (packed ? 0.5625 : 1) / moq_memory_rate(target, 3.9e12);
    double tiles = ceil((rows + sqrt(rows)) / most);
    double padded = fmax(rows, tiles * most * 3 / 4);
    double products = active * weights * padded / moq_matrix_rate(target, packed ? 3.3e14 : 5e14);
    double between = slots * (double)w2->out_features * (8 + 4) / moq_memory_rate(target, 3e12);
    return 20e-6 + between + fmax(read, products);
}

/* Layers without a gate have the small tiles alone. */
static int best_row(const moq_moe_spec *spec, int64_t tokens) {
    if (!spec->gated)
        return 0;
    return seconds(spec, tokens, 0) <= seconds(spec, tokens, 1) ? 0 : 1;
}

moq_way moq_moe_many_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant) {
    bool given = variant > 0 && variant <= (spec->gated ? MOQ_MOE_MANY_WAYS : 1);
    return moq_way_of(given ? variant : 0, given ? variant - 1 : best_row(spec, tokens), 1);
}

uint64_t moq_moe_many_variants(const moq_moe_call *call) {
    int other = 1 - best_row(call->spec, call->tokens);
    return call->spec->gated ? 1 | 1ull << (other + 1) : 1;
}

double moq_moe_many_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, best_row(spec, tokens));
}
