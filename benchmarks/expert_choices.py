"""What the plan's estimates of experts cost: the kernel that `MoEMethod` chooses beside all that can run.

For each layer and number of tokens every kernel is forced in turn (MOQEXT_KERNEL) and timed in CUDA graphs
whose calls meet experts drawn anew, on weights that come from memory. The table says what the choice takes
beyond the fastest; the rows of `--json` are what estimates are fitted to. Codes and scales are random, as
only times are wanted.

    python -m benchmarks.expert_choices [--model NAME ...] [--layer ALGO[,COMPUTE] ...] [--tokens T ...]
                                        [--slow SECONDS] [--seconds S] [--json FILE] [--output FILE]

A line of `--output` is one of tests/data/expert_kernels.txt:
chip; layer; model; tokens; kernel:microseconds ...
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import device, record
from benchmarks.goals import geomean
from benchmarks.moe_layers import MODELS, UNIFORM, Batch, Sizes, draw, expert_map_of
from moqext import MoEMethod
from moqext.layers.method import ParamSpec
from moqext.ops.spelling import Compute

TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 8192)
LAYERS = (
    "NVFP4",
    "NVFP4,fp8",
    "NVFP4,fp4",
    "W4A8_NVFP4_FP8",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
)
BATCHES = 8
REPLAYS = 3
SLOW = 20e-3
"""Kernels whose estimate is longer than so many seconds are left out, but for the chosen one."""

CHIPS = {"NVIDIA H200": "H200 SXM", "NVIDIA H100 80GB HBM3": "H100 SXM"}
"""The plan's name of a device."""

SCALES = (0x28, 0x38)
"""Codes of block scales, from 0.25 to 1."""

FACTORS = {"fold": 1.0, "input": 0.02, "scale": 1e-3}
"""Other scales, by the first of these that is in their name."""


def chip_of(torch: Any) -> str:
    """The plan's name of the device, or its own."""
    name = torch.cuda.get_device_name(0)
    return CHIPS.get(name, name)


def record_line(chip: str, layer: str, model: str, tokens: int, microseconds: Mapping[Any, float]) -> str:
    """Times as tests/data has them."""
    times = " ".join(f"{name}:{time:.1f}" for name, time in sorted(microseconds.items()))
    return "; ".join((chip, layer, model, str(tokens), times))


@dataclass
class Cell:
    """A number of tokens of a layer.

    Attributes:
        model: Of `MODELS`.
        layer: Algorithm and compute.
        tokens: Rows of x.
        chosen: The plan's kernel, "family:name".
        seconds: Of every kernel that ran.
    """

    model: str
    layer: str
    tokens: int
    chosen: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """How much longer the choice takes than the fastest: 0.1 is a tenth."""
        return self.seconds[self.chosen] / min(self.seconds.values()) - 1

    def line(self) -> str:
        """One of the printed table."""
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        times = ", ".join(f"{_short(name)} {self.seconds[name] * 1e6:.1f}" for name in order)
        return (
            f"{self.model} {self.layer} T={self.tokens}: {_short(self.chosen)}, {self.loss:.1%} lost: {times}"
        )

    def recorded(self, chip: str) -> str:
        """One of tests/data/expert_kernels.txt."""
        times = {name: seconds * 1e6 for name, seconds in self.seconds.items()}
        return record_line(chip, self.layer, self.model, self.tokens, times)

    def rows(self) -> list[dict[str, Any]]:
        """One for each kernel, as JSON holds them."""
        about = {"model": self.model, "layer": self.layer, "tokens": self.tokens}
        return [
            about | {"kernel": name, "seconds": seconds, "chosen": name == self.chosen}
            for name, seconds in self.seconds.items()
        ]


def _short(kernel: str) -> str:
    return kernel.removeprefix("cuda:")


def method_of(sizes: Sizes, layer: str, place: str, kernel: str | None = None) -> MoEMethod:
    """A layer of `LAYERS`, by a kernel if it is named."""
    algo, _, compute = layer.partition(",")
    before = os.environ.pop("MOQEXT_KERNEL", None)
    if kernel:
        os.environ["MOQEXT_KERNEL"] = kernel
    try:
        return MoEMethod(
            algo,
            sizes.experts,
            sizes.hidden,
            sizes.intermediate,
            top_k=sizes.top_k,
            activation=sizes.activation,
            gated=sizes.gated,
            device=place,
            compute=_compute(compute),
            global_num_experts=sizes.of_all,
        )
    finally:
        os.environ.pop("MOQEXT_KERNEL", None)
        if before:
            os.environ["MOQEXT_KERNEL"] = before


def _compute(name: str) -> Compute:
    known: dict[str, Compute] = {"": "exact", "fp8": "fp8", "fp4": "fp4", "auto": "auto"}
    return known[name]


def random_params(torch: Any, method: MoEMethod, place: str) -> dict[str, Any]:
    """Prepared tensors of random codes under scales that keep outputs finite."""
    return {
        name: _random_tensor(torch, name, spec, place)
        for name, spec in method.prepared_params.items()
        if not name.endswith(("bias", "pre_quant_scale"))
    }


def _random_tensor(torch: Any, name: str, spec: ParamSpec, place: str) -> Any:
    if spec.dtype == "float32":
        value = next(value for part, value in FACTORS.items() if part in name)
        return torch.full(spec.shape, value, device=place)
    codes = torch.randint(0, 256, spec.shape, dtype=torch.uint8, device=place)
    if spec.dtype == "float8_e4m3fn":
        return codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # at most 1.9, and no NaN
    codes[..., 512:] = torch.randint(*SCALES, codes[..., 512:].shape, dtype=torch.uint8, device=place)
    return codes


def kernels_of(method: MoEMethod, tokens: int, sizes: Sizes, layer: str, place: str) -> dict[str, MoEMethod]:
    """The methods of all kernels that can run so many tokens."""
    verdicts = (line.split(maxsplit=1) for line in method.explain(tokens).splitlines())
    names = [name for name, verdict in verdicts if verdict.startswith(("chosen", "can run"))]
    return {name: method_of(sizes, layer, place, name) for name in names}


def seconds_of(
    torch: Any, sizes: Sizes, method: MoEMethod, params: Mapping[str, Any], batches: Sequence[Batch]
) -> float:
    """Of a call, the median of some replays."""
    local = expert_map_of(torch, sizes, str(batches[0].x.device))

    def call(batch: Batch) -> None:
        method(batch.x, params, batch.weights, batch.ids, local, sizes.on_input, batch.out)

    graph = device.Graph(torch, call, batches)
    return statistics.median(graph.replay_seconds(REPLAYS))


def measure(
    torch: Any, model: str, sizes: Sizes, layer: str, tokens: Iterable[int], place: str, slow: float
) -> Iterable[Cell]:
    """The cells of a layer, one after the other."""
    method = method_of(sizes, layer, place)
    params = random_params(torch, method, place)
    source = torch.Generator(place).manual_seed(1)
    for count in tokens:
        x = torch.randn(count, sizes.hidden, generator=source, device=place).to(torch.bfloat16)
        batches = [
            draw(torch, sizes, x, torch.empty_like(x), UNIFORM, source)
            for _ in range(BATCHES if count < 1024 else 2)
        ]
        cell = Cell(model, layer, count, method.backend_for(count))
        for name, forced in kernels_of(method, count, sizes, layer, place).items():
            if name == cell.chosen or name != "cuda:simt" or _is_short(sizes, count, slow):
                cell.seconds[name] = seconds_of(torch, sizes, forced, params, batches)
        yield cell


def _is_short(sizes: Sizes, tokens: int, slow: float) -> bool:
    """Whether plain cores, some 10 TFLOP/s, are done in time."""
    return 3 * tokens * sizes.top_k * sizes.hidden * sizes.intermediate < slow * 5e12


def summary(cells: Sequence[Cell]) -> str:
    """The mean and the worst of the losses."""
    mean = geomean([1 + cell.loss for cell in cells]) - 1
    beyond = sum(cell.loss > 0.02 for cell in cells)
    worst = max(cells, key=lambda cell: cell.loss)
    return (
        f"{len(cells)} cells: {mean:.2%} lost in the mean, more than 2 % in {beyond}; "
        f"the worst: {worst.line()}"
    )


def main() -> None:
    """Measures, prints a line for each cell and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layer", nargs="+", default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--slow", type=float, default=SLOW)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch = import_module("torch")
    until = time.monotonic() + options.seconds
    cells: list[Cell] = []
    for model, layer in product(options.model, options.layer):
        for cell in measure(torch, model, MODELS[model], layer, options.tokens, "cuda:0", options.slow):
            print(cell.line(), flush=True)
            cells.append(cell)
            if time.monotonic() > until:
                break
        torch.cuda.empty_cache()
        if time.monotonic() > until:
            print(f"no time was left after {model} {layer}", flush=True)
            break
    print(summary(cells))
    if options.output:
        chip = chip_of(torch)
        options.output.write_text("".join(cell.recorded(chip) + "\n" for cell in cells))
    if options.json:
        rows = [row for cell in cells for row in cell.rows()]
        record.write("expert choices", rows, options.json)


if __name__ == "__main__":
    main()
