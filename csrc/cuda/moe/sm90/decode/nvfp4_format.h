/* NVFP4 weights in the decode kernels of experts on Hopper, exact products: up_down.h, split_k.h
 * and nvfp4_fused.cu say what is computed and how.
 *
 * Layout: packed weights (core/nvfp4_packed.h), 0.5625 bytes each. In the general form a stage is
 * four units, two blocks of K of two slabs or four of one, a bulk copy for each slab. With split-K
 * a stage is a slab by a warp's K range, one copy, and two blocks of K are multiplied in turn. In
 * the fused kernel a stage is a slab of the first product by all of K, one copy, or slabs of the
 * second by a block of K, units that lie apart, a box. Eight warps of 128 registers: sixteen of 64
 * had copies of half the size, and were slower at every number of tokens.
 *
 * Bound: memory and the decoder alike. A multiprocessor decodes a unit in 14 to 15 ns; the memory
 * of an H200 brings one in 17 (docs/lab/nvfp4-decode.md). Measured: docs/lab/experts-decode.md. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_NVFP4_FORMAT_H
#define MOQ_CUDA_MOE_SM90_DECODE_NVFP4_FORMAT_H

#include "core/nvfp4_packed.h"
#include "cuda/device/nvfp4_products.h"
#include "cuda/moe/sm90/decode/up_down.h"

namespace moq::moe_decode {

#define X_BLOCK (2 * MOQ_PACK_K) /* bytes of a token in a block of K */

/* Multiplies COUNT blocks of K of a slab, like moq_multiply_units. Their units lie `unit` bytes
 * behind the places; each has sums of its own, so that dependent products do not follow each
 * other. */
template <moq_nvfp4_type TYPE, int COUNT>
static __device__ __forceinline__ void multiply_columns(const moq_unit_places &at, uint32_t unit,
                                                        const uint4 *x, float (&sum)[2][4]) {
    uint32_t word[COUNT][4], scales[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        scales[i] = load_shared_half(at.scale + unit + i * MOQ_PACK_BYTES);
#pragma unroll
        for (int j = 0; j < 4; j++)
            word[i][j] = load_shared_word(at.word[j] + unit + i * MOQ_PACK_BYTES);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        scales[i] = moq_nvfp4_scales<TYPE>(scales[i], false);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t a[COUNT][4], b[COUNT][4];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            moq_nvfp4_fragment<TYPE>(word[i][j], scales[i], a[i]);
            moq_nvfp4_fragment<TYPE>(word[i][j + 1], scales[i], b[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const uint32_t *v = &x[2 * i + half].x + j;
                const uint32_t w[4] = {a[i][2 * half], a[i][2 * half + 1], b[i][2 * half],
                                       b[i][2 * half + 1]};
                moq_mma_16_bits<TYPE>(sum[i], w, v[0], v[1]);
            }
        }
    }
}

/* Returns in `sum` the products of BLOCKS blocks, by multiply_columns. */
template <moq_nvfp4_type TYPE, int BLOCKS>
static __device__ __forceinline__ void multiply_units(const moq_unit_places &at, uint32_t unit,
                                                      const uint4 *x, float (&sum)[4]) {
    float two[2][4] = {};
#pragma unroll
    for (int i = 0; i + 1 < BLOCKS; i += 2)
        multiply_columns<TYPE, 2>(at, unit + i * MOQ_PACK_BYTES, x + 2 * i, two);
    if constexpr (BLOCKS % 2 != 0)
        multiply_columns<TYPE, 1>(at, unit + (BLOCKS - 1) * MOQ_PACK_BYTES, x + 2 * (BLOCKS - 1),
                                  two);
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[i] = __fadd_rn(two[0][i], two[1][i]);
}

template <int SLABS, moq_nvfp4_type TYPE> struct nvfp4 {
    static constexpr int slabs = SLABS, stage_blocks = MOQ_MOE_NVFP4_DECODE_UNITS / SLABS;
    static constexpr int slab_bytes = stage_blocks * MOQ_PACK_BYTES;
    static constexpr int stage_bytes = SLABS * slab_bytes, alignment = 128;
    static constexpr moq_dtype dtype = TYPE == MOQ_NVFP4_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    static constexpr bool scaled_tokens = false, scaled_groups = false, coded = false;
    /* parameters of moq_multiply_units */
    static constexpr int blocks = stage_blocks, tiles = 1;
    static constexpr moq_nvfp4_type type = TYPE;

    typedef const uint8_t *target; /* address in the first slab */
    typedef moq_unit_places places;
    typedef struct {
        uint4 vector[2 * stage_blocks];
    } columns;

    static __device__ __forceinline__ void aim(const warp_state *p, const walk &at, int expert,
                                               target *t) {
        const stack *w = &p->a->w;
        *t = w->weight + expert * w->expert_bytes +
             ((int64_t)(p->slab + at.row) * w->blocks + at.block) * MOQ_PACK_BYTES;
    }

    /* Fills a stage. The next slab of an expert follows the last block of this one. */
    static __device__ __forceinline__ void fill(const warp_state *p, const walk &, target *t,
                                                int count, uint32_t to, uint32_t bar) {
        uint32_t bytes = (uint32_t)(count * MOQ_PACK_BYTES);
        if (is_elected()) {
            mbarrier_expect(bar, p->slabs * bytes);
#pragma unroll
            for (int i = 0; i < SLABS; i++)
                if (i < p->slabs)
                    copy_bytes_once(to + i * slab_bytes, *t + i * p->slab_pitch, bytes, bar,
                                    p->policy);
        }
        *t += bytes;
    }

    static __device__ __forceinline__ places places_of(const warp_state *p) {
        places at = moq_unit_places_of(p->pipeline, p->lane);
#pragma unroll
        for (int i = 0; i < 4; i++)
            find_now(at.word[i]);
        find_now(at.scale);
        return at;
    }

    static __device__ __forceinline__ void load_block(const uint8_t *from, int i, columns *x) {
        x->vector[2 * i] = load_vector(from + i * X_BLOCK);
        x->vector[2 * i + 1] = load_vector(from + i * X_BLOCK + 16);
    }

    static __device__ __forceinline__ const uint8_t *columns_at(const warp_state *p,
                                                                const column *c, int block) {
        return c->row + block * X_BLOCK + p->lane % 4 * 32;
    }

    static __device__ __forceinline__ void load(const warp_state *p, const column *c, int,
                                                int block, int count, columns *x) {
#pragma unroll
        for (int i = 0; i < stage_blocks; i++)
            if (i < count)
                load_block(columns_at(p, c, block), i, x);
    }

    /* Multiplies a stage; loads x of the next one first. */
    template <bool UP>
    static __device__ __forceinline__ void multiply(const warp_state *p, const places &at,
                                                    const stage_view &v, columns *x,
                                                    float (&sum)[SLABS][1][4]) {
        columns own = *x;
        load(p, &v.next, 0, v.next_block, v.next_blocks, x);
        mbarrier_wait(v.bar, v.parity);
        if (UP && p->a->weights_on_input)
            weigh<2 * stage_blocks>(own.vector, dtype, v.own.weight);
#pragma unroll
        for (int i = 0; i < stage_blocks; i++)
            if (i < v.blocks)
                multiply_block(at, v.stage + i * MOQ_PACK_BYTES, &own.vector[2 * i], sum);
    }

    static __device__ __forceinline__ void
    multiply_block(const places &at, uint32_t unit, const uint4 *x, float (&sum)[SLABS][1][4]) {
        const uint4 vector[1][2] = {{x[0], x[1]}};
        moq_multiply_units<nvfp4, SLABS>(at, unit, vector, sum);
    }

    static __device__ __forceinline__ float factor_of_expert(const stack *, int) {
        return MOQ_NVFP4_FACTOR;
    }
};

/* The format with split-K: a warp has BLOCKS blocks of K. */
template <int SLABS, int BLOCKS, moq_nvfp4_type TYPE> struct nvfp4_split_k : nvfp4<SLABS, TYPE> {
    typedef nvfp4<SLABS, TYPE> base;
    static constexpr int blocks = BLOCKS, stage_blocks = BLOCKS, block_bytes = MOQ_PACK_BYTES;

    typedef const uint8_t *split_target;
    typedef struct {
        uint4 vector[2 * BLOCKS];
    } split_columns;
    typedef split_columns raw_columns;

    static __device__ __forceinline__ void aim_split(const warp_state *p, int expert, int slab,
                                                     int begin, split_target *t) {
        const stack *w = &p->a->w;
        *t = w->weight + expert * w->expert_bytes +
             ((int64_t)slab * w->blocks + begin) * MOQ_PACK_BYTES;
    }

    static __device__ __forceinline__ void
    fill_split_stage(const warp_state *p, const split_target *t, uint32_t to, uint32_t bar) {
        mbarrier_expect(bar, BLOCKS * MOQ_PACK_BYTES);
        copy_bytes_once(to, *t, BLOCKS * MOQ_PACK_BYTES, bar, p->policy);
    }

    static __device__ __forceinline__ float scale_of_column(const warp_state *, const column *) {
        return 1;
    }

    static __device__ __forceinline__ void load_raw(const warp_state *p, const column *c, int begin,
                                                    int nominal, raw_columns *x) {
        const uint8_t *from = base::columns_at(p, c, begin);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            x->vector[2 * i] = load_vector(from + i * X_BLOCK);
            x->vector[2 * i + 1] = load_vector(from + i * X_BLOCK + 16);
        }
        if (begin == nominal)
            return;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            if (begin + i < nominal)
                x->vector[2 * i] = x->vector[2 * i + 1] = make_uint4(0, 0, 0, 0);
    }

    template <bool UP>
    static __device__ __forceinline__ void make_columns(const warp_state *p, const column *c,
                                                        const raw_columns *raw, split_columns *x) {
        *x = *raw;
        if (UP && p->a->weights_on_input)
            weigh<2 * BLOCKS>(x->vector, base::dtype, c->weight);
    }

    static __device__ __forceinline__ void multiply_stage(const typename base::places &at,
                                                          const split_stage *stage,
                                                          const split_columns &x, int,
                                                          const split_target &, float (&sum)[4]) {
        multiply_units<TYPE, BLOCKS>(at, stage->at, x.vector, sum);
    }
};

static inline void describe_packed(stack *w) {
    w->blocks = w->columns / MOQ_PACK_K;
    w->slab_bytes = w->blocks * MOQ_PACK_BYTES;
    w->expert_bytes = moq_pack_slabs(w->rows) * w->blocks * MOQ_PACK_BYTES;
}

} // namespace moq::moe_decode

#endif
