"""The meaning of the stored tensors of a linear, or of a stack of experts.

`dequantize` gives the stored weight: codes times scales, in the shape and order of axes of the file.
`dequantize(..., effective=True)` gives the weight that acts on the layer's own input, which differs
where the algorithm smooths (pre_quant_scale) or splits off a low-rank part (lora_a, lora_b):

    effective = (stored + lora_b @ lora_a) * pre_quant_scale        y = effective @ x + bias

The formulas of NVIDIA Model-Optimizer's exports; docs/formats.md lists them format by format.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from moqext.reference.numbers import F32, F64, Array, as_float32, decode, encode, raw

Params = Mapping[str, Array]
NVFP4_FAMILY = ("NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4")
MXFP4_FAMILY = ("MXFP4", "W4A8_MXFP4_FP8")
BLOCK = 128


def tensor(params: Params, role: str) -> Array:
    """A tensor that must be there; `weight_scale_inv` is another name of `weight_scale` (and multiplies)."""
    if role == "weight_scale" and role not in params and "weight_scale_inv" in params:
        return params["weight_scale_inv"]
    if role not in params:
        raise ValueError(f"params: {role} is missing, got {', '.join(sorted(params)) or 'nothing'}")
    return params[role]


def scalar(value: ArrayLike, role: str) -> np.float32:
    """The one element of a tensor of any rank."""
    flat = as_float32(value).reshape(-1)
    if flat.size != 1:
        raise ValueError(f"{role}: expected one element, got shape {np.shape(value)}")
    return np.float32(flat[0])


def scaled(values: Array, *scales: Array) -> F64:
    """The exact product, except that a scale of zero means a weight of zero, whatever the codes are.

    The exporter divides by the scale of an all-zero tensor, so such a file has NaN codes or NaN block scales.
    """
    zero = np.zeros((), bool)
    product = values.astype(np.float64)
    for scale in scales:
        zero = zero | (scale == 0)
        product = product * scale
    return np.where(zero, 0.0, product)


def _wrong_shape(
    scale: Array, weight_shape: tuple[int, ...], expected: str, role: str = "weight_scale"
) -> ValueError:
    return ValueError(
        f"{role}: expected {expected} for a weight of shape {weight_shape}, got shape {scale.shape}"
    )


def _channel_scale(scale: Array, shape: tuple[int, ...]) -> Array:
    """Shapes a scale per tensor, per row or, for stacked experts, per expert or channel to broadcast."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.shape == shape[:1]:
        return scale.reshape(-1, *[1] * (len(shape) - 1))
    if len(shape) == 3 and scale.size == scale.shape[0] == shape[0]:
        return scale.reshape(-1, 1, 1)
    if len(shape) == 3 and scale.ndim == 3:
        if all(have in (1, want) for have, want in zip(scale.shape, shape, strict=True)):
            return scale
    elif len(shape) == 3 and scale.ndim == 2 and shape[1] != shape[2]:
        if scale.shape == (shape[0], shape[1]):
            return scale[:, :, None]
        if scale.shape == (shape[0], shape[2]):
            return scale[:, None, :]
    raise _wrong_shape(scale, shape, "one element, one per row, or one per expert (and channel)")


def _fp8(params: Params, group_size: int | None) -> F64:
    codes = decode(tensor(params, "weight"), "e4m3")
    scale = as_float32(tensor(params, "weight_scale"))
    return scaled(codes, _channel_scale(scale, codes.shape))


def _fp8_blocks(params: Params, group_size: int | None) -> F64:
    """128 x 128 blocks, the last of each axis cut off by the edge; ranks 0, 2 and 4 all occur in files.

    Scales of one byte are powers of two, as DeepSeek-V4 has them. Exporters scale the transpose of stacked
    experts; with one block one way that is only another shape.
    """
    codes = decode(tensor(params, "weight"), "e4m3")
    scale = tensor(params, "weight_scale")
    scale = decode(scale, "e8m0") if scale.dtype.itemsize == 1 else as_float32(scale)
    edge = group_size or BLOCK
    *experts, rows, columns = codes.shape
    grid = (*experts, -(-rows // edge), -(-columns // edge))
    shapes: list[tuple[int, ...]] = [grid, (*experts, grid[-2], 1, grid[-1], 1)]
    if experts and 1 in grid[-2:]:
        shapes.append((*experts, grid[-1], 1, grid[-2], 1))
    if scale.shape not in shapes and not (scale.size == 1 == np.prod(grid)):
        raise _wrong_shape(
            scale, codes.shape, f"shape {grid} (or with an axis of 1 after each of the last two)"
        )
    blocks = scale.reshape(grid).repeat(edge, axis=-2).repeat(edge, axis=-1)
    return scaled(codes, blocks[..., :rows, :columns])


def _along(codes: Array, scale: Array, format: str, group_size: int | None, role: str) -> tuple[F32, Array]:
    """Decodes codes with one block scale per group and repeats the scales to match.

    The groups run along the last axis, except in stacked experts whose weight and scale agree in their last
    extent: there they run along the one before it, and 4-bit pairs are packed along it as well.
    """
    before_last = codes.ndim == 3 and scale.ndim == 3 and codes.shape[-1] == scale.shape[-1]
    if before_last:
        codes, scale = codes.swapaxes(-1, -2), scale.swapaxes(-1, -2)
    values = decode(codes, format)
    shape = values.shape
    group = shape[-1] // scale.shape[-1] if scale.ndim == values.ndim and scale.shape[-1] else 0
    matches = scale.shape[:-1] == shape[:-1] and group * scale.shape[-1] == shape[-1]
    if not matches or (group_size is not None and group != group_size and shape[-1]):
        size = "any size" if group_size is None else f"{group_size} values"
        raise _wrong_shape(scale, shape, f"one scale per group of {size} along the input", role)
    scales = scale.repeat(group, axis=-1)
    return (values.swapaxes(-1, -2), scales.swapaxes(-1, -2)) if before_last else (values, scales)


def _nvfp4(params: Params, group_size: int | None) -> F64:
    scale = decode(tensor(params, "weight_scale"), "e4m3")
    values, blocks = _along(raw(tensor(params, "weight")), scale, "e2m1", group_size, "weight_scale")
    second = as_float32(tensor(params, "weight_scale_2"))
    if second.size == 1:
        second = second.reshape(())
    elif values.ndim == 3 and second.size == second.shape[0] == values.shape[0]:
        second = second.reshape(-1, 1, 1)
    else:
        raise _wrong_shape(second, values.shape, "one element, or one per expert", "weight_scale_2")
    return scaled(values, blocks, second)


def _mx(format: str) -> Callable[[Params, int | None], F64]:
    def dequantize_mx(params: Params, group_size: int | None) -> F64:
        scale = decode(tensor(params, "weight_scale"), "e8m0")
        return np.multiply(
            *_along(raw(tensor(params, "weight")), scale, format, group_size, "weight_scale"),
            dtype=np.float64,
        )

    return dequantize_mx


def _int4(params: Params, group_size: int | None) -> F64:
    """Packed along the output: byte [i, k] holds row 2i in its low nibble; two's complement."""
    packed = raw(tensor(params, "weight"))
    nibbles = np.stack([packed & 15, packed >> 4], axis=-2).reshape(-1, packed.shape[-1])
    values = (nibbles ^ 8).astype(np.int8) - np.int8(8)
    scale = as_float32(tensor(params, "weight_scale"))
    rows, columns = values.shape
    groups = scale.shape[-1] if scale.ndim == 2 else 0
    group = columns // groups if groups else 0
    if scale.shape != (rows, groups) or group * groups != columns or group != (group_size or group):
        raise _wrong_shape(scale, values.shape, "one scale per row and group of columns")
    return scaled(values, scale.repeat(group, axis=-1))


def _int8(params: Params, group_size: int | None) -> F64:
    values = tensor(params, "weight").view(np.int8)
    return scaled(values, _channel_scale(as_float32(tensor(params, "weight_scale")), values.shape))


DEQUANTIZERS: dict[str, Callable[[Params, int | None], F64]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8,
    "FP8_PB_WO": _fp8_blocks,
    **dict.fromkeys((*NVFP4_FAMILY, "W4A8_NVFP4_FP8"), _nvfp4),
    **dict.fromkeys(MXFP4_FAMILY, _mx("e2m1")),
    "MXFP8": _mx("e4m3"),
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _int4,
    "W8A8_SQ_PER_CHANNEL": _int8,
    "W8A16": _int8,
}


def weight64(
    params: Params, quant_algo: str, *, effective: bool = False, group_size: int | None = None
) -> F64:
    """The weight in float64, which `dequantize` rounds once."""
    if quant_algo not in DEQUANTIZERS:
        raise ValueError(f"quant_algo: expected one of {', '.join(DEQUANTIZERS)}, got {quant_algo!r}")
    weight = DEQUANTIZERS[quant_algo](params, group_size)
    if effective and weight.ndim != 2 and not params.keys().isdisjoint(("lora_a", "pre_quant_scale")):
        raise ValueError(f"effective: a smoothed weight must have two axes, got shape {weight.shape}")
    if effective and "lora_a" in params:
        low_rank = [as_float32(tensor(params, role)).astype(np.float64) for role in ("lora_b", "lora_a")]
        weight = weight + low_rank[0] @ low_rank[1]
    if effective and "pre_quant_scale" in params:
        weight = weight * as_float32(params["pre_quant_scale"])
    return weight


def dequantize(
    params: Params, quant_algo: str, *, effective: bool = False, group_size: int | None = None
) -> F32:
    """The weight that the tensors of one linear, or of one stack of experts, stand for.

    Args:
        params: tensors by role: weight, weight_scale, and where the algorithm has them weight_scale_2,
            pre_quant_scale, lora_a, lora_b; others are ignored. Codes may be unsigned carriers.
        quant_algo: canonical name, e.g. "NVFP4".
        effective: False gives the stored weight, i.e. codes times scales; True gives the one that acts on the
            layer's input: (stored + lora_b @ lora_a) * pre_quant_scale. weight_scale_2 of W4A8_AWQ is in
            neither: it is the scale with which that format casts the dequantized weight to FP8.
        group_size: checked against the shapes where given; the block edge for FP8_PB_WO (default 128).

    Returns:
        float32 (N, K): the exact product of code and scales, rounded once. Stacked experts keep the axes of
        the file: (E, in, out) as transformers stores them, (E, out, in) where the file has the output first.
        Where a scale is zero so is the weight, though its codes or block scales are NaN in such files.

    Raises:
        ValueError: an unknown algorithm, a missing tensor, or a scale whose shape does not fit the weight.
    """
    weight = weight64(params, quant_algo, effective=effective, group_size=group_size)
    with np.errstate(over="ignore"):
        return weight.astype(np.float32)


def fold_mxfp8(params: Params) -> tuple[Array, F64]:
    """MXFP8's powers of two folded into E4M3 codes, as `linear(..., compute="fp8")` uses them.

    With v = e4m3 * 2^(weight_scale - 127), row factors and codes are those of `fold_nvfp4`. Only codes that
    become subnormal are rounded.

    Returns:
        uint8 E4M3 codes (N, K) and float64 factors (N,): weight = code * factor[:, None].
    """
    return _fold(weight64(params, "MXFP8"))


def fold_nvfp4(params: Params) -> tuple[Array, F32]:
    """NVFP4 block scales folded into E4M3 codes, as `linear(..., compute="fp8")` uses them.

    With v = e2m1 * weight_scale (exact in float32), each row r gets the power of two
    factor[r] = 2^ceil(log2(max|v[r]| / 448)), or 1 for a row of zeros, and code = e4m3(v / factor).

    Returns:
        uint8 E4M3 codes (N, K) and float32 factors (N,): weight = code * factor[:, None] * weight_scale_2.
    """
    scale = decode(tensor(params, "weight_scale"), "e4m3")
    values = np.multiply(
        *_along(raw(tensor(params, "weight")), scale, "e2m1", None, "weight_scale"), dtype=np.float64
    )
    codes, factor = _fold(values)
    return codes, factor.astype(np.float32)


def fold_mxfp4(params: Params) -> tuple[Array, F64]:
    """MXFP4 block scales folded into E4M3 codes, as `linear(..., compute="fp8")` uses them.

    With v = e2m1 * 2^(weight_scale - 127), codes and factors are made as in `fold_nvfp4`. Of a row whose
    exponents differ by at most 14 every code is exact.

    Returns:
        uint8 E4M3 codes (N, K) and float64 factors (N,): weight = code * factor[:, None].
    """
    return _fold(DEQUANTIZERS["MXFP4"](params, None))


def _fold(values: F64) -> tuple[Array, F64]:
    fraction, exponent = np.frexp(np.abs(values).max(axis=-1, initial=0.0) / 448.0)
    factor = np.where(fraction > 0, np.ldexp(1.0, exponent - (fraction == 0.5)), 1.0)
    return encode(values / factor[:, None], "e4m3"), factor
