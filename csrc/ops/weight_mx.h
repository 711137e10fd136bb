/* Weight processing of MX weights of four bits: their block scales become those of NVFP4 with
 * groups of 32 (core/mx_scales.h), and the rest is done as for NVFP4. */
#ifndef MOQ_OPS_WEIGHT_MX_H
#define MOQ_OPS_WEIGHT_MX_H

#include "ops/weight_mode.h"

/* Bytes of the workspace before that of moq_prepare_on_cuda; 0 for other weights. */
int64_t moq_prepare_mx_workspace(const moq_weight *weight);

/* Weight processing of sources whose shapes were checked, on the CPU or the current device. A row
 * whose scales have no such form is refused before anything but the workspace is written. */
moq_status moq_prepare_mx(const moq_weight *weight, const moq_weight_sources *sources,
                          moq_prepare_mode mode, moq_params *params, moq_err *err);

#endif
