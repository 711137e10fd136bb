/* Configs of the FP8 and int8 GEMM on Hopper, and its rows: see fp8_prefill_config.h. */
#include "cuda/linear/sm90/fp8_prefill_config.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"

#include <stdio.h>

#define MOST (1 << 24) /* tokens */

#define SHAPE(first, columns, waves, share, fused)                                                 \
    {(first) == MOQ_TOKENS_FIRST ? MOQ_FP8_PREFILL_ROWS(waves, share) : (columns),                 \
     (first) == MOQ_TOKENS_FIRST ? (columns) : MOQ_FP8_PREFILL_ROWS(waves, share), first, share,   \
     fused},

static const moq_fp8_prefill_shape SHAPES[] = {MOQ_FP8_PREFILL_SHAPES(SHAPE)};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, FORMATS = 3 };
_Static_assert(SHAPE_COUNT <= MOQ_TILING_ROWS, "a config tells every shape");

static const moq_rates RATES[SHAPE_COUNT * FORMATS] = {MOQ_RATES_SM90_FP8_PREFILL};
static const moq_rates INT8_RATES[SHAPE_COUNT] = {MOQ_RATES_SM90_INT8_PREFILL};

static bool has_pairs(const moq_fp8_prefill_shape *v) {
    return v->share == MOQ_SHARE_WEIGHTS || v->share == MOQ_SHARE_TOKENS;
}

static moq_fp8_prefill_config partition_work(const moq_linear_spec *spec, int64_t m, int shape,
                                             int cluster) {
    const moq_fp8_prefill_shape *v = &SHAPES[shape];
    moq_fp8_prefill_config geometry = {v, shape, cluster, 0,
                                       divide_up(m, moq_fp8_prefill_tokens(v))};
    int rows = v->weight_rows * (v->share == MOQ_SHARE_TOKENS ? 2 : 1);
    geometry.row_tiles = moq_tile_count(spec, rows);
    int64_t tiles = geometry.row_tiles * geometry.columns;
    int64_t most = moq_clusters_that_fit(&spec->target, cluster);
    geometry.workers = moq_fp8_prefill_has_split_k(v) || tiles < most ? tiles : most;
    return geometry;
}

/* Where x is quantized as it is multiplied, a cluster sees no more than rows of it: one scale for
 * all of x has to be given. Codes are not quantized. */
static bool can_take(const moq_problem *p, const moq_fp8_prefill_shape *v) {
    const moq_linear_spec *spec = p->layer;
    return !v->fused ||
           (spec->input == MOQ_INPUT_E4M3_TENSOR && p->scaled && !spec->quantized_input);
}

/* The most blocks that share K where all tiles are there at once, with a step for every block; 0
 * where they cannot be. */
static int parts_for(const moq_linear_spec *spec, int64_t m, int config, int64_t steps) {
    int least = SHAPES[config].share == MOQ_SPLIT_K ? 2 : 1, most = MAX_CLUSTER;
    for (; most >= least; most--) {
        moq_fp8_prefill_config geometry = partition_work(spec, m, config, most);
        if (geometry.workers <= moq_clusters_that_fit(&spec->target, most) && most <= steps)
            return most;
    }
    return 0;
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    const moq_fp8_prefill_shape *v = &SHAPES[config];
    bool splits = moq_fp8_prefill_has_split_k(v);
    int64_t steps = divide_up(spec->in_features, MOQ_FP8_PREFILL_STEP);
    w->blocks = splits ? parts_for(spec, p->tokens, config, steps) : has_pairs(v) ? 2 : 1;
    if (!can_take(p, v) || w->blocks == 0)
        return false;
    moq_fp8_prefill_config geometry = partition_work(spec, p->tokens, config, w->blocks);
    int64_t tiles = geometry.row_tiles * geometry.columns;
    double turns = (double)divide_up(tiles, geometry.workers);
    double idle = turns * (double)geometry.workers / (double)tiles - 1;
    w->bytes = (double)spec->out_features * (double)spec->in_features;
    w->inside[0] = turns * (double)(splits ? divide_up(steps, w->blocks) : steps);
    w->inside[1] = turns;
    w->inside[2] = (double)(tiles * steps);
    w->beside[0] = spec->quantized_input ? 0 : (double)(p->tokens * spec->in_features);
    w->beside[1] = splits ? w->blocks : 0;
    w->beside[2] = w->bytes * idle; /* memory is idle in a last turn of few tiles */
    bool int8 = spec->input == MOQ_INPUT_INT8;
    w->rates = config + (int8 ? 0 : SHAPE_COUNT * (int)(spec->input - MOQ_INPUT_E4M3_TENSOR));
    return true;
}

/* Blocks and warpgroups that split K are as many as tiles of m rows leave room for. */
static bool row_order_fixed(int config) {
    return !moq_fp8_prefill_has_split_k(&SHAPES[config]);
}

static const moq_configs CONFIGS = {.configs = SHAPE_COUNT,
                                    .by_scale = true,
                                    .rates = RATES,
                                    .row_order_fixed = row_order_fixed,
                                    .work = work};
static const moq_configs INT8_CONFIGS = {
    .configs = SHAPE_COUNT, .rates = INT8_RATES, .row_order_fixed = row_order_fixed, .work = work};

/* Entries of fp8_prefill.cu. */
MOQ_ENTRY moq_status moq_cuda_fp8_prefill(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_fp8_prefill_workspace(const moq_linear_call *call);

/* True if x is quantized once for all partitions. */
static bool has_one_x(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->partition_count == 1 || spec->one_input_scale)
        return true;
    snprintf(reason, size, "quantizes x once, %d partitions may have as many input scales",
             (int)spec->partition_count);
    return false;
}

/* True if rows of W suit the copy engine. */
static bool suits_copies(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_is_multiple_of_16("in_features", spec->in_features, reason, size) &&
           moq_has_int_rows(spec, reason, size) && moq_takes_tokens(m, MOST, reason, size);
}

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_is_on_sm90(spec, reason, size) && moq_suits_fp8_cores(spec, reason, size) &&
           suits_copies(spec, m, reason, size) &&
           (spec->input != MOQ_INPUT_E4M3_TENSOR || has_one_x(spec, reason, size));
}

static bool is_int8(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!moq_is_general(spec, reason, size))
        return false;
    if (spec->weight == MOQ_WEIGHT_INT8_ROW && spec->input == MOQ_INPUT_INT8)
        return true;
    snprintf(reason, size, "multiplies int8 weights by int8 activations, %s has others",
             spec->algo);
    return false;
}

static bool can_run_int8(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_is_on_sm90(spec, reason, size) && is_int8(spec, reason, size) &&
           suits_copies(spec, m, reason, size) && has_one_x(spec, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM90_FP8_PREFILL = {
    {"cuda", "sm90_fp8_prefill", .configs = &CONFIGS, .takes_codes = true, .row_order_fixed = true},
    can_run,
    .workspace = moq_cuda_fp8_prefill_workspace,
    .run = moq_cuda_fp8_prefill,
};

const moq_linear_kernel MOQ_LINEAR_SM90_INT8_PREFILL = {
    {"cuda", "sm90_int8_prefill", .configs = &INT8_CONFIGS, .row_order_fixed = true},
    can_run_int8,
    .workspace = moq_cuda_fp8_prefill_workspace,
    .run = moq_cuda_fp8_prefill,
};

moq_fp8_prefill_config moq_fp8_prefill_expand_config(const moq_linear_call *call) {
    uint8_t tiling = moq_tiling_of(call);
    return partition_work(call->spec, call->m, moq_tiling_row(tiling), moq_tiling_blocks(tiling));
}
