/* How the kernels of experts for any chip go about a call, and estimated seconds of it
 * (docs/lab/any-chip.md): weights of the experts that have rows read, or tiles of them multiplied,
 * and what lies between. */
#include "cuda/choice/chip.h"
#include "cuda/choice/choice_moe.h"
#include "cuda/choice/routing.h"

#include <math.h>

enum { MOST_TILES = 5 };

/* Rows of a tile, and products a second that tiles have which are full of them. */
typedef struct {
    int rows;
    double rate;
} tile;

/* A kernel's pace, as measured on H200. */
typedef struct {
    double steps;   /* seconds of all launches */
    double read;    /* weights a second, from memory */
    double between; /* bytes a second of u, d and the rows that become them */
    double fill;    /* columns that could be multiplied until the first ones have come */
    tile tiles[MOST_TILES];
} pace;

#define BYTES_BETWEEN 6.0 /* of each value of u and d */

/* ---- rows ---- */

/* Tiles of an expert that has so many rows in the mean: one if few experts have more rows than
 * that, else the last one is half empty. */
static double tiles_of(double rows, int most) {
    return rows + sqrt(rows) <= most ? 1 : rows / most + 0.5;
}

static double tile_seconds(double rows, const tile *t) {
    return tiles_of(rows, t->rows) * t->rows / t->rate;
}

static const tile *best_tile(double rows, const pace *of) {
    const tile *best = of->tiles;
    for (int i = 1; i < MOST_TILES && of->tiles[i].rows; i++)
        if (tile_seconds(rows, &of->tiles[i]) < tile_seconds(rows, best))
            best = &of->tiles[i];
    return best;
}

/* ---- seconds ---- */

/* Of one product of all active experts. */
static double product_seconds(const moq_linear_spec *layer, double active, double rows,
                              const pace *of) {
    double n = (double)layer->out_features, k = (double)layer->in_features;
    double read = active * n * k / moq_memory_rate(&layer->target, of->read);
    double multiplied = active * n * (k + of->fill) * tile_seconds(rows, best_tile(rows, of)) /
                        moq_matrix_rate(&layer->target, 1);
    return read > multiplied ? read : multiplied;
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, const pace *of) {
    double slots = moq_expected_slots(spec, tokens), active = moq_active_experts(spec, tokens);
    double values = (double)(spec->w13.out_features + spec->w2.out_features);
    double rows = fmax(1, slots / active);
    return of->steps +
           BYTES_BETWEEN * slots * values / moq_memory_rate(&spec->w13.target, of->between) +
           product_seconds(&spec->w13, active, rows, of) +
           product_seconds(&spec->w2, active, rows, of);
}

/* ---- kernels ---- */

#define PACKED 0.5625 /* bytes of a weight */

static const pace SIMT = {20e-6, 1e12, 3e12, 0, {{8, 1e13}}};
static const pace FP8_AS_F16 = {
    30e-6, 2.56e12, 5.3e12, 460, {{16, 6.1e13}, {32, 7.3e13}, {64, 6.8e13}, {128, 1.05e14}}};
static const pace FP8_AS_E4M3 = {
    23.5e-6, 3.46e12, 6.7e12, 850, {{16, 8.8e13}, {32, 1.09e14}, {64, 1.06e14}, {128, 1.55e14}}};
static const pace NVFP4 = {
    23.5e-6,
    2.54e12 / PACKED,
    6.7e12,
    590,
    {{8, 6.4e13}, {16, 7.4e13}, {32, 1.54e14}, {64, 1.95e14}, {128, 1.95e14}}};
static const pace NVFP4_FOLDED = {
    35e-6,
    1.38e12 / PACKED,
    4.3e12,
    850,
    {{8, 7.1e13}, {16, 7.1e13}, {32, 1.36e14}, {64, 1.6e14}, {128, 1.76e14}}};

#define TILE_ROWS(name, of)                                                                        \
    int moq_moe_##name##_tile_rows(double rows) {                                                  \
        return best_tile(rows, &of)->rows;                                                         \
    }

TILE_ROWS(mma_fp8_as_f16, FP8_AS_F16)
TILE_ROWS(mma_fp8_as_e4m3, FP8_AS_E4M3)
TILE_ROWS(mma_nvfp4, NVFP4)
TILE_ROWS(mma_nvfp4_folded, NVFP4_FOLDED)

double moq_cuda_moe_simt_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double steps = (double)(spec->w13.in_features + spec->w2.in_features) / 512;
    return 1e-6 * steps + seconds(spec, tokens, &SIMT);
}

double moq_cuda_moe_mma_fp8_as_f16_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, &FP8_AS_F16);
}

double moq_cuda_moe_mma_fp8_as_e4m3_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, &FP8_AS_E4M3);
}

double moq_cuda_moe_mma_nvfp4_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, &NVFP4);
}

double moq_cuda_moe_mma_nvfp4_folded_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, &NVFP4_FOLDED);
}
