/* Which kernel runs a linear: one table, a pure predicate and a cost estimate per row.
 *
 * `can_run` looks only at the description of the problem, so the choice is testable on a machine
 * without the device. A plan keeps the kernels that can run a layer; each call takes the cheapest
 * for its number of rows. The reasons of the others are kept for explain(). */
#ifndef MOQ_OPS_PLAN_H
#define MOQ_OPS_PLAN_H

#include "core/linear.h"

#define MOQ_MAX_KERNELS 24

typedef struct {
    const char *family; /* "cpu" */
    const char *name;   /* "portable" */
    /* Writes the reason and returns false when the kernel cannot serve this spec. */
    bool (*can_run)(const moq_linear_spec *spec, char *reason, size_t size);
    /* Estimated seconds for m rows; only the order between kernels matters. */
    double (*cost)(const moq_linear_spec *spec, int64_t m);
    /* Bytes of device memory the call works in; NULL for none. */
    int64_t (*workspace)(const moq_linear_call *call);
    moq_status (*run)(const moq_linear_call *call, moq_err *err);
    /* Its ways to do the call: bit i is set where `variant` i is one. NULL for one. */
    uint64_t (*variants)(const moq_linear_call *call);
    /* The variant that variant 0 stands for with m rows, where finding it takes a while; or NULL.
     */
    int32_t (*choose)(const moq_linear_spec *spec, int64_t m);
    /* It multiplies x by the call's pre_quant_scale itself; before others that is done for them. */
    bool smooths;
    const char *note; /* what explain() says beside its name, or NULL */
    bool folds;       /* of packed NVFP4 weights it multiplies e4m3 codes (moq_linear_folds) */
} moq_linear_kernel;

/* A kernel and one of its variants. */
typedef struct {
    const moq_linear_kernel *kernel;
    int32_t variant;
} moq_linear_choice;

/* Numbers of tokens for which tuning has chosen. */
#define MOQ_MAX_TUNED 64
/* Numbers of rows for which a choice is remembered. */
#define MOQ_REMEMBERED 256

typedef struct {
    int count;
    const moq_linear_kernel *kernel[MOQ_MAX_KERNELS];
    int param_count; /* of the prepared form, which every call checks */
    moq_param_spec param[MOQ_MAX_PARAMS];
    /* What was chosen for m rows, at m modulo their number: comparing all kernels takes longer than
     * a call may cost the host. One word each, since several threads may ask; 0 for none. */
    _Atomic uint64_t remembered[MOQ_REMEMBERED];
    int tuned_count;
    struct {
        int64_t bucket; /* moq_token_bucket */
        moq_linear_choice choice;
    } tuned[MOQ_MAX_TUNED];
} moq_linear_plan;

/* The rows of the table; NULL past the last. */
const moq_linear_kernel *moq_linear_kernel_at(int index);

/* Collects the kernels that can run `spec`, or fails with MOQ_ERR_UNSUPPORTED and every kernel's
 * reason. `forced` is the value of MOQEXT_KERNEL, "family:name", or NULL. */
moq_status moq_linear_make_plan(const moq_linear_spec *spec, const char *forced,
                                moq_linear_plan *plan, moq_err *err);

/* What runs m rows: the choice that was kept for as many, else the cheapest kernel. The kernel is
 * never NULL for a plan that was made. Threads may ask at once. */
moq_linear_choice moq_linear_pick(moq_linear_plan *plan, const moq_linear_spec *spec, int64_t m);

/* What m rows are multiplied as: the layer's compute, or for "auto" that of the kernel picked. */
moq_compute moq_linear_pick_compute(moq_linear_plan *plan, const moq_linear_spec *spec, int64_t m);

/* Keeps a choice for all numbers of rows of m's bucket: a kernel of the plan by its name,
 * "family:name", that can run m rows. MOQ_ERR_VALUE for others, and where the plan is full. */
moq_status moq_linear_keep(moq_linear_plan *plan, const moq_linear_spec *spec, int64_t m,
                           const char *kernel, int32_t variant, moq_err *err);

#endif
