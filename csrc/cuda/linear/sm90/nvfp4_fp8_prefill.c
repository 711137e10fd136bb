/* Configs of the NVFP4 GEMM with FP8 products for prefill on Hopper, and its row: see
 * nvfp4_fp8_prefill_config.h. */
#include "cuda/linear/sm90/nvfp4_fp8_prefill_config.h"

#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"

#define SHAPE(tokens, share) {tokens, (share) == MOQ_ALONE ? 1 : 2},

static const moq_nvfp4_fp8_shape SHAPES[] = {MOQ_NVFP4_FP8_SHAPES(SHAPE)};

/* How tiles are divided: whole ones in rounds, or the last rounds evenly by steps. */
typedef enum { ROUNDS, EVEN, DIVISIONS } division;

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, CONFIG_COUNT = SHAPE_COUNT * DIVISIONS };
_Static_assert(CONFIG_COUNT <= MOQ_TILING_ROWS, "a config tells every shape and division");

static const moq_rates RATES[CONFIG_COUNT] = {MOQ_RATES_SM90_NVFP4_FP8_PREFILL};

static moq_nvfp4_fp8_config partition_work(const moq_linear_spec *spec, int64_t m, int config) {
    const moq_nvfp4_fp8_shape *v = &SHAPES[config % SHAPE_COUNT];
    moq_nvfp4_fp8_config geometry = {v, (int)(v - SHAPES),
                                     divide_up(spec->out_features, MOQ_NVFP4_FP8_ROWS),
                                     divide_up(m, v->tokens * v->blocks)};
    int64_t tiles = geometry.row_tiles * geometry.columns, most = spec->target.sm_count / v->blocks;
    int64_t steps = divide_up(spec->in_features, MOQ_NVFP4_FP8_STEP);
    geometry.workers = tiles < most ? tiles : most;
    if ((division)(config / SHAPE_COUNT) == EVEN) {
        stream_k_split tail = stream_k_split_of(tiles, steps, most);
        geometry.tail_tiles = tail.tiles;
        geometry.workers = tail.workers;
    }
    return geometry;
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    moq_nvfp4_fp8_config geometry = partition_work(spec, p->tokens, config);
    int64_t tiles = geometry.row_tiles * geometry.columns;
    double rounds = (double)divide_up(tiles, geometry.workers);
    double turns = geometry.tail_tiles ? (double)tiles / (double)geometry.workers : rounds;
    w->bytes = MOQ_NVFP4_BYTES * (double)spec->out_features * (double)spec->in_features;
    w->inside[0] = turns * (double)divide_up(spec->in_features, MOQ_NVFP4_FP8_STEP);
    w->inside[1] = w->inside[0] * (double)(geometry.workers * geometry.shape->blocks) /
                   (double)spec->target.sm_count; /* the clock is lower the more are busy */
    w->inside[2] = rounds;
    w->beside[0] = (double)p->tokens * (double)spec->in_features;
    w->beside[1] = geometry.tail_tiles ? (double)geometry.workers / (double)geometry.tail_tiles : 0;
    return true;
}

/* Tiles that are divided evenly are cut at steps that depend on how many there are. */
static bool row_order_fixed(int config) {
    return (division)(config / SHAPE_COUNT) == ROUNDS;
}

static const moq_configs CONFIGS = {
    .configs = CONFIG_COUNT, .rates = RATES, .row_order_fixed = row_order_fixed, .work = work};

/* Entries of nvfp4_fp8_prefill.cu. */
MOQ_ENTRY moq_status moq_cuda_nvfp4_fp8_prefill(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_nvfp4_fp8_prefill_workspace(const moq_linear_call *call);

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_suits_folding(spec, reason, size) &&
           moq_takes_tokens(m, MOQ_NVFP4_PREFILL_TOKENS, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM90_NVFP4_FP8_PREFILL = {
    {"cuda", "sm90_nvfp4_fp8_prefill", .configs = &CONFIGS, .folds = true, .row_order_fixed = true},
    can_run,
    .workspace = moq_cuda_nvfp4_fp8_prefill_workspace,
    .run = moq_cuda_nvfp4_fp8_prefill,
};

moq_nvfp4_fp8_config moq_nvfp4_fp8_expand_config(const moq_linear_call *call) {
    return partition_work(call->spec, call->m, moq_tiling_row(moq_tiling_of(call)));
}
