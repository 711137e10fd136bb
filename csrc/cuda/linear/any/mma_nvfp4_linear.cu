/* NVFP4 linear on mma.sync, for every chip from Ampere on: y[m, n] = round(f[n] sum_k x[m, k] W[n,
 * k] + bias[n]).
 *
 * x is bf16 or fp16 [M, K] as it is. W is e2m1 times its block scales, in the packed layout
 * (core/nvfp4_packed.h); f is the output_scale of the row, weight_scale_2. A weight under its block
 * scale fits into 16 bits of either type (cuda/device/nvfp4_decode.h), so that only float32 sums
 * round. W is the first operand of mma.m16n8k16 and x the second: sums are of 16 rows of W and 8 of
 * x.
 *
 * A block has a tile of ROWS rows of W, across partitions, and TOKENS of x. It goes through K in
 * steps of BLOCKS blocks of 64 columns, copied by cp.async, 16 bytes a thread, to a pipeline of
 * STAGES stages: units of W as stored, and for each block of columns the rows of x, 128 bytes each
 * (cuda/device/mma_tile.h), zeros beyond the ends. WR x WT warps share the tile, and WK of them
 * split the blocks of a step. With too few tiles for the chip, split-K divides K over blocks of the
 * grid: each writes its sums, and a second kernel adds them in order.
 *
 * W does not depend on the preceding kernel, so that the first stages are under way before it has
 * ended (PDL).
 *
 * What bounds it: up to 16 tokens, reading W and the instructions of decoding and copying. With 8
 * tokens they are 230 a warp for 2048 weights, which an H200 could issue for 3.3 TB/s of W at most,
 * and does for 2.5. Many tokens are bound by the tensor cores as mma.sync feeds them: a warp has
 * 128 products for each 110 instructions that decode 32 rows of a block, and reaches 365 TFLOP/s
 * there. */
#include "core/invariant.h"
#include "cuda/linear/any/mma_nvfp4_tile.h"
#include "cuda/runtime/launch.h"

namespace moq::mma_nvfp4 {

#define MAX_SPLITS 4

typedef struct {
    nvfp4_args tile;
    const uint8_t *weight;
    const float *output_scale;
    moq_output out;
    int64_t token_tiles, weight_tiles;
} linear_args;

/* ---- the kernel ---- */

template <class SHAPE, nvfp4_format FORM>
static __global__ void __launch_bounds__(SHAPE::THREADS)
    mma_nvfp4_linear(const __grid_constant__ linear_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    mma_place p = place_of(blockIdx.x, a.token_tiles, a.weight_tiles);
    int64_t first = p.token * SHAPE::TOKENS;
    int tokens = (int)min(a.tile.m - first, (int64_t)SHAPE::TOKENS);
    nvfp4_tile<SHAPE, FORM>(
        a.tile, {a.weight, a.output_scale, a.out, (int)p.weight * SHAPE::TILE_SLABS, tokens, first},
        memory);
}

/* ---- split-K ---- */

#define ADD_THREADS 256

/* Adds the splits' sums in order: y = round(f times the sum + bias). */
static __global__ void __launch_bounds__(ADD_THREADS)
    add_splits(const __grid_constant__ linear_args args) {
    const nvfp4_args &a = args.tile;
    int n = (int)(blockIdx.x * ADD_THREADS + threadIdx.x);
    launch_dependents();
    wait_for_predecessor();
    if (n >= a.n)
        return;
    float scale = MOQ_NVFP4_FACTOR * args.output_scale[n], bias = moq_load_bias(&args.out, n);
    for (int64_t m = blockIdx.y; m < a.m; m += gridDim.y) {
        float sum = a.partial_sums[m * a.n + n];
        for (int i = 1; i < a.splits; i++)
            sum = __fadd_rn(sum, a.partial_sums[(i * a.m + m) * a.n + n]);
        moq_store_output(&args.out, m, n, __fmul_rn(sum, scale), bias);
    }
}

/* ---- launch ---- */

typedef struct {
    int tokens, rows, threads, blocks, shared;
    int registers;         /* blocks of a multiprocessor that have enough registers */
    const void *kernel[2]; /* NVFP4_OF_BF16, NVFP4_OF_F16 */
} shape;

template <class TILING> static constexpr shape shape_of(int registers) {
    return {TILING::TOKENS,
            TILING::ROWS,
            TILING::THREADS,
            TILING::BLOCKS,
            TILING::STAGES * TILING::STAGE,
            registers,
            {(const void *)mma_nvfp4_linear<TILING, NVFP4_OF_BF16>,
             (const void *)mma_nvfp4_linear<TILING, NVFP4_OF_F16>}};
}

static const shape SHAPES[] = {shape_of<tiling_8>(3), shape_of<tiling_16>(3),
                               shape_of<tiling_32>(2), shape_of<tiling_64>(2),
                               shape_of<tiling_128>(2)};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };

static int64_t tiles_of(const moq_linear_call *call, const shape *s) {
    int64_t rows = (call->spec->out_features + s->rows - 1) / s->rows;
    return (call->m + s->tokens - 1) / s->tokens * rows;
}

/* Picks the largest tiles if they give nearly all multiprocessors one, else tiles of few tokens. In
 * those two warps split K alike, in the largest none do. */
static const shape *shape_for(const moq_linear_call *call) {
    const shape *most = &SHAPES[SHAPE_COUNT - 1], *s = SHAPES;
    while (s < most && call->m > s->tokens)
        s++;
    if (call->spec->batch_invariant)
        return s == most ? s - 1 : s;
    return s == most && tiles_of(call, most) * 8 < call->spec->target.sm_count * 7 ? s - 1 : s;
}

/* Shared memory of a multiprocessor in bytes; a block takes 1 KiB more than it asks for. */
static int shared_of(int32_t capability) {
    if (capability == 80 || capability == 87)
        return 164 << 10;
    return capability / 10 == 9 || capability / 10 == 10 ? 228 << 10 : 100 << 10;
}

/* Returns as many splits of K as leave no block waiting for another to end, of at least eight steps
 * each. */
static int splits_for(const moq_linear_call *call, const shape *s) {
    const moq_target *target = &call->spec->target;
    if (call->spec->batch_invariant)
        return 1;
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

static linear_args args_of(const moq_linear_call *call, const shape *s, int splits) {
    const moq_linear_spec *spec = call->spec;
    moq_rows x = moq_rows_of(call->x);
    linear_args args = {.tile = {.x = (const uint8_t *)x.data,
                                 .x_stride = x.stride * (int64_t)sizeof(uint16_t),
                                 .m = call->m,
                                 .k = spec->in_features,
                                 .n = (int)spec->out_features,
                                 .slabs = (int)moq_pack_slabs(spec->out_features),
                                 .blocks = (int)moq_pack_blocks(spec->in_features),
                                 .splits = splits,
                                 .partial_sums = (float *)call->workspace},
                        .weight = call->weight,
                        .output_scale = call->output_scale,
                        .out = moq_output_of(call),
                        .token_tiles = (call->m + s->tokens - 1) / s->tokens,
                        .weight_tiles = (spec->out_features + s->rows - 1) / s->rows};
    return args;
}

static moq_status launch(const moq_linear_call *call, const void *kernel, dim3 grid, int threads,
                         int shared, linear_args *args, moq_err *err) {
    moq_launch launch = {.what = "linear NVFP4",
                         .kernel = kernel,
                         .grid = grid,
                         .block = dim3((unsigned)threads),
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" moq_status moq_cuda_mma_nvfp4(const moq_linear_call *call, moq_err *err) {
    const shape *s = shape_for(call);
    int splits = splits_for(call, s);
    int64_t tiles = tiles_of(call, s);
    MOQ_ASSERT(s->shared <= 96 << 10 && splits >= 1 && splits <= MAX_SPLITS);
    linear_args args = args_of(call, s, splits);
    nvfp4_format form = call->x->dtype == MOQ_DT_F16 ? NVFP4_OF_F16 : NVFP4_OF_BF16;
    if (tiles > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    MOQ_TRY(launch(call, s->kernel[form], dim3((unsigned)tiles, (unsigned)splits), s->threads,
                   s->shared, &args, err));
    if (splits == 1)
        return MOQ_OK;
    unsigned wide = (unsigned)((args.tile.n + ADD_THREADS - 1) / ADD_THREADS);
    return launch(call, (const void *)add_splits, dim3(wide, (unsigned)call->m), ADD_THREADS, 0,
                  &args, err);
}

} // namespace moq::mma_nvfp4
