"""Activations that reach a linear in FP8: vLLM's contract between an activation and the linear behind it.

A linear says of which kind codes may be, and `maybe_fused_act_quant` of vLLM's models then makes them in the
kernel of the activation. Here that is moqext's, which quantizes what the linear would: where one kernel runs
both, outputs keep their bits. Where this vLLM has no such contract, activations come as they are.
"""

from collections.abc import Callable
from typing import Any

import torch

from moqext_torch.activations import silu_and_mul, silu_and_mul_quantize

Producer = Callable[[torch.Tensor, torch.nn.Module], Any]

FEW_TOKENS = 16
"""Up to so many are quantized by the linear's own kernel, which then begins before the activation has ended:
1 to 2 us sooner on an H100 (4096 x 4096 and 4096 x 14336 with 16 tokens), as much later with 64."""

try:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fusion import fused_act_quant
    from vllm.model_executor.layers.fusion.quant_activation import (
        QuantizedActivation,
        expose_input_quant_key,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    PRODUCERS: dict[Any, Producer] | None = fused_act_quant._FUSED_ACT_QUANT
except (ImportError, AttributeError):
    PRODUCERS = None


class _Kernel:
    """What `expose_input_quant_key` asks."""

    def input_quant_key(self) -> Any:
        return kFp8StaticTensorSym


def offer(layer: torch.nn.Module) -> None:
    """Lets an activation hand over codes to a layer with one input_scale.

    Args:
        layer: a linear of one part, in FP8 with an input_scale.
    """
    if PRODUCERS is None:
        return
    key = (SiluAndMul, kFp8StaticTensorSym)
    known = PRODUCERS.get(key)
    if not isinstance(known, SiluAndMulQuantize):
        PRODUCERS[key] = SiluAndMulQuantize(known)
    expose_input_quant_key(layer, _Kernel())


def read(x: Any) -> tuple[torch.Tensor, torch.dtype | None]:
    """x, or its codes with the dtype that they were made from."""
    if PRODUCERS is not None and isinstance(x, QuantizedActivation):
        return x.data, x.orig_dtype
    return x, None


class SiluAndMulQuantize:
    """The activation with the quantization for linears of moqext; for others what vLLM had.

    Args:
        other: vLLM's own, None where it has none.
    """

    def __init__(self, other: Producer | None) -> None:
        self.other = other

    def __call__(self, x: torch.Tensor, linear: torch.nn.Module) -> Any:
        """The codes of silu(gate) * up, as vLLM hands them on."""
        scale = getattr(linear, "moqext_input_scale", None)
        if scale is None:
            assert self.other is not None  # vLLM offers a key of its own only beside a producer
            return self.other(x, linear)
        if not torch.compiler.is_compiling() and x.numel() <= FEW_TOKENS * x.shape[-1]:
            return silu_and_mul(x)
        codes = silu_and_mul_quantize(x, scale)
        return QuantizedActivation(codes, scale, x.dtype, codes.shape, kFp8StaticTensorSym)
