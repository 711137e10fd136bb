/* NVFP4 linear for many tokens on Hopper: y[m, n] = round(sum_k x[m, k] W[n, k] + bias[n]) of
 * 16-bit activations and exact weights, which stay packed in memory.
 *
 * A block makes a tile at a time, 128 rows of W by up to 256 tokens. Two consumer warpgroups decode
 * codes into operands in registers and multiply them, two warps copy, in a pipeline of steps of 64
 * columns. Tiles of a block follow each other without a barrier among its warpgroups, and the
 * outputs of one leave under the products of the next. If tiles do not come out even, blocks share
 * a stream-K tail (nvfp4_prefill.h).
 *
 * What bounds it (H200, docs/lab/nvfp4-prefill.md): the tensor cores and the power they take. A
 * step of 256 tokens is 1024 cycles of products; its 8192 weights take 17 instructions for 8, a
 * seventh of what can be issued meanwhile. */
#include "core/invariant.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/linear/sm90/exact_prefill.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::nvfp4_prefill {

#define UNIT_WORDS  (MOQ_PACK_BYTES / 8)
#define BAND_TOKENS 2048 /* tokens done together, so that they stay in the L2 */

/* ---- packed weights ---- */

/* Decoder of a stage's units. */
struct packed_decoder {
    /* Waits for a stage and decodes its unit. */
    template <class S, int>
    __device__ __forceinline__ void decode(const consumer_pipeline *t, const pipeline_state *slot,
                                           operand_unit *o) const {
        constexpr moq_nvfp4_type TYPE = S::type == AS_BF16 ? MOQ_NVFP4_BF16 : MOQ_NVFP4_F16;
        uint32_t at = (uint32_t)(slot->index * S::weight_bytes);
        await(t, slot);
        moq_packed_unit unit = {load_shared(t->codes + at), load_shared_pair(t->scales + at)};
#pragma unroll
        for (int s = 0; s < MOQ_PACK_GROUPS; s++)
            moq_nvfp4_fragment<TYPE>((&unit.codes.x)[s],
                                     moq_nvfp4_scales<TYPE>((&unit.scales.x)[s / 2], s % 2),
                                     o->group[s]);
    }
};

struct packed_weights {
    typedef struct {
    } operands;

    /* Copies weights of all steps, a box of a unit of each slab; zeros beyond the layer. */
    template <class S>
    static __device__ __forceinline__ void produce(const gemm_args *a, const producer_pipeline *p,
                                                   const CUtensorMap *map) {
        pipeline_state slot = {0, 0};
        uint64_t policy = a->columns == 1 ? policy_evict_first() : policy_evict_normal();
        prefetch_map(map);
        for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
            int slab = place_of<S>(a, w.number, p->rank).row / MOQ_PACK_ROWS;
            int step = first_step_of<S>(a, &w);
            for (int left = w.end - w.first; left > 0; left--, step = step_after(&w, step)) {
                uint32_t full = p->full + 8u * slot.index;
                mbarrier_wait(p->empty + 8u * slot.index, slot.parity ^ 1);
                mbarrier_expect(full, S::weight_bytes);
                copy_box_2d(p->to + (uint32_t)(slot.index * S::weight_bytes), map,
                            step * UNIT_WORDS, slab, full, policy);
                advance(&slot, p->stages);
            }
        }
    }

    /* Bytes of a warp's rows in a stage, and where lane 4g + t has its codes and scales. */
    template <class S> static constexpr uint32_t warp_bytes = MOQ_PACK_BYTES;

    static __device__ __forceinline__ int codes_at(int g, int t) {
        return moq_pack_word_at(g, t, 0);
    }

    static __device__ __forceinline__ int scales_at(int g) {
        return moq_pack_scale_at(g, 0);
    }

    template <class S>
    static __device__ __forceinline__ void
    multiply(const gemm_args *, const consumer_pipeline *t, operands *, const work *w,
             const tile_place *, int, pipeline_state *slot, float (&sum)[S::T / 2]) {
        packed_decoder d;
        nvfp4_prefill::multiply<S>(t, &d, w->end - w->first, slot, sum);
    }
};

/* ---- shapes ---- */

#define BFLOAT16(tokens, share) variant_of<tile<AS_BF16, tokens, share, false>, packed_weights>(),
#define FLOAT16(tokens, share)  variant_of<tile<AS_F16, tokens, share, false>, packed_weights>(),

static const variant BFLOAT16_VARIANTS[] = {MOQ_NVFP4_PREFILL_SHAPES(BFLOAT16)};
static const variant FLOAT16_VARIANTS[] = {MOQ_NVFP4_PREFILL_SHAPES(FLOAT16)};
static_assert(ROWS == MOQ_NVFP4_PREFILL_ROWS && CHUNK == MOQ_NVFP4_PREFILL_CHUNK,
              "as the choice counts them");

/* ---- launch ---- */

static int64_t blocks_of(const moq_nvfp4_prefill_config *config) {
    return config->workers * config->shape->blocks;
}

static int64_t flag_bytes(const moq_nvfp4_prefill_config *config) {
    return divide_up(blocks_of(config) * 16, 256) * 256;
}

int64_t workspace_of(const moq_nvfp4_prefill_config *config) {
    if (!config->tail_tiles)
        return 0;
    return flag_bytes(config) + blocks_of(config) * config->shape->tokens * ROWS * 4;
}

static gemm_args args_of(const moq_linear_call *call, const moq_nvfp4_prefill_config *config,
                         const variant *v, int64_t steps, int limit) {
    const moq_linear_spec *spec = call->spec;
    int64_t band = BAND_TOKENS / config->shape->tokens;
    int stages = (limit - 1024 - v->fixed - v->rest) / v->stage;
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .slabs = (int)moq_pack_slabs(spec->out_features),
                   .blocks = (int)moq_pack_blocks(spec->in_features),
                   .steps = (int)steps,
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .band = (int)(band < config->columns ? band : config->columns),
                   .stages = stages < MAX_STAGES ? stages : MAX_STAGES,
                   .boxed = moq_tensor_map_suits(call->y->data, call->y->stride[0]),
                   .apart = call->m <= APART_TOKENS && !spec->batch_invariant,
                   .tail_tiles = (int)config->tail_tiles,
                   .tail = stream_k_tail_of(config->tail_tiles, steps, config->workers),
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale,
                   .weight_scale = call->weight_scale};
    MOQ_ASSERT(a.stages >= 2); /* one is filled while another is multiplied */
    MOQ_ASSERT(config->row_tiles * config->columns <= INT32_MAX);
    if (config->tail_tiles) {
        a.ready = (uint64_t *)call->workspace;
        a.handed = (float4 *)((char *)call->workspace + flag_bytes(config));
    }
    return a;
}

moq_status launch_exact(const moq_linear_call *call, const moq_nvfp4_prefill_config *config,
                        const variant *v, int64_t steps, const CUtensorMap *weights, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    const moq_nvfp4_prefill_shape *s = config->shape;
    const moq_tensor *x = call->x;
    moq_cuda_device device;
    CUtensorMap w = *weights, tokens, outputs = {};
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(call, config, v, steps, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_rows(&tokens, x->data, call->m, spec->in_features * 2, x->stride[0] * 2,
                                (uint32_t)(s->tokens / s->blocks), err));
    if (a.boxed)
        MOQ_TRY(moq_tensor_map_rows(&outputs, call->y->data, call->m, spec->out_features * 2,
                                    call->y->stride[0] * 2, CHUNK, err));
    moq_launch launch = {.what = "linear for many tokens",
                         .kernel = v->kernel[config->tail_tiles > 0],
                         .grid = dim3((unsigned)blocks_of(config)),
                         .block = dim3(THREADS),
                         .cluster = s->blocks > 1 ? (unsigned)s->blocks : 0,
                         .shared = (size_t)(a.stages * v->stage + v->rest),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&w, &tokens, &outputs, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" int64_t moq_cuda_nvfp4_prefill_workspace(const moq_linear_call *call) {
    moq_nvfp4_prefill_config config = moq_nvfp4_prefill_expand_config(call);
    return workspace_of(&config);
}

extern "C" moq_status moq_cuda_nvfp4_prefill(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_prefill_config config = moq_nvfp4_prefill_expand_config(call);
    const variant *variants = call->x->dtype == MOQ_DT_F16 ? FLOAT16_VARIANTS : BFLOAT16_VARIANTS;
    int64_t blocks = moq_pack_blocks(spec->in_features);
    CUtensorMap weights;
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, moq_pack_slabs(spec->out_features),
                                 blocks * UNIT_WORDS, SLABS, UNIT_WORDS, err));
    return launch_exact(call, &config, &variants[config.index], blocks, &weights, err);
}

} // namespace moq::nvfp4_prefill
