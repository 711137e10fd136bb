/* The kernels of experts on the CUDA floor. Each takes a call that was checked (core/moe.h), on the
 * device of its spec; what a kernel cannot do is said by its predicate in ops/moe_kernels.c. The
 * workspace of a kernel is a number of bytes that the call needs on the device.
 *
 * Nothing is read back from the device: grids are as large as the slots of the call could ask for,
 * and blocks without work end at once. Calls can be captured, and repeat bit by bit. */
#ifndef MOQ_CUDA_MOE_CUDA_MOE_H
#define MOQ_CUDA_MOE_CUDA_MOE_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Experts of a layer whose slots are sorted on the device. */
#define MOQ_CUDA_MOE_EXPERTS 1024

#ifdef __cplusplus
}
#endif
#endif
