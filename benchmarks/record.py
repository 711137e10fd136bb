"""What every benchmark writes: its rows, with the machine, the versions and the commit they belong to."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import moqext

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("numpy", "torch", "ml_dtypes")


def cpu_model() -> str:
    """The processor as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def installed(library: str) -> str | None:
    """Version of a library, None where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """The machine and the software under a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{library: version for library in LIBRARIES if (version := installed(library))},
        "moqext": moqext._C.build_info(),
    }


def write(benchmark: str, rows: list[dict[str, Any]], path: Path, **facts: Any) -> None:
    """Writes {"benchmark", "environment", facts, "rows"} as JSON."""
    record = {"benchmark": benchmark, "environment": environment(), **facts, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
