/* The swizzled order of block scales, in which block-scaled matrix instructions read them: tiles of
 * 128 rows and 4 columns, 512 bytes each, one after the other along a row of tiles. In a tile the
 * 16 bytes of rows m, m + 32, m + 64 and m + 96 lie together, four of each row. */
#ifndef MOQ_CORE_SWIZZLE_H
#define MOQ_CORE_SWIZZLE_H

#include <assert.h>
#include <stdint.h>

#define MOQ_SWIZZLE_ROWS    128
#define MOQ_SWIZZLE_COLUMNS 4
#define MOQ_SWIZZLE_BYTES   (MOQ_SWIZZLE_ROWS * MOQ_SWIZZLE_COLUMNS) /* of a tile */

static_assert(MOQ_SWIZZLE_ROWS == 4 * 32 && MOQ_SWIZZLE_BYTES == 32 * 16,
              "16 bytes of every 32nd row follow each other");

#ifdef __CUDACC__
#define MOQ_SWIZZLE_INLINE static __host__ __device__ __forceinline__
#else
#define MOQ_SWIZZLE_INLINE static inline
#endif

/* Tiles that cover so many rows or columns. */
MOQ_SWIZZLE_INLINE int64_t moq_swizzle_down(int64_t rows) {
    return (rows + MOQ_SWIZZLE_ROWS - 1) / MOQ_SWIZZLE_ROWS;
}

MOQ_SWIZZLE_INLINE int64_t moq_swizzle_across(int64_t columns) {
    return (columns + MOQ_SWIZZLE_COLUMNS - 1) / MOQ_SWIZZLE_COLUMNS;
}

/* The place of the scale of a row and column, with `across` tiles in a row of them. */
MOQ_SWIZZLE_INLINE int64_t moq_swizzle_at(int64_t row, int64_t column, int64_t across) {
    int64_t tile = row / MOQ_SWIZZLE_ROWS * across + column / MOQ_SWIZZLE_COLUMNS;
    return tile * MOQ_SWIZZLE_BYTES + row % 32 * 16 + row % MOQ_SWIZZLE_ROWS / 32 * 4 +
           column % MOQ_SWIZZLE_COLUMNS;
}

#endif
