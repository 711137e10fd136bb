/* Outputs of the FP8 linear for many tokens on Hopper, where tokens are the rows of the products.
 * Outputs of a tile wait in shared memory, and the copy engine takes them out under the products of
 * the next one: blocks have theirs at about the same time, so that what the L2 takes bounds how
 * fast they leave (docs/lab/fp8-prefill.md).
 *
 * What a product gives, 64 tokens by 128 rows of W, is two boxes, of 128 bytes a token in the
 * 128-byte swizzle. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_OUTPUTS_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_OUTPUTS_H

#include "cuda/linear/sm90/sm90_fp8_prefill_tile.h"

namespace moq::fp8_prefill {

#define BOX_BYTES (64 * 128)

/* Scales and rounds the outputs of a product into two boxes at `room`; `e` are terms of its tokens.
 * PLAIN: bfloat16 without factors or biases, at a third of the instructions. */
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

/* Writes what 64 rows have parked, from token `first` on, where boxes would write what is not this
 * tile's, or y's addresses forbid the copy engine. */
static __device__ __forceinline__ void carry_out(const gemm_args *a, uint32_t room,
                                                 const tile_place *at, int first) {
    int piece = threadIdx.x % 16, n = at->row + piece * 8;
#pragma unroll 1
    for (int i = 0; i < 8;
         i++) { /* all lanes alike: the products of the next tile want whole warps */
        int token = threadIdx.x % 128 / 16 + 8 * i;
        uint4 word =
            load_shared(room + piece / 8 * BOX_BYTES + token * 128 + (piece % 8 ^ token % 8) * 16);
        if (n < at->end && first + token < at->last)
            store_eight(&a->out, first + token, n, at->end - n, word);
        __syncwarp();
    }
}

/* Where outputs of a warpgroup go: y, where it can have boxes, factors and biases of columns, room
 * for what waits, and its first row of a tile. */
template <class S> struct output_path {
    const CUtensorMap *map;
    column_terms<S> *b;
    uint32_t room;
    int row;
};

/* Writes the tokens of a wave of a warpgroup. Its waves take turns, each with room of its own:
 * where there are two, a wave's barrier tells that what the other had of the tile before has left.
 * The first thread waits for store_boxes_wait() before the block ends. */
template <class S, int WAVE>
static __device__ __forceinline__ void write_wave(const gemm_args *a, const output_path<S> *path,
                                                  const tile_place *at, const tile_terms<S> *e,
                                                  const float (&sum)[S::T / 2]) {
    bool first = threadIdx.x % 128 == 0;
    /* boxes begin at multiples of 16 bytes, and write as many rows of W as they have */
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
        carry_out(a, room, at, token);
    for (int half = 0; boxed && first && half < 2; half++)
        store_box_2d(path->map, 2 * (at->row + 64 * half), token, room + half * BOX_BYTES);
    __syncwarp();
}

} // namespace moq::fp8_prefill

#endif
