"""Scales that a caller gives as plain numbers."""

from typing import Any

import numpy as np

DIVISOR_ABOVE = 2.0**-128
"""A scale that values are divided by is greater: the reciprocal of 2^-128 is 2^128, which float32 does not
hold, and zeros times an infinity would be NaN. MOQ_DIVISOR_ABOVE of csrc/core/formats.h."""

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def is_number(value: Any) -> bool:
    """True for Python's and NumPy's real numbers, which bool is not one of here."""
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)


def as_tensor(value: Any) -> Any:
    """A number as a float32 array of one element, what is too large for one as infinity; others unchanged."""
    if not is_number(value):
        return value
    with np.errstate(over="ignore"):
        return np.array(float(value), np.float64).astype(np.float32)


def as_tensors(value: Any) -> Any:
    """A number, or each number of a list or tuple, as `as_tensor` has it; others unchanged."""
    return [as_tensor(item) for item in value] if isinstance(value, (list, tuple)) else as_tensor(value)
