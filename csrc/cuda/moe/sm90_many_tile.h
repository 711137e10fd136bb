/* Tiles of the grouped GEMMs of experts on Hopper, for many tokens: which a block makes, how
 * weights and rows come to it, and how sums leave.
 *
 * A tile is 256 rows of an expert's W by up to T rows of its tokens, which are the columns of the
 * products. Two warpgroups multiply; each has two waves of 64 rows of W. In the first product these
 * are rows of gate and the rows of up beside them, so that a thread has both sums of an output:
 * what is written is g. A second product writes d in float32.
 *
 * Blocks take tiles in turn, all tiles of W for some rows after the other, so that the rows come
 * from L2 but once. How many tiles there are is known on the device alone. */
#ifndef MOQ_CUDA_MOE_SM90_MANY_TILE_H
#define MOQ_CUDA_MOE_SM90_MANY_TILE_H

#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/sm90_gemm_outputs.h"
#include "cuda/moe/expert_activation.h"
#include "cuda/moe/group.h"

namespace moq::moe_many {

using namespace gemm;

#define T               128 /* rows of tokens */
#define CONSUMERS       256
#define THREADS         384
#define MANY_STAGES     8
#define WAVE_ROWS       64
#define TURNED          64                 /* tokens that turn around at a time */
#define MANY_TURN_BYTES (TURNED * 128 * 2) /* of both warpgroups */

/* What a product is for. */
typedef enum {
    OF_GATE_AND_UP, /* g = act of both */
    OF_ONE,         /* g = act of each row */
    OF_D            /* sums as they are */
} product_use;

typedef struct {
    const moe::row_tile *tiles;
    const int32_t *count; /* of rows, and of tiles */
    int row_tiles, steps, stages;
    int n;      /* rows of W of an expert */
    int height; /* and what the map of W counts of them */
    int half;   /* rows of gate */
    moe::activation act;
    moq_output out;                   /* g */
    float *d;                         /* [rows, n] */
    const float *output_scale, *bias; /* [E, n], or NULL */
    const float *x_scale;             /* of rows, by groups [steps, x_scale_stride], or NULL */
    int64_t x_scale_stride;
    const float *input_scale; /* [E, parts] where x_scale is NULL, or NULL too */
    int parts;
    const float *block_scale; /* [E, block rows, steps] */
    int64_t block_step;
    moq_partitions partitions;
} gemm_args;

/* ---- tiles ---- */

typedef struct {
    int number, end, stride;
} tile_queue;

/* With the predecessor ended. */
static __device__ __forceinline__ tile_queue tiles_of_block(const gemm_args *a) {
    return {(int)blockIdx.x, a->count[1] * a->row_tiles, (int)gridDim.x};
}

typedef struct {
    moe::row_tile rows;
    int along; /* tile of W */
} place;

static __device__ __forceinline__ place place_at(const gemm_args *a, int number) {
    int tile = number / a->row_tiles;
    return {a->tiles[tile], number - tile * a->row_tiles};
}

/* The first row of W of a wave of a warpgroup, within the expert, and the end of those it may have.
 */
template <product_use USE>
static __device__ __forceinline__ int row_of_wave(const gemm_args *a, int along, int group,
                                                  int wave) {
    if (USE == OF_GATE_AND_UP)
        return wave * a->half + (along * 2 + group) * WAVE_ROWS;
    return (along * 4 + group * 2 + wave) * WAVE_ROWS;
}

template <product_use USE>
static __device__ __forceinline__ int end_of_wave(const gemm_args *a, int wave) {
    return USE == OF_GATE_AND_UP ? (wave + 1) * a->half : a->n;
}

/* ---- copies ---- */

typedef struct {
    const CUtensorMap *map;
    uint32_t ring, full, empty; /* in shared memory; barriers of the stages */
} copy_ring;

/* S says how W is stored: box_bytes of a wave's rows of a step, box_step between steps in the map,
 * and row_unit, the rows that the map counts as one; weight_stage between stages. */
template <class S, product_use USE>
static __device__ __forceinline__ void produce_weights(const gemm_args *a, const copy_ring *r) {
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(r->map);
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block(a); q.number < q.end; q.number += q.stride) {
        place p = place_at(a, q.number);
        int first = p.rows.expert * a->height, row[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            row[i] = first + row_of_wave<USE>(a, p.along, i / 2, i % 2) / S::row_unit;
        for (int step = 0; step < a->steps; step++) {
            uint32_t to = r->ring + (uint32_t)(slot.index * S::weight_stage);
            uint32_t full = r->full + 8u * slot.index;
            mbarrier_wait(r->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, 4 * S::box_bytes);
#pragma unroll
            for (int i = 0; i < 4; i++)
                copy_box_2d(to + i * S::box_bytes, r->map, step * S::box_step, row[i], full,
                            policy);
            advance(&slot, a->stages);
        }
    }
}

/* `scales` is where those of groups go, in the first stage. */
template <class S>
static __device__ __forceinline__ void produce_rows(const gemm_args *a, const copy_ring *r,
                                                    uint32_t scales) {
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(r->map);
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block(a); q.number < q.end; q.number += q.stride) {
        int first = place_at(a, q.number).rows.first;
        for (int step = 0; step < a->steps; step++) {
            uint32_t full = r->full + 8u * slot.index;
            mbarrier_wait(r->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, T * 128 + (S::groups ? T * 4 : 0));
            copy_box_2d(r->ring + (uint32_t)(slot.index * S::row_stage), r->map, step * 128, first,
                        full, policy);
            if (S::groups)
                copy_bytes(scales + (uint32_t)(slot.index * T * 4),
                           a->x_scale + step * a->x_scale_stride + first, T * 4, full);
            advance(&slot, a->stages);
        }
    }
}

/* ---- outputs ---- */

/* What sums are scaled by beside the factor of their row of W. */
template <class S>
static __device__ __forceinline__ float factor_of_token(const gemm_args *a, const place *p) {
    int token = threadIdx.x % 128;
    if (S::groups || token >= p->rows.rows)
        return 1.0f;
    if (a->x_scale)
        return a->x_scale[p->rows.first + token];
    return a->input_scale ? a->input_scale[p->rows.expert * a->parts] : 1.0f;
}

/* Factors and biases of the two rows that a thread has of a wave. */
template <class S, product_use USE>
static __device__ __forceinline__ terms terms_of(const gemm_args *a, const place *p, int group,
                                                 int wave) {
    terms e = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = row_of_wave<USE>(a, p->along, group, wave) + row_of_thread() + 8 * i;
        int64_t at = (int64_t)p->rows.expert * a->n + row;
        if (row >= end_of_wave<USE>(a, wave))
            continue;
        e.factor[i] = S::groups ? 1.0f : a->output_scale[at] * S::unit;
        e.bias[i] = a->bias ? a->bias[at] : 0.0f;
    }
    return e;
}

static __device__ __forceinline__ float finish_sum(const gemm_args *a, float sum, float of_row,
                                                   float of_token, float bias) {
    float value = __fmul_rn(sum, __fmul_rn(of_token, of_row));
    return a->bias ? __fadd_rn(value, bias) : value;
}

/* What carry_out has to know of these outputs. */
struct outputs_of_g {
    typedef gemm_args args;
};

/* Writes 64 columns of g from `column` on, by a warpgroup: `gate` and `up` are sums of the products
 * with their rows, up the same as gate where there is none. */
template <bool GATED>
static __device__ __forceinline__ void
write_g(const gemm_args *a, const place *p, int column, const float *token, uint32_t turn,
        const terms *of_gate, const terms *of_up, const float (&gate)[T / 2],
        const float (&up)[T / 2]) {
    int lane = threadIdx.x % 32, piece = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    int group = threadIdx.x / 128;
    tile_place at = {column, GATED ? a->half : a->n, 0, p->rows.first,
                     p->rows.first + p->rows.rows};
#pragma unroll
    for (int first = 0; first < T; first += TURNED) {
        barrier_sync(2 + group, 128); /* what was there has been stored */
#pragma unroll
        for (int j = first / 8; j < (first + TURNED) / 8; j++) {
            float2 own = *(const float2 *)(token + 8 * j + lane % 4 * 2);
            uint32_t half[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float g[2];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    float x = odd ? own.y : own.x, u = 1.0f;
                    if (GATED)
                        u = finish_sum(a, up[4 * j + 2 * i + odd], of_up->factor[i], x,
                                       of_up->bias[i]);
                    g[odd] = moe::activate(&a->act,
                                           finish_sum(a, gate[4 * j + 2 * i + odd],
                                                      of_gate->factor[i], x, of_gate->bias[i]),
                                           u);
                }
                half[i] = moq_narrow_pair(a->out.dtype, g[0], g[1]);
            }
            store_two_matrices_turned(turn + (j - first / 8) * EIGHT_BYTES + lane % 8 * 128 +
                                          (piece ^ lane % 8) * 16,
                                      half[0], half[1]);
        }
        barrier_sync(2 + group, 128);
        carry_out<outputs_of_g>(a, turn, &at, 0, first, TURNED);
    }
}

/* Writes 64 columns of d from `column` on: eight threads have 32 bytes of a row. */
static __device__ __forceinline__ void write_d(const gemm_args *a, const place *p, int column,
                                               const float *token, const terms *e,
                                               const float (&sum)[T / 2]) {
    int own = threadIdx.x % 4 * 2, n = column + row_of_thread();
#pragma unroll
    for (int j = 0; j < T / 8; j++) {
        float2 x = *(const float2 *)(token + 8 * j + own);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 8 * j + own + i % 2;
            float value =
                finish_sum(a, sum[4 * j + i], e->factor[i / 2], i % 2 ? x.y : x.x, e->bias[i / 2]);
            if (row < p->rows.rows && n + i / 2 * 8 < a->n)
                a->d[(int64_t)(p->rows.first + row) * a->n + n + i / 2 * 8] = value;
        }
    }
}

/* Writes what a warpgroup has of a tile. `board` has room for its tokens' factors, of which a
 * thread brings `factor`. */
template <class S, product_use USE>
static __device__ __forceinline__ void write_tile(const gemm_args *a, const place *p, int group,
                                                  float factor, float *board, uint32_t turn,
                                                  const float (&sum)[2][T / 2]) {
    terms e[2] = {terms_of<S, USE>(a, p, group, 0), terms_of<S, USE>(a, p, group, 1)};
    barrier_sync(2 + group, 128); /* the tile before has been written */
    board[threadIdx.x % 128] = factor;
    barrier_sync(2 + group, 128);
    if constexpr (USE == OF_GATE_AND_UP)
        write_g<true>(a, p, row_of_wave<USE>(a, p->along, group, 0), board, turn, &e[0], &e[1],
                      sum[0], sum[1]);
#pragma unroll
    for (int wave = 0; wave < 2; wave++) {
        int column = row_of_wave<USE>(a, p->along, group, wave);
        if constexpr (USE == OF_ONE)
            write_g<false>(a, p, column, board, turn, &e[wave], &e[wave], sum[wave], sum[wave]);
        if constexpr (USE == OF_D)
            write_d(a, p, column, board, &e[wave], sum[wave]);
    }
}

/* ---- barriers ---- */

/* Weights are there, rows are there, both may be replaced. */
typedef struct {
    uint32_t weights, rows, empty;
} ring_barriers;

/* By all threads, before anything else. `arrivals` are the copies that a stage's rows wait for. */
static __device__ __forceinline__ ring_barriers make_barriers(const gemm_args *a, uint64_t *memory,
                                                              int arrivals) {
    uint32_t first = fixed_shared_address(memory);
    ring_barriers b = {first, first + 8 * MANY_STAGES, first + 16 * MANY_STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(b.weights + 8u * i, 1);
            mbarrier_init(b.rows + 8u * i, arrivals);
            mbarrier_init(b.empty + 8u * i, CONSUMERS / 32 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    return b;
}

} // namespace moq::moe_many

#endif
