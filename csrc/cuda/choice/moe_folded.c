/* NVFP4 experts with FP8 products and many tokens on Hopper: see moe_folded.h. */
#include "cuda/choice/moe_folded.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/routing.h"

#include <math.h>

/* The launches of a call and what is not hidden of them, and bytes a second of what lies between
 * the products: codes of x a row a slot, g and its codes, and d, which the sum over slots reads, as
 * fast as in moe_many.c. */
#define STEPS   25e-6
#define SUMMED  4.8e12
#define BETWEEN 3.6e12

/* Rows of an expert in the mean below which nothing was measured, and what is added there so that
 * the kernel for any chip is taken. */
#define LEAST_ROWS 4
#define NOT_KNOWN  1.6

/* What tiles of a way do, of H200: weights a second that all blocks fold and multiply with no rows,
 * for each tile again, and products a second. The two add up: six times of Qwen3-30B-A3B from 64 to
 * 8192 tokens are met within 2 %. */
typedef struct {
    int rows;
    double fold, products;
} pace;

static const pace WAYS[MOQ_MOE_FOLDED_WAYS] = {{MOQ_MOE_FOLDED_ROWS, 4.1e12, 8.5e14},
                                               {MOQ_MOE_FOLDED_WIDE, 3.2e12, 8.5e14}};

/* Weights that all blocks together have folded when the last is done, of one product: pairs of
 * blocks take tiles of 256 rows of W in turn. */
static double folded(const moq_linear_spec *spec, double tiles) {
    double pairs = fmax(1, spec->target.sm_count / 2),
           along = ceil((double)spec->out_features / 256);
    return ceil(tiles * along / pairs) * pairs * 256 * (double)spec->in_features;
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, int way) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    const pace *p = &WAYS[way];
    double slots = moq_expected_slots(spec, tokens);
    double h = (double)w13->in_features, i = (double)w2->in_features;
    double weights = h * (double)w13->out_features + i * (double)w2->out_features;
    double active = moq_active_experts(spec, tokens);
    double tiles = active * moq_expected_tiles(slots / active, p->rows);
    double fold = (folded(w13, tiles) + folded(w2, tiles)) / moq_matrix_rate(&w13->target, p->fold);
    double products = slots * weights / moq_matrix_rate(&w13->target, p->products);
    double d = w2->dtype == MOQ_DT_BF16 ? 2 : 4; /* bytes */
    double between = slots * (d * h / moq_memory_rate(&w13->target, SUMMED) +
                              (h + 6 * i) / moq_memory_rate(&w13->target, BETWEEN));
    double all = STEPS + between + fold + products;
    return slots < LEAST_ROWS * active ? NOT_KNOWN * all : all;
}

/* Layers without a gate have the small tiles alone. */
static int best_way(const moq_moe_spec *spec, int64_t tokens) {
    return spec->gated && seconds(spec, tokens, 1) < seconds(spec, tokens, 0) ? 1 : 0;
}

moq_way moq_moe_folded_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant) {
    bool given = variant > 0 && variant <= (spec->gated ? MOQ_MOE_FOLDED_WAYS : 1);
    return moq_way_of(given ? variant : 0, given ? variant - 1 : best_way(spec, tokens), 1);
}

uint64_t moq_moe_folded_variants(const moq_moe_call *call) {
    int other = 1 - best_way(call->spec, call->tokens);
    return call->spec->gated ? 1 | 1ull << (other + 1) : 1;
}

double moq_moe_folded_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, best_way(spec, tokens));
}
