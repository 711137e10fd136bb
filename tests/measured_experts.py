"""Times of kernels of experts on GPUs, by chip, layer, model and tokens: tests/data/expert_*.txt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .moe_calls import MODELS, plan

DATA = Path(__file__).parent / "data"
OPTIONS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, EP8": {"of_all": 256},
    "Nemotron-3-Nano": {"activation": "relu2", "gated": False},
}
"""Further options of `plan` for a model."""


class Measured(NamedTuple):
    """Times of each way of a kernel, or of each kernel.

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
        """The plan of the layer on the chip."""
        algo, _, compute = self.layer.partition(",")
        options = {"compute": compute or "exact", "chip": self.chip} | OPTIONS.get(self.model, {})
        return plan(algo, *MODELS[self.model], **options)

    def loss(self, chosen: str) -> float:
        """Part of the fastest time that the chosen one takes beyond it."""
        return self.microseconds[chosen] / min(self.microseconds.values()) - 1


def measured(name: str) -> Iterator[Measured]:
    """The lines of a file."""
    for line in (DATA / name).read_text().splitlines():
        chip, layer, model, tokens, times = line.split("; ")
        each = (time.rsplit(":", 1) for time in times.split())
        yield Measured(chip, layer, model, int(tokens), {key: float(time) for key, time in each})
