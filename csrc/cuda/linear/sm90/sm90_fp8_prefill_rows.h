/* Products of the FP8 linear for many tokens on Hopper where tokens are the rows
 * (sm90_fp8_prefill.cu): a thread has two of them, and a step two scales for it.
 *
 * One set of registers takes the products, so that the next cannot begin before the last is added
 * to the sums, and as little as can be lies between them: both warpgroups are seldom apart, so that
 * what lies there is not hidden behind the other's products. A warp that issues products waits for
 * most of them, so that not much of what follows them in the code happens meanwhile: a step's
 * operands are asked for among the additions of the step before.
 *
 * A warpgroup's tiles follow each other without a gap. The sums of a tile's first wave are complete
 * before the last product of the tile, and leave under it; those of its last wave leave under the
 * first product of the next tile, which then begins them anew (docs/lab/fp8-prefill.md). */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_ROWS_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_ROWS_H

#include "cuda/linear/sm90/sm90_fp8_prefill_outputs.h"
#include "cuda/linear/sm90/sm90_fp8_prefill_products.h"

namespace moq::fp8_prefill {

/* ---- the next tile, without a division where it is in the same band and partition ---- */

/* Where a tile is in its band, as wide as `width` columns, and how far the next is from there. */
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

/* A warpgroup that makes tiles. */
template <class S> struct row_worker {
    const gemm_args *a;
    const consumer_pipeline *pipeline;
    const float *scales; /* of the thread's first token, in the first stage */
    pipeline_state slot;
    own_tile<S> tile;
    const float *line;   /* block scales of the tile from the step after the next on, */
    float scale, second; /* that of this step and of the next */
    /* Of tiles that leave under others: */
    output_path<S> out;
    int rank; /* in a pair of blocks */
    band_place band;
    own_tile<S> next;
    tile_terms<S> terms;
    bool staged; /* the last wave of the tile before is still here, with */
    tile_place place_before;
    tile_terms<S> terms_before;
};

/* ---- a step ---- */

/* Zero, of which the compiler does not know that it is one number for a warp, from any number: a
 * load from an address with it added stays out of uniform registers, into which numbers from memory
 * come only after a wait. */
static __device__ __forceinline__ int zero_of_thread(int any) {
    return (int)((threadIdx.x & (uint32_t)any) >> 10);
}

/* wgmma_operand, of which the upper half is constant, from its lower half. */
static __device__ __forceinline__ uint64_t operand_at(uint32_t place) {
    return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | place;
}

/* Products of 64 rows and all columns, at these places of the step. */
template <class S>
static __device__ __forceinline__ void multiply_rows(uint32_t left, uint32_t right,
                                                     float (&c)[S::T / 2]) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        wgmma_e4m3(c, operand_at(left + 2 * j), operand_at(right + 2 * j), j);
    wgmma_commit();
}

/* sum += c, by the scales of the upper and the lower row. FIRST: the sums begin with c. */
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

/* What is done under a tile's first product. */
template <class S>
static __device__ __forceinline__ void begin_tile(row_worker<S> *o, const float (&last)[S::T / 2]) {
    if (o->staged)
        write_wave<S, S::WAVES - 1>(o->a, &o->out, &o->place_before, &o->terms_before, last);
    o->terms = {};
    fetch_early<S>(o->a, &o->tile.at, o->out.row, &o->terms);
    fetch_late<S>(o->a, &o->tile.at, o->out.row, &o->terms);
    find_next<S>(o->a, o->rank, &o->band, &o->next);
}

/* FIRST, LAST: of the tile. */
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
        mbarrier_wait(t->barriers.weights + 8u * own.index, own.parity);
    mbarrier_wait(t->barriers.tokens + 8u * own.index, own.parity);
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

/* Sums of a tile or a part of one. Those of its last wave, of a part of all waves, are here then.
 */
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

/* ---- a part of a tile ---- */

template <class S>
static __device__ __forceinline__ void multiply_part(const gemm_args *a, const consumer_pipeline *t,
                                                     const own_tile<S> *tile,
                                                     float (&sum)[S::WAVES][S::T / 2]) {
    row_worker<S> o = begin_rows<S>(a, t);
    o.tile = *tile;
    make_row_tile<S>(&o, sum);
}

/* ---- tiles one after the other ---- */

/* Makes and writes all tiles of a warpgroup. Its first thread waits for store_boxes_wait() before
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
        make_row_tile<S>(&o, sum);
        o.staged = true;
        o.place_before = o.tile.at;
        o.terms_before = o.terms;
    }
    if (o.staged)
        write_wave<S, S::WAVES - 1>(a, &o.out, &o.place_before, &o.terms_before, sum[S::WAVES - 1]);
}

} // namespace moq::fp8_prefill

#endif
