/* Configs of the GEMMs for medium numbers of tokens on Hopper, of NVFP4 weights and of those that
 * general kernels read, and their rows: see nvfp4_medium_config.h and general_config.h. */
#include "cuda/linear/sm90/general_config.h"

#include "core/invariant.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"

#include <stdio.h>

#define LEAST_STAGES     3 /* and two of tiles of many tokens, whose steps take long */
#define MANY_TOKENS      128
#define MOST             (1 << 22)   /* tokens */
#define MOST_OUTPUTS     (1ll << 40) /* tiles are counted in 32 bits */
#define FIXED_ROW_GROUPS 3           /* of batch_invariant layers */

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
    int beside = v->weight_step == MOQ_PACKED_STEP
                     ? v->row_groups * v->k_groups * 4 * (2 * MOQ_NVFP4_MEDIUM_SCALES)
                     : MOQ_GENERAL_ROOM;
    int most = BLOCK_SHARED - 1024 - MOQ_NVFP4_MEDIUM_BARRIERS * 8 - COLUMN_TERMS_BYTES - beside -
               l.behind;
    l.stages =
        most / v->stage < MOQ_NVFP4_MEDIUM_STAGES ? most / v->stage : MOQ_NVFP4_MEDIUM_STAGES;
    l.stages -= l.stages % v->k_groups;
    if (l.stages < (v->tokens < MANY_TOKENS ? LEAST_STAGES : 2) || l.stages < 2 * v->k_groups ||
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

int64_t moq_nvfp4_medium_tokens(int64_t m, const moq_nvfp4_medium_config *geometry) {
    int64_t unit = geometry->columns == 1 ? 1 : 8;
    return divide_up(divide_up(m, geometry->columns), unit) * unit;
}

/* Returns the rows of W of a tile: as few as come out in as many rounds, whole sixteens, so that
 * all blocks read W. Packed weights have tiles of all rows. */
static int rows_of_tile(const moq_linear_spec *spec, const moq_nvfp4_medium_shape *v,
                        int64_t columns, int64_t most) {
    int64_t rows = 64 * v->row_groups, tiles = divide_up(spec->out_features, rows) * columns;
    if (v->weight_step == MOQ_PACKED_STEP)
        return (int)rows;
    int64_t row_tiles = divide_up(tiles, most) * most / columns;
    return (int)(divide_up(divide_up(spec->out_features, row_tiles), 16) * 16);
}

/* Tiles of a shape, whose K the blocks of a cluster share, or whose last rounds all blocks share
 * evenly by steps. */
static moq_nvfp4_medium_config partition_work(const moq_linear_spec *spec, int64_t m,
                                              const moq_nvfp4_medium_shape *v, int index,
                                              int cluster, bool tail) {
    int64_t most = moq_clusters_that_fit(&spec->target, cluster), columns = divide_up(m, v->tokens);
    int rows = tail ? 64 * v->row_groups : rows_of_tile(spec, v, columns, most);
    moq_nvfp4_medium_config geometry = {
        v, index, cluster, rows, divide_up(spec->out_features, rows), columns};
    int64_t tiles = geometry.row_tiles * geometry.columns,
            steps = divide_up(spec->in_features, MOQ_NVFP4_MEDIUM_STEP);
    geometry.workers = tiles < most ? tiles : most;
    if (tail) {
        stream_k_split tail = stream_k_split_of(tiles, steps, most);
        geometry.tail_tiles = tail.tiles;
        geometry.workers = tail.workers;
    }
    return geometry;
}

/* The most blocks that share K where all tiles are there at once, with a step for every block; 0
 * where they cannot be. */
static int parts_for(const moq_linear_spec *spec, int64_t tiles, const moq_nvfp4_medium_shape *v) {
    int64_t steps = divide_up(spec->in_features, MOQ_NVFP4_MEDIUM_STEP);
    int least = v->k_groups == 1 ? 2 : 1, most = MAX_CLUSTER;
    while (most >= least &&
           ((most > 1 && (most > steps || tiles > moq_clusters_that_fit(&spec->target, most))) ||
            moq_nvfp4_medium_smem_layout(v, most).stages == 0))
        most--;
    return most >= least ? most : 0;
}

/* Configs are shapes with whole tiles, then shapes with shared ones. */
static bool count(const moq_problem *p, const moq_nvfp4_medium_shape *shapes, int shape_count,
                  int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    const moq_nvfp4_medium_shape *v = &shapes[config % shape_count];
    bool tail = config >= shape_count;
    int64_t columns = divide_up(p->tokens, v->tokens);
    int64_t tiles = divide_up(spec->out_features, 64 * v->row_groups) * columns;
    w->blocks = v->split_k                                      ? parts_for(spec, tiles, v)
                : moq_nvfp4_medium_smem_layout(v, 1).stages > 0 ? 1
                                                                : 0;
    if (w->blocks == 0 || (tail && !v->shared) || tiles >= INT32_MAX / 2 ||
        (v->split_k && (columns > 65535 || tiles > 65535)))
        return false;
    moq_nvfp4_medium_config geometry = partition_work(spec, p->tokens, v, 0, w->blocks, tail);
    tiles = geometry.row_tiles * geometry.columns;
    double rounds = (double)divide_up(tiles, geometry.workers);
    double turns = tail ? (double)tiles / (double)geometry.workers : rounds;
    double steps = (double)divide_up(spec->in_features, MOQ_NVFP4_MEDIUM_STEP);
    double tokens = (double)moq_nvfp4_medium_tokens(p->tokens, &geometry);
    w->bytes = (double)v->weight_step / MOQ_NVFP4_MEDIUM_STEP * (double)spec->out_features *
               (double)spec->in_features;
    w->inside[0] = turns * steps / w->blocks / v->k_groups;
    w->inside[1] = w->inside[0] * tokens;
    w->inside[2] = rounds;
    w->beside[0] = (double)p->tokens * (double)spec->in_features;
    w->beside[1] = rounds * tokens;
    w->beside[2] = v->split_k ? w->blocks : tail && geometry.workers % geometry.tail_tiles ? 1 : 0;
    return true;
}

static moq_nvfp4_medium_config expand(const moq_nvfp4_medium_shape *shapes, int shape_count,
                                      const moq_linear_call *call) {
    int config = call->config.variant - 1, shape = config % shape_count;
    moq_nvfp4_medium_config none = {.cluster = 1};
    return config >= 0
               ? partition_work(call->spec, call->m, &shapes[shape], shape,
                                moq_tiling_blocks(moq_tiling_of(call)), config >= shape_count)
               : none;
}

/* Defines a row of a table of shapes. */
#define SHAPE(token_size, weight_step, tokens, row_groups, k_groups, split_k, shared)              \
    {tokens,                                                                                       \
     row_groups,                                                                                   \
     k_groups,                                                                                     \
     split_k,                                                                                      \
     shared,                                                                                       \
     MOQ_NVFP4_MEDIUM_STAGE(tokens, row_groups, token_size, weight_step),                          \
     MOQ_NVFP4_MEDIUM_STEP * (token_size),                                                         \
     weight_step},

#define EXACT_SHAPE(...)  SHAPE(2, MOQ_PACKED_STEP, __VA_ARGS__)
#define FOLDED_SHAPE(...) SHAPE(1, MOQ_PACKED_STEP, __VA_ARGS__)

static bool takes(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    if (m > MOST_OUTPUTS / spec->out_features)
        snprintf(reason, size, "needs at most 2^40 outputs, got %lld tokens of %lld", (long long)m,
                 (long long)spec->out_features);
    else
        return moq_takes_tokens(m, MOST, reason, size);
    return false;
}

static bool can_run_nvfp4_medium(const moq_linear_spec *spec, int64_t m, char *reason,
                                 size_t size) {
    return moq_is_on_sm90(spec, reason, size) && moq_suits_16_bits(spec, reason, size) &&
           takes(spec, m, reason, size);
}

static bool can_run_nvfp4_fp8_medium(const moq_linear_spec *spec, int64_t m, char *reason,
                                     size_t size) {
    return moq_suits_folding(spec, reason, size) && takes(spec, m, reason, size);
}

/* Defines the row of exact products (nvfp4_medium.cu), and of FP8 ones (nvfp4_fp8_medium.cu). */
#define FAMILY(NAME, name, list, shape, computes_folded)                                           \
    static const moq_nvfp4_medium_shape NAME##_SHAPES[] = {list(shape)};                           \
    enum { NAME##_COUNT = sizeof NAME##_SHAPES / sizeof *NAME##_SHAPES };                          \
    static const moq_rates NAME##_RATES[2 * NAME##_COUNT] = {MOQ_RATES_##NAME};                    \
    static bool work_##name(const moq_problem *p, int config, moq_load *w) {                       \
        return count(p, NAME##_SHAPES, NAME##_COUNT, config, w);                                   \
    }                                                                                              \
    /* Blocks that split K, and steps that they share, are as many as tiles leave room for. The    \
     * first step of a tile follows from its rows of W, which are as many in all of these. */      \
    static bool row_order_fixed_##name(int config) {                                               \
        return config < NAME##_COUNT && !NAME##_SHAPES[config].split_k &&                          \
               NAME##_SHAPES[config].row_groups == FIXED_ROW_GROUPS;                               \
    }                                                                                              \
    static const moq_configs NAME = {.configs = 2 * NAME##_COUNT,                                  \
                                     .rates = NAME##_RATES,                                        \
                                     .row_order_fixed = row_order_fixed_##name,                    \
                                     .work = work_##name};                                         \
    moq_nvfp4_medium_config moq_##name##_expand_config(const moq_linear_call *call) {              \
        return expand(NAME##_SHAPES, NAME##_COUNT, call);                                          \
    }                                                                                              \
    MOQ_ENTRY moq_status moq_cuda_##name(const moq_linear_call *call, moq_err *err);               \
    MOQ_ENTRY int64_t moq_cuda_##name##_workspace(const moq_linear_call *call);                    \
    const moq_linear_kernel MOQ_LINEAR_##NAME = {                                                  \
        {"cuda", "sm90_" #name, .configs = &NAME, .adds = !(computes_folded),                      \
         .folds = computes_folded, .row_order_fixed = true},                                       \
        can_run_##name,                                                                            \
        .workspace = moq_cuda_##name##_workspace,                                                  \
        .run = moq_cuda_##name,                                                                    \
    };

FAMILY(SM90_NVFP4_MEDIUM, nvfp4_medium, MOQ_NVFP4_MEDIUM_SHAPES, EXACT_SHAPE, false)
FAMILY(SM90_NVFP4_FP8_MEDIUM, nvfp4_fp8_medium, MOQ_NVFP4_FP8_MEDIUM_SHAPES, FOLDED_SHAPE, true)

/* ---- MXFP8, int8 and int4 weights (general.cu) ---- */

#define GENERAL_SHAPE(...) SHAPE(2, MOQ_GENERAL_STEP, __VA_ARGS__)
#define INT4_SHAPE(...)    SHAPE(2, MOQ_GENERAL_INT4_STEP, __VA_ARGS__)

static const moq_nvfp4_medium_shape GENERAL_SHAPES[] = {MOQ_GENERAL_SHAPES(GENERAL_SHAPE)
                                                            MOQ_GENERAL_WIDE_SHAPES(GENERAL_SHAPE)};

enum { GENERAL_COUNT = sizeof GENERAL_SHAPES / sizeof *GENERAL_SHAPES };

/* Shapes that int4 does not have have no tokens. */
static const moq_nvfp4_medium_shape INT4_SHAPES[GENERAL_COUNT] = {MOQ_GENERAL_SHAPES(INT4_SHAPE)};

/* Tokens up to which the kernel was timed; the library multiplies more of them. */
#define GENERAL_MOST 256

/* Rates of every config, of each kind of weights. */
typedef enum { E4M3, INT8, INT4, KINDS } kind;

static const moq_rates GENERAL_RATES[KINDS * 2 * GENERAL_COUNT] = {MOQ_RATES_SM90_GENERAL};

static const moq_nvfp4_medium_shape *general_shapes_of(const moq_linear_spec *spec) {
    return spec->weight == MOQ_WEIGHT_INT4_GROUP ? INT4_SHAPES : GENERAL_SHAPES;
}

static bool work_general(const moq_problem *p, int config, moq_load *w) {
    moq_weight_layout weight = ((const moq_linear_spec *)p->layer)->weight;
    kind of = weight == MOQ_WEIGHT_INT4_GROUP ? INT4 : weight == MOQ_WEIGHT_INT8_ROW ? INT8 : E4M3;
    w->rates = (int)of * 2 * GENERAL_COUNT + config;
    const moq_nvfp4_medium_shape *shapes = general_shapes_of(p->layer);
    return shapes[config % GENERAL_COUNT].tokens && count(p, shapes, GENERAL_COUNT, config, w);
}

static const moq_configs GENERAL = {
    .configs = 2 * GENERAL_COUNT, .rates = GENERAL_RATES, .work = work_general};

static bool can_run_general(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_suits_general_sm90(spec, reason, size) &&
           moq_takes_tokens(m, GENERAL_MOST, reason, size);
}

MOQ_ENTRY moq_status moq_cuda_general(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_general_workspace(const moq_linear_call *call);

const moq_linear_kernel MOQ_LINEAR_SM90_GENERAL = {
    {"cuda", "sm90_general", .configs = &GENERAL},
    can_run_general,
    .workspace = moq_cuda_general_workspace,
    .run = moq_cuda_general,
};

moq_nvfp4_medium_config moq_general_expand_config(const moq_linear_call *call) {
    return expand(general_shapes_of(call->spec), GENERAL_COUNT, call);
}
