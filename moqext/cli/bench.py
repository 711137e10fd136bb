"""`python -m moqext bench`: how fast quantized linears run here, alone or those of a checkpoint."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from moqext import _C
from moqext.cli import add_checkpoint, bench_model, text
from moqext.cli.device import add_compute, add_device, choose_device
from moqext.cli.values import add_seed, choose_seed, seconds, whole
from moqext.environment import environment
from moqext.errors import CheckpointError
from moqext.reader.files.whole import output_path, refuse_unwritable, write_whole
from moqext.tools import bench, bench_layers
from moqext.tools.bench_plot import roofline
from moqext.tools.busy import calibrate

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

MAX_SIZE = 1 << 20
"""Largest feature dimension, and largest number of tokens: beyond, a layer fits in no memory."""

SECONDS = 5.0
"""To spend on a shape and number of tokens on the CPU, unless told otherwise."""

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""Projections of a model of 8 billion weights."""

BELIEVED = 1.25
"""Largest share of the floor that is taken for an error of measurement."""

_HEAD = ("algorithm", "kernel", "time", "GB/s", "of floor", "torch")
_HEAD_OF_DEVICE = ("algorithm", "kernel", "time", "GB/s", "of memory", "Tflop/s", "torch")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="how fast linears, or the layers of a checkpoint, run here, against torch's bfloat16",
        description="Times quantized linears, or with DIR the linears and experts of a checkpoint, on random "
        "data, weights coming from memory, beside torch's bfloat16 where torch is installed. A CUDA device "
        "needs no framework. Of DIR headers are enough, or config.json of a model of common form.",
    )
    add_checkpoint(parser, optional=True)
    add_device(parser, "cpu")
    parser.add_argument("--shapes", type=_shapes, metavar="NxK,...", help="out x in features of the layers")
    parser.add_argument(
        "--tokens", type=tokens, default=(1, 16, 256), metavar="M,...", help="rows of x (1,16,256)"
    )
    parser.add_argument("--algos", type=_names, metavar="NAME,...", help="default: all")
    add_compute(parser)
    parser.add_argument("--threads", type=_threads, metavar="T", help="default: all")
    parser.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help=f"on the CPU, to spend on a shape and number of tokens ({SECONDS:g}; of a layer of DIR 1)",
    )
    parser.add_argument(
        "--rotate",
        type=_megabytes,
        metavar="MB",
        help="on the CPU, weights of a contestant that take turns: four times the last cache, at least 400",
    )
    add_seed(parser, "data")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plot", type=output_path, metavar="FILE", help="write a roofline as SVG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    try:
        device, about = choose_device(args.device)
        _refuse_options(args, device)
        if args.directory is not None:
            return bench_model.run(args, device, about, choose_seed(args))
        bench.check(args.shapes or SHAPES, args.algos or bench.ALGOS, device=device, compute=args.compute)
        if args.plot:
            refuse_unwritable(args.plot)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    return _run_shapes(args, device, about)


def _refuse_options(args: argparse.Namespace, device: str) -> None:
    """Raises ValueError for options that would have no effect."""
    on_device = device != "cpu"
    refused = {
        "--shapes": (args.directory is not None, "with DIR: its layers have shapes"),
        "--algos": (args.directory is not None, "with DIR: its layers have formats"),
        "--plot": (args.directory is not None, "with DIR"),
        "--threads": (on_device, "on a device"),
        "--seconds": (on_device, "on a device"),
        "--rotate": (on_device, "on a device"),
    }
    for option, (no, why) in refused.items():
        if no and getattr(args, option.removeprefix("--")) is not None:
            raise ValueError(f"{option}: not {why}")


def _run_shapes(args: argparse.Namespace, device: str, named: str) -> int:
    """Times linears of given shapes."""
    shapes, algos, seed = args.shapes or SHAPES, args.algos or bench.ALGOS, choose_seed(args)
    table = Table(quiet=args.json, on_device=device != "cpu")
    if device == "cpu":
        calibration = calibrate(args.threads or _C.num_threads())
        result = bench.measure(
            shapes,
            args.tokens,
            algos,
            threads=args.threads,
            seconds=args.seconds or SECONDS,
            rotate=args.rotate,
            seed=seed,
            compute=args.compute,
            report=table.add,
        )
        facts = result.facts | {"device": device, "calibration": calibration.as_dict()}
        found = [calibration.doubt, doubt(result.rows)]
    else:
        result = bench_layers.measure_device(
            shapes, args.tokens, algos, device, compute=args.compute, seed=seed, report=table.add
        )
        facts = result.facts | {"calibration": None}
        found = [bench_layers.doubt(facts["spread"], "a linear")]
    warnings = [warning for warning in found if warning]
    about = environment()
    where = title(about, facts) if device == "cpu" else device + named
    rows = [row.as_dict() for row in result.rows]
    if args.plot:
        write_whole(args.plot, roofline(rows, where))
    if args.json:
        told = {"schema": SCHEMA, "environment": about, "compute": args.compute, **facts}
        print(json.dumps(told | {"warnings": warnings, "rows": rows}, allow_nan=False))
    else:
        print(f"\n{where}; {limits(facts)}; seed {seed}")
    for warning in warnings:
        print(f"moqext: warning: {warning}", file=sys.stderr)
    return 0


def doubt(rows: Sequence[bench.Row]) -> str:
    """Why floors are not to be trusted, where calls took far less than these; empty where none did."""
    most = max((row.floor_seconds / row.seconds for row in rows), default=0.0)
    if most <= BELIEVED:
        return ""
    return (
        f"calls took less than their floor ({most:.0%} of it): the machine was busy while its limits were "
        "measured, or the weights fit its cache (--rotate); measure again on an idle machine"
    )


def title(about: dict[str, Any], facts: dict[str, Any]) -> str:
    """The machine in a line."""
    return f"{about['cpu']}, {about['isa']}, {text.plural(facts['threads'], 'thread')}"


def limits(facts: dict[str, Any]) -> str:
    """A line with the speeds that floors are made of."""
    if facts["device"] != "cpu":
        return f"memory of {facts['bytes_per_second'] / 1e12:.2f} TB/s by its clock and width"
    line = f"memory is read at {facts['bytes_per_second'] / 1e9:.1f} GB/s"
    if facts["flop_per_second"] is None:
        return line + ", torch is not installed"
    return line + f", matrices are multiplied at {facts['flop_per_second'] / 1e9:.0f} Gflop/s"


class Table:
    """Prints rows as they come, headed by their shape and tokens."""

    def __init__(self, *, quiet: bool, on_device: bool = False) -> None:
        self._quiet, self._on_device = quiet, on_device
        self._group: tuple[Any, ...] = ()

    def add(self, row: bench.Row) -> None:
        """Prints one row, before the first of a group its head."""
        if self._quiet:
            return
        group = (*row.shape, row.tokens)
        with_torch = row.torch_ratio is not None
        if group != self._group:
            head = f"{row.shape[0]} × {row.shape[1]}, {text.plural(row.tokens, 'token')}"
            print(("\n" if self._group else "") + head)
            print(_line(_HEAD_OF_DEVICE if self._on_device else _HEAD, with_torch))
            self._group = group
        print(_line(_cells(row, self._on_device), with_torch), flush=True)


def _cells(row: bench.Row, on_device: bool) -> tuple[str, ...]:
    speed = row.bytes / row.seconds
    return (
        row.quant_algo,
        row.kernel,
        text.duration(row.seconds),
        f"{speed / 1e9:.1f}" if not on_device else f"{speed / 1e9:.0f}",
        f"{row.floor_seconds / row.seconds:.0%}",
        *((f"{row.flop / row.seconds / 1e12:.1f}",) if on_device else ()),
        "" if row.torch_ratio is None else f"{row.torch_ratio:.2f}×",
    )


def _line(cells: Sequence[str], with_torch: bool) -> str:
    """A row of the table; its last cell is torch's."""
    on_device = len(cells) == len(_HEAD_OF_DEVICE)
    widths = (26, 24, 10, 8, 9, 8, 8) if on_device else (26, 16, 10, 8, 9, 8)
    sides = "<<>>>>>"[: len(cells)]
    shown = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)]
    return ("  " + " ".join(shown if with_torch else shown[:-1])).rstrip()


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for item in text.split(","):
        sides = re.fullmatch(r"([0-9]+)x([0-9]+)", item.strip())
        if not sides:
            raise argparse.ArgumentTypeError(f"expected OUTxIN,... as in 4096x14336, got {item!r}")
        rows, columns = (whole(side, 1, MAX_SIZE, "features") for side in sides.groups())
        shapes.append((rows, columns))
    return shapes


def tokens(text: str) -> list[int]:
    """The argument of `--tokens`: numbers with commas between them."""
    return [whole(item, 1, MAX_SIZE, "tokens") for item in text.split(",")]


def _names(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _threads(text: str) -> int:
    return whole(text, 1, 1024, "threads")


def _megabytes(text: str) -> int:
    return whole(text, 1, 1 << 20, "megabytes") * 1_000_000
