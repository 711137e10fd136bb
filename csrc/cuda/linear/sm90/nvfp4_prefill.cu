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
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/nvfp4_prefill.h"
#include "cuda/linear/sm90/nvfp4_prefill_config.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::nvfp4_prefill {

#define THREADS      384
#define UNIT_WORDS   (MOQ_PACK_BYTES / 8)
#define BAND_TOKENS  2048 /* tokens done together, so that they stay in the L2 */
#define APART_TOKENS 512  /* most tokens for which tiles begin with different steps */

/* ---- producers ---- */

/* Returns the step of a tile that a block copies first, the same for both blocks of a pair. Tiles
 * are staggered only with few tokens. */
template <class S>
static __device__ __forceinline__ int first_step_of(const gemm_args *a, const work *w) {
    return a->apart ? first_step(w, place_of<S>(a, w->number, 0).row / ROWS) : w->first;
}

template <class S>
static __device__ __forceinline__ void
produce_tokens(const gemm_args *a, const producer_pipeline *p, const CUtensorMap *map) {
    pipeline_state slot = {0, 0};
    uint64_t keep = policy_evict_normal();
    prefetch_map(map);
    wait_for_predecessor();
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        int token = place_of<S>(a, w.number, p->rank).token;
        int step = first_step_of<S>(a, &w);
        for (int left = w.end - w.first; left > 0; left--, step = step_after(&w, step)) {
            uint32_t full = p->full + 8u * slot.index;
            uint32_t to = p->to + (uint32_t)(slot.index * S::token_bytes);
            mbarrier_wait(p->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, S::token_bytes);
            if (S::share_tokens) {
                int half = p->rank * (S::T / 2);
                copy_box_2d_to(to + half * 128, map, step * 128, token + half, full, keep, 3);
            } else {
                copy_box_2d(to, map, step * 128, token, full, keep);
            }
            advance(&slot, p->stages);
        }
    }
}

/* Copies weights of all steps, a box of a unit of each slab; zeros beyond the layer. */
template <class S>
static __device__ __forceinline__ void produce_units(const gemm_args *a, const producer_pipeline *p,
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
            copy_box_2d(p->to + (uint32_t)(slot.index * S::weight_bytes), map, step * UNIT_WORDS,
                        slab, full, policy);
            advance(&slot, p->stages);
        }
    }
}

/* ---- mainloop: a warpgroup decodes a unit into operands in registers while the products of
 * the previous unit are under way ---- */

/* Stages as a thread reads them. */
typedef struct {
    uint32_t full, empty;
    uint64_t x;             /* operand in the first stage */
    uint32_t codes, scales; /* addresses of this lane, in the first stage */
    int stages;
} consumer_pipeline;

/* Operand of a unit in a thread: 4 registers for each group of 16 columns. */
typedef struct {
    uint32_t group[MOQ_PACK_GROUPS][4];
} operand_unit;

static __device__ __forceinline__ void await(const consumer_pipeline *t,
                                             const pipeline_state *slot) {
    mbarrier_wait(t->full + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t,
                                               const pipeline_state *slot) {
    warp_releases<S::pair>(t->empty + 8u * slot->index);
}

/* Waits for a stage and decodes its unit. */
template <class S>
static __device__ __forceinline__ void decode(const consumer_pipeline *t,
                                              const pipeline_state *slot, operand_unit *o) {
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

/* Adds the products of a stage's unit. */
template <class S>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const pipeline_state *slot,
                                             const operand_unit *o, float (&sum)[S::T / 2]) {
    uint64_t x = t->x + (uint32_t)(slot->index * (S::token_bytes / 16));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++) {
        if constexpr (S::type == AS_BF16)
            wgmma_bf16(sum, o->group[s], x + 2 * s);
        else
            wgmma_f16(sum, o->group[s], x + 2 * s);
    }
    wgmma_commit();
}

/* Issues the products of a stage, then waits for those of the stage before and releases it. */
template <class S>
static __device__ __forceinline__ void follow(const consumer_pipeline *t, pipeline_state *slot,
                                              pipeline_state *before, bool first,
                                              const operand_unit *o, float (&sum)[S::T / 2]) {
    issue<S>(t, slot, o, sum);
    if (!first) {
        wgmma_wait<1>();
        release<S>(t, before);
    }
    *before = *slot;
    advance(slot, t->stages);
}

/* Adds the products of a tile's steps to the sums. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, int steps,
                                                pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    pipeline_state before = *slot;
    decode<S>(t, slot, &even);
#pragma unroll 1
    for (int step = 0;; step += 2) {
        follow<S>(t, slot, &before, step == 0, &even, sum);
        if (step + 1 == steps)
            break;
        decode<S>(t, slot, &odd);
        follow<S>(t, slot, &before, false, &odd, sum);
        if (step + 2 == steps)
            break;
        decode<S>(t, slot, &even);
    }
    wgmma_wait<0>();
    stay_here(sum);
    release<S>(t, &before);
}

/* Runs a warpgroup's mainloop and epilogue. STREAM_K: blocks share a stream-K tail; without it the
 * code is 2 % faster in layers of short K. */
template <class S, bool STREAM_K>
static __device__ __forceinline__ void consume(const gemm_args *a, const consumer_pipeline *t,
                                               tile_scales<S> *b, const output_path *path,
                                               int group, int rank) {
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        tile_place at = place_of<S>(a, w.number, rank);
        float sum[S::T / 2] = {};
        if (!STREAM_K || w.end == a->steps) /* this block writes the outputs */
            fetch_tile_scales<S>(a, b, &at, group);
        multiply<S>(t, w.end - w.first, &slot, sum);
        if (STREAM_K && w.end < a->steps) {
            store_partial_sums<S>(a, group, sum);
            continue;
        }
        if (STREAM_K && w.first > 0)
            add_partial_sums<S>(a, &w, group, sum);
        write_boxes<S>(a, path, b, &at, group, sum);
    }
}

template <class S, bool STREAM_K>
static __global__ void __launch_bounds__(THREADS, 1)
    nvfp4_prefill(const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap tokens,
                  const __grid_constant__ CUtensorMap outputs,
                  const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[2 * MAX_STAGES];
    __shared__ __align__(16) tile_scales<S> epilogue[2];
    uint32_t first = fixed_shared_address(barrier), x = fixed_shared_address(smem);
    uint32_t room = x + args.stages * S::token_bytes; /* staged outputs */
    uint32_t units = room + 2 * S::T * 128;
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    uint32_t full = first, empty = first + 8 * MAX_STAGES;
    launch_dependents();
    if (threadIdx.x % 32 == 0) { /* some in every warp: each takes 30 ns */
#pragma unroll 1
        for (int i = (int)threadIdx.x / 32; i < args.stages; i += THREADS / 32) {
            mbarrier_init(full + 8u * i, 2);
            mbarrier_init(empty + 8u * i, CONSUMERS / 32 * (S::pair ? 2 : 1) * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (threadIdx.x < CONSUMERS) {
        more_registers<232>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128,
                                0); /* shuffled, so that the compiler sees it is uniform */
        uint32_t own = units + threadIdx.x / 32 * MOQ_PACK_BYTES;
        int lane = threadIdx.x % 32;
        consumer_pipeline t = {full,
                               empty,
                               wgmma_operand(x),
                               own + moq_pack_word_at(lane / 4, lane % 4, 0),
                               own + moq_pack_scale_at(lane / 4, 0),
                               args.stages};
        output_path path = {&outputs, room + group * S::T * 128};
        consume<S, STREAM_K>(&args, &t, &epilogue[group], &path, group, rank);
        if (threadIdx.x % 128 == 0)
            store_boxes_wait();
    } else {
        fewer_registers<40>();
        producer_pipeline of_weights = {full, empty, units, args.stages, rank};
        producer_pipeline of_tokens = {full, empty, x, args.stages, rank};
        if (threadIdx.x == CONSUMERS)
            produce_units<S>(&args, &of_weights, &weights);
        else if (threadIdx.x == CONSUMERS + 32)
            produce_tokens<S>(&args, &of_tokens, &tokens);
        else if (STREAM_K && threadIdx.x >= CONSUMERS + 64)
            announce<S>(&args, (int)threadIdx.x / 32 % 2);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

/* Kernels and sizes of a shape of tiles (nvfp4_prefill_config.h). */
typedef struct {
    int token_bytes, weight_bytes;
    int epilogue;             /* bytes of static shared memory */
    const void *kernel[2][2]; /* bfloat16 or float16; for whole tiles, with a stream-K tail */
} variant;

template <int T, moq_sharing SHARE> static variant variant_of(void) {
    typedef tile<AS_BF16, T, SHARE, false> bf16;
    typedef tile<AS_F16, T, SHARE, false> f16;
    return {bf16::token_bytes,
            bf16::weight_bytes,
            2 * (int)sizeof(tile_scales<bf16>),
            {{(const void *)nvfp4_prefill<bf16, false>, (const void *)nvfp4_prefill<bf16, true>},
             {(const void *)nvfp4_prefill<f16, false>, (const void *)nvfp4_prefill<f16, true>}}};
}

#define VARIANT(tokens, share) variant_of<tokens, share>(),

static const variant VARIANTS[] = {MOQ_NVFP4_PREFILL_SHAPES(VARIANT)};
static_assert(ROWS == MOQ_NVFP4_PREFILL_ROWS && CHUNK == MOQ_NVFP4_PREFILL_CHUNK,
              "as the choice counts them");

/* ---- launch ---- */

/* Counts the blocks of a call. Flags come first in its workspace, partial sums behind them. */
static int64_t blocks_of(const moq_nvfp4_prefill_config *config) {
    return config->workers * config->shape->blocks;
}

static int64_t flag_bytes(const moq_nvfp4_prefill_config *config) {
    return divide_up(blocks_of(config) * 16, 256) * 256;
}

/* Returns the bytes of a tile's staged outputs. */
static int room_of(const moq_nvfp4_prefill_shape *v) {
    return v->tokens * ROWS * 2;
}

static gemm_args args_of(const moq_linear_call *call, const moq_nvfp4_prefill_config *config,
                         int limit) {
    const moq_linear_spec *spec = call->spec;
    const moq_nvfp4_prefill_shape *s = config->shape;
    const variant *v = &VARIANTS[config->index];
    int64_t band = BAND_TOKENS / s->tokens;
    int stages = (limit - 1024 - 16 * MAX_STAGES - v->epilogue - room_of(s)) /
                 (v->token_bytes + v->weight_bytes);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .slabs = (int)moq_pack_slabs(spec->out_features),
                   .blocks = (int)moq_pack_blocks(spec->in_features),
                   .steps = (int)moq_pack_blocks(spec->in_features),
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .band = (int)(band < config->columns ? band : config->columns),
                   .stages = stages < MAX_STAGES ? stages : MAX_STAGES,
                   .boxed = moq_tensor_map_suits(call->y->data, call->y->stride[0]),
                   .apart = call->m <= APART_TOKENS,
                   .tail_tiles = (int)config->tail_tiles,
                   .tail = stream_k_tail_of(config->tail_tiles, moq_pack_blocks(spec->in_features),
                                            config->workers),
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale};
    MOQ_ASSERT(a.stages >= 2); /* one is filled while another is multiplied */
    MOQ_ASSERT(config->row_tiles * config->columns <= INT32_MAX);
    if (config->tail_tiles) {
        a.ready = (uint64_t *)call->workspace;
        a.handed = (float4 *)((char *)call->workspace + flag_bytes(config));
    }
    return a;
}

extern "C" int64_t moq_cuda_nvfp4_prefill_workspace(const moq_linear_call *call) {
    moq_nvfp4_prefill_config config = moq_nvfp4_prefill_expand_config(call);
    if (!config.tail_tiles)
        return 0;
    return flag_bytes(&config) + blocks_of(&config) * config.shape->tokens * ROWS * 4;
}

extern "C" moq_status moq_cuda_nvfp4_prefill(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_prefill_config config = moq_nvfp4_prefill_expand_config(call);
    const moq_nvfp4_prefill_shape *s = config.shape;
    const variant *v = &VARIANTS[config.index];
    moq_cuda_device device;
    CUtensorMap weights, tokens, outputs = {};
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(call, &config, device.shared_per_block);
    const moq_tensor *x = call->x;
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, a.slabs, (int64_t)a.blocks * UNIT_WORDS,
                                 SLABS, UNIT_WORDS, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, x->data, call->m, spec->in_features * 2, x->stride[0] * 2,
                                (uint32_t)(s->tokens / s->blocks), err));
    if (a.boxed)
        MOQ_TRY(moq_tensor_map_rows(&outputs, call->y->data, call->m, spec->out_features * 2,
                                    call->y->stride[0] * 2, CHUNK, err));
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = v->kernel[x->dtype == MOQ_DT_F16][config.tail_tiles > 0],
                         .grid = dim3((unsigned)blocks_of(&config)),
                         .block = dim3(THREADS),
                         .cluster = s->blocks > 1 ? (unsigned)s->blocks : 0,
                         .shared =
                             (size_t)(a.stages * (v->token_bytes + v->weight_bytes) + room_of(s)),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&weights, &tokens, &outputs, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::nvfp4_prefill
