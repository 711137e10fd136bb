"""Tables of Markdown, made from the rows of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moqext.cli.text import duration

Row = Mapping[str, Any]


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of Markdown, whose first `left` columns are text and whose others are numbers."""
    rule = ["---" if number < left else "---:" for number in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *body])


@dataclass(frozen=True)
class Grid:
    """How rows of a result become a table.

    Attributes:
        benchmark: The name of the results.
        lines: What tells lines apart.
        columns: What tells columns apart.
        values: What stands in a cell, each in a column of its own.
        where: Values that rows have to have, alternatives parted by "|".
        rows: The list that has them.
    """

    benchmark: str
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    values: Sequence[str] = ("seconds",)
    where: Mapping[str, str] = field(default_factory=dict)
    rows: str = "rows"

    def table(self, result: Row) -> str:
        """The table of a result."""
        rows = [row for row in result[self.rows] if self._wanted(row)]
        if not self.lines:
            names = list(dict.fromkeys(name for row in rows for name in row))
            return table(names, ([text(row.get(name), name) for name in names] for row in rows), len(names))
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            column = ", ".join(text(row.get(name)) for name in self.columns)
            line = cells.setdefault(tuple(text(row.get(name)) for name in self.lines), {})
            for value in self.values:
                several = len(self.values) > 1 or not column
                line[f"{column} {value}".strip() if several else column] = text(row.get(value), value)
        heads = list(dict.fromkeys(head for line in cells.values() for head in line))
        body = ([*line, *(found.get(head, "") for head in heads)] for line, found in cells.items())
        return table([*self.lines, *heads], body, len(self.lines))

    def _wanted(self, row: Row) -> bool:
        return all(text(row.get(name)) in values.split("|") for name, values in self.where.items())


def text(value: Any, name: str = "") -> str:
    """A value as a cell shows it; `name` tells what it is."""
    if value is None:
        return ""
    if isinstance(value, float):
        if "seconds" in name:
            return duration(value)
        return f"{value:.0%}" if "of_copy" in name else f"{value:.4g}"
    if isinstance(value, list):
        nested = value and isinstance(value[0], list)
        return (", " if nested else " × ").join(text(part) for part in value)
    return str(value)
