"""`python -m moqext convert`: a checkpoint without quantization, in FP8, or in ModelOpt's names."""

import argparse
import statistics
from functools import partial
from typing import get_args

from moqext.checkpoint import Checkpoint
from moqext.cli import add_checkpoint, text
from moqext.cli.layout import add_layout_options, layout_options
from moqext.cli.writing import add_output_options, write_checkpoint
from moqext.tools.convert import TARGETS, Conversion
from moqext.tools.convert.plan import Experts

WORST = 3
"""Weights that are named with their errors."""


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
    add_output_options(parser)
    add_layout_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    write = partial(Checkpoint.convert, to=args.to, experts=args.experts)
    return write_checkpoint(
        args, write, partial(report, to=args.to), layout_options(args), facts={"to": args.to}
    )


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
