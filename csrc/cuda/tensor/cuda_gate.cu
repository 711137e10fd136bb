/* Logits of a router (core/gate.h has the formula).
 *
 * Layouts: x [tokens, H] and the weight [experts, H], rows at multiples of 16 bytes. The eight
 * blocks of a cluster split K of 16 experts, and the four warps of a block split its part. Sums of
 * warps meet in shared memory, those of blocks in the block that has the experts' outputs. A step
 * is 32 columns, of which a lane has eight neighbours, 16 bytes. Both operands permute the columns
 * of a product alike.
 *
 * Bound: latency, as half a megabyte for one token takes a kernel start, one load of the weight,
 * one of x, and the sums. So the weight is loaded before the kernel waits for its predecessor, and
 * a warp has but two steps of 2048 columns. */
#include "cuda/tensor/cuda_gate.h"

#include "cuda/device/ptx.h"
#include "cuda/runtime/launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moq::gate {

#define WARPS   4
#define THREADS (32 * WARPS)
#define SHARES  8  /* blocks of a cluster */
#define EXPERTS 16 /* experts of a cluster */
#define STEP    32 /* columns */
#define AHEAD   2  /* steps of a warp that are loaded at once */
#define MOST    64 /* tokens of a block */

typedef struct {
    const uint8_t *x, *weight;
    void *out;
    int64_t x_stride, weight_stride; /* bytes from row to row */
    int64_t tokens;
    int experts, steps;
} gate_args;

#if !defined(__CUDA_ARCH__) ||                                                                     \
    __CUDA_ARCH__ >= 900 /* clusters exist from compute capability 9.0 on */

/* A lane's weight in a step: row `lane / 4` of the experts and row `lane / 4 + 8`. */
typedef struct {
    uint4 low, high;
} step_rows;

static __device__ __forceinline__ uint4 load_four(const uint8_t *row, int step, int lane) {
    return *(const uint4 *)(row + (int64_t)step * STEP * 2 + lane % 4 * 16);
}

/* Loads the weight of up to AHEAD steps; zeros beyond the last. */
static __device__ __forceinline__ void load_weight(const gate_args &a, step_rows (&w)[AHEAD],
                                                   int expert, int first, int apart, int lane) {
    const uint8_t *row[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        row[i] = a.weight + min(expert + lane / 4 + i * 8, a.experts - 1) * a.weight_stride;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int step = first + i * apart;
        w[i] = {};
        if (step < a.steps)
            w[i] = {load_four(row[0], step, lane), load_four(row[1], step, lane)};
    }
}

template <int DT>
static __device__ __forceinline__ void multiply(float (&sum)[4], const step_rows &w, uint4 x) {
    const uint32_t first[4] = {w.low.x, w.high.x, w.low.y, w.high.y};
    const uint32_t second[4] = {w.low.z, w.high.z, w.low.w, w.high.w};
    const uint32_t of_first[2] = {x.x, x.y}, of_second[2] = {x.z, x.w};
    if constexpr (DT == MOQ_DT_BF16) {
        mma_bf16(sum, first, of_first);
        mma_bf16(sum, second, of_second);
    } else {
        mma_f16(sum, first, of_first);
        mma_f16(sum, second, of_second);
    }
}

/* Adds the products of up to AHEAD steps, of which `w` has the weight; all loads come first. */
template <int DT, int TILES>
static __device__ __forceinline__ void add_steps(const gate_args &a, float (&sum)[TILES][4],
                                                 const step_rows (&w)[AHEAD], int64_t token,
                                                 int first, int apart, int lane) {
    uint4 x[AHEAD][TILES];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int step = first + i * apart;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int64_t row = min(token + tile * 8 + lane / 4, a.tokens - 1);
            x[i][tile] = {};
            if (step < a.steps)
                x[i][tile] = load_four(a.x + row * a.x_stride, step, lane);
        }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply<DT>(sum[tile], w[i], x[i][tile]);
    }
}

template <int DT, int OUT>
static __device__ __forceinline__ void store(const gate_args &a, int64_t at, float value) {
    if constexpr (OUT == MOQ_DT_F32)
        ((float *)a.out)[at] = value;
    else if constexpr (DT == MOQ_DT_BF16)
        ((__nv_bfloat16 *)a.out)[at] = __float2bfloat16_rn(value);
    else
        ((__half *)a.out)[at] = __float2half_rn(value);
}

#endif

template <int DT, int OUT, int TILES>
static __global__ void __launch_bounds__(THREADS, 1)
    router_logits(const __grid_constant__ gate_args a) {
#if __CUDA_ARCH__ >= 900
    constexpr int TOKENS = TILES * 8, OWN = EXPERTS * TOKENS / SHARES; /* outputs of a block */
    __shared__ float part[WARPS][EXPERTS][TOKENS];
    __shared__ float box[SHARES][OWN]; /* partial sums of all blocks for the outputs of this one */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = (int)rank_in_cluster();
    const int expert = (int)blockIdx.x / SHARES * EXPERTS, apart = SHARES * WARPS;
    const int64_t token = (int64_t)blockIdx.y * MOST;
    int step = rank * WARPS + warp;
    float sum[TILES][4] = {};
    step_rows w[AHEAD];
    cluster_arrive();
    load_weight(a, w, expert, step, apart, lane);
    wait_for_predecessor();
    launch_dependents();
    add_steps<DT>(a, sum, w, token, step, apart, lane);
    for (step += AHEAD * apart; step < a.steps; step += AHEAD * apart) {
        load_weight(a, w, expert, step, apart, lane);
        add_steps<DT>(a, sum, w, token, step, apart, lane);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[warp][lane / 4 + i / 2 * 8][tile * 8 + lane % 4 * 2 + i % 2] = sum[tile][i];
    }
    __syncthreads();
    cluster_wait(); /* all blocks run, and their shared memory may be written */
    for (int i = threadIdx.x; i < EXPERTS * TOKENS; i += THREADS) {
        float whole = part[0][i / TOKENS][i % TOKENS];
#pragma unroll
        for (int other = 1; other < WARPS; other++)
            whole += part[other][i / TOKENS][i % TOKENS];
        store_remote(address_in(i / OWN, shared_address(&box[rank][i % OWN])), whole);
    }
    cluster_sync();
    if (threadIdx.x < OWN) {
        float whole = box[0][threadIdx.x];
#pragma unroll
        for (int other = 1; other < SHARES; other++)
            whole += box[other][threadIdx.x];
        const int place = rank * OWN + threadIdx.x, row = expert + place / TOKENS;
        const int64_t column = token + place % TOKENS;
        if (row < a.experts && column < a.tokens)
            store<DT, OUT>(a, column * a.experts + row, whole);
    }
#endif
}

template <int DT, int OUT> static const void *kernel_of(int64_t tokens) {
    return tokens <= 8    ? (const void *)router_logits<DT, OUT, 1>
           : tokens <= 16 ? (const void *)router_logits<DT, OUT, 2>
                          : (const void *)router_logits<DT, OUT, MOST / 8>;
}

extern "C" moq_status moq_cuda_gate(const moq_gate *gate, void *out, void *stream, moq_err *err) {
    const moq_tensor *x = &gate->x, *weight = &gate->weight;
    gate_args a = {.x = (const uint8_t *)x->data,
                   .weight = (const uint8_t *)weight->data,
                   .out = out,
                   .x_stride = x->stride[0] * 2,
                   .weight_stride = weight->stride[0] * 2,
                   .tokens = x->shape[0],
                   .experts = (int)weight->shape[0],
                   .steps = (int)(weight->shape[1] / STEP)};
    const bool wide = gate->dtype == MOQ_DT_F32;
    const void *kernel = x->dtype == MOQ_DT_BF16
                             ? (wide ? kernel_of<MOQ_DT_BF16, MOQ_DT_F32>(a.tokens)
                                     : kernel_of<MOQ_DT_BF16, MOQ_DT_BF16>(a.tokens))
                             : (wide ? kernel_of<MOQ_DT_F16, MOQ_DT_F32>(a.tokens)
                                     : kernel_of<MOQ_DT_F16, MOQ_DT_F16>(a.tokens));
    const int64_t groups = (a.tokens + MOST - 1) / MOST;
    if (!moq_cuda_is_recent(kernel))
        return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                        "router_logits: needs compute capability 9.0 or later");
    if (groups > 65535)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld tokens are more than a launch has",
                        (long long)a.tokens);
    moq_launch launch = {
        .what = "router_logits",
        .kernel = kernel,
        .grid = dim3((unsigned)((a.experts + EXPERTS - 1) / EXPERTS * SHARES), (unsigned)groups),
        .block = dim3(THREADS),
        .cluster = SHARES,
        .stream = (cudaStream_t)stream,
        .pdl = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::gate
