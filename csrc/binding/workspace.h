/* Memory that a call works in: taken for it, given back when its work is queued.
 *
 * A framework takes more than a microsecond to lend some, a tenth of what a call of experts costs
 * the host. So a little of it is kept for the next call that works on the same stream: its work is
 * queued behind what used the memory before, as it is where a framework lends the same memory
 * again. A call has what it took for itself, since others find it gone; captures never see it,
 * whose replays follow no order of calls. */
#ifndef MOQ_BINDING_WORKSPACE_H
#define MOQ_BINDING_WORKSPACE_H

#include "binding/tensor_arg.h"
#include "ops/job.h"

/* Blocks that are kept are this large at most. */
#define MOQ_KEPT_BYTES ((int64_t)1 << 20)

typedef struct {
    moq_arg memory; /* or a block of which the call has a part */
    void *data;     /* NULL for 0 bytes */
    bool kept;      /* to be kept again */
    void *stream;
} moq_workspace;

/* job->bytes in the order of job->memory_stream where the job orders two streams, else of
 * job->stream; of the framework and device of `like`. */
int moq_workspace_take(moq_state *state, const moq_arg *like, const moq_job *job,
                       moq_workspace *out);
/* Gives memory back or keeps it, once the work is queued or has failed. */
void moq_workspace_release(moq_state *state, moq_workspace *workspace);
/* Gives back what was kept. */
void moq_workspace_clear(moq_boundary *boundary);

#endif
