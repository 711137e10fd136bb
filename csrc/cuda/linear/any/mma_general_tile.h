/* Tile of the kernels on mma.sync for 8- and 4-bit weights that general kernels read: what a block
 * of mma_general_linear.cu, whose head tells the layouts, and of experts (cuda/moe) computes. */
#ifndef MOQ_CUDA_LINEAR_ANY_MMA_GENERAL_TILE_H
#define MOQ_CUDA_LINEAR_ANY_MMA_GENERAL_TILE_H

#include "cuda/device/divide.h"
#include "cuda/device/general_codes.h"
#include "cuda/device/load.h"
#include "cuda/device/mma_tile.h"
#include "cuda/device/nvfp4_products.h"

namespace moq::mma_general {

#define STEP      64 /* columns of a warp's step */
#define HALF_STEP 32 /* columns of two products, and of a scale of e4m3 */
#define STAGES    3  /* of x */
#define AHEAD     2  /* steps that W is loaded ahead */

typedef struct {
    int64_t k;
    divisor group; /* of int4: columns of a scale, in units of HALF_STEP */
    int partition_count;
    moq_partitions partitions;
} general_args;

/* Tile that a block computes. */
typedef struct {
    const uint8_t *x; /* 16-bit values of its first token */
    int64_t x_stride; /* bytes */
    const uint8_t *weight;
    const void *weight_scale;
    const float *output_scale; /* [N], or NULL */
    const float *row_scale;    /* of x from its first token on, or NULL */
    int next_scale;            /* to the scale of the next token */
    moq_output out;
    moq_tile rows;
    int64_t first; /* row of `out` of its first token */
    int tokens;
} general_place;

/* ---- W ---- */

/* Codes of a lane in 32 columns: eight of row g and of row g + 8; of int4 both in `low`. */
typedef struct {
    uint2 low, high;
} codes;

/* Position of a lane in W: codes and scales of its first row in the next step. */
typedef struct {
    const uint8_t *code, *scale;
    int rows, left; /* rows of the tile from the first on, columns from the step on */
    int unit;       /* the step's first column, in units of HALF_STEP */
    bool paired;    /* of e4m3: both scales of a step are at an even address */
} weight_place;

/* Codes and scales of a lane in a step, codes by halves. A row has two scales: numbers of int4, or
 * two bytes of e4m3. */
template <int WR> struct weight_step {
    codes code[WR][2];
    uint32_t scale[WR][2][2];
};

/* Returns the row of the lane's sums: the first or the second of two. */
template <int KIND> static __device__ __forceinline__ int row_of_lane(int first, int second) {
    int g = threadIdx.x % 32 / 4;
    return KIND == INT4 ? first + 2 * g + second : first + g + 8 * second;
}

/* Returns the bytes of the scales of a row. */
template <int KIND> static __device__ __forceinline__ int64_t scale_bytes(const general_args &a) {
    int units = (int)(a.k / HALF_STEP);
    return KIND == INT4 ? divide(units, &a.group) * (int64_t)sizeof(float) : units;
}

/* Finds the lane's place from the warp's row `first` and from `column` on. */
template <int KIND>
static __device__ __forceinline__ weight_place find_place(const general_args &a,
                                                          const general_place &p, int first,
                                                          int column) {
    int row = row_of_lane<KIND>(first, 0);
    return {p.weight + (KIND == INT4 ? row / 2 : row) * a.k + column + threadIdx.x % 4 * 8,
            (const uint8_t *)p.weight_scale + row * scale_bytes<KIND>(a),
            p.rows.end - row,
            (int)a.k - column,
            column / HALF_STEP,
            a.k % STEP == 0 && (uintptr_t)p.weight_scale % 2 == 0};
}

/* Loads codes of 32 columns of the lane's rows of a tile of 16; zeros beyond the ends. */
template <int KIND>
static __device__ __forceinline__ codes load_codes(const general_args &a, const weight_place &w,
                                                   int tile, int half) {
    constexpr int ROWS = KIND == INT4 ? 8 : 16; /* of codes of a tile */
    const uint8_t *code = w.code + tile * ROWS * a.k + half * HALF_STEP;
    codes c = {make_uint2(0, 0), make_uint2(0, 0)};
    bool there = w.left > half * HALF_STEP + (int)threadIdx.x % 4 * 8;
    if (there && w.rows > 16 * tile)
        c.low = *(const uint2 *)code;
    if (there && KIND != INT4 && w.rows > 16 * tile + 8)
        c.high = *(const uint2 *)(code + 8 * a.k);
    return c;
}

/* Loads the two scales of a row of int4 in a step, which may be one; zeros beyond K. */
static __device__ __forceinline__ void load_numbers(const general_args &a, const weight_place &w,
                                                    const uint8_t *row, uint32_t (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        scale[half] = w.left > half * HALF_STEP
                          ? ((const uint32_t *)row)[divide(w.unit + half, &a.group)]
                          : 0;
}

/* Loads the two bytes of a row of e4m3 in a step. */
static __device__ __forceinline__ uint32_t load_bytes(const weight_place &w, const uint8_t *row) {
    if (w.paired)
        return w.left > 0 ? *(const uint16_t *)(row + w.unit) : 0;
    uint32_t low = w.left > 0 ? row[w.unit] : 0;
    return low | (w.left > HALF_STEP ? row[w.unit + 1] << 8 : 0);
}

/* Loads the scales of a step in the lane's rows of a tile of 16. */
template <int KIND, int WR>
static __device__ __forceinline__ void load_scales(const general_args &a, const weight_place &w,
                                                   int tile, weight_step<WR> *to) {
#pragma unroll
    for (int second = 0; second < 2 && KIND != INT8; second++) {
        int row = 16 * tile + second * (KIND == INT4 ? 1 : 8);
        const uint8_t *from = w.scale + row * scale_bytes<KIND>(a);
        uint32_t (&scale)[2] = to->scale[tile][second];
        scale[0] = scale[1] = 0;
        if (w.rows <= row)
            continue;
        if (KIND == INT4)
            load_numbers(a, w, from, scale);
        else
            scale[0] = load_bytes(w, from);
    }
}

/* Loads the next step and goes on to the one `columns` behind it. */
template <int KIND, int WR>
static __device__ __forceinline__ void load_step(const general_args &a, int columns,
                                                 weight_place *w, weight_step<WR> *to) {
#pragma unroll
    for (int i = 0; i < 2 * WR; i++)
        to->code[i / 2][i % 2] = load_codes<KIND>(a, *w, i / 2, i % 2);
#pragma unroll
    for (int i = 0; i < WR; i++)
        load_scales<KIND>(a, *w, i, to);
    w->code += columns;
    w->unit += columns / HALF_STEP;
    w->left -= columns;
}

/* Widens the lane's codes of 32 columns to the operands of two products. */
template <int KIND, moq_nvfp4_type TYPE>
static __device__ __forceinline__ void widen_codes(const codes &c, uint32_t (&w)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t low = i / 2 ? c.low.y : c.low.x, high = i / 2 ? c.high.y : c.high.x;
        w[i / 2][i % 2 * 2] = widen<KIND, TYPE>(spread<KIND>(low, i % 2), 0);
        w[i / 2][i % 2 * 2 + 1] =
            widen<KIND, TYPE>(spread<KIND>(KIND == INT4 ? low : high, i % 2), 1);
    }
}

/* Returns the value of a row's scale in a half: int4's, or 2^(code - 127). */
template <int KIND>
static __device__ __forceinline__ float scale_of(const uint32_t (&bits)[2], int half) {
    uint32_t code = bits[0] >> 8 * half & 0xffu;
    return __uint_as_float(KIND == INT4 ? bits[half] : code ? code << 23 : 0x00400000u);
}

/* ---- the tile ---- */

/* Returns the token, of eight, that is column `column` of a product. Columns 2 i and 2 i + 1 are
 * four tokens apart: lanes that read them at once find their parts in different banks. */
static __device__ __forceinline__ int token_of_column(int column) {
    return column / 2 + column % 2 * 4;
}

/* Multiplies the lane's codes of 32 columns by TN tokens, and adds the products to sums. */
template <int KIND, moq_nvfp4_type TYPE, int TN, int WR>
static __device__ __forceinline__ void multiply_half(const weight_step<WR> &step, int half,
                                                     uint32_t x, float (&sum)[WR][TN / 8][4]) {
    int lane = threadIdx.x % 32, token = token_of_column(lane / 4);
    float scale[WR][2];
    uint32_t w[WR][2][4],
        from = x + (uint32_t)token * MMA_ROW + part_at(4 * half + lane % 4, token);
#pragma unroll
    for (int i = 0; i < WR; i++) {
        widen_codes<KIND, TYPE>(step.code[i][half], w[i]);
#pragma unroll
        for (int n = 0; n < 2 && KIND != INT8; n++)
            scale[i][n] = scale_of<KIND>(step.scale[i][n], half);
    }
#pragma unroll
    for (int j = 0; j < TN / 8; j++) {
        uint4 v = load_shared(from + j * 8 * MMA_ROW);
#pragma unroll
        for (int i = 0; i < WR; i++) {
            float part[4] = {};
            float (&to)[4] = KIND == INT8 ? sum[i][j] : part;
            moq_mma_16_bits<TYPE>(to, w[i][0], v.x, v.y);
            moq_mma_16_bits<TYPE>(to, w[i][1], v.z, v.w);
#pragma unroll
            for (int n = 0; n < 4 && KIND != INT8; n++)
                sum[i][j][n] = __fmaf_rn(part[n], scale[i][n / 2], sum[i][j][n]);
        }
    }
}

/* Stores the sums of a warp, whose rows of W begin at `first`. */
template <int KIND, moq_nvfp4_type TYPE, int TN, int WR>
static __device__ __forceinline__ void store_sums(const general_place &p, int first,
                                                  const float (&sum)[WR][TN / 8][4]) {
    constexpr float UNIT = KIND == E4M3_MX && TYPE == MOQ_NVFP4_F16 ? 256.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < WR * TN / 2; i++) {
        int n = row_of_lane<KIND>(first + i / (TN / 2) * 16, i / 2 % 2);
        int m = i % (TN / 2) / 4 * 8 + token_of_column(threadIdx.x % 4 * 2 + i % 2);
        if (n >= p.rows.end || m >= p.tokens)
            continue;
        float total = (&sum[0][0][0])[i] * UNIT;
        float factor = p.output_scale ? p.output_scale[n] : 1.0f;
        if (p.row_scale)
            factor = __fmul_rn(factor, p.row_scale[m * p.next_scale]);
        moq_store_output(&p.out, p.first + m, n, __fmul_rn(total, factor),
                         moq_load_bias(&p.out, n));
    }
}

/* Computes the tile of WM warps with 16 WR rows each by TN tokens, where WK warps split K. W may be
 * loaded before the predecessor kernel has ended. */
template <int KIND, moq_nvfp4_type TYPE, int TN, int WM, int WK, int WR>
static __device__ __forceinline__ void general_tile(const general_args &a, const general_place &p,
                                                    uint8_t *memory) {
    constexpr int THREADS = 32 * WM * WK, STAGE = WK * TN * MMA_ROW;
    int warp = threadIdx.x / 32, share = warp / WM, first = p.rows.begin + warp % WM * 16 * WR;
    int steps = (int)((a.k + STEP * WK - 1) / (STEP * WK));
    weight_place w = find_place<KIND>(a, p, first, share * STEP);
    weight_step<WR> ahead[AHEAD];
    float sum[WR][TN / 8][4] = {};
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        load_step<KIND>(a, STEP * WK, &w, &ahead[i]);
    launch_dependents();
    wait_for_predecessor();
    row_copies<TN, WK, THREADS> x(p.x, p.x_stride, 2 * a.k, p.tokens, 0);
    uint32_t pipeline = shared_address(memory);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        x.copy(pipeline + i * STAGE);
        copy_async_commit();
    }
    for (int base = 0; base < steps; base += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) { /* codes stay in the registers that they come to */
            int step = base + i;
            if (step >= steps)
                break;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            x.copy(pipeline + (step + STAGES - 1) % STAGES * STAGE);
            copy_async_commit();
            uint32_t from = pipeline + step % STAGES * STAGE + share * TN * MMA_ROW;
#pragma unroll
            for (int half = 0; half < 2; half++)
                multiply_half<KIND, TYPE, TN, WR>(ahead[i], half, from, sum);
            load_step<KIND>(a, STEP * WK, &w, &ahead[i]);
        }
    }
    copy_async_wait<0>();
    if (WK > 1)
        add_shares<WR * TN / 2, 32 * WM, WK>(&sum[0][0][0], (float *)memory, share);
    if (share == 0)
        store_sums<KIND, TYPE, TN, WR>(p, first, sum);
}

} // namespace moq::mma_general

#endif
