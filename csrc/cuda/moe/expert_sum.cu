/* The sum over the slots of a token, y = sum of w d, the first slot first: a thread has 16 bytes of
 * each row of d, eight of which are asked for at once. Bound by the reading of d, which many
 * tokens have too much of for L2. */
#include "core/invariant.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/expert_rows.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define SUM_THREADS 256

typedef struct {
    const void *d;
    const float *weights;
    slot_tensor weight_at;
    const int32_t *row;
    moq_output y;
    int64_t first, columns;
    int32_t top_k;
    bool weighted, accumulate, early;
    bool aligned; /* rows of d, and of y, have whole vectors of a thread's columns */
} sum_args;

/* What a thread has of a row of d: 16 bytes, four neighbouring columns of float32 or eight of
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

/* Columns from `column` on; what is beyond the ends is not looked at. Rounded ones are always
 * aligned. */
template <moq_dtype D>
static __device__ __forceinline__ piece_of_d<D> load_d(const sum_args *a, int row, int64_t column) {
    int64_t at = row * a->columns + column;
    if (D != MOQ_DT_F32)
        return {*(const uint4 *)((const uint16_t *)a->d + at)};
    const uint32_t *from = (const uint32_t *)a->d + at;
    if (a->aligned)
        return {*(const uint4 *)from};
    piece_of_d<D> piece = {{from[0], 0, 0, 0}};
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (column + i < a->columns)
            (&piece.word.x)[i] = from[i];
    return piece;
}

template <int COLUMNS>
static __device__ __forceinline__ void store_sums(const sum_args *a, int64_t token, int64_t column,
                                                  const float (&sum)[COLUMNS]) {
    if (a->aligned && a->y.dtype != MOQ_DT_F32) {
        uint2 *to = (uint2 *)((uint16_t *)a->y.data + token * a->y.stride + column);
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 4)
            to[i / 4] = {moq_narrow_pair(a->y.dtype, sum[i], sum[i + 1]),
                         moq_narrow_pair(a->y.dtype, sum[i + 2], sum[i + 3])};
        return;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (column + i < a->columns)
            moq_store_output(&a->y, token, (int)column + i, sum[i], 0.0f);
}

template <moq_dtype D>
static __global__ void __launch_bounds__(SUM_THREADS) combine(const __grid_constant__ sum_args a) {
    constexpr int AT_ONCE = 8; /* rows of d that are asked for */
    constexpr int SUM_COLUMNS = piece_of_d<D>::columns;
    __shared__ int rows[MOQ_MOE_TOP_K];
    __shared__ float weights[MOQ_MOE_TOP_K];
    int64_t token = blockIdx.x;
    launch_dependents();
    if (!a.early)
        wait_for_predecessor();
    if ((int)threadIdx.x < a.top_k) {
        int j = threadIdx.x;
        rows[j] = a.row[token * a.top_k + j];
        weights[j] = a.weighted ? a.weights[slot_offset(&a.weight_at, a.first + token, j)] : 1.0f;
    }
    if (a.early)
        wait_for_predecessor();
    __syncthreads();
    int64_t at = (a.first + token) * a.y.stride;
    for (int64_t column = ((int64_t)blockIdx.y * SUM_THREADS + threadIdx.x) * SUM_COLUMNS;
         column < a.columns; column += (int64_t)gridDim.y * SUM_THREADS * SUM_COLUMNS) {
        float sum[SUM_COLUMNS] = {};
#pragma unroll
        for (int i = 0; a.accumulate && i < SUM_COLUMNS; i++)
            if (column + i < a.columns)
                sum[i] = moq_load_one(a.y.data, at + column + i, a.y.dtype);
        for (int first = 0; first < a.top_k; first += AT_ONCE) {
            piece_of_d<D> d[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (first + j < a.top_k && rows[first + j] >= 0)
                    d[j] = load_d<D>(&a, rows[first + j], column);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (first + j >= a.top_k || rows[first + j] < 0)
                    continue;
#pragma unroll
                for (int i = 0; i < SUM_COLUMNS; i++)
                    sum[i] = __fadd_rn(sum[i], __fmul_rn(weights[first + j], value_of(&d[j], i)));
            }
        }
        store_sums(&a, a.first + token, column, sum);
    }
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
    a.aligned = a.columns % own == 0 && ((uintptr_t)a.y.data | step) % 8 == 0;
    int64_t spans = (a.columns + SUM_THREADS * own - 1) / (SUM_THREADS * own);
    unsigned wide = (unsigned)(spans < 64 ? spans : 64);
    const void *kernel =
        rounded ? (const void *)combine<MOQ_DT_BF16> : (const void *)combine<MOQ_DT_F32>;
    moq_launch launch = {.what = "combining experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)chunk->tokens, wide),
                         .block = dim3(SUM_THREADS),
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::moe
