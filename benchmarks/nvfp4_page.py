"""Writes the tables of docs/results/cuda-nvfp4.md, and a plot for each chip.

They are made from benchmarks/results/nvfp4_cuda.*.json. The README gets some of the cells of the first chip.

python -m benchmarks.nvfp4_page
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, Layout, lines, missed, read_results, write
from benchmarks.goals import Cell, cells, goals, read_published
from benchmarks.layers import NVFP4 as EXACT
from benchmarks.layers import NVFP4_ALGOS, NVFP4_FP8
from moqext import _C
from moqext.cli.text import duration
from moqext.tools.bench_plot import times

README = PAGES.parent.parent / "README.md"
HEADLINE = ("<!-- nvfp4: python -m benchmarks.nvfp4_page -->", "<!-- end of nvfp4 -->")
HEADLINE_SHAPE = (8192, 8192)
HEADLINE_TOKENS = (1, 16, 64, 256, 4096)


def algorithm(algo: str, measured: Sequence[Cell]) -> str:
    """All cells of an algorithm."""
    beside = "FP8 by token" if algo == NVFP4_FP8 else "best other of the run"
    head = ["N × K", "M", "moqext", "of floor", "kernel", "no PDL"]
    head += ["bfloat16", "×", beside, "×", "published", "×"]
    body = [line(cell) for cell in measured if cell.key[2] == algo]
    return f"#### `{algo}`\n\n{lines([*head, 'missed'], body)}"


def line(cell: Cell) -> list[str]:
    """The texts of a cell; the columns of moqext are empty where it was not measured."""
    (shape, tokens, algo), own = cell.key, cell.own
    texts = [f"{shape[0]} × {shape[1]}", str(tokens), "", "", ""]
    if own:
        part = f"{own['floor_seconds'] / own['seconds']:.0%}"
        texts[2:] = [f"**{duration(own['seconds'])}**", part, own["kernel"].partition(":")[2]]
    texts.append(duration(cell.without["seconds"]) if cell.without else "")
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


def auto_folds(shape: tuple[int, int], tokens: int) -> bool:
    """Whether compute="auto" takes FP8 products on Hopper; no device is needed."""
    about = (shape[1], [shape[0]], None, "bfloat16", "cuda:0", "auto")
    return _C.linear_plan(EXACT, *about, capability="9.0").compute_for(tokens) == "fp8"


def headline(result: Mapping[str, Any]) -> str:
    """The README's table: one layer."""
    found = {cell.key: cell for cell in cells(result["rows"], read_published())}
    body = []
    for tokens in HEADLINE_TOKENS:
        exact, as_fp8 = (found.get((HEADLINE_SHAPE, tokens, algo)) for algo in (EXACT, NVFP4_FP8))
        if not (exact and exact.own):
            continue
        seconds = [exact.own["seconds"], as_fp8.own["seconds"] if as_fp8 and as_fp8.own else None]
        seconds.append(exact.bfloat16["seconds"] if exact.bfloat16 else None)
        texts = [duration(value) if value else "" for value in seconds]
        taken = 1 if auto_folds(HEADLINE_SHAPE, tokens) else 0
        texts[taken] = f"**{texts[taken]}**"
        other = exact.published
        texts.append(f"{duration(other.seconds)} {other.peer}" if other else "")
        body.append([str(tokens), *texts])
    head = ["tokens", "NVFP4, exact", "NVFP4, as FP8", "torch, bfloat16", "published"]
    shape, environment = " × ".join(map(str, HEADLINE_SHAPE)), result["environment"]
    where = f"on an {environment['gpu']}, {environment['date'][:10]}"
    page = "[docs/results/cuda-nvfp4.md](docs/results/cuda-nvfp4.md)"
    about = f'A layer of {shape} in NVFP4, measured {where} ({page}); bold is what `compute="auto"` takes:'
    return f"{about}\n\n{lines(head, body, 0)}"


def write_headline() -> None:
    """Into the README, where there is a result."""
    results = list(read_results(NVFP4.files).values())
    if results:
        text = fill(README.read_text(encoding="utf-8"), *HEADLINE, [headline(results[0])])
        README.write_text(text, encoding="utf-8")


NVFP4 = Layout(
    PAGES / "cuda-nvfp4.md",
    "<!-- results: python -m benchmarks.nvfp4_page -->",
    "nvfp4_cuda",
    ("Seconds of a call", times),
    (
        ("time", "time"),
        ("bfloat16", "bfloat16"),
        ("Marlin and Humming", "≥ 1.2× Marlin and Humming"),
        ("FP8", "within 5 % of FP8"),
        ("without PDL", "no PDL ≥ 1.0×"),
    ),
    lambda algo: algo in NVFP4_ALGOS,
    algorithm,
)

if __name__ == "__main__":
    write(NVFP4)
    write_headline()
