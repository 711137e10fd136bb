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
    MOQ_SCRATCH_COUNT
} moq_scratch;

/* At least `bytes` bytes, aligned to 64, of this thread and purpose: valid until the thread asks
 * for the same purpose again. Contents are what was left there. NULL when there is no memory. */
void *moq_take_scratch(moq_scratch purpose, size_t bytes);

#endif
