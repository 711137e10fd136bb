/* Products of int8 of the FP8 prefill kernel on Hopper (fp8_prefill_mainloop.h), with its tiles and
 * pipeline. Sums are int32 and exact, so that they stay in the tensor cores through all of K; they
 * become float32 once. */
#ifndef MOQ_CUDA_LINEAR_SM90_INT8_PRODUCTS_H
#define MOQ_CUDA_LINEAR_SM90_INT8_PRODUCTS_H

#include "cuda/linear/sm90/fp8_products.h"

namespace moq::fp8_prefill {

/* Issues the products of 64 rows by all columns of a step. `add` keeps the sums in c. */
template <int SUMS>
static __device__ __forceinline__ void issue_int8(uint64_t left, uint64_t right, bool add,
                                                  int (&c)[SUMS]) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEP / 32; j++)
        wgmma_s8(c, left + 2 * j, right + 2 * j, add || j > 0);
    wgmma_commit();
}

/* Rounds finished sums to float32. */
template <int SUMS>
static __device__ __forceinline__ void to_floats(int (&c)[SUMS], float (&sum)[SUMS]) {
    stay_here(c);
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        sum[i] = __int2float_rn(c[i]);
}

/* Sums the products of steps [first, end), or of every other one for `group`. */
template <class S>
static __device__ __forceinline__ void multiply_int8(const consumer_pipeline *t, int first, int end,
                                                     int group, pipeline_state *slot,
                                                     float (&sum)[S::WAVES][S::T / 2]) {
    if (S::by_steps) { /* an even number of stages gives each stage one owner */
        slot->index = group;
        first += group;
    }
    int c[S::WAVES][S::T / 2] = {};
    pipeline_state before = *slot;
#pragma unroll 1
    for (int step = first; step < end; step += S::stride) {
        uint32_t at = (uint32_t)(slot->index * (S::stage / 16));
        await(t, slot);
#pragma unroll
        for (int wave = 0; wave < S::WAVES; wave++)
            issue_int8(t->left + at + wave * (64 * STEP / 16), t->right + at, true, c[wave]);
        wgmma_wait<S::WAVES>(); /* products of the step before have ended */
        if (step > first)
            release<S>(t, &before);
        before = *slot;
        advance_own<S>(slot, t->stages);
    }
    wgmma_wait<0>();
    if (first < end)
        release<S>(t, &before);
#pragma unroll
    for (int wave = 0; wave < S::WAVES; wave++)
        to_floats(c[wave], sum[wave]);
}

} // namespace moq::fp8_prefill

#endif
