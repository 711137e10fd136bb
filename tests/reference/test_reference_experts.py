"""The reference's experts against a loop over tokens and slots of its own, and cases by hand."""

import math

import ml_dtypes
import numpy as np
import pytest

from moqext import reference
from moqext.reference import expert_activation, expert_input_scale, experts_reference

from ..linear_cases import random_x
from ..moe_cases import (
    ALGOS,
    COMPUTES,
    ROUTINGS,
    WITH_INPUT_SCALES,
    random_expert_map,
    random_routing,
    random_stacks,
)
from ..work import each

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu2"]


def rounded(values, dtype):
    """The values of a dtype, rounded once: ml_dtypes would go through float32."""
    values = np.asarray(values, np.float64)
    if dtype == "bfloat16":
        fraction, exponent = np.frexp(values)
        return np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8).astype(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(dtype).astype(np.float32)


def tokens_of(rng, shape, dtype="bfloat16"):
    return reference.as_float32(random_x(rng, shape, dtype))


def weight_of(stacks, projection, expert, algo, parts, interleaved, folded):
    """One expert's whole weight [N, K] in float64, its rows as stored."""
    own = {
        name.removeprefix(projection + "_"): stack[expert]
        for name, stack in stacks.items()
        if name.startswith(projection)
    }
    codes = own["weight"]
    rows = len(codes)
    part_of_row = np.arange(rows) % parts if interleaved else np.arange(rows) // (rows // parts)
    if "FP4" in algo:
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(rows, -1)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        of_blocks = ml_dtypes.float8_e8m0fnu if "MXFP4" in algo else ml_dtypes.float8_e4m3fn
        blocks = own["weight_scale"].view(of_blocks).astype(np.float64)
        values *= np.repeat(blocks, values.shape[1] // blocks.shape[1], axis=1)
        if folded:
            largest = np.abs(values).max(axis=1, keepdims=True)
            power = np.exp2([[math.ceil(math.log2(row[0] / 448)) if row[0] else 0] for row in largest])
            values = (values / power).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * power
        if "MXFP4" in algo:
            return values
        return values * np.reshape(own["weight_scale_2"], parts)[part_of_row][:, None]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = own["weight_scale"].astype(np.float64)
    if algo == "FP8":
        return values * scale.reshape(parts)[part_of_row][:, None]
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return values * scale[:, None]
    for row in range(rows):
        part, place = divmod(row, rows // parts)
        for column in range(values.shape[1]):
            values[row, column] *= scale[part * len(scale) // parts + place // 128, column // 128]
    return values


def e4m3(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def treated(x, algo, compute, scale):
    """One token [K] as a projection reads it."""
    if compute == "fp4":
        groups = []
        for group in x.reshape(-1, 16):
            block = np.float32(e4m3(np.abs(group).max() / (np.float32(6) * scale)))
            if block == 0:
                groups.append(np.zeros(16))
                continue
            codes = np.clip(group / (block * scale), -6, 6).astype(ml_dtypes.float4_e2m1fn)
            groups.append(codes.astype(np.float64) * float(block) * float(scale))
        return np.concatenate(groups)
    if algo in ("FP8", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"):
        return e4m3(x * (np.float32(1) / scale)) * float(scale)
    if algo == "FP8_PB_WO":
        groups = np.split(x, range(128, len(x), 128))
        steps = [np.maximum(np.abs(g).max(), np.float32(1e-10)) / np.float32(448) for g in groups]
        return np.concatenate([e4m3(g / step) * float(step) for g, step in zip(groups, steps, strict=True)])
    if algo == "FP8_PER_CHANNEL_PER_TOKEN" or compute == "fp8":
        step = np.maximum(np.abs(x).max() / np.float32(448), np.float32(1 / (448 * 512)))
        return e4m3(x / step) * float(step)
    return x.astype(np.float64)


def scale_of(stacks, projection, expert, algo, compute):
    """The input scale of one expert by Python's max."""
    scales = stacks.get(f"{projection}_input_scale")
    if scales is None or (algo in ("NVFP4", "NVFP4_AWQ") and compute != "fp4"):
        return None
    everything = [value for value in scales.reshape(-1) if value == value]
    own = [value for value in np.reshape(scales[expert], -1) if value == value]
    return max(own or everything) if compute == "fp4" else max(everything)


def act(kind, gate, up):
    """One value of the activations without options."""
    if kind == "silu":
        value = gate / (1 + math.exp(-gate))
    elif kind == "gelu":
        value = gate * (1 + math.erf(gate / math.sqrt(2))) / 2
    elif kind == "gelu_tanh":
        value = gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    else:
        value = gate * gate if gate > 0 else 0.0
    return value if up is None else value * up


def naive(x, stacks, weights, ids, algo, compute="exact", *, kind="silu", gated=True, interleaved=False,
          dtype="bfloat16", expert_map=None, on_input=False, out=None):  # fmt: skip
    """Token by token and slot by slot, each row of an expert's weight found by its number."""
    experts, hidden = stacks["w2_weight"].shape[:2]
    parts = 2 if gated else 1
    rows = stacks["w13_weight"].shape[1]
    result = np.zeros((len(x), hidden)) if out is None else out.astype(np.float64)

    def project(projection, expert, h, count):
        smooth = stacks.get(f"{projection}_pre_quant_scale")
        if smooth is not None:
            h = rounded(h * smooth[expert].view(ml_dtypes.bfloat16).astype(np.float32), dtype)
        a = treated(h, algo, compute, scale_of(stacks, projection, expert, algo, compute))
        weight = weight_of(
            stacks, projection, expert, algo, count, interleaved and count == 2, compute == "fp8"
        )
        bias = stacks.get(f"{projection}_bias")
        y = weight @ a
        if bias is not None:
            one = bias[expert]
            y = y + (one.view(ml_dtypes.bfloat16) if one.dtype == np.uint16 else one).astype(np.float64)
        return y

    for token in range(len(x)):
        for slot, number in enumerate(ids[token].tolist()):
            if expert_map is not None:
                number = int(expert_map[number]) if 0 <= number < len(expert_map) else -1
            if not 0 <= number < experts:
                continue
            w = weights[token, slot]
            u = project("w13", number, rounded(x[token] * w, dtype) if on_input else x[token], parts)
            if not gated:
                pairs = [(u[i], None) for i in range(rows)]
            elif interleaved:
                pairs = [(u[2 * i], u[2 * i + 1]) for i in range(rows // 2)]
            else:
                pairs = [(u[i], u[rows // 2 + i]) for i in range(rows // 2)]
            g = rounded([act(kind, *pair) for pair in pairs], dtype)
            result[token] += (1.0 if on_input else float(w)) * project("w2", number, g, 1)
    return result


def assert_same(actual, expected):
    """Sums in float64, so equal but for their order, unless a rounding between them fell apart."""
    assert actual.dtype == np.float64
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    top = np.nanmax(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9 * top)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("algo", "compute"), COMPUTES)
def test_experts_equal_a_loop_over_tokens(algo, compute, gated, rng):
    hidden, intermediate = (144, 272) if algo == "FP8_PB_WO" else (64, 96)
    stacks = random_stacks(rng, algo, 5, hidden, intermediate, gated=gated)
    x = tokens_of(rng, (7, hidden))
    weights, ids = random_routing(rng, 7, 2, 5)
    y = experts_reference(x, stacks, weights, ids, quant_algo=algo, compute=compute, gated=gated)
    assert_same(y, naive(x, stacks, weights, ids, algo, compute, gated=gated))
    assert np.abs(y).max() > 1e-3


@pytest.mark.parametrize("kind", ROUTINGS)
def test_every_routing(kind, rng):
    stacks = random_stacks(rng, "NVFP4", 8, 32, 48)
    x = tokens_of(rng, (9, 32))
    weights, ids = random_routing(rng, 9, 4, 8, kind, str(rng.choice(["int32", "int64"])))
    y = experts_reference(x, stacks, weights, ids, quant_algo="NVFP4")
    assert not np.isnan(y).any()
    assert_same(y, naive(x, stacks, weights, ids, "NVFP4"))


@pytest.mark.parametrize("algo", [algo for algo in ALGOS if algo != "FP8_PB_WO"])
def test_interleaved_rows_are_those_of_halves(algo, rng):
    stacks = random_stacks(rng, algo, 3, 64, 32, interleaved=True, bias="float32")
    x = tokens_of(rng, (6, 64))
    weights, ids = random_routing(rng, 6, 2, 3)
    y = experts_reference(x, stacks, weights, ids, quant_algo=algo, interleaved=True)
    assert_same(y, naive(x, stacks, weights, ids, algo, interleaved=True))
    by_row = [name for name, s in stacks.items() if name.startswith("w13") and s.shape[1:2] == (64,)]
    by_row = [name for name in by_row if name != "w13_pre_quant_scale"]
    halves = {name: np.concatenate([stacks[name][:, ::2], stacks[name][:, 1::2]], axis=1) for name in by_row}
    assert len(halves) >= 2
    np.testing.assert_array_equal(y, experts_reference(x, stacks | halves, weights, ids, quant_algo=algo))


@each("dtype", ["bfloat16", "float16", "float32"])
@each("bias", [None, "float32", "bfloat16"])
def test_dtypes_and_biases(dtype, bias, rng):
    stacks = random_stacks(rng, "NVFP4_AWQ", 4, 32, 32, bias=bias)
    x = tokens_of(rng, (5, 32), dtype)
    weights, ids = random_routing(rng, 5, 3, 4)
    y = experts_reference(x, stacks, weights, ids, quant_algo="NVFP4_AWQ", dtype=dtype)
    assert_same(y, naive(x, stacks, weights, ids, "NVFP4_AWQ", dtype=dtype))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_in_a_layer(kind, gated, rng):
    stacks = random_stacks(rng, "W4A16_NVFP4", 3, 32, 64, gated=gated)
    x = tokens_of(rng, (4, 32))
    weights, ids = random_routing(rng, 4, 2, 3)
    y = experts_reference(x, stacks, weights, ids, quant_algo="W4A16_NVFP4", activation=kind, gated=gated)
    assert_same(y, naive(x, stacks, weights, ids, "W4A16_NVFP4", kind=kind, gated=gated))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_value_by_value(kind, rng):
    gate, up = rng.normal(size=(2, 3, 50)) * 3
    for u in (up, None):
        expected = [act(kind, g, None if u is None else v) for g, v in zip(gate.flat, up.flat, strict=True)]
        actual = expert_activation(gate, u, kind)
        assert actual.shape == gate.shape
        np.testing.assert_allclose(actual.ravel(), expected, rtol=1e-12, atol=1e-13)  # 1 + erf cancels


@pytest.mark.parametrize(
    ("kind", "options", "alpha", "beta", "limit"),
    [
        ("swigluoai", {}, 1.702, 1.0, 7.0),
        ("swigluoai", {"alpha": 1.5, "beta": 0.25, "limit": 2.0}, 1.5, 0.25, 2.0),
        ("silu", {"limit": 3.0}, 1.0, 0.0, 3.0),
        ("silu", {"alpha": 2.0, "beta": 1.0}, 2.0, 1.0, math.inf),
    ],
)
def test_limits_clamp_the_gate_above_and_up_on_both_sides(kind, options, alpha, beta, limit, rng):
    gate, up = np.append(rng.normal(size=(2, 60)) * 8, [[9, -9, np.nan, 1], [-9, 9, 1, np.nan]], axis=1)
    actual = expert_activation(gate, up, kind, **options)
    for g, u, value in zip(gate, up, actual, strict=True):
        if math.isnan(g) or math.isnan(u):
            assert math.isnan(value)
            continue
        g, u = min(g, limit), min(max(u, -limit), limit)
        assert value == pytest.approx(g / (1 + math.exp(-alpha * g)) * (u + beta), rel=1e-12)
    assert (np.abs(gate) > min(limit, 8)).any()


def test_activations_at_infinities():
    """A sum that overflowed counts as one that nearly did: silu and gelu fall to 0, relu2 is 0."""
    ends = np.array([-np.inf, -1e300, 1e300, np.inf])
    for kind in ACTIVATIONS:
        low, near, high, most = expert_activation(ends, None, kind)
        assert (low, near) == (0, 0)
        assert high >= 1e300
        assert most == np.inf
    assert expert_activation(ends[:1], np.ones(1), "swigluoai") == 0
    assert np.isnan(expert_activation(np.array([np.nan]), np.ones(1), "relu2")).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tanh", None, {}), "activation: expected one of"),
        (("swigluoai", None, {}), "activation: swigluoai is for gated experts only"),
        (("gelu", 1.0, {"limit": 7.0}), "only gated silu and swigluoai have them, not gelu"),
        (("silu", None, {"limit": 7.0}), "only gated silu and swigluoai have them, not silu"),
        (("silu", 1.0, {"limit": 0.0}), "limit: must be above zero"),
        (("swigluoai", 1.0, {"limit": math.nan}), "limit: must be above zero"),
    ],
)
def test_activation_options_that_do_not_exist(arguments, message):
    kind, up, options = arguments
    with pytest.raises(ValueError, match=message):
        expert_activation(np.ones(2), None if up is None else np.ones(2), kind, **options)


def tiny(gate=1.0, up=1.0, down=1.0, experts=2):
    """Experts of 32 x 32 whose only codes other than 0 are the first of gate, up and down: e times each."""
    codes = np.zeros((experts, 3, 32, 32))
    codes[:, :, 0, 0] = np.arange(1, experts + 1)[:, None] * [gate, up, down]
    encoded = reference.encode(codes, "e4m3")
    return {
        "w13_weight": encoded[:, :2].reshape(experts, 64, 32),
        "w13_weight_scale": np.tile(np.float32([0.5, 2.0]), (experts, 1)),
        "w13_input_scale": np.ones((experts, 2), np.float32),
        "w2_weight": encoded[:, 2],
        "w2_weight_scale": np.full(experts, 0.25, np.float32),
        "w2_input_scale": np.ones(experts, np.float32),
    }


def test_two_experts_by_hand():
    """relu2 of a gate of 4 * 0.5 e, times an up of 4 * 2 e, is 32 e^3: 32 and 256; down adds 0.25 e."""
    x = np.zeros((2, 32), np.float32)
    x[:, 0] = 4
    weights = np.float32([[0.5, 0.25], [2.0, 1.0]])
    y = experts_reference(x, tiny(), weights, [[0, 1], [1, 1]], quant_algo="FP8", activation="relu2")
    first, second = 32 * 0.25, 256 * 0.5
    assert y[:, 0].tolist() == [0.5 * first + 0.25 * second, 3 * second]
    assert not y[:, 1:].any()
    out = np.full((2, 32), 0.125, np.float32)
    added = experts_reference(
        x, tiny(), weights, [[0, 1], [1, 1]], quant_algo="FP8", activation="relu2", out=out
    )
    np.testing.assert_array_equal(added, y + 0.125)


def test_the_middle_is_rounded_once_to_the_dtype():
    """(1 + 2^-8) up from bfloat16's grid: the product of two stays apart from its neighbour in float32."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 1
    stacks = {name: value for name, value in tiny(experts=1).items() if "input" not in name}
    stacks |= {
        "w13_weight_scale": np.ones((1, 64), np.float32),
        "w2_weight_scale": np.ones((1, 32), np.float32),
    }
    stacks["w13_weight_scale"][0, 32] = 1 + 2.0**-8 + 2.0**-20
    algo = "FP8_PER_CHANNEL_PER_TOKEN"
    # A token of one value is exact; d is the rounded middle as amax has it, code 448 times amax / 448.
    for dtype, middle in (("bfloat16", 1 + 2.0**-7), ("float32", 1 + 2.0**-8 + 2.0**-20)):
        y = experts_reference(
            x, stacks, np.ones((1, 1)), [[0]], quant_algo=algo, activation="relu2", dtype=dtype
        )
        assert y[0, 0] == pytest.approx(middle, rel=2.0**-23)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_expert_map_and_ids_outside_it(algo, rng):
    stacks = random_stacks(rng, algo, 4, 32, 32)
    x = tokens_of(rng, (12, 32))
    expert_map = random_expert_map(rng, 11, 4)
    weights, ids = random_routing(rng, 12, 3, 11, "hostile")
    y = experts_reference(x, stacks, weights, ids, quant_algo=algo, expert_map=expert_map)
    assert_same(y, naive(x, stacks, weights, ids, algo, expert_map=expert_map))
    same = experts_reference(
        x, stacks, weights, ids, quant_algo=algo, expert_map=expert_map, global_num_experts=11
    )
    np.testing.assert_array_equal(y, same)
    with pytest.raises(ValueError, match="expert_map: expected 12 elements, got 11"):
        experts_reference(
            x, stacks, weights, ids, quant_algo=algo, expert_map=expert_map, global_num_experts=12
        )


def test_shares_of_experts_sum_to_the_whole(rng):
    """Experts are split as expert parallelism does; the algorithm's scales belong to one expert each."""
    stacks = random_stacks(rng, "NVFP4", 6, 32, 32)
    x = tokens_of(rng, (8, 32))
    weights, ids = random_routing(rng, 8, 3, 6)
    whole = experts_reference(x, stacks, weights, ids, quant_algo="NVFP4")
    total = None
    for own in ([4, 0, 3], [1, 5], [2]):
        share = {name: value[own] for name, value in stacks.items()}
        expert_map = np.full(6, -1, np.int32)
        expert_map[own] = np.arange(len(own))
        part = experts_reference(x, share, weights, ids, quant_algo="NVFP4", expert_map=expert_map)
        total = part if total is None else total + part
    assert_same(total, whole)


def test_local_numbers_outside_the_experts_count_nothing(rng):
    stacks = random_stacks(rng, "FP8", 2, 32, 32)
    x = tokens_of(rng, (2, 32))
    y = experts_reference(
        x, stacks, np.ones((2, 1)), [[0], [1]], quant_algo="FP8", expert_map=np.int32([2, -5])
    )
    assert not y.any()


@each("dtype", ["bfloat16", "float16", "float32"])
@each("algo", ["FP8", "NVFP4_AWQ", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_router_weight_on_the_input(algo, dtype, rng):
    stacks = random_stacks(rng, algo, 3, 32, 32)
    x = tokens_of(rng, (6, 32), dtype)
    weights, ids = random_routing(rng, 6, 1, 3, "hostile")
    weights = np.where(
        np.isfinite(weights), weights * rng.uniform(0.3, 1, (6, 1)).astype(np.float32), weights
    )
    y = experts_reference(
        x, stacks, weights, ids, quant_algo=algo, dtype=dtype, apply_router_weight_on_input=True
    )
    assert_same(y, naive(x, stacks, weights, ids, algo, dtype=dtype, on_input=True))
    with pytest.raises(ValueError, match="apply_router_weight_on_input: top_k must be 1, got 2"):
        experts_reference(
            x,
            stacks,
            np.ones((6, 2)),
            np.zeros((6, 2), np.int32),
            quant_algo=algo,
            apply_router_weight_on_input=True,
        )


@each("on_input", [False, True])
@each("algo", ALGOS)
def test_a_nan_weight_shows_only_where_its_slot_counts(algo, on_input, rng):
    stacks = random_stacks(rng, algo, 3, 32, 32)
    x = tokens_of(rng, (3, 32))
    weights = np.float32([[np.nan], [np.nan], [1]])
    y = experts_reference(
        x, stacks, weights, [[0], [-1], [2]], quant_algo=algo, apply_router_weight_on_input=on_input
    )
    assert np.isnan(y[0]).all()
    assert not y[1].any()
    assert np.isfinite(y[2]).all()


def test_no_tokens_and_leading_axes(rng):
    stacks = random_stacks(rng, "FP8", 3, 32, 48)
    x = tokens_of(rng, (2, 3, 32))
    weights, ids = random_routing(rng, 6, 2, 3)
    flat = experts_reference(x.reshape(6, 32), stacks, weights, ids, quant_algo="FP8")
    deep = experts_reference(
        x, stacks, weights.reshape(2, 3, 2), ids.reshape(2, 3, 2), quant_algo="FP8", out=x
    )
    np.testing.assert_array_equal(deep, flat.reshape(x.shape) + x)
    for shape in ((0,), (4, 0)):
        nothing = np.zeros((*shape, 2), np.float32)
        y = experts_reference(
            np.zeros((*shape, 32), np.float32), stacks, nothing, nothing.astype(int), quant_algo="FP8"
        )
        assert y.shape == (*shape, 32)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("algo", "compute"), [("FP8", "exact"), ("W4A8_NVFP4_FP8", "exact"), ("NVFP4", "fp4")]
)
def test_missing_input_scales_take_those_of_others(algo, compute, gated, rng):
    stacks = random_stacks(rng, algo, 6, 32, 32, gated=gated, missing_input_scales=0.5)
    x = tokens_of(rng, (8, 32))
    weights, ids = random_routing(rng, 8, 3, 6)
    y = experts_reference(x, stacks, weights, ids, quant_algo=algo, compute=compute, gated=gated)
    assert_same(y, naive(x, stacks, weights, ids, algo, compute, gated=gated))


def test_input_scales_by_hand():
    nan = np.nan
    stacks = {"w2_weight": np.zeros((4, 1, 1), np.uint8)}
    stacks["w13_input_scale"] = np.float32([[1, 2], [nan, 3], [nan, nan], [0.5, nan]])
    stacks["w2_input_scale"] = np.float32([nan, 0.25, nan, 0.125])
    expected = {
        ("FP8", "exact"): ([3, 3, 3, 3], [0.25] * 4),
        ("W4A8_NVFP4_FP8", "fp8"): ([3, 3, 3, 3], [0.25] * 4),
        ("NVFP4", "fp4"): ([2, 3, 3, 0.5], [0.25, 0.25, 0.25, 0.125]),
    }
    for (algo, compute), (first, second) in expected.items():
        assert expert_input_scale(stacks, "w13_input_scale", algo, compute).tolist() == first
        assert expert_input_scale(stacks, "w2_input_scale", algo, compute).tolist() == second
    for algo, compute in (("NVFP4", "exact"), ("NVFP4", "fp8"), ("FP8_PB_WO", "exact")):
        assert expert_input_scale(stacks, "w2_input_scale", algo, compute) is None


@pytest.mark.parametrize(("algo", "compute"), [("FP8", "exact"), ("W4A8_NVFP4_FP8", "fp8"), ("NVFP4", "fp4")])
@pytest.mark.parametrize("gone", ["nan", "absent"])
def test_without_any_input_scale(algo, compute, gone, rng):
    stacks = random_stacks(rng, algo, 3, 32, 32)
    if gone == "nan":
        stacks["w2_input_scale"] = stacks["w2_input_scale"] * np.float32(np.nan)
    else:
        del stacks["w2_input_scale"]
    with pytest.raises(ValueError, match="w2_input_scale: no expert has one"):
        experts_reference(np.zeros((1, 32)), stacks, [[1.0]], [[0]], quant_algo=algo, compute=compute)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf])
def test_input_scales_must_be_positive_and_finite(value, rng):
    stacks = random_stacks(rng, "FP8", 3, 32, 32)
    stacks["w13_input_scale"][1, 1] = value
    with pytest.raises(ValueError, match="w13_input_scale: must be positive and finite"):
        experts_reference(np.zeros((1, 32)), stacks, [[1.0]], [[0]], quant_algo="FP8")


@pytest.mark.parametrize("algo", [algo for algo in ALGOS if algo not in WITH_INPUT_SCALES] + ["NVFP4"])
def test_input_scales_that_are_not_used_may_be_missing(algo, rng):
    stacks = random_stacks(rng, algo, 2, 32, 32, input_scales=False)
    y = experts_reference(tokens_of(rng, (2, 32)), stacks, np.ones((2, 1)), [[0], [1]], quant_algo=algo)
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"quant_algo": "NVFP4_SVD"}, "quant_algo: expected one of FP8, "),
        ({}, {"interleaved": True, "quant_algo": "FP8_PB_WO"}, "interleaved: expected False, blocks of rows"),
        ({}, {"interleaved": True, "gated": False}, "interleaved: expected False, there is no gate"),
        ({}, {"compute": "fp4"}, "compute: fp4 is for"),
        ({"w2_weight": None}, {}, "params: w2_weight is missing"),
        ({"w13_weight": None}, {}, "params: w13_weight is missing"),
        ({"w2_weight_scale": None}, {}, "weight_scale is missing"),
        ({"w2_weight_scale": np.ones(4, np.float32)}, {}, "stacks: expected the same experts in each"),
        (
            {"w13_weight_scale": np.ones(3, np.float32)},
            {},
            "w13_weight_scale: expected 2 parts of each expert",
        ),
        ({"w13_weight": np.zeros((3, 63, 32), np.uint8)}, {}, "w13_weight: expected 2 parts of each expert"),
    ],
)
def test_stacks_and_options_that_do_not_fit(change, options, message, rng):
    stacks = random_stacks(rng, "FP8", 3, 32, 32) | change
    stacks = {name: value for name, value in stacks.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        experts_reference(
            np.zeros((1, 32), np.float32), stacks, [[1.0]], [[0]], **({"quant_algo": "FP8"} | options)
        )


@pytest.mark.parametrize(
    ("weights", "ids", "message"),
    [
        (np.ones((2, 2)), np.zeros((2, 1), int), r"expected shape \[..., k\], got \(2, 2\) and \(2, 1\)"),
        (np.ones((3, 1)), np.zeros((3, 1), int), r"got \(3, 1\) and \(3, 1\) for x of shape \(2, 32\)"),
        (np.ones((2, 1)), np.zeros((2, 1)), "topk_ids: expected integers, got float64"),
    ],
)
def test_routing_that_does_not_fit(weights, ids, message, rng):
    stacks = random_stacks(rng, "FP8", 3, 32, 32)
    with pytest.raises(ValueError, match=message):
        experts_reference(np.zeros((2, 32), np.float32), stacks, weights, ids, quant_algo="FP8")
