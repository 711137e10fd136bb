/* The whole surface of the CUDA floor, in C: what ops and binding may call.
 *
 * With a build without nvcc the same functions exist (absent.c) and fail with that reason. Streams
 * are cudaStream_t as `void *`; NULL is the legacy default stream. Nothing here synchronises unless
 * it says so. */
#ifndef MOQ_CUDA_CUDA_H
#define MOQ_CUDA_CUDA_H

#include "core/linear.h"
#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char name[256];
    int major; /* compute capability */
    int minor;
    int sm_count;
    int sm_mhz, memory_mhz, bus_bits; /* clocks, and width of the memory; 0 where unknown */
    int shared_per_block;             /* bytes a block may have, opted in */
    int l2_bytes;
    uint64_t memory; /* bytes */
} moq_cuda_device;

/* True when the extension was compiled with nvcc. */
bool moq_cuda_built(void);
/* Architectures that the extension has code for, "80;90a;100f"; "" without nvcc. */
const char *moq_cuda_archs(void);
/* Number of usable devices. MOQ_ERR_INTERNAL with the reason where there is no driver, or none. */
moq_status moq_cuda_device_count(int *count, moq_err *err);
/* Describes a device. Asked once a device and process, then remembered; any thread may ask. */
moq_status moq_cuda_query_device(int index, moq_cuda_device *out, moq_err *err);
/* Makes a device current; moq_cuda_leave restores what was, and gets what this one said. */
moq_status moq_cuda_enter(int32_t device, bool *entered, moq_err *err);
void moq_cuda_leave(bool entered);
/* Makes work queued on `after` from now on wait for the work queued on `before`; streams of the
 * current device. Works within a capture of either, which takes in the other. */
moq_status moq_cuda_order(void *before, void *after, moq_err *err);
/* 13000 for 13.0: of the runtime in this extension, and the latest that the driver knows; 0 where
 * there is none. */
void moq_cuda_versions(int *runtime, int *driver);
/* Whether the stream, of the current device, is being captured into a graph. */
bool moq_cuda_is_capturing(void *stream);
/* In a capture, what this thread launches next is taken to follow work that is not the library's:
 * it begins when that has ended. */
void moq_graph_break_pdl(void);

/* Memory of the current device that a call works in, ordered as the stream is; not within a
 * capture, and slow after a synchronisation. Releasing NULL is nothing. */
moq_status moq_cuda_allocate(size_t bytes, void *stream, void **out, moq_err *err);
void moq_cuda_release(void *memory, void *stream);
/* Copies in the stream's order. `host` may be reused at once after an upload; a download waits for
 * the stream. */
moq_status moq_cuda_upload(void *out, const void *host, size_t bytes, void *stream, moq_err *err);
moq_status moq_cuda_download(void *host, const void *memory, size_t bytes, void *stream,
                             moq_err *err);
moq_status moq_cuda_copy(void *out, const void *memory, size_t bytes, void *stream, moq_err *err);
moq_status moq_cuda_fill(void *out, int byte, size_t bytes, void *stream, moq_err *err);
/* Waits until the work queued on a stream of the current device is done. */
moq_status moq_cuda_wait(void *stream, moq_err *err);

/* Memory of a device that outlives a call; any thread may delete it, and doing so waits for the
 * device. MOQ_ERR_MEMORY where there is not enough. */
moq_status moq_cuda_new(int32_t device, size_t bytes, void **out, moq_err *err);
void moq_cuda_delete(int32_t device, void *memory);

/* Memory of the host that copies to and from a device go to directly, page-locked; as moq_cuda_new
 * and moq_cuda_delete. */
moq_status moq_cuda_new_pinned(int32_t device, size_t bytes, void **out, moq_err *err);
void moq_cuda_delete_pinned(int32_t device, void *memory);

/* A stream to measure in, made when the current device has done all its work, and ended when the
 * stream has; ending NULL is nothing. */
moq_status moq_cuda_make_stream(void **stream, moq_err *err);
void moq_cuda_end_stream(void *stream);
/* Records what `work` queues on the stream; replays it, waits, and tells the seconds it took on the
 * device; forgets it. Forgetting NULL is nothing. */
moq_status moq_cuda_record(void *stream, moq_status (*work)(void *data, moq_err *err), void *data,
                           void **graph, moq_err *err);
moq_status moq_cuda_replay(void *graph, void *stream, double *seconds, moq_err *err);
void moq_cuda_forget(void *graph);

#ifdef __cplusplus
}
#endif
#endif
