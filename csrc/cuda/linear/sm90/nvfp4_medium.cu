/* NVFP4 linear for some dozens of tokens on Hopper: y[m, n] = round(sum_k x[m, k] W[n, k] +
 * bias[n]) of 16-bit activations and exact weights. Its mainloop and kernel are in nvfp4_medium.h;
 * here are the bfloat16 kernels and the launch.
 *
 * W is in the packed layout, x and y are 16-bit matrices of contiguous rows. W gives the 64 rows of
 * a warpgroup's products, from registers, where a warp decodes codes while the previous products
 * are under way; tokens are used as they are. A block has two to four consumer warpgroups and two
 * producer warps, for weights and for tokens, with a pipeline of steps of 128 columns. W is
 * constant, so the pipeline fills before x is complete (PDL).
 *
 * If a layer has fewer tiles than the chip multiprocessors, split-K divides the steps over the
 * blocks of a cluster and over warpgroups (gemm_epilogue.h). If rounds of tiles do not come out
 * even, all blocks share the steps of a stream-K tail (gemm_scheduler.h). Sums are always added in
 * one order.
 *
 * What bounds it (H200, docs/lab/nvfp4-medium.md): 91 instructions of a warp for 16 rows by 64
 * columns, 60 of them decoding, which take 120 to 200 cycles of a scheduler; with 128 tokens the
 * tensor cores, which share the register file with decoding; and the L2, also for x, which every
 * tile of rows reads again. */
#include "core/invariant.h"
#include "cuda/linear/sm90/nvfp4_medium.h"
#include "cuda/linear/sm90/nvfp4_medium_config.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::nvfp4_medium {

/* ---- launch, exact or with FP8 products, of the config that was chosen (nvfp4_medium_config.h)
 * ---- */

static_assert(BARRIERS == MOQ_NVFP4_MEDIUM_BARRIERS, "as the choice counts them");

/* Bytes of weights under way at once at the start of a block; more would delay x. */
#define FLIGHT_BYTES 49152

sums_room room_of_sums(const moq_nvfp4_medium_config *config) {
    const moq_nvfp4_medium_shape *v = config->shape;
    int groups = v->row_groups * v->k_groups;
    if (!config->tail_tiles)
        return {0, 0};
    int64_t flags = divide_up(config->workers * groups * 4 * 8, 256) * 256;
    return {flags, flags + config->workers * groups * 64 * v->tokens * 4};
}

gemm_args begin_args(const moq_linear_call *call, const moq_nvfp4_medium_config *config, layout l,
                     void *room) {
    const moq_linear_spec *spec = call->spec;
    int flight = FLIGHT_BYTES / (config->shape->row_groups * 64 * config->shape->weight_step);
    int after = l.behind ? l.stages * config->shape->stage : 0;
    int64_t steps = divide_up(spec->in_features, STEP);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .rows = config->rows,
                   .steps = (int)steps,
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .tokens = (int)moq_nvfp4_medium_tokens(call->m, config),
                   .stages = l.stages,
                   .flight = flight > 2 ? flight : 2,
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

moq_status refuse(const moq_linear_call *call, moq_err *err) {
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "NVFP4 linear: %lld rows are too many",
                    (long long)call->m);
}

moq_status map_packed(CUtensorMap *map, const moq_linear_call *call,
                      const moq_nvfp4_medium_config *config, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    return moq_tensor_map_words(map, call->weight, moq_pack_slabs(spec->out_features),
                                moq_pack_blocks(spec->in_features) * (MOQ_PACK_BYTES / 8),
                                (uint32_t)config->shape->row_groups * 4, 2 * MOQ_PACK_BYTES / 8,
                                err);
}

moq_status launch_tiles(const moq_linear_call *call, const moq_nvfp4_medium_config *config,
                        layout l, const variant *variants, const gemm_args *args,
                        const CUtensorMap *weights, const void *x, int64_t width, int64_t stride,
                        moq_err *err) {
    const moq_nvfp4_medium_shape *v = config->shape;
    gemm_args a = *args;
    CUtensorMap w = *weights, tokens;
    MOQ_TRY(moq_tensor_map_rows(&tokens, x, call->m, width, stride, (uint32_t)a.tokens, err));
    int blocks = config->cluster;
    moq_launch launch = {.what = "linear for some dozens of tokens",
                         .kernel = variants[config->index].kernel[config->tail_tiles > 0],
                         .grid = v->split_k ? dim3((unsigned)blocks, (unsigned)config->row_tiles,
                                                   (unsigned)config->columns)
                                            : dim3((unsigned)(config->workers * blocks)),
                         .block = dim3((unsigned)variants[config->index].threads),
                         .cluster = blocks > 1 ? (unsigned)blocks : 0,
                         .shared = (size_t)(l.stages * v->stage + l.behind),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&w, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

#define VARIANT(tokens, row_groups, k_groups, split_k, shared)                                     \
    variant_of<MOQ_NVFP4_BF16, tokens, row_groups, k_groups, split_k, shared>(),

static const variant BFLOAT16_VARIANTS[] = {MOQ_NVFP4_MEDIUM_SHAPES(VARIANT)};

extern "C" int64_t moq_cuda_nvfp4_medium_workspace(const moq_linear_call *call) {
    moq_nvfp4_medium_config config = moq_nvfp4_medium_expand_config(call);
    return config.shape ? room_of_sums(&config).bytes : 0;
}

extern "C" moq_status moq_cuda_nvfp4_medium(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_medium_config config = moq_nvfp4_medium_expand_config(call);
    if (!config.shape)
        return refuse(call, err);
    layout l = moq_nvfp4_medium_smem_layout(config.shape, config.cluster);
    gemm_args a = begin_args(call, &config, l, call->workspace);
    const variant *variants = spec->dtype == MOQ_DT_F16 ? float16_variants() : BFLOAT16_VARIANTS;
    CUtensorMap weights;
    MOQ_TRY(map_packed(&weights, call, &config, err));
    return launch_tiles(call, &config, l, variants, &a, &weights, call->x->data,
                        spec->in_features * 2, call->x->stride[0] * 2, err);
}

} // namespace moq::nvfp4_medium
