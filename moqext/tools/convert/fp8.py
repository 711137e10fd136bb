"""Weights requantized to FP8 with one scale for each row: FP8_PER_CHANNEL_PER_TOKEN, as ModelOpt writes it.

    scale[n] = max_k |w[n, k]| / 448, 1 for a row of zeros        float32 [N]
    code[n, k] = e4m3(w[n, k] / scale[n])                         E4M3 [N, K], to nearest even

Stacked experts have one scale for each expert. Weights that are FP8 already keep their codes. Activations are
quantized at run time, by token, so no `input_scale` is written. An embedding table becomes plain: engines
look it up, they do not multiply with it.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import ops
from moqext.errors import CheckpointError
from moqext.reader.matrices import Float32, Matrix, to_float32
from moqext.reader.records import LayerRecord
from moqext.tools.convert.jobs import Job, Pieces, matrix_job, rounded
from moqext.tools.convert.writer import TensorSpec

ALGO = "FP8_PER_CHANNEL_PER_TOKEN"

_MAX = np.float32(448)
_LEAST = np.finfo(np.float32).smallest_subnormal
_KEPT_CODES = ("FP8", ALGO)


@dataclass(frozen=True, slots=True)
class LayerError:
    """The change of a weight by requantizing, against what its codes stood for.

    Attributes:
        layer: its name.
        relative_error: Frobenius norm of the difference over that of the weight.
        max_error: the largest difference over the largest magnitude of the weight.
    """

    layer: str
    relative_error: float
    max_error: float


@dataclass
class Requantizer:
    """Makes the jobs of weights, and gathers their errors while those are done.

    Attributes:
        errors: of the weights that were requantized.
        plain: modules that are written without quantization.
    """

    errors: list[LayerError] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)

    def job(self, matrix: Matrix, dtype: str) -> Job:
        """The job of a weight; `dtype` is for what is written plain."""
        record = matrix.record
        assert record is not None
        if isinstance(record, LayerRecord) and record.kind in ("embedding", "convolution"):
            self.plain.append(matrix.name)
            return matrix_job(matrix, dtype)
        weight = matrix.tensor
        if 0 in matrix.shape:
            message = f"cannot be converted: its weight is empty, of shape {list(matrix.shape)}"
            raise CheckpointError(message, file=matrix.checkpoint.directory, tensor=weight)
        scale = f"{weight}_scale" if weight.endswith(".weight") else f"{weight}_weight_scale"
        specs = (TensorSpec(weight, "F8_E4M3", matrix.shape), TensorSpec(scale, "F32", matrix.shape[:1]))
        kept = _row_scales(matrix)

        def copy() -> Pieces:
            assert kept is not None
            yield scale, kept
            for begin in range(0, matrix.shape[0], matrix.step):
                end = min(begin + matrix.step, matrix.shape[0])
                yield weight, matrix.checkpoint.files.rows(weight, begin, end)

        def requantize() -> Pieces:
            tally = _Tally()
            for values in rounded(matrix, "F32"):
                codes, scales = _quantize(values)
                tally.add(values, codes, scales)
                yield weight, codes
                yield scale, scales
            self.errors.append(tally.error(matrix.name))

        return Job(weight, specs, requantize if kept is None else copy, matrix.nbytes)


def _row_scales(matrix: Matrix) -> Float32 | None:
    """The scale of each row of a weight whose codes can stay; None for any other."""
    record = matrix.record
    assert record is not None
    tensors = record.tensors
    if record.quant_algo not in _KEPT_CODES or tensors.keys() & {"pre_quant_scale", "lora_a"}:
        return None
    info = matrix.checkpoint.tensors[tensors["weight_scale"]]
    scales = to_float32(matrix.checkpoint.tensor(info.name), info.dtype).reshape(-1)
    if scales.size not in (1, matrix.shape[0]) or not (scales > 0).all():
        return None  # a scale of 0 stands over codes that may be NaN
    return np.ascontiguousarray(np.broadcast_to(scales, matrix.shape[:1]))


def _quantize(values: Float32) -> tuple[NDArray[Any], Float32]:
    """Codes, and one scale for each part along the first axis."""
    flat = values.reshape(len(values), -1)
    largest = np.maximum(flat.max(axis=1, initial=0), -flat.min(axis=1, initial=0))
    scales = np.maximum(largest / _MAX, _LEAST).astype(np.float32)
    scales[largest == 0] = 1
    with np.errstate(invalid="ignore"):  # of values that are no numbers, which are refused at the end
        codes: NDArray[Any] = ops.encode(flat / scales[:, None], "e4m3")
    return codes.reshape(values.shape), scales


@dataclass
class _Tally:
    """Sums over the pieces of a weight."""

    squares: float = 0.0
    of_weight: float = 0.0
    difference: float = 0.0
    largest: float = 0.0

    def add(self, values: Float32, codes: NDArray[Any], scales: Float32) -> None:
        flat = values.reshape(len(values), -1)
        decoded = ops.decode(codes, "e4m3").reshape(flat.shape) * scales[:, None]
        flat = flat.astype(np.float64)  # squares of float32 leave its range
        delta = decoded - flat
        self.squares += float(np.vdot(delta, delta))
        self.of_weight += float(np.vdot(flat, flat))
        self.difference = max(self.difference, float(np.abs(delta).max(initial=0)))
        self.largest = max(self.largest, float(np.abs(flat).max(initial=0)))

    def error(self, layer: str) -> LayerError:
        if not self.of_weight:
            return LayerError(layer, 0.0, 0.0)
        return LayerError(layer, sqrt(self.squares / self.of_weight), self.difference / self.largest)
