/* Numbers that the codes of activations mean, for kernels that multiply them as such. The
 * arithmetic is that of cpu/cpu_quantize.h, so that these are the numbers of the same codes. */
#ifndef MOQ_CUDA_DEVICE_ROUND_H
#define MOQ_CUDA_DEVICE_ROUND_H

#include "core/formats.h"
#include "cuda/device/load.h"

namespace moq {

/* Returns the nearest value of a format with `fraction` bits of significand, ties to even; `lowest`
 * is the exponent of its smallest normal number. Values beyond `most` become `most`, NaN stays. */
static __device__ __forceinline__ float round_to_format(float value, int fraction, int lowest,
                                                        float most) {
    float magnitude = fabsf(value);
    if (!(magnitude <= most))
        return value != value ? value : copysignf(most, value);
    uint32_t exponent =
        max(__float_as_uint(magnitude) & 0x7f800000u, (uint32_t)(127 + lowest) << 23);
    float grid = __uint_as_float(exponent + ((uint32_t)(23 - fraction) << 23));
    return copysignf(__fsub_rn(__fadd_rn(magnitude, grid), grid), value);
}

/* Rounds to the values of int8 codes; NaN stays. */
static __device__ __forceinline__ float round_int8(float value) {
    float rounded = rintf(value);
    return rounded > 127.0f ? 127.0f : rounded < -128.0f ? -128.0f : rounded;
}

static __device__ __forceinline__ float round_e4m3(float value) {
    return round_to_format(value, 3, -6, MOQ_E4M3_MAX);
}

static __device__ __forceinline__ float round_e2m1(float value) {
    return round_to_format(value, 1, 0, MOQ_E2M1_MAX);
}

/* Rounds a group of NVFP4 under the scale of the tensor to codes times their block scale, which
 * have six significant bits and lie between 2^-10 and 2688, or are 0. */
static __device__ __forceinline__ void round_nvfp4(float (&value)[MOQ_NVFP4_GROUP], float scale) {
    float amax = __uint_as_float(moq_amax_bits(value));
    float block = round_e4m3(__fdiv_rn(amax, __fmul_rn(MOQ_E2M1_MAX, scale)));
    float step = __fmul_rn(block, scale);
#pragma unroll
    for (int i = 0; i < MOQ_NVFP4_GROUP; i++)
        value[i] = step == 0.0f ? 0.0f : __fmul_rn(round_e2m1(__fdiv_rn(value[i], step)), block);
}

} // namespace moq

#endif
