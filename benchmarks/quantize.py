"""Quantization of activations on a CUDA device, alone and after silu_and_mul or an RMS norm, against copying.

Device time in CUDA graphs of at least 20 calls, bfloat16 normal numbers, medians of nine replays. From 1024
tokens on, the inputs that take turns are 260 MB together and come from memory; with fewer they are two and
come from the cache, as they do behind the kernel that made them. The share is that of the bytes read and
written, each once, at the speed of an elementwise kernel over a gigabyte.

    python -m benchmarks.quantize [--json FILE] [--kinds K,...] [--tokens M,...] [--columns K,...]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import record
from moqext import ops

ROTATED = 260e6
FROM_MEMORY = 1024
LEAST_CALLS = 20
REPLAYS = 9
EPS = 1e-6
BYTES = {"plain": 3, "silu_and_mul": 5, "rms_norm": 3, "add_rms_norm": 7}
"""Of a value: bfloat16 in, one code out; a residual is read and written."""

SCHEMES = {
    "static": "fp8_tensor",
    "dynamic": "fp8_tensor",
    "token": "fp8_token",
    "group": "fp8_group",
}
Call = Callable[[], object]


def replay_seconds(torch: Any, calls: Sequence[Call]) -> float:
    """Of one call, in a graph of them all."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    spent = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(spent[1:])


def copy_rate(torch: Any) -> float:
    """Bytes a second, read and written, of an elementwise kernel."""
    inputs = [torch.randn(1 << 27, device="cuda") for _ in range(2)]
    out = torch.empty_like(inputs[0])
    calls: list[Call] = [lambda x=x: torch.neg(x, out=out) for x in inputs]  # type: ignore[misc]
    return 8 * out.numel() / replay_seconds(torch, calls * 5)


def make_call(torch: Any, kind: str, name: str, tokens: int, columns: int, given: Any) -> Call:
    """A call on inputs and outputs of its own."""
    scheme = SCHEMES[name]
    options = {"scale": given} if name == "static" else {}

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    if kind == "silu_and_mul":
        function, arguments = ops.silu_and_mul_quantize, [random(tokens, 2 * columns), scheme]
    elif kind == "plain":
        function, arguments = ops.quantize, [random(tokens, columns), scheme]
    else:
        function = ops.rms_norm_quantize
        arguments = [random(tokens, columns), random(columns), EPS, scheme]
        if kind == "add_rms_norm":
            options["residual"] = random(tokens, columns)
    codes, *rest = function(*arguments, **options)
    options["out"] = codes
    if name != "static":
        options["scale_out"] = rest[0]
    if "residual" in options:
        options["residual_out"] = rest[-1]
    return lambda: function(*arguments, **options)


def measure(torch: Any, kind: str, name: str, tokens: int, columns: int, given: Any) -> float:
    """Seconds of a call."""
    size = tokens * columns * 2
    inputs = max(2, round(ROTATED / size)) if tokens >= FROM_MEMORY else 2
    calls = [make_call(torch, kind, name, tokens, columns, given) for _ in range(inputs)]
    return replay_seconds(torch, calls * max(1, -(-LEAST_CALLS // len(calls))))


def numbers(text: str) -> list[int]:
    """1,2,3."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measures, prints a line for each shape and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", default=",".join(BYTES))
    parser.add_argument("--tokens", type=numbers, default="1,16,64,2048,8192,32768")
    parser.add_argument("--columns", type=numbers, default="4096,8192")
    options = parser.parse_args()
    torch = import_module("torch")
    rate = copy_rate(torch)
    given = torch.tensor([0.02], device="cuda")
    rows = []
    print(f"copy {rate / 1e12:.3f} TB/s; microseconds and share of it")
    for kind in options.kinds.split(","):
        for columns in options.columns:
            for tokens in options.tokens:
                cells = []
                for name in SCHEMES:
                    seconds = measure(torch, kind, name, tokens, columns, given)
                    share = tokens * columns * BYTES[kind] / seconds / rate
                    cells.append(f"{name} {seconds * 1e6:8.2f} {share:5.2f}")
                    row = {"kind": kind, "scheme": name, "tokens": tokens, "columns": columns}
                    rows.append(row | {"seconds": seconds, "share_of_copy": share})
                print(f"{kind:13s} {tokens:6d} x {columns:5d}  " + "  ".join(cells), flush=True)
    if options.json:
        device = torch.cuda.get_device_name()
        record.write("quantize_cuda", rows, options.json, device=device, copy_bytes_per_second=rate)


if __name__ == "__main__":
    main()
