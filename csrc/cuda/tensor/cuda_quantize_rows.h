/* Kernels that quantize values from a source to codes and scales; a file instantiates them for one
 * source.
 *
 * A thread has chunks of values, T threads (a multiple of 32) a row or a span of it; with rows of
 * up to 32 chunks a block has eight rows, one a warp. If a scale depends on no more than 128
 * neighbours, rows are cut into spans, and nothing but memory is waited for. If it depends on a
 * whole row, the row's chunks stay in registers between the passes over it, as far as they fit; the
 * others are read again.
 *
 * Bound: instructions for rows of whole aligned chunks of 16-bit values, as some 20 of them fit
 * into the time in which memory moves the 3 bytes of a value. So maxima, sums and products of pairs
 * are taken in 16 bits if they round to the same, and quotients with a reciprocal of two parts.
 * With few tokens the time is that of one thread, and chunks are shorter unless a row's own work
 * takes the time. Few long rows are spread over a cluster of blocks, which exchange what their
 * warps found. */
#ifndef MOQ_CUDA_TENSOR_CUDA_QUANTIZE_ROWS_H
#define MOQ_CUDA_TENSOR_CUDA_QUANTIZE_ROWS_H

#include "core/swizzle.h"
#include "cuda/tensor/cuda_quantize.h"
#include "cuda/tensor/cuda_quantize_chunk.h"

namespace moq::quantization {

/* Mode that writes values instead of codes. */
#define MOQ_WRITE_VALUES MOQ_INPUT_AS_IS
/* Mode that writes the largest magnitude of each block instead of codes: the first of two kernels
 * for one scale. */
#define MOQ_FIND_AMAX ((moq_input_mode)(MOQ_INPUT_NVFP4 + 1))

/* Arguments of all kernels. Those that every kernel reads come first: parameters arrive a line at a
 * time. */
typedef struct {
    int64_t m, k;
    const float *given;    /* the scale, or NULL: `scale` */
    float scale;           /* 0: found from the partial maxima */
    const uint32_t *parts; /* bits of maxima, `part_count` of them */
    uint32_t *parts_out;
    int part_count;
    bool aligned_codes;
    uint8_t *codes;
    int64_t code_stride, code_columns;
    void *scales;
    int64_t scale_row, scale_group, scale_tiles;
    bool next_is_busy;
    float *found; /* place of the scale of the whole tensor, or NULL */
    quantize_input x;
} quantize_args;

/* Plan of a kernel: rows of any strides and lengths, NVFP4 too; or whole aligned chunks of 16-bit
 * values, with the values of a chunk and the chunks of a thread. SPREAD: rows on a cluster of
 * blocks. */
typedef enum { MOQ_ANY_ROWS, MOQ_8X1, MOQ_8X1_SPREAD, MOQ_16X1, MOQ_16X2, MOQ_16X4 } moq_row_plan;

/* Returns the values of a chunk. */
static __host__ __device__ constexpr int chunk_values(int plan) {
    return plan == MOQ_8X1 || plan == MOQ_8X1_SPREAD ? 8 : 16;
}

/* Returns the chunks that a thread keeps. */
static __host__ __device__ constexpr int kept_chunks(int dtype, int plan) {
    return plan == MOQ_16X4                              ? 4
           : chunk_values(plan) == 8 || plan == MOQ_16X1 ? 1
           : plan == MOQ_16X2 || dtype != MOQ_DT_F32     ? 2
                                                         : 1;
}

/* Returns true if rows are spread over clusters; code for older chips does not have them and is not
 * called. */
static __host__ __device__ constexpr bool is_spread(int plan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return false;
#else
    return plan == MOQ_8X1_SPREAD;
#endif
}

/* Index type of chunks in a row: whole chunks are few. */
template <int WAY> struct chunk_place {
    typedef int type;
};
template <> struct chunk_place<MOQ_ANY_ROWS> {
    typedef int64_t type;
};

/* Returns the instance of a kernel for a dtype and a plan. */
#define MOQ_INSTANCE(dtype, WAY, kernel, ...)                                                      \
    ((dtype) == MOQ_DT_BF16 ? (const void *)kernel<MOQ_DT_BF16, WAY, ##__VA_ARGS__>                \
                            : (const void *)kernel<MOQ_DT_F16, WAY, ##__VA_ARGS__>)
#define MOQ_GENERAL(dtype, kernel, ...)                                                            \
    ((dtype) == MOQ_DT_F32 ? (const void *)kernel<MOQ_DT_F32, MOQ_ANY_ROWS, ##__VA_ARGS__>         \
                           : MOQ_INSTANCE(dtype, MOQ_ANY_ROWS, kernel, ##__VA_ARGS__))
/* Instances of a file, and their threads. */
#define MOQ_SHORT_OR_LONG(dtype, plan, kernel, few, many, ...)                                     \
    ((plan) == (few)    ? MOQ_INSTANCE(dtype, few, kernel, ##__VA_ARGS__)                          \
     : (plan) == (many) ? MOQ_INSTANCE(dtype, many, kernel, ##__VA_ARGS__)                         \
                        : MOQ_GENERAL(dtype, kernel, ##__VA_ARGS__))

/* Threads of a block of the norm's kernels. */
static __host__ __device__ constexpr int norm_threads(int plan) {
    return plan == MOQ_16X2 ? 128 : plan == MOQ_16X4 ? 512 : 1024;
}

/* Each kernel takes a quantize_args and a source. `mode` may be MOQ_FIND_AMAX. */
const void *moq_silu_kernel(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan);
const void *moq_norm_kernel(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan,
                            bool wide_weight);

/* source: gate and up, halves of a row */
struct silu_source {
    quantize_input up;
    template <int DT, int N> struct raw {
        chunk<DT, N> gate, up;
    };
    template <int DT, int N, bool WHOLE>
    __device__ __forceinline__ raw<DT, N> fetch(const quantize_args *a, int64_t row,
                                                int64_t column) const {
        return {load_chunk<DT, N, WHOLE>(&a->x, row, column, a->k),
                load_chunk<DT, N, WHOLE>(&up, row, column, a->k)};
    }
    template <int DT, int N> static __device__ chunk<DT, N> finish(const raw<DT, N> &values);
};

typedef struct {
    quantize_input residual; /* data is NULL without one */
    quantize_input weight;   /* weights, one row */
    bool wide_weight;        /* float32 */
    bool aligned_out;
    void *residual_out; /* [M, K] */
    void *value_out;    /* [M, K]: values beside codes, or NULL */
    bool aligned_values;
    float columns, eps;
    int parts; /* partial sums of a row, each of a warp's chunks */
} norm_source;

/* Returns the place of a row's chunk; the last one's beyond the end, so that all threads can
 * load. */
template <class PLACE>
static __device__ __forceinline__ PLACE chunk_or_last(PLACE chunk, PLACE chunks) {
    PLACE last = min(chunk, chunks - 1);
    return sizeof last == 4 ? last : max(last, (PLACE)0); /* a row of whole chunks has one */
}

/* ---- where a thread stands ---- */

template <int WAY> static __device__ __forceinline__ int64_t first_row(void) {
    if constexpr (is_spread(WAY))
        return blockIdx.x / blocks_in_cluster();
    return (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
}

/* Threads of a row, possibly of several blocks, and this one's place among them. */
template <int WAY> static __device__ __forceinline__ int threads_of_row(void) {
    if constexpr (is_spread(WAY))
        return blockDim.x * blocks_in_cluster();
    return blockDim.x;
}

template <int WAY> static __device__ __forceinline__ int thread_of_row(void) {
    if constexpr (is_spread(WAY))
        return rank_in_cluster() * blockDim.x + threadIdx.x;
    return threadIdx.x;
}

/* ---- rows on a cluster of blocks ---- */

/* Returns the warps that have values of a row. */
#define MOQ_MOST_TOLD 128

/* An exchange of a word of each warp with all blocks of the cluster. */
typedef struct {
    uint64_t told; /* barrier */
    uint32_t word[MOQ_MOST_TOLD];
} exchange;

/* Opens the exchanges of all threads of the cluster, of so many warps, and waits for the cluster
 * before any word is sent. */
static __device__ __forceinline__ void open_exchanges(exchange *e, int count, int warps) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; i++)
            mbarrier_init(shared_address(&e[i].told), 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; i++)
            mbarrier_expect(shared_address(&e[i].told), warps * 4);
    }
    __syncwarp();
    cluster_arrive();
}

/* Sends the word of a warp, which all its lanes have. Returns when the words of all `warps` are
 * here. */
static __device__ __forceinline__ void tell(exchange *e, int warp, int warps, uint32_t word) {
    uint32_t rank = threadIdx.x % 32, told = shared_address(&e->told);
    if (warp < warps && rank < blocks_in_cluster())
        send_word(address_in(rank, shared_address(&e->word[warp])), word, address_in(rank, told));
    mbarrier_wait(told, 0);
}

/* Returns the maximum over a row's threads. */
static __device__ __forceinline__ uint32_t max_of_cluster(exchange *e, int warp, int warps,
                                                          uint32_t bits) {
    tell(e, warp, warps, __reduce_max_sync(0xffffffffu, bits));
    bits = 0;
    for (int i = threadIdx.x % 32; i < warps; i += 32)
        bits = max(bits, e->word[i]);
    return __reduce_max_sync(0xffffffffu, bits);
}

/* ---- codes ---- */

/* Stores the codes of a chunk, `bytes` of them (16 or 8): `count` codes, then zeros. */
template <int bytes, int WAY>
static __device__ __forceinline__ void store_codes(const quantize_args *a, int64_t row, int64_t at,
                                                   uint4 code, int64_t count) {
    uint8_t *to = a->codes + row * a->code_stride + at;
    bool whole = WAY != MOQ_ANY_ROWS || (a->aligned_codes && count >= bytes);
    if (whole && bytes == 16)
        *(uint4 *)to = code;
    else if (whole)
        *(uint2 *)to = make_uint2(code.x, code.y);
    for (int i = 0; !whole && i < bytes && at + i < a->code_columns; i++) {
        uint32_t word = i < 4 ? code.x : i < 8 ? code.y : i < 12 ? code.z : code.w;
        to[i] = i < count ? (uint8_t)(word >> (i % 4 * 8)) : 0;
    }
}

/* Stores the values of a chunk in rows [M, K] without gaps; `aligned`: each row at a multiple of 16
 * bytes. */
template <int DT, int WAY, int N>
static __device__ __forceinline__ void store_values(void *rows, bool aligned, int64_t k,
                                                    const chunk<DT, N> &c, int64_t row,
                                                    int64_t column) {
    constexpr int size = DT == MOQ_DT_F32 ? 4 : 2;
    uint8_t *to = (uint8_t *)rows + (row * k + column) * size;
    bool whole = WAY != MOQ_ANY_ROWS || (aligned && column + N <= k);
#pragma unroll
    for (int i = 0; i < c.words; i += 4) {
        if (whole)
            ((uint4 *)to)[i / 4] =
                make_uint4(c.word[i], c.word[i + 1], c.word[i + 2], c.word[i + 3]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (whole || column + i >= k)
            continue;
        if (DT == MOQ_DT_F32)
            ((uint32_t *)to)[i] = c.word[i % c.words];
        else
            ((uint16_t *)to)[i] = (uint16_t)(c.word[i / 2] >> (i % 2 * 16));
    }
}

/* Returns the e2m1 code of a value, rounded to nearest even: from 1 on by its bits, below as a
 * multiple of a half. NaN becomes +6, as with cvt.rn.satfinite. */
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

/* Makes NVFP4 codes: block scale = e4m3(amax / (6 * scale_2)), codes of value / (block scale *
 * scale_2), 0 if that product is 0. */
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

/* Combines each part over LANES neighbours, nearest first: lane l has part[l % COUNT]. At each
 * level a lane gives half of its parts for the other lane's half of the remaining ones. */
template <int LANES, int COUNT, class T, class OP>
static __device__ __forceinline__ T fold_lanes(T (&part)[COUNT], OP combine) {
    int left = COUNT;
#pragma unroll
    for (int i = 1; i < LANES; i *= 2) {
        if (left == 1) {
            part[0] = combine(part[0], __shfl_xor_sync(0xffffffffu, part[0], i));
            continue;
        }
        left /= 2;
#pragma unroll
        for (int j = 0; j < COUNT / 2; j++) {
            if (j >= left)
                continue;
            bool odd = threadIdx.x & i;
            T mine = odd ? part[2 * j + 1] : part[2 * j];
            T other = odd ? part[2 * j] : part[2 * j + 1];
            part[j] = combine(mine, __shfl_xor_sync(0xffffffffu, other, i));
        }
    }
    return part[0];
}

/* Finds the scales of the groups of a thread's chunks, which lie `step` apart. One lane finds and
 * stores each. */
template <int DT, int N, int KEPT, class PLACE>
static __device__ __forceinline__ void
find_group_scales(const quantize_args *a, int64_t row, PLACE first, PLACE step, PLACE chunks,
                  const chunk<DT, N> (&kept)[KEPT], float (&scale)[KEPT]) {
    constexpr int LANES = 128 / N;
    uint32_t most[KEPT];
    int lane = threadIdx.x % LANES;
#pragma unroll
    for (int j = 0; j < KEPT; j++)
        most[j] = first + j * step < chunks ? chunk_amax(kept[j]) : 0;
    uint32_t amax = fold_lanes<LANES>(most, [](uint32_t x, uint32_t y) { return max(x, y); });
    float own = group_scale<DT>(__uint_as_float(amax));
    PLACE begin = first - lane + lane % KEPT * step;
    if (lane < KEPT && begin < chunks)
        ((float *)a->scales)[row * a->scale_row + begin / LANES * a->scale_group] = own;
#pragma unroll
    for (int j = 0; j < KEPT; j++)
        scale[j] =
            KEPT == 1 ? own : __shfl_sync(0xffffffffu, own, threadIdx.x % 32 / LANES * LANES + j);
}

/* Quantizes a chunk and stores it, or stores its values. `by` is the scale of the tensor, its
 * reciprocal for E4M3_TENSOR, or the scale of the token or group. */
template <int DT, int WAY, int MODE, int N>
static __device__ __forceinline__ void emit(const quantize_args *a, int64_t row, int64_t column,
                                            const chunk<DT, N> &c, const divisor &by) {
    if constexpr (MODE == MOQ_WRITE_VALUES) {
        store_values<DT, WAY>(a->codes, a->aligned_codes, a->k, c, row, column);
        return;
    }
    float value[N];
    widen(c, value);
    if constexpr (MODE == MOQ_INPUT_NVFP4) {
        int64_t group = column / 16;
        int64_t at = a->scale_tiles ? moq_swizzle_at(row, group, a->scale_tiles)
                                    : row * a->scale_row + group * a->scale_group;
        uint4 code = quantize_nvfp4(value, by.scale, (uint8_t *)a->scales + at);
        store_codes<8, WAY>(a, row, column / 2, code, 8);
        return;
    }
    if (MODE == MOQ_INPUT_E4M3_TENSOR) {
#pragma unroll
        for (int i = 0; i < N; i++)
            value[i] = __fmul_rn(value[i], by.scale);
    } else {
        divide<DT>(value, by);
    }
    uint4 code = make_uint4(moq_e4m3_word(value), moq_e4m3_word(value + 4), 0, 0);
    if (N == 16) {
        code.z = moq_e4m3_word(value + N - 8);
        code.w = moq_e4m3_word(value + N - 4);
    }
    store_codes<N, WAY>(a, row, column, code, a->k - column);
}

/* Quantizes the existing chunks of a thread. `by` is that of emit, except for E4M3_GROUP, whose
 * scales are found here: all lanes of a warp call this. */
template <int DT, int WAY, int MODE, int N, int KEPT, class PLACE>
static __device__ __forceinline__ void emit_chunks(const quantize_args *a, int64_t row, PLACE first,
                                                   PLACE step, PLACE chunks,
                                                   const chunk<DT, N> (&kept)[KEPT], divisor by) {
    float scale[KEPT];
    if (MODE == MOQ_INPUT_E4M3_GROUP)
        find_group_scales(a, row, first, step, chunks, kept, scale);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        if (MODE == MOQ_INPUT_E4M3_GROUP)
            by = divide_by<DT>(scale[j]);
        if (first + j * step < chunks)
            emit<DT, WAY, MODE>(a, row, (int64_t)(first + j * step) * N, kept[j], by);
    }
}

/* ---- scales of the whole tensor ---- */

/* Finds amax from the partial maxima; all lanes of a warp call this. */
template <int MODE> static __device__ __forceinline__ float scale_of_parts(const quantize_args *a) {
    uint32_t most = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < a->part_count; i += 32)
        most = max(most, a->parts[i]);
    float amax = __uint_as_float(__reduce_max_sync(0xffffffffu, most));
    if (MODE == MOQ_INPUT_E4M3_TENSOR)
        return moq_tensor_scale(amax);
    float scale = __fdiv_rn(amax, 2688.0f);
    return scale == 0.0f ? 1.0f : scale;
}

/* Finds the scale of the tensor, in every warp anew. E4M3_TENSOR: its reciprocal, as `emit` takes
 * it. */
template <int MODE> static __device__ __forceinline__ divisor tensor_scale(const quantize_args *a) {
    if (MODE != MOQ_INPUT_E4M3_TENSOR && MODE != MOQ_INPUT_NVFP4)
        return {};
    float scale = a->given ? *a->given : a->scale;
    if (a->part_count)
        scale = scale_of_parts<MODE>(a);
    return {MODE == MOQ_INPUT_E4M3_TENSOR ? __fdiv_rn(1.0f, scale) : scale, 0.0f, 0.0f};
}

/* Stores the scale that was found, even without rows. */
template <int MODE>
static __device__ __forceinline__ void store_tensor_scale(const quantize_args *a) {
    if ((MODE != MOQ_INPUT_E4M3_TENSOR && MODE != MOQ_INPUT_NVFP4) || !a->found ||
        blockIdx.x + blockIdx.y + threadIdx.y > 0 || threadIdx.x >= 32)
        return;
    float scale = scale_of_parts<MODE>(a);
    if (threadIdx.x == 0)
        *a->found = scale;
}

/* Writes the largest magnitude of a block. All its threads call this. */
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

/* Lets the next kernel start after this one has waited itself, unless the next has work of its own:
 * several started kernels of a chain would share a multiprocessor. With several chunks a thread it
 * is done between loads and arithmetic, which the compiler does not mix across it. */
template <int DT, int WAY, int MODE, class SOURCE>
static __global__ void __launch_bounds__(256)
    quantize_spans(const __grid_constant__ quantize_args a, const __grid_constant__ SOURCE source) {
    constexpr int N = chunk_values(WAY), KEPT = kept_chunks(DT, WAY);
    typedef typename chunk_place<WAY>::type place;
    const int threads = blockDim.x;
    uint32_t most = 0;
    if (a.next_is_busy)
        launch_dependents();
    touch_parameter(a);
    touch_parameter(source);
    wait_for_predecessor();
    if (KEPT == 1)
        launch_dependents();
    divisor by = {};
    if (KEPT > 1)
        by = tensor_scale<MODE>(&a);
    const place chunks = (place)((a.k + N - 1) / N), span = (place)KEPT * threads;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    for (; row < a.m; row += (int64_t)gridDim.x * blockDim.y) {
        for (place base = blockIdx.y * span; base < chunks; base += gridDim.y * span) {
            typename SOURCE::template raw<DT, N> raw[KEPT];
            const place first = base + threadIdx.x;
#pragma unroll
            for (int j = 0; j < KEPT; j++)
                raw[j] = source.template fetch<DT, N, WAY != MOQ_ANY_ROWS>(
                    &a, row, (int64_t)chunk_or_last<place>(first + j * threads, chunks) * N);
            if (KEPT > 1)
                launch_dependents();
            else
                by = tensor_scale<MODE>(&a); /* after the loads: it waits for its own */
            chunk<DT, N> kept[KEPT];
#pragma unroll
            for (int j = 0; j < KEPT; j++) {
                kept[j] = SOURCE::finish(raw[j]);
                if (MODE == MOQ_FIND_AMAX)
                    most = max(most, chunk_amax(kept[j]));
            }
            if (MODE != MOQ_FIND_AMAX)
                emit_chunks<DT, WAY, MODE>(&a, row, first, (place)threads, chunks, kept, by);
        }
    }
    if (MODE == MOQ_FIND_AMAX)
        store_part(&a, most);
    store_tensor_scale<MODE>(&a);
}

/* ---- scales of rows ---- */

/* Returns the maximum over a row's threads. `room` is 32 words, apart from those of the call
 * before. */
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

template <int DT, int WAY, class SOURCE>
static __global__ void __launch_bounds__(1024)
    quantize_tokens(const __grid_constant__ quantize_args a,
                    const __grid_constant__ SOURCE source) {
    constexpr int N = chunk_values(WAY), KEPT = kept_chunks(DT, WAY);
    constexpr bool WHOLE = WAY != MOQ_ANY_ROWS;
    constexpr bool SPREAD = is_spread(WAY);
    constexpr int MODE = MOQ_INPUT_E4M3_TOKEN;
    typedef typename chunk_place<WAY>::type place;
    __shared__ uint32_t room[2][32];
    __shared__ exchange maxima[1];
    const int threads = threads_of_row<WAY>();
    const place first = thread_of_row<WAY>();
    const place chunks = (place)((a.k + N - 1) / N);
    const int warps = (int)((chunks + 31) / 32); /* only if rows are spread */
    if constexpr (SPREAD)
        open_exchanges(maxima, 1, warps);
    if (a.next_is_busy)
        launch_dependents();
    touch_parameter(a);
    touch_parameter(source);
    wait_for_predecessor();
    if (KEPT == 1)
        launch_dependents();
    int64_t row = first_row<WAY>();
    for (int turn = 0; row < a.m; row += (int64_t)gridDim.x * blockDim.y, turn ^= 1) {
        typename SOURCE::template raw<DT, N> raw[KEPT];
        chunk<DT, N> kept[KEPT];
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < KEPT; j++)
            raw[j] = source.template fetch<DT, N, WHOLE>(
                &a, row, (int64_t)chunk_or_last<place>(first + j * threads, chunks) * N);
        if (KEPT > 1)
            launch_dependents();
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            kept[j] = SOURCE::finish(raw[j]);
            most = max(most, chunk_amax(kept[j]));
        }
        for (place at = first + KEPT * threads; !WHOLE && at < chunks; at += threads)
            most = max(most, chunk_amax(SOURCE::finish(
                                 source.template fetch<DT, N, WHOLE>(&a, row, at * N))));
        if constexpr (SPREAD) {
            cluster_wait();
            most = max_of_cluster(maxima, first / 32, warps, most);
        } else {
            most = max_of_row(most, room[turn]);
        }
        float scale = token_scale<DT>(__uint_as_float(most));
        divisor by = divide_by<DT>(scale);
        if (first == 0)
            ((float *)a.scales)[row] = scale;
        emit_chunks<DT, WAY, MODE>(&a, row, first, (place)threads, chunks, kept, by);
        for (place at = first + KEPT * threads; !WHOLE && at < chunks; at += threads)
            emit<DT, WAY, MODE>(
                &a, row, at * N,
                SOURCE::finish(source.template fetch<DT, N, WHOLE>(&a, row, at * N)), by);
    }
}

/* Returns the kernel for values of a source. */
template <class SOURCE>
static const void *kernel_of(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan) {
    switch ((int)mode) {
    case MOQ_FIND_AMAX:
        return MOQ_SHORT_OR_LONG(dtype, plan, quantize_spans, MOQ_8X1, MOQ_16X2, MOQ_FIND_AMAX,
                                 SOURCE);
    case MOQ_INPUT_E4M3_TENSOR:
        return MOQ_SHORT_OR_LONG(dtype, plan, quantize_spans, MOQ_8X1, MOQ_16X2,
                                 MOQ_INPUT_E4M3_TENSOR, SOURCE);
    case MOQ_INPUT_E4M3_TOKEN:
        return plan == MOQ_16X2 ? MOQ_INSTANCE(dtype, MOQ_16X2, quantize_tokens, SOURCE)
                                : MOQ_GENERAL(dtype, quantize_tokens, SOURCE);
    case MOQ_INPUT_E4M3_GROUP:
        return MOQ_SHORT_OR_LONG(dtype, plan, quantize_spans, MOQ_8X1, MOQ_16X2,
                                 MOQ_INPUT_E4M3_GROUP, SOURCE);
    default:
        return MOQ_GENERAL(dtype, quantize_spans, MOQ_INPUT_NVFP4, SOURCE);
    }
}

} // namespace moq::quantization

#endif
