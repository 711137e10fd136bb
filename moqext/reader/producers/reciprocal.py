"""The factor in float32 that stands for a divisor, and the reverse, chosen so that weights differ least.

A weight is code * (scale / divisor) in their files, and code * scale * factor in ModelOpt's. The nearest
float32 to 1 / divisor is tried first. Where weights in bfloat16 differ with it, so are its two neighbours.
A trial has every product of a code in E2M1 and a scale in E4M3, powers of two aside.
"""

from collections.abc import Callable, Sequence
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
    return _best(divisor, lambda factor: _differing(divisor, factor))


def divisor_of(factor: np.float32) -> np.float32:
    """The divisor for a factor, as `factor_of`."""
    return _best(factor, lambda divisor: _differing(divisor, factor))


def _best(value: np.float32, count: Callable[[np.float32], int]) -> np.float32:
    """The reciprocal of a value, or that neighbour with which fewer weights differ."""
    with np.errstate(all="ignore"):
        best = np.float32(1) / np.float32(value)
        if not 0 < abs(best) < np.inf or not (least := count(best)):
            return best
        for other in [np.nextafter(best, end) for end in (np.float32(0), np.float32(np.inf))]:
            if (differing := count(other)) < least:
                best, least = other, differing
    return best


def factors_of(divisors: NDArray[np.generic]) -> Float32:
    """The factors for divisors, in their shape."""
    values = as_float32(divisors)
    return np.array([factor_of(value) for value in values.reshape(-1)], np.float32).reshape(values.shape)


def difference(divisor: np.float32, factor: np.float32) -> Difference:
    """The difference that a factor makes; none where one of the two is no positive number."""
    if not (0 < factor < np.inf and 0 < divisor < np.inf):
        return Difference(0.0, 0.0)
    theirs = _CODES * (_SCALES / divisor)
    largest = float(np.abs(_PRODUCTS * factor / theirs.astype(np.float64) - 1).max())
    return Difference(_differing(divisor, factor) / theirs.size, largest)


def tell_differences(what: str, pairs: Sequence[tuple[np.float32, np.float32]]) -> list[str]:
    """A sentence on the weights that differ by pairs of a divisor and a factor; none where none do.

    Args:
        what: the one of the two that the source has, in the plural.
        pairs: divisors and factors.
    """
    found = [difference(divisor, factor) for divisor, factor in pairs]
    inexact = sum(each.largest > 0 for each in found)
    if not inexact:
        return []
    largest, share = max(each.largest for each in found), max(each.share for each in found)
    return [
        f"{inexact} of {len(found)} {what} of weights have no exact reciprocal: weights differ by at most "
        f"{largest:.1e} of themselves in float32"
        + (
            f", and at most {share:.1%} of a layer's by one bit in bfloat16"
            if share
            else ", none in bfloat16"
        )
    ]


def _differing(divisor: np.float32, factor: np.float32) -> int:
    """How many products are another bfloat16."""
    theirs, ours = _CODES * (_SCALES / divisor), _PRODUCTS * factor
    return int(np.count_nonzero(_bf16(theirs) != _bf16(ours)))


def _bf16(values: Float32) -> NDArray[np.uint32]:
    """The bits in bfloat16 of finite values, rounded to nearest even."""
    bits = values.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
