/* Routing on the device, with the ids and weights of the CPU bit for bit (core/route.h). */
#ifndef MOQ_CUDA_TENSOR_CUDA_ROUTE_H
#define MOQ_CUDA_TENSOR_CUDA_ROUTE_H

#include "core/route.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes weights and ids, both [..., top_k] without gaps, of at least one token, by one kernel.
 * Queued on `stream` of the current device; may overlap with its neighbours there (PDL). */
moq_status moq_cuda_route(const moq_route *route, float *weights, int32_t *ids, void *stream,
                          moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
