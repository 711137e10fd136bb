/* FP8 experts of many tokens on Hopper in small tiles: 256 rows of an expert's W by up to 64 rows
 * of its tokens, where neither have scales of groups. Codes and sums are those of
 * sm90_moe_many_fp8.cu, bit by bit.
 *
 * W comes from memory but once, and that bounds it: how fast it comes depends on how much of a row
 * is asked for at a time (docs/lab/moe.md). So a stage of its ring is 64 rows of W, which are one
 * wave's of a warpgroup, by CHUNK steps; the warpgroups take stages by turns. Rows of tokens of as
 * many steps are in a ring of their own, for both. */
#include "core/invariant.h"
#include "cuda/device/wgmma.h"
#include "cuda/moe/sm90/sm90_moe_many_copies.h"
#include "cuda/moe/sm90/sm90_moe_many_fp8_outputs.h"
#include "cuda/moe/sm90/sm90_moe_many_launch.h"

namespace moq::moe_many {

#define CHUNK          4 /* steps */
#define STEP_BYTES     (64 * 128)
#define STAGE_BYTES    (CHUNK * STEP_BYTES)
#define W_STAGES       4
#define X_STAGES       2
#define SMALL_BARRIERS (2 * (W_STAGES + X_STAGES + CLAIMS))
#define SMALL_SHARED   ((W_STAGES + X_STAGES) * STAGE_BYTES + 2 * OUT_ROOM)

struct small_tile {
    static constexpr bool groups = false, pair = false;
    static constexpr int warpgroups = 2, T = 64, tokens = 64, box_rows = 16, at_once = 64;
    static constexpr float unit = 1.0f;
};

/* ---- rings ---- */

/* Barriers of full stages; those of empty ones are behind them. */
typedef struct {
    uint32_t weights, rows;
    claim_board claims;
} small_barriers;

/* By all threads, before anything else. */
static __device__ __forceinline__ small_barriers make_small_barriers(uint64_t *memory,
                                                                     int4 *places) {
    uint32_t first = fixed_shared_address(memory), rows = first + 16 * W_STAGES;
    uint32_t claims = rows + 16 * X_STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < W_STAGES; i++) {
            mbarrier_init(first + 8u * i, 1);
            mbarrier_init(first + 8u * (W_STAGES + i), 4 * WARP_ARRIVALS);
        }
        for (int i = 0; i < X_STAGES; i++) {
            mbarrier_init(rows + 8u * i, 1);
            mbarrier_init(rows + 8u * (X_STAGES + i), 8 * WARP_ARRIVALS);
        }
        for (int i = 0; i < CLAIMS; i++) {
            mbarrier_init(claims + 8u * i, 1);
            mbarrier_init(claims + 8u * (CLAIMS + i), 1 + 8 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    return {first, rows, {places, claims, claims + 8 * CLAIMS}};
}

/* The steps of a chunk that begins with step `first`. */
static __device__ __forceinline__ int steps_of_chunk(const gemm_args *a, int first) {
    return min(CHUNK, a->steps - first);
}

/* W of a tile: of each chunk the waves of both warpgroups in turn. */
template <product_use USE>
static __device__ __forceinline__ void copy_waves(const gemm_args *a, const CUtensorMap *map,
                                                  uint32_t ring, uint32_t full, const place *p,
                                                  ring_place *slot) {
    int first = p->rows.expert * a->height, row[4];
    uint64_t policy = policy_evict_normal();
#pragma unroll
    for (int i = 0; i < 4; i++)
        row[i] = first + row_of_wave<small_tile, USE>(a, p->along, i % 2, i / 2);
    for (int step = 0; step < a->steps; step += CHUNK) {
        int steps = steps_of_chunk(a, step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t to = ring + (uint32_t)(slot->index * STAGE_BYTES);
            uint32_t own = full + 8u * slot->index;
            mbarrier_wait(own + 8 * W_STAGES, slot->parity ^ 1);
            mbarrier_expect(own, steps * STEP_BYTES);
            for (int j = 0; j < steps; j++)
                copy_pairs(to + j * STEP_BYTES, map, (step + j) * 128, row[i], own, policy);
            advance(slot, W_STAGES);
        }
    }
}

template <product_use USE>
static __device__ __forceinline__ void produce_waves(const gemm_args *a, const CUtensorMap *map,
                                                     uint32_t ring, const small_barriers *b) {
    ring_place slot = {0, 0}, at = {0, 0};
    prefetch_map(map);
    if (!a->early)
        wait_for_predecessor();
    int number = blockIdx.x, end = a->count[1] * a->row_tiles;
    while (number < end) {
        place p = place_at<small_tile>(a, number);
        post_claim(&b->claims, &at, &p);
        number = (int)gridDim.x + atomicAdd(a->claimed, 1);
        copy_waves<USE>(a, map, ring, b->weights, &p, &slot);
    }
    place none = {{0, 0, 0}, -1};
    post_claim(&b->claims, &at, &none);
}

/* Rows of a tile, as many boxes as there are. */
static __device__ __forceinline__ void copy_tokens(const gemm_args *a, const CUtensorMap *map,
                                                   uint32_t ring, uint32_t full, const place *p,
                                                   ring_place *slot) {
    constexpr int BOX = small_tile::box_rows;
    int boxes = (p->rows.rows + BOX - 1) / BOX;
    uint64_t policy = policy_evict_normal();
    for (int step = 0; step < a->steps; step += CHUNK) {
        int steps = steps_of_chunk(a, step);
        uint32_t to = ring + (uint32_t)(slot->index * STAGE_BYTES);
        uint32_t own = full + 8u * slot->index;
        mbarrier_wait(own + 8 * X_STAGES, slot->parity ^ 1);
        mbarrier_expect(own, steps * boxes * (BOX * 128));
        for (int j = 0; j < steps; j++)
            for (int i = 0; i < boxes; i++)
                copy_box_2d(to + j * STEP_BYTES + i * (BOX * 128), map, (step + j) * 128,
                            p->rows.first + i * BOX, own, policy);
        advance(slot, X_STAGES);
    }
}

static __device__ __forceinline__ void produce_tokens(const gemm_args *a, const CUtensorMap *map,
                                                      uint32_t ring, const small_barriers *b) {
    ring_place slot = {0, 0}, at = {0, 0};
    prefetch_map(map);
    wait_for_predecessor();
    for (;;) {
        place p = see_claim(&b->claims, &at);
        mbarrier_arrive(b->claims.empty + 8u * at.index);
        advance(&at, CLAIMS);
        if (p.along < 0)
            return;
        copy_tokens(a, map, ring, b->rows, &p, &slot);
    }
}

/* ---- products ---- */

/* What a warpgroup takes stages from: every other one of W. Operands are those of the first. */
typedef struct {
    uint32_t weights, rows;
    uint64_t left, right;
} small_ring;

typedef struct {
    ring_place weights, rows;
} small_place;

/* c = the product of a step. */
static __device__ __forceinline__ void issue_step(uint64_t left, uint64_t right, int step,
                                                  float (&c)[32]) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        wgmma_e4m3(c, left + step * (STEP_BYTES / 16) + 2 * j,
                   right + step * (STEP_BYTES / 16) + 2 * j, j);
    wgmma_commit();
}

/* The product that was issued before the last `pending` ends, and is added. */
template <int pending>
static __device__ __forceinline__ void add_step(float (&sum)[32], float (&c)[32]) {
    wgmma_wait<pending>();
    stay_here(c);
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i] += c[i];
    stay_here(sum);
}

/* A wave's part of a chunk. */
static __device__ __forceinline__ void multiply_wave(uint64_t left, uint64_t right, int steps,
                                                     float (&sum)[32]) {
    float even[32], odd[32];
    if (steps == CHUNK) {
        issue_step(left, right, 0, even);
        issue_step(left, right, 1, odd);
        add_step<1>(sum, even);
        issue_step(left, right, 2, even);
        add_step<1>(sum, odd);
        issue_step(left, right, 3, odd);
        add_step<1>(sum, even);
        add_step<0>(sum, odd);
        return;
    }
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        issue_step(left, right, step, even);
        add_step<0>(sum, even);
    }
}

static __device__ __forceinline__ void multiply_small(const gemm_args *a, const small_ring *t,
                                                      small_place *at, float (&sum)[2][32]) {
#pragma unroll 1
    for (int step = 0; step < a->steps; step += CHUNK) {
        int steps = steps_of_chunk(a, step);
        uint32_t rows = t->rows + 8u * at->rows.index;
        uint64_t right = t->right + (uint32_t)(at->rows.index * (STAGE_BYTES / 16));
        mbarrier_wait(rows, at->rows.parity);
#pragma unroll
        for (int wave = 0; wave < 2; wave++) {
            uint32_t own = t->weights + 8u * at->weights.index;
            mbarrier_wait(own, at->weights.parity);
            multiply_wave(t->left + (uint32_t)(at->weights.index * (STAGE_BYTES / 16)), right,
                          steps, sum[wave]);
            warp_releases<false>(own + 8 * W_STAGES);
            advance(&at->weights, W_STAGES);
            advance(&at->weights, W_STAGES);
        }
        warp_releases<false>(rows + 8 * X_STAGES);
        advance(&at->rows, X_STAGES);
    }
}

/* PLAIN: is_near alone. */
template <product_use USE, bool PLAIN>
static __device__ __forceinline__ void make_tile(const gemm_args *a, const small_ring *t,
                                                 const place *p, small_place *at, const way_out *w,
                                                 int group) {
    float sum[2][32] = {};
    fetch_board<small_tile, USE>(a, p, group, w->board);
    multiply_small(a, t, at, sum);
    write_tile<small_tile, USE, PLAIN>(a, p, group, w, sum);
}

template <product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const small_ring *t,
                                               const claim_board *claims, const way_out *w,
                                               int group) {
    small_place at = {{group, 0}, {0, 0}};
    ring_place claim = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    for (;;) {
        place p = see_claim(claims, &claim);
        warp_releases<false>(claims->empty + 8u * claim.index);
        advance(&claim, CLAIMS);
        if (p.along < 0)
            return;
        if (USE == OF_ONE || (USE == OF_GATE_AND_UP && !is_near(&a->act)))
            make_tile<USE, false>(a, t, &p, &at, w, group);
        else
            make_tile<USE, true>(a, t, &p, &at, w, group);
    }
}

template <product_use USE>
static __global__ void __launch_bounds__(384, 1)
    experts_fp8_small(const __grid_constant__ CUtensorMap weights,
                      const __grid_constant__ CUtensorMap rows,
                      const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[SMALL_BARRIERS];
    __shared__ int4 places[CLAIMS];
    __shared__ out_board board[2];
    uint32_t ring = fixed_shared_address(smem), of_rows = ring + W_STAGES * STAGE_BYTES;
    uint32_t room = of_rows + X_STAGES * STAGE_BYTES;
    small_barriers b = make_small_barriers(barrier, places);
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* the compiler sees it is one */
    if (warp < 8) {
        more_registers<232>();
        int group = warp / 4;
        small_ring t = {b.weights, b.rows, wgmma_operand(ring), wgmma_operand(of_rows)};
        way_out w = {&board[group], room + group * OUT_ROOM, NULL};
        consume<USE>(&a, &t, &b.claims, &w, group);
    } else {
        fewer_registers<40>();
        if (threadIdx.x == 256)
            produce_waves<USE>(&a, &weights, ring, &b);
        else if (threadIdx.x == 288)
            produce_tokens(&a, &rows, of_rows, &b);
    }
}

moq_status multiply_fp8_small(const many_product *p, moq_err *err) {
    static const void *const KERNELS[] = {(const void *)experts_fp8_small<OF_GATE_AND_UP>,
                                          (const void *)experts_fp8_small<OF_ONE>,
                                          (const void *)experts_fp8_small<OF_D>};
    const moe::expert_product *e = &p->product;
    int64_t k = e->spec->in_features, n = e->spec->out_features;
    CUtensorMap weights, rows;
    gemm_args a = fp8_args_of(p);
    MOQ_TRY(moq_tensor_map_pairs(&weights, e->weight->weight, p->moe->experts * n, k, k, err));
    MOQ_TRY(
        moq_tensor_map_rows(&rows, e->rows->data, e->most_rows, k, k, small_tile::box_rows, err));
    return launch(p, KERNELS[use_of(p)], &a, SMALL_SHARED, &weights, &rows, 2, false, err);
}

} // namespace moq::moe_many
