/* FP8 and NVFP4 linear by cuBLASLt: y[m, n] = round(sum_k sx X[m, k] sw W[n, k] + bias[n]).
 *
 * X is quantized into the workspace as the layer prescribes, then multiplied by W as it is stored.
 * Scales are
 * - one for all of x: scalars, the partition's input_scale (or the one found) and the output_scale
 *   of its first row, which all of its rows have; vectors for several partitions that share one of
 *   x;
 * - one a token: vectors, sx [m] and output_scale [N]. The last kernel scales float32 sums instead
 *   if the library has no vectors, or if that is expected to be faster, as its vector kernels leave
 *   the chip empty with few tiles; variants from MOQ_MAX_ALGORITHMS on take the other choice.
 *   Packed NVFP4 weights (compute "fp8") become codes and scales of this kind in the workspace,
 *   some rows at a time (nvfp4_unpack.h);
 * - one for 128 columns: sx [K / 128][m], m rounded up to 4; block scales [block rows][K / 128], K
 *   / 128 rounded up to 4, which are the layer's own if that rounds nothing;
 * - NVFP4: block scales of 16 columns in swizzled order, prepared so for each partition of W, and
 *   as alpha the product of both second-level scales, which a kernel computes on the device for
 *   each partition: pointers to device memory are described for every type of product. Packed
 *   weights (compute "auto") become such codes and scales in the workspace, some rows at a time.
 *
 * The library adds a bias of y's own 16-bit dtype, but not to NVFP4, of which nobody has tried it,
 * and writes to addresses and rows that are multiples of 16. Other outputs, those with a low-rank
 * part, and a number of tokens that was rounded up, pass through the workspace and one more kernel,
 * which costs the time to move y twice.
 *
 * What bounds it: the tensor cores from some hundred tokens on, reading W before that. Chips that
 * it ran on: docs/results/README.md. */
#include "core/formats.h"
#include "core/invariant.h"
#include "core/nvfp4_packed.h"
#include "core/sizes.h"
#include "core/swizzle.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/finish_sums.h"
#include "cuda/linear/linear_cublaslt.h"
#include "cuda/linear/sm120/nvfp4_block.h"
#include "cuda/runtime/cublaslt_api.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_nvfp4_pack.h"
#include "cuda/tensor/cuda_quantize.h"
#include "cuda/tensor/nvfp4_unpack.h"

#include <stdio.h>

namespace moq::cublaslt {

#define WHAT  "linear by cuBLASLt"
#define ALPHA 16 /* bytes from one alpha to the next */

static moq_scaling scaling_of(const moq_linear_spec *spec) {
    if (spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        return MOQ_SCALED_BLOCK;
    if (moq_cublaslt_is_fp4(spec))
        return MOQ_SCALED_NVFP4;
    bool scalars = spec->input == MOQ_INPUT_E4M3_TENSOR && !moq_cublaslt_shares_scale(spec);
    return scalars ? MOQ_SCALED_TENSOR : MOQ_SCALED_VECTOR;
}

/* Returns whether vectors of scales can be applied both by the library and by the last kernel. */
static bool has_two_orders(const moq_linear_spec *spec) {
    return scaling_of(spec) == MOQ_SCALED_VECTOR && moq_cublaslt_has_vectors(spec);
}

/* Returns whether the last kernel scales a product's sums. */
static bool scales_after(const moq_linear_call *call) {
    bool other = has_two_orders(call->spec) && call->config.variant >= MOQ_MAX_ALGORITHMS;
    return scaling_of(call->spec) == MOQ_SCALED_VECTOR &&
           (moq_tiling_row(moq_tiling_of(call)) != 0) != other;
}

/* ---- the workspace ---- */

/* Workspace layout of a call. */
typedef struct {
    int64_t rows;       /* rows of codes and of `sums` */
    int64_t columns;    /* columns of a row of W's block scales */
    int64_t code_bytes; /* bytes of a row of codes */
    int64_t codes, x_scale, x_vector, input_scale, w_scale, quantize, sums, library, end;
    int64_t scale_bytes; /* bytes of x's scales */
    int64_t scale_2,
        alphas; /* NVFP4: scale found by quantization, and an alpha for each partition */
    int64_t library_bytes;
    int64_t w_codes, w_factor; /* W as FP8: codes of some rows, scales of all */
    bool folds;                /* W is packed NVFP4 that becomes FP8, */
    bool unpacks;              /* or codes and swizzled scales */
    bool moves_scales;         /* w_scale is the layer's, with rows of `columns`, aligned */
    bool aligns_inputs;        /* input_scale is the layer's, each aligned to 16 bytes */
    bool scales_after;         /* the library does not scale */
    bool repeats_scale;        /* x_vector repeats the one scale of x for every row */
    bool fused_bias;           /* the library adds it */
    bool direct;               /* the library writes y */
    moq_dtype sums_dtype;
} layout;

/* Reserves the next part of the workspace. */
static int64_t take(layout *l, int64_t bytes) {
    int64_t at = l->end;
    l->end = round_up(l->end + bytes, 256);
    return at;
}

static void results_layout(const moq_linear_call *call, const moq_output *y, layout *l) {
    int64_t size = (int64_t)moq_dtype_size(y->dtype), n = call->spec->out_features;
    bool rows_fit = moq_cublaslt_takes(y->data) &&
                    (call->m == 1 || (y->stride >= n && y->stride * size % 16 == 0));
    l->scales_after = scales_after(call);
    bool after = l->scales_after || call->spec->rank > 0; /* the last kernel has more to do */
    l->fused_bias = y->bias && !after && scaling_of(call->spec) != MOQ_SCALED_NVFP4 &&
                    y->bias_dtype == y->dtype && moq_cublaslt_takes(y->bias);
    l->direct = rows_fit && l->rows == call->m && !after && (!y->bias || l->fused_bias);
    bool exact = after || (y->bias && !l->fused_bias); /* rounded by the last kernel */
    l->sums_dtype = exact ? MOQ_DT_F32 : y->dtype;
}

static moq_cuda_quantize quantization(const moq_linear_call *call, const layout *l) {
    uint8_t *memory = (uint8_t *)call->workspace;
    moq_cuda_quantize q = {};
    q.x = call->x;
    q.mode = call->spec->input;
    q.group = MOQ_FP8_BLOCK;
    q.codes = memory + l->codes;
    q.code_stride = q.code_columns = l->code_bytes;
    q.scales = memory + l->x_scale;
    q.scale_2 = (float *)(memory + l->scale_2);
    q.scale_tiles = moq_swizzle_across(call->spec->in_features / MOQ_NVFP4_GROUP);
    q.scale_row = 1;
    q.scale_group = l->rows;
    q.given = call->input_scale;
    q.workspace = memory + l->quantize;
    q.stream = call->stream;
    q.next_is_busy = l->folds;
    /* Launches without PDL: programmatic edges around the library's kernels cost 0.5 us
     * (docs/lab/cublaslt.md). */
    q.in_turn = true;
    return q;
}

/* Returns the bytes of block scales of so many rows of k columns in swizzled order. */
static int64_t swizzled_bytes(int64_t rows, int64_t k) {
    return moq_swizzle_down(rows) * moq_swizzle_across(k / MOQ_NVFP4_GROUP) * MOQ_SWIZZLE_BYTES;
}

static int64_t w_scale_bytes(const moq_linear_spec *spec, const layout *l) {
    int64_t blocks = moq_linear_block_rows(spec); /* swizzled scales have tiles of as many rows */
    if (l->unpacks)
        return swizzled_bytes(moq_cublaslt_unpacked_rows(spec), spec->in_features);
    if (scaling_of(spec) == MOQ_SCALED_NVFP4)
        return blocks * swizzled_bytes(MOQ_SWIZZLE_ROWS, spec->in_features);
    return 4 * (scaling_of(spec) == MOQ_SCALED_BLOCK ? blocks * l->columns : spec->out_features);
}

static layout workspace_layout(const moq_linear_call *call) {
    const moq_linear_spec *spec = call->spec;
    int64_t k = spec->in_features, blocks = (k + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
    bool block = scaling_of(spec) == MOQ_SCALED_BLOCK, nvfp4 = scaling_of(spec) == MOQ_SCALED_NVFP4;
    bool folds = moq_linear_folds(spec);
    moq_output y = moq_output_of(call);
    layout l = {};
    l.rows = block ? round_up(call->m, 4) : call->m;
    l.columns = round_up(blocks, 4);
    l.code_bytes = nvfp4 ? k / 2 : k;
    l.folds = folds;
    l.unpacks = moq_linear_unpacks(spec);
    l.moves_scales = block   ? l.columns != blocks || !moq_cublaslt_takes(call->weight_scale)
                     : nvfp4 ? l.unpacks || !moq_cublaslt_takes(call->weight_scale)
                             : !folds && !moq_cublaslt_takes(call->output_scale);
    l.aligns_inputs = scaling_of(spec) == MOQ_SCALED_TENSOR && call->input_scale &&
                      (spec->partition_count > 1 || !moq_cublaslt_takes(call->input_scale));
    results_layout(call, &y, &l);
    l.repeats_scale = moq_cublaslt_shares_scale(spec) && !l.scales_after;
    l.codes = take(&l, spec->quantized_input ? 0 : l.rows * l.code_bytes);
    l.scale_bytes = nvfp4 ? swizzled_bytes(call->m, k) : l.rows * (block ? blocks : 1) * 4;
    l.x_scale = take(&l, l.scale_bytes);
    l.scale_2 = take(&l, nvfp4 ? 4 : 0);
    l.alphas = take(&l, nvfp4 ? spec->partition_count * ALPHA : 0);
    l.x_vector = take(&l, l.repeats_scale ? l.rows * 4 : 0);
    l.input_scale = take(&l, l.aligns_inputs ? spec->partition_count * 16 : 0);
    l.w_codes = take(&l, folds       ? moq_cublaslt_folded_rows(spec) * k
                         : l.unpacks ? moq_cublaslt_unpacked_rows(spec) * k / 2
                                     : 0);
    l.w_factor = take(&l, folds ? spec->out_features * 4 : 0);
    l.w_scale = take(&l, l.moves_scales ? w_scale_bytes(spec, &l) : 0);
    moq_cuda_quantize q = quantization(call, &l);
    l.quantize = take(&l, moq_cuda_quantize_workspace(&q));
    l.sums = take(
        &l, l.direct ? 0 : l.rows * spec->out_features * (int64_t)moq_dtype_size(l.sums_dtype));
    l.library_bytes = moq_cublaslt_memory(spec);
    l.library = take(&l, l.library_bytes);
    MOQ_ASSERT((l.codes | l.x_scale | l.w_codes | l.w_scale | l.sums | l.library) % 256 == 0);
    MOQ_ASSERT(l.library + l.library_bytes <= l.end);
    return l;
}

extern "C" int64_t moq_cublaslt_workspace(const moq_linear_call *call) {
    return workspace_layout(call).end;
}

/* ---- the segments of a call ---- */

/* Segment: rows of W that are multiplied at once. */
typedef struct {
    int partition; /* first partition */
    int64_t begin, rows, first_block;
} segment;

/* Returns a part of a partition's rows. */
static segment unpacked_segment(const moq_linear_spec *spec, int index) {
    int64_t most = moq_cublaslt_unpacked_rows(spec);
    segment s = {0, 0, 0, 0};
    for (int64_t end = spec->partition[0];; end += spec->partition[++s.partition])
        for (; s.begin < end; s.begin += s.rows) {
            s.rows = min(most, end - s.begin);
            if (index-- == 0)
                return s;
        }
}

static segment segment_at(const moq_linear_spec *spec, int index) {
    segment s = {index, 0, spec->out_features, 0};
    if (moq_linear_unpacks(spec))
        return unpacked_segment(spec, index);
    if (moq_linear_folds(spec)) {
        int64_t rows = moq_cublaslt_folded_rows(spec), begin = index * rows;
        return {0, begin, begin + rows < s.rows ? rows : s.rows - begin, 0};
    }
    if (!moq_cublaslt_by_partition(spec))
        return s;
    for (int i = 0; i < index; i++) {
        s.begin += spec->partition[i];
        s.first_block += (spec->partition[i] + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
    }
    s.rows = spec->partition[index];
    return s;
}

static int segments_of(const moq_linear_spec *spec) {
    if (moq_linear_folds(spec)) {
        int64_t rows = moq_cublaslt_folded_rows(spec);
        return (int)((spec->out_features + rows - 1) / rows);
    }
    if (moq_linear_unpacks(spec)) {
        int64_t rows = moq_cublaslt_unpacked_rows(spec), count = 0;
        for (int i = 0; i < spec->partition_count; i++)
            count += (spec->partition[i] + rows - 1) / rows;
        return (int)count;
    }
    return moq_cublaslt_by_partition(spec) ? spec->partition_count : 1;
}

/* Returns the scales of W's rows. */
static const float *row_factors(const moq_linear_call *call, const layout *l) {
    return l->folds ? (const float *)((const uint8_t *)call->workspace + l->w_factor)
                    : call->output_scale;
}

/* Returns the scale of W for a segment, with rows of block scales as the library wants them. */
static const void *w_scale_of(const moq_linear_call *call, const layout *l, const segment *s) {
    moq_scaling scaling = scaling_of(call->spec);
    bool blocks = scaling == MOQ_SCALED_BLOCK || scaling == MOQ_SCALED_NVFP4;
    const uint8_t *all = (const uint8_t *)(blocks ? call->weight_scale : row_factors(call, l));
    if (l->moves_scales)
        all = (const uint8_t *)call->workspace + l->w_scale;
    if (l->unpacks) /* of this segment alone */
        return all;
    if (scaling == MOQ_SCALED_NVFP4)
        return all + s->first_block * swizzled_bytes(MOQ_SWIZZLE_ROWS, call->spec->in_features);
    return all + 4 * (scaling == MOQ_SCALED_BLOCK ? s->first_block * l->columns : s->begin);
}

/* Returns the scales of x, found by quantization or given. */
static const float *quantized_scale(const moq_linear_call *call, const layout *l) {
    return call->input_scale ? call->input_scale
                             : (const float *)((const uint8_t *)call->workspace + l->x_scale);
}

/* Returns the scale of x for a segment, if the library wants it. */
static const void *x_scale_of(const moq_linear_call *call, const layout *l, const segment *s) {
    const uint8_t *memory = (const uint8_t *)call->workspace;
    if (scaling_of(call->spec) == MOQ_SCALED_NVFP4)
        return memory + l->x_scale;
    if (l->repeats_scale)
        return (const float *)(memory + l->x_vector);
    if (l->aligns_inputs)
        return (const float *)(memory + l->input_scale + 16 * s->partition);
    return quantized_scale(call, l);
}

static moq_matmul product(const moq_linear_call *call, const layout *l, const segment *s) {
    uint8_t *memory = (uint8_t *)call->workspace;
    moq_output y = moq_output_of(call);
    moq_matmul p = {};
    p.device = call->spec->device.index;
    p.scaling = l->scales_after ? MOQ_SCALED_TENSOR : scaling_of(call->spec);
    p.fast_accum = call->spec->fast_accum &&
                   (p.scaling == MOQ_SCALED_TENSOR || p.scaling == MOQ_SCALED_VECTOR);
    if (p.scaling == MOQ_SCALED_NVFP4)
        p.alpha = (const float *)(memory + l->alphas + ALPHA * s->partition);
    p.m = l->rows;
    p.n = s->rows;
    p.k = call->spec->in_features;
    p.x_stride = p.k;
    p.x = call->spec->quantized_input ? (const uint8_t *)call->x->data : memory + l->codes;
    p.w = l->folds || l->unpacks ? memory + l->w_codes : call->weight + s->begin * l->code_bytes;
    p.x_scale = l->scales_after ? NULL : x_scale_of(call, l, s);
    p.w_scale = l->scales_after ? NULL : w_scale_of(call, l, s);
    p.dtype = l->direct ? y.dtype : l->sums_dtype;
    p.y_stride = l->direct && call->m > 1 ? y.stride : call->spec->out_features;
    p.y = (l->direct ? (uint8_t *)y.data : memory + l->sums) +
          s->begin * (int64_t)moq_dtype_size(p.dtype);
    if (l->fused_bias)
        p.bias = (const uint8_t *)y.bias + s->begin * (int64_t)moq_dtype_size(y.dtype);
    p.workspace = memory + l->library;
    p.workspace_bytes = (size_t)l->library_bytes;
    p.variant = call->config.variant % MOQ_MAX_ALGORITHMS;
    p.stream = call->stream;
    return p;
}

/* Copies rows of floats to where rows begin `stride` bytes apart. */
static moq_status spread(const moq_linear_call *call, int64_t to, int64_t stride, const void *from,
                         int64_t width, int64_t rows, moq_err *err) {
    return moq_cuda_check(cudaMemcpy2DAsync((uint8_t *)call->workspace + to, (size_t)stride, from,
                                            (size_t)width, (size_t)width, (size_t)rows,
                                            cudaMemcpyDeviceToDevice, (cudaStream_t)call->stream),
                          WHAT, err);
}

/* Copies scales that the library cannot take as they lie to the workspace. */
static moq_status place_scales(const moq_linear_call *call, const layout *l, moq_err *err) {
    if (l->aligns_inputs)
        MOQ_TRY(spread(call, l->input_scale, 16, call->input_scale, 4, call->spec->partition_count,
                       err));
    if (!l->moves_scales || l->unpacks)
        return MOQ_OK;
    const moq_linear_spec *spec = call->spec;
    int64_t bytes = w_scale_bytes(spec, l);
    if (spec->weight != MOQ_WEIGHT_E4M3_BLOCK)
        return spread(call, l->w_scale, bytes,
                      call->weight_scale ? call->weight_scale : call->output_scale, bytes, 1, err);
    return spread(call, l->w_scale, l->columns * 4, call->weight_scale,
                  moq_linear_scale_columns(spec) * 4, moq_linear_block_rows(spec), err);
}

#define THREADS 256

static __global__ void repeat(const float *value, float *out, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    wait_for_predecessor();
    if (i < count)
        out[i] = *value;
}

static moq_status launch_overlapping(const moq_linear_call *call, const void *kernel, dim3 grid,
                                     void **args, moq_err *err) {
    moq_launch launch = {};
    launch.what = WHAT;
    launch.kernel = kernel;
    launch.grid = grid;
    launch.block = dim3(THREADS);
    launch.stream = (cudaStream_t)call->stream;
    launch.pdl = true;
    return moq_cuda_launch(&launch, args, err);
}

static moq_status repeat_scale(const moq_linear_call *call, const layout *l, moq_err *err) {
    const float *value = quantized_scale(call, l);
    float *out = (float *)((uint8_t *)call->workspace + l->x_vector);
    int64_t count = l->rows;
    void *args[] = {&value, &out, &count};
    dim3 grid((unsigned)((count + THREADS - 1) / THREADS));
    return launch_overlapping(call, (const void *)repeat, grid, args, err);
}

/* ---- NVFP4 ---- */

/* Multiplies the second-level scale of each partition's first row by that of x, and appends a zero.
 */
static __global__ void find_alphas(const __grid_constant__ moq_partitions partitions, int count,
                                   const float *output_scale, const float *x_scale, bool one,
                                   uint8_t *alphas) {
    int i = threadIdx.x;
    wait_for_predecessor();
    if (i >= count)
        return;
    int begin = i ? partitions.end[i - 1] : 0;
    float *alpha = (float *)(alphas + i * ALPHA);
    alpha[0] = __fmul_rn(output_scale[begin], x_scale[one ? 0 : i]);
    alpha[1] = 0.0f;
}

/* Computes the alphas of all partitions, after the first quantization. */
static moq_status scale_products(const moq_linear_call *call, const layout *l, moq_err *err) {
    uint8_t *memory = (uint8_t *)call->workspace, *alphas = memory + l->alphas;
    moq_partitions partitions = moq_partitions_of(call->spec);
    int count = call->spec->partition_count;
    bool one = !call->input_scale;
    const float *x_scale = one ? (const float *)(memory + l->scale_2) : call->input_scale;
    void *args[] = {&partitions, &count, (void *)&call->output_scale, &x_scale, &one, &alphas};
    static_assert(MOQ_MAX_PARTITIONS <= THREADS, "a block has a thread for each");
    return launch_overlapping(call, (const void *)find_alphas, dim3(1), args, err);
}

/* Clears the scales of x in tiles with padding, which the library wants to be zero: all of them if
 * columns are padded, the last row of tiles if only rows are. */
static moq_status clear_scales(const moq_linear_call *call, const layout *l, moq_err *err) {
    int64_t k = call->spec->in_features;
    bool columns = k % (MOQ_NVFP4_GROUP * MOQ_SWIZZLE_COLUMNS) != 0;
    if (!columns && call->m % MOQ_SWIZZLE_ROWS == 0)
        return MOQ_OK;
    int64_t bytes = columns ? l->scale_bytes : swizzled_bytes(MOQ_SWIZZLE_ROWS, k);
    uint8_t *end = (uint8_t *)call->workspace + l->x_scale + l->scale_bytes;
    return moq_cuda_fill(end - bytes, 0, (size_t)bytes, call->stream, err);
}

/* ---- from the workspace to y ---- */

static moq_status finish_results(const moq_linear_call *call, const layout *l, moq_err *err) {
    moq_sums a = {};
    a.sums = (const uint8_t *)call->workspace + l->sums;
    a.dtype = l->sums_dtype;
    a.m = call->m;
    a.n = (int)call->spec->out_features;
    a.out = moq_output_of(call);
    if (l->fused_bias)
        a.out.bias = NULL;
    if (l->scales_after) {
        a.x_scale = quantized_scale(call, l);
        a.w_scale = row_factors(call, l);
        a.x_stride = call->spec->input == MOQ_INPUT_E4M3_TOKEN;
    }
    return moq_finish_sums(&a, WHAT, call->stream, err);
}

/* ---- the call ---- */

static uint32_t variants_from(moq_linear_call call, int32_t first) {
    call.config.variant = (uint8_t)first;
    layout l = workspace_layout(&call);
    segment s = segment_at(call.spec, 0);
    moq_matmul p = product(&call, &l, &s);
    return ((1u << moq_matmul_variants(&p)) - 1) << first;
}

extern "C" bool moq_cublaslt_ask(const moq_linear_call *call, char *reason, size_t size) {
    layout l = workspace_layout(call);
    moq_err err;
    char message[MOQ_MESSAGE_SIZE];
    for (int i = 0; i < segments_of(call->spec); i++) {
        segment s = segment_at(call->spec, i);
        moq_matmul p = product(call, &l, &s);
        if (moq_matmul_ask(&p, &err) == MOQ_OK)
            continue;
        snprintf(reason, size, "%s", moq_err_message(&err, message));
        return false;
    }
    return true;
}

extern "C" uint64_t moq_cublaslt_variants(const moq_linear_call *call) {
    uint32_t first = variants_from(*call, 0);
    return has_two_orders(call->spec) ? first | variants_from(*call, MOQ_MAX_ALGORITHMS) : first;
}

/* Unpacks W of a segment as FP8. */
static moq_status fold_segment(const moq_linear_call *call, const layout *l, const segment *s,
                               moq_err *err) {
    uint8_t *memory = (uint8_t *)call->workspace;
    moq_cuda_unpack u = {};
    u.weight = call->weight;
    u.fold_scale = call->fold_scale;
    u.output_scale = call->output_scale;
    u.columns = call->spec->in_features;
    u.first = s->begin;
    u.rows = s->rows;
    u.codes = memory + l->w_codes;
    u.factor = (float *)(memory + l->w_factor) + s->begin;
    u.pdl = s->begin ==
            0; /* overlaps the quantization; later, a product still reads the codes before */
    u.stream = call->stream;
    return moq_cuda_nvfp4_unpack(&u, err);
}

/* Unpacks codes and scales of W of a segment, whose rows begin at a slab. The library wants scales
 * beyond its rows and columns to be zero. */
static moq_status unpack_segment(const moq_linear_call *call, const layout *l, const segment *s,
                                 moq_err *err) {
    uint8_t *memory = (uint8_t *)call->workspace;
    int64_t k = call->spec->in_features, unit = moq_pack_blocks(k) * MOQ_PACK_BYTES;
    MOQ_ASSERT(s->begin % MOQ_PACK_ROWS == 0);
    if (s->rows % MOQ_SWIZZLE_ROWS != 0 || k % MOQ_PACK_K != 0)
        MOQ_TRY(moq_cuda_fill(memory + l->w_scale, 0, (size_t)swizzled_bytes(s->rows, k),
                              call->stream, err));
    moq_nvfp4_unpack u = {};
    u.packed = call->weight + s->begin / MOQ_PACK_ROWS * unit;
    u.experts = 1;
    u.rows = s->rows;
    u.columns = k;
    u.group = MOQ_NVFP4_GROUP;
    u.codes = memory + l->w_codes;
    u.scales = memory + l->w_scale;
    u.swizzled = true;
    return moq_cuda_unpack_nvfp4(&u, call->stream, err);
}

typedef moq_status (*multiplier)(const moq_matmul *p, moq_err *err);

static moq_status run_segment(const moq_linear_call *call, const layout *l, int index,
                              multiplier multiply, moq_err *err) {
    segment s = segment_at(call->spec, index);
    moq_cuda_quantize q = quantization(call, l);
    if (index > 0 && q.given)
        q.given += s.partition;
    bool begins = index > 0 && segment_at(call->spec, index - 1).partition != s.partition;
    bool other_scale = q.given && !call->spec->one_input_scale && begins;
    if (!call->spec->quantized_input && (index == 0 || other_scale))
        MOQ_TRY(moq_cuda_quantize_rows(&q, err));
    if (index == 0 && scaling_of(call->spec) == MOQ_SCALED_NVFP4)
        MOQ_TRY(scale_products(call, l, err));
    if (l->repeats_scale)
        MOQ_TRY(repeat_scale(call, l, err));
    if (l->folds)
        MOQ_TRY(fold_segment(call, l, &s, err));
    if (l->unpacks)
        MOQ_TRY(unpack_segment(call, l, &s, err));
    moq_matmul p = product(call, l, &s);
    MOQ_TRY(multiply(&p, err));
    return moq_cuda_settle((cudaStream_t)call->stream, WHAT, err);
}

static moq_status run(const moq_linear_call *call, multiplier multiply, moq_err *err) {
    layout l = workspace_layout(call);
    int segments = segments_of(call->spec);
    MOQ_TRY(place_scales(call, &l, err));
    if (scaling_of(call->spec) == MOQ_SCALED_NVFP4)
        MOQ_TRY(clear_scales(call, &l, err));
    for (int i = 0; i < segments; i++)
        MOQ_TRY(run_segment(call, &l, i, multiply, err));
    return l.direct ? MOQ_OK : finish_results(call, &l, err);
}

extern "C" moq_status moq_cublaslt_linear(const moq_linear_call *call, moq_err *err) {
    return run(call, moq_matmul_run, err);
}

extern "C" moq_status moq_block_scaled_linear(const moq_linear_call *call, moq_err *err) {
    return run(call, moq_block_scaled_product, err);
}

} // namespace moq::cublaslt
