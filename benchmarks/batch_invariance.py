"""Times of `batch_invariant`: layers that have it beside those that choose for each number of tokens.

    python -m benchmarks.batch_invariance [--json FILE]

Calls take their weights in turn, and those of experts a routing that is drawn anew, so that weights come from
memory; benchmarks/device.py has how times are taken. The first and the last row of each invariant output are
compared, bit for bit, with those of a call on that row alone. Without a GPU (`--tiny --device cpu`) the
comparison is all that is done.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import device, record
from benchmarks.linear import facts
from benchmarks.moe import ALONE_FROM, BATCHES, FEW_BATCHES
from benchmarks.moe_layers import MODELS, TINY, UNIFORM, Sizes, draw
from moqext import LinearMethod, MoEMethod
from moqext.cli.text import duration
from moqext.tools.random_layers import random_experts, random_linear

LINEARS = (("FP8", "exact"), ("FP8_PB_WO", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp8"))
SHAPES = ((4096, 4096), (28672, 4096))
"""Rows and columns."""
TOKENS = (1, 16, 64, 256, 4096)
EXPERTS = (("FP8", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp8"))
MODEL = "Qwen3-30B-A3B"
EXPERT_TOKENS = (1, 64, 1024)
WEIGHT_BYTES = 1 << 28
"""Copies of a weight have so many together, several times the last cache of an H200."""
FEW_ROWS = 512
"""Rows of a weight that are made; all others are like them."""

Turn = tuple[Any, Sequence[Any]]
"""Params, and what a method is called on: x, and for experts the weights and ids of their tokens."""


@dataclass
class Run:
    """A measurement on its way.

    Attributes:
        torch: The module.
        place: torch's name of the device.
        rows: One for each method and number of tokens.
        compared: Rows that were compared with calls on them alone.
        differ: Those that depend on others.
    """

    torch: Any
    place: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    compared: int = 0
    differ: list[str] = field(default_factory=list)

    def linear(self, kind: tuple[str, str], shape: tuple[int, int], tokens: Sequence[int]) -> None:
        """A linear, for each number of tokens."""
        rows, columns = shape
        few = min(FEW_ROWS, rows)
        part = random_linear(np.random.default_rng(0), kind[0], [few], columns).parts[0]
        stored = {
            role: np.tile(value, (rows // few, 1)) if value.ndim == 2 else value
            for role, value in part.items()
        }
        about = {"compute": kind[1], "device": self.place}
        pair = [
            LinearMethod(kind[0], columns, [rows], batch_invariant=fixed, **about) for fixed in (False, True)
        ]
        params = self._prepare(pair, stored)
        for count in tokens:
            x = self.torch.randn(count, columns, device=self.place, dtype=self.torch.bfloat16)
            case = {"case": f"{rows} × {columns}", "quant_algo": _named(kind), "tokens": count}
            self._measure(case, pair, params, [(x,)])

    def experts(self, kind: tuple[str, str], model: str, sizes: Sizes, tokens: Sequence[int]) -> None:
        """A layer of experts that are alike, for each number of tokens."""
        torch = self.torch
        each = (sizes.hidden, sizes.intermediate)
        about = {"top_k": sizes.top_k, "compute": kind[1], "device": self.place}
        pair = [
            MoEMethod(kind[0], sizes.experts, *each, batch_invariant=fixed, **about)
            for fixed in (False, True)
        ]
        one = random_experts(np.random.default_rng(0), MoEMethod(kind[0], 1, *each, top_k=1, compute=kind[1]))
        stored = {
            name: np.repeat(stack, sizes.experts, 0) for name, stack in one.items() if "bias" not in name
        }
        params = self._prepare(pair, stored)
        source = torch.Generator(self.place).manual_seed(0)
        for count in tokens:
            x = torch.randn(count, sizes.hidden, device=self.place, dtype=torch.bfloat16)
            many = BATCHES if count < ALONE_FROM else FEW_BATCHES
            batches = [draw(torch, sizes, x, None, UNIFORM, source)[:3] for _ in range(many)]
            case = {"case": model, "quant_algo": _named(kind), "tokens": count}
            self._measure(case, pair, params, batches)

    def _prepare(self, pair: Sequence[Any], stored: Mapping[str, Any]) -> list[list[Any]]:
        """Copies of the weight for each method."""
        tensors = {
            name: self.torch.from_numpy(np.asarray(value)).to(self.place) for name, value in stored.items()
        }
        copies = max(1, WEIGHT_BYTES // sum(tensor.nbytes for tensor in tensors.values()))
        copies = 1 if self.place == "cpu" else copies
        return [[method.prepare(tensors) for _ in range(copies)] for method in pair]

    def _measure(
        self,
        case: Mapping[str, Any],
        pair: Sequence[Any],
        params: Sequence[Sequence[Any]],
        inputs: Sequence[Sequence[Any]],
    ) -> None:
        """Compares rows, and times both methods."""
        tokens, fixed = case["tokens"], _call_of(pair[1])
        y = fixed((params[1][0], inputs[0]))
        for at in sorted({0, tokens - 1}):
            alone = fixed((params[1][0], [part[at : at + 1] for part in inputs[0]]))
            self.compared += 1
            if not self.torch.equal(y[at : at + 1], alone):
                self.differ.append(f"{case}, row {at}")
        if self.place == "cpu":
            return
        graphs, count = {}, max(len(params[0]), len(inputs))
        for at, method in enumerate(pair):
            turns = [(params[at][n % len(params[at])], inputs[n % len(inputs)]) for n in range(count)]
            graphs[at] = device.Graph(self.torch, _call_of(method), turns)
        if tokens < ALONE_FROM:
            times = device.interleaved(self.torch, graphs)
        else:
            times = {at: device.alone(self.torch, graph) for at, graph in graphs.items()}
        for at, method in enumerate(pair):
            row = {**case, "batch_invariant": bool(at), "kernel": method.backend_for(tokens)}
            self.rows.append(row | asdict(times[at]))
        own, other = times[1].seconds, times[0].seconds
        about = f"{case['case']}, {case['quant_algo']}, T={tokens}: {duration(other)}"
        print(f"{about}, invariant {duration(own)} ({own / other:.2f} times)", flush=True)


def _call_of(method: Any) -> Callable[[Turn], Any]:
    def call(turn: Turn) -> Any:
        stored, (x, *routing) = turn
        return method(x, stored, *routing)

    return call


def _named(kind: tuple[str, str]) -> str:
    return kind[0] if kind[1] == "exact" else f"{kind[0]}, {kind[1]}"


def main() -> None:
    """Measures, prints a line for each cell and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    options = parser.parse_args()
    torch = import_module("torch")
    run = Run(torch, options.device)
    try:
        for kind in LINEARS:
            for shape in ((256, 256),) if options.tiny else SHAPES:
                run.linear(kind, shape, (1, 16) if options.tiny else TOKENS)
        for kind in EXPERTS:
            model, sizes = ("tiny", TINY) if options.tiny else (MODEL, MODELS[MODEL])
            run.experts(kind, model, sizes, (1, 16) if options.tiny else EXPERT_TOKENS)
    finally:  # where a cell fails, those before it are kept
        if options.json:
            about = {} if options.device == "cpu" else {"environment": facts(torch, device.Power())}
            record.write(
                "batch_invariance", run.rows, options.json, compared=run.compared, differ=run.differ, **about
            )
    if run.differ:
        raise SystemExit("rows depend on others: " + "; ".join(run.differ))
    print(f"{run.compared} rows have the bits of calls on them alone")


if __name__ == "__main__":
    main()
