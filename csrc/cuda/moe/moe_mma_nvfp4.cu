/* Products of experts of packed NVFP4 weights with rows of 16 bits: tiles of
 * cuda/linear/mma_nvfp4_tile.h. */
#include "cuda/linear/mma_nvfp4_tile.h"
#include "cuda/moe/expert_product.h"

namespace moq::moe {

using namespace mma_nvfp4;

typedef struct {
    nvfp4_args tile;
    expert_stack stack;
    const row_tile *tiles;
    int64_t weight_tiles;
    float *out;
} nvfp4_product_args;

template <class SHAPE, moq_nvfp4_type TYPE>
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
    nvfp4_tile<SHAPE, TYPE>(a.tile,
                            {s->weight + e * s->weight_step, s->output_scale + e * s->n,
                             output_of(s, a.out, e), (int)p.weight * SHAPE::TILE_SLABS, p.rows.rows,
                             p.rows.first},
                            memory);
}

/* ---- launch ---- */

typedef struct {
    int tokens, rows, threads, shared;
    const void *kernel[2]; /* by moq_nvfp4_type */
} shape;

template <class TILING> static constexpr shape shape_of(void) {
    return {TILING::TOKENS,
            TILING::ROWS,
            TILING::THREADS,
            TILING::STAGES * TILING::STAGE,
            {(const void *)nvfp4_experts<TILING, MOQ_NVFP4_BF16>,
             (const void *)nvfp4_experts<TILING, MOQ_NVFP4_F16>}};
}

static const shape SHAPES[] = {shape_of<tiling_8>(), shape_of<tiling_16>(), shape_of<tiling_32>(),
                               shape_of<tiling_64>(), shape_of<tiling_128>()};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };

static row_form form(const moq_linear_spec *spec) {
    (void)spec;
    return ROWS_VALUES;
}

/* The least tile that holds an expert's rows where they are a quarter more than on average. */
static int tile_rows(double rows) {
    int i = 0;
    while (i < SHAPE_COUNT - 1 && rows * 1.25 > SHAPES[i].tokens)
        i++;
    return SHAPES[i].tokens;
}

static const shape *shape_for(int tokens) {
    const shape *s = SHAPES;
    while (s->tokens != tokens)
        s++;
    return s;
}

static moq_status multiply(const expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    const shape *s = shape_for(p->tile_rows);
    nvfp4_product_args args = {};
    args.tile.x = (const uint8_t *)p->rows->data;
    args.tile.x_stride = row_bytes(ROWS_VALUES, spec->dtype, spec->in_features);
    args.tile.m = p->most_rows;
    args.tile.k = spec->in_features;
    args.tile.n = (int)spec->out_features;
    args.tile.slabs = (int)moq_pack_slabs(spec->out_features);
    args.tile.blocks = (int)moq_pack_blocks(spec->in_features);
    args.tile.splits = 1;
    args.stack = stack_of(p);
    args.tiles = p->groups->tile;
    args.weight_tiles = (spec->out_features + s->rows - 1) / s->rows;
    args.out = p->out;
    moq_nvfp4_type type = spec->dtype == MOQ_DT_F16 ? MOQ_NVFP4_F16 : MOQ_NVFP4_BF16;
    return launch_product(p, s->kernel[type], args.weight_tiles, s->threads, s->shared, &args, err);
}

const product_kind NVFP4_PRODUCT = {form, tile_rows, multiply};

} // namespace moq::moe
