"""The matrix of chips, formats and frameworks on docs/support.md, from docs/support.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks import record
from benchmarks.grid import table
from moqext.algorithms import LINEARS

ROOT = record.RESULTS.parent.parent
FILE = ROOT / "docs" / "support.toml"
STATES = {"ran": "**ran**", "compiled": "compiled", "engine": "engine's", "no": "–"}
"""Cells of the tables by state; "no" is what no entry has."""


@dataclass(frozen=True)
class Entry:
    """Cells of one state.

    Attributes:
        state: One of `STATES` but "no".
        chips, frameworks, formats: Whose product the cells are, by their names in the file.
        shown_by: Files that show it.
        note: More about it; empty for nothing.
    """

    state: str
    chips: tuple[str, ...]
    frameworks: tuple[str, ...]
    formats: tuple[str, ...]
    shown_by: tuple[str, ...]
    note: str

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """Each (framework, format, chip)."""
        for framework in self.frameworks:
            for algo in self.formats:
                for chip in self.chips:
                    yield framework, algo, chip


@cache
def document() -> dict[str, Any]:
    """The file as it is."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def entries() -> list[Entry]:
    """Every entry of the file."""
    return [
        Entry(
            entry["state"],
            tuple(entry["chips"]),
            tuple(entry["frameworks"]),
            LINEARS if entry["formats"] == "all" else tuple(entry["formats"]),
            tuple(entry.get("shown_by", ())),
            entry.get("note", ""),
        )
        for entry in document()["entries"]
    ]


def states() -> dict[tuple[str, str, str], str]:
    """The state of each cell that an entry has.

    Raises:
        ValueError: Two entries have one.
    """
    found: dict[tuple[str, str, str], str] = {}
    for entry in entries():
        for cell in entry.cells():
            if cell in found:
                raise ValueError(f"{FILE.name}: two entries for {', '.join(cell)}")
            found[cell] = entry.state
    return found


def section() -> str:
    """A table for each framework, with the notes of its entries below."""
    known, chips = states(), document()["chips"]
    parts = []
    for framework, title in document()["frameworks"].items():
        body = [
            [f"`{algo}`", *(STATES[known.get((framework, algo, chip), "no")] for chip in chips)]
            for algo in LINEARS
        ]
        parts += [f"### {title}", table(["", *chips.values()], body, left=1 + len(chips))]
        notes = [
            f"* {named(entry.chips)}, {STATES[entry.state]}: {entry.note}."
            for entry in entries()
            if framework in entry.frameworks and entry.note
        ]
        parts += ["\n".join(notes)] if notes else []
    return "\n\n".join(parts)


def named(chips: Sequence[str]) -> str:
    """Chips as people call them."""
    return ", ".join(document()["chips"][chip] for chip in chips)
