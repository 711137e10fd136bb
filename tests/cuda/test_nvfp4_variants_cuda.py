"""NVFP4_AWQ, W4A8_NVFP4_FP8, MXFP4 and groups of 32 on the device, by every kernel that can run them."""

from typing import Any

import numpy as np
import pytest

from moqext import UnsupportedQuantization, reference

from ..linear_cases import (
    assert_close,
    assert_within_core_sums,
    assert_within_rounding,
    prepared_for_cuda,
    random_case,
    random_x,
    smoothed,
)
from .cases import OnDevice, assert_a_graph_replays, params_to_cuda, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu
DTYPES = ["bfloat16", "float16", "float32"]


def kernels(case: Any, dtype: str, compute: str) -> list[str]:
    """Kernels that can run the layer, and "" for the plan's own choice."""
    found = OnDevice(case, dtype, compute).method._plan.explain()
    return [name for name, reason in found if reason is None] + [""]


def x_for(rng: Any, case: Any, tokens: int, dtype: str) -> Any:
    """Activations that are ordinary once they are smoothed; else, more often than `assert_within_core_sums`
    expects, one product outweighs all others of its sum."""
    shape, scale = (tokens, case.in_features), case.parts[0].get("pre_quant_scale")
    if scale is None:
        return random_x(rng, shape, dtype)
    values = random_x(rng, shape, "float32") / reference.as_float32(scale)
    return reference.encode(values, dtype) if dtype == "bfloat16" else values.astype(dtype)


def check_by_all(rng: Any, monkeypatch: Any, case: Any, dtype: str, compute: str) -> None:
    """Element by element in each call; the norm of all calls of a kernel, since in one token of few rows the
    last bit of one output may be more than the norm's bound."""
    for kernel in kernels(case, dtype, compute):
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        layer = OnDevice(case, dtype, compute)
        outputs, references = [], []
        for tokens in (1, 5, 16, 17, 64, 200):
            x = x_for(rng, case, tokens, dtype)
            try:
                y = to_numpy(layer(x))
            except UnsupportedQuantization:  # forced, and not for so many rows
                assert kernel not in ("", "cuda:simt")
                continue
            expected = case.expected(x, compute)
            magnitude = case.magnitude(reference.as_float32(x), compute) + 1e-30
            within = assert_within_core_sums if compute == "fp8" else assert_within_rounding
            within(y, expected, magnitude, dtype)
            outputs.append(y)
            references.append(expected)
        assert_close(np.concatenate(outputs), np.concatenate(references), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4"])
def test_x_is_smoothed_first(rng: Any, monkeypatch: Any, compute: str, dtype: str) -> None:
    check_by_all(
        rng, monkeypatch, smoothed(rng, random_case(rng, "NVFP4_AWQ", 528, [130, 31])), dtype, compute
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 80, 1040, 5120])
def test_smoothing_is_one_product_and_one_rounding(
    rng: Any, monkeypatch: Any, dtype: str, columns: int
) -> None:
    """To the bit, by the same kernel: the layer on x, of any strides, and on what smoothing makes of x."""
    case = random_case(rng, "NVFP4_AWQ", columns, [40])
    with_scale = smoothed(rng, case)
    scale = reference.as_float32(with_scale.parts[0]["pre_quant_scale"])
    for kernel in kernels(case, dtype, "exact"):
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        layer, plain = OnDevice(with_scale, dtype), OnDevice(case, dtype)
        for tokens in (1, 3, 16):
            values = random_x(rng, (tokens, 2 * columns), dtype)
            wide = to_cuda(values, dtype)
            for at, x in ((slice(0, columns), wide[:, :columns]), (slice(1, None, 2), wide[:, 1::2])):
                product = (reference.as_float32(values[:, at]) * scale).astype(np.float64)
                by_hand = reference.round_to(product, dtype)
                by_hand = reference.encode(by_hand, dtype) if dtype == "bfloat16" else by_hand
                assert torch.equal(layer(x), plain(by_hand)), (kernel, tokens, at)


def test_many_rows_are_smoothed(rng: Any) -> None:
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 2064, [8]))
    layer, x = OnDevice(case, "bfloat16"), random_x(rng, (5000, 2064), "bfloat16")
    assert_close(to_numpy(layer(x)), case.expected(x), "bfloat16")


def test_smoothing_is_captured(rng: Any) -> None:
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 528, [40]))
    layer = OnDevice(case, "bfloat16")
    assert_a_graph_replays(layer, to_cuda(random_x(rng, (5, 528), "bfloat16"), "bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", ["exact", "fp8"])
@pytest.mark.parametrize("input_scale", [True, False])
@pytest.mark.parametrize("algo", ["W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"])
def test_fp8_activations_under_a_static_scale(
    rng: Any, monkeypatch: Any, algo: str, compute: str, dtype: str, input_scale: bool
) -> None:
    case = random_case(rng, algo, 544, [130, 31], input_scale=input_scale)
    check_by_all(rng, monkeypatch, case, dtype, compute)


@pytest.mark.parametrize("compute", ["exact", "fp8"])
@pytest.mark.parametrize("algo", ["NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MXFP4"])
def test_groups_of_32(rng: Any, monkeypatch: Any, algo: str, compute: str) -> None:
    case = random_case(rng, algo, 1056, [77, 64], group_size=32)
    check_by_all(rng, monkeypatch, case, "bfloat16", compute)


@pytest.mark.parametrize("algo", ["NVFP4_AWQ", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"])
@pytest.mark.parametrize("compute", ["exact", "fp8"])
def test_prepared_tensors(rng: Any, algo: str, compute: str) -> None:
    case = random_case(rng, algo, 288, [40, 24])
    case = smoothed(rng, case) if algo == "NVFP4_AWQ" else case
    method, expected = case.method(compute=compute, device="cuda:0"), prepared_for_cuda(case, compute)
    assert {*method.prepared_params} >= {*expected}
    for params in (case.listed(), case.fused()):
        on_device = params_to_cuda(params)
        prepared = method.prepare(on_device)
        for again in (prepared, method.prepare(on_device, prepared)):
            assert sorted(again) == sorted(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(
                    to_numpy(again[name]).view(np.uint8), value.view(np.uint8), name
                )


def test_bad_factors_are_refused_as_on_the_cpu(rng: Any) -> None:
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 96, [24, 8]))
    case.parts[1]["pre_quant_scale"] = case.parts[1]["pre_quant_scale"].copy()
    case.parts[1]["pre_quant_scale"][50] = 0x7FC0
    cpu, gpu = case.method(), case.method(device="cuda:0")
    with pytest.raises(ValueError, match=r"^pre_quant_scale: .* at index 50") as expected:
        cpu.prepare(case.listed())
    params = params_to_cuda(case.listed())
    params["pre_quant_scale"] = [scale.view(torch.bfloat16) for scale in params["pre_quant_scale"]]
    for scale in (params["pre_quant_scale"], case.listed()["pre_quant_scale"]):
        with pytest.raises(ValueError) as error:
            gpu.prepare(params | {"pre_quant_scale": scale})
        assert str(error.value) == str(expected.value)
