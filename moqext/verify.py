"""The main job: every quantized weight of a checkpoint run, or else read, and compared with the reference.

The reference dequantizes in NumPy, independently of the native code, multiplies in float64 and rounds once;
a layer passes when its output stays within the error that rounding and the order of sums explain. What cannot
be run (algorithms without a kernel, embeddings, stacked experts) is dequantized: every weight must be finite
and, bit for bit, what the reference says.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import ops, reference
from moqext._C import UnsupportedQuantization
from moqext.checkpoint import Checkpoint
from moqext.dequantize import SCALES_OF_WEIGHT
from moqext.errors import CheckpointError
from moqext.load import Layer
from moqext.naming import parse_tensor_name
from moqext.ops import to_device, to_host
from moqext.records import LayerRecord, Projection
from moqext.reference.weights import DEQUANTIZERS
from moqext.spelling import Compute, DtypeName

LIMITS = {"bfloat16": (2.5e-3, 1e-2), "float16": (2.5e-3, 1e-2), "float32": (1e-5, 1e-5)}
"""dtype -> (relative Frobenius error, largest error of an element against the largest of its row). One step
of bfloat16 is up to 7.8e-3 of a value: single elements may fall on the other side of a tie."""

ROWS_AT_ONCE = 4096
"""Rows of a weight the reference holds in float64 at a time; a multiple of the rows of a block."""

CALLS, CALL_SECONDS = 5, 0.2
"""A layer is called so often to time it, or until its calls have taken so long together."""


class Weight(NamedTuple):
    """One quantized weight: a linear, an embedding, or a projection of stacked experts.

    Attributes:
        record: where its tensors are.
        layer: the layer of the checkpoint that it belongs to: the container of experts, else itself.
    """

    record: LayerRecord | Projection
    layer: LayerRecord

    @property
    def name(self) -> str:
        """Its module in the checkpoint."""
        return self.record.name

    @property
    def kind(self) -> str:
        """What it is: "linear", "embedding" or "stacked experts"."""
        return self.record.kind if isinstance(self.record, LayerRecord) else "stacked experts"

    @property
    def group(self) -> str | None:
        """The container of experts, None for what is no expert."""
        return self.layer.name if self.layer.kind == "moe" else None

    @property
    def weights(self) -> int:
        """How many numbers it has."""
        return prod(self.record.shape)

    def errors(self) -> list[str]:
        """Errors that forbid using the weight; a part of stacked experts has the errors of the whole."""
        problems = self.record.problems if isinstance(self.record, LayerRecord) else self.layer.problems
        about = (self.name, self.layer.name)
        return [f"{p.code}: {p.message}" for p in problems if p.severity == "error" and p.layer in about]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one quantized weight.

    Attributes:
        layer: Name in the checkpoint.
        kind: "linear", "embedding" or "stacked experts".
        group: The container of experts that it is of, else None.
        quant_algo: Canonical algorithm.
        shape: (out_features, in_features), with the number of stacked experts before it.
        weights: Their number.
        status: "ok", "failed" (wrong: outside the limits, not finite, or not what the reference reads),
            "read" (cannot be run, but every weight was dequantized, is finite and what the reference says) or
            "error" (refused: cannot be used as stored).
        kernel: "family:name", empty unless it ran.
        relative_error: Frobenius norm of the difference over that of the reference.
        max_error: Largest difference over the largest magnitude of its row of the reference.
        prepare_seconds, run_seconds: Wall time of loading with weight processing, and of a call until y can
            be read on the host: the median of `calls`.
        calls: How many calls were timed.
        message: Why it did not run or failed.
    """

    layer: str
    kind: str
    group: str | None
    quant_algo: str
    shape: tuple[int, ...]
    weights: int
    status: str
    kernel: str = ""
    relative_error: float | None = None
    max_error: float | None = None
    prepare_seconds: float | None = None
    run_seconds: float | None = None
    calls: int = 0
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: such an error is null."""
        data = asdict(self)
        for key in ("relative_error", "max_error"):
            if data[key] is not None and not isfinite(data[key]):
                data[key] = None
        return data


def select_weights(checkpoint: Checkpoint, pattern: str | None = None) -> list[Weight]:
    """The quantized weights, experts one by one, whose name or whose container's name matches a glob."""
    weights = [
        Weight(record, layer)
        for layer in checkpoint.findings(block_scales=True).layers
        for record in (layer.members or layer.projections or (layer,))
    ]
    return [
        weight
        for weight in weights
        if pattern is None or fnmatchcase(weight.name, pattern) or fnmatchcase(weight.layer.name, pattern)
    ]


def absent_layers(checkpoint: Checkpoint, pattern: str | None = None) -> list[str]:
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
    checkpoint: Checkpoint, weights: Iterable[Weight], seed: int, **options: Any
) -> Iterator[Row]:
    """One row per weight, in order; a layer's activations depend on the seed and its place only."""
    for index, weight in enumerate(weights):
        yield verify_layer(checkpoint, weight, np.random.default_rng([seed, index]), **options)


def verify_layer(
    checkpoint: Checkpoint,
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
    if not isinstance(record, LayerRecord) or record.kind != "linear":
        stacked = isinstance(record, Projection)
        why = "stacked experts do not run yet" if stacked else "an embedding is looked up, not multiplied"
        return _read(checkpoint, record, row, why)
    try:
        start = time.perf_counter()
        layer = checkpoint.load(record, device=device, dtype=dtype, compute=compute)
        prepared = time.perf_counter()
        x = _carrier(_activations(rng, tokens, layer.in_features), dtype)
        y, times = _timed_calls(layer, x)
    except UnsupportedQuantization as error:
        return _read(checkpoint, record, row, _reason(record, error))
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        return replace(row, message=_reason(record, error))
    bias = layer.bias if device == "cpu" or layer.bias is None else to_host(layer.bias)
    expected = _expected(checkpoint, record, x, bias, layer.compute_for(tokens))
    relative, largest = compare(y, reference.round_to(expected, dtype))
    limit, limit_max = LIMITS[dtype]
    good = relative <= limit and largest <= limit_max
    return replace(
        row,
        status="ok" if good else "failed",
        kernel=layer.backend_for(tokens),
        relative_error=relative,
        max_error=largest,
        prepare_seconds=prepared - start,
        run_seconds=statistics.median(times),
        calls=len(times),
        message="" if good else f"limits are {limit:g} and {limit_max:g}",
    )


def _timed_calls(layer: Layer, x: NDArray[Any]) -> tuple[NDArray[np.float32], list[float]]:
    """(y, seconds of each call until y can be read on the host); the copy of x to a device comes before."""
    on_device = layer.method.device != "cpu"
    given = to_device(x, layer.method.device) if on_device else x
    times: list[float] = []
    while len(times) < CALLS and sum(times) < CALL_SECONDS:
        began = time.perf_counter()
        y = layer(given)
        if on_device:
            y = to_host(y)
        times.append(time.perf_counter() - began)
    return reference.as_float32(y), times


def _reason(record: LayerRecord | Projection, error: Exception) -> str:
    """What an exception says, without what the row says already."""
    if isinstance(error, CheckpointError):
        return error.reason.removeprefix(f"{record.name}: ")
    plain = str(error).removeprefix(f"{record.name}: ")
    return plain if isinstance(error, UnsupportedQuantization) else f"{type(error).__name__}: {plain}"


# Reading what cannot be run


def _read(checkpoint: Checkpoint, record: LayerRecord | Projection, row: Row, why: str) -> Row:
    """The row of a weight that is dequantized only, and compared with the reference where it has one."""
    try:
        params = {
            role: checkpoint.tensor(record.tensors[role])
            for role in ("weight", *SCALES_OF_WEIGHT)
            if role in record.tensors
        }
        for piece in _pieces(params, record):
            fault = _misread(piece, record)
            if fault:
                return replace(row, status="failed", message=fault)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        return replace(row, message=_reason(record, error))
    return replace(row, status="read", message=why)


def _misread(params: Mapping[str, Any], record: LayerRecord | Projection) -> str:
    """What is wrong with the weights that the native code reads; empty for nothing."""
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


def compare(y: NDArray[np.float32], expected: NDArray[Any]) -> tuple[float, float]:
    """(relative Frobenius error, largest error over the row's largest magnitude); inf for a NaN in y only."""
    if not np.array_equal(np.isfinite(y), np.isfinite(expected)):
        return float("inf"), float("inf")
    expected = expected.astype(np.float64)
    difference = np.abs(y - expected)
    norm = float(np.linalg.norm(expected))
    tops = np.abs(expected).max(axis=-1, initial=0.0)
    tops = np.where(tops == 0, 1.0, tops)
    relative = float(np.linalg.norm(difference)) / (norm or 1.0)
    return relative, float((difference.max(axis=-1, initial=0.0) / tops).max(initial=0.0))


def _activations(rng: np.random.Generator, tokens: int, columns: int) -> NDArray[np.float32]:
    spread = np.exp2(rng.uniform(-2, 2, columns))
    return (rng.standard_normal((tokens, columns)) * spread).astype(np.float32)


def _carrier(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Values in a dtype NumPy has: bfloat16 as its bits in uint16."""
    if dtype == "bfloat16":
        return reference.encode(values, "bfloat16")
    return values.astype(dtype)


def _expected(
    checkpoint: Checkpoint,
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
        elif tensor.size == 1 or tensor.ndim == 0 or role in ("input_scale", "pre_quant_scale"):
            part[role] = tensor
        elif tensor.shape[0] == rows:
            part[role] = tensor[first:last]
        elif role == "weight":  # int4: two rows to a byte
            part[role] = tensor[first // 2 : (last + 1) // 2]
        else:
            part[role] = tensor[first // block : (last + block - 1) // block]
    return part
