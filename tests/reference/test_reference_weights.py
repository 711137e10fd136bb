"""Meaning of stored weights: scale shapes, stacked experts, degenerate tensors, smoothing, bad tensors."""

import ml_dtypes
import numpy as np
import pytest

from moqext import reference
from moqext.reference import dequantize, quantize_weight

from ..work import each

ALL = list(reference.weights.DEQUANTIZERS)
NVFP4_FAMILY = ["NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4"]


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def random_weight(rng, rows=64, columns=256):
    return bf16(rng.normal(size=(rows, columns)))


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@each("algo", ALL)
def test_quantized_weight_is_near_the_original(algo, rng):
    weight = random_weight(rng)
    stored = dequantize(quantize_weight(weight, algo), algo)
    assert stored.dtype == np.float32
    assert stored.shape == weight.shape
    error = relative_error(stored, weight)
    if algo.startswith("W8"):
        assert error < 0.015
    else:
        assert error < (0.035 if algo.startswith("FP8") or algo == "MXFP8" else 0.15)
    assert error > 1e-3


@each("algo", ALL)
def test_zero_rows_and_zero_weights(algo, rng):
    weight = random_weight(rng)
    weight[:32, :128] = 0
    weight[3] = 0
    assert not dequantize(quantize_weight(weight, algo), algo)[weight == 0].any()
    zeros = dequantize(quantize_weight(np.zeros((32, 128), np.float32), algo), algo)
    np.testing.assert_array_equal(zeros, np.zeros((32, 128)))


def test_all_zero_linears_are_stored_as_the_exporter_stores_them():
    """Division by a scale of 0 leaves NaN codes in FP8 and NaN block scales in NVFP4."""
    zeros = np.zeros((8, 64), np.float32)
    fp8 = quantize_weight(zeros, "FP8")
    assert fp8["weight_scale"] == 0
    assert (fp8["weight"] == 0xFF).all()
    nvfp4 = quantize_weight(zeros, "NVFP4")
    assert nvfp4["weight_scale_2"] == 0
    assert (nvfp4["weight_scale"] == 0x7F).all()
    assert (nvfp4["weight"] == 0x77).all()
    in_group = quantize_weight(zeros, "NVFP4", amax=2.0)
    assert (in_group["weight_scale"] == 0x38).all()
    assert not in_group["weight"].any()
    for algo in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"):
        params = quantize_weight(zeros, algo)
        assert (params["weight_scale"] == 1).all()
        assert not params["weight"].any()


def test_nvfp4_block_scales_are_floored_at_the_smallest_subnormal():
    weight = np.zeros((1, 48), np.float32)
    weight[0, 0], weight[0, 16] = 1.0, 1e-7  # the second block's own scale would round to 0
    params = quantize_weight(weight, "NVFP4")
    assert params["weight_scale"].tolist() == [[0x7E, 0x01, 0x38]]
    assert dequantize(params, "NVFP4")[0, 0] == pytest.approx(1.0)


def test_nan_codes_under_a_scale_that_is_not_zero_stay_nan():
    params = {"weight": np.full((2, 4), 0x7F, np.uint8), "weight_scale": np.float32(0.5)}
    assert np.isnan(dequantize(params, "FP8")).all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scalars_of_any_rank(shape, rng):
    params = quantize_weight(random_weight(rng), "NVFP4")
    reshaped = {**params, "weight_scale_2": params["weight_scale_2"].reshape(shape)}
    np.testing.assert_array_equal(dequantize(reshaped, "NVFP4"), dequantize(params, "NVFP4"))
    params = quantize_weight(random_weight(rng), "FP8")
    reshaped = {**params, "weight_scale": params["weight_scale"].reshape(shape)}
    np.testing.assert_array_equal(dequantize(reshaped, "FP8"), dequantize(params, "FP8"))


def test_block_scales_of_every_rank(rng):
    weight = random_weight(rng, 200, 300)  # blocks cut off on both axes
    params = quantize_weight(weight, "FP8_PB_WO")
    assert params["weight_scale"].shape == (2, 1, 3, 1)
    expected = dequantize(params, "FP8_PB_WO")
    grid = params["weight_scale"].reshape(2, 3)
    codes = reference.decode(params["weight"], "e4m3")
    np.testing.assert_array_equal(expected[128:, 256:], codes[128:, 256:] * grid[1, 2])
    np.testing.assert_array_equal(expected[:128, 128:256], codes[:128, 128:256] * grid[0, 1])
    flat = {"weight": params["weight"], "weight_scale": grid}
    np.testing.assert_array_equal(dequantize(flat, "FP8_PB_WO"), expected)
    inverse = {"weight": params["weight"], "weight_scale_inv": grid.astype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(
        dequantize(inverse, "FP8_PB_WO")[:128, :128], codes[:128, :128] * bf16(grid[0, 0])
    )
    one = quantize_weight(weight[:100, :90], "FP8_PB_WO", amax=9.0)
    assert one["weight_scale"].shape == ()
    assert one["weight_scale"] == np.float32(9) / np.float32(448)
    assert relative_error(dequantize(one, "FP8_PB_WO"), weight[:100, :90]) < 0.04


def test_group_size_comes_from_the_shapes(rng):
    params = quantize_weight(random_weight(rng), "W4A16_NVFP4", group_size=32)
    assert params["weight_scale"].shape == (64, 8)
    np.testing.assert_array_equal(
        dequantize(params, "W4A16_NVFP4", group_size=32), dequantize(params, "W4A16_NVFP4")
    )
    with pytest.raises(ValueError, match="weight_scale: expected one scale per group of 16 values"):
        dequantize(params, "W4A16_NVFP4", group_size=16)


def stacked(rng, algo, experts=3, inside=64, outside=96):
    """Experts quantized one by one, as transformers stacks them, with the dequantized result expected."""
    weights = bf16(rng.normal(size=(experts, inside, outside)))
    along_input = algo in NVFP4_FAMILY
    params = [quantize_weight(w.T if along_input else w, algo, amax=6.0) for w in weights]
    expected = np.stack([dequantize(p, algo) for p in params])
    tensors = {role: np.stack([p[role] for p in params]) for role in params[0]}
    if along_input:
        tensors["weight"] = tensors["weight"].swapaxes(1, 2)
        tensors["weight_scale"] = tensors["weight_scale"].swapaxes(1, 2)
        expected = expected.swapaxes(1, 2)
    return tensors, expected


@pytest.mark.parametrize("algo", [*NVFP4_FAMILY, "W4A8_NVFP4_FP8", "MXFP4", "MXFP8"])
def test_stacked_experts_in_both_packings(algo, rng):
    params, expected = stacked(rng, algo)
    rows = 32 if algo in NVFP4_FAMILY else 64
    columns = 48 if algo in ("W4A8_NVFP4_FP8", "MXFP4") else 96
    assert params["weight"].shape == (3, rows, columns)
    weight = dequantize(params, algo)
    assert weight.shape == (3, 64, 96)
    np.testing.assert_array_equal(weight, expected)
    if "weight_scale_2" in params:
        shared = {**params, "weight_scale_2": params["weight_scale_2"][:1]}
        np.testing.assert_array_equal(dequantize(shared, algo), expected)


def test_stacked_experts_with_the_output_first(rng):
    weights = bf16(rng.normal(size=(4, 24, 64)))
    params = [quantize_weight(w, "NVFP4") for w in weights]
    tensors = {role: np.stack([p[role] for p in params]) for role in params[0]}
    assert tensors["weight_scale_2"].shape == (4,)
    expected = np.stack([dequantize(p, "NVFP4") for p in params])
    np.testing.assert_array_equal(dequantize(tensors, "NVFP4"), expected)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1, 1), (3, 8), (3, 20), (3, 8, 1), (3, 1, 20)])
def test_stacked_fp8_scales(shape, rng):
    codes = reference.encode(rng.normal(size=(3, 8, 20)), "e4m3")
    scale = rng.uniform(0.5, 2, size=shape).astype(np.float32)
    by_axis = {(3,): scale.reshape(-1, 1, 1) if shape == (3,) else None}
    by_axis |= {(3, 8): scale[..., None], (3, 20): scale[:, None]} if scale.ndim == 2 else {}
    expected = reference.decode(codes, "e4m3") * by_axis.get(shape, scale)
    np.testing.assert_array_equal(dequantize({"weight": codes, "weight_scale": scale}, "FP8"), expected)


def test_stacked_channel_scale_that_fits_both_axes_is_refused(rng):
    params = {"weight": np.zeros((3, 8, 8), np.uint8), "weight_scale": np.ones((3, 8), np.float32)}
    with pytest.raises(
        ValueError, match=r"weight_scale: expected .* of shape \(3, 8, 8\), got shape \(3, 8\)"
    ):
        dequantize(params, "FP8_PER_CHANNEL_PER_TOKEN")


def test_effective_weight_of_nvfp4_svd(rng):
    smooth = bf16(rng.uniform(0.5, 2, 256))
    params = quantize_weight(random_weight(rng), "NVFP4_SVD")
    down, up = bf16(rng.normal(size=(4, 256))), bf16(rng.normal(size=(64, 4)))
    params |= {"pre_quant_scale": smooth.astype(ml_dtypes.bfloat16), "lora_a": down, "lora_b": up}
    stored = dequantize(params, "NVFP4_SVD")
    effective = dequantize(params, "NVFP4_SVD", effective=True)
    np.testing.assert_allclose(effective, (stored + up @ down) * smooth, rtol=1e-4, atol=1e-5)
    x = bf16(rng.normal(size=(5, 256)))
    y = reference.linear(x, params, "NVFP4_SVD", out_dtype="float64")
    np.testing.assert_allclose(y, x @ effective.T, rtol=1e-4, atol=1e-3)


def test_second_scale_of_w4a8_awq_is_not_part_of_the_weight(rng):
    weight = random_weight(rng)
    both = [dequantize(quantize_weight(weight, algo), algo) for algo in ("W4A16_AWQ", "W4A8_AWQ")]
    np.testing.assert_array_equal(*both)


def test_int4_is_twos_complement_packed_along_the_output():
    params = {
        "weight": np.array([[0x8F, 0x70]], np.uint8),
        "weight_scale": np.array([[2.0], [3.0]], np.float32),
    }
    np.testing.assert_array_equal(dequantize(params, "W4A16_AWQ"), [[-2, 0], [-24, 21]])


def test_mx_codes_of_zero_and_ties():
    """MXFP4 rounds ties toward zero and stores zeros as -0."""
    row = np.zeros((1, 32), np.float32)
    row[0, :8] = [6, 5, 0.25, -0.25, 0.75, -5, 1e-3, -1e-3]
    params = quantize_weight(row, "MXFP4")
    assert params["weight_scale"].tolist() == [[127]]
    nibbles = np.stack([params["weight"] & 15, params["weight"] >> 4], -1).reshape(-1)
    assert nibbles[:10].tolist() == [7, 6, 0, 8, 1, 14, 0, 8, 8, 8]


@pytest.mark.parametrize(
    ("algo", "change", "message"),
    [
        ("NVFP4", {"weight_scale": None}, r"params: weight_scale is missing, got weight, weight_scale_2"),
        ("NVFP4", {"weight_scale_2": np.ones(2, np.float32)}, r"weight_scale_2: expected one element"),
        (
            "NVFP4",
            {"weight_scale": np.ones((64, 15), np.uint8)},
            r"weight_scale: expected one scale per group",
        ),
        ("NVFP4", {"weight_scale": np.ones((63, 16), np.uint8)}, r"got shape \(63, 16\)"),
        (
            "FP8",
            {"weight_scale": np.ones(63, np.float32)},
            r"weight_scale: expected one element, one per row",
        ),
        (
            "FP8_PB_WO",
            {"weight_scale": np.ones((1, 1), np.float32)},
            r"weight_scale: expected shape \(1, 2\)",
        ),
        ("FP8_PB_WO", {"weight_scale": np.float32(1)}, r"weight_scale: expected shape \(1, 2\)"),
        ("W4A16_AWQ", {"weight_scale": np.ones((64, 3), np.float32)}, r"one scale per row and group"),
        ("FP9", {}, r"quant_algo: expected one of FP8, .*got 'FP9'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(algo, change, message, rng):
    params = quantize_weight(random_weight(rng), algo if algo != "FP9" else "FP8") | change
    params = {role: tensor for role, tensor in params.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        dequantize(params, algo)
