/* How a linear is handed to cuBLASLt (linear_cublaslt.cu): facts of a layer that the estimate, the
 * predicate and the launcher go by. */
#ifndef MOQ_CUDA_LINEAR_LINEAR_CUBLASLT_H
#define MOQ_CUDA_LINEAR_LINEAR_CUBLASLT_H

#include "core/linear.h"

/* Bytes of workspace given to the library, as NVIDIA recommends for each generation. */
static inline int64_t moq_cublaslt_memory(const moq_linear_spec *spec) {
    return spec->target.capability >= 90 ? 32 << 20 : 4 << 20;
}

/* Whether the library takes an address: a multiple of 16. */
static inline bool moq_cublaslt_takes(const void *pointer) {
    return (uintptr_t)pointer % 16 == 0;
}

/* Whether x is quantized by one scale that several fused layers share. */
static inline bool moq_cublaslt_shares_scale(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_E4M3_TENSOR && spec->partition_count > 1 &&
           spec->one_input_scale;
}

/* Whether the library multiplies with vectors of scales. */
static inline bool moq_cublaslt_has_vectors(const moq_linear_spec *spec) {
    return spec->target.capability == 90;
}

/* Rows of packed NVFP4 weights (moq_linear_folds) that are FP8 codes in the workspace at a time:
 * 128 MB of codes at most. */
static inline int64_t moq_cublaslt_folded_rows(const moq_linear_spec *spec) {
    const int64_t most = 128 << 20, n = spec->out_features;
    int64_t splits = (n * spec->in_features + most - 1) / most;
    int64_t rows = ((n + splits - 1) / splits + 255) / 256 * 256;
    return rows < n ? rows : n;
}

/* Whether codes of e2m1 are multiplied, with swizzled scales. */
static inline bool moq_cublaslt_is_fp4(const moq_linear_spec *spec) {
    return spec->weight == MOQ_WEIGHT_E2M1_SWIZZLED || moq_linear_unpacks(spec);
}

/* Rows of packed NVFP4 weights that are codes of e2m1 in the workspace at a time: 128 MB of codes
 * at most, of one partition. */
static inline int64_t moq_cublaslt_unpacked_rows(const moq_linear_spec *spec) {
    int64_t most = (256 << 20) / spec->in_features / 128 * 128, rows = 0;
    for (int i = 0; i < spec->partition_count; i++)
        rows = spec->partition[i] > rows ? spec->partition[i] : rows;
    most = most < 128 ? 128 : most;
    return rows < most ? rows : most;
}

/* Whether the library multiplies partition by partition: where each partition has a scale of its
 * own for all of x, or begins a block of scales where a fused matrix would not. Partitions are then
 * multiples of 16 rows. */
static inline bool moq_cublaslt_by_partition(const moq_linear_spec *spec) {
    if (moq_cublaslt_is_fp4(spec))
        return spec->partition_count > 1;
    if (spec->weight != MOQ_WEIGHT_E4M3_BLOCK)
        return spec->input == MOQ_INPUT_E4M3_TENSOR && spec->partition_count > 1 &&
               !spec->one_input_scale;
    for (int i = 0; i + 1 < spec->partition_count; i++)
        if (spec->partition[i] % 128 != 0)
            return true;
    return false;
}

#endif
