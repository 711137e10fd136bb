/* Measuring kernels: see tune.h. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "ops/tune.h"

#include "core/formats.h"
#include "cuda/cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS 5 /* each candidate once a round; the median counts */
/* One that takes this many times the fastest's time in the first round is in no other. */
#define HOPELESS 3.0
/* Calls in a row that are measured together: kernels that overlap with their predecessor find
 * their pace only after a dozen. Fewer where they would take longer than LONG. */
#define CUDA_CALLS 24
#define CPU_CALLS  4
#define LONG       0.02
/* Seconds of work before anything is timed: until then an idle device raises its clocks, and what
 * comes first seems slower, by a third on an H200. */
#define WARM 0.1
/* Copies of the weight: as many as hold this many times the second-level cache, so that no call
 * finds its weight there. */
#define MAX_COPIES   32
#define CACHE_FACTOR 5
#define TILE         65521 /* random values, repeated along x; a prime, so that rows differ */

typedef struct {
    moq_linear_job job;
    int calls;
    void *graph; /* CUDA: the recorded calls */
    int rounds;
    double seconds[ROUNDS];
} candidate;

typedef struct {
    const moq_linear_spec *spec;
    const moq_linear_params *params;
    moq_tensor x, y;
    void *stream;
    int copies;
    const uint8_t *weight[MAX_COPIES]; /* the first is the caller's */
    int64_t workspace_bytes;
    void *workspace;
    int count;
    candidate candidate[MOQ_MAX_TIMINGS];
} bench;

/* ---- memory ---- */

static bool on_cuda(const bench *b) {
    return b->spec->device.kind == MOQ_CUDA;
}

static moq_status allocate(const bench *b, int64_t bytes, void **out, moq_err *err) {
    if (on_cuda(b))
        return moq_cuda_allocate((size_t)bytes, b->stream, out, err);
    *out = malloc((size_t)bytes);
    return *out ? MOQ_OK : moq_fail(err, MOQ_ERR_MEMORY, "tune: out of memory");
}

static moq_status wait_for(const bench *b, moq_err *err) {
    return on_cuda(b) ? moq_cuda_wait(b->stream, err) : MOQ_OK;
}

static void release(const bench *b, void *memory) {
    if (on_cuda(b))
        moq_cuda_release(memory, b->stream);
    else
        free(memory);
}

static moq_status make_matrix(const bench *b, int64_t m, int64_t columns, moq_tensor *out,
                              moq_err *err) {
    *out = (moq_tensor){
        .dtype = b->spec->dtype, .device = b->spec->device, .ndim = 2, .shape = {m, columns}};
    moq_tensor_set_contiguous(out);
    int64_t values = moq_tensor_numel(out);
    if (values < 0)
        return moq_fail(err, MOQ_ERR_VALUE, "tokens: expected fewer, got %lld", (long long)m);
    return allocate(b, values * (int64_t)moq_dtype_size(out->dtype), &out->data, err);
}

/* Values about as normal activations are, from -2 to 2 with a variance of 1/3, the same in every
 * run. */
static void fill_tile(float *values) {
    uint64_t state = 1;
    for (int i = 0; i < TILE; i++) {
        float sum = -2;
        for (int j = 0; j < 4; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX */
            sum += (float)(state >> 40) * 0x1p-24f;
        }
        values[i] = sum;
    }
}

static moq_status fill(const bench *b, moq_err *err) {
    size_t size = moq_dtype_size(b->x.dtype);
    size_t bytes = (size_t)moq_tensor_numel(&b->x) * size, step = TILE * size;
    float *values = malloc(TILE * sizeof *values);
    char *tile = malloc(step), *to = b->x.data;
    moq_status status = MOQ_OK;
    if (!values || !tile) {
        status = moq_fail(err, MOQ_ERR_MEMORY, "tune: out of memory");
    } else {
        fill_tile(values);
        moq_encode_row(b->x.dtype, values, TILE, tile);
    }
    for (size_t at = 0; at < bytes && status == MOQ_OK; at += step) {
        size_t part = bytes - at < step ? bytes - at : step;
        if (on_cuda(b))
            status = moq_cuda_upload(to + at, tile, part, b->stream, err);
        else
            memcpy(to + at, tile, part);
    }
    free(values);
    free(tile);
    return status;
}

/* One weight on the CPU: no kernel there is chosen for how it reads memory. */
static moq_status copy_weight(bench *b, moq_err *err) {
    const moq_tensor *weight = &b->params->weight;
    moq_cuda_device device;
    b->weight[0] = weight->data;
    b->copies = 1;
    if (!on_cuda(b))
        return MOQ_OK;
    MOQ_TRY(moq_cuda_query_device(b->spec->device.index, &device, err));
    double bytes = (double)moq_tensor_numel(weight);
    double wanted = fmin(MAX_COPIES, CACHE_FACTOR * device.l2_bytes / bytes);
    while (b->copies < wanted) {
        void *copy;
        MOQ_TRY(allocate(b, (int64_t)bytes, &copy, err));
        b->weight[b->copies++] = copy;
        MOQ_TRY(moq_cuda_copy(copy, weight->data, (size_t)bytes, b->stream, err));
    }
    return MOQ_OK;
}

/* ---- candidates ---- */

static moq_status add_candidate(bench *b, const moq_linear_kernel *kernel, int32_t variant,
                                int64_t m, moq_err *err) {
    candidate *c = &b->candidate[b->count];
    /* Of no parameters that it would check: the caller's were, once for all candidates. */
    moq_linear_plan plan = {.count = 1, .kernel = {kernel}, .tuned_count = 1};
    plan.tuned[0].bucket = moq_token_bucket(m);
    plan.tuned[0].choice = (moq_linear_choice){kernel, variant};
    MOQ_TRY(moq_linear_open(b->spec, &plan, b->params, &b->x, NULL, &b->y, &c->job, err));
    c->job.call.stream = b->stream;
    if (moq_linear_workspace(&c->job) > b->workspace_bytes)
        b->workspace_bytes = moq_linear_workspace(&c->job);
    b->count++;
    return MOQ_OK;
}

static moq_status add_kernel(bench *b, const moq_linear_kernel *kernel, int64_t m, moq_err *err) {
    MOQ_TRY(add_candidate(b, kernel, 0, m, err));
    if (!kernel->variants)
        return MOQ_OK;
    uint64_t variants = kernel->variants(&b->candidate[b->count - 1].job.call);
    b->count -= !(variants & 1); /* it refuses this very call */
    for (int32_t i = 1; i < MOQ_MAX_VARIANTS; i++)
        if (variants >> i & 1)
            MOQ_TRY(add_candidate(b, kernel, i, m, err));
    return MOQ_OK;
}

static moq_status add_candidates(bench *b, const moq_linear_plan *plan, int64_t m, moq_err *err) {
    for (int i = 0; i < plan->count; i++)
        if (isfinite(plan->kernel[i]->cost(b->spec, m)))
            MOQ_TRY(add_kernel(b, plan->kernel[i], m, err));
    return b->workspace_bytes ? allocate(b, b->workspace_bytes, &b->workspace, err) : MOQ_OK;
}

/* ---- timing ---- */

typedef struct {
    const bench *bench;
    moq_linear_job *job;
    int calls;
} run_args;

static moq_status run_calls(void *data, moq_err *err) {
    run_args *a = data;
    for (int i = 0; i < a->calls; i++) {
        a->job->call.weight = a->bench->weight[i % a->bench->copies];
        a->job->call.workspace = a->bench->workspace;
        MOQ_TRY(moq_linear_run(a->job, err));
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

/* The first call outside of a graph: what is done once a process cannot be recorded. The second
 * tells about how long one takes. */
static moq_status warm_up(bench *b, candidate *c, moq_err *err) {
    run_args once = {b, &c->job, 1}, all = {b, &c->job, 0};
    MOQ_TRY(run_calls(&once, err));
    MOQ_TRY(wait_for(b, err));
    double begin = now();
    MOQ_TRY(run_calls(&once, err));
    MOQ_TRY(wait_for(b, err));
    all.calls = c->calls = calls_for(b, now() - begin);
    return on_cuda(b) ? moq_cuda_record(b->stream, run_calls, &all, &c->graph, err) : MOQ_OK;
}

static moq_status time_once(const bench *b, candidate *c, moq_err *err) {
    run_args all = {b, &c->job, c->calls};
    double begin = now(), *seconds = &c->seconds[c->rounds++];
    if (on_cuda(b))
        MOQ_TRY(moq_cuda_replay(c->graph, b->stream, seconds, err));
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
        MOQ_TRY(moq_cuda_replay(b->candidate[0].graph, b->stream, &seconds, err));
    return MOQ_OK;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double fastest_first(const bench *b) {
    double least = INFINITY;
    for (int i = 0; i < b->count; i++)
        least = fmin(least, b->candidate[i].seconds[0]);
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
    double limit = INFINITY;
    int step = 0;
    if (b->count == 0)
        return MOQ_OK;
    for (int i = 0; i < b->count; i++)
        MOQ_TRY(warm_up(b, &b->candidate[i], err));
    if (on_cuda(b))
        MOQ_TRY(raise_clocks(b, err));
    for (int round = 0; round < ROUNDS; round++) {
        step = next_step(b, step);
        for (int i = 0; i < b->count; i++) {
            candidate *c = &b->candidate[(int64_t)i * step % b->count];
            if (c->seconds[0] < limit)
                MOQ_TRY(time_once(b, c, err));
        }
        if (round == 0)
            limit = HOPELESS * fastest_first(b);
    }
    for (int i = 0; i < b->count; i++)
        qsort(b->candidate[i].seconds, (size_t)b->candidate[i].rounds, sizeof(double), compare);
    return MOQ_OK;
}

/* ---- the measurement ---- */

static moq_status measure(bench *b, const moq_linear_plan *plan, int64_t m, moq_err *err) {
    if (on_cuda(b))
        MOQ_TRY(moq_cuda_make_stream(&b->stream, err));
    MOQ_TRY(make_matrix(b, m, b->spec->in_features, &b->x, err));
    MOQ_TRY(make_matrix(b, m, b->spec->out_features, &b->y, err));
    MOQ_TRY(fill(b, err));
    MOQ_TRY(copy_weight(b, err));
    MOQ_TRY(add_candidates(b, plan, m, err));
    return time_all(b, err);
}

static void finish(bench *b) {
    for (int i = 0; i < b->count; i++)
        moq_cuda_forget(b->candidate[i].graph);
    for (int i = 1; i < b->copies; i++)
        release(b, (void *)b->weight[i]);
    release(b, b->x.data);
    release(b, b->y.data);
    release(b, b->workspace);
    if (on_cuda(b))
        moq_cuda_end_stream(b->stream);
}

static int compare_timings(const void *a, const void *b) {
    return compare(&((const moq_linear_timing *)a)->seconds,
                   &((const moq_linear_timing *)b)->seconds);
}

static void report(const bench *b, moq_linear_timing *timings, int *count) {
    *count = b->count;
    for (int i = 0; i < b->count; i++) {
        const candidate *c = &b->candidate[i];
        timings[i] =
            (moq_linear_timing){{c->job.kernel, c->job.call.variant}, c->seconds[c->rounds / 2]};
    }
    qsort(timings, (size_t)b->count, sizeof *timings, compare_timings);
}

moq_status moq_linear_measure(const moq_linear_spec *spec, const moq_linear_plan *plan,
                              const moq_linear_params *params, int64_t m,
                              moq_linear_timing *timings, int *count, moq_err *err) {
    bool entered = false;
    bench *b = calloc(1, sizeof *b);
    if (!b)
        return moq_fail(err, MOQ_ERR_MEMORY, "tune: out of memory");
    b->spec = spec;
    b->params = params;
    moq_status status = on_cuda(b) ? moq_cuda_enter(spec->device.index, &entered, err) : MOQ_OK;
    if (status == MOQ_OK) {
        status = measure(b, plan, m, err);
        finish(b);
        if (on_cuda(b))
            moq_cuda_leave(entered);
    }
    if (status == MOQ_OK)
        report(b, timings, count);
    free(b);
    return status;
}
