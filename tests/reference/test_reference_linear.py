"""The reference's linear layer and activation quantization against computations by hand."""

import math

import ml_dtypes
import numpy as np
import pytest

from moqext import reference
from moqext.reference import dequantize, linear, quantize_weight


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def e4m3(x):
    """E4M3 values by ml_dtypes, saturating."""
    with np.errstate(invalid="ignore"):
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def weight_by_hand(params, algo):
    """Dequantized weight by ml_dtypes and explicit loops over blocks."""
    if "NVFP4" in algo:
        nibbles = np.stack([params["weight"] & 15, params["weight"] >> 4], -1).reshape(
            len(params["weight"]), -1
        )
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        blocks = params["weight_scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        group = values.shape[1] // blocks.shape[1]
        return values * np.kron(blocks, np.ones((1, group))) * float(params["weight_scale_2"])
    values = params["weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = params["weight_scale"].astype(np.float64)
    if algo == "FP8_PB_WO":
        scale = np.kron(scale.reshape(-(-values.shape[0] // 128), -1), np.ones((128, 128)))
        scale = scale[: values.shape[0], : values.shape[1]]
    return values * (scale[:, None] if scale.ndim == 1 else scale)


def activation_by_hand(x, kind, input_scale=None):
    """Quantized and dequantized activations, one row at a time."""
    if kind == "tensor":
        scale = (
            np.float32(np.abs(x).max() / np.float32(448)) if input_scale is None else np.float32(input_scale)
        )
        return e4m3(x * (np.float32(1) / scale)).astype(np.float64) * scale
    rows = []
    for row in x:
        width = {"token": len(row), "group": 128, "nvfp4": 16}[kind]
        pieces = []
        for start in range(0, len(row), width):
            piece = row[start : start + width]
            amax = np.abs(piece).max()
            if kind == "nvfp4":
                block = e4m3(amax / (np.float32(6) * input_scale))
                step = block * input_scale
                codes = np.clip(piece / step, -6, 6).astype(ml_dtypes.float4_e2m1fn) if block else piece * 0
                pieces.append(codes.astype(np.float64) * float(block) * float(input_scale))
                continue
            if kind == "token":
                scale = np.maximum(amax / np.float32(448), np.float32(1 / (448 * 512)))
            else:
                scale = np.maximum(amax, np.float32(1e-10)) / np.float32(448)
            pieces.append(e4m3(piece / scale).astype(np.float64) * scale)
        rows.append(np.concatenate(pieces))
    return np.array(rows)


@pytest.mark.parametrize(
    ("algo", "compute", "kind", "input_scale"),
    [
        ("FP8", "exact", "tensor", 0.0123),
        ("FP8", "exact", "tensor", None),
        ("FP8_PER_CHANNEL_PER_TOKEN", "exact", "token", None),
        ("FP8_PB_WO", "exact", "group", None),
        ("NVFP4", "exact", None, 0.0021),
        ("W4A16_NVFP4", "exact", None, None),
        ("NVFP4", "fp4", "nvfp4", 0.0021),
        ("NVFP4", "fp4", "nvfp4", 3.7),
        ("NVFP4", "fp4", "nvfp4", None),
        ("W4A16_NVFP4", "fp4", "nvfp4", None),
    ],
)
def test_linear_equals_a_computation_by_hand(algo, compute, kind, input_scale, rng):
    rows, columns = int(rng.integers(130, 200)), 16 * int(rng.integers(9, 20))
    params = quantize_weight(bf16(rng.normal(size=(rows, columns))), algo)
    x = bf16(rng.normal(size=(5, columns)) * rng.choice([1e-3, 1, 30], size=(5, 1)))
    x[2] = 0
    if input_scale is not None:
        params["input_scale"] = np.array([input_scale], np.float32)
    bias = bf16(rng.normal(size=rows))
    scale = params.get("input_scale", np.abs(x).max(keepdims=True) / np.float32(2688)).reshape(())[()]
    if kind == "tensor":
        scale = input_scale
    activation = x.astype(np.float64) if kind is None else activation_by_hand(x, kind, scale)
    expected = activation @ weight_by_hand(params, algo).T
    plain = linear(x, params, algo, compute=compute, out_dtype="float64")
    np.testing.assert_allclose(plain, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
    for given in ({"bias": bias}, {}):
        stored = params if given else {**params, "bias": bias.astype(ml_dtypes.bfloat16)}
        result = linear(x, stored, algo, compute=compute, out_dtype="float32", **given)
        np.testing.assert_array_equal(result, (plain + bias).astype(np.float32))
    for dtype, kept in (("bfloat16", np.float32), ("float16", np.float16)):
        rounded = linear(x, params, algo, compute=compute, out_dtype=dtype)
        assert rounded.dtype == kept
        assert rounded.shape == (5, rows)
        np.testing.assert_array_equal(rounded, reference.round_to(plain, dtype))


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_fp8_compute_folds_block_scales_under_a_power_of_two(algo, rng):
    weight = bf16(rng.normal(size=(40, 272)) * np.exp2(rng.integers(-12, 3, (40, 1))))
    weight[3] = 0
    params = quantize_weight(weight, algo)
    codes, factor = reference.fold_nvfp4(params)
    products = weight_by_hand({**params, "weight_scale_2": np.float32(1)}, algo)
    for row, (power, values) in enumerate(zip(factor, products, strict=True)):
        largest = np.abs(values).max()
        expected = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
        assert power == expected, row
        np.testing.assert_array_equal(reference.decode(codes[row], "e4m3"), e4m3(values / power))
    x = bf16(rng.normal(size=(4, 272)))
    folded = reference.decode(codes, "e4m3").astype(np.float64) * factor[:, None] * params["weight_scale_2"]
    result = linear(x, params, algo, compute="fp8", out_dtype="float64")
    np.testing.assert_allclose(result, activation_by_hand(x, "token") @ folded.T, rtol=1e-12, atol=1e-12)
    noise = np.linalg.norm(folded - dequantize(params, algo)) / np.linalg.norm(folded)
    assert noise < 0.035


def test_folding_at_exact_powers_of_two():
    """A row whose largest product is 448 * 2^k needs the factor 2^k, not the next one."""
    scales = reference.encode(np.array([[448.0], [112.0], [7.0], [6.5], [0.0]]), "e4m3")
    nibbles = np.array([[2], [2], [6], [6], [7]], np.uint8).repeat(8, axis=1)  # 1, 1, 4, 4 and 6
    codes, factor = reference.fold_nvfp4({"weight": nibbles * 17, "weight_scale": scales})
    assert factor.tolist() == [1.0, 0.25, 2.0**-4, 2.0**-4, 1.0]
    np.testing.assert_array_equal(reference.decode(codes, "e4m3")[:, 0], [448, 448, 448, 416, 0])


@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4"])
def test_all_zero_linear_gives_zeros_in_every_way_to_compute(compute, rng):
    params = quantize_weight(np.zeros((8, 64), np.float32), "NVFP4")
    assert (params["weight_scale"] == 0x7F).all()  # NaN, as the exporter leaves it
    x = rng.normal(size=(3, 64)).astype(np.float32)
    np.testing.assert_array_equal(linear(x, params, "NVFP4", compute=compute), np.zeros((3, 8)))


def test_activations_in_mxfp8_are_as_weights_in_mxfp8(rng):
    x = (rng.standard_normal((7, 96)) * np.exp2(rng.integers(-30, 30, (7, 1)))).astype(np.float32)
    x[2], x[3, :40] = 0, 448 * 2.0 ** rng.integers(-9, 9, 40)
    x[4, 5] = np.nan
    codes, scale = reference.quantize_mxfp8(x[np.newaxis])
    stored = quantize_weight(x, "MXFP8")
    np.testing.assert_array_equal(scale[0], stored["weight_scale"])
    np.testing.assert_array_equal(codes[0], stored["weight"])
    amax = np.abs(x[3].reshape(3, 32)).max(axis=1)
    assert np.exp2(scale[0, 3].astype(float) - 127)[0] * 448 == amax[0]  # no next power at a bound
    with pytest.raises(ValueError, match="x: the last axis must be a multiple of 32, got shape"):
        reference.quantize_mxfp8(x[:, :40])


@pytest.mark.parametrize("algo", ["MXFP8", "MXFP4"])
def test_mxfp8_activations_times_the_exact_weight(rng, algo):
    params = quantize_weight(rng.standard_normal((16, 64)).astype(np.float32), algo)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    meant = reference.dequantize(quantize_weight(x, "MXFP8"), "MXFP8").astype(np.float64)
    weight = reference.dequantize(params, algo).astype(np.float64)
    y = linear(x, params, algo, compute="mxfp8", out_dtype="float64")
    np.testing.assert_allclose(y, meant @ weight.T, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="compute: mxfp8 is for MXFP4, MXFP8 only, got 'NVFP4'"):
        linear(x, params, "NVFP4", compute="mxfp8")


def test_rounding_to_bfloat16_and_float16_happens_once():
    """Values that would go the other way if they passed through float32 first."""
    assert reference.round_to(np.array([1 + 2.0**-8 + 2.0**-40]), "bfloat16") == 1 + 2.0**-7
    assert reference.round_to(np.array([1 + 2.0**-11 + 2.0**-40]), "float16") == 1 + 2.0**-10
    assert reference.round_to(np.array([1e39]), "float16") == np.inf


def near_ties(format, scale):
    """Values that lie as near as float32 allows to the middle between two codes, times a scale per row."""
    values = reference.decode(np.arange(8 if format == "e2m1" else 127, dtype=np.uint8), format)
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    middle = np.concatenate([(values[:-1] + values[1:]) / 2, -(values[:-1] + values[1:]) / 2])
    return (middle * np.asarray(scale, np.float64)[:, None]).astype(np.float32)


def test_scales_per_tensor_multiply_by_the_rounded_reciprocal(rng):
    scale = rng.uniform(1e-3, 2, 500).astype(np.float32)
    x = near_ties("e4m3", scale)
    codes = np.stack([reference.quantize_fp8_static(row, s) for row, s in zip(x, scale, strict=True)])
    product = e4m3(x * (np.float32(1) / scale)[:, None])
    np.testing.assert_array_equal(reference.decode(codes, "e4m3"), product)
    assert (product != e4m3(x / scale[:, None])).any()


def test_scales_per_token_and_group_divide(rng):
    scale = (rng.uniform(1e-3, 2, 500).astype(np.float32) * np.float32(448)) / np.float32(448)
    x = near_ties("e4m3", scale)
    x = np.concatenate([(scale * np.float32(448))[:, None], x], axis=1)[:, :128]
    tokens, token_scale = reference.quantize_fp8_token(x)
    groups, group_scale = reference.quantize_fp8_group(x)
    np.testing.assert_array_equal(token_scale, np.abs(x).max(axis=1) / np.float32(448))
    np.testing.assert_array_equal(group_scale[:, 0], token_scale)
    quotient = e4m3(x / token_scale[:, None])
    np.testing.assert_array_equal(reference.decode(tokens, "e4m3"), quotient)
    np.testing.assert_array_equal(tokens, groups)
    assert (quotient != e4m3(x * (np.float32(1) / token_scale)[:, None])).any()


def test_nvfp4_rounds_both_products_before_it_divides(rng):
    """Against exact arithmetic, in which some codes and some block scales would differ."""
    steps = 0
    blocks = 0
    for second in rng.uniform(1e-4, 1e-1, 300).astype(np.float32):
        ratios = near_ties("e4m3", [1.0])[0, 8:126].astype(np.float64)  # ties between normal block scales
        amax = (ratios * 6 * float(second)).astype(np.float32)
        block = reference.quantize_nvfp4(np.repeat(amax[:, None], 16, axis=1), second).block_scale[:, 0]
        expected = e4m3(amax / (np.float32(6) * second))
        np.testing.assert_array_equal(reference.decode(block, "e4m3"), expected)
        blocks += (expected != e4m3((amax.astype(np.float64) / (6 * float(second))).astype(np.float32))).any()
        x = np.tile(near_ties("e2m1", [1.75 * float(second)])[0], 2)[:16]
        x[0] = 6 * np.float32(1.75) * second
        activation = reference.quantize_nvfp4(x, second)
        step = reference.decode(activation.block_scale, "e4m3")[0] * second
        codes = np.clip(x / step, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(reference.decode(activation.codes, "e2m1"), codes)
        exact = x.astype(np.float64) / (1.75 * float(second))
        steps += (codes != np.clip(exact, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)).any()
    assert steps
    assert blocks


def test_activation_rows_of_zeros(rng):
    x = rng.normal(size=(3, 256)).astype(np.float32)
    x[1] = 0
    codes, scale = reference.quantize_fp8_token(x)
    assert scale.shape == (3,)
    assert scale[1] == np.float32(1 / (448 * 512))
    assert not codes[1].any()
    codes, scale = reference.quantize_fp8_group(x)
    assert scale.shape == (3, 2)
    assert (scale[1] == np.float32(1e-10) / np.float32(448)).all()
    assert not codes[1].any()
    activation = reference.quantize_nvfp4(x)
    assert not activation.codes[1].any()
    assert not activation.block_scale[1].any()
    for zeros in (np.zeros((2, 32), np.float32), np.zeros((0, 32), np.float32)):
        assert reference.quantize_fp8_tensor(zeros)[1] == 1
        assert reference.quantize_nvfp4(zeros).input_scale == 1
        assert reference.quantize_fp8_token(zeros)[0].shape == zeros.shape


def test_a_nan_shows_in_everything_under_its_scale():
    x = np.ones((3, 256), np.float32)
    x[1, 3] = np.nan
    nan = 0x7F
    assert (reference.quantize_fp8_tensor(x)[0] & nan == nan).all()
    tokens, scales = reference.quantize_fp8_token(x)
    assert ((tokens & nan == nan).all(axis=1) == np.isnan(scales)).all()
    assert list(np.isnan(scales)) == [False, True, False]
    groups, scales = reference.quantize_fp8_group(x)
    assert np.isnan(scales).tolist() == [[False, False], [True, False], [False, False]]
    assert (groups[1, :128] & nan == nan).all()
    assert (groups[1, 128:] == groups[0, 128:]).all()
    static = reference.quantize_fp8_static(x, 1.0)
    assert (static & nan == nan).sum() == 1
    activation = reference.quantize_nvfp4(x, 0.01)
    assert (activation.block_scale == nan).sum() == 1
    assert activation.block_scale[1, 0] == nan
    assert (activation.codes[1, :8] == 0x77).all()
    assert np.isnan(activation.dequantize()[1, :16]).all()


def test_an_infinity_saturates_under_a_given_scale():
    x = np.ones((1, 32), np.float32)
    x[0, 3] = -np.inf
    assert reference.quantize_fp8_static(x, 0.5)[0, 3] == 0xFE
    activation = reference.quantize_nvfp4(x, 0.01)
    assert activation.block_scale[0, 0] == 0x7E
    assert activation.codes[0, 1] >> 4 == 0xF
    codes, scale = reference.quantize_fp8_token(x)
    assert np.isinf(scale[0])
    assert codes[0, 0] == 0


def test_block_scales_fall_into_subnormals_and_to_zero():
    """Large second-level scales are legitimate; flushing subnormal block scales would lose the block."""
    x = np.zeros((1, 48), np.float32)
    x[0, :16] = 3.0
    x[0, 16:32] = 0.3
    x[0, 32:] = 0.05
    # Block scales of 0.0365, 0.00365 and 0.0006 before rounding; the smallest code is 2^-9.
    activation = reference.quantize_nvfp4(x, 13.7)
    values = reference.decode(activation.block_scale, "e4m3")[0]
    assert values[0] == pytest.approx(3.0 / (6 * 13.7), rel=1 / 16)
    assert values[1] == 2 * 2.0**-9
    assert values[2] == 0
    assert not activation.codes[0, 16:].any()
    assert np.abs(activation.dequantize()[0, 16:32] - 0.3).max() < 0.03


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_activation_scales_must_be_positive_and_finite(scale):
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match="scale: must be positive and finite"):
        reference.quantize_fp8_static(x, scale)
    with pytest.raises(ValueError, match="input_scale: must be positive and finite"):
        reference.quantize_nvfp4(x, scale)
