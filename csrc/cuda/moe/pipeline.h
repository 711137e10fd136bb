/* The pipeline of experts: six steps from x to y that all kernel families share (pipeline.cu),
 * formats and makers of the rows between them, and the hooks in which the families differ. */
#ifndef MOQ_CUDA_MOE_PIPELINE_H
#define MOQ_CUDA_MOE_PIPELINE_H

#include "core/moe.h"
#include "cuda/device/load.h"
#include "cuda/moe/group.h"

namespace moq::moe {

/* ---- rows (expert_rows.cu, expert_sum.cu) ---- */

/* Format of the rows of a product. */
typedef enum {
    ROWS_VALUES, /* values of the layer's dtype */
    ROWS_AMAX,   /* values, and the largest magnitude of each row */
    ROWS_TENSOR, /* e4m3 with the input_scale of the expert */
    ROWS_TOKEN,  /* e4m3 and a scale a row */
    ROWS_GROUP,  /* e4m3 and a scale a row and 128 columns, [columns / 128, scale_stride] */
    ROWS_NVFP4,  /* pairs of e2m1 and an e4m3 scale a row and 16 columns, [rows, columns / 16] */
    /* Values of codes without their scale, as float16: of e4m3 codes with per-tensor or token
     * scales, of NVFP4 codes times their block scales with the input_scale of the expert, and of
     * int8 codes with a scale a row. */
    ROWS_HALVES_TENSOR,
    ROWS_HALVES_TOKEN,
    ROWS_HALVES_NVFP4,
    ROWS_HALVES_INT8
} row_format;

/* Rows in the workspace, in the order of `groups`. Columns from K up to a multiple of 16 are
 * zeros. */
typedef struct {
    row_format format;
    void *data;   /* values, codes, or float16 values of codes */
    void *scales; /* float or e4m3 scales; or amax */
    int64_t scale_stride;
} expert_rows;

/* Return the bytes of a row, and of all scales or amax. */
int64_t row_bytes(row_format format, moq_dtype dtype, int64_t columns);
int64_t scale_bytes(row_format format, int64_t rows, int64_t columns);

/* Makes h, rows of x in the format of w13; if x is codes they stay codes. */
moq_status make_rows_of_x(const slot_chunk *chunk, const slot_groups *groups,
                          const expert_rows *rows, moq_err *err);
/* Makes rows of g = act(u) in the format of w2 from u, float32 [rows, P * I]. */
moq_status make_rows_of_u(const slot_chunk *chunk, const slot_groups *groups, const void *u,
                          const expert_rows *rows, moq_err *err);
/* Makes rows in the format of w2 from values of g, [rows, I] of the layer's dtype, each row at a
 * multiple of 16 values. */
moq_status make_rows_of_g(const slot_chunk *chunk, const slot_groups *groups, const void *g,
                          const expert_rows *rows, moq_err *err);
/* The outputs of the second product: d [rows, H], float32 or, H a multiple of 8, bfloat16. */
typedef struct {
    const void *data;
    moq_dtype dtype;
    bool early; /* the kernel that makes d lets this one start when the groups are complete */
} rows_of_d;

/* Adds the rows of d of each token to y (expert_sum.cu). */
moq_status combine_rows(const slot_chunk *chunk, const slot_groups *groups, rows_of_d d,
                        moq_err *err);

/* ---- products ---- */

/* A product of experts, out[r, n] = sum_k rows[r, k] W[e, n, k] + bias[e, n] for the rows r of each
 * expert e. A family's first product may apply the activation, too. */
typedef struct {
    const moq_moe_call *call;
    const moq_linear_spec *spec; /* layer of one expert */
    const moq_moe_weight *weight;
    const expert_rows *rows, *g; /* g: rows of the second product, which the first may write */
    const slot_groups *groups;
    int64_t most_rows, tiles;
    int tile_rows;
    bool first;        /* rows of x by W13; otherwise rows of g by W2 */
    bool gathered;     /* rows are tokens of x, to be gathered by slot */
    bool early;        /* the groups are complete before the predecessor kernel ends */
    void *out;         /* first: u or values of g; second: d [rows, H] */
    moq_dtype d_dtype; /* dtype of out in the second product */
    int32_t *written;  /* [rows], zeros: counts warps that wrote g, for linked products; or NULL */
} expert_product;

/* Tiles of rows that a family's products take. */
typedef struct {
    int rows, align; /* rows of a tile at most; the rows of an expert begin at multiples of align */
    bool pairs;      /* an expert has an even number of tiles */
} row_tiling;

/* A kernel family. NULL hooks stand for any-chip steps: make_rows_of_x, float32 u of all columns of
 * W13, make_rows_of_u, and products that are not linked. */
typedef struct {
    /* Returns the format of the rows that a product of this layer takes. */
    row_format (*format)(const moq_linear_spec *spec);
    /* Returns the tiles for `rows` rows an expert on average over the call. */
    row_tiling (*tiling)(const moq_moe_call *call, double rows);
    moq_status (*multiply)(const expert_product *product, moq_err *err);
    /* Makes rows of x, or points `x` at the call's tokens; sets gathered or early of `product`. */
    moq_status (*load_x)(const slot_chunk *chunk, expert_product *product, expert_rows *x,
                         moq_err *err);
    /* Returns the bytes of a row of u, the first product's output; 0 if that writes rows of g
     * itself. */
    int64_t (*u_bytes)(const moq_moe_call *call);
    /* Makes rows of g from u. */
    moq_status (*load_g)(const slot_chunk *chunk, const slot_groups *groups, const void *u,
                         const expert_rows *g, moq_err *err);
    /* Returns true if the second product starts while the first one runs, and waits for
     * `written`. */
    bool (*links)(const slot_chunk *chunk);
    bool rounds_d; /* d of bfloat16 layers is bfloat16, not float32 */
    bool early_d;  /* multiply lets the sum over slots start when the groups are complete */
} expert_kernels;

moq_status run_experts(const moq_moe_call *call, const expert_kernels *kernels, moq_err *err);
int64_t experts_workspace(const moq_moe_call *call, const expert_kernels *kernels);

/* Defines the two entries of a family that its row names. */
#define MOQ_EXPERTS_ENTRY(name, kernels)                                                           \
    extern "C" moq_status moq_cuda_moe_##name(const moq_moe_call *call, moq_err *err) {            \
        return moq::moe::run_experts(call, &kernels, err);                                         \
    }                                                                                              \
    extern "C" int64_t moq_cuda_moe_##name##_workspace(const moq_moe_call *call) {                 \
        return moq::moe::experts_workspace(call, &kernels);                                        \
    }

} // namespace moq::moe

#endif
