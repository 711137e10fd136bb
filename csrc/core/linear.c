/* Resolution of a linear layer's description: see linear.h. */
#include "core/linear.h"

#include "core/formats.h"
#include "core/sizes.h"

#include <stdio.h>

moq_status moq_linear_resolve(const moq_weight_names *names, const char *dtype,
                              moq_linear_spec *spec, moq_err *err) {
    *spec = (moq_linear_spec){.dtype = moq_dtype_from_name(dtype)};
    MOQ_TRY(moq_weight_resolve(names, &spec->matrix, err));
    if (spec->dtype != MOQ_DT_BF16 && spec->dtype != MOQ_DT_F16 && spec->dtype != MOQ_DT_F32)
        return moq_fail_of(err, MOQ_ERR_VALUE, "dtype",
                           "expected \"bfloat16\", \"float16\" or \"float32\", got \"%s\"", dtype);
    return MOQ_OK;
}

/* Makes x codes; they were made with one scale, which the checkpoint has. */
static moq_status take_codes(moq_linear_spec *spec, moq_err *err) {
    if (spec->input != MOQ_INPUT_E4M3_TENSOR || !spec->checkpoint_input_scale)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quantized_input",
                           "is for activations in FP8 with an input_scale, %s with "
                           "compute \"%s\" has none",
                           spec->algo, moq_compute_name(spec->compute));
    if (spec->pre_quant_scale)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quantized_input",
                           "%s multiplies x by pre_quant_scale before it is quantized", spec->algo);
    if (spec->partition_count > 1 && !spec->one_input_scale)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quantized_input",
                           "%d partitions may have as many input scales; "
                           "one_input_scale promises that they have one",
                           (int)spec->partition_count);
    spec->quantized_input = true;
    return MOQ_OK;
}

moq_status moq_linear_apply_options(const moq_linear_options *options, moq_linear_spec *spec,
                                    moq_err *err) {
    bool may_fold = spec->compute == MOQ_COMPUTE_FP8 || spec->compute == MOQ_COMPUTE_AUTO;
    if (options->fast_accum && spec->checkpoint == MOQ_WEIGHT_E2M1 && !may_fold)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "fast_accum",
                           "is for FP8 products, %s with compute \"%s\" has none", spec->algo,
                           moq_compute_name(spec->compute));
    spec->fast_accum = options->fast_accum;
    spec->batch_invariant = options->batch_invariant;
    if (options->one_input_scale)
        MOQ_TRY(moq_weight_promise_one_input_scale(&spec->matrix, err));
    return options->quantized_input ? take_codes(spec, err) : MOQ_OK;
}

void moq_linear_settle_choice(moq_linear_spec *spec) {
    bool nvfp4 = spec->checkpoint_input_scale && spec->group_size == MOQ_NVFP4_GROUP;
    if (!moq_linear_has_choice(spec) || !nvfp4 || spec->dtype == MOQ_DT_F32 ||
        spec->batch_invariant || spec->target.capability < MOQ_FP4_CAPABILITY)
        return;
    spec->choice = MOQ_COMPUTE_FP4;
    spec->input = MOQ_INPUT_NVFP4;
}

/* True where a call without input_scale finds one scale from all rows of x. */
static bool finds_scale_of_x(const moq_linear_spec *spec) {
    moq_input_mode input = moq_linear_input_without_scale(spec);
    return input == MOQ_INPUT_E4M3_TENSOR || input == MOQ_INPUT_NVFP4;
}

static int require_input_scale(const moq_linear_spec *spec, moq_param_spec *params, int count) {
    bool required = spec->quantized_input || (spec->batch_invariant && finds_scale_of_x(spec));
    for (int i = 0; i < count; i++)
        if (required && params[i].id == MOQ_PARAM_INPUT_SCALE)
            params[i].required = true;
    return count;
}

int moq_linear_checkpoint_params(const moq_linear_spec *spec, moq_param_spec *params) {
    return require_input_scale(spec, params, moq_weight_checkpoint_params(&spec->matrix, params));
}

int moq_linear_prepared_params(const moq_linear_spec *spec, moq_param_spec *params) {
    return require_input_scale(spec, params, moq_weight_prepared_params(&spec->matrix, params));
}

int64_t moq_token_bucket(int64_t m) {
    int64_t step = 1;
    while (m / 16 >= step)
        step *= 2;
    return m > INT64_MAX - step ? m : round_up(m, step);
}

const char *moq_linear_text(const moq_linear_spec *spec, char *buffer, size_t size) {
    char device[32];
    snprintf(buffer, size, "%s %lldx%lld, compute %s, %s%s on %s", spec->algo,
             (long long)spec->out_features, (long long)spec->in_features,
             moq_compute_name(spec->compute), moq_dtype_name(spec->dtype),
             spec->quantized_input ? " of codes" : "",
             moq_device_text(spec->device, device, sizeof device));
    return buffer;
}
