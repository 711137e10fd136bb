/* Resolution of a linear layer's description: see linear.h. Shapes follow what ModelOpt exports. */
#include "core/linear.h"

#include "core/formats.h"
#include "core/nvfp4_packed.h"
#include "core/swizzle.h"

#include <stdio.h>
#include <string.h>

static const char *const COMPUTE_NAMES[] = {"exact", "fp8", "fp4", "auto"};

enum { COMPUTE_COUNT = sizeof COMPUTE_NAMES / sizeof *COMPUTE_NAMES };

static bool has_linear(const moq_algo_facts *facts) {
    return facts->has_linear;
}

static moq_status find_algo(const char *name, const moq_algo_facts **facts, moq_err *err) {
    moq_algo algo;
    moq_text text = {name, strlen(name)};
    char list[MOQ_ALGO_LIST_SIZE], hint[64];
    if (!moq_algo_parse(text, &algo))
        return moq_fail(err, MOQ_ERR_VALUE, "quant_algo: expected one of %s, got \"%.64s\"%s",
                        moq_algo_list(has_linear, list, sizeof list), name,
                        moq_algo_hint(text, hint, sizeof hint));
    *facts = moq_algo_facts_of(algo);
    if ((*facts)->has_linear)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "%s has no linear method; supported are %s",
                    (*facts)->name, moq_algo_list(has_linear, list, sizeof list));
}

/* The layout of the stored weight of an algorithm that has a linear. */
static moq_weight_layout stored_layout(const moq_algo_facts *facts) {
    if (facts->codes == MOQ_STORED_E2M1)
        return MOQ_WEIGHT_E2M1;
    return facts->scales == MOQ_SCALES_BLOCKS ? MOQ_WEIGHT_E4M3_BLOCK : MOQ_WEIGHT_E4M3_ROW;
}

static moq_status parse_compute(const char *name, moq_compute *compute, moq_err *err) {
    for (int i = 0; i < COMPUTE_COUNT; i++) {
        if (strcmp(COMPUTE_NAMES[i], name) == 0) {
            *compute = (moq_compute)i;
            return MOQ_OK;
        }
    }
    return moq_fail(err, MOQ_ERR_VALUE,
                    "compute: expected \"exact\", \"fp8\", \"fp4\" or \"auto\", got \"%s\"", name);
}

/* CUDA kernels read NVFP4 weights packed, but for those that multiply NVFP4 activations: they read
 * what block-scaled matrix products take. */
static moq_status apply_compute(moq_linear_spec *spec, moq_err *err) {
    bool packs = spec->checkpoint == MOQ_WEIGHT_E2M1 && spec->device.kind == MOQ_CUDA;
    if (packs && spec->compute != MOQ_COMPUTE_FP4)
        spec->weight = MOQ_WEIGHT_E2M1_PACKED;
    if (spec->compute == MOQ_COMPUTE_EXACT)
        return MOQ_OK;
    if (spec->compute == MOQ_COMPUTE_AUTO) {
        if (packs && spec->input == MOQ_INPUT_AS_IS)
            spec->input = MOQ_INPUT_E4M3_TOKEN;
        return MOQ_OK;
    }
    if (spec->checkpoint != MOQ_WEIGHT_E2M1)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                        "compute \"%s\" is for NVFP4 weights; %s runs with compute \"exact\"",
                        moq_compute_name(spec->compute), spec->algo);
    if (spec->compute == MOQ_COMPUTE_FP8) {
        if (!packs)
            spec->weight = MOQ_WEIGHT_E4M3_ROW;
        if (spec->input == MOQ_INPUT_AS_IS)
            spec->input = MOQ_INPUT_E4M3_TOKEN;
        return MOQ_OK;
    }
    if (spec->input != MOQ_INPUT_AS_IS || !spec->checkpoint_input_scale ||
        spec->group_size != MOQ_NVFP4_GROUP)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                        "compute \"fp4\" needs NVFP4 with groups of 16; %s with groups of %d runs "
                        "with compute \"exact\" or \"fp8\"",
                        spec->algo, (int)spec->group_size);
    spec->input = MOQ_INPUT_NVFP4;
    if (packs)
        spec->weight = MOQ_WEIGHT_E2M1_SWIZZLED;
    return MOQ_OK;
}

static moq_status check_group(const moq_algo_facts *facts, int64_t group_size,
                              moq_linear_spec *spec, moq_err *err) {
    int64_t group = group_size ? group_size : facts->group;
    char sizes[32];
    if (!moq_algo_takes_group(facts, group))
        return moq_fail(err, MOQ_ERR_VALUE, "group_size: expected %s for %s, got %lld",
                        moq_algo_groups_text(facts, sizes, sizeof sizes), spec->algo,
                        (long long)group);
    spec->group_size = (int32_t)group;
    return MOQ_OK;
}

static moq_status check_sizes(int64_t in_features, const int64_t *partitions, int32_t count,
                              moq_linear_spec *spec, moq_err *err) {
    int64_t limit = INT32_MAX; /* far above any layer; keeps every product below within int64 */
    if (in_features < 1 || in_features > limit)
        return moq_fail(err, MOQ_ERR_VALUE, "in_features: expected 1 to %lld, got %lld",
                        (long long)limit, (long long)in_features);
    if (count < 1 || count > MOQ_MAX_PARTITIONS)
        return moq_fail(err, MOQ_ERR_VALUE, "out_partitions: expected 1 to %d sizes, got %d",
                        MOQ_MAX_PARTITIONS, (int)count);
    spec->in_features = in_features;
    spec->out_features = 0;
    spec->partition_count = count;
    for (int32_t i = 0; i < count; i++) {
        if (partitions[i] < 1 || partitions[i] > limit)
            return moq_fail(err, MOQ_ERR_VALUE, "out_partitions[%d]: expected 1 to %lld, got %lld",
                            (int)i, (long long)limit, (long long)partitions[i]);
        spec->partition[i] = partitions[i];
        spec->out_features += partitions[i];
    }
    if (spec->checkpoint == MOQ_WEIGHT_E2M1 && in_features % spec->group_size)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "in_features: expected a multiple of the group size %d for %s, got %lld",
                        (int)spec->group_size, spec->algo, (long long)in_features);
    return MOQ_OK;
}

moq_status moq_linear_resolve(const char *algo, const char *compute, const char *dtype,
                              moq_device device, int64_t in_features, const int64_t *partitions,
                              int32_t partition_count, int64_t group_size, moq_linear_spec *spec,
                              moq_err *err) {
    const moq_algo_facts *facts;
    *spec = (moq_linear_spec){.device = device};
    MOQ_TRY(find_algo(algo, &facts, err));
    spec->algo = facts->name;
    spec->per_row_scale = facts->scales == MOQ_SCALES_ROWS;
    spec->checkpoint = spec->weight = stored_layout(facts);
    spec->input = facts->input;
    spec->checkpoint_input_scale = facts->input_scale != MOQ_STATIC_NONE;
    spec->pre_quant_scale = facts->pre_quant_scale;
    spec->dtype = moq_dtype_from_name(dtype);
    if (spec->dtype != MOQ_DT_BF16 && spec->dtype != MOQ_DT_F16 && spec->dtype != MOQ_DT_F32)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "dtype: expected \"bfloat16\", \"float16\" or \"float32\", got \"%s\"",
                        dtype);
    MOQ_TRY(parse_compute(compute, &spec->compute, err));
    MOQ_TRY(check_group(facts, group_size, spec, err));
    MOQ_TRY(check_sizes(in_features, partitions, partition_count, spec, err));
    return apply_compute(spec, err);
}

moq_status moq_linear_apply_options(bool fast_accum, bool one_input_scale, moq_linear_spec *spec,
                                    moq_err *err) {
    bool may_fold = spec->compute == MOQ_COMPUTE_FP8 || spec->compute == MOQ_COMPUTE_AUTO;
    if (fast_accum && spec->checkpoint == MOQ_WEIGHT_E2M1 && !may_fold)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                        "fast_accum: is for FP8 products, %s with compute \"%s\" has none",
                        spec->algo, moq_compute_name(spec->compute));
    if (one_input_scale && !spec->checkpoint_input_scale)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "one_input_scale: %s has no input_scale",
                        spec->algo);
    spec->fast_accum = fast_accum;
    spec->one_input_scale = one_input_scale;
    return MOQ_OK;
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

int64_t moq_linear_block_rows(const moq_linear_spec *spec) {
    int64_t rows = 0;
    for (int32_t i = 0; i < spec->partition_count; i++)
        rows += ceil_div(spec->partition[i], MOQ_FP8_BLOCK);
    return rows;
}

int64_t moq_linear_scale_columns(const moq_linear_spec *spec) {
    return spec->group_size ? ceil_div(spec->in_features, spec->group_size) : 1;
}

int64_t moq_token_bucket(int64_t m) {
    int64_t step = 1;
    while (m / 16 >= step)
        step *= 2;
    return m > INT64_MAX - step ? m : ceil_div(m, step) * step;
}

static const char *const PARAM_NAMES[MOQ_PARAM_COUNT] = {
    [MOQ_PARAM_WEIGHT] = "weight",
    [MOQ_PARAM_WEIGHT_SCALE] = "weight_scale",
    [MOQ_PARAM_WEIGHT_SCALE_2] = "weight_scale_2",
    [MOQ_PARAM_OUTPUT_SCALE] = "output_scale",
    [MOQ_PARAM_FOLD_SCALE] = "fold_scale",
    [MOQ_PARAM_INPUT_SCALE] = "input_scale",
    [MOQ_PARAM_PRE_QUANT_SCALE] = "pre_quant_scale",
};

static moq_param_spec matrix(moq_param id, const char *role, moq_dtype dtype, int64_t rows,
                             int64_t columns) {
    return (moq_param_spec){id, PARAM_NAMES[id], role, dtype, 2, {rows, columns}, true};
}

static moq_param_spec vector(moq_param id, const char *role, int64_t size, bool required) {
    return (moq_param_spec){id, PARAM_NAMES[id], role, MOQ_DT_F32, 1, {size, 0}, required};
}

static int weight_params(const moq_linear_spec *spec, moq_weight_layout layout,
                         moq_param_spec *params) {
    int64_t n = spec->out_features, k = spec->in_features;
    int64_t columns = moq_linear_scale_columns(spec);
    switch (layout) {
    case MOQ_WEIGHT_E4M3_ROW:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E4M3, n, k);
        return 1;
    case MOQ_WEIGHT_E4M3_BLOCK:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E4M3, n, k);
        params[1] = matrix(MOQ_PARAM_WEIGHT_SCALE, "scale", MOQ_DT_F32, moq_linear_block_rows(spec),
                           columns);
        return 2;
    case MOQ_WEIGHT_E2M1:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E2M1X2, n, k / 2);
        params[1] = matrix(MOQ_PARAM_WEIGHT_SCALE, "scale", MOQ_DT_E4M3, n, columns);
        return 2;
    case MOQ_WEIGHT_E2M1_PACKED:
        params[0] = (moq_param_spec){
            .id = MOQ_PARAM_WEIGHT,
            .name = PARAM_NAMES[MOQ_PARAM_WEIGHT],
            .role = "codes",
            .dtype = MOQ_DT_U8,
            .ndim = 3,
            .shape = {moq_pack_slabs(n), moq_pack_blocks(k), MOQ_PACK_BYTES},
            .required = true,
        };
        return 1;
    case MOQ_WEIGHT_E2M1_SWIZZLED: /* tiles have as many rows as blocks of FP8 */
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E2M1X2, n, k / 2);
        params[1] = matrix(MOQ_PARAM_WEIGHT_SCALE, "scale", MOQ_DT_E4M3,
                           moq_linear_block_rows(spec) * MOQ_SWIZZLE_ROWS,
                           moq_swizzle_across(columns) * MOQ_SWIZZLE_COLUMNS);
        return 2;
    }
    return 0;
}

bool moq_linear_folds(const moq_linear_spec *spec) {
    return (spec->weight == MOQ_WEIGHT_E2M1_PACKED && spec->compute == MOQ_COMPUTE_FP8) ||
           moq_linear_has_choice(spec);
}

bool moq_linear_has_choice(const moq_linear_spec *spec) {
    return spec->weight == MOQ_WEIGHT_E2M1_PACKED && spec->compute == MOQ_COMPUTE_AUTO &&
           spec->input == MOQ_INPUT_E4M3_TOKEN;
}

int moq_linear_checkpoint_params(const moq_linear_spec *spec, moq_param_spec *params) {
    int64_t parts = spec->partition_count;
    int count = weight_params(spec, spec->checkpoint, params);
    if (spec->checkpoint == MOQ_WEIGHT_E4M3_ROW)
        params[count++] = vector(MOQ_PARAM_WEIGHT_SCALE, "scale",
                                 spec->per_row_scale ? spec->out_features : parts, true);
    if (spec->checkpoint == MOQ_WEIGHT_E2M1)
        params[count++] = vector(MOQ_PARAM_WEIGHT_SCALE_2, "scale", parts, true);
    if (spec->checkpoint_input_scale)
        params[count++] = vector(MOQ_PARAM_INPUT_SCALE, "scale", parts, false);
    if (spec->pre_quant_scale)
        params[count++] = vector(MOQ_PARAM_PRE_QUANT_SCALE, "factor", spec->in_features, false);
    return count;
}

int moq_linear_prepared_params(const moq_linear_spec *spec, moq_param_spec *params) {
    int count = weight_params(spec, spec->weight, params);
    if (spec->weight != MOQ_WEIGHT_E4M3_BLOCK)
        params[count++] = vector(MOQ_PARAM_OUTPUT_SCALE, "factor", spec->out_features, true);
    if (moq_linear_folds(spec))
        params[count++] = vector(MOQ_PARAM_FOLD_SCALE, "factor", spec->out_features, true);
    if (spec->input == MOQ_INPUT_E4M3_TENSOR || spec->input == MOQ_INPUT_NVFP4)
        params[count++] = vector(MOQ_PARAM_INPUT_SCALE, "scale", spec->partition_count, false);
    if (spec->pre_quant_scale)
        params[count++] = vector(MOQ_PARAM_PRE_QUANT_SCALE, "factor", spec->in_features, false);
    return count;
}

const char *moq_compute_name(moq_compute compute) {
    return COMPUTE_NAMES[compute];
}

const char *moq_linear_text(const moq_linear_spec *spec, char *buffer, size_t size) {
    char device[32];
    snprintf(buffer, size, "%s %lldx%lld, compute %s, %s on %s", spec->algo,
             (long long)spec->out_features, (long long)spec->in_features,
             moq_compute_name(spec->compute), moq_dtype_name(spec->dtype),
             moq_device_text(spec->device, device, sizeof device));
    return buffer;
}
