"""Activations quantized at run time, every operation in float32 unless said otherwise.

Common to all: x is any array `as_float32` takes, groups run along its last axis, "amax" is the largest
magnitude. Codes round to nearest even and saturate; zeros keep their sign. Nothing hides a NaN: it makes
amax, and so a scale found at run time and every code under it, NaN (+6 in NVFP4, whose block scale is the
NaN then); under a given FP8 scale its own code is one. An infinity makes a scale found at run time
infinite: its finite neighbours get code 0, itself NaN; under a given scale it saturates, and so does the
NVFP4 block scale over it. The sign of a NaN code is left open.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moqext.reference.numbers import (
    E2M1_MAX,
    E4M3_MAX,
    F32,
    F64,
    NVFP4_MAX,
    Array,
    as_float32,
    decode,
    encode,
)
from moqext.reference.weights import scalar

INT8_MAX = 127.0
# Smallest dynamic scale per token, as vLLM's kernels have it; it keeps a row of zeros from dividing by zero.
TOKEN_SCALE_FLOOR = np.float32(1.0 / (448.0 * 512.0))
# Smallest amax of a 1 x 128 group, as vLLM's kernels have it; zeros keep a scale above zero.
GROUP_AMAX_FLOOR = np.float32(1e-10)
# An `input_scale` is greater: float32 does not hold the reciprocal of this one, 2^128.
DIVISOR_ABOVE = np.float32(2.0**-128)


def _amax(x: F32) -> F32:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(x).max(axis=-1, initial=0.0), np.float32)


def quantize_fp8_static(x: ArrayLike, scale: ArrayLike) -> Array:
    """E4M3 codes with a given scale per tensor: e4m3(x * (1 / scale)), the reciprocal rounded first.

    Args:
        x: [..., K].
        scale: `input_scale`, one element, positive and finite, and above 2^-128, whose reciprocal float32
            does not hold.

    Returns:
        uint8 codes of the shape of x.

    Raises:
        ValueError: a scale that is zero, negative, not finite, or too small.
    """
    divisor = _positive(scale, "scale")
    if divisor <= DIVISOR_ABOVE:
        raise ValueError(f"scale: its reciprocal must be a float32, got {divisor}")
    return _times_reciprocal(as_float32(x), divisor)


def _positive(value: ArrayLike, name: str) -> np.float32:
    number = scalar(value, name)
    if not (number > 0 and np.isfinite(number)):
        raise ValueError(f"{name}: must be positive and finite, got {number}")
    return number


def _times_reciprocal(x: F32, scale: np.float32) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return encode(x * (np.float32(1.0) / scale), "e4m3")


def _divided(x: F32, scale: F32) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return encode(x / scale, "e4m3")


def quantize_fp8_tensor(x: ArrayLike) -> tuple[Array, np.float32]:
    """E4M3 codes with one scale found at run time: scale = amax / 448, code = e4m3(x * (1 / scale)).

    Where that is below the normal float32 numbers (no element, zeros, or next to it), so that its reciprocal
    could overflow, the scale is 1.

    Returns:
        uint8 codes of the shape of x, and the scale.
    """
    values = as_float32(x)
    scale = np.float32(_amax(values.reshape(-1))) / np.float32(E4M3_MAX)
    if scale < np.finfo(np.float32).tiny:
        scale = np.float32(1.0)
    return _times_reciprocal(values, scale), scale


def quantize_fp8_token(x: ArrayLike) -> tuple[Array, F32]:
    """E4M3 codes with one scale per token: scale = max(amax / 448, 1 / (448 * 512)), code = e4m3(x / scale).

    A true division, unlike the scales per tensor. A token of zeros gets the smallest scale and codes 0.

    Returns:
        uint8 codes of the shape of x, and float32 scales of shape x.shape[:-1].
    """
    values = as_float32(x)
    scale: F32 = np.maximum(_amax(values) / np.float32(E4M3_MAX), TOKEN_SCALE_FLOOR)
    return _divided(values, scale[..., None]), scale


def quantize_fp8_group(x: ArrayLike, group_size: int = 128) -> tuple[Array, F32]:
    """E4M3 codes with one scale per token and group: scale = max(amax, 1e-10) / 448, code = e4m3(x / scale).

    The last group of a row may be shorter.

    Returns:
        uint8 codes of the shape of x, and float32 scales of shape (*x.shape[:-1], ceil(K / group_size)).
    """
    values = as_float32(x)
    columns = values.shape[-1]
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -columns % group_size)])
    groups = padded.reshape(*values.shape[:-1], padded.shape[-1] // group_size, group_size)
    amax: F32 = np.maximum(_amax(groups), GROUP_AMAX_FLOOR)
    scale: F32 = amax / np.float32(E4M3_MAX)
    return _divided(values, scale.repeat(group_size, axis=-1)[..., :columns]), scale


def quantize_int8_static(x: ArrayLike, scale: ArrayLike) -> F32:
    """Int8 codes with a given scale: x * (1 / scale) to the nearest even of -128 to 127, as float32.

    The reciprocal is rounded first. A NaN stays, which no int8 code could.

    Args:
        x: [..., K].
        scale: `input_scale`, as for `quantize_fp8_static`.

    Raises:
        ValueError: a scale that is zero, negative, not finite, or too small.
    """
    divisor = _positive(scale, "scale")
    if divisor <= DIVISOR_ABOVE:
        raise ValueError(f"scale: its reciprocal must be a float32, got {divisor}")
    return _rounded_int8(as_float32(x), divisor)


def quantize_int8_token(x: ArrayLike) -> tuple[F32, F32]:
    """Int8 codes with one scale per token: amax / 127, or 1 where that is below the normal float32 numbers.

    Returns:
        codes as float32, of the shape of x and rounded as by `quantize_int8_static`, and float32 scales of
        shape x.shape[:-1].
    """
    values = as_float32(x)
    scale: F32 = _amax(values) / np.float32(INT8_MAX)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1.0), scale)
    return _rounded_int8(values, scale[..., None]), scale


def _rounded_int8(x: F32, scale: F32 | np.float32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = x * (np.float32(1.0) / scale)
        return np.clip(np.rint(quotient), np.float32(-128.0), np.float32(127.0)).astype(np.float32)


def quantize_mxfp8(x: ArrayLike, group_size: int = 32) -> tuple[Array, Array]:
    """E4M3 codes with a power of two per token and group, the least that keeps amax within 448.

        scale = 2^ceil(log2(amax_of_group / 448)), from 2^-127 to 2^127; 2^-127 for a group of zeros
        code  = e4m3(x / scale)

    Every division is exact. It is what the exporter calibrates MXFP8 for, and how it stores weights.

    Args:
        x: [..., K], K a multiple of the group size.
        group_size: values to a scale.

    Returns:
        uint8 codes of the shape of x, and E8M0 codes of scales, uint8 [..., K / group_size].

    Raises:
        ValueError: K is no multiple of the group size.
    """
    values = as_float32(x)
    if values.shape[-1] % group_size:
        raise ValueError(f"x: the last axis must be a multiple of {group_size}, got shape {values.shape}")
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // group_size, group_size)
    scale = power_above(_amax(groups), E4M3_MAX)
    quotient = np.ldexp(groups.astype(np.float64), 127 - scale.astype(np.int64)[..., None])
    return encode(quotient.reshape(values.shape), "e4m3"), scale


def power_above(amax: F32, limit: float) -> Array:
    """E8M0 code of the smallest power of two that brings amax to the limit; 0 for a group of zeros."""
    fraction, exponent = np.frexp(amax.astype(np.float64) / limit)
    return np.where(amax > 0, np.clip(exponent - (fraction == 0.5) + 127, 0, 254), 0).astype(np.uint8)


class NVFP4Activation(NamedTuple):
    """Codes (uint8 pairs, [..., K / 2]), E4M3 block scales (uint8, [..., K / 16]) and second-level scale."""

    codes: Array
    block_scale: Array
    input_scale: np.float32

    def dequantize(self) -> F64:
        """[..., K]: e2m1 * block scale * input_scale, exact."""
        values = decode(self.codes, "e2m1").astype(np.float64)
        scales = decode(self.block_scale, "e4m3")
        group = values.shape[-1] // max(scales.shape[-1], 1)
        return values * scales.repeat(group, axis=-1) * np.float64(self.input_scale)


def quantize_nvfp4(
    x: ArrayLike, input_scale: ArrayLike | None = None, group_size: int = 16
) -> NVFP4Activation:
    """NVFP4: per group of 16 an E4M3 block scale under one second-level scale.

        block_scale = e4m3(amax_of_group / (6 * input_scale))
        code        = e2m1(x / (block_scale * input_scale))

    with both products rounded to float32 before the divisions. The block scale is not floored: it may be an
    E4M3 subnormal, and where it, or its product, rounds to 0 all codes of the group are 0.

    Args:
        x: [..., K], K a multiple of the group size.
        input_scale: one element, positive and finite; None takes the amax of all of x / 2688, or 1 where
            that is 0.
        group_size: values to a block scale.

    Raises:
        ValueError: K is no multiple of the group size, or a bad input_scale.
    """
    values = as_float32(x)
    columns = values.shape[-1]
    if columns % group_size:
        raise ValueError(f"x: the last axis must be a multiple of {group_size}, got shape {values.shape}")
    if input_scale is None:
        second = np.float32(_amax(values.reshape(-1))) / np.float32(NVFP4_MAX)
        second = np.float32(1.0) if second == 0 else second
    else:
        second = _positive(input_scale, "input_scale")
    groups = values.reshape(*values.shape[:-1], columns // group_size, group_size)
    with np.errstate(all="ignore"):
        block_scale = encode(_amax(groups) / (np.float32(E2M1_MAX) * second), "e4m3")
        step = (decode(block_scale, "e4m3") * second)[..., None]
        scaled = np.where(step == 0, np.float32(0.0), groups / step)
    return NVFP4Activation(encode(scaled.reshape(values.shape), "e2m1"), block_scale, second)
