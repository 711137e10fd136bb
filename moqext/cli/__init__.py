"""The subcommands of `python -m moqext`."""

from pathlib import Path
from typing import Any

from moqext.checkpoint import Checkpoint
from moqext.errors import CheckpointError


def open_checkpoint(directory: str, *, headers_only: bool = False, **options: Any) -> Checkpoint:
    """The checkpoint in a directory that is one, or of a model of the Hub.

    With `headers_only` no more than headers is fetched of the latter; `options` are those of `Checkpoint`.

    Raises:
        CheckpointError: it has no file of a checkpoint, or one that cannot be read.
        ConfigError: its quantization configuration cannot be understood.
    """
    checkpoint = Checkpoint(directory, headers_only=headers_only, **options)
    if checkpoint.config is None and not checkpoint.files.has_weights:
        message = "no checkpoint: neither a quantization configuration nor safetensors files"
        raise CheckpointError(message + _snapshots(checkpoint.directory), file=checkpoint.directory)
    return checkpoint


def _snapshots(directory: Path) -> str:
    """Where the files are if the directory is one of a download cache, which has them in `snapshots`."""
    below = sorted(directory.glob("snapshots/*/"))
    return f"; give the snapshot below it, {below[-1]}" if below else ""
