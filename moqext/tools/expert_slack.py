"""How far the outputs of experts may be from the reference's for the sake of a rounding in the middle.

What is between the two projections is rounded to the dtype, and for FP8 and W4A4 to codes with scales that
may follow from it. A kernel sums in float32: a value that is as near to a boundary as its sum is inexact goes
to one side or to the other, and one code of e4m3 apart is an eighth of the value. So each value has a range
here, and outputs the sum of what its two ends are apart. Nearly all ranges end in the same code.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import reference
from moqext.algorithms import ALGORITHMS
from moqext.ops.spelling import SWIGLU
from moqext.reference.activations import quantize_fp8_group, quantize_fp8_token, quantize_int8_token
from moqext.reference.experts import coded_rows, expert_params, local_experts
from moqext.reference.linear import multiplied_activation, multiplied_weight, treatment

SUMS = 2.0**-20
"""Error of a float32 sum, of the sum of the magnitudes."""

_CORE_SUMS = 2.0**-8.5
"""Error of a sum in FP8 tensor cores of Hopper, of the root of the sum of the squares. They add 32 products
to the sum before, and cut these 33 numbers 13 bits behind the leading one of the largest: by 2^-8 of it at
most, and by half of that and more in few of a million sums. One 32 does not know of the next.
"""

_ROUNDED_D = 2.0**-8
"""Half an ulp of bfloat16, of a value."""

_OFTEN = 2.0
"""Deviations of a sum of what its values are apart, where many have a range and few are at its end."""

_CORE_KERNELS = ("cuda:sm90_fp8_prefill", "cuda:sm90_nvfp4_fp8_prefill")
_ROUNDING_KERNELS = (*_CORE_KERNELS, "cuda:sm90_nvfp4_prefill")

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Params = dict[str, NDArray[Any]]


def sums_in_cores(kernel: str) -> bool:
    """Whether a kernel of experts has sums that FP8 tensor cores begin, for `expert_slack`."""
    return kernel in _CORE_KERNELS


def rounds_d(kernel: str, dtype: str) -> bool:
    """Whether a kernel of experts rounds the outputs of the second projection, for `expert_slack`."""
    return kernel in _ROUNDING_KERNELS and dtype == "bfloat16"


def expert_slack(
    x: NDArray[Any],
    stacks: dict[str, NDArray[Any]],
    topk_weights: NDArray[np.float32],
    topk_ids: NDArray[Any],
    **options: Any,
) -> F64:
    """How far each output may move, [T, H].

    Args:
        x: [T, H], values of the dtype as float32; codes with `quantized_input`.
        stacks: as for `reference.experts_reference`, like all that follow.
        topk_weights: [T, k].
        topk_ids: [T, k].
        **options: of `experts_reference`, by name; `in_cores`, as `sums_in_cores` tells, and
            `rounded`, as `rounds_d` does.
    """
    algo, compute = options["quant_algo"], options.get("compute", "exact")
    size, gated = options.get("group_size"), options.get("gated", True)
    interleaved = options.get("interleaved", False) and gated
    count = len(stacks["w2_weight"])
    local = local_experts(topk_ids, count, options.get("expert_map"), options.get("global_num_experts"))
    coded = options.get("quantized_input", False)
    scales = {
        name: reference.expert_input_scale(
            stacks, f"{name}_input_scale", algo, compute, coded and name == "w13"
        )
        for name in ("w13", "w2")
    }
    values = coded_rows(x, options.get("x_scale"), algo, compute, scales["w13"]) if coded else x
    pairs = ALGORITHMS[algo].codes == "int4"  # two rows in one
    moved = np.zeros((len(x), stacks["w2_weight"].shape[1] * (2 if pairs else 1)))
    for expert in np.unique(local[local >= 0]).tolist():
        tokens, slots = np.nonzero(local == expert)
        rows, weights = values[tokens], topk_weights[tokens, slots][:, None]
        if options.get("apply_router_weight_on_input", False):
            product = (rows * weights).astype(np.float64)
            rows = np.asarray(reference.round_to(product, options.get("dtype", "bfloat16")), np.float32)
            weights = np.ones_like(weights)
        known = np.isfinite(rows).all(axis=1) & np.isfinite(weights[:, 0])
        tokens, rows, weights = tokens[known], rows[known], weights[known]
        given = {
            name: {} if scale is None else {"input_scale": scale[expert]} for name, scale in scales.items()
        }
        halves = expert_params(stacks, "w13", expert, 2 if gated else 1, interleaved)
        low, high = _middle(rows, [half | given["w13"] for half in halves], options)
        (down,) = expert_params(stacks, "w2", expert, 1, False)
        down |= given["w2"]
        weight = multiplied_weight(down, algo, compute, size)
        reach = _reach(low, high, down, weight, options)
        d = np.abs(read_by(low, down, options) @ weight.T + _bias(down))
        error = SUMS + options.get("rounded", False) * _ROUNDED_D  # of d: the sum over slots may cancel
        np.add.at(moved, tokens, np.abs(weights) * (reach + error * (d + reach)))
    return moved


def _middle(rows: F32 | F64, halves: list[Params], options: dict[str, Any]) -> tuple[F32, F32]:
    """Least and largest of what may be between the projections, rounded to the dtype."""
    algo, compute, size = options["quant_algo"], options.get("compute", "exact"), options.get("group_size")
    ends = []
    for half in halves:
        coded = options.get("quantized_input", False)
        a = rows.astype(np.float64) if coded else read_by(np.asarray(rows, np.float32), half, options)
        weight = multiplied_weight(half, algo, compute, size)
        bias = _bias(half)
        u, slack = a @ weight.T + bias, error_of_sums(a, weight, bias, options.get("in_cores", False))
        ends.append((u - slack, u + slack))
    keys = {key: options.get(key) for key in SWIGLU}
    ups = ends[1] if len(ends) > 1 else (None,)
    kind = options.get("activation", "silu")
    corners = np.stack([reference.expert_activation(g, u, kind, **keys) for g in ends[0] for u in ups])
    slack = SUMS * np.abs(corners).max(axis=0)
    dtype = options.get("dtype", "bfloat16")
    low, high = corners.min(axis=0) - slack, corners.max(axis=0) + slack
    rounded = [np.asarray(reference.round_to(end, dtype), np.float32) for end in (low, high)]
    return rounded[0], rounded[1]


def _bias(part: Params) -> Any:
    return reference.as_float32(part["bias"]).astype(np.float64) if "bias" in part else 0.0


def _reach(low: F32, high: F32, down: Params, weight: F64, options: dict[str, Any]) -> F64:
    """How far the sums of the second projection may move, [rows, H]."""
    scaled = "input_scale" in down
    kind = treatment(options["quant_algo"], options.get("compute", "exact"), scaled)
    if kind in ("token", "group") or (kind == "int8" and not scaled):
        ends = smoothed(low, down, options), smoothed(high, down, options)
        apart = _apart_by_scales(np.minimum(*ends), np.maximum(*ends), kind)
        if options.get("in_cores", False):
            return np.asarray(_OFTEN * np.sqrt(np.square(apart) @ np.square(weight).T), np.float64)
        return np.asarray(apart @ np.abs(weight).T, np.float64)
    apart = np.abs(read_by(high, down, options) - read_by(low, down, options))
    return np.asarray(apart @ np.abs(weight).T, np.float64)


def _apart_by_scales(low: F32, high: F32, kind: str) -> F64:
    """Distance of the ends where the largest value makes the scale, which so has a range, too.

    Between the ends of a value its code may be on both sides of a boundary for the scale's sake alone.
    """
    least = np.where(np.sign(low) == np.sign(high), np.minimum(np.abs(low), np.abs(high)), np.float32(0))
    most = np.maximum(np.abs(low), np.abs(high))
    if kind != "group":
        quantize = quantize_int8_token if kind == "int8" else quantize_fp8_token
        small, large = (quantize(values)[1][:, None] for values in (least, most))
    else:
        columns = low.shape[1]
        small, large = (quantize_fp8_group(v)[1].repeat(128, axis=1)[:, :columns] for v in (least, most))

    def read(values: F32, by: F32, times: F32) -> F64:
        quotient = np.abs(values) / by
        if kind == "int8":
            return np.minimum(np.rint(quotient), 128).astype(np.float64) * times
        codes = reference.decode(reference.encode(quotient, "e4m3"), "e4m3")
        return codes.astype(np.float64) * times

    upper = np.where(high >= 0, read(high, small, large), -read(high, large, small))
    lower = np.where(low >= 0, read(low, large, small), -read(low, small, large))
    return upper - lower


def error_of_sums(a: F64, weight: F64, bias: Any, in_cores: bool) -> F64:
    """How inexact the sums of a product may be, [rows, N]."""
    error: F64 = SUMS * (np.abs(a) @ np.abs(weight).T + np.abs(bias))
    return error + _CORE_SUMS * np.sqrt(np.square(a) @ np.square(weight).T) if in_cores else error


def smoothed(h: F32, part: Params, options: dict[str, Any]) -> F32:
    """The values that are quantized: h, or its product with pre_quant_scale."""
    if "pre_quant_scale" not in part:
        return h
    product = (h * reference.as_float32(part["pre_quant_scale"])).astype(np.float64)
    return np.asarray(reference.round_to(product, options.get("dtype", "bfloat16")), np.float32)


def read_by(h: F32, part: Params, options: dict[str, Any]) -> F64:
    """The values that quantized activations of a projection stand for."""
    h = smoothed(h, part, options)
    compute = options.get("compute", "exact")
    return multiplied_activation(h, part, options["quant_algo"], compute, options.get("group_size"))
