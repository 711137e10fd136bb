/* Last kernels of decoding experts on Hopper: y[t] = rounded(out[t] + sum_s w[s] d[s]) over the
 * slots s of a token t, in their order.
 *
 * Layouts: d float32, [slots, H] behind split-K (split_k.h); of fused tiles [blocks + chunks,
 * columns of a chunk, H], partial sums that are added in the order of blocks (fused.h). y [tokens,
 * H], bfloat16 or float16. No sum depends on timing.
 *
 * Bound: latency, the start behind the kernel before and one round of reads. With few tokens a warp
 * has a slot, whose partial sums its lanes share; it finds what it can of a slot before it waits
 * for d. */
#include "cuda/moe/sm90/decode/fused.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_decode {

/* ---- behind split-K ---- */

#define SUM_THREADS 256

/* Writes y of a token's columns from d, added in the order of slots. */
template <moq_dtype DT>
static __global__ void __launch_bounds__(SUM_THREADS)
    moe_decode_sum(const __grid_constant__ down_args args) {
    __shared__ float weight[MOQ_MOE_TOP_K];
    __shared__ bool counts[MOQ_MOE_TOP_K];
    const down_args *a = &args;
    const routing *r = &args.common.route;
    int first = (int)blockIdx.x * r->top_k, lane = (int)threadIdx.x;
    launch_dependents();
    /* Ids, map and weights were complete before the first of the three kernels started. */
    if (lane < r->top_k) {
        counts[lane] = expert_of_slot(r, first + lane) >= 0;
        weight[lane] = a->common.weighted ? weight_of_slot(r, first + lane) : 1.0f;
    }
    __syncthreads();
    wait_for_predecessor();
    int rows = a->common.w.rows, n = (int)blockIdx.y * SUM_THREADS + lane;
    if (n >= rows)
        return;
    int64_t at = blockIdx.x * a->y_stride + n;
    const float *d = a->d + (int64_t)first * rows + n;
    float sum = a->accumulate ? moq_load_one(a->y, at, DT) : 0;
#pragma unroll 8
    for (int j = 0; j < r->top_k; j++)
        if (counts[j])
            sum = __fadd_rn(sum, __fmul_rn(weight[j], d[(int64_t)j * rows]));
    ((uint16_t *)a->y)[at] = (uint16_t)moq_narrow_pair(DT, sum, 0);
}

moq_status launch_sum(const moq_moe_call *call, const down_args *down, moq_err *err) {
    unsigned blocks = (unsigned)((down->common.w.rows + SUM_THREADS - 1) / SUM_THREADS);
    moq_launch launch = {.what = "the sum over slots",
                         .kernel = call->spec->w13.dtype == MOQ_DT_F16
                                       ? (const void *)moe_decode_sum<MOQ_DT_F16>
                                       : (const void *)moe_decode_sum<MOQ_DT_BF16>,
                         .grid = dim3((unsigned)call->tokens, blocks),
                         .block = dim3(SUM_THREADS),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {(void *)down};
    return moq_cuda_launch(&launch, parameters, err);
}

/* ---- behind fused tiles ---- */

#define ADD_WARPS   8
#define ADD_THREADS (32 * ADD_WARPS)
#define ADD_SLOTS   8 /* a thread loads their partial sums at once */

/* The slots of a token in shared memory. */
typedef struct {
    int expert[MOQ_MOE_TOP_K]; /* -1: the slot does not count */
    float weight[MOQ_MOE_TOP_K];
    int first[MOQ_MOE_TOP_K], splits[MOQ_MOE_TOP_K]; /* rows of d, in steps of a chunk's columns */
} added_slots;

/* Finds a slot's expert, weight and row of d before the wait. */
static __device__ __forceinline__ void open_slot(const fused_sum_args *a, added_slots *slots, int i,
                                                 int slot) {
    slots->expert[i] = expert_of_slot(&a->route, slot);
    slots->weight[i] = a->weighted ? weight_of_slot(&a->route, slot) : 1.0f;
    slots->first[i] = slot * a->tiles + slot;
    slots->splits[i] = slots->expert[i] < 0 ? 0 : a->tiles;
}

/* Finds a slot's row of d from the places that the kernel before stored. */
static __device__ __forceinline__ void find_slot(const fused_sum_args *a, added_slots *slots, int i,
                                                 int slot) {
    if (slots->expert[i] < 0)
        return;
    uint32_t place = __ldcg(a->places + slot);
    int all = (int)__ldcg(a->places + a->route.slots) * a->tiles, chunk = (int)place / CHUNK;
    int each = fused_tiles_each(all, &a->by_blocks);
    int first = chunk * a->tiles / each, last = (chunk * a->tiles + a->tiles - 1) / each;
    slots->first[i] = (first + chunk) * CHUNK + (int)place % CHUNK;
    slots->splits[i] = last - first + 1;
}

/* Factors and biases of a lane's four columns. */
typedef struct {
    float4 factor, bias;
} lane_rows;

static __device__ __forceinline__ lane_rows rows_of_slot(const fused_sum_args *a, int expert,
                                                         int n) {
    const stack *w = &a->down;
    lane_rows rows = {};
    if (expert < 0 || n >= w->rows)
        return rows;
    int64_t at = (int64_t)expert * w->rows + n;
    float common =
        w->input_scale ? load_early(w->input_scale + expert * w->partition_count) : a->factor;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        (&rows.factor.x)[i] =
            w->output_scale ? common * load_early(w->output_scale + at + i) : common;
        if (w->bias)
            (&rows.bias.x)[i] = load_early(w->bias + at + i);
    }
    return rows;
}

static __device__ __forceinline__ float4 load_partial(const fused_sum_args *a,
                                                      const added_slots *slots, int i, int split,
                                                      int n) {
    int row = slots->first[i] + split * (a->alone ? 1 : CHUNK);
    return __ldcg((const float4 *)(a->d + (int64_t)row * a->down.rows + n));
}

static __device__ __forceinline__ float4 add_four(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
}

/* Returns an output of the second product, with bias, times the router's weight, for a column of
 * the lane. */
static __device__ __forceinline__ float weighed(const fused_sum_args *a, const lane_rows *rows,
                                                float4 sum, float weight, int column) {
    float d = __fmul_rn((&sum.x)[column], (&rows->factor.x)[column]);
    if (a->down.bias)
        d = __fadd_rn(d, (&rows->bias.x)[column]);
    return __fmul_rn(weight, d);
}

/* Adds by slots, for few tokens and many partial sums. A block has 32 columns, a warp some slots,
 * whose partial sums its lanes share; then slots are added in their order. */
template <moq_dtype DT>
static __device__ __forceinline__ void add_by_slots(const fused_sum_args *a, added_slots *slots) {
    __shared__ float value[MOQ_MOE_TOP_K][32]; /* weighted */
    const int lanes = 8, columns = 4 * lanes, top_k = a->route.top_k;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, own = lane % lanes * 4;
    int begin = (int)blockIdx.y * columns, n = begin + own;
    lane_rows rows = {};
    if (warp < top_k)
        rows = rows_of_slot(a, slots->expert[warp], n);
    wait_for_predecessor();
    if (!a->alone) {
        if (lane == 0) /* the warp's own slots */
            for (int i = warp; i < top_k; i += ADD_WARPS)
                find_slot(a, slots, i, (int)blockIdx.x * top_k + i);
        __syncwarp();
    }
    for (int i = warp; i < top_k; i += ADD_WARPS) {
        int splits = slots->splits[i];
        if (i != warp)
            rows = rows_of_slot(a, slots->expert[i], n);
        float4 sum = make_float4(0, 0, 0, 0);
        if (n < a->down.rows)
#pragma unroll 4
            for (int split = lane / lanes; split < splits; split += 32 / lanes)
                sum = add_four(sum, load_partial(a, slots, i, split, n));
#pragma unroll
        for (int other = lanes; other < 32; other *= 2) {
            float4 more;
#pragma unroll
            for (int j = 0; j < 4; j++)
                (&more.x)[j] = __shfl_xor_sync(ALL_LANES, (&sum.x)[j], other);
            sum = add_four(sum, more);
        }
        if (lane < lanes)
#pragma unroll
            for (int j = 0; j < 4; j++)
                value[i][own + j] = weighed(a, &rows, sum, slots->weight[i], j);
    }
    __syncthreads();
    if ((int)threadIdx.x >= columns || begin + lane >= a->down.rows)
        return;
    int64_t at = blockIdx.x * a->y_stride + begin + lane;
    float sum = a->accumulate ? moq_load_one(a->y, at, DT) : 0;
    for (int i = 0; i < top_k; i++)
        if (slots->splits[i])
            sum = __fadd_rn(sum, value[i][lane]);
    ((uint16_t *)a->y)[at] = (uint16_t)moq_narrow_pair(DT, sum, 0);
}

/* Adds by columns, for more tokens and few partial sums: a thread has four columns of all slots of
 * a token. */
template <moq_dtype DT>
static __device__ __forceinline__ void add_by_columns(const fused_sum_args *a, added_slots *slots) {
    const int top_k = a->route.top_k;
    int n = ((int)blockIdx.y * ADD_THREADS + (int)threadIdx.x) * 4;
    lane_rows rows[ADD_SLOTS];
#pragma unroll
    for (int j = 0; j < ADD_SLOTS; j++)
        rows[j] = rows_of_slot(a, j < top_k ? slots->expert[j] : -1, n);
    wait_for_predecessor();
    if ((int)threadIdx.x < top_k)
        find_slot(a, slots, (int)threadIdx.x, (int)blockIdx.x * top_k + (int)threadIdx.x);
    __syncthreads();
    if (n >= a->down.rows)
        return;
    int64_t at = blockIdx.x * a->y_stride + n;
    float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (a->accumulate)
            (&y.x)[j] = moq_load_one(a->y, at + j, DT);
#pragma unroll 1
    for (int i = 0; i < top_k; i += ADD_SLOTS) {
        float4 sum[ADD_SLOTS], more[ADD_SLOTS];
#pragma unroll
        for (int j = 0; j < ADD_SLOTS; j++) {
            if (i > 0)
                rows[j] = rows_of_slot(a, i + j < top_k ? slots->expert[i + j] : -1, n);
            int splits = i + j < top_k ? slots->splits[i + j] : 0;
            sum[j] = more[j] = make_float4(0, 0, 0, 0);
            if (splits > 0)
                sum[j] = load_partial(a, slots, i + j, 0, n);
            if (splits > 1)
                more[j] = load_partial(a, slots, i + j, 1, n);
        }
#pragma unroll
        for (int j = 0; j < ADD_SLOTS; j++) {
            int splits = i + j < top_k ? slots->splits[i + j] : 0;
            if (splits == 0)
                continue;
            sum[j] = add_four(sum[j], more[j]);
#pragma unroll 1
            for (int split = 2; split < splits; split++)
                sum[j] = add_four(sum[j], load_partial(a, slots, i + j, split, n));
#pragma unroll
            for (int c = 0; c < 4; c++)
                (&y.x)[c] =
                    __fadd_rn((&y.x)[c], weighed(a, &rows[j], sum[j], slots->weight[i + j], c));
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        ((uint16_t *)a->y)[at + j] = (uint16_t)moq_narrow_pair(DT, (&y.x)[j], 0);
}

/* Finds the slots of the block's token. Ids, map and weights were complete before the first of the
 * two kernels started. */
static __device__ __forceinline__ void open_slots(const fused_sum_args *a, added_slots *slots) {
    int i = (int)threadIdx.x;
    launch_dependents();
    if (i < a->route.top_k)
        open_slot(a, slots, i, (int)blockIdx.x * a->route.top_k + i);
    __syncthreads();
}

/* Writes y of some columns of a token, added in the order of slots. */
template <moq_dtype DT>
static __global__ void __launch_bounds__(ADD_THREADS)
    moe_decode_add_slots(const __grid_constant__ fused_sum_args args) {
    __shared__ added_slots slots;
    open_slots(&args, &slots);
    add_by_slots<DT>(&args, &slots);
}

template <moq_dtype DT>
static __global__ void __launch_bounds__(ADD_THREADS)
    moe_decode_add_columns(const __grid_constant__ fused_sum_args args) {
    __shared__ added_slots slots;
    open_slots(&args, &slots);
    add_by_columns<DT>(&args, &slots);
}

template <moq_dtype DT> static const void *sum_kernel(bool by_slots) {
    return by_slots ? (const void *)moe_decode_add_slots<DT>
                    : (const void *)moe_decode_add_columns<DT>;
}

moq_status launch_fused_sum(const moq_moe_call *call, const moq_moe_fused *share,
                            const fused_sum_args *args, moq_err *err) {
    unsigned columns = share->by_slots ? 32 : 4 * ADD_THREADS;
    moq_launch add = {
        .what = "the sum over slots",
        .kernel = call->spec->w13.dtype == MOQ_DT_F16 ? sum_kernel<MOQ_DT_F16>(share->by_slots)
                                                      : sum_kernel<MOQ_DT_BF16>(share->by_slots),
        .grid = dim3((unsigned)call->tokens, ((unsigned)args->down.rows + columns - 1) / columns),
        .block = dim3(ADD_THREADS),
        .stream = (cudaStream_t)call->stream,
        .pdl = true};
    void *parameters[] = {(void *)args};
    return moq_cuda_launch(&add, parameters, err);
}

} // namespace moq::moe_decode
