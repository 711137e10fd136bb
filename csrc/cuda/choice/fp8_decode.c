/* The way of a call of the FP8 linear for a few tokens on Hopper, and its seconds: see
 * fp8_decode.h.
 */
#include "cuda/choice/fp8_decode.h"

#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

/* Two calls are on a multiprocessor at once where they have up to so many tokens, and bytes of W
 * for each. */
#define FEW   2
#define SMALL (160 << 10)
#define LONG  14336 /* columns beyond which two blocks share them for any x */

static bool is_small(const moq_linear_spec *spec) {
    return spec->out_features * spec->in_features <= (int64_t)SMALL * spec->target.sm_count;
}

/* The kernel's shapes: warpgroups that multiply, and tokens. */
static const struct {
    int groups, tokens;
} SHAPES[] = {{2, 2}, {4, 2}, {4, 8}, {4, 16}};

/* One or two tokens of a small layer take half a multiprocessor a block: a call begins while the
 * one before runs, which hides its start. Elsewhere the ring of a whole one, and its warps, are
 * worth more. */
static int shape_for(const moq_linear_spec *spec, int64_t m) {
    return m > 8 ? 3 : m > FEW ? 2 : is_small(spec) ? 0 : 1;
}

/* Two blocks share K where x is long, or would leave the ring little room: they halve what each
 * reads of x, and the room of its codes, for half a microsecond of exchange. `given`: x has one
 * scale, which is there before. */
static int ranks_for(const moq_linear_spec *spec, int64_t m, int tokens, bool given) {
    int64_t k = spec->in_features;
    bool ready = spec->input == MOQ_INPUT_E4M3_TENSOR && given;
    int64_t values = m * k * (ready ? 1 : 2);
    bool long_x = (k > 2048 && values > 32768) || tokens * k > 98304;
    return (long_x || k > LONG) && (k + MOQ_FP8_DECODE_STEP - 1) / MOQ_FP8_DECODE_STEP % 2 == 0 ? 2
                                                                                                : 1;
}

moq_kernel_config moq_cuda_fp8_decode_choose(const moq_linear_spec *spec, int64_t m,
                                             int32_t variant) {
    (void)variant; /* there is one */
    int shape = shape_for(spec, m), tokens = SHAPES[shape].tokens;
    moq_kernel_config config = {.tiling = MOQ_TILING(shape, ranks_for(spec, m, tokens, true)),
                                .dynamic_tiling =
                                    MOQ_TILING(shape, ranks_for(spec, m, tokens, false))};
    return config;
}

moq_fp8_decode_config moq_fp8_decode_expand_config(const moq_linear_call *call) {
    uint8_t tiling = moq_tiling_of(call);
    int shape = moq_tiling_row(tiling);
    moq_fp8_decode_config config = {SHAPES[shape].groups, SHAPES[shape].tokens,
                                    moq_tiling_blocks(tiling), 0};
    return config;
}

static double norm4(double a, double b) {
    return sqrt(sqrt(a * a * a * a + b * b * b * b));
}

/* Seconds, fitted as the estimates of the FP8 GEMM are (fp8_prefill.c): the weight, or what each
 * row of outputs costs where that is longer, then x, read and quantized by every multiprocessor, by
 * the way it is quantized. Small layers with a token or two have blocks of half a multiprocessor.
 */
double moq_cuda_fp8_decode_seconds(const moq_linear_spec *spec, int64_t m) {
    double n = (double)spec->out_features, k = (double)spec->in_features, tokens = (double)m;
    double value = spec->input == MOQ_INPUT_E4M3_TENSOR  ? 2.209e-11 /* of codes, too */
                   : spec->input == MOQ_INPUT_E4M3_GROUP ? 3.313e-11
                                                         : 3.458e-11;
    double start = m <= FEW && is_small(spec) ? 3.541e-6 : 3.45e-6;
    double weights = n * k / moq_memory_rate(&spec->target, 4.502e12);
    return start + norm4(weights, n * (1.097e-10 + 1.481e-11 * tokens)) + value * tokens * k;
}
