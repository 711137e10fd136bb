/* FP8 experts of many tokens on Hopper: products of rows of codes with the experts' W, e4m3 [E, N,
 * K] as prepared, in tiles of sm90_moe_many_tile.h. The products are those of linears
 * (cuda/linear/sm90/sm90_fp8_many_products.h): 128 columns at a time, added to float32 sums.
 *
 * A step is 128 columns, 32 KB of W and 16 KB of rows or less in the 128-byte swizzle, in a ring of
 * four or five. A tile of 256 by 128 takes 1024 cycles of products a step, in which L2 has to
 * deliver 48 bytes a cycle and multiprocessor: that bounds it, and what tiles leave empty. */
#include "cuda/linear/sm90/sm90_fp8_many_products.h"
#include "cuda/moe/sm90/sm90_moe_many_launch.h"

namespace moq::moe_many {

/* Tiles of up to MOST rows of tokens, of which N are multiplied. */
template <bool GROUPS, int MOST, int N>
struct fp8_shape : fp8_many::tile<MOQ_WEIGHTS_FIRST, N, 2, MOQ_ALONE, GROUPS, false> {
    static constexpr bool writes_codes = true, fine = false, half = MOST == 128, three = half;
    static constexpr bool pair = !GROUPS && MOST == 128;
    static constexpr int warpgroups = 2;
    static constexpr int tokens = MOST, stage = (4 * WAVE_ROWS + MOST) * 128;
    static constexpr int row_unit = 1, box_step = 128, box_bytes = WAVE_ROWS * 128;
    static constexpr int weight_stage = stage, row_stage = stage, box_rows = MOST / 4;
    static constexpr int lag = MOST == 128 ? 1 : 2;
    static constexpr int all_bytes = stage + (GROUPS ? MOST * 4 : 0);
    template <int M> using of_width = fp8_shape<GROUPS, MOST, M>;
};

/* The block scales of a warpgroup's rows. */
template <class S, product_use USE>
static __device__ __forceinline__ fp8_many::block_scales<S> find_blocks(const gemm_args *a,
                                                                        const place *p, int group) {
    fp8_many::block_scales<S> block = {};
    block.steps = a->steps;
#pragma unroll
    for (int wave = 0; S::groups && wave < 2; wave++) {
        int partition = USE == OF_GATE_AND_UP ? wave : 0;
        int row = min(row_of_wave<S, USE>(a, p->along, group, wave), end_of_wave<USE>(a, wave) - 1);
        int64_t line = moq_block_row(&a->partitions, partition, row);
        block.row[wave] = a->block_scale + p->rows.expert * a->block_step + line * a->steps;
    }
    if (S::groups)
        fp8_many::hold_scales(&block, 0);
    return block;
}

/* PLAIN: silu without a limit alone, which is compiled for all widths. */
template <class S, product_use USE, bool PLAIN>
static __device__ __forceinline__ void make_tile(const gemm_args *a,
                                                 const fp8_many::consumer_ring *t, const place *p,
                                                 ring_place *slot, const way_out *w, int group) {
    float sum[2][S::T / 2] = {}, factor = factor_of_token<S>(a, p);
    fp8_many::block_scales<S> block = find_blocks<S, USE>(a, p, group);
    fp8_many::multiply<S>(t, &block, 0, a->steps, group, slot, sum);
    write_tile<S, USE, PLAIN>(a, p, group, factor, w, sum);
}

template <class S, product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const fp8_many::consumer_ring *t,
                                               const way_out *w, int group) {
    ring_place slot = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    for (tile_queue q = tiles_of_block<S>(a); q.number < q.end; q.number += q.stride) {
        place p = place_at<S>(a, q.number);
        if (USE == OF_ONE || (USE == OF_GATE_AND_UP && !is_plain(&a->act)))
            make_tile<S, USE, false>(a, t, &p, &slot, w, group);
        else
            with_width<S, USE>(a, p.rows.rows, [&](auto width) {
                typedef typename S::template of_width<decltype(width)::columns> narrow;
                make_tile<narrow, USE, true>(a, t, &p, &slot, w, group);
            });
    }
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(128 * (S::warpgroups + 1), 1)
    experts_fp8(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[3 * MANY_STAGES];
    __shared__ __align__(8) float board[S::warpgroups][BOARD];
    __shared__ uint32_t most[2][TURNED];
    __shared__ uint32_t places[GATHERERS][BOARD / GATHERERS];
    uint32_t ring = fixed_shared_address(smem), scales = ring + a.stages * S::weight_stage;
    uint32_t turn = scales + (S::groups ? a.stages * S::tokens * 4 : 0);
    ring_barriers b = make_barriers<S>(&a, barrier);
    if (threadIdx.x < S::warpgroups * 128) {
        more_registers<232>();
        int group =
            __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
        fp8_many::consumer_ring t = {{b.weights, b.rows, b.empty},
                                     wgmma_operand(ring + group * (2 * WAVE_ROWS * 128)),
                                     wgmma_operand(ring + 4 * WAVE_ROWS * 128),
                                     (const float *)(smem + a.stages * S::weight_stage),
                                     a.stages};
        way_out w = {board[group], turn + group * (MANY_TURN_BYTES / 2), most};
        consume<S, USE>(&a, &t, &w, group);
    } else {
        fewer_registers<40>();
        copy_ring of_weights = {&weights, ring, b.weights, b.empty};
        copy_ring of_rows = {&rows, ring + 4 * WAVE_ROWS * 128, b.rows, b.empty};
        produce<S, USE>(&a, &of_weights, &of_rows, scales, places);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- launch ---- */

/* What a launch needs to know of a shape: the kernels by what they are for. */
typedef struct {
    int stage, box_rows, warpgroups;
    bool pair;
    const void *kernel[3];
} variant;

template <bool GROUPS, int MOST> static variant variant_of(void) {
    typedef fp8_shape<GROUPS, MOST, MOST> S;
    const void *one = NULL; /* such layers have small tiles */
    if constexpr (MOST == 64)
        one = (const void *)experts_fp8<S, OF_ONE>;
    return {
        S::all_bytes,
        S::box_rows,
        S::warpgroups,
        S::pair,
        {(const void *)experts_fp8<S, OF_GATE_AND_UP>, one, (const void *)experts_fp8<S, OF_D>}};
}

moq_status multiply_fp8(const many_product *p, moq_err *err) {
    const moe::expert_product *e = &p->product;
    const moq_linear_spec *spec = e->spec;
    bool groups = e->rows->form == moe::ROWS_GROUP, narrow = e->tile_rows == 64;
    variant v = groups   ? narrow ? variant_of<true, 64>() : variant_of<true, 128>()
                : narrow ? variant_of<false, 64>()
                         : variant_of<false, 128>();
    int64_t k = spec->in_features, steps = (k + 127) / 128;
    moq_cuda_device device;
    CUtensorMap weights, rows;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(p, steps, spec->out_features, v.warpgroups);
    a.x_scale = e->rows->form == moe::ROWS_TENSOR ? NULL : (const float *)e->rows->scales;
    a.x_scale_stride = e->rows->scale_stride;
    a.input_scale = e->weight->input_scale;
    a.block_scale = (const float *)e->weight->weight_scale;
    a.block_step = moq_linear_block_rows(spec) * steps;
    a.partitions = moq_partitions_of(spec);
    int shared = lay_out(&a, v.stage, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_rows(&weights, e->weight->weight, p->moe->experts * spec->out_features,
                                k, k, WAVE_ROWS, err));
    MOQ_TRY(
        moq_tensor_map_rows(&rows, e->rows->data, e->most_rows, k, k, (uint32_t)v.box_rows, err));
    return launch(p, v.kernel[use_of(p)], &a, shared, &weights, &rows, v.warpgroups, v.pair, err);
}

} // namespace moq::moe_many
