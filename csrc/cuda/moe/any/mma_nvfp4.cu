/* NVFP4 experts on any chip with mma.sync: rows by packed weights, in the tiles of
 * cuda/linear/mma_nvfp4_tile.h, which has layouts and bounds.
 *
 * Rows have 16 bits: x unchanged, or the values of its codes, e4m3 or NVFP4, which float16 holds.
 * So the products are those of codes, exactly, on every chip with tensor cores of float16, and sums
 * are float32. Weights are exact, or folded to e4m3. */
#include "cuda/linear/any/mma_nvfp4_tile.h"
#include "cuda/moe/any/any_chip.h"
#include "cuda/moe/expert_product.h"

namespace moq::moe {

using namespace mma_nvfp4;

typedef struct {
    nvfp4_args tile;
    const float *x_scale; /* scales of rows; NULL: the input scale of the expert */
    expert_stack stack;
    const row_tile *tiles;
    int64_t weight_tiles;
    float *out;
} nvfp4_product_args;

template <class SHAPE, nvfp4_format FORMAT>
static __global__ void __launch_bounds__(SHAPE::THREADS)
    nvfp4_experts(const __grid_constant__ nvfp4_product_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    launch_dependents();
    wait_for_predecessor();
    product_place p = place_of_product(a.tiles, a.weight_tiles);
    const expert_stack *s = &a.stack;
    int e = p.rows.expert;
    if (p.rows.rows == 0)
        return;
    nvfp4_tile<SHAPE, FORMAT>(
        a.tile,
        {s->weight + e * s->weight_step, s->output_scale + e * s->n, output_of(s, a.out, e),
         (int)p.weight * SHAPE::TILE_SLABS, p.rows.rows, p.rows.first,
         a.x_scale ? a.x_scale : row_of(s->input_scale, (int64_t)e * s->partition_count),
         a.x_scale != NULL, row_of(s->fold_scale, e * s->n)},
        memory);
}

/* ---- launch ---- */

typedef struct {
    int tokens, rows, threads, shared;
    const void *kernel[4]; /* by nvfp4_format */
} shape;

template <class TILING> static constexpr shape shape_of(void) {
    return {TILING::TOKENS,
            TILING::ROWS,
            TILING::THREADS,
            TILING::STAGES * TILING::STAGE,
            {(const void *)nvfp4_experts<TILING, NVFP4_OF_BF16>,
             (const void *)nvfp4_experts<TILING, NVFP4_OF_F16>,
             (const void *)nvfp4_experts<TILING, NVFP4_OF_CODES>,
             (const void *)nvfp4_experts<TILING, NVFP4_FOLDED>}};
}

/* Tiles of the linear for decode and prefill. Between them the linear splits K, but experts have
 * enough tiles: four warps have all of K and two blocks of K a step, so that they synchronize half
 * as often. */
typedef tiling<32, 128, 1, 4, 1, 2, 4> experts_32;
typedef tiling<64, 128, 1, 4, 1, 2, 3> experts_64;

static const shape SHAPES[] = {shape_of<tiling_8>(), shape_of<tiling_16>(), shape_of<experts_32>(),
                               shape_of<experts_64>(), shape_of<tiling_128>()};

/* Returns the format for codes of x with a scale of the tensor or of tokens. */
static row_format format_folded(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_E4M3_TOKEN ? ROWS_HALVES_TOKEN : ROWS_HALVES_TENSOR;
}

/* Returns the format for exact weights; a layer that leaves the choice to the library is not
 * quantized. */
static row_format format_exact(const moq_linear_spec *spec) {
    if (spec->input == MOQ_INPUT_AS_IS || moq_linear_has_choice(spec))
        return ROWS_VALUES;
    return spec->input == MOQ_INPUT_NVFP4 ? ROWS_HALVES_NVFP4 : format_folded(spec);
}

static const shape *shape_for(int tokens) {
    const shape *s = SHAPES;
    while (s->tokens != tokens)
        s++;
    return s;
}

static moq_status multiply(const expert_product *p, nvfp4_format format, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    const shape *s = shape_for(p->tile_rows);
    nvfp4_product_args args = {};
    args.tile.x = (const uint8_t *)p->rows->data;
    args.tile.x_stride = row_bytes(p->rows->format, spec->dtype, spec->in_features);
    args.tile.m = p->most_rows;
    args.tile.k = spec->in_features;
    args.tile.n = (int)spec->out_features;
    args.tile.slabs = (int)moq_pack_slabs(spec->out_features);
    args.tile.blocks = (int)moq_pack_blocks(spec->in_features);
    args.tile.splits = 1;
    args.x_scale = p->rows->format == ROWS_HALVES_TOKEN ? (const float *)p->rows->scales : NULL;
    args.stack = stack_of(p);
    args.tiles = p->groups->tile;
    args.weight_tiles = (spec->out_features + s->rows - 1) / s->rows;
    args.out = (float *)p->out;
    return launch_product(p, s->kernel[format], args.weight_tiles, s->threads, s->shared, &args,
                          err);
}

static moq_status multiply_exact(const expert_product *p, moq_err *err) {
    if (p->rows->format != ROWS_VALUES)
        return multiply(p, NVFP4_OF_CODES, err);
    return multiply(p, p->spec->dtype == MOQ_DT_F16 ? NVFP4_OF_F16 : NVFP4_OF_BF16, err);
}

static moq_status multiply_folded(const expert_product *p, moq_err *err) {
    return multiply(p, NVFP4_FOLDED, err);
}

static row_tiling tiling_of(const moq_moe_call *call, double rows) {
    return {moq_moe_mma_nvfp4_tile_rows(call->spec, rows), 1, false};
}

static const expert_kernels EXACT = {format_exact, tiling_of, multiply_exact};
static const expert_kernels FOLDED = {format_folded, tiling_of, multiply_folded};

MOQ_EXPERTS_ENTRY(mma_nvfp4, EXACT)
MOQ_EXPERTS_ENTRY(mma_nvfp4_folded, FOLDED)

} // namespace moq::moe
