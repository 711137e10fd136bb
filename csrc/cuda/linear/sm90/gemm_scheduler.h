/* Tile scheduler of the Hopper GEMMs: the tiles of a block in order, the steps of K it makes of
 * each, and where a tile lies. The schedule is static; a block reads it from its number.
 *
 * A worker is a block, or a pair or cluster of blocks with tiles of their own. The class S::tiles
 * turns a tile's number into its place; here are those for one layer. The shape S of a tile also
 * says
 *
 *   args                          the kernel's arguments: m, n, steps, row_tiles, columns, and what
 *                                 the functions below read of them;
 *   weight_rows                   rows of W in a block's tile;
 *   tile_tokens(args)             tokens in a block's tile;
 *   split_k                       whether the blocks of a cluster share K of a tile; the grid is
 *                                 then [tokens][rows of W][splits], which takes no division;
 *   pair                          whether two blocks have neighbouring tiles;
 *   share_tokens, share_weights   the operand that both blocks of a pair read;
 *   stream_k                      whether all workers share the steps of the last tiles evenly;
 *   staggered                     whether tiles of different rows begin with different steps.
 *
 * What bounds it: a block finds its first tile before its first copy, and the producer each later
 * one between two steps, so divisions are few. */
#ifndef MOQ_CUDA_LINEAR_SM90_GEMM_SCHEDULER_H
#define MOQ_CUDA_LINEAR_SM90_GEMM_SCHEDULER_H

#include "cuda/choice/grid.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"

namespace moq::gemm {

/* ---- tiles ---- */

/* Place of a tile: rows of W from `row` to at most `end`, tokens from `token` to `last`. */
typedef struct {
    int row, end, partition, token, last;
} tile_place;

/* Row and column of a tile in the grid of tiles; columns go along the tokens. */
typedef struct {
    int row, column;
} tile_index;

/* Orders tiles by rows, so that the weights of consecutive tiles are in the L2. */
static __device__ __forceinline__ tile_index tile_of_rows(int number, int columns) {
    return {number / columns, number % columns};
}

/* Orders tiles by bands of columns and then by rows, so that a band's tokens are in the L2. */
static __device__ __forceinline__ tile_index tile_of_bands(int number, int rows, int columns,
                                                           int band) {
    int before = number / (rows * band), within = number % (rows * band);
    tile_index tile = tile_of_rows(within, min(band, columns - before * band));
    return {tile.row, before * band + tile.column};
}

/* Tiles of a layer that may cross partitions. BANDS: ordered in bands of a->band columns. */
template <bool BANDS> struct layer_tiles {
    template <class S>
    static __device__ __forceinline__ tile_place find(const typename S::args *a, int number,
                                                      int rank) {
        int tokens = S::tile_tokens(a);
        tile_index tile = {number, (int)blockIdx.z};
        if constexpr (!S::split_k && BANDS)
            tile = tile_of_bands(number, a->row_tiles, a->columns, a->band);
        else if constexpr (!S::split_k)
            tile = tile_of_rows(number, a->columns);
        if (S::share_tokens)
            tile.row = 2 * tile.row + rank;
        if (S::share_weights)
            tile.column = 2 * tile.column + rank;
        int token = tile.column * tokens;
        return {tile.row * S::weight_rows, a->n, 0, token,
                BANDS ? a->m : min(token + tokens, a->m)};
    }
};

/* Tiles that never cross from one partition of a layer to the next, in bands of columns. */
struct partition_tiles {
    template <class S>
    static __device__ __forceinline__ tile_place find(const typename S::args *a, int number,
                                                      int rank) {
        constexpr int ROWS = S::weight_rows * (S::share_tokens ? 2 : 1);
        constexpr int TOKENS = S::tokens * (S::share_weights ? 2 : 1);
        tile_place p = {0, 0, 0, (int)blockIdx.z * TOKENS, a->m};
        int row_tile = number, begin = 0;
        if (!S::split_k) {
            tile_index tile = tile_of_bands(number, a->row_tiles, a->columns, a->band);
            row_tile = tile.row;
            p.token = tile.column * TOKENS;
        }
        for (;; p.partition++) {
            p.end = a->partitions.end[p.partition];
            int tiles = (p.end - begin + ROWS - 1) / ROWS;
            if (row_tile < tiles)
                break;
            row_tile -= tiles;
            begin = p.end;
        }
        p.row = begin + row_tile * ROWS;
        if (S::share_weights)
            p.token += rank * S::tokens;
        if (S::share_tokens)
            p.row += rank * S::weight_rows;
        return p;
    }
};

/* Returns the place of the tile of block `rank` of a pair. */
template <class S>
static __device__ __forceinline__ tile_place place_of(const typename S::args *a, int number,
                                                      int rank) {
    return S::tiles::template find<S>(a, number, rank);
}

/* ---- the work of a block ---- */

/* Schedule of a block: whole tiles up to `count`, `stride` apart, then an even share [low, high) of
 * the steps of the stream-K tail. The current tile is `number`, its steps [first, end), empty when
 * all is done.
 *
 * Tail steps are made from the last to the first. A block thus begins with the first steps of a
 * tile that a later block ends, so that waiting for partial sums means waiting for an earlier
 * block. */
typedef struct {
    int number, stride, count;
    int first, end, low, high;
} work;

static __device__ __forceinline__ bool has_steps(const work *w) {
    return w->end > w->first;
}

/* Returns the first step of the stream-K tail that a worker makes. */
template <class A>
static __device__ __forceinline__ int first_step_of_worker(const A *a, int worker) {
    const stream_k_tail *s = &a->tail;
    int group = worker * s->inverse >> 16;
    return worker * s->least + group * s->more + min(worker - group * s->group, s->more);
}

template <class A> static __device__ __forceinline__ void take_tail_steps(const A *a, work *w) {
    int tile = (w->high - 1) / a->steps;
    if (w->high <= w->low) {
        w->first = w->end = 0;
        return;
    }
    w->number = w->count + tile;
    w->first = max(w->low - tile * a->steps, 0);
    w->end = w->high - tile * a->steps;
    w->high -= w->end - w->first;
}

/* Moves on to the tail when a block's whole tiles are done. */
template <class S>
static __device__ __forceinline__ void take_tail(const typename S::args *a, work *w) {
    if constexpr (S::stream_k)
        take_tail_steps(a, w);
    else
        w->first = w->end = 0;
}

template <class S>
static __device__ __forceinline__ void next_tile(const typename S::args *a, work *w) {
    if constexpr (S::split_k) {
        w->first = w->end = 0;
    } else {
        w->number += w->stride;
        if (w->number >= w->count)
            take_tail<S>(a, w);
    }
}

template <class S>
static __device__ __forceinline__ int first_tail_step(const typename S::args *a, int worker) {
    if constexpr (S::stream_k)
        return first_step_of_worker(a, worker);
    return 0;
}

/* Returns the schedule of one of `workers` workers, which take `whole` tiles in turn and share the
 * tail. */
template <class S>
static __device__ __forceinline__ work work_of(const typename S::args *a, int worker, int workers,
                                               int whole) {
    work w = {worker,
              workers,
              whole,
              0,
              a->steps,
              first_tail_step<S>(a, worker),
              first_tail_step<S>(a, worker + 1)};
    if (w.number >= w.count)
        take_tail<S>(a, &w);
    return w;
}

/* Returns split `rank` of K of a tile, as even as can be: the first `more_splits` have one step
 * more. */
template <class A> static __device__ __forceinline__ work split_of(const A *a, int tile, int rank) {
    int first = rank * a->split_steps + min(rank, a->more_splits);
    return {tile, 0, 0, first, first + a->split_steps + (rank < a->more_splits)};
}

/* Returns the schedule that a block begins with. */
template <class S> static __device__ __forceinline__ work start(const typename S::args *a) {
    int tiles = a->row_tiles * a->columns, blocks = S::pair ? 2 : 1;
    if constexpr (S::split_k)
        return split_of(a, (int)blockIdx.y, (int)rank_in_cluster());
    if constexpr (S::stream_k)
        tiles -= a->tail_tiles;
    return work_of<S>(a, (int)blockIdx.x / blocks, (int)gridDim.x / blocks, tiles);
}

/* Counts the workers before `worker` that have steps of its current tile. */
template <class A>
static __device__ __forceinline__ int earlier_workers(const A *a, const work *w, int worker) {
    int begin = (w->number - w->count) * a->steps, others = 0;
    for (int low = w->low; low > begin;)
        low = first_step_of_worker(a, worker - ++others);
    return others;
}

/* ---- the order of steps. Staggered tiles begin with different steps and wrap around: otherwise
 * all blocks would read the same tokens, from a few lines of the L2 at a time ---- */

static __device__ __forceinline__ int first_step(const work *w, int row_tile) {
    return w->first + row_tile % (w->end - w->first);
}

static __device__ __forceinline__ int step_after(const work *w, int step) {
    return step + 1 == w->end ? w->first : step + 1;
}

/* ---- partial sums in the workspace ---- */

/* Flag that a block's partial sums are stored. The workspace is not cleared before a call, since
 * other data are these 64 bits by chance alone; the reader resets the flag, so that no later call
 * sees it. */
#define READY 0x6d6f7165787473a7ull

static __device__ __forceinline__ void await_sums(uint64_t *flag) {
    while (load_acquire(flag) != READY)
        ;
    *flag = 0;
}

} // namespace moq::gemm

#endif
