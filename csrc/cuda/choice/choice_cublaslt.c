/* What cuBLASLt is expected to take on Hopper, for the choice between it and other kernels, and
 * between its two ways to scale by vectors.
 *
 * Fitted to an H200 with cuBLASLt 13.1 over sixteen layers with 1 to 512 tokens together with the
 * estimates of our kernels, so that the choice loses least; beyond that the fit before, over 64 to
 * 8192 tokens, is what it was kept near to (docs/lab/cublaslt.md). With one scale of x
 * and one of W the library splits K and fills the chip. With vectors it works in tiles of 128 x
 * 128, which take as long as K is however few there are; with blocks it splits K where tiles fill
 * less than half of the chip. */
#include "cuda/choice/choice_cublaslt.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

/* x quantized: 2 bytes of a value read, one written. */
static double quantize_seconds(double m, double k) {
    return 1.32e-6 + 3 * m * k / 4.05e12;
}

/* Products that last keep less of the clock. */
static double slowed(double seconds, double share) {
    return seconds * (1 + share * (seconds < 4e-4 ? seconds / 4e-4 : 1));
}

/* A product with scalars. Sums that stay in the tensor cores take a sixteenth less of their time,
 * with vectors a tenth. */
static double tensor_product_seconds(const moq_linear_spec *spec, double m) {
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double multiply = slowed(2 * m * n * k / moq_matrix_rate(&spec->target, 1.72e15), 0.067) *
                      (spec->fast_accum ? 0.94 : 1);
    return 3.92e-6 + hypot(n * k / moq_memory_rate(&spec->target, 4.05e12), multiply) +
           m * n * 3.81e-13;
}

/* Tiles of 128 x 128. */
static double count_tiles(const moq_linear_spec *spec, double m) {
    return ceil(m / 128) * ceil((double)spec->out_features / 128);
}

/* How often all multiprocessors take one. */
static double count_waves(const moq_linear_spec *spec, double m) {
    return ceil(count_tiles(spec, m) / (double)spec->target.sm_count);
}

/* A product with vectors; W takes its time from memory, however few tiles there are. */
static double vector_product_seconds(const moq_linear_spec *spec, double m) {
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double multiply = slowed(count_waves(spec, m) * (1.27e-6 + 2.25e-9 * k), 0.18);
    double together =
        multiply * (spec->fast_accum ? 0.9 : 1) + n * k / moq_memory_rate(&spec->target, 1.08e13);
    return 3.2e-6 + fmax(together, n * k / moq_memory_rate(&spec->target, 4.05e12));
}

/* A product with blocks: whole tiles or, where they fill less than half of the chip, parts of them.
 * The outputs of a wave count where K is short. */
static double block_product_seconds(const moq_linear_spec *spec, double m) {
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double sm_count = (double)spec->target.sm_count, tiles = count_tiles(spec, m);
    double waves = count_waves(spec, m), multiply = slowed(waves * 2.7e-9 * k, 0.085);
    double whole = 3.59e-6 + 6e-7 * fmin(waves - 1, 8) +
                   hypot(n * k / moq_memory_rate(&spec->target, 4.68e12), multiply) +
                   m * n * 4.28e-13;
    double splits = 1.5e-5 + 3.99e-9 * k * tiles / sm_count;
    return 2 * tiles <= sm_count && splits < whole ? splits : whole;
}

/* Sums read, and y written, by a kernel of ours; `width` bytes of a sum. */
static double finish_seconds(double m, double n, double width) {
    return 3.34e-6 + m * n * (2 * width + 2) / 4e12;
}

/* Of a product with vectors: whether sums of a product with scalars, scaled by a kernel of ours,
 * are expected to be sooner there. Chosen by buckets, as tuning chooses. */
static bool scales_after(const moq_linear_spec *spec, int64_t tokens) {
    double m = (double)moq_token_bucket(tokens), n = (double)spec->out_features;
    return !moq_cublaslt_has_vectors(spec) ||
           tensor_product_seconds(spec, m) + finish_seconds(m, n, 4) <
               vector_product_seconds(spec, m);
}

/* NVFP4, one partition after the other: an estimate, of half of what a B200 is said to do. */
static double nvfp4_product_seconds(const moq_linear_spec *spec, double m) {
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double bytes = (n + m) * k * 0.5625 + 2 * m * n;
    return spec->partition_count * 8e-6 + bytes / moq_memory_rate(&spec->target, 4e12) +
           2 * m * n * k / moq_matrix_rate(&spec->target, 4e15);
}

/* Seconds of a call on W as it is. */
static double call_seconds(const moq_linear_spec *spec, int64_t tokens) {
    double m = (double)tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    double quantize = quantize_seconds(m, k), product = tensor_product_seconds(spec, m);
    if (spec->weight == MOQ_WEIGHT_E2M1_SWIZZLED)
        return quantize + nvfp4_product_seconds(spec, m);
    if (spec->input == MOQ_INPUT_E4M3_TENSOR && !moq_cublaslt_shares_scale(spec)) {
        double more = moq_cublaslt_by_partition(spec) ? spec->partition_count - 1 : 0;
        return quantize + product + more * (quantize + 4.5e-6);
    }
    if (spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        return quantize + block_product_seconds(spec, m) +
               (tokens % 4 ? finish_seconds(m, n, 2) : 0);
    /* 96 and 192 tokens take longer than their products should */
    double between = tokens > 64 && tokens < 256 && tokens != 128 ? 1.15 : 1;
    if (scales_after(spec, tokens))
        return between * (quantize + product + finish_seconds(m, n, 4));
    return between * (quantize + vector_product_seconds(spec, m));
}

/* How much longer than is said above products with 1024 to 2048 tokens take, which with 512 and
 * 4096 they do not: measured of 16 layers of packed NVFP4 weights, and by token of 8192 x 8192 and
 * 28672 x 4096. */
static double longer_with(const moq_linear_spec *spec, double m) {
    double n = (double)spec->out_features, k = (double)spec->in_features;
    bool large = spec->input == MOQ_INPUT_E4M3_TOKEN && n * k > 6e7;
    double most = moq_linear_folds(spec) ? 0.06 : large ? 0.1 : 0;
    return most * fmin(1, fmax(0, fmin(m / 512, 4096 / m) - 1));
}

/* Seconds of a call. Packed NVFP4 weights become FP8 codes in the workspace before. */
double moq_cublaslt_seconds(const moq_linear_spec *spec, int64_t tokens) {
    double m = (double)tokens, n = (double)spec->out_features, k = (double)spec->in_features;
    double call = call_seconds(spec, tokens) * (1 + longer_with(spec, m));
    return moq_linear_folds(spec) ? call + n * k / moq_memory_rate(&spec->target, 2.3e12) : call;
}

/* The variant is an algorithm of the library; the row, whether sums are scaled after the product.
 */
moq_kernel_config moq_cublaslt_choose(const moq_linear_spec *spec, int64_t m, int32_t variant) {
    return moq_kernel_config_of(variant, scales_after(spec, m), 1);
}
