/* v = rounded(rounded(silu(gate)) * up), quantized: core/activation.h has the formula operation by
 * operation, quantize_rows.h the kernels. Memory bounds it, 4 bytes read and one written a value,
 * with some 25 instructions a value not far behind: exp is a polynomial so that its bits are those
 * of the CPU, and the division is a reciprocal corrected once, as __frcp_rn does it. */
#include "cuda/quantize_rows.h"

/* 1 / d, rounded, for d from 1 to 2^120. */
static __device__ __forceinline__ float reciprocal(float d) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return __fmaf_rn(__fmaf_rn(-d, r, 1.0f), r, r);
}

static __device__ __forceinline__ float silu(float gate) {
    float g;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(g) : "f"(gate), "f"(MOQ_SILU_LEAST));
    float h = fminf(g, MOQ_SILU_MOST);
    float shifted = __fmaf_rn(h, MOQ_MINUS_LOG2E, MOQ_RINT_MAGIC);
    float f = __fmaf_rn(h, MOQ_MINUS_LOG2E, -__fsub_rn(shifted, MOQ_RINT_MAGIC));
    float p = __fmaf_rn(MOQ_EXP2_C5, f, MOQ_EXP2_C4);
    p = __fmaf_rn(p, f, MOQ_EXP2_C3);
    p = __fmaf_rn(p, f, MOQ_EXP2_C2);
    p = __fmaf_rn(p, f, MOQ_EXP2_C1);
    p = __fmaf_rn(p, f, 1.0f);
    p = __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
    return __fmul_rn(g, reciprocal(__fadd_rn(1.0f, p)));
}

template <int DT, bool FAST>
__device__ __forceinline__ moq_chunk silu_source::load(const quantize_args *a, int64_t row,
                                                       int64_t column) const {
    moq_chunk gates = load_chunk<DT, FAST>(&a->x, row, column, a->k);
    moq_chunk ups = load_chunk<DT, FAST>(&up, row, column, a->k);
    float value[16], other[16];
    widen<DT>(gates, value);
    widen<DT>(ups, other);
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = silu(value[i]);
    moq_chunk rounded = narrow<DT>(value);
    widen<DT>(rounded, value);
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = __fmul_rn(value[i], other[i]);
    return narrow<DT>(value);
}

const void *moq_silu_kernel(moq_dtype dtype, moq_input_mode mode, bool fast) {
    switch (mode) {
    case MOQ_FIND_AMAX:
        return MOQ_FASTEST(dtype, fast, quantize_spans, MOQ_FIND_AMAX, silu_source);
    case MOQ_INPUT_E4M3_TENSOR:
        return MOQ_FASTEST(dtype, fast, quantize_spans, MOQ_INPUT_E4M3_TENSOR, silu_source);
    case MOQ_INPUT_E4M3_TOKEN:
        return MOQ_FASTEST(dtype, fast, quantize_tokens, silu_source);
    case MOQ_INPUT_E4M3_GROUP:
        return MOQ_FASTEST(dtype, fast, quantize_spans, MOQ_INPUT_E4M3_GROUP, silu_source);
    default:
        return MOQ_GENERAL(dtype, quantize_spans, MOQ_INPUT_NVFP4, silu_source);
    }
}
