/* Resolution of a weight's description: see weight.h. Shapes follow what ModelOpt exports. */
#include "core/weight.h"

#include "core/formats.h"
#include "core/invariant.h"
#include "core/nvfp4_packed.h"
#include "core/sizes.h"
#include "core/swizzle.h"

#include <stdio.h>
#include <string.h>

static const char *const COMPUTE_NAMES[] = {"exact", "fp8", "fp4", "auto"};

enum { COMPUTE_COUNT = sizeof COMPUTE_NAMES / sizeof *COMPUTE_NAMES };

static moq_status find_algo(const char *name, const moq_algo_facts **facts, moq_err *err) {
    moq_algo algo;
    moq_text text = {name, strlen(name)};
    char list[MOQ_ALGO_LIST_SIZE], hint[64];
    if (!moq_algo_parse(text, &algo))
        return moq_fail_of(err, MOQ_ERR_VALUE, "quant_algo", "expected one of %s, got \"%.64s\"%s",
                           moq_algo_list(moq_algo_has_weight, list, sizeof list), name,
                           moq_algo_hint(text, hint, sizeof hint));
    *facts = moq_algo_facts_of(algo);
    if (moq_algo_has_weight(*facts))
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "%s has no linear method; supported are %s",
                    (*facts)->name, moq_algo_list(moq_algo_has_weight, list, sizeof list));
}

/* The layout of the stored weight of an algorithm that has a linear. */
static moq_weight_layout stored_layout(const moq_algo_facts *facts) {
    if (facts->codes == MOQ_STORED_E2M1)
        return MOQ_WEIGHT_E2M1;
    if (facts->codes == MOQ_STORED_INT8)
        return MOQ_WEIGHT_INT8_ROW;
    if (facts->codes == MOQ_STORED_INT4)
        return MOQ_WEIGHT_INT4_GROUP;
    return facts->scales == MOQ_SCALES_BLOCKS   ? MOQ_WEIGHT_E4M3_BLOCK
           : facts->scales == MOQ_SCALES_GROUPS ? MOQ_WEIGHT_E4M3_GROUP
                                                : MOQ_WEIGHT_E4M3_ROW;
}

static moq_status parse_compute(const char *name, moq_compute *compute, moq_err *err) {
    for (int i = 0; i < COMPUTE_COUNT; i++) {
        if (strcmp(COMPUTE_NAMES[i], name) == 0) {
            *compute = (moq_compute)i;
            return MOQ_OK;
        }
    }
    return moq_fail_of(err, MOQ_ERR_VALUE, "compute",
                       "expected \"exact\", \"fp8\", \"fp4\" or \"auto\", got \"%s\"", name);
}

/* CUDA kernels read NVFP4 weights packed, but for those that multiply NVFP4 activations: they read
 * what block-scaled matrix products take. */
static moq_status apply_compute(moq_weight *weight, moq_err *err) {
    bool packs = weight->checkpoint == MOQ_WEIGHT_E2M1 && weight->device.kind == MOQ_CUDA;
    if (packs && weight->compute != MOQ_COMPUTE_FP4)
        weight->weight = MOQ_WEIGHT_E2M1_PACKED;
    /* No one copy of MXFP8 serves both; FP8 products are about as fast with few tokens, and faster
     * with more (docs/numerics.md). */
    bool is_mx = weight->checkpoint == MOQ_WEIGHT_E4M3_GROUP;
    if (weight->compute == MOQ_COMPUTE_AUTO && is_mx && weight->device.kind == MOQ_CUDA)
        weight->compute = MOQ_COMPUTE_FP8;
    if (weight->compute == MOQ_COMPUTE_EXACT)
        return MOQ_OK;
    if (weight->compute == MOQ_COMPUTE_AUTO) {
        if (packs && weight->input == MOQ_INPUT_AS_IS) {
            weight->choice = MOQ_COMPUTE_FP8;
            weight->input = MOQ_INPUT_E4M3_TOKEN;
        }
        return MOQ_OK;
    }
    bool folds = is_mx && weight->compute == MOQ_COMPUTE_FP8;
    if (weight->checkpoint != MOQ_WEIGHT_E2M1 && !folds)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                        "compute \"%s\" is for NVFP4 weights; %s runs with compute \"exact\"%s",
                        moq_compute_name(weight->compute), weight->algo,
                        is_mx ? " or \"fp8\"" : "");
    if (weight->compute == MOQ_COMPUTE_FP8) {
        if (!packs)
            weight->weight = MOQ_WEIGHT_E4M3_ROW;
        if (weight->input == MOQ_INPUT_AS_IS)
            weight->input = MOQ_INPUT_E4M3_TOKEN;
        return MOQ_OK;
    }
    if (weight->input != MOQ_INPUT_AS_IS || !weight->checkpoint_input_scale ||
        weight->group_size != MOQ_NVFP4_GROUP)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                        "compute \"fp4\" needs NVFP4 with groups of 16; %s with groups of %d runs "
                        "with compute \"exact\" or \"fp8\"",
                        weight->algo, (int)weight->group_size);
    weight->input = MOQ_INPUT_NVFP4;
    if (packs)
        weight->weight = MOQ_WEIGHT_E2M1_SWIZZLED;
    return MOQ_OK;
}

static moq_status check_group(const moq_algo_facts *facts, int64_t group_size, moq_weight *weight,
                              moq_err *err) {
    int64_t group = group_size ? group_size : facts->group;
    char sizes[32];
    if (!moq_algo_takes_group(facts, group))
        return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "expected %s for %s, got %lld",
                           moq_algo_groups_text(facts, sizes, sizeof sizes), weight->algo,
                           (long long)group);
    weight->group_size = (int32_t)group;
    return MOQ_OK;
}

/* Finds the rank of low-rank pairs. */
static moq_status check_rank(const moq_weight_names *names, const moq_algo_facts *facts,
                             moq_weight *weight, moq_err *err) {
    int64_t most = INT32_MAX / MOQ_MAX_PARTITIONS;
    if (!facts->low_rank && names->rank)
        return moq_fail_of(err, MOQ_ERR_VALUE, "rank", "%s has no low-rank pair", weight->algo);
    if (!facts->low_rank)
        return MOQ_OK;
    if (names->rank < 0 || names->rank > most)
        return moq_fail_of(err, MOQ_ERR_VALUE, "rank", "expected 1 to %lld, got %lld",
                           (long long)most, (long long)names->rank);
    weight->rank = names->rank ? (int32_t)names->rank : MOQ_SVD_RANK;
    return names->experts ? moq_weight_refuse_experts(weight, err) : MOQ_OK;
}

moq_status moq_weight_refuse_experts(const moq_weight *weight, moq_err *err) {
    if (!weight->rank)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                    "%s runs as linears, and not as experts; `dequantize` and `moqext convert --to "
                    "bf16` do read them",
                    weight->algo);
}

static moq_status check_partitions(const moq_weight_names *names, moq_weight *weight,
                                   moq_err *err) {
    int64_t limit = INT32_MAX;
    int32_t count = names->partition_count;
    if (count < 1 || count > MOQ_MAX_PARTITIONS)
        return moq_fail_of(err, MOQ_ERR_VALUE, "out_partitions", "expected 1 to %d sizes, got %d",
                           MOQ_MAX_PARTITIONS, (int)count);
    weight->partition = names->partitions;
    weight->partition_count = count;
    for (int32_t i = 0; i < count; i++) {
        int64_t rows = names->partitions[i];
        if (rows < 1 || rows > limit)
            return moq_fail(err, MOQ_ERR_VALUE, "out_partitions[%d]: expected 1 to %lld, got %lld",
                            (int)i, (long long)limit, (long long)rows);
        weight->out_features += rows;
    }
    return MOQ_OK;
}

static moq_status check_sizes(const moq_weight_names *names, moq_weight *weight, moq_err *err) {
    int64_t limit = INT32_MAX; /* far above any layer; keeps products of a matrix within int64 */
    int64_t k = names->in_features;
    const char *columns = names->columns_name ? names->columns_name : "in_features";
    if (names->experts < 0 || names->experts > MOQ_MAX_EXPERTS)
        return moq_fail_of(err, MOQ_ERR_VALUE, "experts", "expected 1 to %d, got %d",
                           MOQ_MAX_EXPERTS, (int)names->experts);
    if (k < 1 || k > limit)
        return moq_fail_of(err, MOQ_ERR_VALUE, columns, "expected 1 to %lld, got %lld",
                           (long long)limit, (long long)k);
    weight->experts = names->experts;
    weight->in_features = k;
    MOQ_TRY(check_partitions(names, weight, err));
    bool groups = weight->checkpoint == MOQ_WEIGHT_E2M1 ||
                  weight->checkpoint == MOQ_WEIGHT_E4M3_GROUP ||
                  weight->checkpoint == MOQ_WEIGHT_INT4_GROUP;
    for (int32_t i = 0; i < weight->partition_count; i++)
        if (weight->checkpoint == MOQ_WEIGHT_INT4_GROUP && weight->partition[i] % 2)
            return moq_fail(err, MOQ_ERR_VALUE,
                            "out_partitions[%d]: expected an even size for %s, which stores two "
                            "rows in one, got %lld",
                            (int)i, weight->algo, (long long)weight->partition[i]);
    if (groups && k % weight->group_size)
        return moq_fail_of(err, MOQ_ERR_VALUE, columns,
                           "expected a multiple of the group size %d for %s, got %lld",
                           (int)weight->group_size, weight->algo, (long long)k);
    return MOQ_OK;
}

moq_status moq_weight_resolve(const moq_weight_names *names, moq_weight *weight, moq_err *err) {
    const moq_algo_facts *facts;
    *weight = (moq_weight){.device = names->device};
    MOQ_TRY(find_algo(names->algo, &facts, err));
    weight->algo = facts->name;
    weight->per_row_scale = facts->scales == MOQ_SCALES_ROWS;
    weight->checkpoint = weight->weight = stored_layout(facts);
    weight->mx_scales = weight->checkpoint == MOQ_WEIGHT_E2M1 && facts->scale_dtype == MOQ_DT_E8M0;
    weight->input = facts->input;
    weight->checkpoint_input_scale = facts->input_scale != MOQ_STATIC_NONE;
    weight->by_token = facts->by_token;
    weight->pre_quant_scale = facts->pre_quant_scale;
    weight->unused_scale_2 = facts->second == MOQ_SECOND_UNUSED;
    MOQ_TRY(parse_compute(names->compute, &weight->compute, err));
    MOQ_TRY(check_group(facts, names->group_size, weight, err));
    MOQ_TRY(check_rank(names, facts, weight, err));
    MOQ_TRY(check_sizes(names, weight, err));
    return apply_compute(weight, err);
}

moq_status moq_weight_promise_one_input_scale(moq_weight *weight, moq_err *err) {
    if (!weight->checkpoint_input_scale)
        return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "one_input_scale", "%s has no input_scale",
                           weight->algo);
    weight->one_input_scale = true;
    return MOQ_OK;
}

int64_t moq_weight_partition_blocks(const moq_weight *weight, int32_t partition) {
    int64_t rows = weight->partition[partition];
    return weight->checkpoint == MOQ_WEIGHT_INT4_GROUP ? rows : divide_up(rows, MOQ_FP8_BLOCK);
}

int64_t moq_weight_block_rows(const moq_weight *weight) {
    int64_t rows = 0;
    for (int32_t i = 0; i < weight->partition_count; i++)
        rows += moq_weight_partition_blocks(weight, i);
    return rows;
}

int64_t moq_weight_scale_columns(const moq_weight *weight) {
    return weight->group_size ? divide_up(weight->in_features, weight->group_size) : 1;
}

#define NAMES_OF(place, before)                                                                    \
    [(place) + MOQ_PARAM_WEIGHT] = before "weight",                                                \
               [(place) + MOQ_PARAM_WEIGHT_SCALE] = before "weight_scale",                         \
               [(place) + MOQ_PARAM_WEIGHT_SCALE_2] = before "weight_scale_2",                     \
               [(place) + MOQ_PARAM_OUTPUT_SCALE] = before "output_scale",                         \
               [(place) + MOQ_PARAM_FOLD_SCALE] = before "fold_scale",                             \
               [(place) + MOQ_PARAM_INPUT_SCALE] = before "input_scale",                           \
               [(place) + MOQ_PARAM_PRE_QUANT_SCALE] = before "pre_quant_scale",                   \
               [(place) + MOQ_PARAM_LORA_A] = before "lora_a",                                     \
               [(place) + MOQ_PARAM_LORA_B] = before "lora_b",                                     \
               [(place) + MOQ_PARAM_BIAS] = before "bias"

static const char *const PARAM_NAMES[MOQ_PARAM_PLACES] = {
    NAMES_OF(0, ""),
    NAMES_OF(MOQ_PARAM_OF_W13, "w13_"),
    NAMES_OF(MOQ_PARAM_OF_W2, "w2_"),
};

const char *moq_param_name(int place, moq_param id) {
    return PARAM_NAMES[place + (int)id];
}

static moq_param_spec matrix(moq_param id, const char *role, moq_dtype dtype, int64_t rows,
                             int64_t columns) {
    return (moq_param_spec){id, PARAM_NAMES[id], role, dtype, 2, {rows, columns}, true};
}

static moq_param_spec vector(moq_param id, const char *role, int64_t size, bool required) {
    return (moq_param_spec){id, PARAM_NAMES[id], role, MOQ_DT_F32, 1, {size, 0}, required};
}

/* The codes of a matrix, and the scales that are stored beside them. */
static int code_params(const moq_weight *weight, moq_weight_layout layout, moq_param_spec *params) {
    int64_t n = weight->out_features, k = weight->in_features;
    int64_t columns = moq_weight_scale_columns(weight);
    switch (layout) {
    case MOQ_WEIGHT_E4M3_ROW:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E4M3, n, k);
        return 1;
    case MOQ_WEIGHT_E4M3_BLOCK:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E4M3, n, k);
        params[1] = matrix(MOQ_PARAM_WEIGHT_SCALE, "scale", MOQ_DT_F32,
                           moq_weight_block_rows(weight), columns);
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
                           moq_weight_block_rows(weight) * MOQ_SWIZZLE_ROWS,
                           moq_swizzle_across(columns) * MOQ_SWIZZLE_COLUMNS);
        return 2;
    case MOQ_WEIGHT_E4M3_GROUP:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_E4M3, n, k);
        params[1] = matrix(MOQ_PARAM_WEIGHT_SCALE, "scale", MOQ_DT_E8M0, n, columns);
        return 2;
    case MOQ_WEIGHT_INT8_ROW:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_I8, n, k);
        return 1;
    case MOQ_WEIGHT_INT4_GROUP:
        params[0] = matrix(MOQ_PARAM_WEIGHT, "codes", MOQ_DT_U8, n / 2, k);
        params[1] = matrix(MOQ_PARAM_WEIGHT_SCALE, "scale", MOQ_DT_F32, n, columns);
        return 2;
    }
    return 0;
}

moq_dtype moq_weight_code_dtype(const moq_weight *weight) {
    moq_param_spec params[MOQ_MAX_PARAMS];
    code_params(weight, weight->checkpoint, params);
    return params[0].dtype;
}

bool moq_weight_folds(const moq_weight *weight) {
    return (weight->weight == MOQ_WEIGHT_E2M1_PACKED && weight->compute == MOQ_COMPUTE_FP8) ||
           weight->choice == MOQ_COMPUTE_FP8;
}

bool moq_weight_has_choice(const moq_weight *weight) {
    return weight->choice != MOQ_COMPUTE_EXACT;
}

/* The low-rank pairs of all partitions: lora_a of one after the other, lora_b beside its rows. They
 * are float32 when prepared, which holds whatever a checkpoint has. */
static int low_rank_params(const moq_weight *weight, moq_param_spec *params) {
    if (!weight->rank)
        return 0;
    params[0] = matrix(MOQ_PARAM_LORA_A, "factor", MOQ_DT_F32, moq_weight_ranks(weight),
                       weight->in_features);
    params[1] = matrix(MOQ_PARAM_LORA_B, "factor", MOQ_DT_F32, weight->out_features, weight->rank);
    return 2;
}

/* True if a vector has a value for each partition. */
static bool is_of_partitions(const moq_weight *weight, moq_param id) {
    return id == MOQ_PARAM_WEIGHT_SCALE_2 || id == MOQ_PARAM_INPUT_SCALE ||
           (id == MOQ_PARAM_WEIGHT_SCALE && !weight->per_row_scale);
}

/* The tensors of a matrix as those of the stack: experts first. One value for each of them is a
 * vector. */
static int stack_params(const moq_weight *weight, moq_param_spec *params, int count) {
    for (int i = 0; i < count && weight->experts; i++) {
        moq_param_spec *p = &params[i];
        bool single = p->ndim == 1 && p->shape[0] == 1 && is_of_partitions(weight, p->id);
        for (int d = p->ndim; d > 0; d--)
            p->shape[d] = p->shape[d - 1];
        p->shape[0] = weight->experts;
        p->ndim += single ? 0 : 1;
    }
    MOQ_ASSERT(count <= MOQ_MAX_PARAMS);
    return count;
}

int moq_weight_checkpoint_params(const moq_weight *weight, moq_param_spec *params) {
    int64_t parts = weight->partition_count;
    int count = code_params(weight, weight->checkpoint, params);
    if (weight->checkpoint == MOQ_WEIGHT_E4M3_ROW || weight->checkpoint == MOQ_WEIGHT_INT8_ROW)
        params[count++] = vector(MOQ_PARAM_WEIGHT_SCALE, "scale",
                                 weight->per_row_scale ? weight->out_features : parts, true);
    if (weight->mx_scales)
        params[1].dtype = MOQ_DT_E8M0;
    else if (weight->checkpoint == MOQ_WEIGHT_E2M1)
        params[count++] = vector(MOQ_PARAM_WEIGHT_SCALE_2, "scale", parts, true);
    if (weight->unused_scale_2)
        params[count++] = vector(MOQ_PARAM_WEIGHT_SCALE_2, "scale", parts, false);
    if (weight->checkpoint_input_scale)
        params[count++] = vector(MOQ_PARAM_INPUT_SCALE, "scale", parts, false);
    if (weight->pre_quant_scale)
        params[count++] = vector(MOQ_PARAM_PRE_QUANT_SCALE, "factor", weight->in_features, false);
    count += low_rank_params(weight, params + count);
    return stack_params(weight, params, count);
}

int moq_weight_prepared_params(const moq_weight *weight, moq_param_spec *params) {
    int count = code_params(weight, weight->weight, params);
    if (moq_weight_has_output_scale(weight))
        params[count++] = vector(MOQ_PARAM_OUTPUT_SCALE, "factor", weight->out_features, true);
    if (moq_weight_folds(weight))
        params[count++] = vector(MOQ_PARAM_FOLD_SCALE, "factor", weight->out_features, true);
    if (moq_input_has_scale(weight->input))
        params[count++] = vector(MOQ_PARAM_INPUT_SCALE, "scale", weight->partition_count, false);
    if (weight->pre_quant_scale)
        params[count++] = vector(MOQ_PARAM_PRE_QUANT_SCALE, "factor", weight->in_features, false);
    count += low_rank_params(weight, params + count);
    return stack_params(weight, params, count);
}

const char *moq_compute_name(moq_compute compute) {
    return COMPUTE_NAMES[compute];
}

moq_status moq_weight_fail_in_expert(const moq_weight *weight, int64_t expert, moq_status status,
                                     moq_err *err) {
    bool of_expert = status == MOQ_ERR_VALUE || status == MOQ_ERR_TYPE ||
                     status == MOQ_ERR_BUFFER || status == MOQ_ERR_UNSUPPORTED;
    if (weight->experts && of_expert && err) {
        err->expert = expert;
        err->subject_first = weight->place != 0;
    }
    return status;
}

const char *moq_weight_text(const moq_weight *weight, char *buffer, size_t size) {
    char device[32], experts[24] = "";
    if (weight->experts)
        snprintf(experts, sizeof experts, "%d x ", (int)weight->experts);
    snprintf(buffer, size, "%s %s%lldx%lld, compute %s on %s", weight->algo, experts,
             (long long)weight->out_features, (long long)weight->in_features,
             moq_compute_name(weight->compute),
             moq_device_text(weight->device, device, sizeof device));
    return buffer;
}
