"""Quantization of weights on a CUDA device against copying.

Device time in CUDA graphs by the rules of benchmarks/device.py, of bfloat16 weights that take turns and are
260 MB together or more. The floor is the bytes read and written, each once, at the speed of an elementwise
kernel over a gigabyte. `amax` is the pass that a scale, or second-level scale, of the whole weight needs
before; calls are given what it finds.

    python -m benchmarks.quantize_weight [--json FILE] [--shapes NxK,...] [--algos ALGO,...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import device, record
from moqext import ops
from moqext.algorithms import ALGORITHMS
from moqext.ops.quantize_weights import SEARCHED, WRITTEN

ROTATED = 260e6
IDLE = 0.1
REPLAYS = 5
SHAPES = ((28672, 4096), (4096, 14336), (2048, 768))
AMAX = 6.0


def bytes_moved(algo: str, rows: int, columns: int) -> float:
    """Bytes of a bfloat16 weight, its codes and its scales."""
    facts = ALGORITHMS[algo]
    values = rows * columns
    scales = {"tensor": 1, "rows": rows, "blocks": -(-rows // 128) * -(-columns // 128)}.get(facts.scales)
    each = 4 if facts.scale_dtype == "float32" else 1
    count = values // (facts.group_size or 1) if scales is None else scales
    return 2 * values + values / (2 if facts.codes == "e2m1" else 1) + each * count


def call_of(algo: str, search: str | None) -> Callable[[Any], object]:
    """Quantizes a weight whose largest magnitude is known."""
    whole = ALGORITHMS[algo].scales == "tensor" or ALGORITHMS[algo].second is not None
    options: dict[str, Any] = {"amax": AMAX} if whole else {}
    return lambda weight: ops.quantize_weight(weight, algo, search=search, **options)


def amax_seconds(torch: Any, weights: list[Any]) -> float:
    """Seconds of the pass over a weight for its largest magnitude, with the wait for it."""
    times = []
    for number in range(20):
        weight = weights[number % len(weights)]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        ops.quantize_weights.weight_amax(weight)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def measure(torch: Any, algo: str, search: str | None, weights: list[Any]) -> float:
    """Seconds of a call."""
    graph = device.Graph(torch, call_of(algo, search), weights, max(4, len(weights)))
    return device.alone(torch, graph, REPLAYS, IDLE).seconds


def rows_of(torch: Any, options: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    """Measures all cases and prints a line for each."""
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        count = max(2, round(ROTATED / (2 * shape[0] * shape[1])))
        weights = [torch.randn(*shape, device="cuda").to(torch.bfloat16) for _ in range(count)]
        cases = [(algo, None) for algo in options.algos]
        cases += [
            (algo, search) for search, algos in SEARCHED.items() for algo in options.algos if algo in algos
        ]
        spent = [("amax", None, amax_seconds(torch, weights), 2.0 * shape[0] * shape[1])]
        for algo, search in cases:
            spent.append((algo, search, measure(torch, algo, search, weights), bytes_moved(algo, *shape)))
        for algo, search, seconds, moved in spent:
            share = moved / rate / seconds
            where = f"{shape[0]} x {shape[1]}"
            print(
                f"{where:14s} {algo:26s} {search or '':8s} {seconds * 1e6:9.1f} us {share:4.0%}", flush=True
            )
            row = {"shape": list(shape), "quant_algo": algo, "search": search, "seconds": seconds}
            rows.append(row | {"bytes": moved, "of_copy": share})
    return rows


def shapes(text: str) -> list[tuple[int, int]]:
    """NxK,NxK."""
    return [(int(n), int(k)) for n, k in (part.split("x") for part in text.split(","))]


def main() -> None:
    """Measures, prints a line for each case and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", type=shapes, default=list(SHAPES), metavar="NxK,...")
    parser.add_argument("--algos", type=lambda text: text.split(","), default=list(WRITTEN))
    options = parser.parse_args()
    torch = import_module("torch")
    rate = device.copy_rate(torch)
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.3f} TB/s; microseconds and share of it")
    rows = rows_of(torch, options, rate)
    if options.json:
        name = torch.cuda.get_device_name()
        record.write("quantize_weight_cuda", rows, options.json, device=name, copy_bytes_per_second=rate)


if __name__ == "__main__":
    main()
