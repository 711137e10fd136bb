/* Epilogue of the NVFP4 prefill kernels of experts on Hopper. Outputs of a warpgroup are staged in
 * shared memory: g, 32 or 64 columns of 16 bits of each row, is stored from there by its threads;
 * d, 64 columns of bfloat16 or, in layers of float16, float32, by TMA under the products of the
 * next tile. Small tiles store d from registers. The code for g loops over some rows at a time, so
 * that it stays in the instruction cache (docs/lab/experts-prefill.md). */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_NVFP4_EPILOGUE_H
#define MOQ_CUDA_MOE_SM90_PREFILL_NVFP4_EPILOGUE_H

#include "cuda/device/nvfp4_decode.h"
#include "cuda/moe/sm90/prefill/gemm.h"

namespace moq::moe_prefill {

/* Bytes that warps of gate and of up hand each other of 16 rows, in a warpgroup. */
#define HANDED     2048
#define D_PIECES   3    /* staged pieces of d of a warpgroup */
#define EIGHT_ROWS 1024 /* staged bytes of eight rows of d */

/* Returns the first output column of a warpgroup's wave. */
template <class S>
static __device__ __forceinline__ int column_of_wave(const place *p, int group, int wave) {
    int column = p->along * S::columns + group * S::columns_of_wave;
    return S::gated ? column : column + wave * S::warpgroups * WAVE_ROWS;
}

/* Loads factors and biases of the two rows of W, 8 apart, whose sums a thread has in a wave.
 * complete() adds the decoder's factor, so that memory has time until the sums are there. */
template <class S>
static __device__ __forceinline__ terms find_terms(const gemm_args *a, const place *p, int group,
                                                   int wave) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int column = column_of_wave<S>(p, group, wave) + (S::mixed ? warp % 2 : warp) * 16 + lane / 4;
    int of_up = S::mixed ? warp / 2 : S::gated ? wave : 0;
    terms e = {{0.0f, 0.0f}, {-0.0f, -0.0f}}; /* adding -0 changes nothing */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t at = (int64_t)p->rows.expert * a->n + of_up * a->half + column + 8 * i;
        if (column + 8 * i >= (S::gated ? a->half : a->n))
            continue;
        e.factor[i] = a->output_scale[at];
        if (a->bias)
            e.bias[i] = a->bias[at];
    }
    return e;
}

/* Waits for the factors, not earlier, and multiplies them by the decoder's. */
static __device__ __forceinline__ void complete(terms *e) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        asm volatile("" : "+f"(e->factor[i]));
        e->factor[i] *= MOQ_NVFP4_FACTOR;
    }
}

static __device__ __forceinline__ float finish(float sum, const terms *e, int i) {
    return __fadd_rn(__fmul_rn(sum, e->factor[i]), e->bias[i]);
}

/* Returns the place of 16 staged bytes of a row of g: eight rows use all banks. */
template <class S> static __device__ __forceinline__ int place_in_row(int row, int piece) {
    return (S::mixed ? piece ^ row / 2 % 4 : piece ^ row % 8) * 16;
}

/* Stores `count` staged rows of g, from `first` on. */
template <class S>
static __device__ __forceinline__ void carry_g(const gemm_args *a, const place *p, uint32_t room,
                                               int column, int first, int count) {
    constexpr int PIECES = S::row_bytes / 16;
    int thread = threadIdx.x % 128, piece = thread % PIECES, n = column + piece * 8;
    uint16_t *to = (uint16_t *)a->out.data + (p->rows.first + first) * a->out.stride + n;
    if (n >= (S::gated ? a->half : a->n))
        return;
#pragma unroll 1
    for (int row = thread / PIECES; row < count; row += 128 / PIECES)
        *(uint4 *)(to + row * a->out.stride) =
            load_shared(room + row * S::row_bytes + place_in_row<S>(row, piece));
}

/* Makes g of a thread's finished sums of eight rows: two of a column, and two of the one 8
 * further. */
template <class S, kind_of_code KIND>
static __device__ __forceinline__ void make_g(const gemm_args *a, const float (&gate)[4],
                                              const float (&up)[4], uint32_t (&word)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++)
        word[i] = moq_narrow_pair(
            a->out.dtype, act<KIND>(&a->act, gate[2 * i], S::gated ? up[2 * i] : 1.0f),
            act<KIND>(&a->act, gate[2 * i + 1], S::gated ? up[2 * i + 1] : 1.0f));
}

static __device__ __forceinline__ void finish_four(const float *sum, const terms *e,
                                                   float (&four)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        four[i] = finish(sum[i], e, i / 2);
}

/* Writes a warpgroup's columns of g from `column` on, if a thread has the sums of gate and up, or
 * there is no gate. The sums are overwritten. */
template <class S, kind_of_code KIND>
static __device__ __forceinline__ void write_own_g(const gemm_args *a, const place *p,
                                                   uint32_t room, int group, int column,
                                                   const terms *of_gate, const terms *of_up,
                                                   float (&gate)[S::T / 2], float (&up)[S::T / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, rows = p->rows.rows;
    uint32_t own =
        room + lane % 8 * S::row_bytes + place_in_row<S>(lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll 1
    for (int first = 0; first < rows; first += S::at_once) {
        barrier_sync(2 + group, 128); /* earlier outputs have been stored */
#pragma unroll
        for (int j = 0; j < S::at_once / 8; j++) {
            float z[4], u[4];
            uint32_t word[2];
            finish_four(gate + 4 * j, of_gate, z);
            finish_four(up + 4 * j, of_up, u);
            make_g<S, KIND>(a, z, u, word);
            store_two_matrices_turned(own + 8 * j * S::row_bytes, word[0], word[1]);
        }
        move_down<S::at_once / 2>(gate);
        if (S::gated)
            move_down<S::at_once / 2>(up);
        barrier_sync(2 + group, 128);
        carry_g<S>(a, p, room, column, first, min(S::at_once, rows - first));
    }
}

/* Writes columns of g if two warps have gate and two up: each pair hands the other its sums of
 * eight rows of sixteen, and makes g of the other eight. */
template <class S, kind_of_code KIND>
static __device__ __forceinline__ void write_mixed_g(const gemm_args *a, const place *p,
                                                     uint32_t room, int group, int column,
                                                     const terms *e, float (&sum)[S::T / 2]) {
    int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, rows = p->rows.rows;
    bool of_up = warp / 2;
    int row = 8 * of_up + lane % 8;
    uint32_t own = room + row * S::row_bytes + place_in_row<S>(row, warp % 2 * 2 + lane / 8 % 2);
    uint32_t handed = room + S::at_once * S::row_bytes;
#pragma unroll 1
    for (int first = 0; first < rows; first += S::at_once) {
        float kept[S::at_once / 16][4];
#pragma unroll
        for (int j = 0; j < S::at_once / 16; j++) {
            float low[4], high[4];
            uint4 given;
            finish_four(sum + 8 * j, e, low);
            finish_four(sum + 8 * j + 4, e, high);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                (&given.x)[i] = __float_as_uint(of_up ? low[i] : high[i]);
                kept[j][i] = of_up ? high[i] : low[i];
            }
            store_shared(handed + j * HANDED + thread * 16, given);
        }
        move_down<S::at_once / 2>(sum);
        barrier_sync(2 + group, 128); /* earlier outputs have been stored, too */
#pragma unroll
        for (int j = 0; j < S::at_once / 16; j++) {
            float gate[4], up[4];
            uint32_t word[2];
            uint4 got = load_shared(handed + j * HANDED + (thread ^ 64) * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float other = __uint_as_float((&got.x)[i]);
                gate[i] = of_up ? other : kept[j][i];
                up[i] = of_up ? kept[j][i] : other;
            }
            make_g<S, KIND>(a, gate, up, word);
            store_two_matrices_turned(own + j * 16 * S::row_bytes, word[0], word[1]);
        }
        barrier_sync(2 + group, 128);
        carry_g<S>(a, p, room, column, first, min(S::at_once, rows - first));
    }
}

template <class S, kind_of_code KIND>
static __device__ __forceinline__ void
write_waves_of_g(const gemm_args *a, const place *p, uint32_t room, const terms (&e)[2], int group,
                 float (&sum)[S::waves][S::T / 2]) {
    constexpr int LAST = S::waves - 1;
    int column = column_of_wave<S>(p, group, 0);
    if constexpr (S::mixed)
        write_mixed_g<S, KIND>(a, p, room, group, column, &e[0], sum[0]);
    else
        write_own_g<S, KIND>(a, p, room, group, column, &e[0], &e[S::gated], sum[0], sum[S::gated]);
    if constexpr (!S::gated && LAST > 0)
        write_own_g<S, KIND>(a, p, room, group, column_of_wave<S>(p, group, LAST), &e[LAST],
                             &e[LAST], sum[LAST], sum[LAST]);
}

/* Writes a warpgroup's columns of g for any activation. */
template <class S>
static __device__ __forceinline__ void write_g(const gemm_args *a, const place *p, uint32_t room,
                                               const terms (&e)[2], int group,
                                               float (&sum)[S::waves][S::T / 2]) {
    with_code<S::use, S::T == S::tokens>(&a->act, [&](auto code) {
        write_waves_of_g<S, decltype(code)::kind>(a, p, room, e, group, sum);
    });
}

/* Maps of d, in boxes of 128 bytes by the rows of a piece and by eight. */
typedef struct {
    const CUtensorMap *whole, *eight;
} maps_of_d;

/* Copies a piece of d out by TMA, 64 columns of rows from `first` on, by one thread. Rows come in
 * eights: those of an expert begin at a multiple of that. */
template <class S>
static __device__ __forceinline__ void send_piece(const maps_of_d *m, const place *p, uint32_t room,
                                                  int column, int first) {
    int row = p->rows.first + first, left = p->rows.rows - first;
    bool whole = left >= S::at_once;
    const CUtensorMap *map = whole ? m->whole : m->eight;
#pragma unroll
    for (int i = 0; i < S::at_once; i += 8)
        if (i == 0 || (!whole && i < left)) {
            store_box_of_group(map, column * (S::rounds_d ? 2 : 4), row + i, room + i * 128);
            if (!S::rounds_d)
                store_box_of_group(map, column * 4 + 128, row + i, room + (S::at_once + i) * 128);
        }
    store_commit();
}

/* Rounds a thread's sums of eight rows: two rows of a column, and of the one 8 further. */
static __device__ __forceinline__ void round_d(const float *sum, const terms *e,
                                               uint32_t (&word)[2]) {
    float four[4];
    finish_four(sum, e, four);
#pragma unroll
    for (int i = 0; i < 2; i++)
        word[i] = moq_narrow_pair(MOQ_DT_BF16, four[2 * i], four[2 * i + 1]);
}

/* Stages a piece of a thread's sums, 64 columns of S::at_once rows, in the 128-byte swizzle. */
template <class S>
static __device__ __forceinline__ void stage_d(uint32_t room, const terms *e,
                                               const float (&sum)[S::at_once / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = lane % 4 * 2;
    if constexpr (S::rounds_d) {
        room += lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int j = 0; j < S::at_once / 8; j++) {
            uint32_t word[2];
            round_d(sum + 4 * j, e, word);
            store_two_matrices_turned(room + j * EIGHT_ROWS, word[0], word[1]);
        }
        return;
    }
    int piece = warp % 2 * 4 + lane / 16;
    room += warp / 2 * (S::at_once * 128) + lane / 4 % 4 * 4;
#pragma unroll
    for (int j = 0; j < S::at_once / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int swizzled = (row + i % 2) * 128 + ((piece + i / 2 * 2) ^ (row + i % 2)) * 16;
            store_shared_word(room + swizzled + j * EIGHT_ROWS,
                              __float_as_uint(finish(sum[4 * j + i], e, i / 2)));
        }
}

/* Writes 64 columns of d by a warpgroup through TMA, rows from FIRST on. Its first thread waits for
 * copies, and ensures room for the next piece before the others go on to it. */
template <class S, int FIRST = 0>
static __device__ __forceinline__ void write_d(const maps_of_d *m, const place *p, uint32_t room,
                                               const terms *e, int group, int column, int *next,
                                               float (&sum)[S::T / 2]) {
    if constexpr (FIRST < S::T) {
        if (FIRST >= p->rows.rows)
            return;
        uint32_t some = room + *next * S::piece_bytes;
        float piece[S::at_once / 2] = {};
#pragma unroll
        for (int i = 0; i < S::at_once / 2; i++)
            if (FIRST / 2 + i < S::T / 2)
                piece[i] = sum[FIRST / 2 + i];
        stage_d<S>(some, e, piece);
        fence_async_proxy();
        if (threadIdx.x % 128 == 0)
            store_wait<D_PIECES - 2>();
        barrier_sync(2 + group, 128);
        if (threadIdx.x % 128 == 0)
            send_piece<S>(m, p, some, column, FIRST);
        *next = *next + 1 == D_PIECES ? 0 : *next + 1;
        write_d<S, FIRST + S::at_once>(m, p, room, e, group, column, next, sum);
    }
}

/* Stores rounded d from registers: a warp transposes eight rows by eight columns, so that four
 * threads have 16 bytes of a row. */
template <class S>
static __device__ __forceinline__ void store_rounded_d(const gemm_args *a, const place *p,
                                                       const terms *e, int column,
                                                       float (&sum)[S::T / 2]) {
    int lane = threadIdx.x % 32, left = p->rows.rows - lane / 4;
    int n = column + threadIdx.x / 32 % 4 * 16 + lane % 4 * 2;
    uint16_t *to = (uint16_t *)a->out.data + (p->rows.first + lane / 4) * a->out.stride + n;
#pragma unroll
    for (int j = 0; j < S::T / 8; j++, to += 8 * a->out.stride) {
        uint32_t word[2];
        round_d(sum + 4 * j, e, word);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            word[i] = turn_matrix(word[i]);
            if (8 * j < left && n + 8 * i < a->n)
                *(uint32_t *)(to + 8 * i) = word[i];
        }
    }
}

/* Writes 64 columns of d by a warpgroup from its registers: eight threads have 32 bytes of a
 * row. */
template <class S>
static __device__ __forceinline__ void store_d(const gemm_args *a, const place *p, const terms *e,
                                               int column, float (&sum)[S::T / 2]) {
    if constexpr (S::rounds_d)
        return store_rounded_d<S>(a, p, e, column, sum);
    int lane = threadIdx.x % 32, n = column + threadIdx.x / 32 % 4 * 16 + lane / 4;
    int left = p->rows.rows - lane % 4 * 2;
    bool upper = n < a->n, lower = n + 8 < a->n;
    float *to = a->d + (int64_t)(p->rows.first + lane % 4 * 2) * a->n + n;
#pragma unroll
    for (int j = 0; j < S::T / 8; j++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            if (8 * j + odd < left) {
                if (upper)
                    to[0] = finish(sum[4 * j + odd], e, 0);
                if (lower)
                    to[8] = finish(sum[4 * j + 2 + odd], e, 1);
            }
            to += odd ? 7 * a->n : a->n;
        }
    }
}

} // namespace moq::moe_prefill

#endif
