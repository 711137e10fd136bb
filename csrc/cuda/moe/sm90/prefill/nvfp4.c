/* NVFP4 experts for prefill on Hopper, exact (nvfp4.cu). */
#include "cuda/moe/sm90/prefill/prefill_config.h"

#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

/* Rows of a tile at most, rows of W, and columns of a step. Blocks make tiles one after the other,
 * so that the last round has as long as any (moe/sm90/prefill/nvfp4.cu). */
static const struct {
    int rows, height, columns;
} SHAPES[] = {{64, 512, 128}, {128, 256, 128}, {288, 128, 64}, {64, 256, 128}, {32, 256, 256}};

enum { CONFIG_COUNT = sizeof SHAPES / sizeof *SHAPES, DEEP = 3 };
_Static_assert(CONFIG_COUNT <= MOQ_TILING_ROWS, "a config tells every shape of tiles");

static const moq_rates RATES[CONFIG_COUNT] = {MOQ_RATES_MOE_SM90_NVFP4_PREFILL};

static double rounds_of(const moq_linear_spec *layer, double tiles, int config) {
    double all = tiles * ceil((double)layer->out_features / SHAPES[config].height);
    return ceil(all / (double)layer->target.sm_count);
}

static double steps_of(const moq_linear_spec *layer, int config) {
    return ceil((double)layer->in_features / SHAPES[config].columns);
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double slots = moq_expected_slots(spec, p->tokens),
           active = moq_active_experts(spec, p->tokens);
    double tiles = moq_expected_tiles(slots / active, SHAPES[config].rows);
    double up = rounds_of(&spec->w13, active * tiles, config);
    double down = rounds_of(&spec->w2, active * tiles, config);
    double steps = up * steps_of(&spec->w13, config) + down * steps_of(&spec->w2, config);
    w->bytes = active * moq_expert_weights(spec) * MOQ_NVFP4_BYTES;
    w->inside[0] = steps;
    w->inside[1] = steps * slots / active / tiles;
    w->inside[2] = up + down;
    w->beside[0] = slots * (double)spec->w13.in_features;
    return true;
}

static const moq_configs CONFIGS = {.configs = CONFIG_COUNT, .rates = RATES, .work = work};

int moq_moe_nvfp4_tile_rows(int config) {
    return SHAPES[config].rows;
}

bool moq_moe_nvfp4_is_deep(int config) {
    return config == DEEP;
}

static bool can_run(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SM90_NVFP4_PREFILL, spec, reason, size);
}

MOQ_ENTRY moq_status moq_cuda_moe_nvfp4_prefill(const moq_moe_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_moe_nvfp4_prefill_workspace(const moq_moe_call *call);

const moq_moe_kernel MOQ_MOE_SM90_NVFP4_PREFILL = {
    {"cuda", "sm90_nvfp4_prefill", .configs = &CONFIGS, .row_order_fixed = true},
    can_run,
    .workspace = moq_cuda_moe_nvfp4_prefill_workspace,
    .run = moq_cuda_moe_nvfp4_prefill,
};
