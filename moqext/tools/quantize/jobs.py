"""Jobs of a quantizer: the codes and scales that are written for a weight, a piece of it at a time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moqext.algorithms import ALGORITHMS
from moqext.errors import CheckpointError
from moqext.ops.quantize_weights import SEARCHED, ScaleSearch
from moqext.tools.convert.jobs import Job, Pieces
from moqext.tools.convert.writer import TensorSpec
from moqext.tools.quantize.quantizers import PACKED_ALONG_INPUT, Quantizer
from moqext.tools.quantize.weights import Weight

_SCALE_DTYPES = {"float32": "F32", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "U8"}
"""Types of scales as this package and as the files spell them."""


class Part(NamedTuple):
    """One weight of a job: its algorithm and `input_scale`, None where it has none."""

    weight: Weight
    quant_algo: str | None = None
    input_scale: np.float32 | None = None


def quantized_job(
    parts: Sequence[Part], quantizer: Quantizer, amax: Callable[[Weight], float], search: ScaleSearch | None
) -> Job:
    """The job of weights that are written together.

    Args:
        parts: those of one tensor of the source.
        quantizer: makes codes and scales.
        amax: the largest magnitude of all that share a scale with a weight.
        search: the search for scales, where the algorithm has one.
    """

    def produce() -> Pieces:
        for part in parts:
            yield from _written(part, quantizer, amax, search)

    specs = [spec for part in parts for spec in _specs(part)]
    return Job(parts[0].weight.tensor, tuple(specs), produce, sum(part.weight.nbytes for part in parts))


def _specs(part: Part) -> list[TensorSpec]:
    weight, algo, scale = part
    if algo is None:
        return [TensorSpec(weight.tensor_name("weight"), weight.dtype, weight.shape)]
    facts = ALGORITHMS[algo]
    codes, scales = (_stack_shapes if weight.is_stack else _shapes)(weight, algo)
    specs = [
        TensorSpec(weight.tensor_name("weight"), "U8" if facts.codes == "e2m1" else "F8_E4M3", codes),
        TensorSpec(weight.tensor_name("weight_scale"), _SCALE_DTYPES[facts.scale_dtype or ""], scales),
    ]
    if facts.second is not None:
        specs.append(TensorSpec(weight.tensor_name("weight_scale_2"), "F32", ()))
    if scale is not None:
        specs.append(TensorSpec(weight.tensor_name("input_scale"), "F32", ()))
    return specs


def _shapes(weight: Weight, algo: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and scales of a matrix."""
    facts = ALGORITHMS[algo]
    rows, columns = weight.shape
    codes = (rows, columns // 2 if facts.codes == "e2m1" else columns)
    size = facts.group_size or columns
    if facts.scales == "tensor":
        return codes, ()
    if facts.scales == "rows":
        return codes, (rows,)
    if facts.scales == "blocks":
        down, across = -(-rows // size), -(-columns // size)
        return codes, () if down * across == 1 else (down, 1, across, 1)
    _refuse_ragged(weight, columns, algo, size)
    return codes, (rows, columns // size)


def _stack_shapes(weight: Weight, algo: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and scales of a stack [experts, in, out]."""
    facts = ALGORITHMS[algo]
    experts, columns, rows = weight.shape
    size = facts.group_size or 1
    if facts.scales == "tensor":
        return weight.shape, ()
    if facts.scales == "rows":
        return weight.shape, (experts,)
    if facts.scales == "blocks":
        message = (
            f"no engine reads {algo} of experts that are stacked as [experts, in, out]; "
            "choose another algorithm for them by a rule"
        )
        raise CheckpointError(message, file=weight.checkpoint.directory, tensor=weight.tensor)
    if algo in PACKED_ALONG_INPUT:
        _refuse_ragged(weight, columns, algo, size)
        return (experts, columns // 2, rows), (experts, columns // size, rows)
    _refuse_ragged(weight, rows, algo, size)
    packed = rows // 2 if facts.codes == "e2m1" else rows
    return (experts, columns, packed), (experts, columns, rows // size)


def _refuse_ragged(weight: Weight, values: int, algo: str, size: int) -> None:
    if values % size:
        message = (
            f"cannot be {algo}: its rows have {values} values, no multiple of {size}; leave "
            f'it out (--exclude "{weight.module}"), or choose another algorithm for it by a rule'
        )
        raise CheckpointError(message, file=weight.checkpoint.directory, tensor=weight.tensor)


def _written(
    part: Part, quantizer: Quantizer, amax: Callable[[Weight], float], search: ScaleSearch | None
) -> Pieces:
    weight, algo, scale = part
    if algo is None:
        for piece in weight.pieces():
            yield weight.tensor_name("weight"), piece
        return
    whole: dict[str, Any] = {} if scale is None else {"input_scale": np.asarray(scale)}
    facts = ALGORITHMS[algo]
    single = not weight.is_stack and _shapes(weight, algo)[1] == ()
    largest = amax(weight) if facts.scales == "tensor" or facts.second is not None or single else None
    tried = None if single or algo not in SEARCHED.get(search or "", ()) else search
    for tensors in quantizer.batches(weight, algo, largest, tried):
        for role, values in tensors.items():
            if role == "weight_scale_2" or (role == "weight_scale" and (facts.scales == "tensor" or single)):
                whole[role] = values
            else:
                turned = weight.is_stack and algo in PACKED_ALONG_INPUT
                yield weight.tensor_name(role), np.ascontiguousarray(values.T) if turned else values
    for role, values in whole.items():
        yield weight.tensor_name(role), values
