"""Options, progress and report of the commands that write a checkpoint."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from moqext.cli import open_checkpoint, text
from moqext.cli.progress import Progress
from moqext.tools.convert import MAX_SHARD_SIZE

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Declares `--max-shard-size`, `--overwrite`, `--quiet` and `--json`."""
    parser.add_argument(
        "--max-shard-size", type=parse_size, default=MAX_SHARD_SIZE, metavar="SIZE", help="of a file (5GB)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint that is in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress and no report")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def write_checkpoint(
    args: argparse.Namespace,
    write: Callable[..., Any],
    report: Callable[[Any], Sequence[str]],
    options: dict[str, Any],
    facts: dict[str, Any],
) -> int:
    """Opens a checkpoint, writes another one with a bar, and prints the report; returns the exit status.

    Args:
        args: of `add_checkpoint` and `add_output_options`.
        write: the method of `Checkpoint`, called with the options of `add_output_options`, too.
        report: sentences on its result, a data class.
        options: of `Checkpoint`.
        facts: what the JSON has before the fields of the result.
    """
    progress = Progress(quiet=args.quiet)
    with open_checkpoint(args, **options) as checkpoint:
        try:
            result = write(
                checkpoint,
                args.out,
                overwrite=args.overwrite,
                max_shard_size=args.max_shard_size,
                progress=progress,
            )
        finally:
            progress.end()
    if args.json:
        json.dump({"schema": SCHEMA, "source": args.directory, **facts, **asdict(result)}, sys.stdout)
        print()
    elif not args.quiet:
        text.show(line for sentence in report(result) for line in text.wrap(sentence, text.width()))
    return 0


def parse_size(value: str) -> int:
    """Bytes that a text says, as 5GB; an error for argparse where it says none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]?I?B?)", value.strip().upper())
    factor = _UNITS.get(match[2]) if match else None
    if match is None or factor is None or not (size := int(float(match[1]) * factor)):
        raise argparse.ArgumentTypeError(f"expected a size as in 5GB or 500MiB, got {value!r}")
    return size
