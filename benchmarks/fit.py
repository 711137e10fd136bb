"""Makes every constant of the choice among CUDA kernels: csrc/cuda/choice/rates.h, from committed times.

    python -m benchmarks.fit [--check] [--losses]

`benchmarks/times` holds what `benchmarks.configs` measured. The extension tells of each config what a call is
made of (`plan.configs`: bytes, steps of the busiest multiprocessor, what nothing hides), and the seconds of a
config are

    launch + beside + |bytes / bandwidth, inside|    (csrc/cuda/choice/search.h)

so each row of rates is a fit of eight numbers to the times of one config. Fits minimize the relative error.
Times near the fastest of their cell count most; where a choice was wrong they count more in each round.
The result depends on nothing but the times and the geometry.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.configs import MODELS, OWN, experts_plan, linear_plan
from benchmarks.layers import shape_of
from moqext import _C

ROOT = Path(__file__).parent.parent
TIMES = ROOT / "benchmarks" / "times"
HEADER = ROOT / "csrc" / "cuda" / "choice" / "rates.h"

NEAR, FAR = 0.3, 0.05
"""How much slower than the fastest a config is whose time has half of the weight, and the least weight."""

ROUNDS = 15
SMALL, HARD = 0.03, 3.0
"""A choice that loses more gives weight to its parties, so many times its loss in each round. With every loss
in it, and more rounds, layers that a fit has not seen lose twice as much."""

WORST = 0.2
"""Weight of the worst loss beside the mean, for the round that stays."""

POWERS = (1.5, 2.0, 3.0, 5.0)
PULL, USUAL = 0.05, 0.23
"""How much a fit is pulled to a usual bandwidth, and which: microseconds for a MB from an H200's memory."""

DIGITS = 4
LEAST = 1e-3
"""The share of a call's time of a term that is left out."""


class Cell(NamedTuple):
    """A layer with a number of tokens on a chip.

    Attributes:
        chip: As the plan names it.
        layer: As `benchmarks.configs` names it.
        where: Its shape, or the model of experts.
        tokens: Rows of x.
    """

    chip: str
    layer: str
    where: str
    tokens: int

    @property
    def plan(self) -> _C.Plan:
        """The plan of the layer."""
        return plan_of(self.chip, self.layer, self.where)

    @property
    def decision(self) -> tuple[str, str, str]:
        """Group of alike choices: the chip, the operation and the format."""
        return self.chip, "experts" if self.where in MODELS else "linear", self.layer


class Config(NamedTuple):
    """A config of a kernel, by its number in the family's table."""

    kernel: str
    number: int


Times = Mapping[Cell, Mapping[Config, float]]
"""Microseconds."""


@cache
def plan_of(chip: str, layer: str, where: str) -> Any:
    """The plan of a layer on a chip that need not be here."""
    if where in MODELS:
        return experts_plan(layer, MODELS[where], chip)
    return linear_plan(layer, shape_of(where), chip)


def read(folder: Path = TIMES) -> dict[Cell, dict[Config, float]]:
    """All times."""
    found: dict[Cell, dict[Config, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                chip, kernel, layer, where, tokens, times = line.split("; ")
                for name, time in (item.split(":") for item in times.split()):
                    found[Cell(chip, layer, where, int(tokens))][Config(kernel, int(name))] = float(time)
    return dict(found)


# ---- what a plan chooses ----


def chosen(cell: Cell, times: Mapping[Config, float]) -> Config:
    """Config that the plan takes among those that were measured."""
    found = {Config(row[0], row[1]): row[-1] for row in cell.plan.configs(cell.tokens)}
    return fastest({config: found[config] for config in times if config in found})


def is_for_any_chip(config: Config) -> bool:
    """Whether the kernel is left to other chips."""
    return not config.kernel.startswith(OWN)


def fastest(seconds: Mapping[Config, float]) -> Config:
    """The config that takes least; kernels for any chip are left to other chips."""
    own = [config for config in seconds if not is_for_any_chip(config)]
    return min(own or seconds, key=lambda config: seconds[config])


def losses(times: Times) -> dict[tuple[str, str, str], dict[Cell, float]]:
    """Loss of the choice beside the fastest that was measured, 0.1 for a tenth, by decision."""
    found: dict[tuple[str, str, str], dict[Cell, float]] = defaultdict(dict)
    for cell, each in times.items():
        found[cell.decision][cell] = each[chosen(cell, each)] / min(each.values()) - 1
    return dict(found)


# ---- one row of rates ----


@dataclass
class Row:
    """The calls of a row.

    Attributes:
        terms: What calls are made of, in units of rates, a line a call.
        times: Microseconds.
        weights: Of calls.
        rates: Microseconds of a launch, of a MB, and of each count.
        power: Of the norm of what overlaps.
        expected: Microseconds by these rates.
        stale: Weights have changed.
    """

    terms: Any = field(default_factory=list)
    times: Any = field(default_factory=list)
    weights: Any = field(default_factory=list)
    rates: np.ndarray = field(default_factory=lambda: np.zeros(8))
    power: float = 0
    expected: np.ndarray = field(default_factory=lambda: np.zeros(0))
    stale: bool = True

    def seal(self) -> None:
        """Has all calls."""
        self.terms, self.times, self.weights = map(np.array, (self.terms, self.times, self.weights))

    def fit(self) -> None:
        """Finds the rates, and at first the power."""
        if self.stale:
            log, weights = np.log(self.times), np.sqrt(self.weights)
            powers = [self.power] if self.power else POWERS
            found = [(*minimize(self.terms, log, weights, power), power) for power in powers]
            _, self.rates, self.power = min(found, key=lambda each: each[0])
            self.expected = predict(self.terms, self.rates, self.power)[0]
        self.stale = False


def terms_of(counts: Sequence[float], memory: float) -> list[float]:
    """Counts in units of rates: one launch, MB as an H200 reads them, and the rest."""
    return [1.0, 1e-6 / memory * counts[0], *counts[1:]]


def begin(x: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Rates from which a fit starts."""
    share = np.median(times) / np.maximum(x.mean(0), 1e-30)
    rates = np.where(x.max(0) > 0, share * [0, 0, 0.15, 0.15, 0.15, 0.02, 0.02, 0.02], 0)
    rates[0], rates[1] = 3, USUAL
    return rates


def predict(x: np.ndarray, rates: np.ndarray, power: float) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds, and what each grows by with a rate."""
    memory, inside = x[:, 1] * rates[1], x[:, 2:5] @ rates[2:5]
    both = (memory**power + inside**power) ** (1 / power)
    slope = x.copy()
    slope[:, 1] *= (memory / both) ** (power - 1)
    slope[:, 2:5] *= ((inside / both) ** (power - 1))[:, None]
    return rates[0] + both + x[:, 5:] @ rates[5:], slope


def minimize(x: np.ndarray, log: np.ndarray, weights: np.ndarray, power: float) -> tuple[float, np.ndarray]:
    """Levenberg's and Marquardt's method on the roots of rates, which therefore are not negative."""
    scale = begin(x, np.exp(log))
    pull = PULL * np.sqrt(np.sum(weights**2))

    def residuals(root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rates = scale * root**2
        times, slope = predict(x, rates, power)
        found = np.append(weights * (np.log(times) - log), pull * np.log(rates[1] / USUAL))
        change = np.vstack([weights[:, None] * slope / times[:, None], np.zeros(len(rates))])
        change[-1, 1] = pull / rates[1]
        return found, change * (2 * scale * root)

    damping, root = 1e-2, np.where(scale > 0, 1.0, 0.0)
    error, change = residuals(root)
    for _ in range(300):
        square, down = change.T @ change, -change.T @ error
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), down)
        other, slope = residuals(root + step)
        gain = error @ error - other @ other
        if gain > 0:
            root, error, change, damping = root + step, other, slope, max(damping / 4, 1e-9)
        else:
            damping *= 4
        if damping > 1e9 or 0 < gain < 1e-9 * (error @ error):
            break
    return float(error @ error), scale * root**2


# ---- all rows ----

Place = tuple[str, int, int]
"""A call: a table of rates in C, a row of it, and a number in the row."""


class Fit:
    """The rows of all tables, fitted together.

    Args:
        times: What was measured.
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self.rows: dict[tuple[str, int], Row] = defaultdict(Row)
        self.cells = {cell: dict(self._places(cell, each)) for cell, each in times.items()}
        for row in self.rows.values():
            row.seal()

    def _places(self, cell: Cell, times: Mapping[Config, float]) -> Iterator[tuple[Config, Place]]:
        """Every config that was measured."""
        best = min(times.values())
        for kernel, number, row, counts, _ in cell.plan.configs(cell.tokens):
            table, config = table_of(cell, kernel), Config(kernel, number)
            if config in times:
                own, near = self.rows[table, row], (times[config] / best - 1) / NEAR
                own.terms.append(terms_of(counts, cell.plan.memory))
                own.times.append(times[config])
                own.weights.append(1.0 if is_for_any_chip(config) else max(FAR, 1 / (1 + near**2)))
                yield config, (table, row, len(own.times) - 1)

    def expected(self, place: Place) -> float:
        """Microseconds."""
        return float(self.rows[place[:2]].expected[place[2]])

    def choice(self, cell: Cell) -> Config:
        """Config that is expected to be the fastest."""
        return fastest({config: self.expected(place) for config, place in self.cells[cell].items()})

    def run(self) -> None:
        """Fits, then again with more weight where choices were wrong; of each format the best round stays."""
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in self.cells:
            groups[cell.decision[1:]].append(cell)
        kept = dict.fromkeys(groups, math.inf)
        rates: dict[tuple[str, int], tuple[np.ndarray, float]] = {}
        for _ in range(ROUNDS):
            for row in self.rows.values():
                row.fit()
            for group, cells in groups.items():
                lost = [self._weigh(cell) for cell in cells]
                score = float(np.mean(lost)) + WORST * max(lost)
                if score < kept[group]:
                    kept[group] = score
                    for cell in cells:
                        for table, number, _ in self.cells[cell].values():
                            row = self.rows[table, number]
                            rates[table, number] = row.rates, row.power
        for key, row in self.rows.items():
            row.rates, row.power = rates[key]
            row.expected = predict(row.terms, row.rates, row.power)[0]

    def _weigh(self, cell: Cell) -> float:
        """Loss of a choice; gives weight to the chosen config, and to what it loses against."""
        times, taken = self.times[cell], self.choice(cell)
        best = min(times, key=lambda config: times[config])
        loss = times[taken] / times[best] - 1
        for config in (taken, best):
            if loss > SMALL and config in self.cells[cell]:
                table, number, call = self.cells[cell][config]
                row = self.rows[table, number]
                row.weights[call] *= 1 + HARD * min(loss, 0.2)
                row.stale = True
        return loss


def table_of(cell: Cell, kernel: str) -> str:
    """The name of a kernel's rates, which is that of its row in csrc/cuda/choice/families.h."""
    return ("MOE_" if cell.where in MODELS else "") + kernel.removeprefix("cuda:").upper()


# ---- the header ----


def header(fit: Fit) -> str:
    """The text of rates.h."""
    lines = [
        "/* Rates of configs, made of benchmarks/times by python -m benchmarks.fit, not to be edited: rows",
        " * {launch, bandwidth, power, {inside}, {beside}} of search.h, of zeros where not measured. */",
        "#ifndef MOQ_CUDA_CHOICE_RATES_H",
        "#define MOQ_CUDA_CHOICE_RATES_H",
        "",
        "/* clang-format off */",
    ]
    for table in sorted({table for table, _ in fit.rows}):
        count = 1 + max((row for name, row in fit.rows if name == table), default=0)
        rows = [line_of(fit.rows.get((table, row))) for row in range(count)]
        lines += [f"#define MOQ_RATES_{table} \\", ", \\\n".join(rows)]
    return "\n".join([*lines, "", "#endif", ""])


def line_of(row: Row | None) -> str:
    """A row in C."""
    if row is None:
        return "    {0}"
    share = (row.terms * row.rates / row.expected[:, None]).max(0)
    rates = np.where(share > LEAST, row.rates, 0)
    rates[1] = 1 / max(row.rates[1], LEAST)
    text = [number(rate) for rate in rates]
    inside, beside = ", ".join(text[2:5]), ", ".join(text[5:])
    return f"    {{{text[0]}, {text[1]}, {number(row.power)}, {{{inside}}}, {{{beside}}}}}"


def number(value: float) -> str:
    """In C, with few digits."""
    text = f"{value:.{DIGITS}g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def report(times: Times) -> str:
    """A line a decision: cells, the mean of what is lost, and the most."""
    lines = []
    for decision, lost in sorted(losses(times).items()):
        worst = max(lost, key=lambda cell: lost[cell])
        lines.append(
            f"{', '.join(decision)}: {len(lost)} cells, {np.mean(list(lost.values())):.2%} lost in the mean, "
            f"at most {lost[worst]:.1%} ({worst.where}, {worst.tokens})"
        )
    return "\n".join(lines)


def main() -> None:
    """Writes the header, checks it, or says what is lost by the one that the extension was built with."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where the header is another one")
    parser.add_argument("--losses", action="store_true", help="say what the choices of this build lose")
    options = parser.parse_args()
    times = read()
    if options.losses:
        print(report(times))
        return
    fit = Fit(times)
    fit.run()
    if not options.check:
        HEADER.write_text(header(fit))
    elif HEADER.read_text() != header(fit):
        raise SystemExit(f"{HEADER} is not what the times make; run python -m benchmarks.fit")


if __name__ == "__main__":
    main()
