"""Random linears and experts as a checkpoint stores them, of every algorithm and of sizes that suit no tile.

Weights are normal with rows of unequal size, some of them zeros, and are quantized as the exporter does it.
Partitions, and gate and up, have scales of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import reference
from moqext.algorithms import ALGORITHMS
from moqext.layers.linear import LinearMethod
from moqext.layers.moe import MoEMethod
from moqext.layers.stacks import ExpertStacks
from moqext.tools.verify_row import activations, carrier

Part = dict[str, NDArray[Any]]

BLOCK = 128
"""Rows and columns of a tile of FP8_PB_WO."""

LARGEST = 24.0
"""About the largest of the activations, which input scales are made for."""

ZERO_SHARE = 0.02
"""Rows of zeros among those of a weight."""

RANK = 8
"""Rank of low-rank pairs."""


@dataclass(frozen=True)
class RandomLinear:
    """A linear of some partitions.

    Attributes:
        quant_algo: Of all.
        columns: Of x.
        group_size: Columns that share a scale; None for the algorithm's own.
        parts: Tensors of each partition by role.
    """

    quant_algo: str
    columns: int
    group_size: int | None
    parts: Sequence[Part]

    @property
    def rows(self) -> list[int]:
        """Rows of each partition."""
        pairs = 2 if ALGORITHMS[self.quant_algo].codes == "int4" else 1
        return [pairs * len(part["weight"]) for part in self.parts]

    def method(self, **options: Any) -> LinearMethod:
        """The method of the layer."""
        rank = RANK if ALGORITHMS[self.quant_algo].low_rank else None
        about = {"group_size": self.group_size, "rank": rank, **options}
        return LinearMethod(self.quant_algo, self.columns, self.rows, **about)

    def listed(self) -> dict[str, list[NDArray[Any]]]:
        """Tensors as `prepare` takes them: by role, one of each partition."""
        return {role: [part[role] for part in self.parts] for role in self.parts[0]}


def random_linear(
    rng: np.random.Generator,
    quant_algo: str,
    rows: Sequence[int],
    columns: int,
    group_size: int | None = None,
    *,
    input_scale: bool = True,
) -> RandomLinear:
    """A linear whose partitions have so many rows.

    Args:
        rng: Source.
        quant_algo: Of `moqext.algorithms.LINEARS`.
        rows: Even for int4.
        columns: A multiple of the group.
        group_size: As for `LinearMethod`.
        input_scale: Whether activations have static scales, where the algorithm may have some.
    """
    facts = ALGORITHMS[quant_algo]
    parts = [_random_part(rng, quant_algo, count, columns, group_size, input_scale) for count in rows]
    if facts.pre_quant_scale:
        smooth = _bfloat16(np.exp2(rng.uniform(-2, 2, columns)))
        parts = [part | {"pre_quant_scale": smooth} for part in parts]
    if facts.low_rank:
        parts = [
            part
            | {
                "lora_a": _bfloat16(rng.standard_normal((RANK, columns)) / np.sqrt(columns)),
                "lora_b": _bfloat16(rng.standard_normal((count, RANK)) / np.sqrt(RANK)),
            }
            for part, count in zip(parts, rows, strict=True)
        ]
    return RandomLinear(quant_algo, columns, group_size, parts)


def random_experts(
    rng: np.random.Generator, method: MoEMethod, *, bias: bool = False, input_scale: bool = True
) -> ExpertStacks:
    """Stacks of a layer of experts, filled tensor by tensor as from a file.

    Args:
        rng: Source.
        method: Of the layer.
        bias: Whether projections have biases.
        input_scale: As for `random_linear`.
    """
    stacks = method.new_params()
    algo, hidden, inner = method.quant_algo, method.hidden_size, method.intermediate_size
    first = ("gate_proj", "up_proj") if method.gated else ("up_proj",)
    for expert in range(method.num_experts):
        for names, rows, columns in ((first, inner, hidden), (("down_proj",), hidden, inner)):
            smooth = _bfloat16(np.exp2(rng.uniform(-2, 2, columns)))
            for name in names:
                part = _random_part(rng, algo, rows, columns, method.group_size, input_scale)
                if ALGORITHMS[algo].pre_quant_scale:
                    part["pre_quant_scale"] = smooth
                if bias:
                    part["bias"] = rng.standard_normal(rows).astype(np.float32)
                for role, tensor in part.items():
                    method.load(stacks, f"{name}.{role}", expert, tensor)
    return stacks


def random_x(rng: np.random.Generator, tokens: int, columns: int, dtype: str) -> NDArray[Any]:
    """Activations in a dtype that NumPy has: rows differ in size, and of several one is zero."""
    values = activations(rng, tokens, columns) * np.exp2(rng.uniform(-3, 0, (tokens, 1)))
    if tokens > 4:
        values[rng.integers(tokens)] = 0
    return carrier(values.astype(np.float32), dtype)


def poisoned(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """An output in which what is not written is NaN."""
    bits = np.uint32 if dtype == "float32" else np.uint16
    filled = np.full(shape, np.iinfo(bits).max, bits)
    return filled if dtype == "bfloat16" else filled.view(dtype)


def _random_part(
    rng: np.random.Generator,
    algo: str,
    rows: int,
    columns: int,
    group_size: int | None,
    input_scale: bool,
) -> Part:
    spread = np.exp2(rng.uniform(-3, 0, (rows, 1))) * (rng.random((rows, 1)) >= ZERO_SHARE)
    weight = rng.standard_normal((rows, columns)) * spread / np.sqrt(columns)
    weight[rng.integers(rows)] = 1 / columns  # of all zeros there would be no scale
    part = reference.quantize_weight(_bfloat16(weight), algo, group_size=group_size)
    if algo == "FP8_PB_WO":
        part["weight_scale"] = part["weight_scale"].reshape(-(-rows // BLOCK), -(-columns // BLOCK))
    facts = ALGORITHMS[algo]
    if facts.input_scale is not None and input_scale:
        part["input_scale"] = np.array(np.exp2(rng.uniform(-1, 1)) * LARGEST / facts.input_max, np.float32)
    return part


def _bfloat16(values: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(reference.round_to(values.astype(np.float64), "bfloat16"), np.float32)
