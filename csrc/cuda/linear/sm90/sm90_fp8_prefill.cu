/* FP8 linear for more than a few tokens on Hopper: y[m, n] = round(sum_k X[m, k] W[n, k] * scales +
 * bias[n]).
 *
 * W is e4m3 [N, K] as the checkpoint has it, X e4m3 codes [M, K] that the quantization before makes
 * in the workspace, with group scales [K / 128][tokens]. A block has two warpgroups that multiply
 * and a warp that copies; what it copies goes round in a ring of steps of 128 columns.
 *
 * - Few tokens: W gives the rows of the products, so that a tile has as few tokens as there are. K
 *   is divided among the blocks of a cluster, and where that is not enough among their warpgroups,
 *   since a layer has but 16 to 64 tiles for 132 multiprocessors. W is constant, so the ring is
 *   filled with it before X is complete (dependent launch). Where one scale is given x may be
 *   quantized here instead, by two more warpgroups (sm90_fp8_prefill_quantize.h).
 * - Many tokens: the tokens give the rows, 256 to a tile, so that scales of groups are one number a
 *   row. Pairs of blocks have one operand in common, which each copies half of to both.
 * - Tiles never cross from one partition to the next, so that 64 rows have one block scale a step.
 *
 * What bounds it (H200, docs/lab/fp8-prefill.md): up to 64 tokens the weights, from 0.6 us after a
 * block's start, and a microsecond for sums of parts and the end; with more what the second-level
 * cache delivers, 7 to 8 TB/s, and the tensor cores; with many what lies between two products of a
 * warpgroup and between two tiles, and the clock that power allows. */
#include "core/invariant.h"
#include "cuda/choice/fp8_prefill.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/linear/sm90/sm90_fp8_prefill_products.h"
#include "cuda/linear/sm90/sm90_fp8_prefill_quantize.h"
#include "cuda/linear/sm90/sm90_fp8_prefill_rows.h"
#include "cuda/linear/sm90/sm90_fp8_prefill_tile.h"
#include "cuda/linear/sm90/sm90_gemm_feed.h"
#include "cuda/linear/sm90/sm90_gemm_outputs.h"
#include "cuda/linear/sm90/sm90_schedule.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"
#include "cuda/tensor/cuda_quantize.h"

namespace moq::fp8_prefill {

#define BAND_TOKENS 2048 /* tokens that are done together, for the sake of L2 */

template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const consumer_pipeline *t,
                                               uint8_t *shared, column_terms<S> *b,
                                               const cluster_barriers *meet, int group, int rank) {
    int row = group / S::k_groups * (64 * S::WAVES);
    uint32_t turn = shared_address(shared + a->turn) + group * a->turn_step;
    pipeline_state slot = {0, 0};
    own_tile<S> tile = {start<S>(a)};
    find_tile<S>(a, group, rank, &tile);
    while (has_steps(&tile.w)) {
        float sum[S::WAVES][S::T / 2] = {};
        tile_terms<S> terms = {};
        fetch_early<S>(a, &tile.at, row, &terms);
        wait_for_predecessor(); /* at once from the second tile on */
        if (S::split_k && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks run */
        fetch_late<S>(a, &tile.at, row, &terms);
        if constexpr (S::tokens_first)
            multiply_part<S>(a, t, &tile, sum);
        else
            multiply<S>(t, &tile.block, tile.w.first, tile.w.end, group, &slot, sum);
        if constexpr (S::split_k) {
            reduce_splits<S>(a, shared, b + group, meet, &terms, &tile.at, sum[0]);
            return;
        }
        if (S::token_factors)
            post_columns<S>(&terms, b + group);
#pragma unroll
        for (int i = 0; i < S::WAVES; i++)
            write_columns<S>(a, b + group, turn, &tile.at, row + 64 * i, &terms.row[i], sum[i]);
        next_tile<S>(a, &tile.w);
        find_tile<S>(a, group, rank, &tile);
    }
}

/* Copies weights and tokens of all steps, and the first weights before the tokens are there. */
template <class S>
static __device__ __forceinline__ void produce_steps(const gemm_args *a, const producer_pipeline *p,
                                                     next_copy ahead) {
    next_copy f = ahead;
    while (ahead.copied < a->stages && more(&ahead)) {
        operand_copies::weights<S>(a, p, &ahead);
        advance_copy<S>(a, p, &ahead);
    }
    wait_for_predecessor();
    while (more(&f)) {
        if (f.copied >= a->stages) {
            wait_for_room(p, &f);
            operand_copies::weights<S>(a, p, &f);
        }
        operand_copies::tokens<S>(a, p, &f);
        advance_copy<S>(a, p, &f);
    }
}

template <class S>
static __global__ void __launch_bounds__(S::threads, 1)
    fp8_prefill(const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap tokens,
                const __grid_constant__ CUtensorMap outputs,
                const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ column_terms<S> terms[CONSUMERS / 128];
    static_assert(sizeof terms <= COLUMN_TERMS_BYTES, "what lay_out counts on");
    uint32_t first = fixed_shared_address(barrier), pipeline = fixed_shared_address(smem);
    stage_barriers barriers = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    cluster_barriers meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    int scales = args.scales; /* of tokens, behind the ring */
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    producer_pipeline p = {
        &weights, &tokens, pipeline, pipeline + scales, barriers, args.few ? once : keep,
        keep,     rank};
    next_copy f = {};
    launch_dependents();
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < CONSUMERS) {
        if (S::uneven)
            more_registers<S::registers>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* of uniform registers */
        uint32_t row = S::by_steps ? 0 : group * 64 * S::WAVES;
        consumer_pipeline t = {barriers, wgmma_operand(pipeline + row * STEP),
                               wgmma_operand(pipeline + S::rows * STEP),
                               (const float *)(smem + scales), args.stages};
        if (S::split_k && threadIdx.x == 0)
            mbarrier_expect(meet.posted, bytes_to_come<S>());
        if constexpr (S::boxes) {
            uint32_t room = shared_address(smem + args.turn) + group * args.turn_step;
            output_path<S> out = {&outputs, &terms[group], room, group * 64 * S::WAVES};
            make_tiles<S>(&args, &t, &out, rank);
            if (threadIdx.x % 128 == 0)
                store_boxes_wait();
        } else {
            consume<S>(&args, &t, smem, terms, &meet, group, rank);
        }
    } else if (threadIdx.x < S::copier) {
        sink s = {pipeline + S::token_at, barriers, 0.0f};
        if (S::fused && S::uneven)
            fewer_registers<S::quantizer_registers>();
        if constexpr (S::fused)
            quantize_x<S>(&args, &s);
    } else {
        if (S::uneven)
            fewer_registers<S::copier_registers>();
        if (threadIdx.x == S::copier) {
            if constexpr (S::together)
                produce_steps<S>(&args, &p, f);
            else
                produce_weights<S>(&args, &p, f);
        }
        if (!S::fused && !S::together && threadIdx.x == S::copier + 32)
            produce_tokens<S>(&args, &p);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

/* What a launch needs to know of a shape of tiles (choice/fp8_prefill.h). */
typedef struct {
    int threads, stage;
    const void *kernel[2]; /* one scale a token or less; by groups */
} variant;

template <moq_orientation FIRST, int T, int WAVES, moq_sharing SHARE, bool FUSED>
static variant variant_of(void) {
    typedef tile<FIRST, T, WAVES, SHARE, false, FUSED> plain;
    typedef tile<FIRST, T, WAVES, SHARE, !FUSED, FUSED> groups; /* FUSED: unused */
    static_assert(plain::rows == MOQ_FP8_PREFILL_ROWS(WAVES, SHARE), "as the choice counts them");
    return {plain::threads,
            plain::stage,
            {(const void *)fp8_prefill<plain>, (const void *)fp8_prefill<groups>}};
}

#define VARIANT(first, columns, waves, share, fused, step, group_step)                             \
    variant_of<first, columns, waves, share, fused>(),

static const variant VARIANTS[] = {MOQ_FP8_PREFILL_SHAPES(VARIANT)};

typedef moq_fp8_prefill_config method;
typedef moq_fp8_prefill_shape shape;

/* ---- launch ---- */

/* What a call works in, as offsets; codes are first. Both codes and scales are for `tokens` tokens,
 * enough to fill the last tile: what is beyond m is never looked at. */
typedef struct {
    int64_t tokens, scales, quantize, bytes;
} areas;

static int64_t reserve(areas *w, int64_t bytes) {
    int64_t at = w->bytes;
    w->bytes += divide_up(bytes, 256) * 256;
    return at;
}

static moq_cuda_quantize quantize_of(const moq_linear_call *call) {
    moq_cuda_quantize q = {.x = call->x,
                           .mode = call->spec->input,
                           .given = call->input_scale,
                           .group = STEP,
                           .code_stride = call->spec->in_features,
                           .code_columns = call->spec->in_features,
                           .scale_row = 1,
                           .stream = call->stream,
                           .next_is_busy = true};
    return q;
}

static areas areas_of(const moq_linear_call *call, const method *config) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_quantize q = quantize_of(call);
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP;
    areas w = {.tokens = config->columns * moq_fp8_prefill_tokens(config->shape)};
    if (config->shape->fused || spec->quantized_input)
        return w;
    reserve(&w, w.tokens * spec->in_features);
    w.scales = reserve(&w, 4 * w.tokens * (groups ? divide_up(spec->in_features, STEP) : 1));
    w.quantize = reserve(&w, moq_cuda_quantize_workspace(&q));
    return w;
}

static moq_status quantize(const moq_linear_call *call, const areas *w, moq_err *err) {
    uint8_t *workspace = (uint8_t *)call->workspace;
    moq_cuda_quantize q = quantize_of(call);
    q.codes = workspace;
    q.scales = workspace + w->scales;
    q.scale_group = w->tokens;
    q.workspace = workspace + w->quantize;
    return moq_cuda_quantize_rows(&q, err);
}

static gemm_args args_of(const moq_linear_call *call, const method *config, const areas *w) {
    const moq_linear_spec *spec = call->spec;
    int64_t band = BAND_TOKENS / moq_fp8_prefill_tokens(config->shape);
    bool given = spec->input == MOQ_INPUT_E4M3_TENSOR && call->input_scale;
    float *found = (float *)((uint8_t *)call->workspace + w->scales);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .k = (int)spec->in_features,
                   .steps = (int)divide_up(spec->in_features, STEP),
                   .row_tiles = (int)config->row_tiles,
                   .columns = (int)config->columns,
                   .band = (int)(band < config->columns ? band : config->columns),
                   .split_steps = (int)(divide_up(spec->in_features, STEP) / config->cluster),
                   .more_splits = (int)(divide_up(spec->in_features, STEP) % config->cluster),
                   .few = config->columns == 1,
                   .per_token = spec->input == MOQ_INPUT_E4M3_TOKEN,
                   .x = moq_rows_of(call->x),
                   .out = moq_output_of(call),
                   .x_scale = given ? call->input_scale : found,
                   .x_scale_stride = w->tokens,
                   .output_scale = call->output_scale,
                   .block_scale = (const float *)call->weight_scale,
                   .partitions = moq_partitions_of(spec)};
    return a;
}

/* Shared memory of a block: as many stages as fit, the tokens' scales, where outputs turn around
 * and where sums come to. Sums of many tokens come to where the ring was, and outputs of parts turn
 * around there, behind those. */
static size_t smem_layout(gemm_args *a, const method *config, bool groups, int limit) {
    const shape *s = config->shape;
    int stage = VARIANTS[config->index].stage + (groups ? s->tokens * 4 : 0), rest = 0, turn = 0;
    int outputs = moq_fp8_prefill_has_boxes(s) ? s->tokens * s->weight_rows * 2 : 0;
    if (moq_fp8_prefill_has_split_k(s)) {
        int columns = s->first == MOQ_TOKENS_FIRST ? s->weight_rows : s->tokens;
        split_k_room room = split_k_room_of(
            columns, config->cluster * (s->share == MOQ_SPLIT_K_WARPGROUPS ? 2 : 1), 2);
        a->side = room.side;
        a->turn_step = room.turn_step;
        rest = s->tokens < 128 ? room.sums : 0;
        turn = room.sums - rest;
    } else if (s->first == MOQ_WEIGHTS_FIRST) {
        a->turn_step = TURNED_AT_ONCE(s->tokens) * 128;
        rest = 2 * a->turn_step;
    }
    int most = limit - 1024 - BARRIERS * 8 - COLUMN_TERMS_BYTES - rest - outputs;
    a->stages = most / stage;
    if (a->stages > MAX_STAGES)
        a->stages = MAX_STAGES;
    if (s->share == MOQ_SPLIT_K_WARPGROUPS)
        a->stages -= a->stages % 2;
    bool fits = moq_fp8_prefill_has_split_k(s) && a->split_steps < a->stages;
    a->flight = (fits ? 32768 : 49152) / (s->weight_rows * STEP);
    a->scales = a->stages * VARIANTS[config->index].stage + outputs;
    a->turn = moq_fp8_prefill_has_split_k(s)
                  ? turn
                  : a->stages * (outputs ? VARIANTS[config->index].stage : stage);
    if (outputs)
        a->turn_step = outputs / 2;
    a->room = rest ? a->stages * stage : 0;
    MOQ_ASSERT(a->stages >= (s->share == MOQ_SPLIT_K_WARPGROUPS ? 4 : 2) && a->flight > 0);
    MOQ_ASSERT(a->room % 16 == 0 && a->turn % 16 == 0 && a->turn_step % 16 == 0);
    MOQ_ASSERT(rest || a->turn <= a->stages * stage); /* sums come to where the ring was */
    MOQ_ASSERT(a->stages * stage + rest + outputs <= limit);
    return (size_t)(a->stages * stage + rest + outputs);
}

/* Tokens of a tile that are copied. Of codes that the caller has none beyond its last: the copy
 * engine takes 3 us to fill a tile of few with zeros (docs/lab/fp8-prefill.md), and what is there
 * of them instead is never looked at. */
static uint32_t token_rows(const moq_linear_call *call, const method *config) {
    const shape *s = config->shape;
    bool part = call->spec->quantized_input && config->columns == 1 && s->share != MOQ_SHARE_TOKENS;
    int64_t rows = part ? divide_up(call->m, 8) * 8 : s->tokens;
    return (uint32_t)(rows < s->tokens ? rows : s->tokens);
}

static moq_status multiply_codes(const moq_linear_call *call, const method *config, const areas *w,
                                 moq_err *err) {
    const shape *s = config->shape;
    const variant *v = &VARIANTS[config->index];
    moq_cuda_device device;
    CUtensorMap weights, tokens, outputs;
    MOQ_TRY(moq_cuda_query_device(call->spec->device.index, &device, err));
    gemm_args a = args_of(call, config, w);
    bool groups = call->spec->input == MOQ_INPUT_E4M3_GROUP;
    size_t shared = smem_layout(&a, config, groups, device.shared_per_block);
    uint32_t weight_box = (uint32_t)s->weight_rows / (s->share == MOQ_SHARE_WEIGHTS ? 2 : 1);
    uint32_t token_box = token_rows(call, config) / (s->share == MOQ_SHARE_TOKENS ? 2 : 1);
    a.token_bytes = (int)token_rows(call, config) * STEP;
    MOQ_TRY(moq_tensor_map_rows(&weights, call->weight, a.n, a.k, a.k, weight_box, err));
    if (s->fused)
        tokens = weights;                 /* it is not looked at */
    else if (call->spec->quantized_input) /* what is beyond its rows arrives as zeros */
        MOQ_TRY(moq_tensor_map_rows(&tokens, call->x->data, call->m, a.k, call->x->stride[0],
                                    token_box, err));
    else
        MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, w->tokens, a.k, a.k, token_box, err));
    a.boxed =
        moq_fp8_prefill_has_boxes(s) && moq_tensor_map_suits(call->y->data, call->y->stride[0]);
    if (a.boxed)
        MOQ_TRY(moq_tensor_map_rows(&outputs, call->y->data, call->m, 2 * a.n,
                                    2 * call->y->stride[0], 64, err));
    else
        outputs = weights; /* it is not looked at */
    moq_launch launch = {.what = "FP8 linear",
                         .kernel = v->kernel[groups],
                         .grid = moq_fp8_prefill_has_split_k(s)
                                     ? dim3((unsigned)config->cluster, (unsigned)config->row_tiles,
                                            (unsigned)config->columns)
                                     : dim3((unsigned)(config->workers * config->cluster)),
                         .block = dim3((unsigned)v->threads),
                         .cluster = config->cluster > 1 ? (unsigned)config->cluster : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&weights, &tokens, &outputs, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" int64_t moq_cuda_fp8_prefill_workspace(const moq_linear_call *call) {
    method config = moq_fp8_prefill_expand_config(call);
    return areas_of(call, &config).bytes;
}

extern "C" moq_status moq_cuda_fp8_prefill(const moq_linear_call *call, moq_err *err) {
    method config = moq_fp8_prefill_expand_config(call);
    areas w = areas_of(call, &config);
    if (!config.shape->fused && !call->spec->quantized_input)
        MOQ_TRY(quantize(call, &w, err));
    return multiply_codes(call, &config, &w, err);
}

} // namespace moq::fp8_prefill
