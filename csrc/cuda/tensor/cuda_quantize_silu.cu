/* SiLU and multiply, quantized or as values: v = rounded(rounded(silu(gate)) * up).
 * core/activation.h has the formula operation by operation, cuda_quantize_rows.h the kernels.
 *
 * Bound: memory, 4 bytes read and one written a value, and nearly as much some 25 instructions a
 * value: exp is a polynomial with the bits of the CPU, and the division is a reciprocal corrected
 * once, like __frcp_rn. */
#include "cuda/device/logistic.h"
#include "cuda/tensor/cuda_quantize_rows.h"

namespace moq::quantization {

/* Returns 1 / d, rounded, for d from 1 to 2^120. */
static __device__ __forceinline__ float reciprocal(float d) {
    float r = reciprocal_approx(d);
    return __fmaf_rn(__fmaf_rn(-d, r, 1.0f), r, r);
}

/* Returns silu of max(gate, MOQ_SILU_LEAST). */
static __device__ __forceinline__ float silu(float g) {
    float h = fminf(g, MOQ_SILU_MOST);
    return __fmul_rn(g, reciprocal(__fadd_rn(1.0f, moq_exp_of_minus(h))));
}

template <int DT, int N>
__device__ __forceinline__ chunk<DT, N> silu_source::finish(const raw<DT, N> &values) {
    float value[N];
    widen(at_least<DT, N>(values.gate, MOQ_SILU_LEAST), value);
#pragma unroll
    for (int i = 0; i < N; i++)
        value[i] = silu(value[i]);
    return multiply(narrow<DT>(value), values.up);
}

const void *moq_silu_kernel(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan) {
    if (mode == MOQ_WRITE_VALUES)
        return MOQ_SHORT_OR_LONG(dtype, plan, quantize_spans, MOQ_8X1, MOQ_16X2, MOQ_WRITE_VALUES,
                                 silu_source);
    if (mode == MOQ_INPUT_E4M3_TOKEN && plan == MOQ_8X1)
        return MOQ_INSTANCE(dtype, MOQ_8X1, quantize_tokens, silu_source);
    if (mode == MOQ_INPUT_E4M3_TOKEN && plan == MOQ_8X1_SPREAD)
        return MOQ_INSTANCE(dtype, MOQ_8X1_SPREAD, quantize_tokens, silu_source);
    if (mode == MOQ_INPUT_E4M3_TOKEN && plan == MOQ_16X1)
        return MOQ_INSTANCE(dtype, MOQ_16X1, quantize_tokens, silu_source);
    return kernel_of<silu_source>(dtype, mode, plan);
}

} // namespace moq::quantization
