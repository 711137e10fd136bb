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

/* What a thread multiplies: its ring, and of gate and up the rows of its warp. */
typedef struct {
    nvfp4_many::consumer_ring ring;
    slab_half half;
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

/* Queues the products of a step behind those of the one before, whose end it waits for. */
template <class S>
static __device__ __forceinline__ void
follow(const unit_reader *t, ring_place *slot, ring_place *before, bool first,
       const nvfp4_many::operand_unit *o, float (&sum)[S::T / 2]) {
    uint64_t x = t->ring.x + (uint32_t)(slot->index * (S::token_bytes / 16));
    let_products_see<S>();
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
    if (!first) {
        wgmma_wait<1>();
        nvfp4_many::release<S>(&t->ring, before);
    }
    *before = *slot;
    advance(slot, t->ring.stages);
}

/* Adds the products of a tile's steps. */
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

} // namespace moq::moe_many

#endif
