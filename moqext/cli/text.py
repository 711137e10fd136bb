"""Plain text for terminals: numbers with units, shortened names, aligned columns."""

import shutil
from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")


def width() -> int:
    """Columns to fill: the terminal's, at most 100, and 100 when the output goes elsewhere."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def size(count: int) -> str:
    """Bytes with three significant digits and a decimal unit."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{count} B"
    value = float(f"{value:.3g}")
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def printable(line: str) -> str:
    """The text with whatever a terminal could take for a command spelled out: names come from the file."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def plural(count: int, noun: str) -> str:
    """As in "1 layer" and "2 layers"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def shorten(name: str, columns: int) -> str:
    """The end of a name, which tells more than its beginning, in at most so many columns."""
    return name if len(name) <= columns else "…" + name[len(name) - columns + 1 :]


def clip(text: str, columns: int) -> str:
    """The beginning of a text in at most so many columns."""
    return text if len(text) <= columns else text[: max(columns - 1, 0)] + "…"


def table(rows: Sequence[Sequence[str]], align: str, columns: int, *, indent: int = 2) -> list[str]:
    """Rows as aligned lines that fit the width; the first column is shortened where they do not.

    Args:
        rows: the cells, the header among them if there is one.
        align: "<" or ">" for each column.
        columns: the width to stay within.
        indent: spaces before each line.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    free = columns - indent - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(min(widths[0], free), 16)
    lines = []
    for row in rows:
        cells = [shorten(row[0], widths[0]), *row[1:]]
        padded = [f"{cell:{side}{span}}" for cell, side, span in zip(cells, align, widths, strict=True)]
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return lines
