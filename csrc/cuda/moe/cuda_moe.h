/* Entries of the kernels of experts on the CUDA floor. Each takes a checked call (core/moe.h), on
 * the device of its spec; predicates say what a kernel can run. A workspace is the bytes on the
 * device that the call needs; they need not be zero.
 *
 * Nothing is read back from the device: grids are as large as the slots of the call could need, and
 * blocks without work end at once. Calls can be captured, and repeat bit by bit. */
#ifndef MOQ_CUDA_MOE_CUDA_MOE_H
#define MOQ_CUDA_MOE_CUDA_MOE_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Experts of a layer at most, whose slots are sorted on the device. */
#define MOQ_CUDA_MOE_EXPERTS 1024

/* ---- any chip, any number of tokens: the linears of cuda/linear with an expert ---- */

/* CUDA cores: every layer; sm_80 and up. */
moq_status moq_cuda_moe_simt(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_simt_workspace(const moq_moe_call *call);

/* FP8 weights, H and I multiples of 16, by mma.sync: codes as fp16 on sm_80 and up, or as e4m3 on
 * sm_89 and up. */
moq_status moq_cuda_moe_mma_fp8_as_f16(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_mma_fp8_as_f16_workspace(const moq_moe_call *call);
moq_status moq_cuda_moe_mma_fp8_as_e4m3(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_mma_fp8_as_e4m3_workspace(const moq_moe_call *call);

/* Packed NVFP4 weights, exact or folded to e4m3, x and y of 16 bits, by mma.sync; sm_80 and up. */
moq_status moq_cuda_moe_mma_nvfp4(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_mma_nvfp4_workspace(const moq_moe_call *call);
moq_status moq_cuda_moe_mma_nvfp4_folded(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_mma_nvfp4_folded_workspace(const moq_moe_call *call);

/* ---- Hopper (sm_90a); cuda/choice has what each can run ---- */

/* Decode: FP8 weights, or exact packed NVFP4 weights (choice/moe_decode.h). */
moq_status moq_cuda_moe_fp8_decode(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_fp8_decode_workspace(const moq_moe_call *call);
moq_status moq_cuda_moe_nvfp4_decode(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_nvfp4_decode_workspace(const moq_moe_call *call);

/* Prefill, x and y of 16 bits: FP8 weights, H and I multiples of 16; packed NVFP4 weights, exact or
 * folded to e4m3 with x quantized by token. */
moq_status moq_cuda_moe_fp8_prefill(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_fp8_prefill_workspace(const moq_moe_call *call);
moq_status moq_cuda_moe_nvfp4_prefill(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_nvfp4_prefill_workspace(const moq_moe_call *call);
moq_status moq_cuda_moe_nvfp4_fp8_prefill(const moq_moe_call *call, moq_err *err);
int64_t moq_cuda_moe_nvfp4_fp8_prefill_workspace(const moq_moe_call *call);

#ifdef __cplusplus
}
#endif
#endif
