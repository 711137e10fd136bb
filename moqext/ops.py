"""The operations under the layers, on tensors of any framework: NumPy arrays and whatever speaks DLPack.

A result is made by the framework of the first tensor, or written to `out` where that is given; raw uint8 and
uint16 arrays stand for formats that the framework has no dtype for.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from moqext import _C
from moqext.activation_ops import qk_norm_rope, rms_norm, rotary_embedding, router_logits, silu_and_mul
from moqext.engine_experts import expert_alphas, expert_input_scale, shared_input_scale, swap_gate_up
from moqext.linear import Tensor, make_method
from moqext.scalars import as_tensor, as_tensors, is_number
from moqext.spelling import Compute, Device, Dtype, Scoring, device_name, dtype_name

__all__ = [
    "decode",
    "dequantize",
    "encode",
    "expert_alphas",
    "expert_input_scale",
    "linear",
    "pack_fp4",
    "pack_nvfp4",
    "prepare_experts",
    "qk_norm_rope",
    "quantize",
    "requantize_to_max",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "route",
    "router_logits",
    "shared_input_scale",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "swap_gate_up",
    "swizzle_block_scales",
    "to_device",
    "to_host",
    "unpack_fp4",
    "unpack_nvfp4",
    "unswizzle_block_scales",
]


def turn_heads(*args: Any, **kwargs: Any) -> Any:
    """The name of `qk_norm_rope` until 0.1, which the next version has no more."""
    warnings.warn(
        "moqext.ops.turn_heads is called qk_norm_rope, and the next version has no other name of it",
        DeprecationWarning,
        stacklevel=2,
    )
    return qk_norm_rope(*args, **kwargs)


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

    | scheme | codes | scales | formula |
    |---|---|---|---|
    | "fp8_tensor", scale given | [..., K] E4M3 | scale | e4m3(x * (1 / scale)) |
    | "fp8_tensor" | [..., K] E4M3 | [] | scale = amax / 448, then the same |
    | "fp8_token" | [..., K] E4M3 | [..., 1] | scale = max(amax / 448, 1 / (448 * 512)), e4m3(x / scale) |
    | "fp8_group" | [..., K] E4M3 | [..., ceil(K / g)] | scale = max(amax, 1e-10) / 448, e4m3(x / scale) |
    | "nvfp4" | [..., K / 2] uint8 | [..., K / 16] E4M3 and [] | see below |
    | "nvfp4_swizzled" | the same | [Mp, Kp] E4M3 and [] | the same, block scales of all M rows swizzled |

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
            take, a scale that is not positive and finite, one of at most 2^-128 for "fp8_tensor" (float32
            does not hold its reciprocal), or an output of another shape.
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

    | quant_algo | weight | weight_scale | weight_scale_2 |
    |---|---|---|---|
    | FP8, FP8_PER_CHANNEL_PER_TOKEN | E4M3 [N, K] | float [] or [N] | |
    | FP8_PB_WO | E4M3 [N, K] | float, one for each 128 x 128 tile | |
    | NVFP4, NVFP4_AWQ, NVFP4_SVD, W4A16_NVFP4, W4A8_NVFP4_FP8 | fp4 [N, K/2] | E4M3 [N, K/g] | float32 [] |
    | MXFP4, W4A8_MXFP4_FP8 | fp4 [N, K/2] | E8M0 [N, K/32] | |
    | MXFP8 | E4M3 [N, K] | E8M0 [N, K/32] | |
    | W4A16_AWQ, W4A8_AWQ | int4 [N/2, K], rows 2i and 2i+1 in a byte | float [N, K/g] | not used |
    | W8A8_SQ_PER_CHANNEL, W8A16 | int8 [N, K] | float [] or [N] | |

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


def swizzle_block_scales(scale: Any, *, out: Any = None) -> Any:
    """Block scales in the order of block-scaled tensor core instructions (cuBLAS: "128 x 4 tiles").

    Byte (m, k) of a matrix moves to ((m // 128) * (Kp // 4) + k // 4) * 512 + (m % 32) * 16
    + (m % 128) // 32 * 4 + k % 4, with M padded to a multiple of 128 and K to Kp, a multiple of 4, by zeros.

    Args:
        scale: [M, K], or [B, M, K] as those of experts are, of a dtype of one byte, any strides.
        out: contiguous tensor of the result's shape and dtype.

    Returns:
        `out`, or a new tensor: [Mp, Kp] or [B, Mp, Kp].

    Raises:
        TypeError: a dtype of another width.
        ValueError: another rank, or an out of another shape.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps an input.
    """
    return _C.swizzle_block_scales(scale, out=out)


def unswizzle_block_scales(swizzled: Any, shape: Sequence[int], *, out: Any = None) -> Any:
    """The inverse of `swizzle_block_scales`; the padding is dropped whatever it holds.

    Args:
        swizzled: contiguous [Mp, Kp] or [B, Mp, Kp] of a dtype of one byte.
        shape: (M, K) or (B, M, K), the shape before.
        out: contiguous tensor of that shape.

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: a dtype of another width.
        ValueError: shapes that do not belong together.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps an input.
    """
    return _C.unswizzle_block_scales(swizzled, shape, out=out)


def pack_fp4(codes: Any, *, out: Any = None) -> Any:
    """Two fp4 codes to a byte, the even column in the low nibble.

    Args:
        codes: [..., K] of uint8 or int8, K even; only the low nibbles count.
        out: contiguous uint8 [..., K / 2].

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: another dtype.
        ValueError: an odd K, or an out of another shape.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps an input.
    """
    return _C.pack_fp4(codes, out=out)


def unpack_fp4(packed: Any, *, out: Any = None) -> Any:
    """One fp4 code to a byte, 0 to 15: the inverse of `pack_fp4`.

    Args:
        packed: [..., K / 2] of float4_e2m1fn_x2, uint8 or int8.
        out: contiguous uint8 [..., K].

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: another dtype.
        ValueError: an out of another shape.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps an input.
    """
    return _C.unpack_fp4(packed, out=out)


def pack_nvfp4(weight: Any, weight_scale: Any, *, out: Any = None) -> Any:
    """NVFP4 codes and block scales in the order in which CUDA kernels read them: docs/formats.md, section 6.

    A permutation of the bits, but for scales of minus zero (0x80), which become zero. It looks at nothing
    else; kernels need scales that are neither negative nor NaN, which `LinearMethod.prepare` checks.

    Args:
        weight: [N, K / 2] or [E, N, K / 2], two codes to a byte, K a multiple of 16.
        weight_scale: [N, K / 16] or [N, K / 32], one byte each, or [E, ...] of these. Rows of both are
            contiguous, rows and experts any distance apart.
        out: contiguous uint8 [4 * ceil(N / 64), ceil(K / 64), 576], or [E, ...] of these; on a CUDA device
            its address is a multiple of 16.

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: a dtype of another width.
        ValueError: shapes that do not belong together, or an empty weight.
        BufferError: a device that cannot be used, tensors of different devices, rows with gaps, an out that
            is read-only, misaligned or overlaps an input.
    """
    return _C.pack_nvfp4(weight, weight_scale, out=out)


def unpack_nvfp4(
    packed: Any, shape: Sequence[int], group_size: int = 16, *, out: Any = None, scale_out: Any = None
) -> tuple[Any, Any]:
    """NVFP4 codes and block scales as a checkpoint has them: the inverse of `pack_nvfp4`, minus zeros apart.

    Args:
        packed: contiguous uint8 [4 * ceil(N / 64), ceil(K / 64), 576], or [E, ...] of these.
        shape: (N, K) of the layer, or (E, N, K).
        group_size: columns of a block scale, 16 or 32.
        out: contiguous [N, K / 2], or [E, N, K / 2], for the codes.
        scale_out: contiguous [N, K / group_size], or [E, ...] of these, for the scales.

    Returns:
        `out` and `scale_out`, or new tensors.

    Raises:
        TypeError: a dtype of another width.
        ValueError: shapes that do not belong together, or another group size.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps another tensor, a packed tensor on a CUDA device at no multiple of 16.
    """
    return _C.unpack_nvfp4(packed, shape, group_size, out=out, scale_out=scale_out)


def route(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring: Scoring,
    renormalize: bool = False,
    num_groups: int = 1,
    topk_groups: int | None = None,
    correction_bias: Any = None,
    routed_scaling_factor: float = 1.0,
    padding: Any = None,
    out: tuple[Tensor, Tensor] | None = None,
    stream: Any = None,
) -> tuple[Tensor, Tensor]:
    """The experts that take each token, and their weights, from the logits of a router.

    | scoring | score of logit x |
    |---|---|
    | "softmax" | exp(x) / sum of exp over all experts |
    | "topk_softmax" | exp(x) / sum of exp over the chosen experts |
    | "sigmoid" | 1 / (1 + exp(-x)) |
    | "sqrtsoftplus" | sqrt(log(1 + exp(x))) |

    A token's experts are those of the largest logits or, with a correction_bias, of the largest score + bias:
    the best first, of equals the lower index. The weight of each is its score, without the bias; divided by
    their sum with `renormalize` (zeros stay zeros); times routed_scaling_factor. With groups, experts come
    from the topk_groups best of num_groups groups of neighbours: a group counts as its best expert does or,
    with a bias, as the sum of its two best; of equals the lower index.

    | model | arguments |
    |---|---|
    | Mixtral, Qwen3-MoE (norm_topk_prob) | scoring="softmax", renormalize=True |
    | Qwen2-MoE, OLMoE | scoring="softmax" |
    | DeepSeek-V2 | scoring="softmax", num_groups=, topk_groups=, routed_scaling_factor= |
    | gpt-oss | scoring="topk_softmax" |
    | Llama-4 | scoring="sigmoid", with top_k 1 |
    | MiniMax-M2 | scoring="sigmoid", renormalize=True, correction_bias= |
    | DeepSeek-V3, Kimi-K2, GLM-4.5, Nemotron-H | as MiniMax-M2, with groups and routed_scaling_factor= |
    | DeepSeek-V4 | scoring="sqrtsoftplus", renormalize=True, correction_bias=, routed_scaling_factor= |

    Arithmetic is float32 and laid down operation by operation, exp included, so ids and weights have the bits
    of `moqext.reference.route` on every processor, with any number of threads, and on CUDA devices, where it
    is one kernel; a token's result depends on its own logits alone. Without a bias logits are compared, not
    scores, so that logits that differ are never taken for equals.

    -0 equals +0. A NaN logit (or score + bias) is less than all others, -infinity included: its expert is
    chosen only where there are no others, and has the weight NaN; the other weights are as if it were not
    there. With the softmaxes, +infinity leaves nothing to finite logits, several of them share; where every
    logit is -infinity all are equal.

    Args:
        router_logits: [..., E] of float32, bfloat16 or float16, any strides; a raw uint16 array is bfloat16.
            E is 1 to 1024.
        top_k: experts of a token: 1 to 32, and no more than there are in topk_groups groups.
        scoring: see the table.
        renormalize: divide by the sum of the chosen scores; changes nothing with "topk_softmax".
        num_groups: a divisor of E.
        topk_groups: 1 to num_groups; has to be given where that is not 1.
        correction_bias: [E] of float32, bfloat16 or float16, or None; not with "topk_softmax".
        routed_scaling_factor: positive and finite.
        padding: contiguous bool [...], or None: tokens where it holds have no experts, ids are -1.
        out: contiguous tensors (float32, int32) of the shapes of the results, apart from all others.
        stream: CUDA stream, None for the current one; must be None on the CPU.

    Returns:
        (weights float32 [..., top_k], ids int32 [..., top_k]): `out`, or new tensors of the framework of
        router_logits.

    Raises:
        TypeError: an argument of another kind or dtype.
        ValueError: a number, shape or scoring that is not accepted.
        BufferError: a device that cannot be used, other tensors that are not beside the logits, or an output
            that is read-only or overlaps another tensor.
    """
    return _C.route(
        router_logits,
        top_k,
        scoring,
        renormalize=renormalize,
        num_groups=num_groups,
        topk_groups=topk_groups,
        correction_bias=correction_bias,
        routed_scaling_factor=routed_scaling_factor,
        padding=padding,
        out=out,
        stream=stream,
    )


def to_device(x: Any, device: Device = "cuda:0") -> Any:
    """A tensor of the host copied to a CUDA device, without any framework.

    Args:
        x: contiguous tensor in host memory, of any dtype.
        device: "cuda" or "cuda:N".

    Returns:
        An object with `shape`, `dtype`, `device` and `__dlpack__`: memory of moqext's own, which every
        operation takes, whose results are of the same kind, and which `torch.from_dlpack` and its like
        share without a copy.

    Raises:
        ValueError: no such device.
        BufferError: x is not in host memory, or has gaps.
        MemoryError: not enough is free on the device.
        RuntimeError: there is no CUDA device, or this build has no CUDA.
    """
    return _C.to_device(x, device_name(device))


def to_host(x: Any) -> Any:
    """A CUDA tensor of any framework copied to a NumPy array, once the work queued before is done.

    Args:
        x: contiguous tensor on a CUDA device.

    Returns:
        A NumPy array; dtypes that NumPy has not are those of ml_dtypes if it is installed, else raw integers.

    Raises:
        BufferError: x is not on a CUDA device, or has gaps.
    """
    return _C.to_host(x)


def linear(
    x: Tensor,
    params: Mapping[str, Any],
    quant_algo: str,
    out_partitions: Sequence[int],
    *,
    group_size: int | None = None,
    compute: Compute = "exact",
    bias: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Tensor:
    """A linear layer on prepared parameters, without keeping a `LinearMethod`.

    The method is found again by its description, so a call costs little more than one of the method.

    Args:
        x: [..., in_features]; float32, float16 or bfloat16 (uint16 is taken as raw bfloat16).
        params: what `LinearMethod.prepare` returned for the same description.
        quant_algo: as for `LinearMethod`, like the next three.
        out_partitions: rows of each fused layer.
        group_size: columns that share a block scale, None for the algorithm's own.
        compute: "exact", "fp8", "fp4" or "auto".
        bias: as for `LinearMethod.__call__`, like the next two.
        out: where to write.
        stream: CUDA stream, None for the current one.

    Returns:
        `out`, or a new tensor of x's own framework.

    Raises:
        UnsupportedQuantization, ValueError, TypeError, BufferError, RuntimeError: as `LinearMethod`.
    """
    about = _C.describe_tensor(x)
    dtype = "bfloat16" if about["dtype"] == "uint16" else about["dtype"]
    if dtype not in ("bfloat16", "float16", "float32"):
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {dtype}")
    if not about["shape"]:
        raise ValueError("x: expected at least one dimension, got shape []")
    partitions = tuple(out_partitions) if isinstance(out_partitions, Iterable) else out_partitions
    method = _linear_method(
        quant_algo, about["shape"][-1], partitions, group_size, dtype, about["device"], compute
    )
    return method(x, params, bias, out, stream)


_linear_method = lru_cache(maxsize=256)(make_method)


def prepare_experts(
    params: Mapping[str, Any],
    quant_algo: str,
    in_features: int,
    out_partitions: Sequence[int],
    *,
    group_size: int | None = None,
    compute: str = "exact",
    one_input_scale: bool = False,
    out: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Weight processing of a stack of experts: all of them at once, each as `LinearMethod.prepare` does one.

    Expert e of a result is, bit by bit, what `LinearMethod(quant_algo, K, out_partitions).prepare` makes of
    expert e of `params`; scales that differ between experts, or between gate and up, stay exact.

    | tensor | shape | |
    |---|---|---|
    | weight | [E, N, K], or fp4 [E, N, K/2] | E4M3, or uint8 with two codes a byte |
    | weight_scale | FP8 [E] or [E, P], per channel [E, N], 128 x 128 [E, Nt, Kt] | float |
    | weight_scale | NVFP4 [E, N, K/g] | E4M3 |
    | weight_scale_2, input_scale | [E] or [E, P] | float |
    | pre_quant_scale | [E, K], or [K] for all experts | float |

    N is the sum of the P partitions, [2I] as [I, I] for gate and up; Nt counts blocks of each partition by
    itself. Each tensor may also be a list of one stack per partition ([E, I, K] for gate and for up). One
    value of a scale of partitions serves all experts. Experts may be any distance apart in memory; what
    belongs to one expert is laid out as for `LinearMethod`.

    Args:
        params: the tensors by name, all codes on one device; where results go.
        quant_algo: as for `LinearMethod`, like the next five.
        in_features: K.
        out_partitions: rows of the P layers fused in each expert.
        group_size: columns that share a block scale, None for the algorithm's own.
        compute: "exact", "fp8", "fp4" or "auto".
        one_input_scale: all partitions of an expert have the same `input_scale`, which is checked.
        out: tensors of an earlier call to overwrite, as for `LinearMethod.prepare`.

    Returns:
        A new dict of tensors of the weight's own framework, or `out`: those of `LinearMethod.prepared_params`
        with the experts as first dimension, contiguous. A scale of one value an expert is a vector [E].

    Raises:
        UnsupportedQuantization, ValueError, TypeError, BufferError: as `LinearMethod` and its `prepare`; what
            is wrong in one expert is named with it, "experts.3: weight_scale: ...". Nothing of `out` was
            written then.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params: expected a mapping of names to tensors, got {type(params)}")
    if params.get("weight") is None:
        raise ValueError('params: "weight" is missing')
    weight = params["weight"]
    about = _C.describe_tensor(weight[0] if isinstance(weight, (list, tuple)) and weight else weight)
    if not about["shape"] or not about["shape"][0]:
        raise ValueError(f"weight: expected experts, rows and columns, got shape {about['shape']}")
    plan = _weight_plan(
        quant_algo,
        in_features,
        tuple(out_partitions),
        group_size,
        about["device"],
        compute,
        about["shape"][0],
        one_input_scale,
    )
    return plan.prepare({name: as_tensors(value) for name, value in params.items()}, out)


# typed: in_features 64.0 is no 64, which it equals
_weight_plan = lru_cache(maxsize=256, typed=True)(_C.weight_plan)
