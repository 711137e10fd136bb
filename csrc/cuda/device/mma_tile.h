/* Building blocks of kernels on mma.sync, from sm_80 on: copies of 128-byte rows to a pipeline in
 * shared memory that ldmatrix reads without bank conflicts, the order of a grid's tiles, and sums
 * of warps that split K. */
#ifndef MOQ_CUDA_DEVICE_MMA_TILE_H
#define MOQ_CUDA_DEVICE_MMA_TILE_H

#include "cuda/device/ptx.h"

namespace moq {

#define MMA_ROW   128 /* bytes of a row of a step in shared memory */
#define MMA_PANEL 8   /* tiles of x that meet the same rows of W one after the other */

/* ---- rows in shared memory: the 16-byte parts of a row lie in the order part ^ (row % 8) ---- */

/* Returns the offset of a 16-byte part in its row, for the lane that names row lane % 8 to
 * ldmatrix. */
static __device__ __forceinline__ uint32_t part_at(int part, int lane) {
    return (uint32_t)((part ^ lane % 8) * 16);
}

/* Copies of a thread from ROWS rows each step: BLOCKS times 128 bytes of each, block by block,
 * zeros beyond the ends. Only addresses change from step to step, so that a copy costs five
 * instructions; these bound a kernel with few rows. */
template <int ROWS, int BLOCKS, int THREADS> struct row_copies {
    static constexpr int PARTS = MMA_ROW / 16,
                         BLOCK = ROWS * PARTS; /* copies of a row, and of a block */
    static constexpr int COUNT = BLOCKS * BLOCK / THREADS;
    /* copies of a thread within a block, or blocks covered by one copy of all threads */
    static constexpr int DOWN = BLOCK > THREADS ? BLOCK / THREADS : 1;
    static constexpr int ACROSS = BLOCK < THREADS ? THREADS / BLOCK : 1;
    static_assert(COUNT * THREADS == BLOCKS * BLOCK && THREADS % (8 * PARTS) == 0,
                  "copies come out even, eight rows at a time");

    const uint8_t *from;
    int64_t down;   /* bytes to the rows of the next copy */
    int part, rows; /* this thread's part of a row, and rows from its first row on */
    int parts;      /* parts left in a row from this step on */

    /* Copies `rows` rows of `bytes` bytes, `stride` bytes apart, from byte `at` on; all three are
     * multiples of 16. */
    __device__ __forceinline__ row_copies(const uint8_t *data, int64_t stride, int64_t bytes,
                                          int rows, int64_t at) {
        int index = (int)threadIdx.x % BLOCK, row = index / PARTS; /* row of its first copy */
        part = (int)threadIdx.x / BLOCK * PARTS + index % PARTS;
        from = data + row * stride + at + part * 16;
        down = THREADS / PARTS * stride;
        this->rows = rows - row;
        parts = (int)((bytes - at) / 16);
    }

    __device__ __forceinline__ void copy(uint32_t to) {
        int row = (int)threadIdx.x / PARTS; /* row counted over all blocks */
        to += row * MMA_ROW + part_at((int)threadIdx.x % PARTS, row);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int block = i / DOWN * ACROSS;
            bool inside = i % DOWN * (THREADS / PARTS) < rows && part + block * PARTS < parts;
            copy_async_16(to + i * THREADS * 16, from + block * MMA_ROW + i % DOWN * down,
                          inside ? 16 : 0);
        }
        from += BLOCKS * MMA_ROW;
        parts -= BLOCKS * PARTS;
    }
};

/* ---- tiles ---- */

/* Tile of a block: the grid goes through panels of tiles of x, and in each through all of W, so
 * that concurrent blocks read from the L2. */
typedef struct {
    int64_t token, weight;
} mma_place;

static __device__ __forceinline__ mma_place place_of(int64_t index, int64_t token_tiles,
                                                     int64_t weight_tiles) {
    int64_t whole = MMA_PANEL * weight_tiles, first = index / whole * MMA_PANEL;
    int64_t tokens = min((int64_t)MMA_PANEL, token_tiles - first);
    index %= whole;
    mma_place p = {first + index % tokens, index / tokens};
    return p;
}

/* ---- split-K ---- */

/* Adds the sums of all shares of K to those of share 0, in order, in each of its THREADS threads.
 * `memory` may be a pipeline that the block's threads have read before the call. */
template <int COUNT, int THREADS, int SHARES>
static __device__ __forceinline__ void add_shares(float *sum, float *memory, int share) {
    int thread = threadIdx.x % THREADS;
    __syncthreads();
    if (share > 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            memory[((share - 1) * COUNT + i) * THREADS + thread] = sum[i];
    }
    __syncthreads();
    if (share > 0)
        return;
#pragma unroll
    for (int i = 0; i < (SHARES - 1) * COUNT; i++)
        sum[i % COUNT] = __fadd_rn(sum[i % COUNT], memory[i * THREADS + thread]);
}

} // namespace moq

#endif
