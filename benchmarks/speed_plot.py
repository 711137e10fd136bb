"""Draws docs/speed.svg from the table of speed in the README: python -m benchmarks.speed_plot."""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speed.svg"
LEFT, WIDTH, ROW, TOP = 420, 860, 34, 44


def ratios(text: str) -> list[tuple[str, float]]:
    """Names of the timed regimes, and how many times as fast as the public best."""
    table = text.split("<!-- speed -->")[1].split("<!-- /speed -->")[0]
    rows = re.findall(r"^\| (.*?) \|.*? \| ([\d.]+)× \|", table, re.MULTILINE)
    return [(name, float(ratio)) for name, ratio in rows]


def draw(rows: list[tuple[str, float]]) -> str:
    """Bars of moqext, and a line where the public best stands."""
    height = TOP + ROW * len(rows) + 34
    unit = (WIDTH - LEFT - 70) / max(1.0, *(ratio for _, ratio in rows))
    best = LEFT + unit
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="14" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">times as fast as the public best</text>',
    ]
    for number, (name, ratio) in enumerate(rows):
        y = TOP + ROW * number
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 16}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{ratio * unit:.1f}" height="22" fill="#3b7a2a"/>',
            f'<text x="{LEFT + ratio * unit + 8:.1f}" y="{y + 16}">{ratio:.2f}×</text>',
        ]
    foot = height - 30
    parts += [
        f'<line x1="{best:.1f}" x2="{best:.1f}" y1="{TOP - 8}" y2="{foot}" '
        'stroke="#c0392b" stroke-dasharray="5 4"/>',
        f'<text x="{best:.1f}" y="{height - 12}" text-anchor="middle" fill="#c0392b">public best</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    PICTURE.write_text(draw(ratios(README.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
