/* Tiles, arguments and launch of the grouped GEMMs of experts on Hopper for prefill.
 *
 * A tile is 256 rows of an expert's W by up to 64, 128 or 136 rows of its tokens, which are the
 * columns of the products: as many as there are, rounded up to one of a few widths, each of which
 * has its own code. Two warpgroups multiply, or four with 512 rows of W; each has two waves of 64
 * rows. In the first product these are rows of gate and the rows of up beside them, so that a
 * thread has both sums of an output and g is written. The second product writes d, float32 or
 * rounded.
 *
 * Some shapes use clusters: two blocks have two tiles of one expert and the same rows of W, of
 * which each copies half to both. Blocks take tiles in turn, all tiles of W for some rows one after
 * the other, so that the rows come from L2 but once. The device alone knows how many tiles there
 * are. */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_GEMM_H
#define MOQ_CUDA_MOE_SM90_PREFILL_GEMM_H

#include "core/invariant.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/expert_activation.h"
#include "cuda/moe/pipeline.h"

namespace moq::moe_prefill {

#define MANY_STAGES 12
#define WAVE_ROWS   64

/* Tiles of FP8 rows that multiply each tile of W one after the other. */
#define MOQ_MOE_PREFILL_TOGETHER 8

/* Format of g: values of the layer's dtype, or e4m3 codes with per-tensor scales or scales of
 * groups. */
typedef enum { G_VALUES, G_TENSOR, G_GROUP } g_format;

/* Use of a product. */
typedef enum {
    OF_GATE_AND_UP, /* g = act(gate, up) */
    OF_ONE,         /* g = act of each row */
    OF_D            /* d = sums */
} product_use;

typedef struct {
    const moe::row_tile *tiles;
    const int32_t *count; /* numbers of rows and of tiles */
    int row_tiles, steps, stages;
    bool early; /* the tiles are complete before the predecessor kernel ends */
    int n;      /* rows of W of an expert */
    int height; /* rows or slabs of an expert in the map of W */
    int half;   /* rows of gate: I */
    moe::activation act;
    moq_output out; /* g, or rounded d; FP8 products may write codes of g instead: */
    g_format format;
    uint8_t *codes; /* rows [code_stride], and scales by groups [I / 128, g_scale_stride], */
    float *g_scale; /* or per-tensor scales [E, 1] */
    int64_t code_stride, g_scale_stride;
    float *d;                         /* [rows, n], or NULL if d is rounded to `out` */
    const float *output_scale, *bias; /* [E, n], or NULL */
    const int32_t *slot;              /* slots of gathered rows, or NULL for sorted rows, */
    int top_k;
    const uint8_t *x; /* and x: tokens of `bytes` bytes, x_stride apart */
    int64_t x_stride, bytes;
    const float *x_scale; /* scales of rows, or of groups [steps, x_scale_stride], or NULL */
    int64_t x_scale_stride;
    const float *input_scale; /* [E, partitions] if x_scale is NULL, or NULL too */
    int partition_count;
    const float *block_scale; /* [E, block rows, steps] */
    int64_t block_step;
    moq_partitions partitions;
    int32_t *acquired; /* counter of tiles after each block's first */
    int32_t *written; /* [rows]: warps that have written g of the tile that begins there, or NULL */
    int writers;      /* warps that write g of a tile */
    bool linked;      /* rows are complete when `written` says so */
} gemm_args;

/* ---- tiles ---- */

typedef struct {
    int number, end, stride;
} tile_queue;

typedef struct {
    moe::row_tile rows;
    int along; /* number of the tile of W */
} place;

/* True for silu without a limit. */
static __device__ __forceinline__ bool is_plain(const moe::activation *a) {
    return a->kind == MOQ_MOE_SILU && isinf(a->limit);
}

/* True if products of every width have code for the activation: silu with a gate, relu2 without.
 * Others use the largest products. */
template <product_use USE>
static __device__ __forceinline__ bool is_usual(const moe::activation *a) {
    return USE == OF_D || a->kind == (USE == OF_ONE ? MOQ_MOE_RELU2 : MOQ_MOE_SILU);
}

/* Returns the first row of W of a warpgroup's wave, within the expert. */
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

/* Scales and biases of the two rows of W whose sums a thread has. */
typedef struct {
    float factor[2], bias[2];
} terms;

static __device__ __forceinline__ float finish_sum(float sum, float of_row, float of_token,
                                                   float bias) {
    return __fadd_rn(__fmul_rn(sum, __fmul_rn(of_token, of_row)), bias);
}

/* Activations with code of their own. The code is unrolled, and unused branches would fill the
 * instruction cache (docs/lab/experts-prefill.md). */
typedef enum { PLAIN_SILU, ANY_SILU, RELU2, ANY_ACTIVATION } kind_of_code;

template <kind_of_code KIND>
static __device__ __forceinline__ float act(const moe::activation *a, float gate, float up) {
    if (KIND == PLAIN_SILU)
        return moe::silu_without_limit(a, gate, up);
    if (KIND == ANY_SILU)
        return moe::activate_as<MOQ_MOE_SILU>(a, gate, up);
    if (KIND == RELU2)
        return moe::activate_as<MOQ_MOE_RELU2>(a, gate, up);
    return moe::activate(a, gate, up);
}

/* A kind of code as a type. */
template <kind_of_code KIND> struct code_for {
    static constexpr kind_of_code kind = KIND;
};

/* Calls `write` with the code for an activation. LARGEST: products have the largest width. */
template <product_use USE, bool LARGEST, class F>
static __device__ __forceinline__ void with_code(const moe::activation *a, F write) {
    constexpr bool GATED = USE == OF_GATE_AND_UP;
    if constexpr (GATED)
        if (is_plain(a))
            return write(code_for<PLAIN_SILU>());
    if (!LARGEST || is_usual<USE>(a))
        write(code_for<GATED ? ANY_SILU : RELU2>());
    else if constexpr (LARGEST)
        write(code_for<ANY_ACTIVATION>());
}

/* Moves the sums of the next tokens to the place of those before. */
template <int COUNT, int ALL> static __device__ __forceinline__ void move_down(float (&sum)[ALL]) {
#pragma unroll
    for (int i = 0; i + COUNT < ALL; i++)
        sum[i] = sum[i + COUNT];
}

/* ---- launch (gemm.cu) ---- */

static inline product_use use_of(const moe::expert_product *p) {
    if (!p->first)
        return OF_D;
    return p->call->spec->gated ? OF_GATE_AND_UP : OF_ONE;
}

/* Fills the arguments of products in steps, of tiles of W of so many warpgroups; `height` as in
 * gemm_args. */
gemm_args args_of(const moe::expert_product *p, int64_t steps, int64_t height, int warpgroups);

/* Fills the arguments of FP8 products. */
gemm_args fp8_args_of(const moe::expert_product *p);

/* Returns the format of the rows that FP8 products of a layer take. */
static inline moe::row_format fp8_format(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_E4M3_GROUP   ? moe::ROWS_GROUP
           : spec->input == MOQ_INPUT_E4M3_TOKEN ? moe::ROWS_TOKEN
                                                 : moe::ROWS_TENSOR;
}

/* Returns the format of g of the first FP8 product: codes if their scale is known within a
 * block. */
static inline g_format g_format_of(const moq_moe_spec *spec) {
    moe::row_format format = fp8_format(&spec->w2);
    if (format == moe::ROWS_TENSOR)
        return G_TENSOR;
    return format == moe::ROWS_GROUP && spec->gated ? G_GROUP : G_VALUES;
}

/* Finds the bytes of shared memory that a block may have. */
moq_status find_shared_limit(const moe::expert_product *p, int *limit, moq_err *err);

/* Launches a kernel; `more` are two maps of kernels that take them after their arguments. */
moq_status launch(const moe::expert_product *p, const void *kernel, gemm_args *a, int shared,
                  CUtensorMap *weights, CUtensorMap *rows, int warpgroups, bool pair, moq_err *err,
                  CUtensorMap *more = NULL);

/* Launches a kernel of pairs of blocks, each with tiles in turn. */
moq_status launch_pairs(const moe::expert_product *p, const void *kernel, int64_t tiles,
                        int threads, int shared, void **parameters, moq_err *err);

/* ---- products of the families ---- */

moq_status multiply_fp8(const moe::expert_product *p, moq_err *err);
moq_status multiply_fp8_large(const moe::expert_product *p, moq_err *err);
moq_status multiply_nvfp4(const moe::expert_product *p, moq_err *err);
moq_status multiply_nvfp4_fp8(const moe::expert_product *p, moq_err *err);

} // namespace moq::moe_prefill

#endif
