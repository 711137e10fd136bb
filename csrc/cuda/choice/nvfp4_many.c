/* The choice among ways to do the NVFP4 GEMM of many tokens of Hopper: see nvfp4_many.h. */
#include "cuda/choice/nvfp4_many.h"

#include "core/nvfp4_packed.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

#define SHAPE(tokens, share, step, even) {tokens, (share) == MOQ_ALONE ? 1 : 2, step, even},

static const moq_nvfp4_many_shape SHAPES[] = {MOQ_NVFP4_MANY_SHAPES(SHAPE)};

/* How tiles are divided: whole ones in rounds, the last rounds evenly by steps, or each among the
 * blocks of a cluster. */
typedef enum { ROUNDS, EVEN, PARTS, DIVISIONS } division;

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, VARIANT_COUNT = SHAPE_COUNT * DIVISIONS };

/* Microseconds that sums of blocks take on their way to each other. */
static double exchange_of(const moq_nvfp4_many_way *way, division how) {
    double width = way->shape->tokens / 256.0;
    if (how == EVEN)
        return way->shape->even + width * 0.94 * (1 + (double)way->workers / (double)way->rest);
    return how == PARTS ? width * (2.3 + 0.83 * way->parts) : 0;
}

/* Fitted to 561 times of 16 layers with 128 to 2048 tokens on an H200, 6 % root mean square
 * (docs/lab.md). The more multiprocessors multiply the lower is the clock. */
static double estimate(const moq_linear_spec *spec, const moq_nvfp4_many_way *way, division how) {
    const moq_nvfp4_many_shape *v = way->shape;
    double tiles = (double)(way->row_tiles * way->columns), workers = (double)way->workers;
    double turns = how == EVEN ? tiles / workers : ceil(tiles / workers);
    double parts = how == PARTS ? way->parts : 1;
    double busy = workers * v->blocks * parts / (double)spec->target.sm_count;
    double steps = (double)divide_up(spec->in_features, MOQ_PACK_K) / parts;
    double products = turns * steps * v->step * (1 + 0.172 * busy);
    double outputs = ceil(turns) * (0.29 + 0.0038 * v->tokens);
    double begin = 2.3 + 0.31 * v->blocks;
    return (begin + products + outputs + exchange_of(way, how)) * 1e-6;
}

/* The most parts of K that clusters of blocks can have, all at once; 0 if there is no such way. */
static int parts_of(const moq_linear_spec *spec, const moq_nvfp4_many_shape *v, int64_t tiles) {
    int64_t steps = divide_up(spec->in_features, MOQ_PACK_K);
    int most = MAX_CLUSTER / v->blocks < v->tokens / MOQ_NVFP4_MANY_CHUNK
                   ? MAX_CLUSTER / v->blocks
                   : v->tokens / MOQ_NVFP4_MANY_CHUNK;
    for (int parts = steps < most ? (int)steps : most; parts > 1; parts--)
        if (tiles <= moq_clusters_that_fit(&spec->target, parts * v->blocks))
            return parts;
    return 0;
}

/* Clusters of two go to neighbours, of which every multiprocessor of an H200 has one. */
static moq_nvfp4_many_way way_of(const moq_linear_spec *spec, int64_t m,
                                 const moq_nvfp4_many_shape *v, division how) {
    moq_nvfp4_many_way way = {v, (int)(v - SHAPES),
                              divide_up(spec->out_features, MOQ_NVFP4_MANY_ROWS * v->blocks),
                              divide_up(m, v->tokens)};
    int64_t tiles = way.row_tiles * way.columns, most = spec->target.sm_count / v->blocks;
    int64_t steps = divide_up(spec->in_features, MOQ_PACK_K);
    way.workers = tiles < most ? tiles : most;
    if (how == EVEN) {
        even_shares even = share_evenly(tiles, steps, most);
        way.rest = even.tiles;
        way.workers = even.workers;
    } else if (how == PARTS) {
        way.parts = parts_of(spec, v, tiles);
        way.workers = tiles;
    }
    way.seconds = how == PARTS && way.parts == 0 ? INFINITY : estimate(spec, &way, how);
    return way;
}

static moq_nvfp4_many_way way_at(const moq_linear_spec *spec, int64_t m, int index) {
    moq_nvfp4_many_way way =
        way_of(spec, m, &SHAPES[index % SHAPE_COUNT], (division)(index / SHAPE_COUNT));
    way.variant = index + 1;
    return way;
}

/* Variant 0 is the choice, the others are a shape and a division each; the choice again where that
 * cannot be. */
moq_nvfp4_many_way moq_nvfp4_many_find_way(const moq_linear_spec *spec, int64_t m, int32_t which) {
    moq_nvfp4_many_way best = {.seconds = INFINITY};
    if (which > 0 && which <= VARIANT_COUNT)
        best = way_at(spec, m, which - 1);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < VARIANT_COUNT; i++) {
        moq_nvfp4_many_way way = way_at(spec, m, i);
        if (way.seconds < best.seconds)
            best = way;
    }
    return best;
}

double moq_cuda_nvfp4_many_seconds(const moq_linear_spec *spec, int64_t m) {
    return moq_nvfp4_many_find_way(spec, m, 0).seconds;
}

int32_t moq_cuda_nvfp4_many_choose(const moq_linear_spec *spec, int64_t m) {
    return moq_nvfp4_many_find_way(spec, m, 0).variant;
}

/* The choice, and the shapes that are not expected to take half as long again. */
uint64_t moq_cuda_nvfp4_many_variants(const moq_linear_call *call) {
    double best = moq_nvfp4_many_find_way(call->spec, call->m, 0).seconds;
    uint64_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (way_at(call->spec, call->m, i).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}
