/* FP8 experts on any chip with mma.sync: rows of codes by the tiles of cuda/linear/mma_fp8_tile.h,
 * which has layouts and bounds. */
#include "cuda/choice/grid.h"
#include "cuda/linear/any/mma_fp8_tile.h"
#include "cuda/moe/any/any_chip.h"
#include "cuda/moe/expert_product.h"

namespace moq::moe {

using namespace mma_fp8;

typedef struct {
    fp8_args tile;
    const float *x_scale; /* scales of rows; NULL: the input scale of the expert */
    expert_stack stack;
    const row_tile *tiles;
    int64_t weight_tiles;
    float *out;
} fp8_product_args;

template <int TM, int TN, int WM, int WN, int WK, int STAGES, bool NATIVE>
static __global__ void __launch_bounds__(32 * WM * WN * WK, 1)
    fp8_experts(const __grid_constant__ fp8_product_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    launch_dependents();
    wait_for_predecessor();
    product_place p = place_of_product(a.tiles, a.weight_tiles);
    const expert_stack *s = &a.stack;
    int e = p.rows.expert;
    if (p.rows.rows == 0)
        return;
    moq_tile rows = moq_find_tile(&a.tile.partitions, a.tile.partition_count, p.weight, TN);
    fp8_weight w = {s->weight + e * s->weight_step,
                    a.x_scale ? a.x_scale : s->input_scale + (int64_t)e * s->partition_count,
                    s->weight_scale ? (const float *)(s->weight_scale + e * s->scale_step) : NULL,
                    row_of(s->output_scale, e * s->n)};
    fp8_tile<TM, TN, WM, WN, WK, STAGES, NATIVE>(
        a.tile, {w, output_of(s, a.out, e), rows, p.rows.first, p.rows.rows}, memory);
}

/* ---- launch ---- */

typedef struct {
    int tm, tn, threads, stages;
    const void *kernel[2]; /* as f16, as e4m3 */
} shape;

#define SHAPE(tm, tn, wm, wn, wk, stages)                                                          \
    {                                                                                              \
        tm, tn, 32 * (wm) * (wn) * (wk), stages, {                                                 \
            (const void *)fp8_experts<tm, tn, wm, wn, wk, stages, false>,                          \
                (const void *)fp8_experts<tm, tn, wm, wn, wk, stages, true>                        \
        }                                                                                          \
    }

/* Tiles of the linear, and one between: an expert has 16 to 32 rows more often than a call. */
static const shape SHAPES[] = {SHAPE(16, 32, 1, 1, 4, 8), SHAPE(32, 64, 1, 2, 4, 5),
                               SHAPE(64, 64, 2, 2, 2, 4), SHAPE(128, 128, 2, 4, 1, 3)};

static row_format format_of(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_E4M3_GROUP   ? ROWS_GROUP
           : spec->input == MOQ_INPUT_E4M3_TOKEN ? ROWS_TOKEN
                                                 : ROWS_TENSOR;
}

static moq_status multiply(const expert_product *p, bool native, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    const shape *s = SHAPES;
    while (s->tm != p->tile_rows)
        s++;
    fp8_product_args args = {};
    args.tile.m = p->most_rows;
    args.tile.k = spec->in_features;
    args.tile.codes = (const uint8_t *)p->rows->data;
    args.tile.next_row = p->rows->format == ROWS_TOKEN;
    args.tile.partition_count = spec->partition_count;
    args.tile.partitions = moq_partitions_of(spec);
    args.x_scale = p->rows->format == ROWS_TENSOR ? NULL : (const float *)p->rows->scales;
    args.stack = stack_of(p);
    args.tiles = p->groups->tile;
    args.weight_tiles = moq_tile_count(spec, s->tn);
    args.out = (float *)p->out;
    return launch_product(p, s->kernel[native], args.weight_tiles, s->threads,
                          (s->tm + s->tn) * STEP * s->stages, &args, err);
}

static moq_status multiply_as_halves(const expert_product *p, moq_err *err) {
    return multiply(p, false, err);
}

static moq_status multiply_as_codes(const expert_product *p, moq_err *err) {
    return multiply(p, true, err);
}

static row_tiling tiling_of(const moq_moe_call *call, double rows) {
    return {moq_moe_mma_fp8_tile_rows(call->spec, rows), 1, false};
}

static const expert_kernels AS_HALVES = {format_of, tiling_of, multiply_as_halves};
static const expert_kernels AS_CODES = {format_of, tiling_of, multiply_as_codes};

MOQ_EXPERTS_ENTRY(mma_fp8_as_f16, AS_HALVES)
MOQ_EXPERTS_ENTRY(mma_fp8_as_e4m3, AS_CODES)

} // namespace moq::moe
