/* Sharing out a call of experts with few tokens: see moe_decode.h. */
#include "cuda/choice/moe_decode.h"

#include "core/invariant.h"
#include "core/sizes.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/routing.h"

#include <math.h>
#include <stdio.h>

/* Shared memory of a block that leaves room for a second one on the multiprocessor, less what the
 * kernels declare. */
#define BLOCK_BYTES (112 << 10)
/* That of a block that is alone there, likewise. */
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

/* Of g and d in the forms of two products. */
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
    int whole;          /* a stage is of all blocks of a slice, or of one */
    int flight;         /* stages of a fresh ring that are on their way at once */
    int split[8];       /* blocks that it may have, then 0 */
} format;

#define SPLIT(count) count,
static const format NVFP4 = {MOQ_PACK_K,
                             MOQ_PACK_BYTES,
                             MOQ_MOE_NVFP4_DECODE_UNITS,
                             0,
                             0,
                             1,
                             1,
                             {MOQ_MOE_NVFP4_DECODE_SPLIT_K(SPLIT)}};
static const format FP8 = {128,  16 * 128, 0, MOQ_MOE_FP8_DECODE_BLOCKS,
                           1024, 0,        3, {MOQ_MOE_FP8_DECODE_SPLIT_K(SPLIT)}};
#undef SPLIT

static const format *format_of(const moq_moe_spec *spec) {
    return spec->w13.weight == MOQ_WEIGHT_E2M1_PACKED ? &NVFP4 : &FP8;
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

/* Bytes of sums of all warps that meet in shared memory: those of some items with slices, else what
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

/* As many stages as there is room for, and use: a warp fills so many. False where there is no room
 * for two. */
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

/* The shortest slice of so many blocks or more that K has room for, or 0. */
static int split_of_warp(const format *f, int64_t least, int64_t blocks) {
    for (int i = 0; f->split[i] && f->split[i] <= blocks; i++)
        if (f->split[i] >= least)
            return f->split[i];
    return 0;
}

static int stages_of_split(const moq_moe_spec *spec, const moq_moe_decode_half *h) {
    return format_of(spec)->whole ? 1 : h->split;
}

/* Which warps share K where each has a slice: two at least, those that have least to do that is not
 * there, and of these the most. False where a slice is too long for a warp. */
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

/* Stages of a warp where a block has so many items of slices. */
static int64_t stages_of_items(const moq_moe_decode_half *h, int64_t items) {
    return h->pieces * divide_up(items << h->log_splits, MOQ_MOE_DECODE_WARPS);
}

static bool partition_up(const moq_moe_spec *spec, int64_t tokens, int log_blocks, bool splits,
                         moq_moe_decode_half *h) {
    int64_t slots = slots_of(spec, tokens), columns = spec->w13.in_features;
    int64_t items = chunks_of(spec, slots) * (spec->w2.in_features / MOQ_PACK_ROWS);
    h->grid = spec->w13.target.sm_count << log_blocks;
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

/* A cluster has some slabs of all experts. */
static bool partition_cluster(const moq_moe_spec *spec, int64_t tokens, int log_slabs,
                              int log_cluster, moq_moe_decode_half *h) {
    int64_t slots = slots_of(spec, tokens), rows = (int64_t)MOQ_PACK_ROWS << log_slabs;
    h->slabs = 1 << log_slabs;
    h->cluster = 1 << log_cluster;
    h->grid = (int)(divide_up(down_slabs(spec), h->slabs) * h->cluster);
    int64_t items = divide_up(chunks_of(spec, slots), h->cluster);
    int64_t blocks = items * blocks_of(spec, spec->w2.in_features);
    return fill_half(spec, slots, slots * (rows >> log_cluster) * 4,
                     stages_of(spec, blocks, h->slabs), h);
}

/* With slices, and a kernel behind it that adds up slots. */
static bool partition_sums(const moq_moe_spec *spec, int64_t tokens, int log_blocks,
                           moq_moe_decode_half *h) {
    int64_t slots = slots_of(spec, tokens);
    h->slabs = 2;
    h->cluster = 1;
    h->grid = spec->w2.target.sm_count << log_blocks;
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

/* ---- strips ---- */

/* Blocks of K of a slice in the first product, or 0 where none has room. */
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

/* Stages that are on their way at once at first, where a block has one strip. */
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

/* Those of FP8: stages of a warp that are on their way at first, and stages of the first product
 * that are left when the second one's weights are asked for. With one or two, and one to five left,
 * one and two tokens of Qwen3-30B-A3B take 15.0 to 16.2 and 25.7 to 27.0 us on an H200; with these
 * 15.4 and 25.8, in blocks 15.0 and 25.9. */
#define FP8_FUSED_FLIGHT 1
#define FP8_FUSED_LEFT   2

static void fused_fp8_smem_layout(moq_moe_fused *s) {
    const int warps = MOQ_MOE_FUSED_WARPS, columns = MOQ_MOE_FUSED_COLUMNS;
    int used = 0;
    s->stages = MOQ_MOE_FP8_FUSED_STAGES;
    take(&used, (int64_t)warps * s->stages * FP8.bytes);
    s->down_at =
        take(&used, (int64_t)warps * MOQ_MOE_FP8_FUSED_DOWN_SLABS * MOQ_PACK_ROWS * columns);
    s->staged_at = take(&used, warps * MOQ_MOE_FP8_FUSED_PITCH * 4);
    s->g_at = take(&used, columns * 2 + 4 * warps * 4); /* and maxima of it */
    s->shared = used + FP8.alignment;
}

/* Blocks of a cluster, which have strips with one scale of g; 0 where a scale needs all of g. */
static int fused_fp8_cluster(const moq_moe_spec *spec) {
    if (spec->w2.in_features % MOQ_MOE_FUSED_COLUMNS)
        return 0;
    if (spec->w2.input == MOQ_INPUT_E4M3_GROUP)
        return spec->w2.in_features % 128 ? 0 : 2;
    return spec->w2.input == MOQ_INPUT_E4M3_TENSOR;
}

/* Each slot is by itself, and its strips are spread over as many blocks as there are for it. */
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
    if (format_of(spec) == &FP8)
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

/* ---- the way ---- */

/* Ways to do the second kernel: slices and blocks of a multiprocessor, or slabs and blocks of a
 * cluster. Numbers are logarithms. */
typedef struct {
    bool splits;
    int blocks, slabs;
} down_config;

static const down_config DOWN[] = {{true, 0, 0},  {true, 1, 0},  {false, 0, 0}, {false, 1, 0},
                                   {false, 0, 1}, {false, 1, 1}, {false, 2, 0}, {false, 2, 1}};
_Static_assert(sizeof DOWN / sizeof *DOWN * 2 == MOQ_MOE_DECODE_SPLIT_K, "a way for three bits");

static bool partition_down(const moq_moe_spec *spec, int64_t tokens, const down_config *config,
                           moq_moe_decode_half *h) {
    return config->splits ? partition_sums(spec, tokens, config->blocks, h)
                          : partition_cluster(spec, tokens, config->slabs, config->blocks, h);
}

static bool partition_row(const moq_moe_spec *spec, int64_t tokens, int row,
                          moq_moe_decode_share *share) {
    const down_config *down = &DOWN[row % MOQ_MOE_DECODE_SPLIT_K / 2];
    *share = (moq_moe_decode_share){{0}, {0}, {0}};
    if (row == MOQ_MOE_DECODE_FUSED)
        return partition_fused(spec, tokens, &share->tiles);
    share->up.pieces = share->down.pieces = 1;
    return partition_up(spec, tokens, row % 2, row >= MOQ_MOE_DECODE_SPLIT_K, &share->up) &&
           partition_down(spec, tokens, down, &share->down);
}

/* Bytes of `slabs` slabs of a weight. */
static double slab_bytes(const moq_moe_spec *spec, int64_t slabs, int64_t columns) {
    return (double)slabs * (double)blocks_of(spec, columns) * format_of(spec)->bytes;
}

/* Bytes of weights that a multiprocessor reads up to which a block of the first kernel should leave
 * room for one of the second, where that has clusters. */
#define ONE_BLOCK (160 << 10)

static double up_bytes(const moq_moe_spec *spec, double chunks) {
    return chunks * slab_bytes(spec, spec->w13.out_features / MOQ_PACK_ROWS, spec->w13.in_features);
}

/* Bytes a second, fitted to an H200, on the target: with 0.7 of its memory's rate an H100 has 0.72
 * of these, by which 126 cells with up to 128 tokens have the faster kernel most often. */
#define MEMORY_POWER 0.9

static double rate_on(const moq_target *target, double fitted) {
    return fitted * pow(moq_memory_rate(target, 1), MEMORY_POWER);
}

/* Slices of FP8 whose rows begin within lines of 128 bytes, as every second one of 2880 columns
 * does, have no more bytes a second than this on either chip: gpt-oss-120b with four tokens takes
 * 149 us in slices on an H200, 115 without them, with 64 in slices 1140, on an H100 1085. */
#define PARTED_RATE 2.85e12

/* Of slices of W of a layer. */
static double split_rate(const moq_linear_spec *layer, double fitted) {
    double rate = rate_on(&layer->target, fitted);
    bool parted = layer->weight != MOQ_WEIGHT_E2M1_PACKED && layer->in_features % 128;
    return parted ? fmin(rate, PARTED_RATE) : rate;
}

/* What a chunk costs beside NVFP4's bytes in the first kernel and in the second, so that large
 * experts are read faster. */
#define UP_CHUNK   0.043e-6
#define DOWN_CHUNK 0.022e-6

/* Seconds of the first kernel with two blocks a multiprocessor, fitted to an H200
 * (docs/lab/experts-decode.md): a start and its weights; the end of a slot's items costs time
 * beside NVFP4's products where warps share them. */
static double up_seconds(const moq_moe_spec *spec, int64_t tokens, const moq_moe_decode_half *h) {
    const moq_target *target = &spec->w13.target;
    bool nvfp4 = format_of(spec) == &NVFP4;
    double chunks = expected_chunks(spec, tokens), bytes = up_bytes(spec, chunks);
    double beside = nvfp4 ? UP_CHUNK * chunks : 0;
    if (!h->split)
        return 6.7e-6 + beside + bytes / rate_on(target, nvfp4 ? 4.02e12 : 3.9e12);
    double ends = (double)(slots_of(spec, tokens) * (spec->w2.in_features / MOQ_PACK_ROWS));
    return 6.0e-6 + beside + bytes / split_rate(&spec->w13, nvfp4 ? 4.15e12 : 4.0e12) +
           (nvfp4 ? 0.055e-6 * ends / target->sm_count : 0);
}

/* Where clusters read NVFP4's g, bytes of a row behind so many columns count a quarter: as weights
 * they made Mixtral-8x7B with 16 to 64 tokens 8 to 10 % too long. */
#define LONG_ROW 1536

/* Bytes of g that a block reads, as bytes of weights. */
static double inner_bytes(const moq_moe_spec *spec, int64_t tokens, int cluster) {
    double bytes = (double)moq_moe_decode_inner_bytes(spec, tokens) / cluster;
    if (cluster == 1 || format_of(spec) != &NVFP4)
        return bytes;
    return bytes * (1 - 0.75 * fmax(0, 1 - (double)LONG_ROW / (double)spec->w2.in_features));
}

/* Clusters of four blocks take 0 to 25 % more than those of two, of three models with 4 to 128
 * tokens on an H200. */
#define LARGE_CLUSTER 1.15

/* Seconds of what follows, likewise. With clusters it is what the busiest multiprocessor reads, of
 * weights and of g, and the meeting of a cluster; with slices it is the weights, and the start of a
 * third kernel. */
static double down_seconds(const moq_moe_spec *spec, int64_t tokens, const moq_moe_decode_half *h) {
    const moq_target *target = &spec->w2.target;
    bool nvfp4 = format_of(spec) == &NVFP4;
    double chunks = expected_chunks(spec, tokens), beside = nvfp4 ? DOWN_CHUNK * chunks : 0;
    if (h->split) {
        double rate = split_rate(&spec->w2, nvfp4 ? 3.56e12 : 3.9e12);
        double weights = chunks * slab_bytes(spec, down_slabs(spec), spec->w2.in_features);
        double few_warps = h->grid > target->sm_count ? 1 : 1.25;
        return 4.9e-6 + beside + few_warps * weights / rate;
    }
    double weights = ceil(chunks / h->cluster) * slab_bytes(spec, h->slabs, spec->w2.in_features);
    double inner = inner_bytes(spec, tokens, h->cluster);
    double fit = h->cluster > 1 ? (double)moq_clusters_that_fit(target, h->cluster) * h->cluster
                                : target->sm_count;
    double each = ceil(h->grid / fit); /* blocks of a multiprocessor, two at once */
    double turns = ceil(each / 2);
    double bytes = (turns > 1 ? 2 * turns : each) * (weights + inner);
    double rate = rate_on(target, 4.3e12) / target->sm_count;
    double alone = each < 2 ? 1.3 : 1; /* too few warps */
    if (nvfp4 && h->cluster > 2)
        alone *= LARGE_CLUSTER;
    return 5e-6 + alone * bytes / rate + 2e-6 * (turns - 1) + 0.5e-6 * (h->cluster > 1) +
           0.1e-6 * h->cluster;
}

/* What the slots that are expected here add to NVFP4: 14, 20, 43 and 69 us with 128 to 1024 of them
 * and 7168 columns, 27 with 1024 and 2048. */
static double slots_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double outputs = moq_expected_slots(spec, tokens) * (double)spec->w2.out_features;
    return format_of(spec) == &NVFP4 ? 11.5e-12 * outputs : 0;
}

/* Slots up to which strips were measured; with more, experts have several chunks. */
#define FUSED_SLOTS 512

/* Seconds of the kernel of strips and the sum, likewise: the strips of the busiest block, of which
 * the first product has whole slices, and what comes with a slot. */
static double fused_seconds(const moq_moe_spec *spec, int64_t tokens, const moq_moe_fused *s) {
    const moq_target *target = &spec->w2.target;
    double tiles = (double)fused_tiles_of(spec);
    int64_t columns = (int64_t)s->split * MOQ_MOE_FUSED_SPLITS * MOQ_PACK_K;
    double bytes = slab_bytes(spec, spec->w13.out_features / MOQ_PACK_ROWS, columns) +
                   slab_bytes(spec, down_slabs(spec), spec->w2.in_features);
    double each = fmax(1, ceil(expected_chunks(spec, tokens) * tiles / target->sm_count));
    double rate = rate_on(target, 4.05e12) / target->sm_count;
    double outputs = (double)(slots_of(spec, tokens) * spec->w2.out_features);
    return (s->alone ? 5.2e-6 : 9.0e-6) + each * bytes / tiles / rate + 6.2e-12 * outputs;
}

/* Strips of a block of FP8 up to which they were measured. */
#define FP8_BLOCK_TILES 3

/* Those of FP8, likewise: a start, what of each strip of a block is not hidden by the copies of
 * others, and the weights, of which those of an expert with two slots are read twice, from L2 once.
 * Of 40 times of seven models with one to four tokens 3.7 % off root mean square, 10 at most. */
static double fused_fp8_seconds(const moq_moe_spec *spec, int64_t tokens, const moq_moe_fused *s) {
    double bytes = slab_bytes(spec, spec->w13.out_features / MOQ_PACK_ROWS, spec->w13.in_features) +
                   slab_bytes(spec, down_slabs(spec), spec->w2.in_features);
    double all = expected_chunks(spec, tokens) * bytes;
    return s->block_tiles > FP8_BLOCK_TILES
               ? INFINITY
               : 4.1e-6 + 3.2e-6 * s->block_tiles + all / rate_on(&spec->w2.target, 4.6e12);
}

/* What FP8's scales make of the seconds of two products: times of three models with 1 to 64 tokens
 * on an H200, in the mean (docs/lab/experts-decode.md). */
static double scaling(const moq_moe_spec *spec) {
    if (format_of(spec) == &NVFP4)
        return 1;
    return spec->w13.input == MOQ_INPUT_E4M3_TOKEN ? 1.09 : 1.05;
}

/* Seconds of a row, infinite where it cannot be, or where the first kernel should have another
 * number of blocks. */
static double row_seconds(const moq_moe_spec *spec, int64_t tokens, int row) {
    moq_moe_decode_share share;
    if (!partition_row(spec, tokens, row, &share))
        return INFINITY;
    if (row == MOQ_MOE_DECODE_FUSED && format_of(spec) == &FP8)
        return fused_fp8_seconds(spec, tokens, &share.tiles);
    if (row == MOQ_MOE_DECODE_FUSED)
        return slots_of(spec, tokens) > FUSED_SLOTS ? INFINITY
                                                    : fused_seconds(spec, tokens, &share.tiles);
    /* Slices by blocks without a gate take 19 us more, whatever they read (Nemotron-3-Nano, one to
     * four tokens on an H200); why is not known. */
    if (share.up.split && !spec->gated && spec->w13.weight == MOQ_WEIGHT_E4M3_BLOCK)
        return INFINITY;
    bool one = !share.up.split && !share.down.split &&
               up_bytes(spec, expected_chunks(spec, tokens)) <=
                   (double)ONE_BLOCK * spec->w13.target.sm_count;
    if (row % 2 == one)
        return INFINITY;
    return scaling(spec) * (up_seconds(spec, tokens, &share.up) +
                            down_seconds(spec, tokens, &share.down) + slots_seconds(spec, tokens));
}

static int best_row(const moq_moe_spec *spec, int64_t tokens, double *seconds) {
    int best = -1;
    *seconds = INFINITY;
    for (int row = 0; row <= MOQ_MOE_DECODE_FUSED; row++) {
        double own = row_seconds(spec, tokens, row);
        if (own < *seconds) {
            *seconds = own;
            best = row;
        }
    }
    return best;
}

/* A form has room for the rows of the two products; the next number of blocks says strips. */
static moq_kernel_config config_of_row(int32_t variant, int row) {
    return row == MOQ_MOE_DECODE_FUSED ? moq_kernel_config_of(variant, 0, 2)
                                       : moq_kernel_config_of(variant, row, 1);
}

static int row_of_config(moq_kernel_config config) {
    return moq_tiling_blocks(config.tiling) == 2 ? MOQ_MOE_DECODE_FUSED
                                                 : moq_tiling_row(config.tiling);
}

moq_kernel_config moq_moe_decode_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant) {
    moq_moe_decode_share share;
    int row = variant - 1;
    double seconds;
    bool can = row >= 0 && row <= MOQ_MOE_DECODE_FUSED && partition_row(spec, tokens, row, &share);
    return config_of_row(can ? variant : 0, can ? row : best_row(spec, tokens, &seconds));
}

uint64_t moq_moe_decode_variants(const moq_moe_call *call) {
    uint64_t variants = 1;
    double least;
    int best = best_row(call->spec, call->tokens, &least);
    for (int row = 0; row <= MOQ_MOE_DECODE_FUSED; row++)
        if (row != best && row_seconds(call->spec, call->tokens, row) < 1.5 * least)
            variants |= 1ull << (row + 1);
    return variants;
}

void moq_moe_decode_partition(const moq_moe_spec *spec, int64_t tokens, moq_kernel_config config,
                              moq_moe_decode_share *share) {
    bool fits = partition_row(spec, tokens, row_of_config(config), share);
    MOQ_ASSERT(fits);
    (void)fits;
}

int64_t moq_moe_decode_workspace(const moq_moe_spec *spec, int64_t tokens,
                                 moq_kernel_config config) {
    moq_moe_decode_share share;
    if (row_of_config(config) != MOQ_MOE_DECODE_FUSED)
        return halves_workspace(spec, tokens);
    moq_moe_decode_partition(spec, tokens, config, &share);
    return fused_workspace(spec, tokens, &share.tiles);
}

/* ---- what the kernels take ---- */

static bool is_exact_packed(const moq_linear_spec *layer) {
    return layer->weight == MOQ_WEIGHT_E2M1_PACKED &&
           (layer->input == MOQ_INPUT_AS_IS || moq_linear_has_choice(layer));
}

static bool is_fp8(const moq_linear_spec *layer) {
    return layer->weight == MOQ_WEIGHT_E4M3_ROW || layer->weight == MOQ_WEIGHT_E4M3_BLOCK;
}

/* Both inner dimensions are multiples of `columns`. */
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
    double seconds;
    if (tokens > MOQ_MOE_DECODE_SLOTS / spec->top_k)
        snprintf(reason, size, "needs at most %d slots, got %lld tokens of %d",
                 MOQ_MOE_DECODE_SLOTS, (long long)tokens, (int)spec->top_k);
    else if (best_row(spec, tokens > 0 ? tokens : 1, &seconds) < 0)
        snprintf(reason, size, "has no room in shared memory for %lld tokens", (long long)tokens);
    else
        return true;
    return false;
}

bool moq_moe_nvfp4_decode_takes(const moq_moe_spec *spec, int64_t tokens, char *reason,
                                size_t size) {
    if (is_exact_packed(&spec->w13) && is_exact_packed(&spec->w2))
        return takes_sizes(spec, MOQ_PACK_K, reason, size) &&
               takes_tokens(spec, tokens, reason, size);
    snprintf(reason, size, "multiplies NVFP4 weights exactly, %s with compute %s asks for another",
             spec->w13.algo, moq_compute_name(spec->w13.compute));
    return false;
}

/* A lane has 32 columns, all or none. */
bool moq_moe_fp8_decode_takes(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    if (is_fp8(&spec->w13) && is_fp8(&spec->w2))
        return takes_sizes(spec, 32, reason, size) && takes_tokens(spec, tokens, reason, size);
    snprintf(reason, size, "multiplies FP8 weights, %s with compute %s has others", spec->w13.algo,
             moq_compute_name(spec->w13.compute));
    return false;
}

double moq_moe_decode_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double seconds;
    best_row(spec, tokens, &seconds);
    return seconds;
}
