/* Routing: which experts of a mixture take a token, and with what weights.
 *
 * A token has one logit for each expert. Its `top_k` experts are the best by a value v of each, the
 * best first and of equals the lower index first:
 *
 *   without a bias v is the logit itself: every score rises with it, and logits that differ never
 *   become equal, as float32 scores do where a sigmoid saturates;
 *   with a bias v = score + bias, in float32.
 *
 * Of `groups` groups of neighbours only `top_groups` have a say: the best by the largest v in them
 * or, with a bias, by the sum of the two largest (the largest where a group is one expert); of
 * equals the lower index.
 *
 * -0 equals +0. A NaN, in a logit, as v or as the value of a group, is less than everything else,
 * -infinity included, and one NaN equals another.
 *
 * Weights come from scores without bias. m is the largest logit, S the sum of all scores, D the sum
 * of the chosen ones; the score of a NaN is 0 in both.
 *
 *   softmax        u = exp(x - m), 1 where x is m;    score u / S
 *   topk_softmax   u as softmax has it, and `renormalize` always holds; takes no bias
 *   sigmoid        u = 1 / (1 + e) from x = 0 on, e / (1 + e) below, e = exp(-|x|);    score u
 *   sqrtsoftplus   u = sqrt(max(x, 0) + log1p(e)), e = exp(-|x|);    score u
 *
 *   weight = u / (D + 1e-20) * factor    where `renormalize` holds, D of the chosen u
 *   weight = score * factor              where it does not; a NaN where the logit is a NaN
 *
 * Tokens that are padding have no experts: -1 in the place of every id, and weights as they were.
 *
 * All arithmetic is float32, each operation rounded once, in the order given here, so that ids and
 * weights have the same bits on every processor, with any number of threads. D is added up from 0
 * in the order of the chosen experts. S is 32 sums, of the experts whose index leaves the same
 * rest, each from 0 in the order of the experts; then sum j and sum j + 16 are added, j and j + 8,
 * j and j + 4, j and j + 2, j and j + 1.
 *
 * exp(y), y <= 0: 0 below -87, where float32 nearly ends, else
 *   n = rint(y * log2(e)), the product not rounded, r = fma(n, -LN2_LOW, fma(n, -LN2, y)),
 *   q = C0 + C1 r + ... + C4 r^4 by Horner's rule with fma,
 *   exp = (1 + fma(q, r * r, r)) * 2^n
 * log1p(e), 0 <= e <= 1: z = e / (2 + e), w = z * z, t = z + z;
 *   p = L0 + L1 w + L2 w^2 + L3 w^3 by Horner's rule with fma; log1p = fma(t, w * p, t).
 *
 * Both are within 2 units in the last place; the coefficients are those of the least maximum of the
 * relative error on the interval (3.6e-9 and 5.7e-9), found by iterated weighted least squares. */
#ifndef MOQ_CORE_ROUTE_H
#define MOQ_CORE_ROUTE_H

#include "core/tensor.h"

/* Scratch of a row fits the first-level cache; the largest models have 512 experts, top 22. */
#define MOQ_ROUTE_EXPERTS 1024
#define MOQ_ROUTE_TOP_K   32
#define MOQ_ROUTE_LANES   32 /* sums that S is made of */
#define MOQ_ROUTE_TINY    1e-20f

#define MOQ_ROUTE_LEAST -87.0f
#define MOQ_LOG2E       0x1.715476p+0f
#define MOQ_LN2         0x1.62e43p-1f
#define MOQ_LN2_LOW     -0x1.05c61p-29f
#define MOQ_EXP_C0      0x1.fffffcp-2f
#define MOQ_EXP_C1      0x1.555492p-3f
#define MOQ_EXP_C2      0x1.5558f2p-5f
#define MOQ_EXP_C3      0x1.123a2p-7f
#define MOQ_EXP_C4      0x1.6a23dp-10f
#define MOQ_LOG1P_L0    0x1.555502p-2f
#define MOQ_LOG1P_L1    0x1.99d22p-3f
#define MOQ_LOG1P_L2    0x1.1ebb62p-3f
#define MOQ_LOG1P_L3    0x1.1ee0aap-3f

typedef enum {
    MOQ_ROUTE_SOFTMAX,
    MOQ_ROUTE_TOPK_SOFTMAX,
    MOQ_ROUTE_SIGMOID,
    MOQ_ROUTE_SQRTSOFTPLUS
} moq_route_scoring;

typedef struct {
    moq_route_scoring scoring;
    bool renormalize;
    int32_t experts; /* 1 to MOQ_ROUTE_EXPERTS, a multiple of groups */
    int32_t top_k;   /* 1 to MOQ_ROUTE_TOP_K, no more than experts in top_groups groups */
    int32_t groups;
    int32_t top_groups; /* 1 to groups */
    float factor;       /* positive and finite */
    moq_tensor logits;  /* [..., experts] of float32, bfloat16 or float16, any strides */
    moq_tensor bias;    /* [experts] of one of these; ndim -1 where there is none */
    moq_tensor padding; /* [...] bool without gaps, true for padding; ndim -1 where there is none */
} moq_route;

#endif
