/* cuBLASLt's products: with one scale of x and one of W, with vectors of scales by the library or
 * by a kernel of ours behind it, with blocks, and with packed NVFP4 weights, which become FP8
 * codes. */
#include "cuda/linear/linear_cublaslt.h"
#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"

#include <stdio.h>

#define LONG       5120 /* columns beyond which K is split, */
#define MOST_PARTS 3    /* into so many parts at most */
#define LAUNCH     6e6  /* outputs that are written in the time of a launch */

/* Rows of the rates. */
typedef enum { TENSOR, VECTOR, AFTER, BLOCK, FOLDED_VECTOR, FOLDED_AFTER, KINDS } kind;

static const moq_rates RATES[KINDS] = {MOQ_RATES_CUBLASLT};

static bool has_one_kind(const moq_linear_spec *spec) {
    return moq_cublaslt_is_fp4(spec) || spec->weight == MOQ_WEIGHT_E4M3_BLOCK ||
           (spec->input == MOQ_INPUT_E4M3_TENSOR && !moq_cublaslt_shares_scale(spec));
}

/* Products of NVFP4 codes were never measured: half of the bytes and steps of FP8. */
static kind kind_of(const moq_linear_spec *spec, bool after) {
    if (has_one_kind(spec))
        return spec->weight == MOQ_WEIGHT_E4M3_BLOCK ? BLOCK : TENSOR;
    if (moq_linear_folds(spec))
        return after ? FOLDED_AFTER : FOLDED_VECTOR;
    return after ? AFTER : VECTOR;
}

/* Into how many parts the library splits K: by blocks, where K is long and tiles leave most of the
 * chip idle. */
static int64_t parts_of(const moq_linear_spec *spec, int64_t tiles) {
    int64_t fit = spec->target.sm_count / tiles;
    if (spec->weight != MOQ_WEIGHT_E4M3_BLOCK || spec->in_features <= LONG || fit < 2)
        return 1;
    return fit < MOST_PARTS ? fit : MOST_PARTS;
}

/* The config says whether sums are scaled after the product. Tiles are reckoned as 128 x 128. */
static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    bool vectors = !has_one_kind(spec) && moq_cublaslt_has_vectors(spec);
    if ((config == 0 && !vectors && !has_one_kind(spec)) || (config == 1 && has_one_kind(spec)))
        return false;
    double m = (double)p->tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    double size = moq_cublaslt_is_fp4(spec) ? MOQ_NVFP4_BYTES : 1;
    int64_t tiles = divide_up(p->tokens, 128) * divide_up(spec->out_features, 128);
    double waves = (double)divide_up(tiles, spec->target.sm_count);
    w->rates = (int)kind_of(spec, config == 1);
    w->bytes = size * n * k;
    int64_t parts = parts_of(spec, tiles);
    w->inside[0] = size * waves * k / 128 / (double)parts;
    w->inside[1] = size * m * n * k / spec->target.sm_count;
    w->inside[2] = waves;
    w->beside[0] = m * k * (moq_cublaslt_by_partition(spec) ? spec->partition_count : 1);
    w->beside[1] = moq_linear_folds(spec) ? n * k : m * n;
    if (moq_cublaslt_is_fp4(spec)) /* finding alphas, and unpacking */
        w->beside[1] += LAUNCH * (moq_linear_unpacks(spec) ? 1 + 2 * spec->partition_count : 1);
    if (moq_linear_unpacks(spec)) /* W read and written, in outputs of two bytes */
        w->beside[1] += MOQ_NVFP4_BYTES * n * k / (double)spec->target.memory;
    w->beside[2] = parts > 1;
    return true;
}

static const moq_configs CONFIGS = {.configs = 2, .library = true, .rates = RATES, .work = work};

/* ---- what the library can multiply ---- */

/* True where cuBLASLt multiplies FP8: since compute capability 8.9, by blocks of scales on 9.0
 * alone. */
static bool has_scaling(const moq_linear_spec *spec, char *reason, size_t size) {
    int capability = (int)spec->target.capability;
    bool block = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    if (capability == 90 || (!block && capability >= 89))
        return true;
    snprintf(reason, size, "%s needs compute capability %s, this device has %d.%d",
             block ? "FP8 with block scales" : "FP8", block ? "9.0" : "8.9", capability / 10,
             capability % 10);
    return false;
}

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    bool codes = moq_linear_folds(spec) ? moq_suits_folding(spec, reason, size)
                                        : moq_suits_fp8_cores(spec, reason, size);
    if (!moq_is_on_cuda(spec, reason, size) || !codes || !has_scaling(spec, reason, size) ||
        !moq_is_multiple_of_16("in_features", spec->in_features, reason, size) ||
        !moq_is_multiple_of_16("out_features", spec->out_features, reason, size))
        return false;
    for (int i = 0; moq_cublaslt_by_partition(spec) && i < spec->partition_count; i++)
        if (!moq_is_multiple_of_16("each of out_partitions", spec->partition[i], reason, size))
            return false;
    return moq_has_cublaslt(spec, reason, size);
}

/* Products of NVFP4 codes, both with block scales: since compute capability 10.0. */
static bool can_run_fp4(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return moq_has_capability(spec, MOQ_FP4_CAPABILITY, reason, size) &&
           moq_suits_fp4(spec, reason, size) && moq_has_cublaslt(spec, reason, size);
}

/* ---- the rows ---- */

/* Entries of linear_cublaslt.cu. Variants are the algorithms that the library proposes for the
 * call, with scales applied by the library or after it. */
MOQ_ENTRY moq_status moq_cublaslt_linear(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cublaslt_workspace(const moq_linear_call *call);
MOQ_ENTRY uint64_t moq_cublaslt_variants(const moq_linear_call *call);
MOQ_ENTRY bool moq_cublaslt_ask(const moq_linear_call *call, char *reason, size_t size);

const moq_linear_kernel MOQ_LINEAR_CUBLASLT = {
    {"cuda", "cublaslt", .configs = &CONFIGS, .adds = true, .takes_codes = true, .folds = true},
    can_run,
    .workspace = moq_cublaslt_workspace,
    .run = moq_cublaslt_linear,
    .variants = moq_cublaslt_variants,
    .ask = moq_cublaslt_ask,
};

const moq_linear_kernel MOQ_LINEAR_CUBLASLT_FP4 = {
    {"cuda", "cublaslt_fp4", "not yet run on hardware", &CONFIGS, .adds = true, .quantizes = true},
    can_run_fp4,
    .workspace = moq_cublaslt_workspace,
    .run = moq_cublaslt_linear,
    .variants = moq_cublaslt_variants,
    .ask = moq_cublaslt_ask,
};
