/* What cuBLASLt is expected to take on Hopper, for the choice between it and other kernels, and
 * between its two ways to scale by vectors.
 *
 * Fitted to an H200 with cuBLASLt 13.1 over six layers and 1 to 8192 tokens (docs/lab.md): within a
 * sixth in all cells but those of vectors with fewer than 128 tokens, where the other way is the
 * faster one. With one scale of x and one of W the library splits K and fills the chip. With
 * vectors it works in tiles of 128 x 128, which take as long as K is however few there are; with
 * blocks it splits K where tiles fill less than half of the chip. */
#ifndef MOQ_CUDA_CUBLASLT_COST_H
#define MOQ_CUDA_CUBLASLT_COST_H

#include "cuda/linear.h"

#include <math.h>

#define MOQ_CUBLASLT_LAUNCH 1.5e-6 /* of one more kernel in a graph, and for it to fill */

/* x quantized: 2 bytes of a value read, one written. */
static inline double moq_quantize_seconds(double m, double k) {
    return MOQ_CUBLASLT_LAUNCH + 3 * m * k / 4.2e12;
}

static inline double moq_larger(double a, double b) {
    return a > b ? a : b;
}

/* Products that last keep less of the clock. */
static inline double moq_slowed(double seconds, double share) {
    return seconds * (1 + share * (seconds < 4e-4 ? seconds / 4e-4 : 1));
}

/* A product with scalars. */
static inline double moq_tensor_product_seconds(double m, double n, double k) {
    double read = n * k / 4.1e12, multiply = moq_slowed(2 * m * n * k / 1.6e15, 0.25);
    return 4.7e-6 + sqrt(read * read + multiply * multiply);
}

/* How often all multiprocessors take a tile of 128 x 128, and whether half of them stay idle. */
typedef struct {
    double waves;
    bool few;
} moq_tiles_of_product;

static inline moq_tiles_of_product moq_count_tiles(int64_t m, int64_t n, int64_t sm_count) {
    int64_t tiles = (m + 127) / 128 * ((n + 127) / 128);
    moq_tiles_of_product t = {(double)((tiles + sm_count - 1) / sm_count), 2 * tiles <= sm_count};
    return t;
}

/* A product with vectors. */
static inline double moq_vector_product_seconds(double m, double n, double k, int64_t sm_count) {
    double waves = moq_count_tiles((int64_t)m, (int64_t)n, sm_count).waves;
    return moq_larger(moq_slowed(1.5e-6 + waves * (2.2e-6 + 2.7e-9 * k), 0.15),
                      2.7e-6 + 1.27 * n * k / 4.1e12);
}

/* A product with blocks. */
static inline double moq_block_product_seconds(double m, double n, double k, int64_t sm_count) {
    moq_tiles_of_product t = moq_count_tiles((int64_t)m, (int64_t)n, sm_count);
    double cores = t.few ? 10e-6 + 0.9e-9 * k : t.waves * (1.7e-6 + 3.2e-9 * k);
    return moq_larger(cores, 11.9e-6 + 1.07 * n * k / 4.1e12);
}

/* Sums read, and y written, by a kernel of ours; `width` bytes of a sum. */
static inline double moq_finish_seconds(double m, double n, double width) {
    return 2.4e-6 + m * n * (2 * width + 2) / 4.5e12;
}

/* Whether sums of a product with scalars, scaled by a kernel of ours, are sooner there than those
 * of a product with vectors. Chosen by buckets, as tuning chooses. */
static inline bool moq_cublaslt_scales_after(const moq_linear_spec *spec, int64_t tokens) {
    double m = (double)moq_token_bucket(tokens), n = (double)spec->out_features,
           k = (double)spec->in_features;
    return !moq_cublaslt_has_vectors(spec) ||
           moq_tensor_product_seconds(m, n, k) + moq_finish_seconds(m, n, 4) <
               moq_vector_product_seconds(m, n, k, spec->target.sm_count);
}

/* Seconds of a call. */
static inline double moq_cublaslt_seconds(const moq_linear_spec *spec, int64_t tokens) {
    double m = (double)tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    int64_t sm_count = spec->target.sm_count;
    double quantize = moq_quantize_seconds(m, k), product = moq_tensor_product_seconds(m, n, k);
    if (spec->input == MOQ_INPUT_E4M3_TENSOR && !moq_cublaslt_shares_scale(spec)) {
        double more = moq_cublaslt_by_partition(spec) ? spec->partition_count - 1 : 0;
        return quantize + product + more * (quantize + 4.5e-6);
    }
    if (spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        return quantize + moq_block_product_seconds(m, n, k, sm_count) +
               (tokens % 4 ? moq_finish_seconds(m, n, 2) : 0);
    if (moq_cublaslt_scales_after(spec, tokens))
        return quantize + product + moq_finish_seconds(m, n, 4);
    return quantize + moq_vector_product_seconds(m, n, k, sm_count);
}

#endif
