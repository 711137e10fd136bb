/* NVFP4 experts for prefill on Hopper with FP8 products (compute "fp8"): rows of e4m3 codes by the
 * experts' packed weights, folded to e4m3.
 *
 * Layouts: W packed as prepared; rows e4m3 with a scale a row, their columns in the order of
 * operands (moq_cuda_quantize.paired); g in the layer's dtype, d bfloat16 or float32.
 *
 * Tile: 128 rows of W by up to 96 or 288 rows of an expert's tokens, which are the columns of the
 * products. The rows of W are 64 of gate and the 64 of up beside them, or, without a gate, the next
 * ones. One or two producer warpgroups fold (device/nvfp4_fold.h); they put rows of the first 64
 * and of the others in turns of eight, so that the two rows that a thread of wgmma has are of both.
 * Two warpgroups multiply, both operands in shared memory, a part of the tokens after the other,
 * and add each 128 columns to float32 sums, as FP8 wgmma keeps about 14 bits of its own. Two blocks
 * of a cluster have the same rows and neighbouring rows of W. Each copies half of the rows to both:
 * L2 delivers 23 bytes a cycle and multiprocessor (docs/lab/experts-prefill.md).
 *
 * Epilogue: a warpgroup has 32 columns of the first half of its tile and the 32 of the second that
 * belong to them. Sums leave 32 tokens at a time through shared memory, by a loop that stays in the
 * instruction cache; d in float32 leaves by TMA under what comes next.
 *
 * Bound: a step is 128 columns. With 288 rows its products take the tensor cores 1152 cycles, or
 * 1530 with the sums promoted; warps that fold beside them make that 2030, as they take turns with
 * those that promote, and with all copies and barriers it is some 2270. The epilogue of a tile
 * takes 6000 (g) to 9000 (d in float32). With few rows folding takes 700 cycles a step, and memory
 * as much. */
#include "core/nvfp4_packed.h"
#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/wgmma.h"
#include "cuda/moe/sm90/prefill/gemm.h"
#include "cuda/moe/sm90/prefill/prefill_config.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_prefill {

#define MULTIPLIERS    256 /* threads of the two warpgroups that multiply */
#define FOLDED_COPIERS 128
#define FOLDED_STAGES  6 /* at most */
#define FOLDED_STEP    128
#define PACKED_SLAB    (2 * MOQ_PACK_BYTES) /* bytes of a slab in a step */
#define PACKED_BOX     (4 * PACKED_SLAB)    /* bytes of 64 rows */
#define PACKED_FOLDS   (2 * PACKED_BOX)     /* offset of the powers of two of a stage's rows, */
#define PACKED_STAGE   (PACKED_FOLDS + 512) /* if it is the first step of a tile */
#define OPERAND_EIGHT  1024                 /* bytes of eight rows, in the swizzle of 128 bytes */
#define OPERAND_STAGE  (16 * OPERAND_EIGHT) /* bytes of a stage; half of it is a warpgroup's */

/* Shape of tiles of up to 96 rows of tokens, or, WIDE, 288, multiplied in PARTS parts of N. Fewer
 * rows leave registers for twice as many threads that fold. */
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

/* Returns the tiles of a pair of blocks: all of W for some rows, then for the next. */
static __device__ __forceinline__ tile_queue folded_queue(const gemm_args *a) {
    int along = (a->row_tiles + 1) / 2;
    return {(int)blockIdx.x / 2, a->count[1] * along, (int)gridDim.x / 2};
}

static __device__ __forceinline__ place folded_place_at(const gemm_args *a, int number) {
    int along = (a->row_tiles + 1) / 2, tile = number / along;
    return {a->tiles[tile], 2 * (number - tile * along) + (int)rank_in_cluster()};
}

/* Returns the place of a queue's first tile, if there is one. Warps that need places ask a tile
 * ahead. */
static __device__ __forceinline__ place folded_place(const gemm_args *a, const tile_queue *q) {
    return folded_place_at(a, min(q->number, max(q->end - 1, 0)));
}

static __device__ __forceinline__ place folded_place_after(const gemm_args *a,
                                                           const tile_queue *q) {
    return folded_place_at(a, min(q->number + q->stride, q->end - 1));
}

/* Returns the first of the 64 rows of W, within the expert, of a half of a tile. */
template <product_use USE>
static __device__ __forceinline__ int first_row(const gemm_args *a, int along, int half) {
    return USE == OF_GATE_AND_UP ? half * a->half + along * 64 : along * 128 + half * 64;
}

template <product_use USE>
static __device__ __forceinline__ int end_of_rows(const gemm_args *a, int half) {
    return USE == OF_GATE_AND_UP ? (half + 1) * a->half : a->n;
}

/* ---- barriers ---- */

/* Barriers of the stages: rows full, operands full, both empty; packed weights full, and empty. */
typedef struct {
    uint32_t rows, operands, empty, packed, unpacked;
} folded_barriers;

#define FOLDED_BARRIERS (5 * FOLDED_STAGES)

/* Initializes the barriers; all threads call, first of all. */
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
    cluster_sync(); /* visible to the other block */
    return b;
}

/* ---- producers ---- */

/* Copies packed weights, 64 rows by 128 columns in a box, and the powers of two of a tile's rows
 * beside its first step. */
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

/* Copies rows in boxes of S::box_rows, every other box by this block, for both blocks. */
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

/* ---- folding warps ---- */

/* Stores the operand of a unit, a row's 64 columns in four pieces of 16 bytes: rows g of the slab
 * and, two eights further, rows g + 8. `to` is the place of the lane's row and piece. */
static __device__ __forceinline__ void store_folded(uint32_t to, const uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t piece[4] = {a[0][i], a[0][i + 2], a[1][i], a[1][i + 2]};
        store_matrices(to + i * (2 * OPERAND_EIGHT), piece);
    }
}

/* Reads the powers of two of rows g and g + 8 of a slab, at `from`. */
static __device__ __forceinline__ uint32_t read_folds(uint32_t from) {
    uint32_t at = from + threadIdx.x % 32 / 4 * 4;
    return moq_pack_folds(__uint_as_float(load_shared_word(at)),
                          __uint_as_float(load_shared_word(at + 32)));
}

/* Returns where a lane stores unit `unit` of slab `slab` of the first half in the first stage. The
 * second half is an eight further; the other unit of a step differs in bit 6. */
static __device__ __forceinline__ uint32_t place_of_unit(uint32_t operands, int slab, int unit) {
    int row = threadIdx.x % 8, piece = unit * 4 + threadIdx.x % 32 / 8;
    return operands + slab * (4 * OPERAND_EIGHT) + row * 128 + (piece ^ row) * 16;
}

/* Folds the weights of all steps of a block. A warp has slab `warp % 4` of both halves, both units
 * of a step or, with eight warps, unit `warp / 4`. `packed` and `operands` are the pipelines. */
template <class S>
static __device__ __forceinline__ void fold_weights(const gemm_args *a, const folded_barriers *b,
                                                    uint32_t packed, uint32_t operands, int warp) {
    constexpr int UNITS = S::wide ? 4 : 2; /* units of both halves in turn */
    int slab = warp % 4, unit = S::wide ? 0 : warp / 4;
    uint32_t own = packed + slab * PACKED_SLAB + unit * MOQ_PACK_BYTES;
    uint32_t out = place_of_unit(operands, slab, unit);
    uint32_t folds_at = packed + PACKED_FOLDS + slab * 64;
    pipeline_state slot = {0, 0};
    if (!a->early)
        wait_for_predecessor();
    for (tile_queue q = folded_queue(a); q.number < q.end; q.number += q.stride) {
        uint32_t folds[2] = {0, 0};
#pragma unroll 1
        for (int step = 0; step < a->steps; step++) {
            uint32_t in = own + (uint32_t)(slot.index * PACKED_STAGE);
            uint32_t at = out + (uint32_t)(slot.index * OPERAND_STAGE);
            mbarrier_wait(b->packed + 8u * slot.index, slot.parity);
            moq_packed_unit next = moq_load_unit(in);
            if (step == 0) {
                uint32_t first = folds_at + (uint32_t)(slot.index * PACKED_STAGE);
                folds[0] = read_folds(first);
                folds[1] = read_folds(first + 256);
            }
            mbarrier_wait(b->empty + 8u * slot.index, slot.parity ^ 1);
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                moq_packed_unit now = next;
                uint32_t code[2][4];
                if (i + 1 < UNITS)
                    next =
                        moq_load_unit(in + (i + 1) % 2 * PACKED_BOX + (i + 1) / 2 * MOQ_PACK_BYTES);
                moq_fold_unit(now.codes, now.scales, folds[i % 2], code);
                store_folded((i / 2 ? at ^ 64 : at) + i % 2 * OPERAND_EIGHT, code);
            }
            warp_releases<false>(b->unpacked + 8u * slot.index);
            warp_releases<false>(b->operands + 8u * slot.index);
            advance(&slot, a->stages);
        }
    }
}

/* ---- consumers ---- */

/* A consumer's pipeline: the operand of its warpgroup and all rows, in the first stage. */
typedef struct {
    folded_barriers barriers;
    uint64_t w, x;
    int stages;
} folded_pipeline;

static __device__ __forceinline__ void await(const folded_pipeline *t, const pipeline_state *slot) {
    mbarrier_wait(t->barriers.operands + 8u * slot->index, slot->parity);
    mbarrier_wait(t->barriers.rows + 8u * slot->index, slot->parity);
}

/* Issues c = products of a step with a part of the rows. */
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

/* Waits for the products of a part and adds them to its sums. */
template <class S>
static __device__ __forceinline__ void promote(float (&sum)[S::T / 2], int part,
                                               float (&c)[S::N / 2]) {
    wgmma_wait<0>();
    stay_here(c);
#pragma unroll
    for (int i = 0; i < S::N / 2; i++)
        sum[part * (S::N / 2) + i] += c[i];
}

/* Multiplies all steps of a tile. While sums are added here, the other warpgroup has the tensor
 * cores. */
template <class S>
static __device__ __forceinline__ void
multiply_folded(const folded_pipeline *t, int steps, pipeline_state *slot, float (&sum)[S::T / 2]) {
    float c[S::N / 2];
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        await(t, slot);
        fence_async_proxy(); /* here, as a consumer stored nothing that it would wait for */
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

#define OUT_ROWS    32                     /* tokens of an epilogue step */
#define OUT_COLUMNS 32                     /* columns of a warpgroup in a half */
#define OUT_HALF    (OUT_ROWS * 128)       /* staged bytes of d of a half */
#define OUT_BYTES   (2 * 2 * 2 * OUT_HALF) /* bytes: two warpgroups, halves and buffers */

/* Epilogue operands of a warpgroup: of rows of W, the first half's and then the second's, and of
 * tokens. */
typedef struct {
    float factor[64], fold[64], bias[64], x[288];
} folded_epilogue_operands;

/* The output path of a warpgroup. */
typedef struct {
    const CUtensorMap *map; /* map of d, in boxes of OUT_ROWS by 32 columns */
    folded_epilogue_operands *state;
    uint32_t room; /* two buffers of OUT_ROWS tokens */
    int turn;      /* number of the next buffer */
} folded_path;

template <product_use USE>
static __device__ __forceinline__ int first_column(const gemm_args *a, const place *p, int group,
                                                   int half) {
    return first_row<USE>(a, p->along, half) + group * OUT_COLUMNS;
}

/* Loads the epilogue operands of a tile's rows and tokens. */
template <product_use USE>
static __device__ __forceinline__ void fetch_epilogue_operands(const folded_args *f, const place *p,
                                                               int group,
                                                               folded_epilogue_operands *state) {
    const gemm_args *a = &f->gemm;
    int thread = threadIdx.x % 128, own = thread % 64, half = own / OUT_COLUMNS;
    int row = first_column<USE>(a, p, group, half) + own % OUT_COLUMNS;
    int64_t at = (int64_t)p->rows.expert * a->n;
    int bytes = row < end_of_rows<USE>(a, half) ? 4 : 0;
    at += bytes ? row : 0;
    if (thread < 64)
        copy_async_4(shared_address(&state->factor[own]), a->output_scale + at, bytes);
    else
        copy_async_4(shared_address(&state->fold[own]), f->fold_scale + at, bytes);
    if (a->bias && thread < 64)
        copy_async_4(shared_address(&state->bias[own]), a->bias + at, bytes);
    for (int i = thread; i < p->rows.rows; i += 128)
        copy_async_4(shared_address(&state->x[i]), a->x_scale + p->rows.first + i, 4);
    copy_async_commit();
}

/* Returns factors and biases of a thread's rows. */
static __device__ __forceinline__ terms
read_epilogue_operands(const gemm_args *a, const folded_epilogue_operands *state) {
    int own = threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4;
    terms e = {{0.0f, 0.0f}, {-0.0f, -0.0f}}; /* adding -0 changes nothing */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        e.factor[i] = state->factor[own + 32 * i] * moq_unfold(state->fold[own + 32 * i]);
        if (a->bias)
            e.bias[i] = state->bias[own + 32 * i];
    }
    return e;
}

/* Copies the sums of chunk NUMBER. The assembly comment keeps the compiler from turning a jump into
 * selects for each sum. */
template <int NUMBER, int ALL>
static __device__ __forceinline__ void take_sums(const float (&sum)[ALL], float (&own)[16]) {
    asm volatile("// chunk %0" ::"n"(NUMBER));
#pragma unroll
    for (int k = 0; k < 16; k++)
        own[k] = NUMBER * 16 + k < ALL ? sum[NUMBER * 16 + k < ALL ? NUMBER * 16 + k : 0] : 0.0f;
}

/* Copies the sums of one chunk of tokens. */
template <int ALL>
static __device__ __forceinline__ void choose_sums(const float (&sum)[ALL], int chunk,
                                                   float (&own)[16]) {
    switch (chunk) {
    case 0:
        return take_sums<0>(sum, own);
    case 1:
        return take_sums<1>(sum, own);
    case 2:
        return take_sums<2>(sum, own);
    case 3:
        return take_sums<3>(sum, own);
    case 4:
        return take_sums<4>(sum, own);
    case 5:
        return take_sums<5>(sum, own);
    case 6:
        return take_sums<6>(sum, own);
    case 7:
        return take_sums<7>(sum, own);
    default:
        return take_sums<8>(sum, own);
    }
}

/* Finishes four sums of eight tokens: those of the first half's row, then of the second's. */
static __device__ __forceinline__ void finish_four(const terms *e, const float *x, const float *sum,
                                                   float (&value)[4]) {
    float2 own = *(const float2 *)(x + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; i++)
        value[i] = finish_sum(sum[i], e->factor[i / 2], i % 2 ? own.y : own.x, e->bias[i / 2]);
}

/* ---- epilogue: outputs of 16 bits ---- */

/* Stages g of a chunk, or d, 64 bytes a token; without a gate, the second half follows. */
template <product_use USE, kind_of_code KIND>
static __device__ __forceinline__ void stage_g(const gemm_args *a, uint32_t room, const terms *e,
                                               const float *x, const float (&sum)[16]) {
    constexpr bool GATED = USE == OF_GATE_AND_UP;
    constexpr int KINDS = GATED ? 1 : 2;
    int lane = threadIdx.x % 32, piece = threadIdx.x % 128 / 32;
    uint32_t matrix[KINDS][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float z[4], g[4];
        finish_four(e, x + 8 * j, sum + 4 * j, z);
#pragma unroll
        for (int i = 0; i < 2 * KINDS; i++)
            g[i] = USE == OF_D ? z[i] : act<KIND>(&a->act, z[i], GATED ? z[i + 2] : 1.0f);
#pragma unroll
        for (int i = 0; i < KINDS; i++)
            matrix[i][j] = moq_narrow_pair(a->out.dtype, g[2 * i], g[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < KINDS; i++)
        store_matrices_turned(room + i * (OUT_ROWS * 64) + lane * 64 + (piece ^ lane / 2 % 4) * 16,
                              matrix[i]);
}

/* Stores staged outputs of `count` tokens from row `row` on: four threads have one. */
template <product_use USE>
static __device__ __forceinline__ void carry_g(const gemm_args *a, uint32_t room, const place *p,
                                               int group, int64_t row, int count) {
    int thread = threadIdx.x % 128, token = thread / 4, piece = thread % 4;
#pragma unroll
    for (int half = 0; half < (USE == OF_GATE_AND_UP ? 1 : 2); half++) {
        int column = first_column<USE>(a, p, group, half) + piece * 8;
        uint4 word =
            load_shared(room + half * (OUT_ROWS * 64) + token * 64 + (piece ^ token / 2 % 4) * 16);
        if (token < count && column < end_of_rows<USE>(a, half))
            *(uint4 *)((uint16_t *)a->out.data + (row + token) * a->out.stride + column) = word;
    }
}

template <class S, product_use USE, kind_of_code KIND>
static __device__ __forceinline__ void write_folded_g(const gemm_args *a, const place *p, int group,
                                                      folded_path *w,
                                                      const float (&sum)[S::T / 2]) {
    terms e = read_epilogue_operands(a, w->state);
#pragma unroll 1
    for (int chunk = 0; chunk * OUT_ROWS < p->rows.rows; chunk++) {
        uint32_t room = w->room + w->turn * (2 * OUT_HALF);
        int first = chunk * OUT_ROWS;
        float own[16];
        choose_sums(sum, chunk, own);
        stage_g<USE, KIND>(a, room, &e, w->state->x + first, own);
        barrier_sync(2 + group, 128); /* all threads have stored the other buffer */
        carry_g<USE>(a, room, p, group, p->rows.first + first, p->rows.rows - first);
        w->turn ^= 1;
    }
}

/* ---- epilogue: d in float32 ---- */

/* Stages d of a chunk in the 128-byte swizzle. */
static __device__ __forceinline__ void stage_d(uint32_t room, const terms *e, const float *x,
                                               const float (&sum)[16]) {
    int lane = threadIdx.x % 32, column = threadIdx.x % 128 / 32 * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float z[4];
        finish_four(e, x + 8 * j, sum + 4 * j, z);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = 8 * j + lane % 4 * 2 + i % 2;
            store_shared_word(room + i / 2 * OUT_HALF + token * 128 +
                                  (column / 4 ^ token % 8) * 16 + column % 4 * 4,
                              __float_as_uint(z[i]));
        }
    }
}

/* Stores staged d of an expert's last rows, which rows of others follow. */
static __device__ __forceinline__ void carry_d(const gemm_args *a, uint32_t room, int column,
                                               int64_t row, int count) {
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < count * 16; i += 128) {
        int token = i / 16, half = i / 8 % 2, piece = i % 8, n = column + half * 64 + piece * 4;
        uint4 word = load_shared(room + half * OUT_HALF + token * 128 + (piece ^ token % 8) * 16);
        if (n < a->n)
            *(uint4 *)(a->d + (row + token) * a->n + n) = word;
    }
}

template <class S>
static __device__ __forceinline__ void write_folded_d(const gemm_args *a, const place *p, int group,
                                                      folded_path *w,
                                                      const float (&sum)[S::T / 2]) {
    terms e = read_epilogue_operands(a, w->state);
    int thread = threadIdx.x % 128, column = first_column<OF_D>(a, p, group, 0);
#pragma unroll 1
    for (int chunk = 0; chunk * OUT_ROWS < p->rows.rows; chunk++) {
        uint32_t room = w->room + w->turn * (2 * OUT_HALF);
        int first = chunk * OUT_ROWS, count = min(OUT_ROWS, p->rows.rows - first);
        float own[16];
        choose_sums(sum, chunk, own);
        if (thread == 0)
            store_wait<1>(); /* the other buffer may still be leaving */
        barrier_sync(2 + group, 128);
        stage_d(room, &e, w->state->x + first, own);
        fence_async_proxy();
        barrier_sync(2 + group, 128);
        if (count < OUT_ROWS)
            carry_d(a, room, column, p->rows.first + first, count);
        if (thread == 0) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (count == OUT_ROWS && column + half * 64 < a->n)
                    store_box_of_group(w->map, (column + half * 64) * 4, p->rows.first + first,
                                       room + half * OUT_HALF);
            store_commit(); /* an empty group counts, too */
        }
        w->turn ^= 1;
    }
}

/* Writes a warpgroup's outputs of a tile. */
template <class S, product_use USE>
static __device__ __forceinline__ void write_folded(const gemm_args *a, const place *p, int group,
                                                    folded_path *w, const float (&sum)[S::T / 2]) {
    copy_async_wait<0>();
    barrier_sync(2 + group, 128);
    if constexpr (USE == OF_D) {
        if (a->d)
            write_folded_d<S>(a, p, group, w, sum);
        else
            write_folded_g<S, USE, PLAIN_SILU>(a, p, group, w, sum);
    } else {
        with_code<USE, S::T == S::tokens>(&a->act, [&](auto code) {
            write_folded_g<S, USE, decltype(code)::kind>(a, p, group, w, sum);
        });
    }
}

template <class S, product_use USE>
static __device__ __forceinline__ void
make_folded_tile(const folded_args *f, const folded_pipeline *t, const tile_queue *q, place *p,
                 pipeline_state *slot, int group, folded_path *w) {
    float sum[S::T / 2] = {};
    fetch_epilogue_operands<USE>(f, p, group, w->state);
    multiply_folded<S>(t, f->gemm.steps, slot, sum);
    place next = folded_place_after(&f->gemm, q); /* loaded during the epilogue */
    write_folded<S, USE>(&f->gemm, p, group, w, sum);
    *p = next;
}

/* Makes a tile with the narrowest products that hold its rows and have code for the activation. */
template <class S, product_use USE>
static __device__ __forceinline__ void
make_fitting_tile(const folded_args *f, const folded_pipeline *t, const tile_queue *q, place *p,
                  pipeline_state *slot, int group, folded_path *w) {
    constexpr bool WIDE = S::wide;
    constexpr int LEAST = WIDE ? 96 : 32, SOME = WIDE ? 192 : 64;
    int rows = __shfl_sync(0xffffffffu, p->rows.rows, 0); /* uniform */
    if (!is_usual<USE>(&f->gemm.act))
        rows = S::tokens;
    if (rows <= LEAST)
        make_folded_tile<folded_tile<WIDE, LEAST, 1>, USE>(f, t, q, p, slot, group, w);
    else if (rows <= SOME)
        make_folded_tile<folded_tile<WIDE, SOME / (WIDE ? 2 : 1), WIDE ? 2 : 1>, USE>(
            f, t, q, p, slot, group, w);
    else
        make_folded_tile<S, USE>(f, t, q, p, slot, group, w);
}

template <class S, product_use USE>
static __device__ __forceinline__ void
consume_folded(const folded_args *f, const folded_pipeline *t, int group, folded_path *w) {
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* the next kernel may rely on the groups */
    tile_queue q = folded_queue(&f->gemm);
    place p = folded_place(&f->gemm, &q);
    for (; q.number < q.end; q.number += q.stride)
        make_fitting_tile<S, USE>(f, t, &q, &p, &slot, group, w);
    if (threadIdx.x % 128 == 0)
        store_wait<0>();
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(S::threads, 1)
    experts_folded(const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap rows,
                   const __grid_constant__ CUtensorMap outputs,
                   const __grid_constant__ folded_args f) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[FOLDED_BARRIERS];
    __shared__ __align__(16) folded_epilogue_operands epilogue[2];
    uint32_t x = fixed_shared_address(smem), room = x + f.gemm.stages * S::token_bytes;
    uint32_t operands = room + OUT_BYTES, packed = operands + f.gemm.stages * OPERAND_STAGE;
    folded_barriers b = make_folded_barriers<S>(&f, barrier);
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* uniform */
    if (warp < MULTIPLIERS / 32) {
        more_registers<S::registers>();
        int group = warp / 4;
        folded_pipeline t = {b, wgmma_operand(operands + group * (OPERAND_STAGE / 2)),
                             wgmma_operand(x), f.gemm.stages};
        folded_path w = {&outputs, &epilogue[group], room + group * (OUT_BYTES / 2), 0};
        consume_folded<S, USE>(&f, &t, group, &w);
    } else if (warp < (MULTIPLIERS + S::folders) / 32) {
        fewer_registers<S::folder_registers>();
        fold_weights<S>(&f.gemm, &b, packed, operands, warp - MULTIPLIERS / 32);
    } else {
        fewer_registers<24>();
        int copier = warp - (MULTIPLIERS + S::folders) / 32;
        if (copier == 0 && is_elected())
            produce_packed<USE>(&f, &weights, &b, packed);
        else if (copier == 1 && is_elected())
            produce_shared_rows<S>(&f.gemm, &rows, &b, x);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still copy into this one */
}

/* ---- launch ---- */

/* A shape for the launch: kernels by product_use. */
typedef struct {
    int stage, box_rows, threads;
    const void *kernel[3];
} folded_variant;

template <bool WIDE> static folded_variant folded_variant_of(void) {
    typedef folded_tile<WIDE, WIDE ? 144 : 96, WIDE ? 2 : 1> S;
    return {S::token_bytes + OPERAND_STAGE + PACKED_STAGE,
            S::box_rows,
            S::threads,
            {(const void *)experts_folded<S, OF_GATE_AND_UP>,
             (const void *)experts_folded<S, OF_ONE>, (const void *)experts_folded<S, OF_D>}};
}

/* Sets the stages that fit; returns the dynamic shared memory. */
static int folded_smem_layout(folded_args *f, const folded_variant *v, int limit) {
    int fixed = 1024 + FOLDED_BARRIERS * 8 + 2 * (int)sizeof(folded_epilogue_operands) + OUT_BYTES;
    int stages = (limit - fixed) / v->stage;
    f->gemm.stages = stages < FOLDED_STAGES ? stages : FOLDED_STAGES;
    MOQ_ASSERT(f->gemm.stages >= 2); /* one is folded while one is multiplied */
    return f->gemm.stages * v->stage + OUT_BYTES;
}

moq_status multiply_nvfp4_fp8(const moe::expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    bool wide = p->tile_rows > MOQ_MOE_FOLDED_ROWS;
    folded_variant v = wide ? folded_variant_of<true>() : folded_variant_of<false>();
    int64_t k = spec->in_features, n = spec->out_features, blocks = moq_pack_blocks(k);
    int64_t slabs = moq_pack_slabs(n);
    int limit;
    CUtensorMap weights, rows, outputs;
    MOQ_TRY(find_shared_limit(p, &limit, err));
    folded_args f = {args_of(p, (k + FOLDED_STEP - 1) / FOLDED_STEP, slabs, 1),
                     p->weight->fold_scale};
    f.gemm.x_scale = (const float *)p->rows->scales;
    int shared = folded_smem_layout(&f, &v, limit);
    MOQ_TRY(moq_tensor_map_words(&weights, p->weight->weight, p->call->spec->experts * slabs,
                                 blocks * (MOQ_PACK_BYTES / 8), 4, PACKED_SLAB / 8, err));
    MOQ_TRY(
        moq_tensor_map_rows(&rows, p->rows->data, p->most_rows, k, k, (uint32_t)v.box_rows, err));
    outputs = rows; /* unused by the first product */
    if (!p->first)
        MOQ_TRY(moq_tensor_map_rows(&outputs, p->out, p->most_rows, n * 4, n * 4, OUT_ROWS, err));
    void *parameters[] = {&weights, &rows, &outputs, &f};
    return launch_pairs(p, v.kernel[use_of(p)], p->tiles * ((f.gemm.row_tiles + 1) / 2), v.threads,
                        shared, parameters, err);
}

} // namespace moq::moe_prefill
