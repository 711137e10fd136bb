/* Experts with NVFP4 weights for few tokens on Hopper in strips: sm90_moe_decode_fused.h says what
 * is computed and how. A stage is a slab of the first product by all of K, one copy, or slabs of
 * the second by a block of K, units that lie apart, a box. */
#include "cuda/moe/sm90/sm90_moe_decode_fused_sum.h"
#include "cuda/moe/sm90/sm90_moe_decode_nvfp4.h"
#include "cuda/moe/sm90/sm90_moe_fused.h"

namespace moq::moe_decode {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)

/* With slices of BLOCKS blocks of K in the first product. */
template <int BLOCKS, moq_nvfp4_type TYPE> struct nvfp4_fused : nvfp4_split_k<1, BLOCKS, TYPE> {
    typedef nvfp4_split_k<1, BLOCKS, TYPE> base;
    static constexpr int stage_bytes = MOQ_MOE_NVFP4_FUSED_STAGE;
    static_assert(FUSED_SPLITS * BLOCKS * MOQ_PACK_BYTES <= stage_bytes &&
                      FUSED_SPLITS * STAGE_SLABS * MOQ_PACK_BYTES <= stage_bytes,
                  "a stage has both");

    typedef struct {
        uint4 part[1][2];
    } fused_columns;

    /* A stage of the second product for moq_multiply_units. */
    struct down_units {
        static constexpr int blocks = 1, tiles = 1;
        static constexpr moq_nvfp4_type type = TYPE;
    };

    static __device__ __forceinline__ void fill_up(const fused_args *a, int expert, int slab,
                                                   uint32_t to, uint32_t bar) {
        const stack *w = &a->common.w;
        uint32_t bytes = (uint32_t)(w->blocks * MOQ_PACK_BYTES);
        mbarrier_expect(bar, bytes);
        copy_bytes_once(to, w->weight + expert * w->expert_bytes + (int64_t)slab * bytes, bytes,
                        bar, policy_evict_first());
    }

    static __device__ __forceinline__ void fill_down(const fused_args *a, int expert, int slab,
                                                     int column, uint32_t to, uint32_t bar) {
        mbarrier_expect(bar, FUSED_SPLITS * STAGE_SLABS * MOQ_PACK_BYTES);
        copy_box_2d(to, &a->down_map, column * UNIT_WORDS,
                    expert * (int)moq_pack_slabs(a->down.rows) + slab, bar, policy_evict_first());
    }

    static __device__ __forceinline__ void
    multiply_up(const fused_share *s, const typename base::places &at, const split_stage *stage,
                const typename base::split_columns &x, float (&sum)[4]) {
        multiply_units<TYPE, BLOCKS>(at, stage->at + (uint32_t)(s->k.begin * MOQ_PACK_BYTES),
                                     x.part, sum);
    }

    static __device__ __forceinline__ void load_g(const warp_parts *p, uint32_t g,
                                                  fused_columns *x) {
        uint32_t from = g + (uint32_t)(p->lane / 4 * G_PITCH + p->lane % 4 * 32);
        x->part[0][0] = load_shared(from);
        x->part[0][1] = load_shared(from + 16);
    }

    static __device__ __forceinline__ void multiply_down(const fused_share *s,
                                                         const typename base::places &at,
                                                         const split_stage *stage,
                                                         const fused_columns &x, float (*sum)[4]) {
        uint32_t unit = stage->at + (uint32_t)(s->k.part * STAGE_SLABS * MOQ_PACK_BYTES);
#pragma unroll
        for (int i = 0; i < STAGE_SLABS; i += 2) {
            float two[2][1][4];
#pragma unroll
            for (int j = 0; j < 8; j++)
                two[j / 4][0][j % 4] = sum[i + j / 4][j % 4];
            moq_multiply_units<down_units, 2>(at, unit + i * MOQ_PACK_BYTES, x.part, two);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum[i + j / 4][j % 4] = two[j / 4][0][j % 4];
        }
    }
};

/* Kernels by what a slice has, which is MOQ_MOE_NVFP4_FUSED_SPLIT_K of moe_decode.h. */
template <moq_nvfp4_type TYPE, bool ALONE> static const void *fused_kernel(int split) {
#define BLOCKS(count)                                                                              \
    if (split == count)                                                                            \
        return (const void *)moe_decode_fused<nvfp4_fused<count, TYPE>, ALONE>;
    MOQ_MOE_NVFP4_FUSED_SPLIT_K(BLOCKS)
#undef BLOCKS
    return NULL;
}

template <moq_nvfp4_type TYPE> static const void *kernel_of(const moq_moe_fused *share) {
    return share->alone ? fused_kernel<TYPE, true>(share->split)
                        : fused_kernel<TYPE, false>(share->split);
}

moq_status launch_fused_nvfp4(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    fused_args a = fused_tiles_of(call, share);
    describe_packed(&a.common.w);
    describe_packed(&a.down);
    int64_t slabs = spec->experts * moq_pack_slabs(a.down.rows);
    MOQ_TRY(moq_tensor_map_words(&a.down_map, a.down.weight, slabs, a.down.blocks * UNIT_WORDS,
                                 FUSED_SPLITS * STAGE_SLABS, UNIT_WORDS, err));
    bool half = spec->w13.dtype == MOQ_DT_F16;
    const void *kernel = half ? kernel_of<MOQ_NVFP4_F16>(share) : kernel_of<MOQ_NVFP4_BF16>(share);
    return launch_fused(call, share, "NVFP4 experts", kernel, &a, MOQ_NVFP4_FACTOR, err);
}

} // namespace moq::moe_decode
