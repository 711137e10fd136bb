/* The choice among ways to do the NVFP4 GEMM of many tokens of Hopper: see nvfp4_prefill.h. */
#include "cuda/choice/nvfp4_prefill.h"

#include "core/nvfp4_packed.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

#define SHAPE(tokens, share, step, tail) {tokens, (share) == MOQ_ALONE ? 1 : 2, step, tail},

static const moq_nvfp4_prefill_shape SHAPES[] = {MOQ_NVFP4_PREFILL_SHAPES(SHAPE)};

/* How tiles are divided: whole ones in rounds, the last rounds evenly by steps, or each among the
 * blocks of a cluster. */
typedef enum { ROUNDS, EVEN, SPLIT_K, DIVISIONS } division;

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, VARIANT_COUNT = SHAPE_COUNT * DIVISIONS };
_Static_assert(VARIANT_COUNT <= MOQ_TILING_ROWS, "a way tells every shape and division");

/* Microseconds that sums of blocks take on their way to each other. */
static double exchange_of(const moq_nvfp4_prefill_config *config, division how) {
    double width = config->shape->tokens / 256.0;
    if (how == EVEN)
        return config->shape->tail +
               width * 0.94 * (1 + (double)config->workers / (double)config->tail_tiles);
    return how == SPLIT_K ? width * (2.3 + 0.83 * config->splits) : 0;
}

/* Fitted to 561 times of 16 layers with 128 to 2048 tokens on an H200, 6 % root mean square
 * (docs/lab/nvfp4-prefill.md), the begin again to calls behind the end of the one before. The more
 * multiprocessors multiply the lower is the clock. */
static double estimate(const moq_linear_spec *spec, const moq_nvfp4_prefill_config *config,
                       division how) {
    const moq_nvfp4_prefill_shape *v = config->shape;
    double tiles = (double)(config->row_tiles * config->columns), workers = (double)config->workers;
    double turns = how == EVEN ? tiles / workers : ceil(tiles / workers);
    double splits = how == SPLIT_K ? config->splits : 1;
    double busy = workers * v->blocks * splits / (double)spec->target.sm_count;
    double steps = (double)divide_up(spec->in_features, MOQ_PACK_K) / splits;
    double products = turns * steps * v->step * (1 + 0.172 * busy);
    double outputs = ceil(turns) * (0.29 + 0.0038 * v->tokens);
    double begin = 3.7 + 0.31 * v->blocks;
    return (begin + products + outputs + exchange_of(config, how)) * 1e-6;
}

/* The most parts of K that clusters of blocks can have, all at once; 0 if there is no such way. */
static int parts_of(const moq_linear_spec *spec, const moq_nvfp4_prefill_shape *v, int64_t tiles) {
    int64_t steps = divide_up(spec->in_features, MOQ_PACK_K);
    int most = MAX_CLUSTER / v->blocks < v->tokens / MOQ_NVFP4_PREFILL_CHUNK
                   ? MAX_CLUSTER / v->blocks
                   : v->tokens / MOQ_NVFP4_PREFILL_CHUNK;
    for (int splits = steps < most ? (int)steps : most; splits > 1; splits--)
        if (tiles <= moq_clusters_that_fit(&spec->target, splits * v->blocks))
            return splits;
    return 0;
}

/* What the search compares: a shape and a division, by their variant less 1, and the parts of K.
 */
typedef struct {
    int index, splits;
    double seconds;
} candidate;

static const moq_nvfp4_prefill_shape *shape_of(int index) {
    return &SHAPES[index % SHAPE_COUNT];
}

static division division_of(int index) {
    return (division)(index / SHAPE_COUNT);
}

/* Clusters of two go to neighbours, of which every multiprocessor of an H200 has one. */
static moq_nvfp4_prefill_config partition_work(const moq_linear_spec *spec, int64_t m, int index,
                                               int splits) {
    const moq_nvfp4_prefill_shape *v = shape_of(index);
    moq_nvfp4_prefill_config config = {
        v, (int)(v - SHAPES), divide_up(spec->out_features, MOQ_NVFP4_PREFILL_ROWS * v->blocks),
        divide_up(m, v->tokens)};
    int64_t tiles = config.row_tiles * config.columns, most = spec->target.sm_count / v->blocks;
    int64_t steps = divide_up(spec->in_features, MOQ_PACK_K);
    config.workers = tiles < most ? tiles : most;
    if (division_of(index) == EVEN) {
        stream_k_split tail = stream_k_split_of(tiles, steps, most);
        config.tail_tiles = tail.tiles;
        config.workers = tail.workers;
    } else if (division_of(index) == SPLIT_K) {
        config.splits = splits;
        config.workers = tiles;
    }
    return config;
}

static candidate try_variant(const moq_linear_spec *spec, int64_t m, int index) {
    const moq_nvfp4_prefill_shape *v = shape_of(index);
    int64_t tiles =
        divide_up(spec->out_features, MOQ_NVFP4_PREFILL_ROWS * v->blocks) * divide_up(m, v->tokens);
    bool divides = division_of(index) == SPLIT_K;
    candidate found = {index, divides ? parts_of(spec, v, tiles) : 1, INFINITY};
    if (found.splits) {
        moq_nvfp4_prefill_config config = partition_work(spec, m, index, found.splits);
        found.seconds = estimate(spec, &config, division_of(index));
    }
    return found;
}

/* Variant 0 is the choice, the others are a shape and a division each; the choice again where that
 * cannot be. */
static candidate find_best(const moq_linear_spec *spec, int64_t m, int32_t which) {
    candidate best = {.splits = 1, .seconds = INFINITY};
    if (which > 0 && which <= VARIANT_COUNT)
        best = try_variant(spec, m, which - 1);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < VARIANT_COUNT; i++) {
        candidate other = try_variant(spec, m, i);
        if (other.seconds < best.seconds)
            best = other;
    }
    return best;
}

double moq_cuda_nvfp4_prefill_seconds(const moq_linear_spec *spec, int64_t m) {
    return find_best(spec, m, 0).seconds;
}

moq_kernel_config moq_cuda_nvfp4_prefill_choose(const moq_linear_spec *spec, int64_t m,
                                                int32_t variant) {
    candidate best = find_best(spec, m, variant);
    return moq_kernel_config_of(best.index + 1, best.index, best.splits);
}

moq_nvfp4_prefill_config moq_nvfp4_prefill_expand_config(const moq_linear_call *call) {
    uint8_t tiling = moq_tiling_of(call);
    return partition_work(call->spec, call->m, moq_tiling_row(tiling), moq_tiling_blocks(tiling));
}

double moq_cuda_nvfp4_prefill_config_seconds(const moq_linear_call *call) {
    moq_nvfp4_prefill_config config = moq_nvfp4_prefill_expand_config(call);
    return estimate(call->spec, &config, division_of(moq_tiling_row(moq_tiling_of(call))));
}

/* The choice, and the shapes that are not expected to take half as long again. */
uint64_t moq_cuda_nvfp4_prefill_variants(const moq_linear_call *call) {
    double best = find_best(call->spec, call->m, 0).seconds;
    uint64_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (try_variant(call->spec, call->m, i).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}
