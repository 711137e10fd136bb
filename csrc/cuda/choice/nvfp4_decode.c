/* The choice among ways to do the NVFP4 linear for a few tokens on Hopper: see nvfp4_decode.h. */
#include "cuda/choice/nvfp4_decode.h"

#include "core/invariant.h"
#include "cuda/choice/chip.h"
#include "cuda/choice/choice.h"

#include <math.h>

#define SHORT       2048 /* columns up to which fewer than 8 warps may share K */
#define MOST_ALONE  4    /* tokens whose x comes to stages by lanes, more in boxes */
#define MANY_STAGES 8    /* of a warp: x had better stay */
#define STAGE_BYTES (MOQ_NVFP4_DECODE_STAGE_UNITS * MOQ_PACK_BYTES) /* of W */

static int least(int a, int b) {
    return a < b ? a : b;
}

static int quotient_up(int a, int b) {
    return (a - 1) / b + 1;
}

/* Of the warps that have most: blocks of K, slabs, and rounds. */
static int most_blocks(const moq_nvfp4_decode_share *a) {
    return a->blocks + (a->more_blocks > 0);
}

static int most_slabs(const moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w) {
    return quotient_up(a->slabs + (a->more_slabs > 0), w->warps >> w->log_splits);
}

static int rounds_of(const moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w) {
    return quotient_up(most_slabs(a, w), w->slabs);
}

/* Shares rows and K out. */
static void partition_work(moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w,
                           int sm_count) {
    int slabs = quotient_up(a->n, MOQ_PACK_ROWS), blocks = (int)moq_pack_blocks(a->k);
    int parts = 1 << (w->log_ranks + w->log_splits);
    a->log_ranks = w->log_ranks;
    a->log_splits = w->log_splits;
    a->share = w->share;
    a->blocks = blocks / parts;
    a->more_blocks = blocks % parts;
    a->clusters = least((sm_count << w->two) >> w->log_ranks, slabs);
    a->slabs = slabs / a->clusters;
    a->more_slabs = slabs % a->clusters;
    a->slab_bytes = blocks * (int64_t)MOQ_PACK_BYTES;
    MOQ_ASSERT(parts * a->blocks + a->more_blocks == blocks && a->more_blocks < parts);
    MOQ_ASSERT(a->clusters * a->slabs + a->more_slabs == slabs && a->more_slabs < a->clusters);
    int most = most_blocks(a);
    a->turn = quotient_up(most, quotient_up(most, MOQ_NVFP4_DECODE_STAGE_UNITS / w->slabs));
    MOQ_ASSERT(a->turn * w->slabs <= MOQ_NVFP4_DECODE_STAGE_UNITS);
    a->x_pitch = most * MOQ_NVFP4_DECODE_X_BLOCK + 16;
}

/* Shares `room` bytes out: x where it stays, the stages of all warps, sums, which of a single round
 * go where the rings were, and boxes. As many stages as are of use, or none without two where x
 * stays. */
static void smem_layout(moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w, int room,
                        bool stays) {
    int rounds = rounds_of(a, w), pairs = (a->m + 1) / 2;
    int rows = w->slabs * MOQ_PACK_ROWS, staged = pairs * (rows + 4) * 8;
    int boxes = w->log_ranks ? 2 * rows * pairs * 8 : 0;
    int needed =
        least(rounds * quotient_up(most_blocks(a), a->turn), MOQ_NVFP4_DECODE_STAGES / w->warps);
    int x = stays ? a->m * a->x_pitch << w->log_splits : 0;
    a->x_stays = stays;
    a->boxes = !stays && a->m > MOST_ALONE;
    a->x_rows = a->boxes ? quotient_up(a->m, 8) * 8 : a->m;
    a->x_stage = stays ? 0 : a->turn * a->x_rows * MOQ_NVFP4_DECODE_X_BLOCK;
    int stage = STAGE_BYTES + a->x_stage, each = (room - boxes - x) / w->warps;
    a->stages = least(needed, each / stage);
    bool alias = rounds == 1 && a->stages * stage >= staged;
    if (!alias)
        a->stages = least(needed, (each - 2 * staged) / stage);
    if (each < 0 || a->stages < (stays ? least(needed, 2) : 1))
        a->stages = 0;
    a->warp_bytes = a->stages * stage;
    a->x_at = w->warps * a->warp_bytes;
    a->staged_at = alias ? 0 : a->x_at + x;
    a->staged_bytes = alias ? a->warp_bytes : staged;
    a->staged_turn = alias ? 0 : w->warps * staged;
    a->inbox_at = a->x_at + x + (alias ? 0 : 2 * a->staged_turn);
    a->shared = a->inbox_at + boxes;
    MOQ_ASSERT(!a->stages || a->shared <= room);
    MOQ_ASSERT(a->stages <= MOQ_NVFP4_DECODE_STAGES / w->warps);
    MOQ_ASSERT(a->warp_bytes % MOQ_NVFP4_DECODE_X_BLOCK == 0); /* pieces of x turn by the line */
    MOQ_ASSERT(a->x_at % 16 == 0 && a->x_pitch % 16 == 0);
    MOQ_ASSERT(a->staged_at % 8 == 0 && a->staged_turn % 8 == 0 && a->inbox_at % 8 == 0);
    MOQ_ASSERT(!a->stages || !alias || a->staged_bytes >= staged);
}

/* Dynamic bytes of a block that has a multiprocessor of compute capability 9.0 to itself, and of
 * one that leaves half. */
#define WHOLE_SHARED (BLOCK_SHARED - MOQ_NVFP4_DECODE_DECLARED)
#define HALF_SHARED  ((BLOCK_SHARED + 1024) / 2 - 1024 - MOQ_NVFP4_DECODE_DECLARED)

/* Whether room is left for another block, of this call or the next. */
static bool is_half(const moq_nvfp4_decode_config *w) {
    return w->warps == 8 || !MOQ_NVFP4_DECODE_ADDS(w->warps, w->slabs);
}

/* Everything about a call that its way decides, or false where it cannot be done so. x stays where
 * it is read more than once, or together, or comes in many stages, which costs their warps time,
 * and fits. Eight warps take half of a multiprocessor if that gives each two stages. */
static bool arrange(moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w, int sm_count) {
    partition_work(a, w, sm_count);
    int rounds = rounds_of(a, w), stages = rounds * quotient_up(most_blocks(a), a->turn);
    bool only_half = w->two || (w->warps == 16 && is_half(w)), optional = rounds == 1 && !w->share;
    if (rounds > 1 && !MOQ_NVFP4_DECODE_ADDS(w->warps, w->slabs))
        return false;
    for (int stays = !optional || !is_half(w) || stages >= MANY_STAGES; stays >= w->share;
         stays--) {
        if (is_half(w)) {
            smem_layout(a, w, HALF_SHARED, stays);
            if (a->stages >= (only_half ? 1 : least(stages, 2)))
                return true;
        }
        if (only_half || (is_half(w) && optional && stays))
            continue;
        smem_layout(a, w, WHOLE_SHARED, stays);
        if (a->stages)
            return true;
    }
    return false;
}

/* Microseconds of a multiprocessor for a unit and for a stage, and before the first. */
typedef struct {
    double unit, stage, start;
} costs;

static costs costs_of(const moq_nvfp4_decode_config *w) {
    static const costs EIGHT[3] = {
        {0.0146, 0.01704, 3.883}, {0.01285, 0.02229, 4.147}, {0.01373, 0.04051, 4.357}};
    static const costs TWO[2] = {{0.00473, 0.01277, 4.977}, {0.01101, 0.01538, 5.022}};
    static const costs SIXTEEN[3] = {
        {0.01584, 0.1367, 2.259}, {0.005345, 0.008852, 5.539}, {0.01613, 0.01129, 4.943}};
    return w->two ? TWO[w->slabs / 8] : w->warps > 8 ? SIXTEEN[w->slabs / 4] : EIGHT[w->slabs / 4];
}

/* Microseconds of a call, fitted to 1965 times of 32 layers with up to 16 tokens on an H100, each
 * call behind the end of the one before, as among kernels of others (docs/lab/choice.md): 3 % root
 * mean square where the way is near the best. Products, W from memory and the warp that adds up go
 * on beside each other; before them the start and x, after them the ends of rounds. Two tiles of
 * tokens take a little longer. */
static double estimate(const moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w,
                       const moq_target *target) {
    costs c = costs_of(w);
    bool half = is_half(w);
    int most = most_blocks(a), slabs = most_slabs(a, w), rounds = rounds_of(a, w);
    double warps = w->warps << w->two, columns = (double)most * a->m * MOQ_NVFP4_DECODE_X_BLOCK;
    double products =
        warps * (slabs * most * c.unit + rounds * quotient_up(most, a->turn) * c.stage);
    double memory = (double)a->n * a->k * 0.5625 / moq_memory_rate(target, 4.45e6) * 1.054;
    double before = c.start + w->share * 0.03118 + (half ? 0 : w->log_ranks * 0.5792) +
                    (half && a->shared > HALF_SHARED ? 0.7909 : 0);
    if (a->x_stays) {
        before += columns * (1 << w->log_splits) *
                  (w->share ? 1.076e-5
                   : half   ? 2.752e-5
                            : 1.091e-5);
    } else {
        columns *= rounds;
        double fresh = fmin(columns, (double)a->stages * a->turn * a->m * MOQ_NVFP4_DECODE_X_BLOCK);
        products += warps * (fresh * 1.055e-5 + (columns - fresh) * (a->boxes ? 5.925e-6
                                                                     : half   ? 2.831e-5
                                                                              : 3.294e-5));
        memory += warps * columns * 4.662e-6;
    }
    double added = (double)(rounds - 1) * (w->warps >> w->log_splits) *
                   quotient_up(quotient_up(slabs, rounds), 2) * ((a->m + 1) / 2);
    double adding = added * (0.2441 + 0.005116 * (1 << w->log_splits)) * (w->log_ranks ? 1.707 : 1);
    double ends = rounds * (0.1651 + w->log_ranks * 0.01845);
    double hides = fmin(1, (double)a->k / 2048); /* outputs of more tokens, behind products */
    ends += 2.86e-6 * (a->m - 1) * a->n * (1 - hides * hides * hides);
    double all = before + ends + sqrt(sqrt(pow(products, 4) + pow(memory, 4) + pow(adding, 4)));
    return a->m > 8 ? 1.059 * all : all;
}

/* Of K in full for all warps of a block, then of short K. Rows have to be enough for all threads
 * that add up; two tiles of tokens have one kernel. */
static const moq_nvfp4_decode_config CONFIGS[] = {
    {8, 2, 0, 3},
    {8, 4, 0, 3},
    {8, 2, 1, 3},
    {8, 4, 1, 3},
    {8, 8, 1, 3},
    {8, 2, 0, 3, true},
    {8, 4, 0, 3, true},
    {16, 4, 0, 4},
    {16, 4, 0, 3},
    {16, 4, 1, 4},
    {16, 8, 1, 4},
    {16, 2, 1, 4},
    {8, 4, 0, 3, false, true},
    {8, 8, 0, 3, false, true},
    {8, 4, 1, 3, false, true},
    {8, 8, 1, 3, false, true},
    {8, 4, 0, 3, true, true},
    {8, 8, 0, 3, true, true},
    {8, 2, 0, 2, true},
    {8, 4, 0, 1},
    {8, 4, 0, 1, true},
};

enum { CONFIG_COUNT = sizeof CONFIGS / sizeof *CONFIGS };
_Static_assert(CONFIG_COUNT <= MOQ_TILING_ROWS, "a way tells every row");

static bool suits(const moq_nvfp4_decode_config *w, const moq_nvfp4_decode_share *a) {
    return (w->log_splits >= 3 || a->k <= SHORT) && (a->m <= 8 || (w->warps == 8 && w->slabs == 4));
}

static double seconds_of(moq_nvfp4_decode_share *a, const moq_nvfp4_decode_config *w,
                         const moq_target *target) {
    bool can = suits(w, a) && arrange(a, w, target->sm_count);
    return can ? 1e-6 * estimate(a, w, target) : INFINITY;
}

/* The best of all ways. */
static const moq_nvfp4_decode_config *config_of(moq_nvfp4_decode_share *a, const moq_target *target,
                                                double *seconds) {
    const moq_nvfp4_decode_config *best = CONFIGS;
    *seconds = INFINITY;
    for (int i = 0; i < CONFIG_COUNT; i++) {
        double t = seconds_of(a, &CONFIGS[i], target);
        if (t < *seconds) {
            *seconds = t;
            best = &CONFIGS[i];
        }
    }
    return best;
}

static moq_nvfp4_decode_share begin_share(const moq_linear_spec *spec, int64_t m) {
    moq_nvfp4_decode_share args = {
        .m = (int)m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    return args;
}

double moq_cuda_nvfp4_decode_seconds(const moq_linear_spec *spec, int64_t m) {
    moq_nvfp4_decode_share args = begin_share(spec, m);
    double seconds;
    config_of(&args, &spec->target, &seconds);
    return seconds;
}

/* Variant 0 is the best; the best again where a variant cannot do the call. */
static const moq_nvfp4_decode_config *find_best(const moq_linear_spec *spec, int64_t m,
                                                int32_t which) {
    moq_nvfp4_decode_share args = begin_share(spec, m);
    double seconds;
    if (which > 0 && which <= CONFIG_COUNT && suits(&CONFIGS[which - 1], &args) &&
        arrange(&args, &CONFIGS[which - 1], spec->target.sm_count))
        return &CONFIGS[which - 1];
    return config_of(&args, &spec->target, &seconds);
}

moq_kernel_config moq_cuda_nvfp4_decode_choose(const moq_linear_spec *spec, int64_t m,
                                               int32_t variant) {
    const moq_nvfp4_decode_config *best = find_best(spec, m, variant);
    int row = (int)(best - CONFIGS);
    return moq_kernel_config_of(row + 1, row, 1 << best->log_ranks);
}

const moq_nvfp4_decode_config *moq_nvfp4_decode_expand_config(const moq_linear_call *call,
                                                              moq_nvfp4_decode_share *share) {
    const moq_nvfp4_decode_config *w = &CONFIGS[moq_tiling_row(moq_tiling_of(call))];
    *share = begin_share(call->spec, call->m);
    arrange(share, w, call->spec->target.sm_count);
    return w;
}

double moq_cuda_nvfp4_decode_config_seconds(const moq_linear_call *call) {
    moq_nvfp4_decode_share share;
    const moq_nvfp4_decode_config *w = moq_nvfp4_decode_expand_config(call, &share);
    return 1e-6 * estimate(&share, w, &call->spec->target);
}

/* The choice, and the ways that are not expected to take half as long again. */
uint64_t moq_cuda_nvfp4_decode_variants(const moq_linear_call *call) {
    moq_nvfp4_decode_share args = begin_share(call->spec, call->m);
    double best;
    uint64_t some = 1;
    config_of(&args, &call->spec->target, &best);
    for (int i = 0; i < CONFIG_COUNT; i++)
        if (seconds_of(&args, &CONFIGS[i], &call->spec->target) < 1.5 * best)
            some |= 2ull << i;
    return some;
}
