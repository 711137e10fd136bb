/* Products of the NVFP4 GEMM of Hopper for many tokens: a warpgroup turns a unit's codes into
 * operands in registers while the products of the unit before are under way. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_PRODUCTS_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_PRODUCTS_H

#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/sm90_nvfp4_prefill_tile.h"

namespace moq::nvfp4_prefill {

/* What a thread multiplies. */
typedef struct {
    uint32_t full, empty;
    uint64_t x;             /* operand in the first stage */
    uint32_t codes, scales; /* of its lane, in the first stage */
    int stages;
} consumer_pipeline;

/* A unit's operand of a thread, 4 registers for each group of 16 columns. */
typedef struct {
    uint32_t group[MOQ_PACK_GROUPS][4];
} operand_unit;

static __device__ __forceinline__ void await(const consumer_pipeline *t,
                                             const pipeline_state *slot) {
    mbarrier_wait(t->full + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t,
                                               const pipeline_state *slot) {
    warp_releases<S::pair>(t->empty + 8u * slot->index, S::pair ? rank_in_cluster() & ~1u : 0);
}

/* Waits for a stage and makes the operand of its unit. */
template <class S>
static __device__ __forceinline__ void decode(const consumer_pipeline *t,
                                              const pipeline_state *slot, operand_unit *o) {
    constexpr moq_nvfp4_type TYPE = S::type == AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
    uint32_t at = (uint32_t)(slot->index * S::weight_bytes);
    await(t, slot);
    packed_unit unit = {load_shared(t->codes + at), load_shared_pair(t->scales + at)};
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++)
        moq_nvfp4_fragment<TYPE>((&unit.codes.x)[s],
                                 moq_nvfp4_scales<TYPE>((&unit.scales.x)[s / 2], s % 2),
                                 o->group[s]);
}

/* Adds the products of a stage's unit. */
template <class S>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const pipeline_state *slot,
                                             const operand_unit *o, float (&sum)[S::T / 2]) {
    uint64_t x = t->x + (uint32_t)(slot->index * (S::token_bytes / 16));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++) {
        if constexpr (S::type == AS_BF16)
            wgmma_bf16(sum, o->group[s], x + 2 * s);
        else
            wgmma_f16(sum, o->group[s], x + 2 * s);
    }
    wgmma_commit();
}

/* Queues the products of a stage behind those of the one before, whose end it waits for. */
template <class S>
static __device__ __forceinline__ void follow(const consumer_pipeline *t, pipeline_state *slot,
                                              pipeline_state *before, bool first,
                                              const operand_unit *o, float (&sum)[S::T / 2]) {
    issue<S>(t, slot, o, sum);
    if (!first) {
        wgmma_wait<1>();
        release<S>(t, before);
    }
    *before = *slot;
    advance(slot, t->stages);
}

/* Adds the products of a tile's steps. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, int steps,
                                                pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    pipeline_state before = *slot;
    decode<S>(t, slot, &even);
#pragma unroll 1
    for (int step = 0;; step += 2) {
        follow<S>(t, slot, &before, step == 0, &even, sum);
        if (step + 1 == steps)
            break;
        decode<S>(t, slot, &odd);
        follow<S>(t, slot, &before, false, &odd, sum);
        if (step + 2 == steps)
            break;
        decode<S>(t, slot, &even);
    }
    wgmma_wait<0>();
    stay_here(sum);
    release<S>(t, &before);
}

} // namespace moq::nvfp4_prefill

#endif
