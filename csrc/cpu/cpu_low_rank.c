/* The low-rank part of a linear: see cpu_low_rank.h. Portable C, whose sums run over lanes in a
 * fixed order: the number of threads changes nothing. Rows of x become float32 some at a time. */
#include "cpu/cpu_low_rank.h"

#include "cpu/cpu_rows.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/threads.h"

#define LANES       16
#define ROWS_OF_X   256  /* that are float32 at a time */
#define NANOSECONDS 0.15 /* of a product on one thread, roughly */
#define PRODUCTS    8192 /* that a member of a team gets at least */

typedef struct {
    const moq_low_rank *l;
    int64_t first, rows; /* of x */
    float *x;            /* [rows, K] */
} low_rank_panel;

static float dot(const float *a, const float *b, int64_t n) {
    float lane[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        sum += a[i] * b[i];
    for (int j = 0; j < LANES; j++)
        sum += lane[j];
    return sum;
}

static void load_rows(void *context, int64_t begin, int64_t end) {
    const low_rank_panel *p = context;
    int64_t k = p->l->spec->in_features;
    for (int64_t i = begin; i < end; i++)
        moq_load_row(p->l->x, p->first + i, p->x + i * k);
}

/* Sums of rows [begin, end) of lora_a with all rows of the panel. */
static void multiply_a(void *context, int64_t begin, int64_t end) {
    const low_rank_panel *p = context;
    const moq_low_rank *l = p->l;
    int64_t k = l->spec->in_features, ranks = moq_weight_ranks(&l->spec->matrix);
    moq_pace pace = {0};
    for (int64_t i = begin; i < end && !moq_stops(&pace, p->rows * k); i++)
        for (int64_t m = 0; m < p->rows; m++)
            l->inner[(p->first + m) * ranks + i] = dot(l->lora_a + i * k, p->x + m * k, k);
}

/* Sums of rows [begin, end) of lora_b, partition by partition, with all rows of the panel. */
static void multiply_b(void *context, int64_t begin, int64_t end) {
    const low_rank_panel *p = context;
    const moq_low_rank *l = p->l;
    const moq_linear_spec *spec = l->spec;
    int64_t rank = spec->rank, ranks = moq_weight_ranks(&spec->matrix), first = 0;
    moq_pace pace = {0};
    for (int32_t i = 0; i < spec->partition_count; first += spec->partition[i++]) {
        int64_t last = first + spec->partition[i];
        int64_t from = begin > first ? begin : first, to = end < last ? end : last;
        for (int64_t m = p->first; from < to && m < p->first + p->rows; m++) {
            if (moq_stops(&pace, (to - from) * rank))
                return;
            for (int64_t n = from; n < to; n++)
                l->addend[m * spec->out_features + n] =
                    dot(l->lora_b + n * rank, l->inner + m * ranks + i * rank, rank);
        }
    }
}

/* Shares rows of a matrix, each of so many products, among threads. */
static void share_rows(low_rank_panel *p, int64_t rows, int64_t products, moq_work work) {
    moq_shares shares = {.count = rows,
                         .grain = 1 + PRODUCTS / (products + 1),
                         .nanoseconds = NANOSECONDS * (double)rows * (double)products};
    moq_parallel_for(&shares, work, p);
}

static int64_t rows_of_x(const moq_low_rank *l) {
    return l->m < ROWS_OF_X ? l->m : ROWS_OF_X;
}

int64_t moq_cpu_low_rank_bytes(const moq_low_rank *l) {
    int64_t sums = l->m * moq_weight_ranks(&l->spec->matrix);
    return (sums + rows_of_x(l) * l->spec->in_features) * (int64_t)sizeof(float);
}

moq_status moq_cpu_low_rank(const moq_low_rank *l, moq_err *err) {
    int64_t k = l->spec->in_features, ranks = moq_weight_ranks(&l->spec->matrix);
    low_rank_panel p = {.l = l, .x = l->inner + l->m * ranks};
    (void)err;
    unsigned flushes = moq_enter_float_mode();
    for (; p.first < l->m && !moq_stop_asked(); p.first += p.rows) {
        int64_t left = l->m - p.first;
        p.rows = left < ROWS_OF_X ? left : ROWS_OF_X;
        share_rows(&p, p.rows, k, load_rows);
        share_rows(&p, ranks, p.rows * k, multiply_a);
        share_rows(&p, l->spec->out_features, p.rows * l->spec->rank, multiply_b);
    }
    moq_leave_float_mode(flushes);
    return MOQ_OK;
}
