"""Writes the tables of quantization and weight processing in docs/results, from benchmarks/results.

python -m benchmarks.quantize_page
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import record
from benchmarks.cpu_page import fill

PAGES = record.RESULTS.parent.parent / "docs" / "results"
QUANTIZE = ("<!-- quantization: python -m benchmarks.quantize_page -->", "<!-- end of quantization -->")
PREPARE = ("<!-- preparation: python -m benchmarks.quantize_page -->", "<!-- end of preparation -->")
FEW = 64
"""Tokens up to which the time is what matters, not the share of the floor."""

KINDS = {
    "plain": "`quantize`",
    "silu_and_mul": "`silu_and_mul_quantize`",
    "rms_norm": "`rms_norm_quantize`",
    "add_rms_norm": "`rms_norm_quantize` with a residual",
}
Row = Mapping[str, Any]


def about(result: Mapping[str, Any]) -> str:
    """Where and when a result was measured."""
    facts = result["environment"]
    return (
        f"{result['device']}, {facts['date'][:10]}, moqext {facts['moqext']['commit']}; copies run at "
        f"{result['copy_bytes_per_second'] / 1e12:.2f} TB/s."
    )


def cell(rows: Sequence[Row]) -> str:
    """One case: moqext's time, its share of the floor where there are many tokens, the best peer's time."""
    own = next(row for row in rows if row["peer"] == "moqext")
    peers = [row["seconds"] for row in rows if row["peer"] != "moqext"]
    text = f"{own['seconds'] * 1e6:.{2 if own['tokens'] <= FEW else 1}f}"
    if own["tokens"] > FEW:
        text += f", {own['floor_seconds'] / own['seconds']:.0%}"
    return text + (f" ({min(peers) * 1e6:.{2 if own['tokens'] <= FEW else 1}f})" if peers else "")


def quantization(result: Mapping[str, Any]) -> str:
    """A table for each number of columns."""
    rows: Sequence[Row] = result["rows"]
    parts = [about(result)]
    for columns in dict.fromkeys(row["columns"] for row in rows):
        mine = [row for row in rows if row["columns"] == columns]
        tokens = sorted({row["tokens"] for row in mine})
        lines = [f"| K = {columns} | | " + " | ".join(f"M = {count}" for count in tokens) + " |"]
        lines.append("|---|---|" + "---|" * len(tokens))
        for kind, scheme in dict.fromkeys((row["kind"], row["scheme"]) for row in mine):
            chosen = [row for row in mine if (row["kind"], row["scheme"]) == (kind, scheme)]
            by_tokens = [[row for row in chosen if row["tokens"] == count] for count in tokens]
            cells = " | ".join(cell(group) if group else "" for group in by_tokens)
            lines.append(f"| {KINDS[kind]} | {scheme} | {cells} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def layer_text(row: Row) -> str:
    """What was prepared: linears one after the other, or a layer of experts."""
    if "experts" in row:
        return f"{row['experts']}: " + " × ".join(map(str, row["shape"]))
    return ", ".join(f"{rows} × {columns}" for rows, columns in row["shapes"])


def preparation(result: Mapping[str, Any]) -> str:
    """A table of all layers."""
    lines = ["| | | new | of copy | into `out` | of copy |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        folded = ' for `compute="fp8"`' if row["compute"] == "fp8" else ""
        lines.append(
            f"| {row['quant_algo']}{folded} | {layer_text(row)} "
            f"| {row['seconds'] * 1e6:.0f} µs | {row['of_copy']:.0%} "
            f"| {row['seconds_into_out'] * 1e6:.0f} µs | {row['of_copy_into_out']:.0%} |"
        )
    return about(result) + "\n\n" + "\n".join(lines)


TABLES: Mapping[str, tuple[str, tuple[str, str], Callable[[Mapping[str, Any]], str]]] = {
    "cuda-quantization.md": ("quantize_cuda.h200.json", QUANTIZE, quantization),
    "cuda-preparation.md": ("prepare_cuda.h200.json", PREPARE, preparation),
}
"""Page -> the result it is made from, the markers of its tables, and what makes them."""


def page_files() -> dict[str, str]:
    """File name -> text of each page, from the page and its result as they are."""
    files = {}
    for name, (result, markers, tables) in TABLES.items():
        made = tables(json.loads((record.RESULTS / result).read_text()))
        files[name] = fill((PAGES / name).read_text(encoding="utf-8"), *markers, [made])
    return files


def main() -> None:
    """Writes the pages."""
    for name, text in page_files().items():
        (PAGES / name).write_text(text, encoding="utf-8")
        print(f"written: docs/results/{name}")


if __name__ == "__main__":
    main()
