/* Outputs of NVFP4 experts on Hopper for many tokens. What a warpgroup has of them turns around in
 * shared memory: g, 32 or 64 columns of 16 bits of each row, is stored from there by its threads;
 * d, 64 columns of float32, by the copy engine, which still stores under the products of the next
 * tile. The code for g goes round some rows at a time, so that it stays in the instructions' cache
 * (docs/lab/moe.md). */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_OUTPUTS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_OUTPUTS_H

#include "cuda/moe/sm90/sm90_moe_many_nvfp4_tile.h"

namespace moq::moe_many {

/* The first column of the output of a wave of a warpgroup. */
template <class S>
static __device__ __forceinline__ int column_of_wave(const place *p, int group, int wave) {
    int column = p->along * S::columns + group * (S::halves ? 32 : WAVE_ROWS);
    return S::gated ? column : column + wave * S::warpgroups * WAVE_ROWS;
}

/* Factors and biases of the two rows of W that a thread has sums of in a wave: 8 apart, or, where
 * halves of gate and up are a wave, of both. Factors without that of the decoder: memory has time
 * until the sums are there (complete). */
template <class S>
static __device__ __forceinline__ terms find_terms(const gemm_args *a, const place *p, int group,
                                                   int wave) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int column = column_of_wave<S>(p, group, wave) + warp * (S::halves ? 8 : 16) + lane / 4;
    terms e = {{0.0f, 0.0f}, {-0.0f, -0.0f}}; /* whoever adds -0 adds nothing */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int own = S::halves ? column : column + 8 * i;
        int row = own + (S::halves ? i : S::gated ? wave : 0) * a->half;
        int64_t at = (int64_t)p->rows.expert * a->n + row;
        if (own >= (S::gated ? a->half : a->n))
            continue;
        e.factor[i] = a->output_scale[at];
        if (a->bias)
            e.bias[i] = a->bias[at];
    }
    return e;
}

/* Not before this point are the factors waited for. */
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

/* Where 16 bytes of a row of g are in the room: all of eight rows in banks of their own. */
template <class S> static __device__ __forceinline__ int place_in_row(int row, int piece) {
    return (S::halves ? piece ^ row / 2 % 4 : piece ^ row % 8) * 16;
}

/* Stores so many rows of g, from `first` on, from the room. */
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

/* Makes what a thread has of eight rows: two of a column, or of two columns 8 apart. Sums of gate
 * and up are in one wave, or in two. */
template <class S, kind_of_code KIND>
static __device__ __forceinline__ void make_g(const gemm_args *a, const terms (&e)[2],
                                              const float *gate, const float *up,
                                              uint32_t (&word)[S::halves ? 1 : 2]) {
#pragma unroll
    for (int i = 0; i < (S::halves ? 1 : 2); i++) {
        float g[2];
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            float z = finish(gate[2 * i + odd], &e[0], i), u = 1.0f;
            if (S::gated)
                u = S::halves ? finish(gate[2 + odd], &e[0], 1)
                              : finish(up[2 * i + odd], &e[1], i);
            g[odd] = act<KIND>(&a->act, z, u);
        }
        word[i] = moq_narrow_pair(a->out.dtype, g[0], g[1]);
    }
}

/* Writes the columns of g of a warpgroup from `column` on. The sums are used up. */
template <class S, kind_of_code KIND>
static __device__ __forceinline__ void write_some_g(const gemm_args *a, const place *p,
                                                    uint32_t room, const terms (&e)[2], int group,
                                                    int column, float (&gate)[S::T / 2],
                                                    float (&up)[S::T / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, rows = p->rows.rows;
    int row = S::halves ? lane % 16 : lane % 8, piece = S::halves ? warp : 2 * warp + lane / 8 % 2;
    uint32_t own = room + row * S::row_bytes + place_in_row<S>(row, piece);
#pragma unroll 1
    for (int first = 0; first < rows; first += S::at_once) {
        barrier_sync(2 + group, 128); /* what was there has been stored */
#pragma unroll
        for (int j = 0; j < S::at_once / 8; j += S::halves ? 2 : 1) {
            uint32_t word[S::halves ? 1 : 2], other[S::halves ? 1 : 2] = {};
            make_g<S, KIND>(a, e, gate + 4 * j, up + 4 * j, word);
            if (S::halves)
                make_g<S, KIND>(a, e, gate + 4 * j + 4, up + 4 * j + 4, other);
            store_two_matrices_turned(own + 8 * j * S::row_bytes, word[0],
                                      S::halves ? other[0] : word[S::halves ? 0 : 1]);
        }
        move_down<S::at_once / 2>(gate);
        if (S::gated && !S::halves)
            move_down<S::at_once / 2>(up);
        barrier_sync(2 + group, 128);
        carry_g<S>(a, p, room, column, first, min(S::at_once, rows - first));
    }
}

/* The same for whatever the activation is: what is rarely asked for has code for the largest tiles
 * alone. */
template <class S>
static __device__ __forceinline__ void write_any_g(const gemm_args *a, const place *p,
                                                   uint32_t room, const terms (&e)[2], int group,
                                                   int column, float (&gate)[S::T / 2],
                                                   float (&up)[S::T / 2]) {
    if (S::T < S::tokens || is_plain(&a->act))
        write_some_g<S, PLAIN_SILU>(a, p, room, e, group, column, gate, up);
    else if (a->act.kind == MOQ_MOE_SILU)
        write_some_g<S, ANY_SILU>(a, p, room, e, group, column, gate, up);
    else
        write_some_g<S, ANY_ACTIVATION>(a, p, room, e, group, column, gate, up);
}

template <class S>
static __device__ __forceinline__ void write_g(const gemm_args *a, const place *p, uint32_t room,
                                               const terms (&e)[2], int group,
                                               float (&sum)[S::waves][S::T / 2]) {
    write_any_g<S>(a, p, room, e, group, column_of_wave<S>(p, group, 0), sum[0],
                   sum[S::waves - 1]);
    if constexpr (!S::gated) {
        const terms second[2] = {e[1], e[1]};
        write_any_g<S>(a, p, room, second, group, column_of_wave<S>(p, group, 1), sum[1], sum[1]);
    }
}

/* Maps of d, in boxes of 32 columns by the rows of a piece and by eight. */
typedef struct {
    const CUtensorMap *whole, *eight;
} maps_of_d;

/* Copies a piece of d out, 64 columns of rows from `first` on, by one thread. Rows come in eights:
 * those of an expert begin at a multiple of that. */
template <class S>
static __device__ __forceinline__ void send_piece(const maps_of_d *m, const place *p, uint32_t room,
                                                  int column, int first) {
    int row = p->rows.first + first, left = p->rows.rows - first;
    bool whole = left >= S::d_rows;
    const CUtensorMap *map = whole ? m->whole : m->eight;
#pragma unroll
    for (int i = 0; i < S::d_rows; i += 8)
        if (i == 0 || (!whole && i < left)) {
            store_box_of_group(map, column * 4, row + i, room + i * 128);
            store_box_of_group(map, column * 4 + 128, row + i, room + (S::d_rows + i) * 128);
        }
    store_commit();
}

/* Parks a piece of a thread's sums, 64 columns of S::d_rows rows, in the 128-byte swizzle. */
template <class S>
static __device__ __forceinline__ void park_d(uint32_t room, const terms *e,
                                              const float (&sum)[S::d_rows / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = lane % 4 * 2;
    int piece = warp % 2 * 4 + lane / 16;
    room += warp / 2 * (S::d_rows * 128) + lane / 4 % 4 * 4;
#pragma unroll
    for (int j = 0; j < S::d_rows / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int swizzled = (row + i % 2) * 128 + ((piece + i / 2 * 2) ^ (row + i % 2)) * 16;
            store_shared_word(room + swizzled + j * EIGHT_BYTES,
                              __float_as_uint(finish(sum[4 * j + i], e, i / 2)));
        }
}

/* Writes 64 columns of d by a warpgroup, rows from FIRST on. Its first thread waits for the copies,
 * and makes sure of room for the next piece before the others go on to it. */
template <class S, int FIRST = 0>
static __device__ __forceinline__ void write_d(const maps_of_d *m, const place *p, uint32_t room,
                                               const terms *e, int group, int column, int *next,
                                               float (&sum)[S::T / 2]) {
    if constexpr (FIRST < S::T) {
        if (FIRST >= p->rows.rows)
            return;
        uint32_t some = room + *next * S::piece_bytes;
        float piece[S::d_rows / 2] = {};
#pragma unroll
        for (int i = 0; i < S::d_rows / 2; i++)
            if (FIRST / 2 + i < S::T / 2)
                piece[i] = sum[FIRST / 2 + i];
        park_d<S>(some, e, piece);
        fence_async_proxy();
        if (threadIdx.x % 128 == 0)
            store_wait<D_PIECES - 2>();
        barrier_sync(2 + group, 128);
        if (threadIdx.x % 128 == 0)
            send_piece<S>(m, p, some, column, FIRST);
        *next = *next + 1 == D_PIECES ? 0 : *next + 1;
        write_d<S, FIRST + S::d_rows>(m, p, room, e, group, column, next, sum);
    }
}

} // namespace moq::moe_many

#endif
