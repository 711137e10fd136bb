/* Products of packed units of experts' W with rows of tokens on Hopper: a warpgroup turns the codes
 * of a piece of a step into operands in registers while the products of the piece before are under
 * way. Four lanes need the same scales; each makes a quarter of a step's, which come to the others
 * through shared memory. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_PRODUCTS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_PRODUCTS_H

#include "cuda/linear/sm90/nvfp4_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_nvfp4_copies.h"

namespace moq::moe_prefill {

/* What a thread multiplies: its ring, and where it puts the scales that it makes of a step and
 * where it finds those that it needs. */
typedef struct {
    nvfp4_prefill::consumer_pipeline pipeline;
    uint32_t made, needed;
} unit_reader;

/* A thread's reader. `units` and `scales` are where they begin in shared memory. */
template <class S>
static __device__ __forceinline__ unit_reader reader_of(const feed *f, uint32_t scales,
                                                        int stages) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int slab = S::mixed ? warp % 4 / 2 * S::box_slabs + warp / 4 * 2 + warp % 2 : warp;
    uint32_t unit = f->weights + slab / S::box_slabs * (S::weight_bytes / 2) +
                    slab % S::box_slabs * (S::box_units * MOQ_PACK_BYTES),
             of_warp = scales + warp * (2 * S::scales);
    uint32_t four = S::own_units == 1 ? lane / 2 * 4
                                      : S::unit_at(lane * S::own_units / 32) +
                                            lane % (32 / S::own_units) * (2 * S::own_units);
    return {{f->full, f->empty, wgmma_operand(f->x), unit + moq_pack_word_at(lane / 4, lane % 4, 0),
             unit + MOQ_PACK_SCALES + four, stages},
            kept(of_warp + lane * (S::own_units * 4)),
            kept(of_warp + lane / 4 * 16)};
}

/* Waits for a step, and makes a quarter of the scales that this lane and three others need. */
template <class S>
static __device__ __forceinline__ void open_step(const unit_reader *t, const pipeline_state *slot,
                                                 uint32_t to) {
    constexpr moq_nvfp4_type TYPE =
        S::type == nvfp4_prefill::AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
    nvfp4_prefill::await(&t->pipeline, slot);
    uint32_t from = t->pipeline.scales + (uint32_t)(slot->index * S::weight_bytes);
    if constexpr (S::own_units == 4) {
        uint2 eight = load_shared_pair(from);
        store_shared(
            to, {moq_nvfp4_scales<TYPE>(eight.x, false), moq_nvfp4_scales<TYPE>(eight.x, true),
                 moq_nvfp4_scales<TYPE>(eight.y, false), moq_nvfp4_scales<TYPE>(eight.y, true)});
    } else if constexpr (S::own_units == 2) {
        uint32_t four = load_shared_word(from);
        store_shared_pair(
            to, {moq_nvfp4_scales<TYPE>(four, false), moq_nvfp4_scales<TYPE>(four, true)});
    } else {
        uint32_t four = load_shared_word(from);
        store_shared_word(to, moq_nvfp4_scales<TYPE>(four >> threadIdx.x % 2 * 16, false));
    }
    __syncwarp();
}

/* Operands of some products of 16 columns. */
template <class S> struct piece_operands {
    uint32_t group[S::depth][4];
};

/* Codes and scales of a piece of a step, S::depth groups of a wave. */
template <class S> struct packed_piece {
    uint32_t word[S::depth], scale[S::depth];
};

/* `scales` is where they are of the first piece. */
template <class S>
static __device__ __forceinline__ packed_piece<S>
load_piece(const unit_reader *t, const pipeline_state *slot, uint32_t scales, int piece) {
    int unit = piece * S::depth / MOQ_PACK_GROUPS, first = piece * S::depth % MOQ_PACK_GROUPS;
    uint32_t from = t->pipeline.codes + (uint32_t)(slot->index * S::weight_bytes) +
                    S::unit_at(unit) + 4 * first;
    packed_piece<S> p;
    scales += unit * 128 + 4 * first;
    if constexpr (S::depth == 4) {
        *(uint4 *)p.word = load_shared(from);
        *(uint4 *)p.scale = load_shared(scales);
    } else {
        *(uint2 *)p.word = load_shared_pair(from);
        *(uint2 *)p.scale = load_shared_pair(scales);
    }
    return p;
}

template <class S>
static __device__ __forceinline__ void decode_piece(const packed_piece<S> *p,
                                                    piece_operands<S> *o) {
    constexpr moq_nvfp4_type TYPE =
        S::type == nvfp4_prefill::AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
#pragma unroll
    for (int s = 0; s < S::depth; s++)
        moq_nvfp4_fragment<TYPE>(p->word[s], p->scale[s], o->group[s]);
}

template <class S, int COUNT>
static __device__ __forceinline__ void multiply_medium(const uint32_t (&weights)[4], uint64_t rows,
                                                       float *sum) {
    float (&some)[COUNT] = *(float (*)[COUNT])sum;
    if constexpr (S::type == nvfp4_prefill::AS_BF16)
        wgmma_bf16(some, weights, rows);
    else
        wgmma_f16(some, weights, rows);
}

/* Queues the products of a piece. Of the operand of rows the low half tells where they are: a sum
 * of 64 bits would take more instructions. */
template <class S>
static __device__ __forceinline__ void queue_piece(const unit_reader *t, const pipeline_state *slot,
                                                   int piece, const piece_operands<S> *o,
                                                   float (&sum)[S::T / 2]) {
    uint32_t at = (uint32_t)t->pipeline.x + (uint32_t)(slot->index * (S::token_bytes / 16)) +
                  2 * (piece * S::depth % MOQ_PACK_GROUPS) +
                  piece * S::depth / MOQ_PACK_GROUPS % S::units * (S::panel_bytes / 16);
    uint64_t rest = t->pipeline.x >> 32 << 32;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::depth; s++, at += 2) {
        multiply_medium<S, S::part / 2>(o->group[s], rest | at, sum);
        if constexpr (S::part < S::T)
            multiply_medium<S, (S::T - S::part) / 2>(o->group[s], rest | (at + S::part * 8),
                                                     sum + S::part / 2);
    }
    wgmma_commit();
}

/* The products of these operands have ended: until here they stay in their registers. */
template <class S> static __device__ __forceinline__ void give_up(piece_operands<S> *o) {
#pragma unroll
    for (int i = 0; i < 4 * S::depth; i++)
        asm volatile("" : "+r"(o->group[i / 4][i % 4])::"memory");
}

/* Adds the products of a tile's steps: a piece is decoded under the products of the one
 * before. */
template <class S>
static __device__ __forceinline__ void
multiply(const unit_reader *t, int steps, pipeline_state *slot, float (&sum)[S::waves][S::T / 2]) {
    constexpr int PIECES = S::own_units * MOQ_PACK_GROUPS / S::depth;
    piece_operands<S> set[2] = {};
    pipeline_state before = *slot, next = *slot;
    uint32_t made = t->made, needed = t->needed;
    open_step<S>(t, slot, made);
    packed_piece<S> packed = load_piece<S>(t, slot, needed, 0);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        advance(&next, t->pipeline.stages);
        made ^= S::scales;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            piece_operands<S> *own = &set[piece % 2], *other = &set[1 - piece % 2];
            if (piece == PIECES - 1 && left > 1)
                open_step<S>(t, &next, made);
            decode_piece<S>(&packed, own);
            if (piece < PIECES - 1)
                packed = load_piece<S>(t, slot, needed, piece + 1);
            else if (left > 1)
                packed = load_piece<S>(t, &next, needed ^ S::scales, 0);
            queue_piece<S>(t, slot, piece, own, sum[piece * S::waves / PIECES]);
            wgmma_wait<1>(); /* the products of the piece before have ended */
            give_up<S>(other);
            if (piece == 0 && left < steps)
                nvfp4_prefill::release<S>(&t->pipeline, &before);
        }
        needed ^= S::scales;
        before = *slot;
        *slot = next;
    }
    wgmma_wait<0>();
    give_up<S>(&set[1]);
#pragma unroll
    for (int wave = 0; wave < S::waves; wave++)
        stay_here(sum[wave]);
    nvfp4_prefill::release<S>(&t->pipeline, &before);
}

} // namespace moq::moe_prefill

#endif
