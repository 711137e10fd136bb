/* Routing on the CPU, on all threads. See core/route.h. */
#ifndef MOQ_CPU_CPU_ROUTE_H
#define MOQ_CPU_CPU_ROUTE_H

#include "core/route.h"

/* Writes weights (float32) and ids (int32), both [..., top_k] without gaps. */
void moq_cpu_route(const moq_route *route, float *weights, int32_t *ids);

/* Routes one token. Its logits are followed by NaN up to a multiple of MOQ_ROUTE_LANES, and so is
 * the bias, which is NULL where there is none. */
typedef void (*moq_route_token)(const moq_route *route, const float *logits, const float *bias,
                                float *weights, int32_t *ids);

/* One for each level of vector extensions, with the same bits. */
void moq_route_token_portable(const moq_route *route, const float *logits, const float *bias,
                              float *weights, int32_t *ids);
void moq_route_token_avx2(const moq_route *route, const float *logits, const float *bias,
                          float *weights, int32_t *ids);
void moq_route_token_avx512(const moq_route *route, const float *logits, const float *bias,
                            float *weights, int32_t *ids);

#endif
