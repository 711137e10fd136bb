/* Tile of the kernels on plain CUDA cores: what a block of simt_linear.cu, whose head tells the
 * layouts, and of experts (cuda/moe) computes. */
#ifndef MOQ_CUDA_LINEAR_ANY_SIMT_TILE_H
#define MOQ_CUDA_LINEAR_ANY_SIMT_TILE_H

#include "core/formats.h"
#include "core/nvfp4_packed.h"
#include "core/swizzle.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"
#include "cuda/device/round.h"

namespace moq::simt {

#define WARPS        8
#define TOKENS       WARPS /* rows of x of a block: a warp quantizes one */
#define LANE_K       16    /* columns of a lane */
#define STEP         (32 * LANE_K)
#define THREADS      (32 * WARPS)
#define PREFILL_ROWS 4 /* rows of W of a warp, with work enough */

/* Tensors of a weight. */
typedef struct {
    const uint8_t *weight;
    const void *weight_scale;
    const float *output_scale; /* [N], or NULL with block scales */
    const float *fold_scale;   /* [N], of FOLDED */
    const float *input_scale;  /* one for each partition, or NULL */
    int group;                 /* columns that share a scale, of INT4 */
} simt_weight;

/* Rows of x that are codes already. */
typedef struct {
    const uint8_t *codes; /* or NULL */
    int64_t stride;       /* bytes from row to row, a multiple of 16 with zeros at the end */
    const void
        *scales; /* [rows] of tokens, [K / 128, scale_stride] of groups, e4m3 [rows, K / 16] */
    int64_t scale_stride;
} simt_codes;

typedef struct {
    moq_rows x;
    simt_codes coded; /* codes in place of x, of experts */
    int64_t k;
    const float *amax; /* [rows of x] for tokens, or [parts] of x without an input_scale */
    int parts;
    int partition_count;
    moq_partitions partitions;
} simt_args;

/* Tile that a block computes. */
typedef struct {
    simt_weight w;
    moq_output out;
    moq_tile rows; /* rows of W, WARPS times as many as a warp has */
    int64_t first; /* first row of x */
    int tokens;    /* rows of x from `first` on, at most TOKENS */
} simt_place;

/* ---- x ---- */

static __device__ __forceinline__ uint32_t max_of_block(uint32_t bits, uint32_t *shared) {
    bits = moq_max_of_lanes(bits, 32);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        bits = max(bits, shared[i]);
    return bits;
}

/* Returns the one scale of x in this partition: given, or of the amax of all of it. */
template <int MODE>
static __device__ __forceinline__ float tensor_scale(const simt_args *a, const simt_place *p,
                                                     uint32_t *shared) {
    if (p->w.input_scale)
        return p->w.input_scale[p->rows.partition];
    uint32_t bits = (int)threadIdx.x < a->parts ? __float_as_uint(a->amax[threadIdx.x]) : 0;
    float amax = __uint_as_float(max_of_block(bits, shared));
    if (MODE == MOQ_INPUT_E4M3_TENSOR)
        return moq_tensor_scale(amax);
    float scale = __fdiv_rn(amax, MOQ_NVFP4_MAX);
    return scale == 0.0f ? 1.0f : scale;
}

/* Rounds a lane's values to what their codes mean, without the scale of the row. By groups, the
 * lanes of a group get its scale in *scale. */
template <int MODE>
static __device__ __forceinline__ void quantize(float (&value)[LANE_K], float *scale) {
    if (MODE == MOQ_INPUT_AS_IS)
        return;
    if (MODE == MOQ_INPUT_NVFP4) {
        round_nvfp4(value, *scale);
        return;
    }
    if (MODE == MOQ_INPUT_E4M3_GROUP)
        *scale = moq_group_scale(__uint_as_float(moq_max_of_lanes(moq_amax_bits(value), 8)));
    constexpr bool BY_INVERSE = MODE == MOQ_INPUT_E4M3_TENSOR || MODE == MOQ_INPUT_INT8;
    float inverse = BY_INVERSE ? __frcp_rn(*scale) : 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_K; i++) {
        float quotient = BY_INVERSE ? __fmul_rn(value[i], inverse) : __fdiv_rn(value[i], *scale);
        value[i] = MODE == MOQ_INPUT_INT8 ? round_int8(quotient) : round_e4m3(quotient);
    }
}

/* ---- W ---- */

/* Storage of W. FOLDED is PACKED with scales to be folded; E4M3_MX has groups of 32. */
enum { E4M3_ROW, E4M3_BLOCK, E2M1, PACKED, FOLDED, E4M3_MX, INT8_ROW, INT4 };

/* Powers of two that decoding leaves out: the biases of fp16 and of the format differ. */
#define E4M3_UNIT 256.0f
#define E2M1_UNIT 16384.0f

typedef struct {
    uint4 codes; /* e2m1: the first half */
    float scale; /* e2m1: scale of the lane's columns; blocks: of the lane's 128 */
} weights;

static __device__ __forceinline__ float2 halves(uint32_t pair) {
    __half2 h;
    memcpy(&h, &pair, sizeof h);
    return __half22float2(h);
}

/* Bits as fp16: sign, then exponent and significand in their places. */
static __device__ __forceinline__ void decode_e4m3(uint4 codes, float (&w)[LANE_K]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t spread = __byte_perm((&codes.x)[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
        float2 pair = halves((spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7);
        w[2 * i] = pair.x;
        w[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ void decode_e2m1(uint4 codes, float (&w)[LANE_K]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t byte = (&codes.x)[i / 4] >> (i % 4 * 8);
        float2 pair = halves((byte & 0x07u) << 9 | (byte & 0x08u) << 12 | (byte & 0x70u) << 21 |
                             (byte & 0x80u) << 24);
        w[2 * i] = pair.x;
        w[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ float decode_scale(uint8_t code) {
    return E4M3_UNIT * halves((code & 0x80u) << 8 | (code & 0x7fu) << 7).x;
}

static __device__ __forceinline__ uint4 load_e4m3(const uint8_t *row, int64_t column, int64_t k) {
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (k % LANE_K == 0)
        return *(const uint4 *)(row + column);
#pragma unroll
    for (int i = 0; i < LANE_K; i++) {
        if (column + i < k)
            (&codes.x)[i / 4] |= (uint32_t)row[column + i] << (i % 4 * 8);
    }
    return codes;
}

/* Loads the lane's group of row n from its unit. */
static __device__ __forceinline__ weights load_packed(const uint8_t *weight, int64_t k, int64_t n,
                                                      int64_t column) {
    int r = n % MOQ_PACK_ROWS, g = r % 8, h = r / 8;
    int s = column % MOQ_PACK_K / LANE_K;
    int64_t unit = n / MOQ_PACK_ROWS * moq_pack_blocks(k) + column / MOQ_PACK_K;
    const uint8_t *from = weight + unit * MOQ_PACK_BYTES;
    weights w = {make_uint4(0, 0, 0, 0), decode_scale(from[moq_pack_scale_at(r, s)])};
#pragma unroll
    for (int t = 0; t < 4; t++) {
        uint32_t word = *(const uint32_t *)(from + moq_pack_word_at(g, t, s));
        w.codes.x |= moq_unpack_pair(word, h) << 8 * t;
        w.codes.y |= moq_unpack_pair(word, 2 + h) << 8 * t;
    }
    return w;
}

/* Returns 2^(code - 127). */
static __device__ __forceinline__ float power_of_two(uint8_t code) {
    return __uint_as_float(code ? (uint32_t)code << 23 : 0x00400000u);
}

/* Selects the codes of a row of int4 from those of a pair, as int8. */
static __device__ __forceinline__ uint4 select_row(uint4 pairs, int row) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t nibbles = (&pairs.x)[i] >> 4 * row & 0x0f0f0f0fu;
        (&pairs.x)[i] = nibbles | (nibbles & 0x08080808u) * 0x1eu;
    }
    return pairs;
}

/* Loads the lane's columns of row n of W, zeros from k on. */
template <int WEIGHT>
static __device__ __forceinline__ weights load_weights(const simt_weight *from, int64_t k,
                                                       int64_t n, int64_t padded_row,
                                                       int64_t column) {
    weights w = {make_uint4(0, 0, 0, 0), 0.0f};
    if (column >= k)
        return w;
    if (WEIGHT == PACKED || WEIGHT == FOLDED) {
        w = load_packed(from->weight, k, n, column);
        if (WEIGHT == FOLDED)
            w.scale *= from->fold_scale[n];
        return w;
    }
    if (WEIGHT == E2M1) {
        uint2 codes = *(const uint2 *)(from->weight + (n * k + column) / 2);
        w.codes = make_uint4(codes.x, codes.y, 0, 0);
        int64_t across = moq_swizzle_across(k / LANE_K);
        int64_t at = moq_swizzle_at(padded_row, column / LANE_K, across);
        w.scale = decode_scale(((const uint8_t *)from->weight_scale)[at]);
        return w;
    }
    w.codes = load_e4m3(from->weight + (WEIGHT == INT4 ? n / 2 : n) * k, column, k);
    if (WEIGHT == E4M3_MX)
        w.scale = power_of_two(((const uint8_t *)from->weight_scale)[(n * k + column) / 32]);
    if (WEIGHT == INT4) {
        w.codes = select_row(w.codes, n % 2);
        w.scale = ((const float *)from->weight_scale)[(n * k + column) / from->group];
    }
    if (WEIGHT == E4M3_BLOCK)
        w.scale = ((const float *)
                       from->weight_scale)[padded_row / 128 * ((k + 127) / 128) + column / 128];
    return w;
}

static __device__ __forceinline__ void decode_int8(uint4 codes, float (&w)[LANE_K]) {
#pragma unroll
    for (int i = 0; i < LANE_K; i++)
        w[i] = (float)(int8_t)((&codes.x)[i / 4] >> (i % 4 * 8));
}

/* Decodes values without the unit of their format, which the sums get at the end; folded weights
 * have none. */
template <int WEIGHT>
static __device__ __forceinline__ void decode(const weights &in, float (&w)[LANE_K]) {
    if (WEIGHT == E4M3_ROW || WEIGHT == E4M3_BLOCK || WEIGHT == E4M3_MX) {
        decode_e4m3(in.codes, w);
        return;
    }
    if (WEIGHT == INT8_ROW || WEIGHT == INT4) {
        decode_int8(in.codes, w);
        return;
    }
    decode_e2m1(in.codes, w);
#pragma unroll
    for (int i = 0; i < LANE_K && WEIGHT == FOLDED; i++)
        w[i] = round_e4m3(w[i] * E2M1_UNIT * in.scale);
}

/* Parts of the unit: what sums get, and what the scale of the row gets. Sums of e2m1 get as much as
 * the tensor-core kernels leave out of their products, so that they overflow at the same numbers.
 */
template <int WEIGHT> static __device__ __forceinline__ float unit_of_sums(void) {
    if (WEIGHT == E2M1 || WEIGHT == PACKED)
        return E2M1_UNIT / MOQ_NVFP4_FACTOR;
    return WEIGHT == FOLDED || WEIGHT == INT8_ROW || WEIGHT == INT4 ? 1.0f : E4M3_UNIT;
}

template <int WEIGHT> static __device__ __forceinline__ float unit_of_factors(void) {
    return WEIGHT == E2M1 || WEIGHT == PACKED ? MOQ_NVFP4_FACTOR : 1.0f;
}

/* ---- codes of x ---- */

/* Decodes e4m3 codes, NaN too. */
static __device__ __forceinline__ void decode_coded(uint4 codes, float (&value)[LANE_K]) {
    decode_e4m3(codes, value);
#pragma unroll
    for (int i = 0; i < LANE_K; i++) {
        bool nan = ((&codes.x)[i / 4] >> (i % 4 * 8) & 0x7fu) == 0x7fu;
        value[i] = nan ? __uint_as_float(0x7fffffffu) : value[i] * E4M3_UNIT;
    }
}

/* Loads values of codes, where nothing is left to quantize. */
template <int MODE>
static __device__ __forceinline__ void load_coded(const simt_args *a, int64_t row, int64_t column,
                                                  float (&value)[LANE_K], float *scale) {
    const simt_codes *c = &a->coded;
    if (column >= a->k) {
#pragma unroll
        for (int i = 0; i < LANE_K; i++)
            value[i] = 0.0f;
        return;
    }
    const uint8_t *from = c->codes + row * c->stride;
    if (MODE != MOQ_INPUT_NVFP4) {
        decode_coded(*(const uint4 *)(from + column), value);
        if (MODE == MOQ_INPUT_E4M3_GROUP)
            *scale = ((const float *)c->scales)[column / 128 * c->scale_stride + row];
        return;
    }
    uint2 pairs = *(const uint2 *)(from + column / 2);
    uint8_t code = ((const uint8_t *)c->scales)[row * (a->k / LANE_K) + column / LANE_K];
    float block = (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : decode_scale(code);
    decode_e2m1(make_uint4(pairs.x, pairs.y, 0, 0), value);
#pragma unroll
    for (int i = 0; i < LANE_K; i++)
        value[i] = __fmul_rn(value[i] * E2M1_UNIT, block);
}

/* Returns the scale of a token's row. */
static __device__ __forceinline__ float scale_of_token(const simt_args *a, int64_t row) {
    return a->coded.codes ? a->amax[row] : moq_token_scale(a->amax[row]);
}

/* Returns the scale of a row of int8 codes, given or found. */
static __device__ __forceinline__ float scale_of_int8(const simt_args *a, const simt_place *p,
                                                      int64_t row) {
    if (p->w.input_scale)
        return p->w.input_scale[p->rows.partition];
    float scale = __fdiv_rn(a->amax[row], MOQ_INT8_MAX);
    return scale < 1.17549435e-38f ? 1.0f : scale; /* the least normal number */
}

/* ---- the tile ---- */

template <int MODE, int WEIGHT, int ROWS>
static __device__ __forceinline__ void simt_tile(const simt_args &args, const simt_place &p) {
    __shared__ float4 values[TOKENS][LANE_K / 4][32];
    __shared__ float group_scale[TOKENS][STEP / 128], token_scale[TOKENS];
    __shared__ uint32_t shared[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    moq_tile t = p.rows;
    int64_t first = p.first;
    int tokens = p.tokens, row = t.begin + warp * ROWS;
    float scale = 1.0f;
    if (MODE == MOQ_INPUT_E4M3_TENSOR || MODE == MOQ_INPUT_NVFP4)
        scale = tensor_scale<MODE>(&args, &p, shared);
    if (MODE == MOQ_INPUT_E4M3_TOKEN && warp < tokens)
        scale = scale_of_token(&args, first + warp);
    if (MODE == MOQ_INPUT_INT8 && warp < tokens)
        scale = scale_of_int8(&args, &p, first + warp);
    if (lane == 0)
        token_scale[warp] = scale;
    float sum[ROWS][TOKENS] = {};
    for (int64_t base = 0; base < args.k; base += STEP) {
        int64_t column = base + lane * LANE_K;
        weights w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int n = min(row + r, t.end - 1);
            w[r] = load_weights<WEIGHT>(&p.w, args.k, n,
                                        moq_padded_row(&args.partitions, t.partition, n), column);
        }
        __syncthreads(); /* all have read the values of the step before */
        if (warp < tokens) {
            float value[LANE_K];
            if (MODE != MOQ_INPUT_AS_IS && MODE != MOQ_INPUT_INT8 && args.coded.codes) {
                load_coded<MODE>(&args, first + warp, column, value, &scale);
            } else {
                moq_load_values(&args.x, first + warp, column, args.k, value);
                quantize<MODE>(value, &scale);
            }
            if (MODE == MOQ_INPUT_E4M3_GROUP && lane % 8 == 0)
                group_scale[warp][lane / 8] = scale;
#pragma unroll
            for (int i = 0; i < LANE_K / 4; i++)
                values[warp][i][lane] =
                    make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
        }
        __syncthreads();
        float decoded[ROWS][LANE_K];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            decode<WEIGHT>(w[r], decoded[r]);
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            if (m >= tokens)
                continue;
            float4 x[LANE_K / 4];
#pragma unroll
            for (int i = 0; i < LANE_K / 4; i++)
                x[i] = values[m][i][lane];
            float of_x = MODE == MOQ_INPUT_E4M3_GROUP ? group_scale[m][lane / 8] : 1.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float product = 0.0f;
#pragma unroll
                for (int i = 0; i < LANE_K; i++)
                    product = __fmaf_rn((&x[i / 4].x)[i % 4], decoded[r][i], product);
                if (MODE == MOQ_INPUT_E4M3_GROUP)
                    product = __fmul_rn(product, __fmul_rn(of_x, w[r].scale));
                else if (WEIGHT == E2M1 || WEIGHT == PACKED || WEIGHT == E4M3_MX || WEIGHT == INT4)
                    product = __fmul_rn(product, w[r].scale);
                sum[r][m] = __fadd_rn(sum[r][m], product);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            float total = sum[r][m];
#pragma unroll
            for (int i = 16; i > 0; i /= 2)
                total += __shfl_xor_sync(0xffffffffu, total, i);
            if (lane != r * TOKENS + m || m >= tokens || row + r >= t.end)
                continue;
            total *= unit_of_sums<WEIGHT>();
            if (p.w.output_scale) {
                float factor = p.w.output_scale[row + r] * unit_of_factors<WEIGHT>();
                if (WEIGHT == FOLDED)
                    factor *= __frcp_rn(p.w.fold_scale[row + r]);
                total = __fmul_rn(total, __fmul_rn(token_scale[m], factor));
            } else if (WEIGHT == INT4) {
                total = __fmul_rn(total, token_scale[m]);
            }
            moq_store_output(&p.out, first + m, row + r, total, moq_load_bias(&p.out, row + r));
        }
    }
}

/* ---- instances ---- */

/* Mode by which x is read: a layer that leaves the choice to the library is computed exactly. */
static inline moq_input_mode input_of(const moq_linear_spec *spec) {
    return moq_linear_has_choice(spec) ? MOQ_INPUT_AS_IS : spec->input;
}

/* Returns the kernel of a layer among KERNEL<MODE, WEIGHT>::of(few). */
template <template <int, int> class KERNEL>
static const void *kernel_for(const moq_linear_spec *spec, bool few) {
    bool packed = spec->weight == MOQ_WEIGHT_E2M1_PACKED;
    if (input_of(spec) == MOQ_INPUT_AS_IS && spec->weight == MOQ_WEIGHT_E4M3_GROUP)
        return KERNEL<MOQ_INPUT_AS_IS, E4M3_MX>::of(few);
    if (spec->weight == MOQ_WEIGHT_INT8_ROW)
        return spec->input == MOQ_INPUT_INT8 ? KERNEL<MOQ_INPUT_INT8, INT8_ROW>::of(few)
                                             : KERNEL<MOQ_INPUT_AS_IS, INT8_ROW>::of(few);
    if (spec->weight == MOQ_WEIGHT_INT4_GROUP)
        return spec->input == MOQ_INPUT_E4M3_TENSOR ? KERNEL<MOQ_INPUT_E4M3_TENSOR, INT4>::of(few)
                                                    : KERNEL<MOQ_INPUT_AS_IS, INT4>::of(few);
    switch (input_of(spec)) {
    case MOQ_INPUT_AS_IS:
        return KERNEL<MOQ_INPUT_AS_IS, PACKED>::of(few);
    case MOQ_INPUT_E4M3_TENSOR:
        return !packed                  ? KERNEL<MOQ_INPUT_E4M3_TENSOR, E4M3_ROW>::of(few)
               : moq_linear_folds(spec) ? KERNEL<MOQ_INPUT_E4M3_TENSOR, FOLDED>::of(few)
                                        : KERNEL<MOQ_INPUT_E4M3_TENSOR, PACKED>::of(few);
    case MOQ_INPUT_E4M3_TOKEN:
        return !packed                  ? KERNEL<MOQ_INPUT_E4M3_TOKEN, E4M3_ROW>::of(few)
               : moq_linear_folds(spec) ? KERNEL<MOQ_INPUT_E4M3_TOKEN, FOLDED>::of(few)
                                        : KERNEL<MOQ_INPUT_E4M3_TOKEN, PACKED>::of(few);
    case MOQ_INPUT_E4M3_GROUP:
        return KERNEL<MOQ_INPUT_E4M3_GROUP, E4M3_BLOCK>::of(few);
    default:
        return packed ? KERNEL<MOQ_INPUT_NVFP4, PACKED>::of(few)
                      : KERNEL<MOQ_INPUT_NVFP4, E2M1>::of(few);
    }
}

} // namespace moq::simt

#endif
