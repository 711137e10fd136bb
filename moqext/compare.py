"""How far the weights of two checkpoints are apart: a quantized one and its original, or two exports.

Layers are matched by what they are, not by spelling: prefixes aside, experts by container, number and role
(w1, gate_proj and the first half of gate_up_proj are one), stacked ones against single ones, and fused
linears (qkv_proj) against their parts. Compared is what a layer multiplies by (`moqext.matrices`). Memory
holds a piece of both, or one expert.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log10, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from moqext.checkpoint import Checkpoint
from moqext.convert.experts import TRANSPOSED_MODELS
from moqext.convert.plan import sort_plain
from moqext.layouts import Nibbles, ScaleLayout, check_options
from moqext.matrices import FLOAT_DTYPES, PIECE_BYTES, Float32, Matrix, quantized_matrices
from moqext.naming import (
    FUSED_NAMES,
    INTERLEAVED_ARCHITECTURES,
    PROJECTIONS,
    parse_expert_name,
    without_prefix,
)
from moqext.records import Projection
from moqext.tensor_files import TensorFiles

ROWS = 128
"""Rows of a piece are a multiple of it: of the rows that share a scale or a byte in every format."""


class SingleFile(Checkpoint):
    """One safetensors file, whatever lies beside it; there is no configuration."""

    def __init__(
        self, path: Path, *, scale_layout: ScaleLayout | None = None, nibbles: Nibbles | None = None
    ) -> None:
        check_options(scale_layout, nibbles)
        self.scale_layout, self.nibbles = scale_layout, nibbles
        self.name = str(path)
        self.headers_only = False
        self._stand_in = None
        self.directory = path
        self.files = TensorFiles(path.parent, single=path)
        self.config = None
        self._findings = {}

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """Nothing: config.json beside the file may be another model's."""
        return {}


def open_side(path: str | os.PathLike[str], **options: Any) -> Checkpoint:
    """The checkpoint in a directory, or the tensors of a safetensors file.

    Args:
        path: of either.
        **options: `scale_layout` and `nibbles` of `Checkpoint`.

    Raises:
        CheckpointError: it is neither, or cannot be read.
    """
    file = Path(path)
    if file.suffix == ".safetensors" and file.is_file():
        return SingleFile(file, **options)
    return Checkpoint(path, **options)


@dataclass(frozen=True, slots=True)
class Difference:
    """One layer of both sides.

    Attributes:
        layer: its name in the first.
        other: its name in the second.
        formats: algorithm, or type where it is not quantized, in the first and the second.
        shape: (out features, in features), with the number of stacked experts before it.
        relative_error: Frobenius norm of the difference over that of the second; inf where only that is 0.
        sqnr_db: -20 log10 of it, inf where both are equal.
        max_error: the largest difference of an element.
    """

    layer: str
    other: str
    formats: tuple[str, str]
    shape: tuple[int, ...]
    relative_error: float
    sqnr_db: float
    max_error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two checkpoints have in common and what not.

    Attributes:
        layers: what is quantized on a side, and plain tensors that are not equal, the worst first.
        equal: number of plain tensors that are equal.
        only_first, only_second: names of what has no counterpart.
        misshapen: names of the first, with both shapes, where a counterpart has another shape.
    """

    layers: tuple[Difference, ...]
    equal: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class _Unit:
    """Something that can be compared: a matrix, an expert of a stack, or rows of a fused linear."""

    matrix: Matrix
    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    turned: bool = False
    part: tuple[int | None, int | None, int | None] = (None, None, None)
    """First, last and step of the rows that it has of the whole, or of the expert."""

    def read(self, begin: int, end: int) -> Float32:
        """Rows [begin, end); all of them where it is a part of something."""
        if self.whole:
            values: Float32 = self.matrix.rows(begin, end)
            return values
        if self.expert is None:
            return self._all()[slice(*self.part)]
        values = self.matrix.rows(self.expert, self.expert + 1)[0]
        return (values.T if self.turned else values)[slice(*self.part)]

    def _all(self) -> Float32:
        return np.concatenate(list(self.matrix.pieces()))

    @property
    def whole(self) -> bool:
        """Whether it is a matrix that is read as it is stored."""
        return self.expert is None and self.part == (None, None, None)


_Units = dict[tuple[str, ...], _Unit]


def compare(
    first: Checkpoint, second: Checkpoint, progress: Callable[[int, int, str], None] | None = None
) -> Comparison:
    """The differences of `first` from `second`, which errors are relative to.

    Args:
        first: the quantized checkpoint, or one of two.
        second: the original.
        progress: called with weights done, weights in all, and the name of the layer.

    Raises:
        CheckpointError: a weight of either cannot be read, or is in no known format.
    """
    ours, theirs = _units(first), _units(second)
    _expand(ours, theirs)
    _expand(theirs, ours)
    _divide(ours, theirs)
    _divide(theirs, ours)
    common = [key for key in ours if key in theirs]
    total = sum(prod(ours[key].shape) for key in common)
    rows, misshapen, equal, done = [], [], 0, 0
    for key in common:
        one, other = ours[key], theirs[key]
        done += prod(one.shape)
        if one.shape != other.shape:
            misshapen.append((one.name, one.shape, other.shape))
            continue
        row = _difference(one, other)
        if row.relative_error == 0 and one.matrix.record is None and other.matrix.record is None:
            equal += 1
        else:
            rows.append(row)
        if progress is not None:
            progress(done, total, one.name)
    rows.sort(key=lambda row: -row.relative_error if row.relative_error == row.relative_error else -inf)
    return Comparison(
        tuple(rows),
        equal,
        tuple(unit.name for key, unit in ours.items() if key not in theirs),
        tuple(unit.name for key, unit in theirs.items() if key not in ours),
        tuple(misshapen),
    )


def _units(checkpoint: Checkpoint) -> _Units:
    """Every weight and plain tensor of numbers by what it is."""
    plain = [
        Matrix(checkpoint, info.name.removesuffix(".weight"), info.name, info.shape)
        for info in sort_plain(checkpoint)[0]
        if info.dtype in FLOAT_DTYPES and info.shape
    ]
    matrices = [*quantized_matrices(checkpoint), *plain]
    return {_key(matrix): _Unit(matrix, matrix.name, matrix.shape) for matrix in matrices}


def _key(matrix: Matrix) -> tuple[str, ...]:
    """What a matrix is: ("layers.0", "3", "gate") of an expert, ("layers.0", "", "gate_up") of a stack."""
    expert = parse_expert_name(matrix.name)
    if expert is not None and expert.projection in PROJECTIONS and len(matrix.shape) == 2:
        return _place(expert.container), str(expert.expert), PROJECTIONS[expert.projection]
    container, _, last = matrix.name.rpartition(".")
    if len(matrix.shape) == 3 and last in PROJECTIONS:
        return _place(container), "", PROJECTIONS[last]
    return (without_prefix(matrix.name),)


def _place(container: str) -> str:
    """The layer that experts belong to: `layers.0` of `model.layers.0.block_sparse_moe.experts`."""
    return without_prefix(container.removesuffix(".experts").rpartition(".")[0])


def _expand(units: _Units, others: _Units) -> None:
    """Takes stacks apart into experts where the other side has no such stack of that shape."""
    for key, unit in list(units.items()):
        if len(key) != 3 or key[1]:
            continue
        counterpart = others.get(key)
        if counterpart is not None and counterpart.shape == unit.shape:
            continue
        parts = ("gate", "up") if key[2] == "gate_up" else (key[2],)
        if counterpart is None and not _has_parts(others, key[0], parts):
            continue
        del units[key]
        turned, interleaved = _layout(unit.matrix, len(parts), others.get((key[0], "0", parts[0])))
        rows, columns = unit.shape[1:][::-1] if turned else unit.shape[1:]
        width = rows // len(parts)
        for expert in range(unit.shape[0]):
            for number, part in enumerate(parts):
                chosen: tuple[int, int | None, int | None] = (number * width, (number + 1) * width, None)
                if interleaved:
                    chosen = (number, None, 2)
                name = f"{unit.name}[{expert}]" + (f".{part}" if len(parts) > 1 else "")
                units[key[0], str(expert), part] = replace(
                    unit, name=name, shape=(width, columns), expert=expert, turned=turned, part=chosen
                )


def _has_parts(units: _Units, place: str, parts: tuple[str, ...]) -> bool:
    """Whether there are experts one by one, or stacks of gate and up apart for one of both or in reverse."""
    whole = ("gate_up",) if parts[0] in ("gate", "up") and len(parts) == 1 else parts
    return any(
        (place, expert, part) in units for expert, part in (("0", parts[0]), *(("", p) for p in whole))
    )


def _layout(matrix: Matrix, parts: int, single: _Unit | None) -> tuple[bool, bool]:
    """Whether a stack is [experts, in, out], and whether gate and up alternate in it.

    Its record tells; for a plain one the shape of an expert of the other side, or else the model.
    """
    if isinstance(matrix.record, Projection):
        return matrix.record.transposed, matrix.record.interleaved
    checkpoint = matrix.checkpoint
    interleaved = parts > 1 and not INTERLEAVED_ARCHITECTURES.isdisjoint(checkpoint.architectures)
    if single is not None:
        rows, columns = single.shape
        straight = matrix.shape[1:] == (rows * parts, columns)
        if straight != (matrix.shape[1:] == (columns, rows * parts)):
            return not straight, interleaved
    return checkpoint.model_config.get("model_type") in TRANSPOSED_MODELS, interleaved


def _divide(units: _Units, others: _Units) -> None:
    """Divides fused linears into the parts that the other side has."""
    for key, unit in list(units.items()):
        parent, dot, last = key[0].rpartition(".")
        if len(key) != 1 or key in others or last not in FUSED_NAMES or len(unit.shape) != 2:
            continue
        parts = [(f"{parent}{dot}{part}",) for part in FUSED_NAMES[last]]
        if any(part not in others for part in parts):
            continue
        rows = [others[part].shape[0] for part in parts]
        if sum(rows) != unit.shape[0]:
            continue
        del units[key]
        begin = 0
        for part, count in zip(parts, rows, strict=True):
            name = f"{unit.name}[{begin}:{begin + count}]"
            units[part] = replace(
                unit, name=name, shape=(count, unit.shape[1]), part=(begin, begin + count, None)
            )
            begin += count


def _difference(one: _Unit, other: _Unit) -> Difference:
    squares = of_other = 0.0
    largest = 0.0
    for ours, theirs in _pieces(one, other):
        delta = ours - theirs
        flat = delta.reshape(len(delta), -1)
        squares += float(np.einsum("ij,ij->i", flat, flat).sum(dtype=np.float64))
        flat = theirs.reshape(len(theirs), -1)
        of_other += float(np.einsum("ij,ij->i", flat, flat).sum(dtype=np.float64))
        largest = max(largest, float(np.abs(delta).max(initial=0)))
    relative = sqrt(squares / of_other) if of_other else (inf if squares else 0.0)
    return Difference(
        one.name,
        other.name,
        (one.matrix.quant_algo, other.matrix.quant_algo),
        one.shape,
        relative,
        -20 * log10(relative) if 0 < relative < inf else (inf if relative == 0 else -inf),
        largest,
    )


def _pieces(one: _Unit, other: _Unit) -> Iterator[tuple[Float32, Float32]]:
    rows = one.shape[0]
    step = rows
    if one.whole and other.whole:
        unit = 1 if len(one.shape) > 2 else ROWS
        step = max(1, PIECE_BYTES // (4 * prod(one.shape[1:]) * unit or 1)) * unit
    for begin in range(0, rows, max(step, 1)):
        end = min(begin + step, rows)
        yield one.read(begin, end), other.read(begin, end)


def by_format(rows: Iterable[Difference]) -> Mapping[tuple[str, str], list[Difference]]:
    """The rows by the formats of both sides."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for row in rows:
        groups.setdefault(row.formats, []).append(row)
    return groups
