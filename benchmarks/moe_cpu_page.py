"""Writes the tables of docs/results/cpu-experts.md from benchmarks/results/moe_cpu.*.json.

python -m benchmarks.moe_cpu_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu_page import fill
from benchmarks.cuda_page import PAGES, lines
from benchmarks.record import RESULTS
from moqext.cli.bench import title
from moqext.cli.text import duration
from moqext.tools.bench import PEER

PAGE = PAGES / "cpu-experts.md"
MARKS = ("<!-- results: python -m benchmarks.moe_cpu_page -->", "<!-- end of results -->")


def cell(row: Mapping[str, Any]) -> str:
    """Time, share of the floor, and times as fast as torch."""
    ratio = "" if row["quant_algo"] == PEER else f", **{row['torch_ratio']:.2f}×**"
    return f"{duration(row['seconds'])}, {row['floor_seconds'] / row['seconds']:.0%}{ratio}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each number of tokens."""
    algos = list(dict.fromkeys(row["quant_algo"] for row in rows))
    cells = {(row["tokens"], row["quant_algo"]): cell(row) for row in rows}
    active = {row["tokens"]: row["active_experts"] for row in rows}
    head = ["tokens", "experts", *("torch bfloat16" if algo == PEER else f"`{algo}`" for algo in algos)]
    body = [
        [str(tokens), f"{active[tokens]:.0f}", *(cells[tokens, algo] for algo in algos)] for tokens in active
    ]
    return lines(head, body, 0)


def goals(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was asked for and what came."""
    body = [
        [f"`{row['quant_algo']}`", str(row["tokens"]), f"{row['goal']}", f"{row['torch_ratio']:.2f}",
         "met" if row["torch_ratio"] >= row["goal"] else "missed"]
        for row in rows
        if row["goal"] is not None
    ]  # fmt: skip
    return lines(["algorithm", "tokens", "goal", "reached", ""], body, 1)


def section(result: Mapping[str, Any]) -> str:
    """All rows of a processor."""
    facts = (
        f"{result['experts']} experts, top {result['top_k']}, hidden size {result['hidden_size']}, "
        f"intermediate size {result['intermediate_size']}; memory is read at "
        f"{result['bytes_per_second'] / 1e9:.1f} GB/s."
    )
    heading = f"### {title(result['environment'], result)}"
    return "\n\n".join([heading, facts, table(result["rows"]), goals(result["rows"])])


def page_text() -> str:
    """The page as the recorded results make it."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("moe_cpu.*.json"))]
    return fill(PAGE.read_text(encoding="utf-8"), *MARKS, [section(result) for result in results])


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
