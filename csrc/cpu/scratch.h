/* Memory a thread keeps between calls for the kernels' workspaces.
 *
 * A workspace of some hundred kilobytes that is allocated and freed in every call costs more than
 * the call: the allocator hands such blocks back to the system, and their pages fault in again. */
#ifndef MOQ_CPU_SCRATCH_H
#define MOQ_CPU_SCRATCH_H

#include <stddef.h>

typedef enum {
    MOQ_SCRATCH_PANEL,
    MOQ_SCRATCH_ROW,
    MOQ_SCRATCH_TILE,
    MOQ_SCRATCH_EXPERTS,
    MOQ_SCRATCH_COUNT
} moq_scratch;

/* Memory of at least `bytes` bytes, aligned to 64, of this thread and purpose: valid until the
 * thread asks for the same purpose again. Contents are what was left there. NULL when there is no
 * memory. */
void *moq_take_scratch(moq_scratch purpose, size_t bytes);

/* The workspaces of a thread. */
typedef struct {
    void *memory[MOQ_SCRATCH_COUNT];
    size_t bytes[MOQ_SCRATCH_COUNT];
} moq_scratch_set;

/* Takes this thread's workspaces away for a while, so that other calls in the middle of one leave
 * them alone; back they come in place of whatever was asked for since. */
void moq_set_scratch_aside(moq_scratch_set *kept);
void moq_put_scratch_back(const moq_scratch_set *kept);

#endif
