"""Turns reports of `moqext selftest` into lines of benchmarks/times, which `benchmarks.fit` reads.

    python -m benchmarks.reports REPORT.json ... >> benchmarks/times/CHIP.txt

A report has a few cells of a chip that nobody here has. Linears are timed in it as `benchmarks.configs` times
them; experts, too, wait for the end of the call before them, where that program has them in a chain.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.configs import CHIPS, LAYERS, MODELS, Cell, Config, lines_of

SCHEMA = 1
KERNEL = re.compile(r"cuda:[a-z0-9_]{1,40}")
SHAPE = re.compile(r"[1-9][0-9]{0,6}x[1-9][0-9]{0,6}")


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The head of a file, and a line for each kernel in a cell.

    Raises:
        ValueError: It is no report of a GPU, one of another schema, of a kernel that was wrong, or of a chip
            that csrc/cuda/choice/chip.c does not know; or a row of it is none.
    """
    if report.get("moqext_selftest") != SCHEMA or report.get("device") != "cuda":
        raise ValueError("expected a report of moqext selftest on a CUDA device")
    if report.get("good") is not True:
        raise ValueError("a kernel of it is wrong, and its times may be")
    about = report["attributes"]
    name = CHIPS.get(report["chip"])
    if name is None:
        raise ValueError(f"{report['chip']!r} has no name in benchmarks.configs.CHIPS yet; it has {about}")
    facts = {**about, "moqext": report["commit"] or report["version"], "date": report["date"]}
    yield "# " + "; ".join(f"{key}={value}" for key, value in facts.items())
    for row in report["times"]:
        kernel, cell = row["kernel"], Cell(row["layer"], row["where"], int(row["tokens"]))
        times = {Config(kernel, int(number), 0): 1e-6 * time for number, time in row["microseconds"].items()}
        named = KERNEL.fullmatch(kernel) and (SHAPE.fullmatch(cell.where) or cell.where in MODELS)
        if not named or cell.layer not in LAYERS or not all(0 < time < math.inf for time in times.values()):
            raise ValueError(f"no cell that benchmarks.configs has: {row}")
        yield from lines_of(name, cell, times)


def main() -> None:
    """Prints the lines of all reports."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("report", nargs="+", type=Path)
    for path in parser.parse_args().report:
        try:
            print("\n".join(lines(json.loads(path.read_text()))))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: {error}") from None


if __name__ == "__main__":
    main()
