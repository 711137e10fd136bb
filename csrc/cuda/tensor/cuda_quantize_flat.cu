/* Quantization of contiguous tensors (cuda_quantize_flat.h):
 *
 *     codes = e4m3(x * (1 / scale))                                       the scale given;
 *     codes = e4m3(x / scale), scale = max(amax / 448, 1 / (448 * 512))   one for a row;
 *     codes = e4m3(x / scale), scale = max(amax, 1e-10) / 448             one for 128 columns.
 *
 * 8 threads have a group. The 16 groups of a block are those of a row, or of 4 rows if the scales
 * of a group's rows are neighbours, so that a block writes neighbours.
 *
 * Bound: with few tokens the latency up to the first load. A kernel that runs once between two
 * others finds neither its code nor its parameters in a cache. The kernels of cuda_quantize_rows.h,
 * for rows of every kind, take 0.3 to 0.5 us more (docs/lab/cublaslt.md). With many tokens memory
 * bounds it. */
#include "cuda/tensor/cuda_quantize_flat.h"

#include "cuda/runtime/launch.h"

namespace moq::quantization {

#define THREADS 256
#define N       16 /* values of a thread */
/* Values up to which a thread has half as many: an H200 has threads for four times as many. */
#define FEW (1 << 20)

#define TOKEN_CHUNKS 2 /* chunks of a thread that has a part of a row */
#define MOST_THREADS 1024
/* Values from which rows have large blocks, of 32 registers a thread instead of 48. They keep out
 * blocks of a GEMM, which start early. */
#define BUSY_COLUMNS 8192

#define GROUP_THREADS 128
#define LANES         (128 / N) /* threads of a group */
#define GROUPS        (GROUP_THREADS / LANES)
#define ROW_BITS      2 /* log2 of a block's rows if scales lie row by row */

/* Loads values from `at` * COUNT on. */
template <int DT, int COUNT>
static __device__ __forceinline__ chunk<DT, COUNT> load_flat(const uint4 *x, int64_t at) {
    chunk<DT, COUNT> c;
#pragma unroll
    for (int i = 0; i < COUNT / 8; i++) {
        uint4 four = x[at * (COUNT / 8) + i];
        c.word[4 * i] = four.x;
        c.word[4 * i + 1] = four.y;
        c.word[4 * i + 2] = four.z;
        c.word[4 * i + 3] = four.w;
    }
    return c;
}

static __device__ __forceinline__ void store_flat(uint8_t *codes, int64_t at,
                                                  const float (&value)[8]) {
    ((uint2 *)codes)[at] = make_uint2(moq_e4m3_word(value), moq_e4m3_word(value + 4));
}

static __device__ __forceinline__ void store_flat(uint8_t *codes, int64_t at,
                                                  const float (&value)[16]) {
    ((uint4 *)codes)[at] = moq_e4m3_codes(value);
}

/* Reorders 16 codes as moq_cuda_quantize.paired has them. */
static __device__ __forceinline__ void store_paired(uint8_t *codes, int64_t at,
                                                    const float (&value)[16]) {
    uint4 c = moq_e4m3_codes(value);
    ((uint4 *)codes)[at] = make_uint4(__byte_perm(c.x, c.z, 0x5410), __byte_perm(c.x, c.z, 0x7632),
                                      __byte_perm(c.y, c.w, 0x5410), __byte_perm(c.y, c.w, 0x7632));
}

template <int DT, int COUNT>
static __global__ void __launch_bounds__(THREADS)
    quantize_flat(const uint4 *x, const float *given, uint8_t *codes, int64_t chunks,
                  bool next_is_busy) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float value[COUNT];
    if (next_is_busy)
        launch_dependents();
    wait_for_predecessor();
    float scale = *given;
    if (at >= chunks)
        return;
    chunk<DT, COUNT> c = load_flat<DT, COUNT>(x, at);
    launch_dependents();
    float factor = __frcp_rn(scale);
    widen(c, value);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        value[i] = __fmul_rn(value[i], factor);
    store_flat(codes, at, value);
}

typedef struct {
    const uint4 *x;
    uint8_t *codes;
    float *scales;
    int64_t scale_row, scale_group;
    int m, groups; /* groups of a row */
    int row_bits;  /* a block has 1 << row_bits rows */
    bool next_is_busy;
} group_args;

template <int DT>
static __global__ void __launch_bounds__(GROUP_THREADS)
    quantize_flat_groups(const __grid_constant__ group_args a) {
    int lane = threadIdx.x % LANES, item = threadIdx.x / LANES;
    int row = (blockIdx.y << a.row_bits) + (item & ((1 << a.row_bits) - 1));
    int group = blockIdx.x * (GROUPS >> a.row_bits) + (item >> a.row_bits);
    bool inside = row < a.m && group < a.groups;
    float value[N];
    if (a.next_is_busy)
        launch_dependents();
    wait_for_predecessor();
    int64_t at = inside ? ((int64_t)row * a.groups + group) * LANES + lane : lane;
    chunk<DT, N> c = load_flat<DT, N>(a.x, at);
    launch_dependents();
    uint32_t most = chunk_amax(c);
#pragma unroll
    for (int i = 1; i < LANES; i *= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, i));
    float scale = group_scale<DT>(__uint_as_float(most));
    if (!inside)
        return;
    widen(c, value);
    divide<DT>(value, divide_by<DT>(scale));
    store_flat(a.codes, at, value);
    if (lane == 0)
        a.scales[row * a.scale_row + group * a.scale_group] = scale;
}

/* Quantizes by token, a block a row of `chunks` that its threads keep. PAIRED: rows of x are
 * `stride` chunks apart. */
template <int DT, bool PAIRED, int KEPT>
static __global__ void __launch_bounds__(MOST_THREADS)
    quantize_flat_tokens(const uint4 *x, float *scales, uint8_t *codes, int chunks,
                         bool next_is_busy, int64_t stride) {
    int64_t row = (int64_t)blockIdx.x * chunks, from = PAIRED ? blockIdx.x * stride : row;
    uint32_t most = 0;
    chunk<DT, N> c[KEPT];
    if (next_is_busy)
        launch_dependents();
    wait_for_predecessor();
#pragma unroll
    for (int j = 0; j < KEPT; j++) /* the last chunk more than once */
        c[j] = load_flat<DT, N>(x, from + min((int)(threadIdx.x + j * blockDim.x), chunks - 1));
    launch_dependents();
#pragma unroll
    for (int j = 0; j < KEPT; j++)
        most = max(most, chunk_amax(c[j]));
    float scale = token_scale<DT>(__uint_as_float(max_of_block(most)));
    divisor by = divide_by<DT>(scale);
    if (threadIdx.x == 0)
        scales[blockIdx.x] = scale;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        int at = threadIdx.x + j * blockDim.x;
        float value[N];
        widen(c[j], value);
        divide<DT>(value, by);
        if (at < chunks && PAIRED)
            store_paired(codes, row + at, value);
        else if (at < chunks)
            store_flat(codes, row + at, value);
    }
}

/* ---- launch ---- */

bool moq_quantize_suits_flat(const moq_cuda_quantize *q, const quantize_args *a) {
    if (q->paired)
        return a->m > 0;
    if (q->activation || q->x->dtype == MOQ_DT_F32 || a->m == 0 ||
        (a->m > 1 && (a->x.stride != a->k || a->code_stride != a->k)))
        return false;
    if (q->mode == MOQ_INPUT_E4M3_TENSOR)
        return q->given && a->m < INT32_MAX && a->k < INT32_MAX;
    if (q->mode == MOQ_INPUT_E4M3_TOKEN) /* in a chain the other kernels are as fast */
        return (q->in_turn || (q->next_is_busy && a->k > BUSY_COLUMNS)) &&
               a->k <= MOST_THREADS * TOKEN_CHUNKS * N && a->m <= INT32_MAX;
    return q->mode == MOQ_INPUT_E4M3_GROUP && a->k % 128 == 0 && a->m <= 65535;
}

static moq_status launch_given(const moq_cuda_quantize *q, const quantize_args *a,
                               moq_launch *launch, moq_err *err) {
    bool bf16 = q->x->dtype == MOQ_DT_BF16, few = a->m * a->k <= FEW, busy = a->next_is_busy;
    int64_t chunks = a->m * a->k / (few ? N / 2 : N);
    void *args[] = {(void *)&a->x.data, (void *)&a->given, (void *)&a->codes, &chunks, &busy};
    launch->grid = dim3((unsigned)((chunks + THREADS - 1) / THREADS));
    launch->block = dim3(THREADS);
    if (few)
        launch->kernel = bf16 ? (const void *)quantize_flat<MOQ_DT_BF16, N / 2>
                              : (const void *)quantize_flat<MOQ_DT_F16, N / 2>;
    else
        launch->kernel = bf16 ? (const void *)quantize_flat<MOQ_DT_BF16, N>
                              : (const void *)quantize_flat<MOQ_DT_F16, N>;
    return moq_cuda_launch(launch, args, err);
}

static moq_status launch_tokens(const moq_cuda_quantize *q, const quantize_args *a,
                                moq_launch *launch, moq_err *err) {
    int chunks = (int)(a->k / N);
    int64_t stride = chunks;
    void *args[] = {(void *)&a->x.data,       (void *)&a->scales,
                    (void *)&a->codes,        &chunks,
                    (void *)&a->next_is_busy, &stride};
    launch->grid = dim3((unsigned)a->m);
    launch->block = dim3((unsigned)((chunks + 32 * TOKEN_CHUNKS - 1) / (32 * TOKEN_CHUNKS) * 32));
    launch->kernel = q->x->dtype == MOQ_DT_BF16
                         ? (const void *)quantize_flat_tokens<MOQ_DT_BF16, false, TOKEN_CHUNKS>
                         : (const void *)quantize_flat_tokens<MOQ_DT_F16, false, TOKEN_CHUNKS>;
    return moq_cuda_launch(launch, args, err);
}

static moq_status launch_paired(const moq_cuda_quantize *q, const quantize_args *a,
                                moq_launch *launch, moq_err *err) {
    bool bf16 = q->x->dtype == MOQ_DT_BF16, wide = a->k > MOST_THREADS * TOKEN_CHUNKS * N;
    int chunks = (int)(a->k / N), kept = wide ? 2 * TOKEN_CHUNKS : TOKEN_CHUNKS;
    int64_t stride = a->x.stride / N;
    void *args[] = {(void *)&a->x.data,       (void *)&a->scales,
                    (void *)&a->codes,        &chunks,
                    (void *)&a->next_is_busy, &stride};
    launch->grid = dim3((unsigned)a->m);
    launch->block = dim3((unsigned)((chunks + 32 * kept - 1) / (32 * kept) * 32));
    if (wide)
        launch->kernel =
            bf16 ? (const void *)quantize_flat_tokens<MOQ_DT_BF16, true, 2 * TOKEN_CHUNKS>
                 : (const void *)quantize_flat_tokens<MOQ_DT_F16, true, 2 * TOKEN_CHUNKS>;
    else
        launch->kernel = bf16 ? (const void *)quantize_flat_tokens<MOQ_DT_BF16, true, TOKEN_CHUNKS>
                              : (const void *)quantize_flat_tokens<MOQ_DT_F16, true, TOKEN_CHUNKS>;
    return moq_cuda_launch(launch, args, err);
}

static moq_status launch_groups(const moq_cuda_quantize *q, const quantize_args *a,
                                moq_launch *launch, moq_err *err) {
    group_args g = {.x = (const uint4 *)a->x.data,
                    .codes = a->codes,
                    .scales = (float *)a->scales,
                    .scale_row = a->scale_row,
                    .scale_group = a->scale_group,
                    .m = (int)a->m,
                    .groups = (int)(a->k / 128),
                    .row_bits = a->scale_row == 1 ? ROW_BITS : 0,
                    .next_is_busy = a->next_is_busy};
    int groups = GROUPS >> g.row_bits, rows = 1 << g.row_bits;
    void *args[] = {&g};
    launch->grid =
        dim3((unsigned)((g.groups + groups - 1) / groups), (unsigned)((g.m + rows - 1) / rows));
    launch->block = dim3(GROUP_THREADS);
    launch->kernel = q->x->dtype == MOQ_DT_BF16 ? (const void *)quantize_flat_groups<MOQ_DT_BF16>
                                                : (const void *)quantize_flat_groups<MOQ_DT_F16>;
    return moq_cuda_launch(launch, args, err);
}

moq_status moq_quantize_flat(const moq_cuda_quantize *q, const quantize_args *a, moq_err *err) {
    moq_launch launch = {.what = "quantize", .stream = (cudaStream_t)q->stream, .pdl = !q->in_turn};
    if (q->paired)
        return launch_paired(q, a, &launch, err);
    return q->mode == MOQ_INPUT_E4M3_GROUP   ? launch_groups(q, a, &launch, err)
           : q->mode == MOQ_INPUT_E4M3_TOKEN ? launch_tokens(q, a, &launch, err)
                                             : launch_given(q, a, &launch, err);
}

} // namespace moq::quantization
