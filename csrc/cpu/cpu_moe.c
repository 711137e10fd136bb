/* The driver of experts: see cpu/cpu_moe.h. */
#include "cpu/cpu_moe.h"

#include "core/sizes.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_pass.h"
#include "cpu/cpu_rows.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

#include <stdlib.h>
#include <string.h>

/* Rows of a weight that a thread takes at a time: of one tile, or of a strip of tiles. */
enum { TILE_ROWS = MOQ_LARGE_ROWS, FUSED_ROWS = MOQ_STRIP * MOQ_LARGE_ROWS };
/* Memory up to this is kept by the thread between calls. */
#define KEPT_MEMORY ((size_t)8 << 20)
/* The time that combining takes for each value of d, roughly. */
#define NANOSECONDS_OF_D 0.5

typedef struct job job;

/* A group of up to MOQ_CPU_PANEL_ROWS slots of one expert: a pass of each of its two linears. */
typedef struct {
    const job *job;
    int32_t expert;
    const int32_t *slot; /* [rows]: token * top_k + slot within the chunk */
    int64_t rows;
    float *u, *d; /* [rows, P * I] and [rows, H] */
    moq_linear_call call13, call2;
    moq_tensor y; /* both passes write float32 */
    moq_pass pass13, pass2;
} group;

struct job {
    const moq_linear_tiles *tiles;
    const moq_moe_call *call;
    const moq_moe_spec *spec;
    int64_t first, tokens; /* of the chunk */
    int64_t slots;         /* tokens * top_k */
    int64_t counted;       /* of them, those that count */
    int32_t *count;        /* [experts]: slots of each, then where its next one goes */
    int32_t *sorted;       /* [counted]: slots by expert */
    int32_t *row;          /* [slots]: where d of a slot is among the sorted, or -1 */
    group *group;
    int64_t groups;
    int64_t *unit; /* [groups + 1]: where the units of a region's work begin */
    int64_t (*unit_rows)(const group *g);
    float *u, *d;
    int failed;
};

/* ---- slots ---- */

/* The local expert of a slot, or -1 where it does not count. */
static int32_t expert_of(const moq_moe_call *call, int64_t token, int32_t slot) {
    const moq_tensor *ids = call->ids;
    int64_t at = moq_row_offset(ids, token) + slot * ids->stride[ids->ndim - 1];
    int64_t id = ids->dtype == MOQ_DT_I64 ? ((const int64_t *)ids->data)[at]
                                          : ((const int32_t *)ids->data)[at];
    if (id < 0 || id >= call->spec->global_experts)
        return -1;
    int64_t local = call->expert_map ? call->expert_map[id] : id;
    return local >= 0 && local < call->spec->experts ? (int32_t)local : -1;
}

static float weight_of(const moq_moe_call *call, int64_t token, int32_t slot) {
    const moq_tensor *weights = call->weights;
    return ((const float *)weights
                ->data)[moq_row_offset(weights, token) + slot * weights->stride[weights->ndim - 1]];
}

/* Counts the slots of each expert, and keeps the expert of each in `row`. */
static void count_slots(job *j) {
    memset(j->count, 0, (size_t)j->spec->experts * sizeof *j->count);
    j->counted = 0;
    for (int64_t s = 0; s < j->slots; s++) {
        int64_t token = s / j->spec->top_k;
        j->row[s] = expert_of(j->call, j->first + token, (int32_t)(s - token * j->spec->top_k));
        if (j->row[s] >= 0) {
            j->count[j->row[s]]++;
            j->counted++;
        }
    }
}

/* A panel for each MOQ_CPU_PANEL_ROWS slots of an expert. */
static void make_groups(job *j) {
    int32_t begin = 0;
    j->groups = 0;
    for (int32_t e = 0; e < j->spec->experts; e++) {
        int32_t count = j->count[e];
        for (int32_t at = 0; at < count; at += MOQ_CPU_PANEL_ROWS) {
            int32_t rows = count - at < MOQ_CPU_PANEL_ROWS ? count - at : MOQ_CPU_PANEL_ROWS;
            j->group[j->groups++] =
                (group){.job = j, .expert = e, .slot = j->sorted + begin + at, .rows = rows};
        }
        j->count[e] = begin;
        begin += count;
    }
}

/* Slots by expert, and among those of one expert in their own order. */
static void sort_slots(job *j) {
    for (int64_t s = 0; s < j->slots; s++) {
        if (j->row[s] < 0)
            continue;
        int32_t place = j->count[j->row[s]]++;
        j->sorted[place] = (int32_t)s;
        j->row[s] = place;
    }
}

/* ---- rows of the two panels ---- */

static void smooth(const float *factors, moq_dtype dtype, int64_t n, float *row) {
    for (int64_t k = 0; k < n; k++)
        row[k] *= factors[k];
    moq_round_row(dtype, row, n);
}

static int64_t token_of(const group *g, int64_t m) {
    return g->job->first + g->slot[m] / g->job->spec->top_k;
}

static void read_x(const moq_pass *p, int64_t m, float *row) {
    const group *g = p->reading;
    const moq_moe_call *call = g->job->call;
    int64_t token = token_of(g, m);
    moq_load_row(call->x, token, row);
    if (call->weights_on_input) {
        float weight = weight_of(call, token, 0);
        for (int64_t k = 0; k < p->k; k++)
            row[k] *= weight;
        moq_round_row(call->spec->w13.dtype, row, p->k);
    }
    if (call->w13.pre_quant_scale)
        smooth(call->w13.pre_quant_scale + g->expert * p->k, call->spec->w13.dtype, p->k, row);
}

static void read_codes(const moq_pass *p, int64_t m, const moq_pass_row *row) {
    const group *g = p->reading;
    const moq_moe_call *call = g->job->call;
    moq_gather_row(call->x, token_of(g, m), row->codes);
    if (call->x_scale)
        moq_gather_row(call->x_scale, token_of(g, m),
                       p->call->spec->input == MOQ_INPUT_NVFP4 ? (void *)row->blocks : row->scales);
}

static void read_activation(const moq_pass *p, int64_t m, float *row) {
    const group *g = p->reading;
    const moq_moe_call *call = g->job->call;
    moq_cpu_moe_activation(call->spec, g->u + m * call->spec->w13.out_features, row);
    moq_round_row(call->spec->w13.dtype, row, p->k);
    if (call->w2.pre_quant_scale)
        smooth(call->w2.pre_quant_scale + g->expert * p->k, call->spec->w13.dtype, p->k, row);
}

/* ---- passes ---- */

/* The call of one expert's linear. */
static moq_linear_call call_of(const moq_linear_spec *spec, const moq_moe_weight *w, int64_t expert,
                               const moq_tensor *y, int64_t rows) {
    int64_t n = spec->out_features, k = spec->in_features;
    bool e2m1 = spec->weight == MOQ_WEIGHT_E2M1;
    bool bytes = e2m1 || spec->weight == MOQ_WEIGHT_E4M3_GROUP;
    int64_t scales = bytes ? n * moq_linear_scale_columns(spec)
                     : moq_weight_has_scale_matrix(&spec->matrix)
                         ? moq_linear_block_rows(spec) * moq_linear_scale_columns(spec) * 4
                         : 0;
    return (moq_linear_call){
        .spec = spec,
        .m = rows,
        .y = y,
        .weight = w->weight + expert * moq_code_rows_of(spec->weight, n) * (e2m1 ? k / 2 : k),
        .weight_scale = w->weight_scale ? (const uint8_t *)w->weight_scale + expert * scales : NULL,
        .output_scale = w->output_scale ? w->output_scale + expert * n : NULL,
        .input_scale = w->input_scale ? w->input_scale + expert * spec->partition_count : NULL,
        .bias = w->bias ? w->bias + expert * n : NULL,
        .bias_dtype = MOQ_DT_F32,
    };
}

static void open_pass(const group *g, const moq_linear_call *call, moq_read_row read, moq_pass *p) {
    moq_pass_open(p, g->job->tiles, call);
    p->read = read;
    p->read_codes = call->spec->quantized_input ? read_codes : NULL;
    p->reading = g;
    p->input_scale = call->input_scale ? *call->input_scale : 1.0f;
    p->together = true;
}

static void open_passes(group *g) {
    const moq_moe_call *call = g->job->call;
    const moq_moe_spec *spec = call->spec;
    g->y = (moq_tensor){.dtype = MOQ_DT_F32};
    g->call13 = call_of(&spec->w13, &call->w13, g->expert, &g->y, g->rows);
    g->call2 = call_of(&spec->w2, &call->w2, g->expert, &g->y, g->rows);
    open_pass(g, &g->call13, read_x, &g->pass13);
    open_pass(g, &g->call2, read_activation, &g->pass2);
}

/* Points the rows of a pass's output to `out`. */
static void place_pass(moq_pass *p, int64_t rows, char *memory, float *out) {
    moq_pass_place(p, rows, memory);
    moq_pass_begin(p, 0, rows);
    p->together = p->arranges;
    for (int64_t m = 0; m < rows; m++)
        p->y[m] = (char *)(out + m * p->call->spec->out_features);
}

/* ---- memory ---- */

static size_t align(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

/* The next bytes of a block of memory, of which `used` are taken; where there is none yet they are
 * only counted. */
static void *take(char *memory, size_t *used, size_t bytes) {
    size_t at = *used;
    *used += align(bytes);
    return memory ? memory + at : NULL;
}

static int64_t most_groups(const job *j) {
    return j->slots / MOQ_CPU_PANEL_ROWS +
           (j->slots < j->spec->experts ? j->slots : j->spec->experts);
}

/* Lays out what is needed before slots are counted; returns the bytes. */
static size_t slots_layout(job *j, char *memory) {
    size_t used = 0, slots = (size_t)j->slots, groups = (size_t)most_groups(j);
    j->count = take(memory, &used, (size_t)j->spec->experts * sizeof *j->count);
    j->row = take(memory, &used, slots * sizeof *j->row);
    j->sorted = take(memory, &used, slots * sizeof *j->sorted);
    j->group = take(memory, &used, groups * sizeof *j->group);
    j->unit = take(memory, &used, (groups + 1) * sizeof *j->unit);
    j->u = take(memory, &used, slots * (size_t)j->spec->w13.out_features * sizeof(float));
    j->d = take(memory, &used, slots * (size_t)j->spec->w2.out_features * sizeof(float));
    return used;
}

/* Lays out the panels of the passes; returns the bytes. */
static size_t panels_layout(job *j, char *memory) {
    size_t used = 0;
    for (int64_t i = 0; i < j->groups; i++) {
        group *g = &j->group[i];
        int64_t first = g->slot - j->sorted;
        char *of13 = take(memory, &used, moq_pass_bytes(&g->pass13, g->rows));
        char *of2 = take(memory, &used, moq_pass_bytes(&g->pass2, g->rows));
        if (!memory)
            continue;
        g->u = j->u + first * j->spec->w13.out_features;
        g->d = j->d + first * j->spec->w2.out_features;
        place_pass(&g->pass13, g->rows, of13, g->u);
        place_pass(&g->pass2, g->rows, of2, g->d);
    }
    return used;
}

/* Memory of so many bytes; what is large goes back after the call. */
static char *open_memory(size_t bytes, moq_scratch purpose) {
    return bytes <= KEPT_MEMORY ? moq_take_scratch(purpose, bytes)
                                : aligned_alloc(64, align(bytes));
}

static void close_memory(char *memory, size_t bytes) {
    if (bytes > KEPT_MEMORY)
        free(memory);
}

/* ---- regions ---- */

static int64_t load_rows_of(const moq_pass *p) {
    return p->arranges ? p->tiles->arrange_rows : 1;
}

static int64_t load_rows13(const group *g) {
    return load_rows_of(&g->pass13);
}

static int64_t load_rows2(const group *g) {
    return load_rows_of(&g->pass2);
}

static int64_t tile_rows13(const group *g) {
    return g->pass13.strip > 1 ? FUSED_ROWS : TILE_ROWS;
}

static int64_t tile_rows2(const group *g) {
    return g->pass2.strip > 1 ? FUSED_ROWS : TILE_ROWS;
}

/* Numbers the units of a region through all groups; returns how many there are. */
static int64_t count_units(job *j, int64_t (*unit_rows)(const group *g), int64_t rows) {
    j->unit_rows = unit_rows;
    j->unit[0] = 0;
    for (int64_t i = 0; i < j->groups; i++) {
        int64_t of = rows ? rows : j->group[i].rows;
        j->unit[i + 1] = j->unit[i] + divide_up(of, unit_rows(&j->group[i]));
    }
    return j->unit[j->groups];
}

/* The group that a unit belongs to. */
static int64_t find_group(const job *j, int64_t unit) {
    int64_t low = 0, high = j->groups - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (j->unit[middle] <= unit)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Calls work(pass, begin, end) for the rows of units [begin, end), group by group. */
static void for_units(const job *j, int64_t begin, int64_t end, bool second, int64_t rows,
                      moq_work work) {
    for (int64_t i = find_group(j, begin); begin < end; i++) {
        group *g = &j->group[i];
        int64_t each = j->unit_rows(g), of = rows ? rows : g->rows;
        int64_t last = end < j->unit[i + 1] ? end : j->unit[i + 1];
        int64_t from = (begin - j->unit[i]) * each, to = (last - j->unit[i]) * each;
        work(second ? &g->pass2 : &g->pass13, from, to < of ? to : of);
        begin = last;
    }
}

static void load13(void *context, int64_t begin, int64_t end) {
    for_units(context, begin, end, false, 0, moq_pass_load_rows);
}

static void load2(void *context, int64_t begin, int64_t end) {
    for_units(context, begin, end, true, 0, moq_pass_load_rows);
}

static void multiply13(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    for_units(j, begin, end, false, j->spec->w13.out_features, moq_pass_multiply_rows);
}

static void multiply2(void *context, int64_t begin, int64_t end) {
    const job *j = context;
    for_units(j, begin, end, true, j->spec->w2.out_features, moq_pass_multiply_rows);
}

/* True if a thread of a pass had no memory. */
static bool has_failed(const job *j) {
    bool failed = j->failed != 0;
    for (int64_t i = 0; i < j->groups; i++)
        failed = failed || j->group[i].pass13.failed || j->group[i].pass2.failed;
    return failed;
}

/* Does one of the two linears of all groups. */
static void run_linear(job *j, bool second) {
    const moq_linear_spec *spec = second ? &j->spec->w2 : &j->spec->w13;
    double values = (double)j->counted * (double)spec->in_features, products = 0;
    for (int64_t i = 0; i < j->groups; i++)
        products += moq_cpu_linear_seconds(j->tiles, spec, j->group[i].rows);
    moq_shares rows = {.count = count_units(j, second ? load_rows2 : load_rows13, 0),
                       .grain = 1,
                       .nanoseconds = values * MOQ_NANOSECONDS_OF_X * (second ? 3.0 : 1.0)};
    moq_parallel_for(&rows, second ? load2 : load13, j);
    for (int64_t i = 0; i < j->groups; i++)
        moq_pass_narrow_factors(second ? &j->group[i].pass2 : &j->group[i].pass13);
    moq_shares tiles = {.count =
                            count_units(j, second ? tile_rows2 : tile_rows13, spec->out_features),
                        .grain = 1,
                        .nanoseconds = products * 1e9};
    moq_parallel_for(&tiles, second ? multiply2 : multiply13, j);
}

/* ---- the sum over slots ---- */

static void add_slots(const job *j, int64_t token, int64_t n, float *sum) {
    const moq_moe_call *call = j->call;
    for (int32_t s = 0; s < j->spec->top_k; s++) {
        int64_t row = j->row[token * j->spec->top_k + s];
        if (row < 0)
            continue;
        const float *d = j->d + row * n;
        float weight = call->weights_on_input ? 1.0f : weight_of(call, j->first + token, s);
        for (int64_t i = 0; i < n; i++) {
            float term = weight * d[i];
            sum[i] += term;
        }
    }
}

static void combine(void *context, int64_t begin, int64_t end) {
    job *j = context;
    const moq_tensor *y = j->call->y;
    const moq_row_kernels *kernels = moq_cpu_row_kernels();
    int64_t n = j->spec->w2.out_features;
    float *sum = moq_take_scratch(MOQ_SCRATCH_ROW, (size_t)n * sizeof *sum);
    if (!sum) {
        j->failed = 1;
        return;
    }
    moq_pace pace = {0};
    for (int64_t t = begin; t < end && !moq_stops(&pace, n * j->spec->top_k); t++) {
        char *row =
            (char *)y->data + (size_t)moq_row_offset(y, j->first + t) * moq_dtype_size(y->dtype);
        if (j->call->accumulate)
            kernels->decode(y->dtype, row, n, sum);
        else
            memset(sum, 0, (size_t)n * sizeof *sum);
        add_slots(j, t, n, sum);
        kernels->encode(y->dtype, sum, n, row);
    }
}

static void run_combination(job *j) {
    double values = (double)(j->counted + j->tokens) * (double)j->spec->w2.out_features;
    moq_shares tokens = {.count = j->tokens, .grain = 1, .nanoseconds = values * NANOSECONDS_OF_D};
    moq_parallel_for(&tokens, combine, j);
}

/* ---- the call ---- */

static moq_status no_memory(moq_err *err) {
    return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the rows of experts");
}

/* Lays out the panels of groups, whose slots are laid out, and does everything. */
static moq_status run_groups(job *j, moq_err *err) {
    for (int64_t i = 0; i < j->groups; i++)
        open_passes(&j->group[i]);
    size_t bytes = panels_layout(j, NULL);
    char *memory = open_memory(bytes + 64, MOQ_SCRATCH_PANEL);
    if (!memory)
        return no_memory(err);
    panels_layout(j, memory);
    run_linear(j, false);
    run_linear(j, true);
    run_combination(j);
    close_memory(memory, bytes + 64);
    return has_failed(j) ? no_memory(err) : MOQ_OK;
}

static moq_status run_chunk(job *j, moq_err *err) {
    size_t bytes = slots_layout(j, NULL);
    char *memory = open_memory(bytes, MOQ_SCRATCH_EXPERTS);
    if (!memory)
        return no_memory(err);
    slots_layout(j, memory);
    count_slots(j);
    make_groups(j);
    sort_slots(j);
    moq_status status = run_groups(j, err);
    close_memory(memory, bytes);
    return status;
}

/* Bytes of memory that a slot takes, or nearly. */
static size_t bytes_of_slot(const job *j) {
    const moq_linear_spec *w13 = &j->spec->w13, *w2 = &j->spec->w2;
    size_t units = (size_t)(w13->in_features + w2->in_features) * j->tiles->unit;
    size_t floats = (size_t)(w13->out_features + w2->out_features);
    return 2 * units + floats * sizeof(float) + 64;
}

moq_status moq_cpu_moe(const moq_linear_tiles *tiles, const moq_moe_call *call, moq_err *err) {
    job j = {.tiles = tiles, .call = call, .spec = call->spec};
    int64_t most = (int64_t)(MOQ_MOE_MEMORY / bytes_of_slot(&j)) / call->spec->top_k;
    int64_t chunks = divide_up(call->tokens, most < 1 ? 1 : most);
    int64_t each = divide_up(call->tokens, chunks);
    moq_status status = MOQ_OK;
    unsigned flushes = moq_enter_float_mode();
    for (; j.first < call->tokens && status == MOQ_OK && !moq_stop_asked(); j.first += each) {
        j.tokens = call->tokens - j.first < each ? call->tokens - j.first : each;
        j.slots = j.tokens * call->spec->top_k;
        status = run_chunk(&j, err);
    }
    moq_leave_float_mode(flushes);
    return status;
}

double moq_cpu_moe_seconds(const moq_linear_tiles *tiles, const moq_moe_spec *spec,
                           int64_t tokens) {
    int64_t slots = tokens > INT64_MAX / MOQ_MOE_TOP_K ? INT64_MAX : tokens * spec->top_k;
    int64_t active = slots < spec->experts ? slots : spec->experts;
    int64_t rows = divide_up(slots, active);
    return (double)active * (moq_cpu_linear_seconds(tiles, &spec->w13, rows) +
                             moq_cpu_linear_seconds(tiles, &spec->w2, rows));
}
