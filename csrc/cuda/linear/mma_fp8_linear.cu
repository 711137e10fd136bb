/* FP8 linear by products of warps, for every chip from Ampere on:
 * y[m, n] = round(sum over groups g of 128 columns of s(m, n, g) sum_k X[m, k] W[n, k], times
 * sx[m] sw[n], + bias[n]).
 *
 * X is x quantized to e4m3 [M, K] in the workspace, as the layer prescribes
 * (cuda/tensor/cuda_quantize.h); where partitions have input scales of their own, one matrix of
 * codes for each. W is e4m3 [N, K] as prepared. s is the scale of x of a group times that of the
 * 128 x 128 block of W, 1 for layers without blocks; sx and sw are those of tensors, tokens and
 * rows.
 *
 * Two kinds of products, from the same registers:
 * - f16 (sm_80): each code becomes fp16, exactly but for 2^-8: its 7 bits are exponent and
 *   significand of a half, moved by the difference of the biases. Products and their sums in
 *   float32 are exact to float32's rounding, so that this is also the tensor-core path of float32
 *   outputs. Which columns meet which of a product is free as long as X and W agree: of the four
 *   codes of a register, the odd ones go to one half of it and the even ones to the other.
 * - e4m3 (sm_89): the codes as they are. These sums keep about 14 bits on some chips.
 * Both add to float32 sums outside of the tensor cores every 128 columns.
 *
 * A block has a tile of TM rows of x and TN of W, of one partition and one row of block scales:
 * tiles begin anew with each partition. It goes through K in steps of 128 columns, copied
 * (cp.async, 16 bytes a thread) to a ring of STAGES buffers, rows of 128 bytes with their 16-byte
 * parts in the order part ^ (row % 8), so that ldmatrix has no bank conflicts. Rows and columns
 * beyond the ends are zeros. WM x WN warps share a tile, and WK of them each step, whose sums meet
 * at the end.
 *
 * Few rows are bound by reading W; the more warps in K, the more of them read. Many are bound by
 * the tensor cores and, as f16, by decoding: 5.5 instructions for a register of two values, of
 * which a warp of 64 x 32 needs 24 for 16 products. Where this kernel ran: docs/results/README.md.
 */
#include "core/formats.h"
#include "core/invariant.h"
#include "cuda/device/load.h"
#include "cuda/device/mma_tile.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize.h"

namespace moq::mma_fp8 {

#define STEP  MMA_ROW  /* columns, a byte each */
#define SLICE 32       /* columns that registers of one load hold */
#define UNIT  65536.0f /* what fp16 codes of x and W leave out: 2^8 each */

typedef struct {
    moq_output out;
    int64_t m, k;
    int64_t token_tiles, weight_tiles;
    const uint8_t *codes; /* of x */
    int64_t next_codes;   /* bytes from a partition's codes to the next one's, or 0 */
    const uint8_t *weight;
    const float *x_scale;     /* of x, at row * next_row + partition * next_partition */
    const float *block_scale; /* of W; x_scale is [K / 128, M] then. Or NULL */
    const float *output_scale;
    int next_row, next_partition;
    int partition_count;
    moq_partitions partitions;
} mma_args;

/* ---- codes ---- */

/* The codes in bytes 1 and 3 as two halves times 2^-8; NaN, all of seven bits, stays NaN. */
static __device__ __forceinline__ uint32_t decode_odd(uint32_t codes) {
    uint32_t magnitude = codes >> 1 & 0x3f803f80u;
    uint32_t nan = magnitude + 0x00800080u & 0x40004000u;
    return magnitude | nan | (codes & 0x80008000u);
}

static __device__ __forceinline__ uint32_t decode_even(uint32_t codes) {
    return decode_odd(codes << 8);
}

/* ---- products ---- */

/* Code for older chips multiplies as f16 whatever it is asked for. */
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3 true
#else
#define HAS_E4M3 false
#endif

/* sum += X W^T of MT x 16 rows of x, NT x 8 of W and 32 columns, as ldmatrix brings them. */
template <int MT, int NT>
static __device__ __forceinline__ void
multiply_as_f16(float (&sum)[MT][NT][4], const uint32_t (&x)[MT][4], const uint32_t (&w)[NT][2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t w16[NT][2];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            w16[j][0] = decode_odd(w[j][half]);
            w16[j][1] = decode_even(w[j][half]);
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            uint32_t above = x[i][2 * half], below = x[i][2 * half + 1]; /* 8 rows each */
            uint32_t x16[4] = {decode_odd(above), decode_odd(below), decode_even(above),
                               decode_even(below)};
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_f16(sum[i][j], x16, w16[j]);
        }
    }
}

template <int MT, int NT>
static __device__ __forceinline__ void
multiply_as_e4m3(float (&sum)[MT][NT][4], const uint32_t (&x)[MT][4], const uint32_t (&w)[NT][2]) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int j = 0; j < NT; j++)
            mma_e4m3(sum[i][j], x[i], w[j]);
    }
#endif
}

/* ---- the kernel ---- */

template <int TM, int TN, int WM, int WN, int WK, int STAGES, bool NATIVE>
static __global__ void __launch_bounds__(32 * WM * WN * WK, 1)
    mma_fp8_linear(const __grid_constant__ mma_args a) {
    constexpr int THREADS = 32 * WM * WN * WK;
    constexpr int MT = TM / WM / 16, NT = TN / WN / 8; /* products of a warp */
    constexpr int STAGE = (TM + TN) * STEP;
    constexpr bool E4M3 = NATIVE && HAS_E4M3;
    extern __shared__ __align__(128) uint8_t memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int share = warp / (WM * WN), wm = warp / WN % WM * MT * 16, wn = warp % WN * NT * 8;
    mma_place p = place_of(blockIdx.x, a.token_tiles, a.weight_tiles);
    moq_tile t = moq_find_tile(&a.partitions, a.partition_count, p.weight, TN);
    int64_t first = p.token * TM;
    int tokens = (int)min(a.m - first, (int64_t)TM);
    row_copies<TM, 1, THREADS> x(a.codes + t.partition * a.next_codes + first * a.k, a.k, a.k,
                                 tokens, 0);
    row_copies<TN, 1, THREADS> w(a.weight + (int64_t)t.begin * a.k, a.k, a.k, t.end - t.begin, 0);
    int steps = (int)((a.k + STEP - 1) / STEP);
    const float *block_scale = a.block_scale;
    if (block_scale)
        block_scale += (int64_t)moq_block_row(&a.partitions, t.partition, t.begin) * steps;
    uint32_t ring = shared_address(memory);
    /* matrices of ldmatrix: of x rows 0 and 8, then the next part; of W two parts, then rows 8 */
    uint32_t x_row = (uint32_t)(wm + lane % 16) * STEP;
    uint32_t w_row = (uint32_t)(TM + wn + lane / 16 * 8 + lane % 8) * STEP;

    launch_dependents();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps)
            w.copy(ring + i * STAGE + TM * STEP);
    }
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps)
            x.copy(ring + i * STAGE);
        copy_async_commit();
    }
    float sum[MT][NT][4] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads(); /* this step is there, and the one before has been read by all */
        int next = step + STAGES - 1;
        if (next < steps) {
            uint32_t to = ring + next % STAGES * STAGE;
            x.copy(to);
            w.copy(to + TM * STEP);
        }
        copy_async_commit();
        float scale[MT][2]; /* of the groups of this lane's rows */
        float of_w = block_scale ? block_scale[step] : 1.0f;
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            int row = min(wm + i * 8 + lane / 4, tokens - 1);
            scale[i / 2][i % 2] =
                block_scale ? __fmul_rn(a.x_scale[step * a.m + first + row], of_w) : 1.0f;
        }
        uint32_t stage = ring + step % STAGES * STAGE;
        float part[MT][NT][4] = {};
#pragma unroll
        for (int slice = 0; slice < STEP / SLICE / WK; slice++) {
            int at = (slice * WK + share) * 2;
            uint32_t cx[MT][4], cw[NT][2];
#pragma unroll
            for (int i = 0; i < MT; i++)
                load_matrices(cx[i], stage + x_row + i * 16 * STEP + part_at(at + lane / 16, lane));
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
                uint32_t two[4];
                load_matrices(two, stage + w_row + j * 8 * STEP + part_at(at + lane / 8 % 2, lane));
                cw[j][0] = two[0], cw[j][1] = two[1];
                cw[j + 1][0] = two[2], cw[j + 1][1] = two[3];
            }
            if (E4M3)
                multiply_as_e4m3(part, cx, cw);
            else
                multiply_as_f16(part, cx, cw);
        }
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
            int row = i / (NT * 4), column = i / 4 % NT;
            sum[row][column][i % 4] =
                __fmaf_rn(part[row][column][i % 4], scale[row][i / 2 % 2], sum[row][column][i % 4]);
        }
    }
    if (WK > 1) {
        copy_async_wait<0>();
        add_shares<MT * NT * 4, THREADS / WK, WK>(&sum[0][0][0], (float *)memory, share);
        if (share > 0)
            return;
    }
    float of_x = 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int row = wm + i * 8 + lane / 4;
        if (row >= tokens)
            continue;
        if (!block_scale)
            of_x = a.x_scale[(first + row) * a.next_row + t.partition * a.next_partition];
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) {
            int n = t.begin + wn + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (n >= t.end)
                continue;
            float total = sum[i / 2][j / 2][i % 2 * 2 + j % 2] * (E4M3 ? 1.0f : UNIT);
            if (!block_scale)
                total = __fmul_rn(total, __fmul_rn(of_x, a.output_scale[n]));
            moq_store_output(&a.out, first + row, n, total, moq_load_bias(&a.out, n));
        }
    }
}

/* ---- launch ---- */

typedef struct {
    int tm, tn, threads, stages;
    const void *kernel[2]; /* as f16, as e4m3 */
} shape;

#define SHAPE(tm, tn, wm, wn, wk, stages)                                                          \
    {                                                                                              \
        tm, tn, 32 * (wm) * (wn) * (wk), stages, {                                                 \
            (const void *)mma_fp8_linear<tm, tn, wm, wn, wk, stages, false>,                       \
                (const void *)mma_fp8_linear<tm, tn, wm, wn, wk, stages, true>                     \
        }                                                                                          \
    }

/* At most 96 KiB of shared memory each: what every chip has but for 8.0 and 9.0 is 99. */
static const shape FEW = SHAPE(16, 32, 1, 1, 4, 8), SOME = SHAPE(64, 64, 2, 2, 2, 4),
                   MANY = SHAPE(128, 128, 2, 4, 1, 3);

static int64_t block_count(const moq_linear_call *call, const shape *s) {
    return (call->m + s->tm - 1) / s->tm * moq_tile_count(call->spec, s->tn);
}

static const shape *shape_for(const moq_linear_call *call) {
    if (call->m <= FEW.tm)
        return &FEW;
    return call->m <= SOME.tm || block_count(call, &MANY) < call->spec->target.sm_count ? &SOME
                                                                                        : &MANY;
}

/* Offsets in the workspace. */
typedef struct {
    int64_t copies; /* of x in codes, one for each input scale */
    int64_t codes, scales, quantize, end;
} layout;

static moq_cuda_quantize quantization(const moq_linear_call *call, const layout *l) {
    uint8_t *memory = (uint8_t *)call->workspace;
    int64_t k = call->spec->in_features;
    moq_cuda_quantize q = {.x = call->x,
                           .mode = call->spec->input,
                           .given = call->input_scale,
                           .group = MOQ_FP8_BLOCK,
                           .codes = memory + l->codes,
                           .code_stride = k,
                           .code_columns = k,
                           .scales = memory + l->scales,
                           .scale_row = 1,
                           .scale_group = call->m,
                           .workspace = memory + l->quantize,
                           .stream = call->stream};
    return q;
}

static int64_t take(layout *l, int64_t bytes) {
    int64_t at = l->end;
    l->end += (bytes + 255) / 256 * 256;
    return at;
}

static layout lay_out(const moq_linear_call *call) {
    const moq_linear_spec *spec = call->spec;
    bool groups = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    layout l = {};
    l.copies = call->input_scale && !spec->quantized_input ? spec->partition_count : 1;
    if (spec->quantized_input)
        return l;
    l.codes = take(&l, l.copies * call->m * spec->in_features);
    l.scales = take(&l, call->m * (groups ? moq_linear_scale_columns(spec) : 1) * 4);
    moq_cuda_quantize q = quantization(call, &l);
    l.quantize = take(&l, moq_cuda_quantize_workspace(&q));
    MOQ_ASSERT((l.codes | l.scales | l.quantize) % 256 == 0 && l.quantize <= l.end);
    return l;
}

extern "C" int64_t moq_cuda_mma_fp8_workspace(const moq_linear_call *call) {
    return lay_out(call).end;
}

static moq_status quantize(const moq_linear_call *call, const layout *l, moq_err *err) {
    moq_cuda_quantize q = quantization(call, l);
    if (call->spec->quantized_input)
        return MOQ_OK;
    for (int64_t i = 0; i < l->copies; i++) {
        MOQ_TRY(moq_cuda_quantize_rows(&q, err));
        q.codes += call->m * call->spec->in_features;
        q.given += q.given ? 1 : 0;
    }
    return MOQ_OK;
}

static moq_status multiply(const moq_linear_call *call, const layout *l, bool native,
                           moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    const uint8_t *memory = (const uint8_t *)call->workspace;
    const shape *s = shape_for(call);
    bool groups = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    mma_args args = {
        .out = moq_output_of(call),
        .m = call->m,
        .k = spec->in_features,
        .token_tiles = (call->m + s->tm - 1) / s->tm,
        .weight_tiles = moq_tile_count(spec, s->tn),
        .codes = spec->quantized_input ? (const uint8_t *)call->x->data : memory + l->codes,
        .next_codes = l->copies > 1 ? call->m * spec->in_features : 0,
        .weight = call->weight,
        .x_scale = call->input_scale ? call->input_scale : (const float *)(memory + l->scales),
        .block_scale = groups ? (const float *)call->weight_scale : NULL,
        .output_scale = call->output_scale,
        .next_row = spec->input == MOQ_INPUT_E4M3_TOKEN,
        .next_partition = l->copies > 1,
        .partition_count = spec->partition_count,
        .partitions = moq_partitions_of(spec)};
    int64_t blocks = block_count(call, s);
    if (blocks > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    moq_launch launch = {.what = "linear FP8",
                         .kernel = s->kernel[native],
                         .grid = dim3((unsigned)blocks),
                         .block = dim3((unsigned)s->threads),
                         .shared = (size_t)((s->tm + s->tn) * STEP * s->stages),
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}

static moq_status run(const moq_linear_call *call, bool native, moq_err *err) {
    layout l = lay_out(call);
    MOQ_TRY(quantize(call, &l, err));
    return multiply(call, &l, native, err);
}

extern "C" moq_status moq_cuda_mma_fp8_as_f16(const moq_linear_call *call, moq_err *err) {
    return run(call, false, err);
}

extern "C" moq_status moq_cuda_mma_fp8_as_e4m3(const moq_linear_call *call, moq_err *err) {
    return run(call, true, err);
}

} // namespace moq::mma_fp8
