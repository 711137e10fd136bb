/* Logistic function and exp(-h) on the device, as core/activation.h defines them: the bits of
 * cpu/sigmoid.h. */
#ifndef MOQ_CUDA_DEVICE_LOGISTIC_H
#define MOQ_CUDA_DEVICE_LOGISTIC_H

#include "core/activation.h"

#include <cuda_runtime.h>

namespace moq {

/* Returns exp(-h) for MOQ_SILU_LEAST <= h <= MOQ_SILU_MOST. */
static __device__ __forceinline__ float moq_exp_of_minus(float h) {
    float shifted = __fmaf_rn(h, MOQ_MINUS_LOG2E, MOQ_RINT_MAGIC);
    float f = __fmaf_rn(h, MOQ_MINUS_LOG2E, -__fsub_rn(shifted, MOQ_RINT_MAGIC));
    float p = __fmaf_rn(MOQ_EXP2_C5, f, MOQ_EXP2_C4);
    p = __fmaf_rn(p, f, MOQ_EXP2_C3);
    p = __fmaf_rn(p, f, MOQ_EXP2_C2);
    p = __fmaf_rn(p, f, MOQ_EXP2_C1);
    p = __fmaf_rn(p, f, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

/* Returns 1 / x rounded to nearest for 2^-125 < x < 2^125. Within that range it equals __frcp_rn,
 * without its branch for other numbers, which costs more than the rest when unrolled. */
static __device__ __forceinline__ float moq_reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, -__fmaf_rn(r, x, -1.0f), r);
}

/* Returns 1 / (1 + exp(-z)), with z clamped to the range of moq_exp_of_minus. The result for NaN is
 * unspecified, since callers multiply it by z. */
static __device__ __forceinline__ float moq_sigmoid(float z) {
    float h = fminf(fmaxf(z, MOQ_SILU_LEAST), MOQ_SILU_MOST);
    return moq_reciprocal(__fadd_rn(1.0f, moq_exp_of_minus(h)));
}

} // namespace moq

#endif
