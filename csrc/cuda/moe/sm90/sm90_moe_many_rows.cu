/* Rows for the products of experts of many tokens: expert_rows.cu's ROWS_TENSOR, ROWS_TOKEN,
 * ROWS_GROUP and ROWS_VALUES, bit by bit, for many rows without weights or factors on them. A warp
 * has a token of x, whose codes it makes once for all of its slots, or once more where the scale of
 * a slot's expert is another one, and stores them in the rows of these slots; or it has a row of g.
 * Values are stored as they are.
 *
 * Rows side by side are then copied by the copy engine; warps that gather them from codes of tokens
 * took more from the product than these rows take to be written (docs/lab/moe.md). Bound by what is
 * written: slots times columns. */
#include "core/invariant.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/sm90/sm90_moe_many_rows.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_many {

#define ROW_WARPS 4
#define AT_ONCE   4                   /* chunks of a lane */
#define SPAN      (32 * 16 * AT_ONCE) /* columns that a warp has at a time */

typedef struct {
    moq_rows from; /* x from the chunk's first token on, or g */
    moe::slot_groups groups;
    const float *input_scale; /* [E, parts] */
    int parts, top_k, k;
    bool by_row; /* sources are rows, not tokens */
    int sources;
    uint8_t *codes; /* [rows, k], or values */
    float *scales;  /* of rows, or of groups [K / 128, scale_stride] */
    int64_t scale_stride;
} code_args;

/* The rows of a source, one a lane, or -1, and the factor that each row's values have. */
typedef struct {
    int row;
    float factor;
} target;

template <moe::row_form FORM>
static __device__ __forceinline__ target target_of_lane(const code_args *a, int source) {
    int lane = threadIdx.x % 32;
    target t = {-1, 1.0f};
    if (a->by_row)
        t.row =
            lane == 0 && source < a->groups.count[0] && a->groups.slot[source] >= 0 ? source : -1;
    else if (lane < a->top_k)
        t.row = a->groups.row[(int64_t)source * a->top_k + lane];
    if (FORM == moe::ROWS_TENSOR && t.row >= 0)
        t.factor = __frcp_rn(a->input_scale[(int64_t)a->groups.owner[t.row] * a->parts]);
    return t;
}

/* The chunks of a lane of the columns from `base` on; zeros beyond the last. */
static __device__ __forceinline__ void load_span(const code_args *a, int source, int base,
                                                 moq_chunk (&chunk)[AT_ONCE]) {
    int column = base + (int)threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const uint4 *from = (const uint4 *)((const uint16_t *)a->from.data +
                                            source * a->from.stride + column + 512 * i);
        bool there = column + 512 * i < a->k;
        chunk[i].word[0] = there ? from[0] : make_uint4(0, 0, 0, 0);
        chunk[i].word[1] = there ? from[1] : make_uint4(0, 0, 0, 0);
    }
}

/* moq_widen of 16 bits, which does not look at words that are not there: they would take registers
 * all the same. */
static __device__ __forceinline__ void widen(const code_args *a, const moq_chunk *chunk,
                                             float (&value)[16]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 pair = moq_widen_pair((&chunk->word[i / 4].x)[i % 4], a->from.dtype);
        value[2 * i] = pair.x;
        value[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ uint32_t amax_of_span(const code_args *a,
                                                        const moq_chunk (&chunk)[AT_ONCE]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        most = max(most, moq_chunk_amax_bits(&chunk[i], false, a->from.dtype));
    return most;
}

/* Codes of a span by one factor, or by `scale`, or by those of groups, of which each of eight lanes
 * then has it in `group`. */
template <moe::row_form FORM>
static __device__ __forceinline__ void make_span(const code_args *a,
                                                 const moq_chunk (&chunk)[AT_ONCE], float scale,
                                                 float (&group)[AT_ONCE], uint4 (&code)[AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        float value[16];
        widen(a, &chunk[i], value);
        if (FORM == moe::ROWS_TENSOR) {
            code[i] = moq_codes_multiplied(value, scale);
            continue;
        }
        if (FORM == moe::ROWS_GROUP)
            scale = moq_group_scale(__uint_as_float(
                moq_max_of_lanes(moq_chunk_amax_bits(&chunk[i], false, a->from.dtype), 8)));
        code[i] = moq_codes_divided(value, scale);
        group[i] = scale;
    }
}

template <moe::row_form FORM>
static __device__ __forceinline__ void store_span(const code_args *a, int row, int base,
                                                  const float (&group)[AT_ONCE],
                                                  const uint4 (&code)[AT_ONCE]) {
    int column = base + (int)threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        if (column + 512 * i >= a->k)
            break;
        *(uint4 *)(a->codes + (int64_t)row * a->k + column + 512 * i) = code[i];
        if (FORM == moe::ROWS_GROUP && threadIdx.x % 8 == 0)
            a->scales[(column + 512 * i) / 128 * a->scale_stride + row] = group[i];
    }
}

template <moe::row_form FORM>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    make_codes(const __grid_constant__ code_args a) {
    int source = (int)(blockIdx.x * ROW_WARPS + threadIdx.x / 32);
    moq_chunk chunk[AT_ONCE];
    if (a.by_row)
        launch_dependents();
    else if (source < a.sources) /* x was there before the grouping began */
        load_span(&a, source, 0, chunk);
    wait_for_predecessor();
    if (!a.by_row)
        launch_dependents(); /* which know by then that the grouping is done */
    if (source >= a.sources)
        return;
    if (a.by_row)
        load_span(&a, source, 0, chunk);
    target own = target_of_lane<FORM>(&a, source);
    uint32_t rows = __ballot_sync(0xffffffffu, own.row >= 0);
    float scale = 0.0f;
    if (rows == 0)
        return;
    if (FORM == moe::ROWS_TOKEN) {
        uint32_t most = amax_of_span(&a, chunk);
#pragma unroll 1
        for (int base = SPAN; base < a.k; base += SPAN) {
            load_span(&a, source, base, chunk);
            most = max(most, amax_of_span(&a, chunk));
        }
        if (a.k > SPAN)
            load_span(&a, source, 0, chunk);
        scale = moq_token_scale(__uint_as_float(moq_max_of_lanes(most, 32)));
        if (own.row >= 0)
            a.scales[own.row] = scale;
    }
#pragma unroll 1
    for (int base = 0; base < a.k; base += SPAN) {
        uint4 code[AT_ONCE];
        float group[AT_ONCE] = {};
        if (base > 0)
            load_span(&a, source, base, chunk);
        uint32_t left = rows;
#pragma unroll 1
        while (left) { /* lanes whose rows have one factor */
            float factor = __shfl_sync(0xffffffffu, own.factor, __ffs((int)left) - 1);
            uint32_t same =
                __ballot_sync(0xffffffffu, __float_as_uint(own.factor) == __float_as_uint(factor)) &
                left;
            make_span<FORM>(&a, chunk, FORM == moe::ROWS_TENSOR ? factor : scale, group, code);
            left &= ~same;
#pragma unroll 1
            for (; same; same &= same - 1) {
                int row = __shfl_sync(0xffffffffu, own.row, __ffs((int)same) - 1);
                store_span<FORM>(&a, row, base, group, code);
            }
        }
    }
}

/* The values of 16 bits of a token in the rows of its slots. */
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    copy_values(const __grid_constant__ code_args a) {
    int source = (int)(blockIdx.x * ROW_WARPS + threadIdx.x / 32);
    moq_chunk chunk[AT_ONCE];
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    if (source >= a.sources)
        return;
    target own = target_of_lane<moe::ROWS_VALUES>(&a, source);
    uint32_t rows = __ballot_sync(0xffffffffu, own.row >= 0);
#pragma unroll 1
    for (int base = 0; base < a.k && rows; base += SPAN) {
        int column = base + (int)threadIdx.x % 32 * 16;
        load_span(&a, source, base, chunk);
#pragma unroll 1
        for (uint32_t left = rows; left; left &= left - 1) {
            int row = __shfl_sync(0xffffffffu, own.row, __ffs((int)left) - 1);
            uint4 *to = (uint4 *)((uint16_t *)a.codes + (int64_t)row * a.k + column);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (column + 512 * i >= a.k)
                    break;
                to[64 * i] = chunk[i].word[0];
                to[64 * i + 1] = chunk[i].word[1];
            }
        }
    }
}

static const void *kernel_of(moe::row_form form) {
    switch (form) {
    case moe::ROWS_TENSOR:
        return (const void *)make_codes<moe::ROWS_TENSOR>;
    case moe::ROWS_TOKEN:
        return (const void *)make_codes<moe::ROWS_TOKEN>;
    case moe::ROWS_GROUP:
        return (const void *)make_codes<moe::ROWS_GROUP>;
    default:
        MOQ_ASSERT(form == moe::ROWS_VALUES);
        return (const void *)copy_values;
    }
}

static moq_status make(code_args *a, const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                       const moe::expert_rows *rows, const moq_linear_spec *spec, moq_err *err) {
    a->groups = *groups;
    a->k = (int)spec->in_features;
    a->codes = (uint8_t *)rows->data;
    a->scales = (float *)rows->scales;
    a->scale_stride = rows->scale_stride;
    moq_launch launch = {.what = "rows of experts",
                         .kernel = kernel_of(rows->form),
                         .grid = dim3((unsigned)((a->sources + ROW_WARPS - 1) / ROW_WARPS)),
                         .block = dim3(32 * ROW_WARPS),
                         .stream = (cudaStream_t)chunk->call->stream,
                         .overlap = true};
    void *parameters[] = {a};
    return moq_cuda_launch(&launch, parameters, err);
}

moq_status make_rows_of_tokens(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const moe::expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_linear_spec *w13 = &call->spec->w13;
    code_args a = {};
    a.from = moq_rows_of(call->x);
    a.from.data = (const uint8_t *)a.from.data +
                  chunk->first * a.from.stride * (int64_t)moq_dtype_size(a.from.dtype);
    a.input_scale = call->w13.input_scale;
    a.parts = w13->partition_count;
    a.top_k = call->spec->top_k;
    a.sources = (int)chunk->tokens;
    return make(&a, chunk, groups, rows, w13, err);
}

moq_status make_codes_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                           const void *g, const moe::expert_rows *rows, moq_err *err) {
    const moq_linear_spec *w2 = &chunk->call->spec->w2;
    code_args a = {};
    a.from = {g, w2->in_features, w2->dtype};
    a.by_row = true;
    a.sources = (int)moe::most_rows(chunk);
    return make(&a, chunk, groups, rows, w2, err);
}

} // namespace moq::moe_many
