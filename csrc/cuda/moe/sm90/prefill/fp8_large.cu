/* FP8 experts for prefill on Hopper in large tiles, if neither W nor rows have scales of 128
 * columns. Layouts, codes and sums are those of the small tiles (fp8.cu).
 *
 * Tile: 256 rows of an expert's W by up to 136 rows of its tokens. Two blocks of a cluster have two
 * tiles of the same rows of W, of which each copies half to both. A warpgroup has a pipeline of its
 * own for its 128 rows of W, and both share one for the tokens: one warpgroup can be LAG steps
 * ahead, so that its epilogue runs while the other multiplies and the other way about. The first
 * stays ahead, as both do the same; the second starts that much later.
 *
 * Bound: a step of 136 tokens takes the tensor cores 1088 cycles, and L2 has to deliver 33 kB, 23
 * bytes a cycle and multiprocessor, which is what it delivers to all of them at once. */
#include "core/invariant.h"
#include "cuda/device/wgmma.h"
#include "cuda/moe/sm90/prefill/fp8_epilogue.h"
#include "cuda/moe/sm90/prefill/fp8_mainloop.h"
#include "cuda/moe/sm90/prefill/gemm.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_prefill {

#define LAG            3
#define W_STAGES       3
#define W_BOX          (WAVE_ROWS * 128)
#define W_STAGE        (2 * W_BOX) /* stage of a warpgroup */
#define LARGE_BARRIERS (4 * W_STAGES + 2 * MANY_STAGES)

/* Shape of large tiles of which N columns are multiplied. */
template <int N> struct large_tile {
    static constexpr bool groups = false;
    static constexpr int warpgroups = 2, T = N;
    static constexpr int tokens = 136, box_rows = 24, stage = 6 * box_rows * 128;
    static constexpr int at_once = N > 128 ? 48 : N > OUT_TOKENS ? N / 2 : N;
    static constexpr float unit = 1.0f;
};

typedef large_tile<136> largest;

/* ---- tiles ---- */

/* Returns the pairs of tiles of a pair of blocks, after the predecessor has ended. */
static __device__ __forceinline__ tile_queue tiles_of_block(const gemm_args *a) {
    return {(int)blockIdx.x / 2, a->count[1] / 2 * a->row_tiles, (int)gridDim.x / 2};
}

static __device__ __forceinline__ place place_at(const gemm_args *a, int number) {
    int tile = number / a->row_tiles, along = number - tile * a->row_tiles;
    return {a->tiles[2 * tile + (int)rank_in_cluster()], along};
}

/* ---- pipelines ---- */

/* Returns the barriers of full stages of a warpgroup's W; those of empty stages follow. */
static __device__ __forceinline__ uint32_t barriers_of_weights(uint32_t first, int group) {
    return first + (uint32_t)group * (16 * W_STAGES);
}

static __device__ __forceinline__ uint32_t barriers_of_rows(uint32_t first) {
    return first + 32 * W_STAGES;
}

/* Initializes the barriers; all threads call, first of all. */
static __device__ __forceinline__ uint32_t make_large_barriers(const gemm_args *a,
                                                               uint64_t *memory) {
    uint32_t first = fixed_shared_address(memory), rows = barriers_of_rows(first);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * W_STAGES; i++) {
            uint32_t own = barriers_of_weights(first, i / W_STAGES) + 8u * (i % W_STAGES);
            mbarrier_init(own, 1);
            mbarrier_init(own + 8 * W_STAGES, 2 * 4 * WARP_ARRIVALS);
        }
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(rows + 8u * i, 1);
            mbarrier_init(rows + 8u * (MANY_STAGES + i), 8 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    cluster_sync(); /* visible to the other block */
    return first;
}

/* Copies a wave of a warpgroup's W to both blocks of the cluster. */
template <product_use USE>
static __device__ __forceinline__ void produce_half(const gemm_args *a, const CUtensorMap *map,
                                                    uint32_t pipeline, uint32_t full, int group) {
    int rank = (int)rank_in_cluster();
    pipeline_state slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(map);
    if (!a->early)
        wait_for_predecessor();
    for (tile_queue q = tiles_of_block(a); q.number < q.end; q.number += q.stride) {
        place p = place_at(a, q.number);
        int row = p.rows.expert * a->height + row_of_wave<largest, USE>(a, p.along, group, rank);
        for (int step = 0; step < a->steps; step++) {
            uint32_t own = full + 8u * slot.index;
            mbarrier_wait(own + 8 * W_STAGES, slot.parity ^ 1);
            mbarrier_expect(own, W_STAGE);
            copy_pairs_to_both(pipeline + (uint32_t)(slot.index * W_STAGE + rank * W_BOX), map,
                               step * 128, row, own, policy);
            advance(&slot, W_STAGES);
        }
    }
}

static __device__ __forceinline__ void produce_tokens(const gemm_args *a, const copy_pipeline *r) {
    pipeline_state slot = {0, 0};
    prefetch_map(r->map);
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block(a); q.number < q.end; q.number += q.stride) {
        place p = place_at(a, q.number);
        copy_rows<largest>(a, r, 0, &p, &slot);
    }
}

/* ---- products ---- */

/* A consumer warpgroup's pipelines: barriers, and operands of the first stages. */
typedef struct {
    uint32_t weights, rows;
    uint64_t left, right;
    int stages;
} large_pipeline;

/* A consumer warpgroup's position. After step `tell` of a tile the other warpgroup may start,
 * unless it is -1. */
typedef struct {
    pipeline_state weights, rows;
    int tell;
} large_place;

template <class S>
static __device__ __forceinline__ void multiply_large(const large_pipeline *t, int steps,
                                                      large_place *at, float (&sum)[2][S::T / 2]) {
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        uint32_t weights = t->weights + 8u * at->weights.index;
        uint32_t rows = t->rows + 8u * at->rows.index;
        uint64_t left = t->left + (uint32_t)(at->weights.index * (W_STAGE / 16));
        uint64_t right = t->right + (uint32_t)(at->rows.index * (S::stage / 16));
        mbarrier_wait(weights, at->weights.parity);
        mbarrier_wait(rows, at->rows.parity);
#pragma unroll
        for (int wave = 0; wave < 2; wave++) {
            float c[S::T / 2];
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++)
                wgmma_e4m3(c, left + wave * (W_BOX / 16) + 2 * j, right + 2 * j, j);
            wgmma_commit();
            wgmma_wait<0>();
            stay_here(c);
            if (wave == 1) {
                warp_releases<true>(weights + 8 * W_STAGES);
                warp_releases<false>(rows + 8 * MANY_STAGES);
            }
#pragma unroll
            for (int i = 0; i < S::T / 2; i++)
                sum[wave][i] += c[i];
        }
        advance(&at->weights, W_STAGES);
        advance(&at->rows, t->stages);
        if (step == at->tell)
            barrier_arrive(1, 256);
    }
    at->tell = -1;
}

/* The output path of the next tile, and the epilogue operands of the one after. */
typedef struct {
    output_path out;
    epilogue_operands *other;
} large_paths;

/* Returns the place of the queue's next tile, or of its last one. */
static __device__ __forceinline__ place place_of_next(const gemm_args *a, const tile_queue *q) {
    return place_at(a, min(q->number, q->end - 1));
}

/* Loads the epilogue operands of a tile, by its warpgroup. */
template <product_use USE>
static __device__ __forceinline__ void
prefetch_epilogue_operands(const gemm_args *a, const place *p, const output_path *w, int group) {
    fetch_epilogue_operands<largest, USE>(a, p, group, w->state, threadIdx.x % 128, 128);
    copy_async_commit();
}

/* Makes the tile at *p, whose epilogue operands are on their way. Meanwhile it finds the next tile
 * of the queue and loads its operands to the place of the previous tile's. FAST: is_fast of the
 * activation. */
template <class S, product_use USE, bool FAST>
static __device__ __forceinline__ void make_tile(const gemm_args *a, const large_pipeline *t,
                                                 const tile_queue *q, place *p, large_place *at,
                                                 large_paths *w, int group) {
    float sum[2][S::T / 2] = {};
    multiply_large<S>(t, a->steps, at, sum);
    place next = place_of_next(a, q);
    copy_async_wait<0>();
    barrier_sync(2 + group, 128); /* all threads have finished the tile before */
    output_path own = w->out;
    w->out.state = w->other;
    w->other = own.state;
    if (q->number < q->end)
        prefetch_epilogue_operands<USE>(a, &next, &w->out, group);
    write_tile<S, USE, FAST>(a, p, group, &own, sum);
    *p = next;
}

/* Makes a tile with the narrowest products that hold its rows. */
template <product_use USE>
static __device__ __forceinline__ void
make_fitting_tile(const gemm_args *a, const large_pipeline *t, const tile_queue *q, place *p,
                  large_place *at, large_paths *w, int group) {
    int rows = __shfl_sync(0xffffffffu, p->rows.rows, 0); /* uniform */
    if (!is_fast<USE>(&a->act))
        make_tile<largest, USE, false>(a, t, q, p, at, w, group);
    else if (rows <= 64)
        make_tile<large_tile<64>, USE, true>(a, t, q, p, at, w, group);
    else if (rows <= 96)
        make_tile<large_tile<96>, USE, true>(a, t, q, p, at, w, group);
    else if (rows <= 128)
        make_tile<large_tile<128>, USE, true>(a, t, q, p, at, w, group);
    else
        make_tile<largest, USE, true>(a, t, q, p, at, w, group);
}

template <product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const large_pipeline *t,
                                               large_paths *w, int group) {
    large_place at = {{0, 0}, {0, 0}, group == 0 ? min(LAG, a->steps) - 1 : -1};
    wait_for_predecessor();
    launch_dependents(); /* the next kernel may rely on the groups */
    tile_queue q = tiles_of_block(a);
    if (q.number >= q.end)
        return;
    place p = place_of_next(a, &q);
    prefetch_epilogue_operands<USE>(a, &p, &w->out, group);
    if (group == 1)
        barrier_sync(1, 256);
    while (q.number < q.end) {
        q.number += q.stride;
        make_fitting_tile<USE>(a, t, &q, &p, &at, w, group);
    }
}

template <product_use USE>
static __global__ void __launch_bounds__(384, 1)
    experts_fp8_large(const __grid_constant__ CUtensorMap weights,
                      const __grid_constant__ CUtensorMap rows,
                      const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[LARGE_BARRIERS];
    __shared__ epilogue_operands state[2][2];
    uint32_t pipeline = fixed_shared_address(smem), of_rows = pipeline + 2 * W_STAGES * W_STAGE;
    uint32_t room = of_rows + a.stages * largest::stage;
    uint32_t first = make_large_barriers(&a, barrier), full = barriers_of_rows(first);
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* uniform */
    if (warp < 8) {
        more_registers<232>();
        int group = warp / 4;
        large_pipeline t = {barriers_of_weights(first, group), full,
                            wgmma_operand(pipeline + group * (W_STAGES * W_STAGE)),
                            wgmma_operand(of_rows), a.stages};
        large_paths w = {{&state[group][0], room + group * OUT_ROOM, NULL}, &state[group][1]};
        consume<USE>(&a, &t, &w, group);
    } else {
        fewer_registers<40>();
        int group = warp - 8;
        copy_pipeline r = {&rows, of_rows, full, full + 8 * MANY_STAGES};
        if (threadIdx.x % 32 == 0 && group < 2)
            produce_half<USE>(&a, &weights, pipeline + group * (W_STAGES * W_STAGE),
                              barriers_of_weights(first, group), group);
        else if (threadIdx.x % 32 == 0 && group == 2)
            produce_tokens(&a, &r);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still copy into this one */
}

/* ---- launch ---- */

/* Sets the stages of rows that fit; returns the dynamic shared memory. */
static int large_smem_layout(gemm_args *a, int limit) {
    int fixed = (LARGE_BARRIERS * 8 + 4 * (int)sizeof(epilogue_operands) + 1023) / 1024 * 1024;
    int always = 2 * W_STAGES * W_STAGE + 2 * OUT_ROOM;
    int stages = (limit - fixed - always) / largest::stage;
    a->stages = stages < MANY_STAGES ? stages : MANY_STAGES;
    MOQ_ASSERT(a->stages >= LAG + 2); /* one more than the leading warpgroup needs */
    return a->stages * largest::stage + always;
}

moq_status multiply_fp8_large(const moe::expert_product *p, moq_err *err) {
    int64_t k = p->spec->in_features, n = p->spec->out_features;
    int limit;
    CUtensorMap weights, rows;
    MOQ_TRY(find_shared_limit(p, &limit, err));
    gemm_args a = fp8_args_of(p);
    int shared = large_smem_layout(&a, limit);
    MOQ_TRY(
        moq_tensor_map_pairs(&weights, p->weight->weight, p->call->spec->experts * n, k, k, err));
    MOQ_TRY(moq_tensor_map_rows(&rows, p->rows->data, p->most_rows, k, k, largest::box_rows, err));
    const void *kernel[] = {(const void *)experts_fp8_large<OF_GATE_AND_UP>,
                            (const void *)experts_fp8_large<OF_ONE>,
                            (const void *)experts_fp8_large<OF_D>}; /* by product_use */
    return launch(p, kernel[use_of(p)], &a, shared, &weights, &rows, 2, true, err);
}

} // namespace moq::moe_prefill
