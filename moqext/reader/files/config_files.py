"""The files of a checkpoint that a quantization configuration may stand in, in order of precedence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moqext._C import ConfigError
from moqext.errors import CheckpointError
from moqext.reader.files.hub import fetch, hub_name, is_installed
from moqext.reader.files.untrusted import RepeatedKeys, directory_fault, expand_home, open_file, parse_object

# File name, JSON path of the document in it, document.
Document = tuple[str, str, Mapping[str, Any]]

# Parts of config.json that may hold a quantization_config: the file itself, then the text model of a
# multimodal one.
_NESTED_MODELS = ("text_config", "llm_config")
# Every exporter writes the first, those before 0.27 the second beside it, for mixed precision.
_OWN_FILES = ("hf_quant_config.json", "quant_cfg.json")
# Readers for the checkpoints of other quantizers, by their quant_method.
_OTHER_QUANTIZERS = {
    "compressed-tensors": "llm-compressor wrote it; moqext.Checkpoint reads it with its tensors",
    "fp8": "FP8 as its maker stores it; moqext.Checkpoint reads it with its tensors",
    "fbgemm_fp8": "vLLM, and Transformers with fbgemm-gpu, read it",
    "mxfp4": "MXFP4 as gpt-oss has it; moqext.Checkpoint reads it with its tensors",
    "gptq": "vLLM, SGLang, and Transformers with gptqmodel read it",
    "awq": "vLLM, SGLang, and Transformers with gptqmodel read it",
    "bitsandbytes": "vLLM, and Transformers with bitsandbytes, read it",
    "torchao": "vLLM, and Transformers with torchao, read it",
    "quark": "AMD Quark wrote it; vLLM, SGLang, and Transformers with amd-quark read it",
    "auto-round": "vLLM, SGLang, and Transformers with auto-round read it",
    "hqq": "Transformers with hqq reads it",
    "gguf": "llama.cpp, vLLM and Transformers read it",
}
_FILE_LIMIT = 64 << 20  # bytes; the largest known file, of 22,422 layers, has 3 MB


def documents(directory: str | os.PathLike[str]) -> Iterator[Document]:
    """Yields what a directory says of its quantization, in order of precedence: file, JSON path, document.

    Nothing, where no file says anything. Raises ConfigError for what is no directory, for a file that cannot
    be read or is no JSON object, and for a name given twice in an object that counts.
    """
    if (model := hub_name(directory)) is not None and is_installed():
        try:
            directory = fetch(model, configuration_only=True)
        except CheckpointError as error:
            raise fail(os.fspath(directory), "$", error.reason) from error
    if (fault := directory_fault(directory)) is not None:
        raise fail(os.fspath(directory) or "directory", "$", fault)
    root = Path(expand_home(directory))
    config = _load(root / "config.json") or {}
    places = [("$", config)]
    places += [(f"$.{name}", config[name]) for name in _NESTED_MODELS if isinstance(config.get(name), dict)]
    for path, holder in places:
        where = f"{path}.quantization_config"
        for name in ("quantization_config", *_NESTED_MODELS):
            if isinstance(holder, RepeatedKeys) and name in holder.repeated:
                raise fail("config.json", f"{path}.{name}", "given twice in one object")
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


def with_reader(error: ConfigError, found: Iterable[Document]) -> ConfigError:
    """The exception with what reads the checkpoint, where another quantizer wrote it and that is known."""
    if not error.path.endswith("quant_method"):
        return error
    for _, _, document in found:
        inner = document.get("quantization_config")
        method = (inner if isinstance(inner, Mapping) else document).get("quant_method")
        reader = _OTHER_QUANTIZERS.get(method) if isinstance(method, str) else None
        if reader is not None:
            return _again(error, f"{error}; {reader}")
    return error


def in_directory(error: ConfigError, directory: str) -> ConfigError:
    """The exception with the directory at the beginning of its message."""
    return error if str(error).startswith(directory) else _again(error, f"{directory}: {error}")


def _again(error: ConfigError, message: str) -> ConfigError:
    again = ConfigError(message)
    again.path = error.path
    return again


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
    if (twice := given_twice(path, value)) is not None:
        raise fail(file, twice, "given twice in one object")


def given_twice(path: str, value: Any) -> str | None:
    """The path of a name that an object at or below `value` has twice; None where there is none."""
    pending: list[tuple[_Place, Any]] = [(_Place(None, path), value)]
    while pending:
        place, item = pending.pop()
        if isinstance(item, RepeatedKeys):
            return _spell(place) + _step(item.repeated[0])
        members: Iterable[tuple[str | int, Any]] = ()
        if isinstance(item, (dict, list)):
            members = item.items() if isinstance(item, dict) else enumerate(item)
        pending += [(_Place(place, key), inner) for key, inner in members if isinstance(inner, (dict, list))]
    return None


class _Place(NamedTuple):
    """The holder of a value, and its name or index there; the path of the whole where nothing holds it.

    Spelled for a message only: the paths of all members of an object with a long name would take the name
    times the members.
    """

    around: _Place | None
    step: str | int


def _spell(place: _Place) -> str:
    steps = []
    around = place.around
    while around is not None:
        steps.append(f"[{place.step}]" if isinstance(place.step, int) else _step(place.step))
        place, around = around, around.around
    return str(place.step) + "".join(reversed(steps))


def _step(name: str) -> str:
    return f".{name}" if name.isidentifier() and name.isascii() else f"[{name!r}]"
