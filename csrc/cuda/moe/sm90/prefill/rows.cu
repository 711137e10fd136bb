/* Rows for the prefill products of experts on Hopper: ROWS_TENSOR, ROWS_TOKEN, ROWS_GROUP and
 * ROWS_VALUES of expert_rows.cu, bit by bit, for many rows.
 *
 * A warp has a token of x, or a block has a long one: it makes codes once for all of its slots, or
 * once more if the scale of a slot's expert differs, and stores them in the rows of these slots. A
 * warp, or half of one, has a row of g. A slot's weight or its expert's pre_quant_scale may change
 * its codes: then a warp has its row. Values, and codes with the scales beside them, are copied.
 *
 * Layouts: x [tokens, K] or g [rows, K] of 16 bits; codes [rows, K]; scales a row, or by groups [K
 * / 128, scale_stride]. Sorted rows are then copied by TMA; warps that gathered codes of tokens
 * took more from the product than these rows take to be written (docs/lab/experts-prefill.md).
 * Bound: writes, slots times columns. */
#include "core/invariant.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/sm90/prefill/prefill.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_prefill {

#define ROW_THREADS 128
#define AT_ONCE     4 /* chunks of a lane at a time */

#define BLOCKS_AT_ONCE 8 /* blocks of tokens on a multiprocessor */

/* Work of a warp: the rows of a token's slots, a row of g, or one row of either with a weight or
 * factors. */
typedef enum { OF_TOKEN, OF_G, TREATED } row_source;

typedef struct {
    moq_rows from; /* x from the chunk's first token on, or g */
    moe::slot_groups groups;
    const float *input_scale; /* [E, partitions] */
    int partition_count, top_k, k;
    int sources;    /* tokens, or rows at most */
    uint8_t *codes; /* [rows, k], or values */
    float *scales;  /* scales of rows, or of groups [K / 128, scale_stride] */
    int64_t scale_stride;
    bool of_g; /* TREATED rows are of g, not of x */
    int64_t first;
    const float *weights; /* router weights on the input, or NULL */
    moe::slot_tensor weight_at;
    const float *smooth;      /* [E, K] or NULL */
    int32_t *written;         /* counters of rows, which become 0, or NULL */
    moe::slot_tensor x_scale; /* scales beside codes of x, and how many a token has */
    int x_scales;
} row_args;

/* Shape of a kernel that makes rows: LANES have one. PAIRED: in the order of
 * moq_cuda_quantize.paired. */
template <moe::row_format FORMAT_, row_source SOURCE_, moq_dtype DTYPE_, int LANES_, bool PAIRED_>
struct row_shape {
    static constexpr moe::row_format FORMAT = FORMAT_;
    static constexpr row_source SOURCE = SOURCE_;
    static constexpr moq_dtype DTYPE = DTYPE_;
    static constexpr int LANES = LANES_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int STEP = LANES * 16;     /* columns of a chunk of all lanes */
    static constexpr int SPAN = STEP * AT_ONCE; /* columns of all chunks of all lanes */
};

/* ---- sources ---- */

/* A row of values and the rows that are made of it. */
typedef struct {
    int from;
    int row;      /* a lane's row among them, or -1 */
    float factor; /* factor of its values */
    bool weighted;
    float weight;
    const float *smooth;
} value_row;

/* Finds the values of row `number`, whose codes are its own. */
template <class S>
static __device__ __forceinline__ void find_row(const row_args *a, int number, value_row *v) {
    if (number >= a->groups.count[0])
        return;
    int slot = a->groups.slot[number];
    v->row = slot >= 0 ? number : -1;
    if (S::SOURCE != TREATED || slot < 0)
        return;
    if (a->smooth)
        v->smooth = a->smooth + (int64_t)a->groups.owner[number] * a->k;
    if (a->of_g)
        return;
    v->from = slot / a->top_k;
    v->weighted = a->weights != NULL;
    if (v->weighted)
        v->weight =
            a->weights[slot_offset(&a->weight_at, a->first + v->from, slot - v->from * a->top_k)];
}

template <class S>
static __device__ __forceinline__ value_row find_source(const row_args *a, int number) {
    int lane = threadIdx.x % 32;
    value_row v = {number, -1, 1.0f, false, 1.0f, NULL};
    if (number >= a->sources)
        return v;
    if (S::SOURCE != OF_TOKEN)
        find_row<S>(a, number, &v);
    else if (lane < a->top_k)
        v.row = a->groups.row[(int64_t)number * a->top_k + lane];
    if (S::FORMAT == moe::ROWS_TENSOR && v.row >= 0)
        v.factor = __frcp_rn(a->input_scale[(int64_t)a->groups.owner[v.row] * a->partition_count]);
    return v;
}

/* ---- values ---- */

template <class S> static __device__ __forceinline__ int column_of_lane(int base) {
    return base + (int)threadIdx.x % S::LANES * 16;
}

/* Loads a lane's chunks of the columns from `base` on; zeros beyond the last column. */
template <class S>
static __device__ __forceinline__ void load_span(const row_args *a, int source, int base,
                                                 moq_chunk (&chunk)[AT_ONCE]) {
    int column = column_of_lane<S>(base);
    const uint4 *from =
        (const uint4 *)((const uint16_t *)a->from.data + source * a->from.stride + column);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        bool there = column + S::STEP * i < a->k;
        chunk[i].word[0] = there ? from[S::STEP / 8 * i] : make_uint4(0, 0, 0, 0);
        chunk[i].word[1] = there ? from[S::STEP / 8 * i + 1] : make_uint4(0, 0, 0, 0);
    }
}

static __device__ __forceinline__ void multiply_and_round(moq_dtype dtype, float (&value)[16],
                                                          const float (&by)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        uint32_t pair =
            moq_narrow_pair(dtype, __fmul_rn(value[i], by[i]), __fmul_rn(value[i + 1], by[i + 1]));
        float2 rounded = moq_widen_pair(pair, dtype);
        value[i] = rounded.x;
        value[i + 1] = rounded.y;
    }
}

/* Returns the values of a chunk, with the slot's weight and factors. */
template <class S>
static __device__ __forceinline__ void read_chunk(const row_args *a, const value_row *v, int column,
                                                  const moq_chunk *chunk, float (&value)[16]) {
    moq_rows from = {a->from.data, a->from.stride, S::DTYPE};
    float by[16];
    moq_widen(&from, chunk, value);
    if (S::SOURCE == TREATED && v->weighted) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            by[i] = v->weight;
        multiply_and_round(S::DTYPE, value, by);
    }
    if (S::SOURCE == TREATED && v->smooth && column < a->k) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            by[i] = v->smooth[column + i];
        multiply_and_round(S::DTYPE, value, by);
    }
}

template <class S>
static __device__ __forceinline__ uint32_t amax_of_span(const row_args *a, const value_row *v,
                                                        int base,
                                                        const moq_chunk (&chunk)[AT_ONCE]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        float value[16];
        if (S::SOURCE != TREATED) {
            most = max(most, moq_chunk_amax_bits(&chunk[i], false, S::DTYPE));
            continue;
        }
        read_chunk<S>(a, v, column_of_lane<S>(base) + S::STEP * i, &chunk[i], value);
        most = max(most, moq_amax_bits(value));
    }
    return most;
}

/* ---- codes ---- */

/* Divides for quotients that moq_divide treats apart; out of line, so that other code stays
 * short. */
static __device__ __noinline__ void divide_slowly(float *value, float scale) {
#pragma unroll 1
    for (int i = 0; i < 16; i++)
        value[i] = __fdiv_rn(value[i], scale);
}

/* as moq_codes_divided */
static __device__ __forceinline__ uint4 divided_codes(float (&value)[16], float scale) {
    if (scale > 1e-12f && scale < 1e30f) {
        moq_divide(value, scale, true);
        return moq_e4m3_codes(value);
    }
    float copy[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
        copy[i] = value[i];
    divide_slowly(copy, scale);
    return moq_e4m3_codes(copy);
}

/* Returns the codes of 16 columns in the order of moq_cuda_quantize.paired. */
static __device__ __forceinline__ uint4 paired(const uint4 &c) {
    return make_uint4(__byte_perm(c.x, c.z, 0x5410), __byte_perm(c.x, c.z, 0x7632),
                      __byte_perm(c.y, c.w, 0x5410), __byte_perm(c.y, c.w, 0x7632));
}

/* Makes codes of a span by one factor, by `scale`, or by scales of groups, which each of eight
 * lanes then has in `group`. */
template <class S>
static __device__ __forceinline__ void make_span(const row_args *a, const value_row *v, int base,
                                                 const moq_chunk (&chunk)[AT_ONCE], float scale,
                                                 float (&group)[AT_ONCE], uint4 (&code)[AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        float value[16];
        read_chunk<S>(a, v, column_of_lane<S>(base) + S::STEP * i, &chunk[i], value);
        if (S::FORMAT == moe::ROWS_TENSOR) {
            code[i] = moq_codes_multiplied(value, scale);
            continue;
        }
        if (S::FORMAT == moe::ROWS_GROUP)
            scale = moq_group_scale(__uint_as_float(
                moq_max_of_lanes(moq_chunk_amax_bits(&chunk[i], false, S::DTYPE), 8)));
        uint4 c = divided_codes(value, scale);
        code[i] = S::PAIRED ? paired(c) : c;
        group[i] = scale;
    }
}

template <class S>
static __device__ __forceinline__ void store_span(const row_args *a, int row, int base,
                                                  const float (&group)[AT_ONCE],
                                                  const uint4 (&code)[AT_ONCE]) {
    int column = column_of_lane<S>(base);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        if (column + S::STEP * i >= a->k)
            break;
        *(uint4 *)(a->codes + (int64_t)row * a->k + column + S::STEP * i) = code[i];
        if (S::FORMAT == moe::ROWS_GROUP && threadIdx.x % 8 == 0)
            a->scales[(column + S::STEP * i) / 128 * a->scale_stride + row] = group[i];
    }
}

/* Stores codes of a span of a token in the rows of its slots, which lanes of `slots` have, one
 * each. */
template <class S>
static __device__ __forceinline__ void
spread_codes(const row_args *a, const value_row *v, uint32_t slots, int base,
             const float (&group)[AT_ONCE], const uint4 (&code)[AT_ONCE]) {
#pragma unroll 1
    for (; slots; slots &= slots - 1) {
        int row = __shfl_sync(0xffffffffu, v->row, __ffs((int)slots) - 1);
        store_span<S>(a, row, base, group, code);
    }
}

/* Makes and spreads codes of a span by the factors of the slots' experts, one factor at a time. */
template <class S>
static __device__ __forceinline__ void spread_by_factor(const row_args *a, const value_row *v,
                                                        int base,
                                                        const moq_chunk (&chunk)[AT_ONCE]) {
    uint4 code[AT_ONCE];
    float group[AT_ONCE] = {};
    uint32_t left = __ballot_sync(0xffffffffu, v->row >= 0);
#pragma unroll 1
    while (left) {
        float factor = __shfl_sync(0xffffffffu, v->factor, __ffs((int)left) - 1);
        uint32_t same =
            __ballot_sync(0xffffffffu, __float_as_uint(v->factor) == __float_as_uint(factor)) &
            left;
        make_span<S>(a, v, base, chunk, factor, group, code);
        left &= ~same;
        spread_codes<S>(a, v, same, base, group, code);
    }
}

/* ---- kernels ---- */

/* Returns the maximum over the lanes of a row. */
template <class S> static __device__ __forceinline__ uint32_t most_of_row(uint32_t most) {
    __shared__ uint32_t of_warp[ROW_THREADS / 32];
    most = moq_max_of_lanes(most, min(S::LANES, 32));
    if (S::LANES > 32) {
        of_warp[threadIdx.x / 32] = most;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROW_THREADS / 32; i++)
            most = max(most, of_warp[i]);
    }
    return most;
}

/* Returns the scale of the row, whose span from `base` on is loaded; afterwards the first one
 * is. */
template <class S>
static __device__ __forceinline__ float find_scale(const row_args *a, const value_row *v, int base,
                                                   moq_chunk (&chunk)[AT_ONCE]) {
    uint32_t most = amax_of_span<S>(a, v, base, chunk);
#pragma unroll 1
    while (base > 0) {
        base -= S::SPAN;
        load_span<S>(a, v->from, base, chunk);
        most = max(most, amax_of_span<S>(a, v, base, chunk));
    }
    return moq_token_scale(__uint_as_float(most_of_row<S>(most)));
}

/* Makes codes of a token in the rows of its slots. x was complete before the grouping started: the
 * first span, or all of a block's token, becomes codes meanwhile, unless experts change them. */
template <class S>
static __global__ void __launch_bounds__(ROW_THREADS)
    make_codes_of_token(const __grid_constant__ row_args a) {
    int number = (int)((blockIdx.x * ROW_THREADS + threadIdx.x) / S::LANES);
    int begin = S::FORMAT == moe::ROWS_TOKEN ? (a.k - 1) / S::SPAN * S::SPAN : 0;
    value_row v = {min(number, a.sources - 1), -1, 1.0f, false, 1.0f, NULL};
    moq_chunk chunk[AT_ONCE];
    uint4 code[AT_ONCE];
    float group[AT_ONCE], scale = 0.0f;
    load_span<S>(&a, v.from, begin, chunk);
    if (S::FORMAT == moe::ROWS_TOKEN)
        scale = find_scale<S>(&a, &v, begin, chunk);
    if (S::FORMAT != moe::ROWS_TENSOR)
        make_span<S>(&a, &v, 0, chunk, scale, group, code);
    wait_for_predecessor();
    launch_dependents(); /* the next kernel may rely on the groups */
    v = find_source<S>(&a, number);
    uint32_t slots = __ballot_sync(0xffffffffu, v.row >= 0);
    if (!slots)
        return;
    if (S::FORMAT == moe::ROWS_TOKEN && v.row >= 0)
        a.scales[v.row] = scale;
    if (a.written && v.row >= 0)
        a.written[v.row] = 0;
#pragma unroll 1
    for (int base = 0; base < a.k; base += S::SPAN) {
        if (base > 0)
            load_span<S>(&a, v.from, base, chunk);
        if (S::FORMAT == moe::ROWS_TENSOR) {
            spread_by_factor<S>(&a, &v, base, chunk);
            continue;
        }
        if (base > 0)
            make_span<S>(&a, &v, base, chunk, scale, group, code);
        spread_codes<S>(&a, &v, slots, base, group, code);
    }
}

/* Makes codes of a row that are its own. */
template <class S>
static __global__ void __launch_bounds__(ROW_THREADS)
    make_codes_of_row(const __grid_constant__ row_args a) {
    int number = (int)((blockIdx.x * ROW_THREADS + threadIdx.x) / S::LANES);
    int begin = S::FORMAT == moe::ROWS_TOKEN ? (a.k - 1) / S::SPAN * S::SPAN : 0;
    moq_chunk chunk[AT_ONCE];
    float scale = 0.0f;
    launch_dependents();
    wait_for_predecessor();
    value_row v = find_source<S>(&a, number);
    if (!__any_sync(0xffffffffu, v.row >= 0))
        return;
    load_span<S>(&a, v.row >= 0 ? v.from : 0, begin, chunk); /* one of two rows may have no slot */
    if (S::FORMAT == moe::ROWS_TOKEN) {
        scale = find_scale<S>(&a, &v, begin, chunk);
        if (v.row >= 0 && threadIdx.x % S::LANES == 0)
            a.scales[v.row] = scale;
    }
#pragma unroll 1
    for (int base = 0; base < a.k; base += S::SPAN) {
        uint4 code[AT_ONCE];
        float group[AT_ONCE];
        if (base > 0)
            load_span<S>(&a, v.from, base, chunk);
        make_span<S>(&a, &v, base, chunk, scale, group, code);
        if (v.row >= 0)
            store_span<S>(&a, v.row, base, group, code);
    }
}

#define COPY_STEPS 8 /* stores of a lane at a time */

/* Contents of a copied row: 16-bit values, or codes as they are or in the order of
 * moq_cuda_quantize.paired. */
typedef enum { OF_VALUES, OF_CODES, OF_PAIRED_CODES } copied_row;

/* Returns the parts of 16 bytes of a row. */
template <copied_row OF> static __device__ __forceinline__ int parts_of(const row_args *a) {
    return a->k / (OF == OF_VALUES ? 8 : 16);
}

/* Loads whole sectors at a time. A row is written at half the rate if lanes have 32 bytes each and
 * store one half of them after the other. */
template <copied_row OF>
static __device__ __forceinline__ void load_parts(const row_args *a, int source, int first,
                                                  uint4 (&part)[COPY_STEPS]) {
    int64_t row_bytes = a->from.stride * (OF == OF_VALUES ? 2 : 1);
    const uint4 *from = (const uint4 *)((const uint8_t *)a->from.data + source * row_bytes) + first;
#pragma unroll
    for (int i = 0; i < COPY_STEPS; i++) {
        if (first + 32 * i >= parts_of<OF>(a))
            continue;
        part[i] = OF == OF_PAIRED_CODES ? paired(from[32 * i]) : from[32 * i];
    }
}

template <copied_row OF>
static __device__ __forceinline__ void store_parts(const row_args *a, int row, int first,
                                                   const uint4 (&part)[COPY_STEPS]) {
    uint4 *to = (uint4 *)a->codes + (int64_t)row * parts_of<OF>(a) + first;
#pragma unroll
    for (int i = 0; i < COPY_STEPS; i++)
        if (first + 32 * i < parts_of<OF>(a))
            to[32 * i] = part[i];
}

/* Copies the scales beside a token's codes to a row, and clears its counter. */
static __device__ __forceinline__ void copy_scales(const row_args *a, const float *scales,
                                                   int row) {
    int lane = (int)threadIdx.x % 32;
    for (int i = lane; i < a->x_scales; i += 32)
        a->scales[i * a->scale_stride + row] = scales[i * a->x_scale.step];
    if (a->written && lane == 0)
        a->written[row] = 0;
}

/* Copies the values or codes of a token to the rows of its slots. */
template <copied_row OF>
static __global__ void __launch_bounds__(ROW_THREADS)
    copy_rows(const __grid_constant__ row_args a) {
    typedef row_shape<moe::ROWS_VALUES, OF_TOKEN, MOQ_DT_BF16, 32, false> S;
    int source = (int)((blockIdx.x * ROW_THREADS + threadIdx.x) / 32);
    int lane = (int)threadIdx.x % 32;
    uint4 part[COPY_STEPS];
    if (source < a.sources) /* x was complete before the grouping started */
        load_parts<OF>(&a, source, lane, part);
    wait_for_predecessor();
    launch_dependents(); /* the next kernel may rely on the groups */
    if (source >= a.sources)
        return;
    value_row own = find_source<S>(&a, source);
    uint32_t rows = __ballot_sync(0xffffffffu, own.row >= 0);
    const float *scales = (const float *)a.x_scale.data;
    if (OF != OF_VALUES && a.x_scales)
        scales += slot_offset(&a.x_scale, a.first + source, 0);
#pragma unroll 1
    for (int base = 0; base < parts_of<OF>(&a) && rows; base += 32 * COPY_STEPS) {
        if (base > 0)
            load_parts<OF>(&a, source, base + lane, part);
#pragma unroll 1
        for (uint32_t left = rows; left; left &= left - 1) {
            int row = __shfl_sync(0xffffffffu, own.row, __ffs((int)left) - 1);
            store_parts<OF>(&a, row, base + lane, part);
            if (OF != OF_VALUES && base == 0)
                copy_scales(&a, scales, row);
        }
    }
}

/* ---- launch ---- */

static moq_status launch(row_args *a, const moe::slot_chunk *chunk, const void *kernel, int lanes,
                         moq_err *err) {
    int64_t threads = (int64_t)a->sources * lanes;
    moq_launch launch = {.what = "rows of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)((threads + ROW_THREADS - 1) / ROW_THREADS)),
                         .block = dim3(ROW_THREADS),
                         .stream = (cudaStream_t)chunk->call->stream,
                         .pdl = true};
    void *parameters[] = {a};
    return moq_cuda_launch(&launch, parameters, err);
}

template <moe::row_format FORMAT, row_source SOURCE, int LANES = 32, bool PAIRED = false>
static moq_status launch_as(row_args *a, const moe::slot_chunk *chunk, moq_err *err) {
    typedef row_shape<FORMAT, SOURCE, MOQ_DT_BF16, LANES, PAIRED> bf16;
    typedef row_shape<FORMAT, SOURCE, MOQ_DT_F16, LANES, PAIRED> f16;
    const void *kernel[2];
    if constexpr (SOURCE == OF_TOKEN) {
        kernel[0] = (const void *)make_codes_of_token<bf16>;
        kernel[1] = (const void *)make_codes_of_token<f16>;
    } else {
        kernel[0] = (const void *)make_codes_of_row<bf16>;
        kernel[1] = (const void *)make_codes_of_row<f16>;
    }
    return launch(a, chunk, kernel[a->from.dtype != MOQ_DT_BF16], LANES, err);
}

static row_args args_of(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                        const moq_linear_spec *spec, const moe::expert_rows *rows) {
    row_args a = {};
    a.groups = *groups;
    a.k = (int)spec->in_features;
    a.top_k = chunk->call->spec->top_k;
    a.codes = (uint8_t *)rows->data;
    a.scales = (float *)rows->scales;
    a.scale_stride = rows->scale_stride;
    a.first = chunk->first;
    return a;
}

/* Fills the arguments for x, a token each. */
static row_args args_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                          const moe::expert_rows *rows) {
    const moq_moe_call *call = chunk->call;
    const moq_linear_spec *w13 = &call->spec->w13;
    row_args a = args_of(chunk, groups, w13, rows);
    a.from = moq_rows_of(call->x);
    int64_t row_bytes = a.from.stride * (int64_t)moq_dtype_size(call->x->dtype);
    a.from.data = (const uint8_t *)a.from.data + chunk->first * row_bytes;
    if (call->x_scale) {
        a.x_scale = moe::slot_tensor_of(call->x_scale);
        a.x_scales = (int)moq_moe_x_scales(call->spec);
    }
    a.input_scale = call->w13.input_scale;
    a.partition_count = w13->partition_count;
    a.sources = (int)chunk->tokens;
    return a;
}

static row_args args_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                          const void *g, const moe::expert_rows *rows) {
    const moq_linear_spec *w2 = &chunk->call->spec->w2;
    row_args a = args_of(chunk, groups, w2, rows);
    a.from = {g, w2->in_features, w2->dtype};
    a.of_g = true;
    a.sources = (int)moe::most_rows(chunk);
    return a;
}

/* Launches the kernel for codes of g with a scale a row. */
template <bool PAIRED>
static moq_status launch_tokens_of_g(row_args *a, const moe::slot_chunk *chunk, moq_err *err) {
    return a->k <= 16 * 16 * AT_ONCE ? launch_as<moe::ROWS_TOKEN, OF_G, 16, PAIRED>(a, chunk, err)
                                     : launch_as<moe::ROWS_TOKEN, OF_G, 32, PAIRED>(a, chunk, err);
}

/* Launches the kernel for codes of tokens. Long rows of few tokens get a block each; shorter ones
 * lose more by blocks that delay those of the first product than they win
 * (docs/lab/experts-prefill.md). */
template <moe::row_format FORMAT>
static moq_status launch_tokens(row_args *a, const moe::slot_chunk *chunk, moq_err *err) {
    bool wide = a->k > 2 * 32 * 16 * AT_ONCE &&
                a->sources <= BLOCKS_AT_ONCE * chunk->call->spec->w13.target.sm_count;
    return wide ? launch_as<FORMAT, OF_TOKEN, ROW_THREADS>(a, chunk, err)
                : launch_as<FORMAT, OF_TOKEN>(a, chunk, err);
}

moq_status make_rows_of_tokens(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const moe::expert_rows *rows, int32_t *written, moq_err *err) {
    row_args a = args_of_x(chunk, groups, rows);
    a.written = written;
    if (chunk->call->spec->w13.quantized_input)
        return launch(&a, chunk, (const void *)copy_rows<OF_CODES>, 32, err);
    switch (rows->format) {
    case moe::ROWS_TENSOR:
        return launch_tokens<moe::ROWS_TENSOR>(&a, chunk, err);
    case moe::ROWS_TOKEN:
        return launch_tokens<moe::ROWS_TOKEN>(&a, chunk, err);
    case moe::ROWS_GROUP:
        return launch_tokens<moe::ROWS_GROUP>(&a, chunk, err);
    default:
        MOQ_ASSERT(rows->format == moe::ROWS_VALUES);
        return launch(&a, chunk, (const void *)copy_rows<OF_VALUES>, 32, err);
    }
}

moq_status make_codes_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                           const void *g, const moe::expert_rows *rows, moq_err *err) {
    row_args a = args_of_g(chunk, groups, g, rows);
    if (rows->format == moe::ROWS_GROUP)
        return launch_as<moe::ROWS_GROUP, OF_G>(&a, chunk, err);
    MOQ_ASSERT(rows->format == moe::ROWS_TOKEN);
    return launch_tokens_of_g<false>(&a, chunk, err);
}

moq_status make_paired_rows_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                                 const moe::expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    row_args a = args_of_x(chunk, groups, rows);
    if (call->spec->w13.quantized_input)
        return launch(&a, chunk, (const void *)copy_rows<OF_PAIRED_CODES>, 32, err);
    if (call->weights_on_input) {
        a.weights = (const float *)call->weights->data;
        a.weight_at = moe::slot_tensor_of(call->weights);
    }
    a.smooth = call->w13.pre_quant_scale;
    if (!a.weights && !a.smooth)
        return launch_as<moe::ROWS_TOKEN, OF_TOKEN, 32, true>(&a, chunk, err);
    a.sources = (int)moe::most_rows(chunk);
    return launch_as<moe::ROWS_TOKEN, TREATED, 32, true>(&a, chunk, err);
}

moq_status make_paired_rows_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                                 const void *g, const moe::expert_rows *rows, moq_err *err) {
    row_args a = args_of_g(chunk, groups, g, rows);
    a.smooth = chunk->call->w2.pre_quant_scale;
    return a.smooth ? launch_as<moe::ROWS_TOKEN, TREATED, 32, true>(&a, chunk, err)
                    : launch_tokens_of_g<true>(&a, chunk, err);
}

} // namespace moq::moe_prefill
