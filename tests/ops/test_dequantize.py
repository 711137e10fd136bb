"""`moqext.ops.dequantize` against the reference, bit for bit, and on genuine checkpoints."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moqext
from moqext import ops, reference

from ..work import each

VECTOR = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"]
NVFP4 = ["NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4", "W4A8_NVFP4_FP8"]
MXFP4 = ["MXFP4", "W4A8_MXFP4_FP8"]
INT4 = ["W4A16_AWQ", "W4A8_AWQ"]
INT8 = ["W8A8_SQ_PER_CHANNEL", "W8A16"]


def codes(rng, *shape):
    """Every byte, NaN codes included."""
    return rng.integers(0, 256, shape, np.uint8)


def e4m3_scale(rng, *shape):
    """Positive block scales: zero, subnormals, and now and then a NaN."""
    return rng.integers(0, 128, shape, np.uint8)


def e8m0_scale(rng, *shape):
    return rng.integers(0, 255, shape, np.uint8)


def float_scale(rng, *shape):
    """Positive scales over many powers of two, some of them zero."""
    scale = np.exp2(rng.uniform(-40, 40, shape)).astype(np.float32)
    return np.asarray(np.where(rng.random(shape) < 0.1, np.float32(0), scale), np.float32)


def cases(rng):
    """Yields (algorithm, tensors by role, group_size) over formats, shapes and scale layouts."""
    n, k = (int(extent) for extent in rng.integers(1, 300, 2))
    pb = (-(-n // 128), -(-k // 128))
    for algo in VECTOR:
        for shape in ((), (1,), (1, 1), (n,)):
            yield algo, {"weight": codes(rng, n, k), "weight_scale": float_scale(rng, *shape)}, None
        for shape in ((), (3,), (3, n), (3, k), (3, n, 1), (3, 1, k)):
            if n == k and shape in ((3, n), (3, k)):
                continue
            yield algo, {"weight": codes(rng, 3, n, k), "weight_scale": float_scale(rng, *shape)}, None
    for shape in (pb, (pb[0], 1, pb[1], 1)):
        yield "FP8_PB_WO", {"weight": codes(rng, n, k), "weight_scale": float_scale(rng, *shape)}, None
        stacked = {"weight": codes(rng, 2, n, k), "weight_scale": float_scale(rng, 2, *shape)}
        yield "FP8_PB_WO", stacked, 128
    yield "FP8_PB_WO", {"weight": codes(rng, 128, 40), "weight_scale": float_scale(rng)}, None
    yield "FP8_PB_WO", {"weight": codes(rng, 9, 40), "weight_scale": float_scale(rng, 3, 10)}, 4
    g = int(rng.choice([16, 32]))
    k = int(rng.integers(1, 9))  # groups from here on
    for algo in NVFP4:
        second = {"weight_scale_2": float_scale(rng)}
        yield algo, {"weight": codes(rng, n, k * g // 2), "weight_scale": e4m3_scale(rng, n, k), **second}, g
        experts = {"weight_scale_2": float_scale(rng, 3)}
        weight, scale = codes(rng, 3, n, k * g // 2), e4m3_scale(rng, 3, n, k)
        yield algo, {"weight": weight, "weight_scale": scale, **experts}, None
        weight, scale = codes(rng, 3, k * g // 2, n), e4m3_scale(rng, 3, k, n)
        yield algo, {"weight": weight, "weight_scale": scale, **experts}, g
        yield algo, {"weight": weight, "weight_scale": scale, **second}, None
    for algo in MXFP4:
        yield algo, {"weight": codes(rng, n, k * 16), "weight_scale": e8m0_scale(rng, n, k)}, 32
        yield algo, {"weight": codes(rng, 2, n, k * 16), "weight_scale": e8m0_scale(rng, 2, n, k)}, None
    yield "MXFP8", {"weight": codes(rng, n, k * 32), "weight_scale": e8m0_scale(rng, n, k)}, None
    yield "MXFP8", {"weight": codes(rng, 2, n, k * 32), "weight_scale": e8m0_scale(rng, 2, n, k)}, None
    for algo in INT4:
        second = {"weight_scale_2": float_scale(rng)} if algo == "W4A8_AWQ" else {}
        weight, scale = codes(rng, n, k * 128), float_scale(rng, 2 * n, k)
        yield algo, {"weight": weight, "weight_scale": scale, **second}, 128
    for algo in INT8:
        yield algo, {"weight": codes(rng, n, k), "weight_scale": float_scale(rng, n)}, None


def equal(actual, expected):
    """Compares dtype, shape and bits; the payload and sign of a NaN are left open."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    raw = np.dtype(f"u{actual.itemsize}")
    nan = np.isnan(actual) & np.isnan(expected)
    same = nan | (np.ascontiguousarray(actual).view(raw) == np.ascontiguousarray(expected).view(raw))
    assert same.all(), f"{np.count_nonzero(~same)} of {same.size} differ"


def test_every_format_equals_the_reference(rng):
    seen = set()
    for _ in range(3):
        for algo, params, group_size in cases(rng):
            seen.add(algo)
            actual = ops.dequantize(params["weight"], algo, **scales(params), group_size=group_size)
            expected = reference.dequantize(params, algo, group_size=group_size)
            assert not np.isnan(expected).all()
            equal(actual, expected)
    assert seen == set(reference.weights.DEQUANTIZERS)


def scales(params):
    return {role: tensor for role, tensor in params.items() if role != "weight"}


def test_sixteen_bit_results_are_rounded_once(rng):
    """From the exact product: by way of float32 about one value in 2^13 would land elsewhere."""
    params = {
        "weight": codes(rng, 512, 512) & 0xF7,
        "weight_scale": float_scale(rng, 512) * np.float32(2.0**-15),
    }
    exact = reference.weights.weight64(params, "FP8")
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        out = np.full((512, 512), 0x7FFF, np.uint16)
        result = ops.dequantize(params["weight"], "FP8", **scales(params), dtype=dtype, out=out)
        assert result is out
        expected = reference.encode(exact, short)
        nan = np.isnan(exact)
        np.testing.assert_array_equal(out[~nan], expected[~nan])
        assert (reference.decode(out, short)[nan] != reference.decode(out, short)[nan]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_once_differs_from_rounding_twice(dtype):
    """Products that lie just off the middle of two 16-bit values, while their float32 is that middle."""
    digits = {"bfloat16": 8, "float16": 11}[dtype]
    middles = (2 * np.arange(2 ** (digits - 1), 2**digits) + 1) / 2.0**digits
    weight = np.full((len(middles), 1), reference.encode(1.125, "e4m3"))
    scale = (middles / 1.125).astype(np.float32)
    exact = 1.125 * scale.astype(np.float64)[:, None]
    once, twice = reference.encode(exact, dtype), reference.encode(exact.astype(np.float32), dtype)
    assert (once != twice).any()
    out = np.zeros(weight.shape, np.uint16)
    ops.dequantize(weight, "FP8", weight_scale=scale, dtype=dtype, out=out)
    np.testing.assert_array_equal(out, once)


def test_a_zero_scale_makes_zeros_of_nan_codes():
    """Exporters give a linear of zeros the scale 0, beside codes or block scales that are NaN."""
    fp8 = ops.dequantize(np.full((4, 8), 0xFF, np.uint8), "FP8", weight_scale=np.zeros((), np.float32))
    nvfp4 = ops.dequantize(
        np.full((4, 8), 0x77, np.uint8),
        "NVFP4",
        weight_scale=np.full((4, 1), 0x7F, np.uint8),
        weight_scale_2=np.zeros((), np.float32),
    )
    for weight in (fp8, nvfp4):
        assert not weight.view(np.uint32).any()


def test_a_nan_block_scale_is_not_hidden(rng):
    params = {"weight": codes(rng, 2, 8), "weight_scale": np.array([[0x7F], [0x38]], np.uint8)}
    weight = ops.dequantize(**params, quant_algo="NVFP4", weight_scale_2=np.float32(1).reshape(()))
    assert np.isnan(weight[0]).all()
    assert np.isfinite(weight[1]).all()


def test_gate_and_up_keep_their_own_second_level_scale(rng):
    """[E, 2]: one for each half of the outputs, in both packings."""
    scale_2 = float_scale(rng, 3, 2) + np.float32(1)
    rows = {"weight": codes(rng, 3, 8, 16), "weight_scale": e4m3_scale(rng, 3, 8, 2)}
    columns = {"weight": codes(rng, 3, 16, 8), "weight_scale": e4m3_scale(rng, 3, 2, 8)}
    for params, half in ((rows, np.s_[:, 4:]), (columns, np.s_[:, :, 4:])):
        both = ops.dequantize(**params, quant_algo="NVFP4", weight_scale_2=scale_2)
        gate, up = (
            ops.dequantize(**params, quant_algo="NVFP4", weight_scale_2=scale_2[:, i].copy()) for i in (0, 1)
        )
        gate[half] = up[half]
        equal(both, gate)


def test_stacked_int4_is_its_experts_one_by_one(rng):
    weight, scale = codes(rng, 3, 5, 64), float_scale(rng, 3, 10, 4)
    stacked = ops.dequantize(weight, "W4A16_AWQ", weight_scale=scale)
    for expert in range(3):
        params = {"weight": weight[expert], "weight_scale": scale[expert]}
        equal(stacked[expert], reference.dequantize(params, "W4A16_AWQ"))


def test_strided_tensors(rng):
    for algo, params, group_size in cases(rng):
        strided = {}
        for role, tensor in params.items():
            wide = np.repeat(tensor, 2, axis=-1)[..., ::2] if tensor.ndim else tensor
            strided[role] = np.flip(np.flip(wide, 0).copy(), 0) if tensor.ndim else tensor
        actual = ops.dequantize(strided["weight"], algo, **scales(strided), group_size=group_size)
        equal(actual, reference.dequantize(params, algo, group_size=group_size))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_sixteen_bits(rng, dtype):
    values = np.exp2(rng.uniform(-10, 10, (2, 2))).astype(np.float32)
    raw = reference.encode(values, dtype)
    scale = raw.view(np.float16) if dtype == "float16" else raw
    weight = codes(rng, 130, 200)
    actual = ops.dequantize(weight, "FP8_PB_WO", weight_scale=scale)
    equal(actual, reference.dequantize({"weight": weight, "weight_scale": scale}, "FP8_PB_WO"))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 4, 64), (2, 0, 64)])
def test_empty_weights(shape):
    weight = np.zeros(shape, np.uint8)
    one = np.ones((), np.float32)
    assert ops.dequantize(weight, "FP8", weight_scale=one).shape == shape
    groups = np.zeros((*shape[:-1], shape[-1] // 8), np.uint8)
    result = ops.dequantize(weight, "NVFP4", weight_scale=groups, weight_scale_2=one)
    assert result.shape == (*shape[:-1], 2 * shape[-1])


def tensors_by_layer(directory):
    """(layer, {role: tensor}) of a genuine checkpoint, whatever its algorithm."""
    checkpoint = moqext.Checkpoint(directory)
    names = set(checkpoint.tensors)
    for name in sorted(names):
        if name.endswith(".weight") and f"{name}_scale" in names:
            roles = ("weight", "weight_scale", "weight_scale_2")
            layer = name.removesuffix(".weight")
            yield (
                layer,
                {role: checkpoint.tensor(f"{layer}.{role}") for role in roles if f"{layer}.{role}" in names},
            )


def directories(data):
    return [path.parent for path in sorted(data.glob("checkpoints/*/hf_quant_config.json"))]


# Largest relative error: half a step of E4M3, and of E2M1 between 2 and 3, its largest relative step.
STEP = {False: 2.0**-4, True: 1 / 5}


def test_genuine_checkpoints(data, tmp_path):
    """Equal to the reference, and within a step of the format of the bfloat16 original."""
    seen = set()
    for directory in directories(data):
        config = json.loads((directory / "hf_quant_config.json").read_text())
        algo = config["quantization"]["quant_algo"]  # fp8_pb_wo in lower case
        family = directory.name.split("_")[0]
        if not (tmp_path / family).exists():
            (tmp_path / family).mkdir()
            shutil.copy(
                data / "checkpoints" / f"{family}_bf16.safetensors", tmp_path / family / "model.safetensors"
            )
        originals = moqext.Checkpoint(tmp_path / family)
        for layer, params in tensors_by_layer(directory):
            seen.add(algo)
            weight = ops.dequantize(params["weight"], algo, **scales(params))
            equal(weight, reference.dequantize(params, algo.upper()))
            if "AWQ" in algo or "SQ" in algo or ".experts." in layer:
                continue  # smoothed, so another weight is stored; or stored as one tensor in the original
            original = reference.as_float32(originals.tensor(f"{layer}.weight"))
            error = np.linalg.norm(weight - original) / np.linalg.norm(original)
            assert error < STEP["FP4" in algo], (directory.name, layer, error)
    assert len(seen) >= 10


def wider(algo, weight, params):
    """True where the operation takes a shape of scales that the reference does not list."""
    scale, second = params["weight_scale"].shape, params.get("weight_scale_2", np.ones(())).shape
    if weight.ndim == 2:
        return len(scale) == 2 and scale[1] == 1  # [N, 1]
    tiles_or_pairs = algo in ("FP8_PB_WO", *INT4)
    return tiles_or_pairs or len(second) == 2 or (len(scale) == 2 and 1 in scale)  # [E, P]; [E, 1], [1, N]


extents = st.sampled_from([0, 1, 2, 3, 8, 16, 32, 129])
shapes = st.lists(extents, max_size=4).map(tuple).filter(lambda shape: np.prod(shape) <= 1 << 20)


@settings(max_examples=400)
@given(
    algo=st.sampled_from(sorted(reference.weights.DEQUANTIZERS)),
    weight_shape=st.lists(extents, min_size=2, max_size=3).map(tuple),
    scale_shape=shapes,
    second_shape=shapes,
    divisor=st.sampled_from([None, 1, 2, 8, 16]),
    group_size=st.sampled_from([None, None, 16, 32, 128]),
)
def test_any_shapes_are_refused_or_right(algo, weight_shape, scale_shape, second_shape, divisor, group_size):
    """Nothing crashes, and what the operation takes is what the reference takes, with equal results."""
    if divisor:  # mostly a scale that might fit
        scale_shape = (*weight_shape[:-1], weight_shape[-1] // divisor)
    weight = np.arange(np.prod(weight_shape), dtype=np.int64).astype(np.uint8).reshape(weight_shape)
    byte_scale = algo.startswith("MXFP") or "FP4" in algo
    scale = np.arange(1, 1 + np.prod(scale_shape), dtype=np.int64) % 100 + 1
    params = {"weight": weight, "weight_scale": scale.astype(np.uint8 if byte_scale else np.float32)}
    params["weight_scale"] = params["weight_scale"].reshape(scale_shape)
    if algo in (*NVFP4, "W4A8_AWQ"):
        second = np.arange(1, 1 + np.prod(second_shape), dtype=np.int64)
        params["weight_scale_2"] = second.astype(np.float32).reshape(second_shape)
    try:
        expected = reference.dequantize(params, algo, group_size=group_size)
    except ValueError:
        expected = None
    refusal = ""
    try:
        actual = ops.dequantize(weight, algo, **scales(params), group_size=group_size)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(("weight_scale", "weight_scale_2", "group_size"))
        # The reference takes groups of any size.
        assert expected is None or expected.size == 0 or "expected groups of" in refusal
        return
    if expected is None:
        assert wider(algo, weight, params) or actual.size == 0
    elif expected.size == 0:
        assert actual.size == 0
    else:
        equal(actual, expected)


W = np.zeros((6, 64), np.uint8)
W3 = np.zeros((2, 6, 64), np.uint8)
ONE = np.ones((), np.float32)
G = np.zeros((6, 8), np.uint8)
REFUSED = {
    "algorithm": (
        moqext.UnsupportedQuantization,
        "quant_algo: expected one of FP8, .*W8A16, got 'FP9'",
        W,
        "FP9",
        {"weight_scale": ONE},
    ),
    "whole checkpoint": (
        moqext.UnsupportedQuantization,
        "quant_algo: .* got 'MIXED_PRECISION'",
        W,
        "MIXED_PRECISION",
        {"weight_scale": ONE},
    ),
    "no scale": (ValueError, "weight_scale: FP8 needs one", W, "FP8", {}),
    "no second": (ValueError, "weight_scale_2: NVFP4 needs one", W, "NVFP4", {"weight_scale": G}),
    "second of FP8": (
        ValueError,
        "weight_scale_2: FP8 has none",
        W,
        "FP8",
        {"weight_scale": ONE, "weight_scale_2": ONE},
    ),
    "rank": (
        ValueError,
        r"weight: expected 2 dimensions, or 3 .* got shape \[64\]",
        W[0],
        "FP8",
        {"weight_scale": ONE},
    ),
    "weight dtype": (
        TypeError,
        "weight: expected float8_e4m3fn .* got float32",
        W.astype(np.float32),
        "FP8",
        {"weight_scale": ONE},
    ),
    "scale dtype": (
        TypeError,
        "weight_scale: expected float32, bfloat16, float16 or float64 for FP8, got uint8",
        W,
        "FP8",
        {"weight_scale": G},
    ),
    "E4M3 scale": (
        TypeError,
        "weight_scale: expected float8_e4m3fn .* got float32",
        W,
        "NVFP4",
        {"weight_scale": G.astype(np.float32), "weight_scale_2": ONE},
    ),
    "second dtype": (
        TypeError,
        "weight_scale_2: expected float32, bfloat16, float16 or float64, got int32",
        W,
        "NVFP4",
        {"weight_scale": G, "weight_scale_2": np.ones((), np.int32)},
    ),
    "row count": (
        ValueError,
        r"weight_scale: expected one value, or one for each row of weight, got shape \[5\]",
        W,
        "FP8",
        {"weight_scale": np.ones(5, np.float32)},
    ),
    "expert count": (
        ValueError,
        r"weight_scale: .* got shape \[3\]",
        W3,
        "FP8",
        {"weight_scale": np.ones(3, np.float32)},
    ),
    "square experts": (
        ValueError,
        r"weight_scale: expected \[E, rows, 1\] or \[E, 1, columns\]",
        W3[:, :, :6],
        "FP8",
        {"weight_scale": np.ones((2, 6), np.float32)},
    ),
    "tiles": (
        ValueError,
        r"weight_scale: expected one value for each 128 x 128 tile, \[2, 1, 1, 1\], got shape \[1, 1, 1, 1\]",
        np.zeros((129, 64), np.uint8),
        "FP8_PB_WO",
        {"weight_scale": np.ones((1, 1, 1, 1), np.float32)},
    ),
    "group size": (
        ValueError,
        "weight_scale: expected groups of 16 or 32 for NVFP4, not of 64",
        W,
        "NVFP4",
        {"weight_scale": G[:, :2], "weight_scale_2": ONE},
    ),
    "uneven groups": (
        ValueError,
        r"weight_scale: expected the shape of the values, \[6, 128\], divided by the group",
        W,
        "NVFP4",
        {"weight_scale": G[:, :7], "weight_scale_2": ONE},
    ),
    "group rows": (
        ValueError,
        r"weight_scale: .* got shape \[5, 8\]",
        W,
        "NVFP4",
        {"weight_scale": G[:5], "weight_scale_2": ONE},
    ),
    "group_size": (
        ValueError,
        "group_size: the shapes say 16, got 32",
        W,
        "NVFP4",
        {"weight_scale": G, "weight_scale_2": ONE, "group_size": 32},
    ),
    "MX groups": (ValueError, "groups of 32 for MXFP4, not of 16", W, "MXFP4", {"weight_scale": G}),
    "second shape": (
        ValueError,
        r"weight_scale_2: expected one value, got shape \[2\]",
        W,
        "NVFP4",
        {"weight_scale": G, "weight_scale_2": np.ones(2, np.float32)},
    ),
    "parts of unknown outputs": (
        ValueError,
        r"weight_scale_2: expected one value, or one for each expert, got shape \[2, 2\]",
        W3,
        "W4A8_NVFP4_FP8",
        {"weight_scale": np.zeros((2, 6, 4), np.uint8), "weight_scale_2": np.ones((2, 2), np.float32)},
    ),
    "second parts": (
        ValueError,
        r"weight_scale_2: .* got shape \[2, 4\]",
        W3,
        "NVFP4",
        {"weight_scale": np.zeros((2, 6, 8), np.uint8), "weight_scale_2": np.ones((2, 4), np.float32)},
    ),
    "dtype": (
        TypeError,
        "dtype: expected float32, bfloat16 or float16, got float64",
        W,
        "FP8",
        {"weight_scale": ONE, "dtype": "float64"},
    ),
    "out shape": (
        ValueError,
        r"out: expected shape \[6, 64\], got \[6, 63\]",
        W,
        "FP8",
        {"weight_scale": ONE, "out": np.zeros((6, 63), np.float32)},
    ),
    "out dtype": (
        TypeError,
        "out: expected float32",
        W,
        "FP8",
        {"weight_scale": ONE, "out": np.zeros((6, 64), np.float16)},
    ),
}


@each("case", REFUSED)
def test_bad_arguments_are_refused_by_name_and_nothing_is_written(case):
    error, message, weight, algo, options = REFUSED[case]
    before = options["out"].copy() if "out" in options else None
    with pytest.raises(error, match=message):
        ops.dequantize(weight, algo, **options)
    if before is not None:
        np.testing.assert_array_equal(options["out"], before)


def test_an_output_over_the_scales_is_refused():
    memory = np.zeros(6 * 64, np.float32)
    with pytest.raises(BufferError, match="out: its memory overlaps"):
        ops.dequantize(W, "FP8", weight_scale=memory[:6], out=memory.reshape(6, 64))


def test_torch(rng):
    torch = pytest.importorskip("torch")
    weight, scale = codes(rng, 4, 32), e4m3_scale(rng, 4, 4)
    scale_2 = np.float32(0.5).reshape(())
    for dtype in ("float32", "bfloat16", "float16"):
        result = ops.dequantize(
            torch.from_numpy(weight),
            "NVFP4",
            weight_scale=torch.from_numpy(scale).view(torch.float8_e4m3fn),
            weight_scale_2=torch.tensor(0.5),
            dtype=dtype,
        )
        assert result.dtype == getattr(torch, dtype)
        exact = ops.dequantize(weight, "NVFP4", weight_scale=scale, weight_scale_2=scale_2)
        expected = torch.from_numpy(exact).to(result.dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
