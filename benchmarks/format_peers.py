"""Public kernels of MXFP4, MXFP8, int8 and int4 weights in one process: what their harness measured.

    python -m benchmarks.format_peers LINEARS.json EXPERTS.json --environment MACHINE.json --json RESULT

The harness is no part of this repository: it has the kernels of vLLM and Humming out of their wheels, and
times graphs of calls as `benchmarks.moe_peers` says. Kernels of int8 activations and Humming's quantize x in
the time. Of moqext it has MXFP4; the other formats of moqext are in benchmarks/times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.moe_peers import OWN, Named
from moqext.tools.bench import PEER

LINEARS: Mapping[str, Named] = {
    "bf16": Named(PEER, "torch"),
    "moq_mxfp4": Named("MXFP4", OWN),
    "moq_mxfp4_auto": Named("MXFP4, auto", OWN),
    "marlin_mx4": Named("MXFP4", "vLLM Marlin"),
    "hum_mx8+q": Named("MXFP4, fp8", "Humming"),
    "marlin_mx8": Named("MXFP8", "vLLM Marlin"),
    "marlin_i8": Named("W8A16", "vLLM Marlin"),
    "machete_i8": Named("W8A16", "vLLM Machete"),
    "vct_i8token+q": Named("W8A8_SQ_PER_CHANNEL", "vLLM CUTLASS"),
    "marlin_i4": Named("W4A16_AWQ", "vLLM Marlin"),
    "machete_i4": Named("W4A16_AWQ", "vLLM Machete"),
}
EXPERTS: Mapping[str, Named] = {
    "moq_exact": Named("MXFP4", OWN),
    "moq_auto": Named("MXFP4, auto", OWN),
    "marlin": Named("MXFP4", "vLLM Marlin"),
    "hum_mx8": Named("MXFP4, fp8", "Humming"),
}
"""Who a path of the harness is; others are left out."""

MODELS = {"gptoss20b": "gpt-oss-20b", "gptoss120b": "gpt-oss-120b"}


def rows_of(run: Mapping[str, Any], names: Mapping[str, Named]) -> Iterator[dict[str, Any]]:
    """The measured cells."""
    for line in run["res"]:
        if line["peer"] not in names:
            continue
        where = MODELS[line["model"]] if "model" in line else f"{line['N']} × {line['K']}"
        times = {
            f"{name}seconds": line[us] / 1e6 for name, us in (("", "us"), ("best_", "lo"), ("worst_", "hi"))
        }
        yield {
            "where": where,
            "tokens": line.get("T", line.get("M")),
            **names[line["peer"]]._asdict(),
            **times,
        }


def main() -> None:
    """Writes the result of a run of linears and one of experts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("linears", type=Path)
    parser.add_argument("experts", type=Path)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="what is written")
    parser.add_argument("--environment", type=Path, required=True, help="a JSON file of `moqext.environment`")
    options = parser.parse_args()
    rows = [
        row
        for path, names in ((options.linears, LINEARS), (options.experts, EXPERTS))
        for row in rows_of(json.loads(path.read_text()), names)
    ]
    about = {"benchmark": "format_peers", "environment": json.loads(options.environment.read_text())}
    record.save({**about, "rows": rows}, options.json)
    print(f"{len(rows)} rows")


if __name__ == "__main__":
    main()
