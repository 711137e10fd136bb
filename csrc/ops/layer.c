/* The facts of any problem: see layer.h. */
#include "ops/layer.h"

/* The scheme that quantizes x as the layer wants it. */
static const char *scheme_of(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_NVFP4        ? "nvfp4"
           : spec->input == MOQ_INPUT_E4M3_TOKEN ? "fp8_token"
           : spec->input == MOQ_INPUT_E4M3_GROUP ? "fp8_group"
                                                 : "fp8_tensor";
}

moq_layer moq_describe_layer(const void *problem) {
    const moq_linear_spec *spec = problem;
    return (moq_layer){.algo = spec->algo,
                       .dtype = spec->dtype,
                       .x_dtype = moq_linear_x_dtype(spec),
                       .x_scheme = scheme_of(spec),
                       .quantized_input = spec->quantized_input,
                       .low_rank = spec->rank > 0,
                       .batch_invariant = spec->batch_invariant,
                       .compute = spec->compute,
                       .choice = spec->choice,
                       .device = spec->device,
                       .target = &spec->target,
                       .group_size = spec->group_size};
}
