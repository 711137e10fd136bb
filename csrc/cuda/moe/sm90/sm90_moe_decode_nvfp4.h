/* NVFP4 weights for the kernels of experts with few tokens on Hopper: what a lane asks for, columns
 * of x, and the products of a stage (sm90_moe_decode_kernels.h, sm90_moe_decode_split_k.h). What
 * bounds them is in the head of sm90_moe_nvfp4_decode.cu. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_NVFP4_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_NVFP4_H

#include "core/nvfp4_packed.h"
#include "cuda/choice/moe_decode.h"
#include "cuda/device/nvfp4_products.h"
#include "cuda/moe/sm90/sm90_moe_decode_split_k.h"

namespace moq::moe_decode {

#define X_BLOCK (2 * MOQ_PACK_K) /* bytes of a token in a block of K */

/* COUNT blocks of K of a slab, whose units follow each other `unit` bytes behind the places, each
 * with sums of its own, so that products that add to the same sums do not follow each other. As
 * moq_multiply_units. */
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
                moq_nvfp4_product<TYPE>(sum[i], w, v[0], v[1]);
            }
        }
    }
}

/* multiply_columns of BLOCKS blocks; the sum of all. */
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
    static constexpr bool scaled_tokens = false;
    /* as moq_multiply_units takes them */
    static constexpr int blocks = stage_blocks, tiles = 1;
    static constexpr moq_nvfp4_type type = TYPE;

    typedef const uint8_t *target; /* in the first slab */
    typedef moq_unit_places places;
    typedef struct {
        uint4 part[2 * stage_blocks];
    } columns;

    static __device__ __forceinline__ void aim(const warp_parts *p, const walk &at, int expert,
                                               target *t) {
        const stack *w = &p->a->w;
        *t = w->weight + expert * w->expert_bytes +
             ((int64_t)(p->slab + at.row) * w->blocks + at.block) * MOQ_PACK_BYTES;
    }

    /* The next slab of an expert follows the last block of this one. */
    static __device__ __forceinline__ void fill(const warp_parts *p, const walk &, target *t,
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

    static __device__ __forceinline__ places places_of(const warp_parts *p) {
        places at = moq_unit_places_of(p->pipeline, p->lane);
#pragma unroll
        for (int i = 0; i < 4; i++)
            find_now(at.word[i]);
        find_now(at.scale);
        return at;
    }

    static __device__ __forceinline__ void load_block(const uint8_t *from, int i, columns *x) {
        x->part[2 * i] = load_part(from + i * X_BLOCK);
        x->part[2 * i + 1] = load_part(from + i * X_BLOCK + 16);
    }

    static __device__ __forceinline__ const uint8_t *columns_at(const warp_parts *p,
                                                                const column *c, int block) {
        return c->row + block * X_BLOCK + p->lane % 4 * 32;
    }

    static __device__ __forceinline__ void load(const warp_parts *p, const column *c, int,
                                                int block, int count, columns *x) {
#pragma unroll
        for (int i = 0; i < stage_blocks; i++)
            if (i < count)
                load_block(columns_at(p, c, block), i, x);
    }

    /* x of the next stage is asked for first. */
    template <bool UP>
    static __device__ __forceinline__ void multiply(const warp_parts *p, const places &at,
                                                    const stage_view &v, columns *x,
                                                    float (&sum)[SLABS][1][4]) {
        columns own = *x;
        load(p, &v.next, 0, v.next_block, v.next_blocks, x);
        mbarrier_wait(v.bar, v.parity);
        if (UP && p->a->weights_on_input)
            weigh<2 * stage_blocks>(own.part, dtype, v.own.weight);
#pragma unroll
        for (int i = 0; i < stage_blocks; i++)
            if (i < v.blocks)
                multiply_block(at, v.stage + i * MOQ_PACK_BYTES, &own.part[2 * i], sum);
    }

    static __device__ __forceinline__ void
    multiply_block(const places &at, uint32_t unit, const uint4 *x, float (&sum)[SLABS][1][4]) {
        const uint4 part[1][2] = {{x[0], x[1]}};
        if constexpr (SLABS == 1) {
            moq_multiply_units<nvfp4, 1>(at, unit, part, sum);
        } else {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab += 2)
                moq_multiply_units<nvfp4, 2>(at, unit + slab * slab_bytes, part,
                                             (float (&)[2][1][4])sum[slab]);
        }
    }

    static __device__ __forceinline__ float factor_of_expert(const stack *, int) {
        return MOQ_NVFP4_FACTOR;
    }
};

/* With slices of BLOCKS blocks of K. */
template <int SLABS, int BLOCKS, moq_nvfp4_type TYPE> struct nvfp4_split_k : nvfp4<SLABS, TYPE> {
    typedef nvfp4<SLABS, TYPE> base;
    static constexpr int blocks = BLOCKS, stage_blocks = BLOCKS, block_bytes = MOQ_PACK_BYTES;

    typedef const uint8_t *split_target;
    typedef struct {
        uint4 part[2 * BLOCKS];
    } split_columns;
    typedef split_columns raw_columns;

    static __device__ __forceinline__ void aim_split(const warp_parts *p, int expert, int slab,
                                                     int begin, split_target *t) {
        const stack *w = &p->a->w;
        *t = w->weight + expert * w->expert_bytes +
             ((int64_t)slab * w->blocks + begin) * MOQ_PACK_BYTES;
    }

    static __device__ __forceinline__ void
    fill_split_stage(const warp_parts *p, const split_target *t, uint32_t to, uint32_t bar) {
        mbarrier_expect(bar, BLOCKS * MOQ_PACK_BYTES);
        copy_bytes_once(to, *t, BLOCKS * MOQ_PACK_BYTES, bar, p->policy);
    }

    static __device__ __forceinline__ float scale_of_column(const warp_parts *, const column *) {
        return 1;
    }

    static __device__ __forceinline__ void load_raw(const warp_parts *p, const column *c, int begin,
                                                    int nominal, raw_columns *x) {
        const uint8_t *from = base::columns_at(p, c, begin);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            x->part[2 * i] = load_part(from + i * X_BLOCK);
            x->part[2 * i + 1] = load_part(from + i * X_BLOCK + 16);
        }
        if (begin == nominal)
            return;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            if (begin + i < nominal)
                x->part[2 * i] = x->part[2 * i + 1] = make_uint4(0, 0, 0, 0);
    }

    template <bool UP>
    static __device__ __forceinline__ void make_columns(const warp_parts *p, const column *c,
                                                        const raw_columns *raw, split_columns *x) {
        *x = *raw;
        if (UP && p->a->weights_on_input)
            weigh<2 * BLOCKS>(x->part, base::dtype, c->weight);
    }

    static __device__ __forceinline__ void multiply_stage(const typename base::places &at,
                                                          const split_stage *stage,
                                                          const split_columns &x, int,
                                                          const split_target &, float (&sum)[4]) {
        multiply_units<TYPE, BLOCKS>(at, stage->at, x.part, sum);
    }
};

static inline void describe_packed(stack *w) {
    w->blocks = w->columns / MOQ_PACK_K;
    w->slab_bytes = w->blocks * MOQ_PACK_BYTES;
    w->expert_bytes = moq_pack_slabs(w->rows) * w->blocks * MOQ_PACK_BYTES;
}

} // namespace moq::moe_decode

#endif
