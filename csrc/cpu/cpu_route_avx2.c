/* The routing of one token for AVX2: see route_token.h. */
#include "cpu/cpu_route.h"
#include "cpu/route_token.h"

void moq_route_token_avx2(const moq_route *route, const float *logits, const float *bias,
                          float *weights, int32_t *ids) {
    route_token(route, logits, bias, weights, ids);
}
