"""The header of one .safetensors file: which tensors it holds, of what type and shape, at which bytes.

A file is the length of the header (8 bytes, little-endian), the header (a JSON object), then the bytes of the
tensors; offsets count from the end of the header. Everything in it is taken for a claim and checked against
the size of the file, so a TensorInfo that was handed out describes bytes that exist and fit its shape.
Nothing is allocated but the header itself, and that not before its length is known to fit the file.

Headers as exporters write them are read in C. It gives up at whatever is unusual, right or wrong, and leaves
the header to the reader here, which takes what JSON allows and says what is wrong with the rest.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, NoReturn

from moqext import _C
from moqext.errors import CheckpointError
from moqext.reader.files.shard import Identity
from moqext.reader.files.untrusted import (
    HEAD_BYTES,
    RepeatedKeys,
    foreign_content,
    is_text,
    open_file,
    parse_object,
    refuse_many_values,
    type_name,
)

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_RANK = 32  # what NumPy 1.26 can represent
LENGTH_BYTES = 8

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits per element of every type the format names. A type that is not here cannot be checked against its
shape; it is reported, and refused when the tensor is asked for."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place, shape and dtype of one tensor of a file.

    Attributes:
        name: its name in the checkpoint.
        dtype: its type in the format's spelling, e.g. "F8_E4M3", "BF16", "U8", "F32".
        shape: its dimensions, outermost first; () for a scalar.
        file: the file that holds it.
        begin: first byte, counted from the start of the file.
        end: one past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes it occupies in the file."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements; packed formats store several codes in one element."""
        return math.prod(self.shape)


class Header(NamedTuple):
    """The content of the header of one file.

    Attributes:
        tensors: by name, in the order of the header.
        metadata: the free text entries under "__metadata__".
        holes: ranges [begin, end) of the file, after the header, that no tensor covers.
        identity: of the file when the header was read.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    holes: tuple[tuple[int, int], ...]
    identity: Identity


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of the file at `path`, checked; the tensors' bytes are not read.

    Raises:
        CheckpointError: the file cannot be opened or its header is malformed; names the file and, where
            one is at fault, the tensor.
    """
    file = Path(path)
    text, identity = _read_text(file)
    refuse_many_values(text, file, "the header")
    data_begin = LENGTH_BYTES + len(text)
    usual = _C.read_tensor_header(text, TensorInfo, file, data_begin, identity.size, DTYPE_BITS)
    tensors, metadata = usual or read_unusual(text, file, identity.size)
    holes = _find_holes(tensors, file, data_begin, identity.size)
    return Header(tensors, metadata, holes, identity)


def read_unusual(text: bytes, file: Path, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata of a header that is read as any JSON document.

    Args:
        text: the header.
        file: where it comes from.
        size: of the file.

    Raises:
        CheckpointError: it is malformed.
    """
    document = parse_object(text, file, "the header")
    metadata = _parse_metadata(document.pop("__metadata__", {}), file)
    if isinstance(document, RepeatedKeys):
        raise CheckpointError("the header names it twice", file=file, tensor=document.repeated[0])
    data_begin = LENGTH_BYTES + len(text)
    tensors = {name: _parse_tensor(name, entry, file, data_begin, size) for name, entry in document.items()}
    return tensors, metadata


def _read_text(file: Path) -> tuple[bytes, Identity]:
    """The header's bytes, and which file they are of."""
    with open_file(file) as (stream, size):
        identity = Identity.of(os.fstat(stream.fileno()))
        if size == 0:
            raise CheckpointError("0 bytes: an empty file, as an interrupted download leaves", file=file)
        head = stream.read(HEAD_BYTES)
        if (foreign := foreign_content(head)) is not None:
            raise CheckpointError(foreign, file=file)
        if size < LENGTH_BYTES:
            raise CheckpointError(
                f"truncated: {size} bytes, the length of the header alone takes {LENGTH_BYTES}", file=file
            )
        length = int.from_bytes(head[:LENGTH_BYTES], "little")
        room = size - LENGTH_BYTES
        if length > room:
            raise CheckpointError(
                f"the header claims {length} bytes, the file has {room} after its length", file=file
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"the header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed", file=file
            )
        if not length:
            raise CheckpointError("the header is empty; an unfinished download has such zeros", file=file)
        stream.seek(LENGTH_BYTES)
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(f"truncated: {len(text)} of {length} bytes of the header", file=file)
    if not text.startswith(b"{"):
        raise CheckpointError(f"the header must start with '{{', found {text[:1]!r}", file=file)
    return text, identity


def _parse_metadata(entry: object, file: Path) -> dict[str, str]:
    if not isinstance(entry, dict):
        raise CheckpointError(f"__metadata__ must be an object, found {type_name(entry)}", file=file)
    if isinstance(entry, RepeatedKeys):
        raise CheckpointError(f"__metadata__ has key {entry.repeated[0]!r} twice", file=file)
    for key, value in entry.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"__metadata__[{key!r}] must be a string, found {type_name(value)}", file=file
            )
    return entry


def _parse_tensor(name: str, entry: object, file: Path, data_begin: int, size: int) -> TensorInfo:
    """One entry of the header, with its offsets made absolute."""

    def refuse(message: str) -> NoReturn:
        raise CheckpointError(message, file=file, tensor=name)

    if not is_text(name):
        refuse("the name is not valid Unicode")
    if not isinstance(entry, dict):
        refuse(f"the entry must be an object, found {type_name(entry)}")
    if isinstance(entry, RepeatedKeys):
        refuse(f"the entry has key {entry.repeated[0]!r} twice")
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(f"the entry must have exactly dtype, shape and data_offsets, found {_shorten(list(entry))}")
    dtype = entry["dtype"]
    if not isinstance(dtype, str):
        refuse(f"dtype must be a string, found {type_name(dtype)}")
    shape = _parse_sizes("shape", entry["shape"], refuse)
    offsets = _parse_sizes("data_offsets", entry["data_offsets"], refuse)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"data_offsets must be [begin, end] with begin <= end, found {_shorten(list(offsets))}")
    begin, end = offsets
    room = size - data_begin
    if end > room:
        data = f"the file has {room} bytes of data (truncated?)"
        refuse(f"data_offsets end at {end}, {data}; download it again, or copy it whole")
    count = math.prod(shape)
    elements = count or math.prod(extent for extent in shape if extent)  # no byte backs extents beside a 0
    if elements >= 2**60:
        refuse(f"shape {list(shape)} is absurdly large")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and count * bits != (end - begin) * 8:
        needed = count * bits / 8
        refuse(f"{dtype} of shape {list(shape)} takes {needed:g} bytes, data_offsets span {end - begin}")
    return TensorInfo(name, dtype, shape, file, data_begin + begin, data_begin + end)


def _parse_sizes(key: str, value: object, refuse: Callable[[str], NoReturn]) -> tuple[int, ...]:
    """A list of non-negative integers that fit 64 bits, signed, as a NumPy shape must."""
    if not isinstance(value, list):
        refuse(f"{key} must be an array, found {type_name(value)}")
    if len(value) > MAX_RANK:
        refuse(f"{key} has {len(value)} entries, at most {MAX_RANK} are supported")
    for number in value:
        if type(number) is not int or not 0 <= number < 2**63:
            refuse(f"{key} must hold integers from 0 to 2**63 - 1, found {_shorten(number)}")
    return tuple(value)


def _find_holes(
    tensors: dict[str, TensorInfo], file: Path, data_begin: int, size: int
) -> tuple[tuple[int, int], ...]:
    """Ranges no tensor covers; refuses a byte that two tensors claim."""
    holes = []
    end = data_begin
    previous = ""
    for info in sorted(tensors.values(), key=attrgetter("begin", "end")):
        if not info.nbytes:
            continue
        if info.begin < end:
            raise CheckpointError(
                f"bytes [{info.begin}, {info.end}) overlap tensor {previous!r}, which ends at {end}",
                file=file,
                tensor=info.name,
            )
        if info.begin > end:
            holes.append((end, info.begin))
        end = info.end
        previous = info.name
    if end < size:
        holes.append((end, size))
    return tuple(holes)


def _shorten(value: object, limit: int = 60) -> str:
    """A value for a message; a hostile one may be thousands of digits long."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
