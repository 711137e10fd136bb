/* The routing of one token, in plain C that the compiler makes vectors of: see core/route.h.
 *
 * Each file that includes it is compiled for one level of vector extensions. Rows are padded to
 * whole vectors. What bounds it is latency: a chosen expert takes 29 ns, which are two maxima of a
 * few vectors and a load that waits for the store before it; besides, 256 logits take 90 ns to be
 * ranked and 90 to 140 ns to be scored (one Zen 4 core with AVX-512). */
#ifndef MOQ_CPU_ROUTE_TOKEN_H
#define MOQ_CPU_ROUTE_TOKEN_H

#include "core/route.h"

#include <math.h>
#include <string.h>

/* ---- scores ---- */

/* A constant that, added to a float, makes its lowest bits the integer next to it. */
#define RINT_MAGIC 12582912.0f

/* exp(y) for y <= 0; 0 for a NaN. */
static inline float exp_below(float y) {
    float in = y >= MOQ_ROUTE_LEAST ? y : MOQ_ROUTE_LEAST;
    float shifted = fmaf(in, MOQ_LOG2E, RINT_MAGIC), n = shifted - RINT_MAGIC;
    float r = fmaf(n, -MOQ_LN2_LOW, fmaf(n, -MOQ_LN2, in)), q = MOQ_EXP_C4, e;
    uint32_t bits, exponent;
    q = fmaf(q, r, MOQ_EXP_C3);
    q = fmaf(q, r, MOQ_EXP_C2);
    q = fmaf(q, r, MOQ_EXP_C1);
    q = fmaf(q, r, MOQ_EXP_C0);
    e = 1.0f + fmaf(q, r * r, r);
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &e, sizeof bits);
    bits += exponent << 23;
    memcpy(&e, &bits, sizeof e);
    return y >= MOQ_ROUTE_LEAST ? e : 0.0f;
}

static inline float log1p_of(float e) {
    float z = e / (2.0f + e), w = z * z, t = z + z, p = MOQ_LOG1P_L3;
    p = fmaf(p, w, MOQ_LOG1P_L2);
    p = fmaf(p, w, MOQ_LOG1P_L1);
    p = fmaf(p, w, MOQ_LOG1P_L0);
    return fmaf(t, w * p, t);
}

static inline float sigmoid_of(float x) {
    float e = exp_below(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

static inline float sqrtsoftplus_of(float x) {
    return sqrtf((x > 0.0f ? x : 0.0f) + log1p_of(exp_below(-fabsf(x))));
}

/* u of n logits, of which the largest of the token is `most`. */
static void score(moq_route_scoring scoring, const float *restrict x, int n, float most,
                  float *restrict u) {
    switch (scoring) {
    case MOQ_ROUTE_SOFTMAX:
    case MOQ_ROUTE_TOPK_SOFTMAX:
        for (int i = 0; i < n; i++)
            u[i] = exp_below(x[i] == most ? 0.0f : x[i] - most);
        return;
    case MOQ_ROUTE_SIGMOID:
        for (int i = 0; i < n; i++)
            u[i] = sigmoid_of(x[i]);
        return;
    case MOQ_ROUTE_SQRTSOFTPLUS:
        for (int i = 0; i < n; i++)
            u[i] = sqrtsoftplus_of(x[i]);
        return;
    }
}

/* S, of n scores with zeros up to a whole number of lanes. */
static float sum_of_lanes(const float *u, int n) {
    float lane[MOQ_ROUTE_LANES] = {0};
    for (int i = 0; i < n; i += MOQ_ROUTE_LANES) {
        for (int j = 0; j < MOQ_ROUTE_LANES; j++)
            lane[j] += u[i + j];
    }
    for (int half = MOQ_ROUTE_LANES / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    }
    return lane[0];
}

/* ---- ranks ---- */

/* A value and an index as one number: the larger value, and of equals the lower index, is the
 * larger rank. The upper half is the bits of the value, those of a negative one but the sign
 * inverted, which orders them as integers; a NaN is the least integer. */
typedef int64_t rank;

#define RANK_STEP ((int64_t)1 << 32)
#define NO_RANK   INT64_MIN /* below every rank */

static inline rank rank_of(float value, int32_t index) {
    int32_t bits;
    value += 0.0f; /* -0 becomes +0 */
    memcpy(&bits, &value, sizeof bits);
    bits = value == value ? bits ^ ((bits >> 31) & INT32_MAX) : INT32_MIN;
    return bits * RANK_STEP + (INT32_MAX - index);
}

static inline float value_of(rank r) {
    int32_t bits = (int32_t)(r >> 32);
    float value;
    bits ^= (bits >> 31) & INT32_MAX;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t index_of(rank r) {
    return INT32_MAX - (int32_t)(r & UINT32_MAX);
}

static inline rank most_of(const rank *ranks, int n) {
    rank most = NO_RANK;
    for (int i = 0; i < n; i++)
        most = ranks[i] > most ? ranks[i] : most;
    return most;
}

/* Takes the best away `count` times; their indices go to `best`. A whole number of lanes. The best
 * of each lane-wide block is kept, so that a search looks at one block and the best of all. */
static void take_best(rank *ranks, int n, int count, int32_t *best) {
    rank block[MOQ_ROUTE_EXPERTS / MOQ_ROUTE_LANES];
    int blocks = n / MOQ_ROUTE_LANES;
    for (int b = 0; b < blocks; b++)
        block[b] = most_of(ranks + b * MOQ_ROUTE_LANES, MOQ_ROUTE_LANES);
    for (int t = 0; t < count; t++) {
        best[t] = index_of(most_of(block, blocks));
        int b = best[t] / MOQ_ROUTE_LANES;
        ranks[best[t]] = NO_RANK;
        block[b] = most_of(ranks + b * MOQ_ROUTE_LANES, MOQ_ROUTE_LANES);
    }
}

/* The rank of a group by the ranks of its n members, the first of which is expert `begin`. */
static rank rank_group(rank *member, int n, int32_t begin, bool two, int32_t group) {
    rank first = most_of(member, n);
    if (!two || n == 1)
        return rank_of(value_of(first), group);
    member[index_of(first) - begin] = NO_RANK;
    rank second = most_of(member, n);
    member[index_of(first) - begin] = first;
    return rank_of(value_of(first) + value_of(second), group);
}

/* Takes the ranks of experts away whose group has no say. */
static void keep_groups(const moq_route *route, bool biased, rank *ranks) {
    int size = route->experts / route->groups;
    rank group[MOQ_ROUTE_EXPERTS];
    bool kept[MOQ_ROUTE_EXPERTS];
    for (int g = 0; g < route->groups; g++) {
        group[g] = rank_group(ranks + g * size, size, g * size, biased, g);
        kept[g] = false;
    }
    for (int t = 0; t < route->top_groups; t++) {
        int32_t best = index_of(most_of(group, route->groups));
        kept[best] = true;
        group[best] = NO_RANK;
    }
    for (int g = 0; g < route->groups; g++) {
        for (int i = g * size; i < (g + 1) * size; i++)
            ranks[i] = kept[g] ? ranks[i] : NO_RANK;
    }
}

/* ---- a token ---- */

static inline void route_token(const moq_route *route, const float *logits, const float *bias,
                               float *weights, int32_t *ids) {
    bool softmax = route->scoring == MOQ_ROUTE_SOFTMAX;
    bool sums_chosen = route->renormalize || route->scoring == MOQ_ROUTE_TOPK_SOFTMAX;
    int padded = (route->experts + MOQ_ROUTE_LANES - 1) / MOQ_ROUTE_LANES * MOQ_ROUTE_LANES;
    rank ranks[MOQ_ROUTE_EXPERTS];
    float scores[MOQ_ROUTE_EXPERTS], chosen[MOQ_ROUTE_TOP_K], u[MOQ_ROUTE_TOP_K];
    float divisor = 1.0f;
    for (int i = 0; i < padded; i++)
        ranks[i] = rank_of(logits[i], i);
    float most = value_of(most_of(ranks, padded));
    if (bias != NULL || (softmax && !sums_chosen))
        score(route->scoring, logits, padded, most, scores);
    if (softmax && (bias != NULL || !sums_chosen))
        divisor = sum_of_lanes(scores, padded);
    if (bias != NULL) {
        for (int i = 0; i < padded; i++) {
            float v = scores[i] / divisor + bias[i];
            ranks[i] = rank_of(logits[i] == logits[i] ? v : NAN, i);
        }
    }
    if (route->top_groups < route->groups)
        keep_groups(route, bias != NULL, ranks);
    take_best(ranks, padded, route->top_k, ids); /* the padding is less than any expert */
    for (int t = 0; t < route->top_k; t++)
        chosen[t] = logits[ids[t]];
    score(route->scoring, chosen, route->top_k, most, u);
    if (sums_chosen) {
        divisor = 0.0f;
        for (int t = 0; t < route->top_k; t++)
            divisor += u[t];
        divisor += MOQ_ROUTE_TINY;
    }
    for (int t = 0; t < route->top_k; t++)
        weights[t] = chosen[t] == chosen[t] ? u[t] / divisor * route->factor : NAN;
}

#endif
