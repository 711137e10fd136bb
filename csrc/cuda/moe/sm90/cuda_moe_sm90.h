/* Experts on Hopper (sm_90a): the surface of this room. Each takes a call that was checked, on the
 * device of its layer; what it cannot do is said by its predicate in cuda/choice. The
 * workspace is a number of bytes on the device that need not be zero. */
#ifndef MOQ_CUDA_MOE_SM90_CUDA_MOE_SM90_H
#define MOQ_CUDA_MOE_SM90_CUDA_MOE_SM90_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Packed NVFP4 weights as they are, few tokens: choice/moe_decode.h. */
moq_status moq_cuda_moe_nvfp4_decode(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_nvfp4_decode_workspace(const moq_moe_call *call);

/* FP8 weights, few tokens: likewise. */
moq_status moq_cuda_moe_fp8_decode(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_fp8_decode_workspace(const moq_moe_call *call);

/* Many tokens, x and y of 16 bits: FP8 weights, H and I multiples of 16; packed NVFP4 weights as
 * they are. */
moq_status moq_cuda_moe_fp8_prefill(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_fp8_prefill_workspace(const moq_moe_call *call);
moq_status moq_cuda_moe_nvfp4_prefill(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_nvfp4_prefill_workspace(const moq_moe_call *call);

/* The same, NVFP4 weights folded to e4m3, x quantized by token. */
moq_status moq_cuda_moe_nvfp4_fp8_prefill(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_nvfp4_fp8_prefill_workspace(const moq_moe_call *call);

#ifdef __cplusplus
}
#endif
#endif
