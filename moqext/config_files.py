"""The files of a checkpoint that a quantization configuration may stand in, in order of precedence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moqext._C import ConfigError
from moqext.errors import CheckpointError
from moqext.untrusted import RepeatedKeys, directory_fault, open_file, parse_object

# File name, JSON path of the document in it, document.
Document = tuple[str, str, Mapping[str, Any]]

# Parts of config.json that may hold a quantization_config: the file itself, then the text model of a
# multimodal one.
_NESTED_MODELS = ("text_config", "llm_config")
# Every exporter writes the first, those before 0.27 the second beside it, for mixed precision.
_OWN_FILES = ("hf_quant_config.json", "quant_cfg.json")
_FILE_LIMIT = 256 << 20  # bytes; the largest known file, of 22,422 layers, has 3 MB


def documents(directory: str | os.PathLike[str]) -> Iterator[Document]:
    """Yields what a directory says of its quantization, in order of precedence: file, JSON path, document.

    Nothing, where no file says anything. Raises ConfigError for what is no directory, for a file that cannot
    be read or is no JSON object, and for a name given twice in an object that counts.
    """
    if (fault := directory_fault(directory)) is not None:
        raise fail(os.fspath(directory) or "directory", "$", fault)
    root = Path(directory)
    config = _load(root / "config.json") or {}
    places = [("$", config)]
    places += [(f"$.{name}", config[name]) for name in _NESTED_MODELS if isinstance(config.get(name), dict)]
    for path, holder in places:
        where = f"{path}.quantization_config"
        if isinstance(holder, RepeatedKeys) and "quantization_config" in holder.repeated:
            raise fail("config.json", where, "given twice in one object")
        document = holder.get("quantization_config")
        if document is not None:
            _refuse_twice("config.json", where, document)
            yield "config.json", where, document
    for name in _OWN_FILES:
        document = _load(root / name)
        if document is not None:
            _refuse_twice(name, "$", document)
            yield name, "$", document


def fail(file: str, path: str, message: str) -> ConfigError:
    """The exception for the field at `path` of a file."""
    error = ConfigError(f"{file}: {path}: {message}")
    error.path = path
    return error


def _load(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when it is not there."""
    if not os.path.lexists(path):
        return None
    try:
        with open_file(path) as (stream, size):
            if size > _FILE_LIMIT:
                raise fail(path.name, "$", f"larger than the {_FILE_LIMIT} bytes a configuration may have")
            return parse_object(stream.read(), path, "the file")
    except CheckpointError as error:
        raise fail(path.name, "$", error.reason) from error


def _refuse_twice(file: str, path: str, value: Any) -> None:
    """Refuses names given twice anywhere below `value`: which one counts differs from reader to reader."""
    pending = [(path, value)]
    while pending:
        at, item = pending.pop()
        if isinstance(item, RepeatedKeys):
            raise fail(file, at + _step(item.repeated[0]), "given twice in one object")
        if isinstance(item, dict):
            pending += [(at + _step(name), inner) for name, inner in item.items()]
        elif isinstance(item, list):
            pending += [(f"{at}[{i}]", inner) for i, inner in enumerate(item)]


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() and name.isascii() else f"[{name!r}]"
