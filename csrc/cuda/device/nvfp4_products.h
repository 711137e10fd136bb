/* Products of packed NVFP4 weights in shared memory with up to 16 tokens in registers: a warp
 * multiplies units of a block of K (core/nvfp4_packed.h) by tiles of 8 tokens.
 *
 * Lane (g, t) reads the words of group t of rows g and g + 8, so that a block scale is decoded once
 * for its 16 weights. It has the same group's columns of token g of each tile of x, 16 t to 16 t +
 * 15 of the block, as two vectors of 16 bytes. */
#ifndef MOQ_CUDA_DEVICE_NVFP4_PRODUCTS_H
#define MOQ_CUDA_DEVICE_NVFP4_PRODUCTS_H

#include "core/nvfp4_packed.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"

namespace moq {

/* Addresses that a lane reads in a unit: its words of 4 vectors, and its scales. */
struct moq_unit_places {
    uint32_t word[4], scale;
};

static __device__ __forceinline__ moq_unit_places moq_unit_places_of(uint32_t unit, int lane) {
    moq_unit_places p;
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        p.word[i] = unit + (uint32_t)moq_pack_word_at(g, i, t);
    p.scale = unit + (uint32_t)moq_pack_scale_at(g, t);
    return p;
}

/* Adds a product of m16n8k16 in the type of the activations. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ void moq_mma_16_bits(float (&sum)[4], const uint32_t (&w)[4],
                                                       uint32_t x0, uint32_t x1) {
    const uint32_t x[2] = {x0, x1};
    if (TYPE == MOQ_NVFP4_F16)
        mma_f16(sum, w, x);
    else
        mma_bf16(sum, w, x);
}

/* Multiplies COUNT slabs, one or two, by a block of K; `unit` bytes lie between the places and the
 * first slab, S::blocks units between slabs. P has the members of moq_unit_places, S the tiles and
 * the type of x.
 *
 * Words 0 and 1 have columns 0..3 and 8..11 of the lane's group, words 2 and 3 the rest, so that
 * two neighbouring words of x belong to each step. Slabs take turns, so that consecutive products
 * add to different sums. */
template <class S, int COUNT, class P>
static __device__ __forceinline__ void moq_multiply_units(const P &p, uint32_t unit,
                                                          const uint4 (&x)[S::tiles][2],
                                                          float (&sum)[COUNT][S::tiles][4]) {
    constexpr uint32_t slab = S::blocks * MOQ_PACK_BYTES;
    uint32_t word[COUNT][4], scales[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        scales[i] = load_shared_half(p.scale + unit + i * slab);
#pragma unroll
        for (int j = 0; j < 4; j++)
            word[i][j] = load_shared_word(p.word[j] + unit + i * slab);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        scales[i] = moq_nvfp4_scales<S::type>(scales[i], false);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t a[COUNT][4], b[COUNT][4];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            moq_nvfp4_fragment<S::type>(word[i][j], scales[i], a[i]);
            moq_nvfp4_fragment<S::type>(word[i][j + 1], scales[i], b[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int tile = 0; tile < S::tiles; tile++) {
                const uint32_t *v = &x[tile][half].x + j;
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    const uint32_t w[4] = {a[i][2 * half], a[i][2 * half + 1], b[i][2 * half],
                                           b[i][2 * half + 1]};
                    moq_mma_16_bits<S::type>(sum[i][tile], w, v[0], v[1]);
                }
            }
        }
    }
}

} // namespace moq

#endif
