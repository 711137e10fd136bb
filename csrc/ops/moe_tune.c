/* Timing of experts: random x, and slots that meet all experts in turn. */
#include "ops/moe_call.h"
#include "ops/tune.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    const moq_moe_spec *spec;
    const moq_params *params;
    int64_t tokens;
    int weights; /* how many copies of the stacks there are */
    const void *w13[MOQ_MAX_WEIGHT_COPIES], *w2[MOQ_MAX_WEIGHT_COPIES];
    moq_tensor x, x_scale, y, weight, ids;
    int32_t *turn_ids; /* of each turn, one after the other */
    moq_moe_inputs inputs;
} subject;

static int64_t slots_of(const subject *s) {
    return s->tokens * s->spec->top_k;
}

/* Experts that so many tokens ask for on average where each asks for any of them. */
static int64_t count_active(const subject *s) {
    double experts = s->spec->experts, asked = fmin(s->spec->top_k, experts);
    return llround(experts * (1 - pow(1 - asked / experts, (double)s->tokens)));
}

/* Turns that meet all experts before the first is met again, at least one a copy of the stacks. */
static int count_turns(const subject *s) {
    int64_t turns = s->spec->experts / count_active(s);
    turns = turns > s->weights ? turns : s->weights;
    return turns < MOQ_MAX_WEIGHT_COPIES ? (int)turns : MOQ_MAX_WEIGHT_COPIES;
}

/* A turn has as many experts as tokens of chance ask for, and all of these as many tokens. It goes
 * on where the one before ended, so that few tokens find no expert in a cache. */
static moq_status make_ids(subject *s, moq_tune_memory *memory, int turns, moq_err *err) {
    int64_t slots = slots_of(s), count = slots * turns, active = count_active(s);
    size_t bytes = (size_t)count * sizeof(int32_t);
    int32_t *ids = malloc(bytes);
    void *out = NULL;
    if (!ids)
        return moq_fail_of(err, MOQ_ERR_MEMORY, "tune", "out of memory");
    for (int64_t i = 0; i < count; i++)
        ids[i] = (int32_t)((i / slots * active + i % slots % active) % s->spec->experts);
    moq_status status = moq_tune_allocate(memory, (int64_t)bytes, &out, err);
    if (status == MOQ_OK)
        status = moq_tune_write(memory, out, ids, bytes, err);
    free(ids);
    s->turn_ids = out;
    return status;
}

static moq_status copy_stacks(subject *s, moq_tune_memory *memory, moq_err *err) {
    const moq_tensor *w13 = &s->params->of[MOQ_PARAM_OF_W13 + MOQ_PARAM_WEIGHT];
    const moq_tensor *w2 = &s->params->of[MOQ_PARAM_OF_W2 + MOQ_PARAM_WEIGHT];
    int64_t bytes = moq_tensor_numel(w13) * (int64_t)moq_dtype_size(w13->dtype) +
                    moq_tensor_numel(w2) * (int64_t)moq_dtype_size(w2->dtype);
    MOQ_TRY(moq_tune_count_copies(memory, bytes, &s->weights, err));
    MOQ_TRY(moq_tune_copy(memory, w13, s->weights, s->w13, err));
    return moq_tune_copy(memory, w2, s->weights, s->w2, err);
}

/* Any bytes are pairs of e2m1, and make block scales. */
static moq_status make_x(subject *s, moq_tune_memory *memory, moq_err *err) {
    const moq_linear_spec *w13 = &s->spec->w13;
    moq_dtype dtype = moq_linear_x_dtype(w13);
    int64_t scales = moq_moe_x_scales(s->spec);
    MOQ_TRY(moq_tune_make_matrix(memory, dtype == MOQ_DT_E2M1X2 ? MOQ_DT_E4M3 : dtype, s->tokens,
                                 moq_linear_x_columns(w13), &s->x, err));
    MOQ_TRY(moq_tune_fill(memory, &s->x, err));
    s->x.dtype = dtype;
    if (scales == 0)
        return MOQ_OK;
    MOQ_TRY(moq_tune_make_matrix(memory, moq_moe_x_scale_dtype(s->spec), s->tokens, scales,
                                 &s->x_scale, err));
    return moq_tune_fill(memory, &s->x_scale, err);
}

static moq_status make(void *data, moq_tune_memory *memory, int *copies, moq_err *err) {
    subject *s = data;
    int64_t hidden = s->spec->w13.in_features, k = s->spec->top_k;
    moq_dtype dtype = s->spec->w13.dtype;
    MOQ_TRY(make_x(s, memory, err));
    MOQ_TRY(moq_tune_make_matrix(memory, dtype, s->tokens, hidden, &s->y, err));
    MOQ_TRY(moq_tune_make_matrix(memory, MOQ_DT_F32, s->tokens, k, &s->weight, err));
    MOQ_TRY(moq_tune_fill(memory, &s->weight, err));
    MOQ_TRY(copy_stacks(s, memory, err));
    *copies = count_turns(s);
    MOQ_TRY(make_ids(s, memory, *copies, err));
    s->ids = s->weight;
    s->ids.dtype = MOQ_DT_I32;
    s->ids.data = s->turn_ids;
    s->inputs = (moq_moe_inputs){.x = &s->x,
                                 .x_scale = moq_moe_x_scales(s->spec) ? &s->x_scale : NULL,
                                 .weights = &s->weight,
                                 .ids = &s->ids,
                                 .y = &s->y};
    return MOQ_OK;
}

static moq_status open_job(void *data, moq_choice choice, moq_job *job, moq_err *err) {
    const subject *s = data;
    return moq_moe_open_choice(s->spec, s->params, &s->inputs, choice, (moq_moe_job *)job, err);
}

static uint64_t variants(void *data, const moq_job *job) {
    const moq_moe_job *j = (const moq_moe_job *)job;
    (void)data;
    return moq_moe_variants(j->kernel, &j->call);
}

static void turn(void *data, moq_job *job, int copy) {
    subject *s = data;
    moq_moe_call *call = &((moq_moe_job *)job)->call;
    s->ids.data = s->turn_ids + copy * slots_of(s);
    call->w13.weight = s->w13[copy % s->weights];
    call->w2.weight = s->w2[copy % s->weights];
}

moq_status moq_moe_measure(const moq_plan *plan, const moq_params *params, int64_t tokens,
                           const moq_choice *only, moq_timing *timings, int *count, moq_err *err) {
    subject s = {.spec = plan->problem, .params = params, .tokens = tokens};
    moq_tune_subject about = {.data = &s,
                              .job_size = sizeof(moq_moe_job),
                              .make = make,
                              .open = open_job,
                              .variants = variants,
                              .turn = turn};
    return moq_tune_measure(&about, plan, tokens, only, timings, count, err);
}
