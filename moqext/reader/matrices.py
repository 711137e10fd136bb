"""The weights of a checkpoint as numbers, quantized or not, some rows at a time.

A matrix is a linear's weight [out, in], or the weights of stacked experts in the axes of the file, [experts,
in, out] or [experts, out, in]. What is multiplied with x is meant: y = x W^T. So a weight with a
`pre_quant_scale` s (AWQ, SmoothQuant: y = (x * s) V^T) is V * s along its input, and the low-rank pair of
NVFP4_SVD (y = (x * s) (V + B A)^T) is part of it. Memory is bounded by a piece: `PIECE_BYTES` of float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import ops
from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS, BLOCK_SIZES
from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.dequantize import SCALES_OF_WEIGHT, as_matrix, is_convolution, refuse_without_weight
from moqext.reader.formats.partitions import scale_of_rows
from moqext.reader.records import LayerRecord, Projection

PIECE_BYTES = 8 << 20
"""Bytes of float32 in a piece: small enough that its memory is used again, not mapped anew each time."""

FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Types of plain weights, as the files and as this package spells them."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Matrix:
    """One weight of a checkpoint.

    Attributes:
        checkpoint: where it is.
        name: its module; of experts stacked in one tensor the projection.
        tensor: the tensor that holds it.
        shape: [out, in], or [experts, rows, columns] as the file has them, packing undone; of a convolution
            [out, in, ...].
        record: what is known of it when it is quantized, None for a plain one.
    """

    checkpoint: CheckpointReader
    name: str
    tensor: str
    shape: tuple[int, ...]
    record: LayerRecord | Projection | None = None

    @property
    def quant_algo(self) -> str:
        """The algorithm; for a plain weight its type."""
        return self.record.quant_algo if self.record else self.checkpoint.tensors[self.tensor].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, those that are not read among them."""
        names = self.record.tensors.values() if self.record else (self.tensor,)
        return sum(self.checkpoint.tensors[name].nbytes for name in names)

    @cached_property
    def step(self) -> int:
        """Rows (experts of a stack) of a piece; a multiple of what shares a scale or a byte."""
        unit = 1
        if self.record and len(self.shape) == 2:
            unit = BLOCK_SIZES.get(self.record.quant_algo, 2)
        return max(1, PIECE_BYTES // max(1, 4 * prod(self.shape[1:]) * unit)) * unit

    def pieces(self, dtype: str = "float32") -> Iterator[NDArray[Any]]:
        """Consecutive rows (or experts) of the whole, each rounded once from float32 to `dtype`."""
        for begin in range(0, self.shape[0], self.step):
            yield self.rows(begin, min(begin + self.step, self.shape[0]), dtype)

    def rows(self, begin: int, end: int, dtype: str = "float32") -> NDArray[Any]:
        """Rows [begin, end) of a linear, where `begin` is a multiple of `step`, or experts of a stack.

        bfloat16 comes as ml_dtypes' type or raw uint16.

        Raises:
            CheckpointError: the tensors do not tell what the weight is, or cannot be read.
        """
        if self.record is None:
            return self._plain(begin, end, dtype)
        tensors = self.record.tensors
        values = self._decode(begin, end)
        if "lora_a" in tensors:
            if "lora_b" not in tensors:
                message = f"{self.name}: half of a low-rank pair"
                raise CheckpointError(message, file=self.checkpoint.directory, tensor=tensors["lora_a"])
            values += self._floats(tensors["lora_b"], begin, end) @ self._floats(tensors["lora_a"])
        if "pre_quant_scale" in tensors:
            values *= self._factors(begin, end)
        return round_to(values, dtype)

    def _plain(self, begin: int, end: int, dtype: str) -> NDArray[Any]:
        stored = FLOAT_DTYPES.get(self.checkpoint.tensors[self.tensor].dtype)
        if stored == dtype:
            return self.checkpoint.rows(self.tensor, begin, end)
        return round_to(self._floats(self.tensor, begin, end), dtype)

    def _floats(self, tensor: str, begin: int = 0, end: int | None = None) -> Float32:
        info = self.checkpoint.tensors[tensor]
        if not info.shape:
            return to_float32(self.checkpoint.tensor(tensor), info.dtype)
        rows = self.checkpoint.rows(tensor, begin, info.shape[0] if end is None else end)
        return to_float32(rows, info.dtype)

    def _factors(self, begin: int, end: int) -> Float32:
        """`pre_quant_scale` along the input: [in], or one row for each of these experts."""
        assert self.record is not None
        factors = self._floats(self.record.tensors["pre_quant_scale"])
        if len(self.shape) == 2:
            return factors.reshape(-1)
        transposed = isinstance(self.record, Projection) and self.record.transposed
        columns = self.shape[1] if transposed else self.shape[2]
        of_each = factors.reshape(-1, columns)
        chosen = of_each if len(of_each) == 1 else of_each[begin:end]
        return chosen[:, :, None] if transposed else chosen[:, None, :]

    def _decode(self, begin: int, end: int) -> Float32:
        """Codes times scales, natively."""
        record = self.record
        assert record is not None
        if begin == 0:
            refuse_without_weight(self.checkpoint, record)
        packed = ALGORITHMS[record.quant_algo].codes == "int4"
        first, last = (begin // 2, (end + 1) // 2) if packed else (begin, end)
        scales: dict[str, Any] = {
            role: as_matrix(record, role, self._scale(record.tensors[role], begin, end))
            for role in SCALES_OF_WEIGHT
            if role in record.tensors
        }
        try:
            values: Float32 = ops.dequantize(
                as_matrix(record, "weight", self.checkpoint.rows(self.tensor, first, last)),
                record.quant_algo,
                group_size=record.group_size,
                **scales,
            )
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{self.name}: {error}") from error
        except (ValueError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            message = f"{self.name}: {error}"
            raise CheckpointError(message, file=self.checkpoint.directory, tensor=self.tensor) from error
        return values.reshape(end - begin, *self.shape[1:]) if is_convolution(record) else values

    def _scale(self, tensor: str, begin: int, end: int) -> NDArray[Any]:
        """The scales of some rows: all of them where they are one, else those of the rows or their blocks."""
        shape = self.checkpoint.tensors[tensor].shape
        if prod(shape) == 1:
            return self.checkpoint.tensor(tensor)
        assert self.record is not None
        if isinstance(self.record, LayerRecord) and self.record.partitions:
            return scale_of_rows(self.checkpoint.tensor(tensor), self.record.partitions)[begin:end]
        size = BLOCK_SIZES.get(self.record.quant_algo, 1)
        if len(self.shape) == 2 and size > 1 and shape[0] == -(-self.shape[0] // size):
            return self.checkpoint.rows(tensor, begin // size, -(-end // size))
        if shape[0] == self.shape[0]:
            return self.checkpoint.rows(tensor, begin, end)
        return self.checkpoint.tensor(tensor)


def to_float32(array: NDArray[Any], dtype: str) -> Float32:
    """The values of a plain tensor of that safetensors type."""
    if dtype == "BF16":
        decoded: Float32 = ops.decode(array, "bf16")
        return decoded
    return array.astype(np.float32, copy=False)


def round_to(values: Float32, dtype: str) -> NDArray[Any]:
    """The values in another type, to nearest even; float32 as they are."""
    if dtype == "float32":
        return values
    rounded: NDArray[Any] = ops.encode(values, {"bfloat16": "bf16", "float16": "fp16"}[dtype])
    return rounded


def quantized_matrices(checkpoint: CheckpointReader) -> Iterator[Matrix]:
    """Every quantized weight, experts stored one by one as one each."""
    for layer in checkpoint.layers():
        parts: tuple[LayerRecord | Projection, ...] = layer.projections or tuple(layer.linears())
        for record in parts:
            if "weight" in record.tensors:
                yield matrix_of(checkpoint, record)


def matrix_of(checkpoint: CheckpointReader, record: LayerRecord | Projection) -> Matrix:
    """The weight of a record, in the axes of the file."""
    shape = tuple(record.shape)
    if isinstance(record, Projection) and record.transposed:
        shape = (shape[0], shape[2], shape[1])
    return Matrix(checkpoint, record.name, record.tensors["weight"], shape, record)
