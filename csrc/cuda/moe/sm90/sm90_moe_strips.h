/* Launchers of the form of strips (sm90_moe_few_strips.h), for the surfaces of the kernels for
 * experts with few tokens on Hopper. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_STRIPS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_STRIPS_H

#include "core/moe.h"
#include "cuda/choice/moe_few.h"

namespace moq::moe_few {

moq_status launch_nvfp4_strips(const moq_moe_call *call, const moq_moe_strips *share, moq_err *err);
moq_status launch_fp8_strips(const moq_moe_call *call, const moq_moe_strips *share, moq_err *err);

} // namespace moq::moe_few

#endif
