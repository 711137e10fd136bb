"""Activations and norms that reach a linear in FP8.

For an activation that is vLLM's contract with the linear behind it. A linear says of which kind codes may be,
and `maybe_fused_act_quant` of vLLM's models then makes them in the kernel of the activation. Here that is
moqext's, which quantizes what the linear would: where one kernel runs both, outputs keep their bits. Where
this vLLM has no such contract, activations come as they are.

Nobody says which linear is behind a norm. So a norm's values carry its name, and a linear that finds it
there becomes its taker: from then on the norm writes codes as well, beside values for whoever else reads
them, and the taker finds them there. The first codes are compared with those of the values, which a model may
have changed in their place; then there are none any more. torch.compile sees nothing of it: in its graphs a
norm and the linear behind it become one operation (`moqext_vllm.compiled`).

Both ways pay. Without torch.compile Llama 8B in FP8 went from 1.07 to 1.25 times vLLM's speed with 16
sequences, and from 1.04 to 1.10 with 64; the pass gained 5 and 7 % in compiled graphs (H200,
docs/lab/neighbours.md).
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moqext import ops
from moqext_torch.activations import rms_norm, rms_norm_with_codes, silu_and_mul, silu_and_mul_quantize
from moqext_torch.norm_linear import FEW_TOKENS
from moqext_torch.stepping_aside import tell_fusion
from moqext_vllm.settings import read_ops

logger = logging.getLogger("vllm.moqext")

Producer = Callable[[torch.Tensor, torch.nn.Module], Any]

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


STAND_INS: set[Any] = set()
"""Classes in the place of vLLM's SiluAndMul, which looks producers up by the very type."""


class _Kernel:
    """A kernel as `expose_input_quant_key` asks one."""

    def input_quant_key(self) -> Any:
        return kFp8StaticTensorSym


def offer(layer: torch.nn.Module) -> None:
    """Lets an activation hand over codes to a layer with one input_scale, unless MOQEXT_VLLM_OPS=0.

    Args:
        layer: a linear of one part, in FP8 with an input_scale.
    """
    if read_ops() == "0":
        return
    if PRODUCERS is None:
        tell_fusion(logger, "activations and FP8 linears", "this vLLM has no contract for them")
        return
    known = PRODUCERS.get((SiluAndMul, kFp8StaticTensorSym))
    own = known if isinstance(known, SiluAndMulQuantize) else SiluAndMulQuantize(known)
    for activation in (SiluAndMul, *STAND_INS):
        PRODUCERS[activation, kFp8StaticTensorSym] = own
    expose_input_quant_key(layer, _Kernel())


def read(x: Any, layer: torch.nn.Module, takes_codes: bool) -> tuple[torch.Tensor, torch.dtype | None]:
    """x, or its codes with the dtype that they were made from.

    Args:
        x: what a layer is called with.
        layer: a linear.
        takes_codes: whether it may have codes.
    """
    if PRODUCERS is not None and isinstance(x, QuantizedActivation):
        return x.data, x.orig_dtype
    if not takes_codes or torch.compiler.is_compiling():
        return x, None
    made = getattr(x, MADE, None)
    if made is not None and made.codes is not None and made.taker() is layer:
        right = _are_right(made.codes, x, made.norm, layer.moqext_code_scale)
        return (made.codes, x.dtype) if right else (x, None)
    if made is not None and made.norm.taker is nobody:
        made.norm.taker = weakref.ref(layer)
    return x, None


# ------------------------------------------------------------------------------------------------- norms

MADE = "_moqext_made"
"""Attribute by which the values of a norm tell what they are."""

Taker = Callable[[], torch.nn.Module | None]


def nobody() -> None:
    """The taker of a norm that no linear has come to yet."""


def nobody_ever() -> None:
    """The taker of a norm whose values are changed before a linear reads them."""


@dataclass
class Made:
    """The mark that the values of a norm carry.

    Attributes:
        norm: which has made them.
        codes: their codes for `taker`, if there are any.
        taker: the linear whose input_scale the codes have.
    """

    norm: Any
    codes: torch.Tensor | None = None
    taker: Taker = nobody


def _are_right(codes: torch.Tensor, x: torch.Tensor, norm: Any, scale: torch.Tensor) -> bool:
    """Whether codes of a norm's values are those of x: looked at once, when nothing is being captured."""
    if not norm.codes_are_right:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        own = ops.quantize(x, "fp8_tensor", scale=scale)[0]
        norm.codes_are_right = torch.equal(own.view(torch.uint8), codes.view(torch.uint8))
        if not norm.codes_are_right:
            norm.taker = nobody_ever
            tell_fusion(logger, "norms and FP8 linears", "the model changes a norm's values in their place")
    return bool(norm.codes_are_right)


def run_norm(
    norm: Any, x: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of a layer as `MoqextRMSNorm`, with codes for its taker."""
    weight, eps = norm.weight.data, norm.variance_epsilon
    if torch.compiler.is_compiling():
        return rms_norm(x, weight, eps, residual)
    made, taker = Made(norm), norm.taker()
    if taker is not None and x.numel() > FEW_TOKENS * x.shape[-1]:
        found = rms_norm_with_codes(x, weight, eps, taker.moqext_code_scale, residual)
        if found is not None:
            v, made.codes, *z = found
            made.taker = norm.taker
            setattr(v, MADE, made)
            return (v, z[0]) if z else v
    result = rms_norm(x, weight, eps, residual)
    setattr(result if residual is None else result[0], MADE, made)
    return result


# -------------------------------------------------------------------------------------------- activations


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
