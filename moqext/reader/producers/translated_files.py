"""The tensors of files of another producer, under ModelOpt's names and in its shapes."""

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moqext.reader.files.tensor_files import TensorFiles, TensorInfo
from moqext.reader.files.tensor_header import Header
from moqext.reader.producers.producer import Producer, View
from moqext.reader.producers.reciprocal import factors_of
from moqext.reference import as_float32

_FACTORS = ("divisor", "reciprocal")


class TranslatedFiles(TensorFiles):
    """Files of another producer; what ModelOpt calls and stores alike passes through.

    A name that two tensors would get stays with the one that has it in the files.
    """

    def __init__(self, files: TensorFiles, producer: Producer) -> None:
        """Takes over what is open in `files`."""
        self.__dict__.update(files.__dict__)
        self._stored = files
        self._producer = producer
        self._views: dict[str, tuple[str, View]] = {}
        tensors: dict[str, TensorInfo] = {}
        hidden = set()
        for name, info in files.tensors.items():
            view = producer.view(info, files.tensors)
            if view is None:
                hidden.add(name)
                continue
            if view.name != name and (view.name in files.tensors or view.name in tensors):
                view = View(name, info.shape)
            dtype = "F32" if view.change in _FACTORS else info.dtype
            tensors[view.name] = TensorInfo(view.name, dtype, view.shape, info.file, info.begin, info.end)
            self._views[view.name] = (name, view)
        self.tensors = MappingProxyType(tensors)
        names = {name: view.name for name, view in self._views.values()}
        self.named = MappingProxyType(
            {
                names.get(name, producer.rename(name)): path
                for name, path in files.named.items()
                if name not in hidden
            }
        )

    def source(self, name: str) -> TensorInfo:
        """See `TensorFiles.source`."""
        return self._stored.source(self._views[name][0])

    def is_changed(self, name: str) -> bool:
        """See `TensorFiles.is_changed`."""
        return self._views[name][1].change != "none" or self.source(name).shape != self.tensors[name].shape

    def divisor(self, name: str) -> NDArray[np.float32] | None:
        """See `TensorFiles.divisor`."""
        source, view = self._views[name]
        return as_float32(self._stored.tensor(source)) if view.change in _FACTORS else None

    def known_as(self, name: str) -> str:
        """See `TensorFiles.known_as`."""
        return self._producer.rename(name)

    def tensor(self, name: str, *, raw: bool = False) -> NDArray[Any]:
        """See `TensorFiles.tensor`."""
        if name not in self._views:
            raise self.why_absent(name)
        source, view = self._views[name]
        array = self._stored.tensor(source, raw=raw)
        if view.change == "divisor":
            array = factors_of(array)
        elif view.change == "reciprocal":
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # judged as scales are
                array = np.reciprocal(as_float32(array))
        elif view.change == "rows":
            array = np.repeat(array.reshape(1), view.shape[0])
        return array.reshape(view.shape)

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """See `TensorFiles.rows`."""
        if name not in self._views:
            raise self.why_absent(name)
        source, view = self._views[name]
        if view.change == "none" and view.shape and self.source(name).shape[:1] == view.shape[:1]:
            return self._stored.rows(source, begin, end).reshape(end - begin, *view.shape[1:])
        if not view.shape or not 0 <= begin <= end <= view.shape[0]:
            raise ValueError(f"rows: expected a part of {list(view.shape)}, got [{begin}, {end})")
        return self.tensor(name)[begin:end]

    def raw(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        """See `TensorFiles.raw`."""
        if name not in self._views:
            raise self.why_absent(name)
        source, view = self._views[name]
        if view.change == "none":
            return self._stored.raw(source, begin, end)
        content = self.tensor(name, raw=True).reshape(-1).view(np.uint8)
        if not 0 <= begin <= end <= content.size:
            raise ValueError(f"raw: expected a part of {content.size} bytes, got [{begin}, {end})")
        return content[begin:end]

    def with_file(self, path: Path, header: Header, names: Iterable[str]) -> Self:
        """See `TensorFiles.with_file`; `names` are those of the file."""
        return type(self)(self._stored.with_file(path, header, names), self._producer)

    def close(self) -> None:
        """See `TensorFiles.close`."""
        self._stored.close()
