/* Configs of experts for decode on Hopper, and their rows: see decode.h. */
#include "cuda/moe/sm90/decode/decode.h"

#include "core/invariant.h"
#include "core/sizes.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"
#include "cuda/choice/routing.h"

#include <stdio.h>

enum { CONFIGS = MOQ_MOE_DECODE_FUSED + 1, FORMATS = 3 };

static const moq_rates FP8_RATES[CONFIGS * FORMATS] = {MOQ_RATES_MOE_SM90_FP8_DECODE};
static const moq_rates NVFP4_RATES[CONFIGS] = {MOQ_RATES_MOE_SM90_NVFP4_DECODE};

/* Shared memory of a block that leaves room for a second one on the multiprocessor, less what the
 * kernels declare. */
#define BLOCK_BYTES (112 << 10)
/* Shared memory of a block that is alone on a multiprocessor, without what kernels declare. */
#define WHOLE_BYTES ((227 << 10) - 2048)
/* Slots up to here are grouped by the lanes of a warp, which need no counts. */
#define LANES 32

static int align(int bytes) {
    return (bytes + 127) / 128 * 128;
}

/* The next bytes behind `used`. */
static int take(int *used, int64_t bytes) {
    int at = *used;
    *used = align(at + (int)bytes);
    return at;
}

static int64_t slots_of(const moq_moe_spec *spec, int64_t tokens) {
    return tokens * spec->top_k;
}

/* Chunks of slots at most, or nearly always. */
static int64_t chunks_of(const moq_moe_spec *spec, int64_t slots) {
    return slots < spec->experts ? slots : spec->experts + slots / MOQ_MOE_DECODE_CHUNK;
}

int64_t moq_moe_decode_inner_bytes(const moq_moe_spec *spec, int64_t tokens) {
    return slots_of(spec, tokens) * spec->w2.in_features * (int64_t)moq_dtype_size(spec->w2.dtype);
}

int64_t moq_moe_decode_sums_at(const moq_moe_spec *spec, int64_t tokens) {
    int64_t maxima = spec->w2.input == MOQ_INPUT_E4M3_TOKEN
                         ? slots_of(spec, tokens) * (spec->w2.in_features / MOQ_PACK_ROWS) * 4
                         : 0;
    return moq_moe_decode_inner_bytes(spec, tokens) + maxima;
}

/* Workspace bytes for g and d when up and down are separate kernels. */
static int64_t halves_workspace(const moq_moe_spec *spec, int64_t tokens) {
    return moq_moe_decode_sums_at(spec, tokens) +
           slots_of(spec, tokens) * spec->w2.out_features * (int64_t)sizeof(float);
}

/* ---- formats ---- */

/* Weights as a kernel goes through them. */
typedef struct {
    int columns, bytes; /* of a block of K of a slab */
    int units, blocks;  /* of a stage: slabs by blocks, or blocks of all slabs; the other is 0 */
    int alignment;      /* of the ring, beyond what shared memory has */
    int whole;          /* a stage is of all blocks of a split, or of one */
    int flight;         /* stages of a fresh ring that are on their way at once */
    int split[8];       /* blocks that it may have, then 0 */
} format;

#define SPLIT(count) count,
static const format NVFP4_FORMAT = {MOQ_PACK_K,
                                    MOQ_PACK_BYTES,
                                    MOQ_MOE_NVFP4_DECODE_UNITS,
                                    0,
                                    0,
                                    1,
                                    1,
                                    {MOQ_MOE_NVFP4_DECODE_SPLIT_K(SPLIT)}};
static const format FP8_FORMAT = {128,  16 * 128, 0, MOQ_MOE_FP8_DECODE_BLOCKS,
                                  1024, 0,        3, {MOQ_MOE_FP8_DECODE_SPLIT_K(SPLIT)}};
#undef SPLIT

static const format *format_of(const moq_moe_spec *spec) {
    return spec->w13.weight == MOQ_WEIGHT_E2M1_PACKED ? &NVFP4_FORMAT : &FP8_FORMAT;
}

/* Blocks of K in a stage of so many slabs. */
static int stage_blocks(const format *f, int slabs) {
    return f->units ? f->units / slabs : f->blocks;
}

static int64_t blocks_of(const moq_moe_spec *spec, int64_t columns) {
    return divide_up(columns, format_of(spec)->columns);
}

/* ---- shared memory ---- */

/* Bytes of counts of more slots than lanes: of each expert, and of those in each 32 slots. */
static int64_t counts_of(const moq_moe_spec *spec, int64_t slots) {
    return spec->experts * (4 + 2 * divide_up(slots, LANES));
}

/* Bytes of a warp's stage. */
static int stage_bytes(const moq_moe_spec *spec, const moq_moe_decode_half *h) {
    const format *f = format_of(spec);
    int split = f->whole ? h->split : 1;
    return (h->split ? split : h->slabs * stage_blocks(f, h->slabs)) * f->bytes;
}

/* Bytes of sums of all warps that meet in shared memory: those of some items with splits, else what
 * is left of one. */
static int staged_bytes(const moq_moe_decode_half *h) {
    int items = h->split ? MOQ_MOE_DECODE_STAGED : 1;
    return items * MOQ_MOE_DECODE_WARPS * h->slabs * 4 * LANES * 4;
}

/* The tables; those of so many warps with few slots. */
static void tables_layout(const moq_moe_spec *spec, int64_t slots, int warps, int *used,
                          moq_moe_decode_tables *tables) {
    int begin = *used;
    tables->expert = take(used, slots * 4);
    tables->sorted = take(used, slots * 2);
    tables->chunk = take(used, chunks_of(spec, slots) * 4);
    tables->count = take(used, slots > LANES ? counts_of(spec, slots) : 0);
    tables->chunks = take(used, 4);
    tables->pitch = *used - begin;
    if (slots <= LANES)
        take(used, (warps - 1) * tables->pitch);
}

/* With so many stages; `sums` are bytes of what slots give to a block, 0 in the first kernel. */
static void smem_layout(const moq_moe_spec *spec, int64_t slots, int64_t sums, int stages,
                        moq_moe_decode_half *h) {
    int used = 0;
    h->stages = stages;
    take(&used, (int64_t)MOQ_MOE_DECODE_WARPS * stages * stage_bytes(spec, h));
    h->staged_at = take(&used, staged_bytes(h));
    h->sums_at = take(&used, sums);
    h->weights_at = take(&used, slots * 4);
    tables_layout(spec, slots, h->split ? MOQ_MOE_DECODE_WARPS : 1, &used, &h->tables);
    h->scales_at = take(&used, spec->w13.input == MOQ_INPUT_E4M3_TOKEN ? slots * 4 : 0);
    h->shared = used + format_of(spec)->alignment;
}

/* Gives a warp as many stages as there is room for and it fills. False if two do not fit. */
static bool fill_half(const moq_moe_spec *spec, int64_t slots, int64_t sums, int64_t use,
                      moq_moe_decode_half *h) {
    if (sums > BLOCK_BYTES)
        return false;
    smem_layout(spec, slots, sums, 0, h);
    int64_t room = (BLOCK_BYTES - h->shared) / (MOQ_MOE_DECODE_WARPS * stage_bytes(spec, h));
    int64_t stages = room < use ? room : use;
    if (stages < 2)
        return false;
    smem_layout(spec, slots, sums,
                (int)(stages < MOQ_MOE_DECODE_STAGES ? stages : MOQ_MOE_DECODE_STAGES), h);
    h->flight = h->stages;
    return true;
}

/* Stages that a warp fills of so many blocks of K of all warps, and one more. */
static int64_t stages_of(const moq_moe_spec *spec, int64_t blocks, int slabs) {
    return divide_up(divide_up(blocks, MOQ_MOE_DECODE_WARPS),
                     stage_blocks(format_of(spec), slabs)) +
           1;
}

/* ---- the two kernels ---- */

/* Blocks of a multiprocessor, where they are in no cluster. */
#define BLOCKS 2

/* The shortest split of so many blocks or more that K has room for, or 0. */
static int split_of_warp(const format *f, int64_t least, int64_t blocks) {
    for (int i = 0; f->split[i] && f->split[i] <= blocks; i++)
        if (f->split[i] >= least)
            return f->split[i];
    return 0;
}

static int stages_of_split(const moq_moe_spec *spec, const moq_moe_decode_half *h) {
    return format_of(spec)->whole ? 1 : h->split;
}

/* Which warps share K where each has a split: two at least, those that have least to do that is not
 * there, and of these the most. False where a split is too long for a warp. */
static bool split_blocks(const moq_moe_spec *spec, int64_t columns, moq_moe_decode_half *h) {
    int64_t blocks = blocks_of(spec, columns), least = INT64_MAX;
    h->split = 0;
    for (int log = 3; log > 0; log--) {
        int split = split_of_warp(format_of(spec), divide_up(blocks, 1 << log), blocks);
        int64_t all = (int64_t)split << log;
        /* copies of one block of K are short ones */
        bool longer = all == least && h->split == 1 && split > 1;
        if (split && (all < least || longer)) {
            least = all;
            h->split = split;
            h->log_splits = log;
        }
    }
    h->pieces = h->slabs * stages_of_split(spec, h);
    return h->split > 0;
}

/* Stages of a warp where a block has so many items of splits. */
static int64_t stages_of_items(const moq_moe_decode_half *h, int64_t items) {
    return h->pieces * divide_up(items << h->log_splits, MOQ_MOE_DECODE_WARPS);
}

static bool partition_up(const moq_moe_spec *spec, int64_t tokens, bool splits,
                         moq_moe_decode_half *h) {
    int64_t slots = slots_of(spec, tokens), columns = spec->w13.in_features;
    int64_t items = chunks_of(spec, slots) * (spec->w2.in_features / MOQ_PACK_ROWS);
    h->grid = BLOCKS * spec->w13.target.sm_count;
    h->cluster = 1;
    h->slabs = spec->gated ? 2 : 1;
    int64_t most = divide_up(items, h->grid);
    if (!splits)
        return fill_half(spec, slots, 0, stages_of(spec, most * blocks_of(spec, columns), h->slabs),
                         h);
    if (!split_blocks(spec, columns, h) ||
        !fill_half(spec, slots, 0, stages_of_items(h, most) + 1, h))
        return false;
    int flight = format_of(spec)->flight;
    h->flight = h->stages < flight ? h->stages : flight;
    return true;
}

static int64_t down_slabs(const moq_moe_spec *spec) {
    return divide_up(spec->w2.out_features, MOQ_PACK_ROWS);
}

/* A cluster has two slabs of all experts. */
static bool partition_cluster(const moq_moe_spec *spec, int64_t tokens, int cluster,
                              moq_moe_decode_half *h) {
    int64_t slots = slots_of(spec, tokens);
    h->slabs = 2;
    h->cluster = cluster;
    h->grid = (int)divide_up(down_slabs(spec), 2) * cluster;
    int64_t items = divide_up(chunks_of(spec, slots), cluster);
    int64_t blocks = items * blocks_of(spec, spec->w2.in_features);
    return fill_half(spec, slots, slots * (2 * MOQ_PACK_ROWS / cluster) * 4,
                     stages_of(spec, blocks, 2), h);
}

/* With splits, and a kernel behind it that adds up slots. */
static bool partition_sums(const moq_moe_spec *spec, int64_t tokens, moq_moe_decode_half *h) {
    int64_t slots = slots_of(spec, tokens);
    h->slabs = 2;
    h->cluster = 1;
    h->grid = BLOCKS * spec->w2.target.sm_count;
    int64_t most = divide_up(chunks_of(spec, slots) * divide_up(down_slabs(spec), 2), h->grid);
    return split_blocks(spec, spec->w2.in_features, h) &&
           fill_half(spec, slots, 0, stages_of_items(h, most) + 1, h);
}

/* ---- routing as it is expected ---- */

/* Slots of an expert from which on a fraction of a chunk is taken for half of one. */
#define MANY_SLOTS 64

/* Chunks of an expert that a router which likes all gives `share` of the tokens: its slots are
 * distributed binomially, and the chance of each number follows from the one before. */
static double expected_chunks_of_one(int64_t tokens, double share) {
    double mean = share * (double)tokens, chunks = 0;
    if (share >= 1 || mean > MANY_SLOTS)
        return share >= 1 ? ceil(mean / MOQ_MOE_DECODE_CHUNK) : mean / MOQ_MOE_DECODE_CHUNK + 0.5;
    double chance = pow(1 - share, (double)tokens), odds = share / (1 - share);
    for (int64_t slots = 1; slots <= tokens && slots <= 2 * MANY_SLOTS; slots++) {
        chance *= odds * (double)(tokens - slots + 1) / (double)slots;
        chunks += chance * (double)divide_up(slots, MOQ_MOE_DECODE_CHUNK);
    }
    return chunks;
}

/* Chunks of all experts here, as they are expected. */
static double expected_chunks(const moq_moe_spec *spec, int64_t tokens) {
    double share = (double)spec->top_k / spec->global_experts;
    return fmax(1, spec->experts * expected_chunks_of_one(tokens, share));
}

/* ---- fused tiles ---- */

/* Blocks of K of a split in the first product, or 0 where none has room. */
static int fused_split(const moq_moe_spec *spec) {
#define SPLIT(count) count,
    static const int splits[] = {MOQ_MOE_NVFP4_FUSED_SPLIT_K(SPLIT) 0};
#undef SPLIT
    int64_t blocks = blocks_of(spec, spec->w13.in_features);
    int64_t least = divide_up(blocks, MOQ_MOE_FUSED_SPLITS);
    for (const int *split = splits; *split; split++)
        if (*split >= least && *split <= blocks)
            return *split;
    return 0;
}

/* Stages that are on their way at once at first, where a block has one fused tile. */
#define FUSED_FLIGHT 4

static int64_t fused_tiles_of(const moq_moe_spec *spec) {
    return spec->w2.in_features / MOQ_MOE_FUSED_COLUMNS;
}

/* With so many stages. */
static void fused_smem_layout(const moq_moe_spec *spec, int64_t slots, int stages,
                              moq_moe_fused *s) {
    int used = 0;
    s->stages = stages;
    take(&used, (int64_t)stages * MOQ_MOE_NVFP4_FUSED_STAGE);
    s->staged_at =
        take(&used, MOQ_MOE_FUSED_SPLITS * 2 * MOQ_MOE_FUSED_COLUMNS / MOQ_PACK_ROWS * 512);
    s->g_at = take(&used, MOQ_MOE_DECODE_CHUNK * MOQ_MOE_FUSED_G_PITCH);
    s->weights_at = take(&used, slots * 4);
    tables_layout(spec, slots, MOQ_MOE_FUSED_WARPS, &used, &s->tables);
    s->shared = used + format_of(spec)->alignment;
}

/* FP8: stages of a warp in flight at first, and stages of the first product that are left when the
 * second one's weights are asked for. With one or two, and one to five left,
 * one and two tokens of Qwen3-30B-A3B take 15.0 to 16.2 and 25.7 to 27.0 us on an H200; with these
 * 15.4 and 25.8, in blocks 15.0 and 25.9. */
#define FP8_FUSED_FLIGHT 1
#define FP8_FUSED_LEFT   2

static void fused_fp8_smem_layout(moq_moe_fused *s) {
    const int warps = MOQ_MOE_FUSED_WARPS, columns = MOQ_MOE_FUSED_COLUMNS;
    int used = 0;
    s->stages = MOQ_MOE_FP8_FUSED_STAGES;
    take(&used, (int64_t)warps * s->stages * FP8_FORMAT.bytes);
    s->down_at =
        take(&used, (int64_t)warps * MOQ_MOE_FP8_FUSED_DOWN_SLABS * MOQ_PACK_ROWS * columns);
    s->staged_at = take(&used, warps * MOQ_MOE_FP8_FUSED_PITCH * 4);
    s->g_at = take(&used, columns * 2 + 4 * warps * 4); /* and maxima of it */
    s->shared = used + FP8_FORMAT.alignment;
}

/* Blocks of a cluster, which have fused tiles with one scale of g; 0 where a scale needs all of g.
 */
static int fused_fp8_cluster(const moq_moe_spec *spec) {
    if (spec->w2.in_features % MOQ_MOE_FUSED_COLUMNS)
        return 0;
    if (spec->w2.input == MOQ_INPUT_E4M3_GROUP)
        return spec->w2.in_features % 128 ? 0 : 2;
    return spec->w2.input == MOQ_INPUT_E4M3_TENSOR;
}

/* Each slot is by itself, and its fused tiles are spread over as many blocks as there are for it.
 */
static bool partition_fused_fp8(const moq_moe_spec *spec, int64_t tokens, moq_moe_fused *s) {
    const int warps = MOQ_MOE_FUSED_WARPS;
    int64_t slots = slots_of(spec, tokens);
    int sms = spec->w13.target.sm_count;
    *s = (moq_moe_fused){0};
    s->cluster = fused_fp8_cluster(spec);
    if (!s->cluster || slots * s->cluster > sms || blocks_of(spec, spec->w13.in_features) > warps ||
        down_slabs(spec) > warps * MOQ_MOE_FP8_FUSED_DOWN_SLABS)
        return false;
    int64_t pieces = fused_tiles_of(spec) / s->cluster;
    s->block_tiles = (int)divide_up(pieces, sms / (slots * s->cluster));
    s->slot_blocks = (int)divide_up(pieces, s->block_tiles) * s->cluster;
    s->grid = (int)slots * s->slot_blocks;
    s->fused_stages = (spec->gated ? 2 : 1) * MOQ_MOE_FUSED_COLUMNS / MOQ_PACK_ROWS;
    s->flight = FP8_FUSED_FLIGHT;
    s->ask = s->fused_stages - FP8_FUSED_LEFT;
    s->alone = s->by_slots = true;
    fused_fp8_smem_layout(s);
    return true;
}

static bool partition_fused(const moq_moe_spec *spec, int64_t tokens, moq_moe_fused *s) {
    if (format_of(spec) == &FP8_FORMAT)
        return partition_fused_fp8(spec, tokens, s);
    int64_t slots = slots_of(spec, tokens), tiles = fused_tiles_of(spec);
    int sms = spec->w13.target.sm_count;
    *s = (moq_moe_fused){0};
    s->split = fused_split(spec);
    if (!s->split || down_slabs(spec) > MOQ_MOE_FUSED_WARPS * MOQ_MOE_FUSED_DOWN_SLABS ||
        spec->w2.in_features % MOQ_MOE_FUSED_COLUMNS)
        return false;
    s->alone = tokens == 1 && slots <= LANES && slots * tiles <= sms;
    fused_smem_layout(spec, slots, 0, s);
    int stages =
        (WHOLE_BYTES - s->shared) / MOQ_MOE_NVFP4_FUSED_STAGE / 2 * 2; /* a place is a group's */
    if (stages < 2)
        return false;
    int slabs = (spec->gated ? 2 : 1) * MOQ_MOE_FUSED_COLUMNS / MOQ_PACK_ROWS;
    s->fused_stages = slabs + 2 * MOQ_MOE_FUSED_DOWN_SLABS / MOQ_MOE_FUSED_STAGE_SLABS;
    s->flight = s->alone ? FUSED_FLIGHT : stages;
    fused_smem_layout(spec, slots, stages < MOQ_MOE_FUSED_STAGES ? stages : MOQ_MOE_FUSED_STAGES,
                      s);
    int64_t most = (s->alone ? slots : chunks_of(spec, slots)) * tiles;
    s->grid = most < sms ? (int)most : sms; /* others would have none */
    s->flight = s->flight < s->stages ? s->flight : s->stages;
    s->by_slots = s->alone || expected_chunks(spec, tokens) * 2 < sms;
    s->d_at = align((int)(slots + 1) * 4);
    return true;
}

/* Where slots are, and d of every chunk that a block can have. */
static int64_t fused_workspace(const moq_moe_spec *spec, int64_t tokens, const moq_moe_fused *s) {
    int64_t slots = slots_of(spec, tokens);
    int64_t rows = s->grid + (s->alone ? slots : chunks_of(spec, slots));
    return s->d_at + rows * (s->alone ? 1 : MOQ_MOE_DECODE_CHUNK) * spec->w2.out_features *
                         (int64_t)sizeof(float);
}

/* ---- the config ---- */

/* Two kernels: whether the first has splits of K, and blocks of a cluster of the second, which has
 * splits where that is 0. */
static const struct {
    bool splits;
    int cluster;
} PRODUCTS[] = {{false, 0}, {true, 0}, {false, 1}, {false, 2}};
_Static_assert(sizeof PRODUCTS / sizeof *PRODUCTS == MOQ_MOE_DECODE_FUSED,
               "fused tiles are behind them");

static bool lay_out_config(const moq_moe_spec *spec, int64_t tokens, int config,
                           moq_moe_decode_share *share) {
    *share = (moq_moe_decode_share){{0}, {0}, {0}};
    if (config == MOQ_MOE_DECODE_FUSED)
        return partition_fused(spec, tokens, &share->tiles);
    int cluster = PRODUCTS[config].cluster;
    share->up.pieces = share->down.pieces = 1;
    return partition_up(spec, tokens, PRODUCTS[config].splits, &share->up) &&
           (cluster ? partition_cluster(spec, tokens, cluster, &share->down)
                    : partition_sums(spec, tokens, &share->down));
}

/* Bytes of `slabs` slabs of a weight. */
static double slab_bytes(const moq_moe_spec *spec, int64_t slabs, int64_t columns) {
    return (double)slabs * (double)blocks_of(spec, columns) * format_of(spec)->bytes;
}

static double up_bytes(const moq_moe_spec *spec, double chunks) {
    return chunks * slab_bytes(spec, spec->w13.out_features / MOQ_PACK_ROWS, spec->w13.in_features);
}

/* Bytes of g that a block reads. */
static double inner_bytes(const moq_moe_spec *spec, int64_t tokens, int cluster) {
    return (double)moq_moe_decode_inner_bytes(spec, tokens) / cluster;
}

/* Bytes that the busiest multiprocessor reads where clusters do the second product. */
static double cluster_bytes(const moq_moe_spec *spec, int64_t tokens,
                            const moq_moe_decode_half *h) {
    const moq_target *target = &spec->w2.target;
    double chunks = ceil(expected_chunks(spec, tokens) / h->cluster);
    double weights = chunks * slab_bytes(spec, h->slabs, spec->w2.in_features);
    double fit = h->cluster > 1 ? (double)moq_clusters_that_fit(target, h->cluster) * h->cluster
                                : target->sm_count;
    return ceil(h->grid / fit) * (weights + inner_bytes(spec, tokens, h->cluster));
}

static double down_bytes(const moq_moe_spec *spec, double chunks) {
    return chunks * slab_bytes(spec, down_slabs(spec), spec->w2.in_features);
}

/* Bytes of a layer whose rows begin within lines of 128 bytes, as every second one of 2880 columns
 * does. */
static double parted_bytes(const moq_linear_spec *layer, double bytes) {
    return layer->weight != MOQ_WEIGHT_E2M1_PACKED && layer->in_features % 128 ? bytes : 0;
}

/* Blocks of K of all slabs that the busiest block of a kernel goes through, of so many items. */
static double busiest(const moq_moe_spec *spec, const moq_moe_decode_half *h, double items,
                      int64_t columns) {
    int64_t warps = MOQ_MOE_DECODE_WARPS, blocks = blocks_of(spec, columns);
    int64_t each = h->split ? h->split << h->log_splits : divide_up(blocks, warps) * warps;
    return ceil(items / h->grid) * (double)(each * h->slabs);
}

static void count_products(const moq_moe_spec *spec, int64_t tokens,
                           const moq_moe_decode_share *share, moq_load *w) {
    const moq_moe_decode_half *up = &share->up, *down = &share->down;
    double chunks = expected_chunks(spec, tokens), first = up_bytes(spec, chunks);
    double second = down_bytes(spec, chunks), slots = (double)slots_of(spec, tokens);
    double rows = (double)(spec->w2.in_features / MOQ_PACK_ROWS);
    w->bytes = first + (down->split ? second : 0);
    w->inside[0] = slots * rows / spec->w13.target.sm_count;
    w->inside[1] = busiest(spec, up, chunks * rows, spec->w13.in_features);
    if (down->split)
        w->inside[2] = busiest(spec, down, chunks * (double)divide_up(down_slabs(spec), 2),
                               spec->w2.in_features);
    w->beside[1] = down->split ? chunks : cluster_bytes(spec, tokens, down);
    w->beside[2] = parted_bytes(&spec->w13, first) + parted_bytes(&spec->w2, second);
}

static void count_fused_tiles(const moq_moe_spec *spec, int64_t tokens, const moq_moe_fused *s,
                              moq_load *w) {
    double chunks = expected_chunks(spec, tokens), tiles = (double)fused_tiles_of(spec);
    double bytes = up_bytes(spec, 1) + down_bytes(spec, 1);
    double each = fmax(1, ceil(chunks * tiles / spec->w2.target.sm_count));
    w->bytes = chunks * bytes;
    w->inside[0] = s->split ? each * bytes / tiles : 0;
    w->beside[1] = s->split ? !s->alone : s->block_tiles;
}

/* Slices by blocks without a gate take 19 us more, whatever they read (Nemotron-3-Nano, one to four
 * tokens on an H200): they are left out. */
static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_moe_spec *spec = p->layer;
    moq_moe_decode_share share;
    if (!lay_out_config(spec, p->tokens, config, &share) ||
        (share.up.split && !spec->gated && spec->w13.weight == MOQ_WEIGHT_E4M3_BLOCK))
        return false;
    if (config == MOQ_MOE_DECODE_FUSED)
        count_fused_tiles(spec, p->tokens, &share.tiles, w);
    else
        count_products(spec, p->tokens, &share, w);
    w->beside[0] = moq_expected_slots(spec, p->tokens) * (double)spec->w2.out_features;
    if (format_of(spec) == &FP8_FORMAT)
        w->rates += CONFIGS * (int)(spec->w13.input - MOQ_INPUT_E4M3_TENSOR);
    return true;
}

static const moq_configs FP8 = {.configs = CONFIGS, .rates = FP8_RATES, .work = work};
static const moq_configs NVFP4 = {.configs = CONFIGS, .rates = NVFP4_RATES, .work = work};

static const moq_configs *configs_of(const moq_moe_spec *spec) {
    return format_of(spec) == &FP8_FORMAT ? &FP8 : &NVFP4;
}

void moq_moe_decode_partition(const moq_moe_spec *spec, int64_t tokens, moq_kernel_config geometry,
                              moq_moe_decode_share *share) {
    bool fits = lay_out_config(spec, tokens, moq_tiling_row(geometry.tiling), share);
    MOQ_ASSERT(fits);
    (void)fits;
}

int64_t moq_moe_decode_workspace(const moq_moe_spec *spec, int64_t tokens,
                                 moq_kernel_config geometry) {
    moq_moe_decode_share share;
    if (moq_tiling_row(geometry.tiling) != MOQ_MOE_DECODE_FUSED)
        return halves_workspace(spec, tokens);
    moq_moe_decode_partition(spec, tokens, geometry, &share);
    return fused_workspace(spec, tokens, &share.tiles);
}

/* ---- the kernels ---- */

static bool is_exact_packed(const moq_linear_spec *layer) {
    return layer->weight == MOQ_WEIGHT_E2M1_PACKED &&
           (layer->input == MOQ_INPUT_AS_IS || moq_linear_has_choice(layer));
}

static bool is_fp8(const moq_linear_spec *layer) {
    return layer->weight == MOQ_WEIGHT_E4M3_ROW || layer->weight == MOQ_WEIGHT_E4M3_BLOCK;
}

/* True if both inner dimensions are multiples of `columns`. */
static bool takes_sizes(const moq_moe_spec *spec, int columns, char *reason, size_t size) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    long long hidden = w13->in_features, inner = w2->in_features;
    if (hidden % columns || inner % columns)
        snprintf(reason, size,
                 "needs hidden and intermediate sizes that are multiples of %d, got %lld and %lld",
                 columns, hidden, inner);
    else if (hidden > MOQ_MOE_DECODE_COLUMNS || inner > MOQ_MOE_DECODE_COLUMNS)
        snprintf(reason, size, "needs hidden and intermediate sizes up to %d, got %lld and %lld",
                 MOQ_MOE_DECODE_COLUMNS, hidden, inner);
    else if (spec->experts > MOQ_MOE_DECODE_EXPERTS)
        snprintf(reason, size, "needs at most %d experts, got %d", MOQ_MOE_DECODE_EXPERTS,
                 (int)spec->experts);
    else if (w13->dtype != MOQ_DT_BF16 && w13->dtype != MOQ_DT_F16)
        snprintf(reason, size, "needs bfloat16 or float16, got %s", moq_dtype_name(w13->dtype));
    else if (w13->pre_quant_scale)
        snprintf(reason, size, "does not smooth x, %s does", w13->algo);
    else
        return true;
    return false;
}

static bool takes_tokens(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    moq_problem p = {spec, &spec->w13.target, tokens > 0 ? tokens : 1, true};
    if (tokens > MOQ_MOE_DECODE_SLOTS / spec->top_k)
        snprintf(reason, size, "needs at most %d slots, got %lld tokens of %d",
                 MOQ_MOE_DECODE_SLOTS, (long long)tokens, (int)spec->top_k);
    else if (!(moq_find_config(configs_of(spec), &p).seconds < INFINITY))
        snprintf(reason, size, "has no room in shared memory for %lld tokens", (long long)tokens);
    else
        return true;
    return false;
}

static bool can_run_nvfp4(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    if (!moq_is_on_sm90(&spec->w13, reason, size))
        return false;
    if (is_exact_packed(&spec->w13) && is_exact_packed(&spec->w2))
        return takes_sizes(spec, MOQ_PACK_K, reason, size) &&
               takes_tokens(spec, tokens, reason, size);
    snprintf(reason, size, "multiplies NVFP4 weights exactly, %s with compute %s asks for another",
             spec->w13.algo, moq_compute_name(spec->w13.compute));
    return false;
}

/* A lane has 32 columns, all or none. */
static bool can_run_fp8(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    if (!moq_is_on_sm90(&spec->w13, reason, size))
        return false;
    if (is_fp8(&spec->w13) && is_fp8(&spec->w2))
        return takes_sizes(spec, 32, reason, size) && takes_tokens(spec, tokens, reason, size);
    snprintf(reason, size, "multiplies FP8 weights, %s with compute %s has others", spec->w13.algo,
             moq_compute_name(spec->w13.compute));
    return false;
}

/* Entries of launch.cu. */
MOQ_ENTRY moq_status moq_cuda_moe_fp8_decode(const moq_moe_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_moe_fp8_decode_workspace(const moq_moe_call *call);
MOQ_ENTRY moq_status moq_cuda_moe_nvfp4_decode(const moq_moe_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cuda_moe_nvfp4_decode_workspace(const moq_moe_call *call);

const moq_moe_kernel MOQ_MOE_SM90_FP8_DECODE = {
    {"cuda", "sm90_fp8_decode", .configs = &FP8, .takes_codes = true},
    can_run_fp8,
    .workspace = moq_cuda_moe_fp8_decode_workspace,
    .run = moq_cuda_moe_fp8_decode,
};

const moq_moe_kernel MOQ_MOE_SM90_NVFP4_DECODE = {
    {"cuda", "sm90_nvfp4_decode", .configs = &NVFP4},
    can_run_nvfp4,
    .workspace = moq_cuda_moe_nvfp4_decode_workspace,
    .run = moq_cuda_moe_nvfp4_decode,
};
