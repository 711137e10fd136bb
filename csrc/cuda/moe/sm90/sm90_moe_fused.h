/* Launchers of the form of strips (sm90_moe_decode_fused.h), for the surfaces of the kernels for
 * experts with few tokens on Hopper. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_FUSED_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_FUSED_H

#include "core/moe.h"
#include "cuda/choice/moe_decode.h"

namespace moq::moe_decode {

moq_status launch_fused_nvfp4(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err);
moq_status launch_fused_fp8(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err);

} // namespace moq::moe_decode

#endif
