"""Quantization of activations, and dequantization of weights, on the CPU against the speed of copying.

Bytes of the input and of the outputs are counted once each, as for the copy (numpy.copyto by
as many threads), so that 100 % is a quantization that costs what moving its bytes costs. Buffers take turns,
so that data come from memory, and so do schemes and copies: each turn is a pause, in which the threads of the
one before go to sleep, a call that wakes its own, and calls that count. The best run is what the code costs,
the median what this machine made of it: where other programs use the processors, compare the best runs only.

    python -m benchmarks.quantize_cpu [--json FILE] [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import moqext
from benchmarks import record
from moqext import _C, ops
from moqext.tools.bench import CALLS, PAUSE

SHAPES = ((4096, 4096), (16, 14336))
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_tensor, given scale": ("fp8_tensor", {"scale": 0.01}),
    "fp8_tensor": ("fp8_tensor", {}),
    "fp8_token": ("fp8_token", {}),
    "fp8_group": ("fp8_group", {}),
    "nvfp4, given scale": ("nvfp4", {"scale": 0.002}),
    "nvfp4": ("nvfp4", {}),
}
WEIGHTS = ("FP8", "NVFP4")
GOAL = 0.6
COPY_BYTES = 1 << 26
"""Copied at once, half read and half written: about what the large shape moves."""
BUFFER_BYTES = 1 << 28
"""At least as much input takes turns: more than the last cache of most processors."""


class Case(NamedTuple):
    """A call that moves `bytes`; its number says which buffers it uses."""

    shape: tuple[int, ...]
    dtype: str
    scheme: str
    bytes: int
    run: Callable[[int], object]


def typed(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers as a dtype; bfloat16 as raw words, cut off."""
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def quantize_cases(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> list[Case]:
    """Every scheme on inputs of one shape and dtype."""
    first = typed(rng.standard_normal(shape, np.float32), dtype)
    inputs = [first.copy() for _ in range(BUFFER_BYTES // first.nbytes)]
    outputs = [np.zeros(first.size, np.uint8) for _ in inputs]
    cases = []
    for label, (scheme, options) in SCHEMES.items():
        made = [np.asarray(result) for result in ops.quantize(first, scheme, **options)]
        scales = made[1] if scheme == "nvfp4" or not options else None
        outs = [out[: made[0].size].reshape(made[0].shape) for out in outputs]

        def run(
            turn: int,
            outs: list[np.ndarray] = outs,
            scheme: str = scheme,
            options: dict[str, Any] = options,
            scales: np.ndarray | None = scales,
        ) -> object:
            at = turn % len(inputs)
            return ops.quantize(inputs[at], scheme, out=outs[at], scale_out=scales, **options)

        moved = first.nbytes + made[0].nbytes + (0 if scales is None else scales.nbytes)
        cases.append(Case(shape, dtype, label, moved, run))
    return cases


def dequantize_cases(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> list[Case]:
    """Weights of random codes to one dtype; only quantization has a goal."""
    codes = rng.integers(0, 256, (BUFFER_BYTES // shape[1] // shape[0], *shape), np.uint8)
    outs = [np.zeros(shape, np.float32 if dtype == "float32" else np.uint16) for _ in range(4)]
    cases = []
    for algo in WEIGHTS:
        half = algo == "NVFP4"
        weights = codes[..., : shape[1] // 2] if half else codes
        scales: dict[str, np.ndarray] = {"weight_scale": np.float32(0.01).reshape(())}
        if half:
            blocks = rng.integers(0x30, 0x48, (shape[0], shape[1] // 16), np.uint8)
            scales = {"weight_scale": blocks, "weight_scale_2": np.float32(0.01).reshape(())}

        def run(
            turn: int, algo: str = algo, weights: np.ndarray = weights, scales: dict[str, np.ndarray] = scales
        ) -> object:
            weight, out = weights[turn % len(weights)], outs[turn % len(outs)]
            return ops.dequantize(weight, algo, dtype=dtype, out=out, **scales)

        moved = weights[0].nbytes + outs[0].nbytes + sum(scale.nbytes for scale in scales.values())
        cases.append(Case(shape, dtype, f"dequantize {algo}", moved, run))
    return cases


def copy_case(threads: int, pool: ThreadPoolExecutor) -> Case:
    """A copy by `threads` threads; numpy.copyto runs without the GIL."""
    sources = [np.ones(COPY_BYTES // 2, np.uint8) for _ in range(2 * BUFFER_BYTES // COPY_BYTES)]
    pairs = [(np.zeros_like(source), source) for source in sources]
    pieces = [
        list(zip(np.array_split(to, threads), np.array_split(source, threads), strict=True))
        for to, source in pairs
    ]

    def run(turn: int) -> object:
        return list(pool.map(lambda piece: np.copyto(*piece), pieces[turn % len(pieces)]))

    return Case((), "", "copy", COPY_BYTES, run)


def timed_calls(case: Case, first: int) -> list[float]:
    """Seconds of `CALLS` calls after one that wakes the threads; buffers from number `first` on."""
    times = []
    for number in range(first, first + 1 + CALLS):
        start = time.perf_counter()
        case.run(number)
        times.append(time.perf_counter() - start)
    return times[1:]


def measure(rounds: int, threads: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of the schemes, and the copy's bandwidth in GB/s: best and median."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    copies: list[float] = []
    measured: list[tuple[Case, list[float]]] = []
    with ThreadPoolExecutor(threads) as pool:
        copy = copy_case(threads, pool)
        for shape in SHAPES:
            for dtype in ("bfloat16", "float16", "float32"):
                cases = [copy, *quantize_cases(shape, dtype, rng)]
                if shape == SHAPES[0]:
                    cases += dequantize_cases(shape, dtype, rng)
                times: list[list[float]] = [[] for _ in cases]
                for turn in range(rounds):
                    for i in rng.permutation(len(cases)):  # so that nobody always follows the copy
                        time.sleep(PAUSE)
                        times[i] += timed_calls(cases[i], turn * (1 + CALLS))
                copies += times[0]
                measured += zip(cases[1:], times[1:], strict=True)
    bandwidth = {
        "best": COPY_BYTES / min(copies) / 1e9,
        "median": COPY_BYTES / statistics.median(copies) / 1e9,
    }
    for case, seconds in measured:
        best, median = (case.bytes / time_ / 1e9 for time_ in (min(seconds), statistics.median(seconds)))
        rows.append(
            {
                "shape": case.shape,
                "dtype": case.dtype,
                "scheme": case.scheme,
                "best_gb_per_s": round(best, 2),
                "median_gb_per_s": round(median, 2),
                "best_of_copy": round(best / bandwidth["best"], 3),
                "median_of_copy": round(median / bandwidth["median"], 3),
            }
        )
    return rows, {name: round(value, 2) for name, value in bandwidth.items()}


def main() -> None:
    """Measures, prints a table and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each row")
    parser.add_argument("--threads", type=int, default=moqext.num_threads(), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    options = parser.parse_args()
    moqext.set_num_threads(options.threads)
    rows, copy = measure(options.rounds, options.threads, options.seed)
    print(f"{_C.cpu_isa()}, {options.threads} threads; copy {copy['best']} GB/s, median {copy['median']}")
    print(f"{'':44} {'GB/s':>6} {'median':>6} {'of copy':>8} {'median':>7}")
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        print(
            f"{shape:10} {row['dtype']:9} {row['scheme']:23} {row['best_gb_per_s']:6.1f} "
            f"{row['median_gb_per_s']:6.1f} {row['best_of_copy']:8.0%} {row['median_of_copy']:7.0%}"
        )
    if options.json:
        record.write(
            "quantize_cpu",
            rows,
            options.json,
            isa=_C.cpu_isa(),
            threads=options.threads,
            copy_gb_per_s=copy,
            goal_of_copy=GOAL,
            rounds=options.rounds,
            seed=options.seed,
            load_average=os.getloadavg(),
        )


if __name__ == "__main__":
    main()
