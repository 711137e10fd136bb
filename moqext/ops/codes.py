"""Codes and scales of tensors, and the values that they stand for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moqext import _C
from moqext.ops.scalars import as_tensor, as_tensors, is_number
from moqext.ops.spelling import Dtype, dtype_name


def encode(x: Any, format: str, out: Any = None) -> Any:
    """Codes of floating-point values, rounded to nearest even.

    E4M3, E5M2, E2M1 and E8M0 saturate to their largest finite value, infinities included; bf16 and fp16
    overflow to infinity. A NaN stays one where the format has it and becomes +6 in E2M1. Definitions: OCP
    8-bit Floating Point Specification 1.0, OCP Microscaling Formats 1.0.

    Args:
        x: tensor of any shape and strides; float32, float16 or bfloat16 (uint16 is taken as raw bfloat16).
        format: "e4m3", "e5m2", "e8m0", "e2m1", "bf16", "fp16", or the full name of the dtype. "e2m1" packs
            pairs along the last axis, the even column in the low nibble.
        out: contiguous tensor of the result's shape, of the format's dtype or a raw carrier of its width;
            must not overlap x.

    Returns:
        `out`, or a new tensor of the shape of x (its last axis halved for "e2m1").

    Raises:
        TypeError: a dtype that is not in these lists.
        ValueError: an unknown format, an odd last axis for "e2m1", or an out of another shape or with gaps.
        BufferError: memory that is not on the host, read-only (out) or shared by x and out.
    """
    return _C.encode(x, format, out)


def decode(codes: Any, format: str, out: Any = None) -> Any:
    """float32 values of codes, exactly: every value of every format is a float32.

    Args:
        codes: tensor of any shape and strides, of the format's dtype or a raw carrier of its width.
        format: as for `encode`; with "e2m1" every byte gives two values along the last axis.
        out: contiguous float32 tensor of the result's shape; must not overlap codes.

    Returns:
        `out`, or a new float32 tensor of the shape of codes (its last axis doubled for "e2m1").

    Raises:
        TypeError: codes of another width, or out not float32.
        ValueError: an unknown format, or an out of another shape or with gaps.
        BufferError: as for `encode`.
    """
    return _C.decode(codes, format, out)


def quantize(
    x: Any,
    scheme: str,
    *,
    scale: Any = None,
    group_size: int | None = None,
    out: Any = None,
    scale_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """Activations as FP8 or NVFP4 codes and scales, bit for bit as `moqext.reference` has them.

    - "fp8_tensor", scale given: codes [..., K] E4M3, e4m3(x * (1 / scale));
    - "fp8_tensor": codes [..., K] E4M3, scale [] = amax / 448, then as with a given one;
    - "fp8_token": codes [..., K] E4M3, e4m3(x / scale); scale [..., 1] = max(amax / 448, 1 / (448 * 512));
    - "fp8_group": codes [..., K] E4M3, e4m3(x / scale); scale [..., ceil(K / g)] = max(amax, 1e-10) / 448;
    - "nvfp4": codes [..., K / 2] uint8, block scales [..., K / 16] E4M3, second-level scale [];
    - "nvfp4_swizzled": as "nvfp4", with the block scales of all M rows swizzled, [Mp, Kp].

    NVFP4 has a second-level scale s, given or amax / 2688 over all of x; each group of 16 has the block scale
    b = e4m3(amax / (6 * s)), and the codes are e2m1(x / (b * s)), both products rounded to float32 first; the
    even column is in the low nibble. A block scale may be subnormal; where it is 0, so are the codes.
    "nvfp4_swizzled" has the block scales as `swizzle_block_scales` of [M, K / 16] would, padded with zeros:
    what block-scaled matrix products read.

    Arithmetic is float32, rounded to nearest even; codes saturate. A scale found over a whole tensor is 1
    where amax is 0 or too small for one (amax / 448 subnormal, amax / 2688 zero). Nothing hides a NaN: it
    makes the amax, and with it a scale found at run time and the codes under it, NaN (in NVFP4 the block
    scale, with codes of +6). An infinity makes a scale found at run time infinite and its own code NaN; under
    a given scale it saturates.

    x may be on the CPU or on a CUDA device, with the same bits for results; there, all but a `scale` given as
    a number or in host memory is on that device, the work is queued on a stream, and nothing is read back.

    Args:
        x: [..., K] of float32, float16 or bfloat16, with any strides; a raw uint16 array is bfloat16 unless
            `format` says otherwise. The last axis is what groups and tokens run along.
        scheme: "fp8_tensor", "fp8_token", "fp8_group", "nvfp4" or "nvfp4_swizzled".
        scale: "fp8_tensor" and both of NVFP4: a number or a float32 tensor of one element, positive and
            finite; None finds it from x. One on a CUDA device is used unseen: its value is not checked.
        group_size: "fp8_group": g, default 128; the last group of a row may be shorter.
        out: contiguous tensor for the codes, of their dtype or raw uint8.
        scale_out: contiguous tensor for the scales (the block scales of NVFP4), of their dtype or, where
            they have one byte, raw uint8; not where `scale` is the result.
        format: dtype of a raw x, e.g. "float16".
        stream: CUDA: a handle or an object with `__cuda_stream__`; None is the current stream of the
            framework of x.

    Returns:
        (codes, scales); (codes, block scales, second-level scale) for NVFP4. A given scale is handed back.

    Raises:
        TypeError: a dtype that is not in these lists.
        ValueError: an unknown scheme, K not divisible by 16 for NVFP4, an argument the scheme does not
            take, or an output of another shape; a scale that is not positive and finite, or is at most
            2^-128 for "fp8_tensor", as float32 does not hold its reciprocal.
        BufferError: tensors on other devices than x, a device that cannot be used, or an output that is
            read-only or overlaps another tensor.
    """
    return _C.quantize(
        x,
        scheme,
        scale=as_tensor(scale),
        group_size=group_size,
        out=out,
        scale_out=scale_out,
        format=format,
        stream=stream,
    )


def silu_and_mul_quantize(
    x: Any,
    scheme: str,
    *,
    scale: Any = None,
    out: Any = None,
    scale_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """`quantize` of silu(gate) * up, in one pass over x.

    silu(gate) is rounded to the dtype of x, and so is its product with up: the result is that of a model
    which writes both to memory, as torch and vLLM do. The arithmetic before each rounding is float32 and
    laid down operation by operation, so that the CPU and CUDA devices have the same bits: docs/formats.md.

    Args:
        x: [..., 2K], the gates in the first half of the last axis, as in a fused gate_up_proj; as for
            `quantize` otherwise.
        scheme: as for `quantize`; "fp8_group" has groups of 128.
        scale: as for `quantize`.
        out: for the codes of [..., K], as for `quantize`.
        scale_out: as for `quantize`.
        format: as for `quantize`.
        stream: as for `quantize`.

    Returns:
        As `quantize` of a tensor [..., K].

    Raises:
        TypeError: as for `quantize`.
        ValueError: as for `quantize`, and for an odd last extent of x.
        BufferError: as for `quantize`.
        MemoryError: no room for [..., K] of the dtype of x, which the CPU needs.
    """
    return _C.silu_and_mul_quantize(
        x, scheme, scale=as_tensor(scale), out=out, scale_out=scale_out, format=format, stream=stream
    )


def rms_norm_quantize(
    x: Any,
    weight: Any,
    eps: float,
    scheme: str,
    *,
    residual: Any = None,
    scale: Any = None,
    out: Any = None,
    scale_out: Any = None,
    residual_out: Any = None,
    value_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> tuple[Any, ...]:
    """`quantize` of the RMS norm of x, or of x + residual, in one pass.

        z = x, or x + residual, rounded to the dtype of x
        v = z / sqrt(mean(z * z) + eps), rounded, * weight, rounded again

    with the roundings of a model that writes each step to memory. The arithmetic between them is float32
    and laid down operation by operation, so that the CPU and CUDA devices have the same bits:
    docs/formats.md.

    Args:
        x: [..., K], as for `quantize`; on a CUDA device K is up to 2,097,152.
        weight: [K] of the dtype of x or float32, any stride.
        eps: added to the mean, finite and not negative.
        scheme: as for `quantize`; "fp8_group" has groups of 128.
        residual: of the shape and dtype of x, any strides, or None.
        scale: as for `quantize`.
        out: as for `quantize`.
        scale_out: as for `quantize`.
        residual_out: contiguous tensor for z, of the shape and dtype of x; it may be `residual` itself, and
            shares no memory with another tensor otherwise. None makes a new one.
        value_out: contiguous tensor for v as well, of the shape and dtype of x, for whoever cannot read
            codes. None: v is not written.
        format: as for `quantize`.
        stream: as for `quantize`.

    Returns:
        As `quantize` of x; with a residual, z comes after those. `value_out` is not among them.

    Raises:
        TypeError: as for `quantize`, or a weight or residual of another dtype.
        ValueError: as for `quantize`, or a weight or residual of another shape, or a bad eps.
        BufferError: as for `quantize`.
        MemoryError: no room for [..., K] of the dtype of x, which the CPU needs.
    """
    return _C.rms_norm_quantize(
        x,
        weight,
        eps,
        scheme,
        residual=residual,
        scale=as_tensor(scale),
        out=out,
        scale_out=scale_out,
        residual_out=residual_out,
        value_out=value_out,
        format=format,
        stream=stream,
    )


def dequantize(
    weight: Any,
    quant_algo: str,
    *,
    weight_scale: Any = None,
    weight_scale_2: Any = None,
    group_size: int | None = None,
    dtype: Dtype = "float32",
    out: Any = None,
) -> Any:
    """The weight that stored codes and scales stand for: the exact product, rounded once to `dtype`.

    - FP8, FP8_PER_CHANNEL_PER_TOKEN: weight E4M3 [N, K], weight_scale float [] or [N];
    - FP8_PB_WO: weight E4M3 [N, K], weight_scale float, one for each 128 x 128 tile;
    - NVFP4, NVFP4_AWQ, NVFP4_SVD, W4A16_NVFP4, W4A8_NVFP4_FP8: weight fp4 [N, K/2], weight_scale E4M3
      [N, K/g], weight_scale_2 float32 [];
    - MXFP4, W4A8_MXFP4_FP8: weight fp4 [N, K/2], weight_scale E8M0 [N, K/32];
    - MXFP8: weight E4M3 [N, K], weight_scale E8M0 [N, K/32];
    - W4A16_AWQ, W4A8_AWQ: weight int4 [N/2, K], rows 2i and 2i+1 in a byte, weight_scale float [N, K/g];
    - W8A8_SQ_PER_CHANNEL, W8A16: weight int8 [N, K], weight_scale float [] or [N].

    fp4 and int4 are uint8 with the even column (row) in the low nibble; g is 16 or 32 for fp4, any for int4.
    Scales of tiles are [Nt, 1, Kt, 1] or [Nt, Kt], Nt = ceil(N/128), Kt = ceil(K/128), or [] for one tile.
    Float scales are float32, float16 or bfloat16. One element may have any rank. E4M3 and E8M0 may be raw
    uint8, a bfloat16 scale raw uint16.

    Stacked experts have a leading E in weight and scales, and for FP8 also scales [], [E], [E, N, 1] or
    [E, 1, K] (the 1 may be left out unless N = K). Their weight_scale_2 is [], [E], or in the NVFP4 family
    [E, P] for P equal parts of the outputs, e.g. gate and up. Where weight and weight_scale agree in their
    last extent, groups and fp4 pairs run along the axis before it: NVFP4 [E, K/2, N] with [E, K/16, N].

    A scale of 0 makes the weight under it 0 whatever its codes: exporters write NaN codes there. The result
    is the stored weight; pre_quant_scale and low-rank parts are not applied. Formulas: docs/formats.md.

    Args:
        weight: codes as stored, any strides.
        quant_algo: its name, in any spelling a configuration may have.
        weight_scale: scales as stored; a number stands for one float32 element.
        weight_scale_2: second-level scale, where the format has one; a number stands for one float32 element.
        group_size: checked against the shapes; for FP8_PB_WO the edge of a tile (default 128).
        dtype: "float32", "bfloat16" or "float16".
        out: contiguous tensor of the result's shape and dtype (or raw uint16).

    Returns:
        `out`, or a new tensor: [N, K], or with the axes of a stacked weight, the packed one doubled.

    Raises:
        UnsupportedQuantization: an algorithm that is not in the table.
        TypeError: a dtype that is not in the table.
        ValueError: a scale that is missing or not part of the format, or shapes that do not fit.
        BufferError: memory that is not on the host, or an `out` that is read-only or overlaps an input.
    """
    return _C.dequantize(
        weight,
        quant_algo,
        weight_scale=as_tensor(weight_scale),
        weight_scale_2=as_tensor(weight_scale_2),
        group_size=group_size,
        dtype=dtype_name(dtype),
        out=out,
    )


def requantize_to_max(
    weight: Any, weight_scale: Any, partitions: Sequence[int], *, out: Any = None
) -> tuple[Any, Any]:
    """One scale for a fused FP8 weight: every part moved to the largest, as vLLM does when it loads one.

    code' = e4m3(fp16(code * scale) * (1 / max(weight_scale))), the product with a float32 scale rounded to
    float16 as on vLLM's CPU path, everything else float32. This loses precision (`LinearMethod` and
    `MoEMethod` keep the scales apart and do not); it is here to reproduce those weights exactly. Equal scales
    change nothing. Unlike there, a part whose scale is 0 becomes zeros even if its codes are NaN.

    A stack of experts has the largest scale of each, of gate and up ([I, I]). As in vLLM every expert passes
    through float16, though its scales are equal, which changes codes under a scale below about 2^-15 or above
    146; only experts of one part, which are not gated, stay as they are.

    Args:
        weight: [N, K] or [E, N, K], E4M3 or raw uint8, any strides, on the host or a CUDA device.
        weight_scale: float32 [P], finite and not negative, or a list of P numbers; or one element, which
            changes nothing. For a stack [E, P], or [E] where P is 1. On the weight's device or the host; from
            a device it is read back, so not in a capture.
        partitions: P row counts that sum to N; 0 is allowed.
        out: contiguous E4M3 or raw uint8 of the shape of the weight, apart from the inputs.

    Returns:
        (codes of the weight's shape, largest scale float32 [], or [E] for a stack).

    Raises:
        TypeError: a wrong dtype.
        ValueError: counts that do not sum to N, scales of another shape, negative or not finite, or unequal
            ones of at most 2^-128, whose reciprocal float32 does not hold; of a stack the expert is named.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps an input.
    """
    if isinstance(weight_scale, (list, tuple)) and all(map(is_number, weight_scale)):
        weight_scale = np.array(as_tensors(weight_scale), np.float32)
    return _C.requantize_to_max(weight, as_tensor(weight_scale), partitions, out=out)
