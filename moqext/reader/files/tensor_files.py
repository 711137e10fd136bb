"""The tensors of a checkpoint directory: which files hold them, and each as an array of its own.

Opening reads the index, if there is one, and the header of every file, nothing else. A tensor that is asked
for is read from its file at that moment, if that is still the file whose header was read (`shard.py`).

Which files, first match:
  1. `model.safetensors`, or `diffusion_pytorch_model.safetensors`;
  2. the shards named by the index of such a name, or by the only other `*.safetensors.index.json`;
  3. every `*.safetensors`, without `consolidated*` (the same weights once more) where there are others.
A directory without any of these files is one without weights: `tensors` is empty.

A malformed file is an exception. What is merely incomplete or odd is a Problem, so that half a download can
be looked at: a shard that the index names and that is not there or cannot be read, a tensor that is not where
the index says, a numbered shard that is missing between others. Asking for what is not there raises.
"""

import copy
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moqext.errors import CheckpointError
from moqext.interrupts import heard
from moqext.reader.files.hub import fetch_again
from moqext.reader.files.places import other_forms
from moqext.reader.files.shard import Shard
from moqext.reader.files.tensor_header import Header, TensorInfo, read_header
from moqext.reader.files.untrusted import RepeatedKeys, is_text, open_file, parse_object, type_name
from moqext.reader.naming import near_names
from moqext.reader.problems import Problem, make_problem

__all__ = ["TensorFiles", "TensorInfo", "read_header"]

_STEMS = ("model", "diffusion_pytorch_model")
"""Names of weights in Transformers and in Diffusers, which variants (`model.fp16.safetensors`) lie beside."""
SINGLE_FILES = frozenset(f"{stem}.safetensors" for stem in _STEMS)
"""Files that are read alone."""
_NO_PARTS = ("consolidated", "adapter")
"""Files beside a checkpoint that hold the same weights once more, or changes to them."""
MAX_INDEX_BYTES = 256 << 20  # the largest known, of 276,000 tensors, takes 40 MB
FILES_KEPT = 16
"""Files kept open for the next tensor. Each costs a descriptor, of which a process commonly has 1,024."""
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,6})-of-(?P<count>[0-9]{1,6})\.safetensors")
"""Names of files that tell how many there are, as "model-00002-of-00030.safetensors"."""

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
_EXTENDED_DTYPES = {
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "F8_E8M0": ("float8_e8m0fnu", "u1"),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", "u1"),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", "u1"),
}
"""Types NumPy does not have: the name in ml_dtypes, and the integer that carries the bits without it."""


class TensorFiles:
    """The tensors of the safetensors files in one directory.

    Attributes:
        directory: the directory.
        tensors: every tensor that is there, by name.
        files: the files that were read, in the order of their names.
        index: the index file that was followed, or None.
        named: every tensor the index names, with its file, there or not; empty without an index.
        metadata: the free text entries of the header of each file.
        lost: files that are not read -> tensors in them that no other file has.
        problems: what was found wrong or odd that is no reason to refuse the directory.

    Several threads may read at once, and one may close while others read. A file that was replaced, cut or
    written to since it was opened here is refused by name.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, single: Path | None = None, headers_only: bool = False
    ) -> None:
        """Reads the index and the headers; of `single`, a file or an index, and of what it names alone.

        With `headers_only` the files have nothing but headers, and asking for a tensor raises.

        Raises:
            CheckpointError: the directory is none, or a file in it is malformed.
        """
        self.directory = Path(directory)
        self.index: Path | None = None
        self.named: Mapping[str, Path] = MappingProxyType({})
        self._headers_only = headers_only
        self._problems: list[Problem] = []
        self._unreadable: dict[Path, CheckpointError] = {}
        self._unread: list[Path] = []
        self._lock = Lock()
        self._open: OrderedDict[Path, Shard] | None = OrderedDict()

        headers = self._read_headers() if single is None else self._read_single(single)
        self._identities = {path: header.identity for path, header in headers.items()}
        self.files = tuple(headers)
        self.metadata = {path: header.metadata for path, header in headers.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._merge(headers))
        self._report_missing(headers)
        self.lost: Mapping[Path, tuple[str, ...]] = MappingProxyType(dict(self._report_unread()))
        self.problems: tuple[Problem, ...] = tuple(self._problems)

    @property
    def has_weights(self) -> bool:
        """False for a directory without any safetensors file that can be read."""
        return bool(self.files)

    def tensor(self, name: str, *, raw: bool = False) -> NDArray[Any]:
        """The tensor `name` as a new array, of the shape in the file.

        Plain types are NumPy's. bfloat16 and the 8-bit floats are those of ml_dtypes where it is installed,
        else, and with `raw` everywhere, their bits in uint16 and uint8.

        Raises:
            CheckpointError: there is no such tensor, its file or type cannot be read, or the file is not the
                one any more whose header was read.
            ValueError: after `close`.
        """
        info = self.tensors.get(name)
        if info is None:
            raise self.why_absent(name)
        array: NDArray[Any] = np.empty(info.shape, array_dtype(info, raw=raw))
        self._read(info, 0, array)
        return array

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """The part [begin, end) of a tensor along its first axis; types and errors as `tensor`."""
        info = self.tensors.get(name)
        if info is None:
            raise self.why_absent(name)
        if not info.shape or not 0 <= begin <= end <= info.shape[0]:
            raise ValueError(f"rows: expected a part of {list(info.shape)}, got [{begin}, {end})")
        array: NDArray[Any] = np.empty((end - begin, *info.shape[1:]), array_dtype(info))
        self._read(info, begin * (info.nbytes // max(info.shape[0], 1)), array)
        return array

    def raw(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor of any type; errors as `tensor`."""
        info = self.tensors.get(name)
        if info is None:
            raise self.why_absent(name)
        if not 0 <= begin <= end <= info.nbytes:
            raise ValueError(f"raw: expected a part of {info.nbytes} bytes, got [{begin}, {end})")
        array = np.empty(end - begin, np.uint8)
        self._read(info, begin, array)
        return array

    def source(self, name: str) -> TensorInfo:
        """Type, shape and name of a tensor in its file, which `tensors` may have under another one."""
        return self.tensors[name]

    def is_changed(self, name: str) -> bool:
        """Whether a tensor is handed out with other values, or in another shape, than in its file."""
        return False

    def divisor(self, name: str) -> NDArray[np.float32] | None:
        """The values in the file of a tensor that is handed out as factors for them; None of any other."""
        return None

    def known_as(self, name: str) -> str:
        """The name in `tensors` of a tensor that a file calls `name`."""
        return name

    def with_file(self, path: Path, header: Header, names: Iterable[str]) -> Self:
        """A copy with some more tensors of a file; both share what is open, and closing this one counts."""
        more = copy.copy(self)
        more.__dict__.pop("absent", None)
        more.files = (*self.files, *([] if path in self.files else [path]))
        more.tensors = MappingProxyType({**self.tensors, **{name: header.tensors[name] for name in names}})
        more._identities = {**self._identities, path: header.identity}
        return more

    def close(self) -> None:
        """Closes the files; arrays that were handed out stay valid. May be called again."""
        with self._lock:
            self._open = None

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
        self._unread = [self.directory / name for name in unread if not name.startswith(_NO_PARTS)]
        if self.index is None:
            self._report_gaps(path.name for path in chosen)
            return {path: read_header(path) for path in sorted(chosen)}
        return self._read_indexed(sorted(chosen))

    def _read_single(self, path: Path) -> dict[Path, Header]:
        """The header of a file, or those of the shards of an index."""
        if path.suffix != ".json":
            return {path: read_header(path)}
        return self._read_indexed(self._follow(path))

    def _follow(self, index: Path) -> list[Path]:
        """The files that an index names, those that are there."""
        self.index = index
        self.named = MappingProxyType(read_index(index))
        return sorted(path for path in _distinct(self.named.values()) if os.path.lexists(path))

    def _read_indexed(self, shards: list[Path]) -> dict[Path, Header]:
        """The headers of the shards of an index, those that can be read."""
        headers = {}
        for path in shards:
            try:
                headers[path] = read_header(path)
            except CheckpointError as error:
                self._unreadable[path] = error
        return headers

    def _choose_files(self, weights: list[str], indexes: list[str]) -> set[Path]:
        """The files to read, by the order of preference above; reads the index where it decides."""
        for stem in _STEMS:
            single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
            if single in weights:
                if index in indexes:
                    self._report("index_ignored", f"{index} is not read: there is {single}")
                return {self.directory / single}
            if index in indexes:
                return set(self._follow(self.directory / index))
        if len(indexes) == 1:
            return set(self._follow(self.directory / indexes[0]))
        own = [name for name in weights if not name.startswith("consolidated")]
        return {self.directory / name for name in own or weights}

    def _merge(self, headers: dict[Path, Header]) -> dict[str, TensorInfo]:
        """All tensors by name. Where two files have one, the index decides; otherwise it is an error."""
        tensors: dict[str, TensorInfo] = {}
        for path, header in headers.items():
            for begin, end in header.holes:
                self._report("hole", f"{path.name}: no tensor covers bytes [{begin}, {end})")
            if self._is_as_promised(path, header):
                tensors.update(header.tensors)
                continue
            for name, info in header.tensors.items():
                owner = self.named.get(name)
                if owner is not None and owner is not path and owner != path:
                    message = f"also in {path.name}; the index says {owner.name}"
                    self._report("duplicate_tensor", message, name)
                    continue
                other = tensors.get(name)
                if other is not None:
                    message = f"also in {other.file.name}; give one of the two files, as {path}"
                    raise CheckpointError(message, file=path, tensor=name)
                if self.named and owner is None:
                    self._report("unindexed_tensor", f"in {path.name}, not in the index", name)
                if info.dtype not in _PLAIN_DTYPES and info.dtype not in _EXTENDED_DTYPES:
                    message = f"its type {info.dtype[:40]!r} has no array"
                    self._report("unreadable_dtype", message, name)
                tensors[name] = info
        return tensors

    def _is_as_promised(self, path: Path, header: Header) -> bool:
        """Whether all tensors of a file are the index's, none of another file, and of types with arrays."""
        owners = set(map(id, map(self.named.get, header.tensors)))
        types = {info.dtype for info in header.tensors.values()}
        return owners == {id(path)} and all(
            each in _PLAIN_DTYPES or each in _EXTENDED_DTYPES for each in types
        )

    def _report_missing(self, headers: dict[Path, Header]) -> None:
        """Shards, and tensors in them, that the index promises."""
        if not headers and not self.named:
            others = other_forms(self.directory)
            message = "the directory has no safetensors files" + (f"; {others}" if others else "")
            self._report("no_weights", message)
        absent = sorted(path for path in _distinct(self.named.values()) if path not in headers)
        promised = Counter(self.named.values()) if absent else Counter()
        for path in absent:
            told = f"{self._fetch_again(path)}; tensors in it by the index: {promised[path]:,}"
            if path in self._unreadable:
                self._report("unreadable_shard", f"{path.name}: {self._unreadable[path].reason}; {told}")
            else:
                self._report("missing_shard", f"{path.name} is missing; {told}")
        misplaced = [
            name
            for name, path in self.named.items()
            if ((info := self.tensors.get(name)) is None or info.file is not path)
            and path in headers
            and name not in headers[path].tensors
        ]
        if not misplaced:
            return
        places = {name: path for path, header in headers.items() for name in header.tensors}
        for name in misplaced:
            found = f"it is in {places[name].name}" if name in places else "it is not"
            message = f"the index says it is in {self.named[name].name}, {found}"
            self._report("missing_tensor", message, name)

    def _report_unread(self) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Files that are not read, with their tensors that are in no other."""
        for path in self._unread:
            try:
                names = read_header(path).tensors
            except CheckpointError:
                continue
            lost = [name for name in names if name not in self.tensors and name not in self.named]
            if lost:
                others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
                why = (
                    f"{self.index.name} does not name it"
                    if self.index
                    else f"{self.files[0].name} is beside it"
                )
                message = f"{path.name} has {lost[0]}{others}, and is not read: {why}"
                self._report("unread_tensors", message)
                yield path, tuple(lost)

    def _report_gaps(self, names: Iterable[str]) -> None:
        """Numbered files of which some are not there, where no index tells."""
        numbers: dict[tuple[str, int], set[int]] = {}
        for match in filter(None, map(_NUMBERED.fullmatch, names)):
            numbers.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
        for (stem, count), found in sorted(numbers.items()):
            first = 0 if 0 in found else 1  # exporters count from 1, some others from 0
            missing = count - len(found)
            if missing > 0:
                lost = next(number for number in range(first, first + count) if number not in found)
                message = (
                    f"{missing} of {count} files {stem}-*-of-*.safetensors are missing, number {lost} for one"
                    f"; {fetch_again(self.directory)} downloads them"
                )
                self._report("missing_shard", message)

    def _report(self, code: str, message: str, tensor: str | None = None) -> None:
        self._problems.append(make_problem(code, message, tensor=tensor))

    @cached_property
    def absent(self) -> Mapping[str, Path]:
        """The tensors that the index names and no file has, with the files they should be in."""
        return {name: path for name, path in self.named.items() if name not in self.tensors}

    def why_absent(self, name: str) -> CheckpointError:
        """The exception for a tensor that is not there: which file has it by the index, how to get that."""
        path = self.named.get(name)
        if path is None:
            near = near_names(name, self.tensors)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            return CheckpointError(f"no such tensor{hint}", file=self.directory, tensor=name)
        if path in self._identities:
            return CheckpointError("the index says it is in this file, it is not", file=path, tensor=name)
        reason = f": {self._unreadable[path].reason}" if path in self._unreadable else ", which is missing"
        message = f"the index says it is in this file{reason}; {self._fetch_again(path)}"
        return CheckpointError(message, file=path, tensor=name)

    def _fetch_again(self, path: Path) -> str:
        name = path.relative_to(self.directory).as_posix()
        return f"{fetch_again(self.directory, name, damaged=path in self._unreadable)} downloads it again"

    def _read(self, info: TensorInfo, offset: int, array: NDArray[Any]) -> None:
        """Fills the array with the bytes of a tensor from `offset` on."""
        if not array.size:
            return
        if self._headers_only:
            message = "only its header was fetched; open the checkpoint without headers_only"
            raise CheckpointError(message, file=info.file, tensor=info.name)
        try:
            self._shard(info.file).read_into(array.reshape(-1).view(np.uint8).data, info.begin + offset)
        except CheckpointError as error:
            raise CheckpointError(error.reason, file=info.file, tensor=info.name) from error

    def _shard(self, path: Path) -> Shard:
        """The file, open; kept so for the next tensors."""
        with self._lock:
            if self._open is None:
                raise ValueError(f"{self.directory}: closed, its tensors can no longer be read")
            shard = self._open.pop(path, None) or Shard(path, self._identities[path])
            self._open[path] = shard
            if len(self._open) > FILES_KEPT:
                self._open.popitem(last=False)
            return shard


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
    all_text = is_text("".join(weight_map))
    for name, shard in weight_map.items():
        if not all_text and not is_text(name):
            raise CheckpointError("the name is not valid Unicode", file=path, tensor=name)
        if not isinstance(shard, str):
            message = f"its file must be a string, found {type_name(shard)}"
            raise CheckpointError(message, file=path, tensor=name)
        if shard not in shards:
            shards[shard] = _shard_path(path, name, shard)
    return {name: shards[shard] for name, shard in weight_map.items()}


def _distinct(paths: Iterable[Path]) -> set[Path]:
    """The paths without repetitions; those of an index are a few objects, and slow to hash."""
    return set({id(path): path for path in paths}.values())


def array_dtype(info: TensorInfo, *, raw: bool = False) -> np.dtype[Any]:
    """The NumPy type in which the tensor is shown; with `raw` never one of ml_dtypes.

    Raises:
        CheckpointError: there is none, because its elements are smaller than a byte or its type is not known.
    """
    if info.dtype in _PLAIN_DTYPES:
        return np.dtype(_PLAIN_DTYPES[info.dtype])
    if info.dtype in _EXTENDED_DTYPES:
        return np.dtype(_EXTENDED_DTYPES[info.dtype][1]) if raw else _extended_dtype(info.dtype)
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
        with heard():
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
