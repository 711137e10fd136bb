/* Experts of many tokens on Hopper: see moe_prefill.h. */
#include "cuda/choice/moe_prefill.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/routing.h"

#include <math.h>

/* ---- FP8 ---- */

/* The launches of a call and what is not hidden of them, which is more where rows of x are longer,
 * and bytes a second of what lies between the products: d is read by the sum over slots; x has a
 * row a slot, which is written; these are read and written besides, which is in `x`. SUMMED has in
 * it what a cluster saves that sorts many slots: fitted after the rest to 12 times of Qwen3-30B-A3B
 * and DeepSeek-V3, TP8, with 64 to 4096 tokens, 4.1 % root mean square. PACKED_SUMMED likewise: 10
 * times, 1.9 %. */
#define STEPS   13e-6
#define COLUMN  0.8e-9
#define SUMMED  4.8e12
#define BETWEEN 3.6e12

/* What tiles of up to so many rows do, of H200: bytes of weights a second, and the power of the
 * memory's rate that this goes with on another chip; products a second, as how many rows a tile
 * counts beside its own; and bytes that are moved for each value of x and slot. Weights and
 * products overlap in part: those of large tiles, which the memory seldom bounds, nearly whole.
 * Fitted to every way in 36 cells of seven models with 16 to 8192 tokens on an H200 and in 32 of
 * six on an H100, for each format: what is chosen by them takes 0.2 % more than the fastest in the
 * mean on either chip, 7 % at most (Llama-4-Maverick). Before, large tiles were held to go with the
 * memory wholly, and the choice lost 8 % of FP8 on an H100 (docs/lab/experts-prefill.md). */
#define EXPONENT       1.5
#define LARGE_EXPONENT 3

/* One token takes more: kernels are too short to hide each other's beginnings. Measured of
 * Mixtral-8x7B, 6 to 18 % beyond the kernels of few tokens, whose estimates for one token are up to
 * 14 % too long besides (Llama-4); where those run it is theirs. */
#define ONE_TOKEN 1.4

typedef struct {
    int rows; /* of a tile */
    double read, power, products, tile, x;
    int together; /* tiles that an expert has a multiple of */
} pace;

typedef struct {
    int configs;
    pace config[MOQ_MOE_PREFILL_CONFIGS];
} format;

static const format FP8 = {
    2, {{64, 4.36e12, 1, 5.08e14, 0, 5.5, 1}, {136, 3.23e12, 0.5, 5.95e14, 0, 4.67, 2}}};
static const format FP8_BY_TOKEN = {
    2, {{64, 4.13e12, 1, 4.88e14, 0, 5.41, 1}, {136, 3.14e12, 0.5, 5.44e14, 0, 4.7, 2}}};
static const format FP8_BY_BLOCK = {
    2, {{64, 4.37e12, 1, 4.17e14, 0, 5.78, 1}, {128, 4.09e12, 1, 9.51e14, 143, 5.96, 1}}};

/* How much longer reading and products take, by the row of the format, where rows of W begin within
 * lines of 128 bytes, as every second one of 2880 columns (gpt-oss) does: two lines have to come
 * for 128 columns of it. Part of the fit; alone, 4096 tokens of 2880 columns take 1.18 and 1.07
 * times what those of 2816 or 2944 do. */
static const struct {
    double read, products;
} PARTED[] = {{1.12, 1.5}, {1.025, 1.29}};

/* The share of weights with such rows. */
static double parted_share(const moq_linear_spec *w13, const moq_linear_spec *w2, double weights) {
    double parted = 0;
    if (w13->in_features % 128)
        parted += (double)w13->in_features * (double)w13->out_features;
    if (w2->in_features % 128)
        parted += (double)w2->in_features * (double)w2->out_features;
    return parted / weights;
}

static const format *format_of(const moq_moe_spec *spec) {
    return spec->w13.input == MOQ_INPUT_E4M3_GROUP   ? &FP8_BY_BLOCK
           : spec->w13.input == MOQ_INPUT_E4M3_TOKEN ? &FP8_BY_TOKEN
                                                     : &FP8;
}

static double fp8_seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    double slots = moq_expected_slots(spec, tokens);
    double weights = (double)w13->in_features * (double)w13->out_features +
                     (double)w2->in_features * (double)w2->out_features;
    double parted = parted_share(w13, w2, weights);
    const pace *p = &format_of(spec)->config[row];
    double active = moq_active_experts(spec, tokens), together = p->together;
    double read = active * weights / (p->read * pow(moq_memory_rate(&w13->target, 1), p->power));
    double tiles = together * moq_expected_tiles(slots / active, p->rows * together);
    double rows = slots + active * tiles * p->tile;
    double products = rows * weights / moq_matrix_rate(&w13->target, p->products);
    double d = w2->dtype == MOQ_DT_BF16 ? 2 : 4; /* bytes */
    read *= 1 + (PARTED[row].read - 1) * parted;
    products *= 1 + (PARTED[row].products - 1) * parted;
    double between =
        slots * (d * (double)w2->out_features / moq_memory_rate(&w13->target, SUMMED) +
                 p->x * (double)w13->in_features / moq_memory_rate(&w13->target, BETWEEN));
    double power = row > 0 ? LARGE_EXPONENT : EXPONENT; /* of the overlap */
    return STEPS + COLUMN * (double)w13->in_features + between +
           pow(pow(read, power) + pow(products, power), 1 / power);
}

/* ---- NVFP4 ---- */

/* What a multiprocessor does, of H200: a tile of up to so many rows is `height` rows of W, a step
 * so many columns of it, and takes `step` and `row` for each row of the tile, in microseconds, its
 * outputs `outputs`. Blocks make tiles one after the other, so that the last round has as long as
 * any (moe/sm90/prefill/nvfp4.cu). That and the memory, from which tiles read W at `read`,
 * overlap. Fitted to every way in 32 cells of seven models with 16 to 8192 tokens on an H200 and in
 * 31 of six on an H100: 4 % root mean square, and the way that is chosen takes 0.2 and 0.3 % more
 * than the fastest in the mean, 3 % at most; and to whether the kernel of few tokens is faster, in
 * 126 cells of seven models with 2 to 128 tokens: 0.2 % are lost by that in the mean, 5 % at most
 * (docs/lab/experts-prefill.md). */
#define PACKED_STEPS    16.4e-6
#define PACKED_SUMMED   3.83e12
#define PACKED_BETWEEN  2.86e12
#define PACKED_EXPONENT 5.44

typedef struct {
    int rows, height, columns;
    double step, row, outputs;
    double x; /* bytes that are moved for each value of x and slot */
    double read;
} packed_pace;

static const packed_pace PACKED[] = {{64, 512, 128, 0.7, 0.0211, 0.974, 0, 3.93e12},
                                     {128, 256, 64, 0.294, 0.00396, 0.793, 1.84, 4.24e12},
                                     {288, 128, 64, 0.262, 0.00179, 0.591, 2.74, 2.97e12},
                                     {64, 256, 128, 0.451, 0.00932, 1.12, 0, 4.37e12},
                                     {32, 256, 256, 0.715, 0.0202, 1.16, 0, 3.96e12}};

enum { PACKED_CONFIGS = sizeof PACKED / sizeof *PACKED, PACKED_DEEP = 3 };
_Static_assert(PACKED_CONFIGS <= MOQ_MOE_PREFILL_CONFIGS, "a way tells every shape of tiles");

static bool is_packed(const moq_moe_spec *spec) {
    return spec->w13.weight == MOQ_WEIGHT_E2M1_PACKED;
}

/* Seconds of one of the products, of so many tiles of rows. */
static double packed_product(const moq_linear_spec *layer, double tiles, double rows,
                             const packed_pace *p) {
    double all = tiles * ceil((double)layer->out_features / p->height);
    double rounds = ceil(all / (double)layer->target.sm_count);
    double steps = ceil((double)layer->in_features / p->columns);
    return 1e-6 * rounds * (steps * (p->step + p->row * rows) + p->outputs);
}

static double packed_seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    const packed_pace *p = &PACKED[row];
    double slots = moq_expected_slots(spec, tokens), active = moq_active_experts(spec, tokens);
    double tiles = moq_expected_tiles(slots / active, p->rows);
    double rows = slots / active / tiles + (p->rows <= 64 ? 8 : 12); /* some are of no slot */
    double weights = (double)w13->in_features * (double)w13->out_features +
                     (double)w2->in_features * (double)w2->out_features;
    double read = active * weights * 0.5625 / moq_memory_rate(&w13->target, p->read);
    double products =
        packed_product(w13, active * tiles, rows, p) + packed_product(w2, active * tiles, rows, p);
    double d = w2->dtype == MOQ_DT_BF16 ? 2 : 4; /* bytes */
    double between =
        slots * (d * (double)w2->out_features / moq_memory_rate(&w13->target, PACKED_SUMMED) +
                 p->x * (double)w13->in_features / moq_memory_rate(&w13->target, PACKED_BETWEEN));
    double all =
        PACKED_STEPS + between +
        pow(pow(read, PACKED_EXPONENT) + pow(products, PACKED_EXPONENT), 1 / PACKED_EXPONENT);
    return slots < 4 * active ? 1.03 * all : all; /* which of so few rows is too low */
}

/* ---- both ---- */

static double seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    return is_packed(spec) ? packed_seconds(spec, tokens, row) : fp8_seconds(spec, tokens, row);
}

int moq_moe_prefill_tile_rows(const moq_moe_spec *spec, moq_kernel_config config) {
    int row = moq_tiling_row(config.tiling);
    return is_packed(spec) ? PACKED[row].rows : format_of(spec)->config[row].rows;
}

bool moq_moe_prefill_deep(const moq_moe_spec *spec, moq_kernel_config config) {
    return is_packed(spec) && moq_tiling_row(config.tiling) == PACKED_DEEP;
}

static int ways_of(const moq_moe_spec *spec) {
    return is_packed(spec) ? PACKED_CONFIGS : format_of(spec)->configs;
}

static int best_row(const moq_moe_spec *spec, int64_t tokens) {
    int best = 0;
    for (int row = 1; row < ways_of(spec); row++)
        if (seconds(spec, tokens, row) < seconds(spec, tokens, best))
            best = row;
    return best;
}

moq_kernel_config moq_moe_prefill_choose(const moq_moe_spec *spec, int64_t tokens,
                                         int32_t variant) {
    bool given = variant > 0 && variant <= ways_of(spec);
    return moq_kernel_config_of(given ? variant : 0, given ? variant - 1 : best_row(spec, tokens),
                                1);
}

uint64_t moq_moe_prefill_variants(const moq_moe_call *call) {
    uint64_t rows = (1ull << ways_of(call->spec)) - 1;
    return 1 | (rows & ~(1ull << best_row(call->spec, call->tokens))) << 1;
}

double moq_moe_prefill_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double all = seconds(spec, tokens, best_row(spec, tokens));
    return tokens == 1 && !is_packed(spec) ? ONE_TOKEN * all : all;
}
