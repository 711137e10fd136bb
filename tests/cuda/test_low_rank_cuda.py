"""NVFP4_SVD on CUDA: every kernel that adds the pair, against the reference and the CPU."""

from typing import Any

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import Case, assert_close, random_case, random_x, smoothed, with_pairs
from ..work import each
from .cases import (
    OnDevice,
    assert_writes_only_its_result,
    force,
    params_to_cuda,
    poisoned,
    to_cuda,
    to_numpy,
    torch,
)

pytestmark = pytest.mark.gpu
TOKENS = {
    "simt": (1, 9, 37, 130),
    "sm80_nvfp4": (1, 9, 17, 33, 100, 300),
    "sm90_nvfp4_decode": (1, 2, 7, 8, 16),
    "sm90_nvfp4_medium": (1, 9, 17, 33, 100, 257, 300),
    "sm90_nvfp4_prefill": (1, 33, 129, 300, 1030),
}
SHAPES: list[tuple[int, list[int], int]] = [
    (64, [16], 4),
    (640, [34, 130, 8], 24),
    (1040, [48, 16], 33),
    (512, [1040], 128),
    (4096, [272, 64, 64], 32),
]


def svd_case(rng: Any, columns: int, rows: list[int], rank: int) -> Case:
    case: Case = smoothed(rng, with_pairs(rng, random_case(rng, "NVFP4_SVD", columns, rows), rank))
    return case


@each("shape", SHAPES)
@each("dtype", ["bfloat16", "float16", "float32"])
@each("kernel", TOKENS)
def test_matches_reference(
    rng: Any, monkeypatch: Any, kernel: str, dtype: str, shape: tuple[int, list[int], int]
) -> None:
    if kernel != "simt" and dtype == "float32":
        return  # multiplies 16-bit numbers
    force(monkeypatch, f"cuda:{kernel}", "NVFP4_SVD")
    case = svd_case(rng, *shape)
    layer = OnDevice(case, dtype)
    bias = rng.standard_normal(sum(case.out_partitions)).astype(np.float32)
    for tokens in TOKENS[kernel]:
        x = random_x(rng, (tokens, case.in_features), dtype)
        if dtype == "float16":  # which outputs of 4096 columns may leave
            x /= np.float16(8)
        given = bias if tokens % 2 else None
        y = layer(x, bias=None if given is None else to_cuda(given))
        assert_close(to_numpy(y), case.expected(reference.as_float32(x), bias=given, x_dtype=dtype), dtype)


@each("kernel", TOKENS)
def test_writes_only_its_result(rng: Any, monkeypatch: Any, kernel: str) -> None:
    force(monkeypatch, f"cuda:{kernel}", "NVFP4_SVD")
    layer = OnDevice(svd_case(rng, 256, [40], 8), "bfloat16")
    for tokens in TOKENS[kernel]:
        assert_writes_only_its_result(layer, to_cuda(random_x(rng, (tokens, 256), "bfloat16"), "bfloat16"))


@pytest.mark.parametrize("compute", ["fp8", "fp4", "auto"])
@pytest.mark.parametrize("kernel", [None, "simt", "cublaslt"])
def test_pair_acts_on_x_that_is_not_quantized(
    rng: Any, monkeypatch: Any, compute: str, kernel: str | None
) -> None:
    if (compute, kernel) == ("fp4", "cublaslt"):
        return  # multiplies FP8
    if kernel is not None:
        force(monkeypatch, f"cuda:{kernel}", "NVFP4_SVD", compute)
    case = svd_case(rng, 640, [32, 128, 16], 24)
    layer = OnDevice(case, "bfloat16", compute)
    bias = rng.standard_normal(176).astype(np.float32)
    for tokens in (1, 33, 600):
        x = random_x(rng, (tokens, 640), "bfloat16")
        of_weight = layer.method.compute_for(tokens)
        expected = case.expected(reference.as_float32(x), of_weight, bias=bias, x_dtype="bfloat16")
        y = reference.as_float32(to_numpy(layer(x, bias=to_cuda(bias)))).astype(np.float64)
        assert np.linalg.norm(y - expected) <= 4e-3 * np.linalg.norm(expected)


def test_any_rank(rng: Any) -> None:
    for rank in (1, 2, 31, 32, 65, 200):
        case = svd_case(rng, 96, [33, 7], rank)
        layer = OnDevice(case, "float32")
        for tokens in (1, 16, 17, 70):
            x = random_x(rng, (tokens, 96), "float32")
            assert_close(to_numpy(layer(x)), case.expected(x), "float32")


def test_x_of_many_axes_and_strides(rng: Any) -> None:
    case = svd_case(rng, 128, [24], 4)
    layer = OnDevice(case, "bfloat16")
    wide = to_cuda(random_x(rng, (2, 3, 256), "bfloat16"), "bfloat16")
    assert torch.equal(layer(wide[..., ::2]), layer(wide[..., ::2].contiguous()))
    assert layer(wide[:0, :, :128]).shape == (0, 3, 24)


def test_prepared_bits_are_those_of_the_cpu(rng: Any) -> None:
    """Pairs come from the device or from the host, in any float."""
    case = svd_case(rng, 256, [48, 16], 5)
    here = case.method().prepare(case.listed())
    method = case.method(device="cuda:0")
    there = method.prepare(params_to_cuda(case.listed()))
    mixed = params_to_cuda(case.listed())
    for role in ("lora_a", "lora_b"):
        mixed[role] = [reference.as_float32(part[role]) for part in case.parts]
    places = {name: value.data_ptr() for name, value in there.items()}
    for prepared in (there, method.prepare(mixed, there)):
        for role in ("lora_a", "lora_b", "pre_quant_scale"):
            np.testing.assert_array_equal(to_numpy(prepared[role]), here[role])
    assert {name: value.data_ptr() for name, value in there.items()} == places


def test_what_is_wrong_is_named_and_nothing_is_written(rng: Any) -> None:
    case = svd_case(rng, 64, [16], 4)
    method = case.method(device="cuda:0")
    out = method.prepare(params_to_cuda(case.listed()))
    kept = {role: to_numpy(value).tobytes() for role, value in out.items()}
    params = params_to_cuda(svd_case(rng, 64, [16], 4).listed())
    params["lora_b"][0] = params["lora_b"][0].view(torch.bfloat16).float()
    params["lora_b"][0][7, 2] = float("nan")
    with pytest.raises(ValueError, match="lora_b: expected finite values, got nan at row 7, column 2"):
        method.prepare(params, out)
    assert {role: to_numpy(value).tobytes() for role, value in out.items()} == kept


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_graph_replays_the_call_and_runs_agree(rng: Any, tokens: int) -> None:
    layer = OnDevice(svd_case(rng, 2048, [300, 84], 64), "bfloat16")
    x = to_cuda(random_x(rng, (tokens, 2048), "bfloat16"), "bfloat16")
    expected, out = layer(x), poisoned(tokens, 384, dtype="bfloat16")
    assert torch.equal(layer(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
