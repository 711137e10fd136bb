"""The files of a conversion beside its tensors, and the folder that gathers them until all are there."""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moqext.errors import CheckpointError

STAGING = ".moqext-convert-"
"""How the name of the temporary folder begins."""

QUANTIZATION_FILES = ("hf_quant_config.json", "quant_cfg.json")
INDEX_FILE = "model.safetensors.index.json"

_OTHER_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
)
_NESTED = ("text_config", "llm_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """The type of the model by config.json, None where it does not say."""
    parts = [config, *(config[name] for name in _NESTED if isinstance(config.get(name), dict))]
    named = (part.get(key) for part in parts for key in _DTYPE_KEYS)
    return next((name for name in named if isinstance(name, str)), None)


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the model without quantization, in that type; empty where there is none."""
    result = copy.deepcopy(dict(config))
    parts = [result, *(part for part in result.values() if isinstance(part, dict))]
    for part in parts:
        part.pop("quantization_config", None)
        for key in _DTYPE_KEYS:
            if key in part:
                part[key] = dtype
    if result and not any(key in result for key in _DTYPE_KEYS):
        result["torch_dtype"] = dtype  # the name that every version of Transformers reads
    return result


class Staging:
    """The temporary folder in the target directory, from which `publish` renames the files.

    As a context manager it removes what is left of it, and the target directory too if it made that and
    nothing was published.
    """

    def __init__(self, source: Path, out: str | os.PathLike[str], *, overwrite: bool) -> None:
        """Makes the directory if it is not there, and the folder in it.

        Raises:
            CheckpointError: `out` is no directory, is not empty without `overwrite`, is the source, or lies
                in it.
        """
        self._out = Path(out)
        if not os.fspath(out):
            raise CheckpointError("expected a directory to write to, got an empty name")
        if self._out.exists() and not self._out.is_dir():
            raise CheckpointError("exists and is no directory", file=self._out)
        self._made = not self._out.exists()
        if not self._made and any(self._out.iterdir()) and not overwrite:
            message = "is not empty; --overwrite (overwrite=True) replaces the checkpoint in it"
            raise CheckpointError(message, file=self._out)
        if self._out.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(f"lies in the checkpoint that is converted, {source}", file=self._out)
        self._out.mkdir(parents=True, exist_ok=True)
        for stale in self._out.glob(f"{STAGING}*"):
            shutil.rmtree(stale)
        self.folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=self._out))
        self._published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made and not self._published:
            self._out.rmdir()

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file."""
        (self.folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def publish(self) -> None:
        """Removes the weights and the configuration that are in the directory, and puts the files there.

        The configuration comes last: without it a loader finds no checkpoint.
        """
        for old in [*self._out.glob("*.safetensors"), *self._out.glob("*.safetensors.index.json")]:
            old.unlink()
        for name in ("config.json", *QUANTIZATION_FILES):
            (self._out / name).unlink(missing_ok=True)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name in (INDEX_FILE, "config.json")):
            target = self._out / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        self._published = True


def copy_others(source: Path, staging: Staging) -> list[str]:
    """Copies what is neither weights nor configuration: tokenizer, chat templates, licence.

    Returns:
        Names of files of weights in other forms, which are not copied.
    """
    left_out = []
    for path in _files(source):
        name = path.relative_to(source)
        if path.name in QUANTIZATION_FILES or str(name) == "config.json":
            continue
        if path.name.endswith(_OTHER_WEIGHTS):
            if not path.name.endswith((".safetensors", ".index.json")):
                left_out.append(str(name))
            continue
        target = staging.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return left_out


def _files(directory: Path) -> Iterator[Path]:
    """The files below, but for hidden folders, as version control and download tools make."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _files(path)
        elif path.is_file():
            yield path
