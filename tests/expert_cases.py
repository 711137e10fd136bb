"""Stacks of experts as a checkpoint's tensors of every algorithm, and what each expert alone becomes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moqext import LinearMethod

from .linear_cases import COMPUTES, Case, random_case, smoothed

WITH_FACTORS = [*COMPUTES, ("NVFP4_AWQ", "exact"), ("NVFP4_AWQ", "fp8"), ("W4A8_NVFP4_FP8", "exact")]
"""Algorithms whose weights have scales that may be zero, with each of their prepared forms."""

STACKS = [*WITH_FACTORS, ("MXFP4", "exact"), ("MXFP4", "fp8")]
"""Every algorithm with a prepared form, with each of its prepared forms."""


@dataclass
class Stack:
    """Experts of one shape, each a linear of several partitions (gate and up) with scales of its own."""

    experts: list[Case]

    @property
    def case(self) -> Case:
        return self.experts[0]

    def method(self, **options: Any) -> LinearMethod:
        return self.case.method(**options)

    def fused(self) -> dict[str, np.ndarray]:
        """A tensor for each name, experts first; of one partition, a value an expert is a vector."""
        experts = [expert.fused() for expert in self.experts]
        stacked = {name: np.stack([expert[name] for expert in experts]) for name in experts[0]}
        single = len(self.case.out_partitions) == 1
        one = [name for name, value in stacked.items() if single and value.shape[1:] == (1,)]
        return stacked | {name: stacked[name][:, 0] for name in one if self.case.parts[0][name].ndim == 0}

    def listed(self) -> dict[str, list[np.ndarray]]:
        """A list of one stack a partition for each name, as gate and up come."""
        return {
            name: [
                np.stack([expert.parts[p][name] for expert in self.experts])
                for p in range(len(self.case.parts))
            ]
            for name in self.case.parts[0]
        }

    def about(self) -> tuple[str, int, list[int]]:
        return self.case.algo, self.case.in_features, self.case.out_partitions

    def options(self, compute: str) -> dict[str, Any]:
        return {"group_size": self.case.group_size, "compute": compute}


def random_stack(
    rng: Any, algo: str, columns: int, rows: list[int], experts: int, group_size: int | None = None
) -> Stack:
    cases = [random_case(rng, algo, columns, rows, group_size) for _ in range(experts)]
    return Stack([smoothed(rng, case) if algo == "NVFP4_AWQ" else case for case in cases])


def apart(rng: Any, array: np.ndarray) -> np.ndarray:
    """The array's values in memory where experts are not next to each other, and not in order."""
    wide = np.full((2 * len(array) + 1, *array.shape[1:]), 0x7F, array.dtype)
    view = wide[1::2][::-1]
    view[...] = array
    return view


def expected_of(stack: Stack, prepare: Any) -> dict[str, np.ndarray]:
    """Stacks what `prepare` gives of one case after the other."""
    alone = [prepare(case) for case in stack.experts]
    single = len(stack.case.out_partitions) == 1
    stacked = {name: np.stack([np.asarray(one[name]) for one in alone]) for name in alone[0]}
    if single and "input_scale" in stacked:
        stacked["input_scale"] = stacked["input_scale"][:, 0]
    return stacked
