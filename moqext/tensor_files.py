"""The tensors of a checkpoint directory: which files hold them, and each as an array that is not copied.

Opening reads the index, if there is one, and the header of every file, nothing else. A tensor that is asked
for is a read-only view of a memory map of its file, made at that moment, which lives as long as a view of it.

Which files, first match:
  1. `model.safetensors`;
  2. the shards named by `model.safetensors.index.json`, or by the only other `*.safetensors.index.json`;
  3. every `*.safetensors`, without `consolidated*` (the same weights once more) where there are others.
A directory without any of these files is one without weights: `tensors` is empty.

A malformed file is an exception. What is merely incomplete or odd is a Problem, so that half a download can
be looked at: a shard, or a tensor of one, that the index names and that is not there. Asking for it raises.
"""

import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType, TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from moqext.errors import CheckpointError
from moqext.problems import Problem, make_problem
from moqext.tensor_header import Header, TensorInfo, read_header
from moqext.untrusted import RepeatedKeys, is_text, open_file, parse_object, type_name

__all__ = ["TensorFiles", "TensorInfo", "read_header"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 30
# Maps kept for the next tensor of the same file, beyond those that views keep alive. A map costs a file
# descriptor, of which a process commonly has 1,024.
MAPS_KEPT = 16

_PLAIN_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
}
# Types NumPy does not have: the name in ml_dtypes, and the integer that carries the bits without it.
_EXTENDED_DTYPES = {
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "F8_E8M0": ("float8_e8m0fnu", "u1"),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", "u1"),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", "u1"),
}


class TensorFiles:
    """The tensors of the safetensors files in one directory.

    Attributes:
        directory: the directory.
        tensors: every tensor that is there, by name.
        files: the files that were read, in the order of their names.
        index: the index file that was followed, or None.
        named: every tensor the index names, with its file, there or not; empty without an index.
        problems: what was found wrong or odd that is no reason to refuse the directory.

    A view handed out by `tensor` stays valid after `close`: it owns its map. Writing to a file that is mapped
    changes the views, and cutting it ends the process; replace checkpoint files by renaming.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Reads the index and the headers.

        Raises:
            CheckpointError: the directory is none, or a file in it is malformed.
        """
        self.directory = Path(directory)
        self.index: Path | None = None
        self.named: Mapping[str, Path] = MappingProxyType({})
        self._problems: list[Problem] = []
        self._maps: WeakValueDictionary[Path, mmap.mmap] = WeakValueDictionary()
        self._recent: deque[mmap.mmap] | None = deque(maxlen=MAPS_KEPT)

        headers = self._read_headers()
        self.files = tuple(headers)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._merge(headers))
        self._report_missing(headers)
        self.problems: tuple[Problem, ...] = tuple(self._problems)

    @property
    def has_weights(self) -> bool:
        """False for a directory without any safetensors file."""
        return bool(self.files)

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor `name` as a read-only array, of the shape in the file.

        Plain types are NumPy's. bfloat16 and the 8-bit floats are those of ml_dtypes where it is installed,
        else their bits in uint16 and uint8. Not copied, unless the file places it off its type's alignment.

        Raises:
            CheckpointError: there is no such tensor, or its file or type cannot be read.
            ValueError: after `close`.
        """
        info = self.tensors.get(name)
        if info is None:
            raise self._absent(name)
        dtype = array_dtype(info)
        if info.nbytes == 0:
            array: NDArray[Any] = np.empty(info.shape, dtype)
        else:
            array = self._view(info, dtype)
        array.flags.writeable = False
        return array

    def close(self) -> None:
        """Forgets the maps; each is unmapped when the last view of it is gone. May be called again."""
        self._recent = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<TensorFiles {str(self.directory)!r}: {len(self)} tensors in {len(self.files)} files>"

    # Opening

    def _read_headers(self) -> dict[Path, Header]:
        """The headers of the files that hold the weights."""
        try:
            names = sorted(os.listdir(self.directory))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"not a directory that can be read: {getattr(error, 'strerror', None) or error}",
                file=self.directory,
            ) from error
        weights = [name for name in names if name.endswith(".safetensors")]
        indexes = [name for name in names if name.endswith(".safetensors.index.json")]
        chosen = self._choose_files(weights, indexes)
        unread = [name for name in weights if self.directory / name not in chosen]
        if unread:
            rest = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            self._report("unread_files", f"not read: {', '.join(unread[:3])}{rest}")
        return {path: read_header(path) for path in sorted(chosen)}

    def _choose_files(self, weights: list[str], indexes: list[str]) -> set[Path]:
        """The files to read, by the order of preference above; reads the index where it decides."""
        if SINGLE_FILE in weights:
            if INDEX_FILE in indexes:
                self._report("index_ignored", f"{INDEX_FILE} is not read: there is {SINGLE_FILE}")
            return {self.directory / SINGLE_FILE}
        if INDEX_FILE in indexes or len(indexes) == 1:
            self.index = self.directory / (INDEX_FILE if INDEX_FILE in indexes else indexes[0])
            self.named = MappingProxyType(read_index(self.index))
            return {path for path in set(self.named.values()) if os.path.exists(path)}
        own = [name for name in weights if not name.startswith("consolidated")]
        return {self.directory / name for name in own or weights}

    def _merge(self, headers: dict[Path, Header]) -> dict[str, TensorInfo]:
        """All tensors by name. Where two files have one, the index decides; otherwise it is an error."""
        tensors: dict[str, TensorInfo] = {}
        for path, header in headers.items():
            for begin, end in header.holes:
                self._report("hole", f"{path.name}: no tensor covers bytes [{begin}, {end})")
            for name, info in header.tensors.items():
                owner = self.named.get(name)
                if owner is not None and owner != path:
                    message = f"also in {path.name}; the index says {owner.name}"
                    self._report("duplicate_tensor", message, name)
                    continue
                other = tensors.get(name)
                if other is not None:
                    raise CheckpointError(f"also in {other.file.name}", file=path, tensor=name)
                if self.named and owner is None:
                    self._report("unindexed_tensor", f"in {path.name}, not in the index", name)
                if info.dtype not in _PLAIN_DTYPES and info.dtype not in _EXTENDED_DTYPES:
                    message = f"its type {info.dtype[:40]!r} has no array"
                    self._report("unreadable_dtype", message, name)
                tensors[name] = info
        return tensors

    def _report_missing(self, headers: dict[Path, Header]) -> None:
        """Shards, and tensors in them, that the index promises."""
        if not headers:
            self._report("no_weights", "the directory has no safetensors files")
            return
        absent: dict[Path, int] = {}
        for name, path in self.named.items():
            if path not in headers:
                absent[path] = absent.get(path, 0) + 1
            elif name not in headers[path].tensors:
                message = f"the index says it is in {path.name}, it is not"
                self._report("missing_tensor", message, name)
        for path, count in sorted(absent.items()):
            message = f"{path.name} is missing; tensors in it by the index: {count}"
            self._report("missing_shard", message)

    def _report(self, code: str, message: str, tensor: str | None = None) -> None:
        self._problems.append(make_problem(code, message, tensor=tensor))

    # Reading

    def _absent(self, name: str) -> CheckpointError:
        path = self.named.get(name)
        if path is None:
            return CheckpointError("no such tensor", file=self.directory, tensor=name)
        if path in self.files:
            return CheckpointError("the index says it is in this file, it is not", file=path, tensor=name)
        return CheckpointError("the index says it is in this file, which is missing", file=path, tensor=name)

    def _view(self, info: TensorInfo, dtype: np.dtype[Any]) -> NDArray[Any]:
        mapped = self._map(info)
        if len(mapped) < info.end:
            raise CheckpointError(
                f"the file has become shorter: {len(mapped)} bytes, the tensor ends at {info.end}",
                file=info.file,
                tensor=info.name,
            )
        octets = np.frombuffer(mapped, np.uint8, info.nbytes, info.begin)
        array = octets.view(dtype).reshape(info.shape)
        return array if array.flags.aligned else array.copy()

    def _map(self, info: TensorInfo) -> mmap.mmap:
        """The map of the tensor's file; made, where there is none, and kept for the next ones."""
        if self._recent is None:
            raise ValueError(f"{self.directory}: closed, its tensors can no longer be read")
        mapped = self._maps.get(info.file)
        if mapped is None:
            try:
                mapped = _map_file(info.file)
            except (OSError, ValueError) as error:
                message = f"cannot be mapped: {error}"
                raise CheckpointError(message, file=info.file, tensor=info.name) from error
            self._maps[info.file] = mapped
            self._recent.append(mapped)
        return mapped


def read_index(path: Path) -> dict[str, Path]:
    """The file of every tensor that the index at `path` names.

    Files are relative to the index. They may be links (a download cache keeps links to files elsewhere), but
    their names may not leave its directory.

    Raises:
        CheckpointError: the index is malformed; names it and, where one is at fault, the tensor.
    """
    with open_file(path) as (stream, size):
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{size} bytes, at most {MAX_INDEX_BYTES} are allowed", file=path)
        document = parse_object(stream.read(), path, "the index")
    if isinstance(document, RepeatedKeys):
        raise CheckpointError(f"the index has key {document.repeated[0]!r} twice", file=path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"weight_map must be an object, found {type_name(weight_map)}", file=path)
    if isinstance(weight_map, RepeatedKeys):
        raise CheckpointError("weight_map names it twice", file=path, tensor=weight_map.repeated[0])
    shards: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not is_text(name):
            raise CheckpointError("the name is not valid Unicode", file=path, tensor=name)
        if not isinstance(shard, str):
            message = f"its file must be a string, found {type_name(shard)}"
            raise CheckpointError(message, file=path, tensor=name)
        if shard not in shards:
            shards[shard] = _shard_path(path, name, shard)
    return {name: shards[shard] for name, shard in weight_map.items()}


def array_dtype(info: TensorInfo) -> np.dtype[Any]:
    """The NumPy type in which the tensor is shown.

    Raises:
        CheckpointError: there is none, because its elements are smaller than a byte or its type is not known.
    """
    if info.dtype in _PLAIN_DTYPES:
        return np.dtype(_PLAIN_DTYPES[info.dtype])
    if info.dtype in _EXTENDED_DTYPES:
        return _extended_dtype(info.dtype)
    known = ", ".join(sorted(_PLAIN_DTYPES | _EXTENDED_DTYPES))
    raise CheckpointError(
        f"type {info.dtype[:40]!r} cannot be shown as an array; supported are {known}",
        file=info.file,
        tensor=info.name,
    )


@cache
def _extended_dtype(name: str) -> np.dtype[Any]:
    extended, carrier = _EXTENDED_DTYPES[name]
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(carrier)
    return np.dtype(getattr(ml_dtypes, extended, carrier))


def _shard_path(index: Path, tensor: str, shard: str) -> Path:
    """The path of a shard as the index names it, which must be one below the index."""
    relative = PurePosixPath(shard)
    if not relative.parts or relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"its file {shard!r} leaves the directory", file=index, tensor=tensor)
    if "\0" in shard or not is_text(shard):
        raise CheckpointError(f"its file {shard!r} is not a file name", file=index, tensor=tensor)
    return index.parent / relative


def _map_file(path: Path) -> mmap.mmap:
    with open(path, "rb") as stream:
        if sys.version_info >= (3, 13):  # before, a map holds a descriptor of its own
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
