/* Experts of many tokens on Hopper: see moe_prefill.h. */
#include "cuda/choice/moe_prefill.h"

#include "cuda/choice/choice.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

/* ---- FP8 ---- */

enum { FP8_CONFIGS = 2, FORMATS = 3 };

static const moq_rates FP8_RATES[FP8_CONFIGS * FORMATS] = {MOQ_RATES_MOE_FP8_PREFILL};

static int format_of(const moq_moe_spec *spec) {
    return (int)(spec->w13.input - MOQ_INPUT_E4M3_TENSOR);
}

/* Rows of a tile, and tiles that an expert has a multiple of. */
static int fp8_rows(const moq_moe_spec *spec, int config) {
    return config == 0 ? 64 : spec->w13.input == MOQ_INPUT_E4M3_GROUP ? 128 : 136;
}

/* Weights whose rows begin within lines of 128 bytes, as every second one of 2880 columns does: two
 * lines have to come for 128 columns of it. */
static double parted_weights(const moq_linear_spec *layer) {
    return layer->in_features % 128 ? (double)layer->in_features * (double)layer->out_features : 0;
}

static bool fp8_work(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double slots = moq_expected_slots(spec, p->tokens),
           active = moq_active_experts(spec, p->tokens);
    double weights = moq_expert_weights(spec), h = (double)spec->w13.in_features;
    int together = config == 1 && spec->w13.input != MOQ_INPUT_E4M3_GROUP ? 2 : 1;
    int most = fp8_rows(spec, config);
    double rows = together * most * moq_expected_tiles(slots / active, most * together);
    double parted = parted_weights(&spec->w13) + parted_weights(&spec->w2);
    w->rates = config + FP8_CONFIGS * format_of(spec);
    w->bytes = active * weights;
    w->inside[0] = slots * weights / p->target->sm_count;
    w->inside[1] = active * rows * weights / p->target->sm_count;
    w->inside[2] = slots * parted / p->target->sm_count;
    w->beside[0] = slots * h;
    w->beside[1] = h;
    w->beside[2] = active * parted;
    return true;
}

const moq_configs MOQ_MOE_FP8_PREFILL = {
    .configs = FP8_CONFIGS, .rates = FP8_RATES, .work = fp8_work};

/* ---- NVFP4 ---- */

/* Rows of a tile at most, rows of W, and columns of a step. Blocks make tiles one after the other,
 * so that the last round has as long as any (moe/sm90/prefill/nvfp4.cu). */
static const struct {
    int rows, height, columns;
} PACKED[] = {{64, 512, 128}, {128, 256, 64}, {288, 128, 64}, {64, 256, 128}, {32, 256, 256}};

enum { PACKED_CONFIGS = sizeof PACKED / sizeof *PACKED, PACKED_DEEP = 3 };
_Static_assert(PACKED_CONFIGS <= MOQ_MOE_PREFILL_CONFIGS, "a config tells every shape of tiles");

static const moq_rates PACKED_RATES[PACKED_CONFIGS] = {MOQ_RATES_MOE_NVFP4_PREFILL};

static double rounds_of(const moq_linear_spec *layer, double tiles, int config) {
    double all = tiles * ceil((double)layer->out_features / PACKED[config].height);
    return ceil(all / (double)layer->target.sm_count);
}

static double steps_of(const moq_linear_spec *layer, int config) {
    return ceil((double)layer->in_features / PACKED[config].columns);
}

static bool packed_work(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double slots = moq_expected_slots(spec, p->tokens),
           active = moq_active_experts(spec, p->tokens);
    double tiles = moq_expected_tiles(slots / active, PACKED[config].rows);
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

const moq_configs MOQ_MOE_NVFP4_PREFILL = {
    .configs = PACKED_CONFIGS, .rates = PACKED_RATES, .work = packed_work};

/* ---- both ---- */

static bool is_packed(const moq_moe_spec *spec) {
    return spec->w13.weight == MOQ_WEIGHT_E2M1_PACKED;
}

int moq_moe_prefill_tile_rows(const moq_moe_spec *spec, moq_kernel_config geometry) {
    int config = moq_tiling_row(geometry.tiling);
    return is_packed(spec) ? PACKED[config].rows : fp8_rows(spec, config);
}

bool moq_moe_prefill_deep(const moq_moe_spec *spec, moq_kernel_config geometry) {
    return is_packed(spec) && moq_tiling_row(geometry.tiling) == PACKED_DEEP;
}
