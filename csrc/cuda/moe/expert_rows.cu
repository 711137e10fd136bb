/* Rows for the two products of experts (core/moe.h has the formulas):
 *
 *   h[r] = rounded(x[t] * w), rounded(... * pre_quant_scale[e]), quantized    for W13
 *   g[r] = rounded(act(u[r])), rounded(... * pre_quant_scale[e]), quantized   for W2
 *
 * If x is codes already, h[r] = x[t] with its scales, unchanged.
 *
 * Layouts: x [tokens, H] of any dtype or codes, u float32 [rows, P * I], rows in a row_format
 * (pipeline.h), sorted by expert. A block has one row, a thread 16 neighbouring columns of it at
 * a time. Scales of a whole row take a pass before the one that writes; a thread keeps its first
 * values for it, and makes those of longer rows anew. The arithmetic of quantization is that of
 * cpu/cpu_quantize.h, bit by bit. Bound: memory, as u is float32. */
#include "cuda/device/ptx.h"
#include "cuda/device/round.h"
#include "cuda/moe/expert_activation.h"
#include "cuda/moe/pipeline.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define THREADS 128
#define SPAN    (16 * THREADS) /* columns that a block has at a time */

typedef struct {
    moq_rows from; /* rows of x, or of u */
    activation act;
    bool gated;
    bool aligned; /* rows of u, and their halves, begin at multiples of 16 bytes */
    moq_dtype dtype;
    int64_t k, first; /* columns; first is the token of slot 0 */
    int64_t scale_stride;
    int32_t top_k;
    bool by_row; /* rows are read in their order, not gathered from x */
    slot_groups groups;
    const float *weights; /* router weights on the input, or NULL */
    slot_tensor weight_at;
    const float *smooth;      /* [E, K] or NULL */
    const float *input_scale; /* [E, partitions] */
    int partition_count;
    void *out;
    int64_t stride; /* bytes of a row of out */
    float *scales;
} row_args;

static __host__ __device__ constexpr bool is_values(row_format format) {
    return format == ROWS_VALUES || format == ROWS_AMAX;
}

static __host__ __device__ constexpr bool is_halves(row_format format) {
    return format == ROWS_HALVES_TENSOR || format == ROWS_HALVES_TOKEN ||
           format == ROWS_HALVES_NVFP4 || format == ROWS_HALVES_INT8;
}

static __host__ __device__ constexpr bool has_row_scales(row_format format) {
    return format == ROWS_AMAX || format == ROWS_TOKEN || format == ROWS_HALVES_TOKEN ||
           format == ROWS_HALVES_INT8;
}

/* ---- values ---- */

static __device__ __forceinline__ void round_values(moq_dtype dtype, float (&value)[16]) {
    if (dtype == MOQ_DT_F32)
        return;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        float2 pair = moq_widen_pair(moq_narrow_pair(dtype, value[i], value[i + 1]), dtype);
        value[i] = pair.x;
        value[i + 1] = pair.y;
    }
}

/* Loads columns of u, whose rows may begin anywhere. */
static __device__ __forceinline__ void load_u(const row_args *a, const moq_rows *u, int64_t row,
                                              int64_t column, float (&value)[16]) {
    if (a->aligned) {
        moq_load_values(u, row, column, a->k, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] =
            column + i < a->k ? ((const float *)u->data)[row * u->stride + column + i] : 0.0f;
}

static __device__ __forceinline__ void load_activated(const row_args *a, int64_t row,
                                                      int64_t column, float (&value)[16]) {
    float up[16];
    moq_rows half = a->from;
    load_u(a, &a->from, row, column, value);
    half.data = (const float *)half.data + a->k;
    if (a->gated)
        load_u(a, &half, row, column, up);
#pragma unroll
    for (int i = 0; i < 16; i++) /* columns of g beyond the end are 0 */
        value[i] = column + i < a->k ? activate(&a->act, value[i], a->gated ? up[i] : 1.0f) : 0.0f;
    round_values(a->dtype, value);
}

/* The row of a block. */
typedef struct {
    int row, expert;
    int64_t from; /* row of x, or of u */
    float weight; /* router weight, or 1 if it is not on the input */
} row_place;

template <bool OF_U>
static __device__ __forceinline__ void make_values(const row_args *a, const row_place *p,
                                                   int64_t column, float (&value)[16]) {
    if (OF_U)
        load_activated(a, p->from, column, value);
    else
        moq_load_values(&a->from, p->from, column, a->k, value);
    if (!OF_U && a->weights) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            value[i] = column + i < a->k ? __fmul_rn(value[i], p->weight) : 0.0f;
        round_values(a->dtype, value);
    }
    if (!a->smooth)
        return;
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = column + i < a->k ? __fmul_rn(value[i], a->smooth[p->expert * a->k + column + i])
                                     : 0.0f;
    round_values(a->dtype, value);
}

template <bool OF_U>
static __device__ __forceinline__ row_place place_of(const row_args *a, int row) {
    row_place p = {row, a->groups.owner[row], row, 1.0f};
    if (OF_U || a->by_row)
        return p;
    int slot = a->groups.slot[row];
    p.from = a->first + slot / a->top_k;
    if (a->weights)
        p.weight = a->weights[slot_offset(&a->weight_at, p.from, slot % a->top_k)];
    return p;
}

/* ---- rows ---- */

/* Returns the largest magnitude of the block's row in all threads, and keeps a thread's first KEPT
 * times 16 values. */
template <bool OF_U, int KEPT>
static __device__ __forceinline__ float find_amax(const row_args *a, const row_place *p,
                                                  float (&kept)[KEPT][16]) {
    __shared__ uint32_t shared[THREADS / 32];
    uint32_t most = 0;
    int64_t column = (int64_t)threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < KEPT; i++, column += SPAN) {
        if (column >= a->k)
            continue;
        make_values<OF_U>(a, p, column, kept[i]);
        most = max(most, moq_amax_bits(kept[i]));
    }
    for (; column < a->k; column += SPAN) {
        float value[16];
        make_values<OF_U>(a, p, column, value);
        most = max(most, moq_amax_bits(value));
    }
    most = moq_max_of_lanes(most, 32);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++)
        most = max(most, shared[i]);
    return __uint_as_float(most);
}

static __device__ __forceinline__ void store_values(const row_args *a, moq_dtype dtype, int row,
                                                    int64_t column, const float (&value)[16]) {
    bool wide = dtype == MOQ_DT_F32;
    uint4 *to = (uint4 *)((uint8_t *)a->out + row * a->stride + column * (wide ? 4 : 2));
    if (wide) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[i] =
                make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                           __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3]));
        return;
    }
    uint32_t word[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        word[i] = moq_narrow_pair(dtype, value[2 * i], value[2 * i + 1]);
    to[0] = make_uint4(word[0], word[1], word[2], word[3]);
    to[1] = make_uint4(word[4], word[5], word[6], word[7]);
}

/* Returns the scale of a row: by token, or of int8 that of the expert if it has one. */
template <row_format FORMAT>
static __device__ __forceinline__ float scale_of_row(const row_args *a, int expert, float amax) {
    if (FORMAT != ROWS_HALVES_INT8)
        return moq_token_scale(amax);
    if (a->input_scale)
        return a->input_scale[expert * a->partition_count];
    float scale = __fdiv_rn(amax, MOQ_INT8_MAX);
    return scale < 1.17549435e-38f ? 1.0f : scale; /* FLT_MIN */
}

/* Stores the values of a thread's codes as float16. */
template <row_format FORMAT>
static __device__ __forceinline__ void store_halves(const row_args *a, int row, int64_t column,
                                                    float scale, float (&value)[16]) {
    if (FORMAT == ROWS_HALVES_NVFP4)
        round_nvfp4(value, scale);
    if (FORMAT == ROWS_HALVES_TOKEN)
        moq_divide(value, scale, scale > 1e-12f && scale < 1e30f);
    float inverse = FORMAT == ROWS_HALVES_INT8 ? __frcp_rn(scale) : scale;
#pragma unroll
    for (int i = 0; i < 16 && FORMAT != ROWS_HALVES_NVFP4; i++) {
        float quotient = FORMAT == ROWS_HALVES_TOKEN ? value[i] : __fmul_rn(value[i], inverse);
        value[i] = FORMAT == ROWS_HALVES_INT8 ? round_int8(quotient) : round_e4m3(quotient);
    }
    store_values(a, MOQ_DT_F16, row, column, value);
}

/* Stores codes of a thread's columns; the eight lanes of a group call together. */
template <row_format FORMAT>
static __device__ __forceinline__ void store_codes(const row_args *a, const row_place *p,
                                                   int64_t column, float scale,
                                                   float (&value)[16]) {
    uint4 codes;
    if (FORMAT == ROWS_TENSOR) {
        codes = moq_codes_multiplied(value, scale);
    } else if (FORMAT == ROWS_TOKEN) {
        codes = moq_codes_divided(value, scale);
    } else {
        scale = moq_group_scale(__uint_as_float(moq_max_of_lanes(moq_amax_bits(value), 8)));
        codes = moq_codes_divided(value, scale);
        if (threadIdx.x % 8 == 0 && column < a->k)
            a->scales[column / 128 * a->scale_stride + p->row] = scale;
    }
    if (column < a->k)
        *(uint4 *)((uint8_t *)a->out + p->row * a->stride + column) = codes;
}

/* Stores a thread's values in the format of the product; lanes call together. */
template <row_format FORMAT>
static __device__ __forceinline__ void store_row(const row_args *a, const row_place *p,
                                                 int64_t column, float scale, float (&value)[16]) {
    if (!is_values(FORMAT) && !is_halves(FORMAT))
        store_codes<FORMAT>(a, p, column, scale, value);
    else if (column >= a->k)
        return;
    else if (is_halves(FORMAT))
        store_halves<FORMAT>(a, p->row, column, scale, value);
    else
        store_values(a, a->dtype, p->row, column, value);
}

/* Makes rows of x or u. KEPT is 0 if rows have no scales of their own. */
template <bool OF_U, row_format FORMAT, int KEPT>
static __global__ void __launch_bounds__(THREADS) make_rows(const __grid_constant__ row_args a) {
    launch_dependents();
    wait_for_predecessor();
    int row = (int)blockIdx.x, count = a.groups.count[0], slot = a.groups.slot[row];
    if (row >= count || slot < 0)
        return;
    row_place p = place_of<OF_U>(&a, row);
    float scale = 1.0f;
    if (FORMAT == ROWS_TENSOR || FORMAT == ROWS_HALVES_TENSOR)
        scale = __frcp_rn(a.input_scale[p.expert * a.partition_count]);
    if (FORMAT == ROWS_HALVES_NVFP4)
        scale = a.input_scale[p.expert * a.partition_count];
    int64_t column = (int64_t)threadIdx.x * 16, base = 0;
    if constexpr (KEPT > 0) {
        float kept[KEPT][16] = {}, amax = find_amax<OF_U>(&a, &p, kept);
        scale = scale_of_row<FORMAT>(&a, p.expert, amax);
        if (threadIdx.x == 0)
            a.scales[row] = FORMAT == ROWS_AMAX ? amax : scale;
#pragma unroll
        for (int i = 0; i < KEPT; i++, base += SPAN)
            store_row<FORMAT>(&a, &p, base + column, scale, kept[i]);
    }
    for (; base < a.k; base += SPAN) { /* lanes of a warp loop together */
        float value[16] = {};
        if (base + column < a.k)
            make_values<OF_U>(&a, &p, base + column, value);
        store_row<FORMAT>(&a, &p, base + column, scale, value);
    }
}

/* ---- codes ---- */

typedef struct {
    const uint8_t *codes;
    int64_t next, bytes; /* bytes from row to row, and of a row */
    const void *x_scale; /* may be NULL */
    slot_tensor scale_at;
    int x_scales; /* scales of a row */
    int64_t first;
    int32_t top_k;
    slot_groups groups;
    uint8_t *out;
    int64_t stride;
    void *scales;
    int64_t scale_stride;
} code_args;

static __device__ __forceinline__ void copy_code_row(const code_args *a, int64_t token, int row) {
    const uint8_t *from = a->codes + token * a->next;
    uint8_t *to = a->out + row * a->stride;
    for (int64_t at = (int64_t)threadIdx.x * 16; at < a->stride; at += THREADS * 16) {
        if (at + 16 <= a->bytes) {
            *(uint4 *)(to + at) = *(const uint4 *)(from + at);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 16; i++)
            to[at + i] = at + i < a->bytes ? from[at + i] : 0;
    }
}

/* Converts two e4m3 codes to float16, NaN too. */
static __device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t codes) {
    __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);
    return (uint32_t)pair.x | (uint32_t)pair.y << 16;
}

/* Converts the two e2m1 codes of a byte, times their block scale, to float16, which holds them. */
static __device__ __forceinline__ uint32_t halves_of_e2m1(uint32_t byte, float block) {
    uint32_t bits = (byte & 0x07u) << 9 | (byte & 0x08u) << 12 | (byte & 0x70u) << 21 |
                    (byte & 0x80u) << 24; /* float16 bits, times 2^-14 */
    float2 pair = moq_widen_pair(bits, MOQ_DT_F16);
    block *= 16384.0f;
    return moq_narrow_pair(MOQ_DT_F16, __fmul_rn(pair.x, block), __fmul_rn(pair.y, block));
}

/* Copies a row as the float16 values of its codes, without its scale. Columns are a multiple of 16,
 * as in NVFP4 weights. */
template <row_format FORMAT>
static __device__ __forceinline__ void copy_halves(const code_args *a, int64_t token, int row) {
    const uint8_t *from = a->codes + token * a->next;
    for (int64_t group = threadIdx.x; group < a->stride / 32; group += THREADS) {
        uint32_t word[8];
        float block = 0.0f;
        if (FORMAT == ROWS_HALVES_NVFP4) {
            int64_t at = slot_offset(&a->scale_at, token, (int)group);
            block = moq_widen_pair(halves_of_e4m3(((const uint8_t *)a->x_scale)[at]), MOQ_DT_F16).x;
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            word[i] = FORMAT == ROWS_HALVES_NVFP4
                          ? halves_of_e2m1(from[group * 8 + i], block)
                          : halves_of_e4m3(((const uint16_t *)from)[group * 8 + i]);
        uint4 *to = (uint4 *)(a->out + row * a->stride) + group * 2;
        to[0] = make_uint4(word[0], word[1], word[2], word[3]);
        to[1] = make_uint4(word[4], word[5], word[6], word[7]);
    }
}

template <row_format FORMAT>
static __global__ void __launch_bounds__(THREADS) copy_codes(const __grid_constant__ code_args a) {
    launch_dependents();
    wait_for_predecessor();
    int row = (int)blockIdx.x;
    if (row >= a.groups.count[0] || a.groups.slot[row] < 0)
        return;
    int64_t token = a.first + a.groups.slot[row] / a.top_k;
    if (is_halves(FORMAT))
        copy_halves<FORMAT>(&a, token, row);
    else
        copy_code_row(&a, token, row);
    for (int i = threadIdx.x; i < a.x_scales && FORMAT != ROWS_HALVES_NVFP4; i += THREADS) {
        int64_t at = slot_offset(&a.scale_at, token, i);
        if (FORMAT == ROWS_NVFP4)
            ((uint8_t *)a.scales)[(int64_t)row * a.x_scales + i] = ((const uint8_t *)a.x_scale)[at];
        else /* a token scale is the only one, at i = 0 */
            ((float *)a.scales)[i * a.scale_stride + row] = ((const float *)a.x_scale)[at];
    }
}

/* ---- launch ---- */

int64_t row_bytes(row_format format, moq_dtype dtype, int64_t columns) {
    if (format == ROWS_NVFP4)
        return (columns / 2 + 15) / 16 * 16;
    int64_t size = is_values(format) ? (int64_t)moq_dtype_size(dtype) : is_halves(format) ? 2 : 1;
    return (columns + 15) / 16 * 16 * size;
}

int64_t scale_bytes(row_format format, int64_t rows, int64_t columns) {
    if (format == ROWS_GROUP)
        return rows * ((columns + 127) / 128) * (int64_t)sizeof(float);
    if (format == ROWS_NVFP4)
        return rows * (columns / 16);
    return has_row_scales(format) ? rows * (int64_t)sizeof(float) : 0;
}

/* Returns the kernel for rows with scales of their own. It keeps a span of columns, or of x four
 * spans if these are the whole row. The code for u is too large for a second instance. */
template <bool OF_U, row_format FORMAT> static const void *kernel_keeping(int64_t columns) {
    if constexpr (!OF_U) {
        if (columns > SPAN && columns <= 4 * SPAN)
            return (const void *)make_rows<OF_U, FORMAT, 4>;
    }
    return (const void *)make_rows<OF_U, FORMAT, 1>;
}

template <bool OF_U> static const void *kernel_for(row_format format, int64_t columns) {
    switch (format) {
    case ROWS_AMAX:
        return kernel_keeping<OF_U, ROWS_AMAX>(columns);
    case ROWS_TENSOR:
        return (const void *)make_rows<OF_U, ROWS_TENSOR, 0>;
    case ROWS_TOKEN:
        return kernel_keeping<OF_U, ROWS_TOKEN>(columns);
    case ROWS_GROUP:
        return (const void *)make_rows<OF_U, ROWS_GROUP, 0>;
    case ROWS_HALVES_TENSOR:
        return (const void *)make_rows<OF_U, ROWS_HALVES_TENSOR, 0>;
    case ROWS_HALVES_TOKEN:
        return kernel_keeping<OF_U, ROWS_HALVES_TOKEN>(columns);
    case ROWS_HALVES_NVFP4:
        return (const void *)make_rows<OF_U, ROWS_HALVES_NVFP4, 0>;
    case ROWS_HALVES_INT8:
        return kernel_keeping<OF_U, ROWS_HALVES_INT8>(columns);
    default:
        return (const void *)make_rows<OF_U, ROWS_VALUES, 0>;
    }
}

static moq_status launch(const char *what, const void *kernel, dim3 grid, int threads, void *stream,
                         void *args, moq_err *err) {
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = grid,
                         .block = dim3((unsigned)threads),
                         .stream = (cudaStream_t)stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

/* Fills the arguments that rows of x, u and g share. */
static row_args args_of(const slot_chunk *chunk, const slot_groups *groups,
                        const moq_linear_spec *spec, const moq_moe_weight *weight,
                        const expert_rows *rows) {
    const moq_moe_spec *moe = chunk->call->spec;
    row_args a = {};
    a.dtype = spec->dtype;
    a.k = spec->in_features;
    a.first = chunk->first;
    a.top_k = moe->top_k;
    a.groups = *groups;
    a.smooth = weight->pre_quant_scale;
    a.input_scale = weight->input_scale;
    a.partition_count = spec->partition_count;
    a.out = rows->data;
    a.stride = row_bytes(rows->format, spec->dtype, spec->in_features);
    a.scales = (float *)rows->scales;
    a.scale_stride = rows->scale_stride;
    return a;
}

/* Returns the kernel that copies codes; a scale of a row is copied like scales of groups. */
static const void *code_kernel_for(row_format format) {
    switch (format) {
    case ROWS_NVFP4:
        return (const void *)copy_codes<ROWS_NVFP4>;
    case ROWS_HALVES_NVFP4:
        return (const void *)copy_codes<ROWS_HALVES_NVFP4>;
    case ROWS_HALVES_TENSOR:
    case ROWS_HALVES_TOKEN:
        return (const void *)copy_codes<ROWS_HALVES_TOKEN>;
    default:
        return (const void *)copy_codes<ROWS_GROUP>;
    }
}

static moq_status copy_rows_of_codes(const slot_chunk *chunk, const slot_groups *groups,
                                     const expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_linear_spec *w13 = &call->spec->w13;
    code_args a = {};
    a.codes = (const uint8_t *)call->x->data;
    a.next = call->x->stride[0];
    a.bytes = moq_linear_x_columns(w13);
    if (call->x_scale) {
        a.x_scale = call->x_scale->data;
        a.scale_at = slot_tensor_of(call->x_scale);
        a.x_scales = (int)moq_moe_x_scales(call->spec);
    }
    a.first = chunk->first;
    a.top_k = call->spec->top_k;
    a.groups = *groups;
    a.out = (uint8_t *)rows->data;
    a.stride = row_bytes(rows->format, w13->dtype, w13->in_features);
    a.scales = rows->scales;
    a.scale_stride = rows->scale_stride;
    return launch("rows of experts", code_kernel_for(rows->format),
                  dim3((unsigned)most_rows(chunk)), THREADS, call->stream, &a, err);
}

moq_status make_rows_of_x(const slot_chunk *chunk, const slot_groups *groups,
                          const expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    if (call->spec->w13.quantized_input)
        return copy_rows_of_codes(chunk, groups, rows, err);
    row_args a = args_of(chunk, groups, &call->spec->w13, &call->w13, rows);
    a.from = moq_rows_of(call->x);
    if (call->weights_on_input) {
        a.weights = (const float *)call->weights->data;
        a.weight_at = slot_tensor_of(call->weights);
    }
    return launch("rows of experts", kernel_for<false>(rows->format, a.k),
                  dim3((unsigned)most_rows(chunk)), THREADS, call->stream, &a, err);
}

moq_status make_rows_of_u(const slot_chunk *chunk, const slot_groups *groups, const void *u,
                          const expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    row_args a = args_of(chunk, groups, &spec->w2, &call->w2, rows);
    a.from = {u, spec->w13.out_features, MOQ_DT_F32};
    a.act = activation_of(spec);
    a.gated = spec->gated;
    a.aligned = a.k % 4 == 0;
    return launch("activation of experts", kernel_for<true>(rows->format, a.k),
                  dim3((unsigned)most_rows(chunk)), THREADS, call->stream, &a, err);
}

moq_status make_rows_of_g(const slot_chunk *chunk, const slot_groups *groups, const void *g,
                          const expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_linear_spec *w2 = &call->spec->w2;
    row_args a = args_of(chunk, groups, w2, &call->w2, rows);
    a.from = {g, (w2->in_features + 15) / 16 * 16, w2->dtype};
    a.by_row = true;
    return launch("rows of experts", kernel_for<false>(rows->format, a.k),
                  dim3((unsigned)most_rows(chunk)), THREADS, call->stream, &a, err);
}

} // namespace moq::moe
