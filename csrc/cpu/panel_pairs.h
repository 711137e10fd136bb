/* Panels of bfloat16 in which the pairs of 16 rows of x stand side by side, as the products of both
 * bfloat16 kernels read them. Include it only from files compiled for AVX-512. */
#ifndef MOQ_CPU_PANEL_PAIRS_H
#define MOQ_CPU_PANEL_PAIRS_H

#include "cpu/cpu_linear.h"
#include "cpu/store_avx512.h"

enum { MOQ_PAIRS_ROWS = 16, MOQ_PAIRS_DEPTH = 32 }; /* of a block that is transposed at once */

/* The columns of a tile lie together, in blocks of 16 rows, so that a tile reads one piece of
 * memory; within a block pair (k, k + 1) of row m is place m % 16 of pair k / 2. 16 x 16 pairs at a
 * time are transposed. Rows come row-major, with rows of zeros up to a multiple of 16. */
static void arrange_pairs(const moq_arranging *a, int64_t begin, int64_t end, int64_t first,
                          int64_t last) {
    for (int64_t m = begin; m < end; m += MOQ_PAIRS_ROWS) {
        const uint16_t *in = (const uint16_t *)a->rows + m * a->padded;
        for (int64_t k = first; k < last; k += MOQ_PAIRS_DEPTH) {
            int64_t start = k / a->columns * a->columns, left = a->padded - start;
            uint16_t *out = (uint16_t *)a->panel + start * a->panel_rows +
                            m * (left < a->columns ? left : a->columns) +
                            (k - start) * MOQ_PAIRS_ROWS;
            __m512 tile[MOQ_PAIRS_ROWS];
            for (int i = 0; i < MOQ_PAIRS_ROWS; i++)
                tile[i] = _mm512_loadu_ps((const float *)(in + i * a->padded + k));
            transpose_16x16(tile);
            for (int i = 0; i < MOQ_PAIRS_ROWS; i++)
                _mm512_storeu_ps((float *)(out + i * MOQ_PAIRS_DEPTH), tile[i]);
        }
    }
}

/* The beginning of the block of rows [m, m + 16) in the columns of a tile. */
static inline const uint16_t *pairs_of_tile(const moq_tile *t, int64_t m) {
    return (const uint16_t *)t->panel + t->first * t->panel_rows + m * t->k;
}

#endif
