/* The kernels of experts for any chip: weights of the experts that have rows read, or tiles of them
 * multiplied, and what lies between. */
#include "cuda/moe/any/any_chip.h"
#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

#include <math.h>
#include <stdio.h>

/* The fewest rows of a tile that hold nearly every expert's, from `least` to `most`. */
static int tile_rows(double rows, int least, int most) {
    int tile = least;
    while (tile < most && rows + sqrt(rows) > tile)
        tile *= 2;
    return tile;
}

/* Tiles of batch_invariant layers are those in which as many warps split K. */
int moq_moe_mma_fp8_tile_rows(const moq_moe_spec *spec, double rows) {
    return spec->w13.batch_invariant ? 64 : tile_rows(rows, 16, 128);
}

int moq_moe_mma_nvfp4_tile_rows(const moq_moe_spec *spec, double rows) {
    return tile_rows(rows, spec->w13.batch_invariant ? 32 : 8, 128);
}

int moq_moe_mma_general_tile_rows(const moq_moe_spec *spec, double rows) {
    return tile_rows(rows, spec->w13.batch_invariant ? 32 : 8, 64);
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

/* Defines the row of an experts' kernel, in tiles of so many rows, and W of so many bytes a value.
 */
#define FAMILY(NAME, name, kernel_name, tile, bytes, computes_folded)                              \
    static const moq_rates NAME##_RATES[] = {MOQ_RATES_MOE_##NAME};                                \
    static bool work_##name(const moq_problem *p, int config, moq_load *w) {                       \
        const moq_moe_spec *spec = p->layer;                                                       \
        double rows = moq_expected_slots(spec, p->tokens) / moq_active_experts(spec, p->tokens);   \
        (void)config;                                                                              \
        (void)rows;                                                                                \
        return count(p, bytes, tile, w);                                                           \
    }                                                                                              \
    static const moq_configs NAME = {                                                              \
        .configs = 1, .any_chip = true, .rates = NAME##_RATES, .work = work_##name};               \
    MOQ_ENTRY moq_status moq_cuda_moe_##name(const moq_moe_call *call, moq_err *err);              \
    MOQ_ENTRY int64_t moq_cuda_moe_##name##_workspace(const moq_moe_call *call);                   \
    const moq_moe_kernel MOQ_MOE_##NAME = {                                                        \
        {"cuda", kernel_name, .configs = &NAME, .takes_codes = true, .folds = computes_folded,     \
         .row_order_fixed = true},                                                                 \
        can_run_##name,                                                                            \
        .workspace = moq_cuda_moe_##name##_workspace,                                              \
        .run = moq_cuda_moe_##name,                                                                \
    };

static bool can_run_simt(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SIMT, spec, reason, size);
}

static bool can_run_mma_fp8_as_e4m3(const moq_moe_spec *spec, int64_t tokens, char *reason,
                                    size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SM89_FP8, spec, reason, size);
}

static bool can_run_mma_fp8_as_f16(const moq_moe_spec *spec, int64_t tokens, char *reason,
                                   size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SM80_FP8, spec, reason, size);
}

/* True for packed NVFP4 weights with 16-bit activations. */
static bool is_packed(const moq_moe_spec *spec, char *reason, size_t size) {
    const moq_linear_spec *w13 = &spec->w13;
    if (!moq_runs_as_linears(&MOQ_LINEAR_SIMT, spec, reason, size))
        return false;
    if (w13->weight != MOQ_WEIGHT_E2M1_PACKED)
        snprintf(reason, size, "multiplies NVFP4 weights, %s has others", w13->algo);
    else if (w13->dtype == MOQ_DT_F32)
        snprintf(reason, size, "multiplies 16-bit activations, the layer has float32");
    else
        return true;
    return false;
}

static bool can_run_mma_nvfp4(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    if (!is_packed(spec, reason, size))
        return false;
    if (spec->w13.compute != MOQ_COMPUTE_FP8)
        return true;
    snprintf(reason, size, "multiplies NVFP4 weights exactly, compute fp8 asks for another");
    return false;
}

static bool can_run_mma_nvfp4_folded(const moq_moe_spec *spec, int64_t tokens, char *reason,
                                     size_t size) {
    (void)tokens;
    if (!is_packed(spec, reason, size))
        return false;
    if (moq_linear_folds(&spec->w13))
        return true;
    snprintf(reason, size,
             "multiplies NVFP4 weights with compute fp8, %s with compute %s is "
             "another layer",
             spec->w13.algo, moq_compute_name(spec->w13.compute));
    return false;
}

FAMILY(SIMT, simt, "simt", 8, 1, false)
FAMILY(SM89_FP8, mma_fp8_as_e4m3, "sm89_fp8", moq_moe_mma_fp8_tile_rows(spec, rows), 1, false)
FAMILY(SM80_FP8, mma_fp8_as_f16, "sm80_fp8", moq_moe_mma_fp8_tile_rows(spec, rows), 1, false)
FAMILY(SM80_NVFP4, mma_nvfp4, "sm80_nvfp4", moq_moe_mma_nvfp4_tile_rows(spec, rows),
       MOQ_NVFP4_BYTES, false)
FAMILY(SM80_NVFP4_FP8, mma_nvfp4_folded, "sm80_nvfp4_fp8", moq_moe_mma_nvfp4_tile_rows(spec, rows),
       MOQ_NVFP4_BYTES, true)

/* ---- 8- and 4-bit weights that only general kernels read ---- */

/* Rows of the rates. */
typedef enum { GENERAL_E4M3, GENERAL_INT8, GENERAL_INT4, GENERAL_KINDS } general_kind;

static const moq_rates SM80_GENERAL_RATES[GENERAL_KINDS] = {MOQ_RATES_MOE_SM80_GENERAL};

static bool work_general(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    double rows = moq_expected_slots(spec, p->tokens) / moq_active_experts(spec, p->tokens);
    bool int4 = spec->w13.weight == MOQ_WEIGHT_INT4_GROUP;
    (void)config;
    w->rates = int4                                      ? GENERAL_INT4
               : spec->w13.weight == MOQ_WEIGHT_INT8_ROW ? GENERAL_INT8
                                                         : GENERAL_E4M3;
    return count(p, int4 ? 0.5 : 1, moq_moe_mma_general_tile_rows(spec, rows), w);
}

static const moq_configs SM80_GENERAL = {
    .configs = 1, .rates = SM80_GENERAL_RATES, .work = work_general};

static bool can_run_general(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    return moq_runs_as_linears(&MOQ_LINEAR_SM80_GENERAL, spec, reason, size);
}

MOQ_ENTRY moq_status moq_cuda_moe_mma_general(const moq_moe_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_moe_mma_general_workspace(const moq_moe_call *call);

const moq_moe_kernel MOQ_MOE_SM80_GENERAL = {
    {"cuda", "sm80_general", .configs = &SM80_GENERAL, .row_order_fixed = true},
    can_run_general,
    .workspace = moq_cuda_moe_mma_general_workspace,
    .run = moq_cuda_moe_mma_general,
};
