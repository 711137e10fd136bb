/* Tensor maps: see tensor_map.h. The driver is asked by entry point, never linked. */
#include "cuda/tensor_map.h"

#include <cuda_runtime.h>
#include <cudaTypedefs.h>

static PFN_cuTensorMapEncodeTiled_v12000 found; /* the same for every thread that looks */

static PFN_cuTensorMapEncodeTiled_v12000 encoder(void) {
    void *entry = NULL;
    cudaDriverEntryPointQueryResult result;
    PFN_cuTensorMapEncodeTiled_v12000 encode = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    if (!encode && cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &result) == cudaSuccess) {
        encode = (PFN_cuTensorMapEncodeTiled_v12000)entry;
        __atomic_store_n(&found, encode, __ATOMIC_RELEASE);
    }
    return encode;
}

/* Boxes of bytes in the 128-byte swizzle; what lies outside reads as 0. */
static moq_status encode(CUtensorMap *map, const void *data, uint32_t dims,
                         const cuuint64_t *extent, const cuuint64_t *stride, const cuuint32_t *box,
                         moq_err *err) {
    cuuint32_t step[3] = {1, 1, 1};
    PFN_cuTensorMapEncodeTiled_v12000 call = encoder();
    if (!call)
        return moq_fail(err, MOQ_ERR_INTERNAL, "the CUDA driver has no cuTensorMapEncodeTiled");
    CUresult result = call(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, dims, (void *)data, extent, stride,
                           box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return moq_fail(err, MOQ_ERR_INTERNAL, "cuTensorMapEncodeTiled failed with %d",
                        (int)result);
    return MOQ_OK;
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
