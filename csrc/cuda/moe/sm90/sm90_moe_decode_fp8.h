/* FP8 weights for the kernels of experts with few tokens on Hopper: what a lane asks for, columns
 * of x, and the products of a stage (sm90_moe_decode_kernels.h, sm90_moe_decode_split_k.h). The
 * head of sm90_moe_fp8_decode.cu says what bounds them. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_FP8_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_FP8_H

#include "cuda/choice/moe_decode.h"
#include "cuda/moe/sm90/sm90_moe_decode_split_k.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_decode {

#define BLOCK 128            /* columns, a byte each */
#define BOX   (SLAB * BLOCK) /* bytes */

/* Two codes as float16. */
static __device__ __forceinline__ uint32_t widen_codes(uint32_t word, bool high) {
    uint32_t pair;
    uint16_t codes = (uint16_t)(high ? word >> 16 : word);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
    return pair;
}

template <int SLABS, moq_dtype DT, moq_input_mode MODE> struct fp8 {
    static constexpr int slabs = SLABS, stage_blocks = MOQ_MOE_FP8_DECODE_BLOCKS;
    static constexpr int stage_bytes = SLABS * BOX, alignment = 1024;
    static constexpr moq_dtype dtype = DT;
    static constexpr bool scaled_tokens = MODE == MOQ_INPUT_E4M3_TOKEN;
    static_assert(stage_blocks == 1, "a stage is a block");

    typedef int target;      /* the expert's first row among those of all */
    typedef uint32_t places; /* where the lane's columns of row g are */
    typedef struct {
        uint4 part[4];        /* 32 values */
        float w_scale[SLABS]; /* by blocks */
    } columns;

    static __device__ __forceinline__ void aim(const warp_parts *p, const walk &, int expert,
                                               target *t) {
        *t = expert * p->a->w.rows;
    }

    static __device__ __forceinline__ void fill(const warp_parts *p, const walk &at, target *t, int,
                                                uint32_t to, uint32_t bar) {
        int row = *t + (p->slab + at.row) * SLAB;
        if (is_elected()) {
            mbarrier_expect(bar, (uint32_t)(p->slabs * BOX));
#pragma unroll
            for (int i = 0; i < SLABS; i++)
                if (i < p->slabs)
                    copy_box_2d(to + i * BOX, &p->a->map, at.block * BLOCK,
                                row + i * p->slab_step * SLAB, bar, p->policy);
        }
    }

    /* Pieces of 16 bytes of a row are xored with it. The lane's are 2 t and 2 t + 1. */
    static __device__ __forceinline__ places places_of(const warp_parts *p) {
        int g = p->lane / 4, t = p->lane % 4;
        return p->pipeline + (uint32_t)(g * BLOCK + ((2 * t ^ g) << 4));
    }

    static __device__ __forceinline__ void load(const warp_parts *p, const column *c, int row,
                                                int block, int count, columns *x) {
        const stack *w = &p->a->w;
        int first = block * BLOCK + p->lane % 4 * 32;
        const uint8_t *from = c->row + 2 * first;
        if (count == 0)
            return;
#pragma unroll
        for (int i = 0; i < 4; i++)
            x->part[i] = first < w->columns ? load_part(from + 16 * i) : make_uint4(0, 0, 0, 0);
        if constexpr (MODE == MOQ_INPUT_E4M3_GROUP)
            load_scales(p, c, row, block, x);
    }

    static __device__ __forceinline__ void load_scales(const warp_parts *p, const column *c,
                                                       int item, int block, columns *x) {
        const stack *w = &p->a->w;
#pragma unroll
        for (int i = 0; i < SLABS; i++) {
            int part = w->parts == 2 ? i : 0, slab = p->slab + i * p->slab_step + item;
            int row = (expert_of_chunk(c->chunk) * w->parts + part) * w->part_blocks +
                      (slab - part * p->a->pairs) / (BLOCK / SLAB);
            x->w_scale[i] =
                i < p->slabs
                    ? __ldg((const float *)w->weight_scale + (int64_t)row * w->blocks + block)
                    : 0;
        }
    }

    /* The scale of the columns of the lane's token, which four lanes have. */
    static __device__ __forceinline__ float scale_of_group(const columns *x) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < 16; i++)
            most = __vmaxu2(most, (&x->part[i / 4].x)[i % 4] & 0x7fff7fffu);
        most = moq_max_of_lanes(max(most & 0xffff, most >> 16), 4);
        return moq_group_scale(moq_widen_pair(most, DT).x);
    }

    /* What the lane's token is quantized by: a scale, or its inverse where all have one. */
    static __device__ __forceinline__ float scale_of(const warp_parts *p, const column *c,
                                                     const columns *x) {
        if constexpr (MODE == MOQ_INPUT_E4M3_TENSOR)
            return __frcp_rn(
                __ldg(p->a->w.input_scale + expert_of_chunk(c->chunk) * p->a->w.parts));
        else if constexpr (MODE == MOQ_INPUT_E4M3_TOKEN)
            return p->scale[c->place];
        else
            return scale_of_group(x);
    }

    /* Codes of half of the lane's values as float16. */
    static __device__ __forceinline__ void quantize(const uint4 *part, float scale,
                                                    uint32_t (&x)[8]) {
        float value[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float2 pair = moq_widen_pair((&part[i / 4].x)[i % 4], DT);
            value[2 * i] = pair.x;
            value[2 * i + 1] = pair.y;
        }
        uint4 codes = MODE == MOQ_INPUT_E4M3_TENSOR ? moq_codes_multiplied(value, scale)
                                                    : moq_codes_divided(value, scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = widen_codes((&codes.x)[i / 2], i % 2 != 0);
    }

    /* 64 columns of a slab, from the lane's vectors of rows g and g + 8. */
    static __device__ __forceinline__ void multiply_half(uint4 upper, uint4 lower,
                                                         const uint32_t (&x)[8], float (&sum)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t u = (&upper.x)[i], l = (&lower.x)[i];
            const uint32_t w[4] = {widen_codes(u, false), widen_codes(l, false),
                                   widen_codes(u, true), widen_codes(l, true)};
            const uint32_t b[2] = {x[2 * i], x[2 * i + 1]};
            mma_f16(sum, w, b);
        }
    }

    /* x of the next stage is asked for first: all of it is needed at once. */
    template <bool UP>
    static __device__ __forceinline__ void multiply(const warp_parts *p, const places &at,
                                                    const stage_view &v, columns *x,
                                                    float (&sum)[SLABS][1][4]) {
        columns own = *x;
        load(p, &v.next, v.next_row, v.next_block, v.next_blocks, x);
        mbarrier_wait(v.bar, v.parity);
        if (UP && p->a->weights_on_input)
            weigh<4>(own.part, DT, v.own.weight);
        multiply_stage(p, at + v.stage, &v.own, &own, sum);
    }

    static __device__ __forceinline__ void multiply_stage(const warp_parts *p, uint32_t stage,
                                                          const column *c, const columns *x,
                                                          float (&sum)[SLABS][1][4]) {
        float scale = scale_of(p, c, x), part[SLABS][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t codes[8];
            quantize(&x->part[2 * half], scale, codes);
#pragma unroll
            for (int i = 0; i < SLABS; i++) {
                uint32_t from = (stage + i * BOX) ^ half * 16;
                multiply_half(load_shared(from), load_shared(from + BOX / 2), codes,
                              MODE == MOQ_INPUT_E4M3_GROUP ? part[i] : sum[i][0]);
            }
        }
        if constexpr (MODE == MOQ_INPUT_E4M3_GROUP)
            add_scaled(p, scale, x, part, sum);
    }

    /* Sums of 128 columns with the scales of x, column by column of the product, and of W. */
    static __device__ __forceinline__ void add_scaled(const warp_parts *p, float scale,
                                                      const columns *x,
                                                      const float (&part)[SLABS][4],
                                                      float (&sum)[SLABS][1][4]) {
        float of_column[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            of_column[i] = __shfl_sync(ALL_LANES, scale, (p->lane % 4 * 2 + i) * 4);
#pragma unroll
        for (int i = 0; i < 4 * SLABS; i++)
            sum[i / 4][0][i % 4] = __fmaf_rn(
                part[i / 4][i % 4], x->w_scale[i / 4] * of_column[i % 2], sum[i / 4][0][i % 4]);
    }

    static __device__ __forceinline__ float factor_of_expert(const stack *w, int expert) {
        return MODE == MOQ_INPUT_E4M3_TENSOR ? load_early(w->input_scale + expert * w->parts) : 1;
    }
};

/* With slices of BLOCKS blocks of K. */
template <int SLABS, int BLOCKS, moq_dtype DT, moq_input_mode MODE>
struct fp8_split_k : fp8<SLABS, DT, MODE> {
    typedef fp8<SLABS, DT, MODE> base;
    static constexpr bool scaled_groups = MODE == MOQ_INPUT_E4M3_GROUP;
    static constexpr int blocks = BLOCKS, stage_blocks = 1, block_bytes = BOX;

    typedef struct {
        int row, column;
        float scale; /* of W by blocks */
    } split_target;
    typedef struct {
        typename base::columns block[BLOCKS];
    } raw_columns;
    typedef struct {
        uint32_t code[BLOCKS][2][8]; /* as float16 */
        float scale[BLOCKS][2];      /* by blocks, of the lane's columns of the product */
    } split_columns;

    static __device__ __forceinline__ void aim_split(const warp_parts *p, int expert, int slab,
                                                     int begin, split_target *t) {
        const stack *w = &p->a->w;
        t->row = expert * w->rows + slab * SLAB;
        t->column = begin * BLOCK;
        if constexpr (scaled_groups) {
            int part = w->parts == 2 && slab >= p->a->pairs;
            int row = (expert * w->parts + part) * w->part_blocks +
                      (slab - part * p->a->pairs) / (BLOCK / SLAB);
            t->scale =
                load_early((const float *)w->weight_scale + (int64_t)row * w->blocks + begin);
        }
    }

    static __device__ __forceinline__ void
    fill_split_stage(const warp_parts *p, const split_target *t, uint32_t to, uint32_t bar) {
        mbarrier_expect(bar, BOX);
        copy_box_2d(to, &p->a->map, t->column, t->row, bar, p->policy);
    }

    static __device__ __forceinline__ float scale_of_column(const warp_parts *p, const column *c) {
        return MODE == MOQ_INPUT_E4M3_TENSOR
                   ? load_early(p->a->w.input_scale + expert_of_chunk(c->chunk) * p->a->w.parts)
                   : 1;
    }

    static __device__ __forceinline__ void load_raw(const warp_parts *p, const column *c, int begin,
                                                    int nominal, raw_columns *x) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            int first = (begin + i) * BLOCK + p->lane % 4 * 32;
            bool meant = begin + i >= nominal && first < p->a->w.columns;
#pragma unroll
            for (int j = 0; j < 4; j++)
                x->block[i].part[j] =
                    meant ? load_part(c->row + 2 * first + 16 * j) : make_uint4(0, 0, 0, 0);
        }
    }

    template <bool UP>
    static __device__ __forceinline__ void make_columns(const warp_parts *p, const column *c,
                                                        const raw_columns *raw, split_columns *x) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            typename base::columns own = raw->block[i];
            if (UP && p->a->weights_on_input)
                weigh<4>(own.part, DT, c->weight);
            float scale = MODE == MOQ_INPUT_E4M3_TENSOR  ? __frcp_rn(c->scale)
                          : MODE == MOQ_INPUT_E4M3_TOKEN ? p->scale[c->place]
                                                         : base::scale_of_group(&own);
            base::quantize(own.part, scale, x->code[i][0]);
            base::quantize(own.part + 2, scale, x->code[i][1]);
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

static inline moq_status describe_fp8(const moq_moe_call *call, common_args *c, moq_err *err) {
    stack *w = &c->w;
    w->blocks = (w->columns + BLOCK - 1) / BLOCK;
    w->expert_bytes = (int64_t)w->rows * w->columns;
    return moq_tensor_map_rows(&c->map, w->weight, (int64_t)call->spec->experts * w->rows,
                               w->columns, w->columns, SLAB, err);
}

} // namespace moq::moe_decode

#endif
