/* cuBLASLt's products: with one scale of x and one of W, with vectors of scales by the library or
 * by a kernel of ours behind it, with blocks, and with packed NVFP4 weights, which become FP8
 * codes. */
#include "cuda/choice/choice_cublaslt.h"
#include "cuda/choice/choice.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"

/* Rows of the rates. */
typedef enum { TENSOR, VECTOR, AFTER, BLOCK, FOLDED_VECTOR, FOLDED_AFTER, KINDS } kind;

static const moq_rates RATES[KINDS] = {MOQ_RATES_CUBLASLT};

static bool has_one_kind(const moq_linear_spec *spec) {
    return spec->weight == MOQ_WEIGHT_E2M1_SWIZZLED || spec->weight == MOQ_WEIGHT_E4M3_BLOCK ||
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

/* The config says whether sums are scaled after the product. Tiles are reckoned as 128 x 128; by
 * blocks the library splits K where tiles fill less than half of the chip. */
static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    bool vectors = !has_one_kind(spec) && moq_cublaslt_has_vectors(spec);
    if ((config == 0 && !vectors && !has_one_kind(spec)) || (config == 1 && has_one_kind(spec)))
        return false;
    double m = (double)p->tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    double size = spec->weight == MOQ_WEIGHT_E2M1_SWIZZLED ? MOQ_NVFP4_BYTES : 1;
    int64_t tiles = divide_up(p->tokens, 128) * divide_up(spec->out_features, 128);
    double waves = (double)divide_up(tiles, spec->target.sm_count);
    w->rates = (int)kind_of(spec, config == 1);
    w->bytes = size * n * k;
    bool split = w->rates == BLOCK && 2 * tiles <= spec->target.sm_count;
    double full = (double)tiles / (double)spec->target.sm_count;
    w->inside[0] = size * (split ? full : waves) * k / 128;
    w->inside[1] = size * m * n * k / spec->target.sm_count;
    w->inside[2] = waves;
    w->beside[0] = m * k * (moq_cublaslt_by_partition(spec) ? spec->partition_count : 1);
    w->beside[1] = (moq_linear_folds(spec) ? n * k : m * n);
    w->beside[2] = split;
    return true;
}

const moq_configs MOQ_CUBLASLT = {.configs = 2, .library = true, .rates = RATES, .work = work};
