/* The search for the best config of a kernel: see search.h. */
#include "cuda/choice/search.h"

#include <math.h>

/* Seconds of a config without rates: it can be measured, but is not chosen. */
#define NOT_MEASURED 1.0

static double norm(double a, double b, double power) {
    return pow(pow(a, power) + pow(b, power), 1 / power);
}

static double sum_of(const double *counts, const float *rates, int terms) {
    double sum = 0;
    for (int i = 0; i < terms; i++)
        sum += counts[i] * rates[i];
    return sum;
}

static double seconds_of(const moq_configs *f, const moq_load *w, const moq_rates *r,
                         const moq_target *target) {
    double memory = 1e-6 * w->bytes / (r->bandwidth * target->memory);
    double cores = f->library ? target->library : target->cores;
    double inside = sum_of(w->inside, r->inside, MOQ_INSIDE) / cores;
    double beside = sum_of(w->beside, r->beside, MOQ_BESIDE);
    return 1e-6 * (r->launch + beside + norm(memory, inside, r->power));
}

static bool suits_layer(const moq_configs *f, const moq_problem *p, int config) {
    const moq_linear_spec *spec = p->layer;
    return !spec->batch_invariant || !f->row_order_fixed || f->row_order_fixed(config);
}

moq_found moq_try_config(const moq_configs *f, const moq_problem *p, int config) {
    moq_load w = {.rates = config, .blocks = 1};
    if (config >= f->configs || !suits_layer(f, p, config) || !f->work(p, config, &w))
        return (moq_found){0, 1, INFINITY};
    const moq_rates *r = &f->rates[w.rates];
    double seconds = r->bandwidth > 0 ? seconds_of(f, &w, r, p->target) : NOT_MEASURED;
    return (moq_found){config, w.blocks, seconds};
}

moq_found moq_find_config(const moq_configs *f, const moq_problem *p) {
    moq_found best = {0, 1, INFINITY};
    for (int i = 0; i < f->configs; i++) {
        moq_found other = moq_try_config(f, p, i);
        if (other.seconds < best.seconds)
            best = other;
    }
    return best;
}

static moq_found find_variant(const moq_configs *f, const moq_problem *p, int32_t variant) {
    moq_found found = {0, 1, INFINITY};
    if (variant > 0)
        found = moq_try_config(f, p, variant - 1);
    return found.seconds < INFINITY ? found : moq_find_config(f, p);
}

moq_kernel_config moq_choose_config(const moq_configs *f, const moq_problem *p, int32_t variant) {
    moq_problem of = *p;
    of.tokens = f->library ? moq_token_bucket(p->tokens) : p->tokens;
    moq_found best = find_variant(f, &of, f->library ? 0 : variant);
    int name = f->library ? variant : best.seconds < INFINITY ? best.config + 1 : 0;
    moq_kernel_config chosen = moq_kernel_config_of(name, best.config, best.blocks);
    if (f->by_scale) {
        of.scaled = false;
        best = find_variant(f, &of, variant);
        chosen.dynamic_tiling = MOQ_TILING(best.config, best.blocks);
    }
    return chosen;
}

int moq_config_of(const moq_configs *f, moq_kernel_config chosen, bool scaled) {
    return f->by_scale || f->library
               ? moq_tiling_row(scaled ? chosen.tiling : chosen.dynamic_tiling)
               : chosen.variant - 1;
}

uint64_t moq_configs_near(const moq_configs *f, const moq_problem *p) {
    double limit = 1.5 * moq_find_config(f, p).seconds;
    uint64_t fast = 1;
    for (int i = 0; i < f->configs; i++)
        if (moq_try_config(f, p, i).seconds < limit)
            fast |= 2ull << i;
    return fast;
}
