/* Configs of the FP8 linear for decode on Hopper, and its row: see fp8_decode_config.h. */
#include "cuda/linear/sm90/fp8_decode_config.h"

#include "core/formats.h"
#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"
#include "cuda/choice/rates.h"

#include <math.h>
#include <stdio.h>

/* Two calls are on a multiprocessor at once where they have up to so many tokens, and bytes of W
 * for each. */
#define MOST  16 /* tokens */
#define FEW   2
#define SMALL (160 << 10)
#define LONG  14336 /* columns beyond which two blocks share them for any x */

#define UNIT           8 /* rows of W: what blocks share N by */
#define LEAST_RING     (64 << 10)
#define GOOD_RING      131072.0 /* bytes of a ring that keeps memory busy */
#define BYTES_OF_VALUE 8        /* of W that a block reads while it quantizes a value of x */

/* The kernel's shapes: warpgroups that multiply, and tokens. */
static const struct {
    int groups, tokens;
} SHAPES[] = {{2, 2}, {4, 2}, {4, 8}, {4, 16}};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES, FORMATS = 3 };

static const moq_rates RATES[SHAPE_COUNT * FORMATS] = {MOQ_RATES_SM90_FP8_DECODE};

/* One or two tokens of a small layer take half a multiprocessor a block: a call begins while the
 * one before runs, which hides its start. Elsewhere the ring of a whole one, and its warps, are
 * worth more. */
static int shape_for(const moq_problem *p) {
    const moq_linear_spec *spec = p->layer;
    int64_t most = (int64_t)SMALL * spec->target.sm_count;
    bool small = spec->out_features * spec->in_features <= most;
    return p->tokens > 8 ? 3 : p->tokens > FEW ? 2 : small ? 0 : 1;
}

/* Two blocks share K where x is long, or would leave the ring little room: they halve what each
 * reads of x, and the room of its codes, for half a microsecond of exchange. A scale of x that is
 * there before leaves room. */
static int ranks_for(const moq_problem *p, int tokens) {
    const moq_linear_spec *spec = p->layer;
    int64_t k = spec->in_features;
    bool ready = spec->input == MOQ_INPUT_E4M3_TENSOR && p->scaled;
    int64_t values = p->tokens * k * (ready ? 1 : 2);
    bool long_x = (k > 2048 && values > 32768) || tokens * k > 98304;
    return (long_x || k > LONG) && divide_up(k, MOQ_FP8_DECODE_STEP) % 2 == 0 ? 2 : 1;
}

/* Work of the busiest block: rows of W, and bytes of its ring and passes over K, roughly as
 * fp8_decode.cu lays them out. */
typedef struct {
    double rows, ring, passes;
} share;

static share busiest_share(const moq_linear_spec *spec, int config, int ranks) {
    int groups = SHAPES[config].groups, tokens = SHAPES[config].tokens;
    int64_t units = divide_up(spec->out_features, UNIT), most = spec->target.sm_count / ranks;
    int64_t rows = UNIT * divide_up(units, units < most ? units : most);
    int64_t round = 256 * groups / tokens; /* rows whose sums are added at once */
    int64_t sums = (rows < round ? rows : round) * tokens * groups * 8;
    int64_t room = (groups == 2 ? BLOCK_SHARED / 2 : BLOCK_SHARED) - sums;
    int64_t codes = tokens * spec->in_features / ranks;
    int64_t passes = divide_up(codes, room - LEAST_RING);
    share s = {(double)rows, (double)room - (double)codes / (double)passes, (double)passes};
    return s;
}

/* Bytes are counted as if every block had as many as the busiest, and slow cores do not slow them,
 * by which the search divides. Nothing is multiplied before x is quantized, but the ring fills
 * meanwhile: only what takes longer than that counts. A short ring leaves memory idle. */
static bool work(const moq_problem *p, int config, moq_load *w) {
    const moq_linear_spec *spec = p->layer;
    if (config != shape_for(p))
        return false;
    w->blocks = ranks_for(p, SHAPES[config].tokens);
    share s = busiest_share(spec, config, w->blocks);
    double k = (double)spec->in_features / w->blocks, weights = s.rows * k;
    double values = k * (double)p->tokens, all = weights * spec->target.sm_count;
    w->bytes = (double)spec->out_features * (double)spec->in_features;
    w->inside[0] = all * p->target->cores;
    w->inside[1] = s.rows;
    w->inside[2] = values;
    w->beside[0] = fmax(0, values - fmin(s.passes * s.ring, weights) / BYTES_OF_VALUE);
    w->beside[1] = w->blocks > 1;
    w->beside[2] = all * fmax(0, GOOD_RING / s.ring - 1);
    w->rates = config + SHAPE_COUNT * (int)(spec->input - MOQ_INPUT_E4M3_TENSOR);
    return true;
}

static const moq_configs CONFIGS = {
    .configs = SHAPE_COUNT, .by_scale = true, .rates = RATES, .work = work};

/* Entries of fp8_decode.cu. */
MOQ_ENTRY moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err);

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    if (!moq_is_on_sm90(spec, reason, size) || !moq_suits_fp8_cores(spec, reason, size) ||
        !moq_has_int_rows(spec, reason, size))
        return false;
    if (spec->in_features % MOQ_FP8_BLOCK == 0)
        return moq_takes_tokens(m, MOST, reason, size);
    snprintf(reason, size, "needs in_features to be a multiple of 128, got %lld",
             (long long)spec->in_features);
    return false;
}

const moq_linear_kernel MOQ_LINEAR_SM90_FP8_DECODE = {
    {"cuda", "sm90_fp8_decode", .configs = &CONFIGS, .takes_codes = true},
    can_run,
    .run = moq_cuda_fp8_decode,
};

moq_fp8_decode_config moq_fp8_decode_expand_config(const moq_linear_call *call) {
    uint8_t tiling = moq_tiling_of(call);
    int shape = moq_tiling_row(tiling);
    moq_fp8_decode_config geometry = {SHAPES[shape].groups, SHAPES[shape].tokens,
                                      moq_tiling_blocks(tiling), 0};
    return geometry;
}
