/* Weights to codes and scales: see cpu_weight_codes.h. A band is the rows that share scales; it is
 * read once for its magnitudes, once for each scale that is tried, and once for its codes. Rows of
 * NVFP4 whose scales are not searched for go by the kernel of activations. */
#include "cpu/cpu_weight_codes.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

/* Values that pass through the stack at once. */
#define PIECE MOQ_WEIGHT_PIECE
/* Values that are worth a member of a team, and what one takes, roughly. */
#define THREAD_SHARE 8192
#define NANOSECONDS  2.0
/* Narrowest group that vectors of every level fill. */
#define WIDE_GROUP 128

typedef struct {
    const moq_weight_codes *w;
    const moq_row_kernels *kernels;
    atomic_int failed;
} job;

/* The scales of a band. */
typedef struct {
    int64_t first, rows; /* of the weight */
    int64_t count;       /* scales */
    float *amax;
    float *step;    /* what values are divided by */
    float *trial;   /* another one */
    double *error;  /* sums of squares under `step`, */
    double *others; /* and under `trial` */
    uint8_t *code;  /* of steps that are stored as codes, */
    uint8_t *tried; /* and of trials */
} band;

static const char *row_of(const moq_weight_codes *w, int64_t row) {
    return (const char *)w->weight + (size_t)(row * w->columns) * moq_dtype_size(w->dtype);
}

/* ---- one piece of a row ---- */

/* The values of a piece: whole groups, or a part of one. */
static int64_t piece_of(const moq_weight_codes *w) {
    return w->group < PIECE ? PIECE / w->group * w->group : PIECE;
}

/* Gives zeros the sign that their codes have under E2M1: exporters take it from w < 0, or with E8M0
 * scales from w > 0. */
static void sign_zeros(const moq_weight_codes *w, int64_t n, float *values) {
    const float zero = w->scale_dtype == MOQ_DT_E8M0 ? -0.0f : 0.0f;
    if (w->code_dtype != MOQ_DT_E2M1X2)
        return;
    for (int64_t i = 0; i < n; i++)
        values[i] = values[i] == 0.0f ? zero : values[i];
}

/* values /= their step, where the piece begins with the group of step[0]. */
static void divide(const moq_weight_codes *w, const float *step, int64_t n, float *values) {
    for (int64_t at = 0; at < n; at += w->group, step++) {
        const int64_t end = n - at < w->group ? n : at + w->group;
        const float by = *step;
        for (int64_t i = at; i < end; i++)
            values[i] /= by;
    }
}

/* Moves midpoints of E2M1 that round up to even a little toward zero, where ties go with E8M0
 * scales. */
static void lower_ties(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float a = fabsf(values[i]);
        bool tie = a == 0.75f || a == 1.75f || a == 3.5f;
        values[i] *= tie ? 1.0f - FLT_EPSILON / 2 : 1.0f;
    }
}

/* Quotients and codes of a piece of values. */
static void encode(const job *j, const float *step, int64_t n, float *values, uint8_t *codes) {
    const moq_weight_codes *w = j->w;
    sign_zeros(w, n, values);
    divide(w, step, n, values);
    if (w->rounds)
        moq_round_row(w->dtype, values, n);
    if (w->code_dtype == MOQ_DT_E2M1X2 && w->scale_dtype == MOQ_DT_E8M0)
        lower_ties(values, n);
    j->kernels->encode(w->code_dtype, values, n, codes);
}

static int64_t code_bytes(const moq_weight_codes *w, int64_t n) {
    return w->code_dtype == MOQ_DT_E2M1X2 ? n / 2 : n;
}

static uint8_t *codes_of(const moq_weight_codes *w, int64_t row) {
    return (uint8_t *)w->codes + code_bytes(w, row * w->columns);
}

static void write_row(const job *j, int64_t row, const float *step) {
    const moq_weight_codes *w = j->w;
    const char *from = row_of(w, row);
    uint8_t *codes = codes_of(w, row);
    const int64_t piece = piece_of(w);
    float values[PIECE];
    for (int64_t at = 0; at < w->columns; at += piece) {
        int64_t n = w->columns - at < piece ? w->columns - at : piece;
        j->kernels->decode(w->dtype, from + (size_t)at * moq_dtype_size(w->dtype), n, values);
        encode(j, step + at / w->group, n, values, codes + code_bytes(w, at));
    }
}

/* error[g] += the squares of w - code * step over the groups of a piece */
static void add_squares(const moq_weight_codes *w, const float *step, int64_t n,
                        const float *values, const float *decoded, double *error) {
    for (int64_t at = 0; at < n; at += w->group, step++, error++) {
        const int64_t end = n - at < w->group ? n : at + w->group;
        const double by = (double)*step;
        double sum = 0.0;
        for (int64_t i = at; i < end; i++) {
            double off = (double)values[i] - (double)decoded[i] * by;
            sum += off * off;
        }
        *error += sum;
    }
}

static void add_errors(const job *j, int64_t row, const float *step, double *error) {
    const moq_weight_codes *w = j->w;
    const char *from = row_of(w, row);
    const int64_t piece = piece_of(w);
    float values[PIECE], others[PIECE];
    uint8_t codes[PIECE];
    for (int64_t at = 0; at < w->columns; at += piece) {
        int64_t n = w->columns - at < piece ? w->columns - at : piece, g = at / w->group;
        j->kernels->decode(w->dtype, from + (size_t)at * moq_dtype_size(w->dtype), n, values);
        memcpy(others, values, (size_t)n * sizeof *values);
        encode(j, step + g, n, others, codes);
        j->kernels->decode(w->code_dtype, codes, n, others);
        add_squares(w, step + g, n, values, others, error + g);
    }
}

/* ---- scales of a band ---- */

static bool take_band(const moq_weight_codes *w, int64_t index, band *b) {
    *b = (band){.first = index * w->height, .count = (w->columns + w->group - 1) / w->group};
    b->rows = w->rows - b->first < w->height ? w->rows - b->first : w->height;
    size_t n = (size_t)b->count;
    size_t each = 2 * sizeof(double) + 3 * sizeof(float) + 2;
    char *memory = moq_take_scratch(MOQ_SCRATCH_ROW, n * each);
    if (!memory)
        return false;
    b->error = (double *)memory;
    b->others = b->error + n;
    b->amax = (float *)(b->others + n);
    b->step = b->amax + n;
    b->trial = b->step + n;
    b->code = (uint8_t *)(b->trial + n);
    b->tried = b->code + n;
    return true;
}

static void find_amax(const job *j, const band *b) {
    const moq_weight_codes *w = j->w;
    j->kernels->amax(w->dtype, row_of(w, b->first), w->columns, w->group, b->amax);
    for (int64_t row = 1; row < b->rows; row++) {
        j->kernels->amax(w->dtype, row_of(w, b->first + row), w->columns, w->group, b->trial);
        for (int64_t g = 0; g < b->count; g++)
            if (!(b->trial[g] <= b->amax[g] || isnan(b->amax[g])))
                b->amax[g] = b->trial[g];
    }
}

/* The E4M3 code of a block scale: its least is that of 2^-9, and a block of zeros has 1. */
static uint8_t e4m3_scale(float ratio) {
    if (ratio == 0.0f)
        return MOQ_E4M3_ONE;
    uint8_t code = moq_e4m3_encode(ratio);
    return code > 0 ? code : 1;
}

/* The E8M0 code of the least power of two that brings amax to the largest code. */
static uint8_t e8m0_scale(float amax, float largest) {
    int exponent;
    if (!(amax > 0.0f))
        return 0;
    double fraction = frexp((double)amax / (double)largest, &exponent);
    int code = exponent - (fraction == 0.5) + MOQ_POWER_ONE;
    return (uint8_t)(code < 0 ? 0 : code > MOQ_POWER_MOST ? MOQ_POWER_MOST : code);
}

static float step_of(const moq_weight_codes *w, uint8_t code) {
    return w->scale_dtype == MOQ_DT_E8M0 ? moq_e8m0_decode(code)
                                         : moq_e4m3_decode(code) * w->second;
}

static float first_step(const moq_weight_codes *w, float amax, uint8_t *code) {
    if (w->scale_dtype == MOQ_DT_F32)
        return amax > 0.0f ? amax / MOQ_E4M3_MAX : 1.0f;
    if (w->scale_dtype == MOQ_DT_E4M3)
        *code = e4m3_scale(amax / (MOQ_E2M1_MAX * w->second));
    else
        *code = e8m0_scale(amax, w->code_dtype == MOQ_DT_E4M3 ? MOQ_E4M3_MAX : MOQ_E2M1_MAX);
    return step_of(w, *code);
}

/* ---- the search ---- */

static uint8_t moved(uint8_t code, int by, int least, int most) {
    int to = code + by;
    return (uint8_t)(to < least ? least : to > most ? most : to);
}

/* Sets the trial of a group to the scale that is `by` steps from where it began. */
static void set_trial(const moq_weight_codes *w, const band *b, int64_t g, int by) {
    uint8_t code = 0;
    float step = first_step(w, b->amax[g], &code);
    if (w->scale_dtype == MOQ_DT_F32) {
        b->trial[g] = step * exp2f((float)by / 8.0f);
        return;
    }
    if (w->search == MOQ_SEARCH_FOUR_OVER_SIX)
        code = e4m3_scale(1.5f * b->amax[g] / (MOQ_E2M1_MAX * w->second));
    else if (w->scale_dtype == MOQ_DT_E4M3)
        code = moved(code, by, 1, code > w->most ? code : w->most);
    else
        code = moved(code, by, 0, MOQ_POWER_MOST);
    b->tried[g] = code;
    b->trial[g] = step_of(w, code);
}

static void try_scales(const job *j, const band *b, int by) {
    for (int64_t g = 0; g < b->count; g++) {
        set_trial(j->w, b, g, by);
        b->others[g] = 0.0;
    }
    for (int64_t row = 0; row < b->rows; row++)
        add_errors(j, b->first + row, b->trial, b->others);
    for (int64_t g = 0; g < b->count; g++) {
        if (!(b->others[g] < b->error[g]))
            continue;
        b->error[g] = b->others[g];
        b->step[g] = b->trial[g];
        b->code[g] = b->tried[g];
    }
}

static void search(const job *j, const band *b) {
    const moq_weight_codes *w = j->w;
    int near = w->scale_dtype == MOQ_DT_F32    ? MOQ_NEAR_F32
               : w->scale_dtype == MOQ_DT_E4M3 ? MOQ_NEAR_E4M3
                                               : MOQ_NEAR_E8M0;
    memset(b->error, 0, (size_t)b->count * sizeof *b->error);
    for (int64_t row = 0; row < b->rows; row++)
        add_errors(j, b->first + row, b->step, b->error);
    if (w->search == MOQ_SEARCH_FOUR_OVER_SIX) {
        try_scales(j, b, 0);
        return;
    }
    for (int by = 1; by <= near; by++) {
        try_scales(j, b, by);
        try_scales(j, b, -by);
    }
}

/* ---- NVFP4 ---- */

static bool is_nvfp4(const moq_weight_codes *w) {
    return w->code_dtype == MOQ_DT_E2M1X2 && w->scale_dtype == MOQ_DT_E4M3 &&
           w->group == MOQ_NVFP4_GROUP && w->search == MOQ_SEARCH_NONE;
}

/* Counters as wide as values let the compiler make vectors. */
static bool has_negative_zero(moq_dtype dtype, const void *values, int64_t n) {
    const uint32_t *wide = values;
    const uint16_t *narrow = values;
    uint32_t in_wide = 0;
    uint16_t in_narrow = 0;
    if (dtype == MOQ_DT_F32)
        for (int64_t i = 0; i < n; i++)
            in_wide |= wide[i] == 0x80000000u;
    else
        for (int64_t i = 0; i < n; i++)
            in_narrow |= narrow[i] == 0x8000u;
    return in_wide | in_narrow;
}

/* Writes a row by the kernel of activations. Their formula is that of weights, but for blocks whose
 * scale would be zero and for the sign of zeros: returns false for a row with either. */
static bool write_as_activations(const job *j, int64_t row) {
    const moq_weight_codes *w = j->w;
    const char *from = row_of(w, row);
    int64_t count = w->columns / w->group;
    uint8_t *scales = (uint8_t *)w->scales + row * count;
    if (has_negative_zero(w->dtype, from, w->columns))
        return false;
    j->kernels->nvfp4(w->dtype, from, w->columns, w->second, codes_of(w, row), scales);
    return !memchr(scales, 0, (size_t)count);
}

/* ---- FP8 ---- */

/* True where quotients are e4m3 codes at once: each scale is amax / 448, or 1 over zeros. Narrower
 * groups would be divided value by value. */
static bool divides_to_e4m3(const moq_weight_codes *w, const band *b) {
    bool divides =
        w->code_dtype == MOQ_DT_E4M3 && w->search == MOQ_SEARCH_NONE && w->group >= WIDE_GROUP;
    for (int64_t g = 0; divides && g < b->count; g++)
        divides = !isnan(b->amax[g]);
    return divides;
}

/* ---- all of it ---- */

static void write_band(const job *j, int64_t index, const band *b) {
    const moq_weight_codes *w = j->w;
    if (is_nvfp4(w) && write_as_activations(j, b->first))
        return;
    find_amax(j, b);
    for (int64_t g = 0; g < b->count; g++)
        b->step[g] = first_step(w, b->amax[g], &b->code[g]);
    if (w->search != MOQ_SEARCH_NONE)
        search(j, b);
    if (w->scale_dtype == MOQ_DT_F32)
        memcpy((float *)w->scales + index * b->count, b->step, (size_t)b->count * sizeof(float));
    else
        memcpy((uint8_t *)w->scales + index * b->count, b->code, (size_t)b->count);
    bool divides = divides_to_e4m3(w, b);
    for (int64_t row = b->first; row < b->first + b->rows; row++)
        if (divides)
            j->kernels->divide_e4m3(w->dtype, row_of(w, row), w->columns, w->group, b->step,
                                    codes_of(w, row));
        else
            write_row(j, row, b->step);
}

static void work(void *context, int64_t begin, int64_t end) {
    job *j = context;
    const moq_weight_codes *w = j->w;
    unsigned mode = moq_enter_float_mode();
    moq_pace pace = {0};
    band b;
    for (int64_t i = begin; i < end && !moq_stops(&pace, w->height * w->columns); i++) {
        if (w->given > 0.0f)
            write_row(j, i, &w->given);
        else if (take_band(w, i, &b))
            write_band(j, i, &b);
        else
            atomic_store(&j->failed, 1);
    }
    moq_leave_float_mode(mode);
}

bool moq_cpu_weight_codes(const moq_weight_codes *w) {
    job j = {w, moq_cpu_row_kernels(), 0};
    int64_t band_values = w->height * w->columns;
    moq_shares shares = {.count = (w->rows + w->height - 1) / w->height,
                         .grain = band_values < THREAD_SHARE ? THREAD_SHARE / band_values : 1,
                         .nanoseconds = NANOSECONDS * (double)w->rows * (double)w->columns};
    moq_parallel_for(&shares, work, &j);
    return !atomic_load(&j.failed);
}
