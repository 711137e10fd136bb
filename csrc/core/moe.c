/* Resolution of a layer of experts: see moe.h. */
#include "core/moe.h"

#include "core/formats.h"
#include "core/invariant.h"
#include "core/sizes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- the activation ---- */

static const struct {
    const char *name;
    moq_moe_activation activation;
    float alpha, beta, limit;
    bool gated_only;
} ACTIVATIONS[] = {
    {"silu", MOQ_MOE_SILU, 1.0f, 0.0f, INFINITY, false},
    {"gelu", MOQ_MOE_GELU, 1.0f, 0.0f, INFINITY, false},
    {"gelu_tanh", MOQ_MOE_GELU_TANH, 1.0f, 0.0f, INFINITY, false},
    {"relu2", MOQ_MOE_RELU2, 1.0f, 0.0f, INFINITY, false},
    {"swigluoai", MOQ_MOE_SILU, 1.702f, 1.0f, 7.0f, true},
};

enum { ACTIVATION_COUNT = sizeof ACTIVATIONS / sizeof *ACTIVATIONS };

static moq_status find_activation(const char *name, int *index, moq_err *err) {
    for (*index = 0; *index < ACTIVATION_COUNT; ++*index)
        if (strcmp(ACTIVATIONS[*index].name, name) == 0)
            return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, "activation",
                       "expected \"silu\", \"gelu\", \"gelu_tanh\", \"relu2\" or "
                       "\"swigluoai\", got \"%.64s\"",
                       name);
}

/* A number that float32 holds, or the activation's own where none was given. */
static moq_status take_number(const char *name, double given, float own, float *out, moq_err *err) {
    *out = isnan(given) ? own : (float)given;
    if (isfinite(*out) || isnan(given))
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected a finite number, got %g", given);
}

static moq_status take_activation(const moq_moe_names *names, moq_moe_spec *spec, moq_err *err) {
    int i;
    MOQ_TRY(find_activation(names->activation, &i, err));
    bool plain = isnan(names->alpha) && isnan(names->beta) && isnan(names->limit);
    spec->gated = names->gated;
    spec->activation = ACTIVATIONS[i].activation;
    if (ACTIVATIONS[i].gated_only && !names->gated)
        return moq_fail_of(err, MOQ_ERR_VALUE, "activation", "\"%s\" needs gated=True",
                           ACTIVATIONS[i].name);
    if (!plain && (spec->activation != MOQ_MOE_SILU || !names->gated))
        return moq_fail_of(err, MOQ_ERR_VALUE,
                           !isnan(names->alpha)  ? "alpha"
                           : !isnan(names->beta) ? "beta"
                                                 : "limit",
                           "is for \"silu\" and \"swigluoai\" with a gate, not for \"%s\"%s",
                           ACTIVATIONS[i].name, names->gated ? "" : " without one");
    MOQ_TRY(take_number("alpha", names->alpha, ACTIVATIONS[i].alpha, &spec->alpha, err));
    MOQ_TRY(take_number("beta", names->beta, ACTIVATIONS[i].beta, &spec->beta, err));
    if (!isnan(names->limit) && !(names->limit > 0))
        return moq_fail_of(err, MOQ_ERR_VALUE, "limit", "expected a positive number, got %g",
                           names->limit);
    spec->limit = isnan(names->limit) ? ACTIVATIONS[i].limit : (float)names->limit;
    return MOQ_OK;
}

/* ---- sizes ---- */

static moq_status check_size(const char *name, int64_t value, int64_t most, moq_err *err) {
    if (value >= 1 && value <= most)
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected 1 to %lld, got %lld", (long long)most,
                       (long long)value);
}

static moq_status take_sizes(const moq_moe_names *names, moq_moe_spec *spec, moq_err *err) {
    int64_t global = names->global_experts ? names->global_experts : names->experts;
    MOQ_TRY(check_size("num_experts", names->experts, MOQ_MAX_EXPERTS, err));
    MOQ_TRY(check_size("hidden_size", names->hidden, INT32_MAX, err));
    MOQ_TRY(check_size("intermediate_size", names->intermediate, INT32_MAX, err));
    MOQ_TRY(check_size("top_k", names->top_k, MOQ_MOE_TOP_K, err));
    if (global < names->experts || global > MOQ_MAX_EXPERTS)
        return moq_fail_of(err, MOQ_ERR_VALUE, "global_num_experts",
                           "expected num_experts = %lld to %d, got %lld", (long long)names->experts,
                           MOQ_MAX_EXPERTS, (long long)global);
    spec->experts = (int32_t)names->experts;
    spec->global_experts = (int32_t)global;
    spec->top_k = (int32_t)names->top_k;
    spec->partition13[0] = spec->partition13[1] = names->intermediate;
    spec->partition2[0] = names->hidden;
    return MOQ_OK;
}

/* ---- the weights ---- */

/* No kernel of experts takes the block scales of NVFP4 weights as those of single layers do: they
 * are packed for every compute, so that a stack has one form. */
static void pack_weight(moq_linear_spec *layer) {
    if (layer->weight == MOQ_WEIGHT_E2M1_SWIZZLED)
        layer->weight = MOQ_WEIGHT_E2M1_PACKED;
}

static moq_status resolve_weights(const moq_moe_names *names, moq_moe_spec *spec, moq_err *err) {
    moq_weight_names w13 = {.algo = names->algo,
                            .compute = names->compute,
                            .device = names->device,
                            .in_features = names->hidden,
                            .partitions = spec->partition13,
                            .partition_count = names->gated ? 2 : 1,
                            .group_size = names->group_size,
                            .columns_name = "hidden_size (columns of w13)"};
    moq_weight_names w2 = w13;
    w2.in_features = names->intermediate;
    w2.partitions = spec->partition2;
    w2.partition_count = 1;
    w2.columns_name = "intermediate_size (columns of w2)";
    MOQ_TRY(moq_linear_resolve(&w13, names->dtype, &spec->w13, err));
    MOQ_TRY(moq_weight_refuse_experts(&spec->w13.matrix, err));
    MOQ_TRY(moq_linear_resolve(&w2, names->dtype, &spec->w2, err));
    pack_weight(&spec->w13);
    pack_weight(&spec->w2);
    spec->w13.one_input_scale = spec->w2.one_input_scale = spec->w13.checkpoint_input_scale;
    spec->w13.batch_invariant = spec->w2.batch_invariant = names->batch_invariant;
    return MOQ_OK;
}

/* A token has one row of codes for all of its experts. */
static moq_status take_codes(moq_moe_spec *spec, moq_err *err) {
    moq_linear_spec *w13 = &spec->w13;
    if (moq_linear_has_choice(w13))
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quantized_input",
                           "with compute \"auto\" the call decides what x becomes; "
                           "choose \"exact\" or \"fp8\"");
    if (w13->input == MOQ_INPUT_AS_IS)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quantized_input",
                           "is for activations that are quantized, %s with compute "
                           "\"%s\" multiplies them as they are",
                           w13->algo, moq_compute_name(w13->compute));
    if (w13->pre_quant_scale)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quantized_input",
                           "experts of %s multiply x by their own pre_quant_scale "
                           "before it is quantized",
                           w13->algo);
    w13->quantized_input = true;
    return MOQ_OK;
}

int64_t moq_moe_x_scales(const moq_moe_spec *spec) {
    const moq_linear_spec *w13 = &spec->w13;
    if (!w13->quantized_input || w13->input == MOQ_INPUT_E4M3_TENSOR)
        return 0;
    int64_t group = w13->input == MOQ_INPUT_NVFP4        ? MOQ_NVFP4_GROUP
                    : w13->input == MOQ_INPUT_E4M3_GROUP ? MOQ_FP8_BLOCK
                                                         : w13->in_features;
    return divide_up(w13->in_features, group);
}

moq_dtype moq_moe_x_scale_dtype(const moq_moe_spec *spec) {
    return spec->w13.input == MOQ_INPUT_NVFP4 ? MOQ_DT_E4M3 : MOQ_DT_F32;
}

moq_status moq_moe_resolve(const moq_moe_names *names, moq_moe_spec *spec, moq_err *err) {
    *spec = (moq_moe_spec){0};
    MOQ_TRY(take_sizes(names, spec, err));
    MOQ_TRY(take_activation(names, spec, err));
    MOQ_TRY(resolve_weights(names, spec, err));
    return names->quantized_input ? take_codes(spec, err) : MOQ_OK;
}

static moq_weight stack_of(const moq_linear_spec *layer, int32_t experts, int place) {
    moq_weight stack = layer->matrix;
    stack.experts = experts;
    stack.place = place;
    return stack;
}

moq_weight moq_moe_stack13(const moq_moe_spec *spec) {
    return stack_of(&spec->w13, spec->experts, MOQ_PARAM_OF_W13);
}

moq_weight moq_moe_stack2(const moq_moe_spec *spec) {
    return stack_of(&spec->w2, spec->experts, MOQ_PARAM_OF_W2);
}

/* ---- parameters ---- */

/* Adds the bias of a stack behind its other parameters, and gives all their names and places. */
static int finish_params(const moq_weight *stack, int count, moq_param_spec *params) {
    params[count++] = (moq_param_spec){.id = MOQ_PARAM_BIAS,
                                       .role = "bias",
                                       .dtype = MOQ_DT_F32,
                                       .ndim = 2,
                                       .shape = {stack->experts, stack->out_features}};
    for (int i = 0; i < count; i++) {
        params[i].name = moq_weight_param_name(stack, params[i].id);
        params[i].id += (moq_param)stack->place;
    }
    return count;
}

static int params_of(const moq_moe_spec *spec, bool prepared, moq_param_spec *params) {
    int total = 0;
    for (int second = 0; second < 2; second++) {
        moq_weight stack = second ? moq_moe_stack2(spec) : moq_moe_stack13(spec);
        moq_param_spec *own = params + total;
        int count = prepared ? moq_weight_prepared_params(&stack, own)
                             : moq_weight_checkpoint_params(&stack, own);
        total += finish_params(&stack, count, own);
    }
    MOQ_ASSERT(total <= MOQ_MAX_LAYER_PARAMS);
    return total;
}

int moq_moe_checkpoint_params(const moq_moe_spec *spec, moq_param_spec *params) {
    return params_of(spec, false, params);
}

int moq_moe_prepared_params(const moq_moe_spec *spec, moq_param_spec *params) {
    return params_of(spec, true, params);
}

const char *moq_moe_text(const moq_moe_spec *spec, char *buffer, size_t size) {
    char device[32];
    snprintf(buffer, size, "%s %d experts %lldx%lld, top %d, compute %s, %s%s on %s",
             spec->w13.algo, (int)spec->experts, (long long)spec->w13.in_features,
             (long long)spec->w2.in_features, (int)spec->top_k, moq_compute_name(spec->w13.compute),
             moq_dtype_name(spec->w13.dtype), spec->w13.quantized_input ? " of codes" : "",
             moq_device_text(spec->w13.device, device, sizeof device));
    return buffer;
}
