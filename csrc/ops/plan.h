/* The choice of the kernel that runs a problem: the rules, which are the same for every operation
 * and know none.
 *
 * An operation (a linear; experts) has a table of kernels (core/kernel.h) and a problem of its own
 * type, whose first member is a moq_linear_spec. Here a kernel is the number of its row in that
 * table and the problem a pointer; moq_operation asks the operation what else there is to know. The
 * files of the floor on this plan:
 *
 *   plan              the choice: who can run, who is forced, cheapest, remembered, tuned
 *   tune              candidates timed, for a choice that is measured instead of estimated
 *   job               the path of a call: memory to work in, matrices as kernels read them, the
 *                     device current, streams in order
 *   params            the prepared tensors that every call checks
 *   linear_call       the operation linear: a call checked and launched by the three above
 *   linear_kernels    its table of kernels
 *   linear_tune       what timing a linear takes: random x, copies of the weight
 *   moe_call, moe_kernels, moe_tune    experts in the same three files
 *   weight_prepare    the weight processing of every operation
 *
 * The rules. A kernel can run a problem with a number of tokens, or says in words why not; whether
 * it can depends on the description alone, so that choices are tested on a machine without the
 * device. A plan keeps the kernels that can run its problem with some number of tokens, or the one
 * that MOQEXT_KERNEL names. A call takes what tuning kept for its number of tokens, else of the
 * kernels that can run as many the one with the least estimate; among equals the first of the
 * table. A library is asked last, of the kernel that would be taken, which then gives way or not.
 * An estimate is a number of seconds and never a way to say no.
 *
 * A batch_invariant layer has one kernel for all numbers of tokens: of those with row_order_fixed
 * the one with the least product of estimates for one, some and many tokens. */
#ifndef MOQ_OPS_PLAN_H
#define MOQ_OPS_PLAN_H

#include "core/kernel.h"
#include "cuda/choice/search.h"
#include "ops/layer.h"
#include "ops/params.h"

/* Rows that a table may have. */
#define MOQ_MAX_KERNELS 32
/* Bytes in which a kernel says why it cannot run. */
#define MOQ_REASON_SIZE 256
/* A kernel, by its row in the operation's table, and the config in which it does calls of a number
 * of tokens. */
typedef struct {
    int32_t kernel;
    moq_kernel_config config;
} moq_choice;

/* A kernel, a variant of it and the seconds that it took: see tune.h. */
typedef struct moq_timing moq_timing;
typedef struct moq_plan moq_plan;

/* The questions that an operation answers to the rules. `problem` is of the type that the operation
 * planned for, m a number of tokens. */
typedef struct {
    const moq_kernel *const *kernels;
    int kernel_count;
    /* Writes the reason and returns false where the kernel cannot run m tokens. */
    bool (*can_run)(const void *problem, const moq_kernel *kernel, int64_t m, char *reason,
                    size_t size);
    /* Whether what a kernel that can run m tokens needs beside the device is there: a library with
     * an algorithm. Writes the reason where it is not. NULL: kernels of the operation need nothing.
     */
    bool (*is_served)(const void *problem, const moq_kernel *kernel, int64_t m, char *reason,
                      size_t size);
    /* Estimated seconds of m tokens that a kernel of the CPU can run; only their order matters. */
    double (*cost)(const void *problem, const moq_kernel *kernel, int64_t m);
    /* The problem in a few words, for messages. */
    const char *(*text)(const void *problem, char *buffer, size_t size);
    /* The tensors of the checkpoint and of the prepared form; the count, at most
     * MOQ_MAX_LAYER_PARAMS. */
    int (*checkpoint_params)(const void *problem, moq_param_spec *params);
    int (*prepared_params)(const void *problem, moq_param_spec *params);
    /* Times the kernels of a plan of the operation, and all their variants, or one choice, with
     * m > 0 tokens: moq_tune_measure on tensors that the operation makes. `params` were checked. */
    moq_status (*measure)(const moq_plan *plan, const moq_params *params, int64_t m,
                          const moq_choice *only, moq_timing *timings, int *count, moq_err *err);
} moq_operation;

/* Numbers of tokens for which tuning has chosen. */
#define MOQ_MAX_TUNED 64
/* Numbers of tokens for which a choice is remembered. */
#define MOQ_REMEMBERED 256

struct moq_plan {
    const moq_operation *operation;
    const void *problem; /* the caller's; stays where it is as long as the plan is used */
    moq_layer layer;
    bool forced; /* MOQEXT_KERNEL named the only kernel */
    bool one;    /* the only kernel was chosen for all numbers of tokens */
    int count;
    uint8_t kernel[MOQ_MAX_KERNELS]; /* in the order of the table */
    int param_count;                 /* of the prepared form, which every call checks */
    moq_param_spec param[MOQ_MAX_LAYER_PARAMS];
    /* Choices for m tokens, at m modulo their number: comparing all kernels, and the configs of
     * one, takes longer than a call may cost the host. One word each, since several threads may
     * ask; 0 for none. */
    _Atomic uint64_t remembered[2][MOQ_REMEMBERED]; /* of calls without and with a scale of x */
    int tuned_count;
    struct {
        int64_t bucket; /* moq_token_bucket, whose numbers have configs of their own */
        int32_t kernel;
        int32_t variant;
    } tuned[MOQ_MAX_TUNED];
};

/* Collects the kernels that can run `problem`, or fails with MOQ_ERR_UNSUPPORTED and every kernel's
 * reason. `forced` is the value of MOQEXT_KERNEL, "family:name", or NULL. */
moq_status moq_plan_make(const moq_operation *operation, const void *problem, const char *forced,
                         moq_plan *plan, moq_err *err);

/* Picks the kernel that runs m tokens, and its config; for 0, which nothing runs, the kernel for 1,
 * without a config. `scaled`: the call brings the scale of x, or would find it; without it, "auto"
 * does not quantize x to NVFP4. MOQ_ERR_UNSUPPORTED with the reasons where no kernel of the plan
 * can run as many, as one that MOQEXT_KERNEL names may not. Threads may ask at once. */
moq_status moq_plan_pick(moq_plan *plan, int64_t m, bool scaled, moq_choice *choice, moq_err *err);

/* The compute mode in which a kernel of the plan runs. */
moq_compute moq_plan_compute(const moq_plan *plan, int kernel);

/* The layer with so many tokens, as configs are compared for it. */
moq_problem moq_plan_problem(const moq_plan *plan, int64_t m);

/* Seconds that m tokens are expected to take in the best config of a kernel. */
double moq_plan_cost(const moq_plan *plan, int kernel, int64_t m);

/* The config of m > 0 tokens in a variant of a kernel that can run them; 0 is the best. All configs
 * may be compared, so a plan asks once for a number of tokens. */
moq_kernel_config moq_plan_config(const moq_plan *plan, int kernel, int64_t m, int32_t variant);

/* True if a kernel of the table, of the plan or not, can run m tokens, or MOQ_ANY_TOKENS; else
 * false with a reason of up to MOQ_REASON_SIZE bytes. */
bool moq_plan_can_run(const moq_plan *plan, int kernel, int64_t m, char *reason);

/* True if a kernel can run all numbers of tokens of m's bucket, for which a choice is kept. */
bool moq_plan_can_keep(const moq_plan *plan, int kernel, int64_t m);

/* Keeps a choice for all numbers of tokens of m's bucket: a kernel of the plan by its name,
 * "family:name", that can run them. MOQ_ERR_VALUE for others, and where the plan is full. What was
 * remembered of them is forgotten; no other thread may ask meanwhile. A variant that the kernel
 * does not have stands for its own choice. */
moq_status moq_plan_keep(moq_plan *plan, int64_t m, const char *kernel, int32_t variant,
                         moq_err *err);

/* Whether a kernel could be kept for m tokens and has that variant of them. */
bool moq_plan_has_variant(const moq_plan *plan, int64_t m, const char *kernel, int32_t variant);

/* Whether a choice is kept for m tokens. */
bool moq_plan_is_tuned(const moq_plan *plan, int64_t m);

#endif
