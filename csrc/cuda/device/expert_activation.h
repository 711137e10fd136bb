/* Activations between the two projections of an expert, in float32: core/moe.h has the formulas,
 * cpu/cpu_moe_activation.c is the same for the CPU. */
#ifndef MOQ_CUDA_DEVICE_EXPERT_ACTIVATION_H
#define MOQ_CUDA_DEVICE_EXPERT_ACTIVATION_H

#include "core/moe.h"
#include "cuda/device/logistic.h"

#include <math.h>

namespace moq {

typedef struct {
    moq_moe_activation kind;
    bool gated;
    float alpha, beta, limit;
    float least; /* below it a gate of silu is as good as zero */
} moq_expert_activation;

static inline moq_expert_activation moq_expert_activation_of(const moq_moe_spec *spec) {
    moq_expert_activation a = {
        spec->activation, spec->gated,
        spec->alpha,      spec->beta,
        spec->limit,      spec->alpha > 0.0f ? MOQ_SILU_LEAST / spec->alpha : -INFINITY};
    return a;
}

/* Of comparisons, not minima: a NaN stays one. */
static __device__ __forceinline__ float moq_not_below(float value, float least) {
    return value < least ? least : value;
}

static __device__ __forceinline__ float moq_not_above(float value, float most) {
    return value > most ? most : value;
}

/* gelu, gelu_tanh and relu2, out of line: silu is what models have. Below -16 either gelu is as
 * good as zero, and has to be where z is infinite. */
static __device__ __noinline__ float moq_activate_rarely(moq_moe_activation kind, float z) {
    if (kind == MOQ_MOE_RELU2) {
        float r = moq_not_below(z, 0.0f);
        return r * r;
    }
    float low = moq_not_below(z, -16.0f);
    if (kind == MOQ_MOE_GELU)
        return 0.5f * low * erfcf(low * -0x1.6a09e6p-1f); /* 1 / sqrt(2) */
    return low *
           moq_sigmoid(0x1.988454p+0f * (low + 0.044715f * low * low * low)); /* sqrt(8 / pi) */
}

/* What the gate, or the row where there is none, becomes. */
static __device__ __forceinline__ float moq_activate_gate(const moq_expert_activation *a, float z) {
    if (a->kind != MOQ_MOE_SILU)
        return moq_activate_rarely(a->kind, z);
    float gate = moq_not_below(moq_not_above(z, a->limit), a->least);
    return gate * moq_sigmoid(a->alpha * gate);
}

/* act(u) of gate and up; `up` means nothing where there is no gate. */
static __device__ __forceinline__ float moq_activate(const moq_expert_activation *a, float gate,
                                                     float up) {
    float value = moq_activate_gate(a, gate);
    if (!a->gated)
        return value;
    if (a->kind == MOQ_MOE_SILU)
        up = moq_not_above(moq_not_below(up, -a->limit), a->limit) + a->beta;
    return value * up;
}

} // namespace moq

#endif
