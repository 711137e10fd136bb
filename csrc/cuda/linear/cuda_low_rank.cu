/* The low-rank part of a linear: addend[m, n] = sum_i lora_b[n, i] * (sum_k x[m, k] * lora_a[i, k])
 * by products of tf32, which hold float32 in two parts (core/low_rank.h). One kernel does both
 * products:
 *
 *   out[part, m, row] = sum over the part's k of left[m, at + k] * right[row, k]
 *
 * First left is x, right lora_a, and K is split so that there are blocks for the whole chip; a
 * kernel adds the parts. Then left is what came of it, and right is lora_b; rows of a partition
 * meet the columns of its own pair.
 *
 * A float32 is 11 bits and the rest, whose products with another rest are left out: 2^-21 of a
 * product. Sums of a step are added to float32 sums, as tensor cores truncate theirs. The order of
 * every sum is fixed.
 *
 * A block has TN tokens and 16 * WR rows of the right matrix, 16 to a warp. It goes through K in
 * steps of 32 columns, which come a step ahead into registers and lie in shared memory row by row,
 * four floats longer, so that fragments have no conflicts.
 *
 * What bounds it: with few tokens the latency of its kernels, with many the memory that the addend
 * takes, 8 N bytes of a token. */
#include "core/sizes.h"
#include "cuda/choice/grid.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/cuda_low_rank.h"
#include "cuda/runtime/launch.h"

namespace moq::low_rank {

#define THREADS 256
#define WARPS   (THREADS / 32)
#define STEP    32         /* columns */
#define PITCH   (STEP + 4) /* floats of a row in shared memory */
#define ROWS    128        /* of the right matrix, of a tile, */
#define NARROW  32         /* and where it has no more, of many tokens */
#define FEW     8          /* tokens of a tile of few */
#define MANY    64
#define BLOCKS  2  /* of a multiprocessor, as many parts of K make at most */
#define MOST    64 /* parts of K, */
#define LEAST   4  /* of so many steps at least */
#define FIXED   8  /* parts for any number of tokens */

typedef struct {
    moq_rows left;
    int left_columns;   /* of a partition of the left matrix, 0: all share them */
    const float *right; /* [rows, k] */
    float *out;
    int64_t out_part; /* elements of a part of the output, which has rows of out_stride */
    int64_t m, k, out_stride;
    int64_t steps; /* of a part of K */
    int64_t token_tiles;
    int partition_count;
    moq_partitions partitions; /* of the right matrix */
} product_args;

/* Share of a thread of a step of a matrix: column `lane` of every eighth row. */
template <int COUNT> struct share {
    float value[(COUNT + WARPS - 1) / WARPS];
};

/* Loads a step's columns of the left matrix from token `first` on, zeros beyond the ends. */
template <int TN>
static __device__ __forceinline__ share<TN> load_left(const product_args &a, int partition,
                                                      int64_t first, int64_t k, int64_t end) {
    int64_t column = k + threadIdx.x % 32, offset = (int64_t)partition * a.left_columns;
    share<TN> s;
#pragma unroll
    for (int i = 0; i < TN / WARPS; i++) {
        int64_t token = first + threadIdx.x / 32 + i * WARPS;
        s.value[i] = 0.0f;
        if (token < a.m && column < end)
            s.value[i] =
                moq_load_one(a.left.data, token * a.left.stride + offset + column, a.left.dtype);
    }
    return s;
}

template <int COUNT>
static __device__ __forceinline__ share<COUNT>
load_right(const product_args &a, const moq_tile &rows, int64_t k, int64_t end) {
    int64_t column = k + threadIdx.x % 32;
    share<COUNT> s;
#pragma unroll
    for (int i = 0; i < COUNT / WARPS; i++) {
        int64_t row = rows.begin + threadIdx.x / 32 + i * WARPS;
        s.value[i] = row < rows.end && column < end ? a.right[row * a.k + column] : 0.0f;
    }
    return s;
}

template <int COUNT>
static __device__ __forceinline__ void store_share(const share<COUNT> &s,
                                                   float (&to)[COUNT][PITCH]) {
#pragma unroll
    for (int i = 0; i < COUNT / WARPS; i++)
        to[threadIdx.x / 32 + i * WARPS][threadIdx.x % 32] = s.value[i];
}

/* A float32 as two tf32. */
typedef struct {
    uint32_t high, low;
} parts;

static __device__ __forceinline__ parts part(float value) {
    uint32_t high = __float_as_uint(value) & 0xffffe000u;
    float rest = value == __uint_as_float(high) ? 0.0f : value - __uint_as_float(high);
    return {high, __float_as_uint(rest)};
}

static __device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Adds the products of a step to the sums of a warp: 16 rows from `row` on, by eights of tokens
 * from `token` on. EXACT: the left matrix has 16 bits, which are a tf32. */
template <int ROW_COUNT, int TN, int EIGHTS, bool EXACT>
static __device__ __forceinline__ void multiply_step(const float (&left)[TN][PITCH],
                                                     const float (&right)[ROW_COUNT][PITCH],
                                                     int row, int token, float (&sum)[EIGHTS][4]) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float product[EIGHTS][4] = {};
#pragma unroll 1
    for (int k = 0; k < STEP; k += 8) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            parts p = part(right[row + g + i % 2 * 8][k + t + i / 2 * 4]);
            high[i] = p.high;
            low[i] = p.low;
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            parts x[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                x[i] = part(left[token + 8 * j + g][k + t + 4 * i]);
            uint32_t x_high[2] = {x[0].high, x[1].high}, x_low[2] = {x[0].low, x[1].low};
            mma_tf32(product[j], low, x_high);
            if (!EXACT)
                mma_tf32(product[j], high, x_low);
            mma_tf32(product[j], high, x_high);
        }
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[j][i] += product[j][i];
}

template <int WR, int TN, bool EXACT>
static __global__ void __launch_bounds__(THREADS)
    low_rank_product(const __grid_constant__ product_args a) {
    constexpr int ROW_COUNT = 16 * WR, EIGHTS = TN / 8 / (WARPS / WR);
    __shared__ float left[TN][PITCH], right[ROW_COUNT][PITCH];
    moq_tile rows =
        moq_find_tile(&a.partitions, a.partition_count, blockIdx.x / a.token_tiles, ROW_COUNT);
    int64_t first = blockIdx.x % a.token_tiles * TN;
    int64_t begin = (int64_t)blockIdx.y * a.steps * STEP;
    int64_t end = min(begin + a.steps * STEP, a.k);
    int warp = threadIdx.x / 32, row = warp % WR * 16, token = warp / WR * (8 * EIGHTS);
    float sum[EIGHTS][4] = {};
    launch_dependents();
    share<ROW_COUNT> r = load_right<ROW_COUNT>(a, rows, begin, end);
    wait_for_predecessor();
    share<TN> l = load_left<TN>(a, rows.partition, first, begin, end);
    for (int64_t k = begin; k < end; k += STEP) {
        store_share(l, left);
        store_share(r, right);
        __syncthreads();
        r = load_right<ROW_COUNT>(a, rows, k + STEP, end);
        l = load_left<TN>(a, rows.partition, first, k + STEP, end);
        multiply_step<ROW_COUNT, TN, EIGHTS, EXACT>(left, right, row, token, sum);
        __syncthreads(); /* all have read this step */
    }
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4 * EIGHTS; i++) {
        int64_t m = first + token + i / 4 * 8 + 2 * t + i % 2;
        int n = rows.begin + row + g + i % 4 / 2 * 8;
        if (m < a.m && n < rows.end)
            a.out[blockIdx.y * a.out_part + m * a.out_stride + n] = sum[i / 4][i % 4];
    }
}

/* Adds parts, in order, to the first. */
static __global__ void __launch_bounds__(THREADS)
    add_parts(float *first, int64_t count, int part_count) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    launch_dependents();
    wait_for_predecessor();
    if (i >= count)
        return;
    float sum = first[i];
#pragma unroll 8
    for (int part = 1; part < part_count; part++)
        sum = __fadd_rn(sum, first[part * count + i]);
    first[i] = sum;
}

/* ---- launch ---- */

static int64_t token_tiles_of(int64_t m) {
    return divide_up(m, m <= FEW ? FEW : MANY);
}

/* Returns the rows of a tile. */
static int tile_rows(const moq_low_rank *l, int64_t rows) {
    return l->m > FEW && rows <= NARROW ? NARROW : ROWS;
}

/* Returns the steps of a part of K. */
static int64_t steps_of(const moq_low_rank *l) {
    int64_t steps = divide_up(l->spec->in_features, STEP),
            ranks = moq_weight_ranks(&l->spec->matrix);
    int64_t tiles = token_tiles_of(l->m) * divide_up(ranks, tile_rows(l, ranks));
    int64_t parts = l->spec->batch_invariant ? FIXED : BLOCKS * l->spec->target.sm_count / tiles;
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

template <bool EXACT> static const void *kernel_of(const moq_low_rank *l, int rows) {
    return l->m <= FEW      ? (const void *)low_rank_product<WARPS, FEW, EXACT>
           : rows == NARROW ? (const void *)low_rank_product<NARROW / 16, MANY, EXACT>
                            : (const void *)low_rank_product<WARPS, MANY, EXACT>;
}

static moq_status launch(const moq_low_rank *l, const void *kernel, unsigned blocks, unsigned parts,
                         void **parameters, moq_err *err) {
    moq_launch launch = {.what = "low-rank part of a linear",
                         .kernel = kernel,
                         .grid = dim3(blocks, parts),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)l->stream,
                         .pdl = true};
    return moq_cuda_launch(&launch, parameters, err);
}

static moq_status multiply(const moq_low_rank *l, product_args *a, int rows, int64_t row_tiles,
                           int64_t parts, moq_err *err) {
    a->m = l->m;
    a->token_tiles = token_tiles_of(l->m);
    int64_t blocks = row_tiles * a->token_tiles;
    if (blocks > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)l->m);
    bool exact = a->left.dtype != MOQ_DT_F32;
    void *parameters[] = {a};
    return launch(l, exact ? kernel_of<true>(l, rows) : kernel_of<false>(l, rows), (unsigned)blocks,
                  (unsigned)parts, parameters, err);
}

static moq_status add(const moq_low_rank *l, int64_t parts, moq_err *err) {
    float *first = l->inner;
    int64_t count = l->m * moq_weight_ranks(&l->spec->matrix);
    int part_count = (int)parts;
    void *parameters[] = {&first, &count, &part_count};
    return launch(l, (const void *)add_parts, (unsigned)divide_up(count, THREADS), 1, parameters,
                  err);
}

extern "C" moq_status moq_cuda_low_rank(const moq_low_rank *l, moq_err *err) {
    const moq_linear_spec *spec = l->spec;
    int64_t ranks = moq_weight_ranks(&spec->matrix), parts = parts_of(l);
    int rows = tile_rows(l, ranks);
    product_args inner = {.left = moq_rows_of(l->x),
                          .right = l->lora_a,
                          .out = l->inner,
                          .out_part = l->m * ranks,
                          .k = spec->in_features,
                          .out_stride = ranks,
                          .steps = steps_of(l),
                          .partition_count = 1};
    inner.partitions.end[0] = (int)ranks;
    MOQ_TRY(multiply(l, &inner, rows, divide_up(ranks, rows), parts, err));
    if (parts > 1)
        MOQ_TRY(add(l, parts, err));
    product_args outer = {.left = {l->inner, ranks, MOQ_DT_F32},
                          .left_columns = spec->rank,
                          .right = l->lora_b,
                          .out = l->addend,
                          .k = spec->rank,
                          .out_stride = spec->out_features,
                          .steps = divide_up(spec->rank, STEP),
                          .partition_count = spec->partition_count,
                          .partitions = moq_partitions_of(spec)};
    return multiply(l, &outer, ROWS, moq_tile_count(spec, ROWS), 1, err);
}

} // namespace moq::low_rank
