"""Writes the tables of docs/results/vllm.md from benchmarks/results/vllm*.json.

python -m benchmarks.vllm_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, lines
from benchmarks.record import RESULTS

PAGE = PAGES / "vllm.md"
MARKS = ("<!-- results: python -m benchmarks.vllm_page -->", "<!-- end of results -->")

Row = Mapping[str, Any]

PATTERNS = {
    "vllm.*.json": "",
    "vllm-64.*.json": "64 sequences, engines in turn, on ",
    "vllm-experts.*.json": "Experts on ",
}
"""Results, and what stands before the name of their chip."""
BESIDE = {
    "NVFP4 moqext": "NVFP4 Marlin",
    "FP8 moqext": "FP8 vLLM",
    "experts in NVFP4 moqext": "experts in NVFP4 Marlin",
    "experts in FP8 moqext": "experts in FP8 vLLM",
}
"""vLLM's own way for what moqext runs, by the beginning of the way's name."""


def speeds(row: Row) -> dict[str, float]:
    """Tokens a second of a sequence by batch, and of a prompt."""
    found = dict(row["decode"])
    return found | ({"prompt": row["prefill"]} if row["prefill"] else {})


def own_of(rows: Sequence[Row], row: Row) -> Row | None:
    """The row of vLLM's own kernels, of the same mode, that one of moqext stands beside, in turn."""
    for name, own in BESIDE.items():
        if row["name"].startswith(name):
            mine, same = (
                [each for each in rows if (each["name"], each["compile"]) == (config, row["compile"])]
                for config in (row["name"], own)
            )
            return same[min(mine.index(row), len(same) - 1)] if same else None
    return None


def table(rows: Sequence[Row], compiled: bool) -> str:
    """A line for each way, the multiple of vLLM's own in brackets."""
    some = [row for row in rows if row["compile"] == compiled]
    columns = list(dict.fromkeys(column for row in some for column in speeds(row)))
    body = []
    for row in some:
        own = own_of(rows, row)
        cells = []
        for column in columns:
            speed, least = speeds(row).get(column), own and speeds(own).get(column)
            ratio = f" ({speed / least:.2f}×)" if speed and least else ""
            cells.append(f"{speed:.{0 if column == 'prompt' else 1}f}{ratio}" if speed else "")
        body.append([row["name"], *cells])
    titles = [
        column if column == "prompt" else f"{column} sequence{'s' * (column != '1')}" for column in columns
    ]
    return lines(["linears", *titles], body, 1)


def section(result: Row, what: str = "") -> str:
    """All ways of a chip; `what` stands before its name."""
    about = result["environment"]
    rows = [row for row in result["rows"] if "failed" not in row]
    parts = [
        f"### {what}{result['gpu']}",
        f"vLLM {result['vllm']}, torch {about['torch']}, {about['date'][:10]}. {result['note']}".strip(),
    ]
    for compiled, title in ((False, "CUDA graphs, without torch.compile"), (True, "torch.compile")):
        if any(row["compile"] == compiled for row in rows):
            parts += [f"{title}, tokens a second of a sequence:", table(rows, compiled)]
    return "\n\n".join(parts)


def page_text() -> str:
    """The page as the recorded results make it."""
    sections = [
        section(json.loads(path.read_text()), what)
        for pattern, what in PATTERNS.items()
        for path in sorted(RESULTS.glob(pattern))
    ]
    return fill(PAGE.read_text(encoding="utf-8"), *MARKS, sections)


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
