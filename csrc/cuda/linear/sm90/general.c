/* Configs of the linear of MXFP8, int8 and int4 weights on Hopper, and its row: see
 * general_config.h. */
#include "cuda/linear/sm90/general_config.h"

#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"

#include <stdio.h>

#define SHAPE(...)      MOQ_MEDIUM_SHAPE(2, MOQ_GENERAL_STEP, __VA_ARGS__)
#define INT4_SHAPE(...) MOQ_MEDIUM_SHAPE(2, MOQ_GENERAL_INT4_STEP, __VA_ARGS__)

static const moq_nvfp4_medium_shape SHAPES[] = {MOQ_GENERAL_SHAPES(SHAPE)};
static const moq_nvfp4_medium_shape INT4_SHAPES[] = {MOQ_GENERAL_SHAPES(INT4_SHAPE)};

enum { COUNT = sizeof SHAPES / sizeof *SHAPES };

/* Rates of every config, of each kind of weights. */
typedef enum { E4M3, INT8, INT4, KINDS } kind;

static const moq_rates RATES[KINDS * 2 * COUNT] = {MOQ_RATES_SM90_GENERAL};

static const moq_nvfp4_medium_shape *shapes_of(const moq_linear_spec *spec) {
    return spec->weight == MOQ_WEIGHT_INT4_GROUP ? INT4_SHAPES : SHAPES;
}

static bool work(const moq_problem *p, int config, moq_load *w) {
    moq_weight_layout weight = ((const moq_linear_spec *)p->layer)->weight;
    kind of = weight == MOQ_WEIGHT_INT4_GROUP ? INT4 : weight == MOQ_WEIGHT_INT8_ROW ? INT8 : E4M3;
    w->rates = (int)of * 2 * COUNT + config;
    return moq_medium_count(p, shapes_of(p->layer), COUNT, config, w);
}

static const moq_configs CONFIGS = {.configs = 2 * COUNT, .rates = RATES, .work = work};

/* True if scales come a word for a row and 128 columns. */
static bool suits_scales(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->weight == MOQ_WEIGHT_INT8_ROW)
        return moq_is_multiple_of_16("in_features", spec->in_features, reason, size);
    if (spec->in_features % MOQ_NVFP4_MEDIUM_STEP)
        snprintf(reason, size, "needs in_features to be a multiple of %d, got %lld",
                 MOQ_NVFP4_MEDIUM_STEP, (long long)spec->in_features);
    else if (spec->weight == MOQ_WEIGHT_INT4_GROUP && spec->group_size != MOQ_NVFP4_MEDIUM_STEP)
        snprintf(reason, size, "needs groups of %d, got %d", MOQ_NVFP4_MEDIUM_STEP,
                 spec->group_size);
    else if (spec->weight == MOQ_WEIGHT_E4M3_GROUP && spec->dtype != MOQ_DT_BF16)
        snprintf(reason, size, "multiplies MXFP8 weights by bfloat16, the layer has %s",
                 moq_dtype_name(spec->dtype));
    else
        return true;
    return false;
}

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    if (!moq_is_on_sm90(spec, reason, size) || !moq_is_general(spec, reason, size) ||
        !moq_has_int_rows(spec, reason, size) || !suits_scales(spec, reason, size) ||
        !moq_medium_takes(spec, m, reason, size))
        return false;
    if (spec->input == MOQ_INPUT_AS_IS)
        return true;
    snprintf(reason, size, "multiplies x as it is, %s quantizes it", spec->algo);
    return false;
}

MOQ_ENTRY moq_status moq_cuda_general(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_general_workspace(const moq_linear_call *call);

const moq_linear_kernel MOQ_LINEAR_SM90_GENERAL = {
    {"cuda", "sm90_general", .configs = &CONFIGS},
    can_run,
    .workspace = moq_cuda_general_workspace,
    .run = moq_cuda_general,
};

moq_nvfp4_medium_config moq_general_expand_config(const moq_linear_call *call) {
    return moq_medium_expand(shapes_of(call->spec), COUNT, call);
}
