"""What every benchmark writes: its rows, with the machine, the versions and the commit they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moqext.environment import environment

RESULTS = Path(__file__).parent / "results"


def write(benchmark: str, rows: list[dict[str, Any]], path: Path, **facts: Any) -> None:
    """Writes {"benchmark", "environment", facts, "rows"} as JSON."""
    record = {"benchmark": benchmark, "environment": environment(), **facts, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
