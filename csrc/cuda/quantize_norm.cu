/* v = rounded(rounded(z * r) * weight) with z = x, or rounded(x + residual), quantized:
 * core/activation.h has the formula operation by operation. Memory bounds it: 3 bytes a value, 7
 * with a residual.
 *
 * T threads have a row, whose chunks they keep; the sum of squares is of one shape whatever T is: a
 * warp's 32 chunks follow each other, so its butterfly is the sum of one group of 512, and the
 * groups are added in their order by every thread. */
#include "cuda/quantize_rows.h"

/* A chunk of z; stored where there is a residual. */
template <int DT, bool FAST>
static __device__ __forceinline__ moq_chunk load_z(const quantize_args *a, const norm_source *s,
                                                   int64_t row, int64_t column) {
    moq_chunk chunk = load_chunk<DT, FAST>(&a->x, row, column, a->k);
    if (!s->residual.data)
        return chunk;
    moq_chunk residual = load_chunk<DT, FAST>(&s->residual, row, column, a->k);
    float value[16], other[16];
    widen<DT>(chunk, value);
    widen<DT>(residual, other);
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = __fadd_rn(value[i], other[i]);
    chunk = narrow<DT>(value);
    constexpr int size = DT == MOQ_DT_F32 ? 4 : 2;
    uint8_t *to = (uint8_t *)s->residual_out + (row * a->k + column) * size;
    if (FAST || (s->aligned_out && column + 16 <= a->k)) {
#pragma unroll
        for (int i = 0; i < size; i++)
            ((uint4 *)to)[i] = chunk.word[i];
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (column + i >= a->k)
                continue;
            if (DT == MOQ_DT_F32)
                ((uint32_t *)to)[i] = (&chunk.word[i / 4].x)[i % 4];
            else
                ((uint16_t *)to)[i] = (uint16_t)((&chunk.word[i / 8].x)[i / 2 % 4] >> (i % 2 * 16));
        }
    }
    return chunk;
}

/* The same chunk once more, for a thread that did not keep it. */
template <int DT, bool FAST>
static __device__ __forceinline__ moq_chunk load_z_again(const quantize_args *a,
                                                         const norm_source *s, int64_t row,
                                                         int64_t column) {
    if (!s->residual.data)
        return load_chunk<DT, FAST>(&a->x, row, column, a->k);
    quantize_input z = {s->residual_out, a->k, 1, 0, s->aligned_out};
    return load_chunk<DT, FAST>(&z, row, column, a->k);
}

template <int DT> static __device__ __forceinline__ float sum_of_squares(const moq_chunk &chunk) {
    float value[16], sum = 0.0f;
    widen<DT>(chunk, value);
#pragma unroll
    for (int i = 0; i < 16; i++)
        sum = __fadd_rn(sum, __fmul_rn(value[i], value[i]));
#pragma unroll
    for (int i = 1; i < 32; i *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, i));
    return sum;
}

template <int DT, bool FAST>
static __device__ __forceinline__ moq_chunk normalised(const quantize_args *a, const norm_source *s,
                                                       const moq_chunk &z, int64_t column,
                                                       float r) {
    float value[16], weight[16];
    if (s->wide_weight)
        widen<MOQ_DT_F32>(load_chunk<MOQ_DT_F32, FAST>(&s->weight, 0, column, a->k), weight);
    else
        widen<DT>(load_chunk<DT, FAST>(&s->weight, 0, column, a->k), weight);
    widen<DT>(z, value);
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = __fmul_rn(value[i], r);
    moq_chunk rounded = narrow<DT>(value);
    widen<DT>(rounded, value);
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = __fmul_rn(value[i], weight[i]);
    return narrow<DT>(value);
}

/* All threads of a row have reached this. */
static __device__ __forceinline__ void sync_row(void) {
    if (blockDim.x == 32)
        __syncwarp();
    else
        __syncthreads();
}

template <int DT, bool FAST, int MODE>
static __global__ void __launch_bounds__(1024)
    quantize_norms(const __grid_constant__ quantize_args a, const __grid_constant__ norm_source s) {
    constexpr int HELD = held_chunks<DT>();
    extern __shared__ float sums[]; /* [2][rows of the block][groups] */
    __shared__ uint32_t room[2][32];
    const int threads = blockDim.x;
    uint32_t most_of_all = 0;
    launch_dependents();
    wait_for_predecessor();
    float scale = tensor_scale<MODE>(&a);
    int64_t chunks = (a.k + 15) / 16, last = (chunks + threads - 1) / threads;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    for (int turn = 0; row < a.m; row += (int64_t)gridDim.x * blockDim.y, turn ^= 1) {
        float *sum = sums + (turn * blockDim.y + threadIdx.y) * s.groups;
        moq_chunk held[HELD] = {};
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            if (chunk < chunks)
                held[j] = load_z<DT, FAST>(&a, &s, row, chunk * 16);
        }
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            float part = sum_of_squares<DT>(held[j]);
            if (threadIdx.x % 32 == 0 && chunk < chunks)
                sum[chunk / 32] = part;
        }
        for (int64_t j = HELD; j < last; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            moq_chunk z = {};
            if (chunk < chunks)
                z = load_z<DT, FAST>(&a, &s, row, chunk * 16);
            float part = sum_of_squares<DT>(z);
            if (threadIdx.x % 32 == 0 && chunk < chunks)
                sum[chunk / 32] = part;
        }
        sync_row();
        float total = 0.0f;
        for (int i = 0; i < s.groups; i++)
            total = __fadd_rn(total, sum[i]);
        float mean = __fdiv_rn(total, __ll2float_rn(a.k));
        float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, s.eps)));
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            if (chunk < chunks)
                held[j] = normalised<DT, FAST>(&a, &s, held[j], chunk * 16, r);
            most = max(most, chunk_amax<DT>(held[j]));
        }
        if (MODE == MOQ_INPUT_E4M3_TOKEN || MODE == MOQ_FIND_AMAX) {
            for (int64_t chunk = HELD * threads + threadIdx.x; chunk < chunks; chunk += threads) {
                moq_chunk z = load_z_again<DT, FAST>(&a, &s, row, chunk * 16);
                most = max(most, chunk_amax<DT>(normalised<DT, FAST>(&a, &s, z, chunk * 16, r)));
            }
            most_of_all = max(most_of_all, most);
        }
        if (MODE == MOQ_FIND_AMAX)
            continue;
        if (MODE == MOQ_INPUT_E4M3_TOKEN) {
            scale = moq_token_scale(__uint_as_float(max_of_row(most, room[turn])));
            if (threadIdx.x == 0)
                ((float *)a.scales)[row] = scale;
        }
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            emit<DT, FAST, MODE>(&a, row, chunk * 16, chunk < chunks, held[j], scale);
        }
        for (int64_t j = HELD; j < last; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            moq_chunk v = {};
            if (chunk < chunks)
                v = normalised<DT, FAST>(&a, &s, load_z_again<DT, FAST>(&a, &s, row, chunk * 16),
                                         chunk * 16, r);
            emit<DT, FAST, MODE>(&a, row, chunk * 16, chunk < chunks, v, scale);
        }
    }
    if (MODE == MOQ_FIND_AMAX)
        store_part(&a, most_of_all);
}

const void *moq_norm_kernel(moq_dtype dtype, moq_input_mode mode, bool fast) {
    switch (mode) {
    case MOQ_FIND_AMAX:
        return MOQ_FASTEST(dtype, fast, quantize_norms, MOQ_FIND_AMAX);
    case MOQ_INPUT_E4M3_TENSOR:
        return MOQ_FASTEST(dtype, fast, quantize_norms, MOQ_INPUT_E4M3_TENSOR);
    case MOQ_INPUT_E4M3_TOKEN:
        return MOQ_FASTEST(dtype, fast, quantize_norms, MOQ_INPUT_E4M3_TOKEN);
    case MOQ_INPUT_E4M3_GROUP:
        return MOQ_FASTEST(dtype, fast, quantize_norms, MOQ_INPUT_E4M3_GROUP);
    default:
        return MOQ_GENERAL(dtype, quantize_norms, MOQ_INPUT_NVFP4);
    }
}
