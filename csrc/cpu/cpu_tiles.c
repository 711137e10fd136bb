/* The tiles of a pass: rows of the weight, decoded and multiplied with the panel. See
 * cpu/cpu_pass.h. */
#include "cpu/cpu_pass.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_general.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"

#include <float.h>
#include <math.h>
#include <string.h>

typedef struct {
    int64_t n; /* first row */
    int64_t count;
    int64_t block; /* their row of 128 x 128 blocks */
    double power;  /* taken out of its scales, else 1 */
} tile_place;

typedef struct {
    char *weight;  /* [tile_rows, tile_stride] units */
    float *sums;   /* [strip, tile_rows, stride] */
    float *part;   /* [tile_rows, stride], for block scales */
    float *block;  /* [strip, groups of 128]: the scales of each tile's row of blocks */
    float *values; /* [tile_columns], of general layouts: a row on its way to the kernel's unit */
    int64_t stride;
    char **row; /* [panel rows] */
} tile_memory;

/* Finds the codes of the tile that is decoded next: the next one of those that share columns, else
 * the columns that follow, or where they end the next tile's. */
static void find_next(const moq_pass *p, const tile_place *place, int64_t first, int64_t k,
                      moq_tile *tile) {
    int64_t bits = p->call->spec->weight == MOQ_WEIGHT_E2M1 ? 4 : 8;
    if (p->call->spec->weight == MOQ_WEIGHT_INT4_GROUP)
        return; /* rows lie in pairs, of which the second is there with the first */
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
static void decode_tile(const moq_pass *p, const tile_place *place, int64_t first, int64_t k,
                        const moq_tile *tile, float *values, char *out) {
    const moq_linear_call *call = p->call;
    const moq_linear_tiles *tiles = p->tiles;
    int64_t group = call->spec->group_size, n = place->n;
    for (int64_t r = 0; r < place->count; r++) {
        if (!tiles->fetches)
            prefetch_next(tile, r);
        char *row = out + (size_t)(r * p->tile_stride) * tiles->unit;
        if (moq_layout_is_general(call->spec->weight)) {
            moq_cpu_decode_general(call, n + r, first, k, values);
            moq_pad_floats(values, k);
            tiles->convert(values, round_up(k, MOQ_TILE_STEP), MOQ_ORDER_E2M1, row);
        } else if (call->spec->weight == MOQ_WEIGHT_E2M1) {
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

static void add_scaled(const moq_pass *p, const tile_memory *memory, int64_t count,
                       int64_t column) {
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
static tile_memory memory_of(const moq_pass *p, const tile_memory *memory, int64_t i) {
    tile_memory own = *memory;
    own.sums += i * round_up(p->tile_rows, p->tiles->pad_rows) * memory->stride;
    own.block += i * p->groups;
    return own;
}

/* Multiplies a tile with the panel by a kernel that applies block scales itself. */
static void sum_blocks(const moq_pass *p, const tile_memory *memory, const moq_tile *tile) {
    int64_t group = tile->first / MOQ_FP8_BLOCK;
    moq_tile_scales scales = {
        .x = p->group_scales + group * p->rows, .stride = p->rows, .weight = memory->block + group};
    p->tiles->multiply_blocks(tile, &scales);
}

/* Adds the products of columns [first, first + k) of a tile with the whole panel to its sums. */
static void sum_columns(const moq_pass *p, const tile_memory *memory, const tile_place *place,
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
    decode_tile(p, place, first, k, &tile, memory->values, memory->weight);
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
static void sum_fused_tile(const moq_pass *p, const tile_memory *memory, const tile_place *places,
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

/* Multiplies one tile without decoding first. */
static void sum_decode(const moq_pass *p, const tile_memory *memory, const tile_place *place) {
    const moq_linear_call *call = p->call;
    int64_t n = place->n;
    bool e2m1 = call->spec->weight == MOQ_WEIGHT_E2M1;
    moq_decode_job job = {.layout = call->spec->weight,
                          .codes = call->weight + n * (e2m1 ? p->k / 2 : p->k),
                          .rows = place->count,
                          .k = p->k,
                          .column_scales = p->group_scales,
                          .column_stride = p->rows,
                          .panel = p->panel,
                          .panel_stride =
                              p->regime == MOQ_MEDIUM ? p->arranging.panel_rows : p->padded,
                          .m = p->rows,
                          .sums = memory->sums,
                          .sums_stride = memory->stride};
    if (e2m1) {
        job.group = call->spec->group_size;
        job.scales = (const uint8_t *)call->weight_scale + n * (p->k / job.group);
    } else if (p->group_scales) {
        job.block_scales = memory->block;
    }
    if (p->regime == MOQ_MEDIUM)
        p->tiles->multiply_medium(&job);
    else
        p->tiles->multiply_decode(&job);
}

static void store_portable(const moq_store *s) {
    const moq_row_kernels *convert = moq_cpu_row_kernels();
    float out[MOQ_LARGE_ROWS];
    for (int64_t m = 0; m < s->m; m++) {
        for (int64_t n = 0; n < s->rows; n++)
            out[n] =
                s->sums[n * s->sums_stride + m] * (s->row_factor[m] * s->factor[n]) + s->bias[n];
        convert->encode(s->dtype, out, s->rows, s->row[m]);
    }
}

/* The exact factor of row r of a tile. */
static double factor_of(const moq_pass *p, const tile_place *place, int64_t r) {
    const float *scale = p->call->output_scale;
    return (scale ? (double)scale[place->n + r] : place->power) * p->unit;
}

/* Outputs of a tile in float64, for factors whose products float32 does not hold, and with an
 * addend. */
static void store_wide(const moq_pass *p, const tile_place *place, const moq_store *s) {
    const moq_row_kernels *convert = moq_cpu_row_kernels();
    const moq_linear_call *call = p->call;
    float out[MOQ_LARGE_ROWS];
    for (int64_t m = 0; m < s->m; m++) {
        const float *addend =
            call->addend ? call->addend + (p->first + m) * call->spec->out_features + place->n
                         : NULL;
        for (int64_t n = 0; n < s->rows; n++)
            out[n] = (float)((double)s->sums[n * s->sums_stride + m] * p->factor[m] *
                                 factor_of(p, place, n) +
                             (double)(addend ? addend[n] : 0) + (double)s->bias[n]);
        convert->encode(s->dtype, out, s->rows, s->row[m]);
    }
}

/* True if float32 holds factors of rows from `least` to `most`, and their products with the factors
 * of all tokens, as normal numbers. */
static bool holds_factors(const moq_pass *p, double least, double most) {
    const double lowest = (double)FLT_MIN, highest = (double)FLT_MAX;
    return p->held && least >= lowest && most <= highest && least * p->least >= lowest &&
           most * p->most <= highest;
}

/* True if all scales are 0 or from 2^-60 to 2^60, in integers, of which the compiler makes vectors:
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

/* True if float32 holds the output scales of rows [begin, end), zeros left out, and their products
 * with the factors of all tokens, as normal numbers. */
static bool holds_rows(const moq_pass *p, int64_t begin, int64_t end) {
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

/* Factors, bias, the one rounding. Whether float32 holds factors depends on all rows of x, so that
 * batch_invariant layers do without. */
static void store_tile(const moq_pass *p, const tile_memory *memory, const tile_place *place,
                       bool held) {
    const moq_linear_call *call = p->call;
    int64_t n = place->n, count = place->count;
    float factor[MOQ_LARGE_ROWS], bias[MOQ_LARGE_ROWS] = {0};
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
    if (!held || call->addend || call->spec->batch_invariant)
        store_wide(p, place, &store);
    else if (p->tiles->store)
        p->tiles->store(&store);
    else
        store_portable(&store);
}

/* Finds the end of the partition of row n, and its row of blocks. */
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
        blocks += divide_up(spec->partition[i], MOQ_FP8_BLOCK);
    }
    *block = blocks;
    return end;
}

/* Brings the scales of a row of blocks to where its tile reads them, unless they are there. */
static void place_blocks(const moq_pass *p, float *scales, int64_t block, tile_place *place) {
    if (place->block == block)
        return;
    memcpy(scales, (const float *)p->call->weight_scale + block * p->groups,
           (size_t)p->groups * sizeof(float));
    place->power = moq_take_power(scales, p->groups, MOQ_HIGHEST_SCALE);
    place->block = block;
}

/* Opens the tile that begins at row n and ends before `last`, no further than its row of blocks, in
 * place of one that had its memory before. */
static void place_tile(const moq_pass *p, const tile_memory *memory, int64_t n, int64_t last,
                       tile_place *place) {
    if (p->call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK) {
        int64_t block, stop = find_partition(p->call->spec, n, &block);
        last = stop < last ? stop : last;
        place_blocks(p, memory->block, block, place);
    }
    place->n = n;
    place->count = last - n < p->tile_rows ? last - n : p->tile_rows;
}

static bool take_tile_memory(const moq_pass *p, tile_memory *memory) {
    int64_t rows = round_up(p->tile_rows, p->tiles->pad_rows);
    memory->stride = round_up(p->rows, p->tiles->pad_rows);
    if (memory->stride > MOQ_STRIP_M)
        memory->stride += 16; /* a line, so that rows fall into different sets */
    size_t weight = (size_t)(rows * p->tile_stride) * p->tiles->unit;
    size_t sums = (size_t)(rows * memory->stride) * sizeof(float);
    size_t rows_of_y = (size_t)p->rows * sizeof(char *);
    size_t blocks = p->group_scales ? (size_t)(p->strip * p->groups) * sizeof(float) : 0;
    size_t values = moq_layout_is_general(p->call->spec->weight)
                        ? (size_t)round_up(p->tile_columns, MOQ_TILE_STEP) * sizeof(float)
                        : 0;
    size_t bytes = weight + (size_t)(p->strip + 1) * sums + values + rows_of_y + blocks;
    memory->weight = moq_take_scratch(MOQ_SCRATCH_TILE, bytes);
    if (!memory->weight)
        return false;
    if (p->regime == MOQ_PREFILL)
        memset(memory->weight, 0, weight); /* rows of padding are multiplied, too */
    memory->part = (float *)(memory->weight + weight);
    memory->sums = memory->part + rows * memory->stride;
    memory->values = memory->sums + p->strip * rows * memory->stride;
    memory->row = (char **)((char *)memory->values + values);
    memory->block = (float *)(memory->row + p->rows);
    return true;
}

void moq_pass_multiply_rows(void *context, int64_t begin, int64_t end) {
    moq_pass *p = context;
    tile_memory memory;
    if (!take_tile_memory(p, &memory)) {
        p->failed = 1;
        return;
    }
    tile_place places[MOQ_STRIP];
    for (int i = 0; i < MOQ_STRIP; i++)
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
        if (p->regime == MOQ_PREFILL)
            sum_fused_tile(p, &memory, places, count, &pace);
        else
            sum_decode(p, &memory, &places[0]);
        for (int64_t i = 0; i < count; i++) {
            tile_memory own = memory_of(p, &memory, i);
            double power = places[i].power * p->unit;
            store_tile(p, &own, &places[i], rows ? held : holds_factors(p, power, power));
        }
    }
}
