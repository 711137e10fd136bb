"""MXFP4 on the device: the bits and the refusals of the CPU, exponents to their ends."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod

from ..linear_cases import Case, mx_part, prepared_for_cuda, random_case
from ..moe_cases import random_stacks
from .cases import params_to_cuda, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu


def assert_same(prepared: Any, expected: Any) -> None:
    assert sorted(prepared) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(to_numpy(prepared[name]).view(np.uint8), value.view(np.uint8), name)


def wide_case(rng: Any, columns: int, rows: list[int]) -> Case:
    """Rows of every span from 0 to 17, anywhere among the exponents."""
    parts = [mx_part(rng, count, columns) for count in rows]
    for part in parts:
        shape = part["weight_scale"].shape
        span = rng.integers(0, 18, (shape[0], 1))
        scales = rng.integers(0, 255 - span) + rng.integers(0, span + 1, shape)
        part["weight_scale"] = np.where(part["weight_scale"] == 0, 0, scales).astype(np.uint8)
    return Case("MXFP4", columns, rows, parts)


@pytest.mark.parametrize("compute", ["exact", "fp8", "auto"])
@pytest.mark.parametrize(
    "columns, rows", [(32, [1]), (288, [33, 130, 7]), (512, [128, 256, 128]), (5120, [300]), (28672, [5, 3])]
)
def test_same_bits_as_on_the_cpu(rng: Any, compute: str, columns: int, rows: list[int]) -> None:
    case = wide_case(rng, columns, rows)
    gpu = case.method(compute=compute, device="cuda:0")
    expected = prepared_for_cuda(case, "fp8" if compute == "auto" else compute)
    for params in (case.listed(), case.fused()):
        prepared = gpu.prepare(params_to_cuda(params))
        assert_same(prepared, expected)
        for value in prepared.values():
            value.view(torch.uint8).fill_(0x5A)
        assert gpu.prepare(params_to_cuda(params), prepared) is prepared
        assert_same(prepared, expected)


@pytest.mark.parametrize("start", [16, 3])
def test_rows_of_a_wider_tensor(rng: Any, start: int) -> None:
    case = wide_case(rng, 256, [20, 9])
    params = params_to_cuda(case.listed())
    for name in ("weight", "weight_scale"):
        for i, part in enumerate(params[name]):
            wide = torch.full((part.shape[0] * 2, part.shape[1] + 64), 0xFF, dtype=torch.uint8, device="cuda")
            wide[::2, start : start + part.shape[1]] = part
            params[name][i] = wide[::2, start : start + part.shape[1]]
    assert_same(case.method(device="cuda:0").prepare(params), prepared_for_cuda(case))


@pytest.mark.parametrize("columns", [64, 1024])
@pytest.mark.parametrize("wrong", [255, 1])
def test_what_is_wrong_is_named_as_on_the_cpu_and_nothing_is_written(
    rng: Any, columns: int, wrong: int
) -> None:
    case, good = (random_case(rng, "MXFP4", columns, [24, 40]) for _ in range(2))
    for row in (7, 30):
        case.parts[1]["weight"][row] = 0x11
        case.parts[1]["weight_scale"][row] = 100
        case.parts[1]["weight_scale"][row, 1] = wrong
    cpu, gpu = case.method(), case.method(device="cuda:0")
    with pytest.raises(ValueError, match="row 31") as expected:
        cpu.prepare(case.listed())
    out = gpu.prepare(params_to_cuda(good.listed()))
    for value in out.values():
        value.view(torch.uint8).fill_(0x5A)
    for params in (case.listed(), case.fused()):
        for given in (None, out):
            with pytest.raises(type(expected.value)) as error:
                gpu.prepare(params_to_cuda(params), given)
            assert str(error.value) == str(expected.value)
    assert all((value.view(torch.uint8) == 0x5A).all() for value in out.values())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
@pytest.mark.parametrize("wrong", [255, 1])
def test_what_is_wrong_in_one_expert_is_named_as_on_the_cpu(
    rng: Any, interleaved: bool, name: str, wrong: int
) -> None:
    """Stacks are prepared once more into tensors that are there, of which none is touched."""
    options = {"top_k": 2, "interleaved": interleaved}
    good, stacks = (random_stacks(rng, "MXFP4", 5, 64, 64, interleaved=interleaved) for _ in range(2))
    stacks[name.replace("_scale", "")][3, 9] = 0x11
    stacks[name][3, 9] = [100, wrong]
    cpu, gpu = (MoEMethod("MXFP4", 5, 64, 64, device=device, **options) for device in ("cpu", "cuda:0"))
    with pytest.raises(ValueError, match=rf"^{name}: experts\.3: ") as expected:
        cpu.prepare(stacks)
    out = gpu.prepare({role: to_cuda(value) for role, value in good.items()})
    before = {role: to_numpy(value).tobytes() for role, value in out.items()}
    for given in (None, out):
        with pytest.raises(type(expected.value)) as error:
            gpu.prepare({role: to_cuda(value) for role, value in stacks.items()}, given)
        assert str(error.value) == str(expected.value)
    assert {role: to_numpy(value).tobytes() for role, value in out.items()} == before
    again = gpu.prepare({role: to_cuda(value) for role, value in good.items()}, out)
    assert {role: to_numpy(value).tobytes() for role, value in again.items()} == before
