/* Epilogue of the FP8 prefill kernels of experts on Hopper: g in the layer's dtype or as the e4m3
 * codes that W2 takes, d rounded to bfloat16 or in float32.
 *
 * A thread has two neighbouring columns of each 16 of its warp (fp8_mainloop.h), of two
 * neighbouring tokens of each eight. Outputs are staged in shared memory, a token's 64 columns of a
 * warpgroup in 64 or 128 bytes, and leave in whole sectors. Bound: instructions, as nothing is
 * multiplied meanwhile. An output of g takes some 14, and two of the unit for exponentials and
 * reciprocals. The code loops over half of a tile's tokens, so that it stays in the instruction
 * cache (docs/lab/experts-prefill.md). */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_FP8_EPILOGUE_H
#define MOQ_CUDA_MOE_SM90_PREFILL_FP8_EPILOGUE_H

#include "cuda/moe/sm90/prefill/gemm.h"

namespace moq::moe_prefill {

#define OUT_TOKENS      64                 /* tokens of an epilogue step at most */
#define OUT_ROOM        (OUT_TOKENS * 128) /* bytes of staged outputs of a warpgroup */
#define EPILOGUE_TOKENS 144                /* tokens of a tile at most, in all its steps */

/* Epilogue operands of a warpgroup: of the rows of W of both waves, and of tokens. */
typedef struct __align__(8) {
    float factor[2 * WAVE_ROWS], bias[2 * WAVE_ROWS], token[EPILOGUE_TOKENS];
    float scale; /* scale of g for per-tensor codes */
} epilogue_operands;

/* The output path of a warpgroup: epilogue operands, memory for staged outputs, and the largest
 * magnitudes of tokens of both warpgroups. */
typedef struct {
    epilogue_operands *state;
    uint32_t room;
    uint32_t (*most)[OUT_TOKENS];
} output_path;

/* ---- epilogue operands ---- */

/* Loads the epilogue operands of a warpgroup, by threads `first` and every `apart` after. Tokens
 * without factors get 1. */
template <class S, product_use USE>
static __device__ __forceinline__ void fetch_epilogue_operands(const gemm_args *a, const place *p,
                                                               int group, epilogue_operands *state,
                                                               int first, int apart) {
    int expert = p->rows.expert;
    const float *of_tokens = a->x_scale ? a->x_scale + p->rows.first : a->input_scale;
#pragma unroll 1
    for (int i = first; i < 2 * WAVE_ROWS && (!S::groups || a->bias); i += apart) {
        int wave = i / WAVE_ROWS;
        int row = row_of_wave<S, USE>(a, p->along, group, wave) + i % WAVE_ROWS;
        int bytes = row < end_of_wave<USE>(a, wave) ? 4 : 0;
        int64_t at = (int64_t)expert * a->n + (bytes ? row : 0);
        if (!S::groups)
            copy_async_4(shared_address(&state->factor[i]), a->output_scale + at, bytes);
        if (a->bias)
            copy_async_4(shared_address(&state->bias[i]), a->bias + at, bytes);
    }
    if (USE != OF_D && !S::groups && a->format == G_TENSOR && first == 0)
        copy_async_4(shared_address(&state->scale), a->g_scale + expert, 4);
#pragma unroll 1
    for (int i = first; !S::groups && i < p->rows.rows; i += apart) {
        if (of_tokens)
            copy_async_4(shared_address(&state->token[i]),
                         of_tokens + (a->x_scale ? i : expert * a->partition_count), 4);
        else
            state->token[i] = 1.0f;
    }
}

/* Returns factors and biases of a thread's two columns of a wave. */
template <class S>
static __device__ __forceinline__ terms read_epilogue_operands(const gemm_args *a,
                                                               const epilogue_operands *state,
                                                               int wave) {
    int own = wave * WAVE_ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2;
    terms e = {{1.0f, 1.0f}, {-0.0f, -0.0f}}; /* adding -0 changes nothing */
    if (!S::groups) {
        float2 factor = *(const float2 *)(state->factor + own);
        e.factor[0] = factor.x * S::unit;
        e.factor[1] = factor.y * S::unit;
    }
    if (a->bias) {
        float2 bias = *(const float2 *)(state->bias + own);
        e.bias[0] = bias.x;
        e.bias[1] = bias.y;
    }
    return e;
}

/* Finishes a thread's four sums of a wave for eight tokens, of `factor` each: [column][token]. */
template <class S>
static __device__ __forceinline__ void finish_four(const terms *e, float2 factor, const float *sum,
                                                   float (&value)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float times = S::groups ? 1.0f : e->factor[i / 2] * (i % 2 ? factor.y : factor.x);
        value[i / 2][i % 2] = fmaf(sum[i], times, e->bias[i / 2]);
    }
}

template <class S>
static __device__ __forceinline__ float2 factors_of(const epilogue_operands *state, int token) {
    return S::groups ? make_float2(1.0f, 1.0f)
                     : *(const float2 *)(state->token + token + threadIdx.x % 4 * 2);
}

/* ---- staging: 16-byte pieces of rows of 64 or 128 bytes, eight rows use all banks ---- */

template <int BYTES> static __device__ __forceinline__ int place_in_row(int token, int piece) {
    return token * BYTES + (BYTES == 64 ? piece ^ token / 2 % 4 : piece ^ token % 8) * 16;
}

/* Stages two columns of 16 bits of a thread's two tokens among eight from `token` on, a multiple of
 * eight. */
static __device__ __forceinline__ void stage_pairs(uint32_t room, int token,
                                                   const uint32_t (&pair)[2]) {
    int lane = threadIdx.x % 32, piece = threadIdx.x % 128 / 32 * 2 + lane / 16;
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
        store_shared_word(room + place_in_row<128>(lane % 4 * 2 + odd, piece) + lane / 4 % 4 * 4 +
                              token * 128,
                          pair[odd]);
}

/* Stages two columns of codes of a thread's two tokens of each eight of 16. */
static __device__ __forceinline__ void stage_codes(uint32_t room, int token,
                                                   const uint32_t (&codes)[2]) {
    int lane = threadIdx.x % 32;
    store_two_matrices_turned(room + place_in_row<64>(lane % 16, threadIdx.x % 128 / 32) +
                                  token * 64,
                              codes[0], codes[1]);
}

/* Stores staged outputs of `count` tokens of S::at_once; `left` bytes of a row are outputs. */
template <class S, int BYTES>
static __device__ __forceinline__ void carry_out(uint32_t room, uint8_t *to, int64_t stride,
                                                 int left, int count) {
    constexpr int PIECES = BYTES / 16, AT_A_TIME = 128 / PIECES; /* tokens at a time */
    int thread = threadIdx.x % 128, piece = thread % PIECES, first = thread / PIECES;
    uint32_t from = room + place_in_row<BYTES>(first, piece);
    int end = piece * 16 < left ? count - first : 0;
    to += first * stride + piece * 16;
    stride *= AT_A_TIME;
#pragma unroll
    for (int token = 0; token < S::at_once; token += AT_A_TIME, to += stride)
        if (token < end)
            *(uint4 *)to = load_shared(from + token * BYTES);
}

/* Stores 64 staged columns of 16-bit values from `column` on to `out`. */
template <class S>
static __device__ __forceinline__ void carry_values(const moq_output *out, uint32_t room,
                                                    int64_t row, int column, int end, int count) {
    carry_out<S, 128>(room, (uint8_t *)out->data + (row * out->stride + column) * 2,
                      out->stride * 2, (end - column) * 2, count);
}

/* ---- codes with scales of groups ---- */

/* Loads 16 staged columns of g, of 16 bits, of a token. */
static __device__ __forceinline__ void load_staged(const gemm_args *a, uint32_t room, int token,
                                                   int piece, float (&value)[16]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 eight = load_shared(room + place_in_row<128>(token, 2 * piece + i));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 pair = moq_widen_pair((&eight.x)[j], a->out.dtype);
            value[8 * i + 2 * j] = pair.x;
            value[8 * i + 2 * j + 1] = pair.y;
        }
    }
}

/* Makes codes of 64 staged columns from `column` on and stores them: `count` tokens from row `row`
 * on, four threads a token. The other warpgroup has the other half of the same 128 columns. */
template <class S>
static __device__ __forceinline__ void carry_groups(const gemm_args *a, const output_path *w,
                                                    int64_t row, int column, int count) {
    int thread = threadIdx.x % 128, piece = thread % 4, group = threadIdx.x / 128;
    int64_t scales = column / 128 * a->g_scale_stride + row;
    uint8_t *to = a->codes + row * a->code_stride + column + piece * 16;
    bool own = column + piece * 16 < a->half; /* all 16, or none */
    float value[16];
    barrier_sync(1, 256); /* the maxima of earlier tokens have been read */
#pragma unroll 1
    for (int token = thread / 4; token < S::at_once; token += 32) {
        load_staged(a, w->room, token, piece, value);
        uint32_t bits = moq_max_of_lanes(own ? moq_amax_bits(value) : 0, 4);
        if (piece == 0)
            w->most[group][token] = bits;
    }
    barrier_sync(1, 256);
#pragma unroll 1
    for (int token = thread / 4; token < count; token += 32) {
        load_staged(a, w->room, token, piece, value);
        float scale = moq_group_scale(__uint_as_float(max(w->most[0][token], w->most[1][token])));
        uint4 codes = moq_codes_divided(value, scale);
        if (piece == 0 && group == 0)
            a->g_scale[scales + token] = scale;
        if (own)
            *(uint4 *)(to + token * a->code_stride) = codes;
    }
}

/* ---- g ---- */

/* Constants of silu_fast_approx; docs/numerics.md says what it rounds. */
typedef struct {
    float rate;                           /* factor of the exponent of two */
    float least, most, least_up, most_up; /* limits of the gate, and of up plus beta */
} fast_silu;

static __device__ __forceinline__ fast_silu fast_silu_of(const moe::activation *a) {
    return {a->alpha * MOQ_MINUS_LOG2E, a->least, a->limit, a->beta - a->limit, a->beta + a->limit};
}

/* Clamps a value to a range; NaN stays NaN. */
static __device__ __forceinline__ float within(float value, float least, float most) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(most));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(least));
    return value;
}

/* Returns gate * logistic(alpha * gate) * up, each within its limits, by the chip's approximations:
 * equal to moe::activate_as but for last bits of float32. */
static __device__ __forceinline__ float silu_fast_approx(const fast_silu *s, float gate, float up) {
    float g = within(gate, s->least, s->most), power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(g * s->rate));
    return g * reciprocal_approx(1.0f + power) * within(up, s->least_up, s->most_up);
}

/* True if the activation has code for products of every width: silu_fast_approx with a gate (alpha
 * > 0, else it may give NaN instead of infinity), or relu2 without one. */
template <product_use USE>
static __device__ __forceinline__ bool is_fast(const moe::activation *a) {
    return USE == OF_D || (is_usual<USE>(a) && a->alpha > 0.0f);
}

/* Activates four outputs of eight tokens; without a gate, `up` is ignored. */
template <bool GATED, bool FAST>
static __device__ __forceinline__ void activate_four(const gemm_args *a, const fast_silu *s,
                                                     const float (&up)[2][2],
                                                     float (&value)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float &own = value[i / 2][i % 2];
        float u = GATED ? up[i / 2][i % 2] : 1.0f;
        own = !FAST   ? moe::activate(&a->act, own, u)
              : GATED ? silu_fast_approx(s, own, u)
                      : moe::relu2(own);
    }
}

/* Returns the codes of a pair of 16-bit values times `scale`. */
static __device__ __forceinline__ uint32_t codes_of_pair(uint32_t pair, moq_dtype dtype,
                                                         float scale) {
    float2 value = moq_widen_pair(pair, dtype);
    return moq_e4m3_pair(__fmul_rn(value.x, scale), __fmul_rn(value.y, scale));
}

/* Stages g of 16 tokens, the tile's from `first + token` on. */
template <class S, bool GATED, bool FAST>
static __device__ __forceinline__ void
stage_g(const gemm_args *a, const output_path *w, const fast_silu *s, const terms (&e)[2],
        int first, int token, moq_dtype dtype, float scale, const float *gate, const float *up) {
    uint32_t pair[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float2 factor = factors_of<S>(w->state, first + token + 8 * j);
        float g[2][2], u[2][2] = {};
        finish_four<S>(&e[0], factor, gate + 4 * j, g);
        if (GATED)
            finish_four<S>(&e[1], factor, up + 4 * j, u);
        activate_four<GATED, FAST>(a, s, u, g);
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
            pair[j][odd] = moq_narrow_pair(dtype, g[0][odd], g[1][odd]);
    }
    if (S::groups || a->format != G_TENSOR) {
        stage_pairs(w->room, token, pair[0]);
        stage_pairs(w->room, token + 8, pair[1]);
    } else {
        uint32_t codes[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
            codes[j] = codes_of_pair(pair[j][0], dtype, scale) |
                       codes_of_pair(pair[j][1], dtype, scale) << 16;
        stage_codes(w->room, token, codes);
    }
}

/* Stores staged g, 64 columns from `column` on: `count` tokens from row `row` on. */
template <class S>
static __device__ __forceinline__ void carry_g(const gemm_args *a, const output_path *w,
                                               int64_t row, int column, int end, int count) {
    if (a->format == G_VALUES)
        carry_values<S>(&a->out, w->room, row, column, end, count);
    else if (S::groups)
        carry_groups<S>(a, w, row, column, count);
    else
        carry_out<S, 64>(w->room, a->codes + row * a->code_stride + column, a->code_stride,
                         end - column, count);
}

/* Writes 64 columns of g from `column` on, by a warpgroup. `gate` and `up` are its sums, equal
 * without a gate, and are overwritten. DTYPE is the layer's if the code is for one dtype. */
template <class S, bool GATED, bool FAST, moq_dtype DTYPE>
static __device__ __forceinline__ void write_g(const gemm_args *a, const place *p, int column,
                                               const output_path *w, const terms (&e)[2],
                                               float (&gate)[S::T / 2], float (&up)[S::T / 2]) {
    int group = threadIdx.x / 128, rows = p->rows.rows;
    moq_dtype dtype = DTYPE == MOQ_DT_NONE ? a->out.dtype : DTYPE;
    float scale = !S::groups && a->format == G_TENSOR ? __frcp_rn(w->state->scale) : 1.0f;
    fast_silu s = fast_silu_of(&a->act);
#pragma unroll 1
    for (int first = 0; first < rows; first += S::at_once) {
#pragma unroll
        for (int token = 0; token < S::at_once; token += 16)
            stage_g<S, GATED, FAST>(a, w, &s, e, first, token, dtype, scale, gate + token / 2,
                                    up + token / 2);
        barrier_sync(2 + group, 128);
        carry_g<S>(a, w, p->rows.first + first, column, GATED ? a->half : a->n,
                   min(S::at_once, rows - first));
        move_down<S::at_once / 2>(gate);
        if (GATED)
            move_down<S::at_once / 2>(up);
        barrier_sync(2 + group, 128); /* the staging memory is free again */
    }
}

/* Calls write_g for the output dtype; activations without fast code use the generic one. */
template <class S, bool GATED, bool FAST>
static __device__ __forceinline__ void
write_activated(const gemm_args *a, const place *p, int column, const output_path *w, terms (&e)[2],
                float (&gate)[S::T / 2], float (&up)[S::T / 2]) {
    if constexpr (FAST) {
        if (GATED) {
            e[1].bias[0] += a->act.beta;
            e[1].bias[1] += a->act.beta;
        }
        if (a->out.dtype == MOQ_DT_BF16)
            write_g<S, GATED, true, MOQ_DT_BF16>(a, p, column, w, e, gate, up);
        else
            write_g<S, GATED, true, MOQ_DT_F16>(a, p, column, w, e, gate, up);
    } else {
        write_g<S, GATED, false, MOQ_DT_NONE>(a, p, column, w, e, gate, up);
    }
}

/* ---- d ---- */

/* Stores 16 tokens of d in float32, if as many of the tile's `left` rows remain: eight threads have
 * 64 bytes of a row. */
static __device__ __forceinline__ void store_d(const gemm_args *a, float *to, int left,
                                               const float (&value)[2][2][2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int token = i / 2 * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
        if (token < left)
            *(float2 *)(to + (int64_t)token * a->n) =
                make_float2(value[i / 2][0][i % 2], value[i / 2][1][i % 2]);
    }
}

/* Writes 64 columns of d from `column` on, and overwrites the sums. */
template <class S>
static __device__ __forceinline__ void write_d(const gemm_args *a, const place *p, int column,
                                               const output_path *w, const terms *e,
                                               float (&sum)[S::T / 2]) {
    int group = threadIdx.x / 128, rows = p->rows.rows;
    int own = column + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll 1
    for (int first = 0; first < rows; first += S::at_once) {
#pragma unroll
        for (int token = 0; token < S::at_once; token += 16) {
            float value[2][2][2];
#pragma unroll
            for (int j = 0; j < 2; j++)
                finish_four<S>(e, factors_of<S>(w->state, first + token + 8 * j),
                               sum + token / 2 + 4 * j, value[j]);
            if (a->d) {
                if (own < a->n)
                    store_d(a, a->d + (int64_t)(p->rows.first + first + token) * a->n + own,
                            rows - first - token, value);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t pair[2];
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    pair[odd] = moq_narrow_pair(MOQ_DT_BF16, value[j][0][odd], value[j][1][odd]);
                stage_pairs(w->room, token + 8 * j, pair);
            }
        }
        move_down<S::at_once / 2>(sum);
        barrier_sync(2 + group, 128);
        if (!a->d)
            carry_values<S>(&a->out, w->room, p->rows.first + first, column, a->n,
                            min(S::at_once, rows - first));
        barrier_sync(2 + group, 128); /* the staging memory is free again */
    }
}

/* Writes a warpgroup's outputs of a tile, whose epilogue operands are there. FAST: is_fast of the
 * activation. */
template <class S, product_use USE, bool FAST>
static __device__ __forceinline__ void write_tile(const gemm_args *a, const place *p, int group,
                                                  const output_path *w, float (&sum)[2][S::T / 2]) {
    terms e[2] = {read_epilogue_operands<S>(a, w->state, 0),
                  read_epilogue_operands<S>(a, w->state, 1)};
    if constexpr (USE == OF_GATE_AND_UP)
        write_activated<S, true, FAST>(a, p, row_of_wave<S, USE>(a, p->along, group, 0), w, e,
                                       sum[0], sum[1]);
#pragma unroll
    for (int wave = 0; wave < 2; wave++) {
        int column = row_of_wave<S, USE>(a, p->along, group, wave);
        if constexpr (USE == OF_ONE) {
            terms own[2] = {e[wave], e[wave]};
            write_activated<S, false, FAST>(a, p, column, w, own, sum[wave], sum[wave]);
        }
        if constexpr (USE == OF_D)
            write_d<S>(a, p, column, w, &e[wave], sum[wave]);
    }
}

} // namespace moq::moe_prefill

#endif
