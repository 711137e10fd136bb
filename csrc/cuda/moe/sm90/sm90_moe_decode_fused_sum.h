/* The kernel behind that of strips, which adds up the parts of d and the slots of a token, and how
 * both are launched (sm90_moe_decode_fused.h).
 *
 * What bounds it: the way from the kernel before, and one round of reading. So a warp has a slot
 * where a token is alone, and its lanes share the parts; all that is known of a slot before d is
 * there is found before the wait. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_FUSED_SUM_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_FUSED_SUM_H

#include "cuda/moe/sm90/sm90_moe_decode_fused.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_decode {

#define ADD_WARPS   8
#define ADD_THREADS (32 * ADD_WARPS)
#define ADD_SLOTS   8 /* whose parts a thread asks for at once */

/* The slots of a token in shared memory. */
typedef struct {
    int expert[MOQ_MOE_TOP_K]; /* -1 where a slot does not count */
    float weight[MOQ_MOE_TOP_K];
    int first[MOQ_MOE_TOP_K], parts[MOQ_MOE_TOP_K]; /* rows of d, in steps of a chunk's columns */
} added_slots;

/* What is known of a slot before the wait. */
static __device__ __forceinline__ void open_slot(const fused_sum_args *a, added_slots *slots, int i,
                                                 int slot) {
    slots->expert[i] = expert_of_slot(&a->route, slot);
    slots->weight[i] = a->weighted ? weight_of_slot(&a->route, slot) : 1.0f;
    slots->first[i] = slot * a->tiles + slot;
    slots->parts[i] = slots->expert[i] < 0 ? 0 : a->tiles;
}

/* And what the kernel before tells, where slots are not by themselves. */
static __device__ __forceinline__ void find_slot(const fused_sum_args *a, added_slots *slots, int i,
                                                 int slot) {
    if (slots->expert[i] < 0)
        return;
    uint32_t place = __ldcg(a->places + slot);
    int all = (int)__ldcg(a->places + a->route.slots) * a->tiles, chunk = (int)place / CHUNK;
    int each = fused_tiles_each(all, &a->by_blocks);
    int first = chunk * a->tiles / each, last = (chunk * a->tiles + a->tiles - 1) / each;
    slots->first[i] = (first + chunk) * CHUNK + (int)place % CHUNK;
    slots->parts[i] = last - first + 1;
}

/* Four columns of a lane. */
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
    float common = w->input_scale ? load_early(w->input_scale + expert * w->parts) : a->factor;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        (&rows.factor.x)[i] =
            w->output_scale ? common * load_early(w->output_scale + at + i) : common;
        if (w->bias)
            (&rows.bias.x)[i] = load_early(w->bias + at + i);
    }
    return rows;
}

static __device__ __forceinline__ float4 load_part(const fused_sum_args *a,
                                                   const added_slots *slots, int i, int part,
                                                   int n) {
    int row = slots->first[i] + part * (a->alone ? 1 : CHUNK);
    return __ldcg((const float4 *)(a->d + (int64_t)row * a->down.rows + n));
}

static __device__ __forceinline__ float4 add_four(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
}

/* The linear's outputs with the router's weight, of a column of the lane's. */
static __device__ __forceinline__ float weighed(const fused_sum_args *a, const lane_rows *rows,
                                                float4 sum, float weight, int column) {
    float d = __fmul_rn((&sum.x)[column], (&rows->factor.x)[column]);
    if (a->down.bias)
        d = __fadd_rn(d, (&rows->bias.x)[column]);
    return __fmul_rn(weight, d);
}

/* Few tokens, slots of many parts: a block has 32 columns, a warp some slots, whose parts its lanes
 * share; then slots are added up in their order. */
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
        if (lane == 0) /* of the warp's own */
            for (int i = warp; i < top_k; i += ADD_WARPS)
                find_slot(a, slots, i, (int)blockIdx.x * top_k + i);
        __syncwarp();
    }
    for (int i = warp; i < top_k; i += ADD_WARPS) {
        int parts = slots->parts[i];
        if (i != warp)
            rows = rows_of_slot(a, slots->expert[i], n);
        float4 sum = make_float4(0, 0, 0, 0);
        if (n < a->down.rows)
#pragma unroll 4
            for (int part = lane / lanes; part < parts; part += 32 / lanes)
                sum = add_four(sum, load_part(a, slots, i, part, n));
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
        if (slots->parts[i])
            sum = __fadd_rn(sum, value[i][lane]);
    ((uint16_t *)a->y)[at] = (uint16_t)moq_narrow_pair(DT, sum, 0);
}

/* More tokens, slots of a few parts: a thread has four columns of all slots of a token. */
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
            int parts = i + j < top_k ? slots->parts[i + j] : 0;
            sum[j] = more[j] = make_float4(0, 0, 0, 0);
            if (parts > 0)
                sum[j] = load_part(a, slots, i + j, 0, n);
            if (parts > 1)
                more[j] = load_part(a, slots, i + j, 1, n);
        }
#pragma unroll
        for (int j = 0; j < ADD_SLOTS; j++) {
            int parts = i + j < top_k ? slots->parts[i + j] : 0;
            if (parts == 0)
                continue;
            sum[j] = add_four(sum[j], more[j]);
#pragma unroll 1
            for (int part = 2; part < parts; part++)
                sum[j] = add_four(sum[j], load_part(a, slots, i + j, part, n));
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

/* Slots of the block's token; the ids, and what they are beside, were there before the first of the
 * two kernels began. */
static __device__ __forceinline__ void open_slots(const fused_sum_args *a, added_slots *slots) {
    int i = (int)threadIdx.x;
    launch_dependents();
    if (i < a->route.top_k)
        open_slot(a, slots, i, (int)blockIdx.x * a->route.top_k + i);
    __syncthreads();
}

/* y of some columns of a token, in the order of slots. */
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

template <moq_dtype DT> static inline const void *sum_kernel(bool by_slots) {
    return by_slots ? (const void *)moe_decode_add_slots<DT>
                    : (const void *)moe_decode_add_columns<DT>;
}

/* ---- launch ---- */

/* All but what depends on the format: of both stacks blocks, bytes and maps. */
static inline fused_args fused_tiles_of(const moq_moe_call *call, const moq_moe_fused *share) {
    const moq_moe_spec *spec = call->spec;
    moq_moe_decode_half half = {};
    half.stages = share->stages;
    half.flight = share->flight;
    half.staged_at = share->staged_at;
    half.weights_at = share->weights_at;
    half.tables = share->tables;
    fused_args a = {};
    a.common = common_of(call, &half, &spec->w13, &call->w13);
    a.common.x = call->x->data;
    a.common.x_stride = call->x->stride[0];
    a.common.weighted = call->weights_on_input;
    a.common.by_blocks = divisor_of(share->grid);
    a.activation = moe::activation_of(spec);
    a.down = common_of(call, &half, &spec->w2, &call->w2).w;
    a.g_at = share->g_at;
    a.up_slabs = spec->gated ? FUSED_SLABS : FUSED_SLABS / 2;
    a.common.by_stages = divisor_of(share->fused_stages);
    a.alone = share->alone;
    a.by_fused_tiles = divisor_of((int)(spec->w2.in_features / FUSED_COLUMNS));
    a.places = (uint32_t *)call->workspace;
    a.d = (float *)((uint8_t *)call->workspace + share->d_at);
    return a;
}

static inline moq_status launch_first(const moq_moe_call *call, const moq_moe_fused *share,
                                      const char *what, const void *kernel, void *args,
                                      moq_err *err) {
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = dim3((unsigned)share->grid),
                         .block = dim3(FUSED_THREADS),
                         .cluster = share->cluster > 1 ? (unsigned)share->cluster : 0,
                         .shared = (size_t)share->shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

/* What adds up needs of the kernel before. */
static inline fused_sum_args sum_of(const moq_moe_call *call, const fused_args *a) {
    fused_sum_args sum = {};
    sum.route = a->common.route;
    sum.down = a->down;
    sum.d = a->d;
    sum.places = a->places;
    sum.y = call->y->data;
    sum.y_stride = call->y->stride[0];
    sum.alone = a->alone;
    sum.weighted = !call->weights_on_input;
    sum.accumulate = call->accumulate;
    sum.by_blocks = a->common.by_blocks;
    sum.tiles = a->by_fused_tiles.by;
    return sum;
}

static inline moq_status launch_second(const moq_moe_call *call, const moq_moe_fused *share,
                                       fused_sum_args *args, moq_err *err) {
    unsigned columns = share->by_slots ? 32 : 4 * ADD_THREADS;
    moq_launch add = {
        .what = "the sum over slots",
        .kernel = call->spec->w13.dtype == MOQ_DT_F16 ? sum_kernel<MOQ_DT_F16>(share->by_slots)
                                                      : sum_kernel<MOQ_DT_BF16>(share->by_slots),
        .grid = dim3((unsigned)call->tokens, ((unsigned)args->down.rows + columns - 1) / columns),
        .block = dim3(ADD_THREADS),
        .stream = (cudaStream_t)call->stream,
        .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&add, parameters, err);
}

/* Both kernels; a sum of the second product is multiplied by `factor`. */
static inline moq_status launch_fused(const moq_moe_call *call, const moq_moe_fused *share,
                                      const char *what, const void *kernel, fused_args *a,
                                      float factor, moq_err *err) {
    MOQ_TRY(launch_first(call, share, what, kernel, a, err));
    fused_sum_args sum = sum_of(call, a);
    sum.factor = factor;
    sum.down.input_scale = NULL;
    return launch_second(call, share, &sum, err);
}

} // namespace moq::moe_decode

#endif
