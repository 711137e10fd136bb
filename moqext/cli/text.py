"""Plain text: numbers with units, aligned columns, messages wrapped and coloured where a terminal shows them.

Only a terminal has a width and colours. Elsewhere a line is as long as what it says, and no name is ever cut.
"""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moqext.reader.naming import number_ranges
from moqext.reader.problems import Severity

_UNITS = ("B", "kB", "MB", "GB", "TB")
_COLOURS: dict[Severity, str] = {"error": "1;31", "warning": "33", "note": "36"}
_NARROWEST = 16
"""Columns of names that a table keeps beside its other columns."""


class Line(NamedTuple):
    """One line of output, with the severity of what it tells."""

    text: str
    severity: Severity | None = None


def width() -> int | None:
    """Columns of the terminal that shows the output; None where it goes elsewhere."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def show(lines: Iterable[str | Line]) -> None:
    """Prints lines, coloured by severity where a terminal shows them and may (NO_COLOR, TERM=dumb)."""
    colours = (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") not in ("", "dumb")
    )
    for line in lines:
        severity = line.severity if isinstance(line, Line) else None
        shown = printable(line.text if isinstance(line, Line) else line)
        print(f"\x1b[{_COLOURS[severity]}m{shown}\x1b[0m" if colours and severity else shown)


def size(count: int) -> str:
    """Bytes with three significant digits and a decimal unit."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{count} B"
    value = float(f"{value:.3g}")
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Three digits with a unit of their size."""
    scale, unit = (1e6, "µs") if seconds < 0.9995e-3 else (1e3, "ms") if seconds < 0.9995 else (1.0, "s")
    value = seconds * scale
    return f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 1))))}f} {unit}"


def percent(part: int, whole: int) -> str:
    """A share with one digit; only nothing is 0 %, and only all of it 100 %."""
    if not part or part == whole:
        return "100 %" if part else "0 %"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f} %"


def printable(line: str) -> str:
    """The text with whatever a terminal could take for a command spelled out: names come from the file."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 layer", "2 layers"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def times(count: int) -> str:
    """How many alike a row stands for, where it is more than one."""
    return f"× {count:,}" if count > 1 else ""


def numbered(pattern: str, names: Iterable[str]) -> str:
    """The pattern of these names with their numbers in place of its only `*`: "layers.{0-3,5}.mlp"."""
    before, star, after = pattern.partition("*")
    if not star or "*" in after:
        return pattern
    numbers = [int(name[len(before) : len(name) - len(after)]) for name in names]
    return f"{before}{{{number_ranges(numbers)}}}{after}"


def shorten(name: str, columns: int) -> str:
    """The end of a name, which tells more than its beginning, in at most so many columns."""
    return name if len(name) <= columns else "…" + name[len(name) - columns + 1 :]


def wrap(line: str, columns: int | None, indent: int = 0) -> list[str]:
    """A line as several that fit the width, those after the first further in; as it is without a width.

    A word that alone is wider is broken, never cut.
    """
    line = printable(line)
    if columns is None or indent + len(line) <= columns:
        return [" " * indent + line]
    first, rest = " " * indent, " " * (indent + 2)
    return textwrap.wrap(
        line,
        max(columns, indent + 2 + _NARROWEST),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )


class Layout(NamedTuple):
    """How rows of a table are set, so that they may be printed before the last is known.

    Attributes:
        align: "<" or ">" for each column.
        widths: of the columns.
        columns: the width to stay within; None for any.
        indent: spaces before each line.
        folded: whether every name has a line of its own, and the other cells follow below.
    """

    align: str
    widths: tuple[int, ...]
    columns: int | None
    indent: int
    folded: bool

    def lines(self, row: Sequence[str]) -> list[str]:
        """The lines of one row; see `table`."""
        name, *cells = (printable(cell) for cell in row)
        if self.folded and self.columns is not None:
            return _folded((name, *cells), self.align, self.widths, self.columns, self.indent)
        lines = []
        if len(name) > self.widths[0]:
            lines, name = wrap(name, self.columns, self.indent), ""
        return [*lines, _aligned([name, *cells], self.align, self.widths, self.indent)]


def layout(rows: Sequence[Sequence[str]], align: str, columns: int | None, *, indent: int = 2) -> Layout:
    """How rows of such cells, or of shorter ones, are set; arguments as of `table`."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    folded = False
    if columns is not None:
        free = columns - indent - sum(widths[1:]) - 2 * (len(widths) - 1)
        folded = 2 * sum(len(row[0]) <= free for row in rows) < len(rows)
        widths[0] = widths[0] if folded else min(widths[0], free)
    return Layout(align, tuple(widths), columns, indent, folded)


def table(
    rows: Sequence[Sequence[str]], align: str, columns: int | None, *, indent: int = 2
) -> list[list[str]]:
    """The lines of each row, its columns aligned with those of the others.

    A row takes one line, but where its first cell, a name, does not fit the width: then the name has a line
    of its own, and the other cells follow below. Where few names fit, all rows are set so, with the other
    cells further to the left.

    Args:
        rows: the cells, the header among them if there is one.
        align: "<" or ">" for each column.
        columns: the width to stay within; None for any.
        indent: spaces before each line.
    """
    set_so = layout(rows, align, columns, indent=indent)
    return [set_so.lines(row) for row in rows]


def _folded(row: Sequence[str], align: str, widths: Sequence[int], columns: int, indent: int) -> list[str]:
    """The name of a row, then its other cells on as many lines as they need, further in."""
    lines = wrap(row[0], columns, indent)
    first = 1
    while first < len(row):
        last, taken = first + 1, indent + 2 + widths[first]
        while last < len(row) and taken + 2 + widths[last] <= columns:
            taken += 2 + widths[last]
            last += 1
        part = slice(first, last)
        if any(row[part]):
            lines.append(_aligned(row[part], align[part], widths[part], indent + 2))
        first = last
    return lines


def _aligned(cells: Sequence[str], align: str, widths: Sequence[int], indent: int) -> str:
    padded = [f"{cell:{side}{span}}" for cell, side, span in zip(cells, align, widths, strict=True)]
    return (" " * indent + "  ".join(padded)).rstrip()
