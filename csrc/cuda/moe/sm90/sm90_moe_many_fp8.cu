/* FP8 experts of many tokens on Hopper: products of rows of codes with the experts' W, e4m3 [E, N,
 * K] as prepared, in tiles of sm90_moe_many_tile.h; those of this file have scales of groups, for
 * the others see sm90_moe_many_fp8_small.cu and sm90_moe_many_fp8_large.cu. The products are those
 * of linears (cuda/linear/sm90/sm90_fp8_many_products.h): 128 columns at a time, added to float32
 * sums.
 *
 * A step is 128 columns, 32 KB of W and 16 KB of rows or less in the 128-byte swizzle, in a ring of
 * four or five. A tile of 256 by 128 takes 1024 cycles of products a step, in which L2 has to
 * deliver 48 bytes a cycle and multiprocessor: that bounds it, and what tiles leave empty. */
#include "cuda/linear/sm90/sm90_fp8_many_products.h"
#include "cuda/moe/sm90/sm90_moe_many_copies.h"
#include "cuda/moe/sm90/sm90_moe_many_fp8_outputs.h"
#include "cuda/moe/sm90/sm90_moe_many_launch.h"

namespace moq::moe_many {

/* Tiles of up to MOST rows of tokens, of which N are multiplied. */
template <int MOST, int N>
struct fp8_shape : fp8_many::tile<MOQ_WEIGHTS_FIRST, N, 2, MOQ_ALONE, true, false> {
    static constexpr bool large = MOST > 64;
    static constexpr int warpgroups = 2;
    static constexpr int tokens = MOST, stage = (4 * WAVE_ROWS + MOST) * 128, box_rows = MOST / 4;
    static constexpr int at_once = N > OUT_TOKENS ? N / 2 : N; /* tokens that leave */
    static constexpr int all_bytes = stage + MOST * 4;
    template <int M> using of_width = fp8_shape<MOST, M>;
};

/* What a number is to a template. */
template <int N> struct width {
    static constexpr int columns = N;
};

/* Calls `make` with the least width of S that has room for so many rows. */
template <class S, class F> static __device__ __forceinline__ void with_width(int rows, F make) {
    rows = __shfl_sync(0xffffffffu, rows, 0); /* the compiler sees it is one */
    constexpr bool LARGE = S::large;
    if (LARGE && rows <= 64)
        make(width<64>());
    else if (LARGE && rows <= 96)
        make(width<LARGE ? 96 : 64>());
    else
        make(width<S::tokens>());
}

/* The block scales of a warpgroup's rows. */
template <class S, product_use USE>
static __device__ __forceinline__ fp8_many::block_scales<S> find_blocks(const gemm_args *a,
                                                                        const place *p, int group) {
    fp8_many::block_scales<S> block = {};
    block.steps = a->steps;
#pragma unroll
    for (int wave = 0; wave < 2; wave++) {
        int partition = USE == OF_GATE_AND_UP ? wave : 0;
        int row = min(row_of_wave<S, USE>(a, p->along, group, wave), end_of_wave<USE>(a, wave) - 1);
        int64_t line = moq_block_row(&a->partitions, partition, row);
        block.row[wave] = a->block_scale + p->rows.expert * a->block_step + line * a->steps;
    }
    fp8_many::hold_scales(&block, 0);
    return block;
}

/* PLAIN: is_near alone, which is compiled for all widths. */
template <class S, product_use USE, bool PLAIN>
static __device__ __forceinline__ void make_tile(const gemm_args *a,
                                                 const fp8_many::consumer_ring *t, const place *p,
                                                 ring_place *slot, const way_out *w, int group) {
    float sum[2][S::T / 2] = {};
    fetch_board<S, USE>(a, p, group, w->board);
    fp8_many::block_scales<S> block = find_blocks<S, USE>(a, p, group);
    fp8_many::multiply<S>(t, &block, 0, a->steps, group, slot, sum);
    write_tile<S, USE, PLAIN>(a, p, group, w, sum);
}

template <class S, product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const fp8_many::consumer_ring *t,
                                               const way_out *w, const claim_board *claims,
                                               int group) {
    ring_place slot = {0, 0}, at = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    for (;;) {
        place p = see_claim(claims, &at);
        warp_releases<false>(claims->empty + 8u * at.index);
        advance(&at, CLAIMS);
        if (p.along < 0)
            return;
        if (USE == OF_ONE || (USE == OF_GATE_AND_UP && !is_near(&a->act)))
            make_tile<S, USE, false>(a, t, &p, &slot, w, group);
        else
            with_width<S>(p.rows.rows, [&](auto width) {
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
    __shared__ __align__(8) uint64_t barrier[RING_BARRIERS];
    __shared__ int4 places[CLAIMS];
    __shared__ out_board board[S::warpgroups];
    __shared__ uint32_t most[2][OUT_TOKENS];
    uint32_t ring = fixed_shared_address(smem), scales = ring + a.stages * S::stage;
    uint32_t room = scales + a.stages * S::tokens * 4;
    ring_barriers b = make_barriers<S>(&a, barrier);
    claim_board claims = claims_at(&b, places);
    if (threadIdx.x < S::warpgroups * 128) {
        more_registers<232>();
        int group =
            __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
        fp8_many::consumer_ring t = {{b.weights, b.rows, b.empty},
                                     wgmma_operand(ring + group * (2 * WAVE_ROWS * 128)),
                                     wgmma_operand(ring + 4 * WAVE_ROWS * 128),
                                     (const float *)(smem + a.stages * S::stage),
                                     a.stages};
        way_out w = {&board[group], room + group * OUT_ROOM, most};
        consume<S, USE>(&a, &t, &w, &claims, group);
    } else {
        fewer_registers<40>();
        copy_ring of_weights = {&weights, ring, b.weights, b.empty};
        copy_ring of_rows = {&rows, ring + 4 * WAVE_ROWS * 128, b.rows, b.empty};
        produce<S, USE>(&a, &of_weights, &of_rows, scales, &claims);
    }
}

/* ---- launch ---- */

/* What a launch needs to know of a shape: the kernels by what they are for. */
typedef struct {
    int stage, box_rows;
    const void *kernel[3];
} variant;

template <int MOST> static variant variant_of(void) {
    typedef fp8_shape<MOST, MOST> S;
    const void *one = NULL; /* such layers have small tiles */
    if constexpr (MOST == 64)
        one = (const void *)experts_fp8<S, OF_ONE>;
    return {
        S::all_bytes,
        S::box_rows,
        {(const void *)experts_fp8<S, OF_GATE_AND_UP>, one, (const void *)experts_fp8<S, OF_D>}};
}

/* As many stages as fit, of so many bytes. Dynamic shared memory is returned. */
static int lay_out(gemm_args *a, int stage, int limit) {
    int fixed =
        1024 + RING_BARRIERS * 8 + CLAIMS * 16 + 2 * (int)sizeof(out_board) + 2 * OUT_TOKENS * 4;
    int stages = (limit - fixed - 2 * OUT_ROOM) / stage;
    a->stages = stages < MANY_STAGES ? stages : MANY_STAGES;
    MOQ_ASSERT(a->stages >= 2);
    return a->stages * stage + 2 * OUT_ROOM;
}

moq_status multiply_fp8(const many_product *p, moq_err *err) {
    const moe::expert_product *e = &p->product;
    bool groups = e->rows->form == moe::ROWS_GROUP, narrow = e->tile_rows == 64;
    if (!groups)
        return narrow ? multiply_fp8_small(p, err) : multiply_fp8_large(p, err);
    variant v = narrow ? variant_of<64>() : variant_of<128>();
    int64_t k = e->spec->in_features, n = e->spec->out_features;
    moq_cuda_device device;
    CUtensorMap weights, rows;
    MOQ_TRY(moq_cuda_query_device(e->spec->device.index, &device, err));
    gemm_args a = fp8_args_of(p);
    int shared = lay_out(&a, v.stage, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_pairs(&weights, e->weight->weight, p->moe->experts * n, k, k, err));
    MOQ_TRY(
        moq_tensor_map_rows(&rows, e->rows->data, e->most_rows, k, k, (uint32_t)v.box_rows, err));
    return launch(p, v.kernel[use_of(p)], &a, shared, &weights, &rows, 2, false, err);
}

} // namespace moq::moe_many
