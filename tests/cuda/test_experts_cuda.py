"""Weight processing of stacks of experts on the device: bits and refusals of one expert after the other."""

from typing import Any

import numpy as np
import pytest

from moqext import _C, LinearMethod, ops, reference

from ..expert_cases import STACKS, WITH_FACTORS, Stack, expected_of, random_stack
from ..linear_cases import with_a_lost_scale, with_a_zero_part
from .cases import params_to_cuda, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu


def prepared(stack: Stack, params: Any, compute: str, out: Any = None) -> Any:
    return ops.prepare_experts(params, *stack.about(), **stack.options(compute), out=out)


def one_by_one(stack: Stack, compute: str) -> dict[str, np.ndarray]:
    """Each expert as a matrix on the device, which other tests compare with the CPU."""

    def prepare(case: Any) -> dict[str, np.ndarray]:
        result = case.method(compute=compute, device="cuda:0").prepare(params_to_cuda(case.listed()))
        return {name: to_numpy(value) for name, value in result.items()}

    return expected_of(stack, prepare)


def assert_same(got: Any, expected: Any) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert got[name].is_cuda
        assert got[name].is_contiguous()
        assert tuple(got[name].shape) == value.shape, name
        np.testing.assert_array_equal(to_numpy(got[name]).view(np.uint8), value.view(np.uint8), name)


def code_names(algo: str) -> tuple[str, ...]:
    return ("weight", "weight_scale") if "FP4" in algo else ("weight",)


def scales_at_home(stack: Stack) -> dict[str, Any]:
    """Codes on the device, all other scales on the host."""
    params, names = stack.fused(), code_names(stack.case.algo)
    return params | params_to_cuda({name: params[name] for name in names})


def apart_on_device(array: np.ndarray) -> Any:
    """The array's values with gaps of three elements between experts, so that no vector's alignment suits."""
    flat = to_cuda(array.reshape(len(array), -1))
    memory = torch.zeros((len(array), flat.shape[1] + 3), dtype=flat.dtype, device="cuda")
    memory[:, : flat.shape[1]] = flat
    strides = to_cuda(array).stride()
    return torch.as_strided(memory, array.shape, (memory.stride(0), *strides[1:]))


@pytest.mark.parametrize("algo, compute", STACKS)
@pytest.mark.parametrize("experts", [1, 2, 5])
@pytest.mark.parametrize("rows", [[128, 128], [24], [33, 7, 130]])
def test_an_expert_of_a_stack_has_the_bits_of_its_matrix(
    rng: Any, algo: str, compute: str, experts: int, rows: list[int]
) -> None:
    stack = random_stack(rng, algo, 288, rows, experts)
    expected = one_by_one(stack, compute)
    assert_same(prepared(stack, params_to_cuda(stack.listed()), compute), expected)
    if algo != "FP8_PB_WO" or all(n % 128 == 0 for n in rows[:-1]):
        assert_same(prepared(stack, params_to_cuda(stack.fused()), compute), expected)
        assert_same(prepared(stack, scales_at_home(stack), compute), expected)


@pytest.mark.parametrize("algo, compute", STACKS)
@pytest.mark.parametrize("columns", [128, 1024])
def test_many_experts(rng: Any, algo: str, compute: str, columns: int) -> None:
    stack = random_stack(rng, algo, columns, [64, 64], 130)
    if algo == "FP8_PB_WO":
        assert_same(prepared(stack, params_to_cuda(stack.listed()), compute), one_by_one(stack, compute))
    else:
        assert_same(prepared(stack, params_to_cuda(stack.fused()), compute), one_by_one(stack, compute))


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
@pytest.mark.parametrize("columns", [1, 15, 131])
def test_columns_that_no_vector_divides(rng: Any, algo: str, columns: int) -> None:
    stack = random_stack(rng, algo, columns, [3, 64, 11], 3)
    assert_same(prepared(stack, params_to_cuda(stack.listed()), "exact"), one_by_one(stack, "exact"))


@pytest.mark.parametrize("algo, compute", STACKS)
def test_experts_anywhere_in_memory(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [128, 24], 4)
    expected = one_by_one(stack, compute)
    apart_params = {name: apart_on_device(value) for name, value in stack.fused().items()}
    assert not apart_params["weight"].is_contiguous()
    assert_same(prepared(stack, apart_params, compute), expected)
    every_other = {}
    for name, value in stack.fused().items():
        wide = to_cuda(np.repeat(value, 2, 0))
        every_other[name] = wide[::2]
    assert_same(prepared(stack, every_other, compute), expected)


@pytest.mark.parametrize("algo, compute", STACKS)
@pytest.mark.parametrize("start", [16, 3])
def test_rows_of_a_wider_tensor(rng: Any, algo: str, compute: str, start: int) -> None:
    stack = random_stack(rng, algo, 256, [20, 9], 3)
    params = params_to_cuda(stack.listed())
    for name in code_names(algo):
        for i, part in enumerate(params[name]):
            experts, rows, columns = part.shape
            wide = torch.full((experts, rows * 2, columns + 64), 0xFF, dtype=torch.uint8, device="cuda")
            wide[:, ::2, start : start + columns] = part
            params[name][i] = wide[:, ::2, start : start + columns]
    assert_same(prepared(stack, params, compute), one_by_one(stack, compute))


@pytest.mark.parametrize("algo, compute", STACKS)
@pytest.mark.parametrize("at_home", [False, True])
def test_reload_in_place(rng: Any, algo: str, compute: str, at_home: bool) -> None:
    stack, other = (random_stack(rng, algo, 128, [128, 24], 3) for _ in range(2))
    first = prepared(stack, params_to_cuda(stack.fused()), compute)
    addresses = {name: value.data_ptr() for name, value in first.items()}
    params = scales_at_home(other) if at_home else params_to_cuda(other.fused())
    assert prepared(other, params, compute, out=first) is first
    assert addresses == {name: value.data_ptr() for name, value in first.items()}
    assert_same(first, one_by_one(other, compute))


@pytest.mark.parametrize(
    "algo, compute",
    [("FP8", "exact"), ("FP8_PER_CHANNEL_PER_TOKEN", "exact"), ("FP8_PB_WO", "exact"), ("NVFP4", "fp4")],
)
@pytest.mark.parametrize("zero", [False, True])
def test_codes_may_stay_in_their_place(rng: Any, algo: str, compute: str, zero: bool) -> None:
    stack = random_stack(rng, algo, 1024, [128, 40], 3)
    if zero:
        with_a_zero_part(stack.experts[1], algo)
    expected, params = one_by_one(stack, compute), params_to_cuda(stack.fused())
    out = {name: to_cuda(np.full_like(value, 7)) for name, value in expected.items()}
    out["weight"] = params["weight"]
    assert_same(prepared(stack, params, compute, out=out), expected)


@pytest.mark.parametrize("algo, compute", WITH_FACTORS)
@pytest.mark.parametrize("at_home", [False, True])
def test_scales_of_zero_mean_zeros_of_their_expert(rng: Any, algo: str, compute: str, at_home: bool) -> None:
    stack = random_stack(rng, algo, 256, [128, 24], 4)
    for e in (1, 3):
        with_a_zero_part(stack.experts[e], algo)
    expected = one_by_one(stack, compute)
    params = scales_at_home(stack) if at_home else params_to_cuda(stack.fused())
    assert_same(prepared(stack, params, compute), expected)
    again = {name: to_cuda(np.full_like(value, 7)) for name, value in expected.items()}
    assert prepared(stack, params, compute, out=again) is again
    assert_same(again, expected)


@pytest.mark.parametrize(
    "algo, scale", [("FP8", "weight_scale"), ("NVFP4", "weight_scale_2"), ("NVFP4", "input_scale")]
)
@pytest.mark.parametrize("on_device", [False, True])
def test_one_value_serves_all_experts_or_all_partitions(
    rng: Any, algo: str, scale: str, on_device: bool
) -> None:
    stack = random_stack(rng, algo, 64, [16, 16], 3)
    params = params_to_cuda(stack.fused())
    each = np.float32([0.5, 2, 8])
    move = to_cuda if on_device else np.asarray
    for value, spread in (
        (np.float32([0.25]), np.full((3, 2), 0.25, np.float32)),
        (each, np.stack([each, each], 1)),
        (each[:, None], np.stack([each, each], 1)),
    ):
        expected = prepared(stack, params | {scale: to_cuda(spread)}, "exact")
        expected = {name: to_numpy(tensor) for name, tensor in expected.items()}
        assert_same(prepared(stack, params | {scale: move(value)}, "exact"), expected)


def test_scales_in_bfloat16(rng: Any) -> None:
    stack = random_stack(rng, "FP8", 64, [16, 24], 3)
    params = params_to_cuda(stack.fused())
    params["weight_scale"] = params["weight_scale"].bfloat16()
    expected = prepared(stack, params | {"weight_scale": params["weight_scale"].float()}, "exact")
    assert_same(prepared(stack, params, "exact"), {name: to_numpy(value) for name, value in expected.items()})


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError, BufferError)) as error:
        call(*arguments, **options)
    return str(error.value)


def assert_refused_as_alone(stack: Stack, expert: int, compute: str) -> None:
    """The message of the expert's matrix on the CPU after its number, and nothing of an output written."""
    case = stack.experts[expert]
    alone = refusal(case.method(compute=compute).prepare, case.listed())
    if compute in ("fp8", "auto"):  # what is folded on the device alone
        alone = refusal(case.method(compute=compute, device="cuda:0").prepare, params_to_cuda(case.listed()))
    good = random_stack(np.random.default_rng(1), *stack.about(), len(stack.experts), case.group_size)
    out = prepared(good, params_to_cuda(good.fused()), compute)
    for value in out.values():
        value.view(torch.uint8).fill_(0x5A)
    for params in (params_to_cuda(stack.fused()), scales_at_home(stack)):
        for place in (None, out):
            assert refusal(prepared, stack, params, compute, out=place) == f"experts.{expert}: {alone}"
    for value in out.values():
        assert (value.view(torch.uint8) == 0x5A).all()


@pytest.mark.parametrize("algo, compute", WITH_FACTORS)
def test_a_lost_scale_is_named_with_its_expert(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [128, 40], 4)
    with_a_lost_scale(rng, stack.experts[2])
    assert_refused_as_alone(stack, 2, compute)


@pytest.mark.parametrize("algo, compute", STACKS)
@pytest.mark.parametrize("columns", [128, 8192])
def test_a_bad_code_is_named_with_its_expert(rng: Any, algo: str, compute: str, columns: int) -> None:
    stack = random_stack(rng, algo, columns, [128, 70], 5)
    name = "weight_scale" if "FP4" in algo else "weight"
    for e in (3, 4):  # the first is named
        part = stack.experts[e].parts[rng.integers(2)][name]
        part[rng.integers(part.shape[0]), rng.integers(part.shape[1])] = 0xFF
    assert_refused_as_alone(stack, 3, compute)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("algo, compute", STACKS)
def test_a_bad_scale_is_named_with_its_expert(rng: Any, algo: str, compute: str, bad: float) -> None:
    for name in ("weight_scale_2" if "FP4" in algo else "weight_scale", "input_scale"):
        stack = random_stack(rng, algo, 128, [128, 70], 3)
        part = stack.experts[1].parts[1]
        if name in part:
            scale = np.array(part[name])
            scale.reshape(-1)[-1] = bad
            part[name] = scale
            assert_refused_as_alone(stack, 1, compute)


def test_a_factor_that_folding_does_not_take_is_named(rng: Any) -> None:
    stack = random_stack(rng, "W4A16_NVFP4", 128, [64, 64], 3)
    stack.experts[2].parts[0]["weight_scale_2"] = np.float32(2.0**125)
    assert_refused_as_alone(stack, 2, "fp8")
    assert_same(prepared(stack, params_to_cuda(stack.fused()), "exact"), one_by_one(stack, "exact"))


def test_preparing_a_stack_needs_no_memory_but_its_result(rng: Any) -> None:
    experts, rows, columns = 16, 3072, 2048  # one expert is more than the MiB that is allowed for below
    weight = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 0x7F, (experts, rows, columns // 16), dtype=torch.uint8, device="cuda")
    factor = torch.rand((experts, 2), device="cuda") + 0.5
    params = {"weight": weight, "weight_scale": scale, "weight_scale_2": factor}
    for compute in ("exact", "fp8"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = ops.prepare_experts(params, "W4A16_NVFP4", columns, [rows // 2] * 2, compute=compute)
        held = sum(value.nbytes for value in result.values())
        # torch hands out a block of its cache whole where no more than a MiB of it would be left
        assert torch.cuda.max_memory_allocated() - before <= held + (1 << 20) + 4096
        alone = LinearMethod("W4A16_NVFP4", columns, [rows // 2] * 2, device="cuda:0", compute=compute)
        last = alone.prepare({name: value[-1] for name, value in params.items()})
        assert all(torch.equal(result[name][-1], last[name]) for name in last)
        del result


def test_the_plan_knows_the_tensors_before(rng: Any) -> None:
    for algo, compute in STACKS:
        stack = random_stack(rng, algo, 128, [128, 128], 3)
        plan = _C.weight_plan(*stack.about(), device="cuda:0", compute=compute, experts=3)
        result = {spec[0]: spec[1] for spec in plan.prepared_params()}
        got = plan.prepare(params_to_cuda(stack.fused()))
        assert {name: tuple(value.shape) for name, value in got.items()} == result


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("shape", [(1, 3, 32), (5, 80, 160), (2, 64, 256), (3, 128, 4096)])
def test_packing_of_a_stack_and_back(rng: Any, group_size: int, shape: tuple[int, int, int]) -> None:
    experts, rows, columns = shape
    weight = rng.integers(0, 256, (experts, rows, columns // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (experts, rows, columns // group_size), dtype=np.uint8)
    expected = np.stack([reference.pack_nvfp4(*each) for each in zip(weight, scale, strict=True)])
    for change in (to_cuda, apart_on_device):
        packed = torch.full(expected.shape, 0xA5, dtype=torch.uint8, device="cuda")
        assert ops.pack_nvfp4(change(weight), change(scale), out=packed) is packed
        np.testing.assert_array_equal(to_numpy(packed), expected)
    back, scales = (torch.full(a.shape, 0xA5, dtype=torch.uint8, device="cuda") for a in (weight, scale))
    ops.unpack_nvfp4(packed, shape, group_size, out=back, scale_out=scales)
    np.testing.assert_array_equal(to_numpy(back), weight)
    np.testing.assert_array_equal(to_numpy(scales), scale)
