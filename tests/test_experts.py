"""Weight processing of stacks of experts on the CPU: bits and refusals of one expert after the other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import _C, UnsupportedQuantization, ops, reference

from .expert_cases import STACKS, WITH_FACTORS, Stack, apart, expected_of, random_stack
from .linear_cases import random_case, with_a_lost_scale, with_a_zero_part
from .work import each


def prepared(stack: Stack, params: Any, compute: str, out: Any = None) -> Any:
    return ops.prepare_experts(params, *stack.about(), **stack.options(compute), out=out)


def one_by_one(stack: Stack, compute: str) -> dict[str, np.ndarray]:
    return expected_of(stack, lambda case: case.method(compute=compute).prepare(case.listed()))


def assert_same(got: Any, expected: Any) -> None:
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        assert got[name].flags.c_contiguous
        np.testing.assert_array_equal(got[name].view(np.uint8), value.view(np.uint8), name)


@each("algo, compute", STACKS)
@each("experts", [1, 2, 5])
@each("rows", [[128, 128], [24], [33, 7, 130]])
def test_an_expert_of_a_stack_has_the_bits_of_its_matrix(
    rng: Any, algo: str, compute: str, experts: int, rows: list[int]
) -> None:
    stack = random_stack(rng, algo, 160, rows, experts)
    expected = one_by_one(stack, compute)
    assert_same(prepared(stack, stack.listed(), compute), expected)
    if algo != "FP8_PB_WO" or all(n % 128 == 0 for n in rows[:-1]):
        assert_same(prepared(stack, stack.fused(), compute), expected)


@settings(max_examples=40)
@given(
    st.sampled_from(STACKS),
    st.integers(1, 12),
    st.integers(1, 9),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_any_shape(kind: Any, thirty_twos: int, experts: int, rows: list[int], seed: int) -> None:
    algo, compute = kind
    columns = 32 * thirty_twos - (0 if "FP4" in algo else seed % 32)
    stack = random_stack(np.random.default_rng(seed), algo, columns, rows, experts)
    assert_same(prepared(stack, stack.listed(), compute), one_by_one(stack, compute))


@each("algo, compute", STACKS)
def test_the_plan_knows_the_tensors_before(rng: Any, algo: str, compute: str) -> None:
    for rows in ([128, 128], [40]):
        stack = random_stack(rng, algo, 128, rows, 3)
        plan = _C.weight_plan(*stack.about(), compute=compute, experts=3)
        given = {spec[0]: spec[1:] for spec in plan.checkpoint_params()}
        assert {name: value.shape for name, value in stack.fused().items()} == {
            name: spec[0] for name, spec in given.items()
        }
        result = {spec[0]: spec[1] for spec in plan.prepared_params()}
        assert {name: value.shape for name, value in plan.prepare(stack.fused()).items()} == result


@each("algo, compute", STACKS)
def test_a_matrix_is_no_stack_of_one(rng: Any, algo: str, compute: str) -> None:
    case = random_stack(rng, algo, 64, [128, 24], 1).case
    plan, method = _C.weight_plan(algo, 64, [128, 24], compute=compute), case.method(compute=compute)
    assert plan.checkpoint_params() == method._plan.checkpoint_params()
    assert plan.prepared_params() == method._plan.prepared_params()
    expected = method.prepare(case.listed())
    assert_same(plan.prepare(case.listed()), expected)


@each("algo, compute", STACKS)
def test_experts_anywhere_in_memory(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [128, 24], 4)
    params = {name: apart(rng, value) for name, value in stack.fused().items()}
    assert not params["weight"].flags.c_contiguous
    assert_same(prepared(stack, params, compute), one_by_one(stack, compute))
    broadcast = {name: np.broadcast_to(value[:1], value.shape) for name, value in stack.fused().items()}
    same = Stack([stack.case] * 4)
    assert_same(prepared(stack, broadcast, compute), one_by_one(same, compute))


@each("algo, compute", STACKS)
def test_rows_of_a_wider_tensor(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [20, 9], 3)
    params = stack.listed()
    for name in ("weight", "weight_scale") if "FP4" in algo else ("weight",):
        for i, part in enumerate(params[name]):
            wide = np.full((3, part.shape[1] * 2, part.shape[2] + 5), 0xFF, np.uint8)
            wide[:, ::2, 3:-2] = part
            params[name][i] = wide[:, ::2, 3:-2]
    assert_same(prepared(stack, params, compute), one_by_one(stack, compute))


@each("algo, compute", STACKS)
def test_reload_in_place(rng: Any, algo: str, compute: str) -> None:
    stack, other = (random_stack(rng, algo, 128, [128, 24], 3) for _ in range(2))
    first = prepared(stack, stack.fused(), compute)
    held = dict(first)
    assert prepared(other, other.fused(), compute, out=first) is first
    assert all(first[name] is held[name] for name in held)
    assert_same(first, one_by_one(other, compute))


@pytest.mark.parametrize("algo, compute", [kind for kind in STACKS if kind[1] == "exact"])
def test_codes_may_stay_in_their_place(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [128, 24], 3)
    expected, params = one_by_one(stack, compute), stack.fused()
    out = {name: np.full_like(value, 7) for name, value in expected.items()} | {"weight": params["weight"]}
    assert_same(prepared(stack, params, compute, out=out), expected)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_one_value_serves_all_experts_or_all_partitions(rng: Any, algo: str) -> None:
    stack = random_stack(rng, algo, 64, [16, 16], 3)
    second = "weight_scale_2" if algo == "NVFP4" else "weight_scale"
    params = stack.fused()
    each = np.float32([0.5, 2, 8])
    for value, spread in (
        (0.25, np.full((3, 2), 0.25, np.float32)),
        (np.float32([0.25]), np.full((3, 2), 0.25, np.float32)),
        (each, np.stack([each, each], 1)),
        (each[:, None], np.stack([each, each], 1)),
        ([0.25, 0.5], np.float32([[0.25, 0.5]] * 3)),
        ([each, 1.5], np.stack([each, np.float32([1.5] * 3)], 1)),
    ):
        for name in (second, "input_scale"):
            expected = prepared(stack, params | {name: spread}, "exact")
            assert_same(prepared(stack, params | {name: value}, "exact"), expected)


def test_factors_of_x_may_be_of_all_experts(rng: Any) -> None:
    stack = random_stack(rng, "NVFP4_AWQ", 64, [16, 16], 3)
    params = stack.fused()
    one = params["pre_quant_scale"][1]
    expected = prepared(stack, params | {"pre_quant_scale": np.stack([one] * 3)}, "exact")
    assert_same(prepared(stack, params | {"pre_quant_scale": one}, "exact"), expected)


@each("algo, compute", STACKS)
def test_a_stack_without_an_optional_tensor(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 64, [16, 16], 2)
    for name in ("input_scale", "pre_quant_scale"):
        params = {key: value for key, value in stack.fused().items() if key != name}
        full = prepared(stack, stack.fused(), compute)
        expected = {key: value for key, value in full.items() if key != name}
        assert_same(prepared(stack, params, compute), expected)


@each("algo, compute", WITH_FACTORS)
def test_scales_of_zero_mean_zeros_of_their_expert(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 256, [128, 24], 4)
    for e in (1, 3):
        with_a_zero_part(stack.experts[e], algo)
    assert_same(prepared(stack, stack.fused(), compute), one_by_one(stack, compute))
    assert_same(prepared(stack, stack.listed(), compute), one_by_one(stack, compute))


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError, BufferError)) as error:
        call(*arguments, **options)
    return str(error.value)


def assert_refused_as_alone(stack: Stack, expert: int, compute: str) -> None:
    """The message of the expert's matrix after its number, and nothing of an output written."""
    case = stack.experts[expert]
    alone = refusal(case.method(compute=compute).prepare, case.listed())
    good = random_stack(np.random.default_rng(1), *stack.about(), len(stack.experts), case.group_size)
    out = prepared(good, good.fused(), compute)
    for value in out.values():
        value.view(np.uint8)[...] = 0x5A
    for place in (None, out):
        assert refusal(prepared, stack, stack.listed(), compute, out=place) == f"experts.{expert}: {alone}"
    assert all((value.view(np.uint8) == 0x5A).all() for value in out.values())


@each("algo, compute", WITH_FACTORS)
def test_a_lost_scale_is_named_with_its_expert(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [128, 40], 4)
    with_a_lost_scale(rng, stack.experts[2])
    assert_refused_as_alone(stack, 2, compute)


@each("algo, compute", STACKS)
def test_a_bad_code_is_named_with_its_expert(rng: Any, algo: str, compute: str) -> None:
    stack = random_stack(rng, algo, 128, [30, 70], 5)
    name = "weight_scale" if "FP4" in algo else "weight"
    for e in (3, 4):  # the first is named
        part = stack.experts[e].parts[rng.integers(2)][name]
        part[rng.integers(part.shape[0]), rng.integers(part.shape[1])] = 0xFF
    assert_refused_as_alone(stack, 3, compute)


@each("bad", [-1.0, float("nan"), float("inf")])
@each("algo, compute", STACKS)
def test_a_bad_scale_is_named_with_its_expert(rng: Any, algo: str, compute: str, bad: float) -> None:
    for name in ("weight_scale_2" if "FP4" in algo else "weight_scale", "input_scale"):
        stack = random_stack(rng, algo, 128, [30, 70], 3)
        part = stack.experts[1].parts[1]
        if name in part:
            scale = np.array(part[name])
            scale.reshape(-1)[-1] = bad
            part[name] = scale
            assert_refused_as_alone(stack, 1, compute)


def test_factors_of_x_that_differ_within_an_expert_are_named(rng: Any) -> None:
    stack = random_stack(rng, "NVFP4_AWQ", 64, [16, 16], 3)
    changed = np.array(stack.experts[2].parts[1]["pre_quant_scale"])
    changed[5] ^= 1
    stack.experts[2].parts[1]["pre_quant_scale"] = changed
    assert_refused_as_alone(stack, 2, "exact")


def test_one_input_scale_is_of_the_partitions_of_an_expert(rng: Any) -> None:
    stack = random_stack(rng, "FP8", 64, [16, 16], 3)
    params = stack.fused()
    params["input_scale"] = np.float32([[0.5, 0.5], [2, 2], [4, 4]])
    call = {"params": params, "one_input_scale": True}
    about = dict(zip(("quant_algo", "in_features", "out_partitions"), stack.about(), strict=True))
    assert_same(ops.prepare_experts(**call, **about), prepared(stack, params, "exact"))
    params["input_scale"][1, 1] = 3
    message = refusal(ops.prepare_experts, **call, **about)
    assert message.startswith("experts.1: input_scale: expected the same for all partitions")
    with pytest.raises(UnsupportedQuantization, match="one_input_scale: FP8_PB_WO has no input_scale"):
        ops.prepare_experts(params, "FP8_PB_WO", 64, [16, 16], one_input_scale=True)


def test_mistakes_are_named(rng: Any) -> None:
    stack = random_stack(rng, "NVFP4", 64, [16, 16], 3)
    params = stack.fused()
    for change, message in {
        "weight: expected experts, rows and columns, got shape ()": {"weight": np.zeros((), np.uint8)},
        'params: "weight" is missing': {"weight": None},
        "weight_scale: expected 3 experts first, got shape [2, 32, 4]": {
            "weight_scale": params["weight_scale"][:2]
        },
        "weight_scale_2: expected 3 experts first, got shape [2, 3]": {
            "weight_scale_2": np.ones((2, 3), np.float32)
        },
        "experts: weight: expected shape [32, 32], got [31, 32]": {"weight": params["weight"][:, :31]},
        "experts: weight: expected shape [32, 32], got [32]": {"weight": params["weight"][:, :, 0]},
        "experts: weight: expected contiguous rows, got stride 2": {
            "weight": np.repeat(params["weight"], 2, 2)[..., ::2]
        },
        "experts: weight_scale: missing, NVFP4 needs it": {"weight_scale": None},
        "experts.0: weight_scale_2: missing, NVFP4 needs it": {"weight_scale_2": None},
        "experts.0: weight_scale_2: expected 2 values, got shape [3]": {
            "weight_scale_2": np.ones((3, 3), np.float32)
        },
        "weight: expected 2 tensors, one a partition, got 3": {"weight": [params["weight"]] * 3},
        "params: 'scales' does not belong to a linear of NVFP4": {"scales": 1.0},
    }.items():
        assert refusal(prepared, stack, params | message, "exact") == change
    out = prepared(stack, params, "exact")
    assert refusal(prepared, stack, params, "exact", out=out | {"fold_scale": 1}) == (
        "out: 'fold_scale' is no prepared parameter of NVFP4 3 x 32x64, compute exact on cpu, "
        "which has weight, weight_scale, output_scale"
    )
    assert refusal(prepared, stack, params, "exact", out=out | {"weight": out["weight"][:2]}).startswith(
        'out["weight"]: expected float4_e2m1fn_x2 of shape [3, 32, 32], got'
    )
    assert refusal(_C.weight_plan, "NVFP4", 64, [16], experts=65536).startswith("experts: ")
    assert refusal(_C.weight_plan, "NVFP4", 64, [16], experts=0).startswith("experts: ")
    assert refusal(ops.prepare_experts, [], "NVFP4", 64, [16]).startswith("params: expected a mapping")


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("shape", [(1, 3, 32), (5, 80, 160), (2, 64, 64)])
def test_packing_of_a_stack_and_back(rng: Any, group_size: int, shape: tuple[int, int, int]) -> None:
    experts, rows, columns = shape
    weight = rng.integers(0, 256, (experts, rows, columns // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (experts, rows, columns // group_size), dtype=np.uint8)
    expected = np.stack([reference.pack_nvfp4(*each) for each in zip(weight, scale, strict=True)])
    packed = np.full(expected.shape, 0xA5, np.uint8)
    assert ops.pack_nvfp4(apart(rng, weight), apart(rng, scale), out=packed) is packed
    np.testing.assert_array_equal(packed, expected)
    back, scales = np.full_like(weight, 0xA5), np.full_like(scale, 0xA5)
    ops.unpack_nvfp4(packed, shape, group_size, out=back, scale_out=scales)
    np.testing.assert_array_equal(back, weight)
    np.testing.assert_array_equal(scales, scale)


def test_packing_of_stacks_that_do_not_belong_together() -> None:
    weight, scale = np.zeros((3, 4, 16), np.uint8), np.zeros((3, 4, 2), np.uint8)
    message = "weight_scale: expected one scale per row and 16 or 32 of 32 columns"
    assert refusal(ops.pack_nvfp4, weight, scale[:2]).startswith(message)
    assert refusal(ops.pack_nvfp4, weight, scale[0]).startswith(message)
    packed = ops.pack_nvfp4(weight, scale)
    assert refusal(ops.unpack_nvfp4, packed, (2, 4, 32)).startswith("packed: expected shape [2, 4, 1, 576]")
    assert refusal(ops.unpack_nvfp4, packed, (0, 4, 32)).startswith(
        "shape: expected 1 to 65535 experts, got 0"
    )
    assert refusal(ops.unpack_nvfp4, packed, (4,)).startswith("shape: expected rows and columns")


def test_a_case_of_one_partition_is_a_stack_of_vectors(rng: Any) -> None:
    stack = Stack([random_case(rng, "FP8", 32, [8]) for _ in range(3)])
    assert stack.fused()["weight_scale"].shape == (3,)
    result = prepared(stack, stack.fused(), "exact")
    assert result["input_scale"].shape == (3,)
    assert result["output_scale"].shape == (3, 8)


def test_arguments_of_another_kind(rng: Any) -> None:
    stack = random_stack(rng, "NVFP4", 64, [16, 16], 2)
    right = {"quant_algo": "NVFP4", "in_features": 64, "out_partitions": [16, 16]}
    for name, values in {
        "quant_algo": (None, 3, b"NVFP4", "NVFP5", "", "NVFP4\0"),
        "in_features": (None, 0, -64, 64.0, "64", True, 2**31, 2**70),
        "out_partitions": (None, 3, "16", [], [16, 0], [-1, 33], [1.5], [None], [16] * 65, [[16], [16]]),
        "group_size": ("16", 1.5, True, 0, -1, 2**70, 17),
        "compute": (3, "int8", ""),
        "out": ([], 3, "weight"),
    }.items():
        for value in values:
            with pytest.raises((TypeError, ValueError)):
                ops.prepare_experts(stack.fused(), **{**right, name: value})
