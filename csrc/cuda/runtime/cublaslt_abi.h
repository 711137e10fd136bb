/* The part of cuBLASLt's C interface that moqext uses, declared here, so that no header of the
 * library is needed to build.
 *
 * Every number and function stands in NVIDIA's cublasLt.h, cublas_api.h (cublasStatus_t,
 * cublasOperation_t, cublasComputeType_t) or library_types.h (cudaDataType) of CUDA 13.0 under the
 * same name, numbers behind MOQ_, and is described in "cuBLAS, Using the cuBLASLt API". Within a
 * major version, numbers keep their meaning and functions their parameters; the version is checked
 * before use. tests/cuda/test_cublaslt_abi.py compares this file with the headers, and the sizes
 * with the library, where there are some.
 *
 * Types: an enumeration is passed as an int32_t, as C passes it (they have four bytes); a pointer
 * to an opaque type as a void pointer. */
#ifndef MOQ_CUDA_RUNTIME_CUBLASLT_ABI_H
#define MOQ_CUDA_RUNTIME_CUBLASLT_ABI_H

#include <stddef.h>
#include <stdint.h>

/* Versions of cublasLtGetVersion: 10000 * major + 100 * minor + patch. Everything used exists since
 * 12.9; another major version may have other numbers and sizes. */
#define MOQ_CUBLASLT_MAJOR  13
#define MOQ_CUBLASLT_SONAME "libcublasLt.so.13"

#define MOQ_CUBLASLT_NUMBERS(X)                                                                    \
    /* cublasStatus_t, cublasOperation_t, cublasComputeType_t */                                   \
    X(CUBLAS_STATUS_SUCCESS, 0)                                                                    \
    X(CUBLAS_OP_T, 1)                                                                              \
    X(CUBLAS_COMPUTE_32F, 68)                                                                      \
    X(CUBLAS_COMPUTE_32I, 72)                                                                      \
    /* cudaDataType */                                                                             \
    X(CUDA_R_32F, 0)                                                                               \
    X(CUDA_R_16F, 2)                                                                               \
    X(CUDA_R_8I, 3)                                                                                \
    X(CUDA_R_32I, 10)                                                                              \
    X(CUDA_R_16BF, 14)                                                                             \
    X(CUDA_R_8F_E4M3, 28)                                                                          \
    X(CUDA_R_4F_E2M1, 33)                                                                          \
    /* cublasLtMatmulDescAttributes_t, and the type of each attribute: */                          \
    X(CUBLASLT_MATMUL_DESC_POINTER_MODE, 2)     /* int32_t, of alpha and beta */                   \
    X(CUBLASLT_MATMUL_DESC_TRANSA, 3)           /* int32_t, cublasOperation_t */                   \
    X(CUBLASLT_MATMUL_DESC_EPILOGUE, 7)         /* uint32_t, cublasLtEpilogue_t */                 \
    X(CUBLASLT_MATMUL_DESC_BIAS_POINTER, 8)     /* a pointer to memory of the device */            \
    X(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, 17) /* a pointer to memory of the device */            \
    X(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, 18) /* a pointer to memory of the device */            \
    X(CUBLASLT_MATMUL_DESC_FAST_ACCUM, 25)      /* int8_t */                                       \
    X(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, 26)  /* int32_t, cudaDataType */                        \
    X(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, 31)    /* int32_t, cublasLtMatmulMatrixScale_t */         \
    X(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, 32)    /* int32_t, cublasLtMatmulMatrixScale_t */         \
    /* cublasLtPointerMode_t, cublasLtEpilogue_t, cublasLtMatmulMatrixScale_t */                   \
    X(CUBLASLT_POINTER_MODE_DEVICE, 1)                                                             \
    X(CUBLASLT_EPILOGUE_BIAS, 4)                                                                   \
    X(CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, 0)                                                  \
    X(CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3, 1)                                                 \
    X(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, 3)                                               \
    X(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, 4)                                                  \
    X(CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, 5)                                              \
    /* cublasLtMatmulPreferenceAttributes_t, and the type of each attribute: */                    \
    X(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 1)   /* uint64_t */                                \
    X(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 3) /* uint32_t */                                \
    X(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 5) /* uint32_t, and so are the next three */     \
    X(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 6)                                               \
    X(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 7)                                               \
    X(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 8)                                               \
    /* cublasLtReductionScheme_t */                                                                \
    X(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 2)

enum {
#define MOQ_CUBLASLT_NUMBER(name, value) MOQ_##name = value,
    MOQ_CUBLASLT_NUMBERS(MOQ_CUBLASLT_NUMBER)
#undef MOQ_CUBLASLT_NUMBER
};

/* Opaque structures that the caller allocates and cublasLt*Init_internal fills. The library is told
 * their size and uses no more; newer headers have larger ones, but the library accepts the sizes of
 * 13.0. */
typedef struct {
    uint64_t data[32]; /* cublasLtMatmulDescOpaque_t */
} moq_cublaslt_product;

typedef struct {
    uint64_t data[8]; /* cublasLtMatrixLayoutOpaque_t; 14 in the header of 13.10 */
} moq_cublaslt_matrix;

typedef struct {
    uint64_t data[8]; /* cublasLtMatmulPreferenceOpaque_t; 12 in the header of 13.10 */
} moq_cublaslt_preference;

typedef struct {
    uint64_t data[8]; /* cublasLtMatmulAlgo_t */
} moq_cublaslt_algorithm;

/* cublasLtMatmulHeuristicResult_t: the library writes an array of them, so their size is exact. */
typedef struct {
    moq_cublaslt_algorithm algorithm;
    size_t workspace_bytes;
    int32_t state; /* cublasStatus_t; the rest is valid if it is CUBLAS_STATUS_SUCCESS */
    float waves;
    int32_t reserved[4];
} moq_cublaslt_proposal;

/* List of the library's functions that are used: name, result, parameters. `handle` is a
 * cublasLtHandle_t, `stream` a cudaStream_t. */
#define MOQ_CUBLASLT_FUNCTIONS(X)                                                                  \
    X(cublasLtCreate, int32_t, (void **handle))                                                    \
    X(cublasLtGetStatusName, const char *, (int32_t status))                                       \
    X(cublasLtGetVersion, size_t, (void))                                                          \
    X(cublasLtMatmul, int32_t,                                                                     \
      (void *handle, moq_cublaslt_product *product, const void *alpha, const void *a,              \
       moq_cublaslt_matrix *a_matrix, const void *b, moq_cublaslt_matrix *b_matrix,                \
       const void *beta, const void *c, moq_cublaslt_matrix *c_matrix, void *d,                    \
       moq_cublaslt_matrix *d_matrix, const moq_cublaslt_algorithm *algorithm, void *workspace,    \
       size_t workspace_bytes, void *stream))                                                      \
    X(cublasLtMatmulAlgoGetHeuristic, int32_t,                                                     \
      (void *handle, moq_cublaslt_product *product, moq_cublaslt_matrix *a,                        \
       moq_cublaslt_matrix *b, moq_cublaslt_matrix *c, moq_cublaslt_matrix *d,                     \
       moq_cublaslt_preference *preference, int wanted, moq_cublaslt_proposal *proposal,           \
       int *found))                                                                                \
    X(cublasLtMatmulDescInit_internal, int32_t,                                                    \
      (moq_cublaslt_product * product, size_t size, int32_t compute_type, int32_t scale_type))     \
    X(cublasLtMatmulDescSetAttribute, int32_t,                                                     \
      (moq_cublaslt_product * product, int32_t which, const void *value, size_t size))             \
    X(cublasLtMatmulPreferenceInit_internal, int32_t,                                              \
      (moq_cublaslt_preference * preference, size_t size))                                         \
    X(cublasLtMatmulPreferenceSetAttribute, int32_t,                                               \
      (moq_cublaslt_preference * preference, int32_t which, const void *value, size_t size))       \
    X(cublasLtMatrixLayoutInit_internal, int32_t,                                                  \
      (moq_cublaslt_matrix * matrix, size_t size, int32_t type, uint64_t rows, uint64_t columns,   \
       int64_t stride))

/* Functions of an open library. */
typedef struct {
#define MOQ_CUBLASLT_MEMBER(name, result, parameters) result(*name) parameters;
    MOQ_CUBLASLT_FUNCTIONS(MOQ_CUBLASLT_MEMBER)
#undef MOQ_CUBLASLT_MEMBER
} moq_cublaslt_api;

#endif
