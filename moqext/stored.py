"""What the tensors say about a layer: its format, from data types and shapes, without the configuration.

Some formats leave the same tensors behind, so the answer is a list of algorithms, the most telling one first:

    weight        weight_scale              further tensors     algorithms
    e4m3 (N, K)   float, one value                              FP8 (or FP8_PB_WO of one block)
    e4m3 (N, K)   float (N,)                                    FP8_PER_CHANNEL_PER_TOKEN
    e4m3 (N, K)   float (N/128, [1,] K/128[, 1])                FP8_PB_WO
    e4m3 (N, K)   e8m0 (N, K/32)                                MXFP8
    u8 (N, K/2)   e4m3 (N, K/16)            weight_scale_2      W4A16_NVFP4, NVFP4 with input_scale
                                            ... pre_quant_scale NVFP4_AWQ
                                            ... lora_a, lora_b  NVFP4_SVD
    u8 (N, K/2)   e4m3 (N, K/32)            weight_scale_2      W4A16_NVFP4, W4A8_NVFP4_FP8 with input_scale
    u8 (N, K/2)   e8m0 (N, K/32)                                MXFP4, W4A8_MXFP4_FP8
    u8 (N/2, K)   float (N, K/group)                            W4A16_AWQ, W4A8_AWQ with weight_scale_2
    i8 (N, K)     float (N,)                                    W8A16, W8A8_SQ_PER_CHANNEL with input_scale

Division rounds up. Experts in one stacked tensor are the same with a leading expert dimension, but stored
either as (E, N, K) or transposed, (E, K, N), and with blocks along either of the two: when weight and scale
agree in their last dimension the blocks lie along the one before it, else along the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from moqext.tensor_header import DTYPE_BITS

FLOATS = frozenset(("F32", "F16", "BF16", "F64"))
CODES = frozenset(("F8_E4M3", "U8", "I8"))
"""Types in which ModelOpt stores codes."""
_SMALL = CODES | {"F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"}
_E8M0 = frozenset(("U8", "F8_E8M0"))
_GROUPS = {"nvfp4": (16, 32), "mx": (32,)}

NVFP4_FAMILY = frozenset(("NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4", "W4A8_NVFP4_FP8"))
STATIC_ACTIVATIONS = frozenset(
    ("FP8", "NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")
)
"""Algorithms whose activations are quantized with a stored scale."""

BLOCK = 128
"""Rows and columns of a block of FP8_PB_WO."""


class Tensor(Protocol):
    """What is needed of a tensor here: its safetensors data type and its shape."""

    @property
    def dtype(self) -> str:
        """As in `F8_E4M3`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Without packing undone."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The format of one weight, as its tensors tell it.

    Attributes:
        algos: canonical algorithms that these tensors fit, the most telling first; empty when none is known.
        shape: (N, K), or (E, rows, columns) as stored but unpacked for experts stacked in one tensor.
        group_size: weights that share one block scale along the blocked dimension, None without blocks.
        block_axis: -1 or -2, the dimension that blocks lie along; None without blocks or with square ones.
        fault: problem code and message when the tensors do not fit together, else None.
    """

    algos: tuple[str, ...]
    shape: tuple[int, ...]
    group_size: int | None = None
    block_axis: int | None = None
    fault: tuple[str, str] | None = None


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)


def tensor_bytes(info: Tensor) -> int:
    """Bytes of a tensor by its data type and shape."""
    return prod(info.shape) * DTYPE_BITS.get(info.dtype, 8) // 8


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight holds codes rather than numbers: it has any type but a float of 16 bits or more."""
    return weight.dtype not in FLOATS


def is_small(tensor: Tensor) -> bool:
    """Whether the elements of a tensor of any role are of a type that codes have, 8 bits or less."""
    return tensor.dtype in _SMALL


def recognise(tensors: Mapping[str, Tensor]) -> Stored:
    """The format of a quantized weight from the tensors of its layer, by role (at least "weight")."""
    weight = tensors["weight"]
    shape = weight.shape
    if len(shape) not in (2, 3):
        return Stored((), shape, fault=("unknown_format", f"{weight.dtype} weight of shape {list(shape)}"))
    if weight.dtype not in CODES:
        message = f"a weight stored as {weight.dtype}; ModelOpt's codes are F8_E4M3, U8 or I8"
        return Stored((), shape, fault=("unknown_format", message))
    scale = tensors.get("weight_scale")
    if scale is None:
        return _without_scale(tensors)
    if weight.dtype == "F8_E4M3":
        mx = scale.dtype in _E8M0 and not _is_blocks_of_128(shape, scale)
        return _mxfp8(tensors) if mx else _fp8(tensors)
    if weight.dtype == "U8" and (scale.dtype == "F8_E4M3" or scale.dtype in _E8M0):
        return _fp4(tensors)
    if weight.dtype == "U8" and scale.dtype in FLOATS and len(shape) == 2:
        return _int4(tensors)
    if weight.dtype == "I8" and scale.dtype in FLOATS and len(shape) == 2:
        return _int8(tensors)
    message = f"{weight.dtype} of shape {list(shape)} with a {scale.dtype} scale of shape {list(scale.shape)}"
    return Stored((), shape, fault=("unknown_format", message))


def _without_scale(tensors: Mapping[str, Tensor]) -> Stored:
    """A weight whose scale is missing: the data type still narrows the format down."""
    weight = tensors["weight"]
    algos: tuple[str, ...] = ()
    shape = weight.shape
    if weight.dtype == "F8_E4M3":
        algos = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")
    elif weight.dtype == "I8":
        algos = ("W8A16", "W8A8_SQ_PER_CHANNEL")
    elif weight.dtype == "U8" and "weight_scale_2" in tensors:
        algos = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8")
        shape = (*shape[:-1], shape[-1] * 2)
    elif weight.dtype == "U8":
        algos = ("NVFP4", "W4A16_NVFP4", "MXFP4", "W4A8_MXFP4_FP8", "W4A16_AWQ", "W4A8_AWQ")
        shape = (*shape[:-1], shape[-1] * 2)
    return Stored(algos, shape, fault=("missing_scale", f"a {weight.dtype} weight without weight_scale"))


def _is_blocks_of_128(shape: Sequence[int], scale: Tensor) -> bool:
    """Whether a scale has one value for each 128x128 block of the weight, 4-D as exported or plain."""
    rows, columns = ceil_div(shape[-2], BLOCK), ceil_div(shape[-1], BLOCK)
    if len(shape) == 2 and scale.shape == (rows, 1, columns, 1):
        return True
    return scale.shape == (*shape[:-2], rows, columns)


def _fp8(tensors: Mapping[str, Tensor]) -> Stored:
    shape, scale = tensors["weight"].shape, tensors["weight_scale"]
    dims = scale.shape
    if scale.dtype not in FLOATS and scale.dtype not in _E8M0:
        return Stored((), shape, fault=("dtype_mismatch", f"a {scale.dtype} scale of an e4m3 weight"))
    if _is_blocks_of_128(shape, scale):
        one_block = prod(dims) == 1
        return Stored(("FP8_PB_WO", "FP8") if one_block else ("FP8_PB_WO",), shape, BLOCK)
    if len(shape) == 3:
        return _stacked_fp8(shape, dims)
    if prod(dims) == 1:
        algos = ["FP8"]
        if max(shape) <= BLOCK:
            algos.append("FP8_PB_WO")
        if shape[0] == 1:
            algos.append("FP8_PER_CHANNEL_PER_TOKEN")
        return Stored(tuple(algos), shape)
    if dims == (shape[0],):
        return Stored(("FP8_PER_CHANNEL_PER_TOKEN",), shape)
    blocks = [ceil_div(shape[0], BLOCK), ceil_div(shape[1], BLOCK)]
    expected = f"[], [{shape[0]}] or {blocks}"
    return Stored((), shape, fault=("shape_mismatch", _scale_message(shape, dims, expected)))


def _stacked_fp8(shape: Sequence[int], dims: Sequence[int]) -> Stored:
    """FP8 of stacked experts: one scale, one per expert, per expert and row or column, or square blocks."""
    experts, rows, columns = shape
    whole = tuple(shape)
    if prod(dims) == 1:
        return Stored(("FP8",), whole)
    if prod(dims) == experts and dims[0] == experts:
        one_block = ("FP8_PB_WO",) if max(rows, columns) <= BLOCK else ()
        return Stored(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", *one_block), whole)
    if len(dims) == 2 and dims[0] == experts and dims[1] in (rows, columns):
        return Stored(("FP8_PER_CHANNEL_PER_TOKEN",), whole)
    blocks = [ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)]
    if prod(dims) == experts * prod(blocks) and len(dims) == 5:
        fault = None
        if min(blocks) > 1:
            message = (
                f"blocks of the transposed weight were scaled: the scale has shape {list(dims)}, the codes "
                f"lie in {blocks} blocks per expert; dequantized weights are off by up to a fifth"
            )
            fault = ("clipped_blocks", message)
        return Stored(("FP8_PB_WO",), whole, BLOCK, fault=fault)
    expected = f"[], [{experts}], [{experts}, {rows}], [{experts}, {columns}] or {[experts, *blocks]}"
    return Stored((), whole, fault=("shape_mismatch", _scale_message(shape, dims, expected)))


def _mxfp8(tensors: Mapping[str, Tensor]) -> Stored:
    shape, dims = tensors["weight"].shape, tensors["weight_scale"].shape
    axis, group, fault = _blocks(shape, dims, packed=1, sizes=_GROUPS["mx"])
    return Stored(("MXFP8",), tuple(shape), group, axis, fault)


def _fp4(tensors: Mapping[str, Tensor]) -> Stored:
    """Two E2M1 codes per byte: NVFP4 and its variants with e4m3 block scales, MXFP4 with powers of two."""
    packed, scale = tensors["weight"].shape, tensors["weight_scale"]
    mx = scale.dtype in _E8M0
    axis, group, fault = _blocks(packed, scale.shape, packed=2, sizes=_GROUPS["mx" if mx else "nvfp4"])
    shape = list(packed)
    shape[axis] *= 2
    if mx:
        algos = ("W4A8_MXFP4_FP8", "MXFP4") if "input_scale" in tensors else ("MXFP4", "W4A8_MXFP4_FP8")
        return Stored(algos, tuple(shape), group, axis, fault)
    if "weight_scale_2" not in tensors and fault is None:
        fault = ("missing_scale", "e4m3 block scales without weight_scale_2")
    return Stored(_nvfp4_algos(tensors, group), tuple(shape), group, axis, fault)


def _nvfp4_algos(tensors: Mapping[str, Tensor], group: int | None) -> tuple[str, ...]:
    if "lora_a" in tensors or "lora_b" in tensors:
        return ("NVFP4_SVD",)
    if "pre_quant_scale" in tensors:
        return ("NVFP4_AWQ",)
    if group == 32:
        quantized_activations, others = "W4A8_NVFP4_FP8", ("NVFP4",)
    else:
        # AWQ leaves no trace on a layer whose factors were folded into the preceding norm or linear.
        quantized_activations, others = "NVFP4", ("NVFP4_AWQ",)
    if "input_scale" in tensors:
        return (quantized_activations, "W4A16_NVFP4", *others)
    return ("W4A16_NVFP4", quantized_activations, *others)


def _blocks(
    shape: Sequence[int], dims: Sequence[int], *, packed: int, sizes: tuple[int, ...]
) -> tuple[int, int | None, tuple[str, str] | None]:
    """Axis of the blocks, values per block, and the fault if the scale does not fit the weight.

    `packed` values share one element of the weight; `sizes` are the block sizes the format knows.
    """
    axis = -2 if len(shape) == 3 and len(dims) == 3 and dims[-1] == shape[-1] else -1
    values = shape[axis] * packed
    others = list(shape)
    del others[axis]
    if len(dims) == len(shape):
        kept = list(dims)
        del kept[axis]
        if kept == others and dims[axis] > 0 and values % dims[axis] == 0 and values // dims[axis] in sizes:
            return axis, values // dims[axis], None
    whole = list(shape)
    whole[axis] = values
    wanted = []
    for size in sizes:
        expected = list(whole)
        expected[axis] = values // size
        wanted.append(str(expected))
    return axis, None, ("shape_mismatch", _scale_message(whole, dims, " or ".join(wanted)))


def _int4(tensors: Mapping[str, Tensor]) -> Stored:
    """Two two's-complement values per byte, packed along the rows."""
    packed, dims = tensors["weight"].shape, tensors["weight_scale"].shape
    shape = (packed[0] * 2, packed[1])
    algos = ("W4A8_AWQ",) if "weight_scale_2" in tensors else ("W4A16_AWQ",)
    if len(dims) == 2 and dims[0] == shape[0] and dims[1] > 0 and shape[1] % dims[1] == 0:
        return Stored(algos, shape, shape[1] // dims[1], -1)
    return Stored(
        algos, shape, fault=("shape_mismatch", _scale_message(shape, dims, f"[{shape[0]}, groups]"))
    )


def _int8(tensors: Mapping[str, Tensor]) -> Stored:
    shape, dims = tensors["weight"].shape, tensors["weight_scale"].shape
    smooth = "input_scale" in tensors or "pre_quant_scale" in tensors
    algos = ("W8A8_SQ_PER_CHANNEL", "W8A16") if smooth else ("W8A16", "W8A8_SQ_PER_CHANNEL")
    if dims == (shape[0],) or prod(dims) == shape[0] == 1:
        return Stored(algos, tuple(shape))
    return Stored(algos, tuple(shape), fault=("shape_mismatch", _scale_message(shape, dims, f"[{shape[0]}]")))


def _scale_message(shape: Sequence[int], dims: Sequence[int], expected: str) -> str:
    return f"the scale of a weight of {list(shape)} has shape {list(dims)}; expected {expected}"
