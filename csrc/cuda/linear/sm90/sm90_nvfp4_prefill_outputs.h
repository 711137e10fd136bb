/* Outputs of the NVFP4 kernels of Hopper for many tokens. Outputs of a tile wait in shared
 * memory, and the copy engine takes them out under the products of the next one: all blocks have
 * outputs at about the same time, so that the L2 bounds how fast they leave
 * (docs/lab/nvfp4-prefill.md).
 *
 * A warpgroup has 64 rows of a tile, a chunk of tokens after the other, 128 bytes a token in the
 * 128-byte swizzle. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_OUTPUTS_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_OUTPUTS_H

#include "cuda/linear/cuda_linear.h"
#include "cuda/linear/sm90/sm90_nvfp4_prefill_tile.h"

namespace moq::nvfp4_prefill {

#define TOGETHER 2 /* chunks that leave at a time */

typedef struct {
    const CUtensorMap *map; /* of y, in boxes of a chunk by 64 rows, where it can have one */
    uint32_t room;          /* of the warpgroup, S::rooms chunks */
} output_path;

/* What a row's sums are scaled by. */
template <class S>
static __device__ __forceinline__ float factor_of(const tile_scales<S> *b, int row) {
    if (!S::quantized)
        return b->factor[row] * MOQ_NVFP4_FACTOR;
    return b->factor[row] * moq_unfold(b->fold[row]);
}

/* Scales and rounds a chunk, whose tokens have the scales at `x`. */
template <class S>
static __device__ __forceinline__ void
stage_outputs(const gemm_args *a, uint32_t room, const float *x, const float *sum,
              const float (&factor)[2], const float (&bias)[2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    bool add = a->out.bias != NULL;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t matrix[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *two = sum + 4 * (half * 2 + i / 2) + 2 * (i % 2);
            float2 own = {1.0f, 1.0f};
            if (S::quantized)
                own = *(const float2 *)&x[(half * 2 + i / 2) * 8 + lane % 4 * 2];
            float low = two[0] * (own.x * factor[i % 2]), high = two[1] * (own.y * factor[i % 2]);
            if (add) {
                low = __fadd_rn(low, bias[i % 2]);
                high = __fadd_rn(high, bias[i % 2]);
            }
            matrix[i] = moq_narrow_pair(a->out.dtype, low, high);
        }
        int token = half * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
        store_matrices_turned(room + token * 128 + (piece ^ token % 8) * 16, matrix);
    }
}

/* Writes parked chunks of a tile where y's addresses forbid the copy engine. */
static __device__ __forceinline__ void carry_out(const gemm_args *a, uint32_t room,
                                                 const tile_place *at, int row, chunks part) {
    int thread = threadIdx.x % 128, n = row + thread % 8 * 8;
    int end = min(part.end * CHUNK, a->m - at->token);
#pragma unroll 1
    for (int token = part.first * CHUNK + thread / 8; token < end; token += 16) {
        uint16_t *to = (uint16_t *)a->out.data + (at->token + token) * a->out.stride + n;
        uint4 word = load_shared(room + token * 128 + (thread % 8 ^ token % 8) * 16);
        store_eight(to, a->n - n, n + 8 <= a->n && (uintptr_t)to % 16 == 0, word);
    }
}

/* Writes the outputs of a warpgroup's rows of a tile. Its first thread waits for
 * store_boxes_wait() before the block ends. */
template <class S>
static __device__ __forceinline__ void write_boxes(const gemm_args *a, const output_path *path,
                                                   const tile_scales<S> *b, const tile_place *at,
                                                   int group, const float *sum, chunks part) {
    int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    int row = at->row + group * 64, own = warp * 16 + lane / 4;
    float factor[2], bias[2];
    copy_async_wait<0>();
    if (thread == 0)
        store_boxes_wait(); /* the tile before has left */
    barrier_sync(2 + group, 128);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int n = row + own + 8 * i;
        factor[i] = factor_of<S>(b, own + 8 * i);
        bias[i] = n < a->n ? moq_load_bias(&a->out, n) : 0.0f;
    }
#pragma unroll
    for (int chunk = 0; chunk < S::T / CHUNK; chunk++) {
        if (chunk < part.first || chunk >= part.end)
            continue;
        if (chunk >= S::rooms && chunk % TOGETHER == 0) {
            if (thread == 0)
                store_boxes_wait(); /* chunks of this tile have left */
            barrier_sync(2 + group, 128);
        }
        stage_outputs<S>(a, path->room + chunk % S::rooms * TURN_BYTES,
                         b->x + S::quantized * chunk * CHUNK, sum + chunk * (CHUNK / 2), factor,
                         bias);
        if ((chunk + 1) % TOGETHER != 0 && chunk + 1 != part.end)
            continue;
        chunks some = {max(chunk - chunk % TOGETHER, part.first), chunk + 1};
        uint32_t room = path->room - chunk / S::rooms * (S::rooms * TURN_BYTES); /* of the first */
        fence_async_proxy();
        barrier_sync(2 + group, 128);
        if (!a->boxed)
            carry_out(a, room, at, row, some);
        else if (thread == 0)
            for (int i = some.first; i < some.end; i++)
                store_box_2d(path->map, row * 2, at->token + i * CHUNK, room + i * TURN_BYTES);
    }
}

} // namespace moq::nvfp4_prefill

#endif
