/* Activations between the two projections of an expert on the device. core/moe.h has the formulas,
 * which cpu/cpu_moe_activation.c shares. */
#ifndef MOQ_CUDA_MOE_EXPERT_ACTIVATION_H
#define MOQ_CUDA_MOE_EXPERT_ACTIVATION_H

#include "core/moe.h"
#include "cuda/device/logistic.h"

#include <math.h>

namespace moq::moe {

typedef struct {
    moq_moe_activation kind;
    float alpha, beta, limit, least;
} activation;

static inline activation activation_of(const moq_moe_spec *spec) {
    activation a = {spec->activation, 1.0f, 0.0f, INFINITY, 0.0f};
    if (spec->gated) { /* activations without a gate have no parameters */
        a.alpha = spec->alpha;
        a.beta = spec->beta;
        a.limit = spec->limit;
    }
    a.least = a.alpha > 0.0f ? MOQ_SILU_LEAST / a.alpha : -INFINITY;
    return a;
}

/* Gelu of either form is zero in float32 below this. */
#define GELU_LEAST -16.0f

static __device__ __forceinline__ float gelu(float z) {
    float low = z < GELU_LEAST ? GELU_LEAST : z;
    return 0.5f * low * erfcf(low * -0x1.6a09e6p-1f); /* 1 / sqrt(2) */
}

/* Returns gelu by tanh: (1 + tanh(a)) / 2 is the logistic function of 2 a. */
static __device__ __forceinline__ float gelu_tanh(float z) {
    float low = z < GELU_LEAST ? GELU_LEAST : z;
    return low * moq_sigmoid(0x1.988454p+0f * (low + 0.044715f * low * low * low)); /* sqrt(8/pi) */
}

static __device__ __forceinline__ float relu2(float z) {
    float r = z < 0.0f ? 0.0f : z;
    return r * r;
}

/* Returns silu without a limit, as activate_as does with an infinite one. */
static __device__ __forceinline__ float silu_without_limit(const activation *a, float gate,
                                                           float up) {
    float g = gate < a->least ? a->least : gate;
    return g * moq_sigmoid(a->alpha * g) * (up + a->beta);
}

/* Applies the activation to a gate and to up, which is 1 without a gate. NaN stays NaN. */
template <moq_moe_activation KIND>
static __device__ __forceinline__ float activate_as(const activation *a, float gate, float up) {
    if (KIND == MOQ_MOE_GELU)
        return gelu(gate) * up;
    if (KIND == MOQ_MOE_GELU_TANH)
        return gelu_tanh(gate) * up;
    if (KIND == MOQ_MOE_RELU2)
        return relu2(gate) * up;
    float cut = gate > a->limit ? a->limit : gate, g = cut < a->least ? a->least : cut;
    float low = up < -a->limit ? -a->limit : up;
    return g * moq_sigmoid(a->alpha * g) * ((low > a->limit ? a->limit : low) + a->beta);
}

static __device__ __forceinline__ float activate(const activation *a, float gate, float up) {
    switch (a->kind) {
    case MOQ_MOE_GELU:
        return activate_as<MOQ_MOE_GELU>(a, gate, up);
    case MOQ_MOE_GELU_TANH:
        return activate_as<MOQ_MOE_GELU_TANH>(a, gate, up);
    case MOQ_MOE_RELU2:
        return activate_as<MOQ_MOE_RELU2>(a, gate, up);
    default:
        return activate_as<MOQ_MOE_SILU>(a, gate, up);
    }
}

} // namespace moq::moe

#endif
