/* Experts of every shape, weight and chip on CUDA cores, in the tiles of cuda/linear/simt_tile.h,
 * which has layouts and bounds. */
#include "cuda/choice/grid.h"
#include "cuda/linear/any/simt_tile.h"
#include "cuda/moe/expert_product.h"

namespace moq::moe {

#define FEW_TILES 1024 /* with fewer blocks than this, a warp takes one row of W */

typedef struct {
    simt::simt_args tile;
    expert_stack stack;
    const row_tile *tiles;
    int64_t weight_tiles;
    float *out;
    int group;
} simt_product_args;

template <int MODE, int WEIGHT, int ROWS>
static __global__ void __launch_bounds__(THREADS)
    simt_experts(const __grid_constant__ simt_product_args a) {
    launch_dependents();
    wait_for_predecessor();
    product_place p = place_of_product(a.tiles, a.weight_tiles);
    const expert_stack *s = &a.stack;
    int e = p.rows.expert;
    if (p.rows.rows == 0)
        return;
    moq_tile rows =
        moq_find_tile(&a.tile.partitions, a.tile.partition_count, p.weight, WARPS * ROWS);
    simt::simt_weight w = {s->weight + e * s->weight_step,
                           s->weight_scale + e * s->scale_step,
                           row_of(s->output_scale, e * s->n),
                           row_of(s->fold_scale, e * s->n),
                           row_of(s->input_scale, (int64_t)e * s->partition_count),
                           a.group};
    simt::simt_tile<MODE, WEIGHT, ROWS>(
        a.tile, {w, output_of(s, a.out, e), rows, p.rows.first, p.rows.rows});
}

template <int MODE, int WEIGHT> struct simt_kernel {
    static const void *of(bool few) {
        return few ? (const void *)simt_experts<MODE, WEIGHT, 1>
                   : (const void *)simt_experts<MODE, WEIGHT, PREFILL_ROWS>;
    }
};

/* Returns the format: values, which the kernel quantizes itself and may need amax for, or the codes
 * of x. */
static row_format format_of(const moq_linear_spec *spec) {
    moq_input_mode input = simt::input_of(spec);
    if (!spec->quantized_input)
        return input == MOQ_INPUT_E4M3_TOKEN || input == MOQ_INPUT_INT8 ? ROWS_AMAX : ROWS_VALUES;
    return input == MOQ_INPUT_NVFP4        ? ROWS_NVFP4
           : input == MOQ_INPUT_E4M3_GROUP ? ROWS_GROUP
           : input == MOQ_INPUT_E4M3_TOKEN ? ROWS_TOKEN
                                           : ROWS_TENSOR;
}

static row_tiling tiling_of(const moq_moe_call *, double) {
    return {TOKENS, 1, false};
}

static moq_status multiply(const expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    int64_t stride = row_bytes(p->rows->format, spec->dtype, spec->in_features);
    bool few = moq_tile_count(spec, WARPS * PREFILL_ROWS) * p->tiles < FEW_TILES;
    simt_product_args args = {};
    if (spec->quantized_input)
        args.tile.coded = {(const uint8_t *)p->rows->data, stride, p->rows->scales,
                           p->rows->scale_stride};
    else
        args.tile.x = {p->rows->data, stride / (int64_t)moq_dtype_size(spec->dtype), spec->dtype};
    args.tile.k = spec->in_features;
    args.tile.amax = (const float *)p->rows->scales;
    args.tile.partition_count = spec->partition_count;
    args.tile.partitions = moq_partitions_of(spec);
    args.stack = stack_of(p);
    args.tiles = p->groups->tile;
    args.weight_tiles = moq_tile_count(spec, few ? WARPS : WARPS * PREFILL_ROWS);
    args.out = (float *)p->out;
    args.group = spec->group_size;
    return launch_product(p, simt::kernel_for<simt_kernel>(spec, few), args.weight_tiles, THREADS,
                          0, &args, err);
}

static const expert_kernels SIMT = {format_of, tiling_of, multiply};

MOQ_EXPERTS_ENTRY(simt, SIMT)

} // namespace moq::moe
