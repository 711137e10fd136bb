"""Messages of `prepare` about one tensor, whole: of a matrix, a stack of experts and a layer of experts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moqext import _C, LinearMethod, MoEMethod

from .moe_cases import random_stacks

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 32

Change = Callable[[np.ndarray], Any]


def with_value(value: float) -> Change:
    """Puts `value` at the beginning of expert 1."""

    def change(stack: np.ndarray) -> np.ndarray:
        changed = stack.copy()
        changed.reshape(EXPERTS, -1)[1, 0] = value
        return changed

    return change


def spread(stack: np.ndarray) -> np.ndarray:
    return np.repeat(stack, 2, -1)[..., ::2]


MISSING = "missing, {algo} needs it"
LOST = "zero over a code that is neither zero nor NaN, at row 0, column 0 of the weight: the scale is lost"
NOT_A_SCALE = "expected a non-negative finite value, got {} at index 0"

CASES: list[tuple[str, str, Change, str, str]] = [
    ("FP8", "weight", lambda w: w[..., :-1], "experts", "expected shape [64, {k}], got [64, {less}]"),
    ("FP8", "weight", lambda w: w[..., None], "experts", "expected shape [64, {k}], got [64, {k}, 1]"),
    ("FP8", "weight", spread, "experts", "expected contiguous rows, got stride 2"),
    ("FP8", "weight", with_value(0x7F), "experts.1", "a NaN code at row 0, column 0"),
    ("FP8", "weight_scale", lambda s: None, "experts.0", MISSING),
    ("FP8", "weight_scale", with_value(np.nan), "experts.1", NOT_A_SCALE.format("nan")),
    ("FP8", "weight_scale", with_value(-1), "experts.1", NOT_A_SCALE.format("-1")),
    ("FP8", "weight_scale", with_value(0), "experts.1", LOST),
    (
        "FP8",
        "weight_scale",
        lambda s: s.astype(np.int32),
        "experts.0",
        "expected float32, bfloat16, float16 or float64, got int32",
    ),
    (
        "FP8",
        "input_scale",
        with_value(0),
        "experts.1",
        "expected a positive finite value, got 0 at index 0",
    ),
    (
        "FP8",
        "input_scale",
        with_value(1e-44),
        "experts.1",
        "expected a value above 2.93874e-39, whose reciprocal is a float32, got 9.80909e-45 at index 0",
    ),
    (
        "FP8_PB_WO",
        "weight_scale",
        lambda s: s[..., :-1],
        "experts",
        "expected shape [{blocks}, 1] or [{blocks}, 1, 1, 1] for 128x128 blocks, got [{blocks}, 0]",
    ),
    ("FP8_PB_WO", "weight_scale", lambda s: None, "experts", MISSING),
    ("FP8_PB_WO", "weight_scale", with_value(np.inf), "experts.1", NOT_A_SCALE.format("inf")),
    ("FP8_PB_WO", "weight_scale", with_value(0), "experts.1", LOST),
    ("NVFP4", "weight_scale", lambda s: None, "experts", MISSING),
    (
        "NVFP4",
        "weight_scale",
        with_value(0x80 | 0x11),
        "experts.1",
        "a block scale that is NaN or negative at row 0, column 0",
    ),
    ("NVFP4", "weight_scale_2", lambda s: None, "experts.0", MISSING),
    ("NVFP4", "weight_scale_2", with_value(np.inf), "experts.1", NOT_A_SCALE.format("inf")),
    (
        "NVFP4_AWQ",
        "pre_quant_scale",
        with_value(0x7F80),
        "experts.1",
        "expected finite values, got inf at index 0",
    ),
    (
        "NVFP4_AWQ",
        "pre_quant_scale",
        lambda s: s[..., :-1],
        "experts.0",
        "expected {k} values, got shape [{less}]",
    ),
]


def stacks_of(algo: str) -> dict[str, np.ndarray]:
    stacks = random_stacks(np.random.default_rng(5), algo, EXPERTS, HIDDEN, INTERMEDIATE)
    for name in stacks:
        if name.endswith("_input_scale"):
            stacks[name][...] = 0.5  # gate and up of an expert have the same
        if name.endswith("_weight"):
            stacks[name][:, 0, 0] = 0x21  # neither zero nor NaN
    return stacks


def refusal(prepare: Any, params: dict[str, Any]) -> str:
    with pytest.raises((ValueError, TypeError, BufferError)) as refused:
        prepare(params)
    return str(refused.value)


@pytest.mark.parametrize("place", ["w13", "w2"])
@pytest.mark.parametrize("algo, name, change, whose, said", CASES)
def test_of_a_layer_the_tensor_comes_first(
    algo: str, name: str, change: Change, whose: str, said: str, place: str
) -> None:
    k = HIDDEN if place == "w13" else INTERMEDIATE
    said = said.format(algo=algo, k=k, less=k - 1, blocks=2 if place == "w13" else 1)
    stacks = stacks_of(algo)
    stacks[f"{place}_{name}"] = change(stacks[f"{place}_{name}"])
    plan = MoEMethod(algo, EXPERTS, HIDDEN, INTERMEDIATE, top_k=2)._plan
    assert refusal(plan.prepare, stacks) == f"{place}_{name}: {whose}: {said}"


@pytest.mark.parametrize("algo, name, change, whose, said", CASES)
def test_of_a_stack_the_expert_comes_first_and_a_matrix_has_none(
    algo: str, name: str, change: Change, whose: str, said: str
) -> None:
    said = said.format(algo=algo, k=HIDDEN, less=HIDDEN - 1, blocks=2)
    params = {key[4:]: value for key, value in stacks_of(algo).items() if key.startswith("w13_")}
    params[name] = change(params[name])
    stack = _C.weight_plan(algo, HIDDEN, [32, 32], experts=EXPERTS)
    assert refusal(stack.prepare, params) == f"{whose}: {name}: {said}"
    alone = LinearMethod(algo, HIDDEN, [32, 32])
    of_expert = {key: None if value is None else value[1] for key, value in params.items()}
    assert refusal(alone._plan.prepare, of_expert) == f"{name}: {said}"


@pytest.mark.parametrize("place", ["w13", "w2"])
def test_the_first_dimension_of_a_stack_is_of_experts(place: str) -> None:
    stacks = stacks_of("FP8")
    plan = MoEMethod("FP8", EXPERTS, HIDDEN, INTERMEDIATE, top_k=2)._plan
    for role in ("weight", "weight_scale", "input_scale"):
        name, shape = f"{place}_{role}", list(stacks[f"{place}_{role}"].shape)
        expected = f"{name}: expected 3 experts first, got shape {[2, *shape[1:]]}"
        assert refusal(plan.prepare, stacks | {name: stacks[name][:2]}) == expected


@pytest.mark.parametrize("place", ["w13", "w2"])
def test_a_bias_has_the_name_of_its_place(place: str) -> None:
    plan = MoEMethod("FP8", EXPERTS, HIDDEN, INTERMEDIATE, top_k=2)._plan
    for bias, said in [
        (np.zeros((EXPERTS, 5), np.float32), "expected shape [3, 64], got [3, 5]"),
        (np.zeros((EXPERTS, 64), np.int32), "expected float32, got int32"),
    ]:
        assert refusal(plan.prepare, stacks_of("FP8") | {f"{place}_bias": bias}) == f"{place}_bias: {said}"


@pytest.mark.parametrize(
    "size, said",
    [
        (
            "hidden_size",
            "hidden_size (columns of w13): expected a multiple of the group size 16 for NVFP4, got 40",
        ),
        (
            "intermediate_size",
            "intermediate_size (columns of w2): expected a multiple of the group size 16 for NVFP4, got 40",
        ),
        ("group_size", "group_size: expected 16 or 32 for NVFP4, got 40"),
    ],
)
def test_a_size_that_does_not_fit_says_which_weight(size: str, said: str) -> None:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "group_size": 16} | {size: 40}
    with pytest.raises(ValueError) as refused:
        MoEMethod("NVFP4", EXPERTS, top_k=2, **sizes)
    assert str(refused.value) == said


def test_numbers_of_the_host_keep_the_name_of_their_argument() -> None:
    with pytest.raises(TypeError) as refused:
        _C.numbers(np.zeros(3, np.int32), "scale of x", "cpu", 3)
    assert str(refused.value) == "scale of x: expected float32, got int32"
