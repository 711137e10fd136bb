/* Dequantization on the CPU: see cpu_dequantize.h. Threads share pieces of rows, which go through
 * the stack: codes and scales to float32, the products, and those to the output type, all by the
 * row kernels. Bound by their arithmetic. */
#include "cpu/cpu_dequantize.h"

#include "core/formats.h"
#include "core/scales.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cpu/threads.h"

/* Values of a piece; even, so that a byte of two columns is in one. */
#define PIECE 512
/* Values that a member of a team gets at least, and what one takes, roughly (docs/lab/cpu.md). */
#define THREAD_SHARE 8192
#define NANOSECONDS  2.0

/* Columns [at, at + n) of a row. */
typedef struct {
    int64_t expert, row, at, n;
} piece;

typedef struct {
    float scale[2][PIECE], values[PIECE], result[PIECE];
    uint8_t bytes[8 * PIECE]; /* codes or scales next to each other */
} scratch;

typedef struct {
    const moq_dequantize_job *job;
    const moq_row_kernels *kernels;
    moq_dtype dtype;
    char *out;
    int64_t per_row; /* pieces */
} task;

/* One nibble of each byte. */
static void decode_nibbles(const uint8_t *bytes, int64_t n, int shift, const float table[16],
                           float *values) {
    for (int64_t i = 0; i < n; i++)
        values[i] = table[bytes[i] >> shift & 15];
}

static void decode_codes(const task *t, const piece *p, scratch *tmp) {
    static const float e2m1[] = {0,     .5f,  1,  1.5f,  2,  3,  4,  6,
                                 -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    static const float int4[] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    const moq_dequantize_job *job = t->job;
    bool paired_rows = job->kind == MOQ_CODE_E2M1_ROWS || job->kind == MOQ_CODE_INT4_ROWS;
    bool paired_columns = job->kind == MOQ_CODE_E2M1_COLUMNS;
    const uint8_t *src = (const uint8_t *)job->codes + p->expert * job->code_stride[0] +
                         (paired_rows ? p->row / 2 : p->row) * job->code_stride[1] +
                         (paired_columns ? p->at / 2 : p->at) * job->code_stride[2];
    int shift = p->row % 2 ? 4 : 0;
    moq_gather(src, job->code_stride[2], 1, paired_columns ? p->n / 2 : p->n, tmp->bytes);
    switch (job->kind) {
    case MOQ_CODE_E4M3:
        t->kernels->decode(MOQ_DT_E4M3, tmp->bytes, p->n, tmp->values);
        break;
    case MOQ_CODE_INT8:
        for (int64_t i = 0; i < p->n; i++)
            tmp->values[i] = (float)(int8_t)tmp->bytes[i];
        break;
    case MOQ_CODE_E2M1_COLUMNS:
        t->kernels->decode(MOQ_DT_E2M1X2, tmp->bytes, p->n, tmp->values);
        break;
    case MOQ_CODE_E2M1_ROWS:
        decode_nibbles(tmp->bytes, p->n, shift, e2m1, tmp->values);
        break;
    case MOQ_CODE_INT4_ROWS:
        decode_nibbles(tmp->bytes, p->n, shift, int4, tmp->values);
        break;
    }
}

/* The scale of every value of a piece. */
static void spread_scale(const task *t, const moq_block_scale *s, const piece *p, scratch *tmp,
                         float *out) {
    int64_t size = (int64_t)moq_dtype_size(s->dtype);
    int64_t first = p->at / s->block[2], end = p->at + p->n;
    int64_t blocks = s->stride[2] == 0 ? 1 : (end - 1) / s->block[2] + 1 - first;
    const char *src =
        (const char *)s->data + (p->expert / s->block[0] * s->stride[0] +
                                 p->row / s->block[1] * s->stride[1] + first * s->stride[2]) *
                                    size;
    float values[PIECE];
    moq_gather(src, s->stride[2], (size_t)size, blocks, tmp->bytes);
    if (s->dtype == MOQ_DT_F64)
        moq_decode_scales(s->dtype, tmp->bytes, blocks, values);
    else
        t->kernels->decode(s->dtype, tmp->bytes, blocks, values);
    for (int64_t b = 0, at = p->at; b < blocks; b++) {
        int64_t next = b + 1 < blocks ? (first + b + 1) * s->block[2] : end;
        for (; at < next; at++)
            *out++ = values[b];
    }
}

static void work(void *context, int64_t begin, int64_t end) {
    const task *t = context;
    const int64_t *shape = t->job->shape;
    scratch tmp;
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, PIECE); i++) {
        int64_t row = i / t->per_row, at = i % t->per_row * PIECE;
        piece p = {row / shape[1], row % shape[1], at,
                   shape[2] - at < PIECE ? shape[2] - at : PIECE};
        decode_codes(t, &p, &tmp);
        spread_scale(t, &t->job->scale[0], &p, &tmp, tmp.scale[0]);
        spread_scale(t, &t->job->scale[1], &p, &tmp, tmp.scale[1]);
        void *out = t->out + (row * shape[2] + at) * (int64_t)moq_dtype_size(t->dtype);
        t->kernels->scale(tmp.values, tmp.scale[0], tmp.scale[1], p.n, t->dtype != MOQ_DT_F32,
                          tmp.result);
        t->kernels->encode(t->dtype, tmp.result, p.n, out);
    }
}

void moq_cpu_dequantize(const moq_dequantize_job *job, moq_dtype dtype, void *out) {
    const int64_t *shape = job->shape;
    task t = {job, moq_cpu_row_kernels(), dtype, out, (shape[2] + PIECE - 1) / PIECE};
    int64_t pieces = shape[0] * shape[1] * t.per_row;
    if (pieces == 0)
        return;
    int64_t values = shape[0] * shape[1] * shape[2] / pieces; /* of a piece, on average */
    moq_shares shares = {.count = pieces,
                         .grain = THREAD_SHARE / (values > 0 ? values : 1),
                         .nanoseconds = NANOSECONDS * (double)(pieces * values)};
    moq_parallel_for(&shares, work, &t);
}
