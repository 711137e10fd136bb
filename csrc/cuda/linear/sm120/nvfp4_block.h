/* Product of NVFP4 codes of both operands on compute capability 12.x, in the place of cuBLASLt's.
 */
#ifndef MOQ_CUDA_LINEAR_SM120_NVFP4_BLOCK_H
#define MOQ_CUDA_LINEAR_SM120_NVFP4_BLOCK_H

#include "cuda/runtime/cublaslt_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Multiplies as moq_matmul_run does, of MOQ_SCALED_NVFP4 alone, without a bias. At most 2^22
 * rows of x. */
moq_status moq_block_scaled_product(const moq_matmul *p, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
