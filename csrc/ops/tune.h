/* Measuring which kernel is fastest for a number of tokens, instead of estimating it.
 *
 * Tuning is asked for, never done on the way: it takes memory and time, and waits for the device.
 * It changes which kernel runs, hence at most the last bits of results, or with compute "auto" what
 * is multiplied. Candidates, rounds and the clock are here and know no operation; an operation
 * brings a subject, which makes tensors and opens jobs. */
#ifndef MOQ_OPS_TUNE_H
#define MOQ_OPS_TUNE_H

#include "ops/job.h"
#include "ops/plan.h"
#include "ops/tune_memory.h"

/* Variants of a kernel that are measured. */
#define MOQ_MAX_VARIANTS 64
#define MOQ_MAX_TIMINGS  (MOQ_MAX_KERNELS * MOQ_MAX_VARIANTS)

struct moq_timing {
    int32_t kernel;
    int32_t variant; /* as it was asked for; 0 is the kernel's own choice */
    double seconds;  /* of a call, the median */
};

/* The part of measuring that an operation does. `data` is its own. */
typedef struct {
    void *data;
    size_t job_size; /* of its jobs, of which a moq_job is the first member */
    /* Makes the tensors of calls. *copies is how many sets of weights there are. */
    moq_status (*make)(void *data, moq_tune_memory *memory, int *copies, moq_err *err);
    /* Opens a job on them for a choice that can run it. */
    moq_status (*open)(void *data, moq_choice choice, moq_job *job, moq_err *err);
    /* The variants of the job's kernel: bit i is set for variant i. */
    uint64_t (*variants)(void *data, const moq_job *job);
    /* The next call of the job reads this set of weights. */
    void (*turn)(void *data, moq_job *job, int copy);
} moq_tune_subject;

/* Times every kernel of the plan that can serve m > 0 rows, and all of its variants, and writes
 * them, at most MOQ_MAX_TIMINGS, the fastest first; where `only` is given, that one alone. On CUDA
 * calls are replayed from graphs, each with another set of weights, so that they come from memory;
 * not within a capture. */
moq_status moq_tune_measure(const moq_tune_subject *subject, const moq_plan *plan, int64_t m,
                            const moq_choice *only, moq_timing *timings, int *count, moq_err *err);

#endif
