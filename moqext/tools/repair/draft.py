"""The draft of a repaired checkpoint: what is written for each tensor, and every change with its reason.

All tensors of the source stand in it to be copied byte for byte. Rules drop, rename and edit some of them. A
tensor that is edited passes through memory as a few rows at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.problems import Problem
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.convert.jobs import CHUNK, Job, Pieces, plain_job
from moqext.tools.convert.writer import TensorSpec
from moqext.tools.repair.documents import Documents

Bytes = NDArray[np.uint8]
Edit = Callable[[Bytes, int, int], Bytes]
"""Called with the bytes of rows [begin, end) of a tensor in plain order; returns what is written for them."""

_ROWS = 128
"""Rows are read in multiples of a tile of swizzled scales, so that no tile is read twice."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a repair.

    Attributes:
        code: of the problem that it ends, a key of `moqext.reader.problems.CODES`.
        subject: the layer, tensor, file or entry that is changed; empty for all of the checkpoint.
        message: what is changed, for people.
    """

    code: str
    subject: str
    message: str


@dataclass
class Output:
    """A tensor that is written.

    Attributes:
        source: the tensor whose bytes it has, as the file describes it.
        beside: the tensor of the source in whose file it is written.
        name, shape: of the result.
        plain: whether it is read in plain order, and not as it lies in the file.
        edits: made to its rows, in this order; with any it is read in plain order too.
        value: written instead of what the source has.
    """

    source: TensorInfo
    beside: TensorInfo
    name: str
    shape: tuple[int, ...]
    plain: bool = False
    edits: list[Edit] = field(default_factory=list)
    value: Bytes | None = None

    @property
    def is_copied(self) -> bool:
        """Whether its bytes are those of the source."""
        return self.value is None and not self.plain and not self.edits

    def job(self, checkpoint: CheckpointReader) -> Job:
        """The job that writes it."""
        spec = TensorSpec(self.name, self.source.dtype, self.shape)
        if self.is_copied:
            copied = plain_job(checkpoint, self.source, self.name, self.source.dtype)
            return Job(self.source.name, (spec,), copied.produce, self.source.nbytes)

        def produce() -> Pieces:
            if self.value is not None:
                yield self.name, self.value
                return
            for begin, end in row_ranges(checkpoint, self.source.name):
                rows = plain_rows(checkpoint, self.source.name, begin, end)
                for edit in self.edits:
                    rows = edit(rows, begin, end)
                yield self.name, rows

        return Job(self.source.name, (spec,), produce, self.source.nbytes)


def row_ranges(checkpoint: CheckpointReader, tensor: str) -> Iterator[tuple[int, int]]:
    """Parts of a tensor along its first axis that fit into memory."""
    shape = checkpoint.tensors[tensor].shape
    row = max(1, checkpoint.tensors[tensor].nbytes // max(1, shape[0]))
    step = max(1, CHUNK // row)
    step = max(_ROWS, step // _ROWS * _ROWS) if len(shape) == 2 else step
    for begin in range(0, shape[0], step):
        yield begin, min(begin + step, shape[0])


def plain_rows(checkpoint: CheckpointReader, tensor: str, begin: int, end: int) -> Bytes:
    """The bytes of rows [begin, end) in plain order, those of one element beside each other."""
    rows = np.ascontiguousarray(checkpoint.rows(tensor, begin, end))
    return rows.reshape(rows.shape or (1,)).view(np.uint8)


class Draft:
    """A checkpoint as it is going to be written.

    Attributes:
        checkpoint: the source.
        outputs: source tensor -> what is written for it.
        copies: what is written besides.
        records: tensor -> the record of the weight that it belongs to, and its role there.
        documents: the JSON files, which rules may edit.
        changes: all that is changed.
        reasons: problem -> why the data cannot decide it.
    """

    def __init__(self, checkpoint: CheckpointReader, problems: list[Problem]) -> None:
        """A draft without a change; `problems` are all of the checkpoint."""
        self.checkpoint = checkpoint
        self.documents = Documents(checkpoint.directory)
        self.changes: list[Change] = []
        self.reasons: dict[Problem, str] = {}
        self._open = dict.fromkeys(problems)
        infos = checkpoint.files.tensors
        self.outputs = {name: Output(info, info, name, info.shape) for name, info in infos.items()}
        self.copies: list[Output] = []
        self._names = set(infos)
        self.records: dict[str, tuple[LayerRecord | Projection, str]] = {}
        for layer in checkpoint.findings(block_scales=True).layers:
            parts: tuple[LayerRecord | Projection, ...] = layer.projections or tuple(layer.linears())
            for record in parts:
                self.records.update((tensor, (record, role)) for role, tensor in record.tensors.items())

    def unsolved(self, *codes: str) -> list[Problem]:
        """The problems of these codes that nothing has solved, all where none is given."""
        return [problem for problem in self._open if not codes or problem.code in codes]

    def solve(self, problem: Problem, message: str, subject: str | None = None) -> None:
        """Counts a problem as solved, by that change."""
        where = subject if subject is not None else problem.layer or problem.tensor or ""
        self.changes.append(Change(problem.code, where, message))
        self.reasons.pop(problem, None)
        self._open.pop(problem, None)

    def refuse(self, problem: Problem, reason: str) -> None:
        """Leaves a problem, and says why."""
        self.reasons[problem] = reason

    def drop(self, tensor: str) -> None:
        """Leaves a tensor of the source out."""
        if (output := self.outputs.pop(tensor, None)) is not None:
            self._names.discard(output.name)

    def rename(self, tensor: str, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Gives a tensor another name; False where that is taken."""
        if name in self._names:
            return False
        output = self.outputs[tensor]
        self._names.discard(output.name)
        self._names.add(name)
        output.name = name
        output.shape = output.shape if shape is None else shape
        return True

    def copy(self, tensor: str, name: str) -> bool:
        """Writes a tensor once more under another name; False where that is taken."""
        if name in self._names:
            return False
        self._names.add(name)
        info = self.checkpoint.files.tensors[tensor]
        self.copies.append(Output(info, info, name, info.shape))
        return True

    def edit(self, tensor: str, edit: Edit) -> None:
        """Changes the bytes of a tensor's rows when they are written."""
        self.outputs[tensor].edits.append(edit)

    def set_value(self, tensor: str, value: NDArray[Any]) -> None:
        """Writes other bytes for a tensor; their number stays."""
        assert value.nbytes == self.outputs[tensor].source.nbytes
        self.outputs[tensor].value = np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def relay(self, tensor: str) -> None:
        """Writes a tensor in plain order."""
        output = self.outputs[tensor]
        output.plain = True
        if prod(output.source.shape) != prod(shape := self.checkpoint.tensors[tensor].shape):
            output.shape = shape  # padding is dropped
