/* Activations before quantization: see cpu_activation.h. A row at a time, through float32. */
#include "cpu/cpu_activation.h"

#include "core/formats.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cpu/sigmoid.h"
#include "cpu/threads.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Values that a member of a team gets at least, and what one takes, roughly: 10 microseconds. */
#define THREAD_SHARE 8192
#define NANOSECONDS  1.2

typedef struct {
    const moq_activation *a;
    const moq_tensor *values;
    int64_t k;
    atomic_bool no_memory;
} job;

/* Rounds values to a dtype and back; `room` holds n codes of it. */
static void round_to(moq_dtype dtype, float *values, int64_t n, void *room) {
    if (dtype == MOQ_DT_F32)
        return;
    moq_encode_row(dtype, values, n, room);
    moq_decode_row(dtype, room, n, values);
}

static void *row_of(const moq_tensor *t, int64_t row, int64_t k) {
    return (char *)t->data + row * k * (int64_t)moq_dtype_size(t->dtype);
}

/* ---- silu ---- */

static float silu(float gate) {
    return (gate < MOQ_SILU_LEAST ? MOQ_SILU_LEAST : gate) * moq_sigmoid(gate);
}

static void silu_and_mul_row(const job *j, int64_t row, float *in, void *room) {
    moq_dtype dtype = j->a->x.dtype;
    float *up = in + j->k;
    moq_load_row(&j->a->x, row, in);
    for (int64_t i = 0; i < j->k; i++)
        in[i] = silu(in[i]);
    round_to(dtype, in, j->k, room);
    for (int64_t i = 0; i < j->k; i++)
        in[i] *= up[i];
    moq_encode_row(dtype, in, j->k, row_of(j->values, row, j->k));
}

/* ---- rms norm ---- */

/* The sum of squares of at most MOQ_NORM_TREE values. */
static float sum_of_tree(const float *z, int64_t n) {
    float run[MOQ_NORM_TREE / MOQ_NORM_RUN];
    int64_t runs = 0;
    for (int64_t i = 0; i < n; i += MOQ_NORM_RUN) {
        float sum = 0.0f;
        for (int64_t j = i; j < n && j < i + MOQ_NORM_RUN; j++)
            sum = fmaf(z[j], z[j], sum);
        run[runs++] = sum;
    }
    for (; runs > 1; runs = (runs + 1) / 2) {
        if (runs % 2)
            run[runs] = 0.0f;
        for (int64_t i = 0; i < runs; i += 2)
            run[i / 2] = run[i] + run[i + 1];
    }
    return run[0];
}

static float reciprocal_rms(const float *z, int64_t k, float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < k; i += MOQ_NORM_TREE)
        sum += sum_of_tree(z + i, k - i < MOQ_NORM_TREE ? k - i : MOQ_NORM_TREE);
    return 1.0f / sqrtf(sum / (float)k + eps);
}

static void rms_norm_row(const job *j, int64_t row, float *z, void *room) {
    const moq_activation *a = j->a;
    float *other = z + j->k;
    moq_load_row(&a->x, row, z);
    if (a->residual.ndim >= 0) {
        moq_load_row(&a->residual, row, other);
        for (int64_t i = 0; i < j->k; i++)
            z[i] += other[i];
        moq_encode_row(a->x.dtype, z, j->k, row_of(&a->residual_out, row, j->k));
        round_to(a->x.dtype, z, j->k, room);
    }
    float r = reciprocal_rms(z, j->k, a->eps);
    for (int64_t i = 0; i < j->k; i++)
        z[i] *= r;
    round_to(a->x.dtype, z, j->k, room);
    moq_load_row(&a->weight, 0, other);
    for (int64_t i = 0; i < j->k; i++)
        z[i] *= other[i];
    moq_encode_row(a->x.dtype, z, j->k, row_of(j->values, row, j->k));
}

/* ---- rows ---- */

static void work(void *context, int64_t begin, int64_t end) {
    job *j = context;
    size_t k = (size_t)j->k;
    float *rows = malloc(2 * k * sizeof *rows + k * sizeof(uint16_t));
    if (!rows) {
        atomic_store(&j->no_memory, true);
        return;
    }
    moq_pace pace = {0};
    for (int64_t row = begin; row < end && !moq_stops(&pace, 4 * j->k); row++) {
        if (j->a->kind == MOQ_SILU_AND_MUL)
            silu_and_mul_row(j, row, rows, rows + 2 * k);
        else
            rms_norm_row(j, row, rows, rows + 2 * k);
    }
    free(rows);
}

moq_status moq_cpu_activate(const moq_activation *a, const moq_tensor *values, moq_err *err) {
    job j = {.a = a, .values = values, .k = moq_row_length(values)};
    int64_t rows = moq_row_count(values);
    if (rows == 0 || j.k == 0)
        return MOQ_OK;
    moq_shares shares = {.count = rows,
                         .grain = (THREAD_SHARE + j.k - 1) / j.k,
                         .nanoseconds = NANOSECONDS * (double)rows * (double)j.k};
    moq_parallel_for(&shares, work, &j);
    if (atomic_load(&j.no_memory))
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for rows of %lld values", (long long)j.k);
    return MOQ_OK;
}
