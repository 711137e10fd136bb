"""Rows of `verify`, and how it calls, times and compares a layer, whatever it is."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import reference
from moqext._C import UnsupportedQuantization
from moqext.errors import CheckpointError
from moqext.ops import to_host

LIMITS = {"bfloat16": (2.5e-3, 1e-2), "float16": (2.5e-3, 1e-2), "float32": (1e-5, 1e-5)}
"""dtype -> (relative Frobenius error, largest error of an element against the largest of its row). One step
of bfloat16 is up to 7.8e-3 of a value: single elements may fall on the other side of a tie."""

CALLS, CALL_SECONDS = 5, 0.2
"""A layer is called so often to time it, or until its calls have taken so long together."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one quantized weight.

    Attributes:
        layer: Name in the checkpoint.
        kind: "linear", "embedding", "convolution", "experts" or "stacked experts", a projection only read.
        group: The container of experts that it is of, else None, as for the container itself.
        quant_algo: Canonical algorithm.
        shape: (out_features, in_features), with the number of stacked experts before it; of experts
            (experts, hidden size, intermediate size).
        weights: Their number.
        status: "ok", "failed" (wrong: outside the limits, not finite, or not what the reference reads),
            "read" (cannot be run, but every weight was dequantized, is finite and what the reference says) or
            "error" (refused: cannot be used as stored).
        kernel: "family:name", empty unless it ran.
        relative_error: Frobenius norm of the difference to the rounded reference over that of the reference.
        max_error: Largest such difference over the largest magnitude of its row of the reference.
        exact_error: Frobenius norm of the difference to the float64 reference before it is rounded, over its.
        rounding_error: The same of the rounded reference: what rounding once makes.
        prepare_seconds, run_seconds: Wall time of loading with weight processing, and of a call until y can
            be read on the host: the median of `calls`.
        calls: How many calls were timed.
        message: Why it did not run or failed.
    """

    layer: str
    kind: str
    group: str | None
    quant_algo: str
    shape: tuple[int, ...]
    weights: int
    status: str
    kernel: str = ""
    relative_error: float | None = None
    max_error: float | None = None
    exact_error: float | None = None
    rounding_error: float | None = None
    prepare_seconds: float | None = None
    run_seconds: float | None = None
    calls: int = 0
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: such an error is null."""
        data = asdict(self)
        for key in ("relative_error", "max_error", "exact_error", "rounding_error"):
            if data[key] is not None and not isfinite(data[key]):
                data[key] = None
        return data


def timed_calls(call: Callable[[], Any], *, on_device: bool) -> tuple[NDArray[np.float32], list[float]]:
    """(y, seconds of each call until y can be read on the host)."""
    times: list[float] = []
    while len(times) < CALLS and sum(times) < CALL_SECONDS:
        began = time.perf_counter()
        y = call()
        if on_device:
            y = to_host(y)
        times.append(time.perf_counter() - began)
    return reference.as_float32(y), times


def reason_of(name: str, error: Exception) -> str:
    """The text of an exception, without what the row says already."""
    if isinstance(error, CheckpointError):
        return error.reason.removeprefix(f"{name}: ")
    plain = str(error).removeprefix(f"{name}: ")
    return plain if isinstance(error, UnsupportedQuantization) else f"{type(error).__name__}: {plain}"


def compare(y: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float]:
    """(relative Frobenius error, largest error over the row's largest magnitude); inf for a NaN in y only."""
    if not np.array_equal(np.isfinite(y), np.isfinite(expected)):
        return float("inf"), float("inf")
    expected = expected.astype(np.float64)
    difference = np.abs(y - expected)
    norm = float(np.linalg.norm(expected))
    tops = np.abs(expected).max(axis=-1, initial=0.0)
    tops = np.where(tops == 0, 1.0, tops)
    relative = float(np.linalg.norm(difference)) / (norm or 1.0)
    return relative, float((difference.max(axis=-1, initial=0.0) / tops).max(initial=0.0))


def errors_of(y: NDArray[Any], exact: NDArray[np.float64], dtype: str) -> tuple[float, float]:
    """`exact_error` and `rounding_error` of a row, for outputs and the reference before it is rounded."""
    rounded = np.asarray(reference.round_to(exact, dtype), np.float64)
    return compare(y, exact)[0], compare(rounded, exact)[0]


def judged(relative: float, largest: float, dtype: str) -> tuple[bool, str]:
    """Whether both errors are within the limits, and what to say where they are not."""
    limit, limit_max = LIMITS[dtype]
    good = relative <= limit and largest <= limit_max
    said = f"limits are {limit:g} and {limit_max:g}, errors {relative:.2e} and {largest:.2e}"
    return good, "" if good else said


def within_reach(
    y: NDArray[Any], exact: NDArray[np.float64], slack: NDArray[np.float64], dtype: str
) -> NDArray[np.float64]:
    """The expected outputs moved toward y, as far as sums may be inexact: what is left is beyond that.

    Args:
        y: Outputs as numbers.
        exact: Outputs of the reference before they are rounded.
        slack: How far each may be from them.
        dtype: Of the outputs.
    """
    expected = np.asarray(reference.round_to(exact, dtype), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = (
            np.asarray(reference.round_to(exact + move, dtype), np.float64) for move in (-slack, slack)
        )
        beyond = y - np.clip(y, low, high)
    return np.where(np.isfinite(y) & np.isfinite(expected), expected + beyond, y)


def activations(rng: np.random.Generator, tokens: int, columns: int) -> NDArray[np.float32]:
    """Normal, with columns of unequal size as in real models."""
    spread = np.exp2(rng.uniform(-2, 2, columns))
    return (rng.standard_normal((tokens, columns)) * spread).astype(np.float32)


def carrier(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Values in a dtype NumPy has: bfloat16 as its bits in uint16."""
    if dtype == "bfloat16":
        return reference.encode(values, "bfloat16")
    return values.astype(dtype)
