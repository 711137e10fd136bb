/* Tensor maps: see tensor_map.h. */
#include "cuda/runtime/tensor_map.h"

#include "cuda/runtime/driver.h"

/* Makes a map of boxes; elements outside read as 0. */
static moq_status encode_boxes(CUtensorMap *map, CUtensorMapDataType type,
                               CUtensorMapSwizzle swizzle, const void *data, uint32_t dims,
                               const cuuint64_t *extent, const cuuint64_t *stride,
                               const cuuint32_t *box, moq_err *err) {
    cuuint32_t step[4] = {1, 1, 1, 1};
    const moq_driver *driver;
    MOQ_TRY(moq_cuda_find_driver(&driver, err));
    return moq_cuda_check_driver(driver->encode_tiled(map, type, dims, (void *)data, extent, stride,
                                                      box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                                 "cuTensorMapEncodeTiled", err);
}

/* Makes a map of boxes of bytes in the 128-byte swizzle. */
static moq_status encode(CUtensorMap *map, const void *data, uint32_t dims,
                         const cuuint64_t *extent, const cuuint64_t *stride, const cuuint32_t *box,
                         moq_err *err) {
    return encode_boxes(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, data, dims,
                        extent, stride, box, err);
}

moq_status moq_tensor_map_blocks(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                 int64_t stride, uint32_t box_rows, uint32_t box_blocks,
                                 moq_err *err) {
    cuuint64_t extent[3] = {128, (cuuint64_t)rows, (cuuint64_t)columns / 128};
    cuuint64_t bytes[2] = {(cuuint64_t)stride, 128};
    cuuint32_t box[3] = {128, box_rows, box_blocks};
    return encode(map, data, 3, extent, bytes, box, err);
}

moq_status moq_tensor_map_rows(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                               int64_t stride, uint32_t box_rows, moq_err *err) {
    cuuint64_t extent[2] = {(cuuint64_t)columns, (cuuint64_t)rows};
    cuuint64_t bytes[1] = {(cuuint64_t)stride};
    cuuint32_t box[2] = {128, box_rows};
    return encode(map, data, 2, extent, bytes, box, err);
}

moq_status moq_tensor_map_pairs(CUtensorMap *map, const void *data, int64_t rows, int64_t columns,
                                int64_t stride, moq_err *err) {
    cuuint64_t extent[4] = {(cuuint64_t)columns, 8, 2, (cuuint64_t)rows / 16};
    cuuint64_t bytes[3] = {(cuuint64_t)stride * 2, (cuuint64_t)stride, (cuuint64_t)stride * 16};
    cuuint32_t box[4] = {128, 8, 2, 4};
    return encode(map, data, 4, extent, bytes, box, err);
}

moq_status moq_tensor_map_words(CUtensorMap *map, const void *data, int64_t rows, int64_t words,
                                uint32_t box_rows, uint32_t box_words, moq_err *err) {
    cuuint64_t extent[2] = {(cuuint64_t)words, (cuuint64_t)rows};
    cuuint64_t bytes[1] = {(cuuint64_t)words * 8};
    cuuint32_t box[2] = {box_words, box_rows};
    return encode_boxes(map, CU_TENSOR_MAP_DATA_TYPE_UINT64, CU_TENSOR_MAP_SWIZZLE_NONE, data, 2,
                        extent, bytes, box, err);
}
