/* Memory that a call works in: see workspace.h. Places are taken and given back under the GIL. */
#include "binding/workspace.h"

#include "binding/boundary.h"
#include "binding/py_tensor.h"
#include "cuda/cuda.h"

/* Blocks are this large or a power of two times as large, so that calls of a few more tokens find
 * room in them. */
#define LEAST_BYTES ((int64_t)1 << 16)

static bool suits(const moq_kept_block *block, const moq_arg *like, void *stream) {
    return block->managed && block->stream == stream && block->exchange == like->exchange &&
           block->view.device.index == like->view.device.index;
}

/* The block of a stream, taken out of its place; false where there is none so large. */
static bool take_kept(moq_boundary *boundary, const moq_arg *like, int64_t bytes, void *stream,
                      moq_arg *memory) {
    for (int i = 0; i < MOQ_KEPT_BLOCKS; i++) {
        moq_kept_block *block = &boundary->kept[i];
        if (!suits(block, like, stream) || block->view.shape[0] < bytes)
            continue;
        *memory = (moq_arg){.name = "workspace",
                            .view = block->view,
                            .managed = block->managed,
                            .exchange = block->exchange};
        block->managed = NULL;
        return true;
    }
    return false;
}

/* Keeps a block in a free place, else in the next one in turn. One of the same stream, which
 * another thread gave back meanwhile or which was too small, gives way to it. */
static void keep(moq_boundary *boundary, moq_workspace *w) {
    moq_arg *memory = &w->memory;
    int at = -1;
    for (int i = 0; i < MOQ_KEPT_BLOCKS; i++)
        if (suits(&boundary->kept[i], memory, w->stream) || (at < 0 && !boundary->kept[i].managed))
            at = i;
    if (at < 0)
        at = boundary->next_kept++ % MOQ_KEPT_BLOCKS;
    moq_kept_block *block = &boundary->kept[at];
    moq_kept_block before = *block;
    *block = (moq_kept_block){memory->managed, memory->exchange, memory->view, w->stream};
    memory->managed = NULL;
    if (before.managed)
        moq_managed_release(before.managed);
}

static int64_t block_bytes(int64_t bytes) {
    int64_t size = LEAST_BYTES;
    while (size < bytes)
        size *= 2;
    return size;
}

int moq_workspace_take(moq_state *state, const moq_arg *like, const moq_job *job,
                       moq_workspace *out) {
    out->stream = job->stream;
    out->kept = like->exchange && like->view.device.kind == MOQ_CUDA && job->bytes > 0 &&
                job->bytes <= MOQ_KEPT_BYTES && !job->orders && !moq_cuda_is_capturing(job->stream);
    int64_t bytes = out->kept ? block_bytes(job->bytes) : job->bytes;
    if (!(out->kept && take_kept(state->boundary, like, job->bytes, job->stream, &out->memory)) &&
        moq_arg_take_memory(state, like, bytes, &out->memory) < 0)
        return -1;
    if (out->kept)
        out->memory.exchange = like->exchange;
    out->data = out->memory.view.data;
    return 0;
}

void moq_workspace_release(moq_state *state, moq_workspace *workspace) {
    if (workspace->kept && state->boundary)
        keep(state->boundary, workspace);
    moq_arg_release(&workspace->memory);
}

void moq_workspace_clear(moq_boundary *boundary) {
    for (int i = 0; i < MOQ_KEPT_BLOCKS; i++) {
        DLManagedTensorVersioned *managed = boundary->kept[i].managed;
        boundary->kept[i].managed = NULL;
        if (managed)
            moq_managed_release(managed);
    }
}
