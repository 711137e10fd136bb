"""The operations under the layers, on tensors of any framework: NumPy arrays and whatever speaks DLPack.

A result is made by the framework of the first tensor, or written to `out` where that is given; raw uint8 and
uint16 arrays stand for formats that the framework has no dtype for.
"""

from typing import Any

from moqext import _C

__all__ = ["decode", "encode"]


def encode(x: Any, format: str, out: Any = None) -> Any:
    """Codes of floating-point values, rounded to nearest even.

    E4M3, E5M2, E2M1 and E8M0 saturate to their largest finite value, infinities included; bf16 and fp16
    overflow to infinity. A NaN stays one where the format has it and becomes +6 in E2M1. Definitions: OCP
    8-bit Floating Point Specification 1.0, OCP Microscaling Formats 1.0.

    Args:
        x: contiguous tensor of any shape; float32, float16 or bfloat16 (uint16 is taken as raw bfloat16).
        format: "e4m3", "e5m2", "e8m0", "e2m1", "bf16", "fp16", or the full name of the dtype. "e2m1" packs
            pairs along the last axis, the even column in the low nibble.
        out: contiguous tensor of the result's shape, of the format's dtype or a raw carrier of its width;
            must not overlap x.

    Returns:
        `out`, or a new tensor of the shape of x (its last axis halved for "e2m1").

    Raises:
        TypeError: a dtype that is not in these lists.
        ValueError: an unknown format, a wrong shape of out, or an odd last axis for "e2m1".
        BufferError: memory that is not contiguous, not on the host, read-only (out) or shared by x and out.
    """
    return _C.encode(x, format, out)


def decode(codes: Any, format: str, out: Any = None) -> Any:
    """float32 values of codes, exactly: every value of every format is a float32.

    Args:
        codes: contiguous tensor of any shape, of the format's dtype or a raw carrier of its width.
        format: as for `encode`; with "e2m1" every byte gives two values along the last axis.
        out: contiguous float32 tensor of the result's shape; must not overlap codes.

    Returns:
        `out`, or a new float32 tensor of the shape of codes (its last axis doubled for "e2m1").

    Raises:
        TypeError: codes of another width, or out not float32.
        ValueError: an unknown format, or a wrong shape of out.
        BufferError: as for `encode`.
    """
    return _C.decode(codes, format, out)
