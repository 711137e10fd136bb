"""Number formats, decoded and encoded with float64 arithmetic.

A finite value is an integer times a power of two, so both directions are two lines for every
format with a sign, an exponent and a fraction; E8M0, a bare exponent, is the one exception.
Definitions: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0
(E2M1, E8M0), IEEE 754 (float16); bfloat16 is the upper half of a binary32.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Array = NDArray[Any]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_MAX = E2M1_MAX * E4M3_MAX


class Format(NamedTuple):
    """Layout of a signed format; codes above `largest` are infinity, where it has one, and NaN."""

    exponent: int  # bits
    fraction: int  # bits
    bias: int
    largest: int  # magnitude code of the largest finite value
    infinity: bool  # whether the code after `largest` is one
    carrier: type[np.unsignedinteger[Any]]

    @property
    def ceiling(self) -> int:
        """Magnitude code of what overflows: formats of a byte saturate, wider formats have infinities."""
        return self.largest if self.carrier is np.uint8 else self.largest + 1

    @property
    def nan(self) -> int:
        """Magnitude code of the NaN that encoding gives: all ones, or quiet without payload in 16 bits."""
        ones = (1 << (self.exponent + self.fraction)) - 1
        return ones if self.carrier is np.uint8 else self.largest + 1 | 1 << (self.fraction - 1)


FORMATS = {
    "float8_e4m3fn": Format(4, 3, 7, 0x7E, False, np.uint8),
    "float8_e5m2": Format(5, 2, 15, 0x7B, True, np.uint8),
    "float4_e2m1fn": Format(2, 1, 1, 0x7, False, np.uint8),
    "bfloat16": Format(8, 7, 127, 0x7F7F, True, np.uint16),
    "float16": Format(5, 10, 15, 0x7BFF, True, np.uint16),
}
SHORT = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e8m0": "float8_e8m0fnu",
    "e2m1": "float4_e2m1fn_x2",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def _canonical(name: str) -> str:
    full = SHORT.get(name, name)
    if full not in FORMATS and full not in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
        raise ValueError(f"format: expected one of {', '.join(SHORT)}, got {name!r}")
    return full


def raw(array: ArrayLike) -> Array:
    """The codes of an array as unsigned integers, whatever dtype of 8 or 16 bits they are declared as."""
    codes = plain_array(array)
    if codes.dtype.itemsize not in (1, 2):
        raise TypeError(f"codes: expected an array of 8 or 16 bit elements, got {codes.dtype}")
    return codes.view(np.uint8 if codes.dtype.itemsize == 1 else np.uint16)


def plain_array(array: ArrayLike) -> Array:
    """`numpy.asarray`, which would forget the mask of an array that has one."""
    if isinstance(array, np.ndarray) and hasattr(type(array), "mask"):
        raise TypeError(f"expected an array without a mask, got {type(array)}; pass its filled(value)")
    return np.asarray(array)


def as_float32(array: ArrayLike) -> F32:
    """A tensor of a checkpoint or an activation as float32, without rounding.

    Takes float32, float64 (values that are float32 already), float16, bfloat16 and, as carrier of bfloat16,
    uint16.
    """
    values = plain_array(array)
    if values.dtype == np.uint16 or values.dtype.name == "bfloat16":
        return decode(values, "bfloat16")
    if values.dtype.kind not in "fiu" or values.dtype.itemsize < 2:
        raise TypeError(f"expected a float array or a uint16 carrier of bfloat16, got {values.dtype}")
    return values.astype(np.float32)


def _decode_signed(codes: Array, form: Format) -> F64:
    magnitude = (codes & ((1 << (form.exponent + form.fraction)) - 1)).astype(np.int64)
    field = magnitude >> form.fraction
    count = (magnitude & ((1 << form.fraction) - 1)) + np.where(field > 0, 1 << form.fraction, 0)
    value = np.ldexp(count.astype(np.float64), np.maximum(field, 1) - form.bias - form.fraction)
    value = np.where(magnitude > form.largest, np.nan, value)
    if form.infinity:
        value = np.where(magnitude == form.largest + 1, np.inf, value)
    sign = codes >> (form.exponent + form.fraction) & 1
    signed: F64 = np.where(sign == 1, -value, value)
    return signed


@cache
def _table(name: str) -> F32:
    """The values of all 256 codes of an 8-bit format (of all 16 for E2M1)."""
    if name == "float8_e8m0fnu":
        powers = np.ldexp(1.0, np.arange(256) - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    size = 16 if name == "float4_e2m1fn" else 256
    return _decode_signed(np.arange(size), FORMATS[name]).astype(np.float32)


def decode(codes: ArrayLike, format: str) -> F32:
    """Values of an array of codes.

    Args:
        codes: unsigned integers of the format's width, or an array declared in a dtype of that width.
        format: "e4m3", "e5m2", "e8m0", "e2m1", "bf16", "fp16", or the dtype's full name. "e2m1" is packed in
            pairs: a byte holds the even column in its low nibble, so the last axis doubles.

    Returns:
        float32 (all these formats are subsets of it), of the shape of `codes` but for "e2m1".
    """
    name, carrier = _canonical(format), raw(codes)
    if (carrier.dtype == np.uint16) != (name in ("bfloat16", "float16")):
        raise TypeError(f"codes: {name} does not have the width of {carrier.dtype}")
    if name == "float4_e2m1fn_x2":
        pairs = np.stack([carrier & 15, carrier >> 4], axis=-1)
        return _table("float4_e2m1fn")[pairs.reshape(*carrier.shape[:-1], 2 * carrier.shape[-1])]
    if name == "bfloat16":
        return (carrier.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "float16":
        return _decode_signed(carrier, FORMATS[name]).astype(np.float32)
    return _table(name)[carrier]


def _encode_signed(values: F64, form: Format) -> Array:
    size = np.abs(values)
    finite = np.isfinite(size)
    kept = np.where(finite, size, 0.0)
    lowest = 1 - form.bias
    # Below the smallest normal number the exponent, and with it the last place, stays the same.
    exponent = np.frexp(np.maximum(kept, 2.0**lowest))[1] - 1
    count = np.rint(np.ldexp(kept, form.fraction - exponent))  # ties to even
    # A count that rounds up to the next power of two carries into the exponent field by itself.
    code = ((exponent - lowest).astype(np.int64) << form.fraction) + count.astype(np.int64)
    code = np.where(finite, np.minimum(code, form.ceiling), form.ceiling)
    code = np.where(np.isnan(values), form.nan, code)
    sign = np.signbit(values).astype(np.int64) << (form.exponent + form.fraction)
    return np.asarray(code | sign, form.carrier)


def _encode_e2m1(values: F64) -> Array:
    """Nibbles; a NaN, which E2M1 lacks, becomes +6."""
    nibbles = _encode_signed(values, FORMATS["float4_e2m1fn"])
    return np.where(np.isnan(values), np.uint8(7), nibbles)


def _encode_e8m0(values: F64) -> Array:
    """Nearest power of two, ties up; anything below 2^-127 gives code 0."""
    fraction, exponent = np.frexp(np.where(values > 0, np.minimum(values, 2.0**127), 2.0**-127))
    code = np.maximum(exponent - 1 + (fraction >= 0.75) + 127, 0)
    return np.where(np.isnan(values), 255, code).astype(np.uint8)


def encode(x: ArrayLike, format: str) -> Array:
    """Codes of an array of values, rounded to nearest even.

    The 8-bit formats and E2M1 saturate to their largest finite value, infinities included; bfloat16 and
    float16 overflow to infinity as IEEE 754 says. A NaN stays one (with its sign) where the format has it.
    A zero and a value that rounds to zero keep their sign.

    Args:
        x: float64 or anything `as_float32` takes; the rounding is from that value, once.
        format: as for `decode`; "e2m1" packs pairs along the last axis, whose extent must be even.

    Returns:
        uint8, or uint16 for the 16-bit formats.

    Raises:
        ValueError: unknown format, or an odd last axis for "e2m1".
    """
    name = _canonical(format)
    array = plain_array(x)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = array if array.dtype == np.float64 else as_float32(array).astype(np.float64)
    if name == "float8_e8m0fnu":
        return _encode_e8m0(values)
    if name == "float4_e2m1fn_x2":
        return pack_nibbles(_encode_e2m1(values))
    return _encode_signed(values, FORMATS[name])


def pack_nibbles(nibbles: Array) -> Array:
    """Two 4-bit codes to a byte along the last axis, the even one in the low nibble."""
    if nibbles.ndim == 0 or nibbles.shape[-1] % 2:
        raise ValueError(f"e2m1: the last axis must be even to be packed, got shape {nibbles.shape}")
    return np.asarray(nibbles[..., 0::2] | nibbles[..., 1::2] << 4, np.uint8)


def round_to(values: F64, dtype: str) -> Array:
    """Rounds float64 once to an output type.

    "bfloat16" gives float32 holding bfloat16 values, since NumPy has no such type; "float16", "float32" and
    "float64" give arrays of that dtype.
    """
    if dtype == "bfloat16":
        return decode(encode(values, dtype), dtype)
    if dtype not in ("float16", "float32", "float64"):
        raise ValueError(f"dtype: expected bfloat16, float16, float32 or float64, got {dtype!r}")
    with np.errstate(over="ignore"):
        return values.astype(dtype)
