/* Tiles of the products of experts with NVFP4 weights folded to e4m3 on Hopper, for many tokens:
 * how weights become operands in shared memory, and how they meet rows.
 *
 * A tile is 64 rows of W and the 64 rows beside them, gate and up of the same columns or, of other
 * products, the next ones, by rows of an expert's tokens, which are the columns of the products.
 * One warpgroup, or two, does nothing but fold (device/nvfp4_fold.h); it puts rows of the first 64
 * and of the others in turns of eight, so that the two rows that a thread of wgmma has are of both.
 * Two warpgroups multiply, both operands in shared memory, a part of the tokens after the other,
 * and add what 128 columns give to float32 sums, as FP8 wgmma keeps about 14 bits of its own.
 *
 * Two blocks of a cluster have the same rows and neighbouring rows of W. Each copies half of the
 * rows to both: L2 delivers 23 bytes a cycle and multiprocessor (docs/lab/experts-prefill.md). */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_FOLDED_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_FOLDED_H

#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/nvfp4_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_tile.h"

namespace moq::moe_prefill {

#define MULTIPLIERS    256 /* threads of the two warpgroups that multiply */
#define FOLDED_COPIERS 128
#define FOLDED_STAGES  6 /* at most */
#define FOLDED_STEP    128
#define PACKED_SLAB    (2 * MOQ_PACK_BYTES) /* of a step */
#define PACKED_BOX     (4 * PACKED_SLAB)    /* of 64 rows */
#define PACKED_FOLDS   (2 * PACKED_BOX)     /* where in a stage powers of two of its rows are, */
#define PACKED_STAGE   (PACKED_FOLDS + 512) /* if it is the first of a tile */
#define OPERAND_EIGHT  1024                 /* of eight rows, in the swizzle of 128 bytes */
#define OPERAND_STAGE  (16 * OPERAND_EIGHT) /* half of it a warpgroup's */

/* Up to 96 rows of tokens, or, WIDE, 288, multiplied in PARTS parts of N. Fewer rows leave
 * registers for twice as many threads that fold. */
template <bool WIDE, int N_, int PARTS_> struct folded_tile {
    static constexpr bool wide = WIDE;
    static constexpr int N = N_, PARTS = PARTS_, T = N * PARTS;
    static constexpr int tokens = WIDE ? 288 : 96, token_bytes = tokens * 128;
    static constexpr int box_rows = WIDE ? 32 : 16;
    static constexpr int folders = WIDE ? 128 : 256;
    static constexpr int registers = WIDE ? 224 : 160, folder_registers = WIDE ? 40 : 64;
    static constexpr int threads = MULTIPLIERS + folders + FOLDED_COPIERS;
};

typedef struct {
    gemm_args gemm;
    const float *fold_scale; /* [E, n] */
} folded_args;

/* ---- tiles ---- */

/* Tiles of a pair of blocks: all of W for some rows, then for the next. */
static __device__ __forceinline__ tile_queue folded_queue(const gemm_args *a) {
    int along = (a->row_tiles + 1) / 2;
    return {(int)blockIdx.x / 2, a->count[1] * along, (int)gridDim.x / 2};
}

static __device__ __forceinline__ place folded_place_at(const gemm_args *a, int number) {
    int along = (a->row_tiles + 1) / 2, tile = number / along;
    return {a->tiles[tile], 2 * (number - tile * along) + (int)rank_in_cluster()};
}

/* The first tile of a queue, if there is one, and the one after. Whoever needs them asks a tile
 * ahead. */
static __device__ __forceinline__ place folded_place(const gemm_args *a, const tile_queue *q) {
    return folded_place_at(a, min(q->number, max(q->end - 1, 0)));
}

static __device__ __forceinline__ place folded_place_after(const gemm_args *a,
                                                           const tile_queue *q) {
    return folded_place_at(a, min(q->number + q->stride, q->end - 1));
}

/* The first of the 64 rows of W, within the expert, of the first half of a tile or of the second,
 * and their end. */
template <product_use USE>
static __device__ __forceinline__ int first_row(const gemm_args *a, int along, int half) {
    return USE == OF_GATE_AND_UP ? half * a->half + along * 64 : along * 128 + half * 64;
}

template <product_use USE>
static __device__ __forceinline__ int end_of_rows(const gemm_args *a, int half) {
    return USE == OF_GATE_AND_UP ? (half + 1) * a->half : a->n;
}

/* ---- rings ---- */

/* Barriers of the stages: rows are there, operands are there, both may be replaced; packed weights
 * are there, and may be replaced. */
typedef struct {
    uint32_t rows, operands, empty, packed, unpacked;
} folded_barriers;

#define FOLDED_BARRIERS (5 * FOLDED_STAGES)

/* By all threads, before anything else. */
template <class S>
static __device__ __forceinline__ folded_barriers make_folded_barriers(const folded_args *f,
                                                                       uint64_t *memory) {
    uint32_t first = fixed_shared_address(memory);
    folded_barriers b = {first, first + 8 * FOLDED_STAGES, first + 16 * FOLDED_STAGES,
                         first + 24 * FOLDED_STAGES, first + 32 * FOLDED_STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < f->gemm.stages; i++) {
            mbarrier_init(b.rows + 8u * i, 1);
            mbarrier_init(b.operands + 8u * i, S::folders / 32 * WARP_ARRIVALS);
            mbarrier_init(b.empty + 8u * i, MULTIPLIERS / 32 * 2 * WARP_ARRIVALS);
            mbarrier_init(b.packed + 8u * i, 1);
            mbarrier_init(b.unpacked + 8u * i, S::folders / 32 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    cluster_sync(); /* the other block knows them, too */
    return b;
}

/* ---- copies ---- */

/* Packed weights, 64 rows by 128 columns in a box, with the powers of two of a tile's rows beside
 * those of its first step. */
template <product_use USE>
static __device__ __forceinline__ void produce_packed(const folded_args *f, const CUtensorMap *map,
                                                      const folded_barriers *b, uint32_t pipeline) {
    constexpr int STEP_WORDS = PACKED_SLAB / 8;
    const gemm_args *a = &f->gemm;
    pipeline_state slot = {0, 0};
    uint64_t policy = policy_evict_first();
    prefetch_map(map);
    if (!a->early)
        wait_for_predecessor();
    tile_queue q = folded_queue(a);
    place p = folded_place(a, &q);
    for (; q.number < q.end; q.number += q.stride) {
        place next = folded_place_after(a, &q);
        int slab = p.rows.expert * a->height;
        for (int step = 0; step < a->steps; step++) {
            uint32_t to = pipeline + (uint32_t)(slot.index * PACKED_STAGE);
            uint32_t full = b->packed + 8u * slot.index, bytes[2] = {0, 0};
            mbarrier_wait(b->unpacked + 8u * slot.index, slot.parity ^ 1);
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (step == 0)
                    bytes[half] =
                        4u * (uint32_t)max(0, min(64, end_of_rows<USE>(a, half) -
                                                          first_row<USE>(a, p.along, half)));
            mbarrier_expect(full, 2 * PACKED_BOX + bytes[0] + bytes[1]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first_row<USE>(a, p.along, half);
                copy_box_2d(to + half * PACKED_BOX, map, step * STEP_WORDS,
                            slab + row / MOQ_PACK_ROWS, full, policy);
                if (bytes[half])
                    copy_bytes(to + PACKED_FOLDS + half * 256,
                               f->fold_scale + (int64_t)p.rows.expert * a->n + row, bytes[half],
                               full);
            }
            advance(&slot, a->stages);
        }
        p = next;
    }
}

/* Rows in boxes of S::box_rows, every other one of this block, for both. */
template <class S>
static __device__ __forceinline__ void
produce_shared_rows(const gemm_args *a, const CUtensorMap *map, const folded_barriers *b,
                    uint32_t pipeline) {
    int rank = (int)rank_in_cluster();
    pipeline_state slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(map);
    wait_for_predecessor();
    tile_queue q = folded_queue(a);
    place p = folded_place(a, &q);
    for (; q.number < q.end; q.number += q.stride) {
        moe::row_tile rows = p.rows;
        place next = folded_place_after(a, &q);
        int boxes = (rows.rows + S::box_rows - 1) / S::box_rows;
        for (int step = 0; step < a->steps; step++) {
            uint32_t full = b->rows + 8u * slot.index;
            uint32_t to = pipeline + (uint32_t)(slot.index * S::token_bytes);
            mbarrier_wait(b->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, boxes * (S::box_rows * 128));
            for (int i = rank; i < boxes; i += 2)
                copy_box_2d_to(to + i * (S::box_rows * 128), map, step * 128,
                               rows.first + i * S::box_rows, full, policy, 3);
            advance(&slot, a->stages);
        }
        p = next;
    }
}

/* ---- folding ---- */

/* The operand of a unit, a row's 64 columns in four pieces of 16 bytes: rows g of the slab and,
 * two eights behind, rows g + 8. `to` is the place of the lane's row and piece. */
static __device__ __forceinline__ void store_folded(uint32_t to, const uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t piece[4] = {a[0][i], a[0][i + 2], a[1][i], a[1][i + 2]};
        store_matrices(to + i * (2 * OPERAND_EIGHT), piece);
    }
}

/* The powers of two of rows g and g + 8 of a slab, at `from`. */
static __device__ __forceinline__ uint32_t read_folds(uint32_t from) {
    uint32_t at = from + threadIdx.x % 32 / 4 * 4;
    return moq_pack_folds(__uint_as_float(load_shared_word(at)),
                          __uint_as_float(load_shared_word(at + 32)));
}

/* Where a lane stores unit `unit` of slab `slab` of the first half in the first stage; those of the
 * second half are an eight behind. The other unit of a step is where bit 6 is another one. */
static __device__ __forceinline__ uint32_t place_of_unit(uint32_t operands, int slab, int unit) {
    int row = threadIdx.x % 8, piece = unit * 4 + threadIdx.x % 32 / 8;
    return operands + slab * (4 * OPERAND_EIGHT) + row * 128 + (piece ^ row) * 16;
}

/* Folds the weights of all steps of a block. A warp has slab `warp % 4` of both halves, both units
 * of a step or, where there are eight warps, unit `warp / 4`. `packed` and `operands` are the
 * rings. */
template <class S>
static __device__ __forceinline__ void fold_weights(const gemm_args *a, const folded_barriers *b,
                                                    uint32_t packed, uint32_t operands, int warp) {
    constexpr int UNITS = S::wide ? 4 : 2; /* of both halves in turn */
    int slab = warp % 4, unit = S::wide ? 0 : warp / 4;
    uint32_t own = packed + slab * PACKED_SLAB + unit * MOQ_PACK_BYTES;
    uint32_t out = place_of_unit(operands, slab, unit);
    uint32_t folds_at = packed + PACKED_FOLDS + slab * 64;
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
    for (tile_queue q = folded_queue(a); q.number < q.end; q.number += q.stride) {
        uint32_t folds[2] = {0, 0};
#pragma unroll 1
        for (int step = 0; step < a->steps; step++) {
            uint32_t in = own + (uint32_t)(slot.index * PACKED_STAGE);
            uint32_t at = out + (uint32_t)(slot.index * OPERAND_STAGE);
            mbarrier_wait(b->packed + 8u * slot.index, slot.parity);
            nvfp4_prefill::packed_unit next = nvfp4_prefill::load_unit(in);
            if (step == 0) {
                uint32_t first = folds_at + (uint32_t)(slot.index * PACKED_STAGE);
                folds[0] = read_folds(first);
                folds[1] = read_folds(first + 256);
            }
            mbarrier_wait(b->empty + 8u * slot.index, slot.parity ^ 1);
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                nvfp4_prefill::packed_unit now = next;
                uint32_t code[2][4];
                if (i + 1 < UNITS)
                    next = nvfp4_prefill::load_unit(in + (i + 1) % 2 * PACKED_BOX +
                                                    (i + 1) / 2 * MOQ_PACK_BYTES);
                moq_fold_unit(now.codes, now.scales, folds[i % 2], code);
                store_folded((i / 2 ? at ^ 64 : at) + i % 2 * OPERAND_EIGHT, code);
            }
            warp_releases<false>(b->unpacked + 8u * slot.index);
            warp_releases<false>(b->operands + 8u * slot.index);
            advance(&slot, a->stages);
        }
    }
}

/* ---- products ---- */

/* What a thread multiplies: the operand of its warpgroup and all rows, in the first stage. */
typedef struct {
    folded_barriers barriers;
    uint64_t w, x;
    int stages;
} folded_pipeline;

static __device__ __forceinline__ void await(const folded_pipeline *t, const pipeline_state *slot) {
    mbarrier_wait(t->barriers.operands + 8u * slot->index, slot->parity);
    mbarrier_wait(t->barriers.rows + 8u * slot->index, slot->parity);
}

/* c = products of a step with a part of the rows. */
template <class S>
static __device__ __forceinline__ void issue(const folded_pipeline *t, const pipeline_state *slot,
                                             int part, float (&c)[S::N / 2]) {
    uint64_t w = t->w + (uint32_t)(slot->index * (OPERAND_STAGE / 16));
    uint64_t x = t->x + (uint32_t)(slot->index * (S::token_bytes / 16) + part * (S::N * 8));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < FOLDED_STEP / 32; i++)
        wgmma_e4m3(c, w + 2 * i, x + 2 * i, i > 0);
    wgmma_commit();
}

/* Products of a part end, and are added to its sums. */
template <class S>
static __device__ __forceinline__ void promote(float (&sum)[S::T / 2], int part,
                                               float (&c)[S::N / 2]) {
    wgmma_wait<0>();
    stay_here(c);
#pragma unroll
    for (int i = 0; i < S::N / 2; i++)
        sum[part * (S::N / 2) + i] += c[i];
}

/* Adds the products of all steps of a tile. While sums are added here, the other warpgroup has the
 * tensor cores. */
template <class S>
static __device__ __forceinline__ void
multiply_folded(const folded_pipeline *t, int steps, pipeline_state *slot, float (&sum)[S::T / 2]) {
    float c[S::N / 2];
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        await(t, slot);
        fence_async_proxy(); /* here, where nobody waits for what it stored itself */
#pragma unroll
        for (int part = 0; part < S::PARTS; part++) {
            issue<S>(t, slot, part, c);
            promote<S>(sum, part, c);
        }
        warp_releases<true>(t->barriers.empty + 8u * slot->index);
        stay_here(sum);
        advance(slot, t->stages);
    }
}

} // namespace moq::moe_prefill

#endif
