/* What the kernels of products of warps (mma.sync) share: rows of 128 bytes that threads copy to a
 * ring in shared memory and ldmatrix reads without bank conflicts, the order in which blocks take
 * tiles, and sums that warps share. From sm_80 on. */
#ifndef MOQ_CUDA_DEVICE_MMA_TILE_H
#define MOQ_CUDA_DEVICE_MMA_TILE_H

#include "cuda/device/ptx.h"

namespace moq {

#define MMA_ROW   128 /* bytes of a row of a step in shared memory */
#define MMA_PANEL 8   /* tiles of rows of x that meet the same rows of W one after the other */

/* ---- rows in shared memory: their 16-byte parts in the order part ^ (row % 8) ---- */

/* Where a 16-byte part of a row lies in it, for the lane that names row lane % 8 to ldmatrix. */
static __device__ __forceinline__ uint32_t part_at(int part, int lane) {
    return (uint32_t)((part ^ lane % 8) * 16);
}

/* What a thread copies of ROWS rows each step: BLOCKS times 128 bytes of each, block by block. Only
 * addresses change from step to step, so that a copy costs five instructions: with few rows it is
 * these that bound a kernel. What lies beyond the ends becomes zeros. */
template <int ROWS, int BLOCKS, int THREADS> struct row_copies {
    static constexpr int PARTS = MMA_ROW / 16, BLOCK = ROWS * PARTS; /* copies of a row, a block */
    static constexpr int COUNT = BLOCKS * BLOCK / THREADS;
    /* copies that a thread has in a block, or blocks of one copy of all threads */
    static constexpr int DOWN = BLOCK > THREADS ? BLOCK / THREADS : 1;
    static constexpr int ACROSS = BLOCK < THREADS ? THREADS / BLOCK : 1;
    static_assert(COUNT * THREADS == BLOCKS * BLOCK && THREADS % (8 * PARTS) == 0,
                  "copies come out even, eight rows at a time");

    const uint8_t *from;
    int64_t down;   /* bytes to the rows of the next copy */
    int part, rows; /* the part of a row that is this thread's, and rows from its first on */
    int parts;      /* that there are in a row from this step on */

    /* Of `rows` rows, `stride` bytes apart and of so many bytes, from byte `at` on; all three are
     * multiples of 16. */
    __device__ __forceinline__ row_copies(const uint8_t *data, int64_t stride, int64_t bytes,
                                          int rows, int64_t at) {
        int index = (int)threadIdx.x % BLOCK, row = index / PARTS; /* of its first copy */
        part = (int)threadIdx.x / BLOCK * PARTS + index % PARTS;
        from = data + row * stride + at + part * 16;
        down = THREADS / PARTS * stride;
        this->rows = rows - row;
        parts = (int)((bytes - at) / 16);
    }

    __device__ __forceinline__ void copy(uint32_t to) {
        int row = (int)threadIdx.x / PARTS; /* counting those of all blocks */
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

/* The block's place: panels of tiles of x, in each all of W, so that what blocks of one time read
 * is near. */
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

/* ---- sums ---- */

/* The sums of the THREADS threads of share 0 become those of all shares, in their order, by way of
 * memory that everybody has read. */
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
