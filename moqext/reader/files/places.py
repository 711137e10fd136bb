"""Which files a path means, and a hint where to look for one that leads to no checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moqext._C import ConfigError
from moqext.errors import CheckpointError
from moqext.reader.files.config_files import documents
from moqext.reader.files.untrusted import directory_fault, expand_home, other_form

WEIGHTS = ".safetensors"
INDEX = ".safetensors.index.json"
PIPELINE = "model_index.json"
"""Written by Diffusers at the root of a pipeline, whose parts are directories."""

NO_CHECKPOINT = "no checkpoint: neither a quantization configuration nor safetensors files"

_SHOWN = 4
"""Files and directories that a message names."""


class Place(NamedTuple):
    """Place of a checkpoint on disk.

    Attributes:
        directory: holds its configuration.
        file: the one file to read, of safetensors or an index of such; None for those that the directory
            means.
    """

    directory: Path
    file: Path | None


def locate(path: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> Place:
    """The place that a path means: a directory, or one file of weights or index of several.

    Args:
        path: a directory or a file; a leading `~` is the home directory.
        file: the file, below the directory `path`.

    Raises:
        CheckpointError: there is neither.
    """
    place = Path(expand_home(path))
    if file is not None and os.fspath(path):
        if (fault := directory_fault(place)) is not None:
            raise CheckpointError(fault, file=place)
        place = _member(place, file)
    if place.name.endswith((WEIGHTS, INDEX)) and os.path.isfile(place):
        return Place(place.parent, place)
    if file is not None:
        raise CheckpointError(f"file: expected a name that ends in {WEIGHTS} or {INDEX}", file=place)
    if (fault := directory_fault(path)) is not None:
        raise CheckpointError(fault, file=path or None)
    return Place(place, None)


def _member(directory: Path, file: str | os.PathLike[str]) -> Path:
    """The file below the directory."""
    relative = Path(file)
    if not relative.parts or relative.is_absolute() or ".." in relative.parts:
        message = f"file: expected the name of a file in it, got {os.fspath(file)!r}"
        raise CheckpointError(message, file=directory)
    path = directory / relative
    if not os.path.isfile(path):
        there = [name for name in _names(path.parent) if name.endswith((WEIGHTS, INDEX))]
        hint = f"; there {'are' if len(there) > 1 else 'is'} {_listed(there)}" if there else ""
        raise CheckpointError(f"no such file{hint}", file=path)
    return path


def instead_of(directory: Path, *, fetched: bool = False) -> str:
    """Tells what to give instead of a directory without a checkpoint, or what it has; else empty.

    Args:
        directory: that has neither a quantization configuration nor safetensors files.
        fetched: whether it stands for a model of the Hub, whose parts are opened by the names of files.
    """
    if snapshots := sorted(directory.glob("snapshots/*/")):
        return f"give the snapshot below it, {snapshots[-1]}"
    if parts := dict(_parts(directory)):
        quantized = [part for part, states in parts.items() if states]
        shown = [
            f"--file {part.name}/{_first_file(part)} (file=...)" if fetched else str(part)
            for part in quantized or parts
        ]
        what = "a Diffusers pipeline: give the part" if (directory / PIPELINE).exists() else "give the one"
        kind = "quantized" if quantized else "with safetensors files"
        return f"{what} that is {kind}, {_listed(shown, 'or')}"
    return other_forms(directory)


def other_forms(directory: Path) -> str:
    """Files of weights in forms that are not read here, and what reads them; empty where there are none."""
    forms: dict[str, list[str]] = {}
    for name in _names(directory):
        if (form := other_form(name)) is not None:
            forms.setdefault(form, []).append(name)
    return "; ".join(f"{_listed(names)}: {form}" for form, names in forms.items())


def _parts(directory: Path) -> Iterator[tuple[Path, bool]]:
    """Directories right below with a checkpoint each, and whether one states a quantization."""
    for name in _names(directory):
        part = directory / name
        if name.startswith(".") or not os.path.isdir(part) or _first_file(part) is None:
            continue
        try:
            yield part, any(True for _ in documents(part))
        except ConfigError:
            yield part, False


def _first_file(directory: Path) -> str | None:
    """The index of a directory, else its first file of weights."""
    names = _names(directory)
    for ending in (INDEX, WEIGHTS):
        for name in names:
            if name.endswith(ending):
                return name
    return None


def _names(directory: Path) -> list[str]:
    """Names in a directory, sorted; none where it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _listed(names: list[str], word: str = "and") -> str:
    if len(names) > _SHOWN:
        return f"{', '.join(names[:_SHOWN])} {word} {len(names) - _SHOWN} more"
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
