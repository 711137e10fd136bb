"""Weights quantized as NVIDIA Model-Optimizer's exporter does it, bit for bit.

This is for tests and for making checkpoints: codes and scales of a genuine export follow from the original
bfloat16 weight. Degenerate weights come out as they do there, NaN codes of an all-zero tensor included.
Smoothing is not done here: for the AWQ, SVD and SmoothQuant algorithms pass W / pre_quant_scale.
"""

import numpy as np
from numpy.typing import ArrayLike

from moqext.reference.activations import power_above, quantize_mxfp8
from moqext.reference.numbers import (
    E2M1_MAX,
    E4M3_MAX,
    F32,
    NVFP4_MAX,
    Array,
    as_float32,
    decode,
    encode,
    pack_nibbles,
    round_to,
)
from moqext.reference.weights import BLOCK, NVFP4_FAMILY

E2M1_THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def quantize_weight(
    weight: ArrayLike, quant_algo: str, *, amax: float | None = None, group_size: int | None = None
) -> dict[str, Array]:
    """Tensors that the exporter writes for one linear.

    Args:
        weight: (N, K); bfloat16 values in any dtype `as_float32` takes.
        quant_algo: canonical name; the algorithms of `dequantize`.
        amax: largest magnitude of the fusion group (q, k, v; gate, up; all experts) where the exporter
            shares a scale among them: FP8 experts, one-block FP8_PB_WO, and the second-level scales.
            Default: of this weight.
        group_size: of the block formats; default 16 (NVFP4 family), 32 (MX, W4A8_NVFP4_FP8), 128 (INT4).

    Returns:
        weight, weight_scale and, where the algorithm has it, weight_scale_2; FP8 and E8M0 as uint8 carriers.

    Raises:
        ValueError: an unknown algorithm, or K no multiple of the group size.
    """
    values = as_float32(weight)
    largest = np.float32(np.abs(values).max(initial=0.0) if amax is None else amax)
    with np.errstate(divide="ignore", invalid="ignore"):
        if quant_algo == "FP8":
            return _fp8(values, largest)
        if quant_algo == "FP8_PER_CHANNEL_PER_TOKEN":
            return _fp8_channels(values)
        if quant_algo == "FP8_PB_WO":
            return _fp8_blocks(values, amax)
        if quant_algo in NVFP4_FAMILY:
            return _nvfp4(values, largest / np.float32(NVFP4_MAX), group_size or 16)
        if quant_algo == "W4A8_NVFP4_FP8":
            return _nvfp4(values, largest / np.float32(E4M3_MAX), group_size or 32)
        if quant_algo in ("MXFP4", "W4A8_MXFP4_FP8"):
            return _mxfp4(values, group_size or 32)
        if quant_algo == "MXFP8":
            return _mxfp8(values, group_size or 32)
        if quant_algo == "W4A16_AWQ":
            return _int4(values, group_size or 128)
        if quant_algo == "W4A8_AWQ":
            return {
                **_int4(values, group_size or 128),
                "weight_scale_2": _as_array(largest / np.float32(E4M3_MAX)),
            }
        if quant_algo in ("W8A8_SQ_PER_CHANNEL", "W8A16"):
            return _int8(values)
    raise ValueError(f"quant_algo: not known here, got {quant_algo!r}")


def _as_array(value: np.float32) -> F32:
    return np.asarray(value, np.float32)


def _groups(values: F32, group_size: int) -> F32:
    if values.shape[-1] % group_size:
        raise ValueError(
            f"weight: the last axis must be a multiple of {group_size}, got shape {values.shape}"
        )
    return values.reshape(*values.shape[:-1], -1, group_size)


def _e4m3(values: F32) -> Array:
    """E4M3 codes; 0 / 0 is the negative NaN on the exporter's machines."""
    return np.where(np.isnan(values), np.uint8(0xFF), encode(values, "e4m3"))


def _fp8(values: F32, amax: np.float32) -> dict[str, Array]:
    """The exporter divides in the model's dtype, so the quotient is rounded to bfloat16 first."""
    scale = _as_array(amax / np.float32(E4M3_MAX))
    return {"weight": _e4m3(round_to((values / scale).astype(np.float64), "bfloat16")), "weight_scale": scale}


def _scale_or_one(amax: F32, limit: float) -> F32:
    return np.where(amax > 0, amax / np.float32(limit), np.float32(1.0))


def _fp8_channels(values: F32) -> dict[str, Array]:
    scale = _scale_or_one(np.abs(values).max(axis=-1), E4M3_MAX)
    return {"weight": _e4m3(values / scale[:, None]), "weight_scale": scale}


def _fp8_blocks(values: F32, amax: float | None) -> dict[str, Array]:
    rows, columns = values.shape
    padded = np.pad(values, [(0, -rows % BLOCK), (0, -columns % BLOCK)])
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    if largest.size == 1:  # a scalar amax, which the exporter unifies over a fusion group
        largest = np.asarray(largest.max() if amax is None else amax, np.float32)
    scale = _scale_or_one(largest, E4M3_MAX)
    codes = _e4m3(blocks / scale).reshape(padded.shape)[:rows, :columns]
    return {"weight": codes, "weight_scale": scale}


def _nvfp4(values: F32, second: np.float32, group_size: int) -> dict[str, Array]:
    """Codes and block scales; products with `second` are rounded to float32 before the divisions."""
    groups = _groups(values, group_size)
    ratio = np.abs(groups).max(axis=-1) / (np.float32(E2M1_MAX) * second)
    ratio = np.where(ratio == 0, np.float32(1.0), np.clip(ratio, 2.0**-9, E4M3_MAX))
    block_scale = encode(np.abs(ratio), "e4m3")  # abs: of a NaN, the positive one
    quotient = groups / (decode(block_scale, "e4m3") * second)[..., None]
    signed = np.where(groups == 0, np.abs(quotient), quotient)  # by w < 0: -0 becomes +0; a NaN becomes +6
    codes = encode(signed.reshape(values.shape), "e2m1")
    return {"weight": codes, "weight_scale": block_scale, "weight_scale_2": _as_array(second)}


def _mxfp4(values: F32, group_size: int) -> dict[str, Array]:
    """Ties round toward zero; the sign bit is that of "not positive", so a zero becomes -0."""
    groups = _groups(values, group_size)
    scale = power_above(np.abs(groups).max(axis=-1), E2M1_MAX)
    quotient = np.ldexp(groups.astype(np.float64), 127 - scale.astype(np.int64)[..., None])
    index = np.searchsorted(E2M1_THRESHOLDS, np.abs(quotient), side="left")
    nibbles = (index | np.where(quotient > 0, 0, 8)).astype(np.uint8)
    return {"weight": pack_nibbles(nibbles.reshape(values.shape)), "weight_scale": scale}


def _mxfp8(values: F32, group_size: int) -> dict[str, Array]:
    codes, scale = quantize_mxfp8(_groups(values, group_size), group_size)
    return {"weight": codes.reshape(values.shape), "weight_scale": scale[..., 0]}


def _int4(values: F32, group_size: int) -> dict[str, Array]:
    """Two rows to a byte, the even one in the low nibble."""
    groups = _groups(values, group_size)
    scale = _scale_or_one(np.abs(groups).max(axis=-1), 7.0)
    nibbles = np.clip(np.rint(groups / scale[..., None]), -8, 7).reshape(values.shape).astype(np.int8) & 15
    return {"weight": (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8), "weight_scale": scale}


def _int8(values: F32) -> dict[str, Array]:
    scale = _scale_or_one(np.abs(values).max(axis=-1), 127.0)
    codes = np.clip(np.rint(values / scale[:, None]), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": scale}
