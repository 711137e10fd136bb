/* Routing on the CPU: see cpu_route.h. A token at a time, read as float32. */
#include "cpu/cpu_route.h"

#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

#include <math.h>

/* Logits that a member of a team gets at least: 10 microseconds. */
#define THREAD_SHARE 8192
/* The time that a logit and a token take, roughly: top 8 of 256 and top 2 of 8 on a Zen 4. */
#define LOGIT_NANOSECONDS 1.2
#define TOKEN_NANOSECONDS 70.0

typedef struct {
    const moq_route *route;
    moq_route_token token;
    const float *bias; /* padded; NULL where there is none */
    float *weights;
    int32_t *ids;
    const uint8_t *padding; /* of tokens; NULL where there is none */
} job;

static moq_route_token token_function(void) {
#ifdef __x86_64__
    moq_isa isa = moq_cpu_isa();
    if (isa >= MOQ_ISA_AVX512)
        return moq_route_token_avx512;
    if (isa >= MOQ_ISA_AVX2)
        return moq_route_token_avx2;
#endif
    return moq_route_token_portable;
}

/* Row `row` of a tensor as float32, with NaN behind it up to whole lanes. */
static void load_padded(const moq_tensor *t, int64_t row, float *out) {
    moq_load_row(t, row, out);
    for (int64_t n = moq_row_length(t); n % MOQ_ROUTE_LANES != 0; n++)
        out[n] = NAN;
}

static void work(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    const moq_route *route = j->route;
    float logits[MOQ_ROUTE_EXPERTS];
    moq_pace pace = {0};
    for (int64_t row = begin; row < end && !moq_stops(&pace, route->experts); row++) {
        int32_t *ids = j->ids + row * route->top_k;
        load_padded(&route->logits, row, logits);
        j->token(route, logits, j->bias, j->weights + row * route->top_k, ids);
        for (int32_t t = 0; j->padding && j->padding[row] && t < route->top_k; t++)
            ids[t] = -1;
    }
}

void moq_cpu_route(const moq_route *route, float *weights, int32_t *ids) {
    float bias[MOQ_ROUTE_EXPERTS];
    job j = {.route = route, .token = token_function(), .weights = weights, .ids = ids};
    if (route->padding.ndim >= 0)
        j.padding = route->padding.data;
    if (route->bias.ndim >= 0) {
        load_padded(&route->bias, 0, bias);
        j.bias = bias;
    }
    int64_t rows = moq_row_count(&route->logits);
    moq_shares shares = {.count = rows,
                         .grain = (THREAD_SHARE + route->experts - 1) / route->experts,
                         .nanoseconds = (double)rows *
                                        (LOGIT_NANOSECONDS * route->experts + TOKEN_NANOSECONDS)};
    moq_parallel_for(&shares, work, &j);
}
