/* Linear of 8- and 4-bit weights that general kernels read, by cuBLASLt: y[m, n] = round(fx[m]
 * fw[n] sum_k X[m, k] W[n, k] + bias[n]), for many tokens on every chip from Ampere on.
 *
 * int8 weights and int8 codes of x are multiplied as they are, with sums of int32. Other weights
 * become 16-bit numbers in the workspace, some rows at a time:
 * - e4m3 times E8M0, and int8, exactly;
 * - int4 times its float32 scale as a sum of two bfloat16 numbers, which holds scales of 16 bits
 *   exactly and 16 bits of others; two products are added in float32.
 * X is x, or the values of its e4m3 codes.
 *
 * The library writes y itself where nothing scales the sums. They pass through the workspace
 * elsewhere, and one more kernel (finish_sums.h).
 *
 * What bounds it: the tensor cores with thousands of tokens. Before that the bytes: W once as it is
 * stored, and twice, or four times, as 16-bit numbers. */
#include "core/sizes.h"
#include "cuda/linear/any/simt_tile.h"
#include "cuda/linear/finish_sums.h"
#include "cuda/linear/linear_cublaslt.h"
#include "cuda/runtime/cublaslt_api.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_round.h"

#include <stdio.h>

namespace moq::cublaslt_general {

using namespace moq::simt;

#define WHAT "linear of codes of 8 or 4 bits by cuBLASLt"
/* Numbers of W, and sums, in the workspace at a time. */
#define MOST (64 << 20)

/* ---- the workspace ---- */

typedef struct {
    moq_dtype operands; /* of x and W in the product */
    int passes;         /* products that are added: each has a matrix of W in the workspace */
    int64_t rows;       /* rows of W at a time */
    bool widens;        /* W becomes 16-bit numbers */
    bool direct;        /* the library writes y, */
    bool fused_bias;    /* and adds the bias */
    int64_t x, w, sums, library, library_bytes, end;
} layout;

static int64_t take(layout *l, int64_t bytes) {
    int64_t at = l->end;
    l->end = round_up(l->end + bytes, 256);
    return at;
}

static bool rounds(const moq_linear_call *call) {
    return call->spec->input != MOQ_INPUT_AS_IS;
}

static moq_cuda_round rounding(const moq_linear_call *call, const layout *l) {
    moq_cuda_round r = {call, l->operands, (uint8_t *)call->workspace + l->x};
    return r;
}

/* Returns whether the library can write y as it lies. */
static bool writes_directly(const moq_linear_call *call, const moq_output *y, bool fused_bias) {
    int64_t n = call->spec->out_features;
    bool rows_fit =
        moq_cublaslt_takes(y->data) && (call->m == 1 || (y->stride >= n && y->stride % 8 == 0));
    return call->spec->weight == MOQ_WEIGHT_E4M3_GROUP && !rounds(call) && rows_fit &&
           (!y->bias || fused_bias);
}

/* Splits W evenly into rows that fit. */
static int64_t rows_at_a_time(const moq_linear_call *call, const layout *l) {
    int64_t n = call->spec->out_features, of_row = l->direct ? 1 : call->m;
    if (l->widens)
        of_row = max(of_row, l->passes * call->spec->in_features);
    int64_t splits = (n * of_row + MOST - 1) / MOST;
    return min(n, round_up((n + splits - 1) / splits, 256));
}

static layout workspace_layout(const moq_linear_call *call) {
    const moq_linear_spec *spec = call->spec;
    moq_output y = moq_output_of(call);
    bool int8 = spec->weight == MOQ_WEIGHT_INT8_ROW;
    layout l = {};
    l.widens = !int8 || spec->input != MOQ_INPUT_INT8;
    l.operands = !l.widens                           ? MOQ_DT_I8
                 : int8 && spec->dtype == MOQ_DT_F16 ? MOQ_DT_F16
                                                     : MOQ_DT_BF16;
    l.passes = spec->weight == MOQ_WEIGHT_INT4_GROUP ? 2 : 1;
    l.fused_bias = y.bias && y.bias_dtype == y.dtype && moq_cublaslt_takes(y.bias);
    l.direct = writes_directly(call, &y, l.fused_bias);
    l.rows = rows_at_a_time(call, &l);
    moq_cuda_round r = rounding(call, &l);
    l.x = take(&l, rounds(call) ? moq_cuda_round_bytes(&r) : 0);
    l.w = take(&l, l.widens ? l.passes * l.rows * spec->in_features * 2 : 0);
    l.sums = take(&l, l.direct ? 0 : call->m * l.rows * (int64_t)sizeof(float));
    l.library_bytes = moq_cublaslt_memory(spec);
    l.library = take(&l, l.library_bytes);
    return l;
}

extern "C" int64_t moq_cublaslt_general_workspace(const moq_linear_call *call) {
    return workspace_layout(call).end;
}

/* ---- W as 16-bit numbers ---- */

typedef struct {
    simt_weight weight;
    int64_t k, first, rows;
    uint8_t *values; /* [rows, K], and of int4 behind them what they leave out */
} widen_args;

/* Stores values as 16-bit numbers, and keeps what they leave out. */
template <moq_dtype DTYPE>
static __device__ __forceinline__ void store_narrow(uint8_t *to, float (&value)[LANE_K]) {
    uint32_t pair[LANE_K / 2];
#pragma unroll
    for (int i = 0; i < LANE_K / 2; i++) {
        pair[i] = moq_narrow_pair(DTYPE, value[2 * i], value[2 * i + 1]);
        float2 stored = moq_widen_pair(pair[i], DTYPE);
        value[2 * i] -= stored.x;
        value[2 * i + 1] -= stored.y;
    }
    *(uint4 *)to = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    *(uint4 *)(to + 16) = make_uint4(pair[4], pair[5], pair[6], pair[7]);
}

template <int WEIGHT, moq_dtype DTYPE>
static __global__ void __launch_bounds__(THREADS) widen(const __grid_constant__ widen_args a) {
    int64_t column = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * LANE_K;
    wait_for_predecessor();
    if (column >= a.k)
        return;
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
        weights w = load_weights<WEIGHT>(&a.weight, a.k, a.first + row, 0, column);
        float value[LANE_K];
        decode<WEIGHT>(w, value);
#pragma unroll
        for (int i = 0; i < LANE_K && WEIGHT != INT8_ROW; i++)
            value[i] = __fmul_rn(value[i] * unit_of_sums<WEIGHT>(), w.scale);
        store_narrow<DTYPE>(a.values + (row * a.k + column) * 2, value);
        if (WEIGHT == INT4)
            store_narrow<DTYPE>(a.values + ((a.rows + row) * a.k + column) * 2, value);
    }
}

static const void *widen_kernel(const moq_linear_call *call, const layout *l) {
    switch (call->spec->weight) {
    case MOQ_WEIGHT_E4M3_GROUP:
        return (const void *)widen<E4M3_MX, MOQ_DT_BF16>;
    case MOQ_WEIGHT_INT4_GROUP:
        return (const void *)widen<INT4, MOQ_DT_BF16>;
    default:
        return l->operands == MOQ_DT_F16 ? (const void *)widen<INT8_ROW, MOQ_DT_F16>
                                         : (const void *)widen<INT8_ROW, MOQ_DT_BF16>;
    }
}

/* ---- the segments of a call ---- */

/* Segment: rows of W that are multiplied at once, of one partition where each has an x. */
typedef struct {
    int partition;
    int64_t begin, rows;
} segment;

static moq_status widen_segment(const moq_linear_call *call, const layout *l, const segment *s,
                                moq_err *err) {
    widen_args a = {};
    a.weight.weight = call->weight;
    a.weight.weight_scale = call->weight_scale;
    a.weight.group = call->spec->group_size;
    a.k = call->spec->in_features;
    a.first = s->begin;
    a.rows = s->rows;
    a.values = (uint8_t *)call->workspace + l->w;
    moq_launch launch = {};
    launch.what = WHAT;
    launch.kernel = widen_kernel(call, l);
    launch.grid = dim3((unsigned)((a.k / LANE_K + THREADS - 1) / THREADS),
                       (unsigned)min(s->rows, (int64_t)65535));
    launch.block = dim3(THREADS);
    launch.stream = (cudaStream_t)call->stream;
    launch.pdl = true;
    void *args[] = {&a};
    return moq_cuda_launch(&launch, args, err);
}

static moq_matmul product(const moq_linear_call *call, const layout *l, const segment *s,
                          int pass) {
    uint8_t *memory = (uint8_t *)call->workspace;
    moq_output y = moq_output_of(call);
    moq_rows x = moq_rows_of(call->x);
    moq_cuda_round r = rounding(call, l);
    moq_matmul p = {};
    p.device = call->spec->device.index;
    p.scaling = MOQ_UNSCALED;
    p.operands = l->operands;
    p.accumulate = pass > 0;
    p.m = call->m;
    p.n = s->rows;
    p.k = call->spec->in_features;
    p.x = rounds(call) ? moq_cuda_rounded(&r, s->partition).values : (const uint8_t *)x.data;
    p.x_stride = rounds(call) || call->m == 1 ? p.k : x.stride;
    p.w = l->widens ? memory + l->w + pass * p.n * p.k * 2 : call->weight + s->begin * p.k;
    p.dtype = l->direct ? y.dtype : l->operands == MOQ_DT_I8 ? MOQ_DT_I32 : MOQ_DT_F32;
    p.y = l->direct ? (uint8_t *)y.data + s->begin * 2 : memory + l->sums;
    p.y_stride = !l->direct ? p.n : call->m > 1 ? y.stride : call->spec->out_features;
    if (l->direct && y.bias)
        p.bias = (const uint8_t *)y.bias + s->begin * 2;
    p.workspace = memory + l->library;
    p.workspace_bytes = (size_t)l->library_bytes;
    p.variant = call->config.variant;
    p.stream = call->stream;
    return p;
}

static moq_status finish_segment(const moq_linear_call *call, const layout *l, const segment *s,
                                 moq_err *err) {
    moq_cuda_round r = rounding(call, l);
    moq_sums a = {};
    a.sums = (const uint8_t *)call->workspace + l->sums;
    a.dtype = l->operands == MOQ_DT_I8 ? MOQ_DT_I32 : MOQ_DT_F32;
    a.m = call->m;
    a.n = (int)s->rows;
    a.x_scale = rounds(call) ? moq_cuda_rounded(&r, s->partition).scales : NULL;
    a.x_stride = 1;
    a.w_scale = call->output_scale ? call->output_scale + s->begin : NULL;
    a.out = moq_output_of(call);
    a.out.data = (uint8_t *)a.out.data + s->begin * 2;
    if (a.out.bias)
        a.out.bias =
            (const uint8_t *)a.out.bias + s->begin * (int64_t)moq_dtype_size(a.out.bias_dtype);
    return moq_finish_sums(&a, WHAT, call->stream, err);
}

static moq_status run_segment(const moq_linear_call *call, const layout *l, const segment *s,
                              moq_err *err) {
    if (l->widens)
        MOQ_TRY(widen_segment(call, l, s, err));
    for (int pass = 0; pass < l->passes; pass++) {
        moq_matmul p = product(call, l, s, pass);
        MOQ_TRY(moq_matmul_run(&p, err));
    }
    if (l->direct)
        return moq_cuda_settle((cudaStream_t)call->stream, WHAT, err);
    return finish_segment(call, l, s, err);
}

/* ---- the call ---- */

extern "C" uint64_t moq_cublaslt_general_variants(const moq_linear_call *call) {
    layout l = workspace_layout(call);
    segment s = {0, 0, l.rows};
    moq_matmul p = product(call, &l, &s, 0);
    return (1ull << moq_matmul_variants(&p)) - 1;
}

/* Asks about as many rows of W as are multiplied at a time, and about those that are left. */
extern "C" bool moq_cublaslt_general_ask(const moq_linear_call *call, char *reason, size_t size) {
    layout l = workspace_layout(call);
    int64_t left = call->spec->out_features % l.rows;
    moq_err err;
    char message[MOQ_MESSAGE_SIZE];
    for (int i = 0; i < (left ? 2 : 1) * l.passes; i++) {
        segment s = {0, 0, i < l.passes ? l.rows : left};
        moq_matmul p = product(call, &l, &s, i % l.passes);
        if (moq_matmul_ask(&p, &err) == MOQ_OK)
            continue;
        snprintf(reason, size, "%s", moq_err_message(&err, message));
        return false;
    }
    return true;
}

/* Runs the rows of W from `begin` to `end`, of a partition or of all. */
static moq_status run_rows(const moq_linear_call *call, const layout *l, int partition,
                           int64_t begin, int64_t end, moq_err *err) {
    for (int64_t row = begin; row < end; row += l->rows) {
        segment s = {partition, row, min(l->rows, end - row)};
        MOQ_TRY(run_segment(call, l, &s, err));
    }
    return MOQ_OK;
}

extern "C" moq_status moq_cublaslt_general_linear(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    layout l = workspace_layout(call);
    if (call->m > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    moq_cuda_round r = rounding(call, &l);
    if (rounds(call))
        MOQ_TRY(moq_cuda_round_rows(&r, WHAT, err));
    if (!rounds(call) || !call->input_scale || spec->one_input_scale)
        return run_rows(call, &l, 0, 0, spec->out_features, err);
    int64_t begin = 0;
    for (int i = 0; i < spec->partition_count; begin += spec->partition[i++])
        MOQ_TRY(run_rows(call, &l, i, begin, begin + spec->partition[i], err));
    return MOQ_OK;
}

} // namespace moq::cublaslt_general
