"""Joins results of `benchmarks.moe` that were measured in slices: some models, some numbers of tokens each.

    python -m benchmarks.moe_merge benchmarks/results/moe_cuda.h200.jsonl SLICE.jsonl ...

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
    "rows": ("model", "tokens", "routing", "quant_algo", "neighbours", "policy"),
    "checks": ("model", "tokens", "routing", "quant_algo", "neighbours"),
    "host": ("model", "tokens", "quant_algo"),
    "skipped": ("model", "quant_algo"),
}
"""Names whose values tell the entries of each list apart."""

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
        ValueError: they are of different chips, or a model has other sizes in one of them.
    """
    chips = {result["environment"]["gpu"] for result in results}
    if len(chips) != 1:
        raise ValueError(f"expected results of one chip, got {', '.join(sorted(chips))}")
    models: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    lists: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {name: {} for name in KEYS}
    for result in results:
        for name, sizes in result["models"].items():
            if models.setdefault(name, sizes) != sizes:
                raise ValueError(f"{name}: expected the sizes {models[name]}, got {sizes}")
        first = len(runs)
        runs += runs_of(result)
        for name, keys in KEYS.items():
            for entry in result[name]:
                run = first + entry.get("run", 0)
                lists[name][tuple(entry.get(key) for key in keys)] = {**entry, "run": run}
    joined = {name: _in_order(list(models), list(entries.values())) for name, entries in lists.items()}
    used = sorted({entry["run"] for entries in joined.values() for entry in entries})
    for entry in (entry for entries in joined.values() for entry in entries):
        entry["run"] = used.index(entry["run"])
    last = results[-1]
    kept = {name: last[name] for name in ("benchmark", "environment", "seed", "ceilings")}
    return {**kept, "models": models, "runs": [runs[number] for number in used], **joined}


def _in_order(models: list[str], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model, then by tokens; the rest as measured."""
    return sorted(entries, key=lambda entry: (models.index(entry["model"]), entry.get("tokens", 0)))


def main() -> None:
    """Writes the first file anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path, help="what is written; its rows come first where it is there")
    parser.add_argument("slices", type=Path, nargs="+", help="in the order in which they were measured")
    options = parser.parse_args()
    paths = [options.output, *options.slices] if options.output.exists() else options.slices
    merged = merge([record.read(path) for path in paths])
    record.save(merged, options.output)
    print(f"{len(merged['rows'])} rows of {len(merged['runs'])} runs, {', '.join(merged['models'])}")


if __name__ == "__main__":
    main()
