/* Linear kernels of the CUDA floor. Each takes a call that was checked, on the device of its spec;
 * its predicate in ops/linear_kernels.c says what it cannot do, by the limits of choice/limits.h.
 * Variants of a kernel are its configs (choice/choice.h). Neither a kernel nor its workspace
 * chooses one: the call carries the config that was found for its number of rows
 * (core/kernel_config.h).
 *
 * x and y are matrices [m, K] and [m, N] of contiguous rows; see moq_linear_call. A workspace
 * function returns the bytes that the call needs on the device. */
#ifndef MOQ_CUDA_LINEAR_CUDA_LINEAR_H
#define MOQ_CUDA_LINEAR_CUDA_LINEAR_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Hopper (sm_90a), x and y of 16 bits ---- */

/* FP8 weights, decode: up to 16 tokens, K a multiple of 128. */
moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err);

/* FP8 weights, medium and prefill, K a multiple of 16. */
moq_status moq_cuda_fp8_prefill(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_fp8_prefill_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights, exact, decode: up to 16 tokens. */
moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err);

/* Packed NVFP4 weights, exact, medium: best at dozens up to a few hundred tokens. */
moq_status moq_cuda_nvfp4_medium(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_medium_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights, exact, prefill, K a multiple of 16. */
moq_status moq_cuda_nvfp4_prefill(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_prefill_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights multiplied as FP8 codes, medium: x is quantized by token before the kernel,
 * block scales are folded into the codes within. */
moq_status moq_cuda_nvfp4_fp8_medium(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_fp8_medium_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights multiplied as FP8 codes, prefill. */
moq_status moq_cuda_nvfp4_fp8_prefill(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_nvfp4_fp8_prefill_workspace(const moq_linear_call *call);

/* ---- other chips, any number of tokens ---- */

/* Weights of every layer, on plain CUDA cores; sm_80 and up. */
moq_status moq_cuda_simt_linear(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_simt_workspace(const moq_linear_call *call);

/* FP8 weights, K a multiple of 16: x is quantized, then warps multiply the codes, as fp16 on sm_80
 * and up or as e4m3 on sm_89 and up. */
moq_status moq_cuda_mma_fp8_as_f16(const moq_linear_call *call, moq_err *err);
moq_status moq_cuda_mma_fp8_as_e4m3(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_mma_fp8_workspace(const moq_linear_call *call);

/* Packed NVFP4 weights, exact, x and y of 16 bits; sm_80 and up. */
moq_status moq_cuda_mma_nvfp4(const moq_linear_call *call, moq_err *err);
int64_t moq_cuda_mma_nvfp4_workspace(const moq_linear_call *call);

/* ---- cuBLASLt ---- */

/* FP8 weights, K and N multiples of 16, or NVFP4 weights with swizzled scales, K a multiple of 32
 * (sm_100 and up): x is quantized, then cuBLASLt multiplies (choice/cublaslt.h). Variants are the
 * algorithms that the library proposes for the call, with scales applied by the library or after
 * it. */
moq_status moq_cublaslt_linear(const moq_linear_call *call, moq_err *err);
int64_t moq_cublaslt_workspace(const moq_linear_call *call);
uint64_t moq_cublaslt_variants(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
