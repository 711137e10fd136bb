/* FP8 weights in the decode kernels of experts on Hopper: up_down.h, split_k.h and fp8_fused.cu say
 * what is computed and how.
 *
 * Layouts: weights e4m3 [E, N, K] as the checkpoint has them; x, unless it is codes already, and g
 * are quantized to e4m3 on the way, with one scale an expert, a token, or 128 columns. A stage is
 * 128 columns of a warp's slabs, a box of 16 rows in the 128-byte swizzle for each slab; of one
 * slab with split-K. A lane quantizes the columns that it multiplies: 32 of a token, in the order
 * of its 16-byte groups of W. That takes 70 to 150 instructions, while memory takes 440 for a slab;
 * with split-K once for all items of a chunk. Hopper has no e4m3 products for one warp (mma.sync
 * becomes conversions and float16 products), so codes become float16, which holds them, those of x
 * once for all slabs. Sums are float32, not the 14 bits of wgmma.
 *
 * Quantizing by token needs the whole row: `up` finds the scales of a block's tokens while its
 * pipelines fill, and leaves the maximum of g of each slot and 16 rows for `down`.
 *
 * Bound: the weights of experts that have a slot. Measured: docs/lab/experts-decode.md. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_FP8_FORMAT_H
#define MOQ_CUDA_MOE_SM90_DECODE_FP8_FORMAT_H

#include "cuda/moe/sm90/decode/up_down.h"
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

/* CODED: x is codes already, with the scales that they were made with. */
template <int SLABS, moq_dtype DT, moq_input_mode MODE, bool CODED = false> struct fp8 {
    static constexpr int slabs = SLABS, stage_blocks = MOQ_MOE_FP8_DECODE_BLOCKS;
    static constexpr int stage_bytes = SLABS * BOX, alignment = 1024;
    static constexpr moq_dtype dtype = DT;
    static constexpr bool scaled_tokens = MODE == MOQ_INPUT_E4M3_TOKEN;
    static constexpr bool scaled_groups = MODE == MOQ_INPUT_E4M3_GROUP;
    static constexpr bool coded = CODED;
    static constexpr int vectors = CODED ? 2 : 4; /* of 16 bytes, that have 32 columns of x */
    static_assert(stage_blocks == 1, "a stage is a block");

    typedef int target;      /* row of the stack at which the expert begins */
    typedef uint32_t places; /* offset of the lane's columns of row g */
    typedef struct {
        uint4 vector[vectors]; /* 32 values, or their codes */
        float w_scale[SLABS];  /* block scales */
        float x_scale;         /* scale beside codes */
    } columns;

    static __device__ __forceinline__ void aim(const warp_state *p, const walk &, int expert,
                                               target *t) {
        *t = expert * p->a->w.rows;
    }

    static __device__ __forceinline__ void fill(const warp_state *p, const walk &at, target *t, int,
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

    /* Finds the lane's pieces of 16 bytes, 2 t and 2 t + 1, which are xored with their row. */
    static __device__ __forceinline__ places places_of(const warp_state *p) {
        int g = p->lane / 4, t = p->lane % 4;
        return p->pipeline + (uint32_t)(g * BLOCK + ((2 * t ^ g) << 4));
    }

    static __device__ __forceinline__ void load(const warp_state *p, const column *c, int row,
                                                int block, int count, columns *x) {
        const stack *w = &p->a->w;
        int first = block * BLOCK + p->lane % 4 * 32;
        const uint8_t *from = c->row + (CODED ? 1 : 2) * first;
        if (count == 0)
            return;
#pragma unroll
        for (int i = 0; i < vectors; i++)
            x->vector[i] = first < w->columns ? load_vector(from + 16 * i) : make_uint4(0, 0, 0, 0);
        if constexpr (scaled_groups)
            load_scales(p, c, row, block, x);
        if constexpr (CODED && scaled_groups)
            x->x_scale = scale_beside(p, c, block);
    }

    /* Loads the scale beside the codes of a token in a block of K. */
    static __device__ __forceinline__ float scale_beside(const warp_state *p, const column *c,
                                                         int block) {
        return __ldcg(c->scales + block * p->a->x_scale.step);
    }

    static __device__ __forceinline__ void load_scales(const warp_state *p, const column *c,
                                                       int item, int block, columns *x) {
        const stack *w = &p->a->w;
#pragma unroll
        for (int i = 0; i < SLABS; i++) {
            int partition = w->partition_count == 2 ? i : 0,
                slab = p->slab + i * p->slab_step + item;
            int row =
                (expert_of_chunk(c->chunk) * w->partition_count + partition) * w->partition_blocks +
                (slab - partition * p->a->pairs) / (BLOCK / SLAB);
            x->w_scale[i] =
                i < p->slabs
                    ? __ldg((const float *)w->weight_scale + (int64_t)row * w->blocks + block)
                    : 0;
        }
    }

    /* Returns the scale of the columns of the lane's token, which four lanes share. */
    static __device__ __forceinline__ float scale_of_group(const columns *x) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < 16; i++)
            most = __vmaxu2(most, (&x->vector[i / 4].x)[i % 4] & 0x7fff7fffu);
        most = moq_max_of_lanes(max(most & 0xffff, most >> 16), 4);
        return moq_group_scale(moq_widen_pair(most, DT).x);
    }

    /* Returns the scale beside the codes of the lane's token in the block, if there is one. */
    static __device__ __forceinline__ float scale_of_codes(const columns *x) {
        return CODED && scaled_groups ? x->x_scale : 1;
    }

    /* Returns the factor that quantizes the lane's token: a scale, or its inverse if all tokens
     * have one. */
    static __device__ __forceinline__ float scale_of(const warp_state *p, const column *c,
                                                     const columns *x) {
        if constexpr (CODED)
            return scale_of_codes(x);
        else if constexpr (MODE == MOQ_INPUT_E4M3_TENSOR)
            return __frcp_rn(
                __ldg(p->a->w.input_scale + expert_of_chunk(c->chunk) * p->a->w.partition_count));
        else if constexpr (MODE == MOQ_INPUT_E4M3_TOKEN)
            return p->scale[c->place];
        else
            return scale_of_group(x);
    }

    /* Quantizes half of the lane's values to codes as float16. */
    static __device__ __forceinline__ void quantize(const uint4 *vector, float scale,
                                                    uint32_t (&x)[8]) {
        float value[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float2 pair = moq_widen_pair((&vector[i / 4].x)[i % 4], DT);
            value[2 * i] = pair.x;
            value[2 * i + 1] = pair.y;
        }
        uint4 codes = MODE == MOQ_INPUT_E4M3_TENSOR ? moq_codes_multiplied(value, scale)
                                                    : moq_codes_divided(value, scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = widen_codes((&codes.x)[i / 2], i % 2 != 0);
    }

    /* Makes codes of half of the lane's columns as float16. */
    static __device__ __forceinline__ void make_codes(const uint4 *vector, float scale,
                                                      uint32_t (&x)[8]) {
        if constexpr (CODED) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = widen_codes((&vector->x)[i / 2], i % 2 != 0);
        } else {
            quantize(vector, scale, x);
        }
    }

    /* Multiplies 64 columns of a slab, from the lane's vectors of rows g and g + 8. */
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

    /* Loads x of the next stage first: all of it is needed at once. */
    template <bool UP>
    static __device__ __forceinline__ void multiply(const warp_state *p, const places &at,
                                                    const stage_view &v, columns *x,
                                                    float (&sum)[SLABS][1][4]) {
        columns own = *x;
        load(p, &v.next, v.next_row, v.next_block, v.next_blocks, x);
        mbarrier_wait(v.bar, v.parity);
        if (UP && !CODED && p->a->weights_on_input)
            weigh<vectors>(own.vector, DT, v.own.weight);
        multiply_stage(p, at + v.stage, &v.own, &own, sum);
    }

    static __device__ __forceinline__ void multiply_stage(const warp_state *p, uint32_t stage,
                                                          const column *c, const columns *x,
                                                          float (&sum)[SLABS][1][4]) {
        float scale = scale_of(p, c, x), block_sum[SLABS][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t codes[8];
            make_codes(&x->vector[vectors / 2 * half], scale, codes);
#pragma unroll
            for (int i = 0; i < SLABS; i++) {
                uint32_t from = (stage + i * BOX) ^ half * 16;
                multiply_half(load_shared(from), load_shared(from + BOX / 2), codes,
                              MODE == MOQ_INPUT_E4M3_GROUP ? block_sum[i] : sum[i][0]);
            }
        }
        if constexpr (MODE == MOQ_INPUT_E4M3_GROUP)
            add_scaled(p, scale, x, block_sum, sum);
    }

    /* Adds the sums of 128 columns by the scales of x, column by column of the product, and of
     * W. */
    static __device__ __forceinline__ void add_scaled(const warp_state *p, float scale,
                                                      const columns *x,
                                                      const float (&block_sum)[SLABS][4],
                                                      float (&sum)[SLABS][1][4]) {
        float of_column[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            of_column[i] = __shfl_sync(ALL_LANES, scale, (p->lane % 4 * 2 + i) * 4);
#pragma unroll
        for (int i = 0; i < 4 * SLABS; i++)
            sum[i / 4][0][i % 4] =
                __fmaf_rn(block_sum[i / 4][i % 4], x->w_scale[i / 4] * of_column[i % 2],
                          sum[i / 4][0][i % 4]);
    }

    static __device__ __forceinline__ float factor_of_expert(const stack *w, int expert) {
        return MODE == MOQ_INPUT_E4M3_TENSOR
                   ? load_early(w->input_scale + expert * w->partition_count)
                   : 1;
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
