/* The driver of the CPU's linear kernels: see cpu/linear.h.
 *
 *   y[m, n] = round(f_x[m] * f_w[n] * sum_k X[m, k] * W[n, k] + bias[n])
 *
 * Factors that are constant along K stay out of the sums. 128 x 128 block scales and the scales of
 * 128 columns of x are applied to the sum of each 128 columns. */
#include "cpu/linear.h"

#include "core/formats.h"
#include "cpu/convert.h"
#include "cpu/interrupt.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

#include <math.h>
#include <string.h>

/* Tiles for few rows of x fit a first-level cache (8 x 512 floats are 16 KB); for many they are
 * large, so that the sums of a tile are gathered seldom. In between, reading the weight is what
 * takes the time, and so many bytes of a row at once are read best. */
enum { SMALL_M = 8, SMALL_ROWS = 8, SMALL_COLUMNS = 512, LARGE_ROWS = 32, READ_BYTES = 512 };

/* A panel of more rows than this does not stay in a cache: its columns are used for a strip of
 * tiles at a time, whose sums (8 x 32 x 256 floats are 256 KB) do. */
enum { STRIP_M = 32, STRIP = 8 };

/* Rows of the weight a thread takes at least: below, starting it costs more than it does. */
enum { ROWS_PER_THREAD = 32 };
/* The same for values of x. */
enum { VALUES_PER_THREAD = 2048 };
/* Columns of a panel that are laid out at a time; a multiple of MOQ_TILE_STEP. */
enum { ARRANGED_COLUMNS = 16384 };

typedef struct {
    const moq_linear_tiles *tiles;
    const moq_linear_call *call;
    int64_t k, padded;
    int64_t tile_rows, tile_columns;
    int64_t tile_stride; /* a line more than the columns, so that rows fall into different sets */
    int64_t first, rows; /* of x: the panel */
    moq_arranging arranging;
    float input_scale;
    void *panel;   /* what is multiplied */
    void *decoded; /* rows of x in the kernel's unit; the panel itself where nothing is arranged */
    char **y;      /* [rows]: the rows of the output */
    float *factor; /* [rows] */
    float *group_scales; /* [groups of 128, rows], or NULL */
    int64_t groups;
    int64_t start; /* first row of the weight in this pass */
    int64_t strip; /* tiles that share the panel's columns in the cache */
    bool together; /* rows are arranged by the thread that decodes them */
    bool few;      /* codes are multiplied without being decoded first */
    int failed;    /* a thread had no memory */
} pass;

static int64_t round_up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
}

/* ---- the panel ---- */

typedef struct {
    float *row;      /* [padded] */
    uint8_t *codes;  /* [padded] */
    uint8_t *groups; /* [padded / 16] */
    float *scales;   /* [groups of 128] */
} row_memory;

/* Whether one of the e4m3 codes is a NaN, which the kernels' decoding does not know. */
static bool has_nan(const uint8_t *codes, int64_t n) {
    uint8_t found = 0;
    for (int64_t i = 0; i < n; i++)
        found |= (uint8_t)((codes[i] & 0x7f) == 0x7f);
    return found;
}

/* A row as it is, for e2m1 weights. */
static void convert_row(const pass *p, const row_memory *r, void *out) {
    memset(r->row + p->k, 0, (size_t)(p->padded - p->k) * sizeof(float));
    p->tiles->convert(r->row, p->padded, p->few ? MOQ_ORDER_FEW : MOQ_ORDER_E2M1, out);
}

/* A row of x in the kernel's unit, up to the returned factor: as it is, or what its codes mean. A
 * NaN among the codes of a row makes its factor NaN, and so every output of the row; under a scale
 * found from the row there is one where that scale is not finite. */
/* e2m1 weights have their own order of columns. */
static void decode_codes(const pass *p, const row_memory *r, void *out) {
    if (p->call->spec->weight != MOQ_WEIGHT_E2M1) {
        p->tiles->decode_e4m3(r->codes, p->k, out);
        return;
    }
    moq_cpu_row_kernels()->decode(MOQ_DT_E4M3, r->codes, p->k, r->row);
    convert_row(p, r, out);
}

static float decode_x(const pass *p, const row_memory *r, int64_t m, void *out) {
    const moq_linear_tiles *tiles = p->tiles;
    float factor = p->input_scale;
    switch (p->call->spec->input) {
    case MOQ_INPUT_AS_IS:
        convert_row(p, r, out);
        return 1.0f;
    case MOQ_INPUT_NVFP4:
        moq_quantize_row_nvfp4(r->row, p->k, factor, r->codes, r->groups);
        tiles->decode_e2m1(r->codes, r->groups, p->k, MOQ_NVFP4_GROUP, out);
        return has_nan(r->groups, p->k / MOQ_NVFP4_GROUP) ? NAN : factor * tiles->e2m1_unit;
    case MOQ_INPUT_E4M3_TENSOR:
        moq_quantize_row_fp8_static(r->row, p->k, 1.0f / factor, r->codes);
        factor = has_nan(r->codes, p->k) ? NAN : factor;
        decode_codes(p, r, out);
        return p->call->spec->weight == MOQ_WEIGHT_E2M1 ? factor : factor * tiles->e4m3_unit;
    case MOQ_INPUT_E4M3_TOKEN:
        factor = moq_quantize_row_fp8_token(r->row, p->k, r->codes);
        factor = isfinite(factor) ? factor : NAN;
        break;
    case MOQ_INPUT_E4M3_GROUP:
        moq_quantize_row_fp8_group(r->row, p->k, MOQ_FP8_BLOCK, r->codes, r->scales);
        factor = 1.0f;
        for (int64_t g = 0; g < p->groups; g++) {
            p->group_scales[g * p->rows + m] = r->scales[g];
            factor = isfinite(r->scales[g]) ? factor : NAN;
        }
        break;
    }
    tiles->decode_e4m3(r->codes, p->k, out);
    return factor * tiles->e4m3_unit;
}

/* Rows [begin, end) and columns [first, last) of the panel, some columns after the other. */
static void arrange(const pass *p, int64_t begin, int64_t end, int64_t first, int64_t last) {
    moq_pace pace = {0};
    for (int64_t k = first; k < last && !moq_stops(&pace, (end - begin) * ARRANGED_COLUMNS);
         k += ARRANGED_COLUMNS)
        p->tiles->arrange(&p->arranging, begin, end, k,
                          last - k < ARRANGED_COLUMNS ? last : k + ARRANGED_COLUMNS);
}

static void load_rows(void *context, int64_t begin, int64_t end) {
    pass *p = context;
    size_t padded = (size_t)p->padded, bytes = padded * p->tiles->unit;
    size_t groups = (size_t)round_up(p->groups, 16);
    char *scratch = moq_take_scratch(MOQ_SCRATCH_ROW, 6 * padded + 4 * groups);
    if (!scratch) {
        p->failed = 1;
        return;
    }
    row_memory r = {.row = (float *)scratch};
    r.scales = r.row + padded;
    r.codes = (uint8_t *)(r.scales + groups);
    r.groups = r.codes + padded;
    moq_pace pace = {0};
    for (int64_t m = begin; m < end && !moq_stops(&pace, p->padded); m++) {
        moq_load_row(p->call->x, p->first + m, r.row);
        p->factor[m] = decode_x(p, &r, m, (char *)p->decoded + (size_t)m * bytes);
    }
    if (p->together)
        arrange(p, begin, end, 0, p->padded);
}

/* Ranges are counted in steps of columns. */
static void arrange_columns(void *context, int64_t begin, int64_t end) {
    pass *p = context;
    arrange(p, 0, p->rows, begin * MOQ_TILE_STEP, end * MOQ_TILE_STEP);
}

static void load_panel(pass *p) {
    const moq_linear_tiles *tiles = p->tiles;
    p->arranging = (moq_arranging){.rows = p->decoded,
                                   .padded = p->padded,
                                   .panel_rows = round_up(p->rows, tiles->pad_rows),
                                   .columns = p->tile_columns,
                                   .panel = p->panel};
    /* Where every thread gets rows enough, it arranges what it has decoded. */
    p->together = tiles->arrange && p->rows >= moq_num_threads() * tiles->arrange_rows;
    int64_t grain = p->together ? tiles->arrange_rows : 1 + VALUES_PER_THREAD / p->padded;
    moq_parallel_for(p->rows, grain, load_rows, p);
    if (tiles->arrange && !p->together)
        moq_parallel_for(p->padded / MOQ_TILE_STEP,
                         1 + VALUES_PER_THREAD / (p->rows * MOQ_TILE_STEP), arrange_columns, p);
}

/* ---- the tiles ---- */

typedef struct {
    int64_t n; /* first row */
    int64_t count;
    int64_t block; /* their row of 128 x 128 blocks */
} tile_place;

typedef struct {
    char *weight; /* [tile_rows, tile_stride] units */
    float *sums;  /* [strip, tile_rows, stride] */
    float *part;  /* [tile_rows, stride], for block scales */
    int64_t stride;
    char **row; /* [panel rows] */
} tile_memory;

/* Asks for the row that will be decoded in place of row n: of the next tile when tiles share
 * columns, else the columns that follow, or where they end the next tile's row. Tiles jump from row
 * to row, which hardware does not foresee. */
static void prefetch_next(const pass *p, int64_t n, int64_t count, int64_t first, int64_t k) {
    int64_t bits = p->call->spec->weight == MOQ_WEIGHT_E2M1 ? 4 : 8;
    bool down = p->strip > 1 || first + k >= p->k;
    int64_t next = down ? n + count : n, column = p->strip > 1 ? first : down ? 0 : first + k;
    if (next >= p->call->spec->out_features)
        return;
    const uint8_t *codes = p->call->weight + (next * p->k + column) * bits / 8;
    int64_t left = p->k - column < p->tile_columns ? p->k - column : p->tile_columns;
    for (int64_t i = 0; i < left * bits / 8; i += 64)
        __builtin_prefetch(codes + i, 0, 2);
}

/* Rows [n, n + count) of the weight, columns [first, first + k), decoded and padded. */
static void decode_tile(const pass *p, int64_t n, int64_t count, int64_t first, int64_t k,
                        char *out) {
    const moq_linear_call *call = p->call;
    const moq_linear_tiles *tiles = p->tiles;
    int64_t group = call->spec->group_size;
    for (int64_t r = 0; r < count; r++) {
        prefetch_next(p, n + r, count, first, k);
        char *row = out + (size_t)(r * p->tile_stride) * tiles->unit;
        if (call->spec->weight == MOQ_WEIGHT_E2M1) {
            const uint8_t *scales = (const uint8_t *)call->weight_scale + (n + r) * (p->k / group);
            tiles->decode_e2m1(call->weight + ((n + r) * p->k + first) / 2, scales + first / group,
                               k, group, row);
        } else {
            tiles->decode_e4m3(call->weight + (n + r) * p->k + first, k, row);
        }
    }
}

static void add_scaled_portable(const moq_scaled *s) {
    for (int64_t n = 0; n < s->rows; n++) {
        float *sums = s->sums + n * s->stride;
        const float *part = s->part + n * s->stride;
        for (int64_t m = 0; m < s->m; m++)
            sums[m] += part[m] * (s->scales[m] * s->scale);
    }
}

static void add_scaled(const pass *p, const tile_memory *memory, int64_t count, int64_t block,
                       int64_t column) {
    const float *block_scales = p->call->weight_scale;
    moq_scaled scaled = {.sums = memory->sums,
                         .part = memory->part,
                         .stride = memory->stride,
                         .rows = count,
                         .m = p->rows,
                         .scales = p->group_scales + column * p->rows,
                         .scale = block_scales[block * p->groups + column]};
    if (p->tiles->add_scaled)
        p->tiles->add_scaled(&scaled);
    else
        add_scaled_portable(&scaled);
}

/* The place of tile i of a strip in the sums. */
static tile_memory memory_of(const pass *p, const tile_memory *memory, int64_t i) {
    tile_memory own = *memory;
    own.sums += i * round_up(p->tile_rows, p->tiles->pad_rows) * memory->stride;
    return own;
}

/* A tile times the panel by a kernel that applies block scales itself. */
static void sum_blocks(const pass *p, const tile_place *place, const moq_tile *tile) {
    int64_t group = tile->first / MOQ_FP8_BLOCK;
    const float *weight = p->call->weight_scale;
    moq_tile_scales scales = {.x = p->group_scales + group * p->rows,
                              .stride = p->rows,
                              .weight = weight + place->block * p->groups + group};
    p->tiles->multiply_blocks(tile, &scales);
}

/* Columns [first, first + k) of a tile with the whole panel, added to its sums. */
static void sum_columns(const pass *p, const tile_memory *memory, const tile_place *place,
                        int64_t first, int64_t k) {
    bool blocks = p->call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    bool apart = blocks && !p->tiles->multiply_blocks;
    moq_tile tile = {.weight = memory->weight,
                     .weight_stride = p->tile_stride,
                     .rows = place->count,
                     .panel = p->panel,
                     .panel_stride = p->padded,
                     .panel_rows = p->arranging.panel_rows,
                     .first = first,
                     .m = p->rows,
                     .k = round_up(k, MOQ_TILE_STEP),
                     .sums = apart ? memory->part : memory->sums,
                     .sums_stride = memory->stride,
                     .fresh = apart || first == 0};
    decode_tile(p, place->n, place->count, first, k, memory->weight);
    if (blocks && !apart) {
        sum_blocks(p, place, &tile);
        return;
    }
    if (apart && first == 0)
        memset(memory->sums, 0, (size_t)(place->count * memory->stride) * sizeof(float));
    p->tiles->multiply(&tile);
    if (apart)
        add_scaled(p, memory, place->count, place->block, first / MOQ_FP8_BLOCK);
}

/* The tiles of a strip, some columns of all before the next columns of any: those columns of the
 * panel stay in the cache. */
static void sum_strip(const pass *p, const tile_memory *memory, const tile_place *places,
                      int64_t count, moq_pace *pace) {
    for (int64_t first = 0; first < p->k; first += p->tile_columns) {
        int64_t k = p->k - first < p->tile_columns ? p->k - first : p->tile_columns;
        for (int64_t i = 0; i < count; i++) {
            tile_memory own = memory_of(p, memory, i);
            if (moq_stops(pace, p->tile_rows * k * p->rows))
                return;
            sum_columns(p, &own, &places[i], first, k);
        }
    }
}

/* One tile without decoding first. */
static void sum_few(const pass *p, const tile_memory *memory, const tile_place *place) {
    const moq_linear_call *call = p->call;
    int64_t n = place->n;
    bool e2m1 = call->spec->weight == MOQ_WEIGHT_E2M1;
    moq_few job = {.layout = call->spec->weight,
                   .codes = call->weight + n * (e2m1 ? p->k / 2 : p->k),
                   .rows = place->count,
                   .k = p->k,
                   .column_scales = p->group_scales,
                   .column_stride = p->rows,
                   .panel = p->panel,
                   .panel_stride = p->padded,
                   .m = p->rows,
                   .sums = memory->sums,
                   .sums_stride = memory->stride};
    if (e2m1) {
        job.group = call->spec->group_size;
        job.scales = (const uint8_t *)call->weight_scale + n * (p->k / job.group);
    } else if (p->group_scales) {
        job.block_scales = (const float *)call->weight_scale + place->block * p->groups;
    }
    p->tiles->multiply_few(&job);
}

static void store_portable(const moq_store *s) {
    const moq_row_kernels *convert = moq_cpu_row_kernels();
    float out[LARGE_ROWS];
    for (int64_t m = 0; m < s->m; m++) {
        for (int64_t n = 0; n < s->rows; n++)
            out[n] =
                s->sums[n * s->sums_stride + m] * (s->row_factor[m] * s->factor[n]) + s->bias[n];
        convert->encode(s->dtype, out, s->rows, s->row[m]);
    }
}

/* Factors, bias, the one rounding. */
static void store_tile(const pass *p, const tile_memory *memory, int64_t n, int64_t count) {
    const moq_linear_call *call = p->call;
    float factor[LARGE_ROWS], bias[LARGE_ROWS] = {0};
    float unit = call->spec->weight == MOQ_WEIGHT_E2M1 ? p->tiles->e2m1_unit : p->tiles->e4m3_unit;
    size_t size = moq_dtype_size(call->y->dtype);
    for (int64_t r = 0; r < count; r++)
        factor[r] = call->output_scale ? call->output_scale[n + r] * unit : unit;
    if (call->bias) {
        size_t bias_size = moq_dtype_size(call->bias_dtype);
        moq_decode_row(call->bias_dtype, (const char *)call->bias + (size_t)n * bias_size, count,
                       bias);
    }
    for (int64_t m = 0; m < p->rows; m++)
        memory->row[m] = p->y[m] + (size_t)n * size;
    moq_store store = {.sums = memory->sums,
                       .sums_stride = memory->stride,
                       .rows = count,
                       .m = p->rows,
                       .factor = factor,
                       .bias = bias,
                       .row_factor = p->factor,
                       .dtype = call->y->dtype,
                       .row = memory->row};
    if (p->tiles->store)
        p->tiles->store(&store);
    else
        store_portable(&store);
}

/* Where row n lies: the end of its partition, and its row of blocks. */
static int64_t find_partition(const moq_linear_spec *spec, int64_t n, int64_t *block) {
    int64_t end = 0, blocks = 0;
    for (int32_t i = 0; i < spec->partition_count; i++) {
        int64_t begin = end;
        end += spec->partition[i];
        if (n < end) {
            *block = blocks + (n - begin) / MOQ_FP8_BLOCK;
            int64_t block_end = begin + ((n - begin) / MOQ_FP8_BLOCK + 1) * MOQ_FP8_BLOCK;
            return block_end < end ? block_end : end;
        }
        blocks += (spec->partition[i] + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
    }
    *block = blocks;
    return end;
}

/* The tile that begins at row n and ends before `last`: no further than its row of blocks. */
static tile_place place_tile(const pass *p, int64_t n, int64_t last) {
    tile_place place = {.n = n};
    if (p->call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK) {
        int64_t stop = find_partition(p->call->spec, n, &place.block);
        last = stop < last ? stop : last;
    }
    place.count = last - n < p->tile_rows ? last - n : p->tile_rows;
    return place;
}

static bool take_tile_memory(const pass *p, tile_memory *memory) {
    int64_t rows = round_up(p->tile_rows, p->tiles->pad_rows);
    memory->stride = round_up(p->rows, p->tiles->pad_rows);
    if (memory->stride > STRIP_M)
        memory->stride += 16; /* a line, so that rows fall into different sets */
    size_t weight = (size_t)(rows * p->tile_stride) * p->tiles->unit;
    size_t sums = (size_t)(rows * memory->stride) * sizeof(float);
    size_t bytes = weight + (size_t)(p->strip + 1) * sums + (size_t)p->rows * sizeof(char *);
    memory->weight = moq_take_scratch(MOQ_SCRATCH_TILE, bytes);
    if (!memory->weight)
        return false;
    memset(memory->weight, 0, weight); /* rows of padding are multiplied, too */
    memory->part = (float *)(memory->weight + weight);
    memory->sums = memory->part + rows * memory->stride;
    memory->row = (char **)(memory->sums + p->strip * rows * memory->stride);
    return true;
}

static void multiply_rows(void *context, int64_t begin, int64_t end) {
    pass *p = context;
    tile_memory memory;
    if (!take_tile_memory(p, &memory)) {
        p->failed = 1;
        return;
    }
    moq_pace pace = {0};
    for (int64_t n = p->start + begin, last = p->start + end; n < last;) {
        tile_place places[STRIP];
        int64_t count = 0;
        if (moq_stops(&pace, p->tile_rows * p->k))
            return;
        for (; count < p->strip && n < last; n += places[count++].count)
            places[count] = place_tile(p, n, last);
        if (p->few)
            sum_few(p, &memory, &places[0]);
        else
            sum_strip(p, &memory, places, count, &pace);
        for (int64_t i = 0; i < count; i++) {
            tile_memory own = memory_of(p, &memory, i);
            store_tile(p, &own, places[i].n, places[i].count);
        }
    }
}

/* ---- the call ---- */

static moq_status run_pass(pass *p, int64_t rows, moq_err *err) {
    moq_parallel_for(rows, ROWS_PER_THREAD, multiply_rows, p);
    p->start += rows;
    return p->failed ? moq_fail(err, MOQ_ERR_MEMORY, "no memory for the tiles of a linear layer")
                     : MOQ_OK;
}

/* One panel with all partitions; neighbours whose activations are quantized alike go together. */
static moq_status run_panel(pass *p, float dynamic, moq_err *err) {
    const moq_linear_spec *spec = p->call->spec;
    const float *scales = p->call->input_scale;
    p->start = 0;
    for (int32_t i = 0; i < spec->partition_count;) {
        int64_t rows = 0;
        p->input_scale = scales ? scales[i] : dynamic;
        do
            rows += spec->partition[i++];
        while (i < spec->partition_count && (!scales || scales[i] == p->input_scale));
        load_panel(p);
        MOQ_TRY(run_pass(p, rows, err));
    }
    return MOQ_OK;
}

/* The scale of all of x, for an algorithm that has one and a checkpoint that does not. */
static float dynamic_scale(const moq_linear_call *call) {
    moq_input_mode mode = call->spec->input;
    if (call->input_scale || (mode != MOQ_INPUT_E4M3_TENSOR && mode != MOQ_INPUT_NVFP4))
        return 1.0f;
    float amax = moq_cpu_amax(call->x);
    return mode == MOQ_INPUT_NVFP4 ? moq_nvfp4_dynamic_scale(amax) : moq_fp8_dynamic_scale(amax);
}

static moq_status run_panels(pass *p, moq_err *err) {
    int64_t m = p->call->m;
    float dynamic = dynamic_scale(p->call);
    moq_status status = MOQ_OK;
    for (p->first = 0; p->first < m && status == MOQ_OK && !moq_stop_asked();
         p->first += MOQ_CPU_PANEL_ROWS) {
        p->rows = m - p->first < MOQ_CPU_PANEL_ROWS ? m - p->first : MOQ_CPU_PANEL_ROWS;
        for (int64_t i = 0; i < p->rows; i++)
            p->y[i] = (char *)p->call->y->data + (size_t)moq_row_offset(p->call->y, p->first + i) *
                                                     moq_dtype_size(p->call->y->dtype);
        p->strip = p->rows > STRIP_M ? STRIP : 1;
        p->few = p->rows <= p->tiles->few && p->call->spec->input != MOQ_INPUT_NVFP4;
        status = run_panel(p, dynamic, err);
    }
    return status;
}

static moq_status allocate_panel(pass *p, moq_err *err) {
    int64_t m = p->call->m, rows = m < MOQ_CPU_PANEL_ROWS ? m : MOQ_CPU_PANEL_ROWS;
    bool blocks = p->call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    int64_t values = round_up(rows, p->tiles->pad_rows) * p->padded;
    size_t panel = (size_t)round_up(values * (int64_t)p->tiles->unit, 64);
    size_t copies = p->tiles->arrange ? 2 : 1;
    size_t floats = (size_t)round_up(rows + (blocks ? rows * p->groups : 0), 16);
    size_t bytes = copies * panel + floats * sizeof(float) + (size_t)rows * sizeof(char *);
    char *memory = moq_take_scratch(MOQ_SCRATCH_PANEL, bytes);
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for a panel of a linear layer");
    p->panel = memory;
    p->decoded = memory + (copies - 1) * panel;
    size_t row = (size_t)p->padded * p->tiles->unit; /* rows of padding are multiplied, too */
    memset((char *)p->decoded + (size_t)rows * row, 0, panel - (size_t)rows * row);
    p->factor = (float *)(memory + copies * panel);
    p->group_scales = blocks ? p->factor + rows : NULL;
    p->y = (char **)(p->factor + floats);
    return MOQ_OK;
}

static int64_t columns_of_tiles(const moq_linear_tiles *tiles, const moq_linear_call *call) {
    if (call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK && !tiles->multiply_blocks)
        return MOQ_FP8_BLOCK;
    if (call->m <= SMALL_M)
        return SMALL_COLUMNS;
    int64_t read = call->spec->weight == MOQ_WEIGHT_E2M1 ? 2 * READ_BYTES : READ_BYTES;
    return call->m <= STRIP_M && read < tiles->tile_columns ? read : tiles->tile_columns;
}

moq_status moq_cpu_linear(const moq_linear_tiles *tiles, const moq_linear_call *call,
                          moq_err *err) {
    int64_t k = call->spec->in_features;
    pass p = {.tiles = tiles,
              .call = call,
              .k = k,
              .padded = round_up(k, MOQ_TILE_STEP),
              .tile_rows = call->m <= SMALL_M ? SMALL_ROWS : LARGE_ROWS,
              .tile_columns = columns_of_tiles(tiles, call),
              .groups = (k + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK};
    p.tile_stride = p.tile_columns + 64 / (int64_t)tiles->unit;
    MOQ_TRY(allocate_panel(&p, err));
    return run_panels(&p, err);
}

const moq_linear_tiles *moq_linear_tiles_of(moq_isa isa) {
    static const moq_linear_tiles *const ALL[MOQ_ISA_COUNT] = {
        &moq_linear_portable,
#if defined(__x86_64__)
        &moq_linear_avx2,     &moq_linear_avx512, &moq_linear_avx512bf16, &moq_linear_amx,
#endif
    };
    return ALL[isa];
}
