/* The families of CUDA kernels that the plan chooses among, by search.h.
 *
 * Plain C that looks at nothing but the description of the layer and the chip (chip.h): the same in
 * builds with and without nvcc, and on machines without a device. */
#ifndef MOQ_CUDA_CHOICE_CHOICE_H
#define MOQ_CUDA_CHOICE_CHOICE_H

#include "core/moe.h"
#include "cuda/choice/search.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Linears. */
extern const moq_configs MOQ_SIMT, MOQ_MMA_FP8_AS_F16, MOQ_MMA_FP8_AS_E4M3, MOQ_MMA_NVFP4;
extern const moq_configs MOQ_FP8_DECODE, MOQ_FP8_PREFILL, MOQ_NVFP4_DECODE, MOQ_NVFP4_MEDIUM,
    MOQ_NVFP4_PREFILL;
extern const moq_configs MOQ_NVFP4_FP8_MEDIUM, MOQ_NVFP4_FP8_PREFILL, MOQ_CUBLASLT;

/* Experts. */
extern const moq_configs MOQ_MOE_SIMT, MOQ_MOE_MMA_FP8_AS_F16, MOQ_MOE_MMA_FP8_AS_E4M3;
extern const moq_configs MOQ_MOE_MMA_NVFP4, MOQ_MOE_MMA_NVFP4_FOLDED;
extern const moq_configs MOQ_MOE_FP8_DECODE, MOQ_MOE_NVFP4_DECODE, MOQ_MOE_FP8_PREFILL,
    MOQ_MOE_NVFP4_PREFILL;
extern const moq_configs MOQ_MOE_NVFP4_FP8_PREFILL;

#ifdef __cplusplus
}
#endif
#endif
