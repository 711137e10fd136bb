/* Decision which kernels of a captured graph are launched programmatically: see pdl.h.
 *
 * The graph tells the predecessors: the nodes that the stream's next node depends on. A node is
 * recognised by its handle and the unique number of its capture. */
#include "cuda/runtime/pdl.h"

#include "cuda/cuda.h"

typedef struct {
    bool captured;      /* the stream is in a capture, */
    cuuint64_t capture; /* whose number this is */
    CUgraphNode node;   /* the only predecessor; NULL with none or several */
} stream_end;

/* End of the thread's last launch; its node is NULL if the kernel does not use PDL. */
static __thread struct last_launch {
    CUstream stream;
    stream_end end;
} last;

static stream_end end_of(const moq_driver *driver, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    stream_end end = {false, 0, NULL};
    CUgraph graph;
    const CUgraphNode *nodes;
    const CUgraphEdgeData *edges;
    size_t count = 0;
    if (driver->capture_info(stream, &status, &end.capture, &graph, &nodes, &edges, &count) !=
            CUDA_SUCCESS ||
        status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return end;
    end.captured = true;
    end.node = count == 1 ? nodes[0] : NULL;
    return end;
}

extern "C" void moq_graph_break_pdl(void) {
    last.end.node = NULL;
}

bool moq_pdl_allows(const moq_driver *driver, CUstream stream) {
    stream_end end = end_of(driver, stream);
    bool known = end.node && last.end.node == end.node && last.end.capture == end.capture &&
                 last.stream == stream;
    last.end.captured = end.captured;
    return !end.captured || known;
}

void moq_pdl_launched(const moq_driver *driver, CUstream stream, bool knows) {
    if (knows && last.end.captured) { /* set by the query before the launch */
        last.stream = stream;
        last.end = end_of(driver, stream);
    } else {
        last.end.node = NULL;
    }
}
