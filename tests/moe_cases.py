"""Random stacks of experts as a checkpoint's parameters, and random, skewed and hostile routing.

Tokens come from `linear_cases.random_x`; the scales of stacks suit it, so that outputs neither overflow
float16 nor saturate as a whole.
"""

from typing import Any

import numpy as np

from moqext import reference
from moqext.tools.expert_slack import expert_slack

from .linear_cases import LIMITS, random_part

ALGOS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_AWQ",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
)
COMPUTES = [
    *((algo, "exact") for algo in ALGOS),
    ("NVFP4", "fp8"),
    ("NVFP4", "fp4"),
    ("W4A16_NVFP4", "fp8"),
    ("NVFP4_AWQ", "fp8"),
    ("NVFP4_AWQ", "fp4"),
    ("W4A8_NVFP4_FP8", "fp8"),
    ("MXFP4", "fp8"),
    ("W4A8_MXFP4_FP8", "fp8"),
]
"""Every algorithm with every way to compute it."""

WITH_INPUT_SCALES = ("FP8", "NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8")
"""Algorithms whose files have input scales."""

ROUTINGS = ("random", "skewed", "one", "few", "duplicates", "hostile")
"""Kinds of `random_routing`."""

TYPICAL_LARGEST = 32.0
"""About what the largest of the activations is that input scales are made for."""


def _expert_part(rng: Any, algo: str, rows: int, columns: int, group_size: int | None) -> dict[str, Any]:
    """One linear of every code, its scales moved so that outputs have about the size of inputs."""
    part = random_part(rng, algo, rows, columns, group_size)
    size = float(np.sqrt(np.mean(np.square(reference.dequantize(part, algo, group_size=group_size)))))
    role = "weight_scale_2" if "NVFP4" in algo else "weight_scale"
    factor = np.float32(np.exp2(rng.uniform(-2, 1)) / (max(size, 1e-30) * np.sqrt(columns)))
    if "MXFP4" in algo:
        moved = part[role] + np.rint(np.log2(factor))
        part[role] = np.where(part[role] == 0, 0, moved).astype(np.uint8)
    elif algo == "MXFP8":
        part[role] = (part[role].astype(int) + int(np.rint(np.log2(factor)))).astype(np.uint8)
    else:
        part[role] = np.asarray(part[role] * factor, np.float32)
    if "input_scale" in part:
        largest = 2688 if algo in ("NVFP4", "NVFP4_AWQ") else 127 if "W8A8" in algo else 448
        part["input_scale"] = np.array(np.exp2(rng.uniform(-1, 1)) * TYPICAL_LARGEST / largest, np.float32)
    return part


def _alternating(stack: np.ndarray) -> np.ndarray:
    """Rows of gate and up by turns, from halves, experts first."""
    gate, up = np.split(stack, 2, axis=1)
    return np.stack([gate, up], axis=2).reshape(stack.shape)


def _projection(
    rng: Any, algo: str, experts: int, rows: int, columns: int, parts: int, group_size: int | None
) -> dict[str, np.ndarray]:
    """Tensors by role, experts first: parts side by side, one value a part as [E, parts], [E] for one."""
    each = [
        [_expert_part(rng, algo, rows, columns, group_size) for _ in range(parts)] for _ in range(experts)
    ]
    stacks = {}
    for role in each[0][0]:
        values = [[part[role] for part in expert] for expert in each]
        if values[0][0].ndim == 0:
            stacks[role] = np.stack([np.stack(expert) for expert in values])
            stacks[role] = stacks[role] if parts > 1 else stacks[role][:, 0]
        else:
            stacks[role] = np.stack([np.concatenate(expert) for expert in values])
    if "AWQ" in algo or algo == "W8A8_SQ_PER_CHANNEL":
        smooth = np.exp2(rng.uniform(-2, 2, (experts, columns))).astype(np.float32)
        stacks["pre_quant_scale"] = reference.encode(smooth, "bfloat16")
    return stacks


def random_stacks(
    rng: Any,
    quant_algo: str,
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool = True,
    interleaved: bool = False,
    group_size: int | None = None,
    bias: str | None = None,
    missing_input_scales: float = 0.0,
    input_scales: bool = True,
) -> dict[str, np.ndarray]:
    """Stacks named and shaped as `checkpoint_params`, all scales of gate and up unequal.

    Args:
        rng: generator.
        quant_algo: one of `ALGOS`.
        experts: E.
        hidden: H.
        intermediate: I.
        gated: whether w13 is gate and up.
        interleaved: rows of gate and up alternate; not for FP8_PB_WO.
        group_size: of the NVFP4 family; None is 16, and 32 for W4A8_NVFP4_FP8.
        bias: "float32", or "bfloat16" (as uint16), for biases of both projections.
        missing_input_scales: share of input scales that are NaN; at least one of each projection is left.
        input_scales: False leaves them out.
    """
    parts = 2 if gated else 1
    w13 = _projection(rng, quant_algo, experts, intermediate, hidden, parts, group_size)
    w2 = _projection(rng, quant_algo, experts, hidden, intermediate, 1, group_size)
    if bias:
        for one, rows in ((w13, parts * intermediate), (w2, hidden)):
            values = rng.standard_normal((experts, rows)).astype(np.float32)
            one["bias"] = reference.encode(values, "bfloat16") if bias == "bfloat16" else values
    if interleaved:
        assert gated, "there is no gate"
        assert quant_algo != "FP8_PB_WO", "blocks of rows with one scale cannot alternate"
        by_row = [role for role, value in w13.items() if value.shape[1:2] == (2 * intermediate,)]
        w13 |= {role: _alternating(w13[role]) for role in by_row if role != "pre_quant_scale"}
    for one in (w13, w2):
        if not input_scales:
            one.pop("input_scale", None)
        elif "input_scale" in one:
            gone = rng.random(one["input_scale"].shape) < missing_input_scales
            gone.reshape(-1)[rng.integers(gone.size)] = False
            one["input_scale"][gone] = np.nan
    return {f"w13_{role}": value for role, value in w13.items()} | {
        f"w2_{role}": value for role, value in w2.items()
    }


def make_sums_exact(rng: Any, quant_algo: str, stacks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks whose first FP8 product rounds nothing, also in tensor cores that keep 14 bits of sums.

    For x of `x_of_exact_sums`: codes of W13 are -2 to 2, its scales powers of two and biases multiples of
    one, so that every sum is a whole number below 2^13 of a common unit. Of NVFP4 that is what it folds to.
    """
    made = dict(stacks)
    if "FP4" in quant_algo:
        return made | _fold_to_exact_sums(rng, stacks)
    values = rng.integers(-2, 3, stacks["w13_weight"].shape).astype(np.float32)
    made["w13_weight"] = reference.encode(values, "e4m3").view(stacks["w13_weight"].dtype)
    shape = stacks["w13_weight_scale"].shape
    made["w13_weight_scale"] = np.exp2(rng.integers(-10, -7, shape)).astype(np.float32)
    if "w13_input_scale" in stacks:
        made["w13_input_scale"] = np.full(stacks["w13_input_scale"].shape, 0.5, np.float32)
    return made | _biases_of_exact_sums(rng, stacks)


def _biases_of_exact_sums(rng: Any, stacks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "w13_bias" not in stacks:
        return {}
    biases = rng.integers(-16, 17, stacks["w13_bias"].shape).astype(np.float32) / 8
    carried = stacks["w13_bias"].dtype == np.uint16
    return {"w13_bias": reference.encode(biases, "bfloat16") if carried else biases}


def _fold_to_exact_sums(rng: Any, stacks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scales of groups are one or two times a power of two of the row, factors of x one of the expert."""
    made = _biases_of_exact_sums(rng, stacks)
    codes = rng.choice(np.uint8([0, 2, 4, 10, 12]), (*stacks["w13_weight"].shape, 2))  # -2 to 2
    made["w13_weight"] = codes[..., 0] | codes[..., 1] << 4
    shape = stacks["w13_weight_scale"].shape
    powers = rng.integers(-2, 3, (*shape[:-1], 1)) + rng.integers(0, 2, shape)
    if "w13_weight_scale_2" not in stacks:
        return made | {"w13_weight_scale": (powers + 127 - 9).astype(np.uint8)}
    scales = np.exp2(powers).astype(np.float32)
    made["w13_weight_scale"] = reference.encode(scales, "e4m3").view(stacks["w13_weight_scale"].dtype)
    made["w13_weight_scale_2"] = np.full(stacks["w13_weight_scale_2"].shape, 2.0**-9, np.float32)
    if "w13_pre_quant_scale" in stacks:
        before = stacks["w13_pre_quant_scale"]
        factors = np.exp2(rng.integers(-1, 2, (len(before), *(1,) * (before.ndim - 1)))).astype(np.float32)
        factors = np.broadcast_to(factors, before.shape)
        carried = before.dtype == np.uint16
        made["w13_pre_quant_scale"] = reference.encode(factors, "bfloat16") if carried else factors.copy()
    return made


def x_of_exact_sums(rng: Any, tokens: int, hidden: int, dtype: str) -> np.ndarray:
    """[T, H] of whole numbers from -4 to 4 times a power of two, but for one of 448 in each 128 columns.

    So scales of tokens and groups are powers of two and codes whole numbers, as with input scales of 0.5.
    """
    values = rng.integers(-4, 5, (tokens, hidden)).astype(np.float32)
    for first in range(0, hidden, 128):
        places = rng.integers(first, min(first + 128, hidden), tokens)
        values[np.arange(tokens), places] = rng.choice(np.float32([-448, 448]), tokens)
    values *= np.float32(0.5)
    return reference.encode(values, dtype) if dtype == "bfloat16" else values.astype(dtype)


def random_routing(
    rng: Any, tokens: int, top_k: int, experts: int, kind: str = "random", ids_dtype: str = "int32"
) -> tuple[np.ndarray, np.ndarray]:
    """Router weights, float32 [T, k] that sum to 1 in a row, and ids [T, k].

    Kinds:
        random: different experts in a row, as a router gives them.
        skewed: the same, low numbers much oftener than high ones.
        one: the first slot of every token has the same expert.
        few: three quarters of the experts have no token (one at least has some).
        duplicates: experts may stand twice in a row.
        hostile: duplicates, and ids below 0 and beyond the experts, the least and the largest integers among
            them; weights of both signs, zeros, and at slots that count nothing NaN and infinity.
    """
    weights = rng.random((tokens, top_k)).astype(np.float32) + np.float32(0.01)
    weights /= weights.sum(axis=1, keepdims=True, dtype=np.float32)
    preference = np.zeros(experts)
    if kind == "skewed":
        preference = -2.0 * np.log1p(np.arange(experts))
    if kind in ("random", "skewed", "one"):
        assert top_k <= experts, "experts of a row are different ones"
        order = np.argsort(-(preference + rng.gumbel(size=(tokens, experts))), axis=1)
        if kind == "one":
            chosen = rng.integers(experts)
            rest = order[order != chosen].reshape(tokens, experts - 1)
            order = np.concatenate([np.full((tokens, 1), chosen), rest], axis=1)
        return weights, order[:, :top_k].astype(ids_dtype)
    if kind == "few":
        busy = rng.permutation(experts)[: max(1, experts // 4)]
        return weights, rng.choice(busy, (tokens, top_k)).astype(ids_dtype)
    ids = rng.integers(0, experts, (tokens, top_k)).astype(ids_dtype)
    if kind == "duplicates":
        return weights, ids
    assert kind == "hostile", kind
    limits = np.iinfo(ids_dtype)
    wrong = np.array([-1, -2, -experts, experts, experts + 1, limits.min, limits.max], ids_dtype)
    nothing = rng.random(ids.shape) < 0.3
    ids = np.where(nothing, rng.choice(wrong, ids.shape), ids)
    weights = weights * rng.choice(np.float32([1, -1, 0]), ids.shape)
    return np.where(nothing, rng.choice(np.float32([np.nan, np.inf, 0.5]), ids.shape), weights), ids


def random_expert_map(rng: Any, global_experts: int, local_experts: int) -> np.ndarray:
    """int32 [global_experts]: the local experts at random numbers in a random order, -1 elsewhere."""
    expert_map = np.full(global_experts, -1, np.int32)
    expert_map[rng.permutation(global_experts)[:local_experts]] = np.arange(local_experts)
    return expert_map


def finite_sizes(y: np.ndarray) -> np.ndarray:
    """How large outputs are; 0 where they are not finite."""
    return np.where(np.isfinite(y), np.abs(y), 0)


def assert_experts_close(
    y: np.ndarray,
    x: np.ndarray,
    stacks: dict[str, np.ndarray],
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    *,
    in_cores: bool = False,
    rounded: bool = False,
    **options: Any,
) -> None:
    """The contract of outputs against the reference rounded once, beyond what a rounding in the middle moves.

    Outputs are rounded behind it: by one moved value they may be an ulp further from the expected ones.

    Args:
        y: [T, H], of the dtype of the layer, a carrier of it, or float32 that holds its values.
        x: [T, H], values of the dtype as float32.
        stacks: the checkpoint's parameters.
        topk_weights: [T, k].
        topk_ids: [T, k].
        in_cores: of the kernel, as for `expert_slack`.
        rounded: of the kernel, as for `expert_slack`.
        **options: of `experts_reference`, by name; `dtype` is that of y.
    """
    dtype = options.get("dtype", "bfloat16")
    y = reference.as_float32(y).astype(np.float64)
    exact = reference.experts_reference(x, stacks, topk_weights, topk_ids, **options)
    expected = np.asarray(reference.round_to(exact, dtype), np.float64)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    known = ~np.isnan(expected) & (y != expected)  # equal infinities have no difference
    slack = expert_slack(x, stacks, topk_weights, topk_ids, in_cores=in_cores, rounded=rounded, **options)
    with np.errstate(invalid="ignore"):
        low, high = (
            np.asarray(reference.round_to(exact + move, dtype), np.float64) for move in (-slack, slack)
        )
        beyond = np.where(known, np.maximum(np.maximum(low - y, y - high), 0), 0)
    values = finite_sizes(expected)
    enough = 0.15 if len(y) > 9 else 0.25  # of 300 draws none had more than 0.15 up to 9 tokens, 0.11 with 40
    size = np.linalg.norm(values)
    if np.linalg.norm(slack) > enough * size:  # slots of one expert may cancel, which is no fault of the case
        whole = reference.experts_reference(x, stacks, np.abs(topk_weights), topk_ids, **options)
        size = max(size, np.linalg.norm(finite_sizes(whole)))
    assert np.linalg.norm(slack) <= enough * size + 1e-30, "the case decides too little"
    limit, limit_max = LIMITS[dtype]
    assert np.linalg.norm(beyond) <= limit * np.linalg.norm(values), np.linalg.norm(beyond)
    tops = values.max(axis=-1, keepdims=True, initial=0)
    assert (beyond <= limit_max * tops).all(), (beyond / np.maximum(tops, 1e-30)).max()
