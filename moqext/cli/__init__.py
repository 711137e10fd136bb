"""The subcommands of `python -m moqext`."""

from moqext.checkpoint import Checkpoint
from moqext.errors import CheckpointError


def open_checkpoint(directory: str) -> Checkpoint:
    """The checkpoint in a directory that is one.

    Raises:
        CheckpointError: it has no file of a checkpoint, or one that cannot be read.
        ConfigError: its quantization configuration cannot be understood.
    """
    checkpoint = Checkpoint(directory)
    if checkpoint.config is None and not checkpoint.files.has_weights:
        message = "no checkpoint: neither a quantization configuration nor safetensors files"
        raise CheckpointError(message, file=checkpoint.directory)
    return checkpoint
