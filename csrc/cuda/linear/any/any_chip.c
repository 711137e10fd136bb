/* Linear kernels of every chip: on CUDA cores (simt_linear.cu), and by products of warps
 * (mma_fp8_linear.cu, mma_nvfp4_linear.cu). */
#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"
#include "cuda/linear/any/mma_general_config.h"

#include <stdio.h>

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

#define CONFIGS(name, least, bytes)                                                                \
    static const moq_rates name##_RATES[] = {MOQ_RATES_##name};                                    \
    static bool work_##name(const moq_problem *p, int config, moq_load *w) {                       \
        (void)config;                                                                              \
        return count(p, bytes, least, w);                                                          \
    }                                                                                              \
    static const moq_configs name = {                                                              \
        .configs = 1, .any_chip = true, .rates = name##_RATES, .work = work_##name};

CONFIGS(SIMT, 1, 1)
CONFIGS(SM80_FP8, 16, 1)
CONFIGS(SM89_FP8, 16, 1)
CONFIGS(SM80_NVFP4, 8, MOQ_NVFP4_BYTES)

/* ---- weights of every layer, on CUDA cores ---- */

MOQ_ENTRY moq_status moq_cuda_simt_linear(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_simt_workspace(const moq_linear_call *call);

static bool can_run_simt(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return moq_has_capability(spec, 80, reason, size) && moq_has_int_rows(spec, reason, size) &&
           moq_has_groups(spec, 16, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SIMT = {
    {"cuda", "simt", .configs = &SIMT, .adds = true, .row_order_fixed = true},
    can_run_simt,
    .workspace = moq_cuda_simt_workspace,
    .run = moq_cuda_simt_linear,
};

/* ---- FP8 weights: x is quantized, then warps multiply codes as e4m3 or as fp16 ---- */

MOQ_ENTRY moq_status moq_cuda_mma_fp8_as_e4m3(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY moq_status moq_cuda_mma_fp8_as_f16(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_mma_fp8_workspace(const moq_linear_call *call);

static bool can_run_as_e4m3(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return moq_has_capability(spec, 89, reason, size) && moq_suits_fp8_cores(spec, reason, size) &&
           moq_is_multiple_of_16("in_features", spec->in_features, reason, size) &&
           moq_has_int_rows(spec, reason, size);
}

static bool can_run_as_f16(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return moq_has_capability(spec, 80, reason, size) && moq_is_fp8(spec, reason, size) &&
           moq_is_multiple_of_16("in_features", spec->in_features, reason, size) &&
           moq_has_int_rows(spec, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM89_FP8 = {
    {"cuda", "sm89_fp8", .configs = &SM89_FP8, .takes_codes = true, .row_order_fixed = true},
    can_run_as_e4m3,
    .workspace = moq_cuda_mma_fp8_workspace,
    .run = moq_cuda_mma_fp8_as_e4m3,
};

const moq_linear_kernel MOQ_LINEAR_SM80_FP8 = {
    {"cuda", "sm80_fp8", .configs = &SM80_FP8, .takes_codes = true, .row_order_fixed = true},
    can_run_as_f16,
    .workspace = moq_cuda_mma_fp8_workspace,
    .run = moq_cuda_mma_fp8_as_f16,
};

/* ---- weights that only general kernels read, x and y of 16 bits ---- */

MOQ_ENTRY moq_status moq_cuda_mma_general(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_mma_general_workspace(const moq_linear_call *call);

/* Rows of the rates. */
typedef enum { GENERAL_E4M3, GENERAL_INT8, GENERAL_INT4, GENERAL_KINDS } general_kind;

static const moq_rates SM80_GENERAL_RATES[GENERAL_KINDS] = {MOQ_RATES_SM80_GENERAL};

/* Counts tiles of the busiest multiprocessor and their products, those of prefill beside others. */
static bool work_general(const moq_problem *p, int config, moq_load *w) {
    (void)config;
    const moq_linear_spec *spec = p->layer;
    bool int4 = spec->weight == MOQ_WEIGHT_INT4_GROUP, int8 = spec->weight == MOQ_WEIGHT_INT8_ROW;
    int shape = moq_mma_general_shape(spec, p->tokens);
    const moq_mma_general_tile *t = &MOQ_MMA_GENERAL_TILES[shape];
    double m = (double)p->tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    int64_t tiles = moq_mma_general_tiles(spec, p->tokens, shape);
    double waves = (double)divide_up(tiles, p->target->sm_count);
    w->rates = int4 ? GENERAL_INT4 : int8 ? GENERAL_INT8 : GENERAL_E4M3;
    w->bytes = (int4 ? 0.5 : 1) * n * k;
    w->inside[t->rows > 16] = waves * t->tokens * t->rows * k;
    w->inside[2] = waves * t->tokens;
    w->beside[0] = k;
    w->beside[1] = m * k;
    return true;
}

static const moq_configs SM80_GENERAL = {
    .configs = 1, .rates = SM80_GENERAL_RATES, .work = work_general};

static bool can_run_general(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return moq_has_capability(spec, 80, reason, size) && moq_has_int_rows(spec, reason, size) &&
           moq_is_multiple_of_16("in_features", spec->in_features, reason, size) &&
           moq_is_general(spec, reason, size) && moq_has_groups(spec, 32, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM80_GENERAL = {
    {"cuda", "sm80_general", .configs = &SM80_GENERAL, .row_order_fixed = true},
    can_run_general,
    .workspace = moq_cuda_mma_general_workspace,
    .run = moq_cuda_mma_general,
};

/* ---- packed NVFP4 weights, exact, x and y of 16 bits ---- */

MOQ_ENTRY moq_status moq_cuda_mma_nvfp4(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_mma_nvfp4_workspace(const moq_linear_call *call);

static bool can_run_nvfp4(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return moq_has_capability(spec, 80, reason, size) && moq_suits_16_bits(spec, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM80_NVFP4 = {
    {"cuda", "sm80_nvfp4", .configs = &SM80_NVFP4, .adds = true, .row_order_fixed = true},
    can_run_nvfp4,
    .workspace = moq_cuda_mma_nvfp4_workspace,
    .run = moq_cuda_mma_nvfp4,
};
