/* Tiles multiplied by dot products: the source that each instruction set includes once.
 *
 * The including file defines, before:
 *   unit_t, vec_t, acc_t     a decoded value, a vector of them, a vector of float32 sums;
 *   STEP                     values in a vec_t;
 *   acc_zero() load(p) muladd(acc, a, b) reduce(acc);
 *   WIDE, NARROW             rows of x in a register tile, and for what is left over;
 *   TALL                     rows of the weight in the tile of a single row of x
 * A register tile of N x M keeps N * M sums in registers: each loaded vector is used N or M times.
 */
#include "cpu/cpu_linear.h"

static inline __attribute__((always_inline)) void
multiply_block(const moq_tile *t, int64_t n, int64_t m, const int rows, const int columns) {
    const unit_t *w = (const unit_t *)t->weight + n * t->weight_stride;
    const unit_t *x = (const unit_t *)t->panel + m * t->panel_stride + t->first;
    acc_t acc[8][8];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            acc[i][j] = acc_zero();
    }
    for (int64_t k = 0; k < t->k; k += STEP) {
        vec_t xs[8];
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            xs[j] = load(x + j * t->panel_stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vec_t ws = load(w + i * t->weight_stride + k);
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++)
                acc[i][j] = muladd(acc[i][j], ws, xs[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            float *sum = &t->sums[(n + i) * t->sums_stride + m + j];
            *sum = (t->fresh ? 0 : *sum) + reduce(acc[i][j]);
        }
    }
}

static inline __attribute__((always_inline)) void
multiply_columns(const moq_tile *t, int64_t m, const int columns, const int tall) {
    int64_t n = 0;
    for (; n + tall <= t->rows; n += tall)
        multiply_block(t, n, m, tall, columns);
    for (; n < t->rows; n++)
        multiply_block(t, n, m, 1, columns);
}

static void multiply(const moq_tile *t) {
    int64_t m = 0;
    for (; m + WIDE <= t->m; m += WIDE)
        multiply_columns(t, m, WIDE, 4);
    for (; m + NARROW <= t->m; m += NARROW)
        multiply_columns(t, m, NARROW, 4);
    for (; m < t->m; m++)
        multiply_columns(t, m, 1, TALL);
}
