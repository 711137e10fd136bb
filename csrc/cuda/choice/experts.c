/* Estimated seconds of the kernels of experts for any number of tokens: weights of the experts that
 * are asked for read, or tiles multiplied, and what lies between. */
#include "cuda/choice/chip.h"
#include "cuda/choice/choice_moe.h"

/* Six launches, and what lies between them written and read. */
#define STEPS         15e-6
#define BYTES_BETWEEN 6.0 /* of each value of u and d, and of the rows that become them */

/* A kernel's pace, on the chip that it was measured on. */
typedef struct {
    double read;     /* weights a second, from memory */
    double products; /* a second, of full tiles */
    double rows;     /* of the smallest tile */
} pace;

/* The last tile of an expert is half empty, whatever is routed to it. */
static double rows_of_tiles(double rows, double tile) {
    return rows <= tile / 2 ? tile : rows + tile / 2;
}

static double seconds(const moq_moe_spec *spec, int64_t tokens, pace of) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    double slots = (double)tokens * spec->top_k;
    double active = slots < spec->experts ? slots : spec->experts;
    double weights = (double)w13->in_features * (double)w13->out_features +
                     (double)w2->in_features * (double)w2->out_features;
    double values = (double)(w13->out_features + w2->out_features);
    double rows = rows_of_tiles(slots / active, of.rows);
    double read = active * weights / moq_memory_rate(&w13->target, of.read);
    double products = active * weights * rows / moq_matrix_rate(&w13->target, of.products);
    return STEPS + BYTES_BETWEEN * slots * values / moq_memory_rate(&w13->target, 2e12) +
           (read > products ? read : products);
}

double moq_cuda_moe_simt_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double steps = (double)(spec->w13.in_features + spec->w2.in_features) / 512;
    return 1e-6 * steps + seconds(spec, tokens, (pace){1e12, 1e13, 8});
}

double moq_cuda_moe_mma_fp8_as_f16_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, (pace){1.5e12, 1e14, 16});
}

/* As of the linear, chips that make these products of fp16 ones gain nothing by them. */
double moq_cuda_moe_mma_fp8_as_e4m3_seconds(const moq_moe_spec *spec, int64_t tokens) {
    int32_t capability = spec->w13.target.capability;
    bool native = capability == 89 || capability >= 120;
    return (native ? 0.99 : 1.01) * seconds(spec, tokens, (pace){1.5e12, native ? 2e14 : 1e14, 16});
}

double moq_cuda_moe_mma_nvfp4_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, (pace){2.9e12 / 0.5625, 1.85e14, 8});
}

/* Decoding takes longer where weights are rounded. */
double moq_cuda_moe_mma_nvfp4_folded_seconds(const moq_moe_spec *spec, int64_t tokens) {
    return seconds(spec, tokens, (pace){2.2e12 / 0.5625, 1.7e14, 8});
}
