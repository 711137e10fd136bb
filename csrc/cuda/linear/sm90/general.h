/* Linear of MXFP8, int8 and int4 weights on Hopper: tile, copies and mainloops (general.cu).
 *
 * W is read as the checkpoint stores it, row by row: the copy engine brings 128 columns of the rows
 * of a tile in the 128-byte swizzle. A lane reads columns 4t to 4t + 3 of each 16 of rows g and g +
 * 8, or of int4 of the pair g of rows, and widens them into the fragment of a product: the even
 * ones take the place of columns 2t and 2t + 1, the odd ones that of 2t + 8 and 2t + 9. A warp
 * sorts each 16 columns of x in place, even ones first, to match. Where that does not pay codes are
 * loaded two at a time. Scales, a word for a row and a step, are loaded a step ahead. */
#ifndef MOQ_CUDA_LINEAR_SM90_GENERAL_H
#define MOQ_CUDA_LINEAR_SM90_GENERAL_H

#include "cuda/device/general_codes.h"
#include "cuda/linear/sm90/general_config.h"
#include "cuda/linear/sm90/nvfp4_medium.h"

namespace moq::general {

using namespace nvfp4_medium;

struct row_copies;

/* Tiles of a->rows rows of W. */
struct row_tiles {
    template <class S>
    static __device__ __forceinline__ tile_place find(const gemm_args *a, int number, int) {
        tile_index tile = {number, (int)blockIdx.z};
        if constexpr (!S::split_k)
            tile = tile_of_rows(number, a->columns);
        int row = tile.row * a->rows, token = tile.column * a->tokens;
        return {row, min(row + a->rows, a->n), 0, token, min(token + a->tokens, a->m)};
    }
};

/* Tile of a block, as in nvfp4_medium.h: up to 64 rows of W for each of ROW_GROUPS, by T tokens. */
template <int KIND, moq_nvfp4_type TYPE, int T_, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K>
struct general_tile {
    typedef gemm_args args;
    typedef row_tiles tiles;
    typedef row_copies copies;
    static constexpr bool stream_k = true, staggered = true;
    static constexpr bool share_tokens = false, share_weights = false;
    static __device__ __forceinline__ int tile_tokens(const gemm_args *a) {
        return a->tokens;
    }
    static constexpr int kind = KIND;
    static constexpr moq_nvfp4_type type = TYPE;
    static constexpr int T = T_, WAVES = 1, row_groups = ROW_GROUPS, k_groups = K_GROUPS;
    static constexpr bool split_k = SPLIT_K, pair = false;
    static constexpr int consumers = 128 * ROW_GROUPS * K_GROUPS;
    /* Registers of consumers and producers, where they differ. */
    static constexpr bool uneven = consumers >= 384 || T == 256 || (KIND == INT4 && T == 128);
    static constexpr int few = T <= 16 ? 24 : 0; /* sums, so that the warp that sorts has more */
    static constexpr int registers = consumers == 512   ? (few ? 104 : 112)
                                     : consumers == 384 ? 152
                                                        : 232;
    static constexpr int copier_registers = consumers == 512   ? 32 + few
                                            : consumers == 384 ? 56
                                                               : 40;
    static constexpr int copier = consumers, token_arrivals = 1;
    /* Warps that sort tokens. One takes 1.6 us for 64 of them, so that they pay where tokens are
     * few or widening takes long. */
    static constexpr int sorters = T == 8 ? 1 : T <= 32 && KIND != INT4 ? 2 : 0;
    /* int4 is multiplied as a positive number, whose sums begin with what that adds. */
    static constexpr bool shifted = KIND == INT4 && T == 8;
    static constexpr int stage_room = shifted ? 4 * T : 0,
                         room_bytes = MAX_STAGES * stage_room + 16;
    static constexpr int threads = consumers + (uneven ? 128 : 64 + 32 * sorters);
    static constexpr int tokens = T;
    static constexpr int weight_bytes = 64 * ROW_GROUPS * STEP / (KIND == INT4 ? 2 : 1);
    static constexpr int token_size = 2, token_bytes = T * STEP * token_size;
    /* Products that a set of fragments is for. */
    static constexpr int sums = KIND == INT4 ? T : T / 2; /* of a thread */
    static constexpr int depth = sums >= 64 && consumers == 512 ? 2 : 4;
    static constexpr int pieces = STEP / 16 / depth;
    static constexpr int first_copies = ROW_GROUPS == 1 ? 3 : 1;
    static constexpr bool early = false;
    static constexpr int stage = (token_bytes + weight_bytes + 1023) / 1024 * 1024;
    static constexpr bool own_room = T < 128;
    static constexpr bool tokens_first = false, row_factors = KIND == INT8, token_factors = false;
    static constexpr float unit = KIND == E4M3_MX ? LOWERED : 1.0f;
};

static __device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x5410);
}

static __device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x7632);
}

/* Multiplies fragments of A and B, and adds, by a warp. */
template <class S>
static __device__ __forceinline__ void multiply_by_warp(float (&sum)[4], const uint32_t (&a)[4],
                                                        const uint32_t (&b)[2]) {
    if constexpr (S::type == MOQ_NVFP4_F16)
        mma_f16(sum, a, b);
    else
        mma_bf16(sum, a, b);
}

/* Returns the address that this lane names to ldmatrix for the first 32 columns of eight tokens. */
static __device__ __forceinline__ uint32_t tokens_of_lane(uint32_t stage) {
    uint32_t lane = threadIdx.x % 32, token = lane % 8;
    return stage + token * 128 + (lane / 8 ^ token) * 16;
}

/* Loads the fragments of eight tokens and 32 columns, the i-th of a step, from this lane's address.
 */
template <class S>
static __device__ __forceinline__ void load_tokens(uint32_t (&x)[4], uint32_t from, int i) {
    load_matrices(x, (from ^ i % 2 * 64) + i / 2 * (S::T * 128));
}

/* Stores for each token of a stage what a step's sums of shifted codes begin with: the sum of x by
 * products with ones, times minus the shift. If float32 does not hold one well, all are NaN. */
template <class S>
static __device__ __forceinline__ void store_first_sums(const gemm_args *a, uint32_t stage,
                                                        uint32_t to) {
    constexpr uint32_t ONE = S::type == MOQ_NVFP4_F16 ? 0x3c003c00u : 0x3f803f80u;
    constexpr uint32_t ONES[4] = {ONE, ONE, ONE, ONE};
    constexpr float MOST = 1e37f;
    int pair = threadIdx.x % 32 * 2;
    float first[S::T / 8][2];
    bool holds = true;
#pragma unroll
    for (int i = 0; i < S::T / 8; i++) {
        float sum[2][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t x[4];
            load_tokens<S>(x, tokens_of_lane(stage) + i * 1024, j);
            multiply_by_warp<S>(sum[0], ONES, {x[0], x[1]});
            multiply_by_warp<S>(sum[1], ONES, {x[2], x[3]});
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            bool is_token = pair < 8 && 8 * i + pair + j < a->tokens;
            first[i][j] = is_token ? -INT4_SHIFT<S::type> * (sum[0][j] + sum[1][j]) : 0.0f;
            holds = holds && fabsf(first[i][j]) < MOST;
        }
    }
    holds = __all_sync(0xffffffffu, holds);
#pragma unroll
    for (int i = 0; i < S::T / 8; i++)
        if (pair < 8)
            store_shared_pair(to + (8 * i + pair) * 4,
                              {holds ? __float_as_uint(first[i][0]) : 0x7fffffffu,
                               holds ? __float_as_uint(first[i][1]) : 0x7fffffffu});
}

struct row_copies {
    template <class S>
    static __device__ __forceinline__ void weights(const gemm_args *a, const producer_pipeline *p,
                                                   const next_copy *f) {
        constexpr int ROWS = S::kind == INT4 ? 2 : 1; /* of W in a row of codes */
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage + S::token_bytes);
        uint32_t bar = p->barriers.weights + 8u * f->slot.index;
        mbarrier_expect(bar, a->rows / ROWS * STEP);
        copy_box_2d(to, p->weights, f->step * STEP, f->where.row / ROWS, bar, p->weight_policy);
    }

    template <class S>
    static __device__ __forceinline__ void tokens(const gemm_args *a, const producer_pipeline *p,
                                                  const next_copy *f) {
        copy_tokens<S>(a, p, f);
    }

    /* Returns where this lane reads the first two codes of its row in the first stage, where tokens
     * are not sorted. */
    template <class S>
    static __device__ __forceinline__ uint32_t pairs_of_codes(uint32_t pipeline) {
        uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        uint32_t row = slab_of_warp<S>() * (S::kind == INT4 ? 8 : 16) + g;
        return pipeline + S::token_bytes + row * STEP + g * 16 + 2 * t;
    }

    /* Returns the address that this lane names to ldmatrix for the first codes in the first stage:
     * its row of the first 8 or the next, or of int4 of the only 8, and its 16 columns. */
    template <class S> static __device__ __forceinline__ uint32_t codes(uint32_t pipeline) {
        if constexpr (S::sorters == 0)
            return pairs_of_codes<S>(pipeline);
        uint32_t lane = threadIdx.x % 32, matrix = lane / 8;
        uint32_t row = slab_of_warp<S>() * (S::kind == INT4 ? 8 : 16) + lane % 8;
        uint32_t part = S::kind == INT4 ? matrix : matrix / 2;
        if (S::kind != INT4)
            row += matrix % 2 * 8;
        return pipeline + S::token_bytes + row * STEP + (part ^ lane % 8) * 16;
    }

    /* Scales do not pass through shared memory. Returns where this lane reads tokens instead. */
    template <class S> static __device__ __forceinline__ uint32_t scales(uint32_t pipeline) {
        return tokens_of_lane(pipeline);
    }

    /* Sorts each 16 columns of the tokens of a stage, even ones first. */
    template <class S>
    static __device__ __forceinline__ void sort(const gemm_args *a, uint32_t stage, uint32_t room) {
        int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int token = lane / 4; token < a->tokens; token += 8) {
            uint32_t at = stage + token * 128 + (lane % 4 * 2 ^ token % 8) * 16;
#pragma unroll
            for (int box = 0; box < 2; box++, at += S::T * 128) {
                uint4 v = load_shared(at), w = load_shared(at ^ 16);
                store_shared(at, make_uint4(low_halves(v.x, v.y), low_halves(v.z, v.w),
                                            low_halves(w.x, w.y), low_halves(w.z, w.w)));
                store_shared(at ^ 16, make_uint4(high_halves(v.x, v.y), high_halves(v.z, v.w),
                                                 high_halves(w.x, w.y), high_halves(w.z, w.w)));
            }
        }
        if constexpr (S::shifted) {
            __syncwarp();
            store_first_sums<S>(a, stage, room);
        }
    }
};

/* ---- scales: a word for a row and a step, four E8M0 or a float ---- */

/* The lane's words of its two rows: of the current step, and of the next of this warpgroup. */
typedef struct {
    const uint32_t *from; /* of `next`, of the first row */
    int apart;            /* from a row to the other */
    uint32_t now[2], next[2];
    int step, first, end; /* step of `next`; steps of the tile, which wrap around */
    bool idle;            /* the tile ends before this warp's rows */
} scale_words;

static __device__ __forceinline__ void load_words(scale_words *s) {
    s->next[0] = __ldg(s->from);
    s->next[1] = __ldg(s->from + s->apart);
}

template <class S>
static __device__ __forceinline__ scale_words find_words(const gemm_args *a, const work *w,
                                                         int first) {
    int g = threadIdx.x % 32 / 4, slab = first + threadIdx.x % 128 / 32 * 16;
    int tile = S::split_k ? w->number : w->number / a->columns;
    int upper = min(slab + (S::kind == INT4 ? 2 * g : g), a->n - 1);
    int lower = min(slab + (S::kind == INT4 ? 2 * g + 1 : g + 8), a->n - 1);
    scale_words s = {};
    s.from = (const uint32_t *)a->weight_scale + (int64_t)upper * a->steps;
    s.apart = (lower - upper) * a->steps;
    /* From memory a word takes longer than a step. */
    for (int at = threadIdx.x % 4 * 32; at < a->steps; at += 4 * 32) {
        prefetch_l2(s.from + at);
        prefetch_l2(s.from + s.apart + at);
    }
    s.first = w->first;
    s.end = w->end;
    s.step = first_step(w, tile);
    if (threadIdx.x / 128 % S::k_groups)
        s.step = step_after(w, s.step);
    s.from += s.step;
    load_words(&s);
    return s;
}

/* Moves on to the words of the next step. */
template <class S> static __device__ __forceinline__ void advance_words(scale_words *s) {
#pragma unroll
    for (int i = 0; i < 2; i++)
        s->now[i] = s->next[i];
    int step = s->step + S::k_groups;
    if (step >= s->end)
        step = min(step - (s->end - s->first), s->end - 1);
    s->from += step - s->step;
    s->step = step;
    load_words(s);
}

/* ---- decoding ---- */

/* Finds the factors of groups i and i + 2 of both rows, in two halves. */
static __device__ __forceinline__ void find_factors(const scale_words *words,
                                                    uint32_t (&factor)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        factor[i / 2][i % 2] = e8m0_factors(words->now[i / 2] >> 8 * (i % 2) & 0x00ff00ffu);
}

/* Widens the even and the odd two of four columns, of the first or the second row of int4. */
template <class S>
static __device__ __forceinline__ void widen_four(uint32_t word, int row, uint32_t factor,
                                                  uint32_t *even, uint32_t *odd) {
    constexpr bool UPPER = S::kind == E4M3_MX; /* what is widened is in the upper bytes */
    *even = widen<S::kind, S::type>(UPPER ? word << 8 : word, row, factor);
    *odd = widen<S::kind, S::type>(UPPER ? word : word >> 8, row, factor);
}

/* Products whose codes are loaded at once by `depth` of them. */
template <class S, int DEPTH> constexpr int AT_ONCE = S::kind == INT4 && DEPTH >= 4 ? 4 : 2;

/* Widens the codes of a product, the j-th of a load; `factor` has those of both rows. SHIFTED:
 * numbers are larger by INT4_SHIFT, for an instruction less. */
template <class S, bool SHIFTED = false>
static __device__ __forceinline__ void widen_product(const uint32_t (&word)[4], int j,
                                                     const uint32_t (&factor)[2][2], int product,
                                                     uint32_t (&a)[4]) {
#pragma unroll
    for (int row = 0; row < 2; row++)
        if constexpr (SHIFTED) {
            a[row] = shift_codes<S::type>(word[j], row);
            a[2 + row] = shift_codes<S::type>(word[j], row + 2);
        } else {
            widen_four<S>(word[S::kind == INT4 ? j : 2 * j + row], row,
                          moq_nvfp4_twice(factor[row][product / 2 % 2], product / 4 != 0), &a[row],
                          &a[2 + row]);
        }
}

/* Widens the codes of a product for tokens that are not sorted, two of a row at a time. */
template <class S>
static __device__ __forceinline__ void widen_pairs(uint32_t from, const uint32_t (&factor)[2],
                                                   uint32_t (&a)[4]) {
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t at = from + 8 * half + (S::kind == INT4 ? 0 : row * (8 * STEP));
            a[2 * half + row] =
                widen<S::kind, S::type>(spread<S::kind>(load_shared_half(at), 0), row, factor[row]);
        }
}

/* Widens a piece of a step. */
template <class S>
static __device__ __forceinline__ void widen_piece(const consumer_pipeline *t, const stage_place *s,
                                                   const uint32_t (&factor)[2][2], int piece,
                                                   fragments<S> *f) {
    constexpr int LOAD = S::sorters ? AT_ONCE<S, S::depth> : 1;
#pragma unroll
    for (int i = 0; i < S::depth; i += LOAD) {
        int product = piece * S::depth + i;
        uint32_t from = (t->codes + s->at) ^ (product << 4), word[4];
        if constexpr (S::sorters == 0) {
            uint32_t twice[2];
#pragma unroll
            for (int row = 0; row < 2; row++)
                twice[row] = moq_nvfp4_twice(factor[row][product / 2 % 2], product / 4 != 0);
            widen_pairs<S>(from, twice, f->a[i]);
            continue;
        }
        load_matrices(word, from);
#pragma unroll
        for (int j = 0; j < LOAD; j++)
            widen_product<S>(word, j, factor, product + j, f->a[i + j]);
    }
}

/* Decoder of rows of 8-bit codes. */
template <int KIND> struct row_decoder {
    scale_words words;
    uint32_t factor[2][2];

    template <class S>
    __device__ __forceinline__ void begin_step(const consumer_pipeline *, const stage_place *) {
        if (KIND != E4M3_MX)
            return;
        advance_words<S>(&words);
        find_factors(&words, factor);
    }

    template <class S>
    __device__ __forceinline__ void decode(const consumer_pipeline *t, const stage_place *s,
                                           int piece, fragments<S> *f) const {
        widen_piece<S>(t, s, factor, piece, f);
    }
};

/* ---- int4: sums of a step are scaled and added to those of the tile ---- */

/* Loads what a step's sums of shifted codes begin with, from this lane's address. Returns false
 * where they are NaN: codes have to be widened exactly. */
template <class S>
static __device__ __forceinline__ bool begin_sums(uint32_t from, const stage_place *s,
                                                  float (&part)[S::T / 2]) {
#pragma unroll
    for (int i = 0; i < S::T / 2; i += 2) { /* of one row and of the other */
        uint2 pair = load_shared_pair(from + s->barriers * (S::stage_room / 8) + i / 4 * 32);
        part[i] = __uint_as_float(pair.x);
        part[i + 1] = __uint_as_float(pair.y);
    }
    return __all_sync(0xffffffffu, part[0] == part[0]);
}

/* Issues the products of a piece; those of the first one begin the sums of the step. */
template <class S>
static __device__ __forceinline__ void issue_part(const consumer_pipeline *t, const stage_place *s,
                                                  int piece, const fragments<S> *f,
                                                  float (&part)[S::T / 2]) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::depth; i++) {
        int product = piece * S::depth + i;
        uint64_t x = t->tokens + s->at / 16 + product / 4 * (S::T * STEP / 16) + product % 4 * 2;
        if constexpr (S::type == MOQ_NVFP4_F16)
            wgmma_f16(part, f->a[i], x, product);
        else
            wgmma_bf16(part, f->a[i], x, product);
    }
    wgmma_commit();
}

template <class S>
static __device__ __forceinline__ void add_scaled(const scale_words *words, float (&part)[S::T / 2],
                                                  float (&sum)[S::T / 2]) {
    stay_here(part);
#pragma unroll
    for (int i = 0; i < S::T / 2; i++)
        sum[i] = __fmaf_rn(part[i], __uint_as_float(words->now[i / 2 % 2]), sum[i]);
}

/* Multiplies a step again, by codes that are widened exactly. */
template <class S>
static __device__ __forceinline__ void
multiply_exactly(const consumer_pipeline *t, const stage_place *s, float (&part)[S::T / 2]) {
    constexpr uint32_t NO_FACTORS[2][2] = {};
    float own[S::T / 8][4] = {};
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        uint32_t word[4], a[4], x[4];
        load_matrices(word, (t->codes + s->at) ^ (i << 5));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            widen_product<S>(word, j, NO_FACTORS, 0, a);
#pragma unroll
            for (int eight = 0; eight < S::T / 8; eight++) {
                load_tokens<S>(x, t->scales + s->at + eight * 1024, i);
                multiply_by_warp<S>(own[eight], a, {x[2 * j], x[2 * j + 1]});
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S::T / 2; i++)
        part[i] = own[i / 4][i % 4];
}

/* Gives each lane the sums of rows g and g + 8, where it has those of rows 2g and 2g + 1. */
template <class S> static __device__ __forceinline__ void sort_rows(float (&sum)[S::T / 2]) {
    int lane = threadIdx.x % 32, g = lane / 4, low = g / 2 * 4 + lane % 4;
#pragma unroll
    for (int i = 0; i < S::T / 2; i += 4)
#pragma unroll
        for (int j = i; j < i + 2; j++) {
            float even[2], odd[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                even[half] = __shfl_sync(0xffffffffu, sum[j], low + 16 * half);
                odd[half] = __shfl_sync(0xffffffffu, sum[j + 2], low + 16 * half);
            }
            sum[j] = g % 2 ? odd[0] : even[0];
            sum[j + 2] = g % 2 ? odd[1] : even[1];
        }
}

/* Adds `steps` steps of this warpgroup from `s` on to the sums. While a piece is multiplied, the
 * next is widened. */
template <class S>
static __device__ __forceinline__ void multiply_groups(const consumer_pipeline *t,
                                                       scale_words words, int steps, stage_place *s,
                                                       float (&sum)[S::T / 2]) {
    constexpr uint32_t NO_FACTORS[2][2] = {};
    fragments<S> set[2] = {};
    float part[S::T / 2];
    if (steps <= 0)
        return;
    mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
    widen_piece<S>(t, s, NO_FACTORS, 0, &set[0]);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        stage_place now = *s;
        advance_words<S>(&words);
        mbarrier_wait(t->barriers.tokens + now.barriers, now.parity);
#pragma unroll
        for (int piece = 0; piece < S::pieces; piece++) {
            fragments<S> *other = &set[1 - piece % 2];
            issue_part<S>(t, &now, piece, &set[piece % 2], part);
            if (piece + 1 == S::pieces)
                break;
            if (piece > 0) {
                wgmma_wait<1>();
                give_up<S>(other);
            }
            widen_piece<S>(t, &now, NO_FACTORS, piece + 1, other);
        }
        advance_own<S>(s, t->stages);
        if (left > 1) {
            mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
            wgmma_wait<1>();
            give_up<S>(&set[0]);
            widen_piece<S>(t, s, NO_FACTORS, 0, &set[0]);
        }
        wgmma_wait<0>();
        give_up<S>(&set[1]);
        release<S>(t, &now);
        add_scaled<S>(&words, part, sum);
        stay_here(sum);
    }
    sort_rows<S>(sum);
}

/* ---- up to eight tokens: each warp multiplies on its own ---- */

/* Waits for steps and releases them: the warp's rows are beyond the tile. */
template <class S>
static __device__ __forceinline__ void skip_steps(const consumer_pipeline *t, int steps,
                                                  stage_place *s) {
#pragma unroll 1
    for (; steps > 0; steps--) {
        mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
        mbarrier_wait(t->barriers.tokens + s->barriers, s->parity);
        release<S>(t, s);
        advance_own<S>(s, t->stages);
    }
}

/* Adds `steps` steps from `s` on to the sums. Even and odd products have sums of their own, and so
 * has each step of int4. A stage is released a step later, when all loads of it have ended. */
template <class S>
static __device__ __forceinline__ void multiply_by_warps(const consumer_pipeline *t,
                                                         scale_words words, int steps,
                                                         stage_place *s, float (&sum)[4]) {
    constexpr int LOAD = AT_ONCE<S, 8>, PRODUCTS = STEP / 16;
    constexpr bool GROUPS = S::kind == INT4;
    uint32_t first_sums = kept(t->room + threadIdx.x % 4 * 8);
    float part[2][4] = {};
    stage_place before = *s;
    if (words.idle)
        return skip_steps<S>(t, steps, s);
    if (steps <= 0)
        return;
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        uint32_t codes[PRODUCTS / LOAD][4], x[4][4];
        uint32_t factor[2][2] = {};
        bool holds = true;
        if (S::kind != INT8)
            advance_words<S>(&words);
        mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
#pragma unroll
        for (int i = 0; i < PRODUCTS / LOAD; i++)
            load_matrices(codes[i], (t->codes + s->at) ^ (i * LOAD << 4));
        mbarrier_wait(t->barriers.tokens + s->barriers, s->parity);
#pragma unroll
        for (int i = 0; i < 4; i++)
            load_tokens<S>(x[i], t->scales + s->at, i);
        if constexpr (GROUPS) {
            holds = begin_sums<S>(first_sums, s, part[0]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                part[1][i] = 0.0f;
        }
        if (left < steps)
            release<S>(t, &before);
        if (S::kind == E4M3_MX)
            find_factors(&words, factor);
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) {
            uint32_t a[4];
            widen_product<S, S::shifted>(codes[i / LOAD], i % LOAD, factor, i, a);
            multiply_by_warp<S>(part[i % 2], a, {x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]});
        }
        if constexpr (GROUPS) {
            float both[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                both[i] = part[0][i] + part[1][i];
            if (!holds)
                multiply_exactly<S>(t, s, both);
            add_scaled<S>(&words, both, sum);
        }
        before = *s;
        advance_own<S>(s, t->stages);
    }
    stay_here(part[0]);
    release<S>(t, &before);
#pragma unroll
    for (int i = 0; !GROUPS && i < 4; i++)
        sum[i] = part[0][i] + part[1][i];
    if constexpr (GROUPS)
        sort_rows<S>(sum);
}

/* ---- products ---- */

template <class S> struct products {
    typedef scale_words rows;
    static __device__ __forceinline__ rows fetch(const gemm_args *a, const work *w, int first) {
        rows own = {};
        if constexpr (S::kind != INT8)
            own = find_words<S>(a, w, first);
        own.idle = same_in_warp(slab_of_warp<S>() * 16 >= a->rows);
        return own;
    }
    template <class>
    static __device__ __forceinline__ void complete(const gemm_args *, const tile_place *, int,
                                                    tile_terms<S> *) {
    }
    template <class>
    static __device__ __forceinline__ void multiply(const consumer_pipeline *t, rows words,
                                                    int steps, stage_place *s,
                                                    float (&sum)[S::T / 2]) {
        if constexpr (S::T == 8)
            multiply_by_warps<S>(t, words, steps, s, sum);
        else if constexpr (S::kind == INT4)
            multiply_groups<S>(t, words, steps, s, sum);
        else
            nvfp4_medium::multiply<S>(t, row_decoder<S::kind>{words, {}}, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <int KIND, moq_nvfp4_type TYPE, int T, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K,
          bool SHARED>
static variant variant_of(void) {
    typedef general_tile<KIND, TYPE, T, ROW_GROUPS, K_GROUPS, SPLIT_K> shape;
    static_assert(shape::stage == MOQ_NVFP4_MEDIUM_STAGE(T, ROW_GROUPS, 2,
                                                         KIND == INT4 ? MOQ_GENERAL_INT4_STEP
                                                                      : MOQ_GENERAL_STEP),
                  "as the choice counts it");
    static_assert(shape::room_bytes + 8 * MAX_STAGES <= MOQ_GENERAL_ROOM,
                  "as the choice counts it");
    return {
        shape::threads,
        {(const void *)nvfp4_medium::nvfp4_medium<shape, products<shape>, false>,
         SHARED ? (const void *)nvfp4_medium::nvfp4_medium<shape, products<shape>, SHARED> : NULL}};
}

/* Defines the kernels of all shapes, of a kind of weights and a type of activations, in `name`. */
#define GENERAL_VARIANT(kind, type, tokens, row_groups, k_groups, split_k, shared)                 \
    variant_of<kind, type, tokens, row_groups, k_groups, split_k, shared>(),

/* Return the kernels of every shape for weights of int8 (general_int8.cu) and int4
 * (general_int4.cu). */
const variant *int8_variants(moq_dtype dtype);
const variant *int4_variants(moq_dtype dtype);

} // namespace moq::general

#endif
