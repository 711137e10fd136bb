"""Orders in memory of block scales, pairs of codes and NVFP4 weights."""

from collections.abc import Sequence
from typing import Any

from moqext import _C


def swizzle_block_scales(scale: Any, *, out: Any = None) -> Any:
    """Block scales in the order of block-scaled tensor core instructions (cuBLAS: "128 x 4 tiles").

    Byte (m, k) of a matrix moves to this place, with zeros that pad M to a multiple of 128 and K to Kp, a
    multiple of 4:

        tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4;   tile = (m // 128) * (Kp // 4) + k // 4.

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
