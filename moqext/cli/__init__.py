"""The subcommands of `python -m moqext`."""

import argparse
from typing import Any

from moqext.checkpoint import Checkpoint
from moqext.cli.progress import Progress
from moqext.errors import CheckpointError
from moqext.reader.files.places import NO_CHECKPOINT
from moqext.reader.records import Findings


def add_checkpoint(
    parser: argparse.ArgumentParser,
    *,
    what: str = "a ModelOpt checkpoint",
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Declares the arguments that name a checkpoint, or one that is `whole`; `open_checkpoint` takes them."""
    one_file = "" if whole else ", one .safetensors file"
    parser.add_argument(
        "directory",
        nargs="?" if optional else None,
        metavar="DIR" if optional else None,
        help=f"{what}{one_file}, or org/name[@revision] on the Hugging Face Hub",
    )
    parser.add_argument(
        "--component",
        metavar="NAME",
        help="the directory in it, of a Diffusers pipeline; by default the one that is quantized",
    )
    if whole:
        parser.set_defaults(file=None)
        return
    parser.add_argument("--file", metavar="NAME", help="the file to read, of several in the directory")


def open_checkpoint(args: argparse.Namespace, *, headers_only: bool = False, **options: Any) -> Checkpoint:
    """The checkpoint that the arguments name; `options` are those of `Checkpoint`.

    With `headers_only` no more than headers is fetched of a model of the Hub.

    Raises:
        CheckpointError: it has no file of a checkpoint, or one that cannot be read.
        ConfigError: its quantization configuration cannot be understood.
    """
    checkpoint = Checkpoint(
        args.directory, file=args.file, component=args.component, headers_only=headers_only, **options
    )
    if not checkpoint.has_content:
        raise CheckpointError(NO_CHECKPOINT, file=checkpoint.name)
    return checkpoint


def find(checkpoint: Checkpoint, *, block_scales: bool | None) -> Findings:
    """`Checkpoint.findings`, with a bar while scales are read."""
    progress = Progress(quiet=False, what="scales")
    try:
        return checkpoint.findings(block_scales=block_scales, progress=progress)
    finally:
        progress.end()
