/* RMSNorm, quantized: v = rounded(rounded(z * r) * weight) with z = x, or rounded(x + residual).
 * core/activation.h has the formula operation by operation.
 *
 * T threads have a row, whose chunks they keep. The sum of squares is a binary tree over
 * neighbours, so its bits do not depend on T: a warp's chunks follow each other, and every warp
 * adds the partial sums of all warps of the row.
 *
 * Bound: memory, 3 bytes a value, 7 with a residual. The cost of a row beside its values (sums over
 * lanes and warps, two divisions, a root, addresses) is some 200 instructions a thread. So with
 * many long rows a thread has 64 values. With a residual it has 16, so that memory has more to do,
 * and also with few rows, where one thread's latency counts.
 *
 * Some hundred kernels are instances of these; cuda_quantize_norm.cu, cuda_quantize_norm_token.cu
 * and cuda_norm.cu compile some modes each. */
#ifndef MOQ_CUDA_TENSOR_CUDA_QUANTIZE_NORM_H
#define MOQ_CUDA_TENSOR_CUDA_QUANTIZE_NORM_H

#include "cuda/tensor/cuda_quantize_rows.h"

namespace moq::quantization {

/* Launches the kernels of MOQ_INPUT_E4M3_TOKEN and MOQ_INPUT_E4M3_GROUP
 * (cuda_quantize_norm_token.cu). */
const void *moq_norm_token_kernel(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan,
                                  bool wide_weight);
/* Launches the kernels of MOQ_WRITE_VALUES (cuda_norm.cu). */
const void *moq_norm_values_kernel(moq_dtype dtype, moq_row_plan plan, bool wide_weight);

template <int DT, int WAY, int N>
static __device__ __forceinline__ void store_z(const quantize_args *a, const norm_source *s,
                                               const chunk<DT, N> &z, int64_t row, int64_t column) {
    store_values<DT, WAY>(s->residual_out, s->aligned_out, a->k, z, row, column);
}

/* Stores v, if it is wanted beside its codes. */
template <int DT, int WAY, int MODE, int N>
static __device__ __forceinline__ void store_v(const quantize_args *a, const norm_source *s,
                                               const chunk<DT, N> &v, int64_t row, int64_t column) {
    if (MODE != MOQ_FIND_AMAX && MODE != MOQ_WRITE_VALUES && s->value_out)
        store_values<DT, WAY>(s->value_out, s->aligned_values, a->k, v, row, column);
}

static __device__ __forceinline__ float sum_of(float x, float y) {
    return __fadd_rn(x, y);
}

template <int DT, int N>
static __device__ __forceinline__ float sum_of_squares(const chunk<DT, N> &c) {
    float value[N], sum[2] = {};
    widen(c, value);
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i / MOQ_NORM_RUN] = __fmaf_rn(value[i], value[i], sum[i / MOQ_NORM_RUN]);
    return N == MOQ_NORM_RUN ? sum[0] : __fadd_rn(sum[0], sum[1]);
}

/* Adds the warps' partial sums of a row, each of VALUES values, by every warp. */
template <int VALUES>
static __device__ __forceinline__ float total_of(const float *sum, int parts) {
    constexpr int EACH = MOQ_NORM_TREE / VALUES / 32; /* partial sums of a lane: 1 or 2 */
    float total = 0.0f;
#pragma unroll 1
    for (int first = 0; first < parts; first += 32 * EACH) {
        int at = first + threadIdx.x % 32 * EACH;
        float own = at < parts ? sum[at] : 0.0f;
        if (EACH == 2 && at + 1 < parts)
            own = __fadd_rn(own, sum[at + 1]);
        float part[1] = {own};
        total = __fadd_rn(total, fold_lanes<32>(part, sum_of));
    }
    return total;
}

/* Makes v of a chunk; `gain` has the weights of its columns, of its dtype or float32. */
template <int DT, int WEIGHT, int N>
static __device__ __forceinline__ chunk<DT, N> normalised(const chunk<DT, N> &z, float r,
                                                          const chunk<WEIGHT, N> &gain) {
    float value[N];
    widen(z, value);
#pragma unroll
    for (int i = 0; i < N; i++)
        value[i] = __fmul_rn(value[i], r);
    if constexpr (WEIGHT == DT) {
        return multiply(narrow<DT>(value), gain);
    } else {
        widen(narrow<DT>(value), value);
#pragma unroll
        for (int i = 0; i < N; i++)
            value[i] = __fmul_rn(value[i], __uint_as_float(gain.word[i]));
        return narrow<DT>(value);
    }
}

/* Returns the reciprocal of the root mean square of a row from its sum of squares. */
static __device__ __forceinline__ float reciprocal_rms(float sum, float columns, float eps) {
    float mean = __fdiv_rn(sum, columns);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

/* Synchronizes all threads of a row. */
static __device__ __forceinline__ void sync_row(void) {
    if (blockDim.x == 32)
        __syncwarp();
    else
        __syncthreads();
}

/* ---- rows of whole chunks ---- */

/* Returns the blocks of a multiprocessor that leave each thread the registers with which it was
 * fastest. */
static constexpr int least_blocks(int plan) {
    return plan == MOQ_16X2 ? 10 : plan == MOQ_16X4 ? 2 : 1;
}

/* Registers for a residual: only threads with one chunk have them. */
template <int DT, int WAY, int MODE, int WEIGHT>
static __global__ void __launch_bounds__(norm_threads(WAY), least_blocks(WAY))
    norm_whole_rows(const __grid_constant__ quantize_args a,
                    const __grid_constant__ norm_source s) {
    constexpr int N = chunk_values(WAY), KEPT = kept_chunks(DT, WAY);
    constexpr bool FIND = MODE == MOQ_INPUT_E4M3_TOKEN || MODE == MOQ_FIND_AMAX;
    constexpr bool SPREAD = is_spread(WAY), ADD = KEPT == 1;
    constexpr bool EARLY = KEPT <= (WEIGHT == DT ? 2 : 1); /* weights of all chunks fit registers */
    extern __shared__ float sums[];                        /* [2][rows of the block][parts] */
    __shared__ uint32_t room[2][32];
    __shared__ exchange told[2]; /* sums of squares, maxima */
    const int threads = threads_of_row<WAY>(), first = thread_of_row<WAY>();
    const int chunks = (int)(a.k / N);
    uint32_t most_of_all = 0;
    divisor by = {};
    if constexpr (SPREAD)
        open_exchanges(told, MODE == MOQ_INPUT_E4M3_TOKEN ? 2 : 1, s.parts);
    if (a.next_is_busy)
        launch_dependents();
    touch_parameter(a);
    touch_parameter(s);
    wait_for_predecessor();
    if (KEPT == 1)
        launch_dependents();
    else
        by = tensor_scale<MODE>(&a);
    int64_t row = first_row<WAY>();
    for (int turn = 0; row < a.m; row += (int64_t)gridDim.x * blockDim.y, turn ^= 1) {
        float *sum = sums + (turn * blockDim.y + threadIdx.y) * s.parts;
        chunk<DT, N> kept[KEPT], other[KEPT];
        chunk<WEIGHT, N> gain[KEPT];
        float part[KEPT];
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int column = chunk_or_last(first + j * threads, chunks) * N;
            kept[j] = load_chunk<DT, N, true>(&a.x, row, column, a.k);
            if (ADD && s.residual.data)
                other[j] = load_chunk<DT, N, true>(&s.residual, row, column, a.k);
            if (EARLY)
                gain[j] = load_chunk<WEIGHT, N, true>(&s.weight, 0, column, a.k);
        }
        if (KEPT > 1)
            launch_dependents();
        else
            by = tensor_scale<MODE>(&a); /* after the loads: it waits for its own */
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int place = first + j * threads, column = chunk_or_last(place, chunks) * N;
            if (ADD && s.residual.data) {
                kept[j] = add(kept[j], other[j]);
                if (place < chunks)
                    store_z<DT, WAY>(&a, &s, kept[j], row, column);
            }
            part[j] = place < chunks ? sum_of_squares(kept[j]) : 0.0f;
        }
        float warps = fold_lanes<32>(part, sum_of);
        if constexpr (SPREAD) {
            cluster_wait();
            tell(&told[0], first / 32, s.parts, __float_as_uint(warps));
            sum = (float *)told[0].word;
        } else {
            int at = (threadIdx.x % 32 * threads + threadIdx.x) / 32;
            if (threadIdx.x % 32 < KEPT && at < s.parts)
                sum[at] = warps;
            sync_row();
        }
        float r = reciprocal_rms(total_of<32 * N>(sum, s.parts), s.columns, s.eps);
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int place = first + j * threads;
            if (!EARLY)
                gain[j] = load_chunk<WEIGHT, N, true>(&s.weight, 0,
                                                      chunk_or_last(place, chunks) * N, a.k);
            kept[j] = normalised(kept[j], r, gain[j]);
            if (place < chunks)
                store_v<DT, WAY, MODE>(&a, &s, kept[j], row, place * N);
            if (FIND)
                most = max(most, place < chunks ? chunk_amax(kept[j]) : 0);
            if ((MODE == MOQ_INPUT_E4M3_TENSOR || MODE == MOQ_WRITE_VALUES) && place < chunks)
                emit<DT, WAY, MODE>(&a, row, place * N, kept[j], by);
        }
        most_of_all = max(most_of_all, most);
        if (MODE == MOQ_INPUT_E4M3_TOKEN) {
            if constexpr (SPREAD)
                most = max_of_cluster(&told[1], first / 32, s.parts, most);
            else
                most = max_of_row(most, room[turn]);
            float scale = token_scale<DT>(__uint_as_float(most));
            by = divide_by<DT>(scale);
            if (first == 0)
                ((float *)a.scales)[row] = scale;
        }
        if (MODE == MOQ_INPUT_E4M3_TOKEN || MODE == MOQ_INPUT_E4M3_GROUP)
            emit_chunks<DT, WAY, MODE>(&a, row, first, threads, chunks, kept, by);
    }
    if (MODE == MOQ_FIND_AMAX)
        store_part(&a, most_of_all);
    store_tensor_scale<MODE>(&a);
}

/* ---- rows of any kind ---- */

/* Loads z once more, for a thread that did not keep it. */
template <int DT, int N>
static __device__ __forceinline__ chunk<DT, N> load_z(const quantize_args *a, const norm_source *s,
                                                      int64_t row, int64_t column) {
    if (!s->residual.data)
        return load_chunk<DT, N, false>(&a->x, row, column, a->k);
    quantize_input z = {s->residual_out, a->k, 1, 0, s->aligned_out};
    return load_chunk<DT, N, false>(&z, row, column, a->k);
}

/* Loads v of a chunk; the weight has the dtype of x or is float32. */
template <int DT, int N>
static __device__ __forceinline__ chunk<DT, N>
normalised_any(const quantize_args *a, const norm_source *s, const chunk<DT, N> &z, int64_t column,
               float r) {
    if (!s->wide_weight)
        return normalised(z, r, load_chunk<DT, N, false>(&s->weight, 0, column, a->k));
    return normalised(z, r, load_chunk<MOQ_DT_F32, N, false>(&s->weight, 0, column, a->k));
}

/* Quantizes rows whose chunks are read as often as needed, two or three times. */
template <int DT, int WAY, int MODE>
static __global__ void __launch_bounds__(1024)
    norm_any_rows(const __grid_constant__ quantize_args a, const __grid_constant__ norm_source s) {
    constexpr int N = chunk_values(WAY);
    constexpr bool FIND = MODE == MOQ_INPUT_E4M3_TOKEN || MODE == MOQ_FIND_AMAX;
    extern __shared__ float sums[]; /* [2][rows of the block][parts] */
    __shared__ uint32_t room[2][32];
    const int64_t threads = blockDim.x, chunks = (a.k + N - 1) / N;
    const int64_t end = (chunks + threads - 1) / threads * threads; /* all lanes take part */
    uint32_t most_of_all = 0;
    wait_for_predecessor();
    launch_dependents();
    divisor by = tensor_scale<MODE>(&a);
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    for (int turn = 0; row < a.m; row += (int64_t)gridDim.x * blockDim.y, turn ^= 1) {
        float *sum = sums + (turn * blockDim.y + threadIdx.y) * s.parts;
        for (int64_t at = threadIdx.x; at < end; at += threads) {
            float part[1] = {0.0f};
            if (at < chunks) {
                chunk<DT, N> z = load_chunk<DT, N, false>(&a.x, row, at * N, a.k);
                if (s.residual.data) {
                    z = add(z, load_chunk<DT, N, false>(&s.residual, row, at * N, a.k));
                    store_z<DT, WAY>(&a, &s, z, row, at * N);
                }
                part[0] = sum_of_squares(z);
            }
            float warp = fold_lanes<32>(part, sum_of);
            if (threadIdx.x % 32 == 0 && at < chunks)
                sum[at / 32] = warp;
        }
        sync_row();
        float r = reciprocal_rms(total_of<32 * N>(sum, s.parts), s.columns, s.eps);
        uint32_t most = 0;
        for (int64_t at = threadIdx.x; FIND && at < chunks; at += threads)
            most = max(most, chunk_amax(normalised_any(&a, &s, load_z<DT, N>(&a, &s, row, at * N),
                                                       at * N, r)));
        most_of_all = max(most_of_all, most);
        if (MODE == MOQ_FIND_AMAX)
            continue;
        if (MODE == MOQ_INPUT_E4M3_TOKEN) {
            float scale = token_scale<DT>(__uint_as_float(max_of_row(most, room[turn])));
            by = divide_by<DT>(scale);
            if (threadIdx.x == 0)
                ((float *)a.scales)[row] = scale;
        }
        for (int64_t at = threadIdx.x; at < end; at += threads) {
            chunk<DT, N> v[1] = {};
            if (at < chunks)
                v[0] = normalised_any(&a, &s, load_z<DT, N>(&a, &s, row, at * N), at * N, r);
            if (at < chunks)
                store_v<DT, WAY, MODE>(&a, &s, v[0], row, at * N);
            emit_chunks<DT, WAY, MODE>(&a, row, at, threads, chunks, v, by);
        }
    }
    if (MODE == MOQ_FIND_AMAX)
        store_part(&a, most_of_all);
    store_tensor_scale<MODE>(&a);
}

template <int DT, int MODE, int WEIGHT> static const void *whole_rows_kernel(moq_row_plan plan) {
    return plan == MOQ_8X1_SPREAD ? (const void *)norm_whole_rows<DT, MOQ_8X1_SPREAD, MODE, WEIGHT>
           : plan == MOQ_16X1     ? (const void *)norm_whole_rows<DT, MOQ_16X1, MODE, WEIGHT>
           : plan == MOQ_16X2     ? (const void *)norm_whole_rows<DT, MOQ_16X2, MODE, WEIGHT>
                                  : (const void *)norm_whole_rows<DT, MOQ_16X4, MODE, WEIGHT>;
}

template <int MODE>
static const void *norm_kernel(moq_dtype dtype, moq_row_plan plan, bool wide_weight) {
    if (plan == MOQ_ANY_ROWS)
        return MOQ_GENERAL(dtype, norm_any_rows, MODE);
    if (dtype == MOQ_DT_BF16)
        return wide_weight ? whole_rows_kernel<MOQ_DT_BF16, MODE, MOQ_DT_F32>(plan)
                           : whole_rows_kernel<MOQ_DT_BF16, MODE, MOQ_DT_BF16>(plan);
    return wide_weight ? whole_rows_kernel<MOQ_DT_F16, MODE, MOQ_DT_F32>(plan)
                       : whole_rows_kernel<MOQ_DT_F16, MODE, MOQ_DT_F16>(plan);
}

} // namespace moq::quantization

#endif
