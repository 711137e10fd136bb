"""The format of a layer by its tensors: from data types and shapes, without the configuration.

Some formats leave the same tensors behind, so the answer is a list of algorithms, the most telling one first:

    weight        weight_scale              further tensors     algorithms
    e4m3 (N, K)   float, one value                              FP8 (or FP8_PB_WO of one block);
    e4m3 (N, K)   float (N,)                                    FP8_PER_CHANNEL_PER_TOKEN;
    e4m3 (N, K)   float (N/128, [1,] K/128[, 1])                FP8_PB_WO;
    e4m3 (N, K)   e8m0 (N, K/32)                                MXFP8;
    u8 (N, K/2)   e4m3 (N, K/16)            weight_scale_2      W4A16_NVFP4, NVFP4 with input_scale;
                                            ... pre_quant_scale NVFP4_AWQ;
                                            ... lora_a, lora_b  NVFP4_SVD;
    u8 (N, K/2)   e4m3 (N, K/32)            weight_scale_2      W4A16_NVFP4, W4A8_NVFP4_FP8 with input_scale;
    u8 (N, K/2)   e8m0 (N, K/32)                                MXFP4, W4A8_MXFP4_FP8;
    u8 (N/2, K)   float (N, K/group)                            W4A16_AWQ, W4A8_AWQ with weight_scale_2;
    i8 (N, K)     float (N,)                                    W8A16, W8A8_SQ_PER_CHANNEL with input_scale.

Division rounds up. Experts in one stacked tensor are the same with a leading expert dimension, but stored
either as (E, N, K) or transposed, (E, K, N), and with blocks along either of the two: when weight and scale
agree in their last dimension the blocks lie along the one before it, else along the last. One FP8 scale an
expert is FP8, or FP8_PB_WO of one block, however many dimensions of 1 it has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Protocol

from moqext.algorithms import ALGORITHMS, BLOCK_SIZES, HAS_SECOND, SECOND_IN_WEIGHT, names_where
from moqext.reader.files.tensor_header import DTYPE_BITS

FLOATS = frozenset(("F32", "F16", "BF16", "F64"))
CODES = frozenset(("F8_E4M3", "U8", "I8"))
"""Types in which ModelOpt stores codes."""
_SMALL = CODES | {"F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"}
_E8M0 = frozenset(("U8", "F8_E8M0"))


class Tensor(Protocol):
    """A tensor as far as formats need it: its safetensors data type and its shape."""

    @property
    def dtype(self) -> str:
        """Name of the data type in safetensors headers, such as `F8_E4M3`."""

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
    stored = _recognise(tensors)
    if len(stored.shape) == 3 and 0 in stored.shape and stored.fault is None:
        message = f"experts without elements, of shape {list(stored.shape)}"  # no byte backs their number
        return replace(stored, fault=("shape_mismatch", message))
    return stored


def _recognise(tensors: Mapping[str, Tensor]) -> Stored:
    weight = tensors["weight"]
    shape = weight.shape
    if len(shape) not in (2, 3):  # a convolution in FP8 comes as a matrix; see `layer_forms.py`
        return Stored((), shape, fault=("unknown_format", f"{weight.dtype} weight of shape {list(shape)}"))
    if weight.dtype not in CODES:
        message = f"a weight stored as {weight.dtype}; ModelOpt's codes are F8_E4M3, U8 or I8"
        return Stored((), shape, fault=("unknown_format", message))
    scale = tensors.get("weight_scale")
    if scale is None:
        return _without_scale(tensors)
    if weight.dtype == "F8_E4M3":
        mx = scale.dtype in _E8M0 and not _block_algos(shape, scale)
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
    shape = weight.shape
    algos: Iterable[str]
    if weight.dtype == "U8":
        algos = SECOND_IN_WEIGHT if "weight_scale_2" in tensors else _of("e2m1") + _of("int4")
        shape = (*shape[:-1], shape[-1] * 2)
    else:
        algos = _of("e4m3" if weight.dtype == "F8_E4M3" else "int8")
    algos = sorted(algos, key=lambda name: ALGORITHMS[name].pre_quant_scale)  # factors are rare: last
    message = f"a {weight.dtype} weight without weight_scale"
    return Stored(tuple(algos), shape, fault=("missing_scale", message))


@cache
def _of(codes: str, scales: str | None = None) -> tuple[str, ...]:
    """The algorithms of such codes, and whose scales lie so."""
    return names_where(lambda facts: facts.codes == codes and scales in (None, facts.scales))


def _block_algos(shape: Sequence[int], scale: Tensor) -> tuple[str, ...]:
    """The algorithms of whose square blocks the scale has one value each, 4-D as exported or plain."""
    found = []
    for name, size in BLOCK_SIZES.items():
        rows, columns = ceil_div(shape[-2], size), ceil_div(shape[-1], size)
        spaced = len(shape) == 2 and scale.shape == (rows, 1, columns, 1)
        if spaced or scale.shape == (*shape[:-2], rows, columns):
            found.append(name)
    return tuple(found)


def _fp8(tensors: Mapping[str, Tensor]) -> Stored:
    shape, scale = tensors["weight"].shape, tensors["weight_scale"]
    dims = scale.shape
    if scale.dtype not in FLOATS and scale.dtype not in _E8M0:
        return Stored((), shape, fault=("dtype_mismatch", f"a {scale.dtype} scale of an e4m3 weight"))
    one_each = len(shape) == 3 and prod(dims) == shape[0]  # a block, or all that an expert has
    if not one_each and (blocks := _block_algos(shape, scale)):
        whole = _of("e4m3", "tensor") if prod(dims) == 1 else ()
        return Stored((*blocks, *whole), shape, BLOCK_SIZES[blocks[0]])
    if len(shape) == 3:
        return _stacked_fp8(shape, dims)
    if prod(dims) == 1:
        rows = _of("e4m3", "rows") if shape[0] == 1 else ()
        return Stored((*_of("e4m3", "tensor"), *_one_block(shape), *rows), shape)
    if dims == (shape[0],):
        return Stored(_of("e4m3", "rows"), shape)
    expected = f"[], [{shape[0]}] or {_blocks_text(shape)}"
    return Stored((), shape, fault=("shape_mismatch", _scale_message(shape, dims, expected)))


def _one_block(shape: Sequence[int]) -> tuple[str, ...]:
    """The algorithms of whose square blocks the weight is at most one."""
    return tuple(name for name, size in BLOCK_SIZES.items() if max(shape[-2:]) <= size)


def _blocks_text(shape: Sequence[int]) -> str:
    """The shapes of scales of square blocks, for a message."""
    sizes = dict.fromkeys(BLOCK_SIZES.values())
    return " or ".join(
        str([*shape[:-2], *(ceil_div(extent, size) for extent in shape[-2:])]) for size in sizes
    )


def _stacked_fp8(shape: Sequence[int], dims: Sequence[int]) -> Stored:
    """FP8 of stacked experts: one scale, one per expert, per expert and row or column, or square blocks."""
    experts, rows, columns = shape
    whole = tuple(shape)
    if prod(dims) == 1:
        return Stored((*_of("e4m3", "tensor"), *_one_block(shape)), whole)
    if prod(dims) == experts and dims[0] == experts:
        return Stored((*_of("e4m3", "tensor"), *_of("e4m3", "rows"), *_one_block(shape)), whole)
    if len(dims) == 2 and dims[0] == experts and dims[1] in (rows, columns):
        return Stored(_of("e4m3", "rows"), whole)
    for name, size in BLOCK_SIZES.items():
        blocks = [ceil_div(rows, size), ceil_div(columns, size)]
        if prod(dims) == experts * prod(blocks) and len(dims) == 5:
            fault = None
            if min(blocks) > 1:
                message = (
                    f"blocks of the transposed weight were scaled: the scale has shape {list(dims)}, the "
                    f"codes lie in {blocks} blocks per expert; dequantized weights are off by up to a fifth"
                )
                fault = ("clipped_blocks", message)
            return Stored((name,), whole, size, fault=fault)
    expected = f"[], [{experts}], [{experts}, {rows}], [{experts}, {columns}] or {_blocks_text(shape)}"
    return Stored((), whole, fault=("shape_mismatch", _scale_message(shape, dims, expected)))


def _mxfp8(tensors: Mapping[str, Tensor]) -> Stored:
    shape, dims = tensors["weight"].shape, tensors["weight_scale"].shape
    algos = _of("e4m3", "groups")
    axis, group, fault = _blocks(shape, dims, packed=1, sizes=_sizes(algos))
    return Stored(algos, tuple(shape), group, axis, fault)


@cache
def _sizes(algos: tuple[str, ...]) -> tuple[int, ...]:
    """The group sizes that the algorithms have."""
    return tuple(sorted({size for name in algos for size in ALGORITHMS[name].group_sizes}))


def _fp4(tensors: Mapping[str, Tensor]) -> Stored:
    """Two E2M1 codes per byte: NVFP4 and its variants with e4m3 block scales, MXFP4 with powers of two."""
    packed, scale = tensors["weight"].shape, tensors["weight_scale"]
    mx = scale.dtype in _E8M0
    static = "input_scale" in tensors
    family = _mx_algos(static) if mx else SECOND_IN_WEIGHT
    axis, group, fault = _blocks(packed, scale.shape, packed=2, sizes=_sizes(family))
    shape = list(packed)
    shape[axis] *= 2
    if mx:
        return Stored(family, tuple(shape), group, axis, fault)
    if "weight_scale_2" not in tensors and fault is None:
        fault = ("missing_scale", "e4m3 block scales without weight_scale_2")
    low_rank = "lora_a" in tensors or "lora_b" in tensors
    algos = _nvfp4_algos(low_rank, "pre_quant_scale" in tensors, static, group)
    return Stored(algos, tuple(shape), group, axis, fault)


def _has_other_activations(algo: str, static: bool) -> bool:
    """Whether only one has an input_scale, the tensors or the algorithm."""
    return (ALGORITHMS[algo].input_scale is None) == static


@cache
def _mx_algos(static: bool) -> tuple[str, ...]:
    """The algorithms of E2M1 codes without second level, the more telling first."""
    algos = names_where(lambda facts: facts.codes == "e2m1" and facts.second is None)
    return tuple(sorted(algos, key=lambda name: _has_other_activations(name, static)))


@cache
def _nvfp4_algos(low_rank: bool, factors: bool, static: bool, group: int | None) -> tuple[str, ...]:
    """The variants of NVFP4 that leave such tensors: the most telling first, the least likely last.

    A low-rank pair and factors for the activations are always told; but a layer may be without factors, which
    the producer then folded into the preceding norm or linear. Groups larger than usual are unlikely where
    activations are quantized.
    """
    variants = [ALGORITHMS[name] for name in SECOND_IN_WEIGHT if ALGORITHMS[name].low_rank == low_rank]
    if low_rank or factors:
        return tuple(facts.name for facts in variants if facts.pre_quant_scale)
    size = group or min(_sizes(SECOND_IN_WEIGHT))
    ranked = []
    for facts in variants:
        usual = facts.group_size or size
        if usual > size or (facts.pre_quant_scale and usual != size):
            continue
        odd = usual != size and facts.input_scale is not None
        rank = (facts.pre_quant_scale, odd, _has_other_activations(facts.name, static))
        ranked.append((rank, facts.name))
    return tuple(name for _, name in sorted(ranked, key=lambda entry: entry[0]))


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
    second = "weight_scale_2" in tensors
    algos = tuple(name for name in _of("int4") if (name in HAS_SECOND) == second)
    if len(dims) == 2 and dims[0] == shape[0] and dims[1] > 0 and shape[1] % dims[1] == 0:
        return Stored(algos, shape, shape[1] // dims[1], -1)
    return Stored(
        algos, shape, fault=("shape_mismatch", _scale_message(shape, dims, f"[{shape[0]}, groups]"))
    )


def _int8(tensors: Mapping[str, Tensor]) -> Stored:
    shape, dims = tensors["weight"].shape, tensors["weight_scale"].shape
    smooth = "input_scale" in tensors or "pre_quant_scale" in tensors
    algos = tuple(sorted(_of("int8"), key=lambda name: ALGORITHMS[name].pre_quant_scale != smooth))
    if dims == (shape[0],) or prod(dims) == shape[0] == 1:
        return Stored(algos, tuple(shape))
    return Stored(algos, tuple(shape), fault=("shape_mismatch", _scale_message(shape, dims, f"[{shape[0]}]")))


def _scale_message(shape: Sequence[int], dims: Sequence[int], expected: str) -> str:
    return f"the scale of a weight of {list(shape)} has shape {list(dims)}; expected {expected}"
