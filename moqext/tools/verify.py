"""The main job: every quantized weight of a checkpoint run, or else read, and compared with the reference.

The reference dequantizes in NumPy, independently of the native code, multiplies in float64 and rounds once;
a layer passes when its output stays within the error that rounding and the order of sums explain. Experts run
together, as the layer that they are; where they cannot, those stored one by one run as linears. What cannot
be run (algorithms without a kernel, embeddings, stacks that have no method) is dequantized: every weight must
be finite and, bit for bit, what the reference says.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import ops, reference
from moqext._C import UnsupportedQuantization
from moqext.layers.load import load_layers
from moqext.ops import to_device, to_host
from moqext.ops.spelling import Compute, DtypeName
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.dequantize import SCALES_OF_WEIGHT, as_matrix
from moqext.reader.naming import parse_tensor_name
from moqext.reader.records import LayerRecord, Projection
from moqext.reference.weights import DEQUANTIZERS
from moqext.tools.verify_experts import verify_experts, why_not_together
from moqext.tools.verify_row import (
    Row,
    activations,
    carrier,
    compare,
    errors_of,
    judged,
    reason_of,
    timed_calls,
)

ROWS_AT_ONCE = 4096
"""Rows of a weight the reference holds in float64 at a time; a multiple of the rows of a block."""


_WHOLE = ("input_scale", "pre_quant_scale", "lora_a")
"""Tensors that all rows of a weight have in common."""


class Weight(NamedTuple):
    """A weight with a row of its own: a linear, an embedding, experts that run together, or one of others.

    Attributes:
        record: where its tensors are.
        layer: the layer of the checkpoint that it belongs to: the container of experts, else itself.
        why: of a part of experts, why they do not run together.
    """

    record: LayerRecord | Projection
    layer: LayerRecord
    why: str = ""

    @property
    def name(self) -> str:
        """The module in the checkpoint."""
        return self.record.name

    @property
    def kind(self) -> str:
        """Kind of what it is: "linear", "embedding", "convolution", "experts" or "stacked experts"."""
        if isinstance(self.record, Projection):
            return "stacked experts"
        return "experts" if self.record.kind == "moe" else self.record.kind

    @property
    def group(self) -> str | None:
        """The container of experts that it is a part of, None for what is none."""
        return self.layer.name if self.layer is not self.record else None

    @property
    def weights(self) -> int:
        """How many numbers it has."""
        together = isinstance(self.record, LayerRecord) and self.record.kind == "moe"
        return self.layer.weights if together else prod(self.record.shape)

    def errors(self) -> list[str]:
        """Errors that forbid using the weight; a part of stacked experts has the errors of the whole."""
        problems = self.record.problems if isinstance(self.record, LayerRecord) else self.layer.problems
        about = (self.name, self.layer.name)
        return [f"{p.code}: {p.message}" for p in problems if p.severity == "error" and p.layer in about]


def select_weights(
    checkpoint: CheckpointReader,
    pattern: str | None = None,
    *,
    device: str = "cpu",
    dtype: DtypeName = "bfloat16",
    compute: Compute = "exact",
) -> list[Weight]:
    """The weights to verify, of all whose name or whose container's name matches a glob.

    Args:
        checkpoint: Where it is stored.
        pattern: Of names; experts run together where it matches their container, else those that match alone.
        device: As for `verify_layer`, like the rest: whether experts run together depends on them.
        dtype: Of the activations.
        compute: As for `LinearMethod`.
    """
    weights: list[Weight] = []
    for layer in checkpoint.findings(block_scales=True).layers:
        whole = pattern is None or fnmatchcase(layer.name, pattern)
        parts: tuple[LayerRecord | Projection, ...] = layer.members or layer.projections
        if not parts:
            weights += [Weight(layer, layer)] if whole else []
            continue
        why = (
            why_not_together(checkpoint, layer, device=device, dtype=dtype, compute=compute) if whole else ""
        )
        if whole and not why:
            weights.append(Weight(layer, layer))
            continue
        chosen = [part for part in parts if whole or fnmatchcase(part.name, pattern or "")]
        weights += [Weight(part, layer, why) for part in chosen]
    return weights


def absent_layers(checkpoint: CheckpointReader, pattern: str | None = None) -> list[str]:
    """The quantized layers that the index names, that no file has any tensor of, and that match a glob."""
    roles: dict[str, set[str]] = {}
    present: set[str] = set()
    for name in checkpoint.files.named:
        named = parse_tensor_name(name)
        if named is None:
            continue
        roles.setdefault(named.module, set()).add(named.role)
        if name in checkpoint.tensors:
            present.add(named.module)
    quantized = {"weight", "weight_scale"}
    missing = [name for name, found in roles.items() if quantized <= found and name not in present]
    return [name for name in missing if pattern is None or fnmatchcase(name, pattern)]


def verify_checkpoint(
    checkpoint: CheckpointReader, weights: Iterable[Weight], seed: int, **options: Any
) -> Iterator[Row]:
    """One row per weight, in order; a layer's activations depend on the seed and its place only."""
    for index, weight in enumerate(weights):
        yield verify_layer(checkpoint, weight, np.random.default_rng([seed, index]), **options)


def verify_layer(
    checkpoint: CheckpointReader,
    weight: Weight,
    rng: np.random.Generator,
    *,
    tokens: int = 16,
    device: str = "cpu",
    dtype: DtypeName = "bfloat16",
    compute: Compute = "exact",
) -> Row:
    """Loads, runs and compares one layer; reads it where it cannot be run.

    Args:
        checkpoint: Where it is stored.
        weight: The layer.
        rng: Source of the activations: normal, with columns of unequal size as in real models.
        tokens: Rows of x.
        device: "cpu" or "cuda:N".
        dtype: Of the activations.
        compute: As for `LinearMethod`.
    """
    record = weight.record
    row = Row(
        weight.name, weight.kind, weight.group, record.quant_algo, record.shape, weight.weights, "error"
    )
    if errors := weight.errors():
        return replace(row, message="; ".join(errors))
    if isinstance(record, LayerRecord) and record.kind == "moe":
        return verify_experts(
            checkpoint, record, row, rng, tokens=tokens, device=device, dtype=dtype, compute=compute
        )
    if not isinstance(record, LayerRecord) or record.kind != "linear":
        return _read(checkpoint, record, row, _why_not_run(weight))
    try:
        start = time.perf_counter()
        layer = load_layers(checkpoint, [record], device=device, dtype=dtype, compute=compute)
        prepared = time.perf_counter()
        x = carrier(activations(rng, tokens, layer.in_features), dtype)
        on_device = layer.method.device != "cpu"
        given = to_device(x, layer.method.device) if on_device else x
        y, times = timed_calls(lambda: layer(given), on_device=on_device)
    except UnsupportedQuantization as error:
        return _read(checkpoint, record, row, reason_of(record.name, error))
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        return replace(row, message=reason_of(record.name, error))
    bias = layer.bias if device == "cpu" or layer.bias is None else to_host(layer.bias)
    expected = _expected(checkpoint, record, x, bias, layer.compute_for(tokens))
    relative, largest = compare(y, reference.round_to(expected, dtype))
    exact, rounding = errors_of(y, expected, dtype)
    good, fault = judged(relative, largest, dtype)
    alone = f"by itself, as {weight.why}" if weight.why else ""
    return replace(
        row,
        status="ok" if good else "failed",
        kernel=layer.backend_for(tokens),
        relative_error=relative,
        max_error=largest,
        exact_error=exact,
        rounding_error=rounding,
        prepare_seconds=prepared - start,
        run_seconds=statistics.median(times),
        calls=len(times),
        message=alone if good else fault,
    )


# Reading what cannot be run


def _why_not_run(weight: Weight) -> str:
    if isinstance(weight.record, Projection):
        return weight.why or "stacked experts run together, as their container"
    if weight.record.kind == "convolution":
        return "a convolution has no method"
    return "an embedding is looked up, not multiplied"


def _read(checkpoint: CheckpointReader, record: LayerRecord | Projection, row: Row, why: str) -> Row:
    """The row of a weight that is dequantized only, and compared with the reference where it has one."""
    try:
        params = {
            role: as_matrix(record, role, checkpoint.tensor(record.tensors[role]))
            for role in ("weight", *SCALES_OF_WEIGHT)
            if role in record.tensors
        }
        for piece in _pieces(params, record):
            fault = _misread(piece, record)
            if fault:
                return replace(row, status="failed", message=fault)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        return replace(row, message=reason_of(record.name, error))
    return replace(row, status="read", message=why)


def _misread(params: Mapping[str, Any], record: LayerRecord | Projection) -> str:
    """The fault of the weights that the native code reads; empty for none."""
    scales = {role: tensor for role, tensor in params.items() if role != "weight"}
    values = ops.dequantize(params["weight"], record.quant_algo, group_size=record.group_size, **scales)
    bad = values.size - int(np.count_nonzero(np.isfinite(values)))
    if bad:
        return f"{bad:,} of {values.size:,} weights are NaN or infinite"
    if record.quant_algo not in DEQUANTIZERS:
        return ""
    differing = int(np.count_nonzero(values != _expected_weight(params, record)))
    return f"{differing:,} of {values.size:,} weights are not what the reference reads" if differing else ""


def _expected_weight(params: Mapping[str, Any], record: LayerRecord | Projection) -> NDArray[np.float32]:
    """The reference's weight; where gate and up have second-level scales of their own, part by part."""
    second = params.get("weight_scale_2")
    size = record.group_size
    if not isinstance(record, Projection) or second is None or second.size in (1, params["weight"].shape[0]):
        return reference.dequantize(params, record.quant_algo, group_size=size)
    axis = -1 if record.transposed else -2
    count = second.size // params["weight"].shape[0]
    split = {role: np.split(params[role], count, axis=axis) for role in ("weight", "weight_scale")}
    parts = []
    for part in range(count):
        roles = {role: tensors[part] for role, tensors in split.items()}
        roles["weight_scale_2"] = second.reshape(-1, count)[:, part]
        parts.append(reference.dequantize(roles, record.quant_algo, group_size=size))
    return np.concatenate(parts, axis=axis)


def _pieces(params: Mapping[str, Any], record: LayerRecord | Projection) -> Iterator[dict[str, Any]]:
    """A weight in pieces that fit the memory: so many rows, or one expert, with the scales of each."""
    if 0 in record.shape:
        return  # no byte backs the number of rows
    if isinstance(record, LayerRecord):
        for first, last in _spans(record):
            yield _rows(params, record, first, last)
        return
    experts = record.shape[0]
    if any(tensor.size > 1 and tensor.shape[0] != experts for tensor in params.values()):
        yield dict(params)
        return
    for index in range(experts):
        yield {
            role: tensor if tensor.size == 1 else tensor[index : index + 1] for role, tensor in params.items()
        }


# The reference of what runs


def _expected(
    checkpoint: CheckpointReader,
    record: LayerRecord,
    x: NDArray[Any],
    bias: NDArray[np.float32] | None,
    compute: str,
) -> NDArray[np.float64]:
    params = {role: checkpoint.tensor(name) for role, name in record.tensors.items() if role != "bias"}
    blocks = []
    for first, last in _spans(record):
        part = _rows(params, record, first, last)
        y = reference.linear(
            x,
            part,
            record.quant_algo,
            compute=compute,
            bias=None if bias is None else bias[first:last],
            group_size=record.group_size,
            out_dtype="float64",
        )
        blocks.append(y)
    return np.concatenate(blocks, axis=-1)


def _spans(record: LayerRecord) -> Iterator[tuple[int, int]]:
    """Rows at once, none of which are of two parts with scales of their own."""
    begin = 0
    for rows in record.out_partitions:
        for first in range(begin, begin + rows, ROWS_AT_ONCE):
            yield first, min(first + ROWS_AT_ONCE, begin + rows)
        begin += rows


def _rows(params: Mapping[str, Any], record: LayerRecord, first: int, last: int) -> dict[str, Any]:
    """Rows [first, last) of every tensor that has rows or blocks of rows; scalars as they are."""
    rows, block = record.shape[0], record.group_size or 1
    if (first, last) == (0, rows):
        return dict(params)
    part = {}
    parts = len(record.partitions)
    for role, tensor in params.items():
        if parts and role in ("weight_scale", "input_scale") and tensor.shape == (parts,):
            index = int(np.searchsorted(np.cumsum(record.partitions), first, "right"))
            part[role] = tensor[index : index + 1]
        elif tensor.size == 1 or tensor.ndim == 0 or role in _WHOLE:
            part[role] = tensor
        elif tensor.shape[0] == rows:
            part[role] = tensor[first:last]
        elif role == "weight":  # int4: two rows to a byte
            part[role] = tensor[first // 2 : (last + 1) // 2]
        else:
            part[role] = tensor[first // block : (last + block - 1) // block]
    return part
