/* Rounds activations to the values of their codes: see cuda_round.h. A block has a row of x; the
 * scale of a row, or of all of x, comes from an earlier pass (find_row_amax). */
#include "core/formats.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/device/round.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_round.h"

namespace moq {

#define THREADS 256

typedef struct {
    moq_rows x;
    int64_t m, k;
    moq_input_mode mode;
    const float *given; /* [partitions], or NULL */
    float *amax;        /* [m] */
    float *scale;       /* [partitions or 1, m] */
    moq_dtype to;
    uint8_t *values; /* [partitions or 1, m, K] */
} round_args;

static __device__ __forceinline__ float block_max(float value) {
    __shared__ float most[THREADS / 32];
    uint32_t bits = moq_max_of_lanes(__float_as_uint(value), 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        most[threadIdx.x / 32] = __uint_as_float(bits);
    __syncthreads();
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++)
        all = max(all, __float_as_uint(most[i]));
    return __uint_as_float(all);
}

/* Returns the largest magnitude of the block's row, in all threads; NaN is above all. */
static __device__ __forceinline__ float row_amax(const round_args &a) {
    float most = 0.0f;
    for (int64_t column = threadIdx.x * 16; column < a.k; column += THREADS * 16) {
        float value[16];
        moq_load_values(&a.x, blockIdx.x, column, a.k, value);
        most = __uint_as_float(max(__float_as_uint(most), moq_amax_bits(value)));
    }
    return block_max(most);
}

static __global__ void __launch_bounds__(THREADS)
    find_row_amax(const __grid_constant__ round_args a) {
    launch_dependents();
    wait_for_predecessor();
    float most = row_amax(a);
    if (threadIdx.x == 0)
        a.amax[blockIdx.x] = most;
}

/* Returns the scale of a row: given, of all of x, or its own. */
static __device__ __forceinline__ float scale_of_row(const round_args &a) {
    if (a.given)
        return a.given[blockIdx.y];
    if (a.mode == MOQ_INPUT_INT8) {
        float scale = __fdiv_rn(row_amax(a), MOQ_INT8_MAX);
        return scale < 1.17549435e-38f ? 1.0f : scale; /* FLT_MIN */
    }
    float most = 0.0f;
    for (int64_t i = threadIdx.x; i < a.m; i += THREADS)
        most = __uint_as_float(max(__float_as_uint(most), __float_as_uint(a.amax[i])));
    return moq_tensor_scale(block_max(most));
}

static __device__ __forceinline__ void store_int8(uint8_t *to, const float (&value)[16]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        word[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            word[i] |= ((uint32_t)__float2int_rn(value[4 * i + j]) & 0xffu) << 8 * j;
    }
    *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
}

static __device__ __forceinline__ void store_16_bits(uint8_t *to, const float (&value)[16],
                                                     moq_dtype dtype) {
    uint32_t pair[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        pair[i] = moq_narrow_pair(dtype, value[2 * i], value[2 * i + 1]);
    *(uint4 *)to = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    *(uint4 *)(to + 16) = make_uint4(pair[4], pair[5], pair[6], pair[7]);
}

/* Rounds a row of x to the values of its codes. int8 has no NaN: the scale of the row is then one.
 */
static __global__ void __launch_bounds__(THREADS) round_rows(const __grid_constant__ round_args a) {
    launch_dependents();
    wait_for_predecessor();
    float scale = scale_of_row(a), inverse = __frcp_rn(scale);
    bool nan = false, codes = a.to == MOQ_DT_I8;
    uint8_t *to = a.values + ((int64_t)blockIdx.y * a.m + blockIdx.x) * a.k * (codes ? 1 : 2);
    for (int64_t column = threadIdx.x * 16; column < a.k; column += THREADS * 16) {
        float value[16];
        moq_load_values(&a.x, blockIdx.x, column, a.k, value);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float quotient = __fmul_rn(value[i], inverse);
            value[i] = a.mode == MOQ_INPUT_INT8 ? round_int8(quotient) : round_e4m3(quotient);
            nan |= isnan(quotient);
        }
        if (codes)
            store_int8(to + column, value);
        else
            store_16_bits(to + column * 2, value, a.to);
    }
    nan = __syncthreads_or(nan) && codes;
    if (threadIdx.x == 0)
        a.scale[(int64_t)blockIdx.y * a.m + blockIdx.x] =
            nan ? __uint_as_float(0x7fffffffu) : scale;
}

/* ---- launch ---- */

static int64_t copies_of(const moq_linear_call *call) {
    return call->input_scale && !call->spec->one_input_scale ? call->spec->partition_count : 1;
}

static int64_t copy_bytes(const moq_cuda_round *r) {
    return r->call->m * r->call->spec->in_features * (int64_t)moq_dtype_size(r->to);
}

/* Returns the largest magnitudes [m], and behind them the scales [copies, m]. */
static float *amax_of(const moq_cuda_round *r) {
    return (float *)(r->memory + copies_of(r->call) * copy_bytes(r));
}

extern "C" int64_t moq_cuda_round_bytes(const moq_cuda_round *r) {
    return copies_of(r->call) * copy_bytes(r) +
           (1 + copies_of(r->call)) * r->call->m * (int64_t)sizeof(float);
}

extern "C" moq_rounded moq_cuda_rounded(const moq_cuda_round *r, int partition) {
    int64_t copy = copies_of(r->call) > 1 ? partition : 0;
    moq_rounded found = {r->memory + copy * copy_bytes(r), amax_of(r) + (1 + copy) * r->call->m};
    return found;
}

static moq_status launch(const moq_cuda_round *r, const char *what, const void *kernel,
                         unsigned copies, round_args *args, moq_err *err) {
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = dim3((unsigned)r->call->m, copies),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)r->call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" moq_status moq_cuda_round_rows(const moq_cuda_round *r, const char *what, moq_err *err) {
    const moq_linear_call *call = r->call;
    round_args args = {};
    args.x = moq_rows_of(call->x);
    args.m = call->m;
    args.k = call->spec->in_features;
    args.mode = call->spec->input;
    args.given = call->input_scale;
    args.amax = amax_of(r);
    args.scale = args.amax + call->m;
    args.to = r->to;
    args.values = r->memory;
    if (!call->input_scale && args.mode != MOQ_INPUT_INT8)
        MOQ_TRY(launch(r, what, (const void *)find_row_amax, 1, &args, err));
    return launch(r, what, (const void *)round_rows, (unsigned)copies_of(call), &args, err);
}

} // namespace moq
