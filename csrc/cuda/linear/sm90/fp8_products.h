/* Products of the FP8 prefill kernels on Hopper, of linears (fp8_prefill_mainloop.h) and experts: a
 * step's operands, 128 columns of both in the 128-byte swizzle, multiplied and added to float32
 * sums.
 *
 * One operand gives the 64 rows of wgmma, the other its columns. A warpgroup multiplies 64 rows by
 * all columns of a step, then adds the product to float32 sums under the scales of blocks and
 * groups: FP8 wgmma keeps about 14 bits of its own sums.
 *
 * The shape S of a tile says: T columns of the product; WAVES of 64 rows of a warpgroup;
 * tokens_first, whether tokens are the rows; by_steps, whether warpgroups split K, and stride, from
 * a step of a warpgroup to its next; bytes of a stage; tokens of a step; groups, whether W and x
 * have scales of 128 columns; pair, whether two blocks share the pipeline; two_sets, whether two
 * products are under way at once. */
#ifndef MOQ_CUDA_LINEAR_SM90_FP8_PRODUCTS_H
#define MOQ_CUDA_LINEAR_SM90_FP8_PRODUCTS_H

#include "cuda/device/ptx.h"
#include "cuda/device/wgmma.h"

namespace moq::fp8_prefill {

#define STEP 128 /* columns */

/* Stages as a consumer warpgroup reads them. */
typedef struct {
    uint32_t weights, tokens, empty; /* barriers: of full weights, full tokens, and empty stages */
    uint64_t left, right;            /* operands in the first stage: its own rows, all columns */
    const float *scales;             /* token scales, in the first stage */
    int stages;
} consumer_pipeline;

/* Waits for a step's operands. */
static __device__ __forceinline__ void await(const consumer_pipeline *t,
                                             const pipeline_state *slot) {
    mbarrier_wait(t->weights + 8u * slot->index, slot->parity);
    mbarrier_wait(t->tokens + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const pipeline_state *slot,
                                             int wave, float (&c)[S::T / 2]) {
    uint32_t at = (uint32_t)(slot->index * (S::stage / 16));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        wgmma_e4m3(c, t->left + at + wave * (64 * STEP / 16) + 2 * j, t->right + at + 2 * j, j);
    wgmma_commit();
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t,
                                               const pipeline_state *slot) {
    warp_releases<S::pair>(t->empty + 8u * slot->index);
}

/* Moves on to the next step of this warpgroup. */
template <class S>
static __device__ __forceinline__ void advance_own(pipeline_state *slot, int stages) {
    slot->index += S::stride;
    if (slot->index >= stages) {
        slot->index -= stages;
        slot->parity ^= 1;
    }
}

/* Block scales of W by step, a row of them for each wave of rows, or one for all. A lane holds one
 * step in 32, so that no step waits for a load. If tokens are the rows, only the first two steps
 * are held. */
template <class S> struct block_scales {
    static constexpr int ROWS = S::tokens_first ? 1 : S::WAVES;
    const float *row[ROWS];
    float held[ROWS];
    float second;
    int first, steps; /* the step that lane 0 holds, and the number of steps */
};

template <class S>
static __device__ __forceinline__ void hold_scales(block_scales<S> *block, int step) {
    int own = step + (S::tokens_first ? 0 : threadIdx.x % 32);
    block->first = step;
#pragma unroll
    for (int i = 0; i < block->ROWS; i++)
        block->held[i] = own < block->steps ? block->row[i][own] : 0.0f;
    if (S::tokens_first)
        block->second = block->row[0][min(step + 1, block->steps - 1)];
}

template <class S>
static __device__ __forceinline__ float weight_scale(block_scales<S> *block, int wave, int step) {
    if (!S::groups)
        return 1.0f;
    if (step - block->first >= 32)
        hold_scales(block, block->first + 32);
    return __shfl_sync(0xffffffffu, block->held[wave % block->ROWS], step - block->first);
}

/* Adds c to the sums: x points to the scales of the tokens in shared memory, w is the scale of the
 * rows of W. */
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

/* ---- two sets of accumulators: one is added to the sums while the other is under way ---- */

/* Issues the next product to the other set, then adds the one under way to the sums. H is the half
 * of the registers that holds it. */
template <class S, int H>
static __device__ __forceinline__ void
continue_products(const consumer_pipeline *t, block_scales<S> *block, int step,
                  pipeline_state *slot, pipeline_state *next, float (&c)[S::T / 2],
                  float (&other)[S::T / 2], float (&sum)[S::WAVES][S::T / 2]) {
    const int wave = S::WAVES == 1 ? 0 : H;
    const bool last = S::WAVES == 1 || H == 1; /* the step's last product */
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
end_products(const consumer_pipeline *t, block_scales<S> *block, int step, pipeline_state *slot,
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
multiply_in_two_sets(const consumer_pipeline *t, block_scales<S> *block, int first, int steps,
                     pipeline_state *slot, float (&sum)[S::WAVES][S::T / 2]) {
    float even[S::T / 2], odd[S::T / 2];
    pipeline_state next = *slot;
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

/* ---- one set of accumulators: the other warpgroup has the tensor cores meanwhile ---- */

template <class S>
static __device__ __forceinline__ void
multiply_in_one_set(const consumer_pipeline *t, block_scales<S> *block, int first, int steps,
                    pipeline_state *slot, float (&sum)[S::WAVES][S::T / 2]) {
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
            release<S>(t, slot); /* scales were needed until now */
    }
}

/* Sums the products of steps [first, end), or of every other one for `group`, where W gives the
 * rows. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, block_scales<S> *block,
                                                int first, int end, int group, pipeline_state *slot,
                                                float (&sum)[S::WAVES][S::T / 2]) {
    if (S::by_steps) { /* an even number of stages gives each stage one owner */
        slot->index = group;
        first += group;
    }
    int steps = (end - first + S::stride - 1) / S::stride;
    if (S::by_steps && steps <= 0)
        return;
    if constexpr (S::two_sets)
        multiply_in_two_sets<S>(t, block, first, steps, slot, sum);
    else
        multiply_in_one_set<S>(t, block, first, steps, slot, sum);
}

} // namespace moq::fp8_prefill

#endif
