/* Operation quantize_weight: see quantize_weight.h. The table of algorithms (core/algo.h) says what
 * codes and scales there are; here they become the heights and widths of the one kernel. */
#include "ops/quantize_weight.h"

#include "core/algo.h"
#include "core/formats.h"
#include "cpu/cpu_quantize.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_prepare.h"
#include "cuda/tensor/cuda_weight_codes.h"
#include "ops/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* 4/6: the second level leaves room above the scale of a block's largest value, 256 of E4M3's 448,
 * so that 1.5 times as much fits. */
#define FOUR_OVER_SIX_MAX (256.0f * MOQ_E2M1_MAX)

moq_status moq_scale_search_from_name(const char *name, moq_scale_search *out, moq_err *err) {
    if (strcmp(name, "mse") == 0)
        *out = MOQ_SEARCH_MSE;
    else if (strcmp(name, "4over6") == 0)
        *out = MOQ_SEARCH_FOUR_OVER_SIX;
    else
        return moq_fail_of(err, MOQ_ERR_VALUE, "search", "expected mse or 4over6, got '%.64s'",
                           name);
    return MOQ_OK;
}

/* True for weights of floating-point codes without factors or parts of other weights. */
static bool is_written(const moq_algo_facts *facts) {
    return (facts->codes == MOQ_STORED_E4M3 || facts->codes == MOQ_STORED_E2M1) &&
           !facts->pre_quant_scale && !facts->low_rank;
}

static moq_status find_algorithm(const char *name, const moq_algo_facts **out, moq_err *err) {
    moq_algo algo;
    char names[MOQ_ALGO_LIST_SIZE];
    moq_text text = {name, strlen(name)};
    if (moq_algo_parse(text, &algo) && is_written(moq_algo_facts_of(algo))) {
        *out = moq_algo_facts_of(algo);
        return MOQ_OK;
    }
    return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quant_algo", "expected one of %s, got '%.64s'",
                       moq_algo_list(is_written, names, sizeof names), name);
}

static moq_status check_weight(const moq_tensor *weight, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_activation(weight, "weight", err));
    if (moq_tensor_numel(weight) < 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight", "expected values, got shape %s",
                           moq_shape_text(weight, shape, sizeof shape));
    if (!moq_tensor_is_contiguous(weight))
        return moq_fail_of(err, MOQ_ERR_BUFFER, "weight", "expected a contiguous tensor");
    return MOQ_OK;
}

/* On the current device, that of the weight. */
static moq_status find_on_device(const moq_tensor *weight, void *stream, float *amax,
                                 moq_err *err) {
    void *bits;
    MOQ_TRY(moq_cuda_allocate(sizeof *amax, stream, &bits, err));
    moq_status status = moq_cuda_find_amax(weight->data, weight->dtype, moq_tensor_numel(weight),
                                           bits, stream, err);
    if (status == MOQ_OK)
        status = moq_cuda_download(amax, bits, sizeof *amax, stream, err);
    moq_cuda_release(bits, stream);
    return status;
}

moq_status moq_weight_amax(const moq_tensor *weight, void *stream, float *amax, moq_err *err) {
    bool entered;
    MOQ_TRY(check_weight(weight, err));
    if (weight->device.kind != MOQ_CUDA) {
        *amax = moq_cpu_amax(weight);
        return MOQ_OK;
    }
    MOQ_TRY(moq_cuda_enter(weight->device.index, &entered, err));
    moq_status status = find_on_device(weight, stream, amax, err);
    moq_cuda_leave(entered);
    return status;
}

/* The largest magnitude that a scale of the whole weight follows from. */
static moq_status find_amax(const moq_tensor *weight, void *stream, float *amax, moq_err *err) {
    MOQ_TRY(moq_weight_amax(weight, stream, amax, err));
    if (isfinite(*amax))
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, "weight",
                       "expected finite values for the scale of all of them, got %g",
                       (double)*amax);
}

/* The columns that share a scale. */
static moq_status find_group(const moq_algo_facts *facts, const moq_tensor *weight, int64_t given,
                             int64_t *group, moq_err *err) {
    char sizes[32], shape[128];
    *group = facts->group > 0 ? facts->group : weight->shape[1];
    if (given != 0 && !moq_algo_takes_group(facts, given))
        return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "expected %s for %s, got %lld",
                           moq_algo_groups_text(facts, sizes, sizeof sizes), facts->name,
                           (long long)given);
    if (given != 0)
        *group = given;
    if (facts->scales == MOQ_SCALES_GROUPS && weight->shape[1] % *group != 0)
        return moq_fail_of(
            err, MOQ_ERR_VALUE, "weight", "expected columns in groups of %lld for %s, got shape %s",
            (long long)*group, facts->name, moq_shape_text(weight, shape, sizeof shape));
    return MOQ_OK;
}

/* amax / by; 1 for a weight of zeros, whose codes are zeros then. */
static float scale_over(float amax, float by) {
    float scale = amax / by;
    return scale > 0.0f ? scale : 1.0f;
}

/* Powers of two move floating-point codes, but for the smallest, without changing their error. */
static moq_status check_search(const moq_algo_facts *facts, moq_scale_search search, moq_err *err) {
    bool fixed = facts->scales == MOQ_SCALES_TENSOR ||
                 (facts->scale_dtype == MOQ_DT_E8M0 && facts->codes == MOQ_STORED_E4M3);
    if (search != MOQ_SEARCH_NONE && fixed)
        return moq_fail_of(err, MOQ_ERR_VALUE, "search", "%s has no scales to search for",
                           facts->name);
    if (search == MOQ_SEARCH_FOUR_OVER_SIX &&
        !(facts->second == MOQ_SECOND_PARTS && facts->input_max == MOQ_NVFP4_MAX))
        return moq_fail_of(err, MOQ_ERR_VALUE, "search",
                           "4over6 is for NVFP4 and W4A16_NVFP4, got %s", facts->name);
    return MOQ_OK;
}

/* The scales of the whole weight, once its largest magnitude is known. */
static void set_amax(const moq_algo_facts *facts, float amax, moq_quantize_weight_plan *plan) {
    moq_weight_codes *job = &plan->job;
    if (job->scale_dtype == MOQ_DT_F32) {
        job->given = scale_over(amax, MOQ_E4M3_MAX);
        job->height = 1;
        job->group = job->columns;
        return;
    }
    /* Exporters give weights the second level of their activations. */
    bool room = job->search == MOQ_SEARCH_FOUR_OVER_SIX;
    job->second = scale_over(amax, room ? FOUR_OVER_SIX_MAX : facts->input_max);
    plan->second = job->second;
    job->most = moq_e4m3_encode(facts->input_max / MOQ_E2M1_MAX);
}

moq_status moq_plan_quantize_weight(const char *algo, const moq_tensor *weight, float amax,
                                    int64_t group_size, moq_scale_search search, void *stream,
                                    moq_quantize_weight_plan *plan, moq_err *err) {
    const moq_algo_facts *facts = moq_algo_facts_of(MOQ_ALGO_NONE);
    char shape[128];
    int64_t group;
    MOQ_TRY(find_algorithm(algo, &facts, err));
    MOQ_TRY(check_weight(weight, err));
    if (weight->ndim != 2)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight", "expected [N, K], got shape %s",
                           moq_shape_text(weight, shape, sizeof shape));
    MOQ_TRY(find_group(facts, weight, group_size, &group, err));
    MOQ_TRY(check_search(facts, search, err));
    const int64_t rows = weight->shape[0], columns = weight->shape[1];
    const bool blocks = facts->scales == MOQ_SCALES_BLOCKS, fp4 = facts->codes == MOQ_STORED_E2M1;
    *plan = (moq_quantize_weight_plan){.device = weight->device,
                                       .job = {.weight = weight->data,
                                               .dtype = weight->dtype,
                                               .rows = rows,
                                               .columns = columns,
                                               .height = blocks ? group : 1,
                                               .group = group,
                                               .code_dtype = fp4 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3,
                                               .scale_dtype = facts->scale_dtype,
                                               .rounds = facts->scales == MOQ_SCALES_TENSOR,
                                               .search = search}};
    int64_t down = (rows + plan->job.height - 1) / plan->job.height;
    int64_t across = (columns + group - 1) / group;
    bool whole = facts->scales == MOQ_SCALES_TENSOR || facts->second != MOQ_SECOND_NONE;
    if (amax < 0.0f && whole)
        MOQ_TRY(find_amax(weight, stream, &amax, err));
    if (amax >= 0.0f && (whole || (blocks && down * across == 1)))
        set_amax(facts, amax, plan);
    plan->codes =
        moq_describe(plan->job.code_dtype, 2, (int64_t[]){rows, fp4 ? columns / 2 : columns});
    if (facts->scales == MOQ_SCALES_TENSOR || (blocks && down * across == 1))
        plan->scales = moq_describe(MOQ_DT_F32, 0, NULL);
    else if (facts->scales == MOQ_SCALES_ROWS)
        plan->scales = moq_describe(MOQ_DT_F32, 1, (int64_t[]){rows});
    else if (blocks)
        plan->scales = moq_describe(MOQ_DT_F32, 4, (int64_t[]){down, 1, across, 1});
    else
        plan->scales = moq_describe(facts->scale_dtype, 2, (int64_t[]){rows, across});
    return MOQ_OK;
}

static moq_status run_on_cuda(const moq_weight_codes *job, moq_device device, void *stream,
                              moq_err *err) {
    bool entered;
    MOQ_TRY(moq_cuda_enter(device.index, &entered, err));
    moq_status status = moq_cuda_weight_codes(job, stream, err);
    if (status == MOQ_OK && job->given > 0.0f)
        status = moq_cuda_fill_floats(job->scales, job->given, 1, stream, err);
    moq_cuda_leave(entered);
    return status;
}

moq_status moq_run_quantize_weight(const moq_quantize_weight_plan *plan, const moq_tensor *codes,
                                   const moq_tensor *scales, void *stream, moq_err *err) {
    moq_weight_codes job = plan->job;
    job.codes = codes->data;
    job.scales = scales->data;
    if (plan->device.kind == MOQ_CUDA)
        return run_on_cuda(&job, plan->device, stream, err);
    if (job.given > 0.0f)
        memcpy(scales->data, &job.given, sizeof job.given);
    if (!moq_cpu_weight_codes(&job))
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of some rows");
    return MOQ_OK;
}
