"""`python -m moqext bench`: how fast quantized linears run here, beside torch and the machine's limits."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from moqext.cli import text
from moqext.cli.values import add_seed, choose_seed, seconds, whole
from moqext.environment import environment
from moqext.reader.files.whole import output_path, refuse_unwritable, write_whole
from moqext.tools import bench
from moqext.tools.bench_plot import roofline

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

MAX_SIZE = 1 << 20
"""Largest feature dimension, and largest number of tokens: beyond, a layer fits in no memory."""

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""Projections of a model of 8 billion weights."""

BELIEVED = 1.25
"""Largest share of the floor that is taken for an error of measurement."""

_HEAD = ("algorithm", "kernel", "time", "GB/s", "of floor", "torch")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="how fast the linears run here, against torch's bfloat16 where it is installed",
        description="Times quantized linears on random data, weights coming from memory, with torch's "
        "bfloat16 linear taking turns on as many threads where torch is installed.",
    )
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="where to run")
    parser.add_argument(
        "--shapes", type=_shapes, default=SHAPES, metavar="NxK,...", help="out x in features of the layers"
    )
    parser.add_argument(
        "--tokens", type=tokens, default=(1, 16, 256), metavar="M,...", help="rows of x (1,16,256)"
    )
    parser.add_argument("--algos", type=_names, default=bench.ALGOS, metavar="NAME,...", help="default: all")
    parser.add_argument("--threads", type=_threads, metavar="T", help="default: all")
    parser.add_argument(
        "--seconds", type=seconds, default=5.0, help="to spend on a shape and number of tokens (5)"
    )
    parser.add_argument(
        "--rotate",
        type=_megabytes,
        metavar="MB",
        help="weights of a contestant that take turns: four times the last cache, at least 400",
    )
    add_seed(parser, "data")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plot", type=output_path, metavar="FILE", help="write a roofline as SVG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    seed = choose_seed(args)
    try:
        bench.check(args.shapes, args.algos)
        if args.plot:
            refuse_unwritable(args.plot)
    except ValueError as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    table = Table(quiet=args.json)
    result = bench.measure(
        args.shapes,
        args.tokens,
        args.algos,
        threads=args.threads,
        seconds=args.seconds,
        rotate=args.rotate,
        seed=seed,
        report=table.add,
    )
    about = environment()
    rows = [row.as_dict() for row in result.rows]
    if args.plot:
        write_whole(args.plot, roofline(rows, title(about, result.facts)))
    if args.json:
        print(
            json.dumps(
                {"schema": SCHEMA, "environment": about, **result.facts, "rows": rows}, allow_nan=False
            )
        )
    else:
        print(f"\n{title(about, result.facts)}; {limits(result.facts)}; seed {seed}")
    if warning := doubt(result.rows):
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
    line = f"memory is read at {facts['bytes_per_second'] / 1e9:.1f} GB/s"
    if facts["flop_per_second"] is None:
        return line + ", torch is not installed"
    return line + f", matrices are multiplied at {facts['flop_per_second'] / 1e9:.0f} Gflop/s"


class Table:
    """Prints rows as they come, headed by their shape and tokens."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._group: tuple[Any, ...] = ()

    def add(self, row: bench.Row) -> None:
        """Prints one row, before the first of a group its head."""
        if self._quiet:
            return
        group = (*row.shape, row.tokens)
        if group != self._group:
            head = f"{row.shape[0]} × {row.shape[1]}, {text.plural(row.tokens, 'token')}"
            print(("\n" if self._group else "") + head)
            print(_line(_HEAD))
            self._group = group
        print(_line(_cells(row)), flush=True)


def _cells(row: bench.Row) -> tuple[str, ...]:
    speed = row.bytes / row.seconds / 1e9
    ratio = "" if row.torch_ratio is None else f"{row.torch_ratio:.2f}×"
    return (
        row.quant_algo,
        row.kernel,
        text.duration(row.seconds),
        f"{speed:.1f}",
        f"{row.floor_seconds / row.seconds:.0%}",
        ratio,
    )


def _line(cells: Sequence[str]) -> str:
    widths = (26, 16, 10, 8, 9, 8)
    sides = "<<>>>>"
    cells = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)]
    return ("  " + " ".join(cells)).rstrip()


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
