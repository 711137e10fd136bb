/* NVFP4 experts with FP8 products and many tokens on Hopper: see moe_folded.h. */
#include "cuda/choice/moe_folded.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/routing.h"

#include <math.h>

/* The launches of a call and what is not hidden of them, and bytes a second of what lies between
 * the products: codes of x a row a slot, g and its codes, and d, which the sum over slots reads, as
 * fast as in moe_prefill.c. */
#define STEPS   15e-6
#define SUMMED  4.8e12
#define BETWEEN 3.9e12

/* Rows of an expert in the mean below which little was measured (64 tokens of Llama-4-Maverick, 1.3
 * rows, a tenth longer than expected), and what is multiplied there, so that the kernel for any
 * chip, whose estimates are up to a third too long with so few rows, is not left too soon; and with
 * one token, whose kernels are too short to hide each other's beginnings. */
#define LEAST_ROWS 2.25
#define NOT_KNOWN  1.69
#define ONE_TOKEN  2.2

/* What tiles of a way do, of H200: weights a second that all blocks fold and multiply with no rows,
 * for each tile again, products a second, and seconds of a tile's outputs. They add up. Fitted to
 * both ways in 36 cells of seven models with 16 to 8192 tokens on an H200 and 18 of three on an
 * H100, 5 % root mean square: the way that is chosen is the faster one in all of them. Between this
 * kernel and the exact one the choice loses 0.3 % in the mean of 49 cells, 7 % at most
 * (docs/lab/experts-prefill.md). */
typedef struct {
    int rows;
    double fold, products, outputs;
} pace;

static const pace CONFIGS[MOQ_MOE_FOLDED_CONFIGS] = {
    {MOQ_MOE_FOLDED_ROWS, 4.49e12, 1.14e15, 0.965e-6},
    {MOQ_MOE_FOLDED_WIDE, 3.34e12, 1.13e15, 0.836e-6}};

/* Seconds of folding and of outputs in one product: pairs of blocks take tiles of 256 rows of W in
 * turn, and the last round is as long as any. */
static double folded(const moq_linear_spec *spec, double tiles, const pace *p) {
    double pairs = fmax(1, spec->target.sm_count / 2),
           along = ceil((double)spec->out_features / 256), rounds = ceil(tiles * along / pairs);
    double weights = pairs * 256 * (double)spec->in_features; /* of a round */
    return rounds * (weights / moq_matrix_rate(&spec->target, p->fold) + p->outputs);
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, int config) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    const pace *p = &CONFIGS[config];
    double slots = moq_expected_slots(spec, tokens);
    double h = (double)w13->in_features, i = (double)w2->in_features;
    double weights = h * (double)w13->out_features + i * (double)w2->out_features;
    double active = moq_active_experts(spec, tokens);
    double tiles = active * moq_expected_tiles(slots / active, p->rows);
    double fold = folded(w13, tiles, p) + folded(w2, tiles, p);
    double products = slots * weights / moq_matrix_rate(&w13->target, p->products);
    double d = w2->dtype == MOQ_DT_BF16 ? 2 : 4; /* bytes */
    double between = slots * (d * h / moq_memory_rate(&w13->target, SUMMED) +
                              (h + 6 * i) / moq_memory_rate(&w13->target, BETWEEN));
    double all = STEPS + between + fold + products;
    if (slots >= LEAST_ROWS * active)
        return all;
    return (tokens == 1 ? ONE_TOKEN : NOT_KNOWN) * all;
}

static int best_config(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, 1) < seconds(spec, tokens, 0) ? 1 : 0;
}

moq_kernel_config moq_moe_folded_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant) {
    bool given = variant > 0 && variant <= MOQ_MOE_FOLDED_CONFIGS;
    return moq_kernel_config_of(given ? variant : 0,
                                given ? variant - 1 : best_config(spec, tokens), 1);
}

uint64_t moq_moe_folded_variants(const moq_moe_call *call) {
    int other = 1 - best_config(call->spec, call->tokens);
    return 1 | 1ull << (other + 1);
}

double moq_moe_folded_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, best_config(spec, tokens));
}
