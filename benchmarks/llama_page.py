"""Writes the table of docs/results/llama.md from benchmarks/results/llama.*.json.

python -m benchmarks.llama_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, lines
from benchmarks.record import RESULTS

PAGE = PAGES / "llama.md"
MARKS = ("<!-- results: python -m benchmarks.llama_page -->", "<!-- end of results -->")
HEAD = ["form", "weights", "compute", "call", "tokens", "ms", "tokens/s", "× bfloat16", "× Transformers"]


def section(result: Mapping[str, Any]) -> str:
    """All rows of a chip."""
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
    return f"{about}\n\n{lines(HEAD, body, 4)}"


def page_text() -> str:
    """The page as the recorded results make it."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("llama.*.json"))]
    return fill(PAGE.read_text(encoding="utf-8"), *MARKS, [section(result) for result in results])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
