/* NVFP4 linear for a few tokens on Hopper: y[m, n] = round(wx[n] * sum_k X[m, k] W[n, k] +
 * bias[n]).
 *
 * W is in the packed layout (core/nvfp4_pack.h), X bfloat16 or float16 of at most 16 tokens;
 * products are exact, sums float32. W is read once, 0.5625 bytes a weight, and what makes operands
 * of the codes takes nearly as long: 73 instructions of a warp for the 1024 weights of a unit, 14
 * to 15 ns of a multiprocessor where the memory brings one in 17. So whatever else a warp does
 * counts:
 *
 * - K is split over the warps of a block, and over the two blocks of a cluster where that is
 *   better; rows over clusters, slab by slab, as evenly as can be. Where K is short, groups of
 * warps take different rows.
 * - A warp takes its slabs in rounds of up to 8, with code of its own for every number of them, so
 *   that no slab is multiplied that is not there.
 * - A warp has a ring of stages of its own, which it fills itself: a stage is up to 8 units of W,
 *   some slabs by some blocks of K, a lane for the bulk copy of each slab. It waits for nothing but
 *   its stages.
 * - x is kept beside the rings, one bulk copy a token and warp, where there are several rounds or
 *   many stages and room for it, or comes with the stages: what a warp does for it at each counts.
 *   Stages that are filled again get x of more than four tokens in boxes. Two blocks of other rows
 *   may read x together (multicast).
 * - W is constant, so rings are filled before the preceding kernel has ended (dependent launch); x
 *   follows when it has. What can be told of it before is found before, and so are the places of
 *   sums and outputs: everybody waits for what comes after. Eight warps take half of a
 *   multiprocessor where that is enough for their rings, so that the blocks of the next call are
 *   there when this one ends, or two of this one; sixteen, which are better at long calls, take all
 *   of it, or half with two slabs at a time and without a warp that adds up.
 * - A lane owns whole groups: lane (g, t) reads the words of group t of rows g and g + 8, 4 weights
 *   of each row for a step of 16 columns, so that a block scale is decoded once for its 16 weights.
 *   The columns of x are taken in that order: two loads of 16 bytes for 64 columns of a token.
 * - A warp of its own adds up the sums of a round while the others multiply the next; those of the
 *   last are added by all. Sums of warps, then of blocks, are added in one order, whatever the
 *   timing. How K is split depends on the number of tokens, so the bits of a row may, too.
 *
 * The FP8 kernel for a few tokens (sm90_fp8_decode.cu) has the same parts, but weights that need no
 * decoder: there warps share stages, a producer fills them, and x is quantized ahead of the
 * products.
 *
 * Measured (H200, in a graph): see docs/lab.md. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/sm90_nvfp4_decode.h"
#include "cuda/tensor_map.h"

#include <math.h>

#define SHORT       2048 /* columns up to which fewer than 8 warps may share K */
#define DECLARED    1152 /* bytes of shared memory declared in the kernel */
#define MOST_ALONE  4    /* tokens whose x comes to stages by lanes, more in boxes */
#define MANY_STAGES 8    /* of a warp: x had better stay */
static_assert(sizeof(barriers) <= DECLARED, "more is declared");

/* ---- sums and outputs ---- */

static __device__ __forceinline__ float2 load_sums(uint32_t from) {
    uint2 v = load_shared_pair(from);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

static __device__ __forceinline__ void store_sums(uint32_t to, float x, float y) {
    store_shared_pair(to, make_uint2(__float_as_uint(x), __float_as_uint(y)));
}

/* Leaves a warp's sums where they are brought together: [pair of tokens][row_pitch], `parked` the
 * lane's first. */
template <class S>
static __device__ __forceinline__ void park_sums(uint32_t parked, int pairs, int lane,
                                                 const sums<S> &sum) {
#pragma unroll
    for (int tile = 0; tile < S::tiles; tile++) {
        if (4 * tile + lane % 4 >= pairs)
            continue;
#pragma unroll
        for (int slab = 0; slab < S::slabs; slab++) {
            uint32_t to = parked + (4 * tile * S::row_pitch + slab * MOQ_PACK_ROWS) * 8;
            const float (&d)[4] = sum[slab][tile];
            store_sums(to, d[0], d[1]);
            store_sums(to + 64, d[2], d[3]);
        }
    }
}

/* Adds up what the warps that share K have of a pair. */
template <int WARPS>
static __device__ __forceinline__ float2 gather(const decode_args *a, uint32_t parked) {
    float2 v[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        v[i] = i < 1 << a->log_parts ? load_sums(parked + (uint32_t)(i * a->parked_bytes))
                                     : make_float2(0, 0);
#pragma unroll
    for (int half = WARPS / 2; half; half /= 2) {
#pragma unroll
        for (int i = 0; i < WARPS / 2; i++) {
            if (i < half) {
                v[i].x += v[i + half].x;
                v[i].y += v[i + half].y;
            }
        }
    }
    return v[0];
}

/* A thread's row of a round. */
typedef struct {
    int row, n;
    bool meant;
    float factor, bias;
} output_row;

static __device__ __forceinline__ output_row output_of(const decode_args *a, int slab, int slabs,
                                                       int row) {
    output_row o;
    o.row = row;
    o.n = slab * MOQ_PACK_ROWS + row;
    o.meant = o.n < a->n && row < slabs * MOQ_PACK_ROWS;
    o.factor = o.meant ? a->output_scale[o.n] * MOQ_NVFP4_FACTOR : 0;
    o.bias = 0;
    return o;
}

/* The bias, unlike scales, may be the work of the kernel before: not until that has ended. */
static __device__ __forceinline__ void fetch_bias(const decode_args *a, output_row *o) {
    if (o->meant)
        o->bias = moq_load_bias(&a->out, o->n);
}

/* Where the sums of a thread's row of a round are brought together. Found before they are there:
 * what is done after that, everybody waits for.
 *
 * What the blocks of a cluster send each other is in boxes, [ranks][pairs][rows of a block], used
 * in turn: whoever has all of a box knows that the one before has been read. */
typedef struct {
    uint32_t parked;      /* by the first of the warps that share K */
    uint32_t box, posted; /* this block's, and its barrier */
    uint32_t to, bar;     /* the block's that has the row, for this block's sums */
    int parity;
    bool owned;     /* the row is this block's */
    int pair, step; /* of tokens: the thread's first, and from one to the next */
    int box_size;   /* from rank to rank */
} meeting;

template <class S>
static __device__ __forceinline__ meeting meeting_of(const decode_args *a, uint32_t smem,
                                                     uint32_t posted, int group, int round,
                                                     int slabs, int row) {
    meeting m = {};
    m.step = 1;
    m.parked = smem + (uint32_t)(a->parked_at + (round & 1) * a->parked_turn +
                                 (group << a->log_parts) * a->parked_bytes + row * 8);
    if (a->log_ranks) {
        int own = slabs * (MOQ_PACK_ROWS / MAX_RANKS), owner = row >= own, rank = rank_of(a);
        int pairs = (a->m + 1) / 2;
        m.box_size = S::rank_rows * pairs * 8;
        m.box = smem +
                (uint32_t)(a->inbox_at + ((round & 1) * S::rows * pairs + row - owner * own) * 8);
        m.posted = posted + 8u * (round & 1);
        m.parity = round >> 1 & 1;
        m.owned = owner == rank;
        m.to = address_in((uint32_t)owner, m.box + (uint32_t)(rank * m.box_size));
        m.bar = address_in((uint32_t)owner, m.posted);
    }
    return m;
}

/* Adds up what came of a pair. */
static __device__ __forceinline__ float2 add_ranks(uint32_t box, int size) {
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < MAX_RANKS; i++) {
        float2 v = load_sums(box + (uint32_t)(i * size));
        sum.x += v.x;
        sum.y += v.y;
    }
    return sum;
}

template <class S>
static __device__ __forceinline__ void store_pair(const decode_args *a, const output_row *o,
                                                  int pair, float2 value) {
    moq_output out = a->out;
    out.dtype = S::type == MOQ_NVFP4_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    if (!o->meant)
        return;
    moq_store_output(&out, 2 * pair, o->n, value.x * o->factor, o->bias);
    if (2 * pair + 1 < a->m)
        moq_store_output(&out, 2 * pair + 1, o->n, value.y * o->factor, o->bias);
}

/* Brings the sums of a row together, of every `step`th pair, and writes them or sends them to the
 * block that does. */
template <class S>
static __device__ __forceinline__ void gather_row(const decode_args *a, const meeting *m, int slabs,
                                                  const output_row *o) {
    int pairs = (a->m + 1) / 2;
    if (o->row >= slabs * MOQ_PACK_ROWS)
        return;
#pragma unroll 1
    for (int pair = m->pair; pair < pairs; pair += m->step) {
        float2 v = gather<S::warps>(a, m->parked + (uint32_t)(pair * S::row_pitch * 8));
        if (a->log_ranks)
            send_pair(m->to + (uint32_t)(pair * S::rank_rows * 8), v, m->bar);
        else
            store_pair<S>(a, o, pair, v);
    }
}

/* Writes what has come of a row of this block's. */
template <class S>
static __device__ __forceinline__ void write_row(const decode_args *a, const meeting *m, int slabs,
                                                 const output_row *o) {
    int pairs = (a->m + 1) / 2;
    if (!m->owned || o->row >= slabs * MOQ_PACK_ROWS)
        return;
    mbarrier_wait(m->posted, m->parity);
#pragma unroll 1
    for (int pair = m->pair; pair < pairs; pair += m->step)
        store_pair<S>(a, o, pair,
                      add_ranks(m->box + (uint32_t)(pair * S::rank_rows * 8), m->box_size));
}

/* Bytes that this block is sent of a round. */
static __device__ __forceinline__ void expect_sums(const decode_args *a, uint32_t posted,
                                                   int slabs) {
    mbarrier_expect(posted, slabs * MOQ_PACK_ROWS * ((a->m + 1) / 2) * 8);
}

/* Sums of all rounds but the last, by a warp of its own. */
template <class S>
static __device__ __forceinline__ void finish_rounds(const decode_args *a, uint32_t smem,
                                                     barriers *bar) {
    constexpr int ROWS = (S::rows + 31) / 32; /* of a lane */
    int lane = threadIdx.x % 32, groups = S::warps >> a->log_parts;
    uint32_t posted = shared_address(bar->posted);
    int most = share_of<S>(a, 0, 0).rounds;
#pragma unroll 1
    for (int i = 0; i < (most - 1) * groups; i++) {
        int round = i / groups, group = i % groups;
        share s = share_of<S>(a, 0, group);
        if (round + 1 >= s.rounds)
            continue;
        int slab = first_of(&s, round), slabs = slabs_of(&s, round);
        output_row o[ROWS];
        meeting m[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            o[j] = output_of(a, slab, slabs, lane + 32 * j);
            m[j] = meeting_of<S>(a, smem, posted, group, round, slabs, lane + 32 * j);
            fetch_bias(a, &o[j]);
        }
        if (a->log_ranks && lane == 0)
            expect_sums(a, m[0].posted, slabs);
        mbarrier_wait(shared_address(&bar->parked[group][round & 1]), round >> 1 & 1);
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            gather_row<S>(a, &m[j], slabs, &o[j]);
#pragma unroll
        for (int j = 0; j < ROWS && a->log_ranks; j++)
            write_row<S>(a, &m[j], slabs, &o[j]);
        warp_releases<false>(shared_address(&bar->free[group][round & 1]));
    }
}

/* Those of the last round, by all warps that share K. The boxes of a cluster are used in turn, so
 * the round before has to be done. */
template <class S>
static __device__ __forceinline__ void finish_last(const decode_args *a, const meeting *m,
                                                   barriers *bar, const share *s, int group,
                                                   const output_row *o) {
    int last = s->rounds - 1, slabs = slabs_of(s, last);
    if (a->log_ranks && threadIdx.x == 0)
        expect_sums(a, m->posted, slabs);
    if (a->log_ranks && last > 0)
        mbarrier_wait(shared_address(&bar->free[group][~last & 1]), (last - 1) >> 1 & 1);
    mbarrier_wait(shared_address(&bar->parked[group][last & 1]), last >> 1 & 1);
    gather_row<S>(a, m, slabs, o);
    if (a->log_ranks)
        write_row<S>(a, m, slabs, o);
}

/* ---- the kernel ---- */

static __device__ __forceinline__ void init_barriers(const decode_args *a, barriers *bar,
                                                     int lane) {
    if (lane < 2 * MAX_GROUPS) {
        mbarrier_init(shared_address(&bar->parked[0][lane]), WARP_ARRIVALS << a->log_parts);
        mbarrier_init(shared_address(&bar->free[0][lane]), WARP_ARRIVALS);
    }
    if (lane < MAX_PARTS)
        mbarrier_init(shared_address(&bar->kept[lane]), 1);
    if (lane < 2)
        mbarrier_init(shared_address(&bar->posted[lane]), 1);
}

/* The way of a warp through its slabs and columns; sums are left where they are brought together.
 */
template <class S>
static __device__ __forceinline__ void
multiply_rounds(const decode_args *a, const CUtensorMap *tokens, uint32_t smem, barriers *bar,
                const ring *r, const share *s, const piece_of_x *piece, cursor *next, int warp) {
    int group = warp >> a->log_parts, pairs = (a->m + 1) / 2;
    uint32_t parked_bar = shared_address(bar->parked[group]);
    uint32_t free_bar = shared_address(bar->free[group]);
    uint32_t parked = smem + (uint32_t)(a->parked_at + warp * a->parked_bytes +
                                        (r->lane % 4 * S::row_pitch + r->lane / 4) * 8);
    find_now(parked);
    lane_places<S> places = places_of<S>(a, r);
    ring_place place = {0, 0};
#pragma unroll 1
    for (int round = 0; round < s->rounds; round++) {
        int slabs = slabs_of(s, round);
        sums<S> sum = {};
#pragma unroll 1
        for (int done = 0; done < s->count; done += a->turn) {
            mbarrier_wait(r->full + 8u * place.index, place.parity);
            multiply_slabs<S, S::slabs>(a, places, place.index, done, min(a->turn, s->count - done),
                                        slabs, sum);
            warp_meets();
            if (is_meant(s, next)) {
                fetch_weights<S>(a, s, r, next, place.index);
                if (!a->x_stays)
                    fetch_columns<S>(a, tokens, s, r, piece, next->done, place.index);
                advance_cursor(a, s, next);
            }
            advance(&place, a->stages);
        }
        if (round > 1)
            mbarrier_wait(free_bar + 8u * (round & 1), (round >> 1 & 1) ^ 1);
        park_sums<S>(parked + (uint32_t)((round & 1) * a->parked_turn), pairs, r->lane, sum);
        warp_releases<false>(parked_bar + 8u * (round & 1));
    }
}

template <class S>
static __global__ void __launch_bounds__(S::threads, S::at_once)
    nvfp4_decode(const __grid_constant__ CUtensorMap tokens,
                 const __grid_constant__ decode_args args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ barriers bar;
    const decode_args *a = &args;
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32;
    launch_dependents();
    bool adds = S::adder && warp == S::warps; /* up sums, and has no part of W */
    int part = warp & ((1 << a->log_parts) - 1), group = warp >> a->log_parts;
    ring r;
    r.lane = lane;
    uint32_t smem = shared_address(shared);
    r.stages = smem + (uint32_t)(warp * a->warp_bytes);
    r.full = shared_address(bar.stage + warp * S::max_stages);
    r.x = a->x_stays ? smem + (uint32_t)(a->x_at + part * a->m * a->x_pitch)
                     : r.stages + (uint32_t)(a->stages * WEIGHTS);
    r.policy = policy_evict_first();
    if (adds) {
        init_barriers(a, &bar, lane);
    } else {
        if (!S::adder && warp == 0)
            init_barriers(a, &bar, lane);
        if (lane < a->stages) /* weights, and lanes with their part of x */
            mbarrier_init(r.full + 8u * lane, a->x_stays ? 1 : 1 + 32);
    }
    mbarrier_init_fence();
    barriers_are_ready(2, S::threads);
    if (in_cluster(a))
        cluster_arrive();
    if (a->boxes && threadIdx.x == 0)
        prefetch_map(&tokens);

    share s = {};
    if (!adds)
        s = share_of<S>(a, part, group);
    cursor next = start_of(a, &s, lane);
    int fresh = 0; /* stages */
    for (; fresh < a->stages && is_meant(&s, &next); fresh++) {
        fetch_weights<S>(a, &s, &r, &next, fresh);
        advance_cursor(a, &s, &next);
    }
    piece_of_x piece = piece_of(a, &s, &r);
    tokens_of_x all = all_of(a, &s, &r);
    int threads = 32 << a->log_parts, index = (int)threadIdx.x & (threads - 1);
    int last = s.rounds - 1;
    int slabs = s.rounds ? slabs_of(&s, last) : 0;
    output_row out = output_of(a, first_of(&s, last), slabs, index % S::rows);
    meeting meets = meeting_of<S>(a, smem, shared_address(bar.posted), group, last, slabs, out.row);
    meets.pair = index / S::rows;
    meets.step = threads / S::rows;
    find_now(meets.parked);
    find_now(meets.to);
    find_now(meets.bar);
    find_now(meets.box);
    find_now(meets.pair);
    find_now(out.row);
    find_now(out.n);
    if (a->x_stays && group == 0)
        clear_rest(a, &s, &r);
    barrier_sync(1, S::threads);
    if (in_cluster(a))
        cluster_wait();
    wait_for_predecessor();
    if (adds) {
        finish_rounds<S>(a, smem, &bar);
        return;
    }
    uint32_t kept = shared_address(&bar.kept[part]);
    if (!a->x_stays)
        fetch_fresh(a, &piece, &s, &r, fresh);
    else if (group == 0)
        fetch_all(a, &all, lane, kept);
    fetch_bias(a, &out);
    if (a->x_stays)
        mbarrier_wait(kept, 0);
    multiply_rounds<S>(a, &tokens, smem, &bar, &r, &s, &piece, &next, warp);
    if (s.rounds)
        finish_last<S>(a, &meets, &bar, &s, group, &out);
}

/* ---- ways ---- */

/* A way to run a call: also by two blocks of a multiprocessor, of eight warps each. */
typedef struct {
    int warps, slabs, log_ranks, log_parts;
    bool share, two;
} way;

static int quotient_up(int a, int b) {
    return (a - 1) / b + 1;
}

/* Of the warps that have most: blocks of K, slabs, and rounds. */
static int most_blocks(const decode_args *a) {
    return a->blocks + (a->more_blocks > 0);
}

static int most_slabs(const decode_args *a, const way *w) {
    return quotient_up(a->slabs + (a->more_slabs > 0), w->warps >> w->log_parts);
}

static int rounds_of(const decode_args *a, const way *w) {
    return quotient_up(most_slabs(a, w), w->slabs);
}

/* Shares rows and K out. */
static void share_out(decode_args *a, const way *w, int sm_count) {
    int slabs = quotient_up(a->n, MOQ_PACK_ROWS), blocks = (int)moq_pack_blocks(a->k);
    int parts = 1 << (w->log_ranks + w->log_parts);
    a->log_ranks = w->log_ranks;
    a->log_parts = w->log_parts;
    a->share = w->share;
    a->blocks = blocks / parts;
    a->more_blocks = blocks % parts;
    a->clusters = min((sm_count << w->two) >> w->log_ranks, slabs);
    a->slabs = slabs / a->clusters;
    a->more_slabs = slabs % a->clusters;
    a->slab_bytes = blocks * (int64_t)MOQ_PACK_BYTES;
    int most = most_blocks(a);
    a->turn = quotient_up(most, quotient_up(most, STAGE_UNITS / w->slabs));
    a->x_pitch = most * X_BLOCK + 16;
}

/* Shares `room` bytes out: x where it stays, the stages of all warps, sums, which of a single round
 * go where the rings were, and boxes. As many stages as are of use, or none without two where x
 * stays. */
static void lay_out(decode_args *a, const way *w, int room, bool stays) {
    int rounds = rounds_of(a, w), pairs = (a->m + 1) / 2;
    int rows = w->slabs * MOQ_PACK_ROWS, parked = pairs * (rows + 4) * 8;
    int boxes = w->log_ranks ? 2 * rows * pairs * 8 : 0;
    int needed = min(rounds * quotient_up(most_blocks(a), a->turn), STAGES / w->warps);
    int x = stays ? a->m * a->x_pitch << w->log_parts : 0;
    a->x_stays = stays;
    a->boxes = !stays && a->m > MOST_ALONE;
    a->x_rows = a->boxes ? quotient_up(a->m, 8) * 8 : a->m;
    a->x_stage = stays ? 0 : a->turn * a->x_rows * X_BLOCK;
    int stage = WEIGHTS + a->x_stage, each = (room - boxes - x) / w->warps;
    a->stages = min(needed, each / stage);
    bool alias = rounds == 1 && a->stages * stage >= parked;
    if (!alias)
        a->stages = min(needed, (each - 2 * parked) / stage);
    if (each < 0 || a->stages < (stays ? min(needed, 2) : 1))
        a->stages = 0;
    a->warp_bytes = a->stages * stage;
    a->x_at = w->warps * a->warp_bytes;
    a->parked_at = alias ? 0 : a->x_at + x;
    a->parked_bytes = alias ? a->warp_bytes : parked;
    a->parked_turn = alias ? 0 : w->warps * parked;
    a->inbox_at = a->x_at + x + (alias ? 0 : 2 * a->parked_turn);
    a->shared = a->inbox_at + boxes;
}

/* Dynamic bytes of a block that has a multiprocessor of compute capability 9.0 to itself, and of
 * one that leaves half. */
#define WHOLE_SHARED (232448 - DECLARED)
#define HALF_SHARED  ((232448 + 1024) / 2 - 1024 - DECLARED)

/* Whether room is left for another block, of this call or the next. */
static bool is_half(const way *w) {
    return w->warps == 8 || !has_adder(w->warps, w->slabs);
}

/* Everything about a call that its way decides, or false where it cannot be done so. x stays where
 * it is read more than once, or together, or comes in many stages, which costs their warps time,
 * and fits. Eight warps take half of a multiprocessor if that gives each two stages. */
static bool arrange(decode_args *a, const way *w, int sm_count) {
    share_out(a, w, sm_count);
    int rounds = rounds_of(a, w), stages = rounds * quotient_up(most_blocks(a), a->turn);
    bool only_half = w->two || (w->warps == 16 && is_half(w)), optional = rounds == 1 && !w->share;
    if (rounds > 1 && !has_adder(w->warps, w->slabs))
        return false;
    for (int stays = !optional || !is_half(w) || stages >= MANY_STAGES; stays >= w->share;
         stays--) {
        if (is_half(w)) {
            lay_out(a, w, HALF_SHARED, stays);
            if (a->stages >= (only_half ? 1 : min(stages, 2)))
                return true;
        }
        if (only_half || (is_half(w) && optional && stays))
            continue;
        lay_out(a, w, WHOLE_SHARED, stays);
        if (a->stages)
            return true;
    }
    return false;
}

/* Microseconds of a multiprocessor for a unit and for a stage, and before the first. */
typedef struct {
    double unit, stage, start;
} costs;

static costs costs_of(const way *w) {
    static const costs EIGHT[3] = {
        {0.0121, 0.03187, 1.147}, {0.01149, 0.03616, 1.185}, {0.009743, 0.06943, 1.139}};
    static const costs TWO[2] = {{0.004815, 0.01386, 2.877}, {0.01042, 0.01871, 2.591}};
    static const costs SIXTEEN[3] = {
        {0.009447, 0.07267, 1.157}, {0.005173, 0.008541, 3.416}, {0.01188, 0.01309, 2.888}};
    return w->two ? TWO[w->slabs / 8] : w->warps > 8 ? SIXTEEN[w->slabs / 4] : EIGHT[w->slabs / 4];
}

/* Microseconds of a call, fitted to 1179 times of up to 8 tokens on an H200 (docs/lab.md), 5 % off
 * in the mean where the way is near the best; the choice costs 0.6 %. Products, W from memory and
 * the warp that adds up go on beside each other; before them the start and x, after them the ends
 * of rounds. Two tiles of tokens take up to half as long again. */
static double estimate(const decode_args *a, const way *w) {
    costs c = costs_of(w);
    bool half = is_half(w);
    int most = most_blocks(a), slabs = most_slabs(a, w), rounds = rounds_of(a, w);
    double warps = w->warps << w->two, columns = (double)most * a->m * X_BLOCK;
    double products =
        warps * (slabs * most * c.unit + rounds * quotient_up(most, a->turn) * c.stage);
    double memory = (double)a->n * a->k * 0.5625 / 4.39e6 * 1.067;
    double before = c.start + w->share * 0.03151 + (half ? 0 : w->log_ranks * 0.3487) +
                    (half && a->shared > HALF_SHARED ? 1.256 : 0);
    if (a->x_stays) {
        before += columns * (1 << w->log_parts) *
                  (w->share ? 1.261e-5
                   : half   ? 2.026e-5
                            : 6.748e-6);
    } else {
        columns *= rounds;
        double fresh = fmin(columns, (double)a->stages * a->turn * a->m * X_BLOCK);
        products += warps * (fresh * 1.495e-5 + (columns - fresh) * (a->boxes ? 1.207e-5
                                                                     : half   ? 5.918e-5
                                                                              : 5.507e-5));
        memory += warps * columns * 5.197e-6;
    }
    double added = (double)(rounds - 1) * (w->warps >> w->log_parts) *
                   quotient_up(quotient_up(slabs, rounds), 2) * ((a->m + 1) / 2);
    double adding = added * (0.6943 + 0.005071 * (1 << w->log_parts)) * (w->log_ranks ? 1.054 : 1);
    double ends = rounds * (0.3161 + w->log_ranks * 0.01513);
    double hides = fmin(1, (double)a->k / 2048); /* outputs of more tokens, behind products */
    ends += 6.8e-6 * (a->m - 1) * a->n * (1 - hides * hides * hides);
    double all = before + ends + sqrt(sqrt(pow(products, 4) + pow(memory, 4) + pow(adding, 4)));
    return a->m > 8 ? 1.5 * all : all;
}

/* Of K in full for all warps of a block, then of short K. Rows have to be enough for all threads
 * that add up; two tiles of tokens have one kernel. */
static const way WAYS[] = {
    {8, 2, 0, 3},
    {8, 4, 0, 3},
    {8, 8, 0, 3},
    {8, 2, 1, 3},
    {8, 4, 1, 3},
    {8, 8, 1, 3},
    {8, 2, 0, 3, true},
    {8, 4, 0, 3, true},
    {8, 8, 0, 3, true},
    {16, 4, 0, 4},
    {16, 4, 0, 3},
    {16, 4, 1, 4},
    {16, 8, 1, 4},
    {16, 2, 0, 4},
    {16, 2, 1, 4},
    {8, 4, 0, 3, false, true},
    {8, 8, 0, 3, false, true},
    {8, 4, 1, 3, false, true},
    {8, 8, 1, 3, false, true},
    {8, 4, 0, 3, true, true},
    {8, 8, 0, 3, true, true},
    {8, 2, 0, 2},
    {8, 4, 0, 2},
    {8, 8, 0, 2},
    {8, 2, 0, 2, true},
    {8, 4, 0, 2, true},
    {8, 8, 0, 2, true},
    {8, 2, 0, 1},
    {8, 4, 0, 1},
    {8, 2, 0, 1, true},
    {8, 4, 0, 1, true},
};

enum { WAY_COUNT = sizeof WAYS / sizeof *WAYS };
static_assert(WAY_COUNT < 64, "a bit for each, and one for the choice");

static bool suits(const way *w, const decode_args *a) {
    return (w->log_parts >= 3 || a->k <= SHORT) && (a->m <= 8 || (w->warps == 8 && w->slabs == 4));
}

static double seconds_of(decode_args *a, const way *w, int sm_count) {
    return suits(w, a) && arrange(a, w, sm_count) ? 1e-6 * estimate(a, w) : INFINITY;
}

/* The best of all ways. */
static const way *way_of(decode_args *a, int sm_count, double *seconds) {
    const way *best = WAYS;
    *seconds = INFINITY;
    for (int i = 0; i < WAY_COUNT; i++) {
        double t = seconds_of(a, &WAYS[i], sm_count);
        if (t < *seconds) {
            *seconds = t;
            best = &WAYS[i];
        }
    }
    return best;
}

/* ---- launch ---- */

template <int WARPS, int SLABS, int TILES> static const void *kernel_of(moq_dtype dtype) {
    return dtype == MOQ_DT_F16
               ? (const void *)nvfp4_decode<shape<WARPS, SLABS, TILES, MOQ_NVFP4_F16>>
               : (const void *)nvfp4_decode<shape<WARPS, SLABS, TILES, MOQ_NVFP4_BF16>>;
}

static const void *kernel_for(const way *w, const moq_linear_call *call) {
    moq_dtype dtype = call->spec->dtype;
    if (w->warps == 16)
        return w->slabs == 2   ? kernel_of<16, 2, 1>(dtype)
               : w->slabs == 4 ? kernel_of<16, 4, 1>(dtype)
                               : kernel_of<16, 8, 1>(dtype);
    if (call->m > 8)
        return kernel_of<8, 4, 2>(dtype);
    return w->slabs == 2   ? kernel_of<8, 2, 1>(dtype)
           : w->slabs == 4 ? kernel_of<8, 4, 1>(dtype)
                           : kernel_of<8, 8, 1>(dtype);
}

static decode_args args_of(const moq_linear_spec *spec, int64_t m) {
    decode_args args = {.m = (int)m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    return args;
}

extern "C" double moq_cuda_nvfp4_decode_seconds(const moq_linear_spec *spec, int64_t m) {
    decode_args args = args_of(spec, m);
    double seconds;
    way_of(&args, spec->target.sm_count, &seconds);
    return seconds;
}

extern "C" int32_t moq_cuda_nvfp4_decode_choose(const moq_linear_spec *spec, int64_t m) {
    decode_args args = args_of(spec, m);
    double seconds;
    return (int32_t)(way_of(&args, spec->target.sm_count, &seconds) - WAYS) + 1;
}

/* The choice, and the ways that are not expected to take half as long again. */
extern "C" uint64_t moq_cuda_nvfp4_decode_variants(const moq_linear_call *call) {
    int sm_count = call->spec->target.sm_count;
    decode_args args = args_of(call->spec, call->m);
    double best;
    uint64_t some = 1;
    way_of(&args, sm_count, &best);
    for (int i = 0; i < WAY_COUNT; i++)
        if (seconds_of(&args, &WAYS[i], sm_count) < 1.5 * best)
            some |= 2ull << i;
    return some;
}

extern "C" moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_device device;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    decode_args args = args_of(spec, call->m);
    int which = call->variant - 1;
    double seconds;
    const way *w = which >= 0 && which < WAY_COUNT && suits(&WAYS[which], &args)
                       ? &WAYS[which]
                       : way_of(&args, device.sm_count, &seconds);
    if (!arrange(&args, w, device.sm_count))
        arrange(&args, w = way_of(&args, device.sm_count, &seconds), device.sm_count);
    args.weight = call->weight;
    args.output_scale = call->output_scale;
    args.x = moq_rows_of(call->x);
    args.out = moq_output_of(call);
    CUtensorMap tokens = {};
    if (args.boxes)
        MOQ_TRY(moq_tensor_map_rows(&tokens, args.x.data, args.m, 2 * spec->in_features,
                                    2 * args.x.stride, (uint32_t)args.x_rows, err));
    unsigned cluster = in_cluster(&args) ? 2 : 1;
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = kernel_for(w, call),
                         .grid = dim3(((unsigned)device.sm_count << w->two) / cluster * cluster),
                         .block = dim3((unsigned)(32 * (w->warps + has_adder(w->warps, w->slabs)))),
                         .cluster = cluster > 1 ? cluster : 0,
                         .shared = (size_t)args.shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&tokens, &args};
    return moq_cuda_launch(&launch, parameters, err);
}
