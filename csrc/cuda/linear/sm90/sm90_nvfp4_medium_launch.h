/* The launch of the NVFP4 GEMMs of Hopper, exact or with FP8 products, in the way that was chosen
 * (choice/nvfp4_medium.h). */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_LAUNCH_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_LAUNCH_H

#include "core/invariant.h"
#include "cuda/choice/nvfp4_medium.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/linear/sm90/sm90_nvfp4_medium_frame.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::nvfp4_medium {

static_assert(BARRIERS == MOQ_NVFP4_MEDIUM_BARRIERS, "as the choice counts them");

typedef moq_nvfp4_medium_config method;
typedef moq_nvfp4_medium_layout layout;

/* Weights on their way at once at the start of a block, so that x is not queued behind all. */
#define FLIGHT_BYTES 49152

/* What a call works in where tiles are shared, none where not: a flag of each warp, and sums. */
typedef struct {
    int64_t flags, bytes;
} sums_room;

static sums_room room_of_sums(const method *config) {
    const moq_nvfp4_medium_shape *v = config->shape;
    int groups = v->row_groups * v->k_groups;
    if (!config->tail_tiles)
        return {0, 0};
    int64_t flags = divide_up(config->workers * groups * 4 * 8, 256) * 256;
    return {flags, flags + config->workers * groups * 64 * v->tokens * 4};
}

/* The arguments of a call whose sums, if it hands over some, go to `room`. */
static gemm_args begin_args(const moq_linear_call *call, const method *config, layout l,
                            void *room) {
    const moq_linear_spec *spec = call->spec;
    int flight = FLIGHT_BYTES / (config->shape->row_groups * 64 * 72);
    int after = l.behind ? l.stages * config->shape->stage : 0;
    int64_t steps = divide_up(spec->in_features, STEP);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .steps = (int)steps,
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .tokens = (int)moq_nvfp4_medium_tokens(call->m, config),
                   .stages = l.stages,
                   .flight = flight > 1 ? flight : 1,
                   .split_steps = (int)(steps / config->cluster),
                   .more_splits = (int)(steps % config->cluster),
                   .room = after,
                   .side = l.side,
                   .turn = l.turn,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale,
                   .turn_step = l.turn_step,
                   .tail_tiles = (int)config->tail_tiles,
                   .tail = stream_k_tail_of(config->tail_tiles, steps, config->workers),
                   .handed = (float4 *)((uint8_t *)room + room_of_sums(config).flags),
                   .ready = (uint64_t *)room};
    MOQ_ASSERT(l.stages > 0 && a.tokens <= config->shape->tokens);
    MOQ_ASSERT(config->row_tiles * config->columns <= INT32_MAX);
    return a;
}

static moq_status refuse(const moq_linear_call *call, moq_err *err) {
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "NVFP4 linear: %lld rows are too many",
                    (long long)call->m);
}

/* `variants` are of the shapes in their order; x has a row for each token and bytes of `width` in
 * it, the next one `stride` bytes further. */
static moq_status launch_tiles(const moq_linear_call *call, const method *config, layout l,
                               const variant *variants, const gemm_args *args, const void *x,
                               int64_t width, int64_t stride, moq_err *err) {
    const moq_nvfp4_medium_shape *v = config->shape;
    const moq_linear_spec *spec = call->spec;
    gemm_args a = *args;
    CUtensorMap weights, tokens;
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, moq_pack_slabs(spec->out_features),
                                 moq_pack_blocks(spec->in_features) * (MOQ_PACK_BYTES / 8),
                                 (uint32_t)v->row_groups * 4, 2 * MOQ_PACK_BYTES / 8, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, x, call->m, width, stride, (uint32_t)a.tokens, err));
    int blocks = config->cluster;
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = variants[config->index].kernel[config->tail_tiles > 0],
                         .grid = v->split_k ? dim3((unsigned)blocks, (unsigned)config->row_tiles,
                                                   (unsigned)config->columns)
                                            : dim3((unsigned)(config->workers * blocks)),
                         .block = dim3((unsigned)variants[config->index].threads),
                         .cluster = blocks > 1 ? (unsigned)blocks : 0,
                         .shared = (size_t)(l.stages * v->stage + l.behind),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::nvfp4_medium

#endif
