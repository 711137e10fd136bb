"""The plot of docs/results/llama.md: how many times as fast as Transformers in bfloat16 a model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moqext.tools.svg import label

Row = Mapping[str, Any]
COLOURS = {"bfloat16": "#444444", "FP8": "#0072b2", "NVFP4": "#d55e00"}
FORM = "transformers"
LEFT, TOP, LINE, GAP, WIDTH, ROOM = 150, 62, 20, 18, 420, 190


def speedups(rows: Sequence[Row], title: str) -> str:
    """Bars of the model as from_pretrained hands it over, beside bfloat16 in Transformers.

    Args:
        rows: of benchmarks.llama.
        title: heads the drawing.
    """
    groups = _groups(rows)
    most = max(row["ratio_to_modules"] for group in groups.values() for row in group)
    parts, y = [label(LEFT, 24, title, size=15, weight="bold")], TOP
    parts.append(label(LEFT, 44, "times bfloat16 in Transformers, and tokens a second", colour="#666666"))
    for name, group in groups.items():
        parts.append(label(LEFT - 10, y + LINE * len(group) / 2 + 4, name, anchor="end"))
        for row in group:
            length = WIDTH * row["ratio_to_modules"] / most
            parts.append(
                f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{LINE - 4}" '
                f'fill="{COLOURS[row["weights"]]}"/>'
            )
            text = f"{row['ratio_to_modules']:.2f} × · {row['tokens_per_second']:,.0f} · {_weights(row)}"
            parts.append(label(LEFT + length + 6, y + LINE / 2 + 4, text))
            y += LINE
        y += GAP
    width, height = LEFT + WIDTH + ROOM, y
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="none">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The bars of each number of tokens: bfloat16, and what the quantized model reaches."""
    cases = list(dict.fromkeys((row["what"], row["tokens"]) for row in rows))
    groups = {}
    for what, tokens in sorted(cases):
        own = [row for row in rows if (row["what"], row["tokens"]) == (what, tokens)]
        plain = [row for row in own if (row["form"], row["weights"]) == ("modules", "bfloat16")]
        name = f"prompt of {tokens}" if what == "prefill" else f"{tokens} at a time"
        groups[name] = plain + [row for row in own if row["form"] == FORM]
    return groups


def _weights(row: Row) -> str:
    return str(row["weights"]) + (", auto" if row["compute"] == "auto" else "")
