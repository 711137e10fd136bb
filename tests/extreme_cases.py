"""Linears whose scales and activations lie near the ends of float32, and the check of their outputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moqext import reference

from .linear_cases import HALF_ULP, Case, random_case

LARGEST = {
    "bfloat16": 2.0**128 * (1 - 2.0**-8),
    "float16": 65504.0,
    "float32": float(np.finfo(np.float32).max),
}
SPACING = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
"""Distance between the smallest numbers."""
TOO_SMALL = [1e-45, 1e-40, 2.0**-128]
"""Scales whose reciprocal float32 does not hold."""


def times(case: Case, factor: float, role: str | None = None) -> Case:
    """The layer with the scale of its weights, or of that role, multiplied."""
    role = role or ("weight_scale_2" if "NVFP4" in case.algo else "weight_scale")
    with np.errstate(under="ignore"):
        parts = [part | {role: np.float32(part[role] * np.float32(factor))} for part in case.parts]
    return replace(case, parts=parts)


def with_input_scale(case: Case, scale: float) -> Case:
    """The layer with that input_scale, where its algorithm has one."""
    value = np.array(np.float32(scale))
    parts = [part | ({"input_scale": value} if "input_scale" in part else {}) for part in case.parts]
    return replace(case, parts=parts)


def _one_huge(x: Any) -> Any:
    x[len(x) // 2, 7] = 3.3e38
    return x


@dataclass(frozen=True)
class Extreme:
    """A change of an ordinary layer and of its x.

    `cuda`: the product of the factors of a row and of a token is an ordinary float32, and so are sums of
    unquantized x; the kernels on CUDA devices ask for both.
    """

    layer: Callable[[Case], Case]
    x: Callable[[Any], Any]
    cuda: tuple[str, ...] = ()  # algorithms
    dynamic: bool = False  # without an input_scale


FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
NVFP4 = ("NVFP4", "W4A16_NVFP4")
EXTREMES = {
    "one value of 3.3e38": Extreme(lambda case: case, _one_huge, FP8, dynamic=True),
    "one value of 3.3e38, tiny weights": Extreme(
        lambda case: times(case, 1e-30), _one_huge, FP8, dynamic=True
    ),
    "all values of 3.3e38": Extreme(
        lambda case: times(case, 1e-6), lambda x: np.full_like(x, 3.3e38), (), dynamic=True
    ),
    "values of 3e34": Extreme(
        lambda case: times(case, 1e-6), lambda x: x * np.float32(3e34), NVFP4, dynamic=True
    ),
    "values of 1e37": Extreme(lambda case: times(case, 1e-7), lambda x: x * np.float32(1e37), dynamic=True),
    "tiny values, huge weights": Extreme(
        lambda case: times(case, 1e36), lambda x: x * np.float32(1e-30), FP8, dynamic=True
    ),
    "subnormal values, huge weights": Extreme(
        lambda case: times(case, 1e30), lambda x: x * np.float32(1e-40), dynamic=True
    ),
    "tiny weights": Extreme(lambda case: times(case, 2.0**-90), lambda x: x, (*FP8, *NVFP4)),
    "subnormal weight scales": Extreme(lambda case: times(case, 2.0**-118), lambda x: x),
    "scales with a product below the normal numbers": Extreme(
        lambda case: with_input_scale(times(case, 1e-18), 1e-20), lambda x: x * np.float32(1e-18)
    ),
    "the least input_scale": Extreme(
        lambda case: with_input_scale(case, 2.0**-128 * (1 + 2.0**-20)), lambda x: x * np.float32(1e-38)
    ),
    "the least input_scale, zeros and large values": Extreme(
        lambda case: with_input_scale(case, 2.0**-128 * (1 + 2.0**-20)), lambda x: x * (np.abs(x) > 0.5)
    ),
    "a huge input_scale": Extreme(
        lambda case: with_input_scale(times(case, 1e-30), 1e37), lambda x: x * np.float32(1e37), ("FP8",)
    ),
    "a huge input_scale over ordinary values": Extreme(
        lambda case: with_input_scale(case, 3e38), lambda x: x
    ),
    "two huge scales over zeros": Extreme(
        lambda case: with_input_scale(times(case, 1e30), 1e30), lambda x: x * np.float32(0)
    ),
}


def make_extreme(
    rng: Any, name: str, algo: str, tokens: int, columns: int, rows: list[int]
) -> tuple[Case, Any]:
    """A layer and its x, float32."""
    extreme = EXTREMES[name]
    case = random_case(rng, algo, columns, rows, input_scale=not extreme.dynamic)
    with np.errstate(under="ignore"):
        return extreme.layer(case), extreme.x(rng.standard_normal((tokens, columns)).astype(np.float32))


def as_dtype(x: Any, dtype: str) -> Any:
    """x as the boundary takes it; what float16 does not hold becomes its largest number."""
    if dtype == "bfloat16":
        return reference.encode(np.clip(x, -3.38e38, 3.38e38), dtype)
    return x if dtype == "float32" else np.clip(x, -65504, 65504).astype(dtype)


def assert_as_reference(y: Any, expected: Any, magnitude: Any, dtype: str, sums: float = 1e-5) -> None:
    """Element by element: NaN and infinities where the exact value, rounded to the dtype, is one, but for
    sums next to its largest number; all others within a rounding and the error of a sum."""
    y = reference.as_float32(y).astype(np.float64)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    limit = LARGEST[dtype]
    with np.errstate(all="ignore"):
        slack = sums * magnitude
        beyond = np.abs(expected) - slack > limit * (1 + HALF_ULP[dtype])
        within = np.abs(expected) + slack < limit
    np.testing.assert_array_equal(y[beyond], np.copysign(np.inf, expected[beyond]))
    bound = HALF_ULP[dtype] * 1.001 * np.abs(expected) + slack + SPACING[dtype]
    difference = np.abs(y[within] - expected[within])
    assert (difference <= bound[within]).all(), np.nanmax(difference / bound[within])
