/* What the kernels of products of warps (mma.sync) share: rows of 128 bytes that threads copy to a
 * ring in shared memory and ldmatrix reads without bank conflicts, the order in which blocks take
 * tiles, and sums that warps share. From sm_80 on. */
#ifndef MOQ_CUDA_MMA_TILE_H
#define MOQ_CUDA_MMA_TILE_H

#include "cuda/ptx.h"

#define MMA_ROW   128 /* bytes of a row of a step in shared memory */
#define MMA_PANEL 8   /* tiles of rows of x that meet the same rows of W one after the other */

/* ---- rows in shared memory: their 16-byte parts in the order part ^ (row % 8) ---- */

/* Rows in memory. */
typedef struct {
    const uint8_t *data;
    int64_t stride, bytes; /* of a row; multiples of 16 */
    int rows;
} mma_source;

/* ROWS rows of 128 bytes from byte `at` on to a buffer, zeros where there are none. */
template <int ROWS, int THREADS>
static __device__ __forceinline__ void copy_rows(uint32_t to, const mma_source *from, int64_t at) {
#pragma unroll
    for (int i = 0; i < ROWS * MMA_ROW / 16; i += THREADS) {
        int index = i + (int)threadIdx.x, row = index / (MMA_ROW / 16),
            part = index % (MMA_ROW / 16);
        int64_t byte = at + part * 16;
        bool inside = row < from->rows && byte < from->bytes;
        if (ROWS * MMA_ROW / 16 % THREADS == 0 || index < ROWS * MMA_ROW / 16)
            copy_async_16(to + row * MMA_ROW + ((part ^ row % 8) * 16),
                          from->data + (inside ? row * from->stride + byte : 0), inside ? 16 : 0);
    }
}

/* Where a 16-byte part of a row lies in it, for the lane that names row lane % 8 to ldmatrix. */
static __device__ __forceinline__ uint32_t part_at(int part, int lane) {
    return (uint32_t)((part ^ lane % 8) * 16);
}

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

#endif
