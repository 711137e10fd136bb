/* FP8 experts of many tokens on Hopper: products of rows of codes with the experts' W, e4m3 [E, N,
 * K] as prepared, in tiles of sm90_many_tile.h. The products are those of linears
 * (cuda/linear/sm90/sm90_fp8_many_products.h): 128 columns at a time, added to float32 sums.
 *
 * A step is 128 columns, 32 KB of W and 16 KB of rows in the 128-byte swizzle, in a ring of four. A
 * tile of 256 by 128 takes 1024 cycles of products a step, in which L2 has to deliver 48 bytes a
 * cycle and multiprocessor: that bounds it, at some 1300 TFLOP/s, and what tiles of 128 rows leave
 * empty. */
#include "cuda/linear/sm90/sm90_fp8_many_products.h"
#include "cuda/moe/sm90_many_launch.h"

namespace moq::moe_many {

template <bool GROUPS>
struct fp8_shape : fp8_many::tile<MOQ_WEIGHTS_FIRST, T, 2, MOQ_ALONE, GROUPS, false> {
    static constexpr int row_unit = 1, box_step = 128, box_bytes = WAVE_ROWS * 128;
    static constexpr int weight_stage = (4 * WAVE_ROWS + T) * 128, row_stage = weight_stage;
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
        int row = min(row_of_wave<USE>(a, p->along, group, wave), end_of_wave<USE>(a, wave) - 1);
        int64_t line = moq_block_row(&a->partitions, partition, row);
        block.row[wave] = a->block_scale + p->rows.expert * a->block_step + line * a->steps;
    }
    if (S::groups)
        fp8_many::hold_scales(&block, 0);
    return block;
}

template <class S, product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const fp8_many::consumer_ring *t,
                                               float *board, uint32_t turn, int group) {
    ring_place slot = {0, 0};
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block(a); q.number < q.end; q.number += q.stride) {
        place p = place_at(a, q.number);
        float sum[2][T / 2] = {}, factor = factor_of_token<S>(a, &p);
        fp8_many::block_scales<S> block = find_blocks<S, USE>(a, &p, group);
        fp8_many::multiply<S>(t, &block, 0, a->steps, group, &slot, sum);
        write_tile<S, USE>(a, &p, group, factor, board, turn, sum);
    }
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(THREADS, 1)
    experts_fp8(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[3 * MANY_STAGES];
    __shared__ __align__(8) float board[2][T];
    uint32_t ring = fixed_shared_address(smem), scales = ring + a.stages * S::weight_stage;
    uint32_t turn = scales + (S::groups ? a.stages * T * 4 : 0);
    launch_dependents();
    ring_barriers b = make_barriers(&a, barrier, 1);
    if (threadIdx.x < CONSUMERS) {
        more_registers<232>();
        int group =
            __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
        fp8_many::consumer_ring t = {{b.weights, b.rows, b.empty},
                                     wgmma_operand(ring + group * (2 * WAVE_ROWS * 128)),
                                     wgmma_operand(ring + 4 * WAVE_ROWS * 128),
                                     (const float *)(smem + a.stages * S::weight_stage),
                                     a.stages};
        consume<S, USE>(&a, &t, board[group], turn + group * (MANY_TURN_BYTES / 2), group);
    } else {
        fewer_registers<40>();
        copy_ring of_weights = {&weights, ring, b.weights, b.empty};
        copy_ring of_rows = {&rows, ring + 4 * WAVE_ROWS * 128, b.rows, b.empty};
        if (threadIdx.x == CONSUMERS)
            produce_weights<S, USE>(&a, &of_weights);
        else if (threadIdx.x == CONSUMERS + 32)
            produce_rows<S>(&a, &of_rows, scales);
    }
}

/* ---- launch ---- */

template <class S> static const void *kernel_of(product_use use) {
    return use == OF_GATE_AND_UP ? (const void *)experts_fp8<S, OF_GATE_AND_UP>
           : use == OF_ONE       ? (const void *)experts_fp8<S, OF_ONE>
                                 : (const void *)experts_fp8<S, OF_D>;
}

moq_status multiply_fp8(const many_product *p, moq_err *err) {
    const moe::expert_product *e = &p->product;
    const moq_linear_spec *spec = e->spec;
    bool groups = e->rows->form == moe::ROWS_GROUP;
    int64_t k = spec->in_features, steps = (k + 127) / 128;
    moq_cuda_device device;
    CUtensorMap weights, rows;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(p, steps, spec->out_features);
    a.x_scale = e->rows->form == moe::ROWS_TENSOR ? NULL : e->rows->scales;
    a.x_scale_stride = e->rows->scale_stride;
    a.input_scale = e->weight->input_scale;
    a.block_scale = (const float *)e->weight->weight_scale;
    a.block_step = moq_linear_block_rows(spec) * steps;
    a.partitions = moq_partitions_of(spec);
    int stage = fp8_shape<false>::weight_stage + (groups ? T * 4 : 0);
    int shared = lay_out(&a, stage, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_rows(&weights, e->weight->weight, p->moe->experts * spec->out_features,
                                k, k, WAVE_ROWS, err));
    MOQ_TRY(moq_tensor_map_rows(&rows, e->rows->data, e->most_rows, k, k, T, err));
    const void *kernel =
        groups ? kernel_of<fp8_shape<true>>(use_of(p)) : kernel_of<fp8_shape<false>>(use_of(p));
    return launch(p, kernel, &a, shared, &weights, &rows, err);
}

} // namespace moq::moe_many
