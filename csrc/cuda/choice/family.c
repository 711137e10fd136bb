/* Conditions that the predicates of several families share: see family.h. */
#include "cuda/choice/family.h"

#include "cuda/choice/grid.h"

#include <stdio.h>

/* Columns of NVFP4 weights that are multiplied as FP8 codes. */
#define FOLDED_COLUMNS (1 << 16)

/* Columns of a step of the kernels for Hopper of weights that general kernels read. */
#define GENERAL_STEP 128

/* ---- devices ---- */

bool moq_is_on_cuda(const moq_linear_spec *spec, char *reason, size_t size) {
    char device[32];
    if (spec->device.kind != MOQ_CUDA)
        snprintf(reason, size, "runs on a CUDA device, the layer is on %s",
                 moq_device_text(spec->device, device, sizeof device));
    else if (spec->target.missing[0])
        snprintf(reason, size, "%s", spec->target.missing);
    else
        return true;
    return false;
}

bool moq_has_capability(const moq_linear_spec *spec, int least, char *reason, size_t size) {
    int capability = (int)spec->target.capability;
    if (!moq_is_on_cuda(spec, reason, size))
        return false;
    if (capability >= least)
        return true;
    snprintf(reason, size, "needs compute capability %d.%d or later, this device has %d.%d",
             least / 10, least % 10, capability / 10, capability % 10);
    return false;
}

bool moq_is_on_sm90(const moq_linear_spec *spec, char *reason, size_t size) {
    int capability = (int)spec->target.capability;
    if (!moq_is_on_cuda(spec, reason, size))
        return false;
    if (capability == 90)
        return true;
    snprintf(reason, size, "needs compute capability 9.0, this device has %d.%d", capability / 10,
             capability % 10);
    return false;
}

bool moq_has_cublaslt(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!spec->target.cublaslt_missing[0])
        return true;
    snprintf(reason, size, "%s", spec->target.cublaslt_missing);
    return false;
}

/* ---- sizes ---- */

bool moq_takes_tokens(int64_t m, int64_t most, char *reason, size_t size) {
    if (m <= most)
        return true;
    snprintf(reason, size, "needs at most %lld tokens, got %lld", (long long)most, (long long)m);
    return false;
}

bool moq_has_int_rows(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->out_features <= INT32_MAX)
        return true;
    snprintf(reason, size, "needs fewer than 2^31 rows of the weight, got %lld",
             (long long)spec->out_features);
    return false;
}

bool moq_is_multiple_of_16(const char *what, int64_t size_of, char *reason, size_t size) {
    if (size_of % 16 == 0)
        return true;
    snprintf(reason, size, "needs %s to be a multiple of 16, got %lld", what, (long long)size_of);
    return false;
}

/* ---- layers ---- */

bool moq_is_fp8(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->weight == MOQ_WEIGHT_E4M3_ROW || spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        return true;
    snprintf(reason, size, "multiplies FP8 weights, %s with compute %s has others", spec->algo,
             moq_compute_name(spec->compute));
    return false;
}

bool moq_suits_fp8_cores(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!moq_is_fp8(spec, reason, size))
        return false;
    if (spec->dtype != MOQ_DT_F32)
        return true;
    snprintf(reason, size, "sums to about 1e-4, float32 outputs ask for 1e-5");
    return false;
}

/* True for packed NVFP4 whose x is not quantized, or need not be. */
static bool is_exact_nvfp4(const moq_linear_spec *spec, char *reason, size_t size) {
    bool packed = spec->weight == MOQ_WEIGHT_E2M1_PACKED;
    if (packed && (spec->input == MOQ_INPUT_AS_IS || moq_linear_has_choice(spec)))
        return true;
    if (packed && spec->compute != MOQ_COMPUTE_FP8) {
        snprintf(reason, size, "multiplies x as it is, %s quantizes it", spec->algo);
        return false;
    }
    snprintf(reason, size, "multiplies NVFP4 weights exactly, %s with compute %s asks for another",
             spec->algo, moq_compute_name(spec->compute));
    return false;
}

bool moq_suits_16_bits(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!is_exact_nvfp4(spec, reason, size) || !moq_has_int_rows(spec, reason, size))
        return false;
    if (spec->dtype != MOQ_DT_F32)
        return true;
    snprintf(reason, size, "multiplies 16-bit activations, the layer has float32");
    return false;
}

bool moq_suits_folding(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!moq_is_on_sm90(spec, reason, size) || !moq_has_int_rows(spec, reason, size))
        return false;
    if (!moq_linear_folds(spec))
        snprintf(reason, size,
                 "multiplies NVFP4 weights with compute fp8, %s with compute %s is "
                 "another layer",
                 spec->algo, moq_compute_name(spec->compute));
    else if (spec->dtype == MOQ_DT_F32)
        snprintf(reason, size, "sums to about 1e-4, float32 outputs ask for 1e-5");
    else if (spec->in_features > FOLDED_COLUMNS)
        snprintf(reason, size, "needs at most %d in_features, got %lld", FOLDED_COLUMNS,
                 (long long)spec->in_features);
    else if (spec->input != MOQ_INPUT_E4M3_TOKEN)
        snprintf(reason, size, "quantizes x by token");
    else
        return true;
    return false;
}

bool moq_suits_fp4(const moq_linear_spec *spec, char *reason, size_t size) {
    bool fp4 = spec->weight == MOQ_WEIGHT_E2M1_SWIZZLED || moq_linear_unpacks(spec);
    if (!fp4 || spec->dtype == MOQ_DT_F32) {
        snprintf(reason, size,
                 "multiplies NVFP4 codes to 16-bit outputs (compute fp4), the layer is %s with "
                 "compute %s, %s",
                 spec->algo, moq_compute_name(spec->compute), moq_dtype_name(spec->dtype));
        return false;
    }
    if (spec->in_features % 32 != 0) { /* 16 bytes of codes */
        snprintf(reason, size, "needs in_features to be a multiple of 32, got %lld",
                 (long long)spec->in_features);
        return false;
    }
    for (int i = 0; i < spec->partition_count; i++)
        if (!moq_is_multiple_of_16("each of out_partitions", spec->partition[i], reason, size))
            return false;
    return true;
}

bool moq_is_general(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!moq_layout_is_general(spec->weight))
        snprintf(reason, size,
                 "multiplies MXFP8, int8 and int4 weights, %s with compute %s has others",
                 spec->algo, moq_compute_name(spec->compute));
    else if (spec->dtype == MOQ_DT_F32)
        snprintf(reason, size, "multiplies 16-bit activations, the layer has float32");
    else
        return true;
    return false;
}

static bool suits_general_words(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->weight == MOQ_WEIGHT_INT8_ROW)
        return moq_is_multiple_of_16("in_features", spec->in_features, reason, size);
    if (spec->in_features % GENERAL_STEP)
        snprintf(reason, size, "needs in_features to be a multiple of %d, got %lld", GENERAL_STEP,
                 (long long)spec->in_features);
    else if (spec->weight == MOQ_WEIGHT_INT4_GROUP && spec->group_size != GENERAL_STEP)
        snprintf(reason, size, "needs groups of %d, got %d", GENERAL_STEP, spec->group_size);
    else if (spec->weight == MOQ_WEIGHT_E4M3_GROUP && spec->dtype != MOQ_DT_BF16)
        snprintf(reason, size, "multiplies MXFP8 weights by bfloat16, the layer has %s",
                 moq_dtype_name(spec->dtype));
    else
        return true;
    return false;
}

bool moq_suits_general_sm90(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!moq_is_on_sm90(spec, reason, size) || !moq_is_general(spec, reason, size) ||
        !moq_has_int_rows(spec, reason, size) || !suits_general_words(spec, reason, size))
        return false;
    if (spec->input == MOQ_INPUT_AS_IS)
        return true;
    snprintf(reason, size, "multiplies x as it is, %s quantizes it", spec->algo);
    return false;
}

bool moq_has_groups(const moq_linear_spec *spec, int multiple, char *reason, size_t size) {
    if (spec->weight != MOQ_WEIGHT_INT4_GROUP || spec->group_size % multiple == 0)
        return true;
    snprintf(reason, size, "needs groups of a multiple of %d columns, got %d", multiple,
             (int)spec->group_size);
    return false;
}

/* ---- experts ---- */

bool moq_has_few_experts(const moq_moe_spec *spec, char *reason, size_t size) {
    if (spec->experts <= MOQ_CUDA_MOE_EXPERTS)
        return true;
    snprintf(reason, size, "needs at most %d experts, got %d", MOQ_CUDA_MOE_EXPERTS,
             (int)spec->experts);
    return false;
}

bool moq_runs_as_linears(const moq_linear_kernel *kernel, const moq_moe_spec *spec, char *reason,
                         size_t size) {
    return kernel->can_run(&spec->w13, MOQ_ANY_TOKENS, reason, size) &&
           kernel->can_run(&spec->w2, MOQ_ANY_TOKENS, reason, size) &&
           moq_has_few_experts(spec, reason, size);
}
