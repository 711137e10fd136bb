"""`python -m moqext verify`: every quantized layer of a checkpoint against the reference."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from moqext.checkpoint import Checkpoint
from moqext.cli import add_checkpoint, find, open_checkpoint, text
from moqext.cli.device import add_compute, add_device, choose_device
from moqext.cli.layout import add_layout_options, layout_options
from moqext.cli.plain import plain_tensors
from moqext.cli.progress import Progress
from moqext.cli.select import no_match
from moqext.cli.values import add_seed, choose_seed, whole
from moqext.cli.verify_report import Report, Table
from moqext.errors import CheckpointError
from moqext.reader.files.places import other_forms
from moqext.reader.files.tensor_files import TensorInfo
from moqext.reader.problems import worst_severity
from moqext.tools.verify import Weight, absent_layers, select_weights, verify_checkpoint
from moqext.tools.verify_row import LIMITS, Row

MAX_TOKENS = 1_000_000
"""Rows of activations: beyond, the float64 reference of a large layer fits in no memory."""

SCHEMA = 3
"""Version of the JSON output; raised when a key changes its meaning."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="load, run and check every quantized layer",
        description="Loads every quantized linear and layer of experts of a checkpoint, prepares it, runs it "
        "on random activations and compares the result with an independent float64 reference; what cannot "
        "be run (algorithms without a kernel, embeddings) is dequantized and compared. Reports "
        "every problem of severity error. Exit status: 0 nothing is wrong, 1 a layer is wrong or cannot be "
        "used as stored, or the checkpoint has a problem of severity error, 2 wrong arguments, no checkpoint "
        "that can be read, or nothing quantized in it that matches.",
    )
    add_checkpoint(parser)
    add_device(parser, "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(LIMITS), help="of the activations")
    add_compute(parser)
    parser.add_argument("--layers", metavar="GLOB", help="only layers whose name matches; * crosses dots")
    parser.add_argument("--tokens", type=_tokens, default=16, metavar="M", help="rows of activations (16)")
    add_seed(parser, "activations")
    add_layout_options(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    seed = choose_seed(args)
    try:
        chosen, about = choose_device(args.device)
    except RuntimeError as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    options = {"tokens": args.tokens, "device": chosen, "dtype": args.dtype, "compute": args.compute}
    with open_checkpoint(args, **layout_options(args)) as checkpoint:
        findings = find(checkpoint, block_scales=True)
        problems = (*checkpoint.file_problems, *findings.all_problems())
        kinds = {"device": chosen, "dtype": args.dtype, "compute": args.compute}
        weights = select_weights(checkpoint, args.layers, **kinds)
        missing = absent_layers(checkpoint, args.layers)
        rest = plain_tensors(checkpoint, findings, args.layers)
        misnamed = args.layers is not None and not missing
        if not weights and (misnamed or worst_severity(problems) != "error"):
            raise CheckpointError(_why_nothing(checkpoint, args.layers, rest), file=checkpoint.name)
        table = None if args.json else Table(weights, chosen, args.dtype, text.width())
        rows = _told(verify_checkpoint(checkpoint, weights, seed, **options), weights, table)
        report = Report(rows, problems, rest, missing, len(weights))
    if args.json:
        about_run = {"schema": SCHEMA, "directory": args.directory, "seed": seed, **options}
        print(json.dumps(about_run | report.as_data(), allow_nan=False))
    elif rows or report.complete:
        text.show(report.as_text(chosen + about, seed, args.dtype, text.width()))
    if not report.complete:
        raise KeyboardInterrupt(report.progress)
    return 0 if report.good else 1


def _told(found: Iterator[Row], weights: Sequence[Weight], table: Table | None) -> list[Row]:
    """The rows, each told when it is there; those before an interrupt, where there is one."""
    progress = Progress(quiet=False, what="weights")
    total, done = sum(weight.weights for weight in weights), 0
    rows: list[Row] = []
    try:
        for number, weight in enumerate(weights, 1):
            progress(done, total, weight.name, f"{number:,}/{len(weights):,}")
            rows.append(next(found))
            done += weight.weights
            if table is not None:
                progress.end()
                table.add(rows[-1])
    except KeyboardInterrupt:
        pass
    finally:
        progress.end()
    if table is not None:
        table.flush()
    return rows


def _why_nothing(checkpoint: Checkpoint, pattern: str | None, plain: Sequence[TensorInfo]) -> str:
    if not checkpoint.files.has_weights:
        others = other_forms(checkpoint.directory)
        return "nothing to verify: the directory has no safetensors files" + (f"; {others}" if others else "")
    names = [weight.name for weight in select_weights(checkpoint)]
    if pattern is not None and (names or plain):
        return no_match(pattern, dict.fromkeys(names), [info.name for info in plain])
    return "nothing to verify: no layer is quantized"


def _tokens(text: str) -> int:
    return whole(text, 1, MAX_TOKENS, "tokens")
