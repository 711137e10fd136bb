"""Results of benchmarks: files of JSON lines, a header and then a measured row a line.

The header says once which benchmark it was, the machine, the versions, the commit and the date. A row that is
none of "rows" names its list, as {"list": "checks", ...}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moqext.environment import environment

RESULTS = Path(__file__).parent / "results"


def write(benchmark: str, rows: list[dict[str, Any]], path: Path, **facts: Any) -> None:
    """Keeps a result of this machine: its rows, and facts, of which lists of rows are kept like these."""
    save({"benchmark": benchmark, "environment": environment(), **facts, "rows": rows}, path)


def save(result: Mapping[str, Any], path: Path) -> None:
    """Keeps a result as `read` returns it."""
    tables = {name: value for name, value in result.items() if _is_table(value)}
    lines = [{name: value for name, value in result.items() if name not in tables}]
    for name, rows in tables.items():
        lines += [row if name == "rows" else {"list": name, **row} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines)
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def read(path: Path) -> dict[str, Any]:
    """The header with the lists of rows in it."""
    result, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    for row in rows:
        result.setdefault(row.pop("list", "rows"), []).append(row)
    return dict(result)


def read_all(benchmark: str, folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Results of a benchmark by the name of their machine, in order of names."""
    paths = sorted(folder.glob(f"{benchmark}.*.jsonl"))
    return {path.name.split(".")[1]: read(path) for path in paths}
