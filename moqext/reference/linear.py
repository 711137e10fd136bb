"""A linear layer in float64: what every kernel is compared with."""

import numpy as np
from numpy.typing import ArrayLike

from moqext.reference.activations import (
    NVFP4Activation,
    quantize_fp8_group,
    quantize_fp8_static,
    quantize_fp8_tensor,
    quantize_fp8_token,
    quantize_int8_static,
    quantize_int8_token,
    quantize_mxfp8,
    quantize_nvfp4,
)
from moqext.reference.numbers import F32, F64, Array, as_float32, decode, plain_array, round_to
from moqext.reference.weights import (
    BLOCK,
    MXFP4_FAMILY,
    NVFP4_FAMILY,
    Params,
    fold_mxfp4,
    fold_mxfp8,
    fold_nvfp4,
    scalar,
    tensor,
    weight64,
)

# How compute="exact" treats the activations of each algorithm.
EXACT = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "token",
    "FP8_PB_WO": "group",
    **dict.fromkeys(NVFP4_FAMILY, "untouched"),
    "W4A8_NVFP4_FP8": "tensor",
    "W4A8_MXFP4_FP8": "tensor",
    "MXFP4": "untouched",
    "MXFP8": "untouched",
    "W4A16_AWQ": "untouched",
    "W4A8_AWQ": "tensor",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A16": "untouched",
}
BY_TOKEN = ("W4A8_MXFP4_FP8", "W8A8_SQ_PER_CHANNEL")
"""Algorithms that quantize x by token where there is no input_scale."""
FOLDED = (*NVFP4_FAMILY, "W4A8_NVFP4_FP8", *MXFP4_FAMILY, "MXFP8")
"""Algorithms with compute="fp8"."""
MX_ACTIVATIONS = ("MXFP4", "MXFP8")
"""Algorithms with compute="mxfp8", which no kernel has."""
COMPUTES = {"exact": tuple(EXACT), "fp8": FOLDED, "fp4": NVFP4_FAMILY, "mxfp8": MX_ACTIVATIONS}


def linear(
    x: ArrayLike,
    params: Params,
    quant_algo: str,
    *,
    compute: str = "exact",
    bias: ArrayLike | None = None,
    group_size: int | None = None,
    x_dtype: str | None = None,
    out_dtype: str = "bfloat16",
) -> Array:
    """The layer x @ W.T + bias in float64, with quantized activations, rounded once at the end.

    `compute="exact"` leaves the weight as the file has it and treats x so:

    - FP8 (and W4A8_NVFP4_FP8, W4A8_AWQ): E4M3 per tensor, with input_scale where the file has one, else with
      a scale found at run time (`quantize_fp8_static`, `quantize_fp8_tensor`);
    - W4A8_MXFP4_FP8: E4M3 under input_scale where the file has one, else per token;
    - FP8_PER_CHANNEL_PER_TOKEN: E4M3 per token; FP8_PB_WO: E4M3 per token and group of 128;
    - W8A8_SQ_PER_CHANNEL: int8 under input_scale where the file has one, else per token;
    - NVFP4, NVFP4_AWQ, NVFP4_SVD, W4A16_NVFP4, MXFP4, MXFP8, W4A16_AWQ, W8A16: untouched.

    For the NVFP4 family there are two more. `compute="fp4"` (W4A4) quantizes x with `quantize_nvfp4` under
    input_scale, or where that is missing under a scale found from all of x. `compute="fp8"` quantizes x per
    token and folds the block scales into E4M3 weights (`fold_nvfp4`), which is no longer exact. So it does
    for MXFP4 and MXFP8 (`fold_mxfp4`, `fold_mxfp8`) and, with x as "exact" has it, for W4A8_NVFP4_FP8 and
    W4A8_MXFP4_FP8.

    `compute="mxfp8"` leaves the weight of MXFP4 and MXFP8 as it is, and quantizes x with `quantize_mxfp8`, as
    MXFP8 was calibrated. It is there to compare with; no kernel has it.

    pre_quant_scale multiplies x before it is quantized; the product is rounded to float32 and then to the
    dtype of x. lora_a and lora_b act on the smoothed, unquantized x.

    Args:
        x: [..., K]; float32 or float16, or bfloat16 (also as float32 values or as uint16 carrier).
        params: checkpoint tensors of one linear by role, as for `dequantize`.
        quant_algo: canonical name.
        compute: "exact", "fp4", "fp8" or "mxfp8".
        bias: (N,); default params["bias"] where there is one.
        group_size: as for `dequantize`.
        x_dtype: what x is, where it is an array of float32 that holds "bfloat16" or "float16" values.
        out_dtype: "bfloat16" (returned as float32 that holds bfloat16 values), "float16", "float32" or
            "float64".

    Returns:
        [..., N].

    Raises:
        ValueError: an algorithm or `compute` that is not in the lists above, or tensors that do not fit.
    """
    values = as_float32(x)
    columns = values.shape[-1]
    smooth = params.get("pre_quant_scale")
    if smooth is not None:
        product = (values * as_float32(smooth)).astype(np.float64)
        values = round_to(product, x_dtype or _dtype_of(x)).astype(np.float32)
    weight = multiplied_weight(params, quant_algo, compute, group_size)
    if weight.ndim != 2 or weight.shape[1] != columns:
        raise ValueError(f"x: last axis {columns} does not fit a weight of shape {weight.shape}")
    result = multiplied_activation(values, params, quant_algo, compute, group_size) @ weight.T
    if "lora_a" in params:
        down, up = (as_float32(tensor(params, role)).astype(np.float64) for role in ("lora_a", "lora_b"))
        result = result + values.astype(np.float64) @ down.T @ up.T
    offset = params.get("bias") if bias is None else bias
    if offset is not None:
        result = result + as_float32(offset)
    return round_to(result, out_dtype)


def _dtype_of(x: ArrayLike) -> str:
    name = np.asarray(x).dtype.name
    return {"uint16": "bfloat16", "float64": "float32"}.get(name, name)


def multiplied_weight(params: Params, quant_algo: str, compute: str, group_size: int | None) -> F64:
    """The weight [N, K] as it is multiplied: what codes and scales mean, or with "fp8" its folded codes."""
    if compute not in COMPUTES:
        raise ValueError(f"compute: expected {', '.join(COMPUTES)}, got {compute!r}")
    known = COMPUTES[compute]
    if compute == "exact" and quant_algo not in known:
        raise ValueError(f"quant_algo: linear knows {', '.join(known)}, got {quant_algo!r}")
    if quant_algo not in known:
        raise ValueError(f"compute: {compute} is for {', '.join(known)} only, got {quant_algo!r}")
    if compute != "fp8":
        return weight64(params, quant_algo, group_size=group_size)
    if quant_algo in (*MXFP4_FAMILY, "MXFP8"):
        codes, rows = fold_mxfp8(params) if quant_algo == "MXFP8" else fold_mxfp4(params)
        return decode(codes, "e4m3").astype(np.float64) * rows[:, None]
    second = scalar(tensor(params, "weight_scale_2"), "weight_scale_2")
    codes, factor = fold_nvfp4(params)
    if second == 0:
        return np.zeros(codes.shape)
    return decode(codes, "e4m3").astype(np.float64) * factor[:, None] * second


def treatment(quant_algo: str, compute: str, scaled: bool = True) -> str:
    """The form that activations get: "tensor", "token", "group", "nvfp4", "int8", "mxfp8", or "untouched".

    Args:
        quant_algo: canonical name.
        compute: as for `linear`.
        scaled: whether there is an input_scale.
    """
    if compute == "mxfp8":
        return "mxfp8"
    if compute == "fp4":
        return "nvfp4"
    exact = EXACT[quant_algo]
    if exact == "tensor" and quant_algo in BY_TOKEN and not scaled:
        return "token"
    return "token" if compute == "fp8" and exact == "untouched" else exact


def coded_activation(
    codes: ArrayLike, scale: ArrayLike | None, kind: str, input_scale: np.float32 | None
) -> F64:
    """The values that codes of activations stand for, exactly.

    Args:
        codes: uint8 [..., K], of NVFP4 pairs [..., K / 2].
        scale: of `treatment` "token" [..., 1], "group" [..., ceil(K / 128)], "nvfp4" uint8 [..., K / 16].
        kind: of `treatment`.
        input_scale: of "tensor" and "nvfp4".

    Raises:
        ValueError: nothing quantizes such activations, or there are scales where none belong, or none.
    """
    if kind == "untouched":
        raise ValueError("quantized_input: the layer does not quantize its activations")
    if (scale is None) != (kind == "tensor"):
        raise ValueError(f"x_scale: expected {'None' if kind == 'tensor' else 'scales of codes'}")
    stored = plain_array(codes)
    if kind == "nvfp4" and scale is not None and input_scale is not None:
        return NVFP4Activation(stored, plain_array(scale), input_scale).dequantize()
    values = decode(stored, "e4m3").astype(np.float64)
    if scale is None:
        return values * np.float64(input_scale)
    scales = as_float32(scale).astype(np.float64)
    return values * (scales if kind == "token" else scales.repeat(BLOCK, axis=-1)[..., : values.shape[-1]])


def multiplied_activation(
    x: F32, params: Params, quant_algo: str, compute: str, group_size: int | None
) -> F64:
    """The values that the quantized activations stand for, exactly."""
    kind = treatment(quant_algo, compute, "input_scale" in params)
    if kind == "nvfp4":
        return quantize_nvfp4(x, params.get("input_scale")).dequantize()
    if kind == "untouched":
        return x.astype(np.float64)
    if kind == "mxfp8":
        codes, powers = quantize_mxfp8(x, group_size or 32)
        return decode(codes, "e4m3").astype(np.float64) * np.exp2(powers.astype(np.float64) - 127).repeat(
            group_size or 32, axis=-1
        )
    if kind == "int8" and "input_scale" in params:
        given = scalar(params["input_scale"], "input_scale")
        return quantize_int8_static(x, given).astype(np.float64) * np.float64(given)
    if kind == "int8":
        rounded, rows = quantize_int8_token(x)
        return rounded.astype(np.float64) * rows[..., None].astype(np.float64)
    scale: Array
    if kind == "token":
        codes, rows = quantize_fp8_token(x)
        scale = rows[..., None]
    elif kind == "group":
        size = group_size or BLOCK
        codes, groups = quantize_fp8_group(x, size)
        scale = groups.repeat(size, axis=-1)[..., : x.shape[-1]]
    elif "input_scale" in params:
        scale = np.asarray(scalar(params["input_scale"], "input_scale"))
        codes = quantize_fp8_static(x, scale)
    else:
        codes, one = quantize_fp8_tensor(x)
        scale = np.asarray(one)
    return decode(codes, "e4m3").astype(np.float64) * scale
