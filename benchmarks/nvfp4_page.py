"""Writes the tables of docs/nvfp4.md, and a plot for each, from benchmarks/results/nvfp4_cuda.*.json.

python -m benchmarks.nvfp4_page
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cuda_page import DOCS, Layout, lines, missed, write
from benchmarks.goals import Cell, goals
from benchmarks.layers import NVFP4_ALGOS, NVFP4_FP8
from moqext.bench_plot import times
from moqext.cli.bench import duration


def algorithm(algo: str, measured: Sequence[Cell]) -> str:
    """All cells of an algorithm."""
    beside = "FP8 by token" if algo == NVFP4_FP8 else "best other of the run"
    head = ["N × K", "M", "moqext", "of floor", "kernel", "bfloat16", "×", beside, "×", "published", "×"]
    body = [line(cell) for cell in measured if cell.key[2] == algo]
    return f"#### `{algo}`\n\n{lines([*head, 'missed'], body)}"


def line(cell: Cell) -> list[str]:
    """A cell's texts; those of moqext are empty where it was not measured."""
    (shape, tokens, algo), own = cell.key, cell.own
    texts = [f"{shape[0]} × {shape[1]}", str(tokens), "", "", ""]
    if own:
        part = f"{own['floor_seconds'] / own['seconds']:.0%}"
        texts[2:] = [f"**{duration(own['seconds'])}**", part, own["kernel"].partition(":")[2]]
    best = next((row for row in cell.peers if row is not cell.bfloat16), None)
    beside = cell.fp8 if algo == NVFP4_FP8 else best
    others: list[tuple[str, float] | None] = [
        ("", row["seconds"]) if row else None for row in (cell.bfloat16, beside)
    ]
    if best and beside is best:
        others[1] = (f" {best['peer']}", best["seconds"])
    others.append((f" {cell.published.peer}", cell.published.seconds) if cell.published else None)
    for other in others:
        texts.append(f"{duration(other[1])}{other[0]}" if other else "")
        texts.append(f"{other[1] / own['seconds']:.2f}" if other and own else "")
    return [*texts, ", ".join(missed(goal) for goal in goals(cell) if not goal.met)]


NVFP4 = Layout(
    DOCS / "nvfp4.md",
    "<!-- results: python -m benchmarks.nvfp4_page -->",
    "nvfp4_cuda",
    ("Seconds of a call", times),
    (
        ("time", "time"),
        ("bfloat16", "bfloat16"),
        ("Marlin and Humming", "≥ 1.2× Marlin and Humming"),
        ("FP8", "within 5 % of FP8"),
    ),
    lambda algo: algo in NVFP4_ALGOS,
    algorithm,
)

if __name__ == "__main__":
    write(NVFP4)
