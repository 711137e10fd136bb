/* Tiles of the products of experts with NVFP4 weights folded to e4m3 on Hopper, for many tokens:
 * how weights become operands in shared memory, and how they meet rows.
 *
 * A tile is 64 rows of W and the 64 rows beside them, gate and up of the same columns or, of other
 * products, the next ones, by rows of an expert's tokens, which are the columns of the products.
 * One warpgroup, or two, does nothing but fold (device/nvfp4_fold.h); it puts rows of the first 64
 * and of the others in turns of eight, so that the two rows that a thread of wgmma has are of both.
 * Two warpgroups multiply, operands in registers, a part of the tokens after the other, and add
 * what 128 columns give to float32 sums, as FP8 wgmma keeps about 14 bits of its own.
 *
 * Two blocks of a cluster have the same rows and neighbouring rows of W. Each copies half of the
 * rows to both: L2 delivers 23 bytes a cycle and multiprocessor (docs/lab/moe.md). */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_FOLDED_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_FOLDED_H

#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/sm90_nvfp4_many_tile.h"
#include "cuda/moe/sm90/sm90_moe_many_tile.h"

namespace moq::moe_many {

#define MULTIPLIERS    256 /* threads of the two warpgroups that multiply */
#define FOLDED_COPIERS 128
#define FOLDED_STAGES  6 /* at most */
#define FOLDED_STEP    128
#define PACKED_SLAB    (2 * MOQ_PACK_BYTES) /* of a step */
#define PACKED_BOX     (4 * PACKED_SLAB)    /* of 64 rows */
#define PACKED_FOLDS   (2 * PACKED_BOX)     /* where in a stage powers of two of its rows are, */
#define PACKED_STAGE   (PACKED_FOLDS + 512) /* if it is the first of a tile */
#define OPERAND_UNIT   1024
#define OPERAND_SLAB   (2 * OPERAND_UNIT)
#define OPERAND_STAGE  (8 * OPERAND_SLAB)

/* Up to 160 rows of tokens, or, WIDE, 288, multiplied in PARTS parts of N. Fewer rows leave
 * registers for twice as many threads that fold. */
template <bool WIDE, int N_, int PARTS_> struct folded_tile {
    static constexpr bool wide = WIDE;
    static constexpr int N = N_, PARTS = PARTS_, T = N * PARTS;
    static constexpr int tokens = WIDE ? 288 : 160, token_bytes = tokens * 128;
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

static __device__ __forceinline__ place folded_place(const gemm_args *a, int number) {
    int along = (a->row_tiles + 1) / 2, tile = number / along;
    return {a->tiles[tile], 2 * (number - tile * along) + (int)rank_in_cluster()};
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
                                                      const folded_barriers *b, uint32_t ring) {
    constexpr int STEP_WORDS = PACKED_SLAB / 8;
    const gemm_args *a = &f->gemm;
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(map);
    if (!a->early)
        wait_for_predecessor();
    for (tile_queue q = folded_queue(a); q.number < q.end; q.number += q.stride) {
        place p = folded_place(a, q.number);
        int slab = p.rows.expert * a->height;
        for (int step = 0; step < a->steps; step++) {
            uint32_t to = ring + (uint32_t)(slot.index * PACKED_STAGE);
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
    }
}

/* Rows in boxes of S::box_rows, every other one of this block, for both. */
template <class S>
static __device__ __forceinline__ void
produce_shared_rows(const gemm_args *a, const CUtensorMap *map, const folded_barriers *b,
                    uint32_t ring) {
    int rank = (int)rank_in_cluster();
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(map);
    wait_for_predecessor();
    for (tile_queue q = folded_queue(a); q.number < q.end; q.number += q.stride) {
        moe::row_tile rows = folded_place(a, q.number).rows;
        int boxes = (rows.rows + S::box_rows - 1) / S::box_rows;
        for (int step = 0; step < a->steps; step++) {
            uint32_t full = b->rows + 8u * slot.index;
            uint32_t to = ring + (uint32_t)(slot.index * S::token_bytes);
            mbarrier_wait(b->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, boxes * (S::box_rows * 128));
            for (int i = rank; i < boxes; i += 2)
                copy_box_2d_to(to + i * (S::box_rows * 128), map, step * 128,
                               rows.first + i * S::box_rows, full, policy, 3);
            advance(&slot, a->stages);
        }
    }
}

/* ---- folding ---- */

/* The operand of a unit: of each 32 columns, eight bytes a lane of rows of the first half of the
 * tile, 256 bytes behind them those of the second. Slab i of either half becomes its rows in the
 * slabs 2i and 2i + 1 of the operand. `to` is the lane's place in the first of these. */
static __device__ __forceinline__ void store_folded(uint32_t to, const uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        store_shared_pair(to + i * 512, make_uint2(a[i][0], a[i][2]));
        store_shared_pair(to + OPERAND_SLAB + i * 512, make_uint2(a[i][1], a[i][3]));
    }
}

/* The powers of two of rows g and g + 8 of a slab, at `from`. */
static __device__ __forceinline__ uint32_t read_folds(uint32_t from) {
    uint32_t at = from + threadIdx.x % 32 / 4 * 4;
    return moq_pack_folds(__uint_as_float(load_shared_word(at)),
                          __uint_as_float(load_shared_word(at + 32)));
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
    uint32_t out = operands + 2 * slab * OPERAND_SLAB + unit * OPERAND_UNIT + threadIdx.x % 32 * 8;
    uint32_t folds_at = packed + PACKED_FOLDS + slab * 64;
    ring_place slot = {0, 0};
    wait_for_predecessor();
    for (tile_queue q = folded_queue(a); q.number < q.end; q.number += q.stride) {
        uint32_t folds[2] = {0, 0};
#pragma unroll 1
        for (int step = 0; step < a->steps; step++) {
            uint32_t in = own + (uint32_t)(slot.index * PACKED_STAGE);
            uint32_t to = out + (uint32_t)(slot.index * OPERAND_STAGE);
            mbarrier_wait(b->packed + 8u * slot.index, slot.parity);
            nvfp4_many::packed_unit next = nvfp4_many::load_unit(in);
            if (step == 0) {
                uint32_t first = folds_at + (uint32_t)(slot.index * PACKED_STAGE);
                folds[0] = read_folds(first);
                folds[1] = read_folds(first + 256);
            }
            mbarrier_wait(b->empty + 8u * slot.index, slot.parity ^ 1);
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                nvfp4_many::packed_unit now = next;
                uint32_t code[2][4];
                if (i + 1 < UNITS)
                    next = nvfp4_many::load_unit(in + (i + 1) % 2 * PACKED_BOX +
                                                 (i + 1) / 2 * MOQ_PACK_BYTES);
                moq_fold_unit(now.codes, now.scales, folds[i % 2], code);
                store_folded(to + i % 2 * 256 + i / 2 * OPERAND_UNIT, code);
            }
            warp_releases<false>(b->unpacked + 8u * slot.index);
            warp_releases<false>(b->operands + 8u * slot.index);
            advance(&slot, a->stages);
        }
    }
}

/* ---- products ---- */

#define FLOATS_40(d, i) FLOATS_32(d, i), FLOATS_8(d, i + 32)
#define NUMBERS_40      NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"

/* Widths that device/wgmma.h does not have. */
using moq::wgmma_e4m3;

#define WGMMA_E4M3_OF_REGISTERS(columns, sums, a0, a1, a2, a3, right, more)                        \
    static __device__ __forceinline__ void wgmma_e4m3(float (&d)[sums], const uint32_t (&a)[4],    \
                                                      uint64_t b, int add) {                       \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.ne.b32 p, %" #more ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3"              \
                     " {" NUMBERS_##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #right   \
                                         ", p, 1, 1;\n"                                            \
                                         "}"                                                       \
                     : FLOATS_##sums(d, 0)                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }

WGMMA_E4M3_OF_REGISTERS(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_E4M3_OF_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53)

#undef WGMMA_E4M3_OF_REGISTERS

/* What a thread multiplies: its operand and all rows, in the first stage. */
typedef struct {
    folded_barriers barriers;
    uint32_t operands;
    uint64_t x;
    int stages;
} folded_ring;

/* An operand of a unit. */
typedef struct {
    uint32_t part[2][4];
} folded_unit;

static __device__ __forceinline__ void await(const folded_ring *t, const ring_place *slot) {
    mbarrier_wait(t->barriers.operands + 8u * slot->index, slot->parity);
    mbarrier_wait(t->barriers.rows + 8u * slot->index, slot->parity);
}

static __device__ __forceinline__ void take(const folded_ring *t, const ring_place *slot, int unit,
                                            folded_unit *o) {
    uint32_t at = t->operands + (uint32_t)(slot->index * OPERAND_STAGE + unit * OPERAND_UNIT);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint2 upper = load_shared_pair(at + i * 512), lower = load_shared_pair(at + i * 512 + 256);
        o->part[i][0] = upper.x;
        o->part[i][1] = lower.x;
        o->part[i][2] = upper.y;
        o->part[i][3] = lower.y;
    }
}

/* c = or += products of a unit with a part of the rows. */
template <class S>
static __device__ __forceinline__ void issue(const folded_ring *t, const ring_place *slot, int unit,
                                             int part, const folded_unit *o, int add,
                                             float (&c)[S::N / 2]) {
    uint64_t x =
        t->x + (uint32_t)(slot->index * (S::token_bytes / 16) + part * (S::N * 8) + unit * 4);
    wgmma_fence();
    wgmma_e4m3(c, o->part[0], x, add);
    wgmma_e4m3(c, o->part[1], x + 2, 1);
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

/* Adds the products of all steps of a tile; the operand of a step's first unit is in `even` when it
 * begins. While sums are added here, the other warpgroup has the tensor cores. */
template <class S>
static __device__ __forceinline__ void multiply_folded(const folded_ring *t, int steps,
                                                       ring_place *slot, float (&sum)[S::T / 2]) {
    folded_unit even, odd;
    float c[S::N / 2];
    await(t, slot);
    take(t, slot, 0, &even);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        ring_place next = *slot;
        advance(&next, t->stages);
#pragma unroll
        for (int part = 0; part < S::PARTS; part++) {
            issue<S>(t, slot, 0, part, &even, 0, c);
            if (part == 0)
                take(t, slot, 1, &odd);
            issue<S>(t, slot, 1, part, &odd, 1, c);
            if (part + 1 == S::PARTS && step + 1 < steps) {
                await(t, &next);
                wgmma_wait<1>();
                take(t, &next, 0, &even);
            }
            promote<S>(sum, part, c);
        }
        warp_releases<true>(t->barriers.empty + 8u * slot->index);
        stay_here(sum);
        *slot = next;
    }
}

} // namespace moq::moe_many

#endif
