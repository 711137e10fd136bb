/* Experts of 8- and 4-bit weights that general kernels read, on any chip with mma.sync: rows by the
 * tiles of cuda/linear/any/mma_general_tile.h, which has layouts and bounds.
 *
 * Rows have 16 bits: x unchanged, or the values of its e4m3 or int8 codes as float16, which holds
 * them, with a scale of each row or of the expert. Sums are float32. */
#include "cuda/choice/grid.h"
#include "cuda/linear/any/mma_general_tile.h"
#include "cuda/moe/any/any_chip.h"
#include "cuda/moe/expert_product.h"

namespace moq::moe {

using namespace mma_general;

typedef struct {
    general_args tile;
    const uint8_t *x;
    int64_t x_stride;     /* bytes */
    const float *x_scale; /* scales of rows, or NULL */
    bool expert_scale;    /* rows have the input scale of the expert */
    expert_stack stack;
    const row_tile *tiles;
    int64_t weight_tiles;
    float *out;
} general_product_args;

template <int KIND, moq_nvfp4_type TYPE, int TN, int WM, int WK, int WR>
static __global__ void __launch_bounds__(32 * WM * WK)
    general_experts(const __grid_constant__ general_product_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    launch_dependents();
    wait_for_predecessor();
    product_place p = place_of_product(a.tiles, a.weight_tiles);
    const expert_stack *s = &a.stack;
    int e = p.rows.expert;
    if (p.rows.rows == 0)
        return;
    moq_tile rows =
        moq_find_tile(&a.tile.partitions, a.tile.partition_count, p.weight, 16 * WR * WM);
    const float *scale = a.expert_scale ? s->input_scale + (int64_t)e * s->partition_count
                                        : row_of(a.x_scale, p.rows.first);
    general_place place = {a.x + p.rows.first * a.x_stride,
                           a.x_stride,
                           s->weight + e * s->weight_step,
                           s->weight_scale + e * s->scale_step,
                           row_of(s->output_scale, e * s->n),
                           scale,
                           a.expert_scale ? 0 : 1,
                           output_of(s, a.out, e),
                           rows,
                           p.rows.first,
                           p.rows.rows};
    constexpr int LEAST = TN == 64 ? TN / 2 : TN; /* a large tile is halved if half is empty */
    if (LEAST < TN && p.rows.rows <= LEAST)
        general_tile<KIND, TYPE, LEAST, WM, WK, WR>(a.tile, place, memory);
    else
        general_tile<KIND, TYPE, TN, WM, WK, WR>(a.tile, place, memory);
}

/* ---- launch ---- */

typedef struct {
    int tokens, rows, threads, shared;
    const void *kernel[3][2]; /* by KIND and type of rows */
} shape;

template <int TN, int WM, int WK, int WR> static constexpr shape shape_of(void) {
#define OF(kind)                                                                                   \
    {                                                                                              \
        (const void *)general_experts<kind, MOQ_NVFP4_BF16, TN, WM, WK, WR>,                       \
            (const void *)general_experts<kind, MOQ_NVFP4_F16, TN, WM, WK, WR>                     \
    }
    return {TN,
            16 * WR * WM,
            32 * WM * WK,
            STAGES * WK * TN * MMA_ROW,
            {OF(E4M3_MX), OF(INT8), OF(INT4)}};
#undef OF
}

/* Experts have more tiles of W than a linear, so that fewer warps split K, and with many rows a
 * warp has two tiles of 16 for each load of x. */
static const shape SHAPES[] = {shape_of<8, 2, 4, 1>(), shape_of<16, 4, 2, 1>(),
                               shape_of<32, 4, 1, 2>(), shape_of<64, 8, 1, 2>()};

static row_format format_of(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_INT8          ? ROWS_HALVES_INT8
           : spec->input == MOQ_INPUT_E4M3_TENSOR ? ROWS_HALVES_TENSOR
                                                  : ROWS_VALUES;
}

static const void *kernel_of(const shape *s, const moq_linear_spec *spec, row_format format) {
    bool halves = format != ROWS_VALUES || spec->dtype == MOQ_DT_F16;
    int kind = spec->weight == MOQ_WEIGHT_E4M3_GROUP ? E4M3_MX
               : spec->weight == MOQ_WEIGHT_INT8_ROW ? INT8
                                                     : INT4;
    return s->kernel[kind][halves];
}

static moq_status multiply(const expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    const shape *s = SHAPES;
    while (s->tokens != p->tile_rows)
        s++;
    general_product_args args = {};
    args.tile.k = spec->in_features;
    if (spec->weight == MOQ_WEIGHT_INT4_GROUP)
        args.tile.group = divisor_of(spec->group_size / HALF_STEP);
    args.tile.partition_count = spec->partition_count;
    args.tile.partitions = moq_partitions_of(spec);
    args.x = (const uint8_t *)p->rows->data;
    args.x_stride = row_bytes(p->rows->format, spec->dtype, spec->in_features);
    args.expert_scale = p->rows->format == ROWS_HALVES_TENSOR;
    args.x_scale = p->rows->format == ROWS_HALVES_INT8 ? (const float *)p->rows->scales : NULL;
    args.stack = stack_of(p);
    args.tiles = p->groups->tile;
    args.weight_tiles = moq_tile_count(spec, s->rows);
    args.out = (float *)p->out;
    return launch_product(p, kernel_of(s, spec, p->rows->format), args.weight_tiles, s->threads,
                          s->shared, &args, err);
}

static row_tiling tiling_of(const moq_moe_call *call, double rows) {
    return {moq_moe_mma_general_tile_rows(call->spec, rows), 1, false};
}

static const expert_kernels GENERAL = {format_of, tiling_of, multiply};

MOQ_EXPERTS_ENTRY(mma_general, GENERAL)

} // namespace moq::moe
