/* Routing of tokens (core/route.h has it operation by operation). Every operation is that of
 * cpu/route_token.h, so that ids and weights have the same bits.
 *
 * A warp has a token. Lane i % 32 has expert i, and keeps its experts in registers, N of them at
 * most: the 32 sums that make S are those of the lanes. A value is ranked as an integer key. The
 * best of all is found by a reduction of the warp, and among equals by one more, of indices. Groups
 * go through shared memory, as their members are neighbours and belong to different lanes.
 *
 * Bound: latency with few tokens: the start of a kernel, one load from memory, and the time of each
 * chosen expert in turn. Loops over experts are not unrolled, as the code of a kernel that runs
 * once comes from memory, too. The usual routing, softmax of the chosen experts' logits without a
 * bias or groups, has a kernel of its own (USUAL) with a fifth of the code. */
#include "cuda/device/ptx.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize_chunk.h"
#include "cuda/tensor/cuda_route.h"

namespace moq::routing {

using quantization::quantize_input;

#define WARPS  4 /* warps of a block, each with its own token */
#define LANES  MOQ_ROUTE_LANES
#define ALL    0xffffffffu
#define BLOCKS 0x7fffffff

#define MOST_SORTED 4 /* experts of a lane */

typedef struct {
    quantize_input logits;
    moq_dtype logits_dtype, bias_dtype;
    const void *bias; /* or NULL */
    int64_t bias_step;
    int64_t count; /* tokens */
    float *weights;
    int32_t *ids;
    const uint8_t *padding; /* [tokens], or NULL */
    moq_route_scoring scoring;
    bool divides_by_chosen; /* sum of the chosen u; else, for softmax, of all */
    float factor;
    int experts, top_k;
    int groups, top_groups;
    int group_lanes; /* lanes that share a group: a power of two */
} route_args;

static __device__ __forceinline__ float load_float(const void *data, moq_dtype dtype, int64_t at) {
    if (dtype == MOQ_DT_F32)
        return ((const float *)data)[at];
    return moq_widen_pair(((const uint16_t *)data)[at], dtype).x;
}

/* Returns the offset of a row without a single stride, by divisions. */
static __device__ __noinline__ int64_t offset_of_row(const quantize_input *logits, int64_t row) {
    return row_offset(logits, row);
}

/* ---- scores ---- */

/* Constant to add to a float so that its lowest bits are the nearest integer. */
#define RINT_MAGIC 12582912.0f

/* Returns exp(y) for y <= 0; 0 for a NaN. */
static __device__ __forceinline__ float exp_below(float y) {
    float in = y >= MOQ_ROUTE_LEAST ? y : MOQ_ROUTE_LEAST;
    float shifted = __fmaf_rn(in, MOQ_LOG2E, RINT_MAGIC), n = __fsub_rn(shifted, RINT_MAGIC);
    float r = __fmaf_rn(n, -MOQ_LN2_LOW, __fmaf_rn(n, -MOQ_LN2, in)), q = MOQ_EXP_C4;
    q = __fmaf_rn(q, r, MOQ_EXP_C3);
    q = __fmaf_rn(q, r, MOQ_EXP_C2);
    q = __fmaf_rn(q, r, MOQ_EXP_C1);
    q = __fmaf_rn(q, r, MOQ_EXP_C0);
    float e = __fadd_rn(1.0f, __fmaf_rn(q, __fmul_rn(r, r), r));
    e = __uint_as_float(__float_as_uint(e) + (__float_as_uint(shifted) << 23));
    return y >= MOQ_ROUTE_LEAST ? e : 0.0f;
}

static __device__ __forceinline__ float log1p_of(float e) {
    float z = __fdiv_rn(e, __fadd_rn(2.0f, e)), w = __fmul_rn(z, z), t = __fadd_rn(z, z);
    float p = MOQ_LOG1P_L3;
    p = __fmaf_rn(p, w, MOQ_LOG1P_L2);
    p = __fmaf_rn(p, w, MOQ_LOG1P_L1);
    p = __fmaf_rn(p, w, MOQ_LOG1P_L0);
    return __fmaf_rn(t, __fmul_rn(w, p), t);
}

/* Returns u of a logit; `most` is the largest logit of the token. */
static __device__ __forceinline__ float score(moq_route_scoring scoring, float x, float most) {
    if (scoring == MOQ_ROUTE_SOFTMAX || scoring == MOQ_ROUTE_TOPK_SOFTMAX)
        return exp_below(x == most ? 0.0f : __fsub_rn(x, most));
    float e = exp_below(-fabsf(x));
    if (scoring == MOQ_ROUTE_SIGMOID)
        return __fdiv_rn(x >= 0.0f ? 1.0f : e, __fadd_rn(1.0f, e));
    return __fsqrt_rn(__fadd_rn(x > 0.0f ? x : 0.0f, log1p_of(e)));
}

/* Returns the sum of a value of each lane as a tree: j and j + 16, then j and j + 8, down to
 * neighbours. */
static __device__ __forceinline__ float sum_of_lanes(float own) {
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2)
        own = __fadd_rn(own, __shfl_xor_sync(ALL, own, half));
    return own;
}

/* ---- keys ---- */

/* Returns a float as an integer of the same order: its bits, all but the sign inverted if negative.
 * A NaN is below all numbers, and experts that are no candidates below that. */
#define NAN_KEY (INT32_MIN + 1)
#define NO_KEY  INT32_MIN

static __device__ __forceinline__ int32_t key_of(float value) {
    int32_t bits = __float_as_int(__fadd_rn(value, 0.0f)); /* -0 becomes +0 */
    return value == value ? bits ^ ((bits >> 31) & INT32_MAX) : NAN_KEY;
}

/* Returns the float of a key; a NaN for NAN_KEY. */
static __device__ __forceinline__ float value_of(int32_t key) {
    return __int_as_float(key ^ ((key >> 31) & INT32_MAX));
}

/* A lane's best expert: the largest key, of equals the lower index. */
typedef struct {
    int32_t key, index;
} candidate;

/* Finds the best of keys `first` to `first` + N - 1, as a tree. */
template <int N>
static __device__ __forceinline__ candidate best_of_lane(const int32_t *key, int lane, int first) {
    if constexpr (N == 1) {
        return {key[0], first * LANES + lane};
    } else {
        candidate low = best_of_lane<N / 2>(key, lane, first);
        candidate high = best_of_lane<N / 2>(key + N / 2, lane, first + N / 2);
        return high.key > low.key ? high : low;
    }
}

/* Returns true if a lane's best is the best of the warp. */
static __device__ __forceinline__ bool is_best(candidate own) {
    int32_t most = __reduce_max_sync(ALL, own.key);
    bool mine = own.key == most;
    uint32_t equals = __ballot_sync(ALL, mine);
    if (equals & (equals - 1)) {
        int32_t least = __reduce_min_sync(ALL, mine ? own.index : INT32_MAX);
        mine = mine && own.index == least;
    }
    return mine;
}

/* Removes the best of the warp; true in the lane that had it, whose best before is `taken`. `own`
 * is the lane's best, before and after. */
template <int N>
static __device__ __forceinline__ bool take_best(int32_t (&key)[N], candidate &own,
                                                 candidate &taken, int lane) {
    bool mine = is_best(own);
    if (mine) {
        taken = own;
#pragma unroll
        for (int j = 0; j < N; j++)
            key[j] = own.index / LANES == j ? NO_KEY : key[j];
        own = best_of_lane<N>(key, lane, 0);
    }
    return mine;
}

/* ---- groups ---- */

/* Finds the keys of groups by those of their members and writes them to `group`. `group_lanes`
 * lanes read the members of one, each beginning with another, so that lanes of different groups
 * meet different banks. */
static __device__ __forceinline__ void rank_groups(const route_args &a, const int32_t *member,
                                                   int32_t *group, int lane) {
    int size = a.experts / a.groups, share = a.group_lanes;
    int steps = (size + share - 1) / share;
    bool two = a.bias != NULL && size > 1;
    for (int first = 0; first < a.groups; first += LANES / share) {
        int g = first + lane / share, part = lane & (share - 1), step = g % steps;
        int32_t best = NO_KEY, second = NO_KEY;
        for (int i = 0; i < steps; i++) {
            int at = step * share + part;
            step = step + 1 == steps ? 0 : step + 1;
            int32_t key = g < a.groups && at < size ? member[g * size + at] : NO_KEY;
            second = max(second, min(best, key));
            best = max(best, key);
        }
        for (int half = share / 2; half > 0; half /= 2) {
            int32_t best_there = __shfl_xor_sync(ALL, best, half);
            int32_t second_there = __shfl_xor_sync(ALL, second, half);
            second = max(min(best, best_there), max(second, second_there));
            best = max(best, best_there);
        }
        if (g < a.groups && part == 0)
            group[g] = two ? key_of(__fadd_rn(value_of(best), value_of(second))) : best;
    }
}

/* Replaces the keys of groups by whether each is chosen; a lane has M of them. */
template <int M>
static __device__ __forceinline__ void choose_groups(const route_args &a, int32_t *group,
                                                     int lane) {
    int32_t key[M];
#pragma unroll
    for (int j = 0; j < M; j++) {
        int g = j * LANES + lane;
        key[j] = g < a.groups ? group[g] : NO_KEY;
        if (g < a.groups)
            group[g] = false;
    }
    candidate own = best_of_lane<M>(key, lane, 0), taken;
    __syncwarp();
#pragma unroll 1
    for (int t = 0; t < a.top_groups; t++) {
        if (take_best(key, own, taken, lane))
            group[taken.index] = true;
    }
}

/* Removes the keys of experts whose group is not chosen. `shared` has room for the keys of all
 * experts and of all groups. */
template <int N>
static __device__ __forceinline__ void keep_groups(const route_args &a, int32_t (&key)[N],
                                                   int32_t *shared, int lane) {
    int32_t *group = shared + a.experts;
    float groups_per_expert = 1.0f / (float)(a.experts / a.groups);
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j * LANES + lane < a.experts)
            shared[j * LANES + lane] = key[j];
    }
    __syncwarp();
    rank_groups(a, shared, group, lane);
    __syncwarp();
    if (N == 1 || a.groups <= LANES)
        choose_groups<1>(a, group, lane);
    else
        choose_groups<N>(a, group, lane);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < N; j++) {
        int i = j * LANES + lane;
        /* half an expert further the quotient is no nearer to an integer than its error */
        if (i < a.experts && !group[(int)(((float)i + 0.5f) * groups_per_expert)])
            key[j] = NO_KEY;
    }
    __syncwarp(); /* the next token writes there */
}

/* ---- a token ---- */

/* Makes the weights of the chosen experts, of which each lane below top_k has one with its
 * logit. */
template <bool USUAL>
static __device__ __forceinline__ void write_chosen(const route_args &a, int64_t row, float logit,
                                                    int32_t expert, float most, float divisor,
                                                    int lane) {
    float u = score(USUAL ? MOQ_ROUTE_SOFTMAX : a.scoring, logit, most);
    if (USUAL || a.divides_by_chosen) {
        divisor = 0.0f;
#pragma unroll 1
        for (int t = 0; t < a.top_k; t++)
            divisor = __fadd_rn(divisor, __shfl_sync(ALL, u, t));
        divisor = __fadd_rn(divisor, MOQ_ROUTE_TINY);
    }
    if (lane < a.top_k) {
        float weight = __fmul_rn(__fdiv_rn(u, divisor), a.factor);
        a.weights[row * a.top_k + lane] = logit == logit ? weight : __int_as_float(0x7fc00000);
        a.ids[row * a.top_k + lane] = a.padding && a.padding[row] ? -1 : expert;
    }
}

/* Replaces the logits of a lane's experts by scores, and returns their divisor. */
template <int N>
static __device__ __forceinline__ float score_all(const route_args &a, float (&value)[N],
                                                  const int32_t (&key)[N], float most) {
#pragma unroll
    for (int j = 0; j < N; j++)
        value[j] = key[j] == NO_KEY ? 0.0f : score(a.scoring, value[j], most);
    if (a.scoring != MOQ_ROUTE_SOFTMAX)
        return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++)
        sum = __fadd_rn(sum, value[j]);
    return sum_of_lanes(sum);
}

/* Takes the best experts, one after the other; lane t has the one of place t. */
template <int N>
static __device__ __forceinline__ candidate take_experts(const route_args &a, int32_t (&key)[N],
                                                         candidate *places, int lane) {
    candidate own = best_of_lane<N>(key, lane, 0), taken;
    __syncwarp(); /* the token before has read its places */
#pragma unroll 1
    for (int t = 0; t < a.top_k; t++) {
        if (take_best(key, own, taken, lane))
            places[t] = taken;
    }
    __syncwarp();
    return lane < a.top_k ? places[lane] : (candidate){NAN_KEY, 0};
}

/* Takes the best experts like take_experts, but every lane sorts its few experts once, the best
 * first and of equals the lower index. A lane whose best is taken goes on with its next. */
template <int N>
static __device__ __forceinline__ candidate take_sorted_experts(const route_args &a,
                                                                const int32_t (&key)[N],
                                                                candidate *places, int lane) {
    candidate own[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        own[j] = {key[j], j * LANES + lane};
#pragma unroll
    for (int round = 0; round < N; round++) {
#pragma unroll
        for (int j = round % 2; j + 1 < N; j += 2) {
            candidate first = own[j], second = own[j + 1];
            bool swap = second.key > first.key;
            own[j] = swap ? second : first;
            own[j + 1] = swap ? first : second;
        }
    }
    __syncwarp(); /* the token before has read its places */
#pragma unroll 1
    for (int t = 0; t < a.top_k; t++) {
        bool mine = is_best(own[0]);
        if (mine)
            places[t] = own[0];
#pragma unroll
        for (int j = 0; j + 1 < N; j++)
            own[j] = mine ? own[j + 1] : own[j];
        own[N - 1].key = mine ? NO_KEY : own[N - 1].key;
    }
    __syncwarp();
    return lane < a.top_k ? places[lane] : (candidate){NAN_KEY, 0};
}

template <int N, bool USUAL>
static __device__ __forceinline__ void route_token(const route_args &a, int64_t row,
                                                   candidate *places, int32_t *shared, int lane) {
    bool softmax = a.scoring == MOQ_ROUTE_SOFTMAX, biased = !USUAL && a.bias != NULL;
    int64_t offset =
        !USUAL && a.logits.outer ? offset_of_row(&a.logits, row) : row * a.logits.stride;
    int32_t key[N];
    float value[N]; /* logits, then scores */
    float bias[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        int i = j * LANES + lane;
        bool there = i < a.experts;
        value[j] =
            there ? load_float(a.logits.data, a.logits_dtype, offset + i * a.logits.inner) : 0.0f;
        bias[j] = there && biased ? load_float(a.bias, a.bias_dtype, i * a.bias_step) : 0.0f;
        key[j] = there ? key_of(value[j]) : NO_KEY;
    }
    float most = value_of(__reduce_max_sync(ALL, best_of_lane<N>(key, lane, 0).key));
    float divisor = 1.0f;
    if (!USUAL && (biased || (softmax && !a.divides_by_chosen)))
        divisor = score_all(a, value, key, most);
    if (biased) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            float v = softmax ? __fdiv_rn(value[j], divisor) : value[j];
            key[j] = key[j] > NAN_KEY ? key_of(__fadd_rn(v, bias[j])) : key[j];
        }
    }
    if (!USUAL && a.top_groups < a.groups)
        keep_groups(a, key, shared, lane);
    candidate chosen;
    if constexpr (USUAL && N <= MOST_SORTED)
        chosen = take_sorted_experts(a, key, places, lane);
    else
        chosen = take_experts(a, key, places, lane);
    float logit = value_of(chosen.key);
    if (biased && lane < a.top_k)
        logit = load_float(a.logits.data, a.logits_dtype, offset + chosen.index * a.logits.inner);
    write_chosen<USUAL>(a, row, logit, chosen.index, most, divisor, lane);
}

template <int N, bool USUAL>
static __global__ void __launch_bounds__(WARPS *LANES)
    route_tokens(const __grid_constant__ route_args a) {
    extern __shared__ int32_t shared[];
    __shared__ candidate places[WARPS][LANES];
    int lane = (int)threadIdx.x, warp = (int)threadIdx.y;
    wait_for_predecessor();
    launch_dependents();
    int64_t row = (int64_t)blockIdx.x * blockDim.y + warp;
    for (; row < a.count; row += (int64_t)gridDim.x * blockDim.y)
        route_token<N, USUAL>(a, row, places[warp], shared + warp * (a.experts + a.groups), lane);
}

/* ---- launching ---- */

template <bool USUAL> static const void *kernel_for(int experts) {
    if (experts <= LANES)
        return (const void *)route_tokens<1, USUAL>;
    if (experts <= 2 * LANES)
        return (const void *)route_tokens<2, USUAL>;
    if (experts <= 4 * LANES)
        return (const void *)route_tokens<4, USUAL>;
    if (experts <= 8 * LANES)
        return (const void *)route_tokens<8, USUAL>;
    if (experts <= 16 * LANES)
        return (const void *)route_tokens<16, USUAL>;
    static_assert(MOQ_ROUTE_EXPERTS == 32 * LANES, "the largest kernel has all experts");
    return (const void *)route_tokens<32, USUAL>;
}

/* Returns the rows of the logits, a single stride apart if possible. */
static quantize_input rows_of(const moq_tensor *logits) {
    moq_tensor rows;
    quantize_input in = {
        .data = logits->data, .inner = logits->stride[logits->ndim - 1], .outer = 0};
    if (moq_tensor_as_rows(logits, &rows)) {
        in.stride = rows.stride[0];
        return in;
    }
    in.outer = logits->ndim - 1;
    for (int i = 0; i < in.outer; i++) {
        in.shape[i] = logits->shape[i];
        in.step[i] = logits->stride[i];
    }
    return in;
}

static int lanes_of_group(int groups) {
    int share = 1;
    while (2 * share * groups <= LANES)
        share *= 2;
    return share;
}

extern "C" moq_status moq_cuda_route(const moq_route *route, float *weights, int32_t *ids,
                                     void *stream, moq_err *err) {
    const moq_tensor *logits = &route->logits;
    bool biased = route->bias.ndim >= 0;
    route_args a = {
        .logits = rows_of(logits),
        .logits_dtype = logits->dtype,
        .bias_dtype = biased ? route->bias.dtype : MOQ_DT_F32,
        .bias = biased ? route->bias.data : NULL,
        .bias_step = biased ? route->bias.stride[0] : 0,
        .count = 1,
        .weights = weights,
        .ids = ids,
        .padding = route->padding.ndim >= 0 ? (const uint8_t *)route->padding.data : NULL,
        .scoring = route->scoring,
        .divides_by_chosen = route->renormalize || route->scoring == MOQ_ROUTE_TOPK_SOFTMAX,
        .factor = route->factor,
        .experts = route->experts,
        .top_k = route->top_k,
        .groups = route->groups,
        .top_groups = route->top_groups,
        .group_lanes = lanes_of_group(route->groups)};
    for (int i = 0; i + 1 < logits->ndim; i++)
        a.count *= logits->shape[i];
    int64_t warps = a.count < WARPS ? a.count : WARPS, blocks = (a.count + warps - 1) / warps;
    bool grouped = a.top_groups < a.groups;
    bool softmax = a.scoring == MOQ_ROUTE_SOFTMAX || a.scoring == MOQ_ROUTE_TOPK_SOFTMAX;
    bool usual = softmax && a.divides_by_chosen && !biased && !grouped && !a.logits.outer;
    moq_launch launch = {
        .what = "route",
        .kernel = usual ? kernel_for<true>(a.experts) : kernel_for<false>(a.experts),
        .grid = dim3((unsigned)(blocks < BLOCKS ? blocks : BLOCKS)),
        .block = dim3(LANES, (unsigned)warps),
        .shared = grouped ? (size_t)(warps * (a.experts + a.groups)) * sizeof(int32_t) : 0,
        .stream = (cudaStream_t)stream,
        .pdl = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::routing
