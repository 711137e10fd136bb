/* The low-rank part of a linear: addend[m, n] = sum_i lora_b[n, i] * (sum_k x[m, k] * lora_a[i, k])
 * by float32 products on CUDA cores (core/low_rank.h). One kernel does both products:
 *
 *   out[part, m, row] = sum over the part's k of (sum_j left[j, m, at + k]) * right[row, k]
 *
 * First left is x, right lora_a, and K is split so that there are blocks for the whole chip. Then
 * left is what came of it, whose parts are added as they are read, and right is lora_b; rows of a
 * partition meet the columns of its own pair.
 *
 * A block has 16 * EACH tokens and 32 rows of the right matrix. It goes through K in steps of 32
 * columns, which lie in shared memory row by row, four floats longer, so that 16-byte reads have no
 * conflicts. A thread has EACH tokens and 4 rows, 16 and 8 apart. The order of every sum is fixed.
 *
 * What bounds it: with few tokens the latency of both kernels, with many the fused multiply-adds,
 * 2 r (K + N) of a token, and the memory that the addend takes, 8 N bytes of a token. */
#include "core/sizes.h"
#include "cuda/choice/grid.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/cuda_low_rank.h"
#include "cuda/runtime/launch.h"

namespace moq::low_rank {

#define THREADS 128
#define STEP    32         /* columns */
#define PITCH   (STEP + 4) /* floats of a row in shared memory */
#define ROWS    32         /* of the right matrix, of a tile */
#define FEW     16         /* tokens up to which a thread has one */
#define MANY    4          /* tokens of a thread otherwise */
#define BLOCKS  4          /* of a multiprocessor, as many parts of K make at most */
#define MOST    32         /* parts of K, */
#define LEAST   4          /* of so many steps at least */

typedef struct {
    moq_rows left;
    int64_t left_part;            /* elements from one part of the left matrix to the next */
    int left_parts, left_columns; /* columns of a partition of the left matrix, 0: all share them */
    const float *right;           /* [rows, k] */
    float *out;
    int64_t out_part; /* elements of a part of the output, which has rows of out_stride */
    int64_t m, k, out_stride;
    int64_t steps; /* of a part of K */
    int64_t token_tiles;
    int partition_count;
    moq_partitions partitions; /* of the right matrix */
} product_args;

static __device__ __forceinline__ float load_left(const product_args &a, int64_t token, int64_t k) {
    int64_t at = token * a.left.stride + k;
    float value = moq_load_one(a.left.data, at, a.left.dtype);
    for (int i = 1; i < a.left_parts; i++)
        value = __fadd_rn(value, moq_load_one(a.left.data, at + i * a.left_part, a.left.dtype));
    return value;
}

/* Brings a step's columns of both matrices to shared memory, zeros beyond the ends. */
template <int EACH>
static __device__ __forceinline__ void
load_step(const product_args &a, const moq_tile &rows, int64_t first, int64_t k, int64_t end,
          float (&left)[16 * EACH][PITCH], float (&right)[ROWS][PITCH]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t column = k + lane, offset = (int64_t)rows.partition * a.left_columns;
#pragma unroll
    for (int i = warp; i < 16 * EACH; i += THREADS / 32)
        left[i][lane] =
            first + i < a.m && column < end ? load_left(a, first + i, offset + column) : 0.0f;
#pragma unroll
    for (int i = warp; i < ROWS; i += THREADS / 32)
        right[i][lane] = rows.begin + i < rows.end && column < end
                             ? a.right[(int64_t)(rows.begin + i) * a.k + column]
                             : 0.0f;
}

template <int EACH>
static __device__ __forceinline__ void multiply_step(const float (&left)[16 * EACH][PITCH],
                                                     const float (&right)[ROWS][PITCH],
                                                     float (&sum)[EACH][4]) {
    int token = threadIdx.x / 8, row = threadIdx.x % 8;
#pragma unroll
    for (int k = 0; k < STEP; k += 4) {
        float4 r[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            r[j] = *(const float4 *)&right[row + 8 * j][k];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float4 l = *(const float4 *)&left[token + 16 * i][k];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[i][j] = __fmaf_rn(l.x, r[j].x, sum[i][j]);
                sum[i][j] = __fmaf_rn(l.y, r[j].y, sum[i][j]);
                sum[i][j] = __fmaf_rn(l.z, r[j].z, sum[i][j]);
                sum[i][j] = __fmaf_rn(l.w, r[j].w, sum[i][j]);
            }
        }
    }
}

template <int EACH>
static __global__ void __launch_bounds__(THREADS)
    low_rank_product(const __grid_constant__ product_args a) {
    __shared__ __align__(16) float left[16 * EACH][PITCH], right[ROWS][PITCH];
    moq_tile rows =
        moq_find_tile(&a.partitions, a.partition_count, blockIdx.x / a.token_tiles, ROWS);
    int64_t first = blockIdx.x % a.token_tiles * (16 * EACH);
    int64_t begin = (int64_t)blockIdx.y * a.steps * STEP;
    int64_t end = min(begin + a.steps * STEP, a.k);
    float sum[EACH][4] = {};
    launch_dependents();
    wait_for_predecessor();
    for (int64_t k = begin; k < end; k += STEP) {
        load_step<EACH>(a, rows, first, k, end, left, right);
        __syncthreads();
        multiply_step<EACH>(left, right, sum);
        __syncthreads(); /* all have read this step */
    }
    int token = threadIdx.x / 8, row = rows.begin + threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + token + 16 * i < a.m && row + 8 * j < rows.end)
                a.out[blockIdx.y * a.out_part + (first + token + 16 * i) * a.out_stride + row +
                      8 * j] = sum[i][j];
}

/* ---- launch ---- */

static int64_t token_tiles_of(int64_t m) {
    return divide_up(m, m <= FEW ? FEW : 16 * MANY);
}

/* Returns the steps of a part of K. */
static int64_t steps_of(const moq_low_rank *l) {
    int64_t steps = divide_up(l->spec->in_features, STEP);
    int64_t tiles = token_tiles_of(l->m) * divide_up(moq_weight_ranks(&l->spec->matrix), ROWS);
    int64_t parts = BLOCKS * l->spec->target.sm_count / tiles;
    parts = parts < steps / LEAST ? parts : steps / LEAST;
    parts = parts < 1 ? 1 : parts < MOST ? parts : MOST;
    return divide_up(steps, parts);
}

/* Returns how many parts of K have steps. */
static int64_t parts_of(const moq_low_rank *l) {
    return divide_up(divide_up(l->spec->in_features, STEP), steps_of(l));
}

extern "C" int64_t moq_cuda_low_rank_bytes(const moq_low_rank *l) {
    return parts_of(l) * l->m * moq_weight_ranks(&l->spec->matrix) * (int64_t)sizeof(float);
}

static moq_status launch(const moq_low_rank *l, product_args *a, int64_t row_tiles, int64_t parts,
                         moq_err *err) {
    a->m = l->m;
    a->token_tiles = token_tiles_of(l->m);
    int64_t blocks = row_tiles * a->token_tiles;
    if (blocks > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)l->m);
    moq_launch launch = {.what = "low-rank part of a linear",
                         .kernel = l->m <= FEW ? (const void *)low_rank_product<1>
                                               : (const void *)low_rank_product<MANY>,
                         .grid = dim3((unsigned)blocks, (unsigned)parts),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)l->stream,
                         .pdl = true};
    void *parameters[] = {a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" moq_status moq_cuda_low_rank(const moq_low_rank *l, moq_err *err) {
    const moq_linear_spec *spec = l->spec;
    int64_t ranks = moq_weight_ranks(&spec->matrix), parts = parts_of(l);
    product_args inner = {.left = moq_rows_of(l->x),
                          .left_parts = 1,
                          .right = l->lora_a,
                          .out = l->inner,
                          .out_part = l->m * ranks,
                          .k = spec->in_features,
                          .out_stride = ranks,
                          .steps = steps_of(l),
                          .partition_count = 1};
    inner.partitions.end[0] = (int)ranks;
    MOQ_TRY(launch(l, &inner, divide_up(ranks, ROWS), parts, err));
    product_args outer = {.left = {l->inner, ranks, MOQ_DT_F32},
                          .left_part = l->m * ranks,
                          .left_parts = (int)parts,
                          .left_columns = spec->rank,
                          .right = l->lora_b,
                          .out = l->addend,
                          .k = spec->rank,
                          .out_stride = spec->out_features,
                          .steps = divide_up(spec->rank, STEP),
                          .partition_count = spec->partition_count,
                          .partitions = moq_partitions_of(spec)};
    return launch(l, &outer, moq_tile_count(spec, ROWS), 1, err);
}

} // namespace moq::low_rank
