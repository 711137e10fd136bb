"""vLLM's own RMSNorm and SiluAndMul between moqext's linears, by moqext's kernels.

Kernels of moqext that follow each other on a GPU reach over each other (docs/lab/pdl.md); one of
another library between two of them ends that. The classes here stand in vLLM's registry for out-of-tree
layers, so that every model makes them in the place of vLLM's. Each decides when it is made whether moqext
runs it; where not, it becomes one of vLLM's class, whose very type vLLM asks for in places. Call by call it
decides whether the tensors are such that moqext can, and has vLLM's own code run where not.
"""

import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from moqext_torch import silu_and_mul
from moqext_torch.stepping_aside import tell_fusion
from moqext_vllm import quantized_input
from moqext_vllm.choices import Choices
from moqext_vllm.settings import runs_ops

logger = logging.getLogger("vllm.moqext")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class MoqextRMSNorm(RMSNorm):  # type: ignore[misc]
    """vLLM's RMSNorm; with a residual moqext rounds the sum to the model's dtype before it is squared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = find_config(self)
        why = "" if config is None else self._find_unusual(config)
        if why:
            tell_fusion(logger, "norms and their sums", why)
        if config is None or why:
            self.__class__ = RMSNorm
            return
        self.model_width = config.model_config.get_hidden_size()
        self.taker: quantized_input.Taker = quantized_input.nobody  # of codes of its values
        self.codes_are_right = False  # has been seen
        self.vllm_forward = self._forward_method
        self._forward_method = self.moqext_forward

    def _find_unusual(self, config: Any) -> str:
        """The reason why moqext does not run this norm, empty for none."""
        if getattr(config.compilation_config.pass_config, "fuse_allreduce_rms", False):
            return "vLLM joins them with the sums of ranks (fuse_allreduce_rms), by a pass over its own norms"
        usual = self.has_weight and self.variance_size_override is None
        return "" if usual else "a norm has no weight, or the variance of a part of its row"

    def moqext_forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The norm of x [..., hidden_size], or that of x + residual and the sum itself, as new tensors."""
        if not self._runs(x, residual):
            return self.vllm_forward(x, residual)
        return quantized_input.run_norm(self, x, residual)

    def _runs(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Whether moqext has this norm. Those of heads stay vLLM's: torch.compile joins them with others."""
        return (
            (x.dim() == 2 or self.hidden_size == self.model_width)
            and x.dtype in DTYPES
            and self.weight.dtype == x.dtype
            and x.shape[-1] == self.hidden_size
            and (residual is None or (residual.dtype == x.dtype and residual.dim() == x.dim()))
        )


class MoqextSiluAndMul(SiluAndMul):  # type: ignore[misc]
    """vLLM's SiluAndMul: silu in float32, rounded to the model's dtype, times the other half."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if find_config(self) is None:
            self.__class__ = SiluAndMul
            return
        self.vllm_forward = self._forward_method
        self._forward_method = self.moqext_forward

    def moqext_forward(self, x: torch.Tensor) -> Any:
        """silu(gate) * up of x [..., 2 * width], gates first, as a new tensor."""
        return silu_and_mul(x) if x.dtype in DTYPES else self.vllm_forward(x)


LAYERS: tuple[type[CustomOp], ...] = (MoqextRMSNorm, MoqextSiluAndMul)


def find_config(layer: CustomOp) -> Any:
    """The configuration of the engine, where moqext runs a layer that is being made in it, or None.

    It does in models of whose linears moqext runs some and vLLM none by faster kernels, where `runs_ops` says
    so, unless the user has turned the layer off (`custom_ops` with "-rms_norm").

    Raises:
        ValueError: MOQEXT_VLLM_OPS says something that nobody knows.
    """
    config = get_current_vllm_config_or_none()
    if config is None or not isinstance(config.quant_config, Choices):
        return None
    if not config.quant_config.runs_neighbours:
        return None
    if not runs_ops() or f"-{layer.name}" in config.compilation_config.custom_ops:
        return None
    return config


def register_layers() -> None:
    """Puts the classes into vLLM's registry, unless another plug-in has the place."""
    quantized_input.STAND_INS.add(MoqextSiluAndMul)
    for layer in LAYERS:
        base = layer.__base__
        assert base is not None
        held = op_registry_oot.get(base.__name__)
        if held is None:
            own = base.name
            CustomOp.register_oot(name=base.__name__)(layer)
            layer.name = own  # what users call it in `custom_ops`
        elif held is not layer:
            logger.warning("moqext leaves %s to %s of another plug-in", base.__name__, held)
