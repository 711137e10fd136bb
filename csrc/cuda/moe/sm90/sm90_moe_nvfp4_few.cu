/* Experts with NVFP4 weights for few tokens on Hopper, exact products: sm90_moe_few_kernels.h says
 * what is computed and how.
 *
 * Weights are in the packed layout (core/nvfp4_packed.h), 0.5625 bytes each. The decoder takes
 * nearly as long as the memory, 14 to 15 ns of a multiprocessor for a unit where the memory of an
 * H200 brings one in 17 (docs/lab/nvfp4-few.md). Sixteen
 * warps of 64 registers in half of a multiprocessor: with eight their latencies showed at one
 * token. A stage is two units, a block of K of two slabs or two of one, a bulk copy for each slab.
 *
 * Measured: see docs/lab/moe.md. */
#include "core/nvfp4_packed.h"
#include "cuda/choice/moe_few.h"
#include "cuda/device/nvfp4_products.h"
#include "cuda/moe/sm90/cuda_moe_sm90.h"

#define WARPS MOQ_MOE_NVFP4_FEW_WARPS
#include "cuda/moe/sm90/sm90_moe_few_kernels.h"

namespace moq::moe_few {

#define X_BLOCK (2 * MOQ_PACK_K) /* bytes of a token in a block of K */

template <int SLABS, moq_nvfp4_type TYPE> struct nvfp4 {
    static constexpr int slabs = SLABS, stage_blocks = MOQ_MOE_NVFP4_FEW_UNITS / SLABS;
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
        places at = moq_unit_places_of(p->ring, p->lane);
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
#pragma unroll
        for (int i = 0; i < stage_blocks; i++)
            if (i < v.blocks)
                multiply_block<UP>(p, at, v.stage + i * MOQ_PACK_BYTES, v.own.weight,
                                   &own.part[2 * i], sum);
    }

    template <bool UP>
    static __device__ __forceinline__ void multiply_block(const warp_parts *p, const places &at,
                                                          uint32_t unit, float weight, uint4 *x,
                                                          float (&sum)[SLABS][1][4]) {
        if (UP && p->a->weights_on_input)
            weigh<2>(x, dtype, weight);
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

static void describe(stack *w) {
    w->blocks = w->columns / MOQ_PACK_K;
    w->slab_bytes = w->blocks * MOQ_PACK_BYTES;
    w->expert_bytes = moq_pack_slabs(w->rows) * w->blocks * MOQ_PACK_BYTES;
}

template <moq_nvfp4_type TYPE> static const void *up_kernel(bool gated) {
    return gated ? (const void *)moe_few_up<nvfp4<2, TYPE>>
                 : (const void *)moe_few_up<nvfp4<1, TYPE>>;
}

template <moq_nvfp4_type TYPE> static const void *down_kernel(int slabs) {
    return slabs == 1 ? (const void *)moe_few_down<nvfp4<1, TYPE>>
                      : (const void *)moe_few_down<nvfp4<2, TYPE>>;
}

extern "C" moq_status moq_cuda_moe_nvfp4_few(const moq_moe_call *call, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    bool half = spec->w13.dtype == MOQ_DT_F16;
    moq_moe_few_share share;
    moq_moe_few_share_out(spec, call->tokens, call->way, &share);
    up_args up = up_of(call, &share);
    down_args down = down_of(call, &share);
    describe(&up.common.w);
    describe(&down.common.w);
    const void *kernel =
        half ? up_kernel<MOQ_NVFP4_F16>(spec->gated) : up_kernel<MOQ_NVFP4_BF16>(spec->gated);
    MOQ_TRY(launch_half(call, &share.up, "NVFP4 experts", kernel, &up, err));
    kernel = half ? down_kernel<MOQ_NVFP4_F16>(share.down.slabs)
                  : down_kernel<MOQ_NVFP4_BF16>(share.down.slabs);
    return launch_half(call, &share.down, "NVFP4 experts", kernel, &down, err);
}

extern "C" int64_t moq_cuda_moe_nvfp4_few_workspace(const moq_moe_call *call) {
    return moq_moe_few_workspace(call->spec, call->tokens);
}

} // namespace moq::moe_few
