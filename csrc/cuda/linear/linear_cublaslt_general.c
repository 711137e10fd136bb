/* Row of cuBLASLt for weights that only general kernels read: see linear_cublaslt_general.cu. */
#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"

#include <stdio.h>

/* Rows of the rates. */
typedef enum { E4M3, INT8, INT8_CODES, INT4, KINDS } kind;

static const moq_rates RATES[KINDS] = {MOQ_RATES_CUBLASLT_GENERAL};

static kind kind_of(const moq_linear_spec *spec) {
    if (spec->weight == MOQ_WEIGHT_INT8_ROW)
        return spec->input == MOQ_INPUT_INT8 ? INT8_CODES : INT8;
    return spec->weight == MOQ_WEIGHT_INT4_GROUP ? INT4 : E4M3;
}

/* Tiles are reckoned as 128 x 128, and numbers in bytes of W. */
static bool work(const moq_problem *p, int config, moq_load *w) {
    (void)config;
    const moq_linear_spec *spec = p->layer;
    double m = (double)p->tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    int64_t tiles = divide_up(p->tokens, 128) * divide_up(spec->out_features, 128);
    double waves = (double)divide_up(tiles, spec->target.sm_count);
    w->rates = (int)kind_of(spec);
    w->bytes = n * k;
    w->inside[0] = waves * k / 128;
    w->inside[1] = m * n * k / spec->target.sm_count;
    w->beside[0] = m * k;
    w->beside[1] = n * k;
    w->beside[2] = m * n;
    return true;
}

static const moq_configs CONFIGS = {.configs = 1, .library = true, .rates = RATES, .work = work};

/* True if the 16-bit type of x holds what W becomes: all of int8, and of others bfloat16 alone. */
static bool suits_type(const moq_linear_spec *spec, char *reason, size_t size) {
    bool bf16 = spec->dtype == MOQ_DT_BF16, f16 = spec->dtype == MOQ_DT_F16;
    if (bf16 || (f16 && (spec->weight == MOQ_WEIGHT_INT8_ROW || spec->input != MOQ_INPUT_AS_IS)))
        return true;
    snprintf(reason, size,
             "multiplies bfloat16, and int8 weights by float16, the layer is %s with %s",
             spec->algo, moq_dtype_name(spec->dtype));
    return false;
}

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    if (!moq_has_capability(spec, 80, reason, size) || !moq_is_general(spec, reason, size) ||
        !suits_type(spec, reason, size) || !moq_has_groups(spec, 16, reason, size) ||
        !moq_has_int_rows(spec, reason, size) ||
        !moq_is_multiple_of_16("in_features", spec->in_features, reason, size) ||
        !moq_is_multiple_of_16("out_features", spec->out_features, reason, size))
        return false;
    bool by_partition = spec->input != MOQ_INPUT_AS_IS && !spec->one_input_scale;
    for (int i = 0; by_partition && i < spec->partition_count; i++)
        if (!moq_is_multiple_of_16("each of out_partitions", spec->partition[i], reason, size))
            return false;
    return moq_has_cublaslt(spec, reason, size);
}

MOQ_ENTRY moq_status moq_cublaslt_general_linear(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cublaslt_general_workspace(const moq_linear_call *call);
MOQ_ENTRY uint64_t moq_cublaslt_general_variants(const moq_linear_call *call);
MOQ_ENTRY bool moq_cublaslt_general_ask(const moq_linear_call *call, char *reason, size_t size);

const moq_linear_kernel MOQ_LINEAR_CUBLASLT_GENERAL = {
    {"cuda", "cublaslt_general", .configs = &CONFIGS}, can_run,
    .workspace = moq_cublaslt_general_workspace,       .run = moq_cublaslt_general_linear,
    .variants = moq_cublaslt_general_variants,         .ask = moq_cublaslt_general_ask,
};
