/* FP8 linear for a few tokens on Hopper: y[m, n] = round(sx * wx[n] * sum_k X[m, k] W[n, k] +
 * bias[n]).
 *
 * W is e4m3 [N, K] as the checkpoint has it, X the activations of at most 16 tokens, quantized here
 * to e4m3 as the layer prescribes (one scale, one a token, or one for 128 columns). What bounds it
 * is the time to read W once, so everything serves to keep the memory busy: one block a
 * multiprocessor, a producer warp that copies W through a ring of stages and never looks at x, 16
 * warps that multiply.
 *
 * - A tile is 16 rows of W, a step 512 columns of it: 8 boxes of 8 rows x 128 bytes in the 128-byte
 *   swizzle, [half of the rows][128 columns][8][128]. To wgmma these are 64 "rows" of one operand:
 * the 16 rows four times, each time with other 128 columns. The other operand has the tokens four
 * times likewise. Of the product only the blocks where both columns agree are meant; the rest costs
 * nothing, the tensor cores idle here. So a tile is small enough for 132 blocks to share any N
 * evenly, K is split within the block, and no weight passes through a register.
 * - FP8 wgmma keeps about 14 bits of its sums, so every 128 columns they are added to float32 ones.
 * Block scales are applied there.
 * - Warpgroup i takes the steps i, i + 4, ...; their sums meet in shared memory, in one order,
 * whatever the timing. A stage belongs to one warpgroup for good, since the stages are a multiple
 * of four: a group that skipped a phase of a barrier could not tell it from the next.
 * - x must fit beside the ring. Where it does not, K is done in passes, with the sums kept
 * meanwhile.
 * - W is constant, so the ring is filled before the preceding kernel has ended (dependent launch).
 *
 * Measured (H200, in a graph, docs/lab.md): 8192 x 8192 17.7 us for one token, floor 15.7; 4096 x
 * 4096 6.7 of 3.9. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/load.h"
#include "cuda/ptx.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.h"

#define GROUPS    4                 /* warpgroups that multiply */
#define CONSUMERS (128 * GROUPS)    /* their threads */
#define THREADS   (CONSUMERS + 128) /* the producer's warpgroup gives its registers away */
#define TILE      16                /* rows of W */
#define UNIT      8                 /* rows that blocks share N by */
#define STEP      512               /* columns of W */
#define SLICES    4                 /* of 128 columns in a step */
#define STAGE     (TILE * STEP)
#define MAX_STAGE 28
#define RED_FLOATS(MT)                                                                             \
    (4 * GROUPS * 2 * (MT) * 32) /* the sums of a tile, by warp, register, lane */
#define AT_ONCE(MT)                                                                                \
    (4 / (MT)) /* tiles whose sums are brought together at once: an output a thread */

typedef struct {
    int m, n, k;
    int passes, pass_steps; /* over K, and steps of each but the last */
    int stages;
    int codes_at, red_at; /* offsets in shared memory */
    int scales_at;        /* by groups: [steps of a pass][4][16] floats */
    int kept_at;          /* more than one pass: [tiles][8 * MT][16] floats */
    moq_rows x;
    moq_output out;
    const float *input_scale;  /* one a partition, or NULL */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, K / 128] */
    moq_partitions partitions;
} decode_args;

/* The rows of this block that belong to one partition: [begin, end). */
typedef struct {
    int begin, end, partition;
} segment;

static __device__ __forceinline__ segment block_rows(const decode_args *a) {
    int64_t units = (a->n + UNIT - 1) / UNIT;
    segment s = {(int)(units * blockIdx.x / gridDim.x) * UNIT,
                 (int)(units * (blockIdx.x + 1) / gridDim.x) * UNIT, 0};
    s.end = min(s.end, a->n);
    return s;
}

/* The part of `rest` in the partition of its first row. */
static __device__ __forceinline__ segment first_segment(const decode_args *a, segment rest) {
    while (a->partitions.end[rest.partition] <= rest.begin)
        rest.partition++;
    rest.end = min(rest.end, a->partitions.end[rest.partition]);
    return rest;
}

static __device__ __forceinline__ int steps_of(const decode_args *a, int pass) {
    int all = (a->k + STEP - 1) / STEP;
    return min(a->pass_steps, all - pass * a->pass_steps);
}

/* How far a warpgroup is: its next stage, and the steps dealt out so far. Steps are dealt out over
 * tiles and passes, so that a stage always comes to the same group. */
typedef struct {
    ring_place next;
    int dealt;
} group_place;

static __device__ __forceinline__ ring_place take_stage(group_place *place, int stages) {
    ring_place taken = place->next;
    place->next.index += GROUPS;
    if (place->next.index >= stages) {
        place->next.index -= stages;
        place->next.parity ^= 1;
    }
    return taken;
}

/* ---- the producer ---- */

static __device__ void produce_tile(const decode_args *a, const CUtensorMap *map, uint32_t ring,
                                    uint32_t full, uint32_t empty, int row, int end, int pass,
                                    ring_place *place) {
    uint64_t policy = policy_evict_first();
    int steps = steps_of(a, pass), halves = end - row > UNIT ? 2 : 1;
    for (int step = 0; step < steps; step++) {
        uint32_t stage = ring + (uint32_t)(place->index * STAGE), bar = full + 8u * place->index;
        int block = (pass * a->pass_steps + step) * SLICES;
        mbarrier_wait(empty + 8u * place->index, place->parity ^ 1);
        mbarrier_expect(bar, (uint32_t)(halves * STAGE / 2));
        copy_box_3d(stage, map, 0, row, block, bar, policy);
        if (halves == 2)
            copy_box_3d(stage + STAGE / 2, map, 0, row + UNIT, block, bar, policy);
        advance(place, a->stages);
    }
}

static __device__ void produce(const decode_args *a, const CUtensorMap *map, uint32_t ring,
                               uint32_t full, uint32_t empty) {
    ring_place place = {0, 0};
    segment rest = block_rows(a);
    while (rest.begin < rest.end) {
        segment s = first_segment(a, rest);
        for (int pass = 0; pass < a->passes; pass++) {
            for (int row = s.begin; row < s.end; row += TILE)
                produce_tile(a, map, ring, full, empty, row, s.end, pass, &place);
        }
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

/* ---- x ---- */

/* Who quantizes what: a token has `warps` warps, which take 32 chunks of 16 values in turn. Blocks
 * begin at different places of a row, so that they do not all ask the L2 for the same line. */
typedef struct {
    int token, warps, sub; /* sub: index of this warp among those of the token */
    int chunks, turns;     /* of the row in this pass, and of this warp */
    int shift;
} row_share;

static __device__ __forceinline__ row_share share_of(int m, int columns) {
    row_share r;
    int warp = threadIdx.x / 32, rows = m > 8 ? 16 : m > 4 ? 8 : m > 2 ? 4 : m;
    r.warps = CONSUMERS / 32 / rows;
    r.token = warp / r.warps;
    r.sub = warp % r.warps;
    r.chunks = r.token < m ? columns / 16 : 0;
    r.turns = (r.chunks + 32 * r.warps - 1) / (32 * r.warps);
    r.shift = r.turns ? (int)blockIdx.x % r.turns : 0;
    return r;
}

/* The chunk of this lane in a turn; it may lie beyond the row. */
static __device__ __forceinline__ int chunk_of(const row_share *r, int turn) {
    int turned = turn + r->shift < r->turns ? turn + r->shift : turn + r->shift - r->turns;
    return (turned * r->warps + r->sub) * 32 + threadIdx.x % 32;
}

/* Where 16 codes of a token from column 16 * chunk of the pass on lie: the operand of a step is
 * [4 slices][8 * MT tokens][128], in groups of 8 rows, the 16-byte pieces of a row xored with it.
 */
template <int MT> static __device__ __forceinline__ uint32_t code_at(int token, int chunk) {
    int row = chunk / 8 % SLICES * 8 * MT + token;
    return (uint32_t)(chunk / 32 * (SLICES * MT * 1024) + row * 128 + (chunk % 8 ^ row % 8) * 16);
}

/* The rows of x, as the compiler does not know them: of 16-bit values. */
static __device__ __forceinline__ moq_rows rows_of(const decode_args *a) {
    moq_rows x = a->x;
    x.dtype = x.dtype == MOQ_DT_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    return x;
}

#define BATCH 4 /* turns a lane loads before it uses the first: their latency is paid once */

static __device__ __forceinline__ void load_turns(const decode_args *a, const row_share *r,
                                                  int first, int turn, moq_chunk (&v)[BATCH]) {
    moq_rows x = rows_of(a);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        int chunk = chunk_of(r, turn + i);
        v[i] = moq_chunk();
        if (turn + i < r->turns && chunk < r->chunks)
            v[i] = moq_load_chunk(&x, r->token, first + chunk * 16);
    }
}

/* Codes of what was loaded. By groups `scale` is [K / 128 of the pass][16], and eight lanes have a
 * group: rows are multiples of 128. */
template <int MT, int MODE>
static __device__ __forceinline__ void store_turns(const decode_args *a, const row_share *r,
                                                   int turn, const moq_chunk (&v)[BATCH],
                                                   uint32_t codes, float *scale, float own) {
    float inverse = MODE == MOQ_INPUT_E4M3_TENSOR ? __frcp_rn(own) : 0.0f;
    moq_rows x = rows_of(a);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        int chunk = chunk_of(r, turn + i);
        if (turn + i >= r->turns)
            break;
        float value[16];
        uint4 code;
        moq_widen(&x, &v[i], value);
        if (MODE == MOQ_INPUT_E4M3_TENSOR) {
            code = moq_codes_multiplied(value, inverse);
        } else if (MODE == MOQ_INPUT_E4M3_TOKEN) {
            code = moq_codes_divided(value, own);
        } else {
            float s = moq_group_scale(__uint_as_float(
                moq_max_of_lanes(moq_chunk_amax_bits(&v[i], false, a->x.dtype), 8)));
            code = moq_codes_divided(value, s);
            if (chunk % 8 == 0 && chunk < r->chunks)
                scale[chunk / 8 * 16 + r->token] = s;
        }
        if (chunk < r->chunks)
            store_shared(codes + code_at<MT>(r->token, chunk), code);
    }
}

/* This lane's part of the amax of its token over all of K. */
static __device__ uint32_t lane_amax(const decode_args *a) {
    row_share r = share_of(a->m, a->k);
    uint32_t most = 0;
    for (int turn = 0; turn < r.turns; turn += BATCH) {
        moq_chunk v[BATCH];
        load_turns(a, &r, 0, turn, v);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            most = max(most, moq_chunk_amax_bits(&v[i], false, a->x.dtype));
    }
    return most;
}

/* The scale of this thread's token, from the parts of its lanes; every consumer calls it. */
template <int MODE>
static __device__ float scale_from(const decode_args *a, uint32_t part, uint32_t *amax,
                                   float *scale) {
    row_share r = share_of(a->m, a->k);
    part = moq_max_of_lanes(part, 32);
    if (threadIdx.x % 32 == 0)
        amax[threadIdx.x / 32] = part;
    barrier_sync(1, CONSUMERS);
    uint32_t most = 0;
    int from = MODE == MOQ_INPUT_E4M3_TOKEN ? r.token * r.warps : 0;
    int count = MODE == MOQ_INPUT_E4M3_TOKEN ? r.warps : CONSUMERS / 32;
    for (int i = 0; i < count; i++)
        most = max(most, amax[from + i]);
    float own = MODE == MOQ_INPUT_E4M3_TOKEN ? moq_token_scale(__uint_as_float(most))
                                             : moq_tensor_scale(__uint_as_float(most));
    if (threadIdx.x % 32 == 0)
        scale[MODE == MOQ_INPUT_E4M3_TOKEN ? r.token : 0] = own;
    return own;
}

/* Quantizes the columns of a pass. `own`, the scale of this thread's token, is found first where
 * `find` says so; what was loaded for that is kept where it is all there is. */
template <int MT, int MODE>
static __device__ void quantize_pass(const decode_args *a, int pass, bool find, uint32_t codes,
                                     uint32_t *amax, float *scale, float *own) {
    int first = pass * a->pass_steps * STEP, columns = min(a->pass_steps * STEP, a->k - first);
    row_share r = share_of(a->m, columns);
    moq_chunk v[BATCH];
    load_turns(a, &r, first, 0, v);
    if (find) {
        uint32_t part = 0;
        if (a->passes == 1 && r.turns <= BATCH) {
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                part = max(part, moq_chunk_amax_bits(&v[i], false, a->x.dtype));
        } else {
            part = lane_amax(a);
        }
        *own = scale_from<MODE>(a, part, amax, scale);
    }
    for (int turn = 0; turn < r.turns; turn += BATCH) {
        if (turn > 0)
            load_turns(a, &r, first, turn, v);
        store_turns<MT, MODE>(a, &r, turn, v, codes, scale, *own);
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
                                                  bool odd, const float *x, float w0, float w1) {
    int t = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float first = odd ? c.d[8 * MT + 4 * m + i] : c.d[4 * m + i];
            float second = odd ? c.d[12 * MT + 4 * m + 2 + i] : c.d[4 * MT + 4 * m + 2 + i];
            sum[2 * m + i] += first * (x[8 * m + t + i] * w0);
            sum[2 * m + i] += second * (x[16 + 8 * m + t + i] * w1);
        }
    }
}

/* The scales of W in two slices from `slice` on; 0 beyond K. */
static __device__ __forceinline__ float2 block_scales(const decode_args *a, const float *block,
                                                      int slice) {
    int all = a->k / 128;
    return make_float2(slice < all ? block[slice] : 0.0f,
                       slice + 1 < all ? block[slice + 1] : 0.0f);
}

/* Starts the product of a step, as soon as its stage is there. */
template <int MT>
static __device__ __forceinline__ void start_step(uint32_t ring, uint32_t codes, uint32_t full,
                                                  ring_place at, int step, product<MT> &c) {
    mbarrier_wait(full + 8u * at.index, at.parity);
    uint64_t w = wgmma_operand(ring + (uint32_t)(at.index * STAGE));
    uint64_t x = wgmma_operand(codes + (uint32_t)(step * SLICES * MT * 1024));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
        wgmma_e4m3(c.d, w + 2 * i, x + 2 * i, i);
    wgmma_commit();
}

/* Takes the product of a step that has ended, and gives the stage back. */
template <int MT, int MODE>
static __device__ __forceinline__ void end_step(uint32_t empty, int stage, const float *scale,
                                                float2 w, int step, const product<MT> &c,
                                                float (&sum)[2 * MT]) {
    bool odd = threadIdx.x / 32 & 1;
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(empty + 8u * stage);
    if (MODE == MOQ_INPUT_E4M3_GROUP)
        add_scaled<MT>(sum, c, odd, scale + (step * SLICES + 2 * odd) * 16, w.x, w.y);
    else
        add_meant<MT>(sum, c, odd);
}

/* Adds the products of a tile in one pass to the warp's sums, [8 tokens][2]. This warpgroup's steps
 * are taken from the ring two at a time, so that one is multiplied while the other is added. */
template <int MT, int MODE>
static __device__ void sum_tile(const decode_args *a, uint32_t ring, uint32_t codes, uint32_t full,
                                uint32_t empty, const float *scale, segment s, int row, int pass,
                                group_place *place, float (&sum)[2 * MT]) {
    int warp = threadIdx.x / 32, steps = steps_of(a, pass);
    const float *block = NULL;
    if (MODE == MOQ_INPUT_E4M3_GROUP) {
        int own = row + warp % 4 / 2 * UNIT + threadIdx.x % 32 / 4; /* this lane's row of W */
        block =
            a->block_scale +
            (int64_t)moq_block_row(&a->partitions, s.partition, min(own, s.end - 1)) * (a->k / 128);
    }
    for (int step = (warp / 4 - place->dealt) & (GROUPS - 1); step < steps; step += 2 * GROUPS) {
        product<MT> c[2];
        bool both = step + GROUPS < steps;
        int slice = (pass * a->pass_steps + step) * SLICES + 2 * (warp & 1);
        float2 w[2] = {};
        if (MODE == MOQ_INPUT_E4M3_GROUP) {
            w[0] = block_scales(a, block, slice);
            w[1] = block_scales(a, block, slice + GROUPS * SLICES);
        }
        ring_place first = take_stage(place, a->stages), second = first;
        start_step<MT>(ring, codes, full, first, step, c[0]);
        if (both) {
            second = take_stage(place, a->stages);
            start_step<MT>(ring, codes, full, second, step + GROUPS, c[1]);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        end_step<MT, MODE>(empty, first.index, scale, w[0], step, c[0], sum);
        if (both) {
            wgmma_wait<0>();
            end_step<MT, MODE>(empty, second.index, scale, w[1], step + GROUPS, c[1], sum);
        }
    }
    place->dealt += steps;
}

template <int MT>
static __device__ __forceinline__ void park_sums(float *red, const float (&sum)[2 * MT]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++)
        red[(warp * 2 * MT + i) * 32 + lane] = sum[i];
}

/* Adds up what the warps have of output (token, row % 16) of a tile. */
template <int MT> static __device__ float gather_sum(const float *red, int token, int row) {
    const float *from = red + row / 8 * 2 * (2 * MT * 32) + (token / 8 * 2 + token % 2) * 32 +
                        row % 8 * 4 + token / 2 % 4;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++)
        sum += from[(i / 2 * 4 + i % 2) * (2 * MT * 32)];
    return sum;
}

/* What this thread's output of some tiles is multiplied by and added to, without the scale of x. */
typedef struct {
    int tile, token, row, n;
    bool meant;
    float factor, bias;
} output_terms;

template <int MT, int MODE>
static __device__ __forceinline__ output_terms terms_of(const decode_args *a, segment s, int row) {
    output_terms t;
    t.tile = threadIdx.x / (TILE * 8 * MT);
    t.token = threadIdx.x % (TILE * 8 * MT) / TILE;
    t.row = threadIdx.x % TILE;
    t.n = row + t.tile * TILE + t.row;
    t.meant = t.token < a->m && t.n < s.end;
    t.factor = t.meant && MODE != MOQ_INPUT_E4M3_GROUP ? a->output_scale[t.n] : 1.0f;
    t.bias = t.meant ? moq_load_bias(&a->out, t.n) : 0.0f;
    return t;
}

/* Brings the warps' sums of some tiles together; in the last pass writes the outputs. */
template <int MT, int MODE>
static __device__ void finish_tiles(const decode_args *a, const float *red, float *kept,
                                    const float *scale, const output_terms *t, int pass) {
    if (!t->meant)
        return;
    float value = gather_sum<MT>(red + t->tile * RED_FLOATS(MT), t->token, t->row);
    if (pass > 0)
        value += kept[threadIdx.x];
    if (pass + 1 < a->passes) {
        kept[threadIdx.x] = value;
        return;
    }
    if (MODE != MOQ_INPUT_E4M3_GROUP)
        value *= scale[MODE == MOQ_INPUT_E4M3_TOKEN ? t->token : 0] * t->factor;
    moq_store_output(&a->out, t->token, t->n, value, t->bias);
}

/* Asks for what the outputs will need besides x, all of it constant, so that it is near when it is.
 */
template <int MODE> static __device__ void prefetch_scales(const decode_args *a, segment rest) {
    if (MODE != MOQ_INPUT_E4M3_GROUP) {
        for (int n = rest.begin + threadIdx.x * 32; n < rest.end; n += CONSUMERS * 32)
            prefetch_l2(a->output_scale + n);
        return;
    }
    int blocks = a->k / 128;
    while (rest.begin < rest.end) {
        segment s = first_segment(a, rest);
        int first = moq_block_row(&a->partitions, s.partition, s.begin);
        int last = moq_block_row(&a->partitions, s.partition, s.end - 1);
        for (int i = threadIdx.x * 32; i < (last - first + 1) * blocks; i += CONSUMERS * 32)
            prefetch_l2(a->block_scale + (int64_t)first * blocks + i);
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

template <int MT, int MODE>
static __device__ void consume(const decode_args *a, uint8_t *smem, uint32_t full, uint32_t empty,
                               float *scale, uint32_t *amax) {
    uint32_t ring = shared_address(smem), codes = ring + (uint32_t)a->codes_at;
    float *red = (float *)(smem + a->red_at), *kept = (float *)(smem + a->kept_at);
    group_place place = {{(int)threadIdx.x / 128, 0}, 0};
    segment rest = block_rows(a);
    for (int i = threadIdx.x; i < a->pass_steps * SLICES * MT * 64; i += CONSUMERS)
        store_shared(codes + 16u * i,
                     make_uint4(0, 0, 0, 0)); /* tokens and columns there are not */
    if (MODE == MOQ_INPUT_E4M3_GROUP) {
        for (int i = threadIdx.x; i < a->pass_steps * SLICES * 16; i += CONSUMERS)
            scale[i] = 0;
    }
    prefetch_scales<MODE>(a, rest);
    float own = 1; /* input_scale belongs to the weights: no one is waited for */
    bool given = MODE == MOQ_INPUT_E4M3_TENSOR && a->input_scale;
    if (given)
        own = a->input_scale[rest.begin < rest.end ? first_segment(a, rest).partition : 0];
    barrier_sync(1, CONSUMERS);
    wait_for_predecessor();
    for (bool fresh = true; rest.begin < rest.end; fresh = false) {
        segment s = first_segment(a, rest);
        if (given) {
            own = a->input_scale[s.partition];
            scale[0] = own; /* by all, the same */
        }
        for (int pass = 0; pass < a->passes; pass++) {
            if (fresh || given || a->passes > 1) {
                bool find = fresh && pass == 0 && !given && MODE != MOQ_INPUT_E4M3_GROUP;
                quantize_pass<MT, MODE>(a, pass, find, codes, amax, scale, &own);
                fence_async_proxy();
                barrier_sync(1, CONSUMERS);
            }
            for (int row = s.begin; row < s.end; row += AT_ONCE(MT) * TILE) {
                output_terms terms = terms_of<MT, MODE>(a, s, row);
                for (int i = 0; i < AT_ONCE(MT) && row + i * TILE < s.end; i++) {
                    float sum[2 * MT] = {};
                    sum_tile<MT, MODE>(a, ring, codes, full, empty, scale, s, row + i * TILE, pass,
                                       &place, sum);
                    park_sums<MT>(red + i * RED_FLOATS(MT), sum);
                }
                barrier_sync(1, CONSUMERS);
                finish_tiles<MT, MODE>(a, red, kept + (row - s.begin) / TILE * (TILE * 8 * MT),
                                       scale, &terms, pass);
                barrier_sync(1, CONSUMERS); /* before the sums, or scales, of others */
            }
        }
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

template <int MT, int MODE>
static __global__ void __launch_bounds__(THREADS, 1)
    fp8_decode(const __grid_constant__ CUtensorMap map, const __grid_constant__ decode_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[2 * MAX_STAGE];
    __shared__ float scale[16];
    __shared__ uint32_t amax[16];
    uint32_t full = shared_address(barrier), empty = full + 8 * MAX_STAGE;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; i++) {
            mbarrier_init(full + 8u * i, 1);
            mbarrier_init(empty + 8u * i, 4); /* the warps of a group */
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        more_registers<112>();
        consume<MT, MODE>(&args, smem, full, empty,
                          MODE == MOQ_INPUT_E4M3_GROUP ? (float *)(smem + args.scales_at) : scale,
                          amax);
    } else {
        fewer_registers<24>();
        if (threadIdx.x == CONSUMERS)
            produce(&args, &map, shared_address(smem), full, empty);
    }
}

/* ---- launch ---- */

/* Shared memory of a call: the ring, then x, then the rest. Passes until x leaves most of it to the
 * ring, which needs about 64 KB to keep its share of the memory busy. */
static size_t lay_out(decode_args *a, int tokens, bool groups, int blocks, int limit) {
    int mt = (tokens + 7) / 8, steps = (a->k + STEP - 1) / STEP,
        rows = (a->n + blocks - 1) / blocks;
    int most = limit - 2048 - MAX_STAGE * 16; /* what is declared in the kernel, and alignment */
    for (a->passes = 1;; a->passes++) {
        a->pass_steps = (steps + a->passes - 1) / a->passes;
        int codes = a->pass_steps * SLICES * mt * 1024;
        int red = AT_ONCE(mt) * RED_FLOATS(mt) * 4,
            scales = groups ? a->pass_steps * SLICES * 64 : 0;
        int kept = a->passes > 1 ? (rows / TILE + 2 + AT_ONCE(mt)) * TILE * 8 * mt * 4 : 0;
        int rest = codes + red + scales + kept;
        a->stages = (most - rest) / STAGE / GROUPS * GROUPS;
        if (a->stages > MAX_STAGE)
            a->stages = MAX_STAGE;
        a->codes_at = a->stages * STAGE;
        a->red_at = a->codes_at + codes;
        a->scales_at = a->red_at + red;
        a->kept_at = a->scales_at + scales;
        if (a->stages >= 2 * GROUPS || a->pass_steps == 1)
            return (size_t)(a->codes_at + rest);
    }
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
    int units = (int)((spec->out_features + UNIT - 1) / UNIT);
    int blocks = units < device.sm_count ? units : device.sm_count;
    decode_args args = {.m = (int)call->m,
                        .n = (int)spec->out_features,
                        .k = (int)spec->in_features,
                        .x = moq_rows_of(call->x),
                        .out = moq_output_of(call),
                        .input_scale = call->input_scale,
                        .output_scale = call->output_scale,
                        .block_scale = (const float *)call->weight_scale,
                        .partitions = moq_partitions_of(spec)};
    size_t shared = lay_out(&args, args.m, spec->input == MOQ_INPUT_E4M3_GROUP, blocks,
                            device.shared_per_block);
    MOQ_TRY(moq_tensor_map_blocks(&map, call->weight, args.n, args.k, args.k, UNIT, SLICES, err));
    moq_launch launch = {.what = "FP8 linear",
                         .kernel =
                             call->m <= 8 ? kernel_of<1>(spec->input) : kernel_of<2>(spec->input),
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&map, &args};
    return moq_cuda_launch(&launch, parameters, err);
}
