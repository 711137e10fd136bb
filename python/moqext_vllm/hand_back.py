"""When a layer is vLLM's own: what algorithm and GPU say, and what vLLM does around experts.

Engine by engine the first part is the same, and stands in `moqext_torch.stepping_aside`.
"""

import functools
from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from moqext import UnsupportedQuantization
from moqext_torch.stepping_aside import Reason, reason_to_step_aside


def reason_of_algorithm(quant_algo: str, compute: str) -> Reason | None:
    """Why layers of an algorithm are vLLM's on this machine and with this compute, None where moqext's."""
    capability = current_platform.get_device_capability()
    return reason_to_step_aside(quant_algo, None if capability is None else tuple(capability), compute)


def reason_of_experts(moe: Any) -> Reason | None:
    """Why experts are vLLM's: what is around them asks for its modular kernel, which moqext has none of.

    Args:
        moe: vLLM's description of them.
    """
    parallel, config = moe.moe_parallel_config, get_current_vllm_config_or_none()
    if moe.is_lora_enabled:
        return Reason("adapters of experts (LoRA) need vLLM's modular kernel", runs=False)
    if getattr(getattr(config, "parallel_config", None), "enable_elastic_ep", False):
        return Reason("elastic expert parallelism needs vLLM's modular kernel", runs=False)
    if parallel.use_all2all_kernels or getattr(parallel, "use_passthrough_all2all", False):
        why = f"all2all_backend {parallel.all2all_backend} sends tokens through vLLM's modular kernel"
        if not getattr(parallel, "use_ag_rs_all2all_kernels", False):
            return Reason(why, runs=False)
        if _masks_padding():
            return Reason(f"{why}, and moqext runs them with VLLM_MOE_SKIP_PADDING=0 alone", runs=False)
        return Reason(why, runs=True)
    return None


def _masks_padding() -> bool:
    """Whether vLLM's routing leaves rows of padding out: it looks for them among the tokens of one rank."""
    return bool(getattr(envs, "VLLM_MOE_SKIP_PADDING", False)) and current_platform.is_cuda_alike()


def explain(method: Any, prefix: str, why: str) -> Any:
    """Has what a method of vLLM's raises for a layer say why the layer is not moqext's.

    Args:
        method: of one layer.
        prefix: the layer's name.
        why: what moqext has against it.
    """
    create_weights = method.create_weights

    @functools.wraps(create_weights)
    def create(*args: Any, **kwargs: Any) -> Any:
        try:
            return create_weights(*args, **kwargs)
        except Exception as error:
            raise refusal(prefix, why, error) from error

    method.create_weights = create
    return method


def refusal(prefix: str, why: str, theirs: object) -> UnsupportedQuantization:
    """The exception for a layer that neither runs.

    Args:
        prefix: the layer's name.
        why: what moqext has against it.
        theirs: what vLLM says.
    """
    layer = f"{prefix}: " if prefix and not why.startswith(f"{prefix}:") else ""
    return UnsupportedQuantization(f"{layer}{why}; vLLM says: {theirs}")
