"""A mixture of experts in float64: what every kernel of it is compared with.

Each expert is two linears with an activation between them, and each linear is `moqext.reference.linear` of
one expert's own tensors, gate and up apart. Stacks are named and shaped as a checkpoint's, experts first:
P = 2 where experts are gated, else 1.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moqext.reference.linear import BY_TOKEN, coded_activation, linear, multiplied_weight, treatment
from moqext.reference.numbers import F32, F64, Array, as_float32, plain_array, round_to
from moqext.reference.weights import Params, tensor

ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_AWQ",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
)
ONE_INPUT_SCALE = ("FP8", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")
"""Algorithms whose activations have one scale of the layer, known before it runs."""

SWIGLU = {"silu": (1.0, 0.0, math.inf), "swigluoai": (1.702, 1.0, 7.0)}
"""Numbers alpha, beta and limit of the activations that have them."""


def _times_sigmoid(v: F64, z: F64) -> F64:
    """The product v * sigmoid(z): the limit 0 where z is minus infinity, also of an infinite v."""
    with np.errstate(all="ignore"):
        small = np.exp(-np.abs(z))
        product = v * (np.where(z >= 0, 1.0, small) / (1.0 + small))
    return np.where(z == -np.inf, 0.0, product)


def _silu(v: F64) -> F64:
    return _times_sigmoid(v, v)


def _gelu(v: F64) -> F64:
    """The form with erf; its complement keeps the digits of a negative v."""
    half = np.asarray([math.erfc(each) / 2 for each in (v.ravel() * -math.sqrt(0.5)).tolist()])
    with np.errstate(invalid="ignore"):
        return np.where(v == -np.inf, 0.0, v * half.reshape(v.shape))


def _gelu_tanh(v: F64) -> F64:
    """With z = sqrt(2 / pi) * (v + 0.044715 v^3): v * (1 + tanh(z)) / 2, which is v * sigmoid(2 z)."""
    with np.errstate(over="ignore"):
        return _times_sigmoid(v, math.sqrt(8 / math.pi) * v * (1 + 0.044715 * v * v))


def _relu2(v: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.square(np.maximum(v, 0.0))


ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


def expert_activation(
    gate: F64,
    up: F64 | None = None,
    activation: str = "silu",
    *,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> F64:
    """The function between the two projections of an expert, in float64 and not rounded.

        silu, gelu (with erf), gelu_tanh, relu2:       act(gate) * up, or act(gate) where there is no up;
        silu, swigluoai, gated:                        g * sigmoid(alpha * g) * (u + beta);
                                                       g = min(gate, limit), u = min(max(up, -limit), limit).

    silu(v) = v * sigmoid(v) and relu2(v) = max(v, 0)^2. A gate of minus infinity counts as the limit 0 that
    silu and gelu have there. A NaN stays one.

    Args:
        gate: [..., I].
        up: [..., I]; None where experts are not gated.
        activation: "silu", "gelu", "gelu_tanh" or "relu2", or where gated "swigluoai".
        alpha: of silu and swigluoai where gated; None is 1 and 1.702.
        beta: of silu and swigluoai where gated; None is 0 and 1.
        limit: of silu and swigluoai where gated, above zero; None is none and 7.

    Returns:
        [..., I].

    Raises:
        ValueError: an unknown activation, or options that it does not have.
    """
    if activation not in (*ACTIVATIONS, "swigluoai"):
        known = ", ".join((*ACTIVATIONS, "swigluoai"))
        raise ValueError(f"activation: expected one of {known}, got {activation!r}")
    if up is not None and activation in SWIGLU:
        given = zip((alpha, beta, limit), SWIGLU[activation], strict=True)
        a, b, most = (default if value is None else float(value) for value, default in given)
        if not most > 0:
            raise ValueError(f"limit: must be above zero, got {limit}")
        g = np.minimum(gate, most)
        with np.errstate(all="ignore"):
            return _times_sigmoid(g, a * g) * (np.clip(up, -most, most) + b)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation} is for gated experts only")
    if not (alpha is beta is limit is None):
        raise ValueError(f"alpha, beta, limit: only gated silu and swigluoai have them, not {activation}")
    with np.errstate(all="ignore"):
        value = ACTIVATIONS[activation](gate)
        return value if up is None else value * up


def expert_input_scale(
    stacks: Params, name: str, quant_algo: str, compute: str, shared: bool = False
) -> F32 | None:
    """The scale of each expert's activations before one projection; None where none is used.

    FP8, W8A8_SQ_PER_CHANNEL and those whose names begin with W4A8 have one of the layer, the largest of all
    experts and of gate and up; so every expert has it. Without any, W8A8_SQ_PER_CHANNEL and W4A8_MXFP4_FP8
    quantize by token. `compute="fp4"` has one of each expert, the larger one
    of its gate and up. A NaN is a missing one: an expert without any has the largest of the others.

    Args:
        stacks: as for `experts_reference`.
        name: "w13_input_scale" or "w2_input_scale".
        quant_algo: canonical name.
        compute: "exact", "fp8" or "fp4".
        shared: one of the layer with "fp4", too, as w13 has where its activations are codes already.

    Returns:
        float32 [E], or None.

    Raises:
        ValueError: no expert has one, or one is zero, negative or infinite.
    """
    if quant_algo not in ONE_INPUT_SCALE and compute != "fp4":
        return None
    experts = tensor(stacks, "w2_weight").shape[0]
    slots = as_float32(stacks.get(name, np.full(experts, np.nan, np.float32))).reshape(experts, -1)
    known = ~np.isnan(slots)
    if not known.any() and quant_algo in BY_TOKEN and not shared:
        return None
    if not known.any():
        raise ValueError(f"{name}: no expert has one, and {quant_algo} with compute {compute!r} needs it")
    if not ((slots[known] > 0) & np.isfinite(slots[known])).all():
        raise ValueError(f"{name}: must be positive and finite, got {slots[known].tolist()}")
    each = np.where(known, slots, np.float32(0)).max(axis=1).astype(np.float32)
    largest = (each == 0) | (quant_algo in ONE_INPUT_SCALE) | shared
    scale: F32 = np.where(largest, each.max(), each).astype(np.float32)
    return scale


def _part(name: str, value: Array, part: int, parts: int, interleaved: bool) -> Array:
    """Gate's (0) or up's (1) share of one expert's tensor: one value of two, or half of the rows."""
    if value.ndim < 2 and value.size == parts:
        return np.asarray(value.reshape(parts)[part])
    if value.ndim == 0 or value.shape[0] % parts:
        raise ValueError(f"{name}: expected {parts} parts of each expert, got shape {value.shape}")
    size = value.shape[0] // parts
    return value[part::parts] if interleaved else value[part * size : (part + 1) * size]


def expert_params(
    stacks: Params, projection: str, expert: int, parts: int, interleaved: bool
) -> list[dict[str, Array]]:
    """One expert's tensors of a projection by role, part by part, as `linear` takes them."""
    params: list[dict[str, Array]] = [{} for _ in range(parts)]
    for name, stack in stacks.items():
        role = name.removeprefix(projection + "_")
        if role in (name, "input_scale"):
            continue
        value = np.asarray(plain_array(stack)[expert])
        for part in range(parts):
            shared = role == "pre_quant_scale"
            params[part][role] = value if shared else _part(name, value, part, parts, interleaved)
    return params


def local_experts(
    topk_ids: ArrayLike, experts: int, expert_map: ArrayLike | None, global_num_experts: int | None
) -> NDArray[np.int64]:
    """The local number of each slot's expert, -1 where the slot counts nothing."""
    ids = plain_array(topk_ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"topk_ids: expected integers, got {ids.dtype}")
    ids = ids.astype(np.int64)
    local = np.arange(experts) if expert_map is None else plain_array(expert_map).astype(np.int64)
    known = local.size
    if expert_map is not None and global_num_experts not in (None, known):
        raise ValueError(f"expert_map: expected {global_num_experts} elements, got {known}")
    within = (ids >= 0) & (ids < known)
    numbers = np.append(local, -1)[np.where(within, ids, known)]
    return np.where((numbers >= 0) & (numbers < experts), numbers, -1)


def _count_experts(stacks: Params) -> int:
    """E, which every stack must have first."""
    counts = {name: np.shape(stack)[:1] for name, stack in stacks.items()}
    (experts,) = tensor(stacks, "w2_weight").shape[:1]
    if any(count != (experts,) for count in counts.values()):
        raise ValueError(f"stacks: expected the same experts in each, got {counts}")
    tensor(stacks, "w13_weight")
    return int(experts)


def coded_rows(
    x: ArrayLike, x_scale: ArrayLike | None, quant_algo: str, compute: str, scale: F32 | None
) -> F64:
    """Values of the codes of x, [..., H]; `scale` is that of each expert, one for all, or None."""
    one = None if scale is None else scale[0]
    return coded_activation(x, x_scale, treatment(quant_algo, compute), one)


def _multiply_meaning(
    meaning: F32 | F64, part: dict[str, Array], quant_algo: str, compute: str, group_size: int | None
) -> F64:
    """One part of a projection of what codes stand for."""
    y = meaning.astype(np.float64) @ multiplied_weight(part, quant_algo, compute, group_size).T
    return y + as_float32(part["bias"]) if "bias" in part else y


def _routed_rows(
    values: F32 | F64, topk_weights: ArrayLike, local: NDArray[np.int64]
) -> tuple[F32 | F64, F32, NDArray[np.int64]]:
    """The tokens as [T, H], their router weights and local experts as [T, k]."""
    weights = as_float32(topk_weights)
    if weights.shape != local.shape or weights.shape[:-1] != values.shape[:-1]:
        shapes = f"{weights.shape} and {local.shape} for x of shape {values.shape}"
        raise ValueError(f"topk_weights, topk_ids: expected shape [..., k], got {shapes}")
    tokens, top_k = math.prod(values.shape[:-1]), weights.shape[-1]
    return (
        values.reshape(tokens, values.shape[-1]),
        weights.reshape(tokens, top_k),
        local.reshape(tokens, top_k),
    )


def _weighted_rows(rows: F32 | F64, weights: F32, dtype: str) -> F32:
    if weights.shape[1] != 1:
        raise ValueError(f"apply_router_weight_on_input: top_k must be 1, got {weights.shape[1]}")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(round_to((rows * weights).astype(np.float64), dtype), np.float32)


def experts_reference(
    x: ArrayLike,
    stacks: Params,
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    *,
    quant_algo: str,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    group_size: int | None = None,
    compute: str = "exact",
    dtype: str = "bfloat16",
    expert_map: ArrayLike | None = None,
    global_num_experts: int | None = None,
    apply_router_weight_on_input: bool = False,
    out: ArrayLike | None = None,
    quantized_input: bool = False,
    x_scale: ArrayLike | None = None,
) -> F64:
    """The routed experts of every token and their weighted sum, in float64.

    For token t and slot j, e being the local number of topk_ids[t, j] and w = topk_weights[t, j]:

        u = W13[e] x[t] + b13[e];       x[t] quantized as `linear` says, u not rounded;
        g = act(u), rounded to `dtype`;
        d = W2[e] g + b2[e];            g quantized as x is, d not rounded;
        y[t] = out[t] + (sum of w * d, j = 0 first).

    With `apply_router_weight_on_input` it is x[t] * w, rounded to float32 and then to `dtype`, that W13 has,
    and the sum has d alone. A slot counts nothing, whatever its weight is, where its id is negative or not
    below the number of experts, or where `expert_map` has no local expert for it. The same expert may stand
    in two slots.

    Args:
        x: [..., H], values that `dtype` holds, as for `linear`.
        stacks: w13_weight [E, P * I, H] and w2_weight [E, H, I], FP8 codes or pairs of FP4 codes (the last
            axis is half of it then); gate's rows first, then up's, or alternating where `interleaved`. With
            the scales of the algorithm, each named as `linear` has it after "w13_" or "w2_":

            - FP8: w13_weight_scale [E, P], w2_weight_scale [E];
            - FP8_PER_CHANNEL_PER_TOKEN: w13_weight_scale [E, P * I], w2_weight_scale [E, H];
            - FP8_PB_WO: w13_weight_scale [E, P * ceil(I / 128), ceil(H / 128)], w2_weight_scale
              [E, ceil(H / 128), ceil(I / 128)];
            - NVFP4, W4A16_NVFP4, NVFP4_AWQ, W4A8_NVFP4_FP8: w13_weight_scale [E, P * I, H / g],
              w2_weight_scale [E, H, I / g], w13_weight_scale_2 [E, P], w2_weight_scale_2 [E];
            - MXFP4, W4A8_MXFP4_FP8: w13_weight_scale [E, P * I, H / 32], w2_weight_scale [E, H, I / 32];
            - w13_input_scale [E, P], w2_input_scale [E], NaN where one is missing (`expert_input_scale`);
            - w13_pre_quant_scale [E, H], w2_pre_quant_scale [E, I];
            - w13_bias [E, P * I] (alternating where `interleaved`), w2_bias [E, H].

            With P = 1 the extent P may be left out.
        topk_weights: float32 [..., k].
        topk_ids: integers [..., k].
        quant_algo: canonical name, one of `ALGORITHMS`.
        activation: as for `expert_activation`.
        gated: whether w13 is gate and up, or up alone.
        interleaved: rows of gate (even) and up (odd) alternate in w13 and all that goes by its rows.
        alpha: as for `expert_activation`.
        beta: as for `expert_activation`.
        limit: as for `expert_activation`.
        group_size: as for `linear`.
        compute: as for `linear`.
        dtype: of the layer: "bfloat16", "float16" or "float32".
        expert_map: int32 [global_num_experts], the local number of each expert, -1 for one that is elsewhere.
        global_num_experts: length of `expert_map`, checked; without one ids are local numbers.
        apply_router_weight_on_input: needs k = 1.
        out: [..., H], what the sum is added to; None is zero.
        quantized_input: x is the codes that it would be quantized to, uint8 [..., H], of "fp4" pairs
            [..., H / 2]; w13_input_scale of "fp4" is then one for all experts, the largest.
        x_scale: what `quantize_fp8_token`, `quantize_fp8_group` or `quantize_nvfp4` has beside them (with an
            extent of 1 for a token's one).

    Returns:
        [..., H], not yet rounded to `dtype`.

    Raises:
        ValueError: an algorithm, activation or option that is not one of these, a missing tensor, a missing
            input scale (`expert_input_scale`), or shapes that do not fit.
    """
    if quant_algo not in ALGORITHMS:
        raise ValueError(f"quant_algo: expected one of {', '.join(ALGORITHMS)}, got {quant_algo!r}")
    if interleaved and (quant_algo == "FP8_PB_WO" or not gated):
        reason = "blocks of rows with one scale cannot alternate" if gated else "there is no gate"
        raise ValueError(f"interleaved: expected False, {reason}")
    experts = _count_experts(stacks)
    local = local_experts(topk_ids, experts, expert_map, global_num_experts)
    scales = {
        name: expert_input_scale(
            stacks, name + "_input_scale", quant_algo, compute, quantized_input and name == "w13"
        )
        for name in ("w13", "w2")
    }
    coded = coded_rows(x, x_scale, quant_algo, compute, scales["w13"]) if quantized_input else None
    values = as_float32(x) if coded is None else coded
    rows, w, local = _routed_rows(values, topk_weights, local)
    if apply_router_weight_on_input:
        if quantized_input:
            raise ValueError("apply_router_weight_on_input: codes cannot be multiplied")
        rows, w = _weighted_rows(rows, w, dtype), np.ones_like(w)

    def project(projection: str, expert: int, h: F32 | F64, parts: int) -> list[F64]:
        params = expert_params(stacks, projection, expert, parts, interleaved and parts > 1)
        if quantized_input and projection == "w13":
            return [_multiply_meaning(h, part, quant_algo, compute, group_size) for part in params]
        scale = scales[projection]
        given = {} if scale is None else {"input_scale": scale[expert]}
        options: dict[str, Any] = {"compute": compute, "group_size": group_size, "x_dtype": dtype}
        return [linear(h, part | given, quant_algo, **options, out_dtype="float64") for part in params]

    terms = np.zeros((*w.shape, rows.shape[1]))
    for expert in np.unique(local[local >= 0]).tolist():
        tokens, slots = np.nonzero(local == expert)
        u = project("w13", expert, rows[tokens], 2 if gated else 1)
        up = u[1] if gated else None
        g = expert_activation(u[0], up, activation, alpha=alpha, beta=beta, limit=limit)
        d = project("w2", expert, np.asarray(round_to(g, dtype), np.float32), 1)[0]
        terms[tokens, slots] = w[tokens, slots, None].astype(np.float64) * d
    total = np.zeros(rows.shape)
    for slot in range(w.shape[1]):
        total += terms[:, slot]
    total = total.reshape(values.shape)
    return total if out is None else as_float32(out) + total
