"""The linears of an 8-billion-weight model on the CPU, beside torch's: what `moqext bench` measures.

The result is named after the processor. Under four minutes on 16 processors.

    python -m benchmarks.linear_cpu [--threads T] [--seconds S] [--output FILE]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import moqext
from benchmarks import record
from moqext.cli.bench import SHAPES, Table
from moqext.environment import cpu_model
from moqext.tools import bench

TOKENS = (1, 16, 256)
GOALS = {  # (algorithm begins with, tokens) -> times as fast as torch's bfloat16
    ("FP8", 1): 1.6,
    ("FP8", 16): 1.2,
    ("FP8", 256): 1.0,
    ("NVFP4", 1): 2.8,
    ("NVFP4", 16): 1.5,
    ("NVFP4", 256): 1.0,
}


def goal(algo: str, tokens: int) -> float | None:
    """How many times as fast as torch an algorithm has to be; W4A16_NVFP4 has the goals of NVFP4."""
    return GOALS.get(("FP8" if algo.startswith("FP8") else algo.removeprefix("W4A16_"), tokens))


def default_output(benchmark: str = "linear_cpu") -> Path:
    """Named after the processor, so that results of several machines lie beside each other."""
    name = re.sub(r"\W+", "_", re.sub(r"\((R|TM)\)|CPU|@.*", "", cpu_model())).strip("_").lower()
    return record.RESULTS / f"{benchmark}.{name}.jsonl"


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=default_output(), metavar="FILE", help="the result")
    parser.add_argument("--threads", type=int, default=moqext.num_threads(), help="default: all")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each shape and number of tokens")
    parser.add_argument("--rotate", type=int, help="bytes of weights of a contestant that take turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data")
    options = parser.parse_args()
    result = bench.measure(
        SHAPES,
        TOKENS,
        threads=options.threads,
        seconds=options.seconds,
        rotate=options.rotate,
        seed=options.seed,
        report=Table(quiet=False).add,
    )
    rows = [row.as_dict() | {"goal": goal(row.quant_algo, row.tokens)} for row in result.rows]
    record.write("linear_cpu", rows, options.output, **result.facts)
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
