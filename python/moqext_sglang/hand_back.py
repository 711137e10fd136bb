"""When a layer is SGLang's own: what algorithm and GPU say, and what SGLang does around experts.

Engine by engine the first part is the same, and stands in `moqext_torch.stepping_aside`.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt import server_args as arguments
from sglang.srt.layers import linear
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from moqext import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext_torch.stepping_aside import Reason, reason_to_step_aside, tell_once

try:
    from sglang.srt.runtime_context import get_lora
except ImportError:  # SGLang 0.5.17
    get_lora = arguments.get_global_server_args

logger = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)
"""Oldest GPU on which SGLang runs ModelOpt's FP8."""
TAKEN_FOR_OTHERS = (
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "W4A8_NVFP4_FP8",
    "NVFP4_AWQ",
    "MXFP4",
    "W4A8_MXFP4_FP8",
)
"""Algorithms of a whole checkpoint that SGLang's methods read as another one."""


def read_force() -> bool:
    """Whether MOQEXT_SGLANG_FORCE is "1": moqext runs what it can, even where SGLang would be faster.

    Raises:
        ValueError: it says something that is neither 0 nor 1.
    """
    value = os.environ.get("MOQEXT_SGLANG_FORCE") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"MOQEXT_SGLANG_FORCE: expected 0 or 1, got {value!r}")
    return value == "1"


def reason_of_algorithm(quant_algo: str, compute: str) -> Reason | None:
    """Why layers of an algorithm are SGLang's on this machine and with this compute, None where moqext's."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    reason = reason_to_step_aside(quant_algo, capability, compute)
    if reason is None or not reason.runs:
        return reason
    kept = _has_no_name(quant_algo) or (not reason.fuses and _misreads(quant_algo, capability))
    return None if kept else reason


def _has_no_name(quant_algo: str) -> bool:
    """Whether SGLang has no method for algorithms of ModelOpt's of that kind."""
    facts = ALGORITHMS[quant_algo]
    return facts.low_rank or facts.codes in ("int4", "int8")


def _misreads(quant_algo: str, capability: tuple[int, int] | None) -> bool:
    """Whether SGLang would take layers for others on a GPU, or has no kernels of them there."""
    if capability is None:
        return False
    return quant_algo in TAKEN_FOR_OTHERS or (
        ALGORITHMS[quant_algo].codes == "e4m3" and capability < FP8_CAPABILITY
    )


def compute_of(quant_algo: str, compute: str) -> str:
    """Compute of layers of an algorithm: the one wanted, "exact" where they have it not.

    Args:
        quant_algo: of the layers.
        compute: that the user asks for.
    """
    facts = ALGORITHMS[quant_algo]
    if compute == "fp4":
        has = facts.codes == "e2m1" and facts.linear == "as_is" and facts.input_scale is not None
    else:
        has = facts.codes == "e2m1" or facts.scale_dtype == "float8_e8m0fnu"
    return compute if has else "exact"


def reason_of_experts() -> Reason | None:
    """Why the options of SGLang ask for its own kernels of experts, None where they do not."""
    if get_lora().enable_lora:
        return Reason("adapters of experts (LoRA) need SGLang's own kernels", runs=False)
    exchange, runner = get_moe_a2a_backend(), get_moe_runner_backend()
    if not exchange.is_none():
        return Reason(f"--moe-a2a-backend {exchange.value} sends tokens to SGLang's own kernels", runs=False)
    if not (runner.is_auto() or runner.is_triton() or runner.is_marlin()):
        return Reason(f"--moe-runner-backend {runner.value} asks for kernels of SGLang's", runs=False)
    return None


def ask_sglang(config: Any, layer: Any, prefix: str, algorithm: str, reason: Reason) -> Any:
    """SGLang's method of a layer that is not moqext's, told once in the log.

    Args:
        config: moqext's configuration.
        layer: SGLang's.
        prefix: its name.
        algorithm: of the layer, as the checkpoint names it.
        reason: why it is SGLang's.

    Raises:
        UnsupportedQuantization: SGLang has no method of it either.
    """
    method, theirs = _method_of_sglang(config, layer, prefix, algorithm)
    if method is None:
        why = reason.why.removeprefix(f"{prefix}: ")
        raise UnsupportedQuantization(f"{prefix}: {algorithm}: {why}; SGLang says: {theirs}")
    tell_once(logger, "SGLang", algorithm, reason.why.removeprefix(f"{prefix}: "), prefix)
    return method


def _method_of_sglang(config: Any, layer: Any, prefix: str, algorithm: str) -> tuple[Any, object]:
    """The method, or None and what SGLang has against the layer."""
    if config.engine is None:
        return None, config.refusal
    if algorithm in TAKEN_FOR_OTHERS and not config.checkpoint.quantized_layers:
        return None, "it reads this algorithm as another one"
    config.engine.packed_modules_mapping = config.packed_modules_mapping
    try:
        method = config.engine.get_quant_method(layer, prefix)
    except Exception as error:
        return None, error
    if method is None or isinstance(method, UnquantizedLinearMethod):
        return None, "it would not quantize the layer"
    return method, None


def or_sglang(create_weights: Callable[..., None]) -> Callable[..., None]:
    """Has a layer that `create_weights` of a method refuses get SGLang's method instead.

    Nothing was registered with a layer that is refused. Both methods know their configuration, algorithm and
    name as `quant_config`, `quant_algo` and `prefix`.
    """

    @functools.wraps(create_weights)
    def create(self: Any, layer: Any, *given: Any, **named: Any) -> None:
        try:
            create_weights(self, layer, *given, **named)
            return
        except UnsupportedQuantization as error:
            if (
                getattr(layer, "quant_method", None) is not self
            ):  # SGLang wrapped it: nothing can take its place
                raise
            reason = Reason(str(error), runs=False)
        method = ask_sglang(self.quant_config, layer, self.prefix, self.quant_algo, reason)
        if hasattr(layer, "weight_loader_v2") and "weight_loader" in named:
            known = type(method).__name__ in linear.WEIGHT_LOADER_V2_SUPPORTED
            named["weight_loader"] = layer.weight_loader_v2 if known else layer.weight_loader
        layer.quant_method = method
        try:
            method.create_weights(layer, *given, **named)
        except Exception as error:
            raise UnsupportedQuantization(f"{reason.why}; SGLang says: {error}") from error

    return create


def is_runnable(algorithm: str) -> bool:
    """Whether moqext runs linears of an algorithm here, on any machine."""
    facts = ALGORITHMS.get(algorithm)
    return facts is not None and facts.linear is not None
