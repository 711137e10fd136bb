/* Linear of MXFP8, int8 and int4 weights of many tokens on Hopper: tile, copies and mainloops
 * (general_prefill.cu).
 *
 * W is read as the checkpoint stores it, row by row: the copy engine brings 128 columns of the rows
 * of a tile in the 128-byte swizzle, to a ring that runs ahead of tokens. Lane 4g + t widens codes
 * of rows g and g + 8 into the fragment of a product: of each 16 columns 2t, 2t + 1, 2t + 8 and
 * 2t + 9. A row of int4 codes holds two rows of W, and lane 4g + t has the pair g. Scales, a word
 * for a row and a step, come a step ahead. */
#ifndef MOQ_CUDA_LINEAR_SM90_GENERAL_PREFILL_H
#define MOQ_CUDA_LINEAR_SM90_GENERAL_PREFILL_H

#include "cuda/device/general_codes.h"
#include "cuda/linear/sm90/exact_prefill.h"

namespace moq::general_prefill {

using namespace nvfp4_prefill;

#define STEP       MOQ_GENERAL_PREFILL_STEP
#define RING_BYTES 32768 /* bytes of the ring of weights */

/* Tile of a block, as in nvfp4_prefill.h; a step is 128 columns, two stages of tokens. */
template <int KIND, operand_type TYPE, int T, moq_sharing SHARE>
struct general_tile : tile<TYPE, T, SHARE, false> {
    static constexpr int kind = KIND, halves = 2;
    static constexpr bool ring = true;
    static constexpr int code_rows = KIND == INT4 ? ROWS / 2 : ROWS;
    static constexpr int weight_bytes = code_rows * STEP, ring_stages = RING_BYTES / weight_bytes;
    static constexpr bool row_factors = KIND == INT8, paired_rows = KIND == INT4, adds = false;
    static constexpr float unit = KIND == E4M3_MX ? LOWERED : 1.0f;
    static constexpr moq_nvfp4_type numbers = TYPE == AS_F16 ? MOQ_NVFP4_F16 : MOQ_NVFP4_BF16;
    static_assert(ring_stages <= 4, "warps of producers initialise their barriers");
};

/* ---- scales: a word for a row and a step, four E8M0 or a float ---- */

/* The words of a lane's two rows. Four lanes have the same rows: each holds the word of one of four
 * steps, and of one of the next four, so that a load brings sixteen bytes of a row. */
typedef struct {
    const uint32_t *row[2];
    uint32_t now[2], held[2], next[2]; /* of the current step; of four steps */
    int step, first, end;              /* step of `next`; steps of the tile, which wrap around */
    int taken;                         /* steps of `held` that are done */
} scale_words;

static __device__ __forceinline__ void load_words(scale_words *s) {
    int step = s->step + (int)threadIdx.x % 4;
    step = min(step < s->end ? step : step - (s->end - s->first), s->end - 1);
#pragma unroll
    for (int i = 0; i < 2; i++)
        s->next[i] = __ldg(s->row[i] + step);
}

/* Holds the next four words. */
static __device__ __forceinline__ void hold_words(scale_words *s) {
    int steps = s->end - s->first;
#pragma unroll
    for (int i = 0; i < 2; i++)
        s->held[i] = s->next[i];
    s->taken = 0;
    s->step += 4;
    if (s->step >= s->end)
        s->step = max(s->step - steps, s->first);
    load_words(s);
}

/* Finds the words of a warpgroup's rows from `row` on. */
template <class S>
static __device__ __forceinline__ scale_words find_words(const gemm_args *a, const work *w,
                                                         int row) {
    scale_words s = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int own = min(row + row_of_thread<S>() + APART<S> * i, a->n - 1);
        s.row[i] = (const uint32_t *)a->weight_scale + (int64_t)own * a->steps;
    }
    s.first = w->first;
    s.end = w->end;
    s.step = first_step_of<S>(a, w);
    load_words(&s);
    hold_words(&s);
    return s;
}

/* Moves on to the words of the next step. */
static __device__ __forceinline__ void advance_words(scale_words *s) {
    if (s->taken == 4)
        hold_words(s);
#pragma unroll
    for (int i = 0; i < 2; i++)
        s->now[i] = __shfl_sync(0xffffffffu, s->held[i], (int)threadIdx.x % 32 / 4 * 4 + s->taken);
    s->taken++;
}

/* ---- decoding ---- */

/* Decoder of half a step at a time. */
template <int KIND> struct row_decoder {
    scale_words words;
    pipeline_state from; /* stage of the ring */

    /* Waits for the codes of a step before its first half. */
    template <class S, int HALF>
    __device__ __forceinline__ void decode(const consumer_pipeline *t, const pipeline_state *,
                                           operand_unit *o) {
        if (HALF == 0) {
            mbarrier_wait(t->full + RING_FULL + 8u * from.index, from.parity);
            if (KIND != INT8)
                advance_words(&words);
        }
        uint32_t codes = t->codes + (uint32_t)(from.index * S::weight_bytes);
        uint32_t factor[2] = {};
#pragma unroll
        for (int i = 0; i < MOQ_PACK_GROUPS; i++) {
            int product = HALF * MOQ_PACK_GROUPS + i;
            uint32_t at = codes ^ (product << 4);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                if (KIND == E4M3_MX && i % 2 == 0)
                    factor[row] = e8m0_factor(words.now[row], product / 2);
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    uint32_t pair =
                        load_shared_half(at + 8 * part + (KIND == INT4 ? 0 : row * (8 * STEP)));
                    o->group[i][2 * part + row] =
                        widen<KIND, S::numbers>(spread<KIND>(pair, 0), row, factor[row]);
                }
            }
        }
    }

    /* Releases the codes of a step and moves on to the next, behind products that read all of them:
     * the next copy overtakes loads that are only issued. */
    template <class S> __device__ __forceinline__ void release_codes(const consumer_pipeline *t) {
        warp_releases<false>(t->full + RING_EMPTY + 8u * from.index);
        advance(&from, S::ring_stages);
    }
};

/* ---- int4: sums are kept in units of their row's scale, and change units between groups ---- */

/* A tile's sums keep their units within this factor of the first one, and below this number and
 * above its inverse: so they overflow only where sums of x and codes come near to it. */
#define UNITS_APART 65536.0f
#define UNITS_MOST  0x1p100f

/* Units of a thread's two rows, and those that its sums can change to. Where a scale is not among
 * them, zero for one, sums are put by. */
typedef struct {
    float now[2], ratio[2], least[2], most[2];
    bool change, put_by; /* the next change puts sums by; some were */
} sum_units;

static __device__ __forceinline__ void begin_units(sum_units *u, const uint32_t (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float size = fabsf(__uint_as_float(scale[i]));
        u->now[i] = __uint_as_float(scale[i]);
        u->least[i] = fmaxf(size / UNITS_APART, 1 / UNITS_MOST);
        u->most[i] = fminf(size * UNITS_APART, UNITS_MOST);
    }
}

/* Finds what sums are multiplied by to change to units of the next group: the ratio, rounded. */
static __device__ __forceinline__ void find_ratios(sum_units *u, const uint32_t (&scale)[2]) {
    u->change = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float next = __uint_as_float(scale[i]), size = fabsf(next);
        float inverse = reciprocal_approx(next), ratio = u->now[i] * inverse;
        u->ratio[i] = __fmaf_rn(__fmaf_rn(-ratio, next, u->now[i]), inverse, ratio);
        u->change |= !(size >= u->least[i] && size <= u->most[i]);
    }
}

/* Changes the units of the sums. Only the multiplication writes to them: ptxas would copy sums
 * whose products are under way if branches did. */
template <class S>
static __device__ __forceinline__ void change_units(sum_units *u, float *put_by,
                                                    float (&sum)[S::T / 2]) {
    stay_here(sum);
    if (u->change) {
#pragma unroll
        for (int i = 0; i < S::T / 2; i++)
            put_by[i] = __fmaf_rn(sum[i], u->now[i / 2 % 2], u->put_by ? put_by[i] : 0.0f);
        u->ratio[0] = u->ratio[1] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < S::T / 2; i++)
        sum[i] *= u->ratio[i / 2 % 2];
    stay_here(sum);
}

static __device__ __forceinline__ void end_change(sum_units *u, const uint32_t (&scale)[2]) {
    u->now[0] = __uint_as_float(scale[0]);
    u->now[1] = __uint_as_float(scale[1]);
    if (u->change) {
        u->put_by = true;
        begin_units(u, scale);
    }
}

/* Adds the products of `steps` steps, a group each, to the sums. The other warpgroup has the tensor
 * cores while sums change units. */
template <class S>
static __device__ __forceinline__ void
multiply_groups(const consumer_pipeline *t, row_decoder<INT4> *d, int steps, pipeline_state *slot,
                float (&sum)[S::T / 2]) {
    float put_by[S::T / 2]; /* in memory */
    operand_unit even, odd;
    pipeline_state before = *slot;
    sum_units u = {};
    asm volatile("" ::"l"(put_by) : "memory");
    d->template decode<S, 0>(t, slot, &even);
    begin_units(&u, d->words.now);
#pragma unroll 1
    for (int left = steps;;) {
        find_ratios(&u, d->words.now);
        await(t, slot);
        wgmma_wait<0>();
        if (left < steps)
            release<S>(t, &before);
        change_units<S>(&u, put_by, sum);
        issue<S>(t, slot, &even, sum);
        end_change(&u, d->words.now);
        before = *slot;
        advance(slot, t->stages);
        d->template decode<S, 1>(t, slot, &odd);
        await(t, slot);
        issue<S>(t, slot, &odd, sum);
        d->template release_codes<S>(t);
        wgmma_wait<1>();
        release<S>(t, &before);
        before = *slot;
        advance(slot, t->stages);
        if (--left == 0)
            break;
        d->template decode<S, 0>(t, slot, &even);
    }
    wgmma_wait<0>();
    stay_here(sum);
    release<S>(t, &before);
#pragma unroll
    for (int i = 0; i < S::T / 2; i++)
        sum[i] *= u.now[i / 2 % 2];
    if (u.put_by)
#pragma unroll
        for (int i = 0; i < S::T / 2; i++)
            sum[i] += put_by[i];
}

/* ---- weights as rows of codes ---- */

template <int KIND> struct rows_of_codes {
    typedef pipeline_state operands; /* of the ring */

    template <class S>
    static __device__ __forceinline__ void produce(const gemm_args *a, const producer_pipeline *p,
                                                   const CUtensorMap *map) {
        pipeline_state slot = {0, 0};
        uint64_t policy = a->columns == 1 ? policy_evict_first() : policy_evict_normal();
        prefetch_map(map);
        for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
            int row = place_of<S>(a, w.number, p->rank).row / (ROWS / S::code_rows);
            int step = first_step_of<S>(a, &w);
            for (int left = w.end - w.first; left > 0; left--, step = step_after(&w, step)) {
                uint32_t full = p->full + RING_FULL + 8u * slot.index;
                mbarrier_wait(p->full + RING_EMPTY + 8u * slot.index, slot.parity ^ 1);
                mbarrier_expect(full, S::weight_bytes);
                copy_box_2d(p->to + (uint32_t)(slot.index * S::weight_bytes), map, step * STEP, row,
                            full, policy);
                advance(&slot, S::ring_stages);
            }
        }
    }

    /* Bytes of a warp's rows in a stage, and where lane 4g + t has its codes but for the swizzle.
     * Scales do not pass through shared memory. */
    template <class S>
    static constexpr uint32_t warp_bytes = S::code_rows / (CONSUMERS / 32) * STEP;

    static __device__ __forceinline__ int codes_at(int g, int t) {
        return g * (STEP + 16) + 2 * t;
    }

    static __device__ __forceinline__ int scales_at(int) {
        return 0;
    }

    template <class S>
    static __device__ __forceinline__ void
    multiply(const gemm_args *a, const consumer_pipeline *t, operands *ring, const work *w,
             const tile_place *at, int group, pipeline_state *slot, float (&sum)[S::T / 2]) {
        row_decoder<KIND> d = {{}, *ring};
        int steps = w->end - w->first;
        if constexpr (KIND != INT8)
            d.words = find_words<S>(a, w, at->row + group * 64);
        if constexpr (KIND == INT4)
            multiply_groups<S>(t, &d, steps, slot, sum);
        else
            nvfp4_prefill::multiply<S>(t, &d, steps * 2, slot, sum);
        *ring = d.from;
    }
};

/* ---- shapes ---- */

template <int KIND, operand_type TYPE, int T, moq_sharing SHARE>
static variant general_variant(void) {
    return variant_of<general_tile<KIND, TYPE, T, SHARE>, rows_of_codes<KIND>>();
}

/* Returns the kernels of every shape for weights of int8 and int4 (general_prefill_int.cu). */
const variant *int_variants(bool int4, bool float16);

} // namespace moq::general_prefill

#endif
