"""Tokens as the codes that experts take for x, of every algorithm that has some."""

from typing import Any

import numpy as np

from moqext import MoEMethod, reference
from moqext.tools.expert_slack import rounds_d, sums_in_cores

from .linear_cases import poisoned
from .moe_calls import moved, options_of
from .moe_cases import assert_experts_close

CODED = [
    ("FP8", "exact"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact"),
    ("FP8_PB_WO", "exact"),
    ("W4A8_NVFP4_FP8", "exact"),
    ("W4A8_NVFP4_FP8", "fp8"),
    ("NVFP4", "fp8"),
    ("NVFP4", "fp4"),
    ("W4A16_NVFP4", "fp8"),
]
"""Algorithms and computes whose x may be codes already."""


def scheme_of(method: MoEMethod) -> str:
    """Scheme of `ops.quantize` that makes the codes."""
    if method.compute == "fp4":
        return "nvfp4"
    by_algo = {"FP8": "fp8_tensor", "W4A8_NVFP4_FP8": "fp8_tensor", "FP8_PB_WO": "fp8_group"}
    return by_algo.get(method.quant_algo, "fp8_token")


def input_scale_of(method: MoEMethod, stacks: dict[str, np.ndarray]) -> np.float32:
    """The one scale of w13 that codes are made with."""
    scales = reference.expert_input_scale(stacks, "w13_input_scale", method.quant_algo, method.compute, True)
    assert scales is not None
    return np.float32(scales[0])


def quantized(
    method: MoEMethod, stacks: dict[str, np.ndarray], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes of x [T, H], values of the dtype as float32, by the reference, and the scales beside them."""
    scheme = scheme_of(method)
    if scheme == "fp8_tensor":
        return reference.quantize_fp8_static(x, input_scale_of(method, stacks)), None
    if scheme == "fp8_token":
        codes, scale = reference.quantize_fp8_token(x)
        return codes, scale[..., None]
    if scheme == "fp8_group":
        return reference.quantize_fp8_group(x)
    made = reference.quantize_nvfp4(x, input_scale_of(method, stacks))
    return made.codes, made.block_scale


def check_codes(
    y: Any, method: MoEMethod, stacks: Any, codes: Any, scale: Any, weights: Any, ids: Any, **options: Any
) -> None:
    """The contract of outputs, as `moe_calls.check` has it for values."""
    kernel = method.backend_for(len(codes))
    of_kernel = {"in_cores": sums_in_cores(kernel), "rounded": rounds_d(kernel, method.dtype)}
    options |= options_of(method) | {"quantized_input": True, "x_scale": scale}
    assert_experts_close(y, codes, stacks, weights, ids, **options | of_kernel)


def run_codes(
    method: MoEMethod, params: Any, codes: Any, scale: Any, weights: Any, ids: Any, **options: Any
) -> np.ndarray:
    """y into a poisoned output, of codes and scales of the host, for prepared experts wherever they are."""
    y = poisoned((len(codes), method.hidden_size), method.dtype)
    target = moved(method, y, method.dtype)
    if "expert_map" in options:
        options["expert_map"] = moved(method, options["expert_map"])
    inputs = moved(method, codes), params, moved(method, weights), moved(method, ids)
    assert method(*inputs, out=target, x_scale=moved(method, scale), **options) is target
    if method.device != "cpu":
        from .cuda.cases import to_numpy

        y[...] = to_numpy(target)
    return y
