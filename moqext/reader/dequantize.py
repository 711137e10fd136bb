"""The weight of a checkpoint's layer as numbers: `Checkpoint.dequantize`."""

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import ops
from moqext._C import UnsupportedQuantization
from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.formats.partitions import scale_of_rows
from moqext.reader.problems import Problem
from moqext.reader.records import LayerRecord, Projection

WRONG_WEIGHTS = (
    "lost_scale",
    "partial_scales",
    "conflicting_tensors",
    "doubtful_scale_layout",
    "foreign_layout",
)
"""Problems under which codes and scales do not tell what the weight was."""

SCALES_OF_WEIGHT = ("weight_scale", "weight_scale_2")
"""The roles that make a weight of its codes; the others concern activations, or add to the output."""


def dequantize_layer(checkpoint: CheckpointReader, record: LayerRecord | Projection) -> NDArray[np.float32]:
    """float32 [out, in], [experts, out, in] or as a convolution; see `Checkpoint.dequantize`."""
    refuse_without_weight(checkpoint, record)
    weight = record.tensors["weight"]
    scales: dict[str, Any] = {
        role: as_matrix(record, role, checkpoint.tensor(record.tensors[role]))
        for role in SCALES_OF_WEIGHT
        if role in record.tensors
    }
    if isinstance(record, LayerRecord) and record.partitions:
        scales["weight_scale"] = scale_of_rows(scales["weight_scale"], record.partitions)
    try:
        values: NDArray[np.float32] = ops.dequantize(
            as_matrix(record, "weight", checkpoint.tensor(weight)),
            record.quant_algo,
            group_size=record.group_size,
            **scales,
        )
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{record.name}: {error}") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{record.name}: {error}", file=checkpoint.directory, tensor=weight) from error
    if is_convolution(record):
        return values.reshape(record.shape)
    transposed = isinstance(record, Projection) and record.transposed
    return values.swapaxes(-1, -2) if transposed else values


def is_convolution(record: LayerRecord | Projection | None) -> bool:
    """Whether it is a convolution, whose weight has more than two dimensions."""
    return isinstance(record, LayerRecord) and record.kind == "convolution"


def as_matrix(record: LayerRecord | Projection, role: str, tensor: NDArray[Any]) -> NDArray[Any]:
    """The weight of a convolution with all but its first axis as one, and its scales as one or one a row.

    Tensors of other layers come back as they are.
    """
    if not is_convolution(record):
        return tensor
    return tensor.reshape(len(tensor), prod(tensor.shape[1:])) if role == "weight" else tensor.reshape(-1)


def _problems_of(checkpoint: CheckpointReader, record: LayerRecord | Projection) -> Iterable[Problem]:
    """The problems of a layer; those of a projection stand with its group."""
    if isinstance(record, LayerRecord):
        return record.problems
    groups = (layer for layer in checkpoint.layers() if record in layer.projections)
    return [problem for group in groups for problem in group.problems if problem.layer == record.name]


def refuse_without_weight(checkpoint: CheckpointReader, record: LayerRecord | Projection) -> None:
    """Refuses a group of experts, and tensors that can be read in more than one way or in none."""
    wrong = next(
        (problem for problem in _problems_of(checkpoint, record) if problem.code in WRONG_WEIGHTS), None
    )
    if wrong is not None:
        message = f"{record.name}: {wrong.code}: {wrong.message}"
        raise CheckpointError(message, file=checkpoint.directory, tensor=wrong.tensor)
    if isinstance(record, Projection):
        return
    parts = record.members or record.projections
    if parts:
        message = f"{record.name} has {len(parts)} weights; ask for one, as {parts[0].name}"
        raise CheckpointError(message, file=checkpoint.directory)
    if record.stored_algo is None:
        errors = [problem.message for problem in record.problems if problem.severity == "error"]
        message = f"{record.name} is in no known format: {'; '.join(errors)}"
        raise CheckpointError(message, file=checkpoint.directory, tensor=record.tensors.get("weight"))
