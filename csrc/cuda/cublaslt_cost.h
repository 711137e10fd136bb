/* What cuBLASLt is expected to take on Hopper, for the choice between it and other kernels.
 *
 * Fitted to an H200 with cuBLASLt 13.1 over six layers and 17 to 8192 tokens (docs/lab.md): within
 * a quarter in 173 of 180 cells. With one scale of x and one of W the library splits K and fills
 * the chip. With vectors it works in tiles of 128 x 128, which take as long as K is however few
 * there are; with blocks it splits K in two where tiles fill less than half of the chip. */
#ifndef MOQ_CUDA_CUBLASLT_COST_H
#define MOQ_CUDA_CUBLASLT_COST_H

#include "cuda/linear.h"

#define MOQ_CUBLASLT_LAUNCH 1.5e-6 /* of one more kernel in a graph, and for it to fill */

/* x quantized: 2 bytes of a value read, one written. */
static inline double moq_quantize_seconds(double m, double k) {
    return MOQ_CUBLASLT_LAUNCH + 3 * m * k / 4.2e12;
}

static inline double moq_larger(double a, double b) {
    return a > b ? a : b;
}

/* A product with scalars. */
static inline double moq_tensor_product_seconds(double m, double n, double k) {
    return 4.5e-6 + moq_larger(n * k / 4.1e12, 2 * m * n * k / 1.25e15);
}

/* A product with vectors or blocks, `splits` where K may be. */
static inline double moq_tiled_product_seconds(double m, double n, double k, int64_t sm_count,
                                               bool splits) {
    int64_t tiles = (((int64_t)m + 127) / 128) * (((int64_t)n + 127) / 128);
    int64_t waves = (tiles + sm_count - 1) / sm_count;
    double cores = 2e-6 + (double)waves * (2e-6 + 2.8e-9 * k);
    if (splits && 2 * tiles <= sm_count)
        cores = 9e-6 + 1.4e-9 * k;
    return moq_larger(cores, 3e-6 + 1.35 * n * k / 4.1e12);
}

/* Sums read, and y written, by a kernel of ours; `width` bytes of a sum, in the second-level cache
 * as long as there are few. */
static inline double moq_finish_seconds(double m, double n, double width) {
    double bytes = m * n * (2 * width + 2);
    return MOQ_CUBLASLT_LAUNCH + bytes / (bytes < 64e6 ? 8e12 : 4e12);
}

/* Seconds of a call. */
static inline double moq_cublaslt_seconds(const moq_linear_spec *spec, int64_t tokens) {
    double m = (double)tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    double quantize = moq_quantize_seconds(m, k), product = moq_tensor_product_seconds(m, n, k);
    bool block = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    if (spec->input == MOQ_INPUT_E4M3_TENSOR && !moq_cublaslt_shares_scale(spec)) {
        double more = moq_cublaslt_by_partition(spec) ? spec->partition_count - 1 : 0;
        return quantize + product + more * (quantize + 4.5e-6);
    }
    if (!block && !moq_cublaslt_has_vectors(spec))
        return quantize + product + moq_finish_seconds(m, n, 4);
    return quantize + moq_tiled_product_seconds(m, n, k, spec->target.sm_count, block) +
           (block && tokens % 4 ? moq_finish_seconds(m, n, 2) : 0);
}

#endif
