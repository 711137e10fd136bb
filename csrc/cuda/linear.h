/* The linear kernels of the CUDA floor. Each takes a call that was checked, on the device of its
 * spec; what a kernel cannot do is said by its predicate in ops/linear_kernels.c, from the facts
 * given here.
 *
 * x and y are matrices [m, K] and [m, N] of contiguous rows; see moq_linear_call. */
#ifndef MOQ_CUDA_LINEAR_H
#define MOQ_CUDA_LINEAR_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FP8 weights, x and y of 16 bits, up to MOQ_FP8_DECODE_TOKENS rows, K a multiple of 128; sm_90a.
 */
#define MOQ_FP8_DECODE_TOKENS 16
moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err);

/* FP8 weights, x and y of 16 bits, up to MOQ_FP8_GEMM_TOKENS rows, K a multiple of 16; sm_90a. The
 * estimate is of a whole call; variants are shapes of tiles. */
#define MOQ_FP8_GEMM_TOKENS (1 << 24)
moq_status moq_cuda_fp8_gemm(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_fp8_gemm_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights as they are, x and y of 16 bits, up to MOQ_NVFP4_GEMM_TOKENS rows and
 * MOQ_NVFP4_GEMM_OUTPUTS outputs; sm_90a. Variants are shapes of tiles. */
#define MOQ_NVFP4_GEMM_TOKENS  (1 << 22)
#define MOQ_NVFP4_GEMM_OUTPUTS (1ll << 40) /* tiles are counted in 32 bits */
moq_status moq_cuda_nvfp4_gemm(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_gemm_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights, exact, x and y of 16 bits, any number of rows up to MOQ_NVFP4_WIDE_TOKENS,
 * K a multiple of 16; sm_90a. For hundreds of rows and more. */
#define MOQ_NVFP4_WIDE_TOKENS (1 << 24)
moq_status moq_cuda_nvfp4_wide(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_wide_workspace(const moq_linear_call *call);

/* The same weights as FP8 ones: x quantized by token before, block scales folded into codes on the
 * way, K up to MOQ_NVFP4_FP8_COLUMNS. Variants are shapes of tiles. */
#define MOQ_NVFP4_FP8_COLUMNS (1 << 16)
moq_status moq_cuda_nvfp4_fp8(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_fp8_workspace(const moq_linear_call *call);

/* The same for up to some hundreds of rows; variants are shapes of tiles. */
moq_status moq_cuda_nvfp4_fp8_gemm(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_fp8_gemm_workspace(const moq_linear_call *call);

/* Every layer and any number of rows, on plain CUDA cores; sm_80 and up. */
moq_status moq_cuda_simt_linear(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_simt_workspace(const moq_linear_call *call);

/* FP8 weights, any number of rows, K a multiple of 16 and N too, or NVFP4 ones with swizzled
 * scales, K a multiple of 32 (sm_100 and up): x quantized, then cuBLASLt. Its variants are the
 * algorithms that the library proposes for the call, in two ways where scales are vectors. */
int64_t moq_cublaslt_workspace(const moq_linear_call *call);
moq_status moq_cublaslt_linear(const moq_linear_call *call, moq_err *err);
uint64_t moq_cublaslt_variants(const moq_linear_call *call);

/* Whether x is quantized by one scale that several fused layers share. */
static inline bool moq_cublaslt_shares_scale(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_E4M3_TENSOR && spec->partition_count > 1 &&
           spec->one_input_scale;
}

/* Whether the library multiplies with vectors of scales. */
static inline bool moq_cublaslt_has_vectors(const moq_linear_spec *spec) {
    return spec->target.capability == 90;
}

/* Of packed NVFP4 weights (moq_linear_folds), the rows that are FP8 codes in the workspace at a
 * time: 128 MB of them at most. */
static inline int64_t moq_cublaslt_folded_rows(const moq_linear_spec *spec) {
    const int64_t most = 128 << 20, n = spec->out_features;
    int64_t parts = (n * spec->in_features + most - 1) / most;
    int64_t rows = ((n + parts - 1) / parts + 255) / 256 * 256;
    return rows < n ? rows : n;
}

/* Whether it multiplies partition by partition: where each has a scale of its own for all of x, or
 * begins a block of scales where a fused matrix would not. Each is then a multiple of 16. */
static inline bool moq_cublaslt_by_partition(const moq_linear_spec *spec) {
    if (spec->weight == MOQ_WEIGHT_E2M1_SWIZZLED)
        return spec->partition_count > 1;
    if (spec->weight != MOQ_WEIGHT_E4M3_BLOCK)
        return spec->input == MOQ_INPUT_E4M3_TENSOR && spec->partition_count > 1 &&
               !spec->one_input_scale;
    for (int i = 0; i + 1 < spec->partition_count; i++)
        if (spec->partition[i] % 128 != 0)
            return true;
    return false;
}

/* FP8 weights and any number of rows, K a multiple of 16: x quantized, then products of warps, of
 * the codes as fp16 on sm_80 and up, or as they are on sm_89 and up. */
moq_status moq_cuda_mma_fp8_as_f16(const moq_linear_call *call, moq_err *err);
moq_status moq_cuda_mma_fp8_as_e4m3(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_mma_fp8_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights as they are, x and y of 16 bits, up to MOQ_NVFP4_DECODE_TOKENS rows; sm_90a.
 * Variants are ways to share it out. */
#define MOQ_NVFP4_DECODE_TOKENS 16
moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err);

/* Packed NVFP4 weights as they are, x and y of 16 bits, any number of rows; sm_80 and up. */
moq_status moq_cuda_mma_nvfp4(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_mma_nvfp4_workspace(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
