/* Operands of e4m3 from packed NVFP4 weights, for the linear of many tokens with FP8 products on
 * Hopper (sm90_nvfp4_fp8_prefill.cu): one or two warpgroups fold block scales into codes and write
 * them to shared memory, where two others take them to registers and multiply. What the codes are:
 * nvfp4_fold.h. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_FP8_FOLD_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_FP8_FOLD_H

#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/sm90_nvfp4_prefill_tile.h"

namespace moq::nvfp4_fp8_prefill {

using namespace nvfp4_prefill;

#define UNIT_BYTES 1024 /* of the operand that a unit becomes */

/* Barriers of the stages of the ring that is multiplied from, each with tokens and operands: tokens
 * are there, operands are there, both may be replaced. */
typedef struct {
    uint32_t tokens, operands, empty;
} stage_barriers;

/* The powers of two of rows g and g + 8 of a slab. */
static __device__ __forceinline__ uint32_t fetch_folds(const gemm_args *a, int slab) {
    int n = slab * MOQ_PACK_ROWS + threadIdx.x % 32 / 4, last = a->n - 1;
    return moq_pack_folds(a->fold_scale[min(n, last)], a->fold_scale[min(n + 8, last)]);
}

/* What a folding warp has: some units of each step, one behind the other, and `other` where the
 * other block of a pair has its ring. */
template <class S> struct folder {
    static constexpr int UNITS = S::slabs * S::units / (S::folders / 32);
    static constexpr int SLABS_OF = UNITS > S::units ? UNITS / S::units : 1;
    uint32_t packed, operands, other; /* its units in the first stages */
    uint32_t posted;                  /* the other block's barrier */
};

/* Folds the stage of packed weights at `from` into the stage of operands at `to`. */
template <class S>
static __device__ __forceinline__ void fold_stage(const folder<S> *f, const uint32_t *folds,
                                                  int from, int to) {
    uint32_t unit = f->packed + (uint32_t)(from * S::weight_bytes);
    uint32_t at = (uint32_t)(to * (SLABS * S::units * UNIT_BYTES)) + threadIdx.x % 32 * 16;
    packed_unit next = load_unit(unit);
#pragma unroll
    for (int i = 0; i < f->UNITS; i++) {
        packed_unit now = next;
        uint32_t a[2][4];
        if (i + 1 < f->UNITS)
            next = load_unit(unit + (i + 1) * MOQ_PACK_BYTES);
        moq_fold_unit(now.codes, now.scales, folds[i / S::units], a);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 four = make_uint4(a[j][0], a[j][1], a[j][2], a[j][3]);
            store_shared(f->operands + at + i * UNIT_BYTES + j * 512, four);
            if (S::share_weights)
                send_words(f->other + at + i * UNIT_BYTES + j * 512, four, f->posted + 8u * to);
        }
    }
}

/* Folds the weights of all steps of a block. */
template <class S>
static __device__ __forceinline__ void fold_weights(const gemm_args *a,
                                                    const producer_pipeline *packed,
                                                    const stage_barriers *barriers, folder<S> f) {
    int warp = (threadIdx.x - CONSUMERS) / 32, lane = threadIdx.x % 32;
    uint32_t sent = S::share_weights && warp == 0 ? S::slabs * S::units * UNIT_BYTES : 0;
    pipeline_state from = {0, 0}, to = {0, 0};
    for (work w = begin<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        int slab = place_of<S>(a, w.number, packed->rank).row / MOQ_PACK_ROWS +
                   (S::share_weights ? packed->rank * S::slabs : 0) + warp * f.UNITS / S::units;
        uint32_t folds[f.SLABS_OF];
#pragma unroll
        for (int i = 0; i < f.SLABS_OF; i++)
            folds[i] = fetch_folds(a, slab + i);
#pragma unroll 1
        for (int step = w.first; step < w.end; step++) {
            mbarrier_wait(packed->full + 8u * from.index, from.parity);
            mbarrier_wait(barriers->empty + 8u * to.index, to.parity ^ 1);
            fold_stage<S>(&f, folds, from.index, to.index);
            warp_releases<false>(packed->empty + 8u * from.index);
            if (lane == 0)
                mbarrier_expect(barriers->operands + 8u * to.index, sent);
            else if (WARP_ARRIVALS > 1)
                mbarrier_arrive(barriers->operands + 8u * to.index);
            advance(&from, packed->stages);
            advance(&to, a->stages);
        }
    }
}

/* ---- products ---- */

/* What a thread multiplies: its operand and all tokens, in the first stage. */
typedef struct {
    stage_barriers barriers;
    uint32_t operands;
    uint64_t x;
    int stages;
} consumer_pipeline;

/* An operand of a unit. */
typedef struct {
    uint32_t part[2][4];
} operand_unit;

static __device__ __forceinline__ void await(const consumer_pipeline *t,
                                             const pipeline_state *slot) {
    mbarrier_wait(t->barriers.operands + 8u * slot->index, slot->parity);
    mbarrier_wait(t->barriers.tokens + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t,
                                               const pipeline_state *slot) {
    warp_releases<S::pair>(t->barriers.empty + 8u * slot->index);
}

template <class S>
static __device__ __forceinline__ void take(const consumer_pipeline *t, const pipeline_state *slot,
                                            int unit, operand_unit *o) {
    uint32_t at = (uint32_t)(slot->index * (SLABS * S::units * UNIT_BYTES) + unit * UNIT_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 four = load_shared(t->operands + at + i * 512);
        o->part[i][0] = four.x;
        o->part[i][1] = four.y;
        o->part[i][2] = four.z;
        o->part[i][3] = four.w;
    }
}

/* c = or += products of a unit with a part of the tokens, as many as c has. */
template <class S, int SUMS>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const pipeline_state *slot,
                                             int unit, int part, const operand_unit *o, int add,
                                             float (&c)[SUMS]) {
    uint64_t x =
        t->x + (uint32_t)(slot->index * (S::token_bytes / 16) + part * (SUMS * 16) + unit * 4);
    wgmma_fence();
    wgmma_e4m3(c, o->part[0], x, add);
    wgmma_e4m3(c, o->part[1], x + 2, 1);
    wgmma_commit();
}

/* Products of a part of the tokens end, and are added to the sums. */
template <class S>
static __device__ __forceinline__ void promote(float (&sum)[S::T / 2], int part,
                                               float (&c)[S::sums]) {
    wgmma_wait<0>();
    stay_here(c);
#pragma unroll
    for (int i = 0; i < S::sums; i++)
        sum[part * S::sums + i] += c[i];
}

/* Adds products of some steps to the sums, where there are many tokens by halves of them: what of a
 * step's 128 columns is in the tensor cores, whose sums of e4m3 keep about 14 bits, is added to
 * float32 sums while the other warpgroup has the tensor cores. The operand of a step's first unit
 * is in `even` when it begins. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, int steps,
                                                pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    float c[S::sums];
    await(t, slot);
    take<S>(t, slot, 0, &even);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        pipeline_state next = *slot;
        advance(&next, t->stages);
        issue<S>(t, slot, 0, 0, &even, 0, c);
        take<S>(t, slot, 1, &odd);
        issue<S>(t, slot, 1, 0, &odd, 1, c);
        if (S::splits_of_tokens == 2) {
            promote<S>(sum, 0, c);
            issue<S>(t, slot, 0, 1, &even, 0, c);
            issue<S>(t, slot, 1, 1, &odd, 1, c);
        }
        if (step + 1 < steps) {
            await(t, &next);
            wgmma_wait<1>();
            take<S>(t, &next, 0, &even);
        }
        promote<S>(sum, S::splits_of_tokens - 1, c);
        release<S>(t, slot);
        stay_here(sum);
        *slot = next;
    }
}

/* The sums of the first or the second half of the tokens. */
template <class S>
static __device__ __forceinline__ float (&half_of(float (&sum)[S::T / 2], int half))
    [S::T / 4] { return *(float (*)[S::T / 4])(sum + half * (S::T / 4)); }

/* multiply where sums stay in the tensor cores. */
template <class S>
static __device__ __forceinline__ void multiply_fast(const consumer_pipeline *t, int steps,
                                                     pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    pipeline_state before = *slot;
    await(t, slot);
    take<S>(t, slot, 0, &even);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        issue<S>(t, slot, 0, 0, &even, 1, half_of<S>(sum, 0));
        issue<S>(t, slot, 0, 1, &even, 1, half_of<S>(sum, 1));
        if (step > 0) {
            wgmma_wait<2>();
            release<S>(t, &before);
        }
        take<S>(t, slot, 1, &odd);
        issue<S>(t, slot, 1, 0, &odd, 1, half_of<S>(sum, 0));
        issue<S>(t, slot, 1, 1, &odd, 1, half_of<S>(sum, 1));
        wgmma_wait<2>();
        before = *slot;
        advance(slot, t->stages);
        if (step + 1 < steps) {
            await(t, slot);
            take<S>(t, slot, 0, &even);
        }
    }
    wgmma_wait<0>();
    stay_here(sum);
    release<S>(t, &before);
}

} // namespace moq::nvfp4_fp8_prefill

#endif
