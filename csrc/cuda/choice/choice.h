/* What the choice among CUDA kernels of linears goes by: of each kernel the seconds that a call of
 * m rows is expected to take, the way it would be done, and the ways that are worth measuring.
 *
 * Plain C that looks at nothing but the description of the layer and the table of chips (chip.h):
 * the same in builds with and without nvcc, and on machines without a device. */
#ifndef MOQ_CUDA_CHOICE_CHOICE_H
#define MOQ_CUDA_CHOICE_CHOICE_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Seconds of a whole call. */
double moq_cuda_simt_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_mma_fp8_as_f16_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_mma_fp8_as_e4m3_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_mma_nvfp4_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_fp8_decode_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_fp8_prefill_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_nvfp4_decode_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_nvfp4_medium_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_nvfp4_prefill_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_nvfp4_fp8_prefill_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cuda_nvfp4_fp8_medium_seconds(const moq_linear_spec *spec, int64_t m);
double moq_cublaslt_seconds(const moq_linear_spec *spec, int64_t m);

/* The way of a call of m rows in a variant of the kernel: variant 0 is the best of all, which is
 * also taken where a variant cannot do the call. */
moq_kernel_config moq_cuda_fp8_decode_choose(const moq_linear_spec *spec, int64_t m,
                                             int32_t variant);
moq_kernel_config moq_cuda_fp8_prefill_choose(const moq_linear_spec *spec, int64_t m,
                                              int32_t variant);
moq_kernel_config moq_cuda_nvfp4_decode_choose(const moq_linear_spec *spec, int64_t m,
                                               int32_t variant);
moq_kernel_config moq_cuda_nvfp4_medium_choose(const moq_linear_spec *spec, int64_t m,
                                               int32_t variant);
moq_kernel_config moq_cuda_nvfp4_prefill_choose(const moq_linear_spec *spec, int64_t m,
                                                int32_t variant);
moq_kernel_config moq_cuda_nvfp4_fp8_prefill_choose(const moq_linear_spec *spec, int64_t m,
                                                    int32_t variant);
moq_kernel_config moq_cuda_nvfp4_fp8_medium_choose(const moq_linear_spec *spec, int64_t m,
                                                   int32_t variant);
moq_kernel_config moq_cublaslt_choose(const moq_linear_spec *spec, int64_t m, int32_t variant);

/* Seconds of a whole call in its way. */
double moq_cuda_fp8_prefill_config_seconds(const moq_linear_call *call);
double moq_cuda_nvfp4_decode_config_seconds(const moq_linear_call *call);
double moq_cuda_nvfp4_medium_config_seconds(const moq_linear_call *call);
double moq_cuda_nvfp4_prefill_config_seconds(const moq_linear_call *call);
double moq_cuda_nvfp4_fp8_prefill_config_seconds(const moq_linear_call *call);
double moq_cuda_nvfp4_fp8_medium_config_seconds(const moq_linear_call *call);

/* Bit i is set where variant i is worth measuring: bit 0, the choice, always, and the variants that
 * are not expected to take half as long again. */
uint64_t moq_cuda_fp8_prefill_variants(const moq_linear_call *call);
uint64_t moq_cuda_nvfp4_decode_variants(const moq_linear_call *call);
uint64_t moq_cuda_nvfp4_medium_variants(const moq_linear_call *call);
uint64_t moq_cuda_nvfp4_prefill_variants(const moq_linear_call *call);
uint64_t moq_cuda_nvfp4_fp8_prefill_variants(const moq_linear_call *call);
uint64_t moq_cuda_nvfp4_fp8_medium_variants(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
