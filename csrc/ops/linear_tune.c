/* Timing of a linear: random x and copies of the weight. */
#include "ops/linear_call.h"
#include "ops/tune.h"

typedef struct {
    const moq_linear_spec *spec;
    const moq_params *params;
    int64_t m;
    moq_tensor x, y;
    const void *weight[MOQ_MAX_WEIGHT_COPIES];
} subject;

static moq_status make(void *data, moq_tune_memory *memory, int *copies, moq_err *err) {
    subject *s = data;
    const moq_tensor *weight = &s->params->of[MOQ_PARAM_WEIGHT];
    moq_dtype dtype = s->spec->dtype;
    MOQ_TRY(moq_tune_make_matrix(memory, moq_linear_x_dtype(s->spec), s->m, s->spec->in_features,
                                 &s->x, err));
    MOQ_TRY(moq_tune_make_matrix(memory, dtype, s->m, s->spec->out_features, &s->y, err));
    MOQ_TRY(moq_tune_fill(memory, &s->x, err));
    int64_t bytes = moq_tensor_numel(weight) * (int64_t)moq_dtype_size(weight->dtype);
    MOQ_TRY(moq_tune_count_copies(memory, bytes, copies, err));
    return moq_tune_copy(memory, weight, *copies, s->weight, err);
}

static moq_status open_job(void *data, moq_choice choice, moq_job *job, moq_err *err) {
    const subject *s = data;
    return moq_linear_open_choice(s->spec, s->params, &s->x, NULL, &s->y, s->m, choice,
                                  (moq_linear_job *)job, err);
}

static uint64_t variants(void *data, const moq_job *job) {
    const moq_linear_job *j = (const moq_linear_job *)job;
    (void)data;
    return moq_linear_variants(j->kernel, &j->call);
}

static void turn(void *data, moq_job *job, int copy) {
    ((moq_linear_job *)job)->call.weight = ((const subject *)data)->weight[copy];
}

moq_status moq_linear_measure(const moq_plan *plan, const moq_params *params, int64_t m,
                              const moq_choice *only, moq_timing *timings, int *count,
                              moq_err *err) {
    subject s = {.spec = plan->problem, .params = params, .m = m};
    moq_tune_subject about = {.data = &s,
                              .job_size = sizeof(moq_linear_job),
                              .make = make,
                              .open = open_job,
                              .variants = variants,
                              .turn = turn};
    return moq_tune_measure(&about, plan, m, only, timings, count, err);
}
