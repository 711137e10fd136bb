/* Sharing out a call of experts with few tokens: see moe_few.h. */
#include "cuda/choice/moe_few.h"

#include "core/invariant.h"
#include "cuda/choice/chip.h"

#include <math.h>
#include <stdio.h>

/* Shared memory of a block that leaves room for a second one on the multiprocessor, less what the
 * kernels declare. */
#define BLOCK_BYTES (111 << 10)
/* Slots up to here are grouped by the lanes of a warp, which need no counts. */
#define LANES 32

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

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
    return slots < spec->experts ? slots : spec->experts + slots / MOQ_MOE_FEW_CHUNK;
}

int64_t moq_moe_few_inner_bytes(const moq_moe_spec *spec, int64_t tokens) {
    return slots_of(spec, tokens) * spec->w2.in_features * (int64_t)moq_dtype_size(spec->w2.dtype);
}

/* ---- shared memory ---- */

static int stage_bytes_of(int slabs) {
    return slabs * MOQ_MOE_FEW_STAGE_BLOCKS * MOQ_PACK_BYTES;
}

/* With so many stages; `sums` are bytes of what slots give to a block, 0 in the first kernel. */
static void lay_out(const moq_moe_spec *spec, int64_t slots, int64_t sums, int stages,
                    moq_moe_few_half *h) {
    int used = 0;
    h->stages = stages;
    take(&used, (int64_t)MOQ_MOE_FEW_WARPS * stages * stage_bytes_of(h->slabs));
    h->parked_at = take(&used, (int64_t)MOQ_MOE_FEW_WARPS * h->slabs * 4 * LANES * 4);
    h->sums_at = take(&used, sums);
    h->weights_at = take(&used, sums ? slots * 4 : 0);
    h->tables.expert = take(&used, slots * 4);
    h->tables.sorted = take(&used, slots * 2);
    h->tables.chunk = take(&used, chunks_of(spec, slots) * 4);
    h->tables.count = take(&used, slots > LANES ? spec->experts * 4 : 0);
    h->tables.chunks = take(&used, 4);
    h->shared = used;
}

/* As many stages as there is room for, and use: a warp has so many blocks of K. False where there
 * is no room for two. */
static bool fill_half(const moq_moe_spec *spec, int64_t slots, int64_t sums, int64_t blocks,
                      moq_moe_few_half *h) {
    if (sums > BLOCK_BYTES)
        return false;
    lay_out(spec, slots, sums, 0, h);
    int64_t room = (BLOCK_BYTES - h->shared) / (MOQ_MOE_FEW_WARPS * stage_bytes_of(h->slabs));
    int64_t use = divide_up(blocks, MOQ_MOE_FEW_STAGE_BLOCKS) + 1;
    int64_t stages = room < use ? room : use;
    if (stages < 2)
        return false;
    lay_out(spec, slots, sums, (int)(stages < MOQ_MOE_FEW_STAGES ? stages : MOQ_MOE_FEW_STAGES), h);
    return true;
}

/* ---- the two kernels ---- */

static bool lay_out_up(const moq_moe_spec *spec, int64_t tokens, int log_blocks,
                       moq_moe_few_half *h) {
    int64_t slots = slots_of(spec, tokens);
    int64_t items = chunks_of(spec, slots) * (spec->w2.in_features / MOQ_PACK_ROWS);
    h->grid = spec->w13.target.sm_count << log_blocks;
    h->cluster = 1;
    h->slabs = spec->gated ? 2 : 1;
    int64_t blocks = divide_up(items, h->grid) * moq_pack_blocks(spec->w13.in_features);
    return fill_half(spec, slots, 0, divide_up(blocks, MOQ_MOE_FEW_WARPS), h);
}

static int64_t down_slabs(const moq_moe_spec *spec) {
    return divide_up(spec->w2.out_features, MOQ_PACK_ROWS);
}

static bool lay_out_down(const moq_moe_spec *spec, int64_t tokens, int log_slabs, int log_cluster,
                         moq_moe_few_half *h) {
    int64_t slots = slots_of(spec, tokens), rows = (int64_t)MOQ_PACK_ROWS << log_slabs;
    h->slabs = 1 << log_slabs;
    h->cluster = 1 << log_cluster;
    h->grid = (int)(divide_up(down_slabs(spec), h->slabs) * h->cluster);
    int64_t items = divide_up(chunks_of(spec, slots), h->cluster);
    int64_t blocks = items * moq_pack_blocks(spec->w2.in_features);
    return fill_half(spec, slots, slots * (rows >> log_cluster) * 4,
                     divide_up(blocks, MOQ_MOE_FEW_WARPS), h);
}

/* ---- the way ---- */

static bool lay_out_row(const moq_moe_spec *spec, int64_t tokens, int row,
                        moq_moe_few_share *share) {
    *share = (moq_moe_few_share){{0}, {0}};
    return lay_out_up(spec, tokens, row & 1, &share->up) &&
           lay_out_down(spec, tokens, row >> 1 & 3, row >> 3, &share->down);
}

/* Bytes of a layer's weights of `rows` rows. */
static double weight_bytes(int64_t rows, int64_t columns) {
    return (double)moq_pack_slabs(rows) * (double)moq_pack_blocks(columns) * MOQ_PACK_BYTES;
}

/* Experts that have a slot, as they are expected of a router that likes all. */
static double active_experts(const moq_moe_spec *spec, int64_t tokens) {
    double all = spec->experts, share = (double)spec->top_k / spec->global_experts;
    return all * (1 - pow(share < 1 ? 1 - share : 0, (double)tokens));
}

/* Bytes of weights that a multiprocessor reads beside which two blocks of the first kernel are
 * better than one and its ring: with one, a block of the second kernel is there from the start. */
#define ONE_BLOCK (160 << 10)

/* Seconds of the second kernel by its slabs and clusters, as far as they tell: what the busiest
 * multiprocessor reads, of weights and of g, and the meeting of a cluster. A block alone on its
 * multiprocessor cannot read as fast where it has to read for long. */
static double down_seconds(const moq_moe_spec *spec, int64_t tokens, const moq_moe_few_half *h) {
    double chunks = fmax(1, active_experts(spec, tokens));
    double slab =
        weight_bytes(MOQ_PACK_SLABS * MOQ_PACK_ROWS, spec->w2.in_features) / MOQ_PACK_SLABS;
    double weights = ceil(chunks / h->cluster) * h->slabs * slab;
    double inner = (double)moq_moe_few_inner_bytes(spec, tokens) / h->cluster;
    double each = ceil((double)h->grid / spec->w2.target.sm_count);
    double bytes = each * (weights + 0.5 * inner);
    double rate = moq_memory_rate(&spec->w2.target, 4.3e12) / spec->w2.target.sm_count;
    double alone = each < 2 && bytes > ONE_BLOCK ? 1.15 : 1;
    return alone * bytes / rate + (h->cluster > 1 ? 0.5e-6 : 0) + 0.1e-6 * h->cluster;
}

static int best_row(const moq_moe_spec *spec, int64_t tokens) {
    double up = active_experts(spec, tokens) *
                weight_bytes(spec->w13.out_features, spec->w13.in_features) /
                spec->w13.target.sm_count;
    int best = -1;
    double least = INFINITY;
    for (int row = 0; row < MOQ_MOE_FEW_WAYS; row++) {
        moq_moe_few_share share;
        if ((row & 1) != (up > ONE_BLOCK) || (row >> 1 & 3) == 3 ||
            !lay_out_row(spec, tokens, row, &share))
            continue;
        double seconds = down_seconds(spec, tokens, &share.down);
        if (seconds < least) {
            least = seconds;
            best = row;
        }
    }
    return best;
}

moq_way moq_moe_nvfp4_few_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant) {
    moq_moe_few_share share;
    int row = variant - 1;
    bool can = row >= 0 && row < MOQ_MOE_FEW_WAYS && (row >> 1 & 3) < 3 &&
               lay_out_row(spec, tokens, row, &share);
    return moq_way_of(can ? variant : 0, can ? row : best_row(spec, tokens), 1);
}

void moq_moe_nvfp4_few_share_out(const moq_moe_spec *spec, int64_t tokens, moq_way way,
                                 moq_moe_few_share *share) {
    bool fits = lay_out_row(spec, tokens, moq_form_row(way.form), share);
    MOQ_ASSERT(fits);
    (void)fits;
}

/* ---- what the kernels take ---- */

static bool is_exact_packed(const moq_linear_spec *layer) {
    return layer->weight == MOQ_WEIGHT_E2M1_PACKED &&
           (layer->input == MOQ_INPUT_AS_IS || moq_linear_has_choice(layer));
}

static bool takes_layer(const moq_moe_spec *spec, char *reason, size_t size) {
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    if (!is_exact_packed(w13) || !is_exact_packed(w2))
        snprintf(reason, size,
                 "multiplies NVFP4 weights exactly, %s with compute %s asks for another", w13->algo,
                 moq_compute_name(w13->compute));
    else if (w13->dtype != MOQ_DT_BF16 && w13->dtype != MOQ_DT_F16)
        snprintf(reason, size, "needs bfloat16 or float16, got %s", moq_dtype_name(w13->dtype));
    else if (w13->pre_quant_scale)
        snprintf(reason, size, "multiplies x as it is, %s smooths it", w13->algo);
    else if (w13->in_features % MOQ_PACK_K || w2->in_features % MOQ_PACK_K)
        snprintf(reason, size,
                 "needs hidden and intermediate sizes that are multiples of %d, got "
                 "%lld and %lld",
                 MOQ_PACK_K, (long long)w13->in_features, (long long)w2->in_features);
    else if (w13->in_features > MOQ_MOE_FEW_COLUMNS || w2->in_features > MOQ_MOE_FEW_COLUMNS)
        snprintf(reason, size, "needs hidden and intermediate sizes up to %d, got %lld and %lld",
                 MOQ_MOE_FEW_COLUMNS, (long long)w13->in_features, (long long)w2->in_features);
    else if (spec->experts > MOQ_MOE_FEW_EXPERTS)
        snprintf(reason, size, "needs at most %d experts, got %d", MOQ_MOE_FEW_EXPERTS,
                 (int)spec->experts);
    else
        return true;
    return false;
}

bool moq_moe_nvfp4_few_takes(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    if (!takes_layer(spec, reason, size))
        return false;
    if (tokens > MOQ_MOE_FEW_SLOTS / spec->top_k)
        snprintf(reason, size, "needs at most %d slots, got %lld tokens of %d", MOQ_MOE_FEW_SLOTS,
                 (long long)tokens, (int)spec->top_k);
    else if (best_row(spec, tokens > 0 ? tokens : 1) < 0)
        snprintf(reason, size, "has no room in shared memory for %lld tokens", (long long)tokens);
    else
        return true;
    return false;
}

/* Seconds, of H200: the starts of two kernels and the way from the ids to the weights, then the
 * weights of the experts that have slots, once for each 8 of them. */
double moq_moe_nvfp4_few_seconds(const moq_moe_spec *spec, int64_t tokens) {
    double active = active_experts(spec, tokens);
    double again = (double)slots_of(spec, tokens) / MOQ_MOE_FEW_CHUNK;
    double bytes = weight_bytes(spec->w13.out_features, spec->w13.in_features) +
                   weight_bytes(spec->w2.out_features, spec->w2.in_features);
    return 5.5e-6 + sqrt(active * active + again * again) * bytes /
                        moq_memory_rate(&spec->w13.target, 3.9e12);
}
