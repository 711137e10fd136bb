/* Activations: what a layer does to its input before it quantizes it, where one pass does both.
 *
 * All arithmetic is float32, each operation rounded once, in the order given here, so that every
 * processor has the same bits. "Rounded" without more is to the dtype of x, as a model does that
 * writes each step to memory.
 *
 * silu_and_mul: x [..., 2K] is gate and up; v = rounded(rounded(silu(gate)) * up).
 *   g = max(gate, -80), h = min(g, 20);
 *   n = rint(h * -log2(e)), f = fma(h, -log2(e), -n),
 *   e = 2^n * p(f), p by Horner's rule with fma from MOQ_EXP2_C5 to C1 and 1;
 *   silu = g * (1 / (1 + e)). It is within 2^-19 of the true one down to -80, and -1.4e-33 below.
 *
 * rms_norm: z = x, or rounded(x + residual); v = rounded(rounded(z * r) * weight), where
 *   r = 1 / sqrt(s / K + eps), and s is the sum of z * z: 8 neighbours in their order by fma,
 * begun with 0, such sums pairwise (0 where there are none), and those of each 16384 values in
 * their order. */
#ifndef MOQ_CORE_ACTIVATION_H
#define MOQ_CORE_ACTIVATION_H

#include "core/tensor.h"

#define MOQ_SILU_LEAST  -80.0f
#define MOQ_SILU_MOST   20.0f /* 1 + exp(-20) is 1 */
#define MOQ_MINUS_LOG2E -0x1.715476p+0f
/* 2^f = 1 + C1 f + ... + C5 f^5 on [-1/2, 1/2], relative error 1.1e-7: least maximum of it among
 * polynomials with C0 = 1, found by iterated weighted least squares. */
#define MOQ_EXP2_C1 0x1.62e42ap-1f
#define MOQ_EXP2_C2 0x1.ebf9bcp-3f
#define MOQ_EXP2_C3 0x1.c6b752p-5f
#define MOQ_EXP2_C4 0x1.3cea88p-7f
#define MOQ_EXP2_C5 0x1.5bba14p-10f
/* A constant that, added and taken away again, rounds to an integer, which is in the low bits
 * meanwhile. */
#define MOQ_RINT_MAGIC 12582912.0f

/* Values that are summed in their order, and values whose sums are added pairwise. */
#define MOQ_NORM_RUN  8
#define MOQ_NORM_TREE 16384

typedef enum { MOQ_ACTIVATION_NONE, MOQ_SILU_AND_MUL, MOQ_RMS_NORM } moq_activation_kind;

typedef struct {
    moq_activation_kind kind;
    moq_tensor x;        /* [..., K]; [..., 2K] of silu_and_mul */
    moq_tensor weight;   /* rms_norm: [K] of the dtype of x or float32 */
    moq_tensor residual; /* rms_norm: of the shape and dtype of x; ndim -1 where there is none */
    moq_tensor residual_out; /* where z goes: without gaps; it may be `residual` itself */
    moq_tensor value_out; /* rms_norm, quantized: where v goes as well, without gaps; or no data */
    float eps;
} moq_activation;

#endif
