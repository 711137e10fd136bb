"""What becomes of tensors of the source: which are written instead, and where their values come from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moqext.convert.writer import TensorSpec
from moqext.errors import CheckpointError
from moqext.matrices import FLOAT_DTYPES, Matrix, round_to, to_float32
from moqext.tensor_files import TensorInfo

if TYPE_CHECKING:
    from moqext.checkpoint import Checkpoint

CHUNK = 8 << 20
"""Bytes of a plain tensor that are read at once; a multiple of every element."""

_CARRIERS: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_EXPONENTS: dict[str, tuple[Any, int, int]] = {
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}
"""Type -> integers of its width, all but the sign, the least that is infinite or NaN."""

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


def plain_job(checkpoint: "Checkpoint", info: TensorInfo, name: str, dtype: str) -> Job:
    """A tensor under that name, as it is or rounded to another type."""

    def produce() -> Pieces:
        for begin in range(0, info.nbytes, CHUNK):
            raw = checkpoint.files.raw(info.name, begin, min(begin + CHUNK, info.nbytes))
            if dtype == info.dtype:
                yield name, raw
                continue
            values = to_float32(raw.view(_CARRIERS[info.dtype]), info.dtype)
            rounded = round_to(values, FLOAT_DTYPES[dtype])
            if not all_finite(rounded, dtype) and np.isfinite(values).all():
                _refuse(checkpoint, info.name, f"{np.abs(values).max():.6g} does not fit into {dtype}")
            yield name, rounded

    return Job(info.name, (TensorSpec(name, dtype, info.shape),), produce, info.nbytes)


def matrix_job(matrix: Matrix, dtype: str) -> Job:
    """A quantized weight as numbers."""

    def produce() -> Pieces:
        for piece in matrix.pieces(FLOAT_DTYPES[dtype]):
            yield matrix.tensor, checked(matrix, piece, dtype)

    return Job(matrix.tensor, (TensorSpec(matrix.tensor, dtype, matrix.shape),), produce, matrix.nbytes)


def checked(matrix: Matrix, values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values of a quantized weight if all are finite.

    Raises:
        CheckpointError: a code is NaN, or a value is too large for the type.
    """
    if matrix.record is not None and not all_finite(values, dtype):
        _refuse(matrix.checkpoint, matrix.tensor, f"a code is NaN, or its value does not fit into {dtype}")
    return values


def all_finite(values: NDArray[Any], dtype: str) -> bool:
    """Whether no value is infinite or NaN, by the bits, a part that fits a cache at a time."""
    carrier, mask, least = _EXPONENTS[dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(carrier)
    step = 1 << 18
    return all((bits[at : at + step] & carrier(mask)).max() < least for at in range(0, bits.size, step))


def _refuse(checkpoint: "Checkpoint", tensor: str, message: str) -> None:
    raise CheckpointError(f"cannot be converted: {message}", file=checkpoint.directory, tensor=tensor)
