"""Writes the tables of docs/results/cuda-fp8.md, and a plot for each chip.

They are made from benchmarks/results/linear_cuda.*.json.

python -m benchmarks.cuda_page
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.goals import Cell, Goal, Row, cells, geomean, goals, read_published
from moqext.cli.text import duration
from moqext.tools.bench import PEER
from moqext.tools.bench_plot import roofline

PAGES = record.RESULTS.parent.parent / "docs" / "results"
PAGE = PAGES / "cuda-fp8.md"
BEGIN, END = "<!-- results: python -m benchmarks.cuda_page -->", "<!-- end of results -->"

RANGES = ((1, 16), (17, 64), (65, 1023), (1024, 1 << 20))
"""Tokens whose cells are summed up together."""

PLOTTED = ((4096, 4096), (8192, 8192), (28672, 4096))


class Layout(NamedTuple):
    """A page of results.

    Attributes:
        path: The page.
        begin: Where its tables begin.
        files: Results are benchmarks/results/`files`.*.json.
        plot: What is drawn, and by whom.
        goals: Columns of the summary: the goals counted, and the heads.
        shows: Whether an algorithm of the results has a table.
        table: An algorithm's.
    """

    path: Path
    begin: str
    files: str
    plot: tuple[str, Callable[[Sequence[Row], str], str]]
    goals: Sequence[tuple[str, str]]
    shows: Callable[[str], bool]
    table: Callable[[str, Sequence[Cell]], str]


def render(
    page: str, results: Mapping[str, Mapping[str, Any]], layout: Layout | None = None
) -> dict[str, str]:
    """File name -> text of the page with its tables, and of the plots.

    Args:
        page: The page as it is; what stands between the markers is replaced.
        results: By the name of the chip, what benchmarks.linear wrote.
        layout: The page's; that of docs/results/cuda-fp8.md without one.
    """
    layout = layout or CUDA
    head, rest = page.split(layout.begin)
    _, tail = rest.split(END)
    files, sections = {}, []
    for name, result in results.items():
        measured = [cell for cell in cells(result["rows"], read_published()) if layout.shows(cell.key[2])]
        plot = f"{layout.path.stem}.{name}.svg"
        drawn, draw = layout.plot
        files[plot] = draw(plotted(result["rows"]), result["environment"]["gpu"])
        parts = [
            f"### {result['environment']['gpu']}",
            facts(result),
            summary(measured, layout.goals),
            f"![{drawn} over tokens]({plot})",
            host(result["host"]),
            sustained(result["rows"]),
            *(layout.table(algo, measured) for algo in dict.fromkeys(cell.key[2] for cell in measured)),
        ]
        sections.append("\n\n".join(part for part in parts if part))
    text = "\n\n".join(sections) or "No result is recorded yet."
    files[layout.path.name] = f"{head}{layout.begin}\n\n{text}\n\n{END}{tail}"
    return files


def facts(result: Mapping[str, Any]) -> str:
    """What the figures depend on, in a paragraph."""
    about, ceilings = result["environment"], result["ceilings"]
    versions = f"driver {about['driver']}, torch {about['torch']} (CUDA {about['cuda']})"
    versions += f", Triton {about['triton']}" if "triton" in about else ""
    rates = (
        f"copies run at {ceilings['fp8']['bytes_per_second'] / 1e12:.2f} TB/s, bfloat16 products at "
        f"{ceilings['bfloat16']['flop_per_second'] / 1e12:.0f} and FP8 products at "
        f"{ceilings['fp8']['flop_per_second'] / 1e12:.0f} Tflop/s"
    )
    note = f" {result['note']}." if "note" in result else ""
    return f"{versions}, moqext {about['moqext']['commit']}, {about['date'][:10]}; {rates}.{note}"


def plotted(rows: Sequence[Row]) -> list[Row]:
    """moqext's rows and torch's bfloat16 ones on the shapes of `PLOTTED`, or on the first three."""
    chosen = [row for row in rows if row["peer"] == "moqext" or row["quant_algo"] == PEER]
    chosen = [row for row in chosen if row["protocol"] != "sustained"]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in chosen))
    shapes = [shape for shape in PLOTTED if shape in shapes] or shapes[:3]
    return [row for row in chosen if tuple(row["shape"]) in shapes]


def lines(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are text."""
    rule = ["---" if number < left else "---:" for number in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *body])


def summary(measured: Sequence[Cell], columns: Sequence[tuple[str, str]]) -> str:
    """A line for each algorithm and range of tokens: speed over the best path, and goals met by column."""
    body = []
    for algo in dict.fromkeys(cell.key[2] for cell in measured):
        for low, high in RANGES:
            group = [
                cell for cell in measured if cell.own and cell.key[2] == algo and low <= cell.key[1] <= high
            ]
            ratios = [cell.ratio for cell in group if cell.ratio is not None]
            if not ratios:
                continue
            mine = [goal for cell in group for goal in goals(cell)]
            counts = [count_met([goal for goal in mine if goal.name == name]) for name, _ in columns]
            tokens = f"{low} to {high}" if high < RANGES[-1][1] else f"{low} and more"
            body.append(
                [
                    f"`{algo}`",
                    tokens,
                    str(len(group)),
                    f"{geomean(ratios):.2f}×",
                    f"{min(ratios):.2f}×",
                    *counts,
                ]
            )
    head = ["algorithm", "M", "cells", "geomean", "slowest", *(name for _, name in columns)]
    note = "How fast against the best path of the run or published, and in how many cells each goal is met:"
    return f"{note}\n\n{lines(head, body, 2)}"


def count_met(found: Sequence[Goal]) -> str:
    """How many of how many; nothing where there is no such goal."""
    return f"{sum(goal.met for goal in found)} of {len(found)}" if found else ""


def host(rows: Sequence[Row]) -> str:
    """What an eager call costs the host."""
    if not rows:
        return ""
    order = sorted(rows, key=lambda row: (row["quant_algo"], row["seconds"]))
    body = [
        [f"`{row['quant_algo']}`", row["peer"], row["result"], f"{row['seconds'] * 1e6:.2f}"] for row in order
    ]
    note = "Microseconds that a call outside of a graph costs the host, one token (median):"
    return f"{note}\n\n{lines(['algorithm', 'peer', 'result', 'time'], body, 3)}"


def sustained(rows: Sequence[Row]) -> str:
    """The long runs beside the bursts."""
    bursts = {row_key(row): row for row in rows if row["protocol"] == "alone"}
    body = []
    for row in rows:
        if row["protocol"] != "sustained":
            continue
        burst = bursts[row_key(row)]
        shape = f"{row['shape'][0]} × {row['shape'][1]}"
        body.append(
            [
                shape,
                f"`{row['quant_algo']}`",
                row["peer"],
                str(row["tokens"]),
                duration(burst["seconds"]),
                duration(row["seconds"]),
                f"{row['flop'] / row['seconds'] / 1e12:.0f}",
                f"{row['clock_mhz']:.0f}",
                f"{row['watts']:.0f}" if "watts" in row else "",
            ]
        )
    if not body:
        return ""
    head = ["N × K", "algorithm", "peer", "M", "burst", "sustained", "Tflop/s", "MHz", "W"]
    return f"Bursts, and after a second of such calls without a pause:\n\n{lines(head, body, 3)}"


def row_key(row: Row) -> tuple[Any, ...]:
    """Peer and cell."""
    return (*row["shape"], row["tokens"], row["quant_algo"], row["peer"])


def algorithm(algo: str, measured: Sequence[Cell]) -> str:
    """All cells of an algorithm."""
    head = [
        "N × K",
        "M",
        "moqext",
        "of floor",
        "kernel",
        "no PDL",
        "best peer of the run",
        "×",
        "published",
        "×",
    ]
    body = [line(cell) for cell in measured if cell.key[2] == algo]
    return f"#### `{algo}`\n\n{lines([*head, 'missed'], body)}"


def line(cell: Cell) -> list[str]:
    """The texts of a cell; the columns of moqext are empty where it was not measured."""
    (shape, tokens, _), own = cell.key, cell.own
    texts = [f"{shape[0]} × {shape[1]}", str(tokens)]
    if own:
        part = f"{own['floor_seconds'] / own['seconds']:.0%}"
        texts += [f"**{duration(own['seconds'])}**", part, own["kernel"].partition(":")[2]]
    else:
        texts += ["", "", ""]
    texts.append(duration(cell.without["seconds"]) if cell.without else "")
    others = [(cell.best["peer"], cell.best["seconds"]) if cell.best else None]
    others.append((cell.published.peer, cell.published.seconds) if cell.published else None)
    for other in others:
        texts.append(f"{duration(other[1])} {other[0]}" if other else "")
        texts.append(f"{other[1] / own['seconds']:.2f}" if other and own else "")
    return [*texts, ", ".join(missed(goal) for goal in goals(cell) if not goal.met)]


def missed(goal: Goal) -> str:
    """A goal that was not reached, with what it asks for, or the ratio that was."""
    if goal.name == "time":
        return f"time ({duration(goal.target)})"
    if goal.name == "rate":
        return f"rate ({goal.reached / 1e12:.0f} Tflop/s)"
    return f"{goal.name} ({goal.reached:.2f})"


CUDA = Layout(
    PAGE,
    BEGIN,
    "linear_cuda",
    ("Roofline: operations a second", roofline),
    (
        ("time", "time"),
        ("no slower than any", "≥ 1.0×"),
        ("without PDL", "no PDL ≥ 1.0×"),
        ("torch blockwise", "≥ 1.5× torch by blocks"),
        ("rate", "≥ 1250 Tflop/s"),
    ),
    lambda algo: True,
    algorithm,
)


def read_results(files: str = CUDA.files, folder: Path = record.RESULTS) -> dict[str, dict[str, Any]]:
    """Name of the chip -> result, in order of names."""
    found = sorted(folder.glob(f"{files}.*.json"))
    return {path.name.split(".")[1]: json.loads(path.read_text()) for path in found}


def write(layout: Layout) -> None:
    """Writes the page and the plots."""
    for name, text in render(layout.path.read_text(), read_results(layout.files), layout).items():
        (PAGES / name).write_text(text, encoding="utf-8")
        print(f"written: docs/results/{name}")


if __name__ == "__main__":
    write(CUDA)
