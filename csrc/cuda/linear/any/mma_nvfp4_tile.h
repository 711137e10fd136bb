/* Tile of the NVFP4 kernels on mma.sync: what a block of mma_nvfp4_linear.cu, whose head tells the
 * layouts, and of experts (cuda/moe) computes. */
#ifndef MOQ_CUDA_LINEAR_ANY_MMA_NVFP4_TILE_H
#define MOQ_CUDA_LINEAR_ANY_MMA_NVFP4_TILE_H

#include "core/nvfp4_packed.h"
#include "cuda/device/load.h"
#include "cuda/device/mma_tile.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/nvfp4_fold_halves.h"
#include "cuda/device/ptx.h"

namespace moq::mma_nvfp4 {

#define LANES      32
#define VECTOR     16                                   /* bytes of a copy */
#define UNIT_PARTS (MOQ_PACK_BYTES / VECTOR)            /* copies of a unit */
#define BLOCK_X    (MOQ_PACK_K * (int)sizeof(uint16_t)) /* bytes of a row of x in a block of K */

static_assert(BLOCK_X == MMA_ROW, "64 values of x are a row of a step");

typedef struct {
    const uint8_t *x;
    int64_t x_stride;     /* bytes */
    int64_t m, k;         /* rows and columns of x */
    int n, slabs, blocks; /* rows of W, and the units that hold them */
    int splits;           /* splits of K; blockIdx.y is the number of one */
    float *partial_sums;  /* [splits, m, n], with several splits */
} nvfp4_args;

/* Operands: x of its own type, or codes as float16 numbers with a scale of each row beside them;
 * weights exactly, or folded to e4m3 (cuda/device/nvfp4_fold.h). */
typedef enum { NVFP4_OF_BF16, NVFP4_OF_F16, NVFP4_OF_CODES, NVFP4_FOLDED } nvfp4_format;

/* Tile that a block computes. */
typedef struct {
    const uint8_t *weight;
    const float *output_scale;
    moq_output out;
    int slab;   /* first of SHAPE::TILE_SLABS slabs */
    int tokens; /* rows of x from `first` on, at most SHAPE::TOKENS */
    int64_t first;
    const float *x_scale; /* scale of codes, at row * next_row */
    int next_row;
    const float *fold_scale; /* powers of two of folded weights */
} nvfp4_place;

/* ---- shapes of tiles ---- */

template <int TOKENS_, int ROWS_, int WT_, int WR_, int WK_, int BLOCKS_, int STAGES_>
struct tiling {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_;
    static constexpr int WT = WT_, WR = WR_, WK = WK_; /* warps */
    static constexpr int BLOCKS = BLOCKS_, STAGES = STAGES_;
    static constexpr int THREADS = LANES * WT * WR * WK;
    static constexpr int TILE_SLABS = ROWS / MOQ_PACK_ROWS;
    static constexpr int SLABS = TILE_SLABS / WR,
                         TILES = TOKENS / WT / 8; /* slabs and tiles of a warp */
    static constexpr int X_BYTES = BLOCKS * TOKENS * MMA_ROW;
    static constexpr int STAGE = X_BYTES + BLOCKS * TILE_SLABS * MOQ_PACK_BYTES;
    static_assert(BLOCKS % WK == 0 && STAGE % MMA_ROW == 0, "");
    static_assert((WK - 1) * ROWS * TOKENS * 4 <= STAGES * STAGE, "sums of shares fit into it");
};

/* ---- copies ---- */

/* Copies of W by a thread each step, as row_copies copies x: the units of a slab together. */
template <class SHAPE> struct unit_copies {
    static constexpr int SLAB = SHAPE::BLOCKS * UNIT_PARTS; /* copies of a slab, side by side */
    static constexpr int ALL = SHAPE::TILE_SLABS * SLAB;
    static constexpr int COUNT = (ALL + SHAPE::THREADS - 1) / SHAPE::THREADS;

    const uint8_t *from[COUNT];
    int block[COUNT]; /* block of the step */
    int blocks;       /* blocks left from this step on */

    __device__ __forceinline__ unit_copies(const nvfp4_args *a, const uint8_t *weight, int slab,
                                           int first) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int index = i * SHAPE::THREADS + (int)threadIdx.x, which = slab + index / SLAB;
            int64_t unit = (int64_t)min(which, a->slabs - 1) * a->blocks + first;
            block[i] = which < a->slabs ? index % SLAB / UNIT_PARTS : INT32_MAX;
            from[i] = weight + unit * MOQ_PACK_BYTES + index % SLAB * VECTOR;
        }
        blocks = a->blocks - first;
    }

    __device__ __forceinline__ void copy(uint32_t to) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int index = i * SHAPE::THREADS + (int)threadIdx.x;
            if (ALL % SHAPE::THREADS == 0 || index < ALL)
                copy_async_16(to + index * VECTOR, from[i], block[i] < blocks ? VECTOR : 0);
            from[i] += SHAPE::BLOCKS * MOQ_PACK_BYTES;
        }
        blocks -= SHAPE::BLOCKS;
    }
};

/* ---- products ---- */

template <nvfp4_format FORM>
static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&w)[4],
                                                const uint32_t (&x)[2]) {
    if (FORM == NVFP4_OF_BF16)
        mma_bf16(sum, w, x);
    else
        mma_f16(sum, w, x);
}

/* Decodes the operand of a word of codes, under the scales of its group's pair of bytes. */
template <nvfp4_format FORM>
static __device__ __forceinline__ void decode(uint32_t word, uint32_t bytes, bool upper,
                                              uint32_t folds, uint32_t (&w)[4]) {
    constexpr moq_nvfp4_type TYPE = FORM == NVFP4_OF_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
    if (FORM == NVFP4_FOLDED)
        moq_fold_halves_fragment(word, moq_fold_halves_scales(bytes, upper, folds), w);
    else
        moq_nvfp4_fragment<TYPE>(word, moq_nvfp4_scales<TYPE>(bytes, upper), w);
}

/* Unit as a lane reads it: a word of codes and two scales for each group. */
typedef struct {
    uint32_t word[MOQ_PACK_GROUPS];
    uint32_t scale[MOQ_PACK_GROUPS / 2];
} unit_part;

static __device__ __forceinline__ unit_part load_unit(const uint8_t *unit, int lane) {
    int g = lane / 4, t = lane % 4;
    uint4 words = *(const uint4 *)(unit + moq_pack_word_at(g, t, 0));
    uint2 scales = *(const uint2 *)(unit + moq_pack_scale_at(g, 0));
    return {{words.x, words.y, words.z, words.w}, {scales.x, scales.y}};
}

/* Keeps the compiler from decoding both halves of a block at once, for which the largest tile has
 * no registers. */
#if __CUDA_ARCH__ >= 1000
#define HALF_BY_HALF(form) true
#else
#define HALF_BY_HALF(form) ((form) == NVFP4_FOLDED)
#endif

/* Adds W x^T to the sums, for a warp's slabs and tokens and 64 columns. `x` is the address of the
 * row and part that a lane names to ldmatrix first, `folds` are the powers of two of the lane's
 * rows of each slab. */
template <nvfp4_format FORM, class SHAPE>
static __device__ __forceinline__ void multiply_block(float (&sum)[SHAPE::SLABS][SHAPE::TILES][4],
                                                      const uint8_t *units, uint32_t x, int lane,
                                                      const uint32_t (&folds)[SHAPE::SLABS]) {
    unit_part part[SHAPE::SLABS];
#pragma unroll
    for (int i = 0; i < SHAPE::SLABS; i++)
        part[i] = load_unit(units + i * SHAPE::BLOCKS * MOQ_PACK_BYTES, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) { /* two groups: four parts of a row of x */
        if (HALF_BY_HALF(FORM))
            __syncwarp();
        uint32_t w[SHAPE::SLABS][2][4];
#pragma unroll
        for (int i = 0; i < SHAPE::SLABS * 2; i++)
            decode<FORM>(part[i / 2].word[2 * half + i % 2], part[i / 2].scale[half], i % 2,
                         folds[i / 2], w[i / 2][i % 2]);
        uint32_t at = x + part_at(4 * half + lane / 8, lane);
#pragma unroll
        for (int j = 0; j < SHAPE::TILES; j++) {
            uint32_t four[4];
            load_matrices(four, at + j * 8 * MMA_ROW);
            uint32_t first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
#pragma unroll
            for (int i = 0; i < SHAPE::SLABS; i++)
                multiply<FORM>(sum[i][j], w[i][0], first);
#pragma unroll
            for (int i = 0; i < SHAPE::SLABS; i++)
                multiply<FORM>(sum[i][j], w[i][1], second);
        }
    }
}

/* ---- the tile ---- */

static __device__ __forceinline__ void store_sum(const nvfp4_args *a, const moq_output *out,
                                                 int64_t m, int n, float sum, float scale,
                                                 float bias) {
    if (a->splits > 1)
        a->partial_sums[((int64_t)blockIdx.y * a->m + m) * a->n + n] = sum;
    else
        moq_store_output(out, m, n, __fmul_rn(sum, scale), bias);
}

/* Returns what the sums of row n of W are multiplied by. */
template <nvfp4_format FORM>
static __device__ __forceinline__ float factor_of(const nvfp4_place *p, int n) {
    return p->output_scale[n] *
           (FORM == NVFP4_FOLDED ? moq_unfold(p->fold_scale[n]) : MOQ_NVFP4_FACTOR);
}

template <nvfp4_format FORM>
static __device__ __forceinline__ void store_scaled(const nvfp4_place *p, int64_t m, int n,
                                                    float sum, float scale, float bias) {
    if (FORM == NVFP4_FOLDED)
        sum *= MOQ_FOLDED_HALVES;
    float of_x = p->x_scale[m * p->next_row];
    moq_store_output(&p->out, m, n, __fmul_rn(sum, __fmul_rn(of_x, scale)), bias);
}

/* Computes a tile with all threads of a block and SHAPE::STAGES * SHAPE::STAGE bytes of shared
 * memory. */
template <class SHAPE, nvfp4_format FORM>
static __device__ __forceinline__ void nvfp4_tile(const nvfp4_args &a, const nvfp4_place &p,
                                                  uint8_t *memory) {
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int share = warp / (SHAPE::WT * SHAPE::WR);
    int wr = warp / SHAPE::WT % SHAPE::WR * SHAPE::SLABS, wt = warp % SHAPE::WT * SHAPE::TILES * 8;
    int slab = p.slab, tokens = p.tokens;
    int64_t first = p.first;
    int all = (a.blocks + SHAPE::BLOCKS - 1) / SHAPE::BLOCKS;
    int begin = (int)((int64_t)all * blockIdx.y / a.splits);
    int steps = (int)((int64_t)all * (blockIdx.y + 1) / a.splits) - begin;
    uint32_t pipeline = shared_address(memory);
    unit_copies<SHAPE> w(&a, p.weight, slab, begin * SHAPE::BLOCKS);
    row_copies<SHAPE::TOKENS, SHAPE::BLOCKS, SHAPE::THREADS> x(
        a.x + first * a.x_stride, a.x_stride, a.k * 2, tokens,
        (int64_t)begin * SHAPE::BLOCKS * MMA_ROW);

    launch_dependents();
#pragma unroll
    for (int i = 0; i < SHAPE::STAGES - 1; i++) {
        if (i < steps)
            w.copy(pipeline + i * SHAPE::STAGE + SHAPE::X_BYTES);
    }
    uint32_t folds[SHAPE::SLABS] = {};
#pragma unroll
    for (int i = 0; i < SHAPE::SLABS && FORM == NVFP4_FOLDED; i++) {
        int n = (slab + wr + i) * MOQ_PACK_ROWS + lane / 4; /* rows beyond the end are zeros */
        folds[i] = moq_pack_folds(p.fold_scale[min(n, a.n - 1)], p.fold_scale[min(n + 8, a.n - 1)]);
    }
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < SHAPE::STAGES - 1; i++) {
        if (i < steps)
            x.copy(pipeline + i * SHAPE::STAGE);
        copy_async_commit();
    }
    float sum[SHAPE::SLABS][SHAPE::TILES][4] = {};
    int stage = 0, free = (SHAPE::STAGES - 1) * SHAPE::STAGE;
    for (int step = 0; step < steps; step++) {
        copy_async_wait<SHAPE::STAGES - 2>();
        __syncthreads(); /* this step has arrived, and all have read the one before */
        if (step + SHAPE::STAGES - 1 < steps) {
            w.copy(pipeline + free + SHAPE::X_BYTES);
            x.copy(pipeline + free);
        }
        copy_async_commit();
#pragma unroll
        for (int i = 0; i < SHAPE::BLOCKS / SHAPE::WK; i++) {
            int block = i * SHAPE::WK + share;
            multiply_block<FORM, SHAPE>(
                sum,
                memory + stage + SHAPE::X_BYTES + (wr * SHAPE::BLOCKS + block) * MOQ_PACK_BYTES,
                pipeline + stage + (block * SHAPE::TOKENS + wt + lane % 8) * MMA_ROW, lane, folds);
        }
        free = stage;
        stage += SHAPE::STAGE;
        if (stage == SHAPE::STAGES * SHAPE::STAGE)
            stage = 0;
    }
    if (SHAPE::WK > 1) {
        copy_async_wait<0>();
        add_shares<SHAPE::SLABS * SHAPE::TILES * 4, SHAPE::THREADS / SHAPE::WK, SHAPE::WK>(
            &sum[0][0][0], (float *)memory, share);
        if (share > 0)
            return;
    }
#pragma unroll
    for (int i = 0; i < 2 * SHAPE::SLABS; i++) { /* rows g and g + 8 of a slab */
        int n = (slab + wr + i / 2) * MOQ_PACK_ROWS + i % 2 * 8 + lane / 4;
        if (n >= a.n)
            continue;
        float scale = factor_of<FORM>(&p, n), bias = moq_load_bias(&p.out, n);
#pragma unroll
        for (int j = 0; j < 2 * SHAPE::TILES; j++) {
            int token = wt + j / 2 * 8 + lane % 4 * 2 + j % 2;
            float total = sum[i / 2][j / 2][i % 2 * 2 + j % 2];
            if (token >= tokens)
                continue;
            if (FORM == NVFP4_OF_CODES || FORM == NVFP4_FOLDED)
                store_scaled<FORM>(&p, first + token, n, total, scale, bias);
            else
                store_sum(&a, &p.out, first + token, n, total, scale, bias);
        }
    }
}

/* ---- shapes ---- */

/* Shapes by their tokens, the last for many: the fastest on an H200 of some twenty
 * (docs/lab/any-chip.md). Shared memory is at most 96 KiB: every chip has 99 but for 8.0 and 9.0,
 * which have more. */
typedef tiling<8, 64, 1, 4, 2, 4, 5> tiling_8;
typedef tiling<16, 64, 1, 4, 2, 4, 5> tiling_16;
typedef tiling<32, 128, 1, 4, 2, 2, 4> tiling_32;
typedef tiling<64, 64, 1, 2, 2, 2, 4> tiling_64;
typedef tiling<128, 128, 1, 4, 1, 1, 4> tiling_128;

} // namespace moq::mma_nvfp4

#endif
