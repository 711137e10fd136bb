"""One safetensors file, written tensor by tensor in any order and in pieces.

The header comes first in the file, so names, types and shapes are given first; the bytes of each tensor are
then appended to it as they come. Nothing is held in memory but the header.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from moqext.reader.files.tensor_header import DTYPE_BITS, LENGTH_BYTES

ALIGNMENT = 8
"""The bytes of the tensors begin at a multiple of it."""


class TensorSpec(NamedTuple):
    """A tensor that is to be written: name, type as the format spells it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class TensorWriter:
    """A safetensors file open for writing; as a context manager it is closed and checked."""

    def __init__(self, path: Path, tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> None:
        """Creates the file, unless an earlier run has, and writes its header.

        Wide types come first, so that every tensor begins at a multiple of its own elements.
        """
        ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for tensor in ordered:
            begin, end = end, end + tensor.nbytes
            places[tensor.name] = (begin, end)
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
        first = LENGTH_BYTES + len(text)
        self._path = path
        self._next = {name: first + begin for name, (begin, _) in places.items()}
        self._end = {name: first + end for name, (_, end) in places.items()}
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._write(len(text).to_bytes(LENGTH_BYTES, "little") + text, 0)
        os.truncate(self._descriptor, first + end)

    def append(self, name: str, array: NDArray[Any]) -> int:
        """Writes the next elements of a tensor, in C order, and returns how many bytes they are."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = self._next[name]
        if at + data.size > self._end[name]:
            raise ValueError(f"{self._path.name}: {name}: {at + data.size - self._end[name]} bytes too many")
        self._write(data.data, at)
        self._next[name] = at + data.size
        return data.size

    def skip(self, tensors: Iterable[TensorSpec]) -> None:
        """Takes tensors as written: an earlier run has done so."""
        for tensor in tensors:
            self._next[tensor.name] = self._end[tensor.name]

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while len(view):
            count = os.pwrite(self._descriptor, view, at)
            view, at = view[count:], at + count

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        short = [name for name, end in self._end.items() if self._next[name] < end]
        if kind is None and short:
            raise ValueError(f"{self._path.name}: {short[0]} is not complete")
