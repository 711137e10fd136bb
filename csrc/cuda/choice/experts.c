/* The kernels of experts for any chip: weights of the experts that have rows read, or tiles of them
 * multiplied, and what lies between. */
#include "cuda/choice/choice.h"
#include "cuda/choice/choice_moe.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

#include <math.h>

/* The fewest rows of a tile that hold nearly every expert's, or the most that there are. */
static int tile_rows(double rows, int least) {
    int most = least;
    while (most < 128 && rows + sqrt(rows) > most)
        most *= 2;
    return most;
}

int moq_moe_mma_fp8_tile_rows(double rows) {
    return tile_rows(rows, 16);
}

int moq_moe_mma_nvfp4_tile_rows(double rows) {
    return tile_rows(rows, 8);
}

static bool count(const moq_problem *p, double bytes, int tile, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double slots = moq_expected_slots(spec, p->tokens),
           active = moq_active_experts(spec, p->tokens);
    double rows = fmax(1, slots / active), weights = moq_expert_weights(spec);
    double tiles = rows + sqrt(rows) <= tile ? 1 : rows / tile + 0.5;
    double values = (double)(spec->w13.out_features + spec->w2.out_features);
    w->bytes = active * weights * bytes;
    w->inside[0] = active * tiles * tile * weights / p->target->sm_count;
    w->inside[1] = active * tiles * tile * values / p->target->sm_count;
    w->beside[0] = slots * values;
    return true;
}

#define FAMILY(name, tile, bytes)                                                                  \
    static const moq_rates name##_RATES[] = {MOQ_RATES_MOE_##name};                                \
    static bool work_##name(const moq_problem *p, int config, moq_load *w) {                       \
        const moq_moe_spec *spec = p->layer;                                                       \
        double rows = moq_expected_slots(spec, p->tokens) / moq_active_experts(spec, p->tokens);   \
        (void)config;                                                                              \
        (void)rows;                                                                                \
        return count(p, bytes, tile, w);                                                           \
    }                                                                                              \
    const moq_configs MOQ_MOE_##name = {                                                           \
        .configs = 1, .any_chip = true, .rates = name##_RATES, .work = work_##name};

FAMILY(SIMT, 8, 1)
FAMILY(MMA_FP8_AS_F16, moq_moe_mma_fp8_tile_rows(rows), 1)
FAMILY(MMA_FP8_AS_E4M3, moq_moe_mma_fp8_tile_rows(rows), 1)
FAMILY(MMA_NVFP4, moq_moe_mma_nvfp4_tile_rows(rows), MOQ_NVFP4_BYTES)
FAMILY(MMA_NVFP4_FOLDED, moq_moe_mma_nvfp4_tile_rows(rows), MOQ_NVFP4_BYTES)
