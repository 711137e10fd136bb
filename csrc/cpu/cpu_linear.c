/* The driver of the CPU's linear kernels: see cpu/cpu_linear.h.
 *
 *   y[m, n] = round(f_x[m] * f_w[n] * sum_k X[m, k] * W[n, k] + bias[n])
 *
 * Factors that are constant along K stay out of the sums. 128 x 128 block scales and the scales of
 * 128 columns of x are applied to the sum of each 128 columns.
 *
 * Extreme values: no sum overflows, or loses bits, that the output has. Powers of two are taken out
 * of rows of x that are not quantized and out of rows of block scales, so that what is summed is of
 * ordinary size, and become part of f_x and f_w. The factors of a row and of a token meet in
 * float64 wherever their product would not be a normal float32. */
#include "cpu/cpu_linear.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_quantize.h"
#include "cpu/cpu_rows.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

#include <float.h>
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
/* Values of x that a thread takes at least while the panel is laid out. */
enum { VALUES_PER_THREAD = 2048 };
/* What a value of x takes until it is in the panel, roughly. */
#define NANOSECONDS_OF_X 1.0
/* Columns of a panel that are laid out at a time; a multiple of MOQ_TILE_STEP. */
enum { ARRANGED_COLUMNS = 16384 };

/* Rows of x that are not quantized are multiplied as they are if the exponent of their largest
 * magnitude lies within these, else they are brought to the upper one: K below 2^32 products with
 * weights below 2^12 do not overflow there, and values 2^150 times smaller than the largest still
 * count, with weights of 2^-10 and the powers of two that kernels leave out. Likewise of the scales
 * of 128 columns, for x and the weight each: codes below 2^9 are between them. */
enum { HIGHEST_AS_IS = 80, LOWEST_AS_IS = -60, HIGHEST_SCALE = 20 };

/* How rows of x meet the weight: codes multiplied without being stored decoded, by the kernel's
 * multiply_few or multiply_some, or tiles decoded for all. */
typedef enum { FEW, SOME, MANY } regime;

typedef struct {
    const moq_linear_tiles *tiles;
    const moq_linear_call *call;
    int64_t k, padded;
    int64_t tile_rows, tile_columns;
    int64_t tile_stride; /* a line more than the columns, so that rows fall into different sets */
    int64_t first, rows; /* of x: the panel */
    moq_arranging arranging;
    float input_scale;
    void *panel; /* what is multiplied: `arranged`, or `decoded` where nothing is arranged */
    void *arranged;
    void *decoded;  /* rows of x in the kernel's unit */
    char **y;       /* [rows]: the rows of the output */
    double *factor; /* [rows], and as float32: */
    float *narrow_factor;
    double least, most;  /* of the factors, those that are NaN left out */
    bool held;           /* they are normal numbers of float32 */
    double unit;         /* the power of two that panel and weight leave out together */
    float *group_scales; /* [groups of 128, rows], or NULL */
    int64_t groups;
    int64_t start; /* first row of the weight in this pass */
    int64_t strip; /* tiles that share the panel's columns in the cache */
    bool together; /* rows are arranged by the thread that decodes them */
    regime regime;
    bool arranges;      /* what is multiplied is `arranged` */
    int failed;         /* a thread had no memory */
    double nanoseconds; /* of the call, on one thread */
} pass;

static int64_t round_up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
}

static regime regime_of(const moq_linear_tiles *tiles, const moq_linear_spec *spec, int64_t m) {
    if (spec->input == MOQ_INPUT_NVFP4)
        return MANY;
    return m <= tiles->few ? FEW : m <= tiles->some ? SOME : MANY;
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

/* Lays out a row of x as it is, for e2m1 weights. */
static void convert_row(const pass *p, const row_memory *r, void *out) {
    memset(r->row + p->k, 0, (size_t)(p->padded - p->k) * sizeof(float));
    static const moq_order ORDER[] = {
        [FEW] = MOQ_ORDER_FEW, [SOME] = MOQ_ORDER_SOME, [MANY] = MOQ_ORDER_E2M1};
    p->tiles->convert(r->row, p->padded, ORDER[p->regime], out);
}

/* Divides n values by the power of two that brings the largest finite one to an exponent, and
 * returns it. */
static double take_power(float *values, int64_t n, int exponent) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        float magnitude = fabsf(values[i]);
        largest = magnitude <= FLT_MAX && magnitude > largest ? magnitude : largest;
    }
    if (largest == 0)
        return 1.0;
    double power = ldexp(1.0, ilogbf(largest) - exponent), inverse = 1.0 / power;
    for (int64_t i = 0; i < n; i++)
        values[i] = (float)((double)values[i] * inverse);
    return power;
}

/* Lays out a row of x that is not quantized. */
static double decode_as_is(const pass *p, const row_memory *r, void *out) {
    const float highest = ldexpf(1, HIGHEST_AS_IS), lowest = ldexpf(1, LOWEST_AS_IS);
    float amax;
    moq_cpu_row_kernels()->amax(MOQ_DT_F32, r->row, p->k, p->k, &amax);
    bool ordinary = amax == 0 || (amax >= lowest && amax < highest);
    double power = ordinary ? 1.0 : take_power(r->row, p->k, HIGHEST_AS_IS - 1);
    convert_row(p, r, out);
    return power;
}

/* e2m1 weights have their own order of columns. */
static void decode_codes(const pass *p, const row_memory *r, void *out) {
    if (p->call->spec->weight != MOQ_WEIGHT_E2M1) {
        p->tiles->decode_e4m3(r->codes, p->k, out);
        return;
    }
    moq_cpu_row_kernels()->decode(MOQ_DT_E4M3, r->codes, p->k, r->row);
    convert_row(p, r, out);
}

/* The scales of a row's groups, to the panel's. */
static double place_group_scales(const pass *p, const row_memory *r, int64_t m) {
    bool finite = true;
    for (int64_t g = 0; g < p->groups; g++)
        finite = finite && isfinite(r->scales[g]);
    double power = take_power(r->scales, p->groups, HIGHEST_SCALE);
    for (int64_t g = 0; g < p->groups; g++)
        p->group_scales[g * p->rows + m] = r->scales[g];
    return finite ? power : NAN;
}

/* A row of x in the kernel's unit, up to the returned factor: as it is, or what its codes mean. A
 * NaN among the codes of a row makes its factor NaN, and so every output of the row; under a scale
 * found from the row there is one where that scale is not finite. */
static double decode_x(const pass *p, const row_memory *r, int64_t m, void *out) {
    const moq_linear_tiles *tiles = p->tiles;
    float factor = p->input_scale;
    double power;
    switch (p->call->spec->input) {
    case MOQ_INPUT_AS_IS:
        return decode_as_is(p, r, out);
    case MOQ_INPUT_NVFP4:
        moq_quantize_row_nvfp4(r->row, p->k, factor, r->codes, r->groups);
        tiles->decode_e2m1(r->codes, r->groups, p->k, MOQ_NVFP4_GROUP, out);
        return has_nan(r->groups, p->k / MOQ_NVFP4_GROUP) ? NAN : factor;
    case MOQ_INPUT_E4M3_TENSOR:
        moq_quantize_row_fp8_static(r->row, p->k, 1.0f / factor, r->codes);
        factor = has_nan(r->codes, p->k) ? NAN : factor;
        decode_codes(p, r, out);
        return factor;
    case MOQ_INPUT_E4M3_TOKEN:
        factor = moq_quantize_row_fp8_token(r->row, p->k, r->codes);
        tiles->decode_e4m3(r->codes, p->k, out);
        return isfinite(factor) ? factor : NAN;
    case MOQ_INPUT_E4M3_GROUP:
        moq_quantize_row_fp8_group(r->row, p->k, MOQ_FP8_BLOCK, r->codes, r->scales);
        power = place_group_scales(p, r, m);
        tiles->decode_e4m3(r->codes, p->k, out);
        return power;
    }
    return NAN;
}

/* The powers of two that kernels leave out, of x and of the weight. */
static double unit_of(const moq_linear_tiles *tiles, const moq_linear_spec *spec) {
    bool e2m1 = spec->weight == MOQ_WEIGHT_E2M1;
    double of_w = e2m1 ? tiles->e2m1_unit : tiles->e4m3_unit;
    if (spec->input == MOQ_INPUT_NVFP4)
        return of_w * tiles->e2m1_unit;
    return e2m1 ? of_w : of_w * tiles->e4m3_unit; /* x beside e2m1 is decoded or as it is */
}

/* Rows [begin, end) and columns [first, last) of the panel, some columns after the other. */
static void arrange(const pass *p, int64_t begin, int64_t end, int64_t first, int64_t last) {
    moq_arrange *lay_out = p->regime == SOME ? p->tiles->arrange_some : p->tiles->arrange;
    moq_pace pace = {0};
    for (int64_t k = first; k < last && !moq_stops(&pace, (end - begin) * ARRANGED_COLUMNS);
         k += ARRANGED_COLUMNS)
        lay_out(&p->arranging, begin, end, k,
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

static void narrow_factors(pass *p) {
    double least = (double)FLT_MAX, most = (double)FLT_MIN;
    for (int64_t m = 0; m < p->rows; m++) {
        double factor = p->factor[m];
        p->narrow_factor[m] = (float)factor;
        least = factor < least ? factor : least;
        most = factor > most ? factor : most;
    }
    p->least = least;
    p->most = most;
    p->held = least >= (double)FLT_MIN && most <= (double)FLT_MAX;
}

static void load_panel(pass *p) {
    const moq_linear_tiles *tiles = p->tiles;
    p->arranging = (moq_arranging){.rows = p->decoded,
                                   .padded = p->padded,
                                   .panel_rows = round_up(p->rows, tiles->pad_rows),
                                   .columns = p->tile_columns,
                                   .panel = p->panel};
    /* Where every thread gets rows enough, it arranges what it has decoded. */
    p->together = p->arranges && p->rows >= moq_num_threads() * tiles->arrange_rows;
    moq_shares rows = {.count = p->rows,
                       .grain =
                           p->together ? tiles->arrange_rows : 1 + VALUES_PER_THREAD / p->padded,
                       .nanoseconds = p->nanoseconds};
    moq_parallel_for(&rows, load_rows, p);
    if (p->arranges && !p->together) {
        moq_shares columns = {.count = p->padded / MOQ_TILE_STEP,
                              .grain = 1 + VALUES_PER_THREAD / (p->rows * MOQ_TILE_STEP),
                              .nanoseconds = p->nanoseconds};
        moq_parallel_for(&columns, arrange_columns, p);
    }
    narrow_factors(p);
}

/* ---- the tiles ---- */

typedef struct {
    int64_t n; /* first row */
    int64_t count;
    int64_t block; /* their row of 128 x 128 blocks */
    double power;  /* taken out of its scales, else 1 */
} tile_place;

typedef struct {
    char *weight; /* [tile_rows, tile_stride] units */
    float *sums;  /* [strip, tile_rows, stride] */
    float *part;  /* [tile_rows, stride], for block scales */
    float *block; /* [strip, groups of 128]: the scales of each tile's row of blocks */
    int64_t stride;
    char **row; /* [panel rows] */
} tile_memory;

/* Where codes of the tile that is decoded next lie: the next one of those that share columns, else
 * the columns that follow, or where they end the next tile's. */
static void find_next(const pass *p, const tile_place *place, int64_t first, int64_t k,
                      moq_tile *tile) {
    int64_t bits = p->call->spec->weight == MOQ_WEIGHT_E2M1 ? 4 : 8;
    bool down = p->strip > 1 || first + k >= p->k;
    int64_t n = down ? place->n + place->count : place->n;
    int64_t column = p->strip > 1 ? first : down ? 0 : first + k;
    int64_t columns = p->k - column < p->tile_columns ? p->k - column : p->tile_columns;
    int64_t rows = p->call->spec->out_features - n;
    tile->next_rows = rows < place->count ? rows : place->count;
    tile->next_stride = p->k * bits / 8;
    tile->next_bytes = columns * bits / 8;
    if (tile->next_rows <= 0)
        return;
    tile->next = p->call->weight + (n * p->k + column) * bits / 8;
    if (bits == 4) {
        tile->next_scales_stride = p->k / p->call->spec->group_size;
        tile->next_scales = (const uint8_t *)p->call->weight_scale + n * tile->next_scales_stride +
                            column / p->call->spec->group_size;
    }
}

/* Asks for a row of the next tile. Tiles jump from row to row, which hardware does not foresee. */
static void prefetch_next(const moq_tile *tile, int64_t row) {
    for (int64_t i = 0; row < tile->next_rows && i < tile->next_bytes; i += 64)
        __builtin_prefetch(tile->next + row * tile->next_stride + i, 0, 2);
}

/* Rows [n, n + count) of the weight, columns [first, first + k), decoded and padded. */
static void decode_tile(const pass *p, const tile_place *place, int64_t first, int64_t k,
                        const moq_tile *tile, char *out) {
    const moq_linear_call *call = p->call;
    const moq_linear_tiles *tiles = p->tiles;
    int64_t group = call->spec->group_size, n = place->n;
    for (int64_t r = 0; r < place->count; r++) {
        if (!tiles->fetches)
            prefetch_next(tile, r);
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

static void add_scaled(const pass *p, const tile_memory *memory, int64_t count, int64_t column) {
    moq_scaled scaled = {.sums = memory->sums,
                         .part = memory->part,
                         .stride = memory->stride,
                         .rows = count,
                         .m = p->rows,
                         .scales = p->group_scales + column * p->rows,
                         .scale = memory->block[column]};
    if (p->tiles->add_scaled)
        p->tiles->add_scaled(&scaled);
    else
        add_scaled_portable(&scaled);
}

/* The place of tile i of a strip in the sums. */
static tile_memory memory_of(const pass *p, const tile_memory *memory, int64_t i) {
    tile_memory own = *memory;
    own.sums += i * round_up(p->tile_rows, p->tiles->pad_rows) * memory->stride;
    own.block += i * p->groups;
    return own;
}

/* A tile times the panel by a kernel that applies block scales itself. */
static void sum_blocks(const pass *p, const tile_memory *memory, const moq_tile *tile) {
    int64_t group = tile->first / MOQ_FP8_BLOCK;
    moq_tile_scales scales = {
        .x = p->group_scales + group * p->rows, .stride = p->rows, .weight = memory->block + group};
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
                     .fresh = apart || first == 0,
                     .arranged = p->arranges};
    find_next(p, place, first, k, &tile);
    decode_tile(p, place, first, k, &tile, memory->weight);
    if (blocks && !apart) {
        sum_blocks(p, memory, &tile);
        return;
    }
    if (apart && first == 0)
        memset(memory->sums, 0, (size_t)(place->count * memory->stride) * sizeof(float));
    p->tiles->multiply(&tile);
    if (apart)
        add_scaled(p, memory, place->count, first / MOQ_FP8_BLOCK);
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
                   .panel_stride = p->regime == SOME ? p->arranging.panel_rows : p->padded,
                   .m = p->rows,
                   .sums = memory->sums,
                   .sums_stride = memory->stride};
    if (e2m1) {
        job.group = call->spec->group_size;
        job.scales = (const uint8_t *)call->weight_scale + n * (p->k / job.group);
    } else if (p->group_scales) {
        job.block_scales = memory->block;
    }
    if (p->regime == SOME)
        p->tiles->multiply_some(&job);
    else
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

/* The exact factor of row r of a tile. */
static double factor_of(const pass *p, const tile_place *place, int64_t r) {
    const float *scale = p->call->output_scale;
    return (scale ? (double)scale[place->n + r] : place->power) * p->unit;
}

/* Outputs of a tile in float64, for factors whose products float32 does not hold. */
static void store_wide(const pass *p, const tile_place *place, const moq_store *s) {
    const moq_row_kernels *convert = moq_cpu_row_kernels();
    float out[LARGE_ROWS];
    for (int64_t m = 0; m < s->m; m++) {
        for (int64_t n = 0; n < s->rows; n++)
            out[n] = (float)((double)s->sums[n * s->sums_stride + m] * p->factor[m] *
                                 factor_of(p, place, n) +
                             (double)s->bias[n]);
        convert->encode(s->dtype, out, s->rows, s->row[m]);
    }
}

/* Whether float32 holds factors of rows from `least` to `most`, and their products with the factors
 * of all tokens, as normal numbers. */
static bool holds_factors(const pass *p, double least, double most) {
    const double lowest = (double)FLT_MIN, highest = (double)FLT_MAX;
    return p->held && least >= lowest && most <= highest && least * p->least >= lowest &&
           most * p->most <= highest;
}

/* Whether all scales are 0 or from 2^-60 to 2^60, in integers, of which the compiler makes vectors:
 * so are nearly all there ever were, and this is what a call of one token waits for. */
static bool are_ordinary(const float *scale, int64_t n) {
    const uint32_t lowest = (127 - 60) << 23, range = 120 << 23;
    uint32_t others = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &scale[i], sizeof bits);
        others |= (uint32_t)(bits - lowest > range) & (uint32_t)(bits != 0);
    }
    return others == 0;
}

/* Whether float32 holds the output scales of rows [begin, end), zeros left out, and their products
 * with the factors of all tokens, as normal numbers. */
static bool holds_rows(const pass *p, int64_t begin, int64_t end) {
    const float *scale = p->call->output_scale;
    float least = FLT_MAX, most = 0;
    if (p->least >= 0x1p-60 && p->most <= 0x1p40 && are_ordinary(scale + begin, end - begin))
        return true; /* and the units are at most 2^16 */
    for (int64_t n = begin; n < end; n++) {
        least = scale[n] > 0 && scale[n] < least ? scale[n] : least;
        most = scale[n] > most ? scale[n] : most;
    }
    return most == 0 || holds_factors(p, (double)least * p->unit, (double)most * p->unit);
}

/* Factors, bias, the one rounding. */
static void store_tile(const pass *p, const tile_memory *memory, const tile_place *place,
                       bool held) {
    const moq_linear_call *call = p->call;
    int64_t n = place->n, count = place->count;
    float factor[LARGE_ROWS], bias[LARGE_ROWS] = {0};
    size_t size = moq_dtype_size(call->y->dtype);
    float unit = (float)p->unit, power = (float)(place->power * p->unit);
    for (int64_t r = 0; r < count; r++)
        factor[r] = call->output_scale ? call->output_scale[n + r] * unit : power;
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
                       .row_factor = p->narrow_factor,
                       .dtype = call->y->dtype,
                       .row = memory->row};
    if (!held)
        store_wide(p, place, &store);
    else if (p->tiles->store)
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

/* Brings the scales of a row of blocks to where its tile reads them, unless they are there. */
static void place_blocks(const pass *p, float *scales, int64_t block, tile_place *place) {
    if (place->block == block)
        return;
    memcpy(scales, (const float *)p->call->weight_scale + block * p->groups,
           (size_t)p->groups * sizeof(float));
    place->power = take_power(scales, p->groups, HIGHEST_SCALE);
    place->block = block;
}

/* The tile that begins at row n and ends before `last`: no further than its row of blocks. In place
 * of one that had the same memory before. */
static void place_tile(const pass *p, const tile_memory *memory, int64_t n, int64_t last,
                       tile_place *place) {
    if (p->call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK) {
        int64_t block, stop = find_partition(p->call->spec, n, &block);
        last = stop < last ? stop : last;
        place_blocks(p, memory->block, block, place);
    }
    place->n = n;
    place->count = last - n < p->tile_rows ? last - n : p->tile_rows;
}

static bool take_tile_memory(const pass *p, tile_memory *memory) {
    int64_t rows = round_up(p->tile_rows, p->tiles->pad_rows);
    memory->stride = round_up(p->rows, p->tiles->pad_rows);
    if (memory->stride > STRIP_M)
        memory->stride += 16; /* a line, so that rows fall into different sets */
    size_t weight = (size_t)(rows * p->tile_stride) * p->tiles->unit;
    size_t sums = (size_t)(rows * memory->stride) * sizeof(float);
    size_t rows_of_y = (size_t)p->rows * sizeof(char *);
    size_t blocks = p->group_scales ? (size_t)(p->strip * p->groups) * sizeof(float) : 0;
    size_t bytes = weight + (size_t)(p->strip + 1) * sums + rows_of_y + blocks;
    memory->weight = moq_take_scratch(MOQ_SCRATCH_TILE, bytes);
    if (!memory->weight)
        return false;
    if (p->regime == MANY)
        memset(memory->weight, 0, weight); /* rows of padding are multiplied, too */
    memory->part = (float *)(memory->weight + weight);
    memory->sums = memory->part + rows * memory->stride;
    memory->row = (char **)(memory->sums + p->strip * rows * memory->stride);
    memory->block = (float *)(memory->row + p->rows);
    return true;
}

static void multiply_rows(void *context, int64_t begin, int64_t end) {
    pass *p = context;
    tile_memory memory;
    if (!take_tile_memory(p, &memory)) {
        p->failed = 1;
        return;
    }
    tile_place places[STRIP];
    for (int i = 0; i < STRIP; i++)
        places[i] = (tile_place){.block = -1, .power = 1.0};
    bool rows = p->call->output_scale != NULL;
    bool held = rows && holds_rows(p, p->start + begin, p->start + end);
    moq_pace pace = {0};
    for (int64_t n = p->start + begin, last = p->start + end; n < last;) {
        int64_t count = 0;
        if (moq_stops(&pace, p->tile_rows * p->k))
            return;
        for (; count < p->strip && n < last; n += places[count++].count) {
            tile_memory own = memory_of(p, &memory, count);
            place_tile(p, &own, n, last, &places[count]);
        }
        if (p->regime == MANY)
            sum_strip(p, &memory, places, count, &pace);
        else
            sum_few(p, &memory, &places[0]);
        for (int64_t i = 0; i < count; i++) {
            tile_memory own = memory_of(p, &memory, i);
            double power = places[i].power * p->unit;
            store_tile(p, &own, &places[i], rows ? held : holds_factors(p, power, power));
        }
    }
}

/* ---- the call ---- */

static moq_status run_pass(pass *p, int64_t rows, moq_err *err) {
    moq_shares shares = {.count = rows,
                         .grain = ROWS_PER_THREAD,
                         .piece = p->strip > 1 ? STRIP * LARGE_ROWS : 0,
                         .nanoseconds = p->nanoseconds};
    moq_parallel_for(&shares, multiply_rows, p);
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
        p->regime = regime_of(p->tiles, p->call->spec, p->rows);
        p->strip = p->regime == MANY && p->rows > STRIP_M ? STRIP : 1;
        p->arranges = p->regime == SOME ||
                      (p->regime == MANY && p->tiles->arrange && p->rows >= p->tiles->arrange_from);
        p->panel = p->arranges ? p->arranged : p->decoded;
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
    size_t bytes =
        copies * panel + floats * sizeof(float) + (size_t)rows * (sizeof(char *) + sizeof(double));
    char *memory = moq_take_scratch(MOQ_SCRATCH_PANEL, bytes);
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for a panel of a linear layer");
    p->arranged = memory;
    p->decoded = memory + (copies - 1) * panel;
    size_t row = (size_t)p->padded * p->tiles->unit; /* rows of padding are multiplied, too */
    memset((char *)p->decoded + (size_t)rows * row, 0, panel - (size_t)rows * row);
    p->narrow_factor = (float *)(memory + copies * panel);
    p->group_scales = blocks ? p->narrow_factor + rows : NULL;
    p->factor = (double *)(p->narrow_factor + floats);
    p->y = (char **)(p->factor + rows);
    return MOQ_OK;
}

static int64_t rows_of_tiles(const moq_linear_tiles *tiles, const moq_linear_call *call) {
    bool small = call->m <= SMALL_M && regime_of(tiles, call->spec, call->m) != SOME;
    return small ? SMALL_ROWS : LARGE_ROWS;
}

static int64_t columns_of_tiles(const moq_linear_tiles *tiles, const moq_linear_call *call) {
    if (call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK && !tiles->multiply_blocks)
        return MOQ_FP8_BLOCK;
    if (call->m <= SMALL_M)
        return SMALL_COLUMNS;
    int64_t read = call->spec->weight == MOQ_WEIGHT_E2M1 ? 2 * READ_BYTES : READ_BYTES;
    return call->m <= STRIP_M && read < tiles->tile_columns ? read : tiles->tile_columns;
}

double moq_cpu_linear_seconds(const moq_linear_tiles *tiles, const moq_linear_spec *spec,
                              int64_t m) {
    const moq_linear_speed *speed = &tiles->speed;
    double weights = (double)spec->in_features * (double)spec->out_features;
    double panels = (double)((m + MOQ_CPU_PANEL_ROWS - 1) / MOQ_CPU_PANEL_ROWS);
    int64_t padded = round_up(m, tiles->pad_rows);
    switch (regime_of(tiles, spec, m)) {
    case FEW:
        return weights * (speed->few + speed->product * (double)m);
    case SOME:
        return weights *
               (speed->some * (double)(padded / tiles->pad_rows) + speed->product * (double)m);
    default:
        return weights * (speed->decode * panels +
                          speed->product * (double)(m < tiles->arrange_from ? m : padded));
    }
}

moq_status moq_cpu_linear(const moq_linear_tiles *tiles, const moq_linear_call *call,
                          moq_err *err) {
    int64_t k = call->spec->in_features;
    pass p = {.tiles = tiles,
              .call = call,
              .k = k,
              .padded = round_up(k, MOQ_TILE_STEP),
              .tile_rows = rows_of_tiles(tiles, call),
              .tile_columns = columns_of_tiles(tiles, call),
              .groups = (k + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK,
              .unit = unit_of(tiles, call->spec),
              .nanoseconds = 1e9 * moq_cpu_linear_seconds(tiles, call->spec, call->m) +
                             NANOSECONDS_OF_X * (double)call->m * (double)k};
    p.tile_stride = p.tile_columns + 64 / (int64_t)tiles->unit;
    MOQ_TRY(allocate_panel(&p, err));
    unsigned flushes = moq_enter_float_mode();
    moq_status status = run_panels(&p, err);
    moq_leave_float_mode(flushes);
    return status;
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
