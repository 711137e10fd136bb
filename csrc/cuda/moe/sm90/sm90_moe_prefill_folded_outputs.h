/* Outputs of the tiles of sm90_moe_prefill_folded.h: act(gate, up) in the layer's dtype, or d,
 * rounded to bfloat16 or in float32.
 *
 * A warpgroup has 32 columns of the first half of its tile and the 32 of the second that belong to
 * them; sums leave 32 tokens at a time through shared memory, by code that goes round, so that it
 * stays in the instructions' cache (docs/lab/experts-prefill.md). d in float32 is taken out by the
 * copy engine under what comes next. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_FOLDED_OUTPUTS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_FOLDED_OUTPUTS_H

#include "cuda/moe/sm90/sm90_moe_prefill_folded.h"

namespace moq::moe_prefill {

#define OUT_ROWS    32                     /* tokens that leave at a time */
#define OUT_COLUMNS 32                     /* columns of a warpgroup and half */
#define OUT_HALF    (OUT_ROWS * 128)       /* bytes of d of a half, */
#define OUT_BYTES   (2 * 2 * 2 * OUT_HALF) /* and of all room: two warpgroups, two halves, twice */

/* store_box_2d (device/ptx.h), as one of several that commit_boxes() makes a group. */
static __device__ __forceinline__ void put_box_2d(const CUtensorMap *map, int c0, int c1,
                                                  uint32_t from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(from)
        : "memory");
}

static __device__ __forceinline__ void commit_boxes(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* What this thread's groups of boxes store has been read, but for the last `pending` of them. */
template <int pending> static __device__ __forceinline__ void wait_for_boxes(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/* What rows of W, the first half's and then the second's, and tokens bring to a warpgroup's part of
 * a tile. */
typedef struct {
    float factor[64], fold[64], bias[64], x[288];
} folded_epilogue_operands;

/* Where a warpgroup's outputs leave. */
typedef struct {
    const CUtensorMap *map; /* of d, in boxes of OUT_ROWS by 32 columns */
    folded_epilogue_operands *state;
    uint32_t room; /* for OUT_ROWS tokens, twice */
    int turn;      /* which of the two is next */
} folded_path;

template <product_use USE>
static __device__ __forceinline__ int first_column(const gemm_args *a, const place *p, int group,
                                                   int half) {
    return first_row<USE>(a, p->along, half) + group * OUT_COLUMNS;
}

/* Asks for what a tile's rows and tokens bring. */
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

/* Factors and biases of a thread's rows. */
static __device__ __forceinline__ terms
read_epilogue_operands(const gemm_args *a, const folded_epilogue_operands *state) {
    int own = threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4;
    terms e = {{0.0f, 0.0f}, {-0.0f, -0.0f}}; /* whoever adds -0 adds nothing */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        e.factor[i] = state->factor[own + 32 * i] * moq_unfold(state->fold[own + 32 * i]);
        if (a->bias)
            e.bias[i] = state->bias[own + 32 * i];
    }
    return e;
}

/* The sums of chunk NUMBER. The comment keeps the compiler from making a choice for each number and
 * chunk of what is a jump. */
template <int NUMBER, int ALL>
static __device__ __forceinline__ void take_sums(const float (&sum)[ALL], float (&own)[16]) {
    asm volatile("// chunk %0" ::"n"(NUMBER));
#pragma unroll
    for (int k = 0; k < 16; k++)
        own[k] = NUMBER * 16 + k < ALL ? sum[NUMBER * 16 + k < ALL ? NUMBER * 16 + k : 0] : 0.0f;
}

/* The sums of one chunk of tokens. */
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

/* The four sums of eight tokens, finished: those of the first half's row, then of the second's. */
static __device__ __forceinline__ void finish_four(const terms *e, const float *x, const float *sum,
                                                   float (&value)[4]) {
    float2 own = *(const float2 *)(x + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; i++)
        value[i] = finish_sum(sum[i], e->factor[i / 2], i % 2 ? own.y : own.x, e->bias[i / 2]);
}

/* ---- outputs of 16 bits ---- */

/* Parks g of a chunk, or d, 64 bytes a token; where there is no gate, that of the second half
 * behind. */
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

/* Writes what was parked, of `count` tokens from row `row` on: four threads have one. */
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
        barrier_sync(2 + group, 128); /* whoever was here has stored what was in the other room */
        carry_g<USE>(a, room, p, group, p->rows.first + first, p->rows.rows - first);
        w->turn ^= 1;
    }
}

/* ---- d in float32 ---- */

/* Parks d of a chunk in the 128-byte swizzle. */
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

/* Writes what was parked of an expert's last rows, behind which there are others'. */
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
            wait_for_boxes<1>(); /* the other room may be leaving still */
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
                    put_box_2d(w->map, (column + half * 64) * 4, p->rows.first + first,
                               room + half * OUT_HALF);
            commit_boxes(); /* none is one, too: the wait counts them */
        }
        w->turn ^= 1;
    }
}

/* Writes what a warpgroup has of a tile. */
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

} // namespace moq::moe_prefill

#endif
