/* Products of the FP8 linear for many tokens on Hopper (sm90_fp8_many.cu): a warpgroup multiplies
 * 64 rows by all columns of a step at a time and adds that to float32 sums, since FP8 wgmma keeps
 * about 14 bits of its own. Scales of blocks and groups are applied there. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_MANY_PRODUCTS_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_MANY_PRODUCTS_H

#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/sm90_fp8_many_tile.h"

namespace moq::fp8_many {

/* What a warpgroup takes steps from. */
typedef struct {
    stage_barriers barriers;
    uint64_t left, right; /* operands in the first stage: its own rows, all columns */
    const float *scales;  /* of tokens, in the first stage */
    int stages;
} consumer_ring;

/* Waits for a step's operands. */
static __device__ __forceinline__ void await(const consumer_ring *t, const ring_place *slot) {
    mbarrier_wait(t->barriers.weights + 8u * slot->index, slot->parity);
    mbarrier_wait(t->barriers.tokens + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void issue(const consumer_ring *t, const ring_place *slot,
                                             int wave, float (&c)[S::T / 2]) {
    uint32_t at = (uint32_t)(slot->index * (S::stage / 16));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        wgmma_e4m3(c, t->left + at + wave * (64 * STEP / 16) + 2 * j, t->right + at + 2 * j, j);
    wgmma_commit();
}

template <class S>
static __device__ __forceinline__ void release(const consumer_ring *t, const ring_place *slot) {
    warp_releases<S::pair>(t->barriers.empty + 8u * slot->index);
}

/* To the next step of this warpgroup. */
template <class S>
static __device__ __forceinline__ void advance_own(ring_place *slot, int stages) {
    slot->index += S::stride;
    if (slot->index >= stages) {
        slot->index -= stages;
        slot->parity ^= 1;
    }
}

/* Scales of blocks of W by step, a row of them for each wave of rows, or one for all: a lane holds
 * one step in 32 of them, so that a step waits for none. */
template <class S> struct block_scales {
    static constexpr int ROWS = S::tokens_first ? 1 : S::WAVES;
    const float *row[ROWS];
    float held[ROWS];
    int first, steps; /* the step that lane 0 holds, and how many there are */
};

template <class S>
static __device__ __forceinline__ void hold_scales(block_scales<S> *block, int step) {
    int own = step + threadIdx.x % 32;
    block->first = step;
#pragma unroll
    for (int i = 0; i < block->ROWS; i++)
        block->held[i] = own < block->steps ? block->row[i][own] : 0.0f;
}

template <class S>
static __device__ __forceinline__ float weight_scale(block_scales<S> *block, int wave, int step) {
    if (!S::groups)
        return 1.0f;
    if (step - block->first >= 32)
        hold_scales(block, block->first + 32);
    return __shfl_sync(0xffffffffu, block->held[wave % block->ROWS], step - block->first);
}

/* sum += c, where x are the scales of the tokens in shared memory and w that of the rows of W. */
template <class S>
static __device__ __forceinline__ void promote(float (&sum)[S::T / 2], const float (&c)[S::T / 2],
                                               const float *x, float w) {
#pragma unroll
    for (int j = 0; j < S::T / 8; j++) {
        if (S::groups) {
            float2 s = *(const float2 *)(x + 8 * j + threadIdx.x % 4 * 2);
            s.x *= w;
            s.y *= w;
            sum[4 * j] += c[4 * j] * s.x;
            sum[4 * j + 1] += c[4 * j + 1] * s.y;
            sum[4 * j + 2] += c[4 * j + 2] * s.x;
            sum[4 * j + 3] += c[4 * j + 3] * s.y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[4 * j + i] += c[4 * j + i];
        }
    }
}

/* ---- two sets of registers: while one is added to the sums, the other is under way ---- */

/* A product under way, of half H of the registers: the next one is issued to the other half, then
 * this one is added to the sums. */
template <class S, int H>
static __device__ __forceinline__ void
continue_products(const consumer_ring *t, block_scales<S> *block, int step, ring_place *slot,
                  ring_place *next, float (&c)[S::T / 2], float (&other)[S::T / 2],
                  float (&sum)[S::WAVES][S::T / 2]) {
    const int wave = S::WAVES == 1 ? 0 : H;
    const bool last = S::WAVES == 1 || H == 1; /* of the step */
    float w = weight_scale<S>(block, wave, step);
    if (last) {
        advance_own<S>(next, t->stages);
        await(t, next);
    }
    issue<S>(t, next, S::WAVES == 1 ? 0 : 1 - H, other);
    wgmma_wait<1>();
    stay_here(c);
    promote<S>(sum[wave], c, t->scales + slot->index * S::tokens, w);
    stay_here(sum[wave]);
    if (last) {
        release<S>(t, slot);
        *slot = *next;
    }
}

template <class S, int H>
static __device__ __forceinline__ void
end_products(const consumer_ring *t, block_scales<S> *block, int step, ring_place *slot,
             float (&c)[S::T / 2], float (&sum)[S::WAVES][S::T / 2]) {
    const int wave = S::WAVES == 1 ? 0 : H;
    float w = weight_scale<S>(block, wave, step);
    wgmma_wait<0>();
    stay_here(c);
    promote<S>(sum[wave], c, t->scales + slot->index * S::tokens, w);
    stay_here(sum[wave]);
    release<S>(t, slot);
    advance_own<S>(slot, t->stages);
}

template <class S>
static __device__ __forceinline__ void
multiply_in_two_sets(const consumer_ring *t, block_scales<S> *block, int first, int steps,
                     ring_place *slot, float (&sum)[S::WAVES][S::T / 2]) {
    float even[S::T / 2], odd[S::T / 2];
    ring_place next = *slot;
    await(t, slot);
    issue<S>(t, slot, 0, even);
    int unit = 0, units = steps * S::WAVES;
    for (; unit + 2 < units; unit += 2) {
        continue_products<S, 0>(t, block, first + unit / S::WAVES * S::stride, slot, &next, even,
                                odd, sum);
        continue_products<S, 1>(t, block, first + (unit + 1) / S::WAVES * S::stride, slot, &next,
                                odd, even, sum);
    }
    if (unit + 2 == units) {
        continue_products<S, 0>(t, block, first + unit / S::WAVES * S::stride, slot, &next, even,
                                odd, sum);
        end_products<S, 1>(t, block, first + (unit + 1) / S::WAVES * S::stride, slot, odd, sum);
    } else {
        end_products<S, 0>(t, block, first + unit / S::WAVES * S::stride, slot, even, sum);
    }
}

/* ---- one set: the other warpgroup has the tensor cores meanwhile ---- */

template <class S>
static __device__ __forceinline__ void
multiply_in_one_set(const consumer_ring *t, block_scales<S> *block, int first, int steps,
                    ring_place *slot, float (&sum)[S::WAVES][S::T / 2]) {
    for (int step = first; step < first + steps; step++, advance(slot, t->stages)) {
        const float *scales = t->scales + slot->index * S::tokens;
        float w[S::WAVES];
#pragma unroll
        for (int wave = 0; wave < S::WAVES; wave++)
            w[wave] = weight_scale<S>(block, wave, step);
        await(t, slot);
#pragma unroll
        for (int wave = 0; wave < S::WAVES; wave++) {
            float c[S::T / 2];
            issue<S>(t, slot, wave, c);
            wgmma_wait<0>();
            if (wave == S::WAVES - 1 && !S::groups)
                release<S>(t, slot);
            promote<S>(sum[wave], c, scales, w[wave]);
        }
        if (S::groups)
            release<S>(t, slot); /* the scales were needed until now */
    }
}

/* ---- tokens are the rows: a product of half of the columns is under way while the one before is
 * added. Both warpgroups wait for the same step, so that they would multiply, and then add, at the
 * same time: adding takes a fifth of a step (docs/lab/fp8-many.md) ---- */

/* Issues piece `piece` of a step: half of the columns, of 64 rows. */
template <class S>
static __device__ __forceinline__ void issue_half(const consumer_ring *t, const ring_place *slot,
                                                  int piece, float (&c)[S::T / 4]) {
    uint32_t at = (uint32_t)(slot->index * (S::stage / 16));
    uint64_t left = t->left + at + piece / 2 * (64 * STEP / 16);
    uint64_t right = t->right + at + piece % 2 * (S::T / 2 * STEP / 16);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        wgmma_e4m3(c, left + 2 * j, right + 2 * j, j);
    wgmma_commit();
}

/* A thread has two rows, whose scales are `upper` and `lower`. */
template <class S>
static __device__ __forceinline__ void promote_half(float (&sum)[S::T / 2], int half,
                                                    const float (&c)[S::T / 4], float upper,
                                                    float lower) {
#pragma unroll
    for (int i = 0; i < S::T / 4; i++)
        sum[half * (S::T / 4) + i] += S::groups ? c[i] * (i & 2 ? lower : upper) : c[i];
}

/* Piece `piece` of a step is under way in `own`: the one after it is issued to `other`, then this
 * one is added. LAST: there is none after it. */
template <class S, int PIECE, bool LAST>
static __device__ __forceinline__ void continue_half(const consumer_ring *t, const ring_place *slot,
                                                     const ring_place *next, float (&own)[S::T / 4],
                                                     float (&other)[S::T / 4], const float (&x)[2],
                                                     float (&sum)[S::T / 2]) {
    constexpr bool ENDS = PIECE == 2 * S::WAVES - 1; /* the step */
    if constexpr (LAST) {
        wgmma_wait<0>();
    } else {
        if (ENDS)
            await(t, next);
        issue_half<S>(t, ENDS ? next : slot, ENDS ? 0 : PIECE + 1, other);
        wgmma_wait<1>();
    }
    stay_here(own);
    promote_half<S>(sum, PIECE % 2, own, x[0], x[1]);
    stay_here(sum);
    if (ENDS)
        release<S>(t, slot);
}

/* Steps between which products are under way: the compiler lets none be where a loop begins anew.
 */
#define STEPS_AT_ONCE 4

/* A step whose first piece is under way in `even`. LAST: of the tile. */
template <class S, bool LAST>
static __device__ __forceinline__ void
multiply_step(const consumer_ring *t, block_scales<S> *block, int step, ring_place *slot,
              float (&even)[S::T / 4], float (&odd)[S::T / 4], float (&sum)[S::WAVES][S::T / 2]) {
    int row = threadIdx.x / 128 * (64 * S::WAVES) + row_of_thread();
    const float *scales = t->scales + slot->index * S::tokens + row;
    float w = weight_scale<S>(block, 0, step), x[S::WAVES][2] = {};
    ring_place next = *slot;
    advance(&next, t->stages);
#pragma unroll
    for (int i = 0; S::groups && i < S::WAVES; i++) {
        x[i][0] = scales[64 * i] * w;
        x[i][1] = scales[64 * i + 8] * w;
    }
    continue_half<S, 0, false>(t, slot, &next, even, odd, x[0], sum[0]);
    continue_half<S, 1, LAST && S::WAVES == 1>(t, slot, &next, odd, even, x[0], sum[0]);
    if constexpr (S::WAVES == 2) {
        continue_half<S, 2, false>(t, slot, &next, even, odd, x[1], sum[1]);
        continue_half<S, 3, LAST>(t, slot, &next, odd, even, x[1], sum[1]);
    }
    *slot = next;
}

template <class S>
static __device__ __forceinline__ void
multiply_in_halves(const consumer_ring *t, block_scales<S> *block, int first, int steps,
                   ring_place *slot, float (&sum)[S::WAVES][S::T / 2]) {
    int step = first, end = first + steps;
#pragma unroll 1
    for (; step + STEPS_AT_ONCE <= end; step += STEPS_AT_ONCE) {
        float even[S::T / 4], odd[S::T / 4];
        await(t, slot);
        issue_half<S>(t, slot, 0, even);
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE - 1; i++)
            multiply_step<S, false>(t, block, step + i, slot, even, odd, sum);
        multiply_step<S, true>(t, block, step + STEPS_AT_ONCE - 1, slot, even, odd, sum);
    }
#pragma unroll 1
    for (; step < end; step++) {
        float even[S::T / 4], odd[S::T / 4];
        await(t, slot);
        issue_half<S>(t, slot, 0, even);
        multiply_step<S, true>(t, block, step, slot, even, odd, sum);
    }
}

/* Sums of the steps of a tile from `first` to `end`, or every other of them for `group`. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_ring *t, block_scales<S> *block,
                                                int first, int end, int group, ring_place *slot,
                                                float (&sum)[S::WAVES][S::T / 2]) {
    if (S::by_steps) { /* the ring has an even number of stages, so that each has one owner */
        slot->index = group;
        first += group;
    }
    int steps = (end - first + S::stride - 1) / S::stride;
    if (S::by_steps && steps <= 0)
        return;
    if constexpr (S::tokens_first)
        multiply_in_halves<S>(t, block, first, steps, slot, sum);
    else if constexpr (S::two_sets)
        multiply_in_two_sets<S>(t, block, first, steps, slot, sum);
    else
        multiply_in_one_set<S>(t, block, first, steps, slot, sum);
}

} // namespace moq::fp8_many

#endif
