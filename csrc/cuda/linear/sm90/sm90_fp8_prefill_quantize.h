/* The FP8 GEMM of Hopper for few tokens and one scale that is given: warps that quantize x where it
 * is multiplied, so that nothing but x is waited for. They read x from L2, and put its codes in the
 * stages of the ring whose weights the copy engine brings.
 *
 * A unit is 128 columns of four tokens, those of a step; a warp has the same tokens in every step.
 * A lane has 16 columns of one token, eight from 8 * (lane % 8) on and eight that are 64 further,
 * so that eight lanes read lines of 128 bytes. Its tokens are such that codes go to all banks. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_QUANTIZE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_QUANTIZE_H

#include "cuda/linear/sm90/sm90_fp8_prefill_tile.h"
#include "cuda/tensor/cuda_quantize_chunk.h"

namespace moq::fp8_prefill {

using quantization::chunk;
using quantization::widen;

/* Where a lane's codes go, and what its values are multiplied by. */
typedef struct {
    uint32_t codes; /* in the first stage */
    stage_barriers barriers;
    float inverse; /* of the scale */
} sink;

/* A warp's share of x: the rows of a lane's tokens, NULL beyond the last, and the end of its
 * columns. */
template <class S> struct x_share {
    static constexpr int UNITS = S::tokens / 32; /* of a step */
    const uint16_t *row[UNITS];
    int token, end; /* the first; others are 32 further */
};

/* What a warp has on its way from L2. */
template <class S, int DT> struct units {
    static constexpr int UNITS = S::tokens / 32;
    static constexpr int STEPS = UNITS == 1 ? 8 : 3;
    chunk<DT, 16> of[STEPS][UNITS];
};

template <class S>
static __device__ __forceinline__ x_share<S> share_of(const gemm_args *a, const work *w) {
    int lane = threadIdx.x % 32, warp = (threadIdx.x - CONSUMERS) / 32;
    x_share<S> x;
    x.token = warp / 2 * 8 + warp % 2 * 2 + lane / 8 % 2 * 4 + lane / 16;
    x.end = min(a->k, w->end * STEP);
    int first = place_of<S>(a, w->number, 0).token + x.token;
#pragma unroll
    for (int u = 0; u < x.UNITS; u++) {
        int m = first + 32 * u;
        x.row[u] = m < a->m ? (const uint16_t *)a->x.data + m * a->x.stride : NULL;
    }
    return x;
}

/* The lane's columns of the units of a step; zeros beyond x. */
template <class S, int DT>
static __device__ __forceinline__ void load_step(const x_share<S> *x, int step,
                                                 chunk<DT, 16> (&unit)[S::tokens / 32]) {
    int column = step * STEP + threadIdx.x % 8 * 8;
#pragma unroll
    for (int u = 0; u < x->UNITS; u++) {
        unit[u] = chunk<DT, 16>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!x->row[u] || column + 64 * half >= x->end)
                continue;
            uint4 four = __ldcg((const uint4 *)(x->row[u] + column + 64 * half));
            unit[u].word[4 * half] = four.x;
            unit[u].word[4 * half + 1] = four.y;
            unit[u].word[4 * half + 2] = four.z;
            unit[u].word[4 * half + 3] = four.w;
        }
    }
}

/* Codes of the units of a step, and where they lie in stage `index`. */
template <class S, int DT>
static __device__ __forceinline__ void make_codes(const sink *s,
                                                  const chunk<DT, 16> (&unit)[S::tokens / 32],
                                                  uint4 (&code)[S::tokens / 32]) {
#pragma unroll
    for (int u = 0; u < S::tokens / 32; u++) {
        float value[16];
        widen<DT, 16>(unit[u], value);
        code[u] = moq_codes_multiplied(value, s->inverse);
    }
}

template <class S>
static __device__ __forceinline__ void put_codes(const sink *s, const x_share<S> *x, int index,
                                                 const uint4 (&code)[S::tokens / 32]) {
#pragma unroll
    for (int u = 0; u < S::tokens / 32; u++) {
        int token = x->token + 32 * u, piece = threadIdx.x % 8 / 2 ^ token % 8;
        uint32_t to = s->codes + (uint32_t)(index * S::stage + token * STEP + piece * 16 +
                                            threadIdx.x % 2 * 8);
        store_shared_pair(to, make_uint2(code[u].x, code[u].y));
        store_shared_pair(to ^ 64, make_uint2(code[u].z, code[u].w));
    }
}

/* Quantizes this block's part of x, values of DT, as the ring has room. Some steps are done
 * together: one is a chain of dependent instructions. */
template <class S, int DT>
static __device__ __forceinline__ void quantize_part(const gemm_args *a, const sink *s) {
    work w = start<S>(a);
    x_share<S> x = share_of<S>(a, &w);
    units<S, DT> unit;
    constexpr int TOGETHER = x.UNITS == 1 ? 4 : 1;
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < unit.STEPS; i++)
        load_step<S, DT>(&x, w.first + i, unit.of[i]);
    for (int first = w.first; first < w.end; first += unit.STEPS) {
#pragma unroll
        for (int i = 0; i < unit.STEPS; i += TOGETHER) {
            uint4 code[TOGETHER][x.UNITS];
            uint32_t arrival = 0;
            int left = w.end - first - i;
            if (left <= 0)
                break;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                make_codes<S, DT>(s, unit.of[i + j], code[j]);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                if (j >= left)
                    break;
                mbarrier_wait(s->barriers.empty + 8u * slot.index, slot.parity ^ 1);
                put_codes<S>(s, &x, slot.index, code[j]);
                if (threadIdx.x % 32 == j)
                    arrival = s->barriers.tokens + 8u * slot.index;
                advance(&slot, a->stages);
            }
            fence_async_proxy();
            __syncwarp();
            if (arrival)
                mbarrier_arrive(arrival);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                load_step<S, DT>(&x, first + i + j + unit.STEPS, unit.of[i + j]);
        }
    }
}

/* Quantizes this block's part of x, of bfloat16 or float16. */
template <class S> static __device__ __forceinline__ void quantize_x(const gemm_args *a, sink *s) {
    s->inverse = __frcp_rn(a->x_scale[0]); /* it belongs to the weights: no one is waited for */
    if (a->x.dtype == MOQ_DT_BF16)
        quantize_part<S, MOQ_DT_BF16>(a, s);
    else
        quantize_part<S, MOQ_DT_F16>(a, s);
}

} // namespace moq::fp8_prefill

#endif
