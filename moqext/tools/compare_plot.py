"""Errors of layers as SVG: a dot for each in the order of the model, error upwards, colours by format.

The axis of errors is logarithmic and spans what the layers have. A browser shows a layer's name and figures
where the pointer rests on its dot; names below the axis are as many as find room.
"""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from moqext.reader.naming import number_order
from moqext.tools.compare import Difference, by_format
from moqext.tools.svg import label

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Told apart by colour-blind readers too (Okabe and Ito)."""

_WIDTH, _HEIGHT = 760, 320
_LEFT, _TOP, _BOTTOM = 70, 58, 60
_NAME_ROOM = 13
"""Pixels along the axis that a name takes."""

_LETTER = 5.6
"""Pixels of a letter of a name, about."""

_LONGEST = 44
"""Letters of a name below the axis; the tooltip has all."""

_LEAST = 1e-30
"""Errors below it stand at the lower edge."""

_MARGIN = 1.15
"""Factor by which the axis goes beyond the least and the largest error."""


def error_plot(rows: Sequence[Difference], title: str) -> str:
    """The drawing as text; layers without any difference stand at its lower edge.

    Args:
        rows: What `moqext.tools.compare.compare` found, at least one.
        title: Heads the drawing.
    """
    ordered = sorted(rows, key=lambda row: number_order(row.layer))
    ticks = axis([row.relative_error for row in rows if 0 < row.relative_error < math.inf])
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])
    names = [" / ".join(dict.fromkeys(formats)) for formats in by_format(ordered)]
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(sorted(set(names)))}
    parts = [
        label(_LEFT, 24, title, size=15, weight="bold"),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" stroke="#999999"/>',
        label(_LEFT, _TOP - 10, "relative error", anchor="middle"),
    ]
    for tick in ticks:
        y = _TOP + _HEIGHT * (high - math.log10(tick)) / (high - low)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#dddddd"/>')
        parts.append(label(_LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    for number, row in enumerate(ordered):
        x, y = _across(number, len(ordered)), _TOP + _HEIGHT * (1 - _up(row.relative_error, low, high))
        colour = colours[" / ".join(dict.fromkeys(row.formats))]
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75">'
            f"<title>{escape(_tooltip(row))}</title></circle>"
        )
    below, room = _names([row.layer for row in ordered])
    parts += below
    legend = _TOP + _HEIGHT + room
    for number, (name, colour) in enumerate(colours.items()):
        x, y = _LEFT + 380 * (number % 2), legend + 24 + 18 * (number // 2)
        parts.append(f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(label(x + 14, y, name))
    width = _LEFT + _WIDTH + 30
    height = legend + _BOTTOM - 22 + 18 * (-(-len(colours) // 2) - 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="none">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def axis(errors: Sequence[float]) -> list[float]:
    """Ticks around the errors: powers of ten, in a short range twice and five times these as well.

    Args:
        errors: Finite and positive; of none the axis is that of any errors.
    """
    least = max(min(errors, default=1e-3), _LEAST) / _MARGIN
    most = max(max(errors, default=1e-2), _LEAST) * _MARGIN
    steps = (1, 2, 5) if most / least < 100 else (1,)
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    first = max(number for number, tick in enumerate(ticks) if tick <= least)
    last = min(number for number, tick in enumerate(ticks) if tick >= most)
    return ticks[first : last + 1]


def _across(number: int, count: int) -> float:
    return _LEFT + _WIDTH * (number + 0.5) / count


def _up(error: float, low: float, high: float) -> float:
    """The place of an error as a part of the height: zeros below, what is infinite or NaN above."""
    if error == 0:
        return 0.0
    return max(0.0, (math.log10(error) - low) / (high - low)) if math.isfinite(error) else 1.0


def _tooltip(row: Difference) -> str:
    other = "" if row.other == row.layer else f" ({row.other})"
    formats = " / ".join(dict.fromkeys(row.formats))
    if row.relative_error == 0:
        return f"{row.layer}{other}: equal, {formats}"
    return f"{row.layer}{other}: {row.relative_error:.3e}, {row.sqnr_db:.1f} dB, {formats}"


def _names(names: Sequence[str]) -> tuple[list[str], float]:
    """Names below the axis, each where its layer stands, and the height that they take."""
    step = -(-len(names) * _NAME_ROOM // _WIDTH)
    shown = names[::step]
    shared = _shared_start(names)
    parts, longest = [], 0
    for number, name in enumerate(shown):
        short = name[len(shared) :]
        if len(short) > _LONGEST:
            short = f"…{short[1 - _LONGEST :]}"
        longest = max(longest, len(short))
        x, y = _across(number * step, len(names)) + 4, _TOP + _HEIGHT + 8
        text = label(x, y, short, anchor="end", size=10, colour="#444444")
        parts.append(text.replace("<text ", f'<text transform="rotate(-90 {x:.1f} {y:.1f})" ', 1))
    room = 12 + _LETTER * longest
    told = "layers in the order of the model"
    told += f", every {step}th named" if step > 1 else ""
    told += f", without {shared}" if shared else ""
    parts.append(label(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + room + 12, told, anchor="middle"))
    return parts, room + 16


def _shared_start(names: Sequence[str]) -> str:
    """The start of all names up to a dot; empty where there is one name."""
    first, last = min(names), max(names)
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind(".", 0, same) + 1] if len(names) > 1 else ""
