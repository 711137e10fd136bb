"""Joins results of `benchmarks.moe` or `benchmarks.linear` that were measured in slices or anew.

    python -m benchmarks.merge benchmarks/results/moe_cuda.h200.jsonl SLICE.jsonl ...

A later file's rows take the place of the same ones of an earlier one. Floors are those of the run that a row
was measured in, whose number in "runs" it has; the result has the environment and the ceilings of the last
file. Slices of different chips are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

KEYS = {
    "rows": ("model", "shape", "tokens", "routing", "quant_algo", "neighbours", "policy", "peer", "protocol"),
    "checks": ("model", "tokens", "routing", "quant_algo", "neighbours"),
    "host": ("model", "tokens", "quant_algo", "peer", "result"),
    "skipped": ("model", "shape", "tokens", "quant_algo", "peer"),
}
"""Names whose values tell the entries of each list apart; an entry has those of its benchmark."""

Result = Mapping[str, Any]


def runs_of(result: Result) -> list[dict[str, Any]]:
    """The runs that a result was joined from, or itself."""
    if "runs" in result:
        return [dict(run) for run in result["runs"]]
    about = result["environment"]
    facts = {name: about[name] for name in ("date", "driver", "torch", "moqext")}
    return [facts | {"seed": result["seed"], "ceilings": result["ceilings"]}]


def merge(results: Sequence[Result]) -> dict[str, Any]:
    """One result of several, in the order in which they were measured.

    Raises:
        ValueError: they are of different benchmarks or chips, or a model has other sizes in one of them.
    """
    kinds = {result["benchmark"] for result in results}
    if len(kinds) != 1:
        raise ValueError(f"expected results of one benchmark, got {', '.join(sorted(kinds))}")
    chips = {result["environment"]["gpu"] for result in results}
    if len(chips) != 1:
        raise ValueError(f"expected results of one chip, got {', '.join(sorted(chips))}")
    models: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    lists: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {
        name: {} for name in KEYS if any(name in result for result in results)
    }
    for result in results:
        for name, sizes in result.get("models", {}).items():
            if models.setdefault(name, sizes) != sizes:
                raise ValueError(f"{name}: expected the sizes {models[name]}, got {sizes}")
        first = len(runs)
        runs += runs_of(result)
        for name, entries in lists.items():
            for entry in result.get(name, []):
                run = first + entry.get("run", 0)
                entries[tuple(str(entry.get(key)) for key in KEYS[name])] = {**entry, "run": run}
    joined = {name: _in_order(list(entries.values())) for name, entries in lists.items()}
    used = sorted({entry["run"] for entries in joined.values() for entry in entries})
    for entry in (entry for entries in joined.values() for entry in entries):
        entry["run"] = used.index(entry["run"])
    last = results[-1]
    kept = {name: last[name] for name in ("benchmark", "environment", "seed", "ceilings")}
    kept |= {"models": models} if models else {}
    return {**kept, "runs": [runs[number] for number in used], **joined}


def _in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model or shape, then by tokens; the rest as measured."""
    places = list(dict.fromkeys(map(_place, entries)))
    return sorted(entries, key=lambda entry: (places.index(_place(entry)), entry.get("tokens") or 0))


def _place(entry: Result) -> str:
    return str(entry.get("model") or entry.get("shape"))


def main() -> None:
    """Writes the first file anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path, help="what is written; its rows come first where it is there")
    parser.add_argument("slices", type=Path, nargs="+", help="in the order in which they were measured")
    options = parser.parse_args()
    paths = [options.output, *options.slices] if options.output.exists() else options.slices
    merged = merge([record.read(path) for path in paths])
    record.save(merged, options.output)
    print(f"{len(merged['rows'])} rows of {len(merged['runs'])} runs")


if __name__ == "__main__":
    main()
