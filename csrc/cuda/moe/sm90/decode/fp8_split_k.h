/* FP8 weights with split-K in the decode kernels of experts on Hopper: fp8_format.h for the kernels
 * of split_k.h, which say what is computed, the layouts and tiles, and what bounds it. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_FP8_SPLIT_K_H
#define MOQ_CUDA_MOE_SM90_DECODE_FP8_SPLIT_K_H

#include "cuda/moe/sm90/decode/fp8_format.h"
#include "cuda/moe/sm90/decode/split_k.h"

namespace moq::moe_decode {

/* The format with split-K: a warp has BLOCKS blocks of K. */
template <int SLABS, int BLOCKS, moq_dtype DT, moq_input_mode MODE, bool CODED = false>
struct fp8_split_k : fp8<SLABS, DT, MODE, CODED> {
    typedef fp8<SLABS, DT, MODE, CODED> base;
    static constexpr bool scaled_groups = base::scaled_groups;
    static constexpr int blocks = BLOCKS, stage_blocks = 1, block_bytes = BOX;

    typedef struct {
        int row, column;
        float scale; /* block scales of W */
    } split_target;
    typedef struct {
        typename base::columns block[BLOCKS];
    } raw_columns;
    typedef struct {
        uint32_t code[BLOCKS][2][8]; /* as float16 */
        float scale[BLOCKS][2];      /* block scales of the lane's columns of the product */
    } split_columns;

    static __device__ __forceinline__ void aim_split(const warp_state *p, int expert, int slab,
                                                     int begin, split_target *t) {
        const stack *w = &p->a->w;
        t->row = expert * w->rows + slab * SLAB;
        t->column = begin * BLOCK;
        if constexpr (scaled_groups) {
            int partition = w->partition_count == 2 && slab >= p->a->pairs;
            int row = (expert * w->partition_count + partition) * w->partition_blocks +
                      (slab - partition * p->a->pairs) / (BLOCK / SLAB);
            t->scale =
                load_early((const float *)w->weight_scale + (int64_t)row * w->blocks + begin);
        }
    }

    static __device__ __forceinline__ void
    fill_split_stage(const warp_state *p, const split_target *t, uint32_t to, uint32_t bar) {
        mbarrier_expect(bar, BOX);
        copy_box_2d(to, &p->a->map, t->column, t->row, bar, p->policy);
    }

    static __device__ __forceinline__ float scale_of_column(const warp_state *p, const column *c) {
        return MODE == MOQ_INPUT_E4M3_TENSOR && !CODED
                   ? load_early(p->a->w.input_scale +
                                expert_of_chunk(c->chunk) * p->a->w.partition_count)
                   : 1;
    }

    static __device__ __forceinline__ void load_raw(const warp_state *p, const column *c, int begin,
                                                    int nominal, raw_columns *x) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            int first = (begin + i) * BLOCK + p->lane % 4 * 32;
            bool meant = begin + i >= nominal && first < p->a->w.columns;
#pragma unroll
            for (int j = 0; j < base::vectors; j++)
                x->block[i].vector[j] = meant
                                            ? load_vector(c->row + (CODED ? 1 : 2) * first + 16 * j)
                                            : make_uint4(0, 0, 0, 0);
            if constexpr (CODED && scaled_groups)
                x->block[i].x_scale = meant ? base::scale_beside(p, c, begin + i) : 0;
        }
    }

    static __device__ __forceinline__ float scale_of_block(const warp_state *p, const column *c,
                                                           const typename base::columns *x) {
        if constexpr (CODED)
            return base::scale_of_codes(x);
        else
            return MODE == MOQ_INPUT_E4M3_TENSOR  ? __frcp_rn(c->scale)
                   : MODE == MOQ_INPUT_E4M3_TOKEN ? p->scale[c->place]
                                                  : base::scale_of_group(x);
    }

    template <bool UP>
    static __device__ __forceinline__ void make_columns(const warp_state *p, const column *c,
                                                        const raw_columns *raw, split_columns *x) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            typename base::columns own = raw->block[i];
            if (UP && !CODED && p->a->weights_on_input)
                weigh<base::vectors>(own.vector, DT, c->weight);
            float scale = scale_of_block(p, c, &own);
            base::make_codes(own.vector, scale, x->code[i][0]);
            base::make_codes(own.vector + base::vectors / 2, scale, x->code[i][1]);
#pragma unroll
            for (int j = 0; j < 2 && scaled_groups; j++)
                x->scale[i][j] = __shfl_sync(ALL_LANES, scale, (p->lane % 4 * 2 + j) * 4);
        }
    }

    static __device__ __forceinline__ void multiply_stage(uint32_t places, const split_stage *stage,
                                                          const split_columns &x, int block,
                                                          const split_target &t, float (&sum)[4]) {
        float two[2][4] = {}, scale = 1;
        if constexpr (scaled_groups)
            scale = __shfl_sync(ALL_LANES, t.scale, stage->number % 32);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t from = (places + stage->at) ^ half * 16;
            base::multiply_half(load_shared(from), load_shared(from + BOX / 2), x.code[block][half],
                                two[half]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float both = __fadd_rn(two[0][j], two[1][j]);
            sum[j] = scaled_groups ? __fmaf_rn(both, scale * x.scale[block][j % 2], sum[j])
                                   : __fadd_rn(sum[j], both);
        }
    }
};

/* Returns the up kernel for the K range of a warp, one of MOQ_MOE_FP8_DECODE_SPLIT_K (decode.h). */
template <moq_dtype DT, moq_input_mode MODE, bool CODED, int BLOCKS>
static const void *up_split_k_kernel(const moq_moe_decode_half *h) {
    if constexpr (MODE != MOQ_INPUT_E4M3_GROUP) /* no config splits K of them without a gate */
        if (h->slabs == 1)
            return (const void *)moe_decode_up_split_k<fp8_split_k<1, BLOCKS, DT, MODE, CODED>>;
    return (const void *)moe_decode_up_split_k<fp8_split_k<2, BLOCKS, DT, MODE, CODED>>;
}

template <moq_dtype DT, moq_input_mode MODE, bool CODED>
static const void *up_kernel_with(const moq_moe_decode_half *h) {
#define BLOCKS(count)                                                                              \
    if (h->split == count)                                                                         \
        return up_split_k_kernel<DT, MODE, CODED, count>(h);
    MOQ_MOE_FP8_DECODE_SPLIT_K(BLOCKS)
#undef BLOCKS
    return h->slabs == 2 ? (const void *)moe_decode_up<fp8<2, DT, MODE, CODED>>
                         : (const void *)moe_decode_up<fp8<1, DT, MODE, CODED>>;
}

/* Returns the up kernel of the geometry, for values or for codes of x. */
template <moq_dtype DT, bool CODED>
static const void *up_kernel_of(const moq_moe_decode_half *h, moq_input_mode mode) {
    return mode == MOQ_INPUT_E4M3_TENSOR  ? up_kernel_with<DT, MOQ_INPUT_E4M3_TENSOR, CODED>(h)
           : mode == MOQ_INPUT_E4M3_TOKEN ? up_kernel_with<DT, MOQ_INPUT_E4M3_TOKEN, CODED>(h)
                                          : up_kernel_with<DT, MOQ_INPUT_E4M3_GROUP, CODED>(h);
}

/* Returns the up kernel for codes of x (fp8_coded.cu). */
const void *coded_up_kernel_of(const moq_moe_decode_half *h, moq_dtype dtype, moq_input_mode mode);

} // namespace moq::moe_decode

#endif
