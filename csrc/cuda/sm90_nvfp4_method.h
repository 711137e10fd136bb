/* How a call of the NVFP4 GEMM of Hopper is done, exact or with FP8 products: which shape of tiles
 * it takes, how many blocks share K, what lies where in shared memory, and the launch. */
#ifndef MOQ_CUDA_SM90_NVFP4_METHOD_H
#define MOQ_CUDA_SM90_NVFP4_METHOD_H

#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/sm90_grid.h"
#include "cuda/sm90_nvfp4_frame.h"
#include "cuda/tensor_map.h"

#include <math.h>

/* A shape of tiles. */
typedef struct {
    int tokens, row_groups, k_groups;
    bool parts, pair;
    int threads, stage;
    int token_step;           /* bytes of a token in a step */
    double step;              /* microseconds, fitted */
    const void *kernel[2][2]; /* of bfloat16, of float16; for whole tiles, shared ones or NULL */
} variant;

/* How a call is done: a shape of tiles and how many there are. */
typedef struct {
    const variant *shape;
    int cluster; /* blocks that share K */
    int64_t row_tiles, columns, workers;
    int64_t rest; /* tiles that are shared evenly */
    double seconds;
} method;

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
    const variant *shapes;
    int count, least, most;
    costs cost;
} family;

/* Shared memory of a block: as many stages as fit, and where sums come to or outputs turn around;
 * sums of many tokens come to where the ring was. A warpgroup needs its next step before it gives
 * up one; no stages where that cannot be. */
typedef struct {
    int stages, side, behind; /* float4 of a share of sums; bytes behind the ring */
    int turn, turn_step;      /* where outputs turn around, and of the next warpgroup */
} layout;

static layout lay_out(const variant *v, int cluster) {
    int turned = v->row_groups * TURNED_AT_ONCE(v->tokens) * 128;
    layout l = {0, 0, turned, 0, turned / v->row_groups};
    if (v->parts) {
        int groups = v->row_groups * v->k_groups;
        parts_room room = room_of_parts(v->tokens, cluster * v->k_groups, groups);
        l.side = room.side;
        l.behind = v->tokens < 128 ? room.sums : 0;
        l.turn = room.sums - l.behind; /* where the ring was, behind sums if those are there too */
        l.turn_step = room.turn_step;
        turned = groups * l.turn_step;
    }
    int scales = v->row_groups * v->k_groups * 4 * (2 * SCALES);
    int most = BLOCK_SHARED - 1024 - BARRIERS * 8 - BOARD_BYTES - scales - l.behind;
    l.stages = most / v->stage < MAX_STAGES ? most / v->stage : MAX_STAGES;
    l.stages -= l.stages % v->k_groups;
    if (l.stages < LEAST_STAGES || l.stages < 2 * v->k_groups ||
        (v->parts && l.turn + turned > l.stages * v->stage))
        l.stages = 0;
    if (!v->parts)
        l.turn = l.stages * v->stage;
    return l;
}

/* Tokens of a tile: as few as give as many tiles, whole eights where there are several. */
static int64_t tokens_of(int64_t m, const method *way) {
    int64_t unit = way->shape->pair ? 16 : way->columns == 1 ? 1 : 8;
    return divide_up(divide_up(m, way->columns), unit) * unit;
}

/* Microseconds from where sums of shared tiles are left to where they have been added. */
static double exchange_of(const costs *c, const method *way, double tokens) {
    double blocks = (double)way->workers / (double)way->rest;
    double own = way->workers % way->rest == 0 ? c->own + c->own_token * tokens : 0;
    return c->hand_over + c->shared_token * tokens * (1 + c->others * blocks) - own;
}

/* Of the sums and outputs of a tile. */
static double outputs_of(const costs *c, const method *way, double tokens) {
    const variant *v = way->shape;
    if (!v->parts)
        return c->rows * v->row_groups + c->tokens * tokens;
    int64_t eights = divide_up(v->tokens / 8, way->cluster); /* of the block that has most */
    double received = (double)(eights * (way->cluster - 1)) * v->k_groups * v->row_groups;
    return c->part_rows * v->row_groups + c->part_tokens * fmin(tokens, 64) +
           c->part_more * fmax(0, tokens - 64) + c->received * received;
}

/* Seconds of a call: x quantized; then the products, W from memory and all tiles from the
 * second-level cache at the same time; then sums and outputs. */
static double estimate(const family *f, const moq_linear_spec *spec, const method *way, int64_t m) {
    const variant *v = way->shape;
    const costs *c = &f->cost;
    double n = (double)spec->out_features, k = (double)spec->in_features, pair = v->pair ? 2 : 1;
    double x = (double)m * k * 1e-6, steps = (double)divide_up(spec->in_features, STEP);
    double tokens = fmax(f->least, (double)tokens_of(m, way));
    double tiles = (double)(way->row_tiles * way->columns);
    double turns = tiles / (double)way->workers;
    double exchange = way->rest ? exchange_of(c, way, tokens) : 0;
    if (!way->rest)
        turns = ceil(turns);
    double blocks = (double)way->workers * way->cluster * pair;
    double share = v->row_groups * 64 * 72 + v->token_step * tokens / pair;
    double products = turns * steps / way->cluster / v->k_groups * v->step;
    if (v->tokens >= 128) /* they lower the clock */
        products *= 1 + c->heat * fmin(1, products / 100);
    double far = 1 + c->far * fmax(0, 2 * x - 1.5);
    double copies = tiles * pair * steps * share * far * 1e-6 / c->cache;
    double memory = n * k * 0.5625e-6 / c->memory / fmin(1, blocks / 80);
    double seconds =
        c->begin + c->quantize * x + exchange + ceil(turns) * outputs_of(c, way, tokens) +
        cbrt(products * products * products + memory * memory * memory + copies * copies * copies);
    return seconds * 1e-6;
}

static method method_of(const family *f, const moq_linear_spec *spec, int64_t m, const variant *v,
                        int cluster, bool shared) {
    int pair = v->pair ? 2 : 1;
    method way = {v, cluster, divide_up(spec->out_features, 64 * v->row_groups * pair),
                  divide_up(m, v->tokens)};
    int64_t tiles = way.row_tiles * way.columns, steps = divide_up(spec->in_features, STEP);
    int64_t most = clusters_that_fit(spec->target.sm_count, cluster * pair);
    way.workers = tiles < most ? tiles : most;
    if (shared) {
        even_shares even = share_evenly(tiles, steps, most);
        way.rest = even.tiles;
        way.workers = even.workers;
    }
    bool can = tiles < INT32_MAX / 2 && lay_out(v, cluster).stages > 0;
    if (v->parts && (way.columns > 65535 || way.row_tiles > 65535))
        can = false;
    if (cluster > 1 && (tiles > most || cluster > steps)) /* all at once, a step for each */
        can = false;
    way.seconds = can ? estimate(f, spec, &way, m) : INFINITY;
    return way;
}

static method sooner(method one, method other) {
    return other.seconds < one.seconds ? other : one;
}

/* The best way with a shape, whose tiles are all whole or shared. */
static method best_of_shape(const family *f, const moq_linear_spec *spec, int64_t m,
                            const variant *v, bool shared) {
    if (shared && !v->kernel[0][1])
        return {.seconds = INFINITY};
    int least = v->parts && v->k_groups == 1 ? 2 : 1;
    int most = v->parts ? MAX_CLUSTER / (v->pair ? 2 : 1) : 1;
    method best = method_of(f, spec, m, v, least, shared);
    for (int cluster = least + 1; cluster <= most; cluster++)
        best = sooner(best, method_of(f, spec, m, v, cluster, shared));
    return best;
}

/* Whether tiles of a shape are neither far too wide for the tokens nor too narrow. */
static bool suits(const family *f, const variant *v, int64_t m) {
    return (v->tokens == f->least || m > v->tokens / 2) &&
           (v->tokens == f->most || m <= 4 * v->tokens);
}

/* Variants from 1 on: the shapes with whole tiles, then the shapes with shared ones. */
static method method_at(const family *f, const moq_linear_spec *spec, int64_t m, int index) {
    return best_of_shape(f, spec, m, &f->shapes[index % f->count], index >= f->count);
}

/* Variant 0 is the choice; the choice again where a variant cannot do the call. */
static method method_for(const family *f, const moq_linear_spec *spec, int64_t m, int32_t which) {
    method best = {.seconds = INFINITY};
    if (which > 0 && which <= 2 * f->count)
        best = method_at(f, spec, m, which - 1);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < 2 * f->count; i++)
        if (suits(f, &f->shapes[i % f->count], m))
            best = sooner(best, method_at(f, spec, m, i));
    return best;
}

static int32_t choice_of(const family *f, const moq_linear_spec *spec, int64_t m) {
    method way = method_for(f, spec, m, 0);
    return (int32_t)(way.shape - f->shapes) + (way.rest ? f->count : 0) + 1;
}

/* The choice, and those that are not expected to take half as long again. */
static uint64_t variants_of(const family *f, const moq_linear_call *call) {
    double best = method_for(f, call->spec, call->m, 0).seconds;
    uint64_t some = 1;
    for (int i = 0; i < 2 * f->count; i++)
        if (suits(f, &f->shapes[i % f->count], call->m) &&
            method_at(f, call->spec, call->m, i).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}

/* ---- launch ---- */

/* Weights on their way at once at the start of a block, so that x is not queued behind all. */
#define FLIGHT_BYTES 49152

/* What a call works in where tiles are shared, none where not: a flag of each warp, and sums. */
typedef struct {
    int64_t flags, bytes;
} sums_room;

static sums_room room_of_sums(const method *way) {
    const variant *v = way->shape;
    int groups = v->row_groups * v->k_groups;
    if (!way->rest)
        return {0, 0};
    int64_t flags = divide_up(way->workers * groups * 4 * 8, 256) * 256;
    return {flags, flags + way->workers * groups * 64 * v->tokens * 4};
}

/* Of a call whose sums, if it hands over some, go to `room`. */
static gemm_args begin_args(const moq_linear_call *call, const method *way, layout l, void *room) {
    const moq_linear_spec *spec = call->spec;
    int flight = FLIGHT_BYTES / (way->shape->row_groups * 64 * 72);
    int after = l.behind ? l.stages * way->shape->stage : 0;
    int64_t steps = divide_up(spec->in_features, STEP);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .steps = (int)steps,
                   .row_tiles = (int)way->row_tiles,
                   .columns = (int)way->columns,
                   .tokens = (int)tokens_of(call->m, way),
                   .box = (int)tokens_of(call->m, way) / (way->shape->pair ? 2 : 1),
                   .stages = l.stages,
                   .flight = flight > 1 ? flight : 1,
                   .part_steps = (int)(steps / way->cluster),
                   .more_parts = (int)(steps % way->cluster),
                   .room = after,
                   .side = l.side,
                   .turn = l.turn,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale,
                   .turn_step = l.turn_step,
                   .rest = (int)way->rest,
                   .shares = shares_of(way->rest, steps, way->workers),
                   .handed = (float4 *)((uint8_t *)room + room_of_sums(way).flags),
                   .ready = (uint64_t *)room};
    return a;
}

static moq_status refuse(const moq_linear_call *call, moq_err *err) {
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "NVFP4 linear: %lld rows are too many",
                    (long long)call->m);
}

/* x has a row for each token and bytes of `width` in it, the next one `stride` bytes further. */
static moq_status launch_tiles(const moq_linear_call *call, const method *way, layout l,
                               const gemm_args *args, const void *x, int64_t width, int64_t stride,
                               moq_err *err) {
    const variant *v = way->shape;
    const moq_linear_spec *spec = call->spec;
    gemm_args a = *args;
    CUtensorMap weights, tokens;
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, moq_pack_slabs(spec->out_features),
                                 moq_pack_blocks(spec->in_features) * (MOQ_PACK_BYTES / 8),
                                 (uint32_t)v->row_groups * 4, 2 * MOQ_PACK_BYTES / 8, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, x, call->m, width, stride, (uint32_t)a.box, err));
    int blocks = way->cluster * (v->pair ? 2 : 1); /* of a cluster */
    moq_launch launch = {
        .what = "NVFP4 linear",
        .kernel = v->kernel[spec->dtype == MOQ_DT_F16][way->rest > 0],
        .grid = v->parts ? dim3((unsigned)blocks, (unsigned)way->row_tiles, (unsigned)way->columns)
                         : dim3((unsigned)(way->workers * blocks)),
        .block = dim3((unsigned)v->threads),
        .cluster = blocks > 1 ? (unsigned)blocks : 0,
        .shared = (size_t)(l.stages * v->stage + l.behind),
        .stream = (cudaStream_t)call->stream,
        .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

#endif
