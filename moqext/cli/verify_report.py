"""The report of `python -m moqext verify`, as text and as data: rows as they come, the rest at the end."""

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from moqext import _C
from moqext.cli import plain, text
from moqext.cli import problems as problem_list
from moqext.reader.files.tensor_files import TensorInfo
from moqext.reader.problems import Problem, Severity
from moqext.tools.verify import Weight
from moqext.tools.verify_row import LIMITS, Row

WORST = 10
"""Experts that are named below the table."""

_HEAD = ("layer", "algorithm", "shape", "kernel", "rel. error", "rounding", "time")
_SHOWN = {"ok": "ok", "read": "read only", "failed": "failed", "error": "refused"}
_BAD = ("failed", "error")


class Table:
    """Prints a line per layer, and per container of experts that share algorithm and kernel, as they come."""

    def __init__(self, weights: Sequence[Weight], device: str, dtype: str, columns: int | None) -> None:
        """Prepares columns that all weights fit; nothing is printed before the first row."""
        kernels = [name for name in _C.kernels() if name.startswith(device.partition(":")[0])]
        widest = max((*kernels, *_SHOWN.values()), key=len)
        groups: dict[str, list[Weight]] = defaultdict(list)
        for weight in weights:
            groups[weight.group or weight.name].append(weight)
        cells = [_HEAD]
        for name, alike in groups.items():
            named = _counted(name, len(alike)) if len(alike) > 1 else alike[0].name
            algo = max((weight.record.quant_algo for weight in alike), key=len)
            shapes = _extents(weight.record.shape for weight in alike)
            cells.append((named, algo, shapes, widest, "0.00e+00 !", "0.00e+00", "00.0 ms"))
        self._layout = text.layout(cells, "<<<<>>>", columns, indent=0)
        meaning = (
            "(rel. error: outputs against those of an independent float64 reference, before any rounding; "
            f"rounding: the part of it that rounding them to {dtype} makes alone)"
        )
        self._heading = [*self._layout.lines(_HEAD), *text.wrap(meaning, columns)]
        self._pending: list[Row] = []
        self._begun = False

    def add(self, row: Row) -> None:
        """Prints the row, or keeps it until all of its container are there."""
        if self._pending and (row.group is None or row.group != self._pending[-1].group):
            self.flush()
        self._pending.append(row)
        if row.group is None:
            self.flush()

    def flush(self) -> None:
        """Prints the lines of the rows that were kept."""
        if self._pending and not self._begun:
            text.show(self._heading)
            self._begun = True
        groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in self._pending:
            groups[row.group or row.layer, row.quant_algo, row.kernel or row.status].append(row)
        self._pending = []
        for (name, _, _), rows in groups.items():
            bad = any(row.status in _BAD for row in rows)
            lines = self._layout.lines(_cells(name, rows))
            text.show(text.Line(line, "error" if bad else None) for line in lines)
        sys.stdout.flush()


@dataclass(frozen=True)
class Report:
    """The rows of a run, and what else is to be said of the checkpoint.

    Attributes:
        rows: One per quantized weight.
        problems: All of the checkpoint.
        rest: The tensors that are not quantized.
        missing: Quantized layers that the index names and that are in no file.
        total: How many rows a whole run has.
    """

    rows: Sequence[Row]
    problems: Sequence[Problem]
    rest: Sequence[TensorInfo]
    missing: Sequence[str]
    total: int

    @cached_property
    def errors(self) -> list[Problem]:
        """The problems for which a checkpoint is not used as it is."""
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, and nothing was left out."""
        return self.complete and not self.errors and not any(row.status in _BAD for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return len(self.rows) == self.total

    @property
    def progress(self) -> str:
        """How far it came, as "after 3 of 70 layers"; empty where it did not begin."""
        if not self.rows:
            return ""
        return f"after {len(self.rows):,} of {text.plural(self.total, 'layer')}"

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        interrupted = {} if self.complete else {"interrupted": self.progress}
        return interrupted | {
            "good": self.good,
            "totals": self.totals(),
            "rows": [row.as_dict() for row in self.rows],
            "problems": problem_list.as_data(self.problems),
            "unquantized": plain.as_data(self.rest),
        }

    def totals(self) -> dict[str, Any]:
        """How many layers and weights ran, could only be read, were wrong or refused, and the shares."""
        whole = sum(row.weights for row in self.rows)
        data: dict[str, Any] = {"layers": len(self.rows), "weights": whole}
        for key, status in (("ran", "ok"), ("read", "read"), ("failed", "failed"), ("refused", "error")):
            rows = [row for row in self.rows if row.status == status]
            weights = sum(row.weights for row in rows)
            share = weights / whole if whole else None
            data[key] = {"layers": len(rows), "weights": weights, "share": share}
        return data | {"missing": {"layers": len(self.missing)}}

    def as_text(self, device: str, seed: int, dtype: str, columns: int | None) -> list[str | text.Line]:
        """The report as lines of text, but for the table of the rows."""
        names = [row.layer for row in self.rows]
        parts = [
            self._worst(columns),
            [text.Line(line) for line in plain.as_text(self.rest, names, columns, indent=0)],
            self._problem_lines(columns),
            self._summary(device, seed, dtype, columns),
        ]
        lines: list[str | text.Line] = []
        for part in parts:
            if part:
                lines += ["", *part] if lines or self.rows else part
        return lines

    def _worst(self, columns: int | None) -> list[text.Line]:
        """The experts with the largest errors, by name: their rows in the table are shared."""
        shared = Counter(row.group for row in self.rows)
        experts = [row for row in self.rows if row.group is not None and shared[row.group] > 1]
        inexact = [row for row in experts if row.status == "failed" or row.relative_error]
        inexact.sort(key=_badness, reverse=True)
        if not inexact:
            return []
        shown = inexact[:WORST]
        head = ("worst experts", "shape", "rel. error", "rounding", "")
        rows = [head]
        for row in shown:
            fault = "failed" if row.status == "failed" else ""
            rows.append(
                (
                    row.layer,
                    _extents([row.shape]),
                    _error(row.exact_error),
                    _error(row.rounding_error),
                    fault,
                )
            )
        failed = [False, *(row.status == "failed" for row in shown)]
        return _coloured(text.table(rows, "<<>><", columns, indent=0), failed)

    def _problem_lines(self, columns: int | None) -> list[text.Line]:
        if not self.problems:
            return []
        others = (
            "" if len(self.errors) == len(self.problems) else "; `inspect` shows those that are no errors"
        )
        lines = text.wrap(f"Problems: {problem_list.counts(self.problems)}{others}", columns)
        heading = [text.Line(line, "error" if self.errors else None) for line in lines]
        errors = problem_list.as_text(self.errors, columns, every=True)
        return [*heading, *errors, *problem_list.repair_hint(self.problems, columns)]

    def _summary(self, device: str, seed: int, dtype: str, columns: int | None) -> list[text.Line]:
        """Lines with the fate of the layers and its reasons, the share of the weights, and the verdict."""
        counts = Counter(row.status for row in self.rows)
        found = ", ".join(f"{counts[status]:,} {shown}" for status, shown in _SHOWN.items() if counts[status])
        relative, largest = LIMITS[dtype]
        facts = [f"{found} on {device}"] if self.rows else []
        if calls := {row.calls for row in self.rows if row.calls}:
            facts.append(
                f"limits, from the rounded reference: {relative:g} relative, {largest:g} of the row's largest"
            )
            few = f"{min(calls)} to " if min(calls) < max(calls) else ""
            facts.append(f"time: median of {few}{text.plural(max(calls), 'call')}; seed {seed}")
        lines = [text.Line(line) for line in text.wrap("; ".join(facts), columns) if line]
        for sentence in self._reasons():
            lines += [text.Line(line) for line in text.wrap(sentence, columns, indent=2)]
        lines += [text.Line(line) for line in text.wrap(self._shares(), columns)]
        severity: Severity | None = None if self.good else "error"
        return lines + [text.Line(line, severity) for line in text.wrap(self._verdict(), columns)]

    def _reasons(self) -> list[str]:
        """Why layers did not run or failed, each reason once; those that a problem tells are told there."""
        told: dict[str | None, list[str]] = defaultdict(list)
        for problem in self.errors:
            told[problem.layer].append(f"{problem.code}: {problem.message}")
        messages: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            problems = [*told.get(row.layer, ()), *told.get(row.group, ())]
            if row.message and not any(problem in row.message for problem in problems):
                messages[f"{_SHOWN[row.status]}: {row.message}"].append(row)
        sentences = []
        for message, rows in messages.items():
            others = f" and {text.plural(len(rows) - 1, 'other')}" if len(rows) > 1 else ""
            sentences.append(f"{rows[0].layer}{others}: {message}")
        return sentences

    def _shares(self) -> str:
        totals = self.totals()
        whole = totals["weights"]
        words = {"ran": "ran", "read": "could only be read", "failed": "wrong", "refused": "refused"}
        parts = []
        for key, words_ in words.items():
            weights, layers = totals[key]["weights"], totals[key]["layers"]
            if key != "failed" or layers:
                count = f" ({text.plural(layers, 'layer')})" if layers else ""
                parts.append(f"{text.percent(weights, whole)} {words_}{count}")
        shares = f": {', '.join(parts)}" if self.rows else ": none"
        if not self.missing:
            return f"quantized weights{shares}"
        others = ", ..." if len(self.missing) > 1 else ""
        missing = (
            f"layers that the index names and no file has: {len(self.missing):,} ({self.missing[0]}{others})"
        )
        return f"quantized weights that are there{shares}; {missing}"

    def _verdict(self) -> str:
        counts = Counter(row.status for row in self.rows)
        if self.good:
            return (
                "result: all right" if counts["ok"] else "result: nothing is wrong, but nothing could be run"
            )
        faults = [
            "" if self.complete else f"interrupted {self.progress}",
            text.plural(len(self.errors), "error") + " of the checkpoint" if self.errors else "",
            text.plural(counts["failed"], "wrong layer") if counts["failed"] else "",
            text.plural(counts["error"], "refused layer") if counts["error"] else "",
        ]
        return f"result: {', '.join(fault for fault in faults if fault)}"


def _coloured(rows: Sequence[Sequence[str]], bad: Sequence[bool]) -> list[text.Line]:
    """The lines of a table, those of bad rows as errors."""
    return [
        text.Line(line, "error" if wrong else None)
        for lines, wrong in zip(rows, bad, strict=True)
        for line in lines
    ]


def _badness(row: Row) -> tuple[bool, float]:
    return row.status == "failed", inf if row.relative_error is None else row.relative_error


def _extents(shapes: Iterable[Sequence[int]]) -> str:
    """The shapes, each once."""
    return ", ".join(dict.fromkeys(" × ".join(map(str, shape)) for shape in shapes))


def _counted(name: str, count: int) -> str:
    return f"{name} {text.times(count)}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _cells(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """One line of the table: of several rows their largest errors and the median of their times."""
    shapes = _extents(row.shape for row in rows)
    named = _counted(name, len(rows)) if len(rows) > 1 else rows[0].layer
    about = (named, rows[0].quant_algo, shapes)
    times = [row.run_seconds for row in rows if row.run_seconds is not None]
    if not times:
        return (*about, _SHOWN[rows[0].status], "", "", "")
    error = max(row.exact_error or 0.0 for row in rows)
    rounding = max(row.rounding_error or 0.0 for row in rows)
    mark = " !" if any(row.status == "failed" for row in rows) else ""
    return (
        *about,
        rows[0].kernel,
        _error(error) + mark,
        _error(rounding),
        text.duration(statistics.median(times)),
    )
