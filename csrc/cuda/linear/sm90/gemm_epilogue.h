/* Epilogue of the Hopper GEMMs: split-K sums are added, scaled, rounded and stored.
 *
 * The shape S of a tile says: T columns of the product; row_groups warpgroups with 64 (or WAVES
 * times 64) rows each, times k_groups that split the steps of K; tokens_first, whether tokens are
 * the rows; row_factors and token_factors, which scales outputs have; and args, the kernel's
 * arguments with m, n, out, output_scale, x_scale, per_token and the offsets of the smem layout.
 *
 * What bounds it: with few tokens the exchange of sums between blocks, about a microsecond; with
 * many the L2, which takes all blocks' outputs at about the same time (docs/lab/fp8-prefill.md). */
#ifndef MOQ_CUDA_LINEAR_SM90_GEMM_EPILOGUE_H
#define MOQ_CUDA_LINEAR_SM90_GEMM_EPILOGUE_H

#include "cuda/choice/grid.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/gemm_scheduler.h"

namespace moq::gemm {

/* ---- epilogue operands: a thread loads those of its rows of the product into registers; those of
 * columns pass through shared memory ---- */

/* Scales and biases of two rows 8 apart, or of two columns 128 apart. They are kept as loaded, so
 * that nothing waits for them before the mainloop. */
typedef struct {
    float factor[2], bias[2];
} terms;

template <class S> struct tile_terms {
    static constexpr int COLUMNS = (S::T + 127) / 128; /* columns of a thread */
    terms row[S::WAVES], column;
};

/* Scales and biases of a warpgroup's columns in shared memory, read two at a time. */
template <class S> struct __align__(8) column_terms {
    float factor[S::T], bias[S::tokens_first ? S::T : 1];
};

/* Returns the upper of the two rows that a thread has of 64. */
static __device__ __forceinline__ int row_of_thread(void) {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

template <class S, int COUNT, int APART>
static __device__ __forceinline__ void fetch_factors(const typename S::args *a,
                                                     const tile_place *at, int own, terms *e) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (at->row + own + APART * i < at->end)
            e->factor[i] = a->output_scale[at->row + own + APART * i];
}

template <class S, int COUNT, int APART>
static __device__ __forceinline__ void fetch_biases(const typename S::args *a, const tile_place *at,
                                                    int own, terms *e) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (at->row + own + APART * i < at->end)
            e->bias[i] = moq_load_bias(&a->out, at->row + own + APART * i);
}

template <class S, int COUNT, int APART>
static __device__ __forceinline__ void fetch_scales(const typename S::args *a, const tile_place *at,
                                                    int token, terms *e) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int m = at->token + token + APART * i;
        if (m < at->last)
            e->factor[i] = a->x_scale[a->per_token ? m : 0];
    }
}

/* Loads operands that do not depend on the preceding kernel; `row` is the warpgroup's first row. */
template <class S>
static __device__ __forceinline__ void fetch_early(const typename S::args *a, const tile_place *at,
                                                   int row, tile_terms<S> *e) {
    if constexpr (S::row_factors && S::tokens_first) {
        fetch_factors<S, e->COLUMNS, 128>(a, at, threadIdx.x % 128, &e->column);
    } else if constexpr (S::row_factors) {
#pragma unroll
        for (int i = 0; i < S::WAVES; i++)
            fetch_factors<S, 2, 8>(a, at, row + 64 * i + row_of_thread(), &e->row[i]);
    }
}

/* Loads operands that may come from the preceding kernel, after it has ended. */
template <class S>
static __device__ __forceinline__ void fetch_late(const typename S::args *a, const tile_place *at,
                                                  int row, tile_terms<S> *e) {
    int column = threadIdx.x % 128;
    if constexpr (S::tokens_first)
        fetch_biases<S, e->COLUMNS, 128>(a, at, column, &e->column);
    else if constexpr (S::token_factors)
        fetch_scales<S, e->COLUMNS, 128>(a, at, column, &e->column);
#pragma unroll
    for (int i = 0; i < S::WAVES; i++) {
        int own = row + 64 * i + row_of_thread();
        if constexpr (!S::tokens_first)
            fetch_biases<S, 2, 8>(a, at, own, &e->row[i]);
        else if constexpr (S::token_factors)
            fetch_scales<S, 2, 8>(a, at, own, &e->row[i]);
    }
}

/* Stores the column operands to shared memory, before a barrier of the warpgroup. */
template <class S>
static __device__ __forceinline__ void post_columns(const tile_terms<S> *e, column_terms<S> *b) {
#pragma unroll
    for (int i = 0; i < e->COLUMNS; i++) {
        int column = threadIdx.x % 128 + 128 * i;
        if (column >= S::T)
            continue;
        b->factor[column] = e->column.factor[i];
        if (S::tokens_first)
            b->bias[column] = e->column.bias[i];
    }
}

/* Whether outputs may get an addend: those of NVFP4 weights as they are. */
template <class S> constexpr bool ADDS = S::row_factors && !S::token_factors;

/* Returns the output of a sum: scaled, plus the bias. */
template <class S>
static __device__ __forceinline__ float finish(const typename S::args *a, float sum, float row,
                                               float column, float bias) {
    if (S::row_factors)
        sum *= S::token_factors ? column * row : row * S::unit;
    else if (S::unit != 1.0f)
        sum *= S::unit;
    return a->out.bias ? __fadd_rn(sum, bias) : sum;
}

/* ---- stores ---- */

/* Stores `count` outputs, at most 8, of token m from column n on; one 16-byte store where aligned.
 */
static __device__ __forceinline__ void store_eight(const moq_output *out, int64_t m, int n,
                                                   int count, uint4 word) {
    uint16_t *to = (uint16_t *)out->data + m * out->stride + n;
    if (count >= 8 && (uintptr_t)to % 16 == 0) {
        *(uint4 *)to = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            to[i] = (uint16_t)((&word.x)[i / 2] >> (i % 2 * 16));
}

/* ---- tokens are the columns: outputs are staged transposed as 16 bits, 128 bytes a token for the
 * 64 rows of a warpgroup. That takes half the stores to shared memory and a quarter of the
 * instructions that float32 sums would (docs/lab/fp8-prefill.md) ---- */

/* Adds an addend to two outputs of row n of W, of token m and the next one. */
template <class S>
static __device__ __forceinline__ void add_addends(const typename S::args *a, const tile_place *at,
                                                   int m, int n, float &low, float &high) {
    if (!a->out.addend || n >= at->end)
        return;
    if (m < at->last)
        low = __fadd_rn(low, moq_load_addend(&a->out, m, n));
    if (m + 1 < at->last)
        high = __fadd_rn(high, moq_load_addend(&a->out, m + 1, n));
}

/* Stages outputs of eight tokens, from the tile's token `first` on, from this thread's sums,
 * transposed: rows 8i and on of a token lie at (i ^ token % 8) * 16. `row` is the warpgroup's first
 * row, and `column` points to the tokens' scales. */
template <class S>
static __device__ __forceinline__ void
stage_eight(const typename S::args *a, uint32_t room, const tile_place *at, int row, int first,
            const terms *e, const float *column, float4 sum) {
    int lane = threadIdx.x % 32, piece = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    float2 own = {1.0f, 1.0f};
    if (S::token_factors)
        own = *(const float2 *)(column + lane % 4 * 2);
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float low = finish<S>(a, i ? sum.z : sum.x, e->factor[i], own.x, e->bias[i]);
        float high = finish<S>(a, i ? sum.w : sum.y, e->factor[i], own.y, e->bias[i]);
        if constexpr (ADDS<S>)
            add_addends<S>(a, at, at->token + first + lane % 4 * 2,
                           at->row + row + row_of_thread() + 8 * i, low, high);
        half[i] = moq_narrow_pair(a->out.dtype, low, high);
    }
    store_two_matrices_turned(room + lane % 8 * 128 + (piece ^ lane % 8) * 16, half[0], half[1]);
}

/* Stores what a warpgroup has staged: `count` tokens from the tile's token `first` on, of the 64
 * rows from `row` on. */
template <class S>
static __device__ __forceinline__ void store_staged(const typename S::args *a, uint32_t room,
                                                    const tile_place *at, int row, int first,
                                                    int count) {
    int thread = threadIdx.x % 128, n = at->row + row + thread % 8 * 8;
    int end = min(count, at->last - at->token - first);
    if (n >= at->end)
        return;
#pragma unroll 4
    for (int token = thread / 8; token < end; token += 16)
        store_eight(&a->out, at->token + first + token, n, at->end - n,
                    load_shared(room + token * 128 + (thread % 8 ^ token % 8) * 16));
}

/* Writes the outputs of 64 rows, from the tile's row `row` on. */
template <class S>
static __device__ __forceinline__ void
write_columns(const typename S::args *a, const column_terms<S> *b, uint32_t room,
              const tile_place *at, int row, const terms *e, const float (&sum)[S::T / 2]) {
    constexpr int AT_ONCE = TURNED_AT_ONCE(S::T);
    int group = threadIdx.x / 128;
#pragma unroll
    for (int first = 0; first < S::T; first += AT_ONCE) {
        barrier_sync(2 + group, 128); /* the previous contents have been stored */
#pragma unroll
        for (int j = 0; j < AT_ONCE / 8; j++) {
            const float *four = sum + (first / 8 + j) * 4;
            stage_eight<S>(a, room + j * EIGHT_BYTES, at, row, first + 8 * j, e,
                           b->factor + first + 8 * j,
                           make_float4(four[0], four[1], four[2], four[3]));
        }
        barrier_sync(2 + group, 128);
        store_staged<S>(a, room, at, row, first, AT_ONCE);
    }
}

/* ---- tokens are the rows ---- */

/* Writes four outputs of a thread: two rows of W from `own` on, of tokens `token` and `token` + 8.
 */
template <class S>
static __device__ __forceinline__ void write_four(const typename S::args *a,
                                                  const column_terms<S> *b, const tile_place *at,
                                                  int token, int own, const terms *e, float4 sum) {
    int n = at->row + own;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = at->token + token + 8 * i;
        uint16_t *to = (uint16_t *)a->out.data + m * a->out.stride + n;
        float low = finish<S>(a, i ? sum.z : sum.x, b->factor[own], e->factor[i], b->bias[own]);
        float high =
            finish<S>(a, i ? sum.w : sum.y, b->factor[own + 1], e->factor[i], b->bias[own + 1]);
        uint32_t word = moq_narrow_pair(a->out.dtype, low, high);
        if (m >= at->last || n >= at->end)
            continue;
        if (n + 1 < at->end && (uintptr_t)to % 4 == 0) {
            *(uint32_t *)to = word;
            continue;
        }
        to[0] = (uint16_t)word;
        if (n + 1 < at->end)
            to[1] = (uint16_t)(word >> 16);
    }
}

/* ---- split-K ---- */

/* Barriers of a cluster for split-K, each used once: sums of other blocks have arrived, and all
 * blocks are done with their pipelines. */
typedef struct {
    uint32_t posted, ready;
} cluster_barriers;

/* Returns the split that adds up the j-th eight columns of the product. */
template <class S> static __device__ __forceinline__ int owner_of(int j, int splits) {
    return j * splits / (S::T / 8);
}

/* Columns that a split adds up, counted in eights. */
typedef struct {
    int first, count;
} eights;

template <class S> static __device__ __forceinline__ eights eights_of(int split, int splits) {
    eights e = {0, 0};
#pragma unroll
    for (int j = 0; j < S::T / 8; j++) { /* shorter than a division */
        e.first += owner_of<S>(j, splits) < split;
        e.count += owner_of<S>(j, splits) == split;
    }
    return e;
}

/* Returns the bytes of sums that a block receives from other blocks. */
template <class S> static __device__ __forceinline__ int bytes_to_come(void) {
    int splits = (int)blocks_in_cluster() * S::k_groups,
        split = (int)rank_in_cluster() * S::k_groups;
    int count = 0;
#pragma unroll
    for (int i = 0; i < S::k_groups; i++)
        count += eights_of<S>(split + i, splits).count;
    return count * (splits - S::k_groups) * (S::row_groups * 128) * 16;
}

/* Adds the sums of all splits: blocks of a cluster, times warpgroups in them. Each split receives
 * every split's sums of some of the product's columns, eight at a time, as
 * [warpgroups][eights][splits][threads], and adds them in the order of the splits.
 *
 * Warpgroups count the splits of the first rows, then of the next. Outputs are staged at a->turn,
 * which may overlap the pipeline: all blocks are done with it by then. */
template <class S>
static __device__ __forceinline__ void
reduce_splits(const typename S::args *a, uint8_t *shared, column_terms<S> *b,
              const cluster_barriers *meet, const tile_terms<S> *e, const tile_place *at,
              const float (&sum)[S::T / 2]) {
    constexpr int SPLIT = S::k_groups;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, rows = group / SPLIT;
    int blocks = (int)blocks_in_cluster(), splits = blocks * SPLIT;
    int rank = (int)rank_in_cluster(), split = rank * SPLIT + group % SPLIT;
    uint32_t room = shared_address(shared + a->room);
    uint32_t turn = shared_address(shared + a->turn + group * a->turn_step);
    if (!S::own_room) {
        warp_releases_all(meet->ready, blocks);
        mbarrier_wait(meet->ready, 0);
    }
    int before = 0, local = 0; /* the owner of the eight before, and the index among its eights */
#pragma unroll
    for (int j = 0; j < S::T / 8; j++) {
        int owner = owner_of<S>(j, splits), side = rows * SPLIT + owner % SPLIT;
        local = owner == before ? local : 0;
        before = owner;
        uint32_t to = room + 16u * (side * a->side + (local++ * splits + split) * 128 + thread);
        float4 four = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
        int block = owner / SPLIT;
        if (block != rank)
            send_four(address_in(block, to), four, address_in(block, meet->posted));
        else
            store_shared(to, make_uint4(__float_as_uint(four.x), __float_as_uint(four.y),
                                        __float_as_uint(four.z), __float_as_uint(four.w)));
    }
    if (S::tokens_first || S::token_factors)
        post_columns<S>(e, b);
    eights own = eights_of<S>(split, splits);
    const float4 *mine = (const float4 *)(shared + a->room) + group * a->side + thread;
    barrier_sync(1, S::consumers);
    if (blocks > 1)
        mbarrier_wait(meet->posted, 0);
    for (int j = 0; j < own.count; j++) {
        float4 total = mine[j * splits * 128];
        for (int i = 1; i < splits; i++) {
            float4 other = mine[(j * splits + i) * 128];
            total.x += other.x;
            total.y += other.y;
            total.z += other.z;
            total.w += other.w;
        }
        int column = (own.first + j) * 8;
        if constexpr (S::tokens_first)
            write_four<S>(a, b, at, rows * 64 + row_of_thread(), column + thread % 4 * 2,
                          &e->row[0], total);
        else
            stage_eight<S>(a, turn + j * EIGHT_BYTES, at, rows * 64, column, &e->row[0],
                           b->factor + column, total);
    }
    if constexpr (!S::tokens_first) {
        barrier_sync(2 + group, 128);
        store_staged<S>(a, turn, at, rows * 64, own.first * 8, own.count * 8);
    }
}

} // namespace moq::gemm

#endif
