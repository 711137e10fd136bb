"""Stacks of experts that `MoEMethod` takes, filled one tensor of one expert at a time.

A slot is what one tensor of a checkpoint fills: of w13 the half of gate or of up of one expert, of w2 an
expert. Which are filled is remembered by the memory of the tensors, so that one that never came is an error
instead of whatever was there, whichever mapping the tensors are handed on in.
"""

import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import _C
from moqext.layers.method import ParamSpec
from moqext.ops.scalars import as_tensor
from moqext.reader.naming import PROJECTIONS

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
_FLOATS = ("float32", "bfloat16", "float16")
MAY_BE_ABSENT = ("input_scale",)
"""Roles of which some experts may have none: the others' largest serves them."""


_MEMORY: dict[int, tuple[weakref.ref[Any], NDArray[np.bool_]]] = {}
"""Which slots are filled of the stack that begins at an address, as long as the stack lives."""


class ExpertStacks(dict[str, Any]):
    """Stacks by name, as `MoEMethod.checkpoint_params` has them, and which of their slots are filled.

    Copies into a plain mapping know the same, since it goes with the memory of the tensors.

    Attributes:
        filled: for each stack bools [experts, halves], halves being 2 for w13 of gated experts, else 1.
    """

    def __init__(self, tensors: Mapping[str, Any], filled: Mapping[str, NDArray[np.bool_]]) -> None:
        super().__init__(tensors)
        self.filled = {name: slots for name, slots in filled.items() if name in tensors}
        for name, slots in self.filled.items():
            _remember(self[name], slots)

    def copy(self) -> "ExpertStacks":
        """Stacks of the same tensors, and of the same slots."""
        return ExpertStacks(self, self.filled)

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpertStacks, (dict(self), self.filled)


def _address(tensor: Any) -> int:
    """Address of a tensor's first element; 0 for other objects."""
    with suppress(TypeError, ValueError, BufferError):
        return int(_C.describe_tensor(tensor)["pointer"])
    return 0


def _remember(tensor: Any, filled: NDArray[np.bool_]) -> None:
    address, memory = _address(tensor), _MEMORY

    def forget(gone: "weakref.ref[Any]") -> None:
        if address in memory and memory[address][0] is gone:
            del memory[address]

    with suppress(TypeError):  # a type without weak references
        memory[address] = weakref.ref(tensor, forget), filled


def filled_slots(params: Mapping[str, Any]) -> dict[str, NDArray[np.bool_]]:
    """Which slots are filled of the stacks among some tensors that `MoEMethod.load` is to fill."""
    if isinstance(params, ExpertStacks):
        return params.filled
    known = {}
    for name, tensor in params.items() if _MEMORY else ():
        address = _address(tensor)
        if address and address in _MEMORY:
            known[name] = _MEMORY[address][1][: shape_of(tensor, name)[0]]
    return known


class Slot(NamedTuple):
    """Destination of a checkpoint's tensor."""

    stack: str
    """The name of the stack, as "w13_weight_scale"."""
    role: str
    halves: tuple[int, ...]
    """Halves of w13: (0,) for gate, (1,) for up, both for a tensor that has both; (0,) for w2."""


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
    """NumPy stacks with no slot filled; codes are raw bytes.

    Scales are NaN, which `prepare` refuses of an expert that never came, in copies of the memory as well.
    """
    tensors = {
        name: np.full(spec.shape, np.nan, np.float32)
        if spec.dtype == "float32"
        else np.empty(spec.shape, np.uint8)
        for name, spec in specs.items()
    }
    return ExpertStacks(tensors, _nothing_filled(specs, gated))


def adopt_stacks(specs: Mapping[str, ParamSpec], gated: bool, tensors: Mapping[str, Any]) -> ExpertStacks:
    """Stacks over tensors that a framework allocated, with no slot filled; see `MoEMethod.adopt`."""
    unknown = sorted(tensors.keys() - specs.keys())
    if unknown:
        raise ValueError(
            f"tensors: {unknown[0]!r} is no parameter of these experts, which have {', '.join(specs)}"
        )
    for name, spec in specs.items():
        if name not in tensors and spec.required:
            raise ValueError(f"tensors[{name!r}]: missing")
        if name in tensors:
            _check_target(tensors[name], spec, f"tensors[{name!r}]")
    for one, other in combinations(tensors, 2):
        _refuse_shared(tensors[other], f"tensors[{other!r}]", tensors[one], f"tensors[{one!r}]")
    return ExpertStacks(tensors, _nothing_filled({name: specs[name] for name in tensors}, gated))


def _check_target(tensor: Any, spec: ParamSpec, name: str) -> None:
    """Refuses what `load` cannot write a stack to: another form, or slots that share memory."""
    with naming(name):
        found = _C.describe_tensor(np.empty(0, np.uint8), out=tensor)
    if found["shape"] != spec.shape:
        raise ValueError(f"{name}: expected shape {list(spec.shape)}, got {list(found['shape'])}")
    dtypes = _FLOATS if spec.dtype == "float32" else (spec.dtype, "uint8")
    if found["dtype"] not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(dtypes)}, got {found['dtype']}")


def _refuse_shared(out: Any, name: str, other: Any, other_name: str) -> None:
    """BufferError where one tensor that is written shares memory with another one."""
    try:
        _C.describe_tensor(other, out=out)
    except BufferError:
        raise BufferError(f"{name}: shares memory with {other_name}, which is written too") from None


def _nothing_filled(specs: Mapping[str, ParamSpec], gated: bool) -> dict[str, NDArray[np.bool_]]:
    return {name: np.zeros((spec.shape[0], _halves(name, gated)), np.bool_) for name, spec in specs.items()}


def _halves(name: str, gated: bool) -> int:
    """How many tensors of a checkpoint fill one expert of a stack."""
    return 2 if gated and name.startswith("w13_") else 1


def fill_slot(
    stacks: ExpertStacks,
    specs: Mapping[str, ParamSpec],
    name: str,
    expert: int,
    tensor: Any,
    *,
    gated: bool,
    interleaved: bool,
) -> None:
    """Copies a tensor of a checkpoint to where it belongs; see `MoEMethod.load`."""
    slot = find_slot(name, gated)
    if slot.stack not in stacks:
        raise ValueError(f"name: {name!r} has no place in these experts, which have {', '.join(stacks)}")
    stack, filled = stacks[slot.stack], stacks.filled[slot.stack]
    if isinstance(expert, bool) or not isinstance(expert, (int, np.integer)) or not 0 <= expert < len(filled):
        raise ValueError(f"expert: expected 0 to {len(filled) - 1}, got {expert!r}")
    spec = specs[slot.stack]
    with naming(f"{name} of expert {expert}"):
        tensor = _read(as_tensor(tensor), spec)
        if slot.role == "pre_quant_scale":
            _fill_factors(stack[expert : expert + 1], tensor, slot, spec, filled[expert])
        elif filled.shape[1] == 1:
            _copy(stack[expert : expert + 1], tensor, spec)
        else:
            _fill_halves(stack[expert], tensor, slot, spec, interleaved)
    filled[expert, list(slot.halves)] = True


def _read(tensor: Any, spec: ParamSpec) -> Any:
    """A tensor of a checkpoint as numbers, where it has scales of blocks as powers of two."""
    has_blocks = spec.role == "scale" and spec.dtype == "float32" and len(spec.shape) == 3
    if has_blocks and _C.describe_tensor(tensor)["dtype"] in ("float8_e8m0fnu", "uint8"):
        return _C.decode(tensor, "e8m0")
    return tensor


def _fill_factors(target: Any, tensor: Any, slot: Slot, spec: ParamSpec, filled: NDArray[np.bool_]) -> None:
    """The factors of an expert's input, [1, ...], which gate and up have in common, whichever comes first."""
    others = [half for half in range(len(filled)) if filled[half] and half not in slot.halves]
    if not others:
        _copy(target, tensor, spec)
        return
    given = np.empty(tuple(target.shape), np.float32)
    _copy(given, tensor, spec)
    held = _C.numbers(target, "x", "cpu", given.size)
    differ = np.flatnonzero((held != given) & ~(np.isnan(held) & np.isnan(given)))
    if differ.size:
        here, there = ("gate", "up")[1 - others[0]], ("gate", "up")[others[0]]
        at = differ[0]
        raise ValueError(
            f"x: gate and up have one input, and so the same pre_quant_scale, but differ: {here} has "
            f"{given.flat[at]:g} and {there}, which was loaded before, {held.flat[at]:g} at index {at}"
        )


def _fill_halves(target: Any, tensor: Any, slot: Slot, spec: ParamSpec, interleaved: bool) -> None:
    """Gate, up or both of one expert: a scale of each, or rows, one half behind the other or in turn."""
    if len(target.shape) == 1 and target.shape[0] == 2 and slot.role != "bias":  # a scale of each half
        values = _C.numbers(tensor, "x", "cpu", 2).ravel()
        if values.size not in (1, len(slot.halves)):
            raise ValueError(f"x: expected {len(slot.halves)} values, got shape {list(values.shape)}")
        for half, value in zip(slot.halves, np.broadcast_to(values, len(slot.halves)), strict=True):
            target[half] = float(value)
    elif len(slot.halves) == 2:
        _copy(target, tensor, spec)
    else:
        rows = target.shape[0] // 2
        half = slot.halves[0]
        _copy(target[half::2] if interleaved else target[half * rows : (half + 1) * rows], tensor, spec)


def _copy(target: Any, tensor: Any, spec: ParamSpec) -> None:
    """The values of a tensor in the shape of the target, extents of 1 aside."""
    shape, wanted = shape_of(tensor, "x"), tuple(target.shape)
    squeezed = [extent for extent in shape if extent != 1]
    if shape != wanted and squeezed == [extent for extent in wanted if extent != 1]:
        tensor = tensor.reshape(wanted)
    _C.copy(tensor, target, spec.dtype if spec.dtype != "float32" else _C.describe_tensor(target)["dtype"])


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Failures of the boundary, which call a tensor x, with what the caller calls it."""
    try:
        yield
    except (ValueError, TypeError, BufferError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('x: ').removeprefix('out: ')}") from None


def shape_of(tensor: Any, name: str) -> tuple[int, ...]:
    """The shape of a tensor of any framework."""
    with naming(name):
        return tuple(_C.describe_tensor(tensor)["shape"])


def refuse_unfilled(filled: Mapping[str, NDArray[np.bool_]], specs: Mapping[str, ParamSpec]) -> None:
    """ValueError with every stack that has a slot which was never filled, but for input scales.

    A stack that is optional and has no slot filled is one that the checkpoint does not have.
    """
    lines = []
    for name, slots in filled.items():
        absent = not slots.any() and not specs[name].required
        if absent or slots.all() or name.endswith(MAY_BE_ABSENT):
            continue
        experts, halves = np.nonzero(~slots)
        which = "" if slots.shape[1] == 1 else f", {'up' if halves[0] else 'gate'}"
        more = f" and {experts.size - 1} more" if experts.size > 1 else ""
        lines.append(f"{name}: expert {experts[0]}{which}{more} was never loaded")
    if lines:
        raise ValueError("params: " + "; ".join(lines))
