"""The choice of kernels loses little on measured times, and its constants are made of them."""

import importlib
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"[0-9][0-9.e+-]*(?=f)")
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")


@pytest.fixture(scope="module")
def fit() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module("benchmarks.fit")


@pytest.fixture(scope="module")
def times(fit: Any) -> Any:
    return fit.read()


@pytest.fixture(scope="module")
def losses(fit: Any, times: Any) -> Any:
    return fit.losses(times)


def test_choices_are_the_fastest_that_were_measured(losses: Any) -> None:
    """1 % is lost in the mean of a chip, an operation and a format at most, and 10 % in a cell."""
    assert len(losses) == 25
    assert {chip for chip, _, _ in losses} == {"H200 SXM", "H100 SXM"}
    assert {which: mean(lost.values()) for which, lost in losses.items() if mean(lost.values()) > 0.01} == {}
    worst = {cell: loss for lost in losses.values() for cell, loss in lost.items() if loss > 0.1}
    assert worst == {}


def test_the_page_says_what_is_lost(losses: Any) -> None:
    """A line of docs/lab/choice.md for each decision, as `python -m benchmarks.fit --losses` has it."""
    page = (ROOT / "docs" / "lab" / "choice.md").read_text()
    shown = re.findall(r"^\| (H[0-9]+ SXM) \| (\w+), (.*?) \| (.*) \|$", page, re.MULTILINE)
    expected = []
    for (chip, what, layer), lost in losses.items():
        at, most = max(lost.items(), key=lambda item: item[1])
        cells = f"{len(lost)} | {100 * mean(lost.values()):.2f} % | {100 * most:.1f} %"
        tokens = f"{at.tokens} token{'s' * (at.tokens > 1)}"
        place = at.where.replace("x", " x ") if what == "linear" else at.where
        expected.append((chip, what, layer.replace(",", ", "), f"{cells} ({place}, {tokens})"))
    assert sorted(shown) == sorted(expected)


def test_what_a_plan_takes_was_measured(fit: Any, times: Any) -> None:
    """On an H200 every config of every kernel was; a choice that was not would lose nobody knows how much."""
    cells = [cell for cell in times if cell.chip == "H200 SXM"]
    taken = {cell: fit.Config(*(row := cell.plan.config(cell.tokens))[:1], row[2]) for cell in cells}
    assert len(cells) == 3488
    assert [cell for cell, config in taken.items() if config not in times[cell]] == []
    assert [cell for cell in cells if taken[cell] != fit.chosen(cell, times[cell])] == []


@pytest.mark.slow
def test_the_constants_are_those_that_the_times_make(fit: Any, times: Any) -> None:
    """Else: python -m benchmarks.fit."""
    made = fit.Fit(times)
    made.run()
    words, numbers = zip(*map(parted, (fit.header(made), fit.HEADER.read_text())), strict=True)
    assert words[0] == words[1]
    # Processors round differently, which a fit of three digits shows in the last one.
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02)


def parted(text: str) -> tuple[list[str], list[float]]:
    """Text between the rates of a header, and the rates."""
    return NUMBER.split(text), [float(number) for number in NUMBER.findall(text)]


def test_a_fit_finds_the_rates_of_times_that_have_some(fit: Any) -> None:
    """Without noise: a launch, bytes and steps that overlap, and what nothing hides."""
    np = pytest.importorskip("numpy")
    row = fit.Row()
    for number in range(60):
        counts = (1e6 * (1 + number % 7) ** 2, 10.0 * (number % 11), 0, 0, 5.0 * (number % 3), 0, 0)
        row.terms.append(fit.terms_of(counts, 1.0))
    row.seal()
    rates = np.array([3, 0.25, 0.2, 0, 0, 0.1, 0, 0])
    row.times, row.weights = fit.predict(row.terms, rates, 3.0)[0], np.ones(60)
    row.fit()
    assert row.power == 3.0
    assert row.expected == pytest.approx(row.times, rel=5e-3)  # pulled a little to the usual bandwidth
    assert row.rates == pytest.approx(rates, rel=0.05, abs=1e-2)
