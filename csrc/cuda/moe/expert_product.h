/* One of the two products of experts, out[r, n] = sum_k rows[r, k] W[e, n, k] + bias[e, n] for the
 * rows r of each expert e: what the kernels of linears take with an expert in their schedule. A
 * block has a tile of rows (group.h) and a tile of W. */
#ifndef MOQ_CUDA_MOE_EXPERT_PRODUCT_H
#define MOQ_CUDA_MOE_EXPERT_PRODUCT_H

#include "cuda/moe/expert_rows.h"

namespace moq::moe {

typedef struct {
    const moq_linear_spec *spec; /* of one expert */
    const moq_moe_weight *weight;
    const expert_rows *rows;
    int64_t most_rows;
    const slot_groups *groups;
    int64_t tiles;
    int tile_rows;
    float *out; /* [rows, N] */
    void *stream;
} expert_product;

/* A way to multiply. */
typedef struct {
    /* What the product is given of rows. */
    row_format (*form)(const moq_linear_spec *spec);
    /* Rows of a tile, where an expert has so many on average. */
    int (*tile_rows)(double rows);
    moq_status (*multiply)(const expert_product *product, moq_err *err);
} product_kind;

/* The kernels of cuda/linear: simt_linear.cu, mma_nvfp4_linear.cu and mma_fp8_linear.cu. */
extern const product_kind SIMT_PRODUCT, NVFP4_PRODUCT, NVFP4_FOLDED_PRODUCT, FP8_AS_F16_PRODUCT,
    FP8_AS_E4M3_PRODUCT;

/* ---- the weight of an expert ---- */

/* Where the stacks are, and bytes or values from one expert to the next. */
typedef struct {
    const uint8_t *weight, *weight_scale;
    const float *output_scale, *fold_scale, *input_scale, *bias; /* or NULL */
    int64_t weight_step, scale_step, n;
    int parts;
} expert_stack;

static inline expert_stack stack_of(const expert_product *p) {
    const moq_linear_spec *spec = p->spec;
    const moq_moe_weight *w = p->weight;
    moq_param_spec params[MOQ_MAX_PARAMS];
    expert_stack s = {w->weight,
                      (const uint8_t *)w->weight_scale,
                      w->output_scale,
                      w->fold_scale,
                      w->input_scale,
                      w->bias,
                      0,
                      0,
                      spec->out_features,
                      (int)spec->partition_count};
    int count = moq_linear_prepared_params(spec, params);
    for (int i = 0; i < count; i++) {
        int64_t bytes = (int64_t)moq_dtype_size(params[i].dtype);
        for (int j = 0; j < params[i].ndim; j++)
            bytes *= params[i].shape[j];
        if (params[i].id == MOQ_PARAM_WEIGHT)
            s.weight_step = bytes;
        if (params[i].id == MOQ_PARAM_WEIGHT_SCALE)
            s.scale_step = bytes;
    }
    return s;
}

static __device__ __forceinline__ const float *row_of(const float *values, int64_t at) {
    return values ? values + at : values;
}

/* The output of an expert, with its bias. */
static __device__ __forceinline__ moq_output output_of(const expert_stack *s, float *out,
                                                       int expert) {
    return {out, s->n, MOQ_DT_F32, MOQ_DT_F32, row_of(s->bias, expert * s->n)};
}

/* The tile of rows of a block, and which tile of W is its: those of W follow each other, so that
 * blocks of one time read the same rows. */
typedef struct {
    row_tile rows;
    int64_t weight;
} product_place;

static __device__ __forceinline__ product_place place_of_product(const row_tile *tiles,
                                                                 int64_t weight_tiles) {
    return {tiles[blockIdx.x / weight_tiles], blockIdx.x % weight_tiles};
}

/* Launches a kernel of so many tiles of W and threads with `args`. */
moq_status launch_product(const expert_product *product, const void *kernel, int64_t weight_tiles,
                          int threads, int shared, void *args, moq_err *err);

} // namespace moq::moe

#endif
