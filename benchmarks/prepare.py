"""Weight processing on a CUDA device against the speed of copying.

Bytes of the checkpoint's tensors and of the prepared tensors are counted once each, and so are the bytes of
the copy (torch's, of the largest weight). Times are a caller's, from an idle device to an idle device:
`prepare`, which returns when its work is done, with all that it checks and allocates, and the copy with the
wait for it.

    python -m benchmarks.prepare [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from moqext import LinearMethod

COLUMNS = 8192
ROWS = (57344, 8192)
CASES = (
    ("FP8", "exact"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact"),
    ("FP8_PB_WO", "exact"),
    ("NVFP4", "exact"),
    ("NVFP4", "fp8"),
)
MODEL = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
"""The four linears of a layer of a model of 70 billion weights, which has eighty."""

ROUNDS = 51


def seconds(torch: Any, call: Callable[[], object]) -> float:
    """Median time of a call that returns when its work is done, with the device idle before."""
    times = []
    for index in range(3 + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if index >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_speed(torch: Any) -> float:
    """Bytes a second, read and written, of copying the largest weight."""
    weight = torch.randint(0, 0x7F, (max(ROWS), COLUMNS), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(weight)

    def copy() -> None:
        target.copy_(weight)
        torch.cuda.synchronize()

    return float(2 * weight.numel() / seconds(torch, copy))


def tensors(torch: Any, algo: str, rows: int, columns: int) -> dict[str, Any]:
    """Checkpoint tensors of a linear on the device; e4m3 codes without NaN."""

    def codes(width: int) -> Any:
        return torch.randint(0, 0x7F, (rows, width), dtype=torch.uint8, device="cuda")

    if algo == "NVFP4":
        second = torch.full((), 0.01, device="cuda")
        return {"weight": codes(columns // 2), "weight_scale": codes(columns // 16), "weight_scale_2": second}
    shape = {"FP8": (), "FP8_PB_WO": (rows // 128, columns // 128)}.get(algo, (rows,))
    return {"weight": codes(columns), "weight_scale": torch.rand(shape, device="cuda") + 0.01}


def measure(
    torch: Any, algo: str, compute: str, shapes: Sequence[tuple[int, int]], copy: float
) -> dict[str, Any]:
    """Prepares linears one after the other, into new tensors and into the tensors of an earlier call.

    `copy` is in bytes a second.
    """
    methods = [
        LinearMethod(algo, columns, [rows], device="cuda:0", compute=compute) for rows, columns in shapes
    ]
    params = [tensors(torch, algo, *shape) for shape in shapes]

    def prepare(targets: Sequence[Any]) -> list[Any]:
        every = zip(methods, params, targets, strict=True)
        return [method.prepare(given, target) for method, given, target in every]

    fresh = [None] * len(shapes)
    out = prepare(fresh)
    every = [tensor for group in (*params, *out) for tensor in group.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in every)
    new, again = (seconds(torch, partial(prepare, targets)) for targets in (fresh, out))
    return {
        "quant_algo": algo,
        "compute": compute,
        "shapes": [list(shape) for shape in shapes],
        "bytes": size,
        "seconds": new,
        "seconds_into_out": again,
        "of_copy": size / new / copy,
        "of_copy_into_out": size / again / copy,
    }


def main() -> None:
    """Measures, prints a table and writes the result."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    copy = copy_speed(torch)
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s")
    print(f"{'layer':45} {'new':>10} {'of copy':>8} {'into out':>10} {'of copy':>8}")
    results = []
    cases = [(*case, [(rows, COLUMNS)]) for rows in ROWS for case in CASES]
    cases += [(*case, MODEL) for case in CASES[-2:]]
    for algo, compute, shapes in cases:
        row = measure(torch, algo, compute, shapes, copy)
        results.append(row)
        name = f"{algo} {compute} {' '.join(f'{rows}x{columns}' for rows, columns in shapes)}"
        print(
            f"{name:45} {row['seconds'] * 1e6:7.1f} us {row['of_copy']:8.0%}"
            f" {row['seconds_into_out'] * 1e6:7.1f} us {row['of_copy_into_out']:8.0%}"
        )
    if args.json:
        device = torch.cuda.get_device_name()
        record.write("prepare", results, args.json, device=device, copy_bytes_per_second=copy)


if __name__ == "__main__":
    main()
