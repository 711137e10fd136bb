"""Time to ask 60,000 module names against 500 exclusion patterns, under both semantics.

The names are the expert projections of a 60-layer model of 334 experts; the patterns are what an exporter
writes for such a model, and, as a second list, patterns that all begin with a wildcard. Times are medians of
several runs and include the call from Python.

    python -m benchmarks.exclusion [--json FILE] [--runs N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import moqext
from benchmarks import record

NAMES = 60_000
PATTERNS = 500
LAYERS, EXPERTS = 60, 334
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def module_names() -> list[str]:
    """The first 60,000 expert projections of the model."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for projection in ("gate_proj", "up_proj", "down_proj")
    ]
    return names[:NAMES]


def exported_patterns(rng: np.random.Generator) -> list[str]:
    """Exact names, trailing wildcards and single experts, as ModelOpt writes them."""
    patterns = ["lm_head", "model.embed_tokens", "mtp*", "*.visual.*"]
    patterns += [f"model.layers.{layer}.self_attn*" for layer in range(LAYERS)]
    patterns += [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
    while len(patterns) < PATTERNS:
        patterns.append(f"model.layers.{rng.integers(LAYERS)}.mlp.experts.{rng.integers(EXPERTS)}.*")
    return patterns


def leading_wildcards(rng: np.random.Generator) -> list[str]:
    """Patterns without a literal beginning, none of which matches."""
    return [
        f"*.layers.{rng.integers(LAYERS)}.mlp.experts.{rng.integers(EXPERTS)}.w{i}*" for i in range(PATTERNS)
    ]


def median_seconds(run: Callable[[], object], runs: int) -> float:
    """Median of the wall time of `runs` calls."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(runs: int, seed: int) -> list[dict[str, object]]:
    """One row for each list and semantics, and one for reading the list."""
    rng = np.random.default_rng(seed)
    names = module_names()
    rows: list[dict[str, object]] = []
    for label, patterns in (
        ("exported", exported_patterns(rng)),
        ("leading wildcards", leading_wildcards(rng)),
    ):
        mapping = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": patterns}}
        config = moqext.QuantConfig.from_dict(mapping)
        reading = median_seconds(lambda mapping=mapping: moqext.QuantConfig.from_dict(mapping), runs)
        rows.append({"patterns": label, "what": "read", "seconds": reading, "excluded": None})
        for semantics, packed in (("modelopt", None), ("vllm", PACKED)):

            def ask(semantics=semantics, packed=packed, config=config):
                return sum(config.is_excluded(name, packed, semantics) for name in names)

            excluded = ask()
            rows.append(
                {
                    "patterns": label,
                    "what": semantics,
                    "seconds": median_seconds(ask, runs),
                    "excluded": excluded,
                }
            )
    return rows


def main() -> None:
    """Measures, prints a table and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pattern lists")
    options = parser.parse_args()
    rows = measure(options.runs, options.seed)
    print(f"{NAMES} names, {PATTERNS} patterns, median of {options.runs}")
    for row in rows:
        nanoseconds = row["seconds"] / NAMES * 1e9 if row["what"] != "read" else float("nan")
        each = f"{nanoseconds:7.0f} ns/name" if row["what"] != "read" else ""
        print(f"{row['patterns']:18} {row['what']:9} {row['seconds'] * 1e3:9.2f} ms  {each}")
    if options.json:
        record.write("exclusion", rows, options.json, names=NAMES, patterns=PATTERNS, runs=options.runs)


if __name__ == "__main__":
    main()
