/* The linear kernels of every chip: on plain CUDA cores, and by products of warps. */
#include "cuda/choice/choice.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"

/* Counts W, products of `least` rows of x at least, and K. */
static bool count(const moq_problem *p, double bytes, int64_t least, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double rows = (double)(p->tokens < least ? least : p->tokens);
    w->bytes = bytes * n * k;
    w->inside[0] = n * k * rows / p->target->sm_count;
    w->beside[0] = k;
    w->beside[1] = (double)p->tokens * k;
    return true;
}

#define FAMILY(name, least, bytes)                                                                 \
    static const moq_rates name##_RATES[] = {MOQ_RATES_##name};                                    \
    static bool work_##name(const moq_problem *p, int config, moq_load *w) {                       \
        (void)config;                                                                              \
        return count(p, bytes, least, w);                                                          \
    }                                                                                              \
    const moq_configs MOQ_##name = {                                                               \
        .configs = 1, .any_chip = true, .rates = name##_RATES, .work = work_##name};

FAMILY(SIMT, 1, 1)
FAMILY(MMA_FP8_AS_F16, 16, 1)
FAMILY(MMA_FP8_AS_E4M3, 16, 1)
FAMILY(MMA_NVFP4, 8, MOQ_NVFP4_BYTES)
