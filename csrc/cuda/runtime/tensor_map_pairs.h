/* A tensor map of rows in pairs: see tensor_map.h. */
#ifndef MOQ_CUDA_RUNTIME_TENSOR_MAP_PAIRS_H
#define MOQ_CUDA_RUNTIME_TENSOR_MAP_PAIRS_H

#include "cuda/runtime/tensor_map.h"

/* moq_tensor_map_rows in boxes of [64, 128], of whose each 16 rows the even ones come first. The
 * coordinates of a box are its column, twice 0, and its row divided by 16; `rows` are a multiple of
 * that. */
moq_status moq_tensor_map_pairs(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                int64_t stride, moq_err *err);

#endif
