"""Operations on activations between linears; `moqext.ops` has these names."""

import warnings
from typing import Any

from moqext import _C


def silu_and_mul(x: Any, *, out: Any = None, format: str | None = None, stream: Any = None) -> Any:
    """silu(gate) * up, the values that `silu_and_mul_quantize` quantizes, bit for bit.

    Args:
        x: [..., 2K], the gates in the first half of the last axis; float32, float16 or bfloat16, with any
            strides, on the CPU or a CUDA device. A raw uint16 array is bfloat16 unless `format` says
            otherwise.
        out: contiguous [..., K] of the dtype of x, apart from x.
        format: dtype of a raw x, e.g. "float16".
        stream: CUDA: as for `quantize`.

    Returns:
        `out`, or a new tensor of the framework of x.

    Raises:
        TypeError: another dtype.
        ValueError: an odd last extent of x, or an out of another shape.
        BufferError: tensors of different devices, a device that cannot be used, or an out that is read-only
            or overlaps x.
    """
    return _C.silu_and_mul(x, out=out, format=format, stream=stream)


def rms_norm(
    x: Any,
    weight: Any,
    eps: float,
    *,
    residual: Any = None,
    out: Any = None,
    residual_out: Any = None,
    format: str | None = None,
    stream: Any = None,
) -> Any:
    """The RMS norm of x, or of x + residual: the values that `rms_norm_quantize` quantizes, bit for bit.

        z = x, or x + residual, rounded to the dtype of x
        v = z / sqrt(mean(z * z) + eps), rounded, * weight, rounded again

    Args:
        x: [..., K], as for `silu_and_mul`; on a CUDA device K is up to 2,097,152.
        weight: [K] of the dtype of x or float32, any stride.
        eps: added to the mean, finite and not negative.
        residual: of the shape and dtype of x, any strides, or None.
        out: contiguous tensor for v, of the shape and dtype of x.
        residual_out: contiguous tensor for z; it may be `residual` itself, and shares no memory with another
            tensor otherwise. None makes a new one.
        format: as for `silu_and_mul`.
        stream: as for `silu_and_mul`.

    Returns:
        v; with a residual (v, z).

    Raises:
        TypeError: another dtype of x, weight or residual.
        ValueError: a weight, residual or output of another shape, or a bad eps.
        BufferError: as for `silu_and_mul`.
    """
    return _C.rms_norm(
        x,
        weight,
        eps,
        residual=residual,
        out=out,
        residual_out=residual_out,
        format=format,
        stream=stream,
    )


def rotary_embedding(x: Any, cos: Any, sin: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Heads turned by the angles of their tokens, as in Llama: x * cos + other * sin.

    `other` is -x[d + D / 2] in the first half of a head, and x[d - D / 2] in the second. Both products and
    their sum are rounded to the dtype of x, as by a model that writes each to memory; the CPU and CUDA
    devices have the same bits.

    Args:
        x: [B, T, H, D], D even; float32, float16 or bfloat16 (raw uint16), any strides: also the heads within
            the result of a fused qkv_proj.
        cos: [B, T, D] or [1, T, D] of the dtype of x, any strides.
        sin: as cos.
        out: contiguous [B, T, H, D] of the dtype of x, apart from the inputs.
        stream: as for `silu_and_mul`.

    Returns:
        `out`, or a new tensor of the framework of x.

    Raises:
        TypeError: another dtype.
        ValueError: other shapes.
        BufferError: as for `silu_and_mul`.
    """
    return _C.rotary_embedding(x, cos, sin, out=out, stream=stream)


def router_logits(x: Any, weight: Any, *, dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
    """The logits of experts, x times the rows of the weight, summed in float32 and rounded once.

    One kernel, for the few experts of a router and up to some 64 tokens, that is launched programmatically
    and has the weight on its way while its predecessor still runs. A token's sums are in the same order
    whatever stands beside it.

    Args:
        x: [T, K] of bfloat16 or float16 on a CUDA device of compute capability 9.0 or later; K is a multiple
            of 32, and rows begin at multiples of 16 bytes and have no gaps.
        weight: [E, K], of the dtype and device of x, aligned as x is.
        dtype: of the result: "float32", or that of x, which is what it has without one.
        out: as for `silu_and_mul`.
        stream: as for `silu_and_mul`.

    Returns:
        [T, E].

    Raises:
        TypeError: another dtype.
        ValueError: other shapes, gaps, or x on the CPU.
        UnsupportedQuantization: an older device.
        BufferError: as for `silu_and_mul`.
    """
    return _C.router_logits(x, weight, dtype=dtype, out=out, stream=stream)


def qk_norm_rope(
    x: Any,
    positions: Any,
    table: Any,
    q_heads: int,
    k_heads: int,
    *,
    q_weight: Any = None,
    k_weight: Any = None,
    eps: float = 0.0,
    k_cache: Any = None,
    v_cache: Any = None,
    slots: Any = None,
    stream: Any = None,
) -> Any:
    """Norms and rotates (RoPE) the heads of q and k in their place, by the positions of their tokens.

    In one kernel, with the bits of `rms_norm` of each head, where its kind has a weight, and of
    `rotary_embedding` behind it; with a cache, k and v are also stored there.

    Args:
        x: [T, at least (q_heads + k_heads) * D] of bfloat16 or float16 on a CUDA device, such as what a fused
            qkv_proj writes: the heads of q, then those of k, then what stays as it is. Rows begin at
            multiples of 16 bytes and have no gaps.
        positions: [T] int64; those beyond the table have its last row.
        table: [P, D] of the dtype of x: D / 2 cosines of each position, then as many sines. D is 32, 64, 128
            or 256.
        q_heads: of a token.
        k_heads: of a token.
        q_weight: [D] of the dtype of x, or None: no norm.
        k_weight: [D] of the dtype of x, or None: no norm.
        eps: of the norms, finite and not negative.
        k_cache: [blocks, slots of a block, k_heads, D] of the dtype of x, a view with gaps mostly, where the
            turned heads of k are written as well. Behind those of k x has as many heads of v then.
        v_cache: a view like k_cache, where the heads of v are written as they are.
        slots: [at most T] int64: the place of each token in the cache, from the first token on, block times
            slots of a block plus slot. What lies outside of the cache is not stored, as of padding, -1.
        stream: as for `silu_and_mul`.

    Returns:
        x.

    Raises:
        TypeError: another dtype.
        ValueError: other shapes, gaps, or x on the CPU.
        BufferError: as for `silu_and_mul`; or x shares memory with another tensor.
    """
    return _C.qk_norm_rope(
        x,
        positions,
        table,
        q_heads,
        k_heads,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=slots,
        stream=stream,
    )


def turn_heads(*args: Any, **kwargs: Any) -> Any:
    """The name of `qk_norm_rope` until 0.1, which the next version has no more."""
    warnings.warn(
        "moqext.ops.turn_heads is called qk_norm_rope, and the next version has no other name of it",
        DeprecationWarning,
        stacklevel=2,
    )
    return qk_norm_rope(*args, **kwargs)
