/* FP8 linear for a few tokens on Hopper: y[m, n] = round(sx * wx[n] * sum_k X[m, k] W[n, k] +
 * bias[n]).
 *
 * W is e4m3 [N, K] as the checkpoint has it, X the activations of at most 16 tokens, quantized here
 * to e4m3 as the layer prescribes (one scale, one a token, or one for 128 columns). What bounds it
 * is the time to read W once, so everything serves to keep the memory busy: one block a
 * multiprocessor, a producer that copies W through a ring of stages and never looks at x, 16 warps
 * that multiply.
 *
 * - A tile is 16 rows of W, a step 512 columns of it: 8 boxes of 8 rows x 128 bytes in the 128-byte
 *   swizzle, [half of the rows][128 columns][8][128]. To wgmma these are 64 "rows" of one operand:
 *   the 16 rows four times, each time with other 128 columns. The other operand has the tokens four
 *   times likewise. Of the product only the blocks where both columns agree are meant; the rest
 *   costs nothing, the tensor cores idle here. So a tile is small enough for 132 blocks to share
 * any N evenly, K is split within the block, and no weight passes through a register.
 * - FP8 wgmma keeps about 14 bits of its sums, so every 128 columns they are added to float32 ones.
 *   Block scales are applied there.
 * - Warpgroup i takes the steps i, i + 4, ... of a round of tiles; their sums meet in shared
 * memory, in one order, whatever the timing. A stage belongs to one warpgroup for good, since the
 * stages are a multiple of four: a group that skipped a phase of a barrier could not tell it from
 * the next.
 * - Every block reads all of x, from L2, which bounds it where x is long: there two blocks of a
 *   cluster share the rows of W and halve K, and send each other their sums.
 * - x must fit beside the ring. Where it does not, K is done in passes, with the sums kept
 *   meanwhile.
 * - W is constant, so the ring is filled before the preceding kernel has ended (dependent launch).
 *
 * Measured (H200, in a graph): see docs/lab.md. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/load.h"
#include "cuda/ptx.h"
#include "cuda/sm90_fp8_decode.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.h"

#define THREADS   (CONSUMERS + 128) /* the producer's warpgroup gives its registers away */
#define TILE      16                /* rows of W */
#define STAGE     (TILE * STEP)
#define MAX_STAGE 28
#define BARRIERS  (2 * MAX_STAGE + 3)
/* A round: tiles whose sums are brought together at once, two outputs a thread. */
#define ROUND(MT)      (2 * GROUPS / (MT))
#define ROUND_ROWS(MT) (TILE * ROUND(MT))
#define PARKED_BYTES   (2 * GROUPS * WARPS * 32 * 8)
#define BOX_BYTES      (CONSUMERS * 8)
#define KEPT_ROUNDS    8 /* of a block, where there are passes */
/* Stages on their way at once: enough for the memory's latency. More would only queue, and reads
 * of x behind them. */
#define FLIGHT 6

/* ---- the producer ---- */

/* Where the producer is. */
typedef struct {
    const CUtensorMap *map;
    ring_place place, landed; /* the next stage, and the one that is waited for */
    int flying;               /* stages before `place` */
} producer;

static __device__ __forceinline__ void produce_tile(const decode_args *a, const block_memory *b,
                                                    producer *p, int row, int end, int pass) {
    uint64_t policy = policy_evict_first();
    int steps = steps_of(a, pass), halves = end - row > UNIT ? 2 : 1;
    int block = first_column(a, pass) / 128;
#pragma unroll 1
    for (int step = 0; step < steps; step++, block += SLICES) {
        int index = p->place.index;
        uint32_t stage = b->ring + (uint32_t)(index * STAGE), bar = b->full + 8u * index;
        mbarrier_wait(b->empty + 8u * index, p->place.parity ^ 1);
        if (++p->flying > a->flight) {
            mbarrier_wait(b->full + 8u * p->landed.index, p->landed.parity);
            advance(&p->landed, a->stages);
        }
        mbarrier_expect(bar, (uint32_t)(halves * STAGE / 2));
        copy_box_3d(stage, p->map, 0, row, block, bar, policy);
        if (halves == 2)
            copy_box_3d(stage + STAGE / 2, p->map, 0, row + UNIT, block, bar, policy);
        advance(&p->place, a->stages);
    }
}

static __device__ __forceinline__ void produce(const decode_args *a, const CUtensorMap *map,
                                               const block_memory *b) {
    producer p = {map};
    segment rest = cluster_rows(a);
    while (rest.begin < rest.end) {
        segment s = first_segment(a, rest);
        for (int pass = 0; pass < a->passes; pass++) {
#pragma unroll 1
            for (int row = s.begin; row < s.end; row += TILE)
                produce_tile(a, b, &p, row, s.end, pass);
        }
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

/* ---- products ---- */

template <int MT> struct product {
    float d[16 * MT]; /* m64 x n(32 * MT): [slice of the column][8 tokens][4] */
};

/* Adds the meant blocks of a step to the warp's sums, [8 tokens][2]. A warp has rows g and g + 8 of
 * the operand: one row of W, in slices 2 * odd and 2 * odd + 1. */
template <int MT>
static __device__ __forceinline__ void add_meant(float (&sum)[2 * MT], const product<MT> &c,
                                                 bool odd) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float even = c.d[4 * m + i] + c.d[4 * MT + 4 * m + 2 + i];
            float other = c.d[8 * MT + 4 * m + i] + c.d[12 * MT + 4 * m + 2 + i];
            sum[2 * m + i] += odd ? other : even;
        }
    }
}

/* The same under block scales: `x` points to those of the tokens in the warp's first slice, `w` are
 * those of W in its two. */
template <int MT>
static __device__ __forceinline__ void add_scaled(float (&sum)[2 * MT], const product<MT> &c,
                                                  bool odd, const float *x, float2 w) {
    int t = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float first = odd ? c.d[8 * MT + 4 * m + i] : c.d[4 * m + i];
            float second = odd ? c.d[12 * MT + 4 * m + 2 + i] : c.d[4 * MT + 4 * m + 2 + i];
            sum[2 * m + i] += first * (x[8 * m + t + i] * w.x);
            sum[2 * m + i] += second * (x[MAX_TOKENS + 8 * m + t + i] * w.y);
        }
    }
}

/* A step of a tile, in a stage of the ring. */
typedef struct {
    int tile, step;
    ring_place at;
    float2 w; /* block scales of the lane's row in the warp's two slices */
} tile_step;

/* What a warpgroup has to do in a round: of the steps of its tiles, in their order, each fourth.
 * Steps are dealt out over rounds and passes, so that a stage always comes to the same group; the
 * next two are found while others are multiplied. */
typedef struct {
    segment rows;
    int row, pass;    /* the first row of the round */
    int tiles, steps; /* of the round, of a tile */
    int left;         /* steps from the group's next one on */
    ring_place place; /* of the group */
    int tile, step;   /* the one after `next` */
    tile_step next[2];
} group_round;

/* The scales of W of a lane's row in its warp's two slices of a step; 0 beyond K. */
static __device__ __forceinline__ float2 block_scales(const decode_args *a, const group_round *r,
                                                      int tile, int step) {
    int warp = threadIdx.x / 32, all = a->k / 128;
    int row = r->row + tile * TILE + warp % 4 / 2 * UNIT + (int)threadIdx.x % 32 / 4;
    int slice = first_column(a, r->pass) / 128 + step * SLICES + 2 * (warp & 1);
    const float *block =
        a->block_scale +
        (int64_t)moq_block_row(&a->partitions, r->rows.partition, min(row, r->rows.end - 1)) * all;
    return make_float2(slice < all ? block[slice] : 0.0f,
                       slice + 1 < all ? block[slice + 1] : 0.0f);
}

template <int MODE>
static __device__ __forceinline__ void find_next(const decode_args *a, group_round *r, int left) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i * GROUPS >= left)
            break;
        r->next[i].tile = r->tile;
        r->next[i].step = r->step;
        r->next[i].at = r->place;
        if (MODE == MOQ_INPUT_E4M3_GROUP)
            r->next[i].w = block_scales(a, r, r->tile, r->step);
        r->place.index += GROUPS;
        if (r->place.index >= a->stages) {
            r->place.index -= a->stages;
            r->place.parity ^= 1;
        }
        r->step += GROUPS;
        while (r->step >= r->steps) {
            r->step -= r->steps;
            r->tile++;
        }
    }
}

/* The round from `row` on; `dealt` counts the steps of those before. */
template <int MT, int MODE>
static __device__ __forceinline__ void begin_round(const decode_args *a, group_round *r,
                                                   segment rows, int row, int pass, int *dealt) {
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    r->rows = rows;
    r->row = row;
    r->pass = pass;
    r->tiles = min(ROUND(MT), (rows.end - row + TILE - 1) / TILE);
    r->steps = steps_of(a, pass);
    r->tile = 0;
    r->step = (group - *dealt) & (GROUPS - 1);
    r->left = r->tiles * r->steps - r->step;
    *dealt += r->tiles * r->steps;
    while (r->step >= r->steps) {
        r->step -= r->steps;
        r->tile++;
    }
    find_next<MODE>(a, r, r->left);
}

/* Starts the product of a step, as soon as its stage is there. */
template <int MT>
static __device__ __forceinline__ void start_step(const block_memory *b, const tile_step *s,
                                                  product<MT> &c) {
    mbarrier_wait(b->full + 8u * s->at.index, s->at.parity);
    uint64_t w = wgmma_operand(b->ring + (uint32_t)(s->at.index * STAGE));
    uint64_t x = wgmma_operand(b->codes + (uint32_t)(s->step * SLICES * MT * 1024));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
        wgmma_e4m3(c.d, w + 2 * i, x + 2 * i, i);
    wgmma_commit();
}

/* A warp's sums of a tile, and the tile they are of. */
template <int MT> struct warp_sums {
    float of[2 * MT];
    int tile, warp;
};

/* Leaves the sums of tiles before `tile` where they are brought together: [tile][warp][m][lane]. */
template <int MT>
static __device__ __forceinline__ void park_sums(const block_memory *b, warp_sums<MT> &sum,
                                                 int tile) {
    for (; sum.tile < tile; sum.tile++) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
            b->parked[((sum.tile * WARPS + sum.warp) * MT + m) * 32 + threadIdx.x % 32] =
                make_float2(sum.of[2 * m], sum.of[2 * m + 1]);
            sum.of[2 * m] = sum.of[2 * m + 1] = 0;
        }
    }
}

/* Takes the product of a step that has ended, and gives the stage back. */
template <int MT, int MODE>
static __device__ __forceinline__ void end_step(const block_memory *b, const tile_step *s,
                                                const product<MT> &c, warp_sums<MT> &sum) {
    bool odd = sum.warp & 1;
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(b->empty + 8u * s->at.index);
    park_sums<MT>(b, sum, s->tile);
    if (MODE == MOQ_INPUT_E4M3_GROUP)
        add_scaled<MT>(sum.of, c, odd, b->scale + (s->step * SLICES + 2 * odd) * MAX_TOKENS, s->w);
    else
        add_meant<MT>(sum.of, c, odd);
}

/* Sums the products of a round and parks the sums. Steps are taken two at a time, so that one is
 * multiplied while the other is added. */
template <int MT, int MODE>
static __device__ __forceinline__ void sum_round(const decode_args *a, const block_memory *b,
                                                 group_round *r) {
    warp_sums<MT> sum = {};
    sum.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
#pragma unroll 1
    for (; r->left > GROUPS; r->left -= 2 * GROUPS) {
        product<MT> c[2];
        tile_step first = r->next[0], second = r->next[1];
        start_step<MT>(b, &first, c[0]);
        start_step<MT>(b, &second, c[1]);
        find_next<MODE>(a, r, r->left - 2 * GROUPS);
        wgmma_wait<1>();
        end_step<MT, MODE>(b, &first, c[0], sum);
        wgmma_wait<0>();
        end_step<MT, MODE>(b, &second, c[1], sum);
    }
    if (r->left > 0) {
        product<MT> c;
        start_step<MT>(b, &r->next[0], c);
        wgmma_wait<0>();
        end_step<MT, MODE>(b, &r->next[0], c, sum);
    }
    park_sums<MT>(b, sum, r->tiles);
}

/* ---- outputs ---- */

/* A thread's outputs of a round: two tokens of a row, as a lane of the products has them. */
typedef struct {
    int tile, half, m, lane;
} output_place;

template <int MT> static __device__ __forceinline__ output_place place_of(int index) {
    output_place o = {index / (64 * MT), index / 32 % 2, index / 64 % MT, index % 32};
    return o;
}

/* Adds up what the warps have of a thread's outputs. */
template <int MT> static __device__ __forceinline__ float2 gather_sums(const float2 *parked) {
    output_place o = place_of<MT>(threadIdx.x);
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++) {
        int warp = i / 2 * 4 + o.half * 2 + i % 2;
        float2 v = parked[((o.tile * WARPS + warp) * MT + o.m) * 32 + o.lane];
        sum.x += v.x;
        sum.y += v.y;
    }
    return sum;
}

/* What a thread's outputs of a round are multiplied by and added to, without the scale of x. */
typedef struct {
    int token, n; /* the first token */
    bool meant;
    float factor, bias;
} output_terms;

template <int MT, int MODE>
static __device__ __forceinline__ output_terms terms_of(const decode_args *a, segment s, int row) {
    int share = CONSUMERS >> a->log_ranks;
    output_place o = place_of<MT>(rank_of(a) * share + threadIdx.x);
    output_terms t;
    t.token = o.m * 8 + o.lane % 4 * 2;
    t.n = row + o.tile * TILE + o.half * UNIT + o.lane / 4;
    t.meant = threadIdx.x < share && t.token < a->m && t.n < s.end;
    t.factor = t.meant && MODE != MOQ_INPUT_E4M3_GROUP ? a->output_scale[t.n] : 1.0f;
    t.bias = t.meant ? moq_load_bias(&a->out, t.n) : 0.0f;
    return t;
}

template <int MODE>
static __device__ __forceinline__ void store_outputs(const decode_args *a, const float *scale,
                                                     const output_terms *t, float2 value) {
    moq_output out = a->out; /* of 16 bits, which the compiler does not know */
    out.dtype = out.dtype == MOQ_DT_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    if (!t->meant)
        return;
    if (MODE != MOQ_INPUT_E4M3_GROUP) {
        value.x *= scale[MODE == MOQ_INPUT_E4M3_TOKEN ? t->token : 0] * t->factor;
        value.y *= scale[MODE == MOQ_INPUT_E4M3_TOKEN ? t->token + 1 : 0] * t->factor;
    }
    moq_store_output(&out, t->token, t->n, value.x, t->bias);
    if (t->token + 1 < a->m)
        moq_store_output(&out, t->token + 1, t->n, value.y, t->bias);
}

/* Sends the sums of this block to the blocks whose outputs they are, and adds up what came for its
 * own. Boxes are used in turn, `posted` counts: whoever has all of a box knows that the one before
 * has been read. */
static __device__ __forceinline__ float2 exchange_sums(const decode_args *a, const block_memory *b,
                                                       int posted, float2 own) {
    int share = CONSUMERS >> a->log_ranks, box = posted & 1;
    uint32_t bar = b->posted + 8u * box, owner = threadIdx.x * a->ranks / CONSUMERS;
    const float2 *inbox = b->inbox + box * CONSUMERS;
    uint32_t to = shared_address(inbox + rank_of(a) * share + (threadIdx.x & (share - 1)));
    if (threadIdx.x == 0)
        mbarrier_expect(bar, BOX_BYTES);
    send_pair(address_in(owner, to), own, address_in(owner, bar));
    mbarrier_wait(bar, posted >> 1 & 1);
    float2 sum = {0, 0};
    if (threadIdx.x < share) {
#pragma unroll 1
        for (int i = 0; i < a->ranks; i++) {
            float2 v = inbox[i * share + threadIdx.x];
            sum.x += v.x;
            sum.y += v.y;
        }
    }
    return sum;
}

/* Brings the warps' sums of a round together; in the last pass writes the outputs. */
template <int MT, int MODE>
static __device__ __forceinline__ void finish_round(const decode_args *a, const block_memory *b,
                                                    const group_round *r, const output_terms *t,
                                                    int *posted) {
    float2 *kept = b->kept + (r->row - r->rows.begin) / ROUND_ROWS(MT) * CONSUMERS;
    float2 value = gather_sums<MT>(b->parked);
    if (r->pass > 0) {
        float2 before = kept[threadIdx.x];
        value.x += before.x;
        value.y += before.y;
    }
    if (r->pass + 1 < a->passes) {
        kept[threadIdx.x] = value;
        return;
    }
    if (a->ranks > 1)
        value = exchange_sums(a, b, (*posted)++, value);
    store_outputs<MODE>(a, b->scale, t, value);
}

/* ---- the kernel ---- */

/* Asks for what the outputs will need besides x, all of it constant, so that it is near when it is.
 */
template <int MODE>
static __device__ __forceinline__ void prefetch_scales(const decode_args *a, segment rest) {
    if (MODE != MOQ_INPUT_E4M3_GROUP) {
#pragma unroll 1
        for (int n = rest.begin + threadIdx.x * 32; n < rest.end; n += CONSUMERS * 32)
            prefetch_l2(a->output_scale + n);
        return;
    }
    int blocks = a->k / 128;
    while (rest.begin < rest.end) {
        segment s = first_segment(a, rest);
        int first = moq_block_row(&a->partitions, s.partition, s.begin);
        int last = moq_block_row(&a->partitions, s.partition, s.end - 1);
#pragma unroll 1
        for (int i = threadIdx.x * 32; i < (last - first + 1) * blocks; i += CONSUMERS * 32)
            prefetch_l2(a->block_scale + (int64_t)first * blocks + i);
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

/* Zeros where K ends within a step: W is zero there, x must be a number. */
template <int MT, int MODE>
static __device__ __forceinline__ void clear_codes(const decode_args *a, const block_memory *b) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a->pass_steps * SLICES * MT * 64; i += CONSUMERS)
        store_shared(b->codes + 16u * i, make_uint4(0, 0, 0, 0));
    if (MODE == MOQ_INPUT_E4M3_GROUP) {
#pragma unroll 1
        for (int i = threadIdx.x; i < a->pass_steps * SLICES * MAX_TOKENS; i += CONSUMERS)
            b->scale[i] = 0;
    }
}

template <int MT, int MODE>
static __device__ __forceinline__ void consume(const decode_args *a, const block_memory *b) {
    bool given = MODE == MOQ_INPUT_E4M3_TENSOR && a->input_scale;
    segment rest = cluster_rows(a);
    group_round r;
    r.place.index = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    r.place.parity = 0;
    int posted = 0, dealt = 0;
    if (a->k % STEP)
        clear_codes<MT, MODE>(a, b);
    prefetch_scales<MODE>(a, rest);
    for (bool fresh = true; rest.begin < rest.end; fresh = false) {
        segment s = first_segment(a, rest);
        if (given && threadIdx.x == 0) /* it belongs to the weights: no one is waited for */
            b->scale[0] = a->input_scale[s.partition];
        if (fresh || given)
            barrier_sync(1, CONSUMERS);
        for (int pass = 0; pass < a->passes; pass++) {
            output_terms terms = terms_of<MT, MODE>(a, s, s.begin);
            begin_round<MT, MODE>(a, &r, s, s.begin, pass, &dealt);
            if (fresh || given || a->passes > 1) {
                bool first = fresh && pass == 0;
                quantize_pass<MT, MODE>(a, b, pass, first && !given, first);
                fence_async_proxy();
                barrier_sync(1, CONSUMERS);
            }
            for (;;) {
                sum_round<MT, MODE>(a, b, &r);
                barrier_sync(1, CONSUMERS);
                finish_round<MT, MODE>(a, b, &r, &terms, &posted);
                int row = r.row + ROUND_ROWS(MT);
                if (row >= s.end)
                    break;
                terms = terms_of<MT, MODE>(a, s, row);
                begin_round<MT, MODE>(a, &r, s, row, pass, &dealt);
                barrier_sync(1, CONSUMERS); /* before the sums of others */
            }
            if (pass + 1 < a->passes || s.end < rest.end)
                barrier_sync(1, CONSUMERS); /* before the codes, or scales, of others */
        }
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

template <int MT, int MODE>
static __global__ void __launch_bounds__(THREADS, 1)
    fp8_decode(const __grid_constant__ CUtensorMap map, const __grid_constant__ decode_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ float scale[MAX_TOKENS];
    __shared__ uint32_t maxima[(1 + MAX_RANKS) * MAX_TOKENS];
    const decode_args *a = &args;
    block_memory b = {};
    b.full = shared_address(barrier);
    b.empty = b.full + 8 * MAX_STAGE;
    b.told = b.empty + 8 * MAX_STAGE;
    b.posted = b.told + 8;
    launch_dependents();
    if (threadIdx.x % 32 == 0) { /* one thread would take 2 us */
#pragma unroll
        for (int i = 0; i < BARRIERS; i += THREADS / 32) {
            int index = i + threadIdx.x / 32;
            if (index < BARRIERS)
                mbarrier_init(b.full + 8u * index,
                              index >= MAX_STAGE && index < 2 * MAX_STAGE ? 4 : 1);
        }
        mbarrier_init_fence();
    }
    if (threadIdx.x == CONSUMERS + 32)
        prefetch_map(&map);
    if (threadIdx.x < MAX_TOKENS)
        maxima[threadIdx.x] = 0;
    __syncwarp();
    if (a->ranks > 1)
        cluster_arrive();
    b.ring = shared_address(smem);
    b.codes = b.ring + a->codes_at;
    b.scale = MODE == MOQ_INPUT_E4M3_GROUP ? (float *)(smem + a->scales_at) : scale;
    b.maxima = maxima;
    b.all_maxima = a->ranks > 1 ? maxima + MAX_TOKENS : maxima;
    b.parked = (float2 *)(smem + a->parked_at);
    b.inbox = (float2 *)(smem + a->inbox_at);
    b.kept = (float2 *)(smem + a->kept_at);
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        more_registers<112>();
        if (threadIdx.x == 0 && a->ranks > 1)
            mbarrier_expect(b.told, a->ranks * MAX_TOKENS * 4);
        consume<MT, MODE>(a, &b);
    } else {
        fewer_registers<24>();
        if (threadIdx.x == CONSUMERS)
            produce(a, &map, &b);
    }
}

/* ---- launch ---- */

/* How many blocks share K. Two halve what each reads of x, and the room of its codes, for half a
 * microsecond of exchange: worth it where x is long, or would leave the ring little room. */
static int ranks_of(const decode_args *a, bool static_scale) {
    int64_t values = (int64_t)a->m * a->k * (static_scale ? 1 : 2);
    int64_t codes = (int64_t)(a->m + 7) / 8 * 8 * a->k;
    bool long_x = (a->k > 2048 && values > 32768) || codes > 98304;
    return long_x && (a->k + STEP - 1) / STEP % 2 == 0 ? 2 : 1;
}

/* Shared memory of a call: the ring, then x, then the rest. Passes until x leaves most of it to the
 * ring, which needs about 64 KB to keep its share of the memory busy. */
static size_t lay_out(decode_args *a, bool groups, int limit) {
    int mt = (a->m + 7) / 8;
    int most = limit - 2048; /* what is declared in the kernel, and alignment */
    int boxes = a->ranks > 1 ? 2 * BOX_BYTES : 0;
    for (int parts = 1;; parts++) {
        a->pass_steps = (a->rank_steps + parts - 1) / parts;
        a->passes = (a->rank_steps + a->pass_steps - 1) / a->pass_steps;
        int64_t codes = (int64_t)a->pass_steps * SLICES * mt * 1024;
        int64_t scales = groups ? (int64_t)a->pass_steps * SLICES * MAX_TOKENS * 4 : 0;
        int kept = a->passes > 1 ? KEPT_ROUNDS * CONSUMERS * 8 : 0;
        int64_t rest = codes + PARKED_BYTES + boxes + scales + kept;
        if (rest > most)
            continue;
        a->stages = min((int)(most - rest) / STAGE / GROUPS * GROUPS, MAX_STAGE);
        a->flight = min(a->stages, FLIGHT);
        a->codes_at = a->stages * STAGE;
        a->parked_at = a->codes_at + (int)codes;
        a->inbox_at = a->parked_at + PARKED_BYTES;
        a->scales_at = a->inbox_at + boxes;
        a->kept_at = a->scales_at + (int)scales;
        if (a->stages >= 2 * GROUPS || a->pass_steps == 1)
            return (size_t)(a->codes_at + rest);
    }
}

/* Shares N out, and returns the number of clusters: as many as there is room for, more where sums
 * are kept from pass to pass. */
static int share_rows(decode_args *a, int sm_count) {
    int units = (int)(((int64_t)a->n + UNIT - 1) / UNIT), clusters = sm_count / a->ranks;
    int most = KEPT_ROUNDS * (a->m > 8 ? ROUND_ROWS(2) : ROUND_ROWS(1)) / UNIT;
    if (a->passes > 1)
        clusters = max(clusters, (units + most - 1) / most);
    clusters = min(clusters, units);
    a->units = units / clusters;
    a->more_units = units % clusters;
    return clusters;
}

template <int MT> static const void *kernel_of(moq_input_mode mode) {
    switch (mode) {
    case MOQ_INPUT_E4M3_TENSOR:
        return (const void *)fp8_decode<MT, MOQ_INPUT_E4M3_TENSOR>;
    case MOQ_INPUT_E4M3_TOKEN:
        return (const void *)fp8_decode<MT, MOQ_INPUT_E4M3_TOKEN>;
    default:
        return (const void *)fp8_decode<MT, MOQ_INPUT_E4M3_GROUP>;
    }
}

extern "C" moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_device device;
    CUtensorMap map;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    decode_args args = {
        .m = (int)call->m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    args.x = moq_rows_of(call->x);
    args.out = moq_output_of(call);
    args.input_scale = call->input_scale;
    args.output_scale = call->output_scale;
    args.block_scale = (const float *)call->weight_scale;
    args.partitions = moq_partitions_of(spec);
    while (1 << args.log_rows < args.m)
        args.log_rows++;
    args.ranks = ranks_of(&args, spec->input == MOQ_INPUT_E4M3_TENSOR && call->input_scale);
    args.log_ranks = args.ranks == 2;
    args.rank_steps = (args.k + STEP - 1) / STEP / args.ranks;
    size_t shared = lay_out(&args, spec->input == MOQ_INPUT_E4M3_GROUP, device.shared_per_block);
    int clusters = share_rows(&args, device.sm_count);
    MOQ_TRY(moq_tensor_map_blocks(&map, call->weight, args.n, args.k, args.k, UNIT, SLICES, err));
    moq_launch launch = {.what = "FP8 linear",
                         .kernel =
                             call->m <= 8 ? kernel_of<1>(spec->input) : kernel_of<2>(spec->input),
                         .grid = dim3((unsigned)(clusters * args.ranks)),
                         .block = dim3(THREADS),
                         .cluster = args.ranks > 1 ? (unsigned)args.ranks : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&map, &args};
    return moq_cuda_launch(&launch, parameters, err);
}
