"""Jobs of a conversion: tensors that are written for those of the source, and the origin of their values."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.tensor_files import TensorInfo
from moqext.reader.matrices import FLOAT_DTYPES, Float32, Matrix, round_to, to_float32
from moqext.tools.convert.writer import TensorSpec

CHUNK = 8 << 20
"""Bytes of a plain tensor that are read at once; a multiple of every element."""

_CARRIERS: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_EXPONENTS: dict[str, tuple[Any, int, int]] = {
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}
"""Type -> integers of its width, all but the sign, the least that is infinite or NaN."""

_LARGEST = {"BF16": 3.38953e38, "F16": 65504.0, "F32": 3.40282e38}

Pieces = Iterator[tuple[str, NDArray[Any]]]
"""Names of tensors with their next elements."""


@dataclass(frozen=True, slots=True)
class Job:
    """Tensors that are written to one file.

    Attributes:
        source: the tensor of the source by whose place the jobs are ordered.
        tensors: what is written.
        produce: yields their elements; those of one tensor in their order.
        reads: bytes of the source that are read.
    """

    source: str
    tensors: tuple[TensorSpec, ...]
    produce: Callable[[], Pieces] = field(compare=False)
    reads: int

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plain_job(checkpoint: CheckpointReader, info: TensorInfo, name: str, dtype: str) -> Job:
    """A tensor under that name, as it is or rounded to another type."""

    def produce() -> Pieces:
        rounding = Rounding(checkpoint, info.name, dtype, info.shape, keeps_infinity=True)
        for begin in range(0, info.nbytes, CHUNK):
            raw = checkpoint.files.raw(info.name, begin, min(begin + CHUNK, info.nbytes))
            same = dtype == info.dtype
            yield name, raw if same else rounding(to_float32(raw.view(_CARRIERS[info.dtype]), info.dtype))
        rounding.finish()

    return Job(info.name, (TensorSpec(name, dtype, info.shape),), produce, info.nbytes)


def matrix_job(matrix: Matrix, dtype: str) -> Job:
    """A quantized weight as numbers."""

    def produce() -> Pieces:
        for piece in rounded(matrix, dtype):
            yield matrix.tensor, piece

    return Job(matrix.tensor, (TensorSpec(matrix.tensor, dtype, matrix.shape),), produce, matrix.nbytes)


def turned_job(matrix: Matrix, dtype: str) -> Job:
    """Stacked experts as numbers, rows and columns of each exchanged."""
    experts, rows, columns = matrix.shape

    def produce() -> Pieces:
        for piece in rounded(matrix, dtype):
            yield matrix.tensor, np.ascontiguousarray(piece.swapaxes(1, 2))

    spec = TensorSpec(matrix.tensor, dtype, (experts, columns, rows))
    return Job(matrix.tensor, (spec,), produce, matrix.nbytes)


def rounded(matrix: Matrix, dtype: str) -> Iterator[NDArray[Any]]:
    """Consecutive rows (or experts) of a weight in the type that is written.

    Raises:
        CheckpointError: at the end, where a value is too large for the type, or a code is NaN.
    """
    if matrix.record is None and matrix.checkpoint.tensors[matrix.tensor].dtype == dtype:
        yield from matrix.pieces(FLOAT_DTYPES[dtype])
        return
    rounding = Rounding(
        matrix.checkpoint, matrix.tensor, dtype, matrix.shape, keeps_infinity=matrix.record is None
    )
    for piece in matrix.pieces():
        yield rounding(piece)
    rounding.finish()


class Rounding:
    """Rounds the values of a tensor to a type, piece by piece, and counts those that it does not hold."""

    def __init__(
        self,
        checkpoint: CheckpointReader,
        tensor: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        keeps_infinity: bool,
    ) -> None:
        """Counts nothing yet.

        Args:
            checkpoint: for messages, as `tensor` and `shape`.
            tensor: its name in the source.
            dtype: the type to round to.
            shape: of the tensor.
            keeps_infinity: whether infinity and NaN of the source are values, as of a mask, and not damage.
        """
        self._directory = checkpoint.directory
        self._tensor = tensor
        self._dtype = dtype
        self._total = prod(shape)
        self._keeps_infinity = keeps_infinity
        self._nan = 0
        self._too_large = 0
        self._largest = np.float32(0)

    def __call__(self, values: Float32) -> NDArray[Any]:
        """The next values, rounded."""
        result = round_to(values, FLOAT_DTYPES[self._dtype])
        if not all_finite(result, self._dtype):
            self._count(values, result)
        return result

    def _count(self, values: Float32, result: NDArray[Any]) -> None:
        carrier, mask, least = _EXPONENTS[self._dtype]
        infinite = (np.ascontiguousarray(result).view(carrier) & carrier(mask)) >= least
        if self._keeps_infinity:
            infinite &= np.isfinite(values)
        self._nan += int(np.isnan(values).sum(where=infinite))
        lost = np.abs(values[infinite & ~np.isnan(values)])
        self._too_large += lost.size
        self._largest = max(self._largest, lost.max(initial=0))

    def finish(self) -> None:
        """Raises CheckpointError where values were lost."""
        found = []
        if self._nan:
            found.append(f"{self._nan:,} of {self._total:,} codes or scales are NaN")
        if self._too_large:
            found.append(
                f"{self._too_large:,} of {self._total:,} values do not fit into {self._dtype}, whose largest "
                f"is {_LARGEST[self._dtype]:.6g}; the largest of them is {self._largest:.6g}"
            )
        if found:
            message = f"cannot be converted: {'; '.join(found)}"
            raise CheckpointError(message, file=self._directory, tensor=self._tensor)


def all_finite(values: NDArray[Any], dtype: str) -> bool:
    """Whether no value is infinite or NaN, by the bits, a part that fits a cache at a time."""
    carrier, mask, least = _EXPONENTS[dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(carrier)
    step = 1 << 18
    return all((bits[at : at + step] & carrier(mask)).max() < least for at in range(0, bits.size, step))
