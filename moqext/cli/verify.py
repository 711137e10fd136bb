"""`python -m moqext verify`: every quantized linear of a checkpoint against the reference."""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator

from moqext import _C
from moqext.checkpoint import Checkpoint
from moqext.cli import open_checkpoint, text
from moqext.errors import CheckpointError
from moqext.verify import LIMITS, Row, select_linears, verify_checkpoint

MAX_TOKENS = 1_000_000
"""Rows of activations: beyond, the float64 reference of a large layer fits in no memory."""

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

_HEAD = ("layer", "algorithm", "shape", "kernel", "rel. error", "max error", "time")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="load, run and check every quantized linear",
        description="Loads every quantized linear of a checkpoint, prepares it, runs it on random "
        "activations and compares the result with an independent float64 reference. Exit status: 0 all "
        "within the limits, 1 a layer failed or could not run as stored, 2 nothing could be verified.",
    )
    parser.add_argument("directory", help="a ModelOpt checkpoint")
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help='"cpu" (default), "cuda[:N]", or "auto": the first CUDA device, the CPU where there is none',
    )
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(LIMITS), help="of the activations")
    parser.add_argument(
        "--compute",
        default="exact",
        choices=("exact", "fp8", "fp4", "auto"),
        help="how NVFP4 weights are multiplied",
    )
    parser.add_argument("--layers", metavar="GLOB", help="only layers whose name matches; * crosses dots")
    parser.add_argument("--tokens", type=_tokens, default=16, metavar="M", help="rows of activations (16)")
    parser.add_argument("--seed", type=_seed, help="of the activations; a fresh one is drawn and printed")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")
    device, about = _choose_device(args.device)
    options = {"tokens": args.tokens, "device": device, "dtype": args.dtype, "compute": args.compute}
    with open_checkpoint(args.directory) as checkpoint:
        records = select_linears(checkpoint, args.layers)
        if not records:
            raise CheckpointError(_why_nothing(checkpoint, args.layers), file=checkpoint.directory)
        rows = list(_with_progress(verify_checkpoint(checkpoint, records, seed, **options), len(records)))
    if args.json:
        print(
            json.dumps({"schema": SCHEMA, "seed": seed, **options, "rows": [row.as_dict() for row in rows]})
        )
    else:
        _print_table(rows)
        _print_summary(rows, device + about, seed, args.dtype)
    return _status(rows)


def _why_nothing(checkpoint: Checkpoint, pattern: str | None) -> str:
    if not checkpoint.files.has_weights:
        return "nothing to run: the directory has no safetensors files"
    found = select_linears(checkpoint)
    if pattern is not None and found:
        return f"no quantized linear matches {pattern!r}; {len(found)} do not, as {found[0].name}"
    return "nothing to run: no linear is quantized"


def _number(text: str, expected: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _tokens(text: str) -> int:
    return _number(text, f"a positive number of at most {MAX_TOKENS}", 1, MAX_TOKENS)


def _seed(text: str) -> int:
    return _number(text, "a number from 0 to 2**64 - 1", 0, 2**64 - 1)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise argparse.ArgumentTypeError(f'expected "cpu", "cuda:N" or "auto", got {text!r}')
    return text


def _choose_device(wanted: str) -> tuple[str, str]:
    """The device, and in parentheses which one it is or why "auto" came to the CPU."""
    if wanted == "cpu":
        return wanted, ""
    index = int(wanted.partition(":")[2] or 0)
    try:
        devices = _C.cuda_devices()
    except RuntimeError as error:
        devices = []
        if wanted == "auto":
            return "cpu", f" ({error})"
    name = devices[index]["name"] if index < len(devices) else ""
    return f"cuda:{index}", f" ({name})" if name else ""


def _status(rows: list[Row]) -> int:
    if any(row.status in ("failed", "error") for row in rows):
        return 1
    return 0 if any(row.status == "ok" for row in rows) else 2


def _with_progress(rows: Iterable[Row], total: int) -> Iterator[Row]:
    """Passes the rows on and draws a bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield from rows
        return
    try:
        for done, row in enumerate(rows, 1):
            width = max(10, min(40, shutil.get_terminal_size().columns - 50))
            filled = width * done // total
            bar = "#" * filled + "." * (width - filled)
            name = text.shorten(text.printable(row.layer), 30)
            print(f"\r\x1b[K[{bar}] {done}/{total} {name}", end="", file=sys.stderr, flush=True)
            yield row
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _cells(row: Row) -> tuple[str, ...]:
    shape = " × ".join(map(str, row.shape))
    if row.relative_error is None or row.max_error is None or row.run_seconds is None:
        return (row.layer, row.quant_algo, shape, row.status, "", "", "")
    error = f"{row.relative_error:.2e}" + (" !" if row.status == "failed" else "")
    return (
        row.layer,
        row.quant_algo,
        shape,
        row.kernel,
        error,
        f"{row.max_error:.2e}",
        _duration(row.run_seconds),
    )


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _print_table(rows: list[Row]) -> None:
    lines = text.table([_HEAD, *map(_cells, rows)], "<<<<>>>", text.width(), indent=0)
    for line in lines:
        print(text.printable(line))


def _print_summary(rows: list[Row], device: str, seed: int, dtype: str) -> None:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    relative, largest = LIMITS[dtype]
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    limits = f"limits {relative:g} relative, {largest:g} of the row's largest"
    print("\n" + text.printable(f"{summary} on {device}; {limits}; seed {seed}"))
    messages: dict[str, list[str]] = {}
    for row in rows:
        if row.message:
            messages.setdefault(row.message, []).append(row.layer)
    for message, layers in messages.items():
        others = f" and {text.plural(len(layers) - 1, 'other')}" if len(layers) > 1 else ""
        print(text.printable(f"  {layers[0]}{others}: {message}"))
