"""Weight processing on a CUDA device against the speed of copying.

Bytes of the checkpoint's tensors and of the prepared tensors are counted once each, and so are the bytes of
the copy (torch's, of the largest weight). Times are a caller's, from an idle device to an idle device:
`prepare`, which returns when its work is done, with all that it checks and allocates, and the copy with the
wait for it.

    python -m benchmarks.prepare [--json FILE] [--only linears | experts]
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
from benchmarks.moe_layers import MODELS, Sizes
from moqext import LinearMethod, MoEMethod

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

EXPERTS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3, TP8")
"""Layers of experts of these models."""

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


def tensors(torch: Any, method: LinearMethod | MoEMethod, device: str = "cuda") -> dict[str, Any]:
    """Checkpoint tensors of a layer on the device; e4m3 codes without NaN, and no bias."""
    found = {}
    for name, spec in method.checkpoint_params.items():
        if name.endswith("bias") or not (spec.required or name.endswith("_input_scale")):
            continue
        if spec.dtype == "float32":
            found[name] = torch.rand(spec.shape, device=device) + 0.01
        else:
            found[name] = torch.randint(0, 0x7F, spec.shape, dtype=torch.uint8, device=device)
    return found


def linears(algo: str, compute: Any, shapes: Sequence[tuple[int, int]]) -> list[LinearMethod]:
    """Layers of a linear each."""
    return [LinearMethod(algo, columns, [rows], device="cuda:0", compute=compute) for rows, columns in shapes]


def experts(algo: str, compute: Any, sizes: Sizes, device: str = "cuda:0") -> MoEMethod:
    """A layer of experts."""
    return MoEMethod(
        algo,
        sizes.experts,
        sizes.hidden,
        sizes.intermediate,
        top_k=sizes.top_k,
        device=device,
        compute=compute,
    )


def measure(torch: Any, methods: Sequence[LinearMethod | MoEMethod], copy: float) -> dict[str, Any]:
    """Prepares layers one after the other, into new tensors and into the tensors of an earlier call.

    `copy` is in bytes a second.
    """
    params = [tensors(torch, method) for method in methods]

    def prepare(targets: Sequence[Any]) -> list[Any]:
        every = zip(methods, params, targets, strict=True)
        return [method.prepare(given, target) for method, given, target in every]

    fresh = [None] * len(methods)
    out = prepare(fresh)
    every = [tensor for group in (*params, *out) for tensor in group.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in every)
    new, again = (seconds(torch, partial(prepare, targets)) for targets in (fresh, out))
    return {
        "quant_algo": methods[0].quant_algo,
        "compute": methods[0].compute,
        "bytes": size,
        "seconds": new,
        "seconds_into_out": again,
        "of_copy": size / new / copy,
        "of_copy_into_out": size / again / copy,
    }


def show(row: dict[str, Any], layer: str) -> None:
    """Prints a line."""
    print(
        f"{row['quant_algo']} {row['compute']} {layer}".ljust(45),
        f"{row['seconds'] * 1e6:7.1f} us {row['of_copy']:8.0%}",
        f"{row['seconds_into_out'] * 1e6:7.1f} us {row['of_copy_into_out']:8.0%}",
        flush=True,
    )


def main() -> None:
    """Measures, prints a table and writes the result."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--only", choices=("linears", "experts"), help="leave the other out")
    args = parser.parse_args()
    copy = copy_speed(torch)
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s")
    print(f"{'layer':45} {'new':>10} {'of copy':>8} {'into out':>10} {'of copy':>8}")
    results = []
    cases = [(*case, [(rows, COLUMNS)]) for rows in ROWS for case in CASES]
    cases += [(*case, MODEL) for case in CASES[-2:]]
    for algo, compute, shapes in cases if args.only != "experts" else []:
        row = measure(torch, linears(algo, compute, shapes), copy)
        results.append({**row, "shapes": [list(shape) for shape in shapes]})
        show(row, " ".join(f"{rows}x{columns}" for rows, columns in shapes))
    for name in EXPERTS if args.only != "linears" else ():
        for algo, compute in CASES:
            row = measure(torch, [experts(algo, compute, MODELS[name])], copy)
            sizes = MODELS[name]
            shape = [sizes.experts, sizes.hidden, sizes.intermediate]
            results.append({**row, "experts": name, "shape": shape})
            show(row, name)
    if args.json:
        device = torch.cuda.get_device_name()
        record.write("prepare", results, args.json, device=device, copy_bytes_per_second=copy)


if __name__ == "__main__":
    main()
