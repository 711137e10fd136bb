/* NVFP4 linear with FP8 products for up to some hundreds of tokens on Hopper (compute "fp8"): y[m,
 * n] = round(sum_k X[m, k] W[n, k] * scales + bias[n]).
 *
 * X is e4m3 codes with a scale a token, quantized into the workspace, each 16 columns in the order
 * of wgmma operands (moq_cuda_quantize). W gives the 64 rows of a warpgroup's products, from
 * registers, where a warp folds packed codes into e4m3 (nvfp4_fold.h) while the previous products
 * are under way. Tile, pipeline, split-K and stream-K tail are those of the exact kernels
 * (nvfp4_medium.h): steps of 128 columns.
 *
 * What bounds it (H200, docs/lab/nvfp4-fp8.md): folding, 140 cycles of a scheduler for 16 rows by
 * 64 columns, half of them conversions to e4m3, and twice that while the tensor cores are busy. */
#include "cuda/device/nvfp4_fold.h"
#include "cuda/linear/sm90/nvfp4_medium.h"
#include "cuda/tensor/cuda_quantize.h"

namespace moq::nvfp4_fp8_medium {

using namespace nvfp4_medium;

/* Tile of a block, as in nvfp4_medium.h: 64 rows of W for each of ROW_GROUPS, by T tokens. One or
 * two K_GROUPS of warpgroups take steps in turn. SPLIT_K: the blocks of a cluster split K, too. */
template <int T_, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K> struct folded_tile {
    typedef gemm_args args;
    typedef layer_tiles<false> tiles;
    typedef operand_copies copies;
    static constexpr bool stream_k = true, staggered = true;
    static constexpr bool share_tokens = false, share_weights = false;
    static __device__ __forceinline__ int tile_tokens(const gemm_args *a) {
        return a->tokens;
    }
    static constexpr int T = T_, WAVES = 1, row_groups = ROW_GROUPS, k_groups = K_GROUPS;
    static constexpr bool split_k = SPLIT_K, pair = false;
    static constexpr int consumers = 128 * ROW_GROUPS * K_GROUPS;
    static constexpr bool uneven = consumers >= 384 || T >= 128;
    static constexpr int registers = consumers == 512   ? 112
                                     : T < 128          ? 152
                                     : consumers == 384 ? 160
                                                        : 232;
    static constexpr int copier_registers = consumers >= 384 ? 32 : 40;
    /* Codes are loaded before the previous unit is folded, where registers allow. */
    static constexpr bool ahead = T < 128 || consumers < 384;
    static constexpr int copier = consumers, token_arrivals = 1;
    static constexpr int sorters = 0;
    static constexpr int room_bytes = consumers / 32 * (2 * MOQ_NVFP4_MEDIUM_SCALES);
    static constexpr int threads = consumers + (uneven ? 128 : 64);
    static constexpr int weight_rows = 64 * ROW_GROUPS, tokens = T;
    static constexpr int weight_bytes = weight_rows / 16 * 2 * UNIT;
    static constexpr int token_size = 1, token_bytes = T * STEP;
    static constexpr int stage = (token_bytes + weight_bytes + 1023) / 1024 * 1024;
    static constexpr bool own_room = T < 128;
    static constexpr bool tokens_first = false, row_factors = true, token_factors = true;
    static constexpr int first_copies = 3;
    static constexpr float unit = 1.0f;
};

/* ---- products ---- */

/* Operand of a unit. */
typedef struct {
    uint32_t part[2][4];
} operand_unit;

/* Folds this lane's scales of a step. */
static __device__ __forceinline__ void make_folded_scales(const consumer_pipeline *t,
                                                          const stage_place *s,
                                                          const scale_places *p, uint32_t folds) {
    uint32_t four = load_shared_word(t->scales + s->at);
    store_shared_pair(p->made + s->scales, moq_fold_scales(four, folds));
    __syncwarp();
}

/* Codes and scales of a unit that a lane folds. */
typedef struct {
    uint4 codes, scales;
} packed_unit;

static __device__ __forceinline__ packed_unit load_unit(const consumer_pipeline *t,
                                                        const stage_place *s, const scale_places *p,
                                                        int unit) {
    return {load_shared(t->codes + s->at + (uint32_t)unit * UNIT),
            load_shared(p->needed + s->scales + (uint32_t)unit * (SCALES / 2))};
}

static __device__ __forceinline__ void fold(const packed_unit *u, operand_unit *o) {
    moq_fold_codes(u->codes, u->scales, o->part);
}

/* Multiplies a unit by all tokens: c = products for unit 0, c += products for unit 1. */
template <class S>
static __device__ __forceinline__ void multiply_unit(const consumer_pipeline *t,
                                                     const stage_place *s, int unit,
                                                     const operand_unit *o, float (&c)[S::T / 2]) {
    uint64_t x = t->tokens + s->at / 16 + (uint32_t)(unit * 4);
    wgmma_fence();
    wgmma_e4m3(c, o->part[0], x, unit);
    wgmma_e4m3(c, o->part[1], x + 2, 1);
    wgmma_commit();
}

/* Marks the end of the operand's products: until here it stays in its registers. */
static __device__ __forceinline__ void give_up_unit(operand_unit *o) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("" : "+r"(o->part[i / 4][i % 4])::"memory");
}

/* Adds finished products to the sums. */
template <class S>
static __device__ __forceinline__ void promote(float (&c)[S::T / 2], float (&sum)[S::T / 2]) {
    stay_here(c);
#pragma unroll
    for (int i = 0; i < S::T / 2; i++)
        sum[i] += c[i];
}

/* Adds `steps` steps of this warpgroup from `s` on to the sums. While a unit is multiplied, the
 * next is folded. Tensor cores keep about 14 bits of their sums, which are added to float32 sums
 * every step. */
template <class S>
static __device__ __forceinline__ void multiply_folded(const consumer_pipeline *t, uint32_t folds,
                                                       int steps, stage_place *s,
                                                       float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    packed_unit first, second;
    float c[S::T / 2];
    scale_places p = find_scale_places(t);
    if (steps <= 0)
        return;
    mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
    make_folded_scales(t, s, &p, folds);
    first = load_unit(t, s, &p, 0);
    if (S::ahead)
        second = load_unit(t, s, &p, 1);
    fold(&first, &even);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        stage_place now = *s;
        mbarrier_wait(t->barriers.tokens + now.barriers, now.parity);
        multiply_unit<S>(t, &now, 0, &even, c);
        advance_own<S>(s, t->stages);
        if (left > 1) {
            mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
            make_folded_scales(t, s, &p, folds);
            if (S::ahead)
                first = load_unit(t, s, &p, 0);
        }
        if (!S::ahead)
            second = load_unit(t, &now, &p, 1);
        fold(&second, &odd);
        multiply_unit<S>(t, &now, 1, &odd, c);
        if (S::ahead && left > 1)
            second = load_unit(t, s, &p, 1);
        wgmma_wait<1>();
        give_up_unit(&even);
        if (left > 1) {
            if (!S::ahead)
                first = load_unit(t, s, &p, 0);
            fold(&first, &even);
        }
        wgmma_wait<0>();
        give_up_unit(&odd);
        release<S>(t, &now);
        promote<S>(c, sum);
        stay_here(sum);
    }
}

struct folded_products {
    typedef uint32_t rows; /* powers of two of the rows whose scales this lane folds */
    static __device__ __forceinline__ rows fetch(const gemm_args *a, const work *, int first) {
        int row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16 / 2;
        return moq_pack_folds(a->fold_scale[min(row, a->n - 1)],
                              a->fold_scale[min(row + 8, a->n - 1)]);
    }
    /* Divides the outputs' scales by the power of two that codes were multiplied by. */
    template <class S>
    static __device__ __forceinline__ void complete(const gemm_args *a, const tile_place *at,
                                                    int row, tile_terms<S> *e) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int n = min(at->row + row + row_of_thread() + 8 * i, a->n - 1);
            e->row[0].factor[i] *= moq_unfold(a->fold_scale[n]);
        }
    }
    template <class S>
    static __device__ __forceinline__ void multiply(const consumer_pipeline *t, rows folds,
                                                    int steps, stage_place *s,
                                                    float (&sum)[S::T / 2]) {
        multiply_folded<S>(t, folds, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <int T, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K, bool SHARED>
static variant variant_of(void) {
    typedef folded_tile<T, ROW_GROUPS, K_GROUPS, SPLIT_K> shape;
    const void *whole = (const void *)nvfp4_medium::nvfp4_medium<shape, folded_products, false>,
               *shared = NULL;
    if constexpr (SHARED)
        shared = (const void *)nvfp4_medium::nvfp4_medium<shape, folded_products, true>;
    static_assert(shape::stage == MOQ_NVFP4_MEDIUM_STAGE(T, ROW_GROUPS, 1, MOQ_PACKED_STEP),
                  "as the choice counts it");
    return {shape::threads, {whole, shared}};
}

#define VARIANT(tokens, row_groups, k_groups, split_k, shared)                                     \
    variant_of<tokens, row_groups, k_groups, split_k, shared>(),

static const variant VARIANTS[] = {MOQ_NVFP4_FP8_MEDIUM_SHAPES(VARIANT)};

/* ---- launch ---- */

/* Workspace layout of a call: offsets, codes first. */
typedef struct {
    int64_t scales, sums, bytes;
} workspace_layout;

static workspace_layout workspace_layout_of(const moq_linear_call *call,
                                            const moq_nvfp4_medium_config *config) {
    workspace_layout w = {.scales = divide_up(call->m * call->spec->in_features, 256) * 256};
    w.sums = divide_up(w.scales + call->m * 4, 256) * 256;
    w.bytes = w.sums + room_of_sums(config).bytes;
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

extern "C" int64_t moq_cuda_nvfp4_fp8_medium_workspace(const moq_linear_call *call) {
    moq_nvfp4_medium_config config = moq_nvfp4_fp8_medium_expand_config(call);
    return config.shape ? workspace_layout_of(call, &config).bytes : 0;
}

extern "C" moq_status moq_cuda_nvfp4_fp8_medium(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_medium_config config = moq_nvfp4_fp8_medium_expand_config(call);
    if (!config.shape)
        return refuse(call, err);
    workspace_layout w = workspace_layout_of(call, &config);
    MOQ_TRY(quantize(call, &w, err));
    layout l = moq_nvfp4_medium_smem_layout(config.shape, config.cluster);
    gemm_args a = begin_args(call, &config, l, (uint8_t *)call->workspace + w.sums);
    a.fold_scale = call->fold_scale;
    a.x_scale = (const float *)((uint8_t *)call->workspace + w.scales);
    a.per_token = true;
    CUtensorMap weights;
    MOQ_TRY(map_packed(&weights, call, &config, err));
    return launch_tiles(call, &config, l, VARIANTS, &a, &weights, call->workspace,
                        spec->in_features, spec->in_features, err);
}

} // namespace moq::nvfp4_fp8_medium
