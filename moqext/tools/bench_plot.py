"""Measured linears as SVG, beside what the machine allows: a roofline, or times.

One panel a shape, tokens from left to right. Solid lines are what each algorithm reached, dashed ones of the
same colour what the machine allows. A roofline rises on the left, where bytes decide, and is level on the
right, where operations do. Times are level on the left and rise on the right.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moqext.tools.svg import label, points

_PANEL = (300, 260)
_LEFT, _TOP, _GAP, _BOTTOM = 62, 62, 34, 76
_COLOURS = ("#444444", "#0072b2", "#56b4e9", "#cc79a7", "#d55e00", "#e69f00", "#009e73")
"""Told apart by colour-blind readers too (Okabe and Ito); the first one is torch's."""

_Point = tuple[float, float]
_Row = Mapping[str, Any]


class _Scale(NamedTuple):
    """The upward axis: value of a row by the name of its seconds, unit, and name of a power of ten."""

    value: Callable[[_Row, str], float]
    unit: str
    name: Callable[[int], str]


def roofline(rows: Sequence[_Row], title: str) -> str:
    """Operations a second, as the text of a drawing.

    Args:
        rows: What `moqext.tools.bench.Row.as_dict` gives, at least one; or the same out of JSON.
        title: Heads the drawing.
    """
    return _draw(rows, title, _Scale(lambda row, seconds: row["flop"] / row[seconds], "flop/s", _speed))


def times(rows: Sequence[_Row], title: str) -> str:
    """The plot of seconds a call over tokens, as SVG: a panel for each shape."""
    return _draw(rows, title, _Scale(lambda row, seconds: float(row[seconds]), "time", _time))


def _draw(rows: Sequence[_Row], title: str, scale: _Scale) -> str:
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    algos = list(dict.fromkeys(row["quant_algo"] for row in rows))
    tokens = sorted({row["tokens"] for row in rows})
    reached = [scale.value(row, "seconds") for row in rows]
    roofs = [scale.value(row, "floor_seconds") for row in rows]
    low = math.floor(math.log10(min(reached + roofs)))
    high = max(math.ceil(math.log10(max(reached + roofs))), low + 1)
    width = _LEFT + len(shapes) * (_PANEL[0] + _GAP)
    parts = [label(_LEFT, 24, title, size=15, weight="bold")]
    colours = dict(zip(algos, _colours(algos), strict=True))
    for number, shape in enumerate(shapes):
        left = _LEFT + number * (_PANEL[0] + _GAP)
        heading = f"{shape[0]} × {shape[1]}"
        parts += _axes(left, tokens, low, high, heading, scale if number == 0 else None)
        for algo in algos:
            own = [row for row in rows if tuple(row["shape"]) == shape and row["quant_algo"] == algo]
            own.sort(key=lambda row: row["tokens"])

            def place(row: _Row, seconds: str, left: float = left) -> _Point:
                return _place(left, tokens, low, high, row["tokens"], scale.value(row, seconds))

            colour = colours[algo]
            roof = points(place(row, "floor_seconds") for row in own)
            line = [place(row, "seconds") for row in own]
            parts.append(f'<polyline points="{roof}" stroke="{colour}" stroke-dasharray="4 3"/>')
            parts.append(f'<polyline points="{points(line)}" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in line]
    legend, lines = _legend(colours, width)
    height = _TOP + _PANEL[1] + _BOTTOM + 18 * lines
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="none">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts + legend) + "\n</svg>\n"
    )


def _colours(algos: Sequence[str]) -> list[str]:
    """Torch's own for what torch runs, the others in turn."""
    others = _COLOURS[1:]
    quantized = [algo for algo in algos if algo != "bfloat16"]
    return [
        _COLOURS[0] if algo == "bfloat16" else others[quantized.index(algo) % len(others)] for algo in algos
    ]


def _place(left: float, tokens: Sequence[int], low: int, high: int, count: int, value: float) -> _Point:
    first, last = math.log2(tokens[0]), math.log2(tokens[-1])
    across = (math.log2(count) - first) / (last - first) if last > first else 0.5
    up = (math.log10(value) - low) / (high - low)
    return left + _PANEL[0] * (0.04 + 0.92 * across), _TOP + _PANEL[1] * (1 - up)


def _axes(
    left: float, tokens: Sequence[int], low: int, high: int, title: str, scale: _Scale | None
) -> list[str]:
    """The axes of a panel; those of the first panel have the names of the scale."""
    width, height = _PANEL
    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{width}" height="{height}" stroke="#999999"/>',
        label(left + width / 2, _TOP - 8, title, anchor="middle"),
        label(left + width / 2, _TOP + height + 36, "tokens", anchor="middle"),
    ]
    for power in range(low, high + 1):
        y = _TOP + height * (high - power) / (high - low)
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#dddddd"/>')
        if scale:
            parts.append(label(left - 6, y + 4, scale.name(power), anchor="end"))
    for count in tokens:
        x, _ = _place(left, tokens, low, high, count, 10.0**low)
        parts.append(f'<path d="M{x:.1f} {_TOP + height}v4" stroke="#999999"/>')
        parts.append(label(x, _TOP + height + 18, str(count), anchor="middle"))
    if scale:
        parts.append(label(left, _TOP - 8, scale.unit, anchor="middle"))
    return parts


def _legend(colours: Mapping[str, str], width: float) -> tuple[list[str], int]:
    """A line of text for each algorithm, as many beside each other as fit, and how many lines that took."""
    parts = []
    column, beside = 250, max(1, int((width - _LEFT) // 250))
    labels = [(algo if algo != "bfloat16" else "torch, bfloat16", colour) for algo, colour in colours.items()]
    for number, (name, colour) in enumerate(labels):
        x = _LEFT + column * (number % beside)
        y = _TOP + _PANEL[1] + 62 + 18 * (number // beside)
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2"/>')
        parts.append(label(x + 28, y, name))
    y = _TOP + _PANEL[1] + 62 + 18 * -(-len(labels) // beside)
    parts.append(label(_LEFT, y, "dashed: the least time that bytes and operations allow", colour="#666666"))
    return parts, -(-len(labels) // beside)


def _speed(power: int) -> str:
    names = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
    whole = power - power % 3
    return f"{10 ** (power - whole)} {names[whole]}".rstrip() if whole in names else f"1e{power}"


def _time(power: int) -> str:
    names = {-9: "ns", -6: "µs", -3: "ms", 0: "s"}
    whole = power - power % 3
    return f"{10 ** (power - whole)} {names[whole]}" if whole in names else f"1e{power} s"
