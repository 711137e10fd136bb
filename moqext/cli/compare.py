"""`python -m moqext compare`: how far the weights of two checkpoints are apart."""

import argparse
import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moqext.cli import text
from moqext.cli.layout import add_layout_options, layout_options
from moqext.cli.progress import Progress
from moqext.errors import CheckpointError
from moqext.reader.files.whole import output_path, refuse_unwritable, write_whole
from moqext.tools.compare import Comparison, Difference, by_format, compare, open_side
from moqext.tools.compare_plot import error_plot

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

SHOWN = 20
"""Layers in the table, and names in a list, where not all are asked for."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        help="error of each layer against the original, or of two exports",
        description="Dequantizes every layer of both, and reports how far the first is from the second. Exit "
        "status: 0 every layer has its counterpart (and none exceeds --max-error), 1 a layer is on one side "
        "only, has another shape there, may be either of two, or exceeds it, 2 wrong arguments, nothing that "
        "can be read, nothing in common.",
    )
    parser.add_argument("first", help="a checkpoint: the quantized one")
    parser.add_argument("second", help="a checkpoint or a .safetensors file: the original")
    parser.add_argument("--component", metavar="NAME", help="the directory in both, of Diffusers pipelines")
    parser.add_argument(
        "--max-error", type=_error, metavar="E", help="exit with 1 on a larger relative error"
    )
    parser.add_argument("--all", action="store_true", help=f"list every layer, not only the worst {SHOWN}")
    parser.add_argument("--plot", type=_svg, metavar="FILE", help="write the errors of all layers as SVG")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_layout_options(parser, "the first")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    if args.plot:
        refuse_unwritable(args.plot)
    progress = Progress(quiet=args.quiet or args.json, what="weights")
    options = {"component": args.component, **layout_options(args)}
    with open_side(args.first, **options) as first, open_side(args.second, like=first) as second:
        try:
            result = compare(first, second, progress)
        finally:
            progress.end()
    if not (result.layers or result.equal or result.ambiguous):
        raise CheckpointError(f"nothing in common with {args.second}", file=args.first)
    limit = math.inf if args.max_error is None else args.max_error
    good = not (result.only_first or result.only_second or result.misshapen or result.ambiguous)
    good = good and all(row.relative_error <= limit for row in result.layers)
    if args.plot and result.layers:
        title = f"{Path(args.first).name} against {Path(args.second).name}"
        write_whole(args.plot, error_plot(result.layers, title))
    if args.json:
        about = {"schema": SCHEMA, "first": args.first, "second": args.second, "good": good}
        print(json.dumps(about | as_data(result), allow_nan=False))
    else:
        text.show(as_text(result, args.first, args.second, limit, every=args.all))
    return 0 if good else 1


def as_data(result: Comparison) -> dict[str, Any]:
    """The comparison as plain data for JSON, which has no infinity: such a number is null."""
    data = asdict(result)
    for row in data["layers"]:
        for key in ("relative_error", "sqnr_db", "max_error"):
            row[key] = row[key] if math.isfinite(row[key]) else None
    data["misshapen"] = [
        {"layer": name, "first": ours, "second": theirs} for name, ours, theirs in result.misshapen
    ]
    data["ambiguous"] = [{"first": ours, "second": theirs} for ours, theirs in result.ambiguous]
    return data


def as_text(
    result: Comparison, first: str, second: str, limit: float, *, every: bool
) -> list[str | text.Line]:
    """The worst layers, what each format costs, and what has no counterpart."""
    columns = text.width()
    shown = result.layers if every else result.layers[:SHOWN]
    lines: list[str | text.Line] = []
    if shown:
        cells: list[tuple[str, ...]] = [
            ("layer", "first", "second", "shape", "rel. error", "SQNR", "max error")
        ]
        cells += [_cells(row) for row in shown]
        bad = [False, *(not row.relative_error <= limit for row in shown)]
        for wrong, row in zip(bad, text.table(cells, "<<<>>>>", columns), strict=True):
            lines += [text.Line(line, "error" if wrong else None) for line in row]
        if len(shown) < len(result.layers):
            lines.append(f"  and {len(result.layers) - len(shown):,} with less error; --all lists them")
        lines.append("")
        groups: list[tuple[str, ...]] = [("formats", "layers", "median error", "worst", "SQNR")]
        groups += [_group(formats, rows) for formats, rows in by_format(result.layers).items()]
        lines += [line for row in text.table(groups, "<>>>>", columns) for line in row]
    lines += ["", f"plain tensors that are equal: {result.equal:,}"]
    for what, names in ((f"only in {first}", result.only_first), (f"only in {second}", result.only_second)):
        if names:
            lines.append(text.Line(f"{what}: {len(names):,}", "warning"))
            few = names if every else names[:SHOWN]
            lines += [line for name in few for line in text.wrap(name, columns, indent=2)]
            if len(few) < len(names):
                lines.append(f"  and {len(names) - len(few):,} more")
    for name, ours, theirs in result.misshapen:
        message = f"{name}: {list(ours)} in the first, {list(theirs)} in the second"
        lines += [text.Line(line, "error") for line in text.wrap(message, columns)]
    for some, others in result.ambiguous:
        message = f"not compared, as which is which is not told: {', '.join(some)}; {', '.join(others)}"
        lines += [text.Line(line, "error") for line in text.wrap(message, columns)]
    return lines


def _cells(row: Difference) -> tuple[str, ...]:
    shape = " × ".join(map(str, row.shape))
    return (row.layer, *row.formats, shape, *_errors(row.relative_error, row.sqnr_db), f"{row.max_error:.3g}")


def _group(formats: tuple[str, str], rows: list[Difference]) -> tuple[str, ...]:
    median = statistics.median(row.relative_error for row in rows)
    worst = max(row.relative_error for row in rows)
    name = " / ".join(dict.fromkeys(formats))
    decibel = -20 * math.log10(median) if 0 < median < math.inf else math.inf
    return name, f"{len(rows):,}", f"{median:.3e}", f"{worst:.3e}", _errors(median, decibel)[1]


def _errors(relative: float, decibel: float) -> tuple[str, str]:
    if relative == 0:
        return "equal", ""
    return f"{relative:.3e}", f"{decibel:.1f} dB" if math.isfinite(decibel) else ""


def _error(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a relative error as 0.1, got {value!r}")
    return number


def _svg(value: str) -> Path:
    path = output_path(value)
    if path.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .svg, got {value!r}")
    return path
