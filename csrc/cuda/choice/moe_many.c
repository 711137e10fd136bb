/* Experts of many tokens on Hopper: see moe_many.h. */
#include "cuda/choice/moe_many.h"

#include "cuda/choice/chip.h"

#include <math.h>

/* The launches of a call and what is not hidden of them, and bytes a second of what lies between
 * the products: d is read by the sum over slots, x has a row a slot, which is written. */
#define STEPS   22e-6
#define BETWEEN 3.6e12

/* What tiles of up to 64 rows do, and large ones, of H200: bytes of weights a second, products a
 * second, as how many rows a tile counts beside its own, and bytes that are written for each value
 * of x and slot. The first two overlap in part (EXPONENT). Of NVFP4, times of four models from 128
 * to 4096 tokens are met within 11 % but for one, within 15 %; of FP8, 15 of Qwen3-30B-A3B within
 * 4 % (docs/lab/moe.md). */
#define EXPONENT 1.5

typedef struct {
    double read, products, tile, x;
} pace;

typedef struct {
    int rows; /* of a large tile */
    pace way[MOQ_MOE_MANY_WAYS];
    int together; /* large tiles that an expert has a multiple of */
} format;

static const format PACKED = {288, {{4.2e12, 3.15e14, 40, 0}, {1.5e12, 3.8e14, 28, 2}}, 1};
static const format FP8 = {136, {{4.5e12, 5.4e14, 32, 1}, {3.6e12, 7.2e14, 24, 1}}, 2};
static const format FP8_BY_TOKEN = {136, {{4.4e12, 5.4e14, 32, 1}, {3.3e12, 5.8e14, 16, 1}}, 2};
static const format FP8_BY_BLOCK = {128, {{4.5e12, 5.4e14, 44, 1}, {3.4e12, 3.85e14, 0, 1}}, 1};

static const format *format_of(const moq_moe_spec *spec) {
    if (spec->w13.weight == MOQ_WEIGHT_E2M1_PACKED)
        return &PACKED;
    return spec->w13.input == MOQ_INPUT_E4M3_GROUP   ? &FP8_BY_BLOCK
           : spec->w13.input == MOQ_INPUT_E4M3_TOKEN ? &FP8_BY_TOKEN
                                                     : &FP8;
}

/* Experts that have a slot, as they are expected of a router that likes all. */
static double active_experts(const moq_moe_spec *spec, int64_t tokens) {
    double all = spec->experts, share = (double)spec->top_k / spec->global_experts;
    return fmax(1, all * (1 - pow(share < 1 ? 1 - share : 0, (double)tokens)));
}

/* Tiles of an expert that has so many rows in the mean, as chance spreads them. */
static double tiles_of(double rows, double most) {
    double spread = 1.2 * sqrt(rows), sum = 0;
    for (int i = -1; i <= 1; i++)
        sum += ceil(fmax(1, rows + i * spread) / most);
    return sum / 3;
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    const format *f = format_of(spec);
    double slots = (double)tokens * spec->top_k * spec->experts / spec->global_experts;
    double weights = (double)w13->in_features * (double)w13->out_features +
                     (double)w2->in_features * (double)w2->out_features;
    const pace *p = &f->way[row];
    double active = active_experts(spec, tokens), together = row ? f->together : 1;
    double bytes = active * weights * (f == &PACKED ? 0.5625 : 1);
    double read = bytes / moq_memory_rate(&w13->target, p->read);
    double tiles = together * tiles_of(slots / active, (row ? f->rows : 64) * together);
    double rows = slots + active * tiles * p->tile;
    double products = rows * weights / moq_matrix_rate(&w13->target, p->products);
    double d = f != &PACKED && w2->dtype == MOQ_DT_BF16 ? 2 : 4; /* bytes */
    double between = slots * (d * (double)w2->out_features + p->x * (double)w13->in_features) /
                     moq_memory_rate(&w13->target, BETWEEN);
    return STEPS + between + pow(pow(read, EXPONENT) + pow(products, EXPONENT), 1 / EXPONENT);
}

int moq_moe_many_tile_rows(const moq_moe_spec *spec, moq_way way) {
    return moq_form_row(way.form) ? format_of(spec)->rows : 64;
}

/* Layers without a gate have the small tiles alone. */
static int best_row(const moq_moe_spec *spec, int64_t tokens) {
    return spec->gated && seconds(spec, tokens, 1) < seconds(spec, tokens, 0) ? 1 : 0;
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
