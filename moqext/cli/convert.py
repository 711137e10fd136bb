"""`python -m moqext convert`: a checkpoint without quantization, in FP8, or in ModelOpt's names."""

import argparse
import json
import re
import statistics
import sys
from dataclasses import asdict
from typing import get_args

from moqext.cli import add_checkpoint, open_checkpoint, text
from moqext.cli.layout import add_layout_options, layout_options
from moqext.cli.progress import Progress
from moqext.tools.convert import MAX_SHARD_SIZE, TARGETS, Conversion
from moqext.tools.convert.plan import Experts

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

WORST = 3
"""Weights that are named with their errors."""

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


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint again without quantization, in FP8, or as ModelOpt has it",
        description="Writes the model with plain weights, as Transformers and others load it: safetensors, "
        "config.json without quantization, and all other files. Exit status: 0, 2 for wrong arguments, a "
        "checkpoint that cannot be read or has a problem of severity error, or a target that cannot be "
        "written; OUT is then as it was.",
    )
    add_checkpoint(parser)
    parser.add_argument("out", help="directory to write to")
    parser.add_argument(
        "--to",
        choices=TARGETS,
        default="bf16",
        help="type of the weights (bf16); fp8: a scale for each row; modelopt, compressed-tensors: "
        "the same codes in their names",
    )
    parser.add_argument(
        "--experts",
        choices=get_args(Experts),
        default="auto",
        help="experts as the source has them, stacked in one tensor, in tensors of their own, by default as "
        "Transformers loads the model",
    )
    parser.add_argument(
        "--max-shard-size", type=parse_size, default=MAX_SHARD_SIZE, metavar="SIZE", help="of a file (5GB)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint that is in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress and no report")
    add_layout_options(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    progress = Progress(quiet=args.quiet)
    with open_checkpoint(args, **layout_options(args)) as checkpoint:
        try:
            result = checkpoint.convert(
                args.out,
                to=args.to,
                experts=args.experts,
                overwrite=args.overwrite,
                max_shard_size=args.max_shard_size,
                progress=progress,
            )
        finally:
            progress.end()
    if args.json:
        json.dump({"schema": SCHEMA, "source": args.directory, "to": args.to, **asdict(result)}, sys.stdout)
        print()
    elif not args.quiet:
        text.show(line for sentence in report(result, args.to) for line in text.wrap(sentence, text.width()))
    return 0


def report(result: Conversion, to: str) -> list[str]:
    """Sentences that say what was written."""
    speed = text.size(int((result.bytes_read + result.bytes_written) / max(result.seconds, 1e-9)))
    kept = "kept in their codes"
    done = {"fp8": "converted", "modelopt": kept, "compressed-tensors": kept}.get(to, "dequantized")
    counts = [
        text.plural(len(result.files), "file"),
        text.plural(result.tensors, "tensor"),
        text.size(result.bytes_written),
        f"{text.plural(result.dequantized, 'weight')} {done}",
    ]
    return [
        f"{result.directory}: {', '.join(counts)}",
        f"{text.size(result.bytes_read)} read and {text.size(result.bytes_written)} written in "
        f"{text.duration(result.seconds)}, {speed}/s together",
        *result.notes,
        *_errors(result),
    ]


def _errors(result: Conversion) -> list[str]:
    """Lines that say what requantizing cost, and where most."""
    if not result.errors:
        return []
    relative = [error.relative_error for error in result.errors]
    worst = ", ".join(f"{error.layer} {error.relative_error:.2e}" for error in result.errors[:WORST])
    return [
        f"{text.plural(len(relative), 'weight')} requantized: relative error "
        f"{statistics.median(relative):.2e} in the median; largest difference "
        f"{max(error.max_error for error in result.errors):.2e} of the largest weight; worst: {worst}"
    ]


def parse_size(value: str) -> int:
    """Bytes that a text says, as 5GB; an error for argparse where it says none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]?I?B?)", value.strip().upper())
    factor = _UNITS.get(match[2]) if match else None
    if match is None or factor is None or not (size := int(float(match[1]) * factor)):
        raise argparse.ArgumentTypeError(f"expected a size as in 5GB or 500MiB, got {value!r}")
    return size
