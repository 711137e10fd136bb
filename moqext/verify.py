"""The main job: every quantized linear of a checkpoint loaded, run, and compared with the reference.

The reference dequantizes in NumPy, independently of the native code, multiplies in float64 and rounds once;
a layer passes when its output stays within the error that rounding and the order of sums explain.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import reference
from moqext._C import UnsupportedQuantization
from moqext.checkpoint import Checkpoint
from moqext.load import Layer
from moqext.ops import to_device, to_host
from moqext.records import LayerRecord

LIMITS = {"bfloat16": (2.5e-3, 1e-2), "float16": (2.5e-3, 1e-2), "float32": (1e-5, 1e-5)}
"""dtype -> (relative Frobenius error, largest error of an element against the largest of its row). One step
of bfloat16 is up to 7.8e-3 of a value: single elements may fall on the other side of a tie."""

ROWS_AT_ONCE = 4096
"""Rows of a weight the reference holds in float64 at a time; a multiple of the 128 rows of a block."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one layer.

    Attributes:
        layer: Name in the checkpoint.
        quant_algo: Canonical algorithm.
        shape: (out_features, in_features).
        status: "ok", "failed" (outside the limits), "unsupported" (recognised, but nothing here runs it) or
            "error" (cannot be run as stored).
        kernel: "family:name", empty unless it ran.
        relative_error: Frobenius norm of the difference over that of the reference.
        max_error: Largest difference over the largest magnitude of its row of the reference.
        prepare_seconds, run_seconds: Wall time of loading with weight processing, and of the call until y can
            be read on the host.
        message: Why it did not run or failed.
    """

    layer: str
    quant_algo: str
    shape: tuple[int, ...]
    status: str
    kernel: str = ""
    relative_error: float | None = None
    max_error: float | None = None
    prepare_seconds: float | None = None
    run_seconds: float | None = None
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: such an error is null."""
        data = asdict(self)
        for key in ("relative_error", "max_error"):
            if data[key] is not None and not isfinite(data[key]):
                data[key] = None
        return data


def select_linears(checkpoint: Checkpoint, pattern: str | None = None) -> list[LayerRecord]:
    """The quantized linears, experts stored one by one among them, whose name matches a glob."""
    records = [linear for layer in checkpoint.layers() for linear in layer.linears()]
    return [record for record in records if pattern is None or fnmatchcase(record.name, pattern)]


def verify_layer(
    checkpoint: Checkpoint,
    record: LayerRecord,
    rng: np.random.Generator,
    *,
    tokens: int = 16,
    device: str = "cpu",
    dtype: str = "bfloat16",
    compute: str = "exact",
) -> Row:
    """Loads, runs and compares one layer.

    Args:
        checkpoint: Where it is stored.
        record: The layer.
        rng: Source of the activations: normal, with columns of unequal size as in real models.
        tokens: Rows of x.
        device: "cpu" or "cuda:N".
        dtype: Of the activations.
        compute: As for `LinearMethod`.
    """
    about = (record.name, record.quant_algo, record.shape)
    try:
        start = time.perf_counter()
        layer = checkpoint.load(record.name, device=device, dtype=dtype, compute=compute)
        prepared = time.perf_counter()
        values = _activations(rng, tokens, layer.in_features)
        x = _carrier(values, dtype)
        y, seconds = _timed_call(layer, x)
    except UnsupportedQuantization as error:
        return Row(*about, "unsupported", message=_reason(record, error))
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        return Row(*about, "error", message=f"{type(error).__name__}: {_reason(record, error)}")
    bias = layer.bias if device == "cpu" or layer.bias is None else to_host(layer.bias)
    expected = _expected(checkpoint, record, x, bias, layer.method.compute_for(tokens))
    relative, largest = compare(y, reference.round_to(expected, dtype))
    limit, limit_max = LIMITS[dtype]
    good = relative <= limit and largest <= limit_max
    return Row(
        *about,
        "ok" if good else "failed",
        layer.backend,
        relative,
        largest,
        prepared - start,
        seconds,
        "" if good else f"limits are {limit:g} and {limit_max:g}",
    )


def _timed_call(layer: Layer, x: NDArray[Any]) -> tuple[NDArray[np.float32], float]:
    """(y, seconds until y can be read on the host); the copy of x to a device comes before."""
    on_device = layer.method.device != "cpu"
    given = to_device(x, layer.method.device) if on_device else x
    began = time.perf_counter()
    y = layer(given)
    if on_device:
        y = to_host(y)
    return reference.as_float32(y), time.perf_counter() - began


def _reason(record: LayerRecord, error: Exception) -> str:
    return str(error).removeprefix(f"{record.name}: ")


def verify_checkpoint(
    checkpoint: Checkpoint, records: list[LayerRecord], seed: int, **options: Any
) -> Iterator[Row]:
    """One row per record, in order; a layer's activations depend on the seed and its place only."""
    for index, record in enumerate(records):
        yield verify_layer(checkpoint, record, np.random.default_rng([seed, index]), **options)


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
    rows = record.shape[0]
    blocks = []
    for first in range(0, rows, ROWS_AT_ONCE):
        part = _rows(params, rows, first, min(first + ROWS_AT_ONCE, rows))
        y = reference.linear(
            x,
            part,
            record.quant_algo,
            compute=compute,
            bias=None if bias is None else bias[first : first + ROWS_AT_ONCE],
            group_size=record.group_size,
            out_dtype="float64",
        )
        blocks.append(y)
    return np.concatenate(blocks, axis=-1)


def _rows(params: Mapping[str, Any], rows: int, first: int, last: int) -> dict[str, Any]:
    """Rows [first, last) of every tensor that has rows or blocks of rows; scalars as they are."""
    if (first, last) == (0, rows):
        return dict(params)
    part = {}
    for role, tensor in params.items():
        if tensor.size == 1 or tensor.ndim == 0 or role in ("input_scale", "pre_quant_scale"):
            part[role] = tensor
        elif tensor.shape[0] == rows:
            part[role] = tensor[first:last]
        else:
            part[role] = tensor[first // 128 : (last + 127) // 128]
    return part
