/* The launch of the NVFP4 GEMMs of Hopper, exact or with FP8 products, in the way that was chosen
 * (choice/nvfp4_some.h). */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_SOME_LAUNCH_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_SOME_LAUNCH_H

#include "core/invariant.h"
#include "cuda/choice/nvfp4_some.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/linear/sm90/sm90_nvfp4_some_frame.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::nvfp4_some {

static_assert(BARRIERS == MOQ_NVFP4_SOME_BARRIERS, "as the choice counts them");

typedef moq_nvfp4_some_way method;
typedef moq_nvfp4_some_layout layout;

/* Weights on their way at once at the start of a block, so that x is not queued behind all. */
#define FLIGHT_BYTES 49152

/* What a call works in where tiles are shared, none where not: a flag of each warp, and sums. */
typedef struct {
    int64_t flags, bytes;
} sums_room;

static sums_room room_of_sums(const method *way) {
    const moq_nvfp4_some_shape *v = way->shape;
    int groups = v->row_groups * v->k_groups;
    if (!way->rest)
        return {0, 0};
    int64_t flags = divide_up(way->workers * groups * 4 * 8, 256) * 256;
    return {flags, flags + way->workers * groups * 64 * v->tokens * 4};
}

/* The arguments of a call whose sums, if it hands over some, go to `room`. */
static gemm_args begin_args(const moq_linear_call *call, const method *way, layout l, void *room) {
    const moq_linear_spec *spec = call->spec;
    int flight = FLIGHT_BYTES / (way->shape->row_groups * 64 * 72);
    int after = l.behind ? l.stages * way->shape->stage : 0;
    int64_t steps = divide_up(spec->in_features, STEP);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .steps = (int)steps,
                   .row_tiles = (int)way->row_tiles,
                   .columns = (int)way->columns,
                   .tokens = (int)moq_nvfp4_some_tokens(call->m, way),
                   .stages = l.stages,
                   .flight = flight > 1 ? flight : 1,
                   .part_steps = (int)(steps / way->cluster),
                   .more_parts = (int)(steps % way->cluster),
                   .room = after,
                   .side = l.side,
                   .turn = l.turn,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale,
                   .turn_step = l.turn_step,
                   .rest = (int)way->rest,
                   .shares = shares_of(way->rest, steps, way->workers),
                   .handed = (float4 *)((uint8_t *)room + room_of_sums(way).flags),
                   .ready = (uint64_t *)room};
    MOQ_ASSERT(l.stages > 0 && a.tokens <= way->shape->tokens);
    MOQ_ASSERT(way->row_tiles * way->columns <= INT32_MAX);
    return a;
}

static moq_status refuse(const moq_linear_call *call, moq_err *err) {
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "NVFP4 linear: %lld rows are too many",
                    (long long)call->m);
}

/* `variants` are of the shapes in their order; x has a row for each token and bytes of `width` in
 * it, the next one `stride` bytes further. */
static moq_status launch_tiles(const moq_linear_call *call, const method *way, layout l,
                               const variant *variants, const gemm_args *args, const void *x,
                               int64_t width, int64_t stride, moq_err *err) {
    const moq_nvfp4_some_shape *v = way->shape;
    const moq_linear_spec *spec = call->spec;
    gemm_args a = *args;
    CUtensorMap weights, tokens;
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, moq_pack_slabs(spec->out_features),
                                 moq_pack_blocks(spec->in_features) * (MOQ_PACK_BYTES / 8),
                                 (uint32_t)v->row_groups * 4, 2 * MOQ_PACK_BYTES / 8, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, x, call->m, width, stride, (uint32_t)a.tokens, err));
    int blocks = way->cluster;
    moq_launch launch = {
        .what = "NVFP4 linear",
        .kernel = variants[way->index].kernel[way->rest > 0],
        .grid = v->parts ? dim3((unsigned)blocks, (unsigned)way->row_tiles, (unsigned)way->columns)
                         : dim3((unsigned)(way->workers * blocks)),
        .block = dim3((unsigned)variants[way->index].threads),
        .cluster = blocks > 1 ? (unsigned)blocks : 0,
        .shared = (size_t)(l.stages * v->stage + l.behind),
        .stream = (cudaStream_t)call->stream,
        .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::nvfp4_some

#endif
