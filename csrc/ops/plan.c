/* The rules by which a kernel is chosen: see plan.h. */
#include "ops/plan.h"

#include "core/invariant.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static bool is_named(const moq_kernel *kernel, const char *text) {
    size_t family = strlen(kernel->family);
    return strncmp(text, kernel->family, family) == 0 && text[family] == ':' &&
           strcmp(text + family + 1, kernel->name) == 0;
}

static const moq_kernel *kernel_of(const moq_plan *plan, int kernel) {
    return plan->operation->kernels[kernel];
}

/* By the description alone. */
static bool can_run(const moq_plan *plan, int kernel, int64_t m, char *reason) {
    const moq_kernel *row = kernel_of(plan, kernel);
    if (plan->layer.quantized_input && !row->takes_codes)
        snprintf(reason, MOQ_REASON_SIZE, "quantizes x itself, the layer gets codes");
    else if (plan->layer.low_rank && !row->adds)
        snprintf(reason, MOQ_REASON_SIZE, "adds nothing to its outputs, %s has a low-rank part",
                 plan->layer.algo);
    else if (plan->layer.batch_invariant && !row->row_order_fixed)
        snprintf(reason, MOQ_REASON_SIZE,
                 "sums of a row depend on the number of rows, the layer is batch_invariant");
    else if (plan->one && plan->kernel[0] != kernel)
        snprintf(reason, MOQ_REASON_SIZE,
                 "%s:%s runs all numbers of rows of batch_invariant layers",
                 kernel_of(plan, plan->kernel[0])->family, kernel_of(plan, plan->kernel[0])->name);
    else if (plan->operation->can_run(plan->problem, row, m, reason, MOQ_REASON_SIZE)) {
        if (!row->only_forced || plan->forced)
            return true;
        snprintf(reason, MOQ_REASON_SIZE, "runs only where MOQEXT_KERNEL names it");
    }
    return false;
}

static bool is_served(const moq_plan *plan, int kernel, int64_t m, char *reason) {
    const moq_operation *operation = plan->operation;
    return !operation->is_served ||
           operation->is_served(plan->problem, kernel_of(plan, kernel), m, reason, MOQ_REASON_SIZE);
}

bool moq_plan_can_run(const moq_plan *plan, int kernel, int64_t m, char *reason) {
    return can_run(plan, kernel, m, reason) && is_served(plan, kernel, m, reason);
}

/* ---- collecting the kernels ---- */

/* Names all that there are. */
static moq_status refuse_name(const moq_operation *operation, const char *forced, moq_err *err) {
    char names[640] = "";
    size_t used = 0;
    for (int i = 0; i < operation->kernel_count && used < sizeof names; i++) {
        const moq_kernel *kernel = operation->kernels[i];
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s:%s", i ? ", " : "",
                                 kernel->family, kernel->name);
    }
    return moq_fail_of(err, MOQ_ERR_VALUE, "MOQEXT_KERNEL",
                       "no kernel named \"%.64s\"; there are %s", forced, names);
}

static void add_kernel(moq_plan *plan, int kernel) {
    plan->kernel[plan->count++] = (uint8_t)kernel;
}

static moq_status force(moq_plan *plan, const char *forced, moq_err *err) {
    char reason[MOQ_REASON_SIZE];
    int kernel = 0, count = plan->operation->kernel_count;
    while (kernel < count && !is_named(kernel_of(plan, kernel), forced))
        kernel++;
    if (kernel == count)
        return refuse_name(plan->operation, forced, err);
    plan->forced = true;
    if (!moq_plan_can_run(plan, kernel, MOQ_ANY_TOKENS, reason))
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "MOQEXT_KERNEL=%s cannot run this layer: %s",
                        forced, reason);
    add_kernel(plan, kernel);
    return MOQ_OK;
}

/* True if a kernel is of a family for the device. */
static bool is_for(const moq_kernel *kernel, moq_device device) {
    return (strcmp(kernel->family, "cpu") == 0) == (device.kind == MOQ_CPU);
}

/* Appends "family:name reason" for a kernel that cannot run m tokens. */
static void add_reason(const moq_plan *plan, int kernel, int64_t m, char *reasons, size_t size) {
    char reason[MOQ_REASON_SIZE];
    const moq_kernel *row = kernel_of(plan, kernel);
    size_t used = strlen(reasons);
    moq_plan_can_run(plan, kernel, m, reason);
    snprintf(reasons + used, size - used, "%s%s:%s %s", used ? "; " : "", row->family, row->name,
             reason);
}

/* Says why none of the kernels for the layer's device can run it. */
static moq_status refuse(const moq_plan *plan, moq_err *err) {
    const moq_operation *operation = plan->operation;
    const char *missing = plan->layer.target->missing;
    char text[160], reasons[832] = "";
    for (int i = 0; i < operation->kernel_count; i++)
        if (is_for(operation->kernels[i], plan->layer.device))
            add_reason(plan, i, MOQ_ANY_TOKENS, reasons, sizeof reasons);
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "no kernel can run %s: %s",
                    operation->text(plan->problem, text, sizeof text),
                    missing[0] ? missing : reasons);
}

static moq_status collect(moq_plan *plan, const char *forced, moq_err *err) {
    char reason[MOQ_REASON_SIZE];
    if (forced && *forced)
        return force(plan, forced, err);
    for (int i = 0; i < plan->operation->kernel_count; i++)
        if (moq_plan_can_run(plan, i, MOQ_ANY_TOKENS, reason))
            add_kernel(plan, i);
    return plan->count ? MOQ_OK : refuse(plan, err);
}

/* ---- the cheapest ---- */

moq_problem moq_plan_problem(const moq_plan *plan, int64_t m) {
    return (moq_problem){plan->problem, plan->layer.target, m, true};
}

double moq_plan_cost(const moq_plan *plan, int kernel, int64_t m) {
    const moq_configs *configs = kernel_of(plan, kernel)->configs;
    moq_problem p = moq_plan_problem(plan, m);
    return configs ? moq_find_config(configs, &p).seconds
                   : plan->operation->cost(plan->problem, kernel_of(plan, kernel), m);
}

moq_kernel_config moq_plan_config(const moq_plan *plan, int kernel, int64_t m, int32_t variant) {
    const moq_configs *configs = kernel_of(plan, kernel)->configs;
    moq_problem p = moq_plan_problem(plan, m);
    return configs ? moq_choose_config(configs, &p, variant) : moq_kernel_config_of(0, 0, 1);
}

/* Says why no kernel of the plan can run m tokens. */
static moq_status refuse_tokens(const moq_plan *plan, int64_t m, moq_err *err) {
    char text[160], reasons[832] = "";
    for (int i = 0; i < plan->count; i++)
        add_reason(plan, plan->kernel[i], m, reasons, sizeof reasons);
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "no kernel can run %lld tokens of %s: %s%s",
                    (long long)m, plan->operation->text(plan->problem, text, sizeof text), reasons,
                    plan->forced ? "; unset MOQEXT_KERNEL when the layer is made" : "");
}

/* Seconds by which a kernel comes behind all others. */
#define LAST 1e3

/* Whether others are preferred: on Hopper kernels made for it; elsewhere, where folded codes are
 * multiplied in 16 bits too, exact ones of "auto". */
static bool is_replaced(const moq_plan *plan, int kernel) {
    const moq_kernel *row = kernel_of(plan, kernel);
    if (plan->layer.target->capability == 90)
        return row->configs && row->configs->any_chip;
    return plan->layer.choice == MOQ_COMPUTE_FP8 && row->folds;
}

/* Whether a kernel does calls that bring no scale of x. */
static bool runs_without_scale(const moq_plan *plan, int kernel) {
    return plan->layer.choice != MOQ_COMPUTE_FP4 || !kernel_of(plan, kernel)->quantizes;
}

/* The number among the plan's kernels of the one with the least estimate, but for those whose bit
 * is set; -1 for none. */
static int find_least(const moq_plan *plan, int64_t m, bool scaled, uint32_t without) {
    char reason[MOQ_REASON_SIZE];
    double least = 0;
    int best = -1;
    for (int i = 0; i < plan->count; i++) {
        int kernel = plan->kernel[i];
        if (without >> i & 1 || !can_run(plan, kernel, m, reason) ||
            !(scaled || runs_without_scale(plan, kernel)))
            continue;
        double seconds = moq_plan_cost(plan, kernel, m) + (is_replaced(plan, kernel) ? LAST : 0);
        if (best < 0 || seconds < least) {
            best = i;
            least = seconds;
        }
    }
    return best;
}

static moq_status find_cheapest(const moq_plan *plan, int64_t m, bool scaled, int32_t *kernel,
                                moq_err *err) {
    char reason[MOQ_REASON_SIZE];
    uint32_t without = 0;
    int best = find_least(plan, m, scaled, without);
    while (best >= 0 && !is_served(plan, plan->kernel[best], m, reason)) {
        without |= 1u << best;
        best = find_least(plan, m, scaled, without);
    }
    if (best < 0)
        return refuse_tokens(plan, m, err);
    *kernel = plan->kernel[best];
    return MOQ_OK;
}

/* ---- one for all numbers of tokens ---- */

/* The product of estimates for numbers of tokens of decode and of prefill. */
static double cost_of_all(const moq_plan *plan, int kernel) {
    static const int64_t TOKENS[] = {1, 64, 4096};
    double product = is_replaced(plan, kernel) ? LAST : 1;
    for (size_t i = 0; i < sizeof TOKENS / sizeof *TOKENS; i++)
        product *= moq_plan_cost(plan, kernel, TOKENS[i]);
    return product;
}

/* Leaves the kernel that is best on the whole. */
static void keep_one(moq_plan *plan) {
    double least = cost_of_all(plan, plan->kernel[0]);
    for (int i = 1; i < plan->count; i++) {
        double cost = cost_of_all(plan, plan->kernel[i]);
        if (cost < least) {
            least = cost;
            plan->kernel[0] = plan->kernel[i];
        }
    }
    plan->count = 1;
    plan->one = true;
}

moq_status moq_plan_make(const moq_operation *operation, const void *problem, const char *forced,
                         moq_plan *plan, moq_err *err) {
    memset(plan, 0, sizeof *plan);
    plan->operation = operation;
    plan->problem = problem;
    plan->layer = moq_describe_layer(problem);
    plan->param_count = operation->prepared_params(problem, plan->param);
    MOQ_TRY(collect(plan, forced, err));
    if (plan->layer.batch_invariant && !plan->forced)
        keep_one(plan);
    return MOQ_OK;
}

/* ---- the choice ---- */

static int find_tuned(const moq_plan *plan, int64_t m) {
    int64_t bucket = moq_token_bucket(m);
    int i = 0;
    while (i < plan->tuned_count && plan->tuned[i].bucket != bucket)
        i++;
    return i;
}

/* Chooses what was kept for m tokens, else the cheapest. */
static moq_status choose(const moq_plan *plan, int64_t m, bool scaled, moq_choice *choice,
                         moq_err *err) {
    int tuned = find_tuned(plan, m);
    int32_t variant = 0;
    if (tuned < plan->tuned_count &&
        (scaled || runs_without_scale(plan, plan->tuned[tuned].kernel))) {
        choice->kernel = plan->tuned[tuned].kernel;
        variant = plan->tuned[tuned].variant;
    } else {
        MOQ_TRY(find_cheapest(plan, m, scaled, &choice->kernel, err));
    }
    choice->config = moq_plan_config(plan, choice->kernel, m, variant);
    return MOQ_OK;
}

/* ---- choices that are remembered, a word each: m, the kernel's row, the config ---- */

#define ROW_BITS    8
#define CONFIG_BITS 24
_Static_assert(MOQ_MAX_KERNELS <= 1 << ROW_BITS, "a word tells every row");
_Static_assert(sizeof(moq_kernel_config) * 8 == CONFIG_BITS, "a word tells all of a config");

static uint64_t to_word(int64_t m, moq_choice choice) {
    moq_kernel_config config = choice.config;
    MOQ_ASSERT(choice.kernel >= 0 && choice.kernel < 1 << ROW_BITS);
    return ((uint64_t)m << ROW_BITS | (uint64_t)choice.kernel) << CONFIG_BITS |
           (uint64_t)config.variant << 16 | (uint64_t)config.tiling << 8 | config.dynamic_tiling;
}

static moq_choice from_word(uint64_t word) {
    moq_kernel_config config = {(uint8_t)(word >> 16), (uint8_t)(word >> 8), (uint8_t)word};
    return (moq_choice){(int32_t)(word >> CONFIG_BITS & ((1u << ROW_BITS) - 1)), config};
}

static int64_t tokens_of(uint64_t word) {
    return (int64_t)(word >> (ROW_BITS + CONFIG_BITS));
}

moq_status moq_plan_pick(moq_plan *plan, int64_t m, bool scaled, moq_choice *choice, moq_err *err) {
    if (m < 1) {
        choice->config = (moq_kernel_config){0};
        return find_cheapest(plan, 1, scaled, &choice->kernel, err);
    }
    _Atomic uint64_t *place = &plan->remembered[scaled][m % MOQ_REMEMBERED];
    uint64_t word = atomic_load_explicit(place, memory_order_relaxed);
    if (word && tokens_of(word) == m) {
        *choice = from_word(word);
        return MOQ_OK;
    }
    MOQ_TRY(choose(plan, m, scaled, choice, err));
    word = to_word(m, *choice);
    if (tokens_of(word) == m) /* no more tokens than a word holds */
        atomic_store_explicit(place, word, memory_order_relaxed);
    return MOQ_OK;
}

static void forget(moq_plan *plan, int64_t bucket) {
    for (int i = 0; i < 2 * MOQ_REMEMBERED; i++) {
        _Atomic uint64_t *place = &plan->remembered[i / MOQ_REMEMBERED][i % MOQ_REMEMBERED];
        uint64_t word = atomic_load_explicit(place, memory_order_relaxed);
        if (moq_token_bucket(tokens_of(word)) == bucket)
            atomic_store_explicit(place, 0, memory_order_relaxed);
    }
}

moq_compute moq_plan_compute(const moq_plan *plan, int kernel) {
    const moq_kernel *row = kernel_of(plan, kernel);
    bool exact = plan->layer.choice == MOQ_COMPUTE_FP8 ? !row->folds : !row->quantizes;
    if (plan->layer.compute != MOQ_COMPUTE_AUTO)
        return plan->layer.compute;
    return exact ? MOQ_COMPUTE_EXACT : (moq_compute)plan->layer.choice;
}

/* The bucket's own number is the largest in it: what lies between it and m, a kernel that runs
 * both runs too. */
bool moq_plan_can_keep(const moq_plan *plan, int kernel, int64_t m) {
    char reason[MOQ_REASON_SIZE];
    return moq_plan_can_run(plan, kernel, m, reason) &&
           moq_plan_can_run(plan, kernel, moq_token_bucket(m), reason);
}

/* The row of a kernel of the plan by its name, that can run all of m's bucket; -1 for none. */
static int find_kept(const moq_plan *plan, int64_t m, const char *kernel) {
    for (int i = 0; i < plan->count; i++)
        if (is_named(kernel_of(plan, plan->kernel[i]), kernel) &&
            moq_plan_can_keep(plan, plan->kernel[i], m))
            return plan->kernel[i];
    return -1;
}

moq_status moq_plan_keep(moq_plan *plan, int64_t m, const char *kernel, int32_t variant,
                         moq_err *err) {
    int row = find_kept(plan, m, kernel);
    if (row < 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "kernel",
                           "expected one of this plan that runs %lld tokens, got \"%.64s\"",
                           (long long)m, kernel);
    int i = find_tuned(plan, m);
    if (i == MOQ_MAX_TUNED)
        return moq_fail_of(err, MOQ_ERR_VALUE, "tokens", "a layer can be tuned for %d numbers",
                           MOQ_MAX_TUNED);
    plan->tuned[i].bucket = moq_token_bucket(m);
    plan->tuned[i].kernel = row;
    plan->tuned[i].variant = variant;
    plan->tuned_count += i == plan->tuned_count;
    forget(plan, plan->tuned[i].bucket);
    return MOQ_OK;
}

bool moq_plan_is_tuned(const moq_plan *plan, int64_t m) {
    return find_tuned(plan, m) < plan->tuned_count;
}

bool moq_plan_has_variant(const moq_plan *plan, int64_t m, const char *kernel, int32_t variant) {
    int row = find_kept(plan, m, kernel);
    return row >= 0 && (!variant || moq_plan_config(plan, row, m, variant).variant == variant);
}
