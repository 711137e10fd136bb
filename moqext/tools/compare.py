"""How far the weights of two checkpoints are apart: a quantized one and its original, or two exports.

Layers are matched by what they are, not by spelling: prefixes aside, experts by container, number and role
(w1, gate_proj and the first half of gate_up_proj are one), stacked ones against single ones, and fused
linears (qkv_proj) against their parts. Where a checkpoint has two layers that differ in a prefix alone, these
need the same name on both sides. Compared is what a layer multiplies by (`matrices.py`), and every other
tensor. Memory holds a piece of both, or one expert.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log10, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.places import PIPELINE
from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.files.untrusted import expand_home
from moqext.reader.formats.layouts import Nibbles, ScaleLayout, check_options
from moqext.reader.matrices import FLOAT_DTYPES, PIECE_BYTES, Float32, Matrix, quantized_matrices, to_float32
from moqext.reader.naming import (
    FUSED_NAMES,
    INTERLEAVED_ARCHITECTURES,
    PROJECTIONS,
    parse_expert_name,
    without_prefix,
)
from moqext.reader.records import Projection
from moqext.tools.convert.experts import TRANSPOSED_MODELS
from moqext.tools.convert.plan import sort_plain

_EXACT_DTYPES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64")
"""Types of tensors that are compared as they are stored."""

ROWS = 128
"""Rows of a piece are a multiple of it: of the rows that share a scale or a byte in every format."""


class SingleFile(CheckpointReader):
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


def open_side(
    path: str | os.PathLike[str], *, like: CheckpointReader | None = None, **options: Any
) -> CheckpointReader:
    """The checkpoint in a directory, or the tensors of a safetensors file.

    Args:
        path: of either.
        like: the other side; of a Diffusers pipeline its component is opened.
        **options: `component`, `scale_layout` and `nibbles` of `Checkpoint`.

    Raises:
        CheckpointError: it is neither, or cannot be read.
    """
    file = Path(path)
    if file.suffix == ".safetensors" and file.is_file():
        options.pop("component", None)
        return SingleFile(file, **options)
    if like is not None and (Path(expand_home(path)) / PIPELINE).is_file():
        options.setdefault("component", like.component)
    return CheckpointReader(path, **options)


@dataclass(frozen=True, slots=True)
class Difference:
    """One layer of both sides.

    Attributes:
        layer: its name in the first.
        other: its name in the second.
        formats: algorithm, or type where it is not quantized, in the first and the second.
        shape: (out features, in features), with the number of stacked experts before it.
        relative_error: Frobenius norm of the difference over that of the second; inf where only that is 0;
            0 only where all elements are equal.
        sqnr_db: -20 log10 of it, inf where both are equal.
        max_error: the largest difference of an element.
        differing: number of elements that are not equal; NaN equals NaN.
    """

    layer: str
    other: str
    formats: tuple[str, str]
    shape: tuple[int, ...]
    relative_error: float
    sqnr_db: float
    max_error: float
    differing: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two checkpoints, and what they have in common.

    Attributes:
        layers: what is quantized on a side, and plain tensors that are not equal, the worst first.
        equal: number of plain tensors that are equal.
        only_first, only_second: names of what has no counterpart.
        misshapen: names of the first, with both shapes, where a counterpart has another shape.
        ambiguous: names of the first and of the second, each of which may be any of the others.
    """

    layers: tuple[Difference, ...]
    equal: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    ambiguous: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


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

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Rows [begin, end), all of them of a part of something; float32 but for `_EXACT_DTYPES`."""
        checkpoint, tensor = self.matrix.checkpoint, self.matrix.tensor
        dtype = self.matrix.quant_algo
        if not self.shape:
            value = checkpoint.tensor(tensor).reshape(1)
            return to_float32(value, dtype) if dtype in FLOAT_DTYPES else value
        if dtype in _EXACT_DTYPES:
            return checkpoint.files.rows(tensor, begin, end)
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


_Key = tuple[str, ...]
_Units = dict[_Key, _Unit]
_Beginning = tuple[str, bool]
"""The first part of a key, and whether it is a container of experts."""


def compare(
    first: CheckpointReader, second: CheckpointReader, progress: Callable[[int, int, str], None] | None = None
) -> Comparison:
    """The differences of `first` from `second`, which errors are relative to.

    Args:
        first: the quantized checkpoint, or one of two.
        second: the original.
        progress: called with weights done, weights in all, and the name of the layer.

    Raises:
        CheckpointError: a weight of either cannot be read, or is in no known format.
    """
    found = _found(first), _found(second)
    ambiguous = _ambiguous(*found)
    ours, theirs = (_units(matrices, ambiguous) for matrices in found)
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
    only_first, only_second, unclear = _unpaired(ours, theirs, ambiguous)
    return Comparison(tuple(rows), equal, only_first, only_second, tuple(misshapen), unclear)


def _found(checkpoint: CheckpointReader) -> list[tuple[_Key, Matrix]]:
    """Every weight and plain tensor of numbers, by what it is in this checkpoint."""
    plain = [
        Matrix(checkpoint, info.name.removesuffix(".weight"), info.name, info.shape)
        for info in sort_plain(checkpoint)[0]
        if info.dtype in FLOAT_DTYPES or info.dtype in _EXACT_DTYPES
    ]
    return [(_key(matrix), matrix) for matrix in (*quantized_matrices(checkpoint), *plain)]


def _ambiguous(*sides: Iterable[tuple[_Key, Matrix]]) -> dict[_Beginning, str]:
    """Beginnings of keys that are one where prefixes do not count, and two in a checkpoint -> that one."""
    ambiguous: dict[_Beginning, str] = {}
    everywhere: dict[_Beginning, set[_Beginning]] = {}
    doubtful: set[_Beginning] = set()
    for side in sides:
        places: dict[_Beginning, set[_Beginning]] = {}
        for key, _ in side:
            places.setdefault(_beginning(_aligned(key)), set()).add(_beginning(key))
        doubtful.update(place for place, names in places.items() if len(names) > 1)
        for place, names in places.items():
            everywhere.setdefault(place, set()).update(names)
    for place in doubtful:
        ambiguous.update((name, place[0]) for name in everywhere[place])
    return ambiguous


def _units(matrices: Iterable[tuple[_Key, Matrix]], ambiguous: Mapping[_Beginning, str]) -> _Units:
    """The matrices by what they are in any checkpoint, or in this one where that may be two."""
    units: _Units = {}
    for key, matrix in matrices:
        known = key if _beginning(key) in ambiguous else _aligned(key)
        units[(matrix.tensor,) if known in units else known] = _Unit(matrix, matrix.name, matrix.shape)
    return units


def _unpaired(
    ours: _Units, theirs: _Units, ambiguous: Mapping[_Beginning, str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]]:
    """Names of what only the first has, only the second has, and what may be one another."""
    groups: dict[_Key, tuple[list[str], list[str]]] = {}
    for side, (units, others) in enumerate(((ours, theirs), (theirs, ours))):
        for key, unit in units.items():
            if key not in others:
                place = ambiguous.get(_beginning(key))
                group = groups.setdefault(key if place is None else ("", place, *key[1:]), ([], []))
                group[side].append(unit.name)
    unclear = tuple((tuple(a), tuple(b)) for a, b in groups.values() if a and b)
    only = [
        tuple(name for group in groups.values() if not all(group) for name in group[side]) for side in (0, 1)
    ]
    return only[0], only[1], unclear


def _key(matrix: Matrix) -> _Key:
    """Key of a matrix: (container, "3", "gate") of an expert, (container, "", "gate_up") of a stack."""
    expert = parse_expert_name(matrix.name)
    if expert is not None and expert.projection in PROJECTIONS and len(matrix.shape) == 2:
        return expert.container, str(expert.expert), PROJECTIONS[expert.projection]
    container, _, last = matrix.name.rpartition(".")
    if len(matrix.shape) == 3 and last in PROJECTIONS:
        return container, "", PROJECTIONS[last]
    return (matrix.name,)


def _beginning(key: _Key) -> _Beginning:
    return key[0], len(key) == 3


def _aligned(key: _Key) -> _Key:
    """The key without what two checkpoints of one model need not share."""
    return (_place(key[0]), *key[1:]) if len(key) == 3 else (without_prefix(key[0]),)


def _place(container: str) -> str:
    """The layer that experts belong to: `layers.0` of `model.layers.0.block_sparse_moe.experts`."""
    return without_prefix(container.removesuffix(".experts").rpartition(".")[0])


def _expand(units: _Units, others: _Units) -> None:
    """Takes stacks apart into experts where the other side has no such stack of that shape."""
    for key, unit in list(units.items()):
        if len(key) != 3 or key[1] or not prod(unit.shape):
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
    squares = of_other = largest = 0.0
    differing = 0
    for ours, theirs in _pieces(one, other):
        unequal = (ours != theirs) & ~((ours != ours) & (theirs != theirs))  # equal infinities: no difference
        differing += int(np.count_nonzero(unequal))
        wide = theirs.astype(np.float64).reshape(-1)  # squares of float32 leave its range
        of_other += _square_sum(wide if np.isfinite(wide).all() else wide[np.isfinite(wide)])
        if unequal.any():
            with np.errstate(invalid="ignore", over="ignore"):
                delta = np.subtract(ours[unequal], theirs[unequal], dtype=np.float64)
                squares += _square_sum(delta)
            largest = float(np.maximum(largest, np.abs(delta).max()))
    relative = _relative(squares, of_other) if differing else 0.0
    return Difference(
        one.name,
        other.name,
        (one.matrix.quant_algo, other.matrix.quant_algo),
        one.shape,
        relative,
        -20 * log10(relative) if 0 < relative < inf else (inf if relative == 0 else -inf),
        largest,
        differing,
    )


def _square_sum(values: NDArray[np.float64]) -> float:
    return float(np.vdot(values, values))


def _relative(squares: float, of_other: float) -> float:
    """The relative error of elements that differ: never 0, which means that none does."""
    if not of_other:
        return inf
    return max(sqrt(squares / of_other), sys.float_info.min)


def _pieces(one: _Unit, other: _Unit) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    if not prod(one.shape):
        return  # without elements the first extent may be anything
    rows = one.shape[0] if one.shape else 1
    step = rows
    if one.whole and other.whole:
        unit = 1 if len(one.shape) > 2 else ROWS
        step = max(1, PIECE_BYTES // (4 * prod(one.shape[1:]) * unit)) * unit
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield one.read(begin, end), other.read(begin, end)


def by_format(rows: Iterable[Difference]) -> Mapping[tuple[str, str], list[Difference]]:
    """The rows by the formats of both sides."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for row in rows:
        groups.setdefault(row.formats, []).append(row)
    return groups
