/* The choice among ways to do the NVFP4 GEMM with FP8 products of Hopper: see nvfp4_fp8.h. */
#include "cuda/choice/nvfp4_fp8.h"

#include "cuda/choice/choice.h"

#include <math.h>

#define SHAPE(tokens, share, step, fast_step, tail, output)                                        \
    {tokens, (share) == MOQ_ALONE ? 1 : 2, {step, fast_step}, tail, output},

static const moq_nvfp4_fp8_shape SHAPES[] = {MOQ_NVFP4_FP8_SHAPES(SHAPE)};

/* How tiles are divided: whole ones in rounds, or the last rounds evenly by steps. */
typedef enum { ROUNDS, EVEN, DIVISIONS } division;

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, VARIANT_COUNT = SHAPE_COUNT * DIVISIONS };
_Static_assert(VARIANT_COUNT <= MOQ_TILING_ROWS, "a way tells every shape and division");

/* x quantized, then steps and outputs, and the way of sums to other blocks. Fitted to 432 times of
 * 16 layers with 128 to 2048 tokens on an H200, 3.8 % root mean square, and to what the choice
 * loses (docs/lab/nvfp4-fp8.md), the begin again to calls behind the end of the one before. The
 * more multiprocessors multiply, and the longer, the lower is the clock.
 */
static double estimate(const moq_linear_spec *spec, const moq_nvfp4_fp8_config *config, int64_t m) {
    const moq_nvfp4_fp8_shape *v = config->shape;
    double tiles = (double)(config->row_tiles * config->columns), workers = (double)config->workers;
    double steps = (double)divide_up(spec->in_features, MOQ_NVFP4_FP8_STEP);
    double turns = config->tail_tiles ? tiles / workers : ceil(tiles / workers);
    double longer = 0.0291 * (double)config->tail_tiles / workers; /* steps that are shared take */
    double busy = workers * v->blocks / (double)spec->target.sm_count;
    double quantize = 1.5 + (double)m * (double)spec->in_features / 1.4e6;
    double products = (turns + longer) * steps * v->step[spec->fast_accum] * (1 + 0.19 * busy);
    double exchange = config->tail_tiles ? v->tail + 0.00262 * v->tokens *
                                                         (1 + workers / (double)config->tail_tiles)
                                         : 0;
    products *= 1 + 0.0695 * fmin(1, products / 400);
    return (3.5 + quantize + products + ceil(turns) * v->output * v->tokens + exchange) * 1e-6;
}

/* `index` is of a shape and a division. */
static moq_nvfp4_fp8_config partition_work(const moq_linear_spec *spec, int64_t m, int index) {
    const moq_nvfp4_fp8_shape *v = &SHAPES[index % SHAPE_COUNT];
    moq_nvfp4_fp8_config config = {v, (int)(v - SHAPES),
                                   divide_up(spec->out_features, MOQ_NVFP4_FP8_ROWS),
                                   divide_up(m, v->tokens * v->blocks)};
    int64_t tiles = config.row_tiles * config.columns, most = spec->target.sm_count / v->blocks;
    int64_t steps = divide_up(spec->in_features, MOQ_NVFP4_FP8_STEP);
    config.workers = tiles < most ? tiles : most;
    if ((division)(index / SHAPE_COUNT) == EVEN) {
        stream_k_split tail = stream_k_split_of(tiles, steps, most);
        config.tail_tiles = tail.tiles;
        config.workers = tail.workers;
    }
    return config;
}

static double seconds_of(const moq_linear_spec *spec, int64_t m, int index) {
    moq_nvfp4_fp8_config config = partition_work(spec, m, index);
    return estimate(spec, &config, m);
}

/* The best of all shapes and divisions. */
static int find_best(const moq_linear_spec *spec, int64_t m, double *seconds) {
    int best = 0;
    *seconds = INFINITY;
    for (int i = 0; i < VARIANT_COUNT; i++) {
        double t = seconds_of(spec, m, i);
        if (t < *seconds) {
            *seconds = t;
            best = i;
        }
    }
    return best;
}

double moq_cuda_nvfp4_fp8_prefill_seconds(const moq_linear_spec *spec, int64_t m) {
    double seconds;
    find_best(spec, m, &seconds);
    return seconds;
}

/* Variant 0 is the choice, of which no number is told; the others are a shape and a division each.
 */
moq_kernel_config moq_cuda_nvfp4_fp8_prefill_choose(const moq_linear_spec *spec, int64_t m,
                                                    int32_t variant) {
    double seconds;
    if (variant > 0 && variant <= VARIANT_COUNT)
        return moq_kernel_config_of(variant, variant - 1, 1);
    return moq_kernel_config_of(0, find_best(spec, m, &seconds), 1);
}

moq_nvfp4_fp8_config moq_nvfp4_fp8_expand_config(const moq_linear_call *call) {
    return partition_work(call->spec, call->m, moq_tiling_row(moq_tiling_of(call)));
}

double moq_cuda_nvfp4_fp8_prefill_config_seconds(const moq_linear_call *call) {
    return seconds_of(call->spec, call->m, moq_tiling_row(moq_tiling_of(call)));
}

/* The choice, and the shapes that are not expected to take half as long again. */
uint64_t moq_cuda_nvfp4_fp8_prefill_variants(const moq_linear_call *call) {
    double best = moq_cuda_nvfp4_fp8_prefill_seconds(call->spec, call->m);
    uint64_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (seconds_of(call->spec, call->m, i) < 1.5 * best)
            some |= 2ull << i;
    return some;
}
