/* Activations between the two projections of an expert: core/moe.h has the formulas. */
#include "cpu/cpu_moe.h"
#include "cpu/sigmoid.h"

/* The gate and what it is multiplied with. A NaN stays one. */
static float cut_gate(float gate, float limit) {
    return gate > limit ? limit : gate;
}

static float cut_up(float up, float limit) {
    float low = up < -limit ? -limit : up;
    return low > limit ? limit : low;
}

/* The product z s(alpha z) is as good as zero below `least`, and has to be where z is enormous. */
static void silu_gated(const moq_moe_spec *s, const float *u, int64_t n, float *g) {
    const float alpha = s->alpha, beta = s->beta, limit = s->limit;
    const float least = alpha > 0.0f ? MOQ_SILU_LEAST / alpha : -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        float cut = cut_gate(u[i], limit), gate = cut < least ? least : cut;
        g[i] = gate * moq_sigmoid(alpha * gate) * (cut_up(u[n + i], limit) + beta);
    }
}

/* The two forms of gelu are as good as zero below this, and have to be where z is infinite. */
#define GELU_LEAST -16.0f

/* The complement keeps the digits of a negative z. */
static float gelu(float z) {
    float low = z < GELU_LEAST ? GELU_LEAST : z;
    return 0.5f * low * erfcf(low * -0x1.6a09e6p-1f); /* 1 / sqrt(2) */
}

/* (1 + tanh(a)) / 2 is the logistic function of 2 a. */
static float gelu_tanh(float z) {
    float low = z < GELU_LEAST ? GELU_LEAST : z;
    return low * moq_sigmoid(0x1.988454p+0f * (low + 0.044715f * low * low * low)); /* sqrt(8/pi) */
}

static float relu2(float z) {
    float r = z < 0.0f ? 0.0f : z;
    return r * r;
}

static float silu(float z) {
    return (z < MOQ_SILU_LEAST ? MOQ_SILU_LEAST : z) * moq_sigmoid(z);
}

/* Instances of one loop each, so that the simple ones become vectors. */
#define ROWS_OF(function)                                                                          \
    static void function##_rows(const moq_moe_spec *s, const float *u, int64_t n, float *g) {      \
        for (int64_t i = 0; i < n; i++)                                                            \
            g[i] = function(u[i]);                                                                 \
        for (int64_t i = 0; i < n && s->gated; i++)                                                \
            g[i] *= u[n + i];                                                                      \
    }

ROWS_OF(silu)
ROWS_OF(gelu)
ROWS_OF(gelu_tanh)
ROWS_OF(relu2)

void moq_cpu_moe_activation(const moq_moe_spec *spec, const float *u, float *g) {
    int64_t n = spec->w2.in_features;
    switch (spec->activation) {
    case MOQ_MOE_SILU:
        if (spec->gated)
            silu_gated(spec, u, n, g);
        else
            silu_rows(spec, u, n, g);
        break;
    case MOQ_MOE_GELU:
        gelu_rows(spec, u, n, g);
        break;
    case MOQ_MOE_GELU_TANH:
        gelu_tanh_rows(spec, u, n, g);
        break;
    case MOQ_MOE_RELU2:
        relu2_rows(spec, u, n, g);
        break;
    }
}
