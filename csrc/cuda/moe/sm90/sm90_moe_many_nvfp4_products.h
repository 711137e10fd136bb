/* Products of packed units of experts' W with rows of tokens on Hopper, as those of linears
 * (cuda/linear/sm90/sm90_nvfp4_many_products.h): a warpgroup turns the codes of a step into
 * operands in registers while the products of the step before are under way.
 *
 * Where gate and up are wanted together, a warp takes eight rows of a slab of gate and the same
 * eight of one of up, in the place of the upper and the lower eight rows of an operand. The fields
 * of a word's upper rows lie elsewhere than those of its lower ones; masks and factors say where,
 * so that all warps have the same code: two shifts and two multiplications more for 8 weights. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_PRODUCTS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_PRODUCTS_H

#include "cuda/linear/sm90/sm90_nvfp4_many_products.h"
#include "cuda/moe/sm90/sm90_moe_many_nvfp4_tile.h"

namespace moq::moe_many {

/* Where the fields of the rows that a warp takes of a slab lie in a word, the lower eight rows or
 * the upper ones: of its first pair of columns and of its second; and their scales. */
typedef struct {
    uint32_t shift, first, first_factor, second, second_factor, scales;
} slab_half;

template <nvfp4_many::operand_type TYPE>
static __device__ __forceinline__ slab_half half_of(int upper) {
    if (TYPE == nvfp4_many::AS_F16)
        return upper ? slab_half{4, 0x10381038u, 8 + 64, 0, 1, 0x7351}
                     : slab_half{2, 0x81c081c0u, 1 + 8, 0, 512, 0x6240};
    return upper ? slab_half{3, 0x02070207u, 64, 0x05c005c0u, 1 + 32, 0x7351}
                 : slab_half{0, 0x81c081c0u, 1, 0x40074007u, 2 + 64, 0x6240};
}

/* The two pairs of a word as moq_nvfp4_codes has them. In float16 a sign and a magnitude of the
 * second pair would meet in one multiplication. */
template <nvfp4_many::operand_type TYPE>
static __device__ __forceinline__ void codes_of_half(uint32_t word, const slab_half *h,
                                                     uint32_t *first, uint32_t *second) {
    const uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x0e000e00u, OF_BF16 = 0x81c081c0u;
    if (TYPE == nvfp4_many::AS_F16) {
        *first = (word & h->first) * h->first_factor & (SIGN | MAGNITUDE);
        *second = (word * h->second_factor & MAGNITUDE) | (word * h->shift & SIGN);
    } else {
        word >>= h->shift;
        *first = (word & h->first) * h->first_factor;
        *second = (word & h->second) * h->second_factor & OF_BF16;
    }
}

/* What a thread multiplies: its ring; in large tiles, of gate and up the rows of its warp; in small
 * ones, where it puts the scales that it makes of a step, four of two groups of rows g and g + 8,
 * and where it finds those that it needs. */
typedef struct {
    nvfp4_many::consumer_ring ring;
    slab_half half;
    uint32_t made, needed;
} unit_reader;

template <class S>
static __device__ __forceinline__ void decode_halves(const unit_reader *t, const ring_place *slot,
                                                     nvfp4_many::operand_unit *o) {
    constexpr moq_nvfp4_type TYPE = S::type == nvfp4_many::AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
    constexpr uint32_t UP = S::weight_bytes / 2;
    uint32_t codes = t->ring.codes + (uint32_t)(slot->index * S::weight_bytes);
    uint32_t scales = t->ring.scales + (uint32_t)(slot->index * S::weight_bytes);
    nvfp4_many::await(&t->ring, slot);
    uint4 gate = load_shared(codes), up = load_shared(codes + UP);
    uint2 gate_scales = load_shared_pair(scales), up_scales = load_shared_pair(scales + UP);
    uint32_t both[2] = {__byte_perm(gate_scales.x, up_scales.x, t->half.scales),
                        __byte_perm(gate_scales.y, up_scales.y, t->half.scales)};
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++) {
        uint32_t scale = moq_nvfp4_scales<TYPE>(both[s / 2], s % 2), *to = o->group[s];
        codes_of_half<S::type>((&gate.x)[s], &t->half, &to[0], &to[2]);
        codes_of_half<S::type>((&up.x)[s], &t->half, &to[1], &to[3]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[i] = moq_nvfp4_multiply<TYPE>(to[i], moq_nvfp4_twice(scale, i % 2));
    }
}

template <class S>
static __device__ __forceinline__ void decode_step(const unit_reader *t, const ring_place *slot,
                                                   nvfp4_many::operand_unit *o) {
    if constexpr (S::halves)
        decode_halves<S>(t, slot, o);
    else
        nvfp4_many::decode<S>(&t->ring, slot, o);
}

/* Queues the products of a step. */
template <class S>
static __device__ __forceinline__ void queue_products(const unit_reader *t, const ring_place *slot,
                                                      const nvfp4_many::operand_unit *o,
                                                      float (&sum)[S::T / 2]) {
    uint64_t x = t->ring.x + (uint32_t)(slot->index * (S::token_bytes / 16));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++)
#pragma unroll
        for (int begin = 0; begin < S::T; begin += S::part) {
            float (&some)[S::part / 2] = *(float (*)[S::part / 2])(sum + begin / 2);
            if constexpr (S::type == nvfp4_many::AS_BF16)
                wgmma_bf16(some, o->group[s], x + 2 * s + begin * 8);
            else
                wgmma_f16(some, o->group[s], x + 2 * s + begin * 8);
        }
    wgmma_commit();
}

/* Queues the products of a step behind those of the one before, whose end it waits for. */
template <class S>
static __device__ __forceinline__ void
follow(const unit_reader *t, ring_place *slot, ring_place *before, bool first,
       const nvfp4_many::operand_unit *o, float (&sum)[S::T / 2]) {
    queue_products<S>(t, slot, o, sum);
    if (!first) {
        wgmma_wait<1>();
        nvfp4_many::release<S>(&t->ring, before);
    }
    *before = *slot;
    advance(slot, t->ring.stages);
}

/* Adds the products of a large tile's steps. */
template <class S>
static __device__ __forceinline__ void multiply(const unit_reader *t, int steps, ring_place *slot,
                                                float (&sum)[S::T / 2]) {
    nvfp4_many::operand_unit even, odd;
    ring_place before = *slot;
#pragma unroll 1
    for (int left = steps;; left -= 2) {
        decode_step<S>(t, slot, &even);
        follow<S>(t, slot, &before, left == steps, &even, sum);
        if (left == 1)
            break;
        decode_step<S>(t, slot, &odd);
        follow<S>(t, slot, &before, false, &odd, sum);
        if (left == 2)
            break;
    }
    wgmma_wait<0>();
    stay_here(sum);
    nvfp4_many::release<S>(&t->ring, &before);
}

/* ---- small tiles: a warpgroup has two waves, with sums of their own ---- */

/* Waits for a step, and makes a quarter of the scales that this lane and three others need. */
template <class S>
static __device__ __forceinline__ void open_step(const unit_reader *t, const ring_place *slot,
                                                 uint32_t to) {
    constexpr moq_nvfp4_type TYPE = S::type == nvfp4_many::AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
    nvfp4_many::await(&t->ring, slot);
    uint32_t four = load_shared_word(t->ring.scales + (uint32_t)(slot->index * S::weight_bytes));
    store_shared_pair(to,
                      {moq_nvfp4_scales<TYPE>(four, false), moq_nvfp4_scales<TYPE>(four, true)});
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
static __device__ __forceinline__ packed_piece<S> load_piece(const unit_reader *t,
                                                             const ring_place *slot,
                                                             uint32_t scales, int piece) {
    int wave = piece * S::depth / MOQ_PACK_GROUPS, first = piece * S::depth % MOQ_PACK_GROUPS;
    uint32_t from = t->ring.codes + (uint32_t)(slot->index * S::weight_bytes) +
                    wave * (S::weight_bytes / 2) + 4 * first;
    packed_piece<S> p;
    scales += wave * (SCALES_OF_STEP / 2) + 4 * first;
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
    constexpr moq_nvfp4_type TYPE = S::type == nvfp4_many::AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
#pragma unroll
    for (int s = 0; s < S::depth; s++)
        moq_nvfp4_fragment<TYPE>(p->word[s], p->scale[s], o->group[s]);
}

/* Queues the products of a piece. Of the operand of rows the low half tells where they are: a sum of
 * 64 bits would take more instructions. */
template <class S>
static __device__ __forceinline__ void queue_piece(const unit_reader *t, const ring_place *slot,
                                                   int piece, const piece_operands<S> *o,
                                                   float (&sum)[S::T / 2]) {
    uint32_t at = (uint32_t)t->ring.x + (uint32_t)(slot->index * (S::token_bytes / 16)) +
                  2 * (piece * S::depth % MOQ_PACK_GROUPS);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::depth; s++) {
        uint64_t x = t->ring.x >> 32 << 32 | (at + 2 * s);
        if constexpr (S::type == nvfp4_many::AS_BF16)
            wgmma_bf16(sum, o->group[s], x);
        else
            wgmma_f16(sum, o->group[s], x);
    }
    wgmma_commit();
}

/* The products of these operands have ended: until here they stay in their registers. */
template <class S> static __device__ __forceinline__ void give_up(piece_operands<S> *o) {
#pragma unroll
    for (int i = 0; i < 4 * S::depth; i++)
        asm volatile("" : "+r"(o->group[i / 4][i % 4])::"memory");
}

/* Adds the products of a small tile's steps: a piece is decoded under the products of the one
 * before. */
template <class S>
static __device__ __forceinline__ void multiply_waves(const unit_reader *t, int steps,
                                                      ring_place *slot,
                                                      float (&sum)[2][S::T / 2]) {
    constexpr int PIECES = 2 * MOQ_PACK_GROUPS / S::depth;
    piece_operands<S> set[2] = {};
    ring_place before = *slot, next = *slot;
    uint32_t made = t->made, needed = t->needed;
    open_step<S>(t, slot, made);
    packed_piece<S> packed = load_piece<S>(t, slot, needed, 0);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        advance(&next, t->ring.stages);
        made ^= SCALES_OF_STEP;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            piece_operands<S> *own = &set[piece % 2], *other = &set[1 - piece % 2];
            if (piece == PIECES - 1 && left > 1)
                open_step<S>(t, &next, made);
            decode_piece<S>(&packed, own);
            if (piece < PIECES - 1)
                packed = load_piece<S>(t, slot, needed, piece + 1);
            else if (left > 1)
                packed = load_piece<S>(t, &next, needed ^ SCALES_OF_STEP, 0);
            queue_piece<S>(t, slot, piece, own, sum[piece * 2 / PIECES]);
            wgmma_wait<1>(); /* the products of the piece before have ended */
            give_up<S>(other);
            if (piece == 0 && left < steps)
                nvfp4_many::release<S>(&t->ring, &before);
        }
        needed ^= SCALES_OF_STEP;
        before = *slot;
        *slot = next;
    }
    wgmma_wait<0>();
    give_up<S>(&set[1]);
    stay_here(sum[0]);
    stay_here(sum[1]);
    nvfp4_many::release<S>(&t->ring, &before);
}

} // namespace moq::moe_many

#endif
