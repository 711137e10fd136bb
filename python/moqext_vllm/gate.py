"""vLLM's linear of a router by moqext, for few tokens: between a norm and the routing, programmatically.

It stands in vLLM's registry as the norms do (`moqext_vllm.activations`), and becomes vLLM's class where
moqext does not run it.

A kernel of another library there ends the run of those that reach over each other (docs/lab/pdl.md),
and reads half a megabyte of weight only when its predecessor has ended.
"""

import logging
from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from moqext import ops
from moqext_torch.op import is_plain_call
from moqext_torch.stepping_aside import tell_fusion
from moqext_vllm.activations import find_config

logger = logging.getLogger("vllm.moqext")

MOST_TOKENS = 64
STEP = 32
"""Columns are a multiple of it."""
DTYPES = (torch.bfloat16, torch.float16)


class MoqextGateLinear(GateLinear):  # type: ignore[misc]
    """vLLM's GateLinear, whose logits are summed in float32 and rounded as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = find_config(self)
        why = "" if config is None else self._find_unusual(config)
        if why:
            tell_fusion(logger, "linears of routers and the routing behind them", why)
        if config is None or why:
            self.__class__ = GateLinear

    def _find_unusual(self, config: Any) -> str:
        """The reason why moqext does not run this linear, empty for none."""
        if config.lora_config is not None:
            return "the engine serves adapters (LoRA)"
        if not current_platform.has_device_capability(90):
            return "moqext's kernel needs capability 9.0"
        if not isinstance(self.quant_method, UnquantizedLinearMethod) or self.weight.dtype not in DTYPES:
            return "the weight is quantized, or neither bfloat16 nor float16"
        if self.weight.shape[1] % STEP or self.bias is not None:
            return f"there is a bias, or the columns are no multiple of {STEP}"
        return ""

    def forward(self, x: torch.Tensor) -> Any:
        """The logits of x [tokens, columns]; where vLLM returns a bias as well, none."""
        if not self._fits(x):
            return super().forward(x)
        wide = self.out_dtype == torch.float32
        logits = ops.router_logits(x, self.weight.data, dtype="float32" if wide else None)
        return (logits, None) if self.return_bias else logits

    def _fits(self, x: torch.Tensor) -> bool:
        """Whether moqext has a call: what nobody watches, of few tokens."""
        return bool(
            not torch.compiler.is_compiling()
            and self.out_dtype in (None, x.dtype, torch.float32)
            and x.is_cuda
            and is_plain_call(x)
            and x.dim() == 2
            and x.dtype == self.weight.dtype
            and 0 < x.shape[0] <= MOST_TOKENS
            and x.stride(1) == 1
            and x.stride(0) % 8 == 0
            and x.data_ptr() % 16 == 0
        )


def register_gate() -> None:
    """Puts the class into vLLM's registry, unless another plug-in has the place."""
    held = op_registry_oot.get(GateLinear.__name__)
    if held is None:
        own = GateLinear.name
        GateLinear.register_oot(name=GateLinear.__name__)(MoqextGateLinear)
        MoqextGateLinear.name = own  # what users call it
    elif held is not MoqextGateLinear:
        logger.warning("moqext leaves %s to %s of another plug-in", GateLinear.__name__, held)
