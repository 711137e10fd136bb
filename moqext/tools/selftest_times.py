"""Times of all configs of a device's kernels on a few layers of models, in the names of benchmarks/times.

A call is as `tune` times it: by itself among kernels of others, on weights that come from memory.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moqext import _C
from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext.layers.linear import LinearMethod
from moqext.layers.moe import MoEMethod
from moqext.tools.bench import random_params

SHAPES = ((4096, 4096), (28672, 4096))
"""Rows and columns of linears."""

LINEAR_TOKENS = (1, 16, 256)

EXPERT_MODEL, EXPERT_SIZES, EXPERT_TOP_K = "Qwen3-30B-A3B", (128, 2048, 768), 8
"""Experts, hidden size and intermediate size of a model."""

EXPERT_TOKENS = (1, 64, 512)

OTHER_SCALING = 8
"""The variant of cuBLASLt that scales by vectors in the other way than the chosen one."""


class TimedCell(NamedTuple):
    """A layer with a number of tokens.

    Attributes:
        layer: Its format, as "NVFP4" or "NVFP4,fp8".
        where: "NxK", or the model of experts.
        tokens: Rows of x.
        chosen: The kernel and its config that the plan takes.
        seconds: Of each config, by the kernel and the number in its table.
    """

    layer: str
    where: str
    tokens: int
    chosen: tuple[str, int]
    seconds: dict[str, dict[int, float]]

    @property
    def fastest(self) -> tuple[str, int]:
        """The kernel and its config that took least."""
        return min(
            ((kernel, number) for kernel, times in self.seconds.items() for number in times),
            key=lambda each: self.seconds[each[0]][each[1]],
        )

    def seconds_of(self, config: tuple[str, int]) -> float | None:
        """Seconds of a config; None where it was not timed."""
        return self.seconds.get(config[0], {}).get(config[1])

    def as_rows(self) -> list[dict[str, Any]]:
        """Plain data for JSON, a row a kernel, in microseconds."""
        return [
            {
                "kernel": kernel,
                "layer": self.layer,
                "where": self.where,
                "tokens": self.tokens,
                "microseconds": {str(number): round(1e6 * time, 2) for number, time in times.items()},
            }
            for kernel, times in self.seconds.items()
        ]


def time_cells(
    device: str,
    until: float,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[str], object] = lambda name: None,
) -> Iterator[TimedCell]:
    """Times cell by cell, and begins none when the clock says `until`.

    Args:
        device: "cuda:N".
        until: In the seconds of the clock.
        clock: Seconds since some moment.
        progress: Told of each cell.
    """
    rng = np.random.default_rng(0)
    for layer, where, counts in _layers():
        if clock() >= until:
            return
        try:
            method = _method(layer, where, device)
        except UnsupportedQuantization:
            continue
        params = random_params(method, rng)
        for tokens in counts:
            if clock() >= until:
                return
            progress(f"{layer}, {where}, {tokens} tokens")
            plan = method._plan
            kernel, _, number, *_ = plan.config(tokens)
            found = by_config(plan, tokens, plan.measure(tokens, params))
            if found:
                yield TimedCell(layer, where, tokens, (kernel, number), found)
        del params


def _layers() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Layers and their numbers of tokens, the most telling first.

    Formats with the same codes, scales and activations have the same kernels: the first of them is timed.
    E2M1 with activations in FP8, whose kernels are those of "fp8", is left out.
    """
    kinds = {(facts.codes, facts.scales, facts.linear): name for name, facts in reversed(ALGORITHMS.items())}
    kinds.pop(("e2m1", "groups", "e4m3_tensor"))
    linears = [name for name in ALGORITHMS if name in kinds.values() and ALGORITHMS[name].linear]
    folded = [f"{name},fp8" for name in linears if ALGORITHMS[name].codes == "e2m1"][:1]
    experts = [
        next(name for name in linears if ALGORITHMS[name].codes == codes) for codes in ("e4m3", "e2m1")
    ]
    for place, (rows, columns) in enumerate(SHAPES):
        for layer in [*linears, *folded]:
            yield layer, f"{rows}x{columns}", LINEAR_TOKENS
        for layer in experts if place == 0 else ():
            yield layer, EXPERT_MODEL, EXPERT_TOKENS


def _method(layer: str, where: str, device: str) -> LinearMethod | MoEMethod:
    algo, _, compute = layer.partition(",")
    options: dict[str, Any] = {"device": device, "compute": compute or "exact"}
    if where == EXPERT_MODEL:
        return MoEMethod(algo, *EXPERT_SIZES, top_k=EXPERT_TOP_K, **options)
    rows, _, columns = where.partition("x")
    return LinearMethod(algo, int(columns), [int(rows)], **options)


def by_config(
    plan: _C.Plan, tokens: int, timings: list[tuple[str, int, float]]
) -> dict[str, dict[int, float]]:
    """Seconds by the kernel and the number of the config in its table, of what `measure` returned."""
    measured = {(kernel, variant): seconds for kernel, variant, seconds in timings}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for kernel, number, *_ in plan.configs(tokens):
        seconds = measured.get((kernel, variant_of(plan, tokens, kernel, number)))
        if seconds is not None:
            found[kernel][number] = seconds
    return dict(found)


def variant_of(plan: _C.Plan, tokens: int, kernel: str, number: int) -> int:
    """Variant by which a plan keeps a config; cuBLASLt's are algorithms, from 8 on of the other scaling."""
    if kernel == "cuda:cublaslt_general":
        return 0
    if kernel != "cuda:cublaslt":
        return number + 1
    plan.keep(tokens, kernel, 0)
    return 0 if plan.config(tokens)[2] == number else OTHER_SCALING
