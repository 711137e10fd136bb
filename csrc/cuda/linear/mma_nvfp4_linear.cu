/* NVFP4 linear by products of warps, for every chip from Ampere on:
 * y[m, n] = round(f[n] sum_k x[m, k] W[n, k] + bias[n]).
 *
 * x is bf16 or fp16 [M, K] as it is. W is e2m1 times its block scales, of the packed layout
 * (core/nvfp4_packed.h), f the output_scale of the row, weight_scale_2. A weight under its block
 * scale fits into 16 bits of either kind (cuda/device/nvfp4_decode.h), so that sums in float32 are
 * all that rounds. W is the first operand of mma.m16n8k16 and x the second: sums are of 16 rows of
 * W and 8 of x.
 *
 * A block has a tile of ROWS rows of W, whatever partitions they are of, and TOKENS of x. It goes
 * through K in steps of BLOCKS blocks of 64 columns, copied (cp.async, 16 bytes a thread) to a ring
 * of STAGES buffers: units of W as they are in memory, and for each of their columns of units the
 * rows of x, 128 bytes each (cuda/device/mma_tile.h). What lies beyond the ends are zeros. WR x WT
 * warps share the tile, and WK of them the blocks of a step, whose sums meet at the end. Where
 * tiles are too few for the chip, K is also split over blocks of the grid: each writes its sums,
 * and a second kernel adds them in their order.
 *
 * W does not depend on the kernel before, so that the first stages are on their way before it has
 * ended.
 *
 * Up to some 16 tokens it is reading W and the instructions of decoding and copying that bound it:
 * of 8 tokens 230 a warp for 2048 weights, which an H200 could issue for 3.3 TB/s of W at most, and
 * does for 2.5. Many tokens are bound by the tensor cores as mma.sync feeds them: a warp has 128
 * products for each 110 instructions that decode 32 rows of a block, and reaches 365 TFLOP/s there.
 */
#include "core/invariant.h"
#include "core/nvfp4_packed.h"
#include "cuda/device/load.h"
#include "cuda/device/mma_tile.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/runtime/launch.h"

namespace moq::mma_nvfp4 {

#define LANES      32
#define VECTOR     16                                   /* bytes of a copy */
#define UNIT_PARTS (MOQ_PACK_BYTES / VECTOR)            /* copies of a unit */
#define BLOCK_X    (MOQ_PACK_K * (int)sizeof(uint16_t)) /* bytes of a row of x for one */

#define MAX_SPLITS 4

static_assert(BLOCK_X == MMA_ROW, "64 values of x are a row of a step");

typedef struct {
    moq_output out;
    const uint8_t *x;
    int64_t x_stride; /* bytes */
    int64_t m, k;
    int64_t token_tiles, weight_tiles;
    const uint8_t *weight;
    const float *output_scale;
    int n, slabs, blocks; /* rows of W, and the units that hold them */
    int splits;           /* of K */
    float *parts;         /* [splits, m, n] of sums where there are several */
} nvfp4_args;

/* ---- shapes of tiles ---- */

template <int TOKENS_, int ROWS_, int WT_, int WR_, int WK_, int BLOCKS_, int STAGES_>
struct tiling {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_;
    static constexpr int WT = WT_, WR = WR_, WK = WK_; /* warps */
    static constexpr int BLOCKS = BLOCKS_, STAGES = STAGES_;
    static constexpr int THREADS = LANES * WT * WR * WK;
    static constexpr int TILE_SLABS = ROWS / MOQ_PACK_ROWS;
    static constexpr int SLABS = TILE_SLABS / WR, TILES = TOKENS / WT / 8; /* of a warp */
    static constexpr int X_BYTES = BLOCKS * TOKENS * MMA_ROW;
    static constexpr int STAGE = X_BYTES + BLOCKS * TILE_SLABS * MOQ_PACK_BYTES;
    static_assert(BLOCKS % WK == 0 && STAGE % MMA_ROW == 0, "");
    static_assert((WK - 1) * ROWS * TOKENS * 4 <= STAGES * STAGE, "sums of shares fit into it");
};

/* ---- copies ---- */

/* What a thread copies of W each step, as row_copies does of x: the units of a slab together. */
template <class SHAPE> struct unit_copies {
    static constexpr int SLAB = SHAPE::BLOCKS * UNIT_PARTS; /* copies of a slab, side by side */
    static constexpr int ALL = SHAPE::TILE_SLABS * SLAB;
    static constexpr int COUNT = (ALL + SHAPE::THREADS - 1) / SHAPE::THREADS;

    const uint8_t *from[COUNT];
    int block[COUNT]; /* of the step */
    int blocks;       /* that there are from this step on */

    __device__ __forceinline__ unit_copies(const nvfp4_args *a, int slab, int first) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int index = i * SHAPE::THREADS + (int)threadIdx.x, which = slab + index / SLAB;
            int64_t unit = (int64_t)min(which, a->slabs - 1) * a->blocks + first;
            block[i] = which < a->slabs ? index % SLAB / UNIT_PARTS : INT32_MAX;
            from[i] = a->weight + unit * MOQ_PACK_BYTES + index % SLAB * VECTOR;
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

template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&w)[4],
                                                const uint32_t (&x)[2]) {
    if (TYPE == MOQ_NVFP4_F16)
        mma_f16(sum, w, x);
    else
        mma_bf16(sum, w, x);
}

/* What a lane has of a unit: a word of codes and two scales for each group. */
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

/* sum += W x^T of a warp's slabs and tokens and 64 columns. `x` is the address of the row and part
 * that a lane names to ldmatrix first. */
template <moq_nvfp4_type TYPE, class SHAPE>
static __device__ __forceinline__ void multiply_block(float (&sum)[SHAPE::SLABS][SHAPE::TILES][4],
                                                      const uint8_t *units, uint32_t x, int lane) {
    unit_part part[SHAPE::SLABS];
#pragma unroll
    for (int i = 0; i < SHAPE::SLABS; i++)
        part[i] = load_unit(units + i * SHAPE::BLOCKS * MOQ_PACK_BYTES, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) { /* two groups, four parts of a row of x */
        uint32_t w[SHAPE::SLABS][2][4];
#pragma unroll
        for (int i = 0; i < SHAPE::SLABS * 2; i++)
            moq_nvfp4_fragment<TYPE>(part[i / 2].word[2 * half + i % 2],
                                     moq_nvfp4_scales<TYPE>(part[i / 2].scale[half], i % 2),
                                     w[i / 2][i % 2]);
        uint32_t at = x + part_at(4 * half + lane / 8, lane);
#pragma unroll
        for (int j = 0; j < SHAPE::TILES; j++) {
            uint32_t four[4];
            load_matrices(four, at + j * 8 * MMA_ROW);
            uint32_t first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
#pragma unroll
            for (int i = 0; i < SHAPE::SLABS; i++)
                multiply<TYPE>(sum[i][j], w[i][0], first);
#pragma unroll
            for (int i = 0; i < SHAPE::SLABS; i++)
                multiply<TYPE>(sum[i][j], w[i][1], second);
        }
    }
}

/* ---- the kernel ---- */

static __device__ __forceinline__ void store_sum(const nvfp4_args *a, int64_t m, int n, float sum,
                                                 float scale, float bias) {
    if (a->splits > 1)
        a->parts[((int64_t)blockIdx.y * a->m + m) * a->n + n] = sum;
    else
        moq_store_output(&a->out, m, n, __fmul_rn(sum, scale), bias);
}

template <class SHAPE, moq_nvfp4_type TYPE>
static __global__ void __launch_bounds__(SHAPE::THREADS)
    mma_nvfp4_linear(const __grid_constant__ nvfp4_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int share = warp / (SHAPE::WT * SHAPE::WR);
    int wr = warp / SHAPE::WT % SHAPE::WR * SHAPE::SLABS, wt = warp % SHAPE::WT * SHAPE::TILES * 8;
    mma_place p = place_of(blockIdx.x, a.token_tiles, a.weight_tiles);
    int slab = (int)p.weight * SHAPE::TILE_SLABS;
    int64_t first = p.token * SHAPE::TOKENS;
    int tokens = (int)min(a.m - first, (int64_t)SHAPE::TOKENS);
    int all = (a.blocks + SHAPE::BLOCKS - 1) / SHAPE::BLOCKS;
    int begin = (int)((int64_t)all * blockIdx.y / a.splits);
    int steps = (int)((int64_t)all * (blockIdx.y + 1) / a.splits) - begin;
    uint32_t ring = shared_address(memory);
    unit_copies<SHAPE> w(&a, slab, begin * SHAPE::BLOCKS);
    row_copies<SHAPE::TOKENS, SHAPE::BLOCKS, SHAPE::THREADS> x(
        a.x + first * a.x_stride, a.x_stride, a.k * 2, tokens,
        (int64_t)begin * SHAPE::BLOCKS * MMA_ROW);

    launch_dependents();
#pragma unroll
    for (int i = 0; i < SHAPE::STAGES - 1; i++) {
        if (i < steps)
            w.copy(ring + i * SHAPE::STAGE + SHAPE::X_BYTES);
    }
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < SHAPE::STAGES - 1; i++) {
        if (i < steps)
            x.copy(ring + i * SHAPE::STAGE);
        copy_async_commit();
    }
    float sum[SHAPE::SLABS][SHAPE::TILES][4] = {};
    int stage = 0, free = (SHAPE::STAGES - 1) * SHAPE::STAGE;
    for (int step = 0; step < steps; step++) {
        copy_async_wait<SHAPE::STAGES - 2>();
        __syncthreads(); /* this step is there, and the one before has been read by all */
        if (step + SHAPE::STAGES - 1 < steps) {
            w.copy(ring + free + SHAPE::X_BYTES);
            x.copy(ring + free);
        }
        copy_async_commit();
#pragma unroll
        for (int i = 0; i < SHAPE::BLOCKS / SHAPE::WK; i++) {
            int block = i * SHAPE::WK + share;
            multiply_block<TYPE, SHAPE>(
                sum,
                memory + stage + SHAPE::X_BYTES + (wr * SHAPE::BLOCKS + block) * MOQ_PACK_BYTES,
                ring + stage + (block * SHAPE::TOKENS + wt + lane % 8) * MMA_ROW, lane);
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
        float scale = MOQ_NVFP4_FACTOR * a.output_scale[n], bias = moq_load_bias(&a.out, n);
#pragma unroll
        for (int j = 0; j < 2 * SHAPE::TILES; j++) {
            int token = wt + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (token < tokens)
                store_sum(&a, first + token, n, sum[i / 2][j / 2][i % 2 * 2 + j % 2], scale, bias);
        }
    }
}

/* ---- split sums ---- */

#define ADD_THREADS 256

/* y = round(f times the parts' sum, added in their order, + bias) */
static __global__ void __launch_bounds__(ADD_THREADS)
    add_parts(const __grid_constant__ nvfp4_args a) {
    int n = (int)(blockIdx.x * ADD_THREADS + threadIdx.x);
    launch_dependents();
    wait_for_predecessor();
    if (n >= a.n)
        return;
    float scale = MOQ_NVFP4_FACTOR * a.output_scale[n], bias = moq_load_bias(&a.out, n);
    for (int64_t m = blockIdx.y; m < a.m; m += gridDim.y) {
        float sum = a.parts[m * a.n + n];
        for (int i = 1; i < a.splits; i++)
            sum = __fadd_rn(sum, a.parts[(i * a.m + m) * a.n + n]);
        moq_store_output(&a.out, m, n, __fmul_rn(sum, scale), bias);
    }
}

/* ---- launch ---- */

typedef struct {
    int tokens, rows, threads, blocks, shared;
    int registers;         /* blocks of a multiprocessor that have enough of them */
    const void *kernel[2]; /* by moq_nvfp4_type */
} shape;

template <class TILING> static constexpr shape shape_of(int registers) {
    return {TILING::TOKENS,
            TILING::ROWS,
            TILING::THREADS,
            TILING::BLOCKS,
            TILING::STAGES * TILING::STAGE,
            registers,
            {(const void *)mma_nvfp4_linear<TILING, MOQ_NVFP4_BF16>,
             (const void *)mma_nvfp4_linear<TILING, MOQ_NVFP4_F16>}};
}

/* By their tokens, the last for many of them: of some twenty the fastest on an H200
 * (docs/lab/any-chip.md). At most 96 KiB of shared memory: what every chip has but for 8.0 and 9.0
 * is 99. */
static const shape SHAPES[] = {
    shape_of<tiling<8, 64, 1, 4, 2, 4, 5>>(3), shape_of<tiling<16, 64, 1, 4, 2, 4, 5>>(3),
    shape_of<tiling<32, 128, 1, 4, 2, 2, 4>>(2), shape_of<tiling<64, 64, 1, 2, 2, 2, 4>>(2),
    shape_of<tiling<128, 128, 1, 4, 1, 1, 4>>(2)};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };

static int64_t tiles_of(const moq_linear_call *call, const shape *s) {
    int64_t rows = (call->spec->out_features + s->rows - 1) / s->rows;
    return (call->m + s->tokens - 1) / s->tokens * rows;
}

/* The largest tiles where they give nearly all multiprocessors one, else those of few tokens. */
static const shape *shape_for(const moq_linear_call *call) {
    const shape *most = &SHAPES[SHAPE_COUNT - 1], *s = SHAPES;
    while (s < most && call->m > s->tokens)
        s++;
    return s == most && tiles_of(call, most) * 8 < call->spec->target.sm_count * 7 ? s - 1 : s;
}

/* Bytes of shared memory of a multiprocessor; a block takes 1 KiB more than it asks for. */
static int shared_of(int32_t capability) {
    if (capability == 80 || capability == 87)
        return 164 << 10;
    return capability / 10 == 9 || capability / 10 == 10 ? 228 << 10 : 100 << 10;
}

/* As many splits of K as leave no block waiting for another to end, and each eight steps. */
static int splits_for(const moq_linear_call *call, const shape *s) {
    const moq_target *target = &call->spec->target;
    int64_t steps = moq_pack_blocks(call->spec->in_features) / s->blocks;
    int together = shared_of(target->capability) / (s->shared + 1024);
    together = together < s->registers ? together : s->registers;
    int64_t splits = (int64_t)together * target->sm_count / tiles_of(call, s);
    splits = splits < steps / 8 ? splits : steps / 8;
    return splits < 1 ? 1 : splits < MAX_SPLITS ? (int)splits : MAX_SPLITS;
}

extern "C" int64_t moq_cuda_mma_nvfp4_workspace(const moq_linear_call *call) {
    int splits = splits_for(call, shape_for(call));
    return splits > 1 ? splits * call->m * call->spec->out_features * (int64_t)sizeof(float) : 0;
}

static nvfp4_args args_of(const moq_linear_call *call, const shape *s, int splits) {
    const moq_linear_spec *spec = call->spec;
    moq_rows x = moq_rows_of(call->x);
    nvfp4_args args = {.out = moq_output_of(call),
                       .x = (const uint8_t *)x.data,
                       .x_stride = x.stride * (int64_t)sizeof(uint16_t),
                       .m = call->m,
                       .k = spec->in_features,
                       .token_tiles = (call->m + s->tokens - 1) / s->tokens,
                       .weight_tiles = (spec->out_features + s->rows - 1) / s->rows,
                       .weight = call->weight,
                       .output_scale = call->output_scale,
                       .n = (int)spec->out_features,
                       .slabs = (int)moq_pack_slabs(spec->out_features),
                       .blocks = (int)moq_pack_blocks(spec->in_features),
                       .splits = splits,
                       .parts = (float *)call->workspace};
    return args;
}

static moq_status launch(const moq_linear_call *call, const void *kernel, dim3 grid, int threads,
                         int shared, nvfp4_args *args, moq_err *err) {
    moq_launch launch = {.what = "linear NVFP4",
                         .kernel = kernel,
                         .grid = grid,
                         .block = dim3((unsigned)threads),
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" moq_status moq_cuda_mma_nvfp4(const moq_linear_call *call, moq_err *err) {
    const shape *s = shape_for(call);
    int splits = splits_for(call, s);
    int64_t tiles = tiles_of(call, s);
    MOQ_ASSERT(s->shared <= 96 << 10 && splits >= 1 && splits <= MAX_SPLITS);
    nvfp4_args args = args_of(call, s, splits);
    moq_nvfp4_type type = call->x->dtype == MOQ_DT_F16 ? MOQ_NVFP4_F16 : MOQ_NVFP4_BF16;
    if (tiles > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    MOQ_TRY(launch(call, s->kernel[type], dim3((unsigned)tiles, (unsigned)splits), s->threads,
                   s->shared, &args, err));
    if (splits == 1)
        return MOQ_OK;
    unsigned wide = (unsigned)((args.n + ADD_THREADS - 1) / ADD_THREADS);
    return launch(call, (const void *)add_parts, dim3(wide, (unsigned)call->m), ADD_THREADS, 0,
                  &args, err);
}

} // namespace moq::mma_nvfp4
