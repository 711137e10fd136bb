/* Rotary embedding: see cpu_rotary.h. A token at a time, its heads one after the other, through
 * float32. */
#include "cpu/cpu_rotary.h"

#include "core/formats.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"
#include "cpu/threads.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Values that a member of a team gets at least, and what one takes, roughly. */
#define THREAD_SHARE 8192
#define NANOSECONDS  2.0

typedef struct {
    const moq_rotary *r;
    char *out;
    atomic_bool no_memory;
} job;

static void round_to(moq_dtype dtype, float *values, int64_t n, void *codes) {
    if (dtype == MOQ_DT_F32)
        return;
    moq_encode_row(dtype, values, n, codes);
    moq_decode_row(dtype, codes, n, values);
}

/* `x` of 2 * half values times cos and sin; `turned` and `part` are room for as many. */
static void rotate_head(moq_dtype dtype, const float *x, const float *cos, const float *sin,
                        int64_t half, float *turned, float *part, void *codes) {
    for (int64_t i = 0; i < half; i++) {
        turned[i] = x[i] * cos[i];
        turned[half + i] = x[half + i] * cos[half + i];
        part[i] = -x[half + i] * sin[i];
        part[half + i] = x[i] * sin[half + i];
    }
    round_to(dtype, turned, 2 * half, codes);
    round_to(dtype, part, 2 * half, codes);
    for (int64_t i = 0; i < 2 * half; i++)
        turned[i] += part[i];
}

static void work(void *context, int64_t begin, int64_t end) {
    job *j = context;
    const moq_tensor *x = &j->r->x;
    int64_t heads = x->shape[2], columns = x->shape[3];
    size_t n = (size_t)columns;
    float *cos = malloc(5 * n * sizeof *cos + n * sizeof(uint16_t));
    if (!cos) {
        atomic_store(&j->no_memory, true);
        return;
    }
    float *sin = cos + n, *values = sin + n, *turned = values + n, *part = turned + n;
    void *codes = part + n;
    moq_pace pace = {0};
    for (int64_t token = begin; token < end && !moq_stops(&pace, 8 * heads * columns); token++) {
        moq_load_row(&j->r->cos, token, cos);
        moq_load_row(&j->r->sin, token, sin);
        for (int64_t row = token * heads; row < (token + 1) * heads; row++) {
            moq_load_row(x, row, values);
            rotate_head(x->dtype, values, cos, sin, columns / 2, turned, part, codes);
            moq_encode_row(x->dtype, turned, columns,
                           j->out + row * columns * (int64_t)moq_dtype_size(x->dtype));
        }
    }
    free(cos);
}

moq_status moq_cpu_rotate(const moq_rotary *rotary, void *out, moq_err *err) {
    job j = {.r = rotary, .out = out};
    int64_t tokens = rotary->x.shape[0] * rotary->x.shape[1];
    int64_t values = rotary->x.shape[2] * rotary->x.shape[3];
    moq_shares shares = {.count = tokens,
                         .grain = (THREAD_SHARE + values - 1) / values,
                         .nanoseconds = NANOSECONDS * (double)tokens * (double)values};
    moq_parallel_for(&shares, work, &j);
    if (atomic_load(&j.no_memory))
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for heads of %lld values",
                        (long long)rotary->x.shape[3]);
    return MOQ_OK;
}
