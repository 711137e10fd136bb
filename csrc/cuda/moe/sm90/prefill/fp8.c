/* FP8 experts for prefill on Hopper (fp8.cu, fp8_large.cu). */
#include "cuda/moe/sm90/prefill/prefill_config.h"

#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

enum { CONFIG_COUNT = 2, FORMATS = 3 };

static const moq_rates RATES[CONFIG_COUNT * FORMATS] = {MOQ_RATES_MOE_SM90_FP8_PREFILL};

static int format_of(const moq_moe_spec *spec) {
    return (int)(spec->w13.input - MOQ_INPUT_E4M3_TENSOR);
}

int moq_moe_fp8_tile_rows(const moq_moe_spec *spec, int config) {
    return config == 0 ? 64 : spec->w13.input == MOQ_INPUT_E4M3_GROUP ? 128 : 136;
}

/* Weights whose rows begin within lines of 128 bytes, as every second one of 2880 columns does: two
 * lines have to come for 128 columns of it. */
static double parted_weights(const moq_linear_spec *layer) {
    return layer->in_features % 128 ? (double)layer->in_features * (double)layer->out_features : 0;
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double slots = moq_expected_slots(spec, p->tokens),
           active = moq_active_experts(spec, p->tokens);
    double weights = moq_expert_weights(spec), h = (double)spec->w13.in_features;
    int together = config == 1 && spec->w13.input != MOQ_INPUT_E4M3_GROUP ? 2 : 1;
    int most = moq_moe_fp8_tile_rows(spec, config);
    double rows = together * most * moq_expected_tiles(slots / active, most * together);
    double parted = parted_weights(&spec->w13) + parted_weights(&spec->w2);
    w->rates = config + CONFIG_COUNT * format_of(spec);
    w->bytes = active * weights;
    w->inside[0] = slots * weights / p->target->sm_count;
    w->inside[1] = active * rows * weights / p->target->sm_count;
    w->inside[2] = slots * parted / p->target->sm_count;
    w->beside[0] = slots * h;
    w->beside[1] = h;
    w->beside[2] = active * parted;
    return true;
}

static const moq_configs CONFIGS = {.configs = CONFIG_COUNT, .rates = RATES, .work = work};

static bool can_run(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SM90_FP8_PREFILL, spec, reason, size);
}

MOQ_ENTRY moq_status moq_cuda_moe_fp8_prefill(const moq_moe_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_moe_fp8_prefill_workspace(const moq_moe_call *call);

const moq_moe_kernel MOQ_MOE_SM90_FP8_PREFILL = {
    {"cuda", "sm90_fp8_prefill", .configs = &CONFIGS, .takes_codes = true, .row_order_fixed = true},
    can_run,
    .workspace = moq_cuda_moe_fp8_prefill_workspace,
    .run = moq_cuda_moe_fp8_prefill,
};
