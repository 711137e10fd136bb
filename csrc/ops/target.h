/* The chip behind a device, for the choice of a kernel. */
#ifndef MOQ_OPS_TARGET_H
#define MOQ_OPS_TARGET_H

#include "core/linear.h"

/* Finds what `device` is, and whether there is cuBLASLt, which is opened for a CUDA device. Never
 * fails: where there is no such device, or this build has no code for it, `missing` says so, where
 * there is no cuBLASLt, `cublaslt_missing`. */
moq_target moq_find_target(moq_device device);

/* A chip that need not be here, in a build with code for it: what a plan would be there.
 * `capability` is "9.0", or the name of a chip of the table, "H100 SXM". `pretend`: cuBLASLt is
 * asked what it has, and calls run on the device that is here. */
moq_status moq_assume_target(moq_device device, const char *capability, bool pretend,
                             moq_target *target, moq_err *err);

/* MOQ_ERR_UNSUPPORTED where an assumed target is not what `device` is. */
moq_status moq_check_target(moq_device device, const moq_target *target, moq_err *err);

/* True if code for `archs`, as in "80;90a;100f;89-virtual", runs on a compute capability. */
bool moq_archs_run_on(const char *archs, int32_t capability);

#endif
