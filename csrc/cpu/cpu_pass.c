/* The parts of a pass: see cpu/cpu_pass.h. */
#include "cpu/cpu_pass.h"

#include "core/formats.h"
#include "cpu/cpu_rows.h"

#include <string.h>

/* Tiles for few rows of x fit a first-level cache (8 x 512 floats are 16 KB); for many they are
 * large. In between, reading the weight is what takes the time, and so many bytes of a row at once
 * are read best. */
enum { SMALL_M = 8, SMALL_ROWS = 8, SMALL_COLUMNS = 512, READ_BYTES = 512 };

moq_regime moq_regime_of(const moq_linear_tiles *tiles, const moq_linear_spec *spec, int64_t m) {
    if (spec->input == MOQ_INPUT_NVFP4 || moq_layout_is_general(spec->weight) ||
        spec->batch_invariant)
        return MOQ_PREFILL;
    return m <= tiles->few ? MOQ_DECODE : m <= tiles->some ? MOQ_MEDIUM : MOQ_PREFILL;
}

/* The powers of two that kernels leave out, of x and of the weight. */
static double unit_of(const moq_linear_tiles *tiles, const moq_linear_spec *spec) {
    bool e2m1 = spec->weight == MOQ_WEIGHT_E2M1;
    if (moq_layout_is_general(spec->weight))
        return 1; /* both go through float32 */
    double of_w = e2m1 ? tiles->e2m1_unit : tiles->e4m3_unit;
    if (spec->input == MOQ_INPUT_NVFP4)
        return of_w * tiles->e2m1_unit;
    return e2m1 ? of_w : of_w * tiles->e4m3_unit; /* x beside e2m1 is decoded or as it is */
}

static int64_t rows_of_tiles(const moq_linear_tiles *tiles, const moq_linear_call *call) {
    bool small = call->m <= SMALL_M && moq_regime_of(tiles, call->spec, call->m) != MOQ_MEDIUM;
    return small ? SMALL_ROWS : MOQ_LARGE_ROWS;
}

static int64_t columns_of_tiles(const moq_linear_tiles *tiles, const moq_linear_call *call) {
    if (call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK && !tiles->multiply_blocks)
        return MOQ_FP8_BLOCK;
    if (call->spec->batch_invariant)
        return tiles->tile_columns; /* sums of a tile's columns are added up */
    if (call->m <= SMALL_M)
        return SMALL_COLUMNS;
    int64_t read = call->spec->weight == MOQ_WEIGHT_E2M1 ? 2 * READ_BYTES : READ_BYTES;
    return call->m <= MOQ_STRIP_M && read < tiles->tile_columns ? read : tiles->tile_columns;
}

static void read_x(const moq_pass *p, int64_t m, float *row) {
    moq_load_row(p->call->x, p->first + m, row);
}

static void read_codes_of_x(const moq_pass *p, int64_t m, const moq_pass_row *row) {
    moq_gather_row(p->call->x, p->first + m, row->codes);
}

void moq_pass_open(moq_pass *p, const moq_linear_tiles *tiles, const moq_linear_call *call) {
    int64_t k = call->spec->in_features;
    *p = (moq_pass){.tiles = tiles,
                    .call = call,
                    .read = read_x,
                    .read_codes = call->spec->quantized_input ? read_codes_of_x : NULL,
                    .k = k,
                    .padded = round_up(k, MOQ_TILE_STEP),
                    .tile_rows = rows_of_tiles(tiles, call),
                    .tile_columns = columns_of_tiles(tiles, call),
                    .groups = divide_up(k, MOQ_FP8_BLOCK),
                    .unit = unit_of(tiles, call->spec)};
    p->tile_stride = p->tile_columns + 64 / (int64_t)tiles->unit;
}

/* The parts of a panel's memory. */
typedef struct {
    size_t panel;  /* bytes of the rows in the kernel's unit */
    size_t copies; /* of them: as decoded, and where the kernel arranges, as arranged */
    size_t floats; /* factors and scales of groups */
    size_t bytes;  /* all */
} parts;

static bool has_blocks(const moq_pass *p) {
    return p->call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
}

static parts parts_of(const moq_pass *p, int64_t rows) {
    int64_t values = round_up(rows, p->tiles->pad_rows) * p->padded;
    int64_t floats = rows + (has_blocks(p) ? rows * p->groups : 0);
    parts of = {.panel = (size_t)round_up(values * (int64_t)p->tiles->unit, 64),
                .copies = p->tiles->arrange ? 2 : 1,
                .floats = (size_t)round_up(floats, 16)};
    of.bytes = of.copies * of.panel + of.floats * sizeof(float) +
               (size_t)rows * (sizeof(char *) + sizeof(double));
    return of;
}

size_t moq_pass_bytes(const moq_pass *p, int64_t rows) {
    return parts_of(p, rows).bytes;
}

void moq_pass_place(moq_pass *p, int64_t rows, char *memory) {
    parts of = parts_of(p, rows);
    size_t row = (size_t)p->padded * p->tiles->unit; /* rows of padding are multiplied, too */
    p->arranged = memory;
    p->decoded = memory + (of.copies - 1) * of.panel;
    memset((char *)p->decoded + (size_t)rows * row, 0, of.panel - (size_t)rows * row);
    p->narrow_factor = (float *)(memory + of.copies * of.panel);
    p->group_scales = has_blocks(p) ? p->narrow_factor + rows : NULL;
    p->factor = (double *)(p->narrow_factor + of.floats);
    p->y = (char **)(p->factor + rows);
}

void moq_pass_begin(moq_pass *p, int64_t first, int64_t rows) {
    p->first = first;
    p->rows = rows;
    p->regime = moq_regime_of(p->tiles, p->call->spec, rows);
    p->strip = p->regime == MOQ_PREFILL && rows > MOQ_STRIP_M ? MOQ_STRIP : 1;
    p->arranges = p->regime == MOQ_MEDIUM ||
                  (p->regime == MOQ_PREFILL && p->tiles->arrange &&
                   (rows >= p->tiles->arrange_from || p->call->spec->batch_invariant));
    p->panel = p->arranges ? p->arranged : p->decoded;
    p->arranging = (moq_arranging){.rows = p->decoded,
                                   .padded = p->padded,
                                   .panel_rows = round_up(rows, p->tiles->pad_rows),
                                   .columns = p->tile_columns,
                                   .panel = p->panel};
}
