"""Checkpoints of the Hugging Face Hub, by name: `org/name` or `org/name@revision`.

huggingface_hub fetches them, where it is installed, with its cache, its token and its HF_ENDPOINT. A name
that is a directory here is that directory. To look at a checkpoint the beginnings of its files are enough:
then only JSON and headers are fetched, and files of the same size that hold the header and nothing else stand
in for the shards.
"""

import importlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from moqext.errors import CheckpointError
from moqext.interrupts import heard
from moqext.reader.files.tensor_header import LENGTH_BYTES, MAX_HEADER_BYTES
from moqext.reader.files.untrusted import HUB_NAME

_CONFIGURATION = ("config.json", "hf_quant_config.json", "quant_cfg.json")
_PIPELINE = ("model_index.json", *(f"*/{name}" for name in _CONFIGURATION))
"""Files that say of a Diffusers pipeline which of its components are quantized."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", ".*")
_FIRST_BYTES = 1 << 18
"""Fetched of a shard at first: most headers are shorter."""
_AT_ONCE = 8
"""Requests that are under way together."""


class HubName(NamedTuple):
    """A model of the Hub."""

    repo: str
    revision: str | None


def hub_name(name: str | os.PathLike[str]) -> HubName | None:
    """The model that a name stands for; None where it is a path here, or can be no model's name."""
    if not isinstance(name, str):
        return None
    match = HUB_NAME.fullmatch(name)
    if match is None or os.path.exists(name) or os.path.exists(name.split("/")[0]):
        return None
    return HubName(match["repo"], match["revision"])


def is_installed() -> bool:
    """Whether huggingface_hub can be imported."""
    return find_spec("huggingface_hub") is not None


def fetch(
    name: HubName,
    *,
    configuration_only: bool = False,
    only: str | None = None,
    component: str | None = None,
) -> Path:
    """The directory that the cache has the model in, with everything but weights in other forms.

    Args:
        name: the model.
        configuration_only: fetches what states the quantization, of the model or its components, nothing
            else.
        only: the one file of weights that is wanted; all where that is an index.
        component: the directory of the model that is wanted.

    Raises:
        CheckpointError: there is no such model or revision, or it cannot be fetched.
    """
    below = "" if component is None else f"{component}/"
    wanted = [*_CONFIGURATION, *_PIPELINE] if configuration_only else [f"{below}*"] if below else None
    if only is not None and only.endswith(".safetensors"):
        wanted = ["*.json", f"{below}{only}"]
    with _told(name):
        hub = importlib.import_module("huggingface_hub")
        return Path(
            hub.snapshot_download(
                name.repo, revision=name.revision, allow_patterns=wanted, ignore_patterns=list(_OTHER_WEIGHTS)
            )
        )


def fetch_headers(
    name: HubName, *, only: str | None = None, component: str | None = None
) -> "tempfile.TemporaryDirectory[str]":
    """A directory with the JSON files of the model, and for each shard a file with its header alone.

    Args:
        name: the model.
        only: the one file of weights that is wanted; all where that is an index.
        component: the directory of the model that is wanted.

    Raises:
        CheckpointError: as `fetch`, or a shard is not what its name says.
    """
    with _told(name):
        hub = importlib.import_module("huggingface_hub")
        about = hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        files = {file.rfilename: file.size for file in about.siblings if _is_safe(file.rfilename)}
        pinned = HubName(name.repo, about.sha)
        directory = tempfile.TemporaryDirectory(prefix="moqext-hub-")
        root = Path(directory.name)

        def take(file: str) -> None:
            target = root / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith(".json"):
                path = hub.hf_hub_download(pinned.repo, file, revision=pinned.revision)
                target.write_bytes(Path(path).read_bytes())
            else:
                _write_header(pinned, file, files[file], target)

        below = "" if component is None else f"{component}/"
        wanted = [
            file for file in files if file.startswith(below) and _has_headers(file.removeprefix(below), only)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(take, wanted))
    return directory


def fetch_again(directory: Path, file: str | None = None, *, damaged: bool = False) -> str:
    """The command that downloads a file of a checkpoint again, or all that is missing.

    Args:
        directory: of the checkpoint; in the library's cache it tells the model.
        file: its name below the directory.
        damaged: whether the file is there, and has to be replaced.
    """
    cached = [part.removeprefix("models--") for part in directory.parts if part.startswith("models--")]
    words = ["hf download", cached[-1].replace("--", "/", 1) if cached else "ORG/NAME"]
    words += [file] if file else []
    words += [] if cached else [f"--local-dir {directory}"]
    return f"`{' '.join(words)}{' --force-download' if damaged else ''}`"


def _has_headers(file: str, only: str | None) -> bool:
    """Whether a file tells of the model: its configuration, an index, or a header that is wanted."""
    if file.endswith(".safetensors"):
        return only is None or not only.endswith(".safetensors") or file == only
    name = file.rpartition("/")[2]
    return name in (*_CONFIGURATION, "model_index.json") or name.endswith(".index.json")


def _is_safe(file: str) -> bool:
    """Whether a name of a file stays below the directory."""
    return not file.startswith("/") and ".." not in file.split("/") and "\0" not in file


def _write_header(name: HubName, file: str, size: int | None, target: Path) -> None:
    """The header of a shard, then a hole up to its size, which the reader checks the header against."""
    head = _fetch_range(name, file, 0, _FIRST_BYTES)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    end = LENGTH_BYTES + length
    if length <= MAX_HEADER_BYTES and end > len(head) >= _FIRST_BYTES:
        head += _fetch_range(name, file, len(head), end)
    with open(target, "wb") as stream:
        stream.write(head[:end] if length <= MAX_HEADER_BYTES else head)
        stream.truncate(max(size or 0, stream.tell()))


def _fetch_range(name: HubName, file: str, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a file, fewer where it is shorter."""
    hub: Any = importlib.import_module("huggingface_hub")
    tools: Any = importlib.import_module("huggingface_hub.utils")
    url = hub.hf_hub_url(name.repo, file, revision=name.revision)
    headers = {**tools.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    answer = tools.get_session().get(url, headers=headers)
    tools.hf_raise_for_status(answer)
    content: bytes = answer.content
    return content if answer.status_code == 206 else content[begin:end]


@contextmanager
def _told(name: HubName) -> Iterator[None]:
    """Turns what the library and the network raise into an error that names the model."""
    shown = name.repo + (f"@{name.revision}" if name.revision else "")
    try:
        with heard():
            yield
    except CheckpointError:
        raise
    except Exception as error:  # the library's own errors, and those of the client it uses, share no base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"no such directory here, and cannot be fetched from the Hugging Face Hub: {reason}"
        raise CheckpointError(message, file=shown) from error
