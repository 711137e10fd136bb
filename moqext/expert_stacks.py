"""Stacks of experts as engines keep them, filled one tensor of one expert at a time.

A slot is what one tensor of a checkpoint fills: of w13 the half of gate or of up of one expert, of w2 an
expert. Which are filled is remembered beside the tensors, so that one that never came is an error instead
of whatever was in memory.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import _C
from moqext.method import ParamSpec
from moqext.naming import PROJECTIONS
from moqext.scalars import as_tensor

_ROLES = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_inv": "weight_scale",
    "scale": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "scale_2": "weight_scale_2",
    "input_scale": "input_scale",
    "pre_quant_scale": "pre_quant_scale",
    "bias": "bias",
}
_NAME = re.compile(
    rf"(?:.*\.)?(?P<projection>{'|'.join(sorted(PROJECTIONS, key=len, reverse=True))})"
    rf"(?:[._](?P<role>{'|'.join(sorted(_ROLES, key=len, reverse=True))}))?"
)
_CARRIERS = {"float32": np.dtype(np.float32)}
MAY_BE_ABSENT = ("input_scale",)
"""Roles of which some experts may have none: the others' largest serves them."""


class ExpertStacks(dict[str, Any]):
    """Stacks by name, as `MoEMethod.checkpoint_params` has them, and which of their slots are filled.

    Attributes:
        filled: for each stack bools [experts, halves], halves being 2 for w13 of gated experts, else 1.
    """

    def __init__(self, tensors: Mapping[str, Any], filled: Mapping[str, NDArray[np.bool_]]) -> None:
        super().__init__(tensors)
        self.filled = dict(filled)


class Slot(NamedTuple):
    """Where a tensor of a checkpoint goes."""

    stack: str
    """The name of the stack, as "w13_weight_scale"."""
    role: str
    halves: tuple[int, ...]
    """Of w13: (0,) for gate, (1,) for up, both for a tensor that has both; (0,) of w2."""


def find_slot(name: str, gated: bool) -> Slot:
    """The slot of a tensor, by what the checkpoint calls it below the expert ("up_proj.weight_scale").

    Raises:
        ValueError: it is no projection of an expert, or one that experts without a gate do not have.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"name: expected a projection of an expert and a role, as 'gate_proj.weight', got {name!r}"
        )
    role, part = _ROLES[match["role"] or "weight"], PROJECTIONS[match["projection"]]
    if part in ("gate", "gate_up") and not gated:
        raise ValueError(f"name: {name!r} is of experts with a gate, these have none (gated=False)")
    if part == "down":
        return Slot(f"w2_{role}", role, (0,))
    halves = {"gate": (0,), "up": (1,) if gated else (0,), "gate_up": (0, 1)}[part]
    return Slot(f"w13_{role}", role, halves)


def empty_stacks(specs: Mapping[str, ParamSpec], gated: bool) -> ExpertStacks:
    """NumPy stacks with no slot filled; codes are raw bytes."""
    tensors = {
        name: np.empty(spec.shape, _CARRIERS.get(spec.dtype, np.uint8)) for name, spec in specs.items()
    }
    return ExpertStacks(tensors, _nothing_filled(specs, gated))


def adopt_stacks(specs: Mapping[str, ParamSpec], gated: bool, tensors: Mapping[str, Any]) -> ExpertStacks:
    """Stacks over tensors that a framework allocated, with no slot filled.

    Raises:
        ValueError: a required stack is missing, one is unknown, or of another shape than the method says.
    """
    unknown = sorted(tensors.keys() - specs.keys())
    if unknown:
        raise ValueError(
            f"tensors: {unknown[0]!r} is no parameter of these experts, which have {', '.join(specs)}"
        )
    for name, spec in specs.items():
        if name not in tensors and spec.required:
            raise ValueError(f"tensors[{name!r}]: missing")
        if name in tensors and (shape := shape_of(tensors[name], f"tensors[{name!r}]")) != spec.shape:
            raise ValueError(f"tensors[{name!r}]: expected shape {list(spec.shape)}, got {list(shape)}")
    return ExpertStacks(tensors, _nothing_filled({name: specs[name] for name in tensors}, gated))


def _nothing_filled(specs: Mapping[str, ParamSpec], gated: bool) -> dict[str, NDArray[np.bool_]]:
    return {name: np.zeros((spec.shape[0], _halves(name, gated)), np.bool_) for name, spec in specs.items()}


def _halves(name: str, gated: bool) -> int:
    """How many tensors of a checkpoint fill one expert of a stack: gate and up share what scales x."""
    return 2 if gated and name.startswith("w13_") and not name.endswith("pre_quant_scale") else 1


def fill_slot(
    stacks: ExpertStacks, name: str, expert: int, tensor: Any, *, gated: bool, interleaved: bool
) -> None:
    """Copies a tensor of a checkpoint to where it belongs; see `MoEMethod.load`."""
    slot = find_slot(name, gated)
    if slot.stack not in stacks:
        raise ValueError(f"name: {name!r} has no place in these experts, which have {', '.join(stacks)}")
    stack, filled = stacks[slot.stack], stacks.filled[slot.stack]
    if isinstance(expert, bool) or not isinstance(expert, (int, np.integer)) or not 0 <= expert < len(filled):
        raise ValueError(f"expert: expected 0 to {len(filled) - 1}, got {expert!r}")
    tensor = as_tensor(tensor)
    with naming(f"{name} of expert {expert}"):
        if filled.shape[1] == 1:
            _fill_whole(
                stack[expert : expert + 1], tensor, again=bool(filled[expert, 0]) and slot.halves == (1,)
            )
        else:
            _fill_halves(stack[expert], tensor, slot, interleaved)
    filled[expert, 0 if filled.shape[1] == 1 else list(slot.halves)] = True


def _fill_whole(target: Any, tensor: Any, again: bool) -> None:
    """One expert of a stack without halves, [1, ...]; `again` where gate has filled it and up has it, too."""
    if again:
        before = np.array(_host(target), copy=True)
        _copy(target, tensor)
        if not np.array_equal(before, _host(target), equal_nan=True):
            raise ValueError("x: gate and up have one input, and so the same pre_quant_scale, but differ")
        return
    _copy(target, tensor)


def _fill_halves(target: Any, tensor: Any, slot: Slot, interleaved: bool) -> None:
    """Gate, up or both of one expert: a scale of each, or rows, one half behind the other or in turn."""
    if len(target.shape) == 1 and target.shape[0] == 2 and slot.role != "bias":  # a scale of each half
        values = _C.numbers(tensor, "x", "cpu", 2).ravel()
        if values.size not in (1, len(slot.halves)):
            raise ValueError(f"x: expected {len(slot.halves)} values, got shape {list(values.shape)}")
        for half, value in zip(slot.halves, np.broadcast_to(values, len(slot.halves)), strict=True):
            target[half] = float(value)
    elif len(slot.halves) == 2:
        _copy(target, tensor)
    else:
        rows = target.shape[0] // 2
        half = slot.halves[0]
        _copy(target[half::2] if interleaved else target[half * rows : (half + 1) * rows], tensor)


def _copy(target: Any, tensor: Any) -> None:
    """The values of a tensor in the shape of the target, extents of 1 aside."""
    shape, wanted = shape_of(tensor, "x"), tuple(target.shape)
    squeezed = [extent for extent in shape if extent != 1]
    if shape != wanted and squeezed == [extent for extent in wanted if extent != 1]:
        tensor = tensor.reshape(wanted)
    _C.copy(tensor, target)


def _host(tensor: Any) -> Any:
    """A tensor of codes or numbers, wherever it lies, as NumPy reads it."""
    if isinstance(tensor, np.ndarray):
        return tensor
    return _C.numbers(tensor, "x", "cpu", prod(tensor.shape))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Failures of the boundary, which call a tensor x, with what the caller calls it."""
    try:
        yield
    except (ValueError, TypeError, BufferError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('x: ')}") from None


def shape_of(tensor: Any, name: str) -> tuple[int, ...]:
    """The shape of a tensor of any framework."""
    with naming(name):
        return tuple(_C.describe_tensor(tensor)["shape"])


def refuse_unfilled(stacks: ExpertStacks, specs: Mapping[str, ParamSpec], gated: bool) -> None:
    """ValueError with every stack that has a slot which was never filled, but for input scales.

    A stack that is optional and has no slot filled is one that the checkpoint does not have.
    """
    lines = []
    for name, filled in stacks.filled.items():
        absent = not filled.any() and not specs[name].required
        if absent or filled.all() or name.endswith(MAY_BE_ABSENT):
            continue
        experts, halves = np.nonzero(~filled)
        which = "" if filled.shape[1] == 1 else f", {'up' if halves[0] else 'gate'}"
        more = f" and {experts.size - 1} more" if experts.size > 1 else ""
        lines.append(f"{name}: expert {experts[0]}{which}{more} was never loaded")
    if lines:
        raise ValueError("params: " + "; ".join(lines))
