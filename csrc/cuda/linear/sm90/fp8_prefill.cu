/* FP8 or int8 linear for more than a few tokens on Hopper: y[m, n] = round(sum_k X[m, k] W[n, k] *
 * scales + bias[n]).
 *
 * W is e4m3 or int8 [N, K] as the checkpoint has it. X is e4m3 codes [M, K], quantized into the
 * workspace, with group scales [K / 128][tokens], or int8 codes with a scale a token. A block has
 * two consumer warpgroups and a producer warp, with a pipeline of steps of 128 columns.
 *
 * - Few tokens: W gives the rows of the products, so that a tile is as narrow as the tokens. K is
 *   split over the blocks of a cluster, and then over their warpgroups, since a layer has 16 to 64
 *   tiles for 132 multiprocessors. W is constant, so the pipeline fills before X is complete (PDL).
 *   With one given scale, two more warpgroups may quantize x in the kernel instead.
 * - Many tokens: tokens give the rows, 256 to a tile, so that group scales are one number a row.
 *   Pairs of blocks share one operand; each copies half of it to both.
 * - Tiles never cross partitions, so that 64 rows have one block scale a step.
 *
 * What bounds it (H200, docs/lab/fp8-prefill.md): up to 64 tokens the weights, from 0.6 us after a
 * block's start, plus a microsecond for split-K and the end; with more the L2, 7 to 8 TB/s, and the
 * tensor cores; with many the gaps between a warpgroup's products and between tiles, and the clock
 * that power allows. */
#include "core/invariant.h"
#include "cuda/linear/sm90/fp8_prefill_config.h"
#include "cuda/linear/sm90/fp8_prefill_mainloop.h"
#include "cuda/linear/sm90/gemm_epilogue.h"
#include "cuda/linear/sm90/gemm_pipeline.h"
#include "cuda/linear/sm90/gemm_scheduler.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"
#include "cuda/tensor/cuda_quantize.h"
#include "cuda/tensor/cuda_quantize_chunk.h"
#include "cuda/tensor/cuda_round.h"

namespace moq::fp8_prefill {

/* ---- epilogue where tokens are the rows. Outputs are staged in shared memory and leave by bulk
 * tensor stores under the products of the next tile: all blocks have outputs at about the same
 * time, so that the L2 bounds how fast they leave (docs/lab/fp8-prefill.md). A product of 64 tokens
 * by 128 rows of W is two boxes, of 128 bytes a token in the 128-byte swizzle ---- */

#define BOX_BYTES (64 * 128)

/* Scales and rounds the outputs of a product and stages them as two boxes at `room`; `e` are the
 * tokens' operands. PLAIN: bfloat16 without scales or biases, at a third of the instructions. */
template <class S, bool PLAIN>
static __device__ __forceinline__ void stage_outputs(const gemm_args *a, uint32_t room,
                                                     const column_terms<S> *b, const terms *e,
                                                     const float (&sum)[S::T / 2]) {
    int lane = threadIdx.x % 32, token = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < S::T / 8; j += 2) {
        uint32_t matrix[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *two = sum + 4 * (j + i / 2) + 2 * (i % 2);
            int own = (j + i / 2) * 8 + lane % 4 * 2;
            if (PLAIN) {
                matrix[i] = moq_narrow_pair(MOQ_DT_BF16, two[0], two[1]);
                continue;
            }
            float low = finish<S>(a, two[0], b->factor[own], e->factor[i % 2], b->bias[own]);
            float high =
                finish<S>(a, two[1], b->factor[own + 1], e->factor[i % 2], b->bias[own + 1]);
            matrix[i] = moq_narrow_pair(a->out.dtype, low, high);
        }
        store_matrices(
            room + j / 8 * BOX_BYTES + token * 128 + ((j % 8 + lane / 16) ^ lane % 8) * 16, matrix);
    }
}

/* Stores 64 staged rows from token `first` on without the copy engine: a box would overwrite
 * outputs of another tile, or y is not aligned for it. */
static __device__ __forceinline__ void store_staged(const gemm_args *a, uint32_t room,
                                                    const tile_place *at, int first) {
    int piece = threadIdx.x % 16, n = at->row + piece * 8;
#pragma unroll 1
    for (int i = 0; i < 8;
         i++) { /* equal counts for all lanes: the next products need whole warps */
        int token = threadIdx.x % 128 / 16 + 8 * i;
        uint4 word =
            load_shared(room + piece / 8 * BOX_BYTES + token * 128 + (piece % 8 ^ token % 8) * 16);
        if (n < at->end && first + token < at->last)
            store_eight(&a->out, first + token, n, at->end - n, word);
        __syncwarp();
    }
}

/* Destination of a warpgroup's outputs: the map of y, column operands, room for staged outputs, and
 * its first row of a tile. */
template <class S> struct output_path {
    const CUtensorMap *map;
    column_terms<S> *b;
    uint32_t room;
    int row;
};

/* Writes the tokens of one wave of a warpgroup. Each wave has staging room of its own; with two,
 * the barrier of one tells that the other's outputs of the tile before have left. The first thread
 * must call store_boxes_wait() before the block ends. */
template <class S, int WAVE>
static __device__ __forceinline__ void write_wave(const gemm_args *a, const output_path<S> *path,
                                                  const tile_place *at, const tile_terms<S> *e,
                                                  const float (&sum)[S::T / 2]) {
    bool first = threadIdx.x % 128 == 0;
    /* boxes begin at multiples of 16 bytes and write all of their rows of W */
    bool boxed = a->boxed && at->row % 8 == 0 && (at->row + S::T <= at->end || at->end == a->n);
    bool plain = !S::row_factors && !a->out.bias && a->out.dtype == MOQ_DT_BF16;
    int barrier = 2 + threadIdx.x / 128, token = at->token + path->row + 64 * WAVE;
    uint32_t room = path->room + 2 * BOX_BYTES * WAVE;
    if (WAVE == 0 && !plain)
        post_columns<S>(e, path->b);
    if (S::WAVES == 1 && first)
        store_boxes_wait();
    if (S::WAVES == 1 || !plain)
        barrier_sync(barrier, 128);
    if (plain)
        stage_outputs<S, true>(a, room, path->b, &e->row[WAVE], sum);
    else
        stage_outputs<S, false>(a, room, path->b, &e->row[WAVE], sum);
    fence_async_proxy();
    if (S::WAVES > 1 && first)
        store_boxes_wait();
    barrier_sync(barrier, 128);
    if (!boxed)
        store_staged(a, room, at, token);
    for (int half = 0; boxed && first && half < 2; half++)
        store_box_2d(path->map, 2 * (at->row + 64 * half), token, room + half * BOX_BYTES);
    __syncwarp();
}

/* ---- mainloop where tokens are the rows: a thread has two of them, and two scales a step
 *
 * One set of accumulators takes the products, so the next product waits for the promotion of the
 * last. Both warpgroups are seldom apart, so that the gap between two products is not hidden and
 * has to be short: the operands of a step are awaited during the promotion of the step before.
 *
 * Tiles of a warpgroup follow each other without a gap. The sums of a tile's first wave are
 * complete before its last product and leave under it. Those of its last wave leave under the first
 * product of the next tile (docs/lab/fp8-prefill.md). ---- */

/* ---- the next tile, without a division if it is in the same band and partition ---- */

/* Position of a tile in its band of `width` columns, and the distance to the next tile. */
typedef struct {
    int row, column, width;
    int along, across;
} band_place;

template <class S>
static __device__ __forceinline__ void find_far(const gemm_args *a, int rank, band_place *band,
                                                own_tile<S> *tile) {
    int all = a->row_tiles * a->band, before = tile->w.number / all;
    int within = tile->w.number - before * all;
    band->width = min(a->band, a->columns - before * a->band);
    band->row = within / band->width;
    band->column = within % band->width;
    band->along = tile->w.stride / band->width;
    band->across = tile->w.stride % band->width;
    find_tile<S>(a, 0, rank, tile);
}

template <class S>
static __device__ __forceinline__ void find_next(const gemm_args *a, int rank, band_place *band,
                                                 own_tile<S> *tile) {
    constexpr int ROWS = S::weight_rows * (S::share_tokens ? 2 : 1);
    constexpr int TOKENS = S::tokens * (S::share_weights ? 2 : 1);
    next_tile<S>(a, &tile->w);
    if (!has_steps(&tile->w))
        return;
    int row = band->row + band->along, column = band->column + band->across;
    if (column >= band->width) {
        column -= band->width;
        row++;
    }
    int rows = (row - band->row) * ROWS;
    if (row >= a->row_tiles || tile->at.row + rows >= tile->at.end) {
        find_far<S>(a, rank, band, tile);
        return;
    }
    tile->at.row += rows;
    tile->at.token += (column - band->column) * TOKENS;
    tile->block.row[0] += (int64_t)(rows / 128) * a->steps;
    if (S::groups)
        hold_scales(&tile->block, tile->w.first);
    band->row = row;
    band->column = column;
}

/* State of a consumer warpgroup. */
template <class S> struct row_worker {
    const gemm_args *a;
    const consumer_pipeline *pipeline;
    const float *scales; /* scales of the thread's first token, in the first stage */
    pipeline_state slot;
    own_tile<S> tile;
    const float *line;   /* block scales of the tile, from the step after the next on */
    float scale, second; /* block scales of this step and of the next */
    /* State of tiles whose outputs leave under others: */
    output_path<S> out;
    int rank; /* rank in a pair of blocks */
    band_place band;
    own_tile<S> next;
    tile_terms<S> terms;
    bool staged; /* the last wave of the tile before is not yet written; its place and operands: */
    tile_place place_before;
    tile_terms<S> terms_before;
};

/* ---- a step ---- */

/* Returns zero, computed from any number so that the compiler cannot tell it is uniform. A load
 * from an address plus this zero avoids uniform registers, which wait for memory at once. */
static __device__ __forceinline__ int zero_of_thread(int any) {
    return (int)((threadIdx.x & (uint32_t)any) >> 10);
}

/* Rebuilds a wgmma operand from its lower half; the upper half is constant. */
static __device__ __forceinline__ uint64_t operand_at(uint32_t place) {
    return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | place;
}

/* Multiplies 64 rows by all columns of a step; `left` and `right` are the operands' lower halves.
 */
template <class S>
static __device__ __forceinline__ void multiply_rows(uint32_t left, uint32_t right,
                                                     float (&c)[S::T / 2]) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        wgmma_e4m3(c, operand_at(left + 2 * j), operand_at(right + 2 * j), j);
    wgmma_commit();
}

/* Adds c to the sums under the scales of the upper and the lower row. FIRST: the sums begin with c.
 */
template <class S, bool FIRST>
static __device__ __forceinline__ void
promote_rows(float (&sum)[S::T / 2], const float (&c)[S::T / 2], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < S::T / 2; i++) {
        float x = i / 2 % 2 ? lower : upper;
        if (FIRST)
            sum[i] = S::groups ? c[i] * x : c[i];
        else
            sum[i] += S::groups ? c[i] * x : c[i];
    }
}

/* Work under a tile's first product: writes the previous tile, loads epilogue operands, finds the
 * next tile. */
template <class S>
static __device__ __forceinline__ void begin_tile(row_worker<S> *o, const float (&last)[S::T / 2]) {
    if (o->staged)
        write_wave<S, S::WAVES - 1>(o->a, &o->out, &o->place_before, &o->terms_before, last);
    o->terms = {};
    fetch_early<S>(o->a, &o->tile.at, o->out.row, &o->terms);
    fetch_late<S>(o->a, &o->tile.at, o->out.row, &o->terms);
    find_next<S>(o->a, o->rank, &o->band, &o->next);
}

/* Makes one step. FIRST, LAST: the tile's first or last step. */
template <class S, bool FIRST, bool LAST>
static __device__ __forceinline__ void make_step(row_worker<S> *o, int step,
                                                 float (&sum)[S::WAVES][S::T / 2]) {
    constexpr uint32_t STAGE = S::stage / 16, WAVE = 64 * STEP / 16;
    const consumer_pipeline *t = o->pipeline;
    pipeline_state own = o->slot;
    uint32_t left = (uint32_t)t->left + own.index * STAGE;
    uint32_t right = (uint32_t)t->right + own.index * STAGE;
    float scale = o->scale;
    if (!S::together)
        mbarrier_wait(t->weights + 8u * own.index, own.parity);
    mbarrier_wait(t->tokens + 8u * own.index, own.parity);
    advance(&o->slot, t->stages);
#pragma unroll
    for (int wave = 0; wave < S::WAVES; wave++) {
        float c[S::T / 2];
        const float *rows = o->scales + own.index * S::tokens + 64 * wave;
        float upper = S::groups ? rows[0] : 1.0f, lower = S::groups ? rows[8] : 1.0f;
        multiply_rows<S>(left + wave * WAVE, right, c);
        if (S::groups && wave == 0 && !LAST) {
            o->scale = o->second;
            o->second = *o->line;
            o->line += step + 3 < o->tile.w.end;
        }
        if (S::boxes && FIRST && wave == 0)
            begin_tile<S>(o, sum[S::WAVES - 1]);
        if (S::boxes && LAST && wave > 0)
            write_wave<S, 0>(o->a, &o->out, &o->tile.at, &o->terms, sum[0]);
        wgmma_wait<0>();
        if (wave == S::WAVES - 1)
            release<S>(t, &own);
        stay_here(c);
        promote_rows<S, FIRST>(sum[wave], c, upper * scale, lower * scale);
        stay_here(sum[wave]);
    }
}

/* Makes one step of int8. The products of the step before, in the stage `before`, end under it. */
template <class S, bool FIRST, bool LAST>
static __device__ __forceinline__ void make_int8_step(row_worker<S> *o, pipeline_state *before,
                                                      int (&c)[S::WAVES][S::T / 2],
                                                      float (&sum)[S::WAVES][S::T / 2]) {
    constexpr uint32_t STAGE = S::stage / 16, WAVE = 64 * STEP / 16;
    const consumer_pipeline *t = o->pipeline;
    pipeline_state own = o->slot;
    uint32_t left = (uint32_t)t->left + own.index * STAGE;
    uint32_t right = (uint32_t)t->right + own.index * STAGE;
    if (!S::together)
        mbarrier_wait(t->weights + 8u * own.index, own.parity);
    mbarrier_wait(t->tokens + 8u * own.index, own.parity);
    advance(&o->slot, t->stages);
#pragma unroll
    for (int wave = 0; wave < S::WAVES; wave++) {
        issue_int8(operand_at(left + wave * WAVE), operand_at(right), !FIRST, c[wave]);
        if (FIRST && wave == 0)
            begin_tile<S>(o, sum[S::WAVES - 1]);
        if (!FIRST && wave == 0) {
            wgmma_wait<1>();
            release<S>(t, before);
        }
        if (LAST && wave > 0) {
            wgmma_wait<1>();
            to_floats(c[0], sum[0]);
            write_wave<S, 0>(o->a, &o->out, &o->tile.at, &o->terms, sum[0]);
        }
    }
    *before = own;
}

/* Sums the steps of a whole tile of int8, and leaves its last wave's sums to the caller. */
template <class S>
static __device__ __forceinline__ void make_int8_tile(row_worker<S> *o,
                                                      float (&sum)[S::WAVES][S::T / 2]) {
    int c[S::WAVES][S::T / 2], steps = o->tile.w.end - o->tile.w.first;
    pipeline_state before;
    make_int8_step<S, true, false>(o, &before, c, sum);
#pragma unroll 1
    for (int step = 1; step < steps - 1; step++)
        make_int8_step<S, false, false>(o, &before, c, sum);
    if (steps > 1)
        make_int8_step<S, false, true>(o, &before, c, sum);
    wgmma_wait<0>();
    release<S>(o->pipeline, &before);
    to_floats(c[S::WAVES - 1], sum[S::WAVES - 1]);
    if (steps == 1 && S::WAVES > 1) {
        to_floats(c[0], sum[0]);
        write_wave<S, 0>(o->a, &o->out, &o->tile.at, &o->terms, sum[0]);
    }
}

/* Sums the steps of a tile, or of a split of one. Whole tiles leave their last wave's sums to the
 * caller, splits all waves. */
template <class S>
static __device__ __forceinline__ void make_row_tile(row_worker<S> *o,
                                                     float (&sum)[S::WAVES][S::T / 2]) {
    int first = o->tile.w.first, end = o->tile.w.end;
    o->scale = o->tile.block.held[0];
    o->second = o->tile.block.second;
    o->line = o->tile.block.row[0] + min(first + 2, end - 1) + zero_of_thread(o->pipeline->stages);
    make_step<S, true, false>(o, first, sum);
#pragma unroll 4
    for (int step = first + 1; step < end - 1; step++)
        make_step<S, false, false>(o, step, sum);
    if (first + 1 < end)
        make_step<S, false, true>(o, end - 1, sum);
    else if (S::boxes && S::WAVES > 1)
        write_wave<S, 0>(o->a, &o->out, &o->tile.at, &o->terms, sum[0]);
}

template <class S>
static __device__ __forceinline__ row_worker<S> begin_rows(const gemm_args *a,
                                                           const consumer_pipeline *t) {
    row_worker<S> o = {a, t};
    o.scales = t->scales + threadIdx.x / 128 * (64 * S::WAVES) + row_of_thread();
    return o;
}

/* ---- a split of a tile ---- */

template <class S>
static __device__ __forceinline__ void multiply_part(const gemm_args *a, const consumer_pipeline *t,
                                                     const own_tile<S> *tile,
                                                     float (&sum)[S::WAVES][S::T / 2]) {
    row_worker<S> o = begin_rows<S>(a, t);
    o.tile = *tile;
    make_row_tile<S>(&o, sum);
}

/* ---- tiles one after the other ---- */

/* Makes and writes all tiles of a warpgroup. The first thread must call store_boxes_wait() before
 * the block ends. */
template <class S>
static __device__ __forceinline__ void make_tiles(const gemm_args *a, const consumer_pipeline *t,
                                                  const output_path<S> *out, int rank) {
    float sum[S::WAVES][S::T / 2];
    row_worker<S> o = begin_rows<S>(a, t);
    o.out = *out;
    o.rank = rank;
    o.next = {start<S>(a)};
    find_far<S>(a, rank, &o.band, &o.next);
    wait_for_predecessor();
    while (has_steps(&o.next.w)) {
        o.tile = o.next;
        if constexpr (S::int8)
            make_int8_tile<S>(&o, sum);
        else
            make_row_tile<S>(&o, sum);
        o.staged = true;
        o.place_before = o.tile.at;
        o.terms_before = o.terms;
    }
    if (o.staged)
        write_wave<S, S::WAVES - 1>(a, &o.out, &o.place_before, &o.terms_before, sum[S::WAVES - 1]);
}

/* ---- quantization in the kernel, for few tokens under one given scale: two warpgroups read x from
 * the L2 and put its codes into the stages of the pipeline, so that nothing but x is waited for
 *
 * A unit is 128 columns of four tokens; a warp has the same tokens in every step. A lane has 16
 * columns of one token, eight from 8 * (lane % 8) on and eight 64 further, so that eight lanes read
 * lines of 128 bytes. Tokens are dealt out such that codes go to all banks. ---- */

using quantization::chunk;
using quantization::widen;

/* Destination of a lane's codes, and the factor of its values. */
typedef struct {
    uint32_t codes; /* address in the first stage */
    stage_barriers barriers;
    float inverse; /* reciprocal of the scale */
} sink;

/* Share of x of a warp: the rows of a lane's tokens, NULL beyond the last, and the end of its
 * columns. */
template <class S> struct x_share {
    static constexpr int UNITS = S::tokens / 32; /* units of a step */
    const uint16_t *row[UNITS];
    int token, end; /* the first token, others are 32 further; the end of K */
};

/* Units of x that a warp has under way from the L2. */
template <class S, int DT> struct units {
    static constexpr int UNITS = S::tokens / 32;
    static constexpr int STEPS = UNITS == 1 ? 8 : 3;
    chunk<DT, 16> of[STEPS][UNITS];
};

template <class S>
static __device__ __forceinline__ x_share<S> share_of(const gemm_args *a, const work *w) {
    int lane = threadIdx.x % 32, warp = (threadIdx.x - CONSUMERS) / 32;
    x_share<S> x;
    x.token = warp / 2 * 8 + warp % 2 * 2 + lane / 8 % 2 * 4 + lane / 16;
    x.end = min(a->k, w->end * STEP);
    int first = place_of<S>(a, w->number, 0).token + x.token;
#pragma unroll
    for (int u = 0; u < x.UNITS; u++) {
        int m = first + 32 * u;
        x.row[u] = m < a->m ? (const uint16_t *)a->x.data + m * a->x.stride : NULL;
    }
    return x;
}

/* Loads the lane's columns of the units of a step; zeros beyond x. */
template <class S, int DT>
static __device__ __forceinline__ void load_step(const x_share<S> *x, int step,
                                                 chunk<DT, 16> (&unit)[S::tokens / 32]) {
    int column = step * STEP + threadIdx.x % 8 * 8;
#pragma unroll
    for (int u = 0; u < x->UNITS; u++) {
        unit[u] = chunk<DT, 16>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!x->row[u] || column + 64 * half >= x->end)
                continue;
            uint4 four = __ldcg((const uint4 *)(x->row[u] + column + 64 * half));
            unit[u].word[4 * half] = four.x;
            unit[u].word[4 * half + 1] = four.y;
            unit[u].word[4 * half + 2] = four.z;
            unit[u].word[4 * half + 3] = four.w;
        }
    }
}

/* Quantizes the units of a step. */
template <class S, int DT>
static __device__ __forceinline__ void make_codes(const sink *s,
                                                  const chunk<DT, 16> (&unit)[S::tokens / 32],
                                                  uint4 (&code)[S::tokens / 32]) {
#pragma unroll
    for (int u = 0; u < S::tokens / 32; u++) {
        float value[16];
        widen<DT, 16>(unit[u], value);
        code[u] = moq_codes_multiplied(value, s->inverse);
    }
}

template <class S>
static __device__ __forceinline__ void put_codes(const sink *s, const x_share<S> *x, int index,
                                                 const uint4 (&code)[S::tokens / 32]) {
#pragma unroll
    for (int u = 0; u < S::tokens / 32; u++) {
        int token = x->token + 32 * u, piece = threadIdx.x % 8 / 2 ^ token % 8;
        uint32_t to = s->codes + (uint32_t)(index * S::stage + token * STEP + piece * 16 +
                                            threadIdx.x % 2 * 8);
        store_shared_pair(to, make_uint2(code[u].x, code[u].y));
        store_shared_pair(to ^ 64, make_uint2(code[u].z, code[u].w));
    }
}

/* Quantizes this block's part of x, of type DT, as stages become empty. Several steps are done
 * together, since one is a chain of dependent instructions. */
template <class S, int DT>
static __device__ __forceinline__ void quantize_part(const gemm_args *a, const sink *s) {
    work w = start<S>(a);
    x_share<S> x = share_of<S>(a, &w);
    units<S, DT> unit;
    constexpr int TOGETHER = x.UNITS == 1 ? 4 : 1;
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < unit.STEPS; i++)
        load_step<S, DT>(&x, w.first + i, unit.of[i]);
    for (int first = w.first; first < w.end; first += unit.STEPS) {
#pragma unroll
        for (int i = 0; i < unit.STEPS; i += TOGETHER) {
            uint4 code[TOGETHER][x.UNITS];
            uint32_t arrival = 0;
            int left = w.end - first - i;
            if (left <= 0)
                break;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                make_codes<S, DT>(s, unit.of[i + j], code[j]);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                if (j >= left)
                    break;
                mbarrier_wait(s->barriers.empty + 8u * slot.index, slot.parity ^ 1);
                put_codes<S>(s, &x, slot.index, code[j]);
                if (threadIdx.x % 32 == j)
                    arrival = s->barriers.tokens + 8u * slot.index;
                advance(&slot, a->stages);
            }
            fence_async_proxy();
            __syncwarp();
            if (arrival)
                mbarrier_arrive(arrival);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                load_step<S, DT>(&x, first + i + j + unit.STEPS, unit.of[i + j]);
        }
    }
}

/* Quantizes this block's part of x, bfloat16 or float16. */
template <class S> static __device__ __forceinline__ void quantize_x(const gemm_args *a, sink *s) {
    s->inverse = __frcp_rn(a->x_scale[0]); /* given with the weights: no kernel is waited for */
    if (a->x.dtype == MOQ_DT_BF16)
        quantize_part<S, MOQ_DT_BF16>(a, s);
    else
        quantize_part<S, MOQ_DT_F16>(a, s);
}

#define BAND_TOKENS 2048 /* tokens done together, so that they stay in the L2 */

template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const consumer_pipeline *t,
                                               uint8_t *shared, column_terms<S> *b,
                                               const cluster_barriers *meet, int group, int rank) {
    int row = group / S::k_groups * (64 * S::WAVES);
    uint32_t turn = shared_address(shared + a->turn) + group * a->turn_step;
    pipeline_state slot = {0, 0};
    own_tile<S> tile = {start<S>(a)};
    find_tile<S>(a, group, rank, &tile);
    while (has_steps(&tile.w)) {
        float sum[S::WAVES][S::T / 2] = {};
        tile_terms<S> terms = {};
        fetch_early<S>(a, &tile.at, row, &terms);
        wait_for_predecessor(); /* returns at once from the second tile on */
        if (S::split_k && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks of the cluster run */
        fetch_late<S>(a, &tile.at, row, &terms);
        if constexpr (S::int8)
            multiply_int8<S>(t, tile.w.first, tile.w.end, group, &slot, sum);
        else if constexpr (S::tokens_first)
            multiply_part<S>(a, t, &tile, sum);
        else
            multiply<S>(t, &tile.block, tile.w.first, tile.w.end, group, &slot, sum);
        if constexpr (S::split_k) {
            reduce_splits<S>(a, shared, b + group, meet, &terms, &tile.at, sum[0]);
            return;
        }
        if (S::token_factors)
            post_columns<S>(&terms, b + group);
#pragma unroll
        for (int i = 0; i < S::WAVES; i++)
            write_columns<S>(a, b + group, turn, &tile.at, row + 64 * i, &terms.row[i], sum[i]);
        next_tile<S>(a, &tile.w);
        find_tile<S>(a, group, rank, &tile);
    }
}

/* Copies weights and tokens of all steps with one thread, the first weights before the tokens are
 * complete. */
template <class S>
static __device__ __forceinline__ void produce_steps(const gemm_args *a, const producer_pipeline *p,
                                                     next_copy ahead) {
    next_copy f = ahead;
    while (ahead.copied < a->stages && more(&ahead)) {
        operand_copies::weights<S>(a, p, &ahead);
        advance_copy<S>(a, p, &ahead);
    }
    wait_for_predecessor();
    while (more(&f)) {
        if (f.copied >= a->stages) {
            wait_for_room(p, &f);
            operand_copies::weights<S>(a, p, &f);
        }
        operand_copies::tokens<S>(a, p, &f);
        advance_copy<S>(a, p, &f);
    }
}

template <class S>
static __global__ void __launch_bounds__(S::threads, 1)
    fp8_prefill(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap tokens,
                const __grid_constant__ CUtensorMap outputs,
                const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ column_terms<S> terms[CONSUMERS / 128];
    static_assert(sizeof terms <= COLUMN_TERMS_BYTES, "as smem_layout counts them");
    uint32_t first = fixed_shared_address(barrier), pipeline = fixed_shared_address(smem);
    stage_barriers barriers = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    cluster_barriers meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    int scales = args.scales; /* token scales, behind the pipeline */
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    producer_pipeline p = {
        &weights, &tokens, pipeline, pipeline + scales, barriers, args.weights_once ? once : keep,
        keep,     rank};
    next_copy f = {};
    launch_dependents();
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < CONSUMERS) {
        if (S::uneven)
            more_registers<S::registers>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128,
                                0); /* shuffled, so that it is in a uniform register */
        uint32_t row = S::by_steps ? 0 : group * 64 * S::WAVES;
        consumer_pipeline t = {barriers.weights,
                               barriers.tokens,
                               barriers.empty,
                               wgmma_operand(pipeline + row * STEP),
                               wgmma_operand(pipeline + S::rows * STEP),
                               (const float *)(smem + scales),
                               args.stages};
        if (S::split_k && threadIdx.x == 0)
            mbarrier_expect(meet.posted, bytes_to_come<S>());
        if constexpr (S::boxes) {
            uint32_t room = shared_address(smem + args.turn) + group * args.turn_step;
            output_path<S> out = {&outputs, &terms[group], room, group * 64 * S::WAVES};
            make_tiles<S>(&args, &t, &out, rank);
            if (threadIdx.x % 128 == 0)
                store_boxes_wait();
        } else {
            consume<S>(&args, &t, smem, terms, &meet, group, rank);
        }
    } else if (threadIdx.x < S::copier) {
        sink s = {pipeline + S::token_at, barriers, 0.0f};
        if (S::fused && S::uneven)
            fewer_registers<S::quantizer_registers>();
        if constexpr (S::fused)
            quantize_x<S>(&args, &s);
    } else {
        if (S::uneven)
            fewer_registers<S::copier_registers>();
        if (threadIdx.x == S::copier) {
            if constexpr (S::together)
                produce_steps<S>(&args, &p, f);
            else
                produce_weights<S>(&args, &p, f);
        }
        if (!S::fused && !S::together && threadIdx.x == S::copier + 32)
            produce_tokens<S>(&args, &p);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

/* Kernels and sizes of a shape of tiles (fp8_prefill_config.h). */
typedef struct {
    int threads, stage;
    const void *kernel[OPERANDS];
} variant;

template <moq_orientation FIRST, int T, int WAVES, moq_sharing SHARE, bool FUSED>
static variant variant_of(void) {
    typedef tile<FIRST, T, WAVES, SHARE, E4M3, FUSED> plain;
    typedef tile<FIRST, T, WAVES, SHARE, FUSED ? E4M3 : E4M3_GROUPS, FUSED> groups;
    typedef tile<FIRST, T, WAVES, SHARE, FUSED ? E4M3 : INT8, FUSED> int8;
    static_assert(plain::rows == MOQ_FP8_PREFILL_ROWS(WAVES, SHARE), "as the choice counts them");
    return {plain::threads,
            plain::stage,
            {(const void *)fp8_prefill<plain>, (const void *)fp8_prefill<groups>,
             (const void *)fp8_prefill<int8>}};
}

#define VARIANT(first, columns, waves, share, fused)                                               \
    variant_of<first, columns, waves, share, fused>(),

static const variant VARIANTS[] = {MOQ_FP8_PREFILL_SHAPES(VARIANT)};

typedef moq_fp8_prefill_shape shape;

/* ---- launch ---- */

/* Workspace layout of a call: offsets, codes first. Codes and scales have `tokens` rows, enough to
 * fill the last tile; rows beyond m are never read. */
typedef struct {
    int64_t tokens, scales, quantize, bytes;
} workspace_layout;

static int64_t reserve(workspace_layout *w, int64_t bytes) {
    int64_t at = w->bytes;
    w->bytes += divide_up(bytes, 256) * 256;
    return at;
}

static moq_cuda_quantize quantize_of(const moq_linear_call *call) {
    moq_cuda_quantize q = {.x = call->x,
                           .mode = call->spec->input,
                           .given = call->input_scale,
                           .group = STEP,
                           .code_stride = call->spec->in_features,
                           .code_columns = call->spec->in_features,
                           .scale_row = 1,
                           .stream = call->stream,
                           .next_is_busy = true};
    return q;
}

static operand_format format_of(const moq_linear_call *call) {
    return call->spec->input == MOQ_INPUT_INT8         ? INT8
           : call->spec->input == MOQ_INPUT_E4M3_GROUP ? E4M3_GROUPS
                                                       : E4M3;
}

static moq_cuda_round rounding(const moq_linear_call *call) {
    moq_cuda_round r = {call, MOQ_DT_I8, (uint8_t *)call->workspace};
    return r;
}

static workspace_layout int8_workspace(const moq_linear_call *call, int64_t tokens) {
    moq_cuda_round r = rounding(call);
    workspace_layout w = {.tokens = tokens};
    w.scales = (int64_t)((uintptr_t)moq_cuda_rounded(&r, 0).scales - (uintptr_t)r.memory);
    w.bytes = moq_cuda_round_bytes(&r);
    if (w.bytes < tokens * call->spec->in_features)
        w.bytes = tokens * call->spec->in_features;
    return w;
}

static workspace_layout workspace_layout_of(const moq_linear_call *call,
                                            const moq_fp8_prefill_config *config) {
    const moq_linear_spec *spec = call->spec;
    if (format_of(call) == INT8)
        return int8_workspace(call, config->columns * moq_fp8_prefill_tokens(config->shape));
    moq_cuda_quantize q = quantize_of(call);
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP;
    workspace_layout w = {.tokens = config->columns * moq_fp8_prefill_tokens(config->shape)};
    if (config->shape->fused || spec->quantized_input)
        return w;
    reserve(&w, w.tokens * spec->in_features);
    w.scales = reserve(&w, 4 * w.tokens * (groups ? divide_up(spec->in_features, STEP) : 1));
    w.quantize = reserve(&w, moq_cuda_quantize_workspace(&q));
    return w;
}

static moq_status quantize(const moq_linear_call *call, const workspace_layout *w, moq_err *err) {
    if (format_of(call) == INT8) {
        moq_cuda_round r = rounding(call);
        return moq_cuda_round_rows(&r, "int8 linear", err);
    }
    uint8_t *workspace = (uint8_t *)call->workspace;
    moq_cuda_quantize q = quantize_of(call);
    q.codes = workspace;
    q.scales = workspace + w->scales;
    q.scale_group = w->tokens;
    q.workspace = workspace + w->quantize;
    return moq_cuda_quantize_rows(&q, err);
}

static gemm_args args_of(const moq_linear_call *call, const moq_fp8_prefill_config *config,
                         const workspace_layout *w) {
    const moq_linear_spec *spec = call->spec;
    int64_t band = BAND_TOKENS / moq_fp8_prefill_tokens(config->shape);
    bool given = spec->input == MOQ_INPUT_E4M3_TENSOR && call->input_scale;
    float *found = (float *)((uint8_t *)call->workspace + w->scales);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .k = (int)spec->in_features,
                   .steps = (int)divide_up(spec->in_features, STEP),
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .band = (int)(band < config->columns ? band : config->columns),
                   .split_steps = (int)(divide_up(spec->in_features, STEP) / config->cluster),
                   .more_splits = (int)(divide_up(spec->in_features, STEP) % config->cluster),
                   .weights_once = config->columns == 1,
                   .per_token =
                       spec->input == MOQ_INPUT_E4M3_TOKEN || spec->input == MOQ_INPUT_INT8,
                   .x = moq_rows_of(call->x),
                   .out = moq_output_of(call),
                   .x_scale = given ? call->input_scale : found,
                   .x_scale_stride = w->tokens,
                   .output_scale = call->output_scale,
                   .block_scale = (const float *)call->weight_scale,
                   .partitions = moq_partitions_of(spec)};
    return a;
}

/* Lays out a block's shared memory: as many stages as fit, token scales, staged outputs, and sums
 * of other blocks. For many tokens these sums, and the outputs of splits behind them, take the
 * place of the pipeline. */
static size_t smem_layout(gemm_args *a, const moq_fp8_prefill_config *config, bool groups,
                          int limit) {
    const shape *s = config->shape;
    int stage = VARIANTS[config->index].stage + (groups ? s->tokens * 4 : 0), rest = 0, turn = 0;
    int outputs = moq_fp8_prefill_has_boxes(s) ? s->tokens * s->weight_rows * 2 : 0;
    if (moq_fp8_prefill_has_split_k(s)) {
        int columns = s->first == MOQ_TOKENS_FIRST ? s->weight_rows : s->tokens;
        split_k_room room = split_k_room_of(
            columns, config->cluster * (s->share == MOQ_SPLIT_K_WARPGROUPS ? 2 : 1), 2);
        a->side = room.side;
        a->turn_step = room.turn_step;
        rest = s->tokens < 128 ? room.sums : 0;
        turn = room.sums - rest;
    } else if (s->first == MOQ_WEIGHTS_FIRST) {
        a->turn_step = TURNED_AT_ONCE(s->tokens) * 128;
        rest = 2 * a->turn_step;
    }
    int most = limit - 1024 - BARRIERS * 8 - COLUMN_TERMS_BYTES - rest - outputs;
    a->stages = most / stage;
    if (a->stages > MAX_STAGES)
        a->stages = MAX_STAGES;
    if (s->share == MOQ_SPLIT_K_WARPGROUPS)
        a->stages -= a->stages % 2;
    bool fits = moq_fp8_prefill_has_split_k(s) && a->split_steps < a->stages;
    a->flight = (fits ? 32768 : 49152) / (s->weight_rows * STEP);
    a->scales = a->stages * VARIANTS[config->index].stage + outputs;
    a->turn = moq_fp8_prefill_has_split_k(s)
                  ? turn
                  : a->stages * (outputs ? VARIANTS[config->index].stage : stage);
    if (outputs)
        a->turn_step = outputs / 2;
    a->room = rest ? a->stages * stage : 0;
    MOQ_ASSERT(a->stages >= (s->share == MOQ_SPLIT_K_WARPGROUPS ? 4 : 2) && a->flight > 0);
    MOQ_ASSERT(a->room % 16 == 0 && a->turn % 16 == 0 && a->turn_step % 16 == 0);
    MOQ_ASSERT(rest || a->turn <= a->stages * stage); /* sums take the place of the pipeline */
    MOQ_ASSERT(a->stages * stage + rest + outputs <= limit);
    return (size_t)(a->stages * stage + rest + outputs);
}

/* Returns the tokens of a tile that are copied. Codes given by the caller end with the last token:
 * filling the rest of a small tile with zeros would take the copy engine 3 us
 * (docs/lab/fp8-prefill.md), and it is never read. */
static uint32_t token_rows(const moq_linear_call *call, const moq_fp8_prefill_config *config) {
    const shape *s = config->shape;
    bool part = call->spec->quantized_input && config->columns == 1 && s->share != MOQ_SHARE_TOKENS;
    int64_t rows = part ? divide_up(call->m, 8) * 8 : s->tokens;
    return (uint32_t)(rows < s->tokens ? rows : s->tokens);
}

static moq_status multiply_codes(const moq_linear_call *call, const moq_fp8_prefill_config *config,
                                 const workspace_layout *w, moq_err *err) {
    const shape *s = config->shape;
    const variant *v = &VARIANTS[config->index];
    moq_cuda_device device;
    CUtensorMap weights, tokens, outputs;
    MOQ_TRY(moq_cuda_query_device(call->spec->device.index, &device, err));
    gemm_args a = args_of(call, config, w);
    operand_format format = format_of(call);
    size_t shared = smem_layout(&a, config, format == E4M3_GROUPS, device.shared_per_block);
    uint32_t weight_box = (uint32_t)s->weight_rows / (s->share == MOQ_SHARE_WEIGHTS ? 2 : 1);
    uint32_t token_box = token_rows(call, config) / (s->share == MOQ_SHARE_TOKENS ? 2 : 1);
    a.token_bytes = (int)token_rows(call, config) * STEP;
    MOQ_TRY(moq_tensor_map_rows(&weights, call->weight, a.n, a.k, a.k, weight_box, err));
    if (s->fused)
        tokens = weights;                 /* never read */
    else if (call->spec->quantized_input) /* rows beyond the last arrive as zeros */
        MOQ_TRY(moq_tensor_map_rows(&tokens, call->x->data, call->m, a.k, call->x->stride[0],
                                    token_box, err));
    else
        MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, w->tokens, a.k, a.k, token_box, err));
    a.boxed =
        moq_fp8_prefill_has_boxes(s) && moq_tensor_map_suits(call->y->data, call->y->stride[0]);
    if (a.boxed)
        MOQ_TRY(moq_tensor_map_rows(&outputs, call->y->data, call->m, 2 * a.n,
                                    2 * call->y->stride[0], 64, err));
    else
        outputs = weights; /* never read */
    moq_launch launch = {.what = format == INT8 ? "int8 linear" : "FP8 linear",
                         .kernel = v->kernel[format],
                         .grid = moq_fp8_prefill_has_split_k(s)
                                     ? dim3((unsigned)config->cluster, (unsigned)config->row_tiles,
                                            (unsigned)config->columns)
                                     : dim3((unsigned)(config->workers * config->cluster)),
                         .block = dim3((unsigned)v->threads),
                         .cluster = config->cluster > 1 ? (unsigned)config->cluster : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&weights, &tokens, &outputs, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" int64_t moq_cuda_fp8_prefill_workspace(const moq_linear_call *call) {
    moq_fp8_prefill_config config = moq_fp8_prefill_expand_config(call);
    return workspace_layout_of(call, &config).bytes;
}

extern "C" moq_status moq_cuda_fp8_prefill(const moq_linear_call *call, moq_err *err) {
    moq_fp8_prefill_config config = moq_fp8_prefill_expand_config(call);
    workspace_layout w = workspace_layout_of(call, &config);
    if (!config.shape->fused && !call->spec->quantized_input)
        MOQ_TRY(quantize(call, &w, err));
    return multiply_codes(call, &config, &w, err);
}

} // namespace moq::fp8_prefill
