"""Scales and activations near the ends of float32 on a CUDA device (docs/numerics.md, "Extreme values").

Outputs are the reference's as far as sums and products of factors are float32; refusals are those of the CPU.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moqext import UnsupportedQuantization, reference

from ..extreme_cases import EXTREMES, TOO_SMALL, as_dtype, assert_as_reference, make_extreme, with_input_scale
from ..linear_cases import COMPUTES, FP8_CORE_WORST, random_case

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import OnDevice, on_host, params_to_cuda, to_numpy  # noqa: E402

CASES = [
    (name, algo, compute)
    for name, extreme in EXTREMES.items()
    for algo, compute in COMPUTES
    if algo in extreme.cuda
]


def outputs(
    monkeypatch: Any, case: Any, x: Any, dtype: str, compute: str = "exact"
) -> Iterator[tuple[str, Any]]:
    """Runs every kernel that takes so many tokens, but cuBLASLt, which has its own order of scales."""
    monkeypatch.delenv("MOQEXT_KERNEL", raising=False)
    reasons = dict(case.method(dtype=dtype, compute=compute, device="cuda:0")._plan.explain())
    for kernel in [name for name, reason in reasons.items() if reason is None and "cublaslt" not in name]:
        print(kernel)
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        try:
            y = to_numpy(OnDevice(case, dtype, compute)(x))
        except UnsupportedQuantization:
            continue
        yield kernel, y


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 6, 70])
@pytest.mark.parametrize("name, algo, compute", CASES)
def test_every_kernel_gives_what_the_reference_gives(
    rng: Any, monkeypatch: Any, name: str, algo: str, compute: str, tokens: int, dtype: str
) -> None:
    case, values = make_extreme(rng, name, algo, tokens, 256, [128, 64])
    x = as_dtype(values, dtype)
    known = reference.as_float32(x)
    with np.errstate(all="ignore"):
        expected, magnitude = case.expected(known, compute), case.magnitude(known, compute)
    for kernel, y in outputs(monkeypatch, case, x, dtype, compute):
        quantized = "FP8" in algo or compute == "fp8"
        sums = FP8_CORE_WORST if quantized and "simt" not in kernel else 1e-5
        assert_as_reference(y, expected, magnitude, dtype, sums)


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_a_product_of_factors_below_the_normal_numbers_is_rounded_once(
    rng: Any, monkeypatch: Any, algo: str, tokens: int
) -> None:
    """To a multiple of 2^-149: outputs are off by no more than 2^-150 times the sum of their codes."""
    name = "scales with a product below the normal numbers"
    case, values = make_extreme(rng, name, algo, tokens, 256, [128, 64])
    x = as_dtype(values, "bfloat16")
    known = reference.as_float32(x)
    expected, magnitude = case.expected(known), case.magnitude(known)
    codes = 448.0**2 * 256
    bound = 2.0**-8 * np.abs(expected) + FP8_CORE_WORST * magnitude + codes * 2.0**-150 + 2.0**-133
    for _, y in outputs(monkeypatch, case, x, "bfloat16"):
        assert (np.abs(reference.as_float32(y) - expected) <= bound).all()


@pytest.mark.parametrize("scale", TOO_SMALL)
@pytest.mark.parametrize("algo, compute", [("FP8", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp4")])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_input_scale_without_a_reciprocal_is_refused_as_on_the_cpu(
    rng: Any, algo: str, compute: str, scale: float, on_device: bool, fused: bool
) -> None:
    case = random_case(rng, algo, 1152, [300, 30, 8])
    gpu = case.method(compute=compute, device="cuda:0")
    out = gpu.prepare(params_to_cuda(case.listed()))
    copies = {name: value.clone() for name, value in out.items()}
    case.parts[1]["input_scale"] = np.array(np.float32(scale))
    params = case.fused() if fused else case.listed()
    with pytest.raises(ValueError, match=r"^input_scale: expected a value above 2.93874e-39") as expected:
        on_host(case, compute=compute).prepare(params)
    given = params_to_cuda(params)
    if not on_device:
        given["input_scale"] = params["input_scale"]
    for target in (None, out):
        with pytest.raises(ValueError) as error:
            gpu.prepare(given, target)
        assert str(error.value) == str(expected.value)
    for name, value in out.items():
        assert torch.equal(value.view(torch.uint8), copies[name].view(torch.uint8))


def test_the_least_input_scale_is_taken(rng: Any) -> None:
    least = np.nextafter(np.float32(2.0**-128), np.float32(1))
    case = with_input_scale(random_case(rng, "FP8", 256, [128]), least)
    y = to_numpy(OnDevice(case, "float32")(np.zeros((3, 256), np.float32)))
    np.testing.assert_array_equal(y, 0)


@pytest.mark.parametrize("scale", [2.0**125, 3e38])
@pytest.mark.parametrize("compute", ["fp8", "auto"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_second_scale_that_folding_cannot_multiply_is_refused(
    rng: Any, scale: float, compute: str, on_device: bool
) -> None:
    case = random_case(rng, "NVFP4", 1152, [300, 30, 8])
    gpu = case.method(compute=compute, device="cuda:0")
    if compute == "auto" and "fold_scale" not in gpu.prepared_params:
        pytest.skip("there is no choice on this device")
    out = gpu.prepare(params_to_cuda(case.listed()))
    copies = {name: value.clone() for name, value in out.items()}
    case.parts[1]["weight_scale_2"] = np.array(np.float32(scale))
    given = params_to_cuda(case.listed())
    if not on_device:
        given["weight_scale_2"] = case.listed()["weight_scale_2"]
    for target in (None, out):
        with pytest.raises(
            ValueError, match=r"^weight_scale_2: expected at most 2.12676e\+37, .* at index 1$"
        ):
            gpu.prepare(given, target)
    for name, value in out.items():
        assert torch.equal(value, copies[name])
    case.method(device="cuda:0").prepare(given)
