/* FP8 and NVFP4 codes of activations: the choice among the kernels of cuda_quantize_rows.h.
 * cpu/cpu_quantize.h has the formulas, cuda_quantize.h the layouts. Bound: memory, 2 bytes read and
 * one written a value. */
#include "cuda/tensor/cuda_quantize.h"

#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize_flat.h"

namespace moq::quantization {

#define MAX_BLOCKS 0x7fffffff
/* Partial maxima of a tensor: enough blocks for every multiprocessor, few enough for one warp. */
#define MAX_PARTS 1024
/* Values up to which a thread has eight: an H200 has threads for four times as many. */
#define FEW_CHUNKS (1 << 16)
/* Values from which few rows are spread over clusters of up to 8 blocks: as many blocks in all as
 * leave half of an H200's multiprocessors to the next kernel. */
#define SPREAD_COLUMNS 4096
#define SPREAD_BLOCKS  66

/* Source of values: x as it is in memory. */
typedef struct {
    template <int DT, int N> using raw = chunk<DT, N>;
    template <int DT, int N, bool WHOLE>
    __device__ __forceinline__ raw<DT, N> fetch(const quantize_args *a, int64_t row,
                                                int64_t column) const {
        return load_chunk<DT, N, WHOLE>(&a->x, row, column, a->k);
    }
    template <int DT, int N>
    static __device__ __forceinline__ chunk<DT, N> finish(const chunk<DT, N> &values) {
        return values;
    }
} memory_source;

/* ---- groups of any size ---- */

template <int DT>
static __device__ __forceinline__ float value_at(const quantize_args *a, int64_t offset,
                                                 int64_t column) {
    return moq_load_one(a->x.data, offset + column * a->x.inner, (moq_dtype)DT);
}

/* Quantizes groups: a warp a group, a value a lane. */
template <int DT, int WAY>
static __global__ void __launch_bounds__(256)
    quantize_any_groups(const __grid_constant__ quantize_args a, int group) {
    wait_for_predecessor();
    launch_dependents();
    int lane = threadIdx.x % 32;
    int64_t groups = (a.k + group - 1) / group;
    int64_t warp = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (; warp < a.m * groups; warp += (int64_t)gridDim.x * blockDim.x / 32) {
        int64_t row = warp / groups, first = warp % groups * group;
        int64_t end = min(first + group, a.k), offset = row_offset(&a.x, row);
        uint32_t most = 0;
        for (int64_t i = first + lane; i < end; i += 32)
            most = max(most, __float_as_uint(value_at<DT>(&a, offset, i)) & 0x7fffffffu);
        float scale = moq_group_scale(__uint_as_float(__reduce_max_sync(0xffffffffu, most)));
        for (int64_t i = first + lane; i < end; i += 32)
            a.codes[row * a.code_stride + i] =
                (uint8_t)moq_e4m3_pair(__fdiv_rn(value_at<DT>(&a, offset, i), scale), 0.0f);
        for (int64_t i = a.k + lane; end == a.k && i < a.code_columns; i += 32)
            a.codes[row * a.code_stride + i] = 0;
        if (lane == 0)
            ((float *)a.scales)[row * a.scale_row + first / group * a.scale_group] = scale;
    }
}

/* ---- launch ---- */

static bool is_aligned(const void *data, int64_t stride_bytes, int64_t rows, int to) {
    return (uintptr_t)data % to == 0 && (rows < 2 || stride_bytes % to == 0);
}

static int64_t row_count(const moq_tensor *x) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < x->ndim; i++)
        rows *= x->shape[i];
    return rows;
}

/* Returns the rows of x: one stride for all of them if its leading axes allow it. */
static quantize_input input_of(const moq_tensor *x) {
    int64_t size = (int64_t)moq_dtype_size(x->dtype), rows = 1;
    quantize_input in = {.data = x->data, .inner = 1, .outer = x->ndim - 1};
    if (x->ndim > 0 && x->shape[x->ndim - 1] > 1)
        in.inner = x->stride[x->ndim - 1];
    bool one = true;
    for (int i = x->ndim - 2; i >= 0; i--) {
        in.shape[i] = x->shape[i];
        in.step[i] = x->stride[i];
        if (x->shape[i] == 1)
            continue;
        one = one && (rows == 1 || x->stride[i] == rows * in.stride);
        in.stride = rows == 1 ? x->stride[i] : in.stride;
        rows *= x->shape[i];
    }
    if (one || rows == 0)
        in.outer = 0;
    in.aligned = one && in.inner == 1 && is_aligned(x->data, in.stride * size, rows, 16);
    return in;
}

/* Returns the threads of a row or span that keep all its chunks, at most `most`; with few, up to
 * eight rows share a block of at most `limit` threads. */
static dim3 block_for(int64_t chunks, int kept, int most, int limit) {
    int64_t spans = chunks ? (chunks + kept * most - 1) / (kept * most) : 1;
    int64_t threads = (chunks + kept * spans - 1) / (kept * spans);
    int warps = (int)((threads + 31) / 32);
    return warps <= 1 ? dim3(32, limit < 256 ? (unsigned)limit / 32 : 8)
                      : dim3((unsigned)warps * 32);
}

typedef struct {
    dim3 grid, block;
    unsigned cluster;
} shape;

/* Returns the blocks for a count, which may be 0: at least one, which writes a scale of the
 * tensor. */
static unsigned at_most(int64_t count, int64_t limit) {
    return (unsigned)(count < 1 ? 1 : count < limit ? count : limit);
}

/* Lays out a call with whole rows a block: a scale is found over them before the first code. */
static bool by_rows(const moq_cuda_quantize *q, moq_input_mode mode) {
    return mode == MOQ_INPUT_E4M3_TOKEN || (q->activation && q->activation->kind == MOQ_RMS_NORM);
}

/* Returns the blocks of a row's cluster: as many as leave each 2048 values, if the chip has
 * enough. */
static int ranks_for(const quantize_args *a) {
    int ranks = a->k > 8192 ? 8 : 4;
    while (ranks > 2 && a->m * ranks > SPREAD_BLOCKS)
        ranks /= 2;
    return ranks;
}

static shape spread_shape(const quantize_args *a, moq_row_plan plan) {
    int ranks = ranks_for(a), values = chunk_values(plan) * 32 * ranks;
    shape s = {.grid = dim3((unsigned)(a->m * ranks)),
               .block = dim3((unsigned)((a->k + values - 1) / values * 32)),
               .cluster = (unsigned)ranks};
    return s;
}

static shape shape_for(const moq_cuda_quantize *q, const quantize_args *a, moq_input_mode mode,
                       moq_row_plan plan) {
    if (is_spread(plan))
        return spread_shape(a, plan);
    bool rows = by_rows(q, mode);
    int kept = kept_chunks(q->x->dtype, plan), values = chunk_values(plan);
    int64_t chunks = (a->k + values - 1) / values;
    bool norm = q->activation && q->activation->kind == MOQ_RMS_NORM;
    int limit = norm ? norm_threads(plan) : rows ? 1024 : 256;
    shape s = {.block = block_for(chunks, kept, !rows && plan == MOQ_8X1 ? 128 : limit, limit)};
    int64_t blocks = (a->m + s.block.y - 1) / s.block.y, span = (int64_t)kept * s.block.x;
    s.grid =
        dim3(at_most(blocks, MAX_BLOCKS), rows ? 1 : at_most((chunks + span - 1) / span, 65535));
    if (mode == MOQ_FIND_AMAX) { /* rows before spans */
        s.grid.x = at_most(s.grid.x, MAX_PARTS);
        s.grid.y = at_most(s.grid.y, MAX_PARTS / s.grid.x);
    }
    return s;
}

static bool is_dynamic(const moq_cuda_quantize *q) {
    return (q->mode == MOQ_INPUT_E4M3_TENSOR || q->mode == MOQ_INPUT_NVFP4) && !q->given &&
           q->scale == 0.0f;
}

extern "C" int64_t moq_cuda_quantize_workspace(const moq_cuda_quantize *q) {
    return is_dynamic(q) ? MAX_PARTS * (int64_t)sizeof(uint32_t) : 0;
}

/* Source of a kernel's values. */
typedef union {
    memory_source memory;
    silu_source silu;
    norm_source norm;
} any_source;

static silu_source silu_source_of(quantize_input *gate, const moq_tensor *x, int64_t k) {
    silu_source s = {*gate};
    int64_t size = (int64_t)moq_dtype_size(x->dtype);
    s.up.data = (const uint8_t *)gate->data + k * gate->inner * size;
    s.up.aligned = gate->aligned && (uintptr_t)s.up.data % 16 == 0;
    return s;
}

static norm_source norm_source_of(const moq_activation *n, int64_t k) {
    norm_source s = {.weight = input_of(&n->weight),
                     .wide_weight = n->weight.dtype == MOQ_DT_F32,
                     .columns = (float)k,
                     .eps = n->eps};
    s.value_out = n->value_out.data;
    s.aligned_values = is_aligned(s.value_out, k * (int64_t)moq_dtype_size(n->x.dtype), 2, 16);
    if (n->residual.ndim < 0)
        return s;
    s.residual = input_of(&n->residual);
    s.residual_out = n->residual_out.data;
    s.aligned_out = is_aligned(s.residual_out, k * (int64_t)moq_dtype_size(n->x.dtype), 2, 16);
    return s;
}

/* Returns true if every chunk is whole and at a multiple of 16 bytes. */
static bool is_whole(const quantize_args *a, moq_activation_kind kind, const any_source *source) {
    bool rest = true;
    if (kind == MOQ_SILU_AND_MUL)
        rest = source->silu.up.aligned;
    else if (kind == MOQ_RMS_NORM)
        rest = source->norm.weight.aligned && source->norm.aligned_values &&
               (!source->norm.residual.data ||
                (source->norm.residual.aligned && source->norm.aligned_out));
    return rest && a->x.aligned && a->k > 0 && a->k <= INT32_MAX / 2 && a->k % 16 == 0 &&
           a->aligned_codes && a->code_columns == a->k;
}

/* Returns true if rows are faster on several blocks each: always if the chip has room for these,
 * else if a block would have much to do. */
static bool is_worth_spreading(const moq_cuda_quantize *q, const quantize_args *a,
                               const any_source *source) {
    if (!q->activation || a->k < SPREAD_COLUMNS)
        return false;
    bool heavy = q->activation->kind == MOQ_SILU_AND_MUL || source->norm.residual.data;
    return a->m * ranks_for(a) <= SPREAD_BLOCKS || (heavy && a->k > SPREAD_COLUMNS);
}

/* Returns the plan for whole rows, fastest on an H200 at 1 to 64 and at 8192 rows of 4096 and 8192.
 * Rows that threads have to keep can be too long for all of them. */
static moq_row_plan plan_for(const moq_cuda_quantize *q, const quantize_args *a,
                             const any_source *source, moq_input_mode mode) {
    moq_activation_kind kind = q->activation ? q->activation->kind : MOQ_ACTIVATION_NONE;
    if (q->x->dtype == MOQ_DT_F32 || mode == MOQ_INPUT_NVFP4 || !is_whole(a, kind, source))
        return MOQ_ANY_ROWS;
    bool few = a->m <= FEW_CHUNKS && a->m * (a->k / 8) <= FEW_CHUNKS;
    if (!by_rows(q, mode))
        return few ? MOQ_8X1 : MOQ_16X2;
    if (a->k > 1024 * 32)
        return MOQ_ANY_ROWS;
    if (few && is_worth_spreading(q, a, source) &&
        moq_cuda_is_recent(MOQ_GENERAL(MOQ_DT_F32, quantize_any_groups)))
        return MOQ_8X1_SPREAD;
    bool narrow = a->k <= 1024 * 16;
    if (kind == MOQ_RMS_NORM && source->norm.residual.data)
        return narrow ? MOQ_16X1 : MOQ_ANY_ROWS;
    if (kind == MOQ_RMS_NORM)
        return few && narrow ? MOQ_16X1 : a->k > 4096 ? MOQ_16X4 : MOQ_16X2;
    if (kind == MOQ_SILU_AND_MUL && few && a->k <= 1024 * 8)
        return MOQ_8X1;
    return kind == MOQ_SILU_AND_MUL && narrow ? MOQ_16X1 : MOQ_16X2;
}

static moq_status launch(const moq_cuda_quantize *q, const quantize_args *a, any_source *source,
                         moq_input_mode mode, moq_err *err) {
    moq_activation_kind kind = q->activation ? q->activation->kind : MOQ_ACTIVATION_NONE;
    moq_dtype dtype = q->x->dtype;
    moq_row_plan plan = plan_for(q, a, source, mode);
    shape s = shape_for(q, a, mode, plan);
    moq_launch launch = {.what = "quantize",
                         .kernel =
                             kind == MOQ_SILU_AND_MUL ? moq_silu_kernel(dtype, mode, plan)
                             : kind == MOQ_RMS_NORM
                                 ? moq_norm_kernel(dtype, mode, plan, source->norm.wide_weight)
                                 : kernel_of<memory_source>(dtype, mode, plan),
                         .grid = s.grid,
                         .block = s.block,
                         .cluster = s.cluster,
                         .stream = (cudaStream_t)q->stream,
                         .pdl = !q->in_turn};
    if (kind == MOQ_RMS_NORM) {
        int part = 32 * chunk_values(plan);
        source->norm.parts = (int)((a->k + part - 1) / part);
        launch.shared = 2 * s.block.y * source->norm.parts * sizeof(float);
    }
    void *parameters[] = {(void *)a, source};
    return moq_cuda_launch(&launch, parameters, err);
}

static moq_status launch_any_groups(const moq_cuda_quantize *q, const quantize_args *a,
                                    moq_err *err) {
    int group = q->group;
    int64_t warps = a->m * ((a->k + group - 1) / group);
    moq_launch launch = {.what = "quantize",
                         .kernel = MOQ_GENERAL(q->x->dtype, quantize_any_groups),
                         .grid = dim3(at_most((warps + 7) / 8, MAX_BLOCKS)),
                         .block = dim3(256),
                         .stream = (cudaStream_t)q->stream,
                         .pdl = !q->in_turn};
    void *parameters[] = {(void *)a, &group};
    return moq_cuda_launch(&launch, parameters, err);
}

/* Launches the first of two kernels: maxima for the second, which reads them; and z, if there is a
 * residual, for the second. */
static moq_status find_amax(const moq_cuda_quantize *q, quantize_args *a, any_source *source,
                            moq_err *err) {
    shape s = shape_for(q, a, MOQ_FIND_AMAX, plan_for(q, a, source, MOQ_FIND_AMAX));
    a->parts_out = (uint32_t *)q->workspace;
    MOQ_TRY(launch(q, a, source, MOQ_FIND_AMAX, err));
    a->parts = a->parts_out;
    a->part_count = (int)(s.grid.x * s.grid.y);
    a->found = q->mode == MOQ_INPUT_NVFP4 ? q->scale_2 : (float *)q->scales;
    if (q->activation && q->activation->kind == MOQ_RMS_NORM && source->norm.residual.data) {
        a->x = input_of(&q->activation->residual_out);
        source->norm.residual.data = NULL;
    }
    return MOQ_OK;
}

extern "C" moq_status moq_cuda_quantize_rows(const moq_cuda_quantize *q, moq_err *err) {
    moq_activation_kind kind = q->activation ? q->activation->kind : MOQ_ACTIVATION_NONE;
    int64_t k = q->x->ndim > 0 ? q->x->shape[q->x->ndim - 1] : 1;
    quantize_args a = {.m = row_count(q->x),
                       .k = kind == MOQ_SILU_AND_MUL ? k / 2 : k,
                       .given = q->given,
                       .scale = q->scale,
                       .codes = q->codes,
                       .code_stride = q->code_stride,
                       .code_columns = q->code_columns,
                       .scales = q->scales,
                       .scale_row = q->scale_row,
                       .scale_group = q->scale_group,
                       .scale_tiles = q->scale_tiles,
                       .next_is_busy = q->next_is_busy,
                       .x = input_of(q->x)};
    any_source source;
    if (kind == MOQ_SILU_AND_MUL)
        source.silu = silu_source_of(&a.x, q->x, a.k);
    else if (kind == MOQ_RMS_NORM)
        source.norm = norm_source_of(q->activation, a.k);
    a.aligned_codes = is_aligned(a.codes, a.code_stride, a.m, q->mode == MOQ_INPUT_NVFP4 ? 8 : 16);
    if (q->mode == MOQ_INPUT_E4M3_GROUP && q->group != 128)
        return launch_any_groups(q, &a, err);
    if (is_whole(&a, kind, &source) && moq_quantize_suits_flat(q, &a))
        return moq_quantize_flat(q, &a, err);
    if (is_dynamic(q))
        MOQ_TRY(find_amax(q, &a, &source, err));
    return launch(q, &a, &source, q->mode, err);
}

} // namespace moq::quantization
