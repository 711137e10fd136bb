"""The weights of linears in an unquantized checkpoint, and which of them share a scale.

Experts that are stacked in one tensor [experts, out, in] are written one by one, as ModelOpt does; stacks
[experts, in, out] (Llama 4, gpt-oss) stay stacks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext.errors import CheckpointError
from moqext.ops.quantize_weights import weight_amax
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.matrices import FLOAT_DTYPES, Matrix
from moqext.reader.naming import FUSED_GROUPS, PROJECTIONS, parse_expert_name, parse_tensor_name
from moqext.tools.convert.experts import split_parts, stack_layout

PIECE_BYTES = 2 << 20
"""Bytes of a weight that are read at once: memory of 16 MB is mapped anew each time, at twice the time."""

ROWS = 128
"""Rows of a piece are a multiple of it: of the rows that share a scale in every format."""

SAME_INPUT = (*FUSED_GROUPS, ("q_proj", "kv_a_proj_with_mqa"), ("query", "key", "value"))
"""Linears of one parent that are given the same tensor, and share an amax."""

CONV1D_MODELS = frozenset(("gpt2", "imagegpt", "decision_transformer", "openai-gpt"))
"""Model types whose linears are stored [in, out] under the names of linears."""


@dataclass(frozen=True)
class Weight:
    """The weight of one linear, or of all experts of a stack [experts, in, out].

    Attributes:
        checkpoint: where it is.
        module: its name in the result; of a stack its projection.
        tensor: the tensor that holds it.
        shape: [out, in]; of a stack [experts, in, out].
        expert: its number in a stack that is written one by one, else None.
        part: which of how many parts of the expert's rows it is.
        interleaved: whether these parts alternate.
    """

    checkpoint: CheckpointReader = field(repr=False)
    module: str
    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    part: tuple[int, int] = (0, 1)
    interleaved: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it is of all experts."""
        return len(self.shape) == 3

    @property
    def dtype(self) -> str:
        """The type of its values, as the file spells it."""
        return self.checkpoint.tensors[self.tensor].dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the source."""
        width = 4 if self.dtype == "F32" else 2
        return width * int(np.prod(self.shape, dtype=np.int64))

    def tensor_name(self, role: str) -> str:
        """The name of one of its tensors in the result."""
        if self.is_stack and not self.tensor.endswith(".weight"):
            return self.module if role == "weight" else f"{self.module}_{role}"
        return f"{self.module}.{role}"

    def pieces(self) -> Iterator[NDArray[Any]]:
        """Consecutive rows, or experts, contiguous."""
        return (piece for piece, _ in self.measured())

    def measured(self) -> Iterator[tuple[NDArray[Any], float]]:
        """Consecutive rows, or experts, contiguous, with the largest magnitude of each.

        Raises:
            CheckpointError: a value is infinite or NaN.
        """
        for piece in self.unchecked():
            yield piece, self.refuse_infinite(weight_amax(piece))

    def refuse_infinite(self, amax: float) -> float:
        """The largest magnitude of some of the values as it is, where it is a number.

        Raises:
            CheckpointError: it is infinite or NaN.
        """
        if isfinite(amax):
            return amax
        message = f"{self.module}: a weight is infinite or NaN, and cannot be quantized"
        raise CheckpointError(message, file=self.checkpoint.directory, tensor=self.tensor)

    def unchecked(self) -> Iterator[NDArray[Any]]:
        """Consecutive rows, or experts, contiguous, whatever is in them."""
        if self.expert is not None:
            (values,) = self.checkpoint.rows(self.tensor, self.expert, self.expert + 1)
            yield np.ascontiguousarray(split_parts(values, self.part[1], self.interleaved)[self.part[0]])
            return
        step = 1 if self.is_stack else _rows_at_once(self.nbytes // self.shape[0])
        for begin in range(0, self.shape[0], step):
            yield self.checkpoint.rows(self.tensor, begin, min(begin + step, self.shape[0]))


def _rows_at_once(row_bytes: int) -> int:
    return max(1, PIECE_BYTES // (row_bytes * ROWS)) * ROWS


def find_weights(checkpoint: CheckpointReader) -> tuple[list[Weight], list[str]]:
    """The weights that may be quantized, in the order of the source, and modules of other matrices.

    Raises:
        CheckpointError: the model stores its linears [in, out].
    """
    weights: list[Weight] = []
    others: list[str] = []
    _refuse_conv1d(checkpoint)
    for name, info in checkpoint.tensors.items():
        named = parse_tensor_name(name)
        if named is None or named.role != "weight" or len(info.shape) < 2 or info.dtype not in FLOAT_DTYPES:
            continue
        if 0 in info.shape:
            others.append(named.module)
        elif len(info.shape) == 2:
            weights.append(Weight(checkpoint, named.module, name, tuple(info.shape)))
        elif len(info.shape) == 3 and named.module.rpartition(".")[2] in PROJECTIONS:
            weights += _of_stack(checkpoint, named.module, name, tuple(info.shape))
        else:
            others.append(named.module)
    return weights, others


def _of_stack(
    checkpoint: CheckpointReader, module: str, tensor: str, shape: tuple[int, ...]
) -> Iterator[Weight]:
    transposed, interleaved = stack_layout(checkpoint, Matrix(checkpoint, module, tensor, shape))
    if transposed:
        yield Weight(checkpoint, module, tensor, shape)
        return
    for bias in (f"{module}_bias", f"{module}.bias"):
        if bias in checkpoint.tensors:
            message = "cannot be quantized: biases of experts stacked as [experts, out, in] have no name"
            raise CheckpointError(message, file=checkpoint.directory, tensor=bias)
    container, _, last = module.rpartition(".")
    role = PROJECTIONS[last]
    names = ("gate_proj", "up_proj") if role == "gate_up" else (f"{role}_proj",)
    rows = shape[1] // len(names)
    for expert in range(shape[0]):
        for part, name in enumerate(names):
            own = f"{container}.{expert}.{name}"
            place = (part, len(names))
            yield Weight(checkpoint, own, tensor, (rows, shape[2]), expert, place, interleaved)


def _refuse_conv1d(checkpoint: CheckpointReader) -> None:
    kind = checkpoint.model_config.get("model_type")
    if kind in CONV1D_MODELS:
        message = f"cannot be quantized: models of type {kind} store their linears as [in, out]"
        raise CheckpointError(message, file=checkpoint.directory)


def same_input(weights: Sequence[Weight], algos: Mapping[str, str]) -> Iterator[tuple[Weight, ...]]:
    """The weights in groups that are given the same tensor and have the same algorithm.

    Args:
        weights: those that are quantized.
        algos: module -> algorithm.
    """
    parents: dict[str, dict[str, Weight]] = defaultdict(dict)
    for weight in weights:
        parent, _, last = weight.module.rpartition(".")
        parents[parent][last] = weight
    for children in parents.values():
        left = dict(children)
        for group in SAME_INPUT:
            for algo in {algos[left[name].module] for name in group if name in left}:
                members = [name for name in group if name in left and algos[left[name].module] == algo]
                if len(members) > 1:
                    yield tuple(left.pop(name) for name in members)
        for weight in left.values():
            yield (weight,)


def fused_unlike(weights: Sequence[Weight], algos: Mapping[str, str]) -> list[str]:
    """Parents with linears that engines fuse, as q, k and v, and that do not all have one algorithm."""
    parents: dict[str, dict[str, str | None]] = defaultdict(dict)
    for weight in weights:
        parent, _, last = weight.module.rpartition(".")
        parents[parent][last] = algos.get(weight.module)
    return [
        parent
        for parent, children in parents.items()
        if any(len({children[name] for name in group if name in children}) > 1 for group in FUSED_GROUPS)
    ]


class Amaxes:
    """Largest magnitudes, found when they are first asked for, by any thread.

    Args:
        groups: the weights that share one.
        find: finds that of one weight.
    """

    def __init__(self, groups: Mapping[str, Sequence[Weight]], find: Callable[[Weight], float]) -> None:
        self._groups = groups
        self._find = find
        self._known: dict[str, float] = {}
        self._locks = {module: Lock() for module in groups}

    def __call__(self, weight: Weight) -> float:
        """The largest magnitude of a weight and of those that share it."""
        return max(self._own(member) for member in self._groups[weight.module])

    def _own(self, weight: Weight) -> float:
        with self._locks[weight.module]:
            if weight.module not in self._known:
                self._known[weight.module] = self._find(weight)
            return self._known[weight.module]


def is_expert(weight: Weight) -> bool:
    """Whether it is one expert's."""
    return parse_expert_name(weight.module) is not None
