/* FP8 experts for decode on Hopper with a kernel for each product: instances of the kernels of
 * up_down.h and split_k.h for e4m3 weights (fp8_format.h), which say what is computed, the layouts
 * and tiles, and what bounds it. */
#include "cuda/moe/sm90/decode/fp8_format.h"
#include "cuda/moe/sm90/decode/split_k.h"

namespace moq::moe_decode {

/* The format with split-K: a warp has BLOCKS blocks of K. */
template <int SLABS, int BLOCKS, moq_dtype DT, moq_input_mode MODE>
struct fp8_split_k : fp8<SLABS, DT, MODE> {
    typedef fp8<SLABS, DT, MODE> base;
    static constexpr bool scaled_groups = MODE == MOQ_INPUT_E4M3_GROUP;
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
        return MODE == MOQ_INPUT_E4M3_TENSOR
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
            for (int j = 0; j < 4; j++)
                x->block[i].vector[j] =
                    meant ? load_vector(c->row + 2 * first + 16 * j) : make_uint4(0, 0, 0, 0);
        }
    }

    template <bool UP>
    static __device__ __forceinline__ void make_columns(const warp_state *p, const column *c,
                                                        const raw_columns *raw, split_columns *x) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            typename base::columns own = raw->block[i];
            if (UP && p->a->weights_on_input)
                weigh<4>(own.vector, DT, c->weight);
            float scale = MODE == MOQ_INPUT_E4M3_TENSOR  ? __frcp_rn(c->scale)
                          : MODE == MOQ_INPUT_E4M3_TOKEN ? p->scale[c->place]
                                                         : base::scale_of_group(&own);
            base::quantize(own.vector, scale, x->code[i][0]);
            base::quantize(own.vector + 2, scale, x->code[i][1]);
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

/* Returns the kernel for the K range of a warp, one of MOQ_MOE_FP8_DECODE_SPLIT_K
 * (decode.h). */
template <moq_dtype DT, moq_input_mode MODE, int BLOCKS>
static const void *split_k_kernel(const moq_moe_decode_half *h, bool up) {
    if (!up)
        return (const void *)moe_decode_down_split_k<fp8_split_k<2, BLOCKS, DT, MODE>>;
    if constexpr (MODE != MOQ_INPUT_E4M3_GROUP) /* no config splits K of them without a gate */
        if (h->slabs == 1)
            return (const void *)moe_decode_up_split_k<fp8_split_k<1, BLOCKS, DT, MODE>>;
    return (const void *)moe_decode_up_split_k<fp8_split_k<2, BLOCKS, DT, MODE>>;
}

template <moq_dtype DT, moq_input_mode MODE>
static const void *kernel_with(const moq_moe_decode_half *h, bool up) {
#define BLOCKS(count)                                                                              \
    if (h->split == count)                                                                         \
        return split_k_kernel<DT, MODE, count>(h, up);
    MOQ_MOE_FP8_DECODE_SPLIT_K(BLOCKS)
#undef BLOCKS
    if (up)
        return h->slabs == 2 ? (const void *)moe_decode_up<fp8<2, DT, MODE>>
                             : (const void *)moe_decode_up<fp8<1, DT, MODE>>;
    return (const void *)moe_decode_down<fp8<2, DT, MODE>>;
}

template <moq_dtype DT>
static const void *kernel_of(const moq_moe_decode_half *h, moq_input_mode mode, bool up) {
    return mode == MOQ_INPUT_E4M3_TENSOR  ? kernel_with<DT, MOQ_INPUT_E4M3_TENSOR>(h, up)
           : mode == MOQ_INPUT_E4M3_TOKEN ? kernel_with<DT, MOQ_INPUT_E4M3_TOKEN>(h, up)
                                          : kernel_with<DT, MOQ_INPUT_E4M3_GROUP>(h, up);
}

moq_status launch_fp8(const moq_moe_call *call, const moq_moe_decode_share *share, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    moq_input_mode mode = spec->w13.input;
    up_args up = up_of(call, share);
    down_args down = down_of(call, share);
    MOQ_TRY(describe_fp8(call, &up.common, err));
    MOQ_TRY(describe_fp8(call, &down.common, err));
    bool half = spec->w13.dtype == MOQ_DT_F16;
    const void *up_kernel = half ? kernel_of<MOQ_DT_F16>(&share->up, mode, true)
                                 : kernel_of<MOQ_DT_BF16>(&share->up, mode, true);
    const void *down_kernel = half ? kernel_of<MOQ_DT_F16>(&share->down, mode, false)
                                   : kernel_of<MOQ_DT_BF16>(&share->down, mode, false);
    return launch_all(call, share, "FP8 experts", up_kernel, &up, down_kernel, &down, err);
}

} // namespace moq::moe_decode
