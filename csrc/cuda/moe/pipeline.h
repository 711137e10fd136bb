/* The pipeline of experts: six steps from x to y that all kernel families share, and the hooks in
 * which the families differ (pipeline.cu has the steps). */
#ifndef MOQ_CUDA_MOE_PIPELINE_H
#define MOQ_CUDA_MOE_PIPELINE_H

#include "cuda/moe/expert_rows.h"

namespace moq::moe {

/* A product of experts, out[r, n] = sum_k rows[r, k] W[e, n, k] + bias[e, n] for the rows r of each
 * expert e. A family's first product may apply the activation, too. */
typedef struct {
    const moq_moe_call *call;
    const moq_linear_spec *spec; /* of one expert */
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

/* Defines the two entries of a family that cuda_moe.h declares. */
#define MOQ_EXPERTS_ENTRY(name, kernels)                                                           \
    extern "C" moq_status moq_cuda_moe_##name(const moq_moe_call *call, moq_err *err) {            \
        return moq::moe::run_experts(call, &kernels, err);                                         \
    }                                                                                              \
    extern "C" int64_t moq_cuda_moe_##name##_workspace(const moq_moe_call *call) {                 \
        return moq::moe::experts_workspace(call, &kernels);                                        \
    }

} // namespace moq::moe

#endif
