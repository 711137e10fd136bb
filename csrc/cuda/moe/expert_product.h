/* Products of experts by the tiles of any-chip linears (cuda/linear), which get an expert in their
 * schedule: a block has a tile of rows (group.h) and a tile of W. */
#ifndef MOQ_CUDA_MOE_EXPERT_PRODUCT_H
#define MOQ_CUDA_MOE_EXPERT_PRODUCT_H

#include "cuda/moe/pipeline.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

/* ---- the weight of an expert ---- */

/* The stacks of a weight, and steps in bytes or values from one expert to the next. */
typedef struct {
    const uint8_t *weight, *weight_scale;
    const float *output_scale, *fold_scale, *input_scale, *bias; /* each may be NULL */
    int64_t weight_step, scale_step, n;
    int partition_count;
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

/* Returns the output of an expert, with its bias. */
static __device__ __forceinline__ moq_output output_of(const expert_stack *s, float *out,
                                                       int expert) {
    return {out, s->n, MOQ_DT_F32, MOQ_DT_F32, row_of(s->bias, expert * s->n)};
}

/* A block's tile of rows and number of the tile of W. Tiles of W alternate fastest, so that
 * concurrent blocks read the same rows. */
typedef struct {
    row_tile rows;
    int64_t weight;
} product_place;

static __device__ __forceinline__ product_place place_of_product(const row_tile *tiles,
                                                                 int64_t weight_tiles) {
    return {tiles[blockIdx.x / weight_tiles], blockIdx.x % weight_tiles};
}

/* Launches a kernel with `weight_tiles` tiles of W, `threads` threads and `args`. */
static inline moq_status launch_product(const expert_product *p, const void *kernel,
                                        int64_t weight_tiles, int threads, int shared, void *args,
                                        moq_err *err) {
    if (p->tiles > INT32_MAX / weight_tiles)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)p->most_rows);
    moq_launch launch = {.what = "product of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)(p->tiles * weight_tiles)),
                         .block = dim3((unsigned)threads),
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)p->call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::moe

#endif
