/* FP8 experts for prefill on Hopper: rows of codes by the experts' W, with per-tensor or per-token
 * scales in small tiles, and with scales of 128 columns in all. fp8_large.cu has large tiles
 * without such scales. Products are those of the linears
 * (cuda/linear/sm90/fp8_products.h): 128 columns at a time, added to float32 sums.
 *
 * Layouts: W e4m3 [E, N, K] as prepared; rows e4m3 [rows, K], sorted by expert; g and d as in
 * fp8_epilogue.h. Tile: 256 rows of W by up to 64 or 128 rows of tokens. A step is 128 columns, 32
 * KB of W and 16 KB of rows or less in the 128-byte swizzle, in a pipeline of four or five stages.
 *
 * Bound: with small tiles W, which comes from memory but once. A tile of 256 by 128 takes 1024
 * cycles of products a step, in which L2 has to deliver 48 bytes a cycle and multiprocessor: that
 * bounds it, and what tiles leave empty.
 *
 * Linked products (expert_product.written): the second one does not wait for the end of the first.
 * Each tile of rows has a counter, at its first row, of the warps that have written their columns
 * of its g; the thread that copies rows waits for all of them (tell_written, await_rows).
 *
 * No block waits for one that cannot run. Blocks of the second kernel start when all blocks of the
 * first have called launch_dependents or ended, so all of these have started. A block that has
 * started keeps its place and waits for none but its own warps and copies: before the call its
 * consumers have waited for the kernel ahead. Each of them ends, no matter how many blocks of the
 * second kernel wait. Work of other streams or processes delays it at most, as preempted blocks
 * come back. Kernels behind start when the blocks of the second have. If it is not launched by PDL
 * after all (ordinary edges of a graph, tools), the first kernel has ended and every counter is
 * full.
 *
 * Counters belong to one call: make_codes_of_token sets them to 0, whatever a failed call has left,
 * behind the grouping, which waits for the call before, and the first product waits for it. They
 * lie in the workspace, so that streams have their own. The second kernel ends after the first, so
 * that whoever waits for it waits for both; it writes d while the first may read rows of x, which
 * therefore lie elsewhere.
 *
 * A warp's stores come before its lane 0 adds (__syncwarp, release), the sum before the look at it
 * (acquire), and all of that before the copies, which are of another proxy (fence.proxy.async, by
 * the thread that looks and copies). Copies of rows behind the tile's, and of their scales, may
 * bring anything: they go to columns of products that are never written. */
#include "cuda/linear/sm90/fp8_products.h"
#include "cuda/moe/sm90/prefill/fp8_epilogue.h"
#include "cuda/moe/sm90/prefill/fp8_mainloop.h"
#include "cuda/moe/sm90/prefill/gemm.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_prefill {

/* Shape of tiles of up to MOST rows of tokens, of which N are multiplied. */
template <bool GROUPS, int MOST, int N> struct fp8_shape {
    static constexpr bool large = MOST > 64, groups = GROUPS;
    static constexpr bool tokens_first = false, by_steps = false, pair = false;
    static constexpr int warpgroups = 2, T = N, WAVES = 2, stride = 1;
    static constexpr bool two_sets = WAVES * T <= 128; /* as registers allow */
    static constexpr float unit = 1.0f;
    static constexpr int tokens = MOST, stage = (4 * WAVE_ROWS + MOST) * 128, box_rows = MOST / 4;
    static constexpr int at_once = N > OUT_TOKENS ? N / 2 : N; /* tokens of an epilogue step */
    static constexpr int all_bytes = stage + (GROUPS ? MOST * 4 : 0);
    template <int M> using of_width = fp8_shape<GROUPS, MOST, M>;
};

/* A number as a type. */
template <int N> struct width {
    static constexpr int columns = N;
};

/* Calls `make` with the least width of S that holds so many rows. */
template <class S, class F> static __device__ __forceinline__ void with_width(int rows, F make) {
    constexpr bool LARGE = S::large;
    rows = __shfl_sync(0xffffffffu, rows, 0); /* uniform */
    if (rows <= (LARGE ? 64 : 16))
        make(width<LARGE ? 64 : 16>());
    else if (rows <= (LARGE ? 96 : 32))
        make(width<LARGE ? 96 : 32>());
    else
        make(width<S::tokens>());
}

/* ---- epilogue operands, loaded a tile ahead: short tiles would not hide the latency ---- */

#define EPILOGUE_STAGES   2
#define EPILOGUE_BARRIERS (2 * EPILOGUE_STAGES)
#define HELD              32 /* block scales of a row that come with epilogue operands */

/* A pipeline of epilogue operands. Barriers: a stage of both warpgroups is full, and empty. */
typedef struct {
    epilogue_operands (*state)[2];
    uint32_t full, empty;
} epilogue_pipeline;

/* Initializes the barriers, by one thread before the block synchronizes. */
static __device__ __forceinline__ void make_epilogue_barriers(const epilogue_pipeline *b) {
    for (int i = 0; i < EPILOGUE_STAGES; i++) {
        mbarrier_init(b->full + 8u * i, 2 * 32);
        mbarrier_init(b->empty + 8u * i, 8 * WARP_ARRIVALS);
    }
}

/* Returns the block scales of a wave's rows, one a step. */
template <class S, product_use USE>
static __device__ __forceinline__ const float *line_of_wave(const gemm_args *a, const place *p,
                                                            int group, int wave) {
    int partition = USE == OF_GATE_AND_UP ? wave : 0;
    int row = min(row_of_wave<S, USE>(a, p->along, group, wave), end_of_wave<USE>(a, wave) - 1);
    int64_t line = moq_block_row(&a->partitions, partition, row);
    return a->block_scale + p->rows.expert * a->block_step + line * a->steps;
}

/* Copies block scales to the place of factors, which rows with group scales do not have. */
template <class S, product_use USE>
static __device__ __forceinline__ void fetch_block_scales(const gemm_args *a, const place *p,
                                                          int group, epilogue_operands *state) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int wave = 0; wave < 2; wave++)
        copy_async_4(shared_address(&state->factor[wave * HELD + lane]),
                     line_of_wave<S, USE>(a, p, group, wave) + min(lane, a->steps - 1), 4);
}

template <class S, product_use USE>
static __device__ __forceinline__ void produce_epilogue_operands(const gemm_args *a,
                                                                 const scheduler_queue *scheduler,
                                                                 const epilogue_pipeline *b) {
    pipeline_state slot = {0, 0}, at = {0, 0};
    int lane = threadIdx.x % 32;
    if (!a->linked) /* linked kernels' epilogue operands are of weights alone */
        wait_for_predecessor();
    for (;;) {
        place p = read_published_tile(scheduler, &at);
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(scheduler->empty + 8u * at.index);
        advance(&at, SCHEDULER_STAGES);
        if (p.along < 0)
            return;
        mbarrier_wait(b->empty + 8u * slot.index, slot.parity ^ 1);
#pragma unroll 1
        for (int group = 0; group < 2; group++) {
            epilogue_operands *state = &b->state[slot.index][group];
            fetch_epilogue_operands<S, USE>(a, &p, group, state, lane, 32);
            if (S::groups)
                fetch_block_scales<S, USE>(a, &p, group, state);
        }
        copy_async_arrive(b->full + 8u * slot.index);
        mbarrier_arrive(b->full + 8u * slot.index);
        advance(&slot, EPILOGUE_STAGES);
    }
}

/* ---- tiles ---- */

/* Returns the block scales of a warpgroup's rows. */
template <class S, product_use USE>
static __device__ __forceinline__ fp8_prefill::block_scales<S>
find_blocks(const gemm_args *a, const place *p, int group, const epilogue_operands *state) {
    fp8_prefill::block_scales<S> block = {};
    block.steps = a->steps;
#pragma unroll
    for (int wave = 0; S::groups && wave < 2; wave++) {
        block.row[wave] = line_of_wave<S, USE>(a, p, group, wave);
        block.held[wave] = state->factor[wave * HELD + threadIdx.x % 32];
    }
    return block;
}

/* A consumer warpgroup's pipelines of steps and epilogue operands, its output path, its step and
 * its number of tiles. */
typedef struct {
    fp8_prefill::consumer_pipeline steps;
    epilogue_pipeline epilogue;
    output_path out;
    pipeline_state step;
    uint32_t tiles;
} tile_maker;

/* Returns the pipeline state of the nth use of a pipeline. */
template <int PLACES> static __device__ __forceinline__ pipeline_state nth_place(uint32_t n) {
    return {(int)(n % PLACES), (int)(n / PLACES % 2)};
}

/* Counts a warp that has written its part of g of a tile. */
static __device__ __forceinline__ void tell_written(const gemm_args *a, const place *p) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        add_release(a->written + p->rows.first, 1);
}

/* Makes a tile. FAST: is_fast of the activation. */
template <class S, product_use USE, bool FAST>
static __device__ __forceinline__ void make_tile(const gemm_args *a, tile_maker *m, const place *p,
                                                 int group) {
    float sum[2][S::T / 2] = {};
    pipeline_state state = nth_place<EPILOGUE_STAGES>(m->tiles);
    m->out.state = &m->epilogue.state[state.index][group];
    if (S::groups)
        mbarrier_wait(m->epilogue.full + 8u * state.index, state.parity);
    fp8_prefill::block_scales<S> block = find_blocks<S, USE>(a, p, group, m->out.state);
    fp8_prefill::multiply<S>(&m->steps, &block, 0, a->steps, group, &m->step, sum);
    if (!S::groups)
        mbarrier_wait(m->epilogue.full + 8u * state.index, state.parity);
    write_tile<S, USE, FAST>(a, p, group, &m->out, sum);
    if (USE != OF_D && a->written)
        tell_written(a, p);
    warp_releases<false>(m->epilogue.empty + 8u * state.index);
    m->tiles++;
}

template <class S, product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, tile_maker *m,
                                               const scheduler_queue *scheduler, int group) {
    if (!a->linked)
        wait_for_predecessor();
    launch_dependents(); /* the next kernel may rely on the groups */
    for (;;) {
        pipeline_state at = nth_place<SCHEDULER_STAGES>(m->tiles);
        place p = read_published_tile(scheduler, &at);
        warp_releases<false>(scheduler->empty + 8u * at.index);
        if (p.along < 0)
            break;
        if (!is_fast<USE>(&a->act))
            make_tile<S, USE, false>(a, m, &p, group);
        else
            with_width<S>(p.rows.rows, [&](auto width) {
                typedef typename S::template of_width<decltype(width)::columns> narrow;
                make_tile<narrow, USE, true>(a, m, &p, group);
            });
    }
    if (a->linked)
        wait_for_predecessor(); /* a kernel that waits for this one waits for all before it */
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(128 * (S::warpgroups + 1), 1)
    experts_fp8(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[PIPELINE_BARRIERS + EPILOGUE_BARRIERS];
    __shared__ int4 places[SCHEDULER_STAGES];
    __shared__ epilogue_operands state[EPILOGUE_STAGES][2];
    __shared__ uint32_t most[2][OUT_TOKENS];
    uint32_t pipeline = fixed_shared_address(smem), scales = pipeline + a.stages * S::stage;
    uint32_t room = pipeline + a.stages * S::all_bytes;
    uint32_t epilogue_barriers = fixed_shared_address(barrier + PIPELINE_BARRIERS);
    epilogue_pipeline epilogue = {state, epilogue_barriers,
                                  epilogue_barriers + 8 * EPILOGUE_STAGES};
    if (threadIdx.x == 0)
        make_epilogue_barriers(&epilogue);
    pipeline_barriers b = make_barriers<S>(&a, barrier);
    scheduler_queue scheduler = scheduler_queue_at(&b, places);
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* uniform */
    if (warp < 8) {
        more_registers<232>();
        int group = warp / 4;
        tile_maker m = {{b.weights, b.rows, b.empty,
                         wgmma_operand(pipeline + group * (2 * WAVE_ROWS * 128)),
                         wgmma_operand(pipeline + 4 * WAVE_ROWS * 128),
                         (const float *)(smem + a.stages * S::stage), a.stages},
                        epilogue,
                        {NULL, room + group * OUT_ROOM, most},
                        {0, 0},
                        0};
        consume<S, USE>(&a, &m, &scheduler, group);
    } else {
        fewer_registers<40>();
        copy_pipeline of_weights = {&weights, pipeline, b.weights, b.empty};
        copy_pipeline of_rows = {&rows, pipeline + 4 * WAVE_ROWS * 128, b.rows, b.empty};
        if (warp == 10)
            produce_epilogue_operands<S, USE>(&a, &scheduler, &epilogue);
        else
            produce<S, USE>(&a, &of_weights, &of_rows, scales, &scheduler);
    }
}

/* ---- launch ---- */

/* A shape for the launch: kernels by product_use. */
typedef struct {
    int stage, box_rows;
    const void *kernel[3];
} variant;

template <bool GROUPS, int MOST> static variant variant_of(void) {
    typedef fp8_shape<GROUPS, MOST, MOST> S;
    return {S::all_bytes,
            S::box_rows,
            {(const void *)experts_fp8<S, OF_GATE_AND_UP>, (const void *)experts_fp8<S, OF_ONE>,
             (const void *)experts_fp8<S, OF_D>}};
}

/* Sets the stages of `stage` bytes that fit; returns the dynamic shared memory. */
static int smem_layout(gemm_args *a, int stage, int limit) {
    int fixed = 1024 + (PIPELINE_BARRIERS + EPILOGUE_BARRIERS) * 8 + SCHEDULER_STAGES * 16 +
                2 * EPILOGUE_STAGES * (int)sizeof(epilogue_operands) + 2 * OUT_TOKENS * 4;
    int stages = (limit - fixed - 2 * OUT_ROOM) / stage;
    a->stages = stages < MANY_STAGES ? stages : MANY_STAGES;
    MOQ_ASSERT(a->stages >= 2);
    return a->stages * stage + 2 * OUT_ROOM;
}

/* Returns the warps that write g of a tile of rows: those of a block for each tile of W13. */
static int writers_of_g(const moe::expert_product *p) {
    int64_t columns = (p->call->spec->gated ? 2 : 4) * WAVE_ROWS;
    return 8 * (int)((p->call->spec->w2.in_features + columns - 1) / columns);
}

moq_status multiply_fp8(const moe::expert_product *p, moq_err *err) {
    bool groups = p->rows->format == moe::ROWS_GROUP, narrow = p->tile_rows == 64;
    if (!groups && !narrow)
        return multiply_fp8_large(p, err);
    variant v = !groups  ? variant_of<false, 64>()
                : narrow ? variant_of<true, 64>()
                         : variant_of<true, 128>();
    int64_t k = p->spec->in_features, n = p->spec->out_features;
    int limit;
    CUtensorMap weights, rows;
    MOQ_TRY(find_shared_limit(p, &limit, err));
    gemm_args a = fp8_args_of(p);
    a.writers = writers_of_g(p);
    int shared = smem_layout(&a, v.stage, limit);
    MOQ_TRY(
        moq_tensor_map_pairs(&weights, p->weight->weight, p->call->spec->experts * n, k, k, err));
    MOQ_TRY(
        moq_tensor_map_rows(&rows, p->rows->data, p->most_rows, k, k, (uint32_t)v.box_rows, err));
    return launch(p, v.kernel[use_of(p)], &a, shared, &weights, &rows, 2, false, err);
}

} // namespace moq::moe_prefill
