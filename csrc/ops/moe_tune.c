/* What timing experts takes: random x, and slots that meet all experts in turn. */
#include "ops/moe_call.h"
#include "ops/tune.h"

typedef struct {
    const moq_moe_spec *spec;
    const moq_params *params;
    int64_t tokens;
    moq_tensor x, y, weights, ids;
    moq_moe_inputs inputs;
} subject;

/* Tokens take turns with neighbours, so that every expert has as many of them as any other. */
static moq_status make(void *data, moq_tune_memory *memory, int *copies, moq_err *err) {
    subject *s = data;
    const moq_moe_spec *spec = s->spec;
    int64_t hidden = spec->w13.in_features, k = spec->top_k;
    MOQ_TRY(moq_tune_make_matrix(memory, spec->w13.dtype, s->tokens, hidden, &s->x, err));
    MOQ_TRY(moq_tune_make_matrix(memory, spec->w13.dtype, s->tokens, hidden, &s->y, err));
    MOQ_TRY(moq_tune_make_matrix(memory, MOQ_DT_F32, s->tokens, k, &s->weights, err));
    MOQ_TRY(moq_tune_make_matrix(memory, MOQ_DT_I32, s->tokens, k, &s->ids, err));
    MOQ_TRY(moq_tune_fill(memory, &s->x, err));
    MOQ_TRY(moq_tune_fill(memory, &s->weights, err));
    for (int64_t i = 0; i < s->tokens * k; i++)
        ((int32_t *)s->ids.data)[i] = (int32_t)(i % spec->experts);
    s->inputs = (moq_moe_inputs){.x = &s->x, .weights = &s->weights, .ids = &s->ids, .y = &s->y};
    *copies = 1;
    return MOQ_OK;
}

static moq_status open_job(void *data, moq_choice choice, moq_job *job, moq_err *err) {
    const subject *s = data;
    return moq_moe_open_choice(s->spec, s->params, &s->inputs, choice, (moq_moe_job *)job, err);
}

static uint64_t variants(void *data, const moq_job *job) {
    (void)data, (void)job;
    return 1;
}

static void turn(void *data, moq_job *job, int copy) {
    (void)data, (void)job, (void)copy;
}

moq_status moq_moe_measure(const moq_plan *plan, const moq_params *params, int64_t tokens,
                           moq_timing *timings, int *count, moq_err *err) {
    subject s = {.spec = plan->problem, .params = params, .tokens = tokens};
    moq_tune_subject about = {.data = &s,
                              .job_size = sizeof(moq_moe_job),
                              .make = make,
                              .open = open_job,
                              .variants = variants,
                              .turn = turn};
    return moq_tune_measure(&about, plan, tokens, timings, count, err);
}
