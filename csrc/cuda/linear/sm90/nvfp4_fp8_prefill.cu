/* NVFP4 linear with FP8 products for many tokens on Hopper (compute "fp8"): y[m, n] = round(sum_k
 * X[m, k] W[n, k] * scales + bias[n]).
 *
 * X is e4m3 codes with a scale a token, quantized into the workspace, each 16 columns in the order
 * of wgmma operands (moq_cuda_quantize). W is packed NVFP4 in memory. A block makes a tile at a
 * time, 128 rows of W by T tokens: a warpgroup folds block scales into e4m3 codes (nvfp4_fold.h)
 * and writes them to shared memory, two consumer warpgroups load them into registers and multiply
 * 64 rows each, two warps copy. If tiles do not come out even, blocks share a stream-K tail
 * (nvfp4_prefill.h).
 *
 * What bounds it (H200, docs/lab/nvfp4-fp8.md): folding 128 x 128 weights takes a warpgroup about
 * as long as their products with 256 tokens take the tensor cores. With tokens enough, pairs of
 * blocks have the same weights and each folds half of them for both. */
#include "core/invariant.h"
#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/nvfp4_fp8_prefill_config.h"
#include "cuda/linear/sm90/nvfp4_prefill.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"
#include "cuda/tensor/cuda_quantize.h"

namespace moq::nvfp4_fp8_prefill {

/* ---- folding ---- */

using namespace nvfp4_prefill;

#define UNIT_BYTES 1024 /* bytes of the operand that a unit becomes */

/* Barriers of the operand pipeline's stages: tokens are full, operands are full, both are empty. */
typedef struct {
    uint32_t tokens, operands, empty;
} stage_barriers;

/* Returns the powers of two of rows g and g + 8 of a slab. */
static __device__ __forceinline__ uint32_t fetch_folds(const gemm_args *a, int slab) {
    int n = slab * MOQ_PACK_ROWS + threadIdx.x % 32 / 4, last = a->n - 1;
    return moq_pack_folds(a->fold_scale[min(n, last)], a->fold_scale[min(n + 8, last)]);
}

/* Share of a folding warp: consecutive units of each step; `other` is the pipeline of the other
 * block of a pair. */
template <class S> struct folder {
    static constexpr int UNITS = S::slabs * S::units / (S::folders / 32);
    static constexpr int SLABS_OF = UNITS > S::units ? UNITS / S::units : 1;
    uint32_t packed, operands, other; /* addresses of its units in the first stages */
    uint32_t posted;                  /* the other block's barrier */
};

/* Folds the stage of packed weights at `from` into the stage of operands at `to`. */
template <class S>
static __device__ __forceinline__ void fold_stage(const folder<S> *f, const uint32_t *folds,
                                                  int from, int to) {
    uint32_t unit = f->packed + (uint32_t)(from * S::weight_bytes);
    uint32_t at = (uint32_t)(to * (SLABS * S::units * UNIT_BYTES)) + threadIdx.x % 32 * 16;
    moq_packed_unit next = moq_load_unit(unit);
#pragma unroll
    for (int i = 0; i < f->UNITS; i++) {
        moq_packed_unit now = next;
        uint32_t a[2][4];
        if (i + 1 < f->UNITS)
            next = moq_load_unit(unit + (i + 1) * MOQ_PACK_BYTES);
        moq_fold_unit(now.codes, now.scales, folds[i / S::units], a);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 four = make_uint4(a[j][0], a[j][1], a[j][2], a[j][3]);
            store_shared(f->operands + at + i * UNIT_BYTES + j * 512, four);
            if (S::share_weights)
                send_words(f->other + at + i * UNIT_BYTES + j * 512, four, f->posted + 8u * to);
        }
    }
}

/* Folds the weights of all steps of a block. */
template <class S>
static __device__ __forceinline__ void fold_weights(const gemm_args *a,
                                                    const producer_pipeline *packed,
                                                    const stage_barriers *barriers, folder<S> f) {
    int warp = (threadIdx.x - CONSUMERS) / 32, lane = threadIdx.x % 32;
    uint32_t sent = S::share_weights && warp == 0 ? S::slabs * S::units * UNIT_BYTES : 0;
    pipeline_state from = {0, 0}, to = {0, 0};
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        int slab = place_of<S>(a, w.number, packed->rank).row / MOQ_PACK_ROWS +
                   (S::share_weights ? packed->rank * S::slabs : 0) + warp * f.UNITS / S::units;
        uint32_t folds[f.SLABS_OF];
#pragma unroll
        for (int i = 0; i < f.SLABS_OF; i++)
            folds[i] = fetch_folds(a, slab + i);
#pragma unroll 1
        for (int step = w.first; step < w.end; step++) {
            mbarrier_wait(packed->full + 8u * from.index, from.parity);
            mbarrier_wait(barriers->empty + 8u * to.index, to.parity ^ 1);
            fold_stage<S>(&f, folds, from.index, to.index);
            warp_releases<false>(packed->empty + 8u * from.index);
            if (lane == 0)
                mbarrier_expect(barriers->operands + 8u * to.index, sent);
            else if (WARP_ARRIVALS > 1)
                mbarrier_arrive(barriers->operands + 8u * to.index);
            advance(&from, packed->stages);
            advance(&to, a->stages);
        }
    }
}

/* ---- mainloop ---- */

/* Stages as a thread reads them: its operand and all tokens. */
typedef struct {
    stage_barriers barriers;
    uint32_t operands;
    uint64_t x;
    int stages;
} consumer_pipeline;

/* Operand of a unit. */
typedef struct {
    uint32_t part[2][4];
} operand_unit;

static __device__ __forceinline__ void await(const consumer_pipeline *t,
                                             const pipeline_state *slot) {
    mbarrier_wait(t->barriers.operands + 8u * slot->index, slot->parity);
    mbarrier_wait(t->barriers.tokens + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t,
                                               const pipeline_state *slot) {
    warp_releases<S::pair>(t->barriers.empty + 8u * slot->index);
}

template <class S>
static __device__ __forceinline__ void take(const consumer_pipeline *t, const pipeline_state *slot,
                                            int unit, operand_unit *o) {
    uint32_t at = (uint32_t)(slot->index * (SLABS * S::units * UNIT_BYTES) + unit * UNIT_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 four = load_shared(t->operands + at + i * 512);
        o->part[i][0] = four.x;
        o->part[i][1] = four.y;
        o->part[i][2] = four.z;
        o->part[i][3] = four.w;
    }
}

/* Multiplies a unit by as many tokens as c has sums of, half `part` of them; `add` keeps the sums
 * in c. */
template <class S, int SUMS>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const pipeline_state *slot,
                                             int unit, int part, const operand_unit *o, int add,
                                             float (&c)[SUMS]) {
    uint64_t x =
        t->x + (uint32_t)(slot->index * (S::token_bytes / 16) + part * (SUMS * 16) + unit * 4);
    wgmma_fence();
    wgmma_e4m3(c, o->part[0], x, add);
    wgmma_e4m3(c, o->part[1], x + 2, 1);
    wgmma_commit();
}

/* Waits for the products of half `part` of the tokens and adds them to the sums. */
template <class S>
static __device__ __forceinline__ void promote(float (&sum)[S::T / 2], int part,
                                               float (&c)[S::sums]) {
    wgmma_wait<0>();
    stay_here(c);
#pragma unroll
    for (int i = 0; i < S::sums; i++)
        sum[part * S::sums + i] += c[i];
}

/* Adds the products of `steps` steps to the sums, of many tokens by halves. Tensor cores keep about
 * 14 bits of e4m3 sums, so those of a step's 128 columns are added to float32 sums while the other
 * warpgroup has the tensor cores. `even` holds the operand of a step's first unit when the step
 * begins. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, int steps,
                                                pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    float c[S::sums];
    await(t, slot);
    take<S>(t, slot, 0, &even);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        pipeline_state next = *slot;
        advance(&next, t->stages);
        issue<S>(t, slot, 0, 0, &even, 0, c);
        take<S>(t, slot, 1, &odd);
        issue<S>(t, slot, 1, 0, &odd, 1, c);
        if (S::splits_of_tokens == 2) {
            promote<S>(sum, 0, c);
            issue<S>(t, slot, 0, 1, &even, 0, c);
            issue<S>(t, slot, 1, 1, &odd, 1, c);
        }
        if (step + 1 < steps) {
            await(t, &next);
            wgmma_wait<1>();
            take<S>(t, &next, 0, &even);
        }
        promote<S>(sum, S::splits_of_tokens - 1, c);
        release<S>(t, slot);
        stay_here(sum);
        *slot = next;
    }
}

/* Returns the sums of the first or the second half of the tokens. */
template <class S>
static __device__ __forceinline__ float (&half_of(float (&sum)[S::T / 2], int half))
    [S::T / 4] { return *(float (*)[S::T / 4])(sum + half * (S::T / 4)); }

/* Adds the products of `steps` steps with sums that stay in the tensor cores. */
template <class S>
static __device__ __forceinline__ void multiply_fast(const consumer_pipeline *t, int steps,
                                                     pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    pipeline_state before = *slot;
    await(t, slot);
    take<S>(t, slot, 0, &even);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        issue<S>(t, slot, 0, 0, &even, 1, half_of<S>(sum, 0));
        issue<S>(t, slot, 0, 1, &even, 1, half_of<S>(sum, 1));
        if (step > 0) {
            wgmma_wait<2>();
            release<S>(t, &before);
        }
        take<S>(t, slot, 1, &odd);
        issue<S>(t, slot, 1, 0, &odd, 1, half_of<S>(sum, 0));
        issue<S>(t, slot, 1, 1, &odd, 1, half_of<S>(sum, 1));
        wgmma_wait<2>();
        before = *slot;
        advance(slot, t->stages);
        if (step + 1 < steps) {
            await(t, slot);
            take<S>(t, slot, 0, &even);
        }
    }
    wgmma_wait<0>();
    stay_here(sum);
    release<S>(t, &before);
}

#define STEP          128
#define COPIERS       128
#define PACKED_STAGES 3
#define BAND_TOKENS   2048 /* tokens done together, so that they stay in the L2 */
#define OPERAND_BYTES (SLABS * 2 * UNIT_BYTES) /* bytes of a stage */

/* ---- producers: one warp copies weights, one thread x ---- */

template <class S>
static __device__ __forceinline__ void produce_weights(const gemm_args *a,
                                                       const producer_pipeline *p) {
    int lane = threadIdx.x % 32;
    pipeline_state slot = {0, 0};
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        int row = place_of<S>(a, w.number, p->rank).row;
        int slab = row / MOQ_PACK_ROWS + (S::share_weights ? p->rank * S::slabs : 0);
        int slabs = max(0, min(S::slabs, a->slabs - slab));
        const uint8_t *from = a->weight + (int64_t)(slab + lane) * a->blocks * MOQ_PACK_BYTES;
        int step = first_step(&w, row / ROWS);
#pragma unroll 1
        for (int left = w.end - w.first; left > 0; left--, step = step_after(&w, step)) {
            int bytes = min(S::units, a->blocks - step * S::units) * MOQ_PACK_BYTES;
            uint32_t full = p->full + 8u * slot.index;
            mbarrier_wait(p->empty + 8u * slot.index, slot.parity ^ 1);
            if (lane == 0)
                mbarrier_expect(full, (uint32_t)(slabs * bytes));
            __syncwarp();
            if (lane < slabs)
                copy_bytes(p->to + (uint32_t)(slot.index * S::weight_bytes + lane * S::slab_bytes),
                           from + step * S::slab_bytes, (uint32_t)bytes, full);
            advance(&slot, p->stages);
        }
    }
}

template <class S>
static __device__ __forceinline__ void produce_codes(const gemm_args *a, const producer_pipeline *p,
                                                     const CUtensorMap *map) {
    pipeline_state slot = {0, 0};
    uint64_t keep = policy_evict_normal();
    prefetch_map(map);
    wait_for_predecessor();
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        tile_place at = place_of<S>(a, w.number, p->rank);
        int step = first_step(&w, at.row / ROWS);
#pragma unroll 1
        for (int left = w.end - w.first; left > 0; left--, step = step_after(&w, step)) {
            uint32_t full = p->full + 8u * slot.index;
            mbarrier_wait(p->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, S::token_bytes);
            copy_box_2d(p->to + (uint32_t)(slot.index * S::token_bytes), map, step * 128, at.token,
                        full, keep);
            advance(&slot, p->stages);
        }
    }
}

/* ---- consumers ---- */

/* Runs a warpgroup's mainloop and epilogue. STREAM_K: blocks share the steps of some tiles. */
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
        if constexpr (S::fast)
            multiply_fast<S>(t, w.end - w.first, &slot, sum);
        else
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

template <class S>
static __device__ __forceinline__ void set_up(const stage_barriers *barriers,
                                              const producer_pipeline *packed, int stages) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            mbarrier_init(barriers->tokens + 8u * i, 1);
            mbarrier_init(barriers->operands + 8u * i, S::folders / 32 * WARP_ARRIVALS);
            mbarrier_init(barriers->empty + 8u * i,
                          CONSUMERS / 32 * (S::pair ? 2 : 1) * WARP_ARRIVALS);
        }
        for (int i = 0; i < packed->stages; i++) {
            mbarrier_init(packed->full + 8u * i, 1);
            mbarrier_init(packed->empty + 8u * i, S::folders / 32 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair)
        cluster_sync();
    else
        __syncthreads();
}

template <class S, bool STREAM_K>
static __global__ void __launch_bounds__(CONSUMERS + S::folders + COPIERS, 1)
    nvfp4_fp8(const __grid_constant__ CUtensorMap tokens,
              const __grid_constant__ CUtensorMap outputs, const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[3 * MAX_STAGES + 2 * PACKED_STAGES];
    __shared__ __align__(16) tile_scales<S> epilogue[2];
    uint32_t first = fixed_shared_address(barrier), x = fixed_shared_address(smem);
    uint32_t operands = x + args.stages * S::token_bytes;
    uint32_t room = operands + args.stages * OPERAND_BYTES; /* staged outputs */
    uint32_t weights = room + 2 * S::rooms * TURN_BYTES;
    uint32_t behind = first + 24 * MAX_STAGES;
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    stage_barriers barriers = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    producer_pipeline packed = {behind, behind + 8 * PACKED_STAGES, weights, PACKED_STAGES, rank};
    launch_dependents();
    set_up<S>(&barriers, &packed, args.stages);
    if (threadIdx.x < CONSUMERS) {
        more_registers<S::registers>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128,
                                0); /* shuffled, so that the compiler sees it is uniform */
        uint32_t own = threadIdx.x / 32 * (2 * UNIT_BYTES) + threadIdx.x % 32 * 16;
        consumer_pipeline t = {barriers, operands + own, wgmma_operand(x), args.stages};
        output_path path = {&outputs, room + group * S::rooms * TURN_BYTES};
        consume<S, STREAM_K>(&args, &t, &epilogue[group], &path, group, rank);
        if (threadIdx.x % 128 == 0)
            store_boxes_wait();
    } else if (threadIdx.x < CONSUMERS + S::folders) {
        fewer_registers<S::folder_registers>();
        folder<S> f;
        int unit = (threadIdx.x - CONSUMERS) / 32 * f.UNITS;
        f.packed = weights + unit * MOQ_PACK_BYTES;
        f.operands =
            operands + (unit + (S::share_weights ? rank * S::slabs * S::units : 0)) * UNIT_BYTES;
        f.other = S::share_weights ? address_in(rank ^ 1, f.operands) : 0;
        f.posted = S::share_weights ? address_in(rank ^ 1, barriers.operands) : 0;
        fold_weights<S>(&args, &packed, &barriers, f);
    } else {
        fewer_registers<24>();
        producer_pipeline of_tokens = {barriers.tokens, barriers.empty, x, args.stages, rank};
        if (threadIdx.x < CONSUMERS + S::folders + 32)
            produce_weights<S>(&args, &packed);
        else if (threadIdx.x == CONSUMERS + S::folders + 32)
            produce_codes<S>(&args, &of_tokens, &tokens);
        else if (STREAM_K && threadIdx.x >= CONSUMERS + S::folders + 64)
            announce<S>(&args, (int)threadIdx.x / 32 % 2);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still write to this one */
    }
}

/* ---- shapes ---- */

/* Kernels and sizes of a shape of tiles (nvfp4_fp8_prefill_config.h). */
typedef struct {
    int threads;
    int stage;                /* bytes of tokens and operands, */
    int rest;                 /* bytes of the packed pipeline and of staged outputs */
    int epilogue;             /* bytes of static shared memory */
    const void *kernel[2][2]; /* promoted or fast; for whole tiles, with a stream-K tail */
} variant;

template <int T, moq_sharing SHARE> static variant variant_of(void) {
    typedef tile<AS_E4M3, T, SHARE, false> exact;
    typedef tile<AS_E4M3, T, SHARE, true> fast;
    return {CONSUMERS + exact::folders + COPIERS,
            exact::token_bytes + OPERAND_BYTES,
            PACKED_STAGES * exact::weight_bytes + 2 * exact::rooms * TURN_BYTES,
            2 * (int)sizeof(tile_scales<exact>) + 8 * (3 * MAX_STAGES + 2 * PACKED_STAGES),
            {{(const void *)nvfp4_fp8<exact, false>, (const void *)nvfp4_fp8<exact, true>},
             {(const void *)nvfp4_fp8<fast, false>, (const void *)nvfp4_fp8<fast, true>}}};
}

#define VARIANT(tokens, share) variant_of<tokens, share>(),

static const variant VARIANTS[] = {MOQ_NVFP4_FP8_SHAPES(VARIANT)};
static_assert(ROWS == MOQ_NVFP4_FP8_ROWS && STEP == MOQ_NVFP4_FP8_STEP,
              "as the choice counts them");

/* ---- launch ---- */

/* Workspace layout of a call: offsets, codes first. Codes and scales cover whole tiles: rows beyond
 * m are never used, and skipping their copies would take longer. */
typedef struct {
    int64_t tokens, scales, flags, sums, bytes;
} workspace_layout;

static workspace_layout workspace_layout_of(const moq_linear_spec *spec,
                                            const moq_nvfp4_fp8_config *config) {
    workspace_layout w = {.tokens =
                              config->columns * config->shape->tokens * config->shape->blocks};
    w.scales = divide_up(w.tokens * spec->in_features, 256) * 256;
    w.flags = w.sums = divide_up(w.scales + w.tokens * 4, 256) * 256;
    if (config->tail_tiles) {
        int64_t blocks = config->workers * config->shape->blocks;
        w.sums += divide_up(blocks * 16, 256) * 256;
        w.bytes = w.sums + blocks * config->shape->tokens * ROWS * 4;
    } else {
        w.bytes = w.flags;
    }
    return w;
}

static moq_status quantize(const moq_linear_call *call, const workspace_layout *w, moq_err *err) {
    uint8_t *workspace = (uint8_t *)call->workspace;
    moq_cuda_quantize q = {.x = call->x,
                           .mode = MOQ_INPUT_E4M3_TOKEN,
                           .codes = workspace,
                           .code_stride = call->spec->in_features,
                           .code_columns = call->spec->in_features,
                           .scales = workspace + w->scales,
                           .scale_row = 1,
                           .stream = call->stream,
                           .next_is_busy = true,
                           .paired = true};
    return moq_cuda_quantize_rows(&q, err);
}

static gemm_args args_of(const moq_linear_call *call, const moq_nvfp4_fp8_config *config,
                         const workspace_layout *w, int limit) {
    const moq_linear_spec *spec = call->spec;
    const variant *v = &VARIANTS[config->index];
    int64_t band = BAND_TOKENS / (config->shape->tokens * config->shape->blocks);
    int stages = (limit - 1024 - v->epilogue - v->rest) / v->stage;
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .slabs = (int)moq_pack_slabs(spec->out_features),
                   .blocks = (int)moq_pack_blocks(spec->in_features),
                   .steps = (int)divide_up(spec->in_features, STEP),
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .band = (int)(band < config->columns ? band : config->columns),
                   .stages = stages < MAX_STAGES ? stages : MAX_STAGES,
                   .boxed = moq_tensor_map_suits(call->y->data, call->y->stride[0]),
                   .tail_tiles = (int)config->tail_tiles,
                   .tail = stream_k_tail_of(config->tail_tiles, divide_up(spec->in_features, STEP),
                                            config->workers),
                   .handed = (float4 *)((uint8_t *)call->workspace + w->sums),
                   .ready = (uint64_t *)((uint8_t *)call->workspace + w->flags),
                   .weight = call->weight,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale,
                   .fold_scale = call->fold_scale,
                   .x_scale = (const float *)((uint8_t *)call->workspace + w->scales)};
    MOQ_ASSERT(a.stages >= 2); /* one is filled while another is multiplied */
    MOQ_ASSERT(config->row_tiles * config->columns <= INT32_MAX);
    MOQ_ASSERT(w->scales % 16 == 0 && w->flags % 8 == 0 && w->sums % 16 == 0);
    return a;
}

extern "C" int64_t moq_cuda_nvfp4_fp8_prefill_workspace(const moq_linear_call *call) {
    moq_nvfp4_fp8_config config = moq_nvfp4_fp8_expand_config(call);
    return workspace_layout_of(call->spec, &config).bytes;
}

extern "C" moq_status moq_cuda_nvfp4_fp8_prefill(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_fp8_config config = moq_nvfp4_fp8_expand_config(call);
    const variant *v = &VARIANTS[config.index];
    int blocks = config.shape->blocks;
    workspace_layout w = workspace_layout_of(spec, &config);
    moq_cuda_device device;
    CUtensorMap tokens, outputs = {};
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    MOQ_TRY(quantize(call, &w, err));
    gemm_args a = args_of(call, &config, &w, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, w.tokens, spec->in_features,
                                spec->in_features, (uint32_t)config.shape->tokens, err));
    if (a.boxed)
        MOQ_TRY(moq_tensor_map_rows(&outputs, call->y->data, call->m, spec->out_features * 2,
                                    call->y->stride[0] * 2, CHUNK, err));
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = v->kernel[spec->fast_accum][config.tail_tiles > 0],
                         .grid = dim3((unsigned)(config.workers * blocks)),
                         .block = dim3((unsigned)v->threads),
                         .cluster = blocks > 1 ? (unsigned)blocks : 0,
                         .shared = (size_t)(a.stages * v->stage + v->rest),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&tokens, &outputs, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::nvfp4_fp8_prefill
