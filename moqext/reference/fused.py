"""Operations on activations before they are quantized, step by step in float32.

The bits are laid down, so that every processor can have the same: each operation rounds once, sums have one
order, exp is a polynomial. `as_float32` takes the inputs; results are float32 holding values of `dtype`.
"""

import numpy as np
from numpy.typing import ArrayLike

from moqext.reference.numbers import F32, F64, Array, as_float32, round_to

EXP2 = [np.float32(float.fromhex(c)) for c in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5")]
EXP2 += [np.float32(float.fromhex(c)) for c in ("0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0")]
"""Coefficients of 2^f = 1 + C1 f + ... + C5 f^5 on [-1/2, 1/2], relative error 1.1e-7; C5 first."""

MINUS_LOG2E = np.float32(float.fromhex("-0x1.715476p+0"))


def _to_odd(a: F64, b: F64) -> F64:
    """Sum in float64, the last bit set where it is not exact: rounding it again is rounding once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = total.view(np.int64) & 1 == 0
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & even, (total.view(np.int64) + towards).view(np.float64), total)


def fma(a: F32, b: np.float32 | F32, c: np.float32 | F32) -> F32:
    """`a * b + c`, rounded once: the product of two float32 is exact in float64."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return _to_odd(product, np.broadcast_to(np.asarray(c, np.float64), product.shape)).astype(np.float32)


def _round(values: F32, dtype: str) -> F32:
    return np.asarray(round_to(values.astype(np.float64), dtype), np.float32)


def _silu(gate: F32) -> F32:
    """`gate / (1 + exp(-gate))` with exp as a polynomial; below -80 it is what it is there."""
    g = np.maximum(gate, np.float32(-80))  # NaN stays
    h = np.minimum(g, np.float32(20))  # 1 + exp(-20) is 1
    h = np.where(np.isnan(h), np.float32(0), h)
    n = np.rint(h.astype(np.float64) * np.float64(MINUS_LOG2E)).astype(np.float32)
    f = fma(h, MINUS_LOG2E, -n)
    p = np.broadcast_to(EXP2[0], f.shape).astype(np.float32)
    for c in EXP2[1:]:
        p = fma(p, f, c)
    e = np.ldexp(p, n.astype(np.int32))
    return np.asarray(g * (np.float32(1) / (np.float32(1) + e)), np.float32)


def silu_and_mul(x: ArrayLike, dtype: str = "bfloat16") -> F32:
    """silu(gate) * up, the gate being the first half of the last axis of x and up the second.

        g = max(gate, -80); h = min(g, 20); n = rint(h * -log2(e)); f = fma(h, -log2(e), -n);
        silu = g * (1 / (1 + 2^n * p(f))), p by Horner's rule with fma.

    silu is rounded to `dtype`, and so is the product.

    Args:
        x: [..., 2K].
        dtype: "bfloat16", "float16" or "float32".

    Returns:
        [..., K].
    """
    values = as_float32(x)
    k = values.shape[-1] // 2
    with np.errstate(all="ignore"):
        return _round(_round(_silu(values[..., :k]), dtype) * values[..., k:], dtype)


def _sum_of_squares(z: F32) -> F32:
    """Along the last axis: 8 neighbours in order by fma, such sums pairwise, sums of 16384 in order."""
    runs = np.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 16384)])
    runs = runs.reshape(*z.shape[:-1], runs.shape[-1] // 16384, 2048, 8)
    sums: F32 = np.zeros(runs.shape[:-1], np.float32)
    for run in np.moveaxis(runs, -1, 0):
        sums = fma(run, run, sums)
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    total: Array = np.zeros(z.shape[:-1], np.float32)
    for group in np.moveaxis(sums[..., 0], -1, 0):
        total = total + group
    return total


def rms_norm(
    x: ArrayLike, weight: ArrayLike, eps: float, residual: ArrayLike | None = None, dtype: str = "bfloat16"
) -> tuple[F32, F32]:
    """The RMS norm of z = x, or of z = x + residual rounded to `dtype`.

        r = 1 / sqrt(s / K + eps), s the sum of z * z in the order of `_sum_of_squares`
        v = (z * r rounded to `dtype`) * weight, rounded again

    Args:
        x: [..., K].
        weight: [K].
        eps: rounded to float32.
        residual: of the shape of x, or None.
        dtype: "bfloat16", "float16" or "float32".

    Returns:
        v and z, [..., K].
    """
    z = as_float32(x)
    with np.errstate(all="ignore"):
        if residual is not None:
            z = _round(z + as_float32(residual), dtype)
        mean = _sum_of_squares(z) / np.float32(z.shape[-1])
        r = np.float32(1) / np.sqrt(mean + np.float32(eps))
        return _round(_round(z * r[..., None], dtype) * as_float32(weight), dtype), z


def rotary_embedding(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, dtype: str = "bfloat16") -> F32:
    """Heads turned by angles: x * cos + other * sin.

    `other` is -x[d + D / 2] in the first half of a head, x[d - D / 2] in the second. Both products are
    rounded to `dtype`, and so is their sum.

    Args:
        x: [B, T, H, D].
        cos: [B, T, D] or [1, T, D].
        sin: as cos.
        dtype: "bfloat16", "float16" or "float32".

    Returns:
        [B, T, H, D].
    """
    values = as_float32(x)
    low, high = np.split(values, 2, axis=-1)
    other = np.concatenate([-high, low], axis=-1)
    angles = [as_float32(angle)[:, :, None] for angle in (cos, sin)]
    with np.errstate(all="ignore"):
        return _round(_round(values * angles[0], dtype) + _round(other * angles[1], dtype), dtype)
