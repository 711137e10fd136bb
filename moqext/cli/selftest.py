"""`python -m moqext selftest`: every kernel that this chip can run, right or wrong, and a few times."""

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moqext import _C
from moqext.cli import text
from moqext.cli.device import add_device, choose_device
from moqext.cli.info import version
from moqext.cli.progress import Progress
from moqext.cli.values import add_seed, choose_seed, seconds
from moqext.environment import cpu_model, cuda_attributes
from moqext.reader.files.whole import output_path, refuse_unwritable, write_whole
from moqext.tools.selftest import KernelRow, Selftest
from moqext.tools.selftest_times import TimedCell, time_cells

SCHEMA = 1
"""Version of the report; raised when a key changes its meaning."""

SHARE_OF_CHECKS = 0.65
"""The part of the time on a device after which times are taken."""

LIMITS = "2.5e-3 relative and 1e-2 of the row's largest, 1e-5 for float32"

clock = time.monotonic

_HEAD = ("kernel", "formats", "cases", "rel. error", "max error", "of limit", "verdict")
_TIMES_HEAD = ("layer", "shape", "tokens", "chosen", "time", "gain", "fastest")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "selftest",
        help="check every kernel that this chip can run, and time a few layers",
        description="Runs every kernel that this chip can run, in every format and config, on random layers "
        "of sizes that suit no tile, and compares the outputs with an independent float64 reference; on a "
        "CUDA device then times a few layers of models. Exit status: 0 nothing is wrong, 1 a kernel is "
        "wrong or none runs, 2 wrong arguments or no such device.",
    )
    add_device(parser, "auto")
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=60.0,
        metavar="S",
        help="to spend, about; at least one layer runs (60)",
    )
    add_seed(parser, "layers")
    parser.add_argument(
        "--report",
        type=output_path,
        metavar="FILE",
        help="also write the result as JSON, without names of the machine, its user or its files",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output: the report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    begin = clock()
    seed = choose_seed(args)
    try:
        chosen, about = choose_device(args.device)
    except RuntimeError as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    if args.report is not None:
        refuse_unwritable(args.report)
    on_device = chosen != "cpu"
    test = Selftest(chosen, seed, clock)
    cells: list[TimedCell] = []
    _check(test, begin, args.seconds * (SHARE_OF_CHECKS if on_device else 1))
    if not args.json:
        text.show(_kernel_lines(test, text.width()))
    if on_device:
        cells = _time(chosen, begin, begin + args.seconds)
    report = _report(test, cells, chosen, seed, args.seconds)
    if args.report is not None:
        write_whole(args.report, json.dumps(report, indent=1, allow_nan=False) + "\n")
    if args.json:
        print(json.dumps(report, allow_nan=False))
    else:
        text.show(_time_lines(cells, text.width()))
        text.show(_summary(test, chosen + about, seed, args.report, text.width()))
    return 0 if report["good"] else 1


def _check(test: Selftest, begin: float, seconds: float) -> None:
    progress = Progress(quiet=False, what="s", rate=False)

    def tell(name: str) -> None:
        spent = clock() - begin
        progress(round(min(spent, seconds)), round(seconds), name, text.plural(test.layers, "layer"))

    try:
        test.run(begin + seconds, tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after {text.plural(test.layers, 'layer')}") from None
    finally:
        progress.end()


def _time(device: str, begin: float, until: float) -> list[TimedCell]:
    progress = Progress(quiet=False, what="s", rate=False)

    def tell(name: str) -> None:
        now = clock()
        progress(round(min(now, until) - begin), round(until - begin), name, "times")

    try:
        return list(time_cells(device, until, clock, tell))
    finally:
        progress.end()


def _kernel_lines(test: Selftest, columns: int | None) -> list[str | text.Line]:
    """A line for each kernel, under a heading for linears and one for experts."""
    rows: list[tuple[str, ...]] = [_HEAD]
    bad = [False]
    for row in test.rows:
        name = row.kernel if row.operation == "linear" else f"{row.kernel}, experts"
        formats = f"{len(row.checked)} of {len(row.formats)}"
        errors = (_error(row.relative_error), _error(row.max_error), _share(row.of_limit))
        rows.append((name, formats, f"{row.cases:,}", *(errors if row.cases else ("", "", "")), row.verdict))
        bad.append(row.verdict == "wrong")
    lines = text.table(rows, "<>>>>><", columns, indent=0)
    return [
        text.Line(line, "error" if wrong else None)
        for each, wrong in zip(lines, bad, strict=True)
        for line in each
    ]


def _time_lines(cells: Sequence[TimedCell], columns: int | None) -> list[str]:
    """The table of times; nothing without any."""
    if not cells:
        return []
    rows: list[tuple[str, ...]] = [_TIMES_HEAD]
    for cell in cells:
        taken, best = cell.seconds_of(cell.chosen), cell.seconds_of(cell.fastest)
        if best is None:
            continue
        gain = "" if taken is None else f"{taken / best:.2f}×"
        other = "" if cell.chosen == cell.fastest else f"{_config(cell.fastest)}, {text.duration(best)}"
        spent = "" if taken is None else text.duration(taken)
        shape = cell.where.replace("x", " × ") if cell.where[0].isdigit() else cell.where
        rows.append((cell.layer, shape, str(cell.tokens), _config(cell.chosen), spent, gain, other))
    return ["", *(line for each in text.table(rows, "<<><>><", columns, indent=0) for line in each)]


def _summary(
    test: Selftest, where: str, seed: int, report: Path | None, columns: int | None
) -> list[str | text.Line]:
    """Where it ran and by which limits, the cases that were wrong, and the verdict."""
    about = f"{text.plural(test.layers, 'layer')} on {where}; limits {LIMITS}; seed {seed}"
    lines: list[str | text.Line] = ["", *text.wrap(about, columns)]
    for row in test.rows:
        for fault in row.faults:
            found = text.wrap(f"wrong: {row.kernel}: {fault}", columns, indent=2)
            lines += [text.Line(line, "error") for line in found]
    wrong, missed = (_count(test.rows, verdict) for verdict in ("wrong", "not reached"))
    told = [
        f"{text.plural(wrong, 'wrong kernel')}" if wrong else "",
        f"{text.plural(missed, 'kernel')} not reached: give it more --seconds" if missed else "",
        "" if test.rows else "no kernel runs here",
    ]
    partly = any(len(row.checked) < len(row.formats) for row in test.rows)
    right = "all right, of the formats that were reached; more --seconds reach the others"
    verdict = ", ".join(part for part in told if part) or (right if partly else "all right")
    lines += [
        text.Line(line, "error" if wrong or not test.rows else None)
        for line in text.wrap(f"result: {verdict}", columns)
    ]
    if report is not None:
        lines += text.wrap(f"written to {report}", columns)
    return lines


def _report(
    test: Selftest, cells: Sequence[TimedCell], device: str, seed: int, seconds: float
) -> dict[str, Any]:
    """Plain data for JSON: nothing in it names a machine, a user or a file."""
    build = _C.build_info()
    runtime, driver = map(version, _C.cuda_versions())
    library = _C.cublaslt()[1]
    return {
        "moqext_selftest": SCHEMA,
        "good": bool(test.rows) and not _count(test.rows, "wrong"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "seconds": seconds,
        "version": build["version"],
        "commit": build["commit"],
        "cuda_archs": build["cuda_archs"],
        "device": device.partition(":")[0],
        **_chip(device),
        "cuda_runtime": runtime,
        "cuda_driver": driver,
        "cublaslt": ".".join(map(str, library or ())) or None,
        "layers": test.layers,
        "kernels": [_told(row) for row in test.rows],
        "times": [row for cell in cells for row in cell.as_rows()],
    }


def _chip(device: str) -> dict[str, Any]:
    """The chip, and what the choice of kernels knows of it."""
    if device == "cpu":
        return {"chip": cpu_model(), "isa": _C.cpu_isa(), "threads": _C.num_threads()}
    index = int(device.partition(":")[2])
    found = next(row for row in _C.cuda_devices() if row["index"] == index)
    try:
        attributes = cuda_attributes(index)
    except (OSError, RuntimeError, ImportError):
        attributes = {"name": found["name"], "sms": found["sm_count"]}
    capability = ".".join(map(str, found["capability"]))
    return {"chip": found["name"], "capability": capability, "attributes": attributes}


def _told(row: KernelRow) -> dict[str, Any]:
    data = row.as_dict()
    data["faults"] = [without_paths(fault) for fault in data["faults"]]
    return data


def without_paths(message: str) -> str:
    """A message without the names of files, which tell of a user."""
    return re.sub(r"[^\s'\"(]*[/\\][^\s'\")]*", "...", message)


def _count(rows: Sequence[KernelRow], verdict: str) -> int:
    return sum(row.verdict == verdict for row in rows)


def _config(config: tuple[str, int]) -> str:
    kernel, number = config
    return f"{kernel}, {number}" if number else kernel


def _error(value: float) -> str:
    return f"{value:.2e}"


def _share(value: float) -> str:
    return f"{100 * value:.0f}%" if value < 100 else "> 9999%"
