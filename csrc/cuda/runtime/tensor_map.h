/* Tensor maps: descriptions of matrices in device memory for the bulk tensor copy engine of sm_90.
 */
#ifndef MOQ_CUDA_RUNTIME_TENSOR_MAP_H
#define MOQ_CUDA_RUNTIME_TENSOR_MAP_H

#include "core/status.h"

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Describes a row-major matrix of bytes [rows, columns] as [columns / 128, rows, 128], in boxes of
 * [box_blocks, box_rows, 128] that arrive in the 128-byte swizzle; bytes outside read as 0. The
 * address, `stride` and columns are multiples of 16, 16 and 128. */
moq_status moq_tensor_map_blocks(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                 int64_t stride, uint32_t box_rows, uint32_t box_blocks,
                                 moq_err *err);

/* Describes a row-major matrix of bytes [rows, columns] in boxes of [box_rows, 128] that arrive in
 * the 128-byte swizzle; bytes outside read as 0. The address and `stride` are multiples of 16. */
moq_status moq_tensor_map_rows(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                               int64_t stride, uint32_t box_rows, moq_err *err);

/* Describes a matrix like moq_tensor_map_rows in boxes of [64, 128] that have the even rows of each
 * 16 first. Coordinates of a box are its column, twice 0, and its row divided by 16; `rows` is a
 * multiple of 16. */
moq_status moq_tensor_map_pairs(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                int64_t stride, moq_err *err);

/* Describes contiguous rows of 8-byte words, an even number each, in boxes of [box_rows, box_words]
 * that arrive row after row; words outside read as 0. The address is a multiple of 16. */
moq_status moq_tensor_map_words(CUtensorMap *map, const void *data, int64_t rows, int64_t words,
                                uint32_t box_rows, uint32_t box_words, moq_err *err);

/* Returns whether a matrix of 16-bit values, with rows `stride` values apart, can have a map. */
static inline bool moq_tensor_map_suits(const void *data, int64_t stride) {
    return ((uintptr_t)data | (uintptr_t)(stride * 2)) % 16 == 0;
}

#endif
