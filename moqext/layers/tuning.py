"""The cache of measured choices: which kernel was the fastest here, by layer and number of tokens.

`moqext tune` and `tune(..., save=True)` of a method write it; every method looks its layer up when made.
Nothing is timed on the way, and the file is read once in a process. Choices count only where they were made:
on the same device, with the same version of moqext and the same driver. The file is JSON,

    {"moqext_tune": 1, "devices": {device: {software: {layer: {tokens: cell}}}}}

where `tokens` is the largest number that shares a choice, and a cell {"kernel", "variant", "seconds"}, with
"library" where the variant is an algorithm of cuBLASLt.
"""

import fcntl
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from moqext import _C
from moqext.environment import cpu_model
from moqext.errors import CheckpointError
from moqext.reader.files.untrusted import open_file, parse_object
from moqext.reader.files.whole import output_path, refuse_unwritable, write_whole

logger = logging.getLogger("moqext")

SCHEMA = 1
"""Version of the file; raised when a key changes its meaning."""

MAX_BYTES = 64 << 20
MAX_TOKENS = 2**31 - 1
MAX_BUCKETS = 64
"""Numbers of tokens of a layer; MOQ_MAX_TUNED of csrc/ops/plan.h."""
MAX_VARIANT = 63
"""Largest number of a variant; MOQ_MAX_VARIANTS of csrc/ops/tune.h."""

_KERNEL = re.compile(r"[a-z0-9]{1,16}:[a-z0-9_]{1,64}")
_TOKENS = re.compile(r"[1-9][0-9]{0,9}")
_said: set[Path] = set()
_UNTOLD = ("_plan", "device", "interleaved", "alpha", "beta", "limit")
"""Slots of methods that do not decide which kernel is fast."""


class Cell(NamedTuple):
    """The fastest kernel for a layer and a number of tokens.

    Attributes:
        kernel: "family:name".
        variant: which of the kernel's ways; 0 for the kernel's own choice.
        seconds: of a call, the median.
        library: version of cuBLASLt, where the variant is one of its algorithms; else empty.
    """

    kernel: str
    variant: int
    seconds: float
    library: str = ""


Layers = dict[str, dict[int, Cell]]
"""Choices by layer and by the largest number of tokens that shares one."""


def cache_path() -> Path | None:
    """The file that `MOQEXT_TUNE` names, or tune.json in the user's cache directory.

    Returns:
        None where `MOQEXT_TUNE` is "0", or the user has no home directory.
    """
    named = os.environ.get("MOQEXT_TUNE")
    if named == "0":
        return None
    if named:
        return output_path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        caches = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return caches / "moqext" / "tune.json"


def layer_key(method: object) -> str:
    """A layer as the cache names it: the class of its method and the arguments that a kernel's time knows."""
    kinds = [kind for kind in type(method).__mro__ if kind.__module__.partition(".")[0] == "moqext"]
    slots = sorted(name for kind in kinds for name in vars(kind)["__slots__"] if name not in _UNTOLD)
    return f"{kinds[0].__name__} " + json.dumps({name: getattr(method, name) for name in slots})


@cache
def device_key(device: str) -> str | None:
    """A device as the cache names it: its name and attributes; None where there is none.

    Args:
        device: "cpu" or "cuda:N".
    """
    if device == "cpu":
        return f"{cpu_model()}, {_C.cpu_isa()}"
    with suppress(RuntimeError, StopIteration):
        found = next(row for row in _C.cuda_devices() if f"cuda:{row['index']}" == device)
        capability = ".".join(map(str, found["capability"]))
        return f"{found['name']}, {capability}, {found['sm_count']} SMs, {found['memory'] / 2**30:.0f} GiB"
    return None


@cache
def software_key(device: str) -> str:
    """The software that a choice belongs to: moqext, and on a GPU the driver.

    Args:
        device: "cpu" or "cuda:N".
    """
    about = _C.build_info()
    version = f"moqext {about['version']} {about['commit'] or ''}".rstrip()
    if device == "cpu":
        return version
    driver = _C.cuda_versions()[1]
    return f"{version}, driver {driver // 1000}.{driver % 1000 // 10}"


def take(plan: _C.Plan, method: object, device: str) -> None:
    """Has a plan keep what the cache says of its layer, if anything; a cache that does not fit is ignored.

    Args:
        plan: a new one, of the method.
        method: as for `layer_key`.
        device: "cpu" or "cuda:N".
    """
    path = cache_path()
    if path is None or os.environ.get("MOQEXT_KERNEL"):
        return
    layers = _layers_of(path, device)
    if not layers:
        return
    for tokens, cell in layers.get(layer_key(method), {}).items():
        variant = cell.variant if cell.library == _library_of(cell.kernel) else 0
        if plan.has_variant(tokens, cell.kernel, variant):
            plan.keep(tokens, cell.kernel, variant)
        else:
            why = f"{cell.kernel}, {variant} does not run {tokens} tokens of {layer_key(method)}"
            _say(path, logging.WARNING, f"{why}; it is ignored")


def save(path: Path, device: str, layers: Layers) -> None:
    """Writes choices to the file, beside what others wrote or write at the same time.

    Args:
        path: its directory is made where there is none.
        device: "cpu" or "cuda:N", where they were measured.
        layers: the choices.

    Raises:
        CheckpointError: as `check`, or there is no such device.
        OSError: it cannot be written.
    """
    key = device_key(device)
    if key is None:
        raise CheckpointError(f"no device {device} whose choices could be written", file=path)
    software = software_key(device)
    check(path)
    with _alone(path.parent):
        empty: dict[str, Any] = {"moqext_tune": SCHEMA, "devices": {}}
        document = read(path) if path.exists() else empty
        found: Any = document["devices"].get(key)
        if not isinstance(found, dict):
            found = {}
        try:
            known = _checked(found.get(software, {}))
        except ValueError:
            known = {}
        for layer, cells in layers.items():
            newest = list((cells | {**known.get(layer, {}), **cells}).items())[:MAX_BUCKETS]
            known[layer] = dict(sorted(newest))
        document["devices"][key] = found | {software: {name: _told(known[name]) for name in sorted(known)}}
        write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    forget()


def check(path: Path) -> None:
    """Makes the directory of a file to be written, and refuses what could not be kept there.

    Raises:
        CheckpointError: the file is there and no cache, or cannot be written; or MOQEXT_KERNEL is set, so
            that one kernel alone is measured.
        OSError: there can be no such directory.
    """
    if os.environ.get("MOQEXT_KERNEL"):
        raise CheckpointError("MOQEXT_KERNEL is set: no other kernel would be measured", file=path)
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(path)
    if path.exists():
        read(path)


def forget() -> None:
    """Has files read again, which may have changed since."""
    _read_once.cache_clear()
    _layers_of.cache_clear()


def cells_of(plan: _C.Plan, choices: Iterable[tuple[int, str, int, float]]) -> dict[int, Cell]:
    """The cells of choices measured in this process.

    Args:
        plan: of the layer.
        choices: (tokens, kernel, variant, seconds) each.
    """
    return {
        plan.bucket(tokens): Cell(kernel, variant, seconds, _library_of(kernel))
        for tokens, kernel, variant, seconds in choices
    }


def read(path: Path) -> dict[str, Any]:
    """The file as it is.

    Raises:
        CheckpointError: it cannot be read, or is no cache of this version.
    """
    with open_file(path) as (stream, size):
        if size > MAX_BYTES:
            raise CheckpointError(f"{size} bytes, a cache of moqext tune has at most {MAX_BYTES}", file=path)
        document = parse_object(stream.read(MAX_BYTES + 1), path, "the cache of moqext tune")
    if document.get("moqext_tune") != SCHEMA or not isinstance(document.get("devices"), dict):
        raise CheckpointError("is no cache of moqext tune, or one of another version", file=path)
    return document


@cache
def _read_once(path: Path) -> dict[str, Any]:
    """The devices in the file, none where it is not there or cannot be used."""
    if not os.path.exists(path):
        return {}
    try:
        devices: dict[str, Any] = read(path)["devices"]
    except CheckpointError as error:
        _say(path, logging.WARNING, f"{error.reason}; it is ignored")
        return {}
    return devices


@cache
def _layers_of(path: Path, device: str) -> Layers:
    """The choices in the file for a device of this machine and this software."""
    devices = _read_once(path)
    if not devices:
        return {}
    key, software = device_key(device), software_key(device)
    found = devices.get(key) if key is not None else None
    if found is None:
        _say(path, logging.INFO, f"nothing in it was measured on {key or device}; it is ignored")
        return {}
    if not isinstance(found, dict) or software not in found:
        why = f"what was measured on {key} is not of {software}; it is ignored until `moqext tune`"
        _say(path, logging.WARNING, why)
        return {}
    try:
        return _checked(found[software])
    except ValueError as error:
        _say(path, logging.WARNING, f"{error}; it is ignored")
        return {}


def _checked(layers: object) -> Layers:
    """The layers of a device, whatever is in the file.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(layers, dict):
        raise ValueError("expected an object of layers")
    return {name: _cells(cells) for name, cells in layers.items()}


def _cells(cells: object) -> dict[int, Cell]:
    if not isinstance(cells, dict) or len(cells) > MAX_BUCKETS:
        raise ValueError(f"expected an object of up to {MAX_BUCKETS} numbers of tokens for each layer")
    found = {}
    for tokens, cell in cells.items():
        if not _TOKENS.fullmatch(tokens) or int(tokens) > MAX_TOKENS or not _is_cell(cell):
            raise ValueError(f"not a choice for a number of tokens: {tokens[:32]!r}")
        found[int(tokens)] = Cell(
            cell["kernel"], int(cell["variant"]), cell["seconds"], cell.get("library", "")
        )
    return found


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict):
        return False
    kernel, variant, seconds = cell.get("kernel"), cell.get("variant"), cell.get("seconds")
    return (
        isinstance(kernel, str)
        and _KERNEL.fullmatch(kernel) is not None
        and isinstance(variant, int)
        and 0 <= variant <= MAX_VARIANT
        and isinstance(seconds, float)
        and 0.0 < seconds < math.inf
        and isinstance(cell.get("library", ""), str)
    )


def _told(cells: Mapping[int, Cell]) -> dict[str, dict[str, Any]]:
    """The cells of a layer as JSON has them."""
    return {
        str(tokens): {name: value for name, value in cell._asdict().items() if value != ""}
        for tokens, cell in cells.items()
    }


def _library_of(kernel: str) -> str:
    """The version of the library whose algorithms are a kernel's variants; empty for moqext's own kernels."""
    if not kernel.startswith("cuda:cublaslt"):
        return ""
    version = _C.cublaslt()[1]
    return ".".join(map(str, version or ()))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keeps other writers of the directory out, where its file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say(path: Path, level: int, message: str) -> None:
    """Logs a line about a file, the first one alone in a process."""
    if path not in _said:
        _said.add(path)
        logger.log(level, "%s: %s", path, message)
