/* Configs of the GEMMs for prefill on Hopper, of NVFP4 weights and of those that general kernels
 * read, and their rows: see nvfp4_prefill_config.h. */
#include "cuda/linear/sm90/nvfp4_prefill_config.h"

#include "core/nvfp4_packed.h"
#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"

#define SHAPE(tokens, share) {tokens, (share) == MOQ_ALONE ? 1 : 2},

static const moq_nvfp4_prefill_shape SHAPES[] = {MOQ_NVFP4_PREFILL_SHAPES(SHAPE)};

/* How tiles are divided: whole ones in rounds, or the last rounds evenly by steps. */
typedef enum { ROUNDS, EVEN, DIVISIONS } division;

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, CONFIG_COUNT = SHAPE_COUNT * DIVISIONS };
_Static_assert(CONFIG_COUNT <= MOQ_TILING_ROWS, "a config tells every shape and division");
_Static_assert((int)SHAPE_COUNT == MOQ_NVFP4_PREFILL_SHAPE_COUNT, "as kernels count them");

static const moq_rates RATES[CONFIG_COUNT] = {MOQ_RATES_SM90_NVFP4_PREFILL};

/* Columns of a step. */
static int step_of(const moq_linear_spec *spec) {
    return moq_layout_is_general(spec->weight) ? MOQ_GENERAL_PREFILL_STEP : MOQ_PACK_K;
}

/* Clusters of two go to neighbours, of which every multiprocessor of an H200 has one. */
static moq_nvfp4_prefill_config partition_work(const moq_linear_spec *spec, int64_t m, int config) {
    const moq_nvfp4_prefill_shape *v = &SHAPES[config % SHAPE_COUNT];
    moq_nvfp4_prefill_config geometry = {
        v, (int)(v - SHAPES), divide_up(spec->out_features, MOQ_NVFP4_PREFILL_ROWS * v->blocks),
        divide_up(m, v->tokens)};
    int64_t tiles = geometry.row_tiles * geometry.columns, most = spec->target.sm_count / v->blocks;
    int64_t steps = divide_up(spec->in_features, step_of(spec));
    geometry.workers = tiles < most ? tiles : most;
    if ((division)(config / SHAPE_COUNT) == EVEN) {
        stream_k_split tail = stream_k_split_of(tiles, steps, most);
        geometry.tail_tiles = tail.tiles;
        geometry.workers = tail.workers;
    }
    return geometry;
}

static bool count(const moq_problem *p, int config, double weight_bytes, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    moq_nvfp4_prefill_config geometry = partition_work(spec, p->tokens, config);
    int64_t tiles = geometry.row_tiles * geometry.columns;
    double rounds = (double)divide_up(tiles, geometry.workers);
    double turns = geometry.tail_tiles ? (double)tiles / (double)geometry.workers : rounds;
    w->bytes = weight_bytes * (double)spec->out_features * (double)spec->in_features;
    w->inside[0] = turns * (double)divide_up(spec->in_features, step_of(spec));
    w->inside[1] = w->inside[0] * (double)(geometry.workers * geometry.shape->blocks) /
                   (double)spec->target.sm_count; /* the clock is lower the more are busy */
    w->inside[2] = rounds;
    w->beside[0] = geometry.tail_tiles ? (double)geometry.workers / (double)geometry.tail_tiles : 0;
    return true;
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    return count(p, config, MOQ_NVFP4_BYTES, w);
}

/* Tiles that are divided evenly are cut at steps that depend on how many there are. */
static bool row_order_fixed(int config) {
    return (division)(config / SHAPE_COUNT) == ROUNDS;
}

static const moq_configs CONFIGS = {
    .configs = CONFIG_COUNT, .rates = RATES, .row_order_fixed = row_order_fixed, .work = work};

/* Entries of nvfp4_prefill.cu. */
MOQ_ENTRY moq_status moq_cuda_nvfp4_prefill(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_nvfp4_prefill_workspace(const moq_linear_call *call);

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_is_on_sm90(spec, reason, size) && moq_suits_16_bits(spec, reason, size) &&
           moq_takes_tokens(m, MOQ_NVFP4_PREFILL_TOKENS, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM90_NVFP4_PREFILL = {
    {"cuda", "sm90_nvfp4_prefill", .configs = &CONFIGS, .adds = true, .row_order_fixed = true},
    can_run,
    .workspace = moq_cuda_nvfp4_prefill_workspace,
    .run = moq_cuda_nvfp4_prefill,
};

moq_nvfp4_prefill_config moq_nvfp4_prefill_expand_config(const moq_linear_call *call) {
    return partition_work(call->spec, call->m, moq_tiling_row(moq_tiling_of(call)));
}

/* ---- MXFP8, int8 and int4 weights (general_prefill.cu) ---- */

/* Rates of every config, of each kind of weights. */
typedef enum { E4M3, INT8, INT4, KINDS } kind;

static const moq_rates GENERAL_RATES[KINDS * CONFIG_COUNT] = {MOQ_RATES_SM90_GENERAL_PREFILL};

static bool work_general(const moq_problem *p, int config, moq_load *w) {
    moq_weight_layout weight = ((const moq_linear_spec *)p->layer)->weight;
    kind of = weight == MOQ_WEIGHT_INT4_GROUP ? INT4 : weight == MOQ_WEIGHT_INT8_ROW ? INT8 : E4M3;
    w->rates = (int)of * CONFIG_COUNT + config;
    if (!count(p, config, of == INT4 ? 0.5 : 1, w))
        return false;
    w->beside[1] = w->inside[2] < 2 ? w->inside[2] : 2; /* tiles whose ends nothing hides */
    return true;
}

static const moq_configs GENERAL = {.configs = CONFIG_COUNT,
                                    .rates = GENERAL_RATES,
                                    .row_order_fixed = row_order_fixed,
                                    .work = work_general};

/* Entries of general_prefill.cu. */
MOQ_ENTRY moq_status moq_cuda_general_prefill(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_general_prefill_workspace(const moq_linear_call *call);

static bool can_run_general(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_suits_general_sm90(spec, reason, size) &&
           moq_takes_tokens(m, MOQ_NVFP4_PREFILL_TOKENS, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM90_GENERAL_PREFILL = {
    {"cuda", "sm90_general_prefill", .configs = &GENERAL, .row_order_fixed = true},
    can_run_general,
    .workspace = moq_cuda_general_prefill_workspace,
    .run = moq_cuda_general_prefill,
};

moq_nvfp4_prefill_config moq_general_prefill_expand_config(const moq_linear_call *call) {
    return partition_work(call->spec, call->m, moq_tiling_row(moq_tiling_of(call)));
}
