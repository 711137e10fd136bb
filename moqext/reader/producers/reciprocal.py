"""The factor in float32 that stands for a divisor, chosen so that weights differ least.

    their weight = code * (scale / divisor)      ours = code * scale * factor

The nearest float32 to 1 / divisor and, where weights in bfloat16 differ with it, its two neighbours are tried
with every product of a code in E2M1 and a scale in E4M3, powers of two aside.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext.reference import as_float32

Float32 = NDArray[np.float32]

_CODES = np.array([[1], [1.5]], np.float32)
_SCALES = np.arange(8, 16, dtype=np.float32)
"""The significands of codes and scales, subnormal ones among them."""
_PRODUCTS = _CODES * _SCALES


class Difference(NamedTuple):
    """The difference that a factor in place of a divisor makes.

    Attributes:
        share: of the products of codes and scales that are another bfloat16.
        largest: the largest relative difference in float32.
    """

    share: float
    largest: float


def factor_of(divisor: np.float32) -> np.float32:
    """The factor for a divisor; of zero, infinity and NaN their reciprocal, which is no scale."""
    with np.errstate(all="ignore"):
        nearest = np.float32(1) / np.float32(divisor)
        if not 0 < abs(nearest) < np.inf or not (least := _differing(divisor, nearest)):
            return nearest
        best = nearest
        for end in (np.float32(0), np.float32(np.inf)):
            other = np.nextafter(nearest, end)
            if (count := _differing(divisor, other)) < least:
                best, least = other, count
    return best


def factors_of(divisors: NDArray[np.generic]) -> Float32:
    """The factors for divisors, in their shape."""
    values = as_float32(divisors)
    return np.array([factor_of(value) for value in values.reshape(-1)], np.float32).reshape(values.shape)


def difference(divisor: np.float32, factor: np.float32) -> Difference:
    """The difference that a factor makes, both positive numbers."""
    theirs = _CODES * (_SCALES / divisor)
    largest = float(np.abs(_PRODUCTS * factor / theirs.astype(np.float64) - 1).max())
    return Difference(_differing(divisor, factor) / theirs.size, largest)


def _differing(divisor: np.float32, factor: np.float32) -> int:
    """How many products are another bfloat16."""
    theirs, ours = _CODES * (_SCALES / divisor), _PRODUCTS * factor
    return int(np.count_nonzero(_bf16(theirs) != _bf16(ours)))


def _bf16(values: Float32) -> NDArray[np.uint32]:
    """The bits in bfloat16 of finite values, rounded to nearest even."""
    bits = values.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
