/* Which kernels are launched programmatically: see overlap.h.
 *
 * In a capture the graph tells what is ahead: the nodes that the next one of the stream depends on.
 * A node is known again by the capture and its handle; a thread remembers the last of its own. */
#include "cuda/runtime/overlap.h"

#include "cuda/runtime/launch.h"

typedef struct {
    bool captured; /* the stream is in a capture, whose number it is */
    cuuint64_t capture;
    CUgraphNode node; /* the only one ahead, NULL where there are none or several */
} stream_end;

static __thread struct last_launch { /* each thread has one */
    CUstream stream;
    bool follows; /* what is launched next in this stream stands behind it, in the same call */
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

void moq_overlap_begin(void) {
    last.follows = false;
}

extern "C" void moq_cuda_meet_stranger(void) {
    last.follows = false;
    last.end.node = NULL;
}

bool moq_overlap_allows(const moq_driver *driver, CUstream stream) {
    if (last.follows && last.stream == stream)
        return true;
    stream_end end = end_of(driver, stream);
    bool known = end.captured && end.node && last.stream == stream &&
                 last.end.capture == end.capture && last.end.node == end.node;
    last.end = end;
    return known;
}

void moq_overlap_launched(const moq_driver *driver, CUstream stream, bool knows) {
    last.stream = stream;
    last.follows = knows;
    if (last.end.captured)
        last.end = end_of(driver, stream);
    if (!knows)
        last.end.node = NULL;
}
