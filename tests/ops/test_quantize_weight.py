"""`ops.quantize_weight`: the bits of the reference, which are ModelOpt's, and searches that lower errors."""

import numpy as np
import pytest

from moqext import UnsupportedQuantization, ops, reference
from moqext.algorithms import ALGORITHMS
from moqext.ops.quantize_weights import SEARCHED as SEARCHES
from moqext.ops.quantize_weights import WRITTEN

from ..quantize_cases import as_dtype, carrier, hostile
from ..work import each

KINDS = ("normal", "zeros", "signed zeros", "ties", "wide")
SEARCHED = SEARCHES["mse"]


def same_bits(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    return got.shape == expected.shape and carrier(got).tobytes() == carrier(expected).tobytes()


def meant(tensors, algo):
    """The weight that tensors stand for."""
    return reference.dequantize(tensors, algo).astype(np.float64)


def test_it_knows_the_algorithms_that_exporters_write_without_smoothing():
    assert set(WRITTEN) == {
        "FP8",
        "FP8_PER_CHANNEL_PER_TOKEN",
        "FP8_PB_WO",
        "NVFP4",
        "W4A16_NVFP4",
        "W4A8_NVFP4_FP8",
        "MXFP4",
        "W4A8_MXFP4_FP8",
        "MXFP8",
    }


@pytest.mark.parametrize("algo", WRITTEN)
@each("kind", KINDS)
@each("shape", [(1, 32), (3, 128), (130, 288), (257, 96), (2, 2080)])
@each("shared", [False, True])
def test_bits_of_the_reference(algo, kind, shape, shared, rng):
    raw, values = as_dtype(hostile(rng, shape, kind), "bfloat16")
    largest = float(np.abs(values).max())
    if not largest:
        return
    amax = None
    if shared and algo != "FP8_PER_CHANNEL_PER_TOKEN":
        amax = float(np.float32(largest * 1.5))
    got = ops.quantize_weight(raw, algo, amax=amax)
    expected = reference.quantize_weight(values, algo, amax=amax)
    assert got.keys() == expected.keys()
    for role, tensor in expected.items():
        assert same_bits(got[role], tensor), role


def codes(weight, algo):
    """Codes one by one, bits of a byte."""
    raw = carrier(np.asarray(weight)).view(np.uint8)
    if ALGORITHMS[algo].codes == "e4m3":
        return raw
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], -1)


@pytest.mark.parametrize("algo", WRITTEN)
@each("kind", ["nan", "inf", "tiny"])
@each("shape", [(3, 128), (130, 288), (2, 2080)])
def test_values_that_are_no_numbers_leave_others_alone(algo, kind, shape, rng):
    """The sign of a NaN's code is nobody's; all other codes and scales are the reference's."""
    raw, values = as_dtype(hostile(rng, shape, kind), "bfloat16")
    amax = None if np.isfinite(values).all() else 3.0
    got = ops.quantize_weight(raw, algo, amax=amax)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = reference.quantize_weight(values, algo, amax=amax)
    for role in expected.keys() - {"weight"}:
        assert same_bits(got[role], expected[role]), role
    differ = codes(got["weight"], algo) ^ codes(expected["weight"], algo)
    differ[np.isnan(values)] &= 0x7F if ALGORITHMS[algo].codes == "e4m3" else 7
    assert not differ.any()


@each("dtype", ["float16", "float32"])
@each("algo", [algo for algo in WRITTEN if algo != "FP8"])
def test_wider_weights(dtype, algo, rng):
    array, values = as_dtype(hostile(rng, (70, 320), "normal"), dtype)
    expected = reference.quantize_weight(values, algo)
    for role, tensor in ops.quantize_weight(array, algo).items():
        assert same_bits(tensor, expected[role]), role


@each("dtype", ["float16", "float32"])
def test_a_quotient_of_fp8_is_rounded_to_the_dtype_of_the_weight(dtype, rng):
    array, values = as_dtype(hostile(rng, (33, 65), "normal"), dtype)
    got = ops.quantize_weight(array, "FP8")
    quotient = (values / np.float32(got["weight_scale"])).astype(dtype).astype(np.float32)
    assert same_bits(got["weight"], reference.encode(quotient, "e4m3"))


@each("algo", WRITTEN)
def test_zeros_stay_zeros(algo):
    """Exporters store NaN for a weight of zeros."""
    got = ops.quantize_weight(np.zeros((64, 64), np.float32), algo)
    values = meant(got, algo)
    assert not values.any()
    assert np.isfinite(values).all()
    assert (carrier(got["weight"]) & 0x77 == 0).all()


@each("algo", SEARCHED)
def test_a_search_lowers_the_error(algo, rng):
    weight = hostile(rng, (256, 256), "normal")
    plain, searched = (
        meant(ops.quantize_weight(weight, algo, search=search), algo) for search in (None, "mse")
    )
    errors = [np.square(values - weight).sum() for values in (plain, searched)]
    assert errors[1] < errors[0]


@each("algo", ["NVFP4", "W4A16_NVFP4"])
def test_four_over_six_takes_the_better_of_two_scales_for_each_group(algo, rng):
    weight = hostile(rng, (64, 128), "normal")
    second = np.float32(np.abs(weight).max() / np.float32(1536))
    got = ops.quantize_weight(weight, algo, search="4over6")
    assert got["weight_scale_2"] == second
    groups = weight.reshape(-1, 16)
    ratio = np.abs(groups).max(axis=1) / (np.float32(6) * second)
    candidates = []
    for factor in (np.float32(1), np.float32(1.5)):
        step = reference.decode(reference.encode(ratio * factor, "e4m3"), "e4m3") * second
        values = reference.decode(reference.encode(groups / step[:, None], "e2m1"), "e2m1")
        candidates.append(np.square(values * step[:, None].astype(np.float64) - groups).sum(axis=1))
    errors = np.square(meant(got, algo).reshape(-1, 16) - groups).sum(axis=1)
    np.testing.assert_allclose(errors, np.minimum(*candidates), rtol=1e-5)
    plain = meant(ops.quantize_weight(weight, algo), algo)
    assert errors.sum() < np.square(plain - weight).sum()


@each("value", [np.nan, np.inf])
@each("algo", ["FP8", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
def test_a_scale_of_all_values_is_not_found_of_infinite_ones(value, algo):
    """A NaN once left the one scale of FP8 unset, and a scale for each row was written to its place."""
    weight = np.ones((4096, 64), np.float32)
    weight[77, 3] = value
    with pytest.raises(ValueError, match="weight: expected finite values for the scale of all of them, got"):
        ops.quantize_weight(weight, algo)
    assert (carrier(ops.quantize_weight(weight, algo, amax=1.0)["weight_scale"]) != 0).any()


@each("row", [0, 1, 127])
def test_a_block_with_nan_has_a_scale_of_one_wherever_it_is(row, rng):
    weight = hostile(rng, (256, 256), "normal")
    weight[row, 5] = np.nan
    scales = ops.quantize_weight(weight, "FP8_PB_WO")["weight_scale"].reshape(2, 2)
    assert scales[0, 0] == 1
    assert (scales.reshape(-1)[1:] < 1).all()


def test_amax_of_a_weight(rng):
    weight = hostile(rng, (3, 70, 5), "wide")
    assert ops.quantize_weights._C.weight_amax(weight) == np.abs(weight).max()
    weight[1, 2, 3] = np.nan
    assert np.isnan(ops.quantize_weights._C.weight_amax(weight))


ONES = np.ones((32, 64), np.float32)


@each(
    "weight, algo, options, error, told",
    [
        (ONES, "NVFP5", {}, UnsupportedQuantization, "quant_algo: expected one of FP8, .* got 'NVFP5'"),
        (ONES, "W4A16_AWQ", {}, UnsupportedQuantization, "got 'W4A16_AWQ'"),
        (ONES[:, :20].copy(), "NVFP4", {}, ValueError, r"weight: .* groups of 16 for NVFP4.*\[32, 20\]"),
        (ONES[0], "FP8", {}, ValueError, r"weight: expected \[N, K\], got shape \[64\]"),
        (ONES[:0], "FP8", {}, ValueError, r"weight: expected values, got shape \[0, 64\]"),
        (ONES[:, ::2], "FP8", {}, BufferError, "weight: expected a contiguous tensor"),
        (ONES.astype(np.int64), "FP8", {}, TypeError, "weight: expected float32"),
        (ONES, "NVFP4", {"group_size": 24}, ValueError, "group_size: expected 16 or 32 for NVFP4, got 24"),
        (ONES, "NVFP4", {"amax": -1.0}, ValueError, "amax: expected a finite number"),
        (ONES, "NVFP4", {"amax": np.inf}, ValueError, "amax: expected a finite number"),
        (ONES, "NVFP4", {"search": "best"}, ValueError, "search: expected mse or 4over6, got 'best'"),
        (ONES, "FP8", {"search": "mse"}, ValueError, "search: FP8 has no scales to search for"),
        (ONES, "MXFP8", {"search": "mse"}, ValueError, "search: MXFP8 has no scales"),
        (ONES, "MXFP4", {"search": "4over6"}, ValueError, "4over6 is for NVFP4 and W4A16_NVFP4, got MXFP4"),
    ],
)
def test_what_is_refused(weight, algo, options, error, told):
    with pytest.raises(error, match=told):
        ops.quantize_weight(weight, algo, **options)
