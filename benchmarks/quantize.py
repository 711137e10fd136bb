"""Quantization of activations on a CUDA device, alone and after silu_and_mul or an RMS norm, against copying.

Device time in CUDA graphs by the rules of benchmarks/device.py, bfloat16 normal numbers. From 1024 tokens on,
the inputs that take turns are 260 MB together and come from memory; with fewer they are two and come from the
cache, as they do behind the kernel that made them. The floor is the bytes read and written, each once, at the
speed of an elementwise kernel over a gigabyte. Peers are the same in Triton, one kernel each, with and
without programmatic dependent launch (benchmarks/peers). Triton compiles each kernel once, in a second or so:
fill its cache first, with a process for each kind and scheme (`--kinds K --schemes S --tokens 1`).

    python -m benchmarks.quantize [--json FILE] [--kinds K,...] [--tokens M,...] [--columns K,...]
    python -m benchmarks.quantize --merge FILE... --json FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import device, record
from moqext import ops

ROTATED = 260e6
FROM_MEMORY = 1024
IDLE = 0.1
EPS = 1e-6
LEAST_AGREEMENT = 0.9
BYTES = {"plain": 3, "silu_and_mul": 5, "rms_norm": 3, "add_rms_norm": 7}
"""Bytes a value: bfloat16 in, one code out; a residual is read and written."""

SCHEMES = {
    "static": "fp8_tensor",
    "dynamic": "fp8_tensor",
    "token": "fp8_token",
    "group": "fp8_group",
}
Buffers = dict[str, Any]
Call = Callable[[Buffers], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A measured call: a kind of `BYTES` and a scheme of `SCHEMES` on [tokens, columns] values."""

    kind: str
    scheme: str
    tokens: int
    columns: int

    def floor_seconds(self, rate: float) -> float:
        """`rate` in bytes a second."""
        return self.tokens * self.columns * BYTES[self.kind] / rate


def make_buffers(torch: Any, case: Case) -> Buffers:
    """Inputs and outputs of a call."""

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    wide = 2 if case.kind == "silu_and_mul" else 1
    width = {"token": 1, "group": case.columns // 128}.get(case.scheme)
    size = () if width is None else (case.tokens, width)
    return {
        "x": random(case.tokens, wide * case.columns),
        "weight": random(case.columns),
        "residual": random(case.tokens, case.columns) if case.kind == "add_rms_norm" else None,
        "out": torch.empty(case.tokens, case.columns, device="cuda", dtype=torch.float8_e4m3fn),
        "scale": torch.empty(size, device="cuda"),
        "given": torch.tensor([0.02], device="cuda"),
        "inverse": torch.tensor([50.0], device="cuda"),
    }


def own_call(case: Case) -> Call:
    """moqext; a residual is updated in place."""
    scheme = SCHEMES[case.scheme]

    def call(b: Buffers) -> object:
        options = {"out": b["out"]}
        options |= {"scale": b["given"]} if case.scheme == "static" else {"scale_out": b["scale"]}
        if case.kind == "silu_and_mul":
            return ops.silu_and_mul_quantize(b["x"], scheme, **options)
        if case.kind == "plain":
            return ops.quantize(b["x"], scheme, **options)
        if b["residual"] is not None:
            options |= {"residual": b["residual"], "residual_out": b["residual"]}
        return ops.rms_norm_quantize(b["x"], b["weight"], EPS, scheme, **options)

    return call


def triton_call(case: Case, pdl: bool) -> Call:
    """The kernels of benchmarks/peers."""
    plain = import_module("benchmarks.peers.triton_quantize")
    fused = import_module("benchmarks.peers.triton_fused")

    def call(b: Buffers) -> object:
        if case.kind == "silu_and_mul":
            return fused.silu_and_mul(b["x"], case.scheme, b["out"], b["scale"], b["inverse"], pdl)
        if case.kind != "plain":
            add = (b["residual"], b["residual"])
            scales = (b["out"], b["scale"], b["inverse"])
            return fused.rms_norm(b["x"], b["weight"], EPS, case.scheme, *scales, *add, pdl)
        if case.scheme == "static":
            return plain.quantize_static(b["x"], b["inverse"], b["out"], pdl)
        if case.scheme == "token":
            return plain.quantize_token(b["x"], b["out"], b["scale"], pdl)
        return plain.quantize_group(b["x"], b["out"], b["scale"].view(case.columns // 128, -1), pdl)

    return call


def agreement(torch: Any, case: Case, call: Call) -> float:
    """The share of codes that are moqext's; peers multiply by rounded reciprocals and have their own exp."""
    buffers = make_buffers(torch, case)
    residual = None if buffers["residual"] is None else buffers["residual"].clone()
    own_call(case)(buffers)
    wanted = buffers["out"].view(torch.uint8).clone()
    buffers["out"].view(torch.uint8).fill_(0xA5)
    if residual is not None:
        buffers["residual"].copy_(residual)
    call(buffers)
    return float((buffers["out"].view(torch.uint8) == wanted).float().mean())


def calls_of(torch: Any, case: Case, triton: bool) -> dict[str, Call]:
    """By the name of the peer; one that fails or is wrong is named and left out."""
    calls = {"moqext": own_call(case)}
    if not triton or case.scheme == "dynamic":
        return calls
    for peer, pdl in (("Triton", False), ("Triton, PDL", True)):
        call = triton_call(case, pdl)
        try:
            same = agreement(torch, case, call)
        except Exception as error:
            print(f"{peer}: {error!r}")
            continue
        if same >= LEAST_AGREEMENT:
            calls[peer] = call
        else:
            print(f"{peer}: {same:.1%} of the codes are the same")
    return calls


def measure(torch: Any, case: Case, triton: bool) -> dict[str, device.Times]:
    """Times by peer."""
    count = 2
    if case.tokens >= FROM_MEMORY:
        count = max(2, round(ROTATED / (case.tokens * case.columns * 2)))
    buffers = [make_buffers(torch, case) for _ in range(count)]
    graphs = {
        peer: device.Graph(torch, call, buffers, device.LEAST_CALLS if case.tokens >= FROM_MEMORY else None)
        for peer, call in calls_of(torch, case, triton).items()
    }
    if case.tokens < FROM_MEMORY:
        return device.interleaved(torch, graphs)
    return {peer: device.alone(torch, graph, 9, IDLE) for peer, graph in graphs.items()}


def numbers(text: str) -> list[int]:
    """1,2,3."""
    return [int(part) for part in text.split(",")]


def rows_of(torch: Any, options: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    """Measures all cases and prints a line for each."""
    rows: list[dict[str, Any]] = []
    for kind in options.kinds.split(","):
        for columns in options.columns:
            for tokens in options.tokens:
                for scheme in options.schemes.split(","):
                    case = Case(kind, scheme, tokens, columns)
                    floor, cells = case.floor_seconds(rate), []
                    for peer, times in measure(torch, case, options.triton).items():
                        cells.append(f"{peer} {times.seconds * 1e6:.2f} ({floor / times.seconds:.0%})")
                        row = {"kind": kind, "scheme": scheme, "tokens": tokens, "columns": columns}
                        row |= {"peer": peer, "seconds": times.seconds, "best_seconds": times.best_seconds}
                        row |= {"worst_seconds": times.worst_seconds, "clock_mhz": times.clock_mhz}
                        rows.append(row | {"floor_seconds": floor})
                    print(
                        f"{kind:13s} {scheme:8s} {tokens:6d} x {columns:5d}  {', '.join(cells)}", flush=True
                    )
    return rows


def main() -> None:
    """Measures, prints a line for each case and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+", help="results of this benchmark to put together")
    parser.add_argument("--kinds", default=",".join(BYTES))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--tokens", type=numbers, default="1,16,64,2048,8192,32768")
    parser.add_argument("--columns", type=numbers, default="4096,8192")
    parser.add_argument("--no-triton", dest="triton", action="store_false")
    options = parser.parse_args()
    if options.merge:
        results = [record.read(path) for path in options.merge]
        merged = results[0] | {"rows": [row for result in results for row in result["rows"]]}
        record.save(merged, options.json)
        return
    options.triton = options.triton and find_spec("triton") is not None
    torch = import_module("torch")
    rate = device.copy_rate(torch)
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.3f} TB/s; microseconds and share of it")
    rows = rows_of(torch, options, rate)
    if options.json:
        name = torch.cuda.get_device_name()
        record.write("quantize_cuda", rows, options.json, device=name, copy_bytes_per_second=rate)


if __name__ == "__main__":
    main()
