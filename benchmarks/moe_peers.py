"""Public kernels of experts beside moqext in one process: what their harness measured, as a result.

    python -m benchmarks.moe_peers RUN.json ... --json benchmarks/results/moe_peers.h200.jsonl

The harness is no part of this repository: it has the kernels of vLLM, Humming and DeepGEMM out of their
wheels, takes moqext's layer from `benchmarks.peers.own_experts`, and times graphs of calls that follow each
other, each on experts drawn anew. Up to 512 tokens graphs take turns; with 1024 and more each runs alone
after a pause. Every layer's output is compared with float32 of what the weights mean. A run has the rows of
some models, numbers of tokens and one routing; a later run's rows take the place of an earlier one's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.layers import NVFP4, NVFP4_FP8
from benchmarks.moe_layers import POWER, UNIFORM
from moqext.tools.bench import PEER

OWN, ORDINARY = "moqext", "moqext, ordinary launches"


class Named(NamedTuple):
    """Who a path of the harness is.

    Attributes:
        quant_algo: What it computes.
        peer: Whose it is.
    """

    quant_algo: str
    peer: str


NAMES: Mapping[str, Named] = {
    "moq_nv": Named(NVFP4, OWN),
    "moq_nv_fp8": Named(NVFP4_FP8, OWN),
    "moq_fp8t": Named("FP8", OWN),
    "moq_fp8b": Named("FP8_PB_WO", OWN),
    "marlin": Named(NVFP4, "vLLM Marlin"),
    "marlin_sgl": Named(NVFP4, "SGLang Marlin"),
    "hum": Named(NVFP4, "Humming"),
    "tri_fp8t": Named("FP8", "vLLM Triton"),
    "vct_fp8t": Named("FP8", "vLLM CUTLASS"),
    "tri_fp8b": Named("FP8_PB_WO", "vLLM Triton"),
    "dg_contig(gemm)": Named("FP8_PB_WO", "DeepGEMM, its two products alone"),
    "tri_bf16": Named(PEER, "vLLM Triton"),
}
SUFFIX = "-ordinary"
"""End of the name of a path of moqext whose programmatic edges are ordinary ones."""

MODELS = {"qwen3": "Qwen3-30B-A3B", "mixtral": "Mixtral-8x7B", "ds": "DeepSeek-V3, TP8"}
ROUTINGS = {"uniform": UNIFORM, "power": POWER}

Row = Mapping[str, Any]


def named(path: str) -> Named | None:
    """None for a path that is not told of."""
    known = NAMES.get(path.removesuffix(SUFFIX))
    if known is None or not path.endswith(SUFFIX):
        return known
    return known._replace(peer=ORDINARY)


def row_of(line: Row) -> dict[str, Any] | None:
    """A measured cell; None for a path that is not told of."""
    who = named(line["peer"])
    if who is None:
        return None
    return {
        "model": MODELS[line["model"]],
        "tokens": line["T"],
        "routing": ROUTINGS[line["routing"]],
        "quant_algo": who.quant_algo,
        "peer": who.peer,
        "kernel": line["kernel"],
        "seconds": line["us"] / 1e6,
        "best_seconds": line["lo"] / 1e6,
        "worst_seconds": line["hi"] / 1e6,
        "floor_seconds": line["floor"] / 1e6,
        "active_experts": line["active"],
    }


def check_of(line: Row) -> dict[str, Any] | None:
    """How far a path's output is off; None for one that is not told of."""
    who = named(line["peer"])
    if who is None:
        return None
    return {"model": MODELS[line["model"]], **who._asdict(), "error": line["error"]}


def join(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several runs on one chip.

    Raises:
        ValueError: They are of different chips.
    """
    chips = {run["environment"]["gpu"] for run in runs}
    if len(chips) != 1:
        raise ValueError(f"expected runs on one chip, got {', '.join(sorted(chips))}")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    checks: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        for row in filter(None, map(row_of, run["rows"])):
            key = tuple(row[name] for name in ("model", "tokens", "routing", "quant_algo", "peer"))
            rows[key] = row
        for check in filter(None, map(check_of, run["checks"])):
            checks[check["model"], check["quant_algo"], check["peer"]] = check
    order = list(MODELS.values())
    return {
        "benchmark": "moe_peers",
        "environment": runs[-1]["environment"],
        "checks": list(checks.values()),
        "failed": {name: reason for run in runs for name, reason in run["failed"].items()},
        "rows": sorted(rows.values(), key=lambda row: (order.index(row["model"]), row["tokens"])),
    }


def main() -> None:
    """Writes the result of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="in the order in which they were measured")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="what is written")
    options = parser.parse_args()
    joined = join([json.loads(path.read_text()) for path in options.runs])
    record.save(joined, options.json)
    print(f"{len(joined['rows'])} rows, {len(joined['checks'])} outputs compared, {joined['failed']}")


if __name__ == "__main__":
    main()
