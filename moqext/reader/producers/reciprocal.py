"""The factor in float32 that stands for a divisor, chosen so that weights differ least.

    their weight = code * (scale / divisor)      ours = code * scale * factor

The nearest float32 to 1 / divisor and its two neighbours are tried with every product of a code in E2M1 and a
scale in E4M3, powers of two aside: the fewest that differ in bfloat16, then in float32.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext.reference import as_float32

Float32 = NDArray[np.float32]

_CODES = np.array([1, 1.5], np.float32)
_SCALES = np.arange(8, 16, dtype=np.float32)
"""The significands of codes and scales, subnormal ones among them."""


class Factor(NamedTuple):
    """A factor in place of a divisor.

    Attributes:
        value: the factor.
        differing: share of the products of codes and scales that differ in bfloat16, by one unit in the last
            place.
        largest: the largest relative difference of one in float32.
    """

    value: np.float32
    differing: float
    largest: float


def factor_of(divisor: np.float32) -> Factor:
    """The factor for a divisor; of zero, infinity and NaN their reciprocal, which is no scale."""
    with np.errstate(all="ignore"):
        nearest = np.float32(1) / np.float32(divisor)
        if not 0 < abs(nearest) < np.inf or float(nearest) * float(divisor) == 1:
            return Factor(nearest, 0.0, 0.0)
        theirs = _CODES[:, None] * (_SCALES / divisor)
        candidates = np.array(
            [nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))]
        )
        ours = (_CODES[:, None] * _SCALES) * candidates[:, None, None]
        rounded = (_bf16(ours) != _bf16(theirs)).sum(axis=(1, 2))
        exact = (ours != theirs).sum(axis=(1, 2))
        best = min(range(len(candidates)), key=lambda at: (rounded[at], exact[at]))
        largest = np.nanmax(np.abs(ours[best] / theirs - 1), initial=0)
    return Factor(candidates[best], float(rounded[best]) / theirs.size, float(largest))


def factors_of(divisors: NDArray[np.generic]) -> Float32:
    """The factors for divisors, in their shape."""
    values = as_float32(divisors)
    found = [factor_of(divisor).value for divisor in values.reshape(-1)]
    return np.array(found, np.float32).reshape(values.shape)


def _bf16(values: Float32) -> NDArray[np.uint32]:
    """The bits in bfloat16 of finite values, rounded to nearest even."""
    bits = values.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
