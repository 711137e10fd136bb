"""What every way of the kernels for experts of many tokens takes: their estimates are fitted to this.

    python -m benchmarks.expert_ways [--model NAME ...] [--layer ALGO[,COMPUTE] ...] [--tokens T ...]
                                     [--output FILE]

A way is a shape of tiles, by its row in the kernel's table. Each is kept for its number of tokens and timed
in CUDA graphs whose calls meet experts drawn anew; codes and scales are random, as only times are wanted. A
line of the output is one of tests/data/expert_ways.txt: chip; layer; model; tokens; row:microseconds ...
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.expert_choices import chip_of, method_of, random_params, record_line, seconds_of
from benchmarks.moe_layers import MODELS, UNIFORM, Sizes, draw

KERNELS = {
    "FP8": "cuda:sm90_fp8_prefill",
    "FP8_PER_CHANNEL_PER_TOKEN": "cuda:sm90_fp8_prefill",
    "FP8_PB_WO": "cuda:sm90_fp8_prefill",
    "NVFP4": "cuda:sm90_nvfp4_prefill",
    "NVFP4,fp8": "cuda:sm90_nvfp4_fp8_prefill",
}
TOKENS = (64, 256, 512, 1024, 2048, 4096)
HEAVY = 1024
"""From so many tokens on graphs have fewer calls, each after an idle pause of so many seconds:"""
IDLE = 0.08


class Cell(NamedTuple):
    """The ways of a layer with so many tokens.

    Attributes:
        chip: As the plan knows it.
        layer: Of `KERNELS`.
        model: Of `MODELS`.
        tokens: Rows of x.
        microseconds: By the row of the kernel's table.
    """

    chip: str
    layer: str
    model: str
    tokens: int
    microseconds: dict[int, float]

    def line(self) -> str:
        """As the file has it."""
        return record_line(*self)


def variants_of(plan: Any, kernel: str, tokens: int) -> list[int]:
    """The variants that are ways of the kernel, whose rows are theirs less one; the last is kept."""
    found = []
    for variant in range(1, 100):
        plan.keep(tokens, kernel, variant)
        if plan.row(tokens) != (kernel, variant - 1):
            break
        found.append(variant)
    return found


def measure(
    torch: Any, chip: str, model: str, sizes: Sizes, layer: str, counts: Iterable[int]
) -> Iterable[Cell]:
    """The cells of a layer, one after the other."""
    kernel = KERNELS[layer]
    method = method_of(sizes, layer, "cuda:0", kernel)
    params = random_params(torch, method, "cuda:0")
    source = torch.Generator("cuda:0").manual_seed(1)
    for tokens in counts:
        x = torch.randn(tokens, sizes.hidden, generator=source, device="cuda:0").to(torch.bfloat16)
        calls = 8 if tokens < HEAVY else 3
        batches = [draw(torch, sizes, x, torch.empty_like(x), UNIFORM, source) for _ in range(calls)]
        times = {}
        for variant in variants_of(method._plan, kernel, tokens):
            method._plan.keep(tokens, kernel, variant)
            if tokens >= HEAVY:
                torch.cuda.synchronize()
                time.sleep(IDLE)
            times[variant - 1] = 1e6 * seconds_of(torch, sizes, method, params, batches)
        yield Cell(chip, layer, model, tokens, times)


def main() -> None:
    """Measures, prints a line for each cell and, if asked, writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layer", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch = import_module("torch")
    chip, lines = chip_of(torch), []
    for model, layer in product(options.model, options.layer):
        for cell in measure(torch, chip, model, MODELS[model], layer, options.tokens):
            lines.append(cell.line())
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
