/* Packed NVFP4 weights (core/nvfp4_packed.h) as FP8 ones on the device; sm_90a. */
#ifndef MOQ_CUDA_TENSOR_NVFP4_UNPACK_H
#define MOQ_CUDA_TENSOR_NVFP4_UNPACK_H

#include "core/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const uint8_t *weight; /* packed units of all rows */
    const float *fold_scale, *output_scale;
    int64_t columns;     /* a multiple of 16 */
    int64_t first, rows; /* rows to unpack; `first` is a multiple of 16 */
    uint8_t *codes;      /* [rows, columns] */
    float *factor;       /* [rows]: factors of outputs of these codes */
    /* True if the kernel before in the stream was launched without PDL and touches nothing of this:
     * both may run at once. */
    bool pdl;
    void *stream; /* cudaStream_t */
} moq_cuda_unpack;

moq_status moq_cuda_nvfp4_unpack(const moq_cuda_unpack *u, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
