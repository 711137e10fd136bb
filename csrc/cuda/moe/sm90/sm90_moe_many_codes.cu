/* Rows of e4m3 codes with a scale a row, their columns in the order of operands: see
 * sm90_moe_many_codes.h.
 *
 * A warp has a row of values, or half a warp where that is enough, and keeps KEPT chunks of 16 a
 * lane; what is beyond is read twice.
 * The codes of a token are written to the rows of all its slots, unless the slot has a say in them
 * by its weight or its expert's pre_quant_scale: then each row is made by itself. Bound by memory:
 * K bytes written a slot. */
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/sm90/sm90_moe_many_codes.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_many {

#define CODE_WARPS 8
#define KEPT       4

/* What a warp makes: the rows of a token's slots, a row of g, or a row of either by itself that has
 * a weight or factors. */
typedef enum { OF_TOKEN, OF_G, TREATED } code_source;

typedef struct {
    moq_rows from; /* x from the chunk's first token on, or g */
    moe::slot_groups groups;
    int k, top_k;
    int count;   /* of warps that may have something to do */
    bool by_row; /* TREATED: rows of g, not of x */
    int64_t first;
    const float *weights; /* of the router, on the input, or NULL */
    moe::slot_tensor weight_at;
    const float *smooth; /* [E, K] or NULL */
    uint8_t *codes;
    float *scales;
} code_args;

/* The row of values of a warp, and what it is multiplied by: a weight, and factors. */
typedef struct {
    int from;
    bool weighted;
    float weight;
    const float *smooth;
} value_row;

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

template <code_source SOURCE>
static __device__ __forceinline__ void treat(const moq_rows *from, const value_row *v, int column,
                                             const moq_chunk *chunk, float (&value)[16]) {
    float by[16];
    moq_widen(from, chunk, value);
    if (SOURCE == TREATED && v->weighted) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            by[i] = v->weight;
        multiply_and_round(from->dtype, value, by);
    }
    if (SOURCE == TREATED && v->smooth) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            by[i] = v->smooth[column + i];
        multiply_and_round(from->dtype, value, by);
    }
}

template <code_source SOURCE>
static __device__ __forceinline__ uint32_t find_amax(const moq_rows *from, const value_row *v,
                                                     int column, const moq_chunk *chunk) {
    float value[16];
    if (SOURCE != TREATED)
        return moq_chunk_amax_bits(chunk, false, from->dtype);
    treat<SOURCE>(from, v, column, chunk, value);
    return moq_amax_bits(value);
}

/* Rows that a warp writes: one, or a token's. */
template <code_source SOURCE>
static __device__ __forceinline__ int row_of(const code_args *a, int number, int slot) {
    return SOURCE == OF_TOKEN ? a->groups.row[(int64_t)number * a->top_k + slot] : number;
}

/* What quotients beyond the ordinary ones take (moq_divide): apart, so that the code of others
 * stays short. */
static __device__ __noinline__ void divide_slowly(float *value, float scale) {
#pragma unroll 1
    for (int i = 0; i < 16; i++)
        value[i] = __fdiv_rn(value[i], scale);
}

/* moq_codes_divided for scales of moq_token_scale. */
static __device__ __forceinline__ uint4 divided_codes(float (&value)[16], float scale) {
    if (scale < 1e30f) {
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

template <code_source SOURCE>
static __device__ __forceinline__ void store_codes(const code_args *a, const moq_rows *from,
                                                   const value_row *v, int number, int column,
                                                   const moq_chunk *chunk, float scale) {
    float value[16];
    treat<SOURCE>(from, v, column, chunk, value);
    uint4 c = divided_codes(value, scale);
    c = make_uint4(__byte_perm(c.x, c.z, 0x5410), __byte_perm(c.x, c.z, 0x7632),
                   __byte_perm(c.y, c.w, 0x5410), __byte_perm(c.y, c.w, 0x7632));
#pragma unroll 1
    for (int slot = 0; slot < (SOURCE == OF_TOKEN ? a->top_k : 1); slot++) {
        int row = row_of<SOURCE>(a, number, slot);
        if (row >= 0)
            *(uint4 *)(a->codes + (int64_t)row * a->k + column) = c;
    }
}

/* False where there is no such row. */
template <code_source SOURCE>
static __device__ __forceinline__ bool find_values(const code_args *a, int number, value_row *v) {
    *v = {number, false, 1.0f, NULL};
    if (number >= a->count)
        return false;
    if (SOURCE == OF_TOKEN)
        return true;
    if (number >= a->groups.count[0]) /* before that no row is without a slot */
        return false;
    if (SOURCE == OF_G)
        return true;
    if (a->smooth)
        v->smooth = a->smooth + (int64_t)a->groups.owner[number] * a->k;
    if (a->by_row)
        return true;
    int slot = a->groups.slot[number];
    v->from = slot / a->top_k;
    v->weighted = a->weights != NULL;
    if (v->weighted)
        v->weight =
            a->weights[slot_offset(&a->weight_at, a->first + v->from, slot - v->from * a->top_k)];
    return true;
}

/* The chunks of a lane from a column on; LANES have a row. */
template <int LANES>
static __device__ __forceinline__ void load_chunks(const moq_rows *from, int row, int k, int first,
                                                   moq_chunk (&kept)[KEPT]) {
    constexpr int SPAN = LANES * 16;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (first + SPAN * i < k)
            kept[i] = moq_load_chunk(from, row, first + SPAN * i);
}

template <code_source SOURCE, moq_dtype DTYPE, int LANES>
static __global__ void __launch_bounds__(32 * CODE_WARPS)
    make_codes(const __grid_constant__ code_args a) {
    constexpr int SPAN = LANES * 16; /* columns that they have at a time */
    int number = (int)((blockIdx.x * (32 * CODE_WARPS) + threadIdx.x) / LANES);
    int lane = threadIdx.x % LANES;
    moq_rows from = {a.from.data, a.from.stride, DTYPE};
    uint32_t most = 0;
    moq_chunk kept[KEPT];
    value_row v;
    launch_dependents();
    wait_for_predecessor();
    bool found = find_values<SOURCE>(&a, number, &v);
    if (!__any_sync(0xffffffffu, found))
        return;
    int k = found ? a.k : 0; /* the other half of the warp may have a row all the same */
#pragma unroll 1
    for (int base = LANES < 32 ? 0 : (a.k - 1) / (KEPT * SPAN) * (KEPT * SPAN); base >= 0;
         base -= KEPT * SPAN) {
        int first = base + lane * 16;
        load_chunks<LANES>(&from, v.from, k, first, kept);
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (first + SPAN * i < k)
                most = max(most, find_amax<SOURCE>(&from, &v, first + SPAN * i, &kept[i]));
    }
    float scale = moq_token_scale(__uint_as_float(moq_max_of_lanes(most, LANES)));
    for (int slot = lane; found && slot < (SOURCE == OF_TOKEN ? a.top_k : 1); slot += LANES) {
        int row = row_of<SOURCE>(&a, number, slot);
        if (row >= 0)
            a.scales[row] = scale;
    }
#pragma unroll 1
    for (int first = lane * 16; first - lane * 16 < k; first += KEPT * SPAN) {
        if (first >= KEPT * SPAN)
            load_chunks<LANES>(&from, v.from, k, first, kept);
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (first + SPAN * i < k)
                store_codes<SOURCE>(&a, &from, &v, number, first + SPAN * i, &kept[i], scale);
    }
}

/* ---- launch ---- */

template <code_source SOURCE, int LANES = 32>
static moq_status launch(code_args *a, const moe::slot_chunk *chunk, moq_err *err) {
    bool bf16 = a->from.dtype == MOQ_DT_BF16;
    moq_launch launch = {.what = "rows of experts",
                         .kernel = bf16 ? (const void *)make_codes<SOURCE, MOQ_DT_BF16, LANES>
                                        : (const void *)make_codes<SOURCE, MOQ_DT_F16, LANES>,
                         .grid = dim3((unsigned)(((int64_t)a->count * LANES + 32 * CODE_WARPS - 1) /
                                                 (32 * CODE_WARPS))),
                         .block = dim3(32 * CODE_WARPS),
                         .stream = (cudaStream_t)chunk->call->stream,
                         .overlap = true};
    void *parameters[] = {a};
    return moq_cuda_launch(&launch, parameters, err);
}

static code_args args_of(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                         const moq_linear_spec *spec, const moq_moe_weight *weight,
                         const code_rows *rows) {
    code_args a = {};
    a.groups = *groups;
    a.k = (int)spec->in_features;
    a.top_k = chunk->call->spec->top_k;
    a.count = (int)moe::most_rows(chunk);
    a.first = chunk->first;
    a.smooth = weight->pre_quant_scale;
    a.codes = rows->codes;
    a.scales = rows->scales;
    return a;
}

moq_status make_row_codes_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const code_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    code_args a = args_of(chunk, groups, &call->spec->w13, &call->w13, rows);
    a.from = moq_rows_of(call->x);
    a.from.data = (const uint8_t *)a.from.data + chunk->first * a.from.stride * 2;
    if (call->weights_on_input) {
        a.weights = (const float *)call->weights->data;
        a.weight_at = moe::slot_tensor_of(call->weights);
    }
    if (a.weights || a.smooth)
        return launch<TREATED>(&a, chunk, err);
    a.count = (int)chunk->tokens;
    return launch<OF_TOKEN>(&a, chunk, err);
}

moq_status make_row_codes_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const void *g, const code_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_linear_spec *w2 = &call->spec->w2;
    code_args a = args_of(chunk, groups, w2, &call->w2, rows);
    a.from = {g, w2->in_features, w2->dtype};
    a.by_row = true;
    if (a.smooth)
        return launch<TREATED>(&a, chunk, err);
    return a.k <= 16 * 16 * KEPT ? launch<OF_G, 16>(&a, chunk, err) : launch<OF_G>(&a, chunk, err);
}

} // namespace moq::moe_many
