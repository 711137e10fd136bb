/* Estimated seconds of the kernels that run on every chip: on plain CUDA cores, and by products of
 * warps. */
#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

/* What a call has before its work, fitted in chains of calls that begin early. The estimates that
 * these are compared with on Hopper count from the end of the kernel before. */
static double begin_of(const moq_linear_spec *spec, double seconds) {
    return spec->target.capability == 90 ? seconds + 2.6e-6 : seconds;
}

/* Seconds: the steps of a block one after the other, bytes at 1 TB/s, products at 20 TFLOP/s.
 * Within a factor of two of what FP8 layers of 4096 x 4096 to 8192 x 8192 take on an H200. */
double moq_cuda_simt_seconds(const moq_linear_spec *spec, int64_t m) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    double steps = (double)spec->in_features / 512;
    return begin_of(spec, 5e-6) + 1e-6 * steps + weights / moq_memory_rate(&spec->target, 1e12) +
           weights * (double)m / 1e13;
}

/* Seconds: x quantized, then W read at 1.5 TB/s or multiplied at `rate` a second, 16 rows of x at
 * least. Within a factor of 1.5 of what the kernel of fp16 takes on an H200; an estimate elsewhere.
 */
static double mma_fp8_seconds(const moq_linear_spec *spec, int64_t m, double rate) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    double read = weights / moq_memory_rate(&spec->target, 1.5e12);
    double products = weights * (double)(m < 16 ? 16 : m) / moq_matrix_rate(&spec->target, rate);
    return 8e-6 + (read > products ? read : products);
}

double moq_cuda_mma_fp8_as_f16_seconds(const moq_linear_spec *spec, int64_t m) {
    return mma_fp8_seconds(spec, m, 1e14);
}

/* The chips that make these products of fp16 ones gain nothing by them. */
double moq_cuda_mma_fp8_as_e4m3_seconds(const moq_linear_spec *spec, int64_t m) {
    bool native = spec->target.capability == 89 || spec->target.capability >= 120;
    return native ? 0.99 * mma_fp8_seconds(spec, m, 2e14) : 1.01 * mma_fp8_seconds(spec, m, 1e14);
}

/* Seconds: W read at 2.9 TB/s, then multiplied, 8 rows of x at least. Within a sixth of what it
 * takes on an H200 from 8192 x 8192 on, up to a third short of it for 32 to 256 tokens of 4096 x
 * 4096 (docs/lab/any-chip.md); an estimate elsewhere. */
double moq_cuda_mma_nvfp4_seconds(const moq_linear_spec *spec, int64_t m) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    return begin_of(spec, 3e-6) + 0.5625 * weights / moq_memory_rate(&spec->target, 2.9e12) +
           2 * weights * (double)(m < 8 ? 8 : m) / moq_matrix_rate(&spec->target, 3.7e14);
}
