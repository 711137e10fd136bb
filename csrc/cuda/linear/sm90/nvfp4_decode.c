/* Configs of the NVFP4 linear for decode on Hopper, and its row: see nvfp4_decode_config.h. */
#include "cuda/linear/sm90/nvfp4_decode_config.h"

#include "core/invariant.h"
#include "cuda/choice/family.h"
#include "cuda/choice/rates.h"

#define MOST        16 /* tokens */
#define MOST_ALONE  4  /* tokens whose x comes to stages by lanes, more in boxes */
#define MANY_STAGES 8  /* of a warp: x had better stay */
#define STAGE_BYTES (MOQ_NVFP4_DECODE_STAGE_UNITS * MOQ_PACK_BYTES) /* of W */

static int least(int a, int b) {
    return a < b ? a : b;
}

static int quotient_up(int a, int b) {
    return (a - 1) / b + 1;
}

/* Blocks of K, slabs and rounds of the warps that have most. */
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

/* Everything about a call that its config decides, or false where it cannot be done so. x stays
 * where it is read more than once, or together, or comes in many stages, which costs their warps
 * time, and fits. Eight warps take half of a multiprocessor if that gives each two stages. */
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

/* Rows have to be enough for all threads that add up; two tiles of tokens have one kernel. */
static const moq_nvfp4_decode_config GEOMETRIES[] = {
    {8, 2, 0, 3, true, false},  {16, 4, 0, 3, false, false}, {8, 8, 0, 3, false, true},
    {8, 4, 1, 3, false, true},  {8, 4, 0, 3, true, true},    {8, 8, 0, 3, true, true},
    {8, 4, 0, 3, false, false}, /* has room for every call */
};

enum { CONFIG_COUNT = sizeof GEOMETRIES / sizeof *GEOMETRIES };
_Static_assert(CONFIG_COUNT <= MOQ_TILING_ROWS, "a config tells every row");

static const moq_rates RATES[CONFIG_COUNT] = {MOQ_RATES_SM90_NVFP4_DECODE};

static moq_nvfp4_decode_share begin_share(const moq_linear_spec *spec, int64_t m) {
    moq_nvfp4_decode_share args = {
        .m = (int)m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    return args;
}

static bool suits(const moq_nvfp4_decode_config *w, const moq_nvfp4_decode_share *a) {
    return a->m <= 8 || (w->warps == 8 && w->slabs == 4);
}

/* A warp's units of W and stages; x, which a block has, and outputs of rounds, of more tokens. */
static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    const moq_nvfp4_decode_config *geometry = &GEOMETRIES[config];
    moq_nvfp4_decode_share a = begin_share(spec, p->tokens);
    if (!suits(geometry, &a) || !arrange(&a, geometry, spec->target.sm_count))
        return false;
    w->blocks = 1 << geometry->log_ranks;
    int rounds = rounds_of(&a, geometry), most = most_blocks(&a);
    w->bytes = MOQ_NVFP4_BYTES * (double)a.n * (double)a.k;
    double x = (double)most * a.m * MOQ_NVFP4_DECODE_X_BLOCK;
    w->inside[0] = most_slabs(&a, geometry) * most;
    w->inside[1] = rounds * quotient_up(most, a.turn);
    w->inside[2] = a.x_stays ? 0 : rounds * x;
    w->beside[0] = a.x_stays ? x * (1 << geometry->log_splits) : 0;
    w->beside[1] = (rounds - 1) * (a.m + 1) / 2;
    w->beside[2] = a.shared > HALF_SHARED;
    return true;
}

static const moq_configs CONFIGS = {.configs = CONFIG_COUNT, .rates = RATES, .work = work};

/* Entries of nvfp4_decode.cu. */
MOQ_ENTRY moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err);

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    return moq_is_on_sm90(spec, reason, size) && moq_suits_16_bits(spec, reason, size) &&
           moq_takes_tokens(m, MOST, reason, size);
}

const moq_linear_kernel MOQ_LINEAR_SM90_NVFP4_DECODE = {
    {"cuda", "sm90_nvfp4_decode", .configs = &CONFIGS, .adds = true},
    can_run,
    .run = moq_cuda_nvfp4_decode,
};

const moq_nvfp4_decode_config *moq_nvfp4_decode_expand_config(const moq_linear_call *call,
                                                              moq_nvfp4_decode_share *share) {
    const moq_nvfp4_decode_config *w = &GEOMETRIES[moq_tiling_row(moq_tiling_of(call))];
    *share = begin_share(call->spec, call->m);
    arrange(share, w, call->spec->target.sm_count);
    return w;
}
