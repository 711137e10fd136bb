/* The kernels that quantize: values from a source, 16 at a time, to codes and scales. For the files
 * that instantiate them, one for each source.
 *
 * A thread has chunks of 16 values, T threads (a multiple of 32) a row or a span of it; with rows
 * of up to 512 values a block has eight rows, one a warp. Where a scale depends on no more than 128
 * neighbours, rows are cut into spans, and nothing is waited for but memory. Where it depends on a
 * whole row, the row's chunks stay in registers between the passes over it, as long as HELD of them
 * a thread are enough; the others are read again. */
#ifndef MOQ_CUDA_QUANTIZE_ROWS_H
#define MOQ_CUDA_QUANTIZE_ROWS_H

#include "cuda/load.h"
#include "cuda/ptx.h"
#include "cuda/quantize.h"

/* Instead of codes, the largest magnitude of each block: the first of two kernels for one scale. */
#define MOQ_FIND_AMAX MOQ_INPUT_AS_IS

/* Rows of a tensor as kernels read them. */
typedef struct {
    const void *data;
    int64_t stride; /* of the rows, where they have one */
    int64_t inner;  /* from value to value */
    int outer;      /* axes before the last, where the rows have no one stride; else 0 */
    bool aligned;   /* inner is 1 and every row begins at a multiple of 16 bytes */
    int64_t shape[MOQ_MAX_NDIM];
    int64_t step[MOQ_MAX_NDIM];
} quantize_input;

typedef struct {
    quantize_input x;
    int64_t m, k;
    const float *given;    /* the scale, or NULL: `scale` */
    float scale;           /* 0: from the partial maxima */
    const uint32_t *parts; /* bits of maxima, `part_count` of them */
    uint32_t *parts_out;
    int part_count;
    bool aligned_codes;
    uint8_t *codes;
    int64_t code_stride, code_columns;
    void *scales;
    int64_t scale_row, scale_group;
    float *found; /* where the scale of the whole tensor goes, or NULL */
} quantize_args;

/* The instance of a kernel for a dtype: of any strides and lengths, or, for 16 bits where `fast`,
 * of whole chunks at multiples of 16 bytes. */
#define MOQ_INSTANCE(dtype, FAST, kernel, ...)                                                     \
    ((dtype) == MOQ_DT_BF16 ? (const void *)kernel<MOQ_DT_BF16, FAST, ##__VA_ARGS__>               \
                            : (const void *)kernel<MOQ_DT_F16, FAST, ##__VA_ARGS__>)
#define MOQ_GENERAL(dtype, kernel, ...)                                                            \
    ((dtype) == MOQ_DT_F32 ? (const void *)kernel<MOQ_DT_F32, false, ##__VA_ARGS__>                \
                           : MOQ_INSTANCE(dtype, false, kernel, ##__VA_ARGS__))
#define MOQ_FASTEST(dtype, fast, kernel, ...)                                                      \
    ((fast) && (dtype) != MOQ_DT_F32 ? MOQ_INSTANCE(dtype, true, kernel, ##__VA_ARGS__)            \
                                     : MOQ_GENERAL(dtype, kernel, ##__VA_ARGS__))

/* Each kernel takes a quantize_args and a source. `mode` may be MOQ_FIND_AMAX. */
const void *moq_silu_kernel(moq_dtype dtype, moq_input_mode mode, bool fast);
const void *moq_norm_kernel(moq_dtype dtype, moq_input_mode mode, bool fast);

/* gate and up, halves of a row */
typedef struct {
    quantize_input up;
    template <int DT, bool FAST>
    __device__ moq_chunk load(const quantize_args *a, int64_t row, int64_t column) const;
} silu_source;

typedef struct {
    quantize_input residual; /* data NULL where there is none */
    quantize_input weight;   /* one row */
    bool wide_weight;        /* float32 */
    bool aligned_out;
    void *residual_out; /* [M, K] */
    float eps;
    int groups; /* of MOQ_NORM_GROUP values in a row */
} norm_source;

/* How many chunks of a dtype a thread keeps: 64 bytes. */
template <int DT> static __host__ __device__ constexpr int held_chunks(void) {
    return DT == MOQ_DT_F32 ? 1 : 2;
}

/* ---- chunks ---- */

template <int DT>
static __device__ __forceinline__ void widen(const moq_chunk &chunk, float (&value)[16]) {
    const moq_rows rows = {NULL, 0, (moq_dtype)DT};
    moq_widen(&rows, &chunk, value);
}

static __device__ __forceinline__ int64_t row_offset(const quantize_input *x, int64_t row) {
    if (x->outer == 0)
        return row * x->stride;
    int64_t offset = 0;
    for (int i = x->outer - 1; i >= 0; i--) {
        offset += row % x->shape[i] * x->step[i];
        row /= x->shape[i];
    }
    return offset;
}

/* Value by value: the end of a row, or rows of other strides. What is beyond the row is 0. */
template <int DT>
static __device__ __noinline__ moq_chunk gather_chunk(const quantize_input *x, int64_t row,
                                                      int64_t column, int64_t k) {
    moq_chunk chunk = {};
    int64_t at = row_offset(x, row) + column * x->inner;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (column + i >= k)
            continue;
        if (DT == MOQ_DT_F32)
            (&chunk.word[i / 4].x)[i % 4] = ((const uint32_t *)x->data)[at + i * x->inner];
        else
            (&chunk.word[i / 8].x)[i / 2 % 4] |=
                (uint32_t)((const uint16_t *)x->data)[at + i * x->inner] << (i % 2 * 16);
    }
    return chunk;
}

template <int DT, bool FAST>
static __device__ __forceinline__ moq_chunk load_chunk(const quantize_input *x, int64_t row,
                                                       int64_t column, int64_t k) {
    if (FAST || (x->aligned && column + 16 <= k)) {
        const moq_rows rows = {(const uint8_t *)x->data + column * (DT == MOQ_DT_F32 ? 4 : 2),
                               x->stride, (moq_dtype)DT};
        return moq_load_chunk(&rows, row, 0);
    }
    return gather_chunk<DT>(x, row, column, k);
}

/* The largest magnitude of a chunk, as bits. */
template <int DT> static __device__ __forceinline__ uint32_t chunk_amax(const moq_chunk &chunk) {
    float value[16];
    widen<DT>(chunk, value);
    return moq_amax_bits(value);
}

template <int DT> static __device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
    uint32_t pair;
    if (DT == MOQ_DT_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Values rounded to a dtype. */
template <int DT> static __device__ __forceinline__ moq_chunk narrow(const float (&value)[16]) {
    moq_chunk chunk = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (DT == MOQ_DT_F32)
            (&chunk.word[i / 4].x)[i % 4] = __float_as_uint(value[i]);
        else if (i % 2 == 0)
            (&chunk.word[i / 8].x)[i / 2 % 4] = narrow_pair<DT>(value[i], value[i + 1]);
    }
    return chunk;
}

/* ---- codes ---- */

/* The codes of a chunk, `bytes` of them (16 or 8), of which `count` are meant and the others 0. */
template <int bytes, bool FAST>
static __device__ __forceinline__ void store_codes(const quantize_args *a, int64_t row, int64_t at,
                                                   uint4 code, int64_t count) {
    uint8_t *to = a->codes + row * a->code_stride + at;
    bool whole = FAST || (a->aligned_codes && count >= bytes);
    if (whole && bytes == 16)
        *(uint4 *)to = code;
    else if (whole)
        *(uint2 *)to = make_uint2(code.x, code.y);
    for (int i = 0; !whole && i < bytes && at + i < a->code_columns; i++) {
        uint32_t word = i < 4 ? code.x : i < 8 ? code.y : i < 12 ? code.z : code.w;
        to[i] = i < count ? (uint8_t)(word >> (i % 4 * 8)) : 0;
    }
}

/* The e2m1 code of a value, rounded to nearest even: from 1 on by its bits, below as a multiple of
 * a half. NaN is +6, as with cvt.rn.satfinite. */
static __device__ __forceinline__ uint32_t e2m1_code(float value) {
    uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    uint32_t large =
        (magnitude + 0x1fffffu + (magnitude >> 22 & 1) >> 22) - 252; /* 1.0 is code 2 */
    uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p22f)) & 3;
    uint32_t code = magnitude < 0x3f800000u ? small : min(large, 7u);
    return magnitude > 0x7f800000u ? 7u : code | bits >> 28 & 8;
}

static __device__ __forceinline__ uint4 e2m1_codes(const float (&value)[16]) {
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        word[i / 8] |= e2m1_code(value[i]) << (i % 8 * 4);
    return make_uint4(word[0], word[1], 0, 0);
}

/* block scale = e4m3(amax / (6 * scale_2)); codes of value / (block scale * scale_2), 0 where that
 * product is. */
static __device__ __forceinline__ uint4 quantize_nvfp4(float (&value)[16], float scale_2,
                                                       uint8_t *block_scale) {
    float amax = __uint_as_float(moq_amax_bits(value));
    uint32_t code = moq_e4m3_pair(__fdiv_rn(amax, __fmul_rn(6.0f, scale_2)), 0.0f);
    float block = __half2float(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, __NV_E4M3));
    float step = __fmul_rn(block, scale_2);
    *block_scale = (uint8_t)code;
    if (step == 0.0f)
        return make_uint4(0, 0, 0, 0);
    moq_divide(value, step, step > 1e-12f && step < 1e30f && amax < 1e26f);
    return e2m1_codes(value);
}

/* Quantizes a chunk and stores it. All lanes of a warp call this; those whose chunk is not
 * `present` only take part in the maximum of a group. `scale` is that of the tensor, its reciprocal
 * for E4M3_TENSOR, or of the token. */
template <int DT, bool FAST, int MODE>
static __device__ __forceinline__ void emit(const quantize_args *a, int64_t row, int64_t column,
                                            bool present, const moq_chunk &chunk, float scale) {
    float value[16];
    widen<DT>(chunk, value);
    if (MODE == MOQ_INPUT_E4M3_GROUP)
        scale = moq_group_scale(
            __uint_as_float(moq_max_of_lanes(present ? moq_amax_bits(value) : 0, 8)));
    if (!present)
        return;
    if (MODE == MOQ_INPUT_NVFP4) {
        uint8_t *to = (uint8_t *)a->scales + row * a->scale_row + column / 16 * a->scale_group;
        uint4 code = quantize_nvfp4(value, scale, to);
        store_codes<8, FAST>(a, row, column / 2, code, 8);
        return;
    }
    if (MODE == MOQ_INPUT_E4M3_GROUP && column % 128 == 0)
        ((float *)a->scales)[row * a->scale_row + column / 128 * a->scale_group] = scale;
    uint4 code = MODE == MOQ_INPUT_E4M3_TENSOR ? moq_codes_multiplied(value, scale)
                                               : moq_codes_divided(value, scale);
    store_codes<16, FAST>(a, row, column, code, a->k - column);
}

/* ---- scales of the whole tensor ---- */

/* Every warp finds it anew. E4M3_TENSOR: the reciprocal, as `emit` takes it. */
template <int MODE> static __device__ __forceinline__ float tensor_scale(const quantize_args *a) {
    if (MODE != MOQ_INPUT_E4M3_TENSOR && MODE != MOQ_INPUT_NVFP4)
        return 0.0f;
    float scale = a->given ? *a->given : a->scale;
    if (a->part_count) {
        uint32_t most = 0;
        for (int i = threadIdx.x % 32; i < a->part_count; i += 32)
            most = max(most, a->parts[i]);
        float amax = __uint_as_float(__reduce_max_sync(0xffffffffu, most));
        if (MODE == MOQ_INPUT_NVFP4) {
            scale = __fdiv_rn(amax, 2688.0f);
            scale = scale == 0.0f ? 1.0f : scale;
        } else {
            scale = moq_tensor_scale(amax);
        }
        if (a->found && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x + threadIdx.y == 0)
            *a->found = scale;
    }
    return MODE == MOQ_INPUT_E4M3_TENSOR ? __fdiv_rn(1.0f, scale) : scale;
}

/* Writes the largest magnitude that a block has met. All its threads call this. */
static __device__ __forceinline__ void store_part(const quantize_args *a, uint32_t most) {
    __shared__ uint32_t room[32];
    int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
    most = __reduce_max_sync(0xffffffffu, most);
    if (thread % 32 == 0)
        room[thread / 32] = most;
    __syncthreads();
    if (thread >= 32)
        return;
    most = __reduce_max_sync(0xffffffffu, thread < warps ? room[thread] : 0);
    if (thread == 0)
        a->parts_out[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = most;
}

/* ---- scales of at most a group: spans ---- */

template <int DT, bool FAST, int MODE, class SOURCE>
static __global__ void __launch_bounds__(256)
    quantize_spans(const __grid_constant__ quantize_args a, const __grid_constant__ SOURCE source) {
    constexpr int HELD = held_chunks<DT>();
    const int threads = blockDim.x;
    uint32_t most = 0;
    launch_dependents();
    wait_for_predecessor();
    float scale = tensor_scale<MODE>(&a);
    int64_t chunks = (a.k + 15) / 16, span = (int64_t)HELD * threads;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    for (; row < a.m; row += (int64_t)gridDim.x * blockDim.y) {
        for (int64_t base = blockIdx.y * span; base < chunks; base += gridDim.y * span) {
            moq_chunk held[HELD] = {};
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                int64_t chunk = base + j * threads + threadIdx.x;
                if (chunk < chunks)
                    held[j] = source.template load<DT, FAST>(&a, row, chunk * 16);
            }
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                int64_t chunk = base + j * threads + threadIdx.x;
                if (MODE == MOQ_FIND_AMAX)
                    most = max(most, chunk_amax<DT>(held[j]));
                else
                    emit<DT, FAST, MODE>(&a, row, chunk * 16, chunk < chunks, held[j], scale);
            }
        }
    }
    if (MODE == MOQ_FIND_AMAX)
        store_part(&a, most);
}

/* ---- scales of rows ---- */

/* The largest of a row's threads. `room` is 32 words, apart from those of the call before. */
static __device__ __forceinline__ uint32_t max_of_row(uint32_t bits, uint32_t *room) {
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (blockDim.x == 32)
        return bits;
    if (threadIdx.x % 32 == 0)
        room[threadIdx.x / 32] = bits;
    __syncthreads();
    uint32_t other = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0;
    return __reduce_max_sync(0xffffffffu, other);
}

template <int DT, bool FAST, class SOURCE>
static __global__ void __launch_bounds__(1024)
    quantize_tokens(const __grid_constant__ quantize_args a,
                    const __grid_constant__ SOURCE source) {
    constexpr int HELD = held_chunks<DT>();
    constexpr int MODE = MOQ_INPUT_E4M3_TOKEN;
    __shared__ uint32_t room[2][32];
    const int threads = blockDim.x;
    launch_dependents();
    wait_for_predecessor();
    int64_t chunks = (a.k + 15) / 16;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    for (int turn = 0; row < a.m; row += (int64_t)gridDim.x * blockDim.y, turn ^= 1) {
        moq_chunk held[HELD] = {};
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            if (chunk < chunks)
                held[j] = source.template load<DT, FAST>(&a, row, chunk * 16);
        }
#pragma unroll
        for (int j = 0; j < HELD; j++)
            most = max(most, chunk_amax<DT>(held[j]));
        for (int64_t chunk = HELD * threads + threadIdx.x; chunk < chunks; chunk += threads)
            most = max(most, chunk_amax<DT>(source.template load<DT, FAST>(&a, row, chunk * 16)));
        float scale = moq_token_scale(__uint_as_float(max_of_row(most, room[turn])));
        if (threadIdx.x == 0)
            ((float *)a.scales)[row] = scale;
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int64_t chunk = j * threads + threadIdx.x;
            emit<DT, FAST, MODE>(&a, row, chunk * 16, chunk < chunks, held[j], scale);
        }
        for (int64_t chunk = HELD * threads + threadIdx.x; chunk < chunks; chunk += threads)
            emit<DT, FAST, MODE>(&a, row, chunk * 16, true,
                                 source.template load<DT, FAST>(&a, row, chunk * 16), scale);
    }
}

#endif
