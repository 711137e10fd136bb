/* Tiles of the grouped GEMMs of experts on Hopper, for many tokens: which a block makes, how
 * weights and rows come to it, and how sums leave.
 *
 * A tile is 256 rows of an expert's W by up to 64 or 128 rows of its tokens, which are the columns
 * of the products: as many as there are, rounded up to one of a few widths, for each of which there
 * is code. Two warpgroups multiply, or four, which have 512 rows; each has two waves of 64 rows. In
 * the first product these are rows of gate and the rows of up beside them, so that a thread has
 * both sums of an output: what is written is g. A second product writes d in float32.
 *
 * Where a shape says so, two blocks of a cluster have two tiles of the same expert and rows of W,
 * of which each copies half to both. Blocks take tiles in turn, all tiles of W for some rows after
 * the other, so that the rows come from L2 but once. How many tiles there are is known on the
 * device alone. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_TILE_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_TILE_H

#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/sm90_gemm_outputs.h"
#include "cuda/moe/expert_activation.h"
#include "cuda/moe/group.h"
#include "cuda/moe/sm90/sm90_moe_many.h"

namespace moq::moe_many {

using namespace gemm;

#define MANY_STAGES     12
#define WAVE_ROWS       64
#define TURNED          32   /* tokens that turn around at a time at most */
#define MANY_TURN_BYTES 8192 /* where they do, of all warpgroups */
#define BOARD           128  /* tokens of a tile at most */
#define GATHERERS       2    /* warps that gather rows */

/* What a product is for. */
typedef enum {
    OF_GATE_AND_UP, /* g = act of both */
    OF_ONE,         /* g = act of each row */
    OF_D            /* sums as they are */
} product_use;

typedef struct {
    const moe::row_tile *tiles;
    const int32_t *count; /* of rows, and of tiles */
    int row_tiles, steps, stages;
    bool early; /* the tiles are known before the predecessor has ended */
    int n;      /* rows of W of an expert */
    int height; /* and what the map of W counts of them */
    int half;   /* rows of gate */
    moe::activation act;
    moq_output out; /* g, or, where w2 takes that, its e4m3 codes: */
    g_form form;
    uint8_t *codes; /* rows [code_stride], and scales by groups [I / 128, g_scale_stride], */
    float *g_scale; /* or the scale of each expert [E, 1] */
    int64_t code_stride, g_scale_stride;
    float *d;                         /* [rows, n] */
    const float *output_scale, *bias; /* [E, n], or NULL */
    const int32_t
        *slot; /* of rows that are gathered from x, or NULL where they are side by side, */
    int top_k;
    const uint8_t *x; /* and x: its tokens, x_stride bytes apart, of which `bytes` */
    int64_t x_stride, bytes;
    const float *x_scale; /* of rows or tokens, by groups [steps, x_scale_stride], or NULL */
    int64_t x_scale_stride;
    const float *input_scale; /* [E, parts] where x_scale is NULL, or NULL too */
    int parts;
    const float *block_scale; /* [E, block rows, steps] */
    int64_t block_step;
    moq_partitions partitions;
} gemm_args;

/* ---- tiles ---- */

typedef struct {
    int number, end, stride;
} tile_queue;

/* With the predecessor ended. The blocks of a pair go through pairs of tiles. */
template <class S> static __device__ __forceinline__ tile_queue tiles_of_block(const gemm_args *a) {
    constexpr int BLOCKS = S::pair ? 2 : 1;
    return {(int)blockIdx.x / BLOCKS, a->count[1] / BLOCKS * a->row_tiles, (int)gridDim.x / BLOCKS};
}

typedef struct {
    moe::row_tile rows;
    int along; /* tile of W */
} place;

template <class S>
static __device__ __forceinline__ place place_at(const gemm_args *a, int number) {
    int tile = number / a->row_tiles, along = number - tile * a->row_tiles;
    if (S::pair)
        tile = 2 * tile + (int)rank_in_cluster();
    return {a->tiles[tile], along};
}

/* Which of x, or of the rows side by side, is row `row`. */
static __device__ __forceinline__ int source_of(const gemm_args *a, int row) {
    return a->slot ? a->slot[row] / a->top_k : row;
}

/* What a number is to a template. */
template <int N> struct width {
    static constexpr int columns = N;
};

/* silu without a limit. */
static __device__ __forceinline__ bool is_plain(const moe::activation *a) {
    return a->kind == MOQ_MOE_SILU && isinf(a->limit);
}

/* Calls `make` with the least width of S that has room for so many rows; with the largest one for
 * what is rarely asked for, which is compiled for that alone. */
template <class S, product_use USE, class F>
static __device__ __forceinline__ void with_width(const gemm_args *a, int rows, F make) {
    rows = __shfl_sync(0xffffffffu, rows, 0); /* the compiler sees it is one */
    if (USE == OF_ONE)
        return make(width<S::tokens>());
    if (USE == OF_GATE_AND_UP && !is_plain(&a->act))
        rows = S::tokens;
    if (S::fine && rows <= S::tokens / 4)
        make(width<S::tokens / (S::fine ? 4 : 2)>());
    else if (S::half && rows <= S::tokens / 2)
        make(width<S::tokens / (S::half ? 2 : 1)>());
    else if (S::three && rows <= S::tokens / 4 * 3)
        make(width<S::tokens / 4 * (S::three ? 3 : 4)>());
    else
        make(width<S::tokens>());
}

/* The first row of W of a wave of a warpgroup, within the expert, and the end of those it may have.
 */
template <class S, product_use USE>
static __device__ __forceinline__ int row_of_wave(const gemm_args *a, int along, int group,
                                                  int wave) {
    if (USE == OF_GATE_AND_UP)
        return wave * a->half + (along * S::warpgroups + group) * WAVE_ROWS;
    return ((along * S::warpgroups + group) * 2 + wave) * WAVE_ROWS;
}

template <product_use USE>
static __device__ __forceinline__ int end_of_wave(const gemm_args *a, int wave) {
    return USE == OF_GATE_AND_UP ? (wave + 1) * a->half : a->n;
}

/* ---- outputs ---- */

/* What sums are scaled by beside the factor of their row of W. */
template <class S>
static __device__ __forceinline__ float factor_of_token(const gemm_args *a, const place *p) {
    int token = threadIdx.x % 128;
    if (S::groups || token >= p->rows.rows)
        return 1.0f;
    if (a->x_scale)
        return a->x_scale[source_of(a, p->rows.first + token)];
    return a->input_scale ? a->input_scale[p->rows.expert * a->parts] : 1.0f;
}

/* Factors and biases of the two rows that a thread has of a wave. */
template <class S, product_use USE>
static __device__ __forceinline__ terms terms_of(const gemm_args *a, const place *p, int group,
                                                 int wave) {
    terms e = {{0.0f, 0.0f}, {-0.0f, -0.0f}}; /* whoever adds -0 adds nothing */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = row_of_wave<S, USE>(a, p->along, group, wave) + row_of_thread() + 8 * i;
        int64_t at = (int64_t)p->rows.expert * a->n + row;
        if (row >= end_of_wave<USE>(a, wave))
            continue;
        e.factor[i] = S::groups ? 1.0f : a->output_scale[at] * S::unit;
        if (a->bias)
            e.bias[i] = a->bias[at];
    }
    return e;
}

static __device__ __forceinline__ float finish_sum(float sum, float of_row, float of_token,
                                                   float bias) {
    return __fadd_rn(__fmul_rn(sum, __fmul_rn(of_token, of_row)), bias);
}

/* What carry_out has to know of these outputs. */
struct outputs_of_g {
    typedef gemm_args args;
};

/* 16 columns of g, of 16 bits, of a token that was turned around. */
static __device__ __forceinline__ void load_turned(const gemm_args *a, uint32_t turn, int token,
                                                   int piece, float (&value)[16]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 eight = load_shared(turn + token * 128 + ((2 * piece + i) ^ token % 8) * 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 pair = moq_widen_pair((&eight.x)[j], a->out.dtype);
            value[8 * i + 2 * j] = pair.x;
            value[8 * i + 2 * j + 1] = pair.y;
        }
    }
}

/* carry_out for codes, of form G_GROUP where S::groups and else G_TENSOR: `count` tokens from
 * `first` on, of the 64 columns from at->row on. Four threads have a token. Where groups have
 * scales, the other warpgroup has the other half of the same 128 columns, and `most` is shared
 * memory for the largest magnitudes of both. */
template <class S>
static __device__ __forceinline__ void carry_codes(const gemm_args *a, uint32_t turn,
                                                   const tile_place *at, int expert, int first,
                                                   int count, uint32_t (*most)[TURNED]) {
    int thread = threadIdx.x % 128, piece = thread % 4, column = at->row + piece * 16;
    int group = threadIdx.x / 128, end = min(count, at->last - at->token - first);
    bool own = column < at->end; /* all 16, or none */
    float scale = 1.0f, value[16];
    if (!S::groups) {
        scale = __frcp_rn(a->g_scale[expert]);
    } else {
        barrier_sync(1, 256); /* those of the tokens before have been read */
#pragma unroll 1
        for (int token = thread / 4; token < count; token += 32) {
            load_turned(a, turn, token, piece, value);
            uint32_t bits = moq_max_of_lanes(own ? moq_amax_bits(value) : 0, 4);
            if (piece == 0)
                most[group][token] = bits;
        }
        barrier_sync(1, 256);
    }
#pragma unroll 1
    for (int token = thread / 4; token < end; token += 32) {
        int64_t row = at->token + first + token;
        load_turned(a, turn, token, piece, value);
        uint4 codes;
        if (!S::groups) {
            codes = moq_codes_multiplied(value, scale);
        } else {
            scale = moq_group_scale(__uint_as_float(max(most[0][token], most[1][token])));
            codes = moq_codes_divided(value, scale);
            if (piece == 0 && group == 0)
                a->g_scale[at->row / 128 * a->g_scale_stride + row] = scale;
        }
        if (own)
            *(uint4 *)(a->codes + row * a->code_stride + column) = codes;
    }
}

/* Where the outputs of a tile pass through shared memory, of a warpgroup: factors of its tokens,
 * and the room where they turn around; and largest magnitudes, of both. */
typedef struct {
    float *token;
    uint32_t turn;
    uint32_t (*most)[TURNED];
} way_out;

/* Activations that have code of their own: it is unrolled, and what is not asked for would keep
 * what is from the instructions' cache (docs/lab/moe.md). */
typedef enum { PLAIN_SILU, ANY_SILU, ANY_ACTIVATION } kind_of_code;

template <kind_of_code KIND>
static __device__ __forceinline__ float act(const moe::activation *a, float gate, float up) {
    if (KIND == PLAIN_SILU)
        return moe::silu_without_limit(a, gate, up);
    if (KIND == ANY_SILU)
        return moe::activate_as<MOQ_MOE_SILU>(a, gate, up);
    return moe::activate(a, gate, up);
}

/* Sums of the next tokens take the place of those before. */
template <int COUNT, int ALL> static __device__ __forceinline__ void move_down(float (&sum)[ALL]) {
#pragma unroll
    for (int i = 0; i + COUNT < ALL; i++)
        sum[i] = sum[i + COUNT];
}

/* Writes 64 columns of g from `column` on, by a warpgroup: `gate` and `up` are sums of the products
 * with their rows, up the same as gate where there is none. They are used up: the code for 32
 * tokens goes round, so that it stays in the instructions' cache (docs/lab/moe.md). */
template <class S, bool GATED, kind_of_code KIND>
static __device__ __forceinline__ void
write_g(const gemm_args *a, const place *p, int column, const way_out *w, const terms *of_gate,
        const terms *of_up, float (&gate)[S::T / 2], float (&up)[S::T / 2]) {
    constexpr int AT_ONCE = S::T < TURNED ? S::T : TURNED;
    int lane = threadIdx.x % 32, piece = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    int group = threadIdx.x / 128;
    tile_place at = {column, GATED ? a->half : a->n, 0, p->rows.first,
                     p->rows.first + p->rows.rows};
#pragma unroll 1
    for (int first = 0; first < p->rows.rows; first += AT_ONCE) {
        barrier_sync(2 + group, 128); /* what was there has been stored */
#pragma unroll
        for (int j = 0; j < AT_ONCE / 8; j++) {
            float2 own = *(const float2 *)(w->token + first + 8 * j + lane % 4 * 2);
            uint32_t half[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float g[2];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    int k = 4 * j + 2 * i + odd;
                    float x = odd ? own.y : own.x, u = 1.0f;
                    float z = finish_sum(gate[k], of_gate->factor[i], x, of_gate->bias[i]);
                    if (GATED)
                        u = finish_sum(up[k], of_up->factor[i], x, of_up->bias[i]);
                    g[odd] = act<KIND>(&a->act, z, u);
                }
                half[i] = moq_narrow_pair(a->out.dtype, g[0], g[1]);
            }
            store_two_matrices_turned(w->turn + j * EIGHT_BYTES + lane % 8 * 128 +
                                          (piece ^ lane % 8) * 16,
                                      half[0], half[1]);
        }
        move_down<AT_ONCE / 2>(gate);
        if (GATED)
            move_down<AT_ONCE / 2>(up);
        barrier_sync(2 + group, 128);
        if (!S::writes_codes || a->form == G_VALUES)
            carry_out<outputs_of_g>(a, w->turn, &at, 0, first, AT_ONCE);
        else
            carry_codes<S>(a, w->turn, &at, p->rows.expert, first, AT_ONCE, w->most);
    }
}

/* The same for whatever the activation is: code of one kind stays together. */
template <class S, bool GATED, bool PLAIN>
static __device__ __forceinline__ void
write_activated(const gemm_args *a, const place *p, int column, const way_out *w,
                const terms *of_gate, const terms *of_up, float (&gate)[S::T / 2],
                float (&up)[S::T / 2]) {
    if (PLAIN || is_plain(&a->act))
        write_g<S, GATED, PLAIN_SILU>(a, p, column, w, of_gate, of_up, gate, up);
    else if (a->act.kind == MOQ_MOE_SILU)
        write_g<S, GATED, ANY_SILU>(a, p, column, w, of_gate, of_up, gate, up);
    else
        write_g<S, GATED, ANY_ACTIVATION>(a, p, column, w, of_gate, of_up, gate, up);
}

/* Writes 64 columns of d from `column` on: eight threads have 32 bytes of a row. The sums are used
 * up, as by write_g. */
template <class S>
static __device__ __forceinline__ void write_d(const gemm_args *a, const place *p, int column,
                                               const float *token, const terms *e,
                                               float (&sum)[S::T / 2]) {
    constexpr int AT_ONCE = S::T < TURNED ? S::T : TURNED;
    int own = threadIdx.x % 4 * 2, n = column + row_of_thread();
    bool upper = n < a->n, lower = n + 8 < a->n;
    float *to = a->d + (int64_t)(p->rows.first + own) * a->n + n;
#pragma unroll 1
    for (int first = 0; first < p->rows.rows; first += AT_ONCE) {
#pragma unroll
        for (int j = 0; j < AT_ONCE / 8; j++) {
            float2 x = *(const float2 *)(token + first + 8 * j + own);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = first + 8 * j + i % 2;
                float value =
                    finish_sum(sum[4 * j + i], e->factor[i / 2], i % 2 ? x.y : x.x, e->bias[i / 2]);
                if (row + own < p->rows.rows && (i / 2 ? lower : upper))
                    to[(int64_t)row * a->n + i / 2 * 8] = value;
            }
        }
        move_down<AT_ONCE / 2>(sum);
    }
}

/* Writes what a warpgroup has of a tile, of whose tokens' factors a thread brings `factor`. PLAIN:
 * the activation is silu without a limit. */
template <class S, product_use USE, bool PLAIN = (S::T < S::tokens)>
static __device__ __forceinline__ void write_tile(const gemm_args *a, const place *p, int group,
                                                  float factor, const way_out *w,
                                                  float (&sum)[2][S::T / 2]) {
    terms e[2] = {terms_of<S, USE>(a, p, group, 0), terms_of<S, USE>(a, p, group, 1)};
    barrier_sync(2 + group, 128); /* the tile before has been written */
    w->token[threadIdx.x % 128] = factor;
    barrier_sync(2 + group, 128);
    if constexpr (USE == OF_GATE_AND_UP)
        write_activated<S, true, PLAIN>(a, p, row_of_wave<S, USE>(a, p->along, group, 0), w, &e[0],
                                        &e[1], sum[0], sum[1]);
#pragma unroll
    for (int wave = 0; wave < 2; wave++) {
        int column = row_of_wave<S, USE>(a, p->along, group, wave);
        if constexpr (USE == OF_ONE)
            write_activated<S, false, PLAIN>(a, p, column, w, &e[wave], &e[wave], sum[wave],
                                             sum[wave]);
        if constexpr (USE == OF_D)
            write_d<S>(a, p, column, w->token, &e[wave], sum[wave]);
    }
}

} // namespace moq::moe_many

#endif
