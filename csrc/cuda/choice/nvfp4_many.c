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
_Static_assert(VARIANT_COUNT <= MOQ_FORM_ROWS, "a way tells every shape and division");

/* Microseconds that sums of blocks take on their way to each other. */
static double exchange_of(const moq_nvfp4_many_way *way, division how) {
    double width = way->shape->tokens / 256.0;
    if (how == EVEN)
        return way->shape->even + width * 0.94 * (1 + (double)way->workers / (double)way->rest);
    return how == PARTS ? width * (2.3 + 0.83 * way->parts) : 0;
}

/* Fitted to 561 times of 16 layers with 128 to 2048 tokens on an H200, 6 % root mean square
 * (docs/lab/nvfp4-many.md), the begin again to calls behind the end of the one before. The more
 * multiprocessors multiply the lower is the clock. */
static double estimate(const moq_linear_spec *spec, const moq_nvfp4_many_way *way, division how) {
    const moq_nvfp4_many_shape *v = way->shape;
    double tiles = (double)(way->row_tiles * way->columns), workers = (double)way->workers;
    double turns = how == EVEN ? tiles / workers : ceil(tiles / workers);
    double parts = how == PARTS ? way->parts : 1;
    double busy = workers * v->blocks * parts / (double)spec->target.sm_count;
    double steps = (double)divide_up(spec->in_features, MOQ_PACK_K) / parts;
    double products = turns * steps * v->step * (1 + 0.172 * busy);
    double outputs = ceil(turns) * (0.29 + 0.0038 * v->tokens);
    double begin = 3.7 + 0.31 * v->blocks;
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

/* What the search compares: a shape and a division, by their variant less 1, and the parts of K.
 */
typedef struct {
    int index, parts;
    double seconds;
} candidate;

static const moq_nvfp4_many_shape *shape_of(int index) {
    return &SHAPES[index % SHAPE_COUNT];
}

static division division_of(int index) {
    return (division)(index / SHAPE_COUNT);
}

/* Clusters of two go to neighbours, of which every multiprocessor of an H200 has one. */
static moq_nvfp4_many_way share_out(const moq_linear_spec *spec, int64_t m, int index, int parts) {
    const moq_nvfp4_many_shape *v = shape_of(index);
    moq_nvfp4_many_way way = {v, (int)(v - SHAPES),
                              divide_up(spec->out_features, MOQ_NVFP4_MANY_ROWS * v->blocks),
                              divide_up(m, v->tokens)};
    int64_t tiles = way.row_tiles * way.columns, most = spec->target.sm_count / v->blocks;
    int64_t steps = divide_up(spec->in_features, MOQ_PACK_K);
    way.workers = tiles < most ? tiles : most;
    if (division_of(index) == EVEN) {
        even_shares even = share_evenly(tiles, steps, most);
        way.rest = even.tiles;
        way.workers = even.workers;
    } else if (division_of(index) == PARTS) {
        way.parts = parts;
        way.workers = tiles;
    }
    return way;
}

static candidate try_variant(const moq_linear_spec *spec, int64_t m, int index) {
    const moq_nvfp4_many_shape *v = shape_of(index);
    int64_t tiles =
        divide_up(spec->out_features, MOQ_NVFP4_MANY_ROWS * v->blocks) * divide_up(m, v->tokens);
    bool divides = division_of(index) == PARTS;
    candidate found = {index, divides ? parts_of(spec, v, tiles) : 1, INFINITY};
    if (found.parts) {
        moq_nvfp4_many_way way = share_out(spec, m, index, found.parts);
        found.seconds = estimate(spec, &way, division_of(index));
    }
    return found;
}

/* Variant 0 is the choice, the others are a shape and a division each; the choice again where that
 * cannot be. */
static candidate find_best(const moq_linear_spec *spec, int64_t m, int32_t which) {
    candidate best = {.parts = 1, .seconds = INFINITY};
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

double moq_cuda_nvfp4_many_seconds(const moq_linear_spec *spec, int64_t m) {
    return find_best(spec, m, 0).seconds;
}

moq_way moq_cuda_nvfp4_many_choose(const moq_linear_spec *spec, int64_t m, int32_t variant) {
    candidate best = find_best(spec, m, variant);
    return moq_way_of(best.index + 1, best.index, best.parts);
}

moq_nvfp4_many_way moq_nvfp4_many_expand_way(const moq_linear_call *call) {
    uint8_t form = moq_form_of(call);
    return share_out(call->spec, call->m, moq_form_row(form), moq_form_blocks(form));
}

double moq_cuda_nvfp4_many_way_seconds(const moq_linear_call *call) {
    moq_nvfp4_many_way way = moq_nvfp4_many_expand_way(call);
    return estimate(call->spec, &way, division_of(moq_form_row(moq_form_of(call))));
}

/* The choice, and the shapes that are not expected to take half as long again. */
uint64_t moq_cuda_nvfp4_many_variants(const moq_linear_call *call) {
    double best = find_best(call->spec, call->m, 0).seconds;
    uint64_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (try_variant(call->spec, call->m, i).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}
