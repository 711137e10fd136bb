"""What kernels of experts took on a GPU, by chip, layer, model and tokens: tests/data/expert_*.txt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .moe_calls import plan

DATA = Path(__file__).parent / "data"
WITHOUT_GATE = {"activation": "relu2", "gated": False}
MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Qwen3-30B-A3B": ((128, 2048, 768, 8), {}),
    "Qwen3-235B-A22B": ((128, 4096, 1536, 8), {}),
    "Mixtral-8x7B": ((8, 4096, 14336, 2), {}),
    "DeepSeek-V3, TP8": ((256, 7168, 256, 8), {}),
    "DeepSeek-V3, EP8": ((32, 7168, 2048, 8), {"of_all": 256}),
    "Llama-4-Maverick": ((128, 5120, 8192, 1), {}),
    "Nemotron-3-Nano": ((128, 2688, 1856, 6), WITHOUT_GATE),
    "gpt-oss-120b": ((128, 2880, 2880, 4), {}),
}
"""Experts, hidden size, intermediate size, top k; and what else `plan` is told."""


class Measured(NamedTuple):
    """What each way of a kernel, or each kernel, took.

    Attributes:
        chip: As the plan knows it.
        layer: Algorithm, and compute behind a comma.
        model: Of `MODELS`.
        tokens: Rows of x.
        microseconds: By the row of the kernel's table, or by the kernel's name.
    """

    chip: str
    layer: str
    model: str
    tokens: int
    microseconds: dict[str, float]

    def plan(self) -> Any:
        """That of the layer on the chip."""
        algo, _, compute = self.layer.partition(",")
        sizes, options = MODELS[self.model]
        return plan(algo, *sizes, compute=compute or "exact", chip=self.chip, **options)

    def loss(self, chosen: str) -> float:
        """What the chosen one takes beyond the fastest."""
        return self.microseconds[chosen] / min(self.microseconds.values()) - 1


def measured(name: str) -> Iterator[Measured]:
    """The lines of a file."""
    for line in (DATA / name).read_text().splitlines():
        chip, layer, model, tokens, times = line.split("; ")
        each = (time.rsplit(":", 1) for time in times.split())
        yield Measured(chip, layer, model, int(tokens), {key: float(time) for key, time in each})
