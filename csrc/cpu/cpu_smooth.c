/* Smoothing on the CPU: see cpu_smooth.h. */
#include "cpu/cpu_smooth.h"

#include "cpu/cpu_convert.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

/* Values that a member of a team gets at least, and the time that one takes, roughly. */
#define VALUES_PER_THREAD 16384
#define NANOSECONDS       1.0

typedef struct {
    const moq_tensor *x, *rows;
    const float *scale;
    int failed; /* a thread had no memory */
} smoothing;

static void smooth(void *context, int64_t begin, int64_t end) {
    smoothing *s = context;
    const moq_row_kernels *kernels = moq_cpu_row_kernels();
    int64_t n = s->rows->shape[1];
    float *row = moq_take_scratch(MOQ_SCRATCH_ROW, (size_t)n * sizeof *row);
    if (!row) {
        s->failed = 1;
        return;
    }
    moq_pace pace = {0};
    size_t bytes = (size_t)s->rows->stride[0] * moq_dtype_size(s->rows->dtype);
    for (int64_t m = begin; m < end && !moq_stops(&pace, n); m++) {
        moq_load_row(s->x, m, row);
        for (int64_t k = 0; k < n; k++)
            row[k] *= s->scale[k];
        kernels->encode(s->rows->dtype, row, n, (char *)s->rows->data + (size_t)m * bytes);
    }
}

moq_status moq_cpu_smooth_rows(const moq_tensor *x, const float *scale, const moq_tensor *rows,
                               moq_err *err) {
    smoothing s = {.x = x, .rows = rows, .scale = scale};
    int64_t count = rows->shape[0], values = rows->shape[1];
    moq_shares shares = {.count = count,
                         .grain = 1 + VALUES_PER_THREAD / values,
                         .nanoseconds = NANOSECONDS * (double)count * (double)values};
    moq_parallel_for(&shares, smooth, &s);
    return s.failed ? moq_fail(err, MOQ_ERR_MEMORY, "no memory for a smoothed row of x") : MOQ_OK;
}
