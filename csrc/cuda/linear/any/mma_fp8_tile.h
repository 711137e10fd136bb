/* Tile of the FP8 kernels on mma.sync: what a block of mma_fp8_linear.cu, whose head tells the
 * layouts, and of experts (cuda/moe) computes. */
#ifndef MOQ_CUDA_LINEAR_ANY_MMA_FP8_TILE_H
#define MOQ_CUDA_LINEAR_ANY_MMA_FP8_TILE_H

#include "cuda/device/load.h"
#include "cuda/device/mma_tile.h"
#include "cuda/device/ptx.h"

namespace moq::mma_fp8 {

#define STEP  MMA_ROW  /* columns, a byte each */
#define SLICE 32       /* columns that registers of one load hold */
#define UNIT  65536.0f /* factor that fp16 codes of x and W leave out: 2^8 each */

typedef struct {
    int64_t m, k;         /* rows and columns of x */
    const uint8_t *codes; /* codes of x */
    int64_t next_codes;   /* bytes from a partition's codes to the next one's, or 0 */
    int next_row, next_partition;
    int partition_count;
    moq_partitions partitions;
} fp8_args;

/* Weight and its scales. */
typedef struct {
    const uint8_t *weight;
    const float *x_scale;     /* scale of x at row * next_row + partition * next_partition */
    const float *block_scale; /* block scales of W, or NULL; with them x_scale is [K / 128, M] */
    const float *output_scale;
} fp8_weight;

/* Tile that a block computes. */
typedef struct {
    fp8_weight w;
    moq_output out;
    moq_tile rows; /* rows of W, at most TN */
    int64_t first;
    int tokens; /* rows of x from `first` on, at most TM */
} fp8_place;

/* ---- codes ---- */

/* Converts the codes in bytes 1 and 3 to two halves times 2^-8; NaN, all of seven bits, stays NaN.
 */
static __device__ __forceinline__ uint32_t decode_odd(uint32_t codes) {
    uint32_t magnitude = codes >> 1 & 0x3f803f80u;
    uint32_t nan = magnitude + 0x00800080u & 0x40004000u;
    return magnitude | nan | (codes & 0x80008000u);
}

static __device__ __forceinline__ uint32_t decode_even(uint32_t codes) {
    return decode_odd(codes << 8);
}

/* ---- products ---- */

/* Code compiled for older chips always multiplies as f16. */
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3 true
#else
#define HAS_E4M3 false
#endif

/* Adds X W^T to the sums, for MT x 16 rows of x, NT x 8 of W and 32 columns, as ldmatrix loads
 * them. */
template <int MT, int NT>
static __device__ __forceinline__ void
multiply_as_f16(float (&sum)[MT][NT][4], const uint32_t (&x)[MT][4], const uint32_t (&w)[NT][2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t w16[NT][2];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            w16[j][0] = decode_odd(w[j][half]);
            w16[j][1] = decode_even(w[j][half]);
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            uint32_t above = x[i][2 * half], below = x[i][2 * half + 1]; /* 8 rows each */
            uint32_t x16[4] = {decode_odd(above), decode_odd(below), decode_even(above),
                               decode_even(below)};
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_f16(sum[i][j], x16, w16[j]);
        }
    }
}

template <int MT, int NT>
static __device__ __forceinline__ void
multiply_as_e4m3(float (&sum)[MT][NT][4], const uint32_t (&x)[MT][4], const uint32_t (&w)[NT][2]) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int j = 0; j < NT; j++)
            mma_e4m3(sum[i][j], x[i], w[j]);
    }
#endif
}

/* ---- the tile ---- */

/* Computes a tile with 32 * WM * WN * WK threads and (TM + TN) * STEP * STAGES bytes of shared
 * memory. */
template <int TM, int TN, int WM, int WN, int WK, int STAGES, bool NATIVE>
static __device__ __forceinline__ void fp8_tile(const fp8_args &a, const fp8_place &p,
                                                uint8_t *memory) {
    constexpr int THREADS = 32 * WM * WN * WK;
    constexpr int MT = TM / WM / 16, NT = TN / WN / 8; /* products of a warp */
    constexpr int STAGE = (TM + TN) * STEP;
    constexpr bool E4M3 = NATIVE && HAS_E4M3;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int share = warp / (WM * WN), wm = warp / WN % WM * MT * 16, wn = warp % WN * NT * 8;
    moq_tile t = p.rows;
    int64_t first = p.first;
    int tokens = p.tokens;
    row_copies<TM, 1, THREADS> x(a.codes + t.partition * a.next_codes + first * a.k, a.k, a.k,
                                 tokens, 0);
    row_copies<TN, 1, THREADS> w(p.w.weight + (int64_t)t.begin * a.k, a.k, a.k, t.end - t.begin, 0);
    int steps = (int)((a.k + STEP - 1) / STEP);
    const float *block_scale = p.w.block_scale;
    if (block_scale)
        block_scale += (int64_t)moq_block_row(&a.partitions, t.partition, t.begin) * steps;
    uint32_t pipeline = shared_address(memory);
    /* matrices of ldmatrix: rows 0 and 8 of x, then the next part; two parts of W, then rows 8 */
    uint32_t x_row = (uint32_t)(wm + lane % 16) * STEP;
    uint32_t w_row = (uint32_t)(TM + wn + lane / 16 * 8 + lane % 8) * STEP;

    launch_dependents();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps)
            w.copy(pipeline + i * STAGE + TM * STEP);
    }
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps)
            x.copy(pipeline + i * STAGE);
        copy_async_commit();
    }
    float sum[MT][NT][4] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads(); /* this step has arrived, and all have read the one before */
        int next = step + STAGES - 1;
        if (next < steps) {
            uint32_t to = pipeline + next % STAGES * STAGE;
            x.copy(to);
            w.copy(to + TM * STEP);
        }
        copy_async_commit();
        float scale[MT][2]; /* scales of the groups of this lane's rows */
        float of_w = block_scale ? block_scale[step] : 1.0f;
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            int row = min(wm + i * 8 + lane / 4, tokens - 1);
            scale[i / 2][i % 2] =
                block_scale ? __fmul_rn(p.w.x_scale[step * a.m + first + row], of_w) : 1.0f;
        }
        uint32_t stage = pipeline + step % STAGES * STAGE;
        float part[MT][NT][4] = {};
#pragma unroll
        for (int slice = 0; slice < STEP / SLICE / WK; slice++) {
            int at = (slice * WK + share) * 2;
            uint32_t cx[MT][4], cw[NT][2];
#pragma unroll
            for (int i = 0; i < MT; i++)
                load_matrices(cx[i], stage + x_row + i * 16 * STEP + part_at(at + lane / 16, lane));
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
                uint32_t two[4];
                load_matrices(two, stage + w_row + j * 8 * STEP + part_at(at + lane / 8 % 2, lane));
                cw[j][0] = two[0], cw[j][1] = two[1];
                cw[j + 1][0] = two[2], cw[j + 1][1] = two[3];
            }
            if (E4M3)
                multiply_as_e4m3(part, cx, cw);
            else
                multiply_as_f16(part, cx, cw);
        }
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
            int row = i / (NT * 4), column = i / 4 % NT;
            sum[row][column][i % 4] =
                __fmaf_rn(part[row][column][i % 4], scale[row][i / 2 % 2], sum[row][column][i % 4]);
        }
    }
    if (WK > 1) {
        copy_async_wait<0>();
        add_shares<MT * NT * 4, THREADS / WK, WK>(&sum[0][0][0], (float *)memory, share);
        if (share > 0)
            return;
    }
    float of_x = 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int row = wm + i * 8 + lane / 4;
        if (row >= tokens)
            continue;
        if (!block_scale)
            of_x = p.w.x_scale[(first + row) * a.next_row + t.partition * a.next_partition];
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) {
            int n = t.begin + wn + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (n >= t.end)
                continue;
            float total = sum[i / 2][j / 2][i % 2 * 2 + j % 2] * (E4M3 ? 1.0f : UNIT);
            if (!block_scale)
                total = __fmul_rn(total, __fmul_rn(of_x, p.w.output_scale[n]));
            moq_store_output(&p.out, first + row, n, total, moq_load_bias(&p.out, n));
        }
    }
}

} // namespace moq::mma_fp8

#endif
