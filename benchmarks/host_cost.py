"""Time of a call apart from the arithmetic: tensors taken in and handed back, a linear of one output.

The layer is NVFP4 with 16 columns and 1 row, bfloat16, so that what is measured is the path from Python to
the kernel and back. Beside it, in parentheses, stand calls of NumPy and torch that do as little. On a CUDA
device the layers are FP8 and NVFP4, 4096 x 4096, with one row of x or 64, and experts with the sizes of
Qwen3-30B-A3B with no row, one, or 64; what is measured is the time to queue the work. With no row that is
all of the way from Python and back but for memory and launches.
Batches of all rows take turns; the best batch is what the code costs, the median what this machine made of
it.

    python -m benchmarks.host_cost [--json FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import moqext
from benchmarks import record

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

CALLS = 200
"""Calls of a batch: about 0.2 ms, short enough to fall between interruptions."""

COLUMNS = 16


class Case(NamedTuple):
    """A statement, the names it uses, and the goal in microseconds where there is one.

    `setup` runs before each batch, outside of the time taken.
    """

    name: str
    statement: str
    names: dict[str, Any]
    goal: float | None = None
    setup: str = "pass"


def layer_tensors() -> dict[str, np.ndarray]:
    """An NVFP4 weight [1, 16] as a checkpoint stores it, all ones."""
    return {
        "weight": np.full((1, COLUMNS // 2), 0x22, np.uint8),
        "weight_scale": np.full((1, 1), 0x38, np.uint8),
        "weight_scale_2": np.float32([1]),
    }


def linear_cases(library: str, x: Any, out: Any, params: dict[str, Any]) -> list[Case]:
    """The whole call, with and without `out=`."""
    method = moqext.LinearMethod("NVFP4", COLUMNS, [1])
    names = {"method": method, "x": x, "params": method.prepare(params), "out": out}
    return [
        Case(f"LinearMethod, {library}, out=", "method(x, params, None, out)", names, 2.0),
        Case(f"LinearMethod, {library}, new result", "method(x, params)", names, 2.0),
    ]


def numpy_cases() -> list[Case]:
    """Rows that need nothing but NumPy."""
    names: dict[str, Any] = {name: np.zeros((2, 3), np.float32) for name in "abcde"}
    x, out = np.zeros((1, COLUMNS), np.uint16), np.zeros((1, 1), np.uint16)
    return [
        Case("no-op, no tensors", "check()", {"check": moqext._C.check_tensors}),
        Case(
            "no-op, 5 NumPy arrays", "check(a, b, c, d, e)", names | {"check": moqext._C.check_tensors}, 0.5
        ),
        *linear_cases("NumPy", x, out, layer_tensors()),
        Case("(numpy.empty)", "empty((1, 1))", {"empty": np.empty}),
        Case("(numpy.add)", "add(a, a)", names | {"add": np.add}),
    ]


def torch_cases() -> list[Case]:
    """Rows of torch's CPU tensors; none without torch."""
    if torch is None:
        return []
    names: dict[str, Any] = {name: torch.zeros(2, 3) for name in "abcde"}
    x, out = torch.zeros(1, COLUMNS, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)
    params = {name: torch.from_numpy(array) for name, array in layer_tensors().items()}
    linear = {"linear": torch.nn.functional.linear, "x": x, "w": x.clone()}
    return [
        Case(
            "no-op, 5 torch tensors", "check(a, b, c, d, e)", names | {"check": moqext._C.check_tensors}, 1.0
        ),
        *linear_cases("torch", x, out, params),
        Case("(torch.empty)", "empty((1, 1))", {"empty": torch.empty}),
        Case("(torch linear, bfloat16 weight)", "linear(x, w)", linear),
    ]


SIZE = 4096
"""Rows and columns of the layer on a CUDA device."""


def cuda_layer_cases(quant_algo: str) -> list[Case]:
    """A layer with one row of x and with 64, which other kernels multiply."""
    method = moqext.LinearMethod(quant_algo, SIZE, [SIZE], device="cuda:0")
    params = method.prepare(
        {
            name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")
            if spec.dtype == "float32"
            else torch.zeros(spec.shape, dtype=torch.uint8, device="cuda")
            for name, spec in method.checkpoint_params.items()
        }
    )
    cases = []
    for tokens in (1, 64):
        x = torch.zeros(tokens, SIZE, dtype=torch.bfloat16, device="cuda")
        names = {"method": method, "x": x, "params": params, "out": torch.empty_like(x)}
        title = f"LinearMethod, {quant_algo}, CUDA, {tokens} rows, "
        cases.append(Case(title + "out=", "method(x, params, None, out)", names, 3.0))
        cases.append(Case(title + "new result", "method(x, params)", names, 3.0))
    return cases


EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768


def cuda_expert_cases(quant_algo: str) -> list[Case]:
    """A layer of experts; each token has other ones."""
    method = moqext.MoEMethod(quant_algo, EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K, device="cuda:0")
    params = method.prepare(
        {
            name: torch.ones(spec.shape, device="cuda")
            if spec.dtype == "float32"
            else torch.full(spec.shape, 0x38, dtype=torch.uint8, device="cuda")  # e4m3: 1
            for name, spec in method.checkpoint_params.items()
            if not name.endswith("bias")
        }
    )
    cases = []
    for tokens in (0, 1, 64):
        x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(tokens * TOP_K, dtype=torch.int32, device="cuda").reshape(tokens, TOP_K)
        names = {"method": method, "x": x, "params": params, "out": torch.empty_like(x)}
        names |= {"weights": torch.ones(tokens, TOP_K, device="cuda"), "ids": slots % EXPERTS}
        title = f"MoEMethod, {quant_algo}, CUDA, {tokens} rows, out="
        cases.append(Case(title, "method(x, params, weights, ids, None, False, out)", names, 9.0))
    return cases


def cuda_cases() -> list[Case]:
    """Rows of torch's CUDA tensors; none without a device."""
    if torch is None or not torch.cuda.is_available():
        return []
    x = torch.zeros(1, SIZE, dtype=torch.bfloat16, device="cuda")
    w = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    rows = [case for algo in ("FP8", "NVFP4") for case in (*cuda_layer_cases(algo), *cuda_expert_cases(algo))]
    peer = {"mm": torch.mm, "empty_like": torch.empty_like, "x": x, "w": w, "out": torch.empty_like(x)}
    sync = {"sync": torch.cuda.synchronize}
    rows += [
        Case("(torch.empty_like, CUDA)", "empty_like(x)", peer),
        Case("(torch.mm, CUDA, out=)", "mm(x, w, out=out)", peer),
        Case("(torch.mm, CUDA)", "mm(x, w)", peer),
    ]
    return [row._replace(names=row.names | sync, setup="sync()") for row in rows]


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a case, microseconds a call."""
    cases = numpy_cases() + torch_cases() + cuda_cases()
    timers = [timeit.Timer(case.statement, case.setup, globals=case.names) for case in cases]
    batches: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for timer, times in zip(timers, batches, strict=True):
            times.append(timer.timeit(CALLS) / CALLS * 1e6)
    return [
        {
            "case": case.name,
            "best_us": round(min(times), 3),
            "median_us": round(statistics.median(times), 3),
            "goal_us": case.goal,
        }
        for case, times in zip(cases, batches, strict=True)
    ]


def main() -> None:
    """Measures, prints a table and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--rounds", type=int, default=2000, help="batches of each row")
    options = parser.parse_args()
    rows = measure(options.rounds)
    print(f"{'microseconds a call':38} {'best':>6} {'median':>7} {'goal':>5}")
    for row in rows:
        goal = f"{row['goal_us']:5.1f}" if row["goal_us"] else ""
        print(f"{row['case']:38} {row['best_us']:6.2f} {row['median_us']:7.2f} {goal}")
    if options.json:
        record.write("host_cost", rows, options.json, calls=CALLS, rounds=options.rounds)


if __name__ == "__main__":
    main()
