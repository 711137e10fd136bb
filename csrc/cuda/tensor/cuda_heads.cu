/* RMSNorm and RoPE of heads of q and k in place, and heads of k and v stored in a cache
 * (core/heads.h has the formula).
 *
 * Layouts: rows of heads of D values, 16 bits each; the cache by slots of blocks. D / 8 lanes have
 * a head, 8 neighbours each. A lane's partner in RoPE lies half as many lanes away, and the sum of
 * squares is the binary tree over neighbours of rms_norm. A block has 128 / (D / 8) heads, of one
 * token or of several. Lanes of v's heads turn nothing, but take part in their warp's shuffles.
 *
 * Bound: memory, 4 bytes a value; with few tokens the start of a kernel and one chain of loads:
 * position, angles. */
#include "cuda/tensor/cuda_heads.h"

#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize_norm.h"

namespace moq::heads {

using quantization::chunk;
using quantization::narrow;
using quantization::normalised;
using quantization::reciprocal_rms;
using quantization::widen;

#define THREADS 128
#define PIECE   8 /* values of a lane */

typedef struct {
    void *data;
    int64_t block, slot, head; /* step from head to head, in values */
} pages;

typedef struct {
    void *x;
    const int64_t *positions;
    const void *table;
    const void *weight[MOQ_HEADS_KINDS];
    int64_t stride, count;      /* stride of rows, in values; heads of all tokens */
    int64_t last;               /* values of a row of the table */
    int q_heads, turned, heads; /* heads of a token: of q, of q and k, and with stored heads of v */
    bool normed;                /* true if any head is normed */
    float eps;
    pages cache[MOQ_CACHES];
    const int64_t *slots;
    int64_t stored, capacity, block_size; /* given slots; slots of the cache and of a block */
} heads_args;

template <int DT>
static __device__ __forceinline__ chunk<DT, PIECE> load_piece(const void *from, int64_t at) {
    const uint4 four = *(const uint4 *)((const uint8_t *)from + at * 2);
    return {{four.x, four.y, four.z, four.w}};
}

template <int DT, int LANES>
static __device__ __forceinline__ chunk<DT, PIECE>
norm_head(const chunk<DT, PIECE> &x, const chunk<DT, PIECE> &gain, float eps) {
    float part[1] = {quantization::sum_of_squares(x)};
    const float sum = quantization::fold_lanes<LANES>(part, quantization::sum_of);
    return normalised(x, reciprocal_rms(sum, LANES * PIECE, eps), gain);
}

/* Turns values: rounded(rounded(v * cos) + rounded(other * sin)). Lanes of the first half have
 * -other. */
template <int DT>
static __device__ __forceinline__ chunk<DT, PIECE>
turn(const chunk<DT, PIECE> &v, const chunk<DT, PIECE> &other, bool first,
     const chunk<DT, PIECE> &cos, const chunk<DT, PIECE> &sin) {
    float own[PIECE], turned[PIECE], angle[PIECE];
    widen(v, own);
    widen(cos, angle);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        own[i] = __fmul_rn(own[i], angle[i]);
    widen(narrow<DT>(own), own);
    widen(other, turned);
    widen(sin, angle);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        turned[i] = __fmul_rn(first ? -turned[i] : turned[i], angle[i]);
    widen(narrow<DT>(turned), turned);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        own[i] = __fadd_rn(own[i], turned[i]);
    return narrow<DT>(own);
}

/* Stores values of a head of k or v, from `at` on, in the cache, if they have a slot. */
template <int DT>
static __device__ __forceinline__ void store_page(const heads_args &a, const chunk<DT, PIECE> &v,
                                                  int64_t token, int64_t head, int64_t at) {
    const int64_t slot = token < a.stored ? a.slots[token] : -1;
    if ((uint64_t)slot >= (uint64_t)a.capacity)
        return;
    const bool is_value = head >= a.turned;
    const pages &cache = a.cache[is_value ? MOQ_CACHE_V : MOQ_CACHE_K];
    const int64_t to = slot / a.block_size * cache.block + slot % a.block_size * cache.slot +
                       (head - (is_value ? a.turned : a.q_heads)) * cache.head + at;
    *(uint4 *)((uint8_t *)cache.data + to * 2) =
        make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

template <int DT, int LANES>
static __global__ void __launch_bounds__(THREADS)
    qk_norm_rope(const __grid_constant__ heads_args a) {
    constexpr int64_t HALF = LANES / 2 * PIECE;
    const int64_t place = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const bool inside = place / LANES < a.count; /* all lanes take part in what warps do together */
    const int64_t number = inside ? place / LANES : a.count - 1;
    const int64_t token = number / a.heads, head = number % a.heads, lane = place % LANES;
    const void *const weight = head < a.q_heads  ? a.weight[MOQ_HEADS_Q]
                               : head < a.turned ? a.weight[MOQ_HEADS_K]
                                                 : NULL;
    const int64_t at = token * a.stride + head * 2 * HALF + lane * PIECE;
    wait_for_predecessor();
    launch_dependents();
    const int64_t row = min((uint64_t)a.positions[token], (uint64_t)a.last) * 2 * HALF;
    chunk<DT, PIECE> v = load_piece<DT>(a.x, at), other;
    const auto cos = load_piece<DT>(a.table, row + lane % (LANES / 2) * PIECE);
    const auto sin = load_piece<DT>(a.table, row + HALF + lane % (LANES / 2) * PIECE);
    if (a.normed) {
        const auto gain = weight ? load_piece<DT>(weight, lane * PIECE) : chunk<DT, PIECE>{};
        const auto normed = norm_head<DT, LANES>(v, gain, a.eps);
        v = weight ? normed : v;
    }
#pragma unroll
    for (int i = 0; i < v.words; i++)
        other.word[i] = __shfl_xor_sync(0xffffffffu, v.word[i], LANES / 2);
    if (head < a.turned)
        v = turn<DT>(v, other, lane < LANES / 2, cos, sin);
    if (inside && head < a.turned)
        *(uint4 *)((uint8_t *)a.x + at * 2) =
            make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    if (inside && head >= a.q_heads && a.slots)
        store_page<DT>(a, v, token, head, lane * PIECE);
}

template <int DT> static const void *kernel_of(int64_t columns) {
    return columns == 32    ? (const void *)qk_norm_rope<DT, 4>
           : columns == 64  ? (const void *)qk_norm_rope<DT, 8>
           : columns == 128 ? (const void *)qk_norm_rope<DT, 16>
                            : (const void *)qk_norm_rope<DT, 32>;
}

static void add_cache(const moq_heads *heads, heads_args *a) {
    const moq_tensor *keys = &heads->cache[MOQ_CACHE_K];
    a->slots = (const int64_t *)heads->slots.data;
    a->stored = heads->slots.shape[0];
    a->block_size = keys->shape[1];
    a->capacity = keys->shape[0] * keys->shape[1];
    a->heads += (int)heads->heads[MOQ_HEADS_K];
    for (int i = 0; i < MOQ_CACHES; i++) {
        const moq_tensor *t = &heads->cache[i];
        a->cache[i] = {t->data, t->stride[0], t->stride[1], t->stride[2]};
    }
}

extern "C" moq_status moq_cuda_qk_norm_rope(const moq_heads *heads, void *stream, moq_err *err) {
    const int64_t columns = heads->table.shape[1];
    heads_args a = {.x = heads->x.data,
                    .positions = (const int64_t *)heads->positions.data,
                    .table = heads->table.data,
                    .stride = heads->x.stride[0],
                    .last = heads->table.shape[0] - 1,
                    .q_heads = (int)heads->heads[MOQ_HEADS_Q],
                    .turned = (int)(heads->heads[MOQ_HEADS_Q] + heads->heads[MOQ_HEADS_K]),
                    .eps = heads->eps};
    for (int i = 0; i < MOQ_HEADS_KINDS; i++) {
        a.weight[i] = heads->weight[i].ndim < 0 ? NULL : heads->weight[i].data;
        a.normed = a.normed || a.weight[i];
    }
    a.heads = a.turned;
    if (heads->slots.ndim >= 0)
        add_cache(heads, &a);
    a.count = heads->x.shape[0] * a.heads;
    const int64_t blocks = (a.count * (columns / PIECE) + THREADS - 1) / THREADS;
    if (blocks > 0x7fffffff)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld heads are more than a launch has",
                        (long long)a.count);
    moq_launch launch = {.what = "qk_norm_rope",
                         .kernel = heads->x.dtype == MOQ_DT_BF16 ? kernel_of<MOQ_DT_BF16>(columns)
                                                                 : kernel_of<MOQ_DT_F16>(columns),
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream,
                         .pdl = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::heads
