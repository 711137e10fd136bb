"""Scales and activations near the ends of float32: every CPU kernel gives what the reference gives, or the
scale is refused by name (docs/numerics.md, "Extreme values")."""

import re
from pathlib import Path

import numpy as np
import pytest

from moqext import LinearMethod, ops, reference, set_num_threads
from moqext.ops import scalars

from .extreme_cases import EXTREMES, TOO_SMALL, as_dtype, assert_as_reference, make_extreme, with_input_scale
from .linear_cases import COMPUTES, LIMITS, random_case, random_part, random_x
from .work import each

FOLDED = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8")
ROOT = Path(__file__).parent.parent


@each("tokens", [(1, 4), (5, 20, 40)])
@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("name", EXTREMES)
def test_every_kernel_gives_what_the_reference_gives(rng, monkeypatch, name, algo, compute, tokens):
    """One 3.3e38 makes no other output NaN, and no sum overflows where its product does not."""
    case, values = make_extreme(rng, name, algo, int(rng.choice(tokens)), 144, [24, 9])
    for dtype in LIMITS:
        x = as_dtype(values, dtype)
        known = reference.as_float32(x)
        with np.errstate(all="ignore"):
            expected, magnitude = case.expected(known, compute), case.magnitude(known, compute)
        monkeypatch.delenv("MOQEXT_KERNEL", raising=False)
        reasons = dict(case.method(dtype=dtype, compute=compute)._plan.explain())
        for kernel in [name for name, reason in reasons.items() if reason is None]:
            print(dtype, kernel)
            monkeypatch.setenv("MOQEXT_KERNEL", kernel)
            method = case.method(dtype=dtype, compute=compute)
            params = method.prepare(case.listed())
            sums = 1e-5 + (rounding_of_factors(params) if compute == "fp8" else 0)
            assert_as_reference(method(x, params), expected, magnitude, dtype, sums)


def rounding_of_factors(params):
    """The relative error of the smallest factor weight_scale_2 * 2^r of "fp8", a multiple of 2^-149 below the
    normal numbers (docs/numerics.md); other computes take weight_scale_2 as it is."""
    factors = np.abs(np.asarray(params.get("output_scale", [1.0]), np.float64))
    return 2.0**-150 / factors[factors > 0].min(initial=1.0)


@each("threads", [1, 2])
@each("name", ["the least input_scale", "subnormal values, huge weights"])
@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_threads_that_flush_subnormal_numbers_give_the_same_bits(rng, name, algo, compute, threads):
    """`torch.set_flush_denormal` is a mode of the processor, in which a subnormal scale would be a zero."""
    torch = pytest.importorskip("torch")
    case, x = make_extreme(rng, name, algo, 40, 272, [90, 70])
    method = case.method(dtype="float32", compute=compute)
    outputs = []
    try:
        set_num_threads(threads)
        for flush in (False, True):
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor has no such mode")
            params = method.prepare(case.listed())
            outputs.append([method(x, params), *params.values(), *ops.quantize(x, "nvfp4")])
            assert (np.float32(1e-40) * np.float32(1) == 0) == flush  # it stays set
    finally:
        torch.set_flush_denormal(False)
        set_num_threads(0)
    for plain, flushed in zip(*outputs, strict=True):
        assert np.asarray(plain).tobytes() == np.asarray(flushed).tobytes()


@each("scale", TOO_SMALL)
@each("algo, compute", [("FP8", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp4")])
def test_an_input_scale_without_a_reciprocal_is_refused(rng, algo, compute, scale):
    """A scale that small made NaN of zeros: 0 times the reciprocal, which is infinite."""
    case = random_case(rng, algo, 64, [8, 8])
    case.parts[1]["input_scale"] = np.array(np.float32(scale))
    with pytest.raises(ValueError, match=r"^input_scale: expected a value above 2.93874e-39, .* at index 1$"):
        case.method(compute=compute).prepare(case.listed())


def test_the_least_input_scale_is_taken(rng):
    least = np.nextafter(np.float32(2.0**-128), np.float32(1))
    case = with_input_scale(random_case(rng, "FP8", 64, [8]), least)
    method = case.method(dtype="float32")
    y = method(np.zeros((2, 64), np.float32), method.prepare(case.listed()))
    np.testing.assert_array_equal(y, 0)
    assert not (
        ops.quantize(np.zeros(16, np.float32), "fp8_tensor", scale=float(least))[0].view(np.uint8)
    ).any()


@pytest.mark.parametrize("scale", TOO_SMALL)
def test_quantizing_by_a_scale_without_a_reciprocal_is_refused(scale):
    x = np.zeros((2, 16), np.float32)
    with pytest.raises(ValueError, match=r"^scale: expected a number whose reciprocal is a float32, got"):
        ops.quantize(x, "fp8_tensor", scale=scale)
    with pytest.raises(ValueError, match=r"^scale: its reciprocal must be a float32, got"):
        reference.quantize_fp8_static(x, np.float32(scale))


def test_requantizing_to_a_scale_without_a_reciprocal_is_refused():
    weight = np.full((2, 16), 0x38, np.uint8)
    with pytest.raises(
        ValueError, match=r"^weight_scale: expected the largest above 2.93874e-39, .* got 1e-39$"
    ):
        ops.requantize_to_max(weight, [1e-39, 1e-40], [1, 1])
    least = float(np.nextafter(np.float32(2.0**-128), np.float32(1)))
    codes, _ = ops.requantize_to_max(weight, [1e-40, least], [1, 1])
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), 0)  # the products are 0 in float16


@pytest.mark.parametrize("algo, compute", [(algo, "fp8") for algo in FOLDED])
@pytest.mark.parametrize("scale", [2.0**125, 3e38])
def test_a_second_scale_that_folding_cannot_multiply_is_refused(rng, algo, compute, scale):
    """The scale's product with the power of two of a row would be infinite, and outputs NaN."""
    part = random_part(rng, algo, 16, 64) | {"weight_scale_2": np.array(np.float32(scale))}
    method = LinearMethod(algo, 64, [16], compute=compute)
    with pytest.raises(ValueError, match=r"^weight_scale_2: expected at most 2.12676e\+37, .* at index 0$"):
        method.prepare(part)
    LinearMethod(algo, 64, [16]).prepare(part)  # compute "exact" takes it
    for limit in (1e-45, 2.0**124):
        method.prepare(part | {"weight_scale_2": np.array(np.float32(limit))})


def test_float16_outputs_overflow_to_infinity_as_the_dtype_has_it(rng):
    case = random_case(rng, "W4A16_NVFP4", 256, [32])
    x = random_x(rng, (3, 256), "float16") * np.float16(64)
    case.parts[0]["weight_scale_2"] = np.array(np.float32(64))
    method = case.method(dtype="float16")
    y = method(x, method.prepare(case.listed()))
    expected = case.expected(x)
    assert np.isinf(y).any()
    assert_as_reference(y, expected, case.magnitude(x), "float16")


def test_bounds_of_scales_are_those_of_the_native_code():
    header = (ROOT / "csrc/core/formats.h").read_text()
    bound = re.search(r"#define MOQ_DIVISOR_ABOVE (\S+)f", header)
    assert float.fromhex(bound[1]) == scalars.DIVISOR_ABOVE == 2.0**-128
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(1) / np.float32(2.0**-128))
    assert np.finfo(np.float32).max == scalars.FLOAT32_MAX
