/* NVFP4 weights to the packed layout (core/nvfp4_packed.h) and back on the device. Callers have
 * validated shapes. */
#ifndef MOQ_CUDA_TENSOR_CUDA_NVFP4_PACK_H
#define MOQ_CUDA_TENSOR_CUDA_NVFP4_PACK_H

#include "core/weight.h"
#include "cuda/tensor/cuda_prepare.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a matrix that lie together, and the step to the next expert's. */
typedef struct {
    const uint8_t *codes; /* [rows, columns / 2] */
    int64_t code_stride;  /* bytes from row to row */
    int64_t code_step;    /* bytes from expert to expert */
    const uint8_t *scales;
    int64_t scale_stride, scale_step;
    int64_t rows;
    /* weight_scale_2; 0: all of these rows are zeros, whatever their codes. */
    const void *factor_at; /* its place on the device, float32 or 16 bits; NULL: */
    moq_dtype factor_dtype;
    float factor;
} moq_pack_source;

typedef struct {
    int64_t experts;               /* matrices of a stack, or 1 */
    int64_t rows, columns;         /* sizes of a matrix; columns is a multiple of group */
    int32_t group;                 /* 16 or 32 columns have a scale */
    int32_t source_count;          /* at most MOQ_MAX_PARTITIONS */
    const moq_pack_source *source; /* [source_count] on the host: their rows follow each other */
    int32_t factor_step;           /* values of factor_at from expert to expert */
    bool checked;                  /* the factors have been checked and reported */
    const float *row_factor;       /* [experts, rows], multiplies the factors of sources; or NULL */
    uint8_t *out;        /* units of all experts, at an address that is a multiple of 16 */
    float *output_scale; /* [experts, rows]: the factor of the row; or NULL */
    float *fold_scale;   /* [experts, rows], as moq_weight_folds has it; or NULL */
    /* Findings for bad scales of groups and bad factors; with one of them nothing is written. NULL:
     * no check. */
    moq_findings *found;
    moq_findings *unless; /* as in moq_code_copy; bad factors are reported there, too */
} moq_nvfp4_pack;

moq_status moq_cuda_pack_nvfp4(const moq_nvfp4_pack *pack, void *stream, moq_err *err);

typedef struct {
    const uint8_t *packed; /* at an address that is a multiple of 16 */
    int64_t experts;       /* matrices of a stack, or 1 */
    int64_t rows, columns; /* sizes of a matrix */
    int32_t group;
    uint8_t *codes;  /* [experts, rows, columns / 2] */
    uint8_t *scales; /* [experts, rows, columns / group] */
    bool swizzled;   /* scales of one matrix, for 16 columns, in the order of core/swizzle.h; what
                        pads it is not written */
} moq_nvfp4_unpack;

moq_status moq_cuda_unpack_nvfp4(const moq_nvfp4_unpack *unpack, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
