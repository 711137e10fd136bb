/* The choice among ways to do the FP8 GEMM of Hopper: see fp8_prefill.h. */
#include "cuda/choice/fp8_prefill.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

#define SHAPE(first, columns, waves, share, fused, step, group_step)                               \
    {(first) == MOQ_TOKENS_FIRST ? MOQ_FP8_PREFILL_ROWS(waves, share) : (columns),                 \
     (first) == MOQ_TOKENS_FIRST ? (columns) : MOQ_FP8_PREFILL_ROWS(waves, share),                 \
     first,                                                                                        \
     share,                                                                                        \
     fused,                                                                                        \
     {step, group_step}},

static const moq_fp8_prefill_shape SHAPES[] = {MOQ_FP8_PREFILL_SHAPES(SHAPE)};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };
_Static_assert(SHAPE_COUNT <= MOQ_TILING_ROWS, "a way tells every shape");

static bool has_pairs(const moq_fp8_prefill_shape *v) {
    return v->share == MOQ_SHARE_WEIGHTS || v->share == MOQ_SHARE_TOKENS;
}

static int rows_of(const moq_fp8_prefill_shape *v) {
    return v->weight_rows * (v->share == MOQ_SHARE_TOKENS ? 2 : 1);
}

/* What an estimate is made of: seconds and rates a second. */
typedef struct {
    double start;         /* of every call */
    double quantize[3];   /* the kernel that does: one scale, by token, by group, */
    double values[3];     /* and how many it does */
    double cache, memory; /* bytes */
    double busy;          /* blocks, one a multiprocessor, that keep the memory busy */
    double output;        /* of a block's tile */
    double sum, sharing;  /* of a token's parts, and more for each block that has one */
    double power;         /* the higher, the less do copies and products get in each other's way */
} rates;

/* Tiles of 32 and 64 tokens where x is quantized in it or before, and of more. Fitted to what
 * tune() measured of 36 layers with 1 to 64 tokens on an H100, each call behind the end of the one
 * before, as among kernels of others (docs/lab/choice.md); 3 % root mean square. That of more
 * tokens to 867 times of sixteen layers with 64 to 512 on an H200 in chains of themselves, its
 * start to such calls. */
static const rates FUSED = {2.771e-6, {0, 0, 0}, {1e30, 1e30, 1e30}, 8.003e12, 4.366e12,
                            104,      6.73e-11,  1.096e-8,           1.8e-9,   8};
static const rates FEW = {3.767e-6,
                          {5.218e-7, 5.121e-7, 5.873e-7},
                          {2.286e12, 2.23e12, 2.354e12},
                          6.07e12,
                          4.23e12,
                          50,
                          1.378e-10,
                          5.084e-9,
                          0,
                          8};
static const rates MANY = {2.7e-6,
                           {1.51e-6, 1.82e-6, 1.76e-6},
                           {2.78e12, 2.31e12, 2.31e12},
                           7.39e12,
                           4.49e12,
                           0,
                           1.16e-10,
                           1.46e-8,
                           0,
                           4};

/* Seconds to read the weights where blocks have some tiles each, the last turn some of the blocks.
 */
static double weight_seconds(const moq_fp8_prefill_config *config, double bytes, const rates *r,
                             double rate) {
    int64_t tiles = config->row_tiles * config->columns;
    int64_t last = (tiles - 1) % config->workers + 1, rest = tiles - last;
    double all = fmin(1, (double)(config->workers * config->cluster) / r->busy);
    double few = fmin(1, (double)(last * config->cluster) / r->busy);
    return bytes / (double)tiles * ((double)rest / all + (double)last / few) / rate;
}

/* Where outputs leave by the copy engine, under the products of a block's next tile: what outputs
 * take of their time nevertheless, and with groups, where a block has more than two tiles, what a
 * step does. The times of shapes are fitted to up to 512 tokens; these to 1024 and 4096 tokens of
 * 8192 x 8192 and 28672 x 4096 on an H200, and by token assumed of no shorter K and no fewer
 * tokens. With one scale cuBLASLt was no slower there. */
#define OUTPUT_SHARE 0.2
#define STEP_SHARE   0.86

/* Seconds of a call: x quantized, then the products, W from memory and all tiles from the
 * second-level cache at the same time, then outputs, and sums of parts. Outputs of all tiles of a
 * block but the last are written while more is copied. */
static double estimate(const moq_linear_spec *spec, const moq_fp8_prefill_config *config,
                       int64_t m) {
    const moq_fp8_prefill_shape *v = config->shape;
    int scaling = spec->input - MOQ_INPUT_E4M3_TENSOR;
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP, splits = moq_fp8_prefill_has_split_k(v);
    bool few = v->first == MOQ_WEIGHTS_FIRST && v->tokens <= 64 && !has_pairs(v);
    const rates *r = v->fused ? &FUSED : few ? &FEW : &MANY;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double tiles = (double)(config->row_tiles * config->columns) * (has_pairs(v) ? 2 : 1);
    double steps = (double)divide_up(spec->in_features, MOQ_FP8_PREFILL_STEP);
    double turns =
        splits ? 1.0 : (double)divide_up(config->row_tiles * config->columns, config->workers);
    double rows = v->weight_rows * (v->share == MOQ_SHARE_WEIGHTS ? 0.5 : 1.0);
    double columns = v->tokens * (v->share == MOQ_SHARE_TOKENS ? 0.5 : 1.0) * (v->fused ? 2 : 1);
    double quantize =
        spec->quantized_input ? 0 : r->quantize[scaling] + (double)m * k / r->values[scaling];
    double output = v->weight_rows * v->tokens * r->output;
    bool by_token = spec->input == MOQ_INPUT_E4M3_TOKEN && m >= 1024 && steps >= 32;
    bool under = moq_fp8_prefill_has_boxes(v) && (groups ? turns > 2 : by_token);
    double step = v->step[groups] * 1e-6 * (under && groups ? STEP_SHARE : 1);
    double products = turns * steps / (splits ? config->cluster : 1) * step +
                      (turns - 1) * output * (under ? OUTPUT_SHARE : 1);
    double copies = tiles * steps * MOQ_FP8_PREFILL_STEP * (rows + columns) / r->cache;
    double rate = moq_memory_rate(&spec->target, r->memory);
    double memory = few ? weight_seconds(config, n * k, r, rate) : n * k / rate;
    double sums = splits ? (r->sum + r->sharing * config->cluster) * v->tokens : 0.0;
    double together =
        pow(pow(products, r->power) + pow(memory, r->power) + pow(copies, r->power), 1 / r->power);
    double all = r->start + quantize + together + output + sums;
    if (spec->quantized_input && few) /* no kernel before this one */
        all -= 1.2e-6;
    if (v->fused && m < v->tokens) /* a tile that is not full is read sooner */
        all -= 1.351e-8 * (double)(v->tokens - m);
    return all;
}

static moq_fp8_prefill_config partition_work(const moq_linear_spec *spec, int64_t m,
                                             const moq_fp8_prefill_shape *v, int cluster) {
    moq_fp8_prefill_config config = {v, (int)(v - SHAPES), cluster, 0,
                                     divide_up(m, moq_fp8_prefill_tokens(v))};
    for (int i = 0; i < spec->partition_count; i++)
        config.row_tiles += divide_up(spec->partition[i], rows_of(v));
    int64_t tiles = config.row_tiles * config.columns;
    int64_t most = moq_clusters_that_fit(&spec->target, cluster);
    config.workers = moq_fp8_prefill_has_split_k(v) || tiles < most ? tiles : most;
    return config;
}

/* What the search compares: a shape of tiles and the blocks that share one. */
typedef struct {
    int shape, cluster;
    double seconds;
} candidate;

static candidate try_shape(const moq_linear_spec *spec, int64_t m, int shape, int cluster) {
    moq_fp8_prefill_config config = partition_work(spec, m, &SHAPES[shape], cluster);
    candidate found = {shape, cluster, estimate(spec, &config, m)};
    if (moq_fp8_prefill_has_split_k(
            config.shape) && /* all tiles at once, and steps for every block */
        (config.row_tiles * config.columns > moq_clusters_that_fit(&spec->target, cluster) ||
         cluster > divide_up(spec->in_features, MOQ_FP8_PREFILL_STEP)))
        found.seconds = INFINITY;
    return found;
}

static candidate sooner(candidate one, candidate other) {
    return other.seconds < one.seconds ? other : one;
}

static candidate best_of_shape(const moq_linear_spec *spec, int64_t m, int shape) {
    const moq_fp8_prefill_shape *v = &SHAPES[shape];
    int least = has_pairs(v) || v->share == MOQ_SPLIT_K ? 2 : 1;
    int most = moq_fp8_prefill_has_split_k(v) ? MAX_CLUSTER : least;
    candidate best = try_shape(spec, m, shape, least);
    for (int cluster = least + 1; cluster <= most; cluster++)
        best = sooner(best, try_shape(spec, m, shape, cluster));
    return best;
}

/* Whether tiles of a shape are neither far too wide for the tokens nor too narrow. */
static bool suits(const moq_fp8_prefill_shape *v, int64_t m) {
    if (v->first == MOQ_TOKENS_FIRST)
        return m > (moq_fp8_prefill_has_split_k(v) ? 64 : 128);
    return v->tokens >= 128 ? m > 64 : v->tokens == 64 ? m > 32 && m <= 128 : m <= 64;
}

/* Where x is quantized as it is multiplied, a cluster sees no more than rows of it: one scale for
 * all of x has to be `given`. Codes are not quantized. */
static bool can_take(const moq_linear_spec *spec, bool given, const moq_fp8_prefill_shape *v) {
    return !v->fused || (spec->input == MOQ_INPUT_E4M3_TENSOR && given && !spec->quantized_input);
}

/* The best of a variant, or of all that suit. Variant 0 is the choice among the shapes, the others
 * are one shape each; the choice again where that shape cannot do the call. */
static candidate find_best(const moq_linear_spec *spec, int64_t m, int32_t which, bool given) {
    candidate best = {.cluster = 1, .seconds = INFINITY};
    if (which > 0 && which <= SHAPE_COUNT && can_take(spec, given, &SHAPES[which - 1]))
        best = best_of_shape(spec, m, which - 1);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < SHAPE_COUNT; i++)
        if (suits(&SHAPES[i], m) && can_take(spec, given, &SHAPES[i]))
            best = sooner(best, best_of_shape(spec, m, i));
    return best;
}

double moq_cuda_fp8_prefill_seconds(const moq_linear_spec *spec, int64_t m) {
    return find_best(spec, m, 0, true).seconds;
}

moq_kernel_config moq_cuda_fp8_prefill_choose(const moq_linear_spec *spec, int64_t m,
                                              int32_t variant) {
    candidate best = find_best(spec, m, variant, true);
    moq_kernel_config config = moq_kernel_config_of(best.shape + 1, best.shape, best.cluster);
    if (SHAPES[best.shape].fused) { /* which needs the scale */
        best = find_best(spec, m, variant, false);
        config.dynamic_tiling = MOQ_TILING(best.shape, best.cluster);
    }
    return config;
}

moq_fp8_prefill_config moq_fp8_prefill_expand_config(const moq_linear_call *call) {
    uint8_t tiling = moq_tiling_of(call);
    return partition_work(call->spec, call->m, &SHAPES[moq_tiling_row(tiling)],
                          moq_tiling_blocks(tiling));
}

double moq_cuda_fp8_prefill_config_seconds(const moq_linear_call *call) {
    moq_fp8_prefill_config config = moq_fp8_prefill_expand_config(call);
    return estimate(call->spec, &config, call->m);
}

/* The choice, and the shapes that are not expected to take half as long again. */
uint64_t moq_cuda_fp8_prefill_variants(const moq_linear_call *call) {
    bool given = call->input_scale != NULL;
    double best = find_best(call->spec, call->m, 0, given).seconds;
    uint64_t some = 1;
    for (int i = 0; i < SHAPE_COUNT; i++)
        if (suits(&SHAPES[i], call->m) && can_take(call->spec, given, &SHAPES[i]) &&
            best_of_shape(call->spec, call->m, i).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}
