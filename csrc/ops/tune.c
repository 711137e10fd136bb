/* Measuring kernels: see tune.h. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "ops/tune.h"

#include "cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 5 /* each candidate once a round; the median counts */
/* One that takes this many times the fastest's time in the first rounds is in no other: two, since
 * one may be another process's fault. */
#define HOPELESS     3.0
#define FIRST_ROUNDS 2
/* On the CPU, one whose first call takes longer than LONG and this many times the fastest's is in
 * no round; on a device the first call may load the kernel. */
#define FAR_BEHIND 20.0
/* Calls in a row that are measured together: kernels that overlap with their predecessor find
 * their pace only after a dozen. Fewer where they would take longer than LONG. */
#define CUDA_CALLS 24
#define CPU_CALLS  4
#define LONG       0.02
/* Seconds of work before anything is timed: until then an idle device raises its clocks, and what
 * comes first seems slower, by a third on an H200. */
#define WARM 0.1

typedef struct {
    int32_t kernel;
    int32_t variant; /* 0 is the kernel's own choice */
    moq_job *job;    /* owned */
    int calls;
    void *graph; /* CUDA: the recorded calls */
    int rounds;
    double seconds[ROUNDS];
} candidate;

typedef struct {
    const moq_tune_subject *subject;
    moq_tune_memory memory;
    int copies; /* sets of weights */
    int64_t workspace_bytes;
    void *workspace;
    int count;
    candidate candidate[MOQ_MAX_TIMINGS];
} bench;

static bool on_cuda(const bench *b) {
    return b->memory.device.kind == MOQ_CUDA;
}

static moq_status wait_for(const bench *b, moq_err *err) {
    return on_cuda(b) ? moq_cuda_wait(b->memory.stream, err) : MOQ_OK;
}

/* ---- candidates ---- */

static moq_status add_candidate(bench *b, moq_choice choice, int32_t variant, moq_err *err) {
    candidate *c = &b->candidate[b->count];
    c->kernel = choice.kernel;
    c->variant = variant;
    c->job = malloc(b->subject->job_size);
    if (!c->job)
        return moq_fail_of(err, MOQ_ERR_MEMORY, "tune", "out of memory");
    b->count++;
    MOQ_TRY(b->subject->open(b->subject->data, choice, c->job, err));
    c->job->stream = b->memory.stream;
    if (c->job->bytes > b->workspace_bytes)
        b->workspace_bytes = c->job->bytes;
    return MOQ_OK;
}

static void drop_last(bench *b) {
    free(b->candidate[--b->count].job);
}

static moq_status add_variant(bench *b, const moq_plan *plan, int64_t m, int kernel,
                              int32_t variant, moq_err *err) {
    moq_choice choice = {kernel, moq_plan_config(plan, kernel, m, variant)};
    return add_candidate(b, choice, variant, err);
}

static moq_status add_kernel(bench *b, const moq_plan *plan, int64_t m, int kernel, moq_err *err) {
    MOQ_TRY(add_variant(b, plan, m, kernel, 0, err));
    uint64_t variants = b->subject->variants(b->subject->data, b->candidate[b->count - 1].job);
    if (!(variants & 1)) /* it refuses this very call */
        drop_last(b);
    for (int32_t i = 1; i < MOQ_MAX_VARIANTS; i++)
        if (variants >> i & 1)
            MOQ_TRY(add_variant(b, plan, m, kernel, i, err));
    return MOQ_OK;
}

static moq_status add_candidates(bench *b, const moq_plan *plan, int64_t m, const moq_choice *only,
                                 moq_err *err) {
    if (only)
        MOQ_TRY(add_candidate(b, *only, only->config.variant, err));
    for (int i = 0; i < plan->count && !only; i++)
        if (moq_plan_can_keep(plan, plan->kernel[i], m))
            MOQ_TRY(add_kernel(b, plan, m, plan->kernel[i], err));
    return b->workspace_bytes
               ? moq_tune_allocate(&b->memory, b->workspace_bytes, &b->workspace, err)
               : MOQ_OK;
}

/* ---- timing ---- */

typedef struct {
    const bench *bench;
    moq_job *job;
    int calls;
} run_args;

/* Runs each call as a model has it, among kernels of others: in a chain of itself its start would
 * be hidden (docs/lab/pdl.md). */
static moq_status run_calls(void *data, moq_err *err) {
    run_args *a = data;
    for (int i = 0; i < a->calls; i++) {
        moq_graph_break_pdl();
        a->bench->subject->turn(a->bench->subject->data, a->job, i % a->bench->copies);
        a->job->workspace = a->bench->workspace;
        MOQ_TRY(moq_job_run(a->job, err));
    }
    return MOQ_OK;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int calls_for(const bench *b, double seconds) {
    double most = fmax(b->copies, on_cuda(b) ? CUDA_CALLS : CPU_CALLS);
    return (int)fmax(1, fmin(most, LONG / seconds));
}

static moq_status call_once(const bench *b, candidate *c, double *seconds, moq_err *err) {
    run_args once = {b, c->job, 1};
    double begin = now();
    MOQ_TRY(run_calls(&once, err));
    MOQ_TRY(wait_for(b, err));
    *seconds = now() - begin;
    return MOQ_OK;
}

/* The first call outside of a graph: what is done once a process cannot be recorded. The second
 * tells about how long one takes; `least` is that of the fastest until now. */
static moq_status warm_up(bench *b, candidate *c, double *least, moq_err *err) {
    run_args all = {b, c->job, 0};
    double seconds;
    MOQ_TRY(call_once(b, c, &seconds, err));
    if (!on_cuda(b) && seconds > fmax(LONG, FAR_BEHIND * *least)) {
        c->seconds[c->rounds++] = seconds;
        return MOQ_OK;
    }
    MOQ_TRY(call_once(b, c, &seconds, err));
    *least = fmin(*least, seconds);
    all.calls = c->calls = calls_for(b, seconds);
    return on_cuda(b) ? moq_cuda_record(b->memory.stream, run_calls, &all, &c->graph, err) : MOQ_OK;
}

static moq_status time_once(const bench *b, candidate *c, moq_err *err) {
    run_args all = {b, c->job, c->calls};
    double begin = now(), *seconds = &c->seconds[c->rounds++];
    if (on_cuda(b))
        MOQ_TRY(moq_cuda_replay(c->graph, b->memory.stream, seconds, err));
    else
        MOQ_TRY(run_calls(&all, err));
    if (!on_cuda(b))
        *seconds = now() - begin;
    *seconds /= c->calls;
    return MOQ_OK;
}

/* Brings a device to the clocks that it will keep. */
static moq_status raise_clocks(const bench *b, moq_err *err) {
    double seconds;
    for (double end = now() + WARM; now() < end;)
        MOQ_TRY(moq_cuda_replay(b->candidate[0].graph, b->memory.stream, &seconds, err));
    return MOQ_OK;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double least_of(const candidate *c) {
    double least = INFINITY;
    for (int i = 0; i < c->rounds; i++)
        least = fmin(least, c->seconds[i]);
    return least;
}

static double fastest(const bench *b) {
    double least = INFINITY;
    for (int i = 0; i < b->count; i++)
        least = fmin(least, least_of(&b->candidate[i]));
    return least;
}

static int common_divisor(int a, int b) {
    return b ? common_divisor(b, a % b) : a;
}

/* The next larger step by which all candidates are met, each after another than with smaller ones:
 * one that is heavy leaves a lower clock to the one after it. */
static int next_step(const bench *b, int step) {
    do
        step++;
    while (common_divisor(step, b->count) > 1);
    return step;
}

static moq_status time_all(bench *b, moq_err *err) {
    double limit = INFINITY, least = INFINITY;
    int step = 0;
    if (b->count == 0)
        return MOQ_OK;
    for (int i = b->count - 1; i >= 0; i--) /* kernels of newer instruction sets come last */
        MOQ_TRY(warm_up(b, &b->candidate[i], &least, err));
    if (on_cuda(b))
        MOQ_TRY(raise_clocks(b, err));
    for (int round = 0; round < ROUNDS; round++) {
        step = next_step(b, step);
        for (int i = 0; i < b->count; i++) {
            candidate *c = &b->candidate[(int64_t)i * step % b->count];
            if (c->calls && (round < FIRST_ROUNDS || least_of(c) < limit))
                MOQ_TRY(time_once(b, c, err));
        }
        if (round == FIRST_ROUNDS - 1)
            limit = HOPELESS * fastest(b);
    }
    for (int i = 0; i < b->count; i++)
        qsort(b->candidate[i].seconds, (size_t)b->candidate[i].rounds, sizeof(double), compare);
    return MOQ_OK;
}

/* ---- the measurement ---- */

static moq_status measure(bench *b, const moq_plan *plan, int64_t m, const moq_choice *only,
                          moq_err *err) {
    MOQ_TRY(moq_tune_memory_begin(plan->layer.device, &b->memory, err));
    MOQ_TRY(b->subject->make(b->subject->data, &b->memory, &b->copies, err));
    MOQ_TRY(add_candidates(b, plan, m, only, err));
    return time_all(b, err);
}

static void finish(bench *b) {
    for (int i = 0; i < b->count; i++) {
        moq_cuda_forget(b->candidate[i].graph);
        free(b->candidate[i].job);
    }
    moq_tune_memory_end(&b->memory);
}

static int compare_timings(const void *a, const void *b) {
    return compare(&((const moq_timing *)a)->seconds, &((const moq_timing *)b)->seconds);
}

static void report(const bench *b, moq_timing *timings, int *count) {
    *count = b->count;
    for (int i = 0; i < b->count; i++) {
        const candidate *c = &b->candidate[i];
        timings[i] = (moq_timing){c->kernel, c->variant, c->seconds[c->rounds / 2]};
    }
    qsort(timings, (size_t)b->count, sizeof *timings, compare_timings);
}

static moq_status measure_on_device(bench *b, const moq_plan *plan, int64_t m,
                                    const moq_choice *only, moq_err *err) {
    bool entered = false, cuda = plan->layer.device.kind == MOQ_CUDA;
    if (cuda)
        MOQ_TRY(moq_cuda_enter(plan->layer.device.index, &entered, err));
    moq_status status = measure(b, plan, m, only, err);
    finish(b);
    if (cuda)
        moq_cuda_leave(entered);
    return status;
}

moq_status moq_tune_measure(const moq_tune_subject *subject, const moq_plan *plan, int64_t m,
                            const moq_choice *only, moq_timing *timings, int *count, moq_err *err) {
    bench *b = calloc(1, sizeof *b);
    if (!b)
        return moq_fail_of(err, MOQ_ERR_MEMORY, "tune", "out of memory");
    b->subject = subject;
    moq_status status = measure_on_device(b, plan, m, only, err);
    if (status == MOQ_OK)
        report(b, timings, count);
    free(b);
    return status;
}
