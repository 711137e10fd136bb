"""Writes the tables of docs/results/llama.md from benchmarks/results/llama.*.json, and a plot for each chip.

python -m benchmarks.llama_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, lines
from benchmarks.llama_plot import FORM, speedups
from benchmarks.record import RESULTS

PAGE = PAGES / "llama.md"
MARKS = ("<!-- results: python -m benchmarks.llama_page -->", "<!-- end of results -->")
HEAD = ["form", "weights", "compute", "call", "tokens", "ms", "tokens/s", "× bfloat16", "× Transformers"]


def section(result: Mapping[str, Any], plot: str | None) -> str:
    """All rows of a chip, below its plot."""
    environment = result["environment"]
    about = (
        f"### {result['gpu']}\n\n{environment['date'][:10]}, torch {environment['torch']}, Transformers "
        f"{result['transformers']}, commit {environment['moqext']['commit']}, a cache of "
        f"{result['context']} places."
    )
    body = [
        [
            *(row["form"], row["weights"], row["compute"], row["what"], str(row["tokens"])),
            *(f"{row['seconds'] * 1e3:.3f}", f"{row['tokens_per_second']:.0f}"),
            *(f"{row['ratio']:.2f}", f"{row['ratio_to_modules']:.2f}"),
        ]
        for row in result["rows"]
    ]
    shown = f"![Times the speed of bfloat16 in Transformers]({plot})\n\n" if plot else ""
    return f"{about}\n\n{shown}{lines(HEAD, body, 4)}"


def page_files() -> dict[str, str]:
    """File name -> text: the page as the recorded results make it, and its plots."""
    files, sections = {}, []
    for path in sorted(RESULTS.glob("llama.*.json")):
        result, plot = json.loads(path.read_text()), None
        if any(row["form"] == FORM for row in result["rows"]):
            plot = f"{path.stem}.svg"
            files[plot] = speedups(result["rows"], f"Llama, 8 billion weights, {result['gpu']}")
        sections.append(section(result, plot))
    return files | {PAGE.name: fill(PAGE.read_text(encoding="utf-8"), *MARKS, sections)}


if __name__ == "__main__":
    for name, text in page_files().items():
        (PAGES / name).write_text(text, encoding="utf-8")
