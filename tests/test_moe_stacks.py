"""Stacks of experts that are filled tensor by tensor: in any order, in memory of their own, in every copy."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod
from moqext.layers import stacks as expert_stacks

from .moe_cases import random_stacks

METHOD = MoEMethod("FP8", 3, 64, 32, top_k=2)


def fill(method: MoEMethod, params: Any, stacks: dict[str, np.ndarray], experts: int) -> None:
    """The first experts of gated FP8 stacks."""
    for name, stack in stacks.items():
        weight, _, role = name.partition("_")
        for expert in range(experts):
            projection = "down_proj" if weight == "w2" else "gate_up_proj"
            method.load(params, f"{projection}.{role}", expert, stack[expert])


# Gate and up have one input


@pytest.mark.parametrize("first, second", [("gate", "up"), ("up", "gate")])
def test_unequal_factors_of_gate_and_up_are_refused_in_both_orders(rng: Any, first: str, second: str) -> None:
    method = MoEMethod("NVFP4_AWQ", 2, 64, 32, top_k=1)
    params = method.new_params()
    factors = np.linspace(1, 2, 64, dtype=np.float32)
    method.load(params, f"{first}_proj.pre_quant_scale", 1, factors)
    message = (
        f"^{second}_proj.pre_quant_scale of expert 1: gate and up have one input, and so the same "
        f"pre_quant_scale, but differ: {second} has 2 and {first}, which was loaded before, 1 at index 0$"
    )
    with pytest.raises(ValueError, match=message):
        method.load(params, f"{second}_proj.pre_quant_scale", 1, factors + 1)
    np.testing.assert_array_equal(params["w13_pre_quant_scale"][1], factors)
    method.load(params, f"{second}_proj.pre_quant_scale", 1, factors)


def test_factors_of_one_half_alone_are_not_those_of_both(rng: Any) -> None:
    method = MoEMethod("NVFP4_AWQ", 2, 64, 32, top_k=1)
    stacks = random_stacks(rng, "NVFP4_AWQ", 2, 64, 32)
    params = method.new_params()
    for name, stack in stacks.items():
        weight, _, role = name.partition("_")
        for expert, value in enumerate(stack):
            part = "down" if weight == "w2" else "up" if role == "pre_quant_scale" else "gate_up"
            method.load(params, f"{part}_proj.{role}", expert, value)
    with pytest.raises(ValueError, match="w13_pre_quant_scale: expert 0, gate and 1 more was never loaded"):
        method.prepare(params)


# Memory


def tensors_of(method: MoEMethod) -> dict[str, np.ndarray]:
    return {
        name: np.zeros(spec.shape, np.float32 if spec.dtype == "float32" else np.uint8)
        for name, spec in method.checkpoint_params.items()
    }


def test_experts_that_share_memory_are_not_adopted() -> None:
    own = tensors_of(METHOD)
    expanded = np.lib.stride_tricks.as_strided(own["w2_weight"], (3, 64, 32), (0, 32, 1))
    rows = np.lib.stride_tricks.as_strided(own["w2_weight"], (3, 64, 32), (64, 1, 1))
    for shared in (expanded, rows):
        with pytest.raises(BufferError, match=r"tensors\['w2_weight'\]: .* its elements share memory"):
            METHOD.adopt(own | {"w2_weight": shared})
    with pytest.raises(
        BufferError, match=r"tensors\['w2_weight'\]: shares memory with tensors\['w13_weight'\], which is"
    ):
        METHOD.adopt(own | {"w2_weight": own["w13_weight"].reshape(-1)[: 3 * 64 * 32].reshape(3, 64, 32)})


def test_stacks_of_another_dtype_or_without_writing_are_not_adopted() -> None:
    own = tensors_of(METHOD)
    with pytest.raises(TypeError, match=r"tensors\['w2_weight'\]: expected float8_e4m3fn or uint8, got int8"):
        METHOD.adopt(own | {"w2_weight": own["w2_weight"].view(np.int8)})
    with pytest.raises(TypeError, match=r"tensors\['w2_weight_scale'\]: expected float32 .* got float64"):
        METHOD.adopt(own | {"w2_weight_scale": np.zeros(3)})
    own["w2_weight"].flags.writeable = False
    with pytest.raises(BufferError, match=r"tensors\['w2_weight'\]: .* read-only"):
        METHOD.adopt(own)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["w13_bias", "w13_input_scale", "w2_input_scale"])
def test_a_reload_does_not_write_what_it_reads(rng: Any, name: str, interleaved: bool) -> None:
    method = MoEMethod("FP8", 3, 64, 32, top_k=2, interleaved=interleaved)
    stacks = random_stacks(rng, "FP8", 3, 64, 32, interleaved=interleaved, bias="float32")
    out = {role: np.asarray(tensor).copy() for role, tensor in method.prepare(stacks).items()}
    before = {role: stack.copy() for role, stack in stacks.items()}
    with pytest.raises(BufferError, match=rf"^out\[.{name}.\]: shares memory with {name}, which is read"):
        method.prepare(stacks, out | {name: stacks[name]})
    for role, stack in stacks.items():
        np.testing.assert_array_equal(stack, before[role])
    method.prepare(stacks, out)


# Copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda stacks: stacks.copy(),
    "unpacked": lambda stacks: {**stacks},
    "dict": dict,
    "merged": lambda stacks: stacks | {},
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda stacks: pickle.loads(pickle.dumps(stacks)),
    "views": lambda stacks: {name: stack[...] for name, stack in stacks.items()},
    "other memory": lambda stacks: {name: stack.copy() for name, stack in stacks.items()},
}


@pytest.mark.filterwarnings("ignore:w[0-9]+_input_scale")  # known to be absent, not that it never came
@pytest.mark.parametrize("way", COPIES)
def test_no_copy_of_stacks_forgets_what_was_never_loaded(rng: Any, way: str) -> None:
    stacks = random_stacks(rng, "FP8", 3, 64, 32)
    params = METHOD.new_params()
    params["w2_weight"][...] = 0
    params["w13_weight"][...] = 0
    fill(METHOD, params, stacks, 2)
    del params["w13_bias"], params["w2_bias"]
    with pytest.raises(ValueError, match=r"expert 2.* was never loaded|experts\.2: expected a non-negative"):
        METHOD.prepare(COPIES[way](params))


@pytest.mark.parametrize("way", [way for way in COPIES if way != "other memory"])
def test_copies_of_full_stacks_are_prepared_as_they_are(rng: Any, way: str) -> None:
    stacks = random_stacks(rng, "FP8", 3, 64, 32)
    params = METHOD.new_params()
    fill(METHOD, params, stacks, 3)
    copied, whole = METHOD.prepare(COPIES[way](params)), METHOD.prepare(stacks)
    assert copied.keys() == whole.keys()
    for name in whole:
        assert np.asarray(copied[name]).tobytes() == np.asarray(whole[name]).tobytes()


def test_adopted_tensors_are_not_full_for_being_the_callers(rng: Any) -> None:
    own = tensors_of(METHOD)
    fill(METHOD, METHOD.adopt(own), random_stacks(rng, "FP8", 3, 64, 32), 2)
    with pytest.raises(ValueError, match="params: w13_weight: expert 2, gate and 1 more was never loaded"):
        METHOD.prepare(own)


def test_stacks_that_are_gone_are_forgotten() -> None:
    gc.collect()
    before = len(expert_stacks._MEMORY)
    params = METHOD.new_params()
    assert len(expert_stacks._MEMORY) == before + len(params)
    del params
    gc.collect()
    assert len(expert_stacks._MEMORY) == before
