/* The choice among ways to do the NVFP4 GEMMs of Hopper: see nvfp4_medium.h. */
#include "cuda/choice/nvfp4_medium.h"

#include "core/invariant.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

#define LEAST_STAGES 3

/* What an estimate counts, in microseconds and microseconds for each; fitted. */
typedef struct {
    double begin, quantize;         /* a call, and a million values of x */
    double cache, memory;           /* bytes that a microsecond brings from either, in millions */
    double far;                     /* how much longer x takes for each MB beyond 1.5, and */
    double heat;                    /* products of 128 tokens and more, from 100 us on */
    double rows, tokens;            /* outputs of whole tiles: 64 rows, a token */
    double part_rows, part_tokens;  /* where K is in parts, */
    double part_more, received;     /* a token beyond 64, and 8 of 64 rows from another block */
    double hand_over, shared_token; /* sums of shared tiles, a token of them, */
    double others;                  /* and of a token for each block of a tile; */
    double own, own_token;          /* and how much less where tiles have blocks of their own */
} costs;

/* The shapes of a kernel, the fewest and the most tokens that tiles of them have, and what an
 * estimate of seconds counts. */
typedef struct {
    const moq_nvfp4_medium_shape *shapes;
    int count, least, most;
    costs cost;
} family;

moq_nvfp4_medium_layout moq_nvfp4_medium_smem_layout(const moq_nvfp4_medium_shape *v, int cluster) {
    int turned = v->row_groups * TURNED_AT_ONCE(v->tokens) * 128;
    moq_nvfp4_medium_layout l = {0, 0, turned, 0, turned / v->row_groups};
    if (v->split_k) {
        int groups = v->row_groups * v->k_groups;
        split_k_room room = split_k_room_of(v->tokens, cluster * v->k_groups, groups);
        l.side = room.side;
        l.behind = v->tokens < 128 ? room.sums : 0;
        l.turn = room.sums - l.behind; /* where the ring was, behind sums if those are there too */
        l.turn_step = room.turn_step;
        turned = groups * l.turn_step;
    }
    int scales = v->row_groups * v->k_groups * 4 * (2 * MOQ_NVFP4_MEDIUM_SCALES);
    int most = BLOCK_SHARED - 1024 - MOQ_NVFP4_MEDIUM_BARRIERS * 8 - COLUMN_TERMS_BYTES - scales -
               l.behind;
    l.stages =
        most / v->stage < MOQ_NVFP4_MEDIUM_STAGES ? most / v->stage : MOQ_NVFP4_MEDIUM_STAGES;
    l.stages -= l.stages % v->k_groups;
    if (l.stages < LEAST_STAGES || l.stages < 2 * v->k_groups ||
        (v->split_k && l.turn + turned > l.stages * v->stage))
        l.stages = 0;
    if (!v->split_k)
        l.turn = l.stages * v->stage;
    MOQ_ASSERT(v->stage % 1024 == 0); /* swizzled operands */
    MOQ_ASSERT(l.turn % 16 == 0 && l.turn_step % 16 == 0 && l.behind % 16 == 0);
    MOQ_ASSERT(!l.stages || l.stages * v->stage <= most);
    MOQ_ASSERT(!l.stages || l.turn + turned <= l.stages * v->stage + l.behind);
    return l;
}

int64_t moq_nvfp4_medium_tokens(int64_t m, const moq_nvfp4_medium_config *config) {
    int64_t unit = config->columns == 1 ? 1 : 8;
    return divide_up(divide_up(m, config->columns), unit) * unit;
}

/* Microseconds from where sums of shared tiles are left to where they have been added. */
static double exchange_of(const costs *c, const moq_nvfp4_medium_config *config, double tokens) {
    double blocks = (double)config->workers / (double)config->tail_tiles;
    double own = config->workers % config->tail_tiles == 0 ? c->own + c->own_token * tokens : 0;
    return c->hand_over + c->shared_token * tokens * (1 + c->others * blocks) - own;
}

/* Of the sums and outputs of a tile. */
static double outputs_of(const costs *c, const moq_nvfp4_medium_config *config, double tokens) {
    const moq_nvfp4_medium_shape *v = config->shape;
    if (!v->split_k)
        return c->rows * v->row_groups + c->tokens * tokens;
    int64_t eights = divide_up(v->tokens / 8, config->cluster); /* of the block that has most */
    double received = (double)(eights * (config->cluster - 1)) * v->k_groups * v->row_groups;
    return c->part_rows * v->row_groups + c->part_tokens * fmin(tokens, 64) +
           c->part_more * fmax(0, tokens - 64) + c->received * received;
}

/* Seconds of a call: x quantized; then the products, W from memory and all tiles from the
 * second-level cache at the same time; then sums and outputs. */
static double estimate(const family *f, const moq_linear_spec *spec,
                       const moq_nvfp4_medium_config *config, int64_t m) {
    const moq_nvfp4_medium_shape *v = config->shape;
    const costs *c = &f->cost;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double x = (double)m * k * 1e-6,
           steps = (double)divide_up(spec->in_features, MOQ_NVFP4_MEDIUM_STEP);
    double tokens = fmax(f->least, (double)moq_nvfp4_medium_tokens(m, config));
    double tiles = (double)(config->row_tiles * config->columns);
    double turns = tiles / (double)config->workers;
    double exchange = config->tail_tiles ? exchange_of(c, config, tokens) : 0;
    if (!config->tail_tiles)
        turns = ceil(turns);
    double blocks = (double)config->workers * config->cluster;
    double share = v->row_groups * 64 * 72 + v->token_step * tokens;
    double products = turns * steps / config->cluster / v->k_groups * v->step;
    if (v->tokens >= 128) /* they lower the clock */
        products *= 1 + c->heat * fmin(1, products / 100);
    double far = 1 + c->far * fmax(0, 2 * x - 1.5);
    double copies = tiles * steps * share * far * 1e-6 / c->cache;
    double memory =
        n * k * 0.5625e-6 / moq_memory_rate(&spec->target, c->memory) / fmin(1, blocks / 80);
    double seconds =
        c->begin + c->quantize * x + exchange + ceil(turns) * outputs_of(c, config, tokens) +
        cbrt(products * products * products + memory * memory * memory + copies * copies * copies);
    return seconds * 1e-6;
}

static moq_nvfp4_medium_config partition_work(const moq_linear_spec *spec, int64_t m,
                                              const moq_nvfp4_medium_shape *v, int index,
                                              int cluster, bool shared) {
    moq_nvfp4_medium_config config = {v, index, cluster,
                                      divide_up(spec->out_features, 64 * v->row_groups),
                                      divide_up(m, v->tokens)};
    int64_t tiles = config.row_tiles * config.columns,
            steps = divide_up(spec->in_features, MOQ_NVFP4_MEDIUM_STEP);
    int64_t most = moq_clusters_that_fit(&spec->target, cluster);
    config.workers = tiles < most ? tiles : most;
    if (shared) {
        stream_k_split tail = stream_k_split_of(tiles, steps, most);
        config.tail_tiles = tail.tiles;
        config.workers = tail.workers;
    }
    return config;
}

/* Whether a call can be done so. */
static bool can_do(const moq_linear_spec *spec, const moq_nvfp4_medium_config *config) {
    const moq_nvfp4_medium_shape *v = config->shape;
    int64_t tiles = config->row_tiles * config->columns,
            steps = divide_up(spec->in_features, MOQ_NVFP4_MEDIUM_STEP);
    int64_t most = moq_clusters_that_fit(&spec->target, config->cluster);
    if (tiles >= INT32_MAX / 2 || moq_nvfp4_medium_smem_layout(v, config->cluster).stages == 0)
        return false;
    if (v->split_k && (config->columns > 65535 || config->row_tiles > 65535))
        return false;
    /* blocks that share K are there all at once, and have a step each */
    return config->cluster == 1 || (tiles <= most && config->cluster <= steps);
}

/* What the search compares: a shape, by its index, and the blocks that share a tile, or the shape
 * whose tiles are shared evenly. */
typedef struct {
    int shape, cluster;
    bool shared;
    double seconds;
} candidate;

static const candidate NONE = {.cluster = 1, .seconds = INFINITY};

static candidate try_shape(const family *f, const moq_linear_spec *spec, int64_t m, int shape,
                           int cluster, bool shared) {
    moq_nvfp4_medium_config config =
        partition_work(spec, m, &f->shapes[shape], shape, cluster, shared);
    double seconds = can_do(spec, &config) ? estimate(f, spec, &config, m) : INFINITY;
    candidate found = {shape, cluster, shared, seconds};
    return found;
}

static candidate sooner(candidate one, candidate other) {
    return other.seconds < one.seconds ? other : one;
}

/* The best way with a shape, whose tiles are all whole or shared. */
static candidate best_of_shape(const family *f, const moq_linear_spec *spec, int64_t m, int shape,
                               bool shared) {
    const moq_nvfp4_medium_shape *v = &f->shapes[shape];
    if (shared && !v->shared)
        return NONE;
    int least = v->split_k && v->k_groups == 1 ? 2 : 1;
    int most = v->split_k ? MAX_CLUSTER : 1;
    candidate best = try_shape(f, spec, m, shape, least, shared);
    for (int cluster = least + 1; cluster <= most; cluster++)
        best = sooner(best, try_shape(f, spec, m, shape, cluster, shared));
    return best;
}

/* Whether tiles of a shape are neither far too wide for the tokens nor too narrow. */
static bool suits(const family *f, const moq_nvfp4_medium_shape *v, int64_t m) {
    return (v->tokens == f->least || m > v->tokens / 2) &&
           (v->tokens == f->most || m <= 4 * v->tokens);
}

/* Variants from 1 on: the shapes with whole tiles, then the shapes with shared ones. */
static candidate best_at(const family *f, const moq_linear_spec *spec, int64_t m, int index) {
    return best_of_shape(f, spec, m, index % f->count, index >= f->count);
}

/* Variant 0 is the choice; the choice again where a variant cannot do the call. */
static candidate find_best(const family *f, const moq_linear_spec *spec, int64_t m, int32_t which) {
    candidate best = NONE;
    if (which > 0 && which <= 2 * f->count)
        best = best_at(f, spec, m, which - 1);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < 2 * f->count; i++)
        if (suits(f, &f->shapes[i % f->count], m))
            best = sooner(best, best_at(f, spec, m, i));
    return best;
}

/* Variant 0 where there is no way. */
static moq_kernel_config choice_of(const family *f, const moq_linear_spec *spec, int64_t m,
                                   int32_t which) {
    candidate best = find_best(f, spec, m, which);
    int variant = best.shape + (best.shared ? f->count : 0) + 1;
    return moq_kernel_config_of(best.seconds < INFINITY ? variant : 0, best.shape, best.cluster);
}

static moq_nvfp4_medium_config expand(const family *f, const moq_linear_call *call) {
    uint8_t tiling = moq_tiling_of(call);
    int shape = moq_tiling_row(tiling);
    moq_nvfp4_medium_config none = {.cluster = 1};
    return call->config.variant
               ? partition_work(call->spec, call->m, &f->shapes[shape], shape,
                                moq_tiling_blocks(tiling), call->config.variant > f->count)
               : none;
}

static double config_seconds(const family *f, const moq_linear_call *call) {
    moq_nvfp4_medium_config config = expand(f, call);
    return config.shape ? estimate(f, call->spec, &config, call->m) : INFINITY;
}

/* The choice, and those that are not expected to take half as long again. */
static uint64_t variants_of(const family *f, const moq_linear_call *call) {
    double best = find_best(f, call->spec, call->m, 0).seconds;
    uint64_t some = 1;
    for (int i = 0; i < 2 * f->count; i++)
        if (suits(f, &f->shapes[i % f->count], call->m) &&
            best_at(f, call->spec, call->m, i).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}

/* ---- exact products ---- */

#define EXACT_SHAPE(tokens, row_groups, k_groups, split_k, shared, step)                           \
    {tokens,                                                                                       \
     row_groups,                                                                                   \
     k_groups,                                                                                     \
     split_k,                                                                                      \
     shared,                                                                                       \
     MOQ_NVFP4_MEDIUM_STAGE(tokens, row_groups, 2),                                                \
     MOQ_NVFP4_MEDIUM_STEP * 2,                                                                    \
     step},

static const moq_nvfp4_medium_shape EXACT_SHAPES[] = {MOQ_NVFP4_MEDIUM_SHAPES(EXACT_SHAPE)};
_Static_assert(sizeof EXACT_SHAPES / sizeof *EXACT_SHAPES < MOQ_TILING_ROWS,
               "a way tells every shape, and tune() measures 64 variants, the choice among them");

/* Fitted to 1557 times of 32 layers with 1 to 512 tokens on an H100, each call behind the end of
 * the one before, as among kernels of others: 3 % root mean square (docs/lab/choice.md). */
static const family EXACT = {EXACT_SHAPES,
                             sizeof EXACT_SHAPES / sizeof *EXACT_SHAPES,
                             16,
                             128,
                             {.begin = 2.497,
                              .cache = 11.62,
                              .memory = 4.636,
                              .far = 0.01979,
                              .heat = 0.1364,
                              .rows = 0.2972,
                              .tokens = 0.008819,
                              .part_rows = 0.2129,
                              .part_tokens = 0.02276,
                              .part_more = 0.03156,
                              .received = 0.0269,
                              .hand_over = 3.115,
                              .shared_token = 0.008161,
                              .others = 0.9588,
                              .own = 1.59,
                              .own_token = 0.01402}};

moq_nvfp4_medium_config moq_nvfp4_medium_expand_config(const moq_linear_call *call) {
    return expand(&EXACT, call);
}

double moq_cuda_nvfp4_medium_seconds(const moq_linear_spec *spec, int64_t m) {
    return find_best(&EXACT, spec, m, 0).seconds;
}

double moq_cuda_nvfp4_medium_config_seconds(const moq_linear_call *call) {
    return config_seconds(&EXACT, call);
}

moq_kernel_config moq_cuda_nvfp4_medium_choose(const moq_linear_spec *spec, int64_t m,
                                               int32_t variant) {
    return choice_of(&EXACT, spec, m, variant);
}

uint64_t moq_cuda_nvfp4_medium_variants(const moq_linear_call *call) {
    return variants_of(&EXACT, call);
}

/* ---- FP8 products ---- */

#define FOLDED_SHAPE(tokens, row_groups, k_groups, split_k, shared, step)                          \
    {tokens,                                                                                       \
     row_groups,                                                                                   \
     k_groups,                                                                                     \
     split_k,                                                                                      \
     shared,                                                                                       \
     MOQ_NVFP4_MEDIUM_STAGE(tokens, row_groups, 1),                                                \
     MOQ_NVFP4_MEDIUM_STEP,                                                                        \
     step},

static const moq_nvfp4_medium_shape FOLDED_SHAPES[] = {MOQ_NVFP4_FP8_MEDIUM_SHAPES(FOLDED_SHAPE)};
_Static_assert(sizeof FOLDED_SHAPES / sizeof *FOLDED_SHAPES < MOQ_TILING_ROWS,
               "a way tells every shape, and tune() measures 64 variants, the choice among them");

/* Fitted to 683 times of 16 layers with 16 to 256 tokens on an H200 (docs/lab/nvfp4-fp8.md): 4 %
 * off, and the choice costs 0.2 % by them; what is before the products again to calls that are
 * behind the end of the one before. */
static const family FOLDED = {FOLDED_SHAPES,
                              sizeof FOLDED_SHAPES / sizeof *FOLDED_SHAPES,
                              32,
                              256,
                              {.begin = 3.2,
                               .quantize = 1 / 0.613,
                               .cache = 11.6,
                               .memory = 4.15,
                               .heat = 0.076,
                               .rows = 0.578,
                               .tokens = 0.0132,
                               .part_rows = 0.785,
                               .part_tokens = 0.0228,
                               .part_more = 0.0228,
                               .received = 0.0135,
                               .hand_over = 3.15,
                               .shared_token = 0.00695,
                               .others = 0.705,
                               .own = 1.68,
                               .own_token = 0.00775}};

moq_nvfp4_medium_config moq_nvfp4_fp8_medium_expand_config(const moq_linear_call *call) {
    return expand(&FOLDED, call);
}

double moq_cuda_nvfp4_fp8_medium_seconds(const moq_linear_spec *spec, int64_t m) {
    return find_best(&FOLDED, spec, m, 0).seconds;
}

double moq_cuda_nvfp4_fp8_medium_config_seconds(const moq_linear_call *call) {
    return config_seconds(&FOLDED, call);
}

moq_kernel_config moq_cuda_nvfp4_fp8_medium_choose(const moq_linear_spec *spec, int64_t m,
                                                   int32_t variant) {
    return choice_of(&FOLDED, spec, m, variant);
}

uint64_t moq_cuda_nvfp4_fp8_medium_variants(const moq_linear_call *call) {
    return variants_of(&FOLDED, call);
}
