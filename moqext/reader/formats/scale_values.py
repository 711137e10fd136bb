"""The values of scales: reading them as float32 whatever their type, and judging them.

Only scales are read. Block scales are a ninth of an NVFP4 checkpoint, so they can be left out. A weight is
read where one of its scales is zero, to tell a layer of zeros from one whose scale was lost.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import ops
from moqext.algorithms import ALGORITHMS
from moqext.ops.scalars import DIVISOR_ABOVE
from moqext.reader.formats.stored import FLOATS, Tensor, tensor_bytes
from moqext.reader.problems import Problem, make_problem

Reader = Callable[[str], NDArray[np.generic]]
Float32 = NDArray[np.float32]

_FP8_MAX = ALGORITHMS["FP8"].input_max
_NVFP4_MAX = ALGORITHMS["NVFP4"].input_max


def _markers(input_max: float) -> dict[str, float]:
    """Activation scales that exporters write without a calibration.

    The scale of amax 0.5 is written for experts that no token reached, that of amax 6 for an NVFP4 input that
    was always zero, and 1.0 for a constant or absent amax.
    """
    amaxes = (0.5, 6.0) if input_max == _NVFP4_MAX else (0.5,)
    return {f"{amax:g}/{input_max:g}": amax / input_max for amax in amaxes} | {"1.0": 1.0}


_LARGE = 1.0
"""An NVFP4 activation scale above this is an amax above 2688, which only deliberate headroom gives."""


_CODES_MAX = {"e4m3": _FP8_MAX, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}

ABSURD_WEIGHT = 4 * 65504.0
"""Weights that no model has, four times what float16 holds; reciprocals of scales make millions of 1."""

ABSURD_AMAX = 64 * 65504.0
"""Activations that no model has, 64 times what float16 holds: with such a scale those of one become zero."""


def _e4m3_table() -> Float32:
    """The value of every e4m3fn code: sign, exponent of 4 bits with bias 7, mantissa of 3; 0x7f, 0xff NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -value, value).astype(np.float32)


def _e8m0_table() -> Float32:
    """The value of every e8m0 code: 2^(code - 127), 0xff NaN."""
    value = 2.0 ** (np.arange(256) - 127.0)
    value[255] = np.nan
    return value.astype(np.float32)


_E4M3_ONE = 0x38
_SCALES_OF_WEIGHT = ("weight_scale", "weight_scale_2")
_TABLES = {"F8_E4M3": _e4m3_table(), "U8": _e8m0_table(), "F8_E8M0": _e8m0_table()}


def decode_scales(dtype: str, array: NDArray[np.generic]) -> Float32:
    """The scales as float32. Bytes are e8m0; fp8 and bf16 may come as ml_dtypes or as uint8 and uint16."""
    if dtype in _TABLES:
        return np.asarray(_TABLES[dtype][array.view(np.uint8)])
    if dtype == "BF16":
        return np.asarray((array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32))
    if array.dtype == np.float32:
        return np.asarray(array, np.float32)
    with np.errstate(over="ignore"):  # of float64: infinite then, and a problem
        return array.astype(np.float32)


FEW = 65536
"""Scales of up to so many values are always read: single ones, one per row, one per expert and row."""


BLOCK_SCALES_READ = 256 << 20
"""Bytes of block scales that are read without being asked to."""


def block_scale_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all the scales of more than `FEW` values, the block scales of large layers."""
    large = (
        info for name, info in tensors.items() if name.endswith("weight_scale") and prod(info.shape) > FEW
    )
    return sum(tensor_bytes(info) for info in large)


class Scales:
    """The scales of a checkpoint, read on demand.

    Args:
        tensors: name -> data type and shape.
        read: name -> array; None when only the headers are at hand, and then nothing has a value.
        block_scales: False to leave scales of more than `FEW` values unread.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], read: Reader | None, *, block_scales: bool = True
    ) -> None:
        self._tensors = tensors
        self._read = read
        self._block_scales = block_scales
        self._single: dict[str, Float32] = {}  # read by several finders, and most of all scales

    @property
    def are_read(self) -> bool:
        """Whether anything has a value."""
        return self._read is not None

    def values(self, name: str | None) -> Float32 | None:
        """The values of a scale, None when it is absent, not to be read, or of a type that no scale has."""
        if self._read is None or name is None:
            return None
        if (known := self._single.get(name)) is not None:
            return known
        info = self._tensors[name]
        if not self._block_scales and prod(info.shape) > FEW:
            return None
        if info.dtype not in _TABLES and info.dtype not in FLOATS:
            return None
        values = decode_scales(info.dtype, self._read(name))
        if values.size == 1:
            self._single[name] = values
        return values

    def are_equal(self, one: str, other: str) -> bool | None:
        """Whether two tensors hold the same numbers, whatever their types; None when nothing may be read."""
        if self._read is None:
            return None
        dtypes = [self._tensors[name].dtype for name in (one, other)]
        if any(dtype not in _TABLES and dtype not in FLOATS for dtype in dtypes):
            return False
        here, there = (
            decode_scales(dtype, self._read(name)).ravel()
            for dtype, name in zip(dtypes, (one, other), strict=True)
        )
        return np.array_equal(here, there, equal_nan=True)

    def has_codes_under_zero(
        self, role: str, algo: str, group_size: int | None, tensors: Mapping[str, str]
    ) -> bool:
        """Whether codes that mean a number, and not zero, stand under the zeros of a scale.

        The weight is dequantized with 1 for every zero of that scale and 0 for everything else of it: what is
        left is what the codes under the zeros say by themselves. NaN, which the exporter leaves in a layer of
        zeros, says nothing.
        """
        if self._read is None:
            return False
        params: dict[str, Any] = {
            name: self._read(tensors[name]) for name in _SCALES_OF_WEIGHT if name in tensors
        }
        dtype = self._tensors[tensors[role]].dtype
        zeros = decode_scales(dtype, params[role]) == 0
        one = np.uint8(_E4M3_ONE) if dtype == "F8_E4M3" else np.float32(1)
        params[role] = np.where(zeros, one, one.dtype.type(0))
        try:
            values = ops.dequantize(self._read(tensors["weight"]), algo, group_size=group_size, **params)
        except (ValueError, TypeError):  # the tensors do not fit each other, which is a problem of its own
            return False
        return bool((np.isfinite(values) & (values != 0)).any())


def check_scales(
    layer: str, algo: str, tensors: Mapping[str, str], scales: Scales, group_size: int | None = None
) -> Iterator[Problem]:
    """The problems of the values of a layer's scales, `tensors` by role."""

    def lost(role: str) -> bool:
        return "weight" in tensors and scales.has_codes_under_zero(role, algo, group_size, tensors)

    second = scales.values(tensors.get("weight_scale_2"))
    if second is not None:
        yield from _check_multiplier(
            layer, tensors["weight_scale_2"], second, partial(lost, "weight_scale_2")
        )
    first = scales.values(tensors.get("weight_scale"))
    if first is not None:
        if second is not None and first.ndim and (second == 0).any():
            # A zero second-level scale means zero weights; the exporter leaves NaN block scales under it.
            per_expert = second.ndim == 1 and len(second) == len(first)
            first = first[second != 0] if per_expert else first[:0]
        # A block far smaller than the largest one may have a scale too small for e4m3: before 0.44 it was 0.
        yield from _check_multiplier(
            layer,
            tensors["weight_scale"],
            first,
            partial(lost, "weight_scale"),
            may_underflow=second is not None,
        )
    yield from _check_amax(layer, algo, tensors, first, second)
    factors = scales.values(tensors.get("pre_quant_scale"))
    if factors is not None and not np.isfinite(factors).all():
        yield _not_finite(layer, tensors["pre_quant_scale"], factors)
    inputs = scales.values(tensors.get("input_scale"))
    if inputs is not None:
        yield from _check_input_scale(layer, algo, tensors["input_scale"], inputs)


def _check_amax(
    layer: str, algo: str, tensors: Mapping[str, str], first: Float32 | None, second: Float32 | None
) -> Iterator[Problem]:
    """The problem of a weight as large as none is, by its scales: perhaps they are reciprocals.

    Block scales of NVFP4 that are not read may be 448 times larger than the one beside them, and codes 6.
    """
    facts = ALGORITHMS.get(algo)
    codes = _CODES_MAX.get(facts.codes or "") if facts and facts.scale_dtype != "float8_e8m0fnu" else None
    if facts is not None and facts.second == "unused":
        second = None
    role = "weight_scale" if second is None else "weight_scale_2"
    if codes is None or (first is None and second is None):
        return
    blocks = first[np.isfinite(first)].max(initial=0) if first is not None else _FP8_MAX / codes
    factor = second[np.isfinite(second)].max(initial=0) if second is not None else 1.0
    amax = float(codes) * float(blocks) * float(factor)
    if amax > ABSURD_WEIGHT:
        message = f"with it the largest weight is {amax:.3g}, as in no model: perhaps its reciprocal is meant"
        yield make_problem("absurd_weight_scale", message, layer=layer, tensor=tensors[role])


def check_divisor(layer: str, name: str, values: Float32) -> Iterator[Problem]:
    """The problems of a scale that something is divided by: activations or cache entries."""
    if _all_above(values, DIVISOR_ABOVE):
        return
    if not np.isfinite(values).all():
        yield _not_finite(layer, name, values)
    elif (values < 0).any():
        yield make_problem("scale_negative", f"{_count(values < 0)} negative", layer=layer, tensor=name)
    elif (values == 0).any():
        yield make_problem("scale_zero", f"{_count(values == 0)} zero", layer=layer, tensor=name)
    else:
        tiny = values <= DIVISOR_ABOVE
        message = f"{_count(tiny)} at most {DIVISOR_ABOVE:.4g}, the least is {values.min():.4g}"
        yield make_problem("scale_tiny", message, layer=layer, tensor=name)


def _all_above(values: Float32, limit: float) -> bool:
    """Whether all values are above a limit and finite: the two extremes tell, and a NaN is both of them."""
    if values.size == 1:
        return limit < values.item() < inf
    return values.size == 0 or bool(values.min() > limit and values.max() < inf)


def _check_multiplier(
    layer: str, name: str, values: Float32, is_lost: Callable[[], bool], *, may_underflow: bool = False
) -> Iterator[Problem]:
    if _all_above(values, 0):
        return
    if not np.isfinite(values).all():
        yield _not_finite(layer, name, values)
    if (values < 0).any():
        yield make_problem("scale_negative", f"{_count(values < 0)} negative", layer=layer, tensor=name)
    zeros = values == 0
    if (zeros.all() if may_underflow else zeros.any()) and is_lost():
        message = f"{_count(zeros)} zero, over codes that are not: their weights are lost"
        yield make_problem("lost_scale", message, layer=layer, tensor=name)
    elif zeros.all():
        message = "the scale is 0 and no code says otherwise: every weight is zero"
        yield make_problem("all_zero_layer", message, layer=layer, tensor=name)
    elif zeros.any():
        yield make_problem("zero_blocks", f"{_count(zeros)} zero", layer=layer, tensor=name)


def _check_input_scale(layer: str, algo: str, name: str, values: Float32) -> Iterator[Problem]:
    if not _all_above(values, DIVISOR_ABOVE):
        yield from check_divisor(layer, name, values)
        return
    facts = ALGORITHMS.get(algo)
    input_max = (facts.input_max if facts else 0) or _FP8_MAX
    found: list[float] = values.ravel().tolist()
    if max(found, default=0.0) * input_max > ABSURD_AMAX:
        message = (
            f"the activation scale is {max(found):.4g}, for activations of {max(found) * input_max:.3g}: "
            "those of any model become zero"
        )
        yield make_problem("absurd_input_scale", message, layer=layer, tensor=name)
        return
    for spelled, marker in _markers(input_max).items():
        if any(abs(value - marker) < 3e-7 * marker for value in found):
            message = f"the activation scale is {spelled}, which stands for no calibration"
            yield make_problem("uncalibrated_input_scale", message, layer=layer, tensor=name)
            return
    if input_max == _NVFP4_MAX and max(found, default=0.0) > _LARGE:
        message = f"the activation scale is {max(found):.4g}; calibration alone seldom gives more than 1"
        yield make_problem("large_input_scale", message, layer=layer, tensor=name)


def _not_finite(layer: str, name: str, values: Float32) -> Problem:
    message = f"{_count(~np.isfinite(values))} NaN or infinite"
    return make_problem("scale_not_finite", message, layer=layer, tensor=name)


def _count(mask: NDArray[np.bool_]) -> str:
    return f"{int(np.count_nonzero(mask))} of {mask.size} values are" if mask.size > 1 else "the value is"
