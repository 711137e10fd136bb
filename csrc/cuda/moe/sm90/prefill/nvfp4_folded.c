/* NVFP4 experts with FP8 products for prefill on Hopper (nvfp4_folded.cu). */
#include "cuda/moe/sm90/prefill/prefill_config.h"

#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

static const moq_rates RATES[MOQ_MOE_FOLDED_CONFIGS] = {MOQ_RATES_MOE_SM90_NVFP4_FP8_PREFILL};

/* Pairs of blocks take tiles of 256 rows of W in turn, and the last round is as long as any. */
static double rounds_of(const moq_linear_spec *layer, double tiles) {
    double pairs = fmax(1, layer->target.sm_count / 2);
    return ceil(tiles * ceil((double)layer->out_features / 256) / pairs);
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double slots = moq_expected_slots(spec, p->tokens),
           active = moq_active_experts(spec, p->tokens);
    int most = config ? MOQ_MOE_FOLDED_WIDE : MOQ_MOE_FOLDED_ROWS;
    double tiles = active * moq_expected_tiles(slots / active, most);
    double up = rounds_of(&spec->w13, tiles), down = rounds_of(&spec->w2, tiles);
    double h = (double)spec->w13.in_features, i = (double)spec->w2.in_features;
    w->bytes = active * moq_expert_weights(spec) * MOQ_NVFP4_BYTES;
    w->inside[0] = (up * h + down * i);
    w->inside[1] = slots * moq_expert_weights(spec) / p->target->sm_count;
    w->inside[2] = up + down;
    w->beside[0] = slots * h;
    w->beside[1] = slots * i;
    return true;
}

static const moq_configs CONFIGS = {
    .configs = MOQ_MOE_FOLDED_CONFIGS, .rates = RATES, .work = work};

static bool can_run(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SM90_NVFP4_FP8_PREFILL, spec, reason, size);
}

MOQ_ENTRY moq_status moq_cuda_moe_nvfp4_fp8_prefill(const moq_moe_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_moe_nvfp4_fp8_prefill_workspace(const moq_moe_call *call);

const moq_moe_kernel MOQ_MOE_SM90_NVFP4_FP8_PREFILL = {
    {"cuda", "sm90_nvfp4_fp8_prefill", .configs = &CONFIGS, .takes_codes = true, .folds = true,
     .row_order_fixed = true},
    can_run,
    .workspace = moq_cuda_moe_nvfp4_fp8_prefill_workspace,
    .run = moq_cuda_moe_nvfp4_fp8_prefill,
};
