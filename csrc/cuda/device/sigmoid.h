/* The logistic function in float32, operation by operation as core/activation.h has it, so that its
 * bits are those of cpu/sigmoid.h. */
#ifndef MOQ_CUDA_DEVICE_SIGMOID_H
#define MOQ_CUDA_DEVICE_SIGMOID_H

#include "core/activation.h"
#include "cuda/device/ptx.h"

namespace moq {

/* 1 / d, rounded as __frcp_rn does it, for d from 1 to 2^120. */
static __device__ __forceinline__ float moq_reciprocal(float d) {
    float r = reciprocal_near(d);
    return __fmaf_rn(__fmaf_rn(-d, r, 1.0f), r, r);
}

/* 1 / (1 + exp(-z)) of z from MOQ_SILU_LEAST on. */
static __device__ __forceinline__ float moq_sigmoid(float z) {
    float h = fminf(z, MOQ_SILU_MOST);
    float shifted = __fmaf_rn(h, MOQ_MINUS_LOG2E, MOQ_RINT_MAGIC);
    float f = __fmaf_rn(h, MOQ_MINUS_LOG2E, -__fsub_rn(shifted, MOQ_RINT_MAGIC));
    float p = __fmaf_rn(MOQ_EXP2_C5, f, MOQ_EXP2_C4);
    p = __fmaf_rn(p, f, MOQ_EXP2_C3);
    p = __fmaf_rn(p, f, MOQ_EXP2_C2);
    p = __fmaf_rn(p, f, MOQ_EXP2_C1);
    p = __fmaf_rn(p, f, 1.0f);
    p = __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
    return moq_reciprocal(__fadd_rn(1.0f, p));
}

} // namespace moq

#endif
