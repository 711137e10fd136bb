"""Which files a path means, and a hint where to look for one that leads to no checkpoint."""

import os
from pathlib import Path
from typing import NamedTuple

from moqext._C import ConfigError
from moqext.errors import CheckpointError
from moqext.reader.files.config_files import documents
from moqext.reader.files.tensor_header import read_header
from moqext.reader.files.untrusted import directory_fault, expand_home, other_form

WEIGHTS = ".safetensors"
INDEX = ".safetensors.index.json"
PIPELINE = "model_index.json"
"""Written by Diffusers at the root of a pipeline, whose parts are directories."""

NO_CHECKPOINT = "no checkpoint: neither a quantization configuration nor safetensors files"

_SCALES = ("weight_scale", "scale_weight", "weight_scale_inv")
"""Ends of the names of weight scales, as ModelOpt, ComfyUI and makers of FP8 models write them."""
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


def locate(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str] | None = None,
    component: str | None = None,
) -> Place:
    """The place that a path means: a directory, or one file of weights or index of several.

    Args:
        path: a directory or a file; a leading `~` is the home directory.
        file: the file, below the directory `path` or that of the component.
        component: the directory in `path` that is meant.

    Raises:
        CheckpointError: there is neither.
    """
    if component is not None:
        path = _component(Path(expand_home(path)), component)
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


def _component(directory: Path, component: str) -> Path:
    """The directory of that name in another one."""
    parts = Path(component).parts if isinstance(component, str) else ()
    if len(parts) != 1 or parts[0] in ("..", os.sep):
        message = f"component: expected the name of a directory in it, got {component!r}"
        raise CheckpointError(message, file=directory)
    if (fault := directory_fault(directory)) is not None:
        raise CheckpointError(fault, file=directory)
    if not os.path.isdir(path := directory / component):
        there = [part.name for part in _parts(directory)]
        hint = f"; there {'are' if len(there) > 1 else 'is'} {_listed(there)}" if there else ""
        raise CheckpointError(f"component: no such directory{hint}", file=path)
    return path


def find_component(directory: Path) -> str | None:
    """The one component of a Diffusers pipeline that is quantized; None of anything else."""
    if not os.path.isfile(directory / PIPELINE):
        return None
    quantized = _quantized(_parts(directory))
    return quantized[0].name if len(quantized) == 1 else None


def stated_component(directory: Path) -> str | None:
    """The one component of a pipeline whose configuration states a quantization, where no weights are."""
    if not os.path.isfile(directory / PIPELINE):
        return None
    stated = [name for name in _names(directory) if _states_quantization(directory / name)]
    return stated[0] if len(stated) == 1 else None


def instead_of(directory: Path) -> str:
    """Tells what to give instead of a directory without a checkpoint, or what it has; else empty.

    Args:
        directory: that has neither a quantization configuration nor safetensors files.
    """
    if snapshots := sorted(directory.glob("snapshots/*/")):
        return f"give the snapshot below it, {snapshots[-1]}"
    if parts := _parts(directory):
        quantized = _quantized(parts)
        what = "a Diffusers pipeline" if (directory / PIPELINE).exists() else "checkpoints are below it"
        kind = "quantized" if quantized else "with safetensors files"
        names = _listed([part.name for part in quantized or parts], "or")
        return f"{what}: give the component that is {kind}, --component {names} (component=)"
    return other_forms(directory)


def other_forms(directory: Path) -> str:
    """Files of weights in forms that are not read here, and what reads them; empty where there are none."""
    forms: dict[str, list[str]] = {}
    for name in _names(directory):
        if (form := other_form(name)) is not None:
            forms.setdefault(form, []).append(name)
    return "; ".join(f"{_listed(names)}: {form}" for form, names in forms.items())


def _parts(directory: Path) -> list[Path]:
    """Directories right below with a checkpoint each."""
    below = [directory / name for name in _names(directory) if not name.startswith(".")]
    return [
        path
        for path in below
        if os.path.isdir(path) and any(file.endswith((INDEX, WEIGHTS)) for file in _names(path))
    ]


def _quantized(parts: list[Path]) -> list[Path]:
    """The parts whose configuration states a quantization; where none does, those with weight scales."""
    return list(filter(_states_quantization, parts)) or list(filter(_has_scales, parts))


def _states_quantization(directory: Path) -> bool:
    """Whether a configuration in a directory states a quantization."""
    try:
        return os.path.isdir(directory) and any(True for _ in documents(directory))
    except ConfigError:
        return False


def _has_scales(directory: Path) -> bool:
    """Whether a file of weights in a directory has a weight scale, by its header."""
    for name in _names(directory):
        if name.endswith(WEIGHTS):
            try:
                tensors = read_header(directory / name).tensors
            except CheckpointError:
                continue
            if any(tensor.endswith(_SCALES) for tensor in tensors):
                return True
    return False


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
