"""Errors of layers as SVG: a dot for each in the order of the model, error upwards, colours by format."""

import math
from collections.abc import Sequence

from moqext.reader.naming import number_order
from moqext.tools.compare import Difference, by_format
from moqext.tools.svg import label

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Told apart by colour-blind readers too (Okabe and Ito)."""

_WIDTH, _HEIGHT = 760, 320
_LEFT, _TOP, _BOTTOM = 70, 58, 60


def error_plot(rows: Sequence[Difference], title: str) -> str:
    """The drawing as text; layers without any difference stand at its lower edge.

    Args:
        rows: What `moqext.tools.compare.compare` found, at least one.
        title: Heads the drawing.
    """
    ordered = sorted(rows, key=lambda row: number_order(row.layer))
    errors = [row.relative_error for row in ordered if 0 < row.relative_error < math.inf]
    low = math.floor(math.log10(min(errors, default=1e-3)))
    high = max(math.ceil(math.log10(max(errors, default=1e-2))), low + 1)
    names = [" / ".join(dict.fromkeys(formats)) for formats in by_format(ordered)]
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(sorted(set(names)))}
    parts = [
        label(_LEFT, 24, title, size=15, weight="bold"),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" stroke="#999999"/>',
        label(_LEFT, _TOP - 10, "relative error", anchor="middle"),
        label(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 22, "layers in the order of the model", anchor="middle"),
    ]
    for power in range(low, high + 1):
        y = _TOP + _HEIGHT * (high - power) / (high - low)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#dddddd"/>')
        parts.append(label(_LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    for number, row in enumerate(ordered):
        x = _LEFT + _WIDTH * (number + 0.5) / len(ordered)
        up = 0.0
        if row.relative_error > 0:
            up = (
                min(1.0, (math.log10(row.relative_error) - low) / (high - low))
                if row.relative_error < math.inf
                else 1.0
            )
        colour = colours[" / ".join(dict.fromkeys(row.formats))]
        y = _TOP + _HEIGHT * (1 - up)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>')
    for number, (name, colour) in enumerate(colours.items()):
        x, y = _LEFT + 380 * (number % 2), _TOP + _HEIGHT + 46 + 18 * (number // 2)
        parts.append(f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(label(x + 14, y, name))
    width = _LEFT + _WIDTH + 30
    height = _TOP + _HEIGHT + _BOTTOM + 18 * (-(-len(colours) // 2) - 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="none">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
