/* Sum over the slots of a token, y = sum of w d, the first slot first.
 *
 * Layouts: d [rows, H] float32 or bfloat16, row [slots], y [tokens, H]. A thread has 16 bytes of
 * each row of d, and loads eight rows at once. Bound: with many tokens the reading of d, which L2
 * does not hold; with few tokens two latencies, of rows and of d. */
#include "core/invariant.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/pipeline.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define SUM_THREADS 256
#define AT_ONCE     8 /* rows of d that a thread loads at a time */

typedef struct {
    const void *d;
    const float *weights;
    slot_tensor weight_at;
    const int32_t *row;
    moq_output y;
    int64_t first, columns;
    int32_t top_k;
    bool weighted, accumulate, early;
    bool aligned; /* rows of d and y consist of whole vectors of a thread's columns */
} sum_args;

/* The slots of a token: rows, or -1 if a slot does not count or is beyond top_k, and router
 * weights. */
typedef struct {
    int row[MOQ_MOE_TOP_K];
    float weight[MOQ_MOE_TOP_K];
} token_slots;
static_assert(MOQ_MOE_TOP_K % AT_ONCE == 0 && MOQ_MOE_TOP_K <= 32, "a lane finds each slot");

static __device__ __forceinline__ void find_slots(const sum_args *a, token_slots *slots) {
    int64_t token = blockIdx.x;
    int j = threadIdx.x;
    if (j >= MOQ_MOE_TOP_K)
        return;
    bool has = j < a->top_k;
    slots->row[j] = has ? a->row[token * a->top_k + j] : -1;
    slots->weight[j] =
        has && a->weighted ? a->weights[slot_offset(&a->weight_at, a->first + token, j)] : 1.0f;
}

/* A thread's piece of a row of d: 16 bytes, four neighbouring columns of float32 or eight of
 * bfloat16. */
template <moq_dtype D> struct piece_of_d {
    static constexpr int columns = D == MOQ_DT_BF16 ? 8 : 4;
    uint4 word;
};

template <moq_dtype D>
static __device__ __forceinline__ float value_of(const piece_of_d<D> *piece, int i) {
    if (D == MOQ_DT_F32)
        return __uint_as_float((&piece->word.x)[i]);
    float2 pair = moq_widen_pair((&piece->word.x)[i / 2], D);
    return i % 2 ? pair.y : pair.x;
}

/* Loads columns from `column` on, not those beyond the end. Rounded d is always aligned. */
template <moq_dtype D>
static __device__ __forceinline__ piece_of_d<D> load_d(const sum_args *a, int row, int64_t column) {
    int64_t at = row * a->columns + column;
    if (D != MOQ_DT_F32)
        return {load_once((const uint16_t *)a->d + at)};
    const uint32_t *from = (const uint32_t *)a->d + at;
    if (a->aligned)
        return {load_once(from)};
    piece_of_d<D> piece = {{from[0], 0, 0, 0}};
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (column + i < a->columns)
            (&piece.word.x)[i] = from[i];
    return piece;
}

/* Adds the rows of up to AT_ONCE slots. */
template <moq_dtype D>
static __device__ __forceinline__ void add_rows(const sum_args *a, const int4 *rows,
                                                const float4 *weights, int64_t column,
                                                float (&sum)[piece_of_d<D>::columns]) {
    piece_of_d<D> d[AT_ONCE];
    int row[AT_ONCE];
    float weight[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j += 4) {
        *(int4 *)(row + j) = rows[j / 4];
        *(float4 *)(weight + j) = weights[j / 4];
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
        if (row[j] >= 0)
            d[j] = load_d<D>(a, row[j], column);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int i = 0; i < piece_of_d<D>::columns; i++)
            if (row[j] >= 0)
                sum[i] = __fadd_rn(sum[i], __fmul_rn(weight[j], value_of(&d[j], i)));
}

template <int COLUMNS>
static __device__ __forceinline__ void store_sums(const sum_args *a, int64_t token, int64_t column,
                                                  const float (&sum)[COLUMNS]) {
    if (a->aligned && a->y.dtype != MOQ_DT_F32) {
        uint16_t *to = (uint16_t *)a->y.data + token * a->y.stride + column;
        __align__(16) uint32_t pair[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2)
            pair[i / 2] = moq_narrow_pair(a->y.dtype, sum[i], sum[i + 1]);
        if (COLUMNS == 8) /* the compiler would split a plain store into words */
            __stcg((uint4 *)to, *(const uint4 *)pair);
        else
            __stcg((uint2 *)to, *(const uint2 *)pair);
        return;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (column + i < a->columns)
            moq_store_output(&a->y, token, (int)column + i, sum[i], 0.0f);
}

/* Adds all slots of a token in the thread's columns from `column` on. */
template <moq_dtype D>
static __device__ __forceinline__ void sum_columns(const sum_args *a, const token_slots *slots,
                                                   int64_t token, int64_t column) {
    constexpr int COLUMNS = piece_of_d<D>::columns;
    float sum[COLUMNS] = {};
#pragma unroll
    for (int i = 0; a->accumulate && i < COLUMNS; i++)
        if (column + i < a->columns)
            sum[i] = moq_load_one(a->y.data, token * a->y.stride + column + i, a->y.dtype);
#pragma unroll 1
    for (int first = 0; first < a->top_k; first += AT_ONCE)
        add_rows<D>(a, (const int4 *)(slots->row + first), (const float4 *)(slots->weight + first),
                    column, sum);
    store_sums(a, token, column, sum);
}

template <moq_dtype D>
static __global__ void __launch_bounds__(SUM_THREADS) combine(const __grid_constant__ sum_args a) {
    constexpr int COLUMNS = piece_of_d<D>::columns;
    __shared__ __align__(16) token_slots slots;
    launch_dependents();
    if (!a.early)
        wait_for_predecessor();
    find_slots(&a, &slots);
    if (a.early)
        wait_for_predecessor();
    __syncthreads();
#pragma unroll 1
    for (int64_t column = ((int64_t)blockIdx.y * SUM_THREADS + threadIdx.x) * COLUMNS;
         column < a.columns; column += (int64_t)gridDim.y * SUM_THREADS * COLUMNS)
        sum_columns<D>(&a, &slots, a.first + blockIdx.x, column);
}

moq_status combine_rows(const slot_chunk *chunk, const slot_groups *groups, rows_of_d d,
                        moq_err *err) {
    const moq_moe_call *call = chunk->call;
    bool rounded = d.dtype == MOQ_DT_BF16;
    int own = rounded ? piece_of_d<MOQ_DT_BF16>::columns : piece_of_d<MOQ_DT_F32>::columns;
    sum_args a = {};
    a.d = d.data;
    a.early = d.early;
    a.weights = (const float *)call->weights->data;
    a.weight_at = slot_tensor_of(call->weights);
    a.row = groups->row;
    a.y = {call->y->data, call->y->stride[0], call->y->dtype, MOQ_DT_NONE, NULL};
    a.first = chunk->first;
    a.columns = call->spec->w2.out_features;
    a.top_k = call->spec->top_k;
    a.weighted = !call->weights_on_input;
    a.accumulate = call->accumulate;
    uint64_t step = (uint64_t)(a.y.stride * (int64_t)moq_dtype_size(a.y.dtype));
    MOQ_ASSERT(!rounded || a.columns % own == 0);
    a.aligned = a.columns % own == 0 && ((uintptr_t)a.y.data | step) % (uint64_t)(2 * own) == 0;
    int64_t spans = (a.columns + SUM_THREADS * own - 1) / (SUM_THREADS * own);
    unsigned wide = (unsigned)(spans < 64 ? spans : 64);
    const void *kernel =
        rounded ? (const void *)combine<MOQ_DT_BF16> : (const void *)combine<MOQ_DT_F32>;
    moq_launch launch = {.what = "combining experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)chunk->tokens, wide),
                         .block = dim3(SUM_THREADS),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::moe
