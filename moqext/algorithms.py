"""The facts of each algorithm, as the table of the native part, csrc/core/algo.c, has them."""

from collections.abc import Callable
from typing import NamedTuple

from moqext import _C


class Algorithm(NamedTuple):
    """One algorithm.

    Attributes:
        name: canonical.
        aliases: other spellings that configurations have; all are read in any case.
        family: what `detect` says of a checkpoint of it, None where no engine method is meant.
        codes: "e4m3", "e2m1", "int4" or "int8"; None for one that no single weight has.
        scales: what shares a value of weight_scale: "tensor", "rows", "blocks" (squares) or "groups" (along
            the contracted axis).
        scale_dtype: of weight_scale; "float32" stands for every float.
        second: what weight_scale_2 is: "factor" or "parts" of the weight, "unused" by it; None for none.
        group_size: weights that share a scale where a file does not say; None where all, or all of a row, do.
        group_sizes: the sizes there are; empty where any is, and where there are no groups.
        pre_quant_scale: whether activations may have factors.
        low_rank: whether there is a low-rank pair.
        input_scale: None without static activations, "optional" or "expected".
        input_max: input_scale is the largest activation over this; 0 where there is none.
        linear: how a linear of it treats activations with compute "exact", None where none runs.
        by_token: whether they have a scale of each token where there is no input_scale.
    """

    name: str
    aliases: tuple[str, ...]
    family: str | None
    codes: str | None
    scales: str | None
    scale_dtype: str | None
    second: str | None
    group_size: int | None
    group_sizes: tuple[int, ...]
    pre_quant_scale: bool
    low_rank: bool
    input_scale: str | None
    input_max: float
    linear: str | None
    by_token: bool


ALGORITHMS: dict[str, Algorithm] = {facts["name"]: Algorithm(**facts) for facts in _C.algorithms()}


def names_where(accepts: Callable[[Algorithm], bool]) -> tuple[str, ...]:
    """The names of the algorithms that are accepted, in the order of the table."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if accepts(algorithm))


HAS_SECOND = frozenset(names_where(lambda algorithm: algorithm.second is not None))
"""Algorithms whose layers have a weight_scale_2."""

SECOND_IN_WEIGHT = names_where(lambda algorithm: algorithm.second in ("factor", "parts"))
"""Algorithms whose weight_scale_2 multiplies the weight, those with weights of NVFP4, in order."""

STATIC_ACTIVATIONS = frozenset(names_where(lambda algorithm: algorithm.input_scale == "expected"))
"""Algorithms whose activations are quantized with a stored scale."""

MAY_BE_STATIC = frozenset(names_where(lambda algorithm: algorithm.input_scale is not None))
"""Algorithms with which an input_scale is used where there is one."""

BLOCK_SIZES: dict[str, int] = {
    name: facts.group_size
    for name, facts in ALGORITHMS.items()
    if facts.scales == "blocks" and facts.group_size
}
"""Rows and columns of a block, for algorithms with a scale per square block."""

LINEARS = names_where(lambda algorithm: algorithm.linear is not None)
"""Algorithms of which a linear runs."""
