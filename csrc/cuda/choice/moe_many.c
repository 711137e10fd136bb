/* Experts of many tokens on Hopper: see moe_many.h. */
#include "cuda/choice/moe_many.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/routing.h"

#include <math.h>

/* The launches of a call and what is not hidden of them, and bytes a second of what lies between
 * the products: d is read by the sum over slots, x has a row a slot, which is written; of FP8 these
 * are read and written besides, which is in `x`. */
#define STEPS     22e-6
#define FP8_STEPS 18e-6
#define BETWEEN   3.6e12

/* What tiles of up to so many rows do, of H200: bytes of weights a second, products a second, as
 * how many rows a tile counts beside its own, and bytes that are moved for each value of x and
 * slot. The first two overlap in part: those of FP8's large tiles, which the memory seldom bounds,
 * nearly whole. Of NVFP4 31 times of three models are met within 17 %. Those of FP8 are fitted to
 * 80 of Qwen3-30B-A3B, Mixtral-8x7B and DeepSeek-V3, TP8 with 1 to 4096 tokens, and to what is
 * chosen by them, which takes 0.3 % more than the fastest in the mean (docs/lab/moe.md). */
#define EXPONENT       1.5
#define LARGE_EXPONENT 3

/* One token in FP8 takes so much more: its kernels are too short to hide each other's beginnings.
 * Measured of Mixtral-8x7B, 6 to 18 % beyond the kernels of few tokens. */
#define ONE_TOKEN 1.15

typedef struct {
    int rows; /* of a tile */
    double read, products, tile, x;
    int together; /* tiles that an expert has a multiple of */
} pace;

typedef struct {
    int ways;
    pace way[MOQ_MOE_MANY_WAYS];
} format;

static const format PACKED = {
    3,
    {{64, 3.8e12, 2.4e14, 12, 0, 1}, {128, 4e12, 3e14, 24, 4, 1}, {288, 3.4e12, 4.2e14, 76, 6, 1}}};
static const format FP8 = {2,
                           {{64, 4.6e12, 9.6e14, 50, 5.1, 1}, {136, 3.3e12, 5.69e14, 0, 5.4, 2}}};
static const format FP8_BY_TOKEN = {
    2, {{64, 4.08e12, 5.1e14, 3, 4.5, 1}, {136, 3.1e12, 5.39e14, 0, 5.2, 2}}};
static const format FP8_BY_BLOCK = {
    2, {{64, 4.6e12, 7.41e14, 55, 4.8, 1}, {128, 3.78e12, 4.39e14, 11, 6, 1}}};

static const format *format_of(const moq_moe_spec *spec) {
    if (spec->w13.weight == MOQ_WEIGHT_E2M1_PACKED)
        return &PACKED;
    return spec->w13.input == MOQ_INPUT_E4M3_GROUP   ? &FP8_BY_BLOCK
           : spec->w13.input == MOQ_INPUT_E4M3_TOKEN ? &FP8_BY_TOKEN
                                                     : &FP8;
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    const format *f = format_of(spec);
    double slots = moq_expected_slots(spec, tokens);
    double weights = (double)w13->in_features * (double)w13->out_features +
                     (double)w2->in_features * (double)w2->out_features;
    const pace *p = &f->way[row];
    double active = moq_active_experts(spec, tokens), together = p->together;
    double bytes = active * weights * (f == &PACKED ? 0.5625 : 1);
    double read = bytes / moq_memory_rate(&w13->target, p->read);
    double tiles = together * moq_expected_tiles(slots / active, p->rows * together);
    double rows = slots + active * tiles * p->tile;
    double products = rows * weights / moq_matrix_rate(&w13->target, p->products);
    double d = f != &PACKED && w2->dtype == MOQ_DT_BF16 ? 2 : 4; /* bytes */
    double between = slots * (d * (double)w2->out_features + p->x * (double)w13->in_features) /
                     moq_memory_rate(&w13->target, BETWEEN);
    double power = f != &PACKED && row > 0 ? LARGE_EXPONENT : EXPONENT;
    double steps = f == &PACKED ? STEPS : FP8_STEPS;
    return steps + between + pow(pow(read, power) + pow(products, power), 1 / power);
}

int moq_moe_many_tile_rows(const moq_moe_spec *spec, moq_way way) {
    return format_of(spec)->way[moq_form_row(way.form)].rows;
}

/* Layers without a gate have the small tiles alone. */
static int ways_of(const moq_moe_spec *spec) {
    return spec->gated ? format_of(spec)->ways : 1;
}

static int best_row(const moq_moe_spec *spec, int64_t tokens) {
    int best = 0;
    for (int row = 1; row < ways_of(spec); row++)
        if (seconds(spec, tokens, row) < seconds(spec, tokens, best))
            best = row;
    return best;
}

moq_way moq_moe_many_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant) {
    bool given = variant > 0 && variant <= ways_of(spec);
    return moq_way_of(given ? variant : 0, given ? variant - 1 : best_row(spec, tokens), 1);
}

uint64_t moq_moe_many_variants(const moq_moe_call *call) {
    uint64_t rows = (1ull << ways_of(call->spec)) - 1;
    return 1 | (rows & ~(1ull << best_row(call->spec, call->tokens))) << 1;
}

double moq_moe_many_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double all = seconds(spec, tokens, best_row(spec, tokens));
    return tokens == 1 && format_of(spec) != &PACKED ? ONE_TOKEN * all : all;
}
