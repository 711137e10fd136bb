"""Layers of a checkpoint made ready to run: `Checkpoint.load`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext.errors import CheckpointError
from moqext.layers.linear import LinearMethod
from moqext.ops import to_device
from moqext.ops.spelling import Compute, Device, Dtype, Tensor
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.records import LayerRecord, Projection
from moqext.reference import as_float32


class Layer:
    """A linear layer with its prepared parameters: `y = layer(x)`.

    Attributes:
        names: The checkpoint's modules, in the order of their rows in y.
        method: The `LinearMethod`.
        params: What `method.prepare` returned.
        bias: float32 [out_features] on the layer's device, or None.

    A layer on a CUDA device has its parameters in memory of moqext's own (`ops.to_device`) and takes x of any
    framework, whose tensors the results then are.
    """

    __slots__ = ("bias", "method", "names", "params")

    def __init__(
        self,
        names: Sequence[str],
        method: LinearMethod,
        params: Mapping[str, Any],
        bias: Any,
    ) -> None:
        self.names = tuple(names)
        self.method = method
        self.params = params
        self.bias = bias

    def __call__(self, x: Tensor, out: Any = None, stream: Any = None) -> Tensor:
        """Multiplies x [..., in_features]; see `LinearMethod.__call__`."""
        return self.method(x, self.params, self.bias, out, stream)

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.method.in_features

    @property
    def out_features(self) -> int:
        """Rows of the weight, all partitions together."""
        return self.method.out_features

    @property
    def backend(self) -> str:
        """The kernel that runs one token, as "family:name"."""
        return self.backend_for(1)

    def backend_for(self, tokens: int) -> str:
        """The kernel that runs so many tokens; see `LinearMethod.backend_for`."""
        return self.method._plan.backend(tokens, self._is_scaled)

    def compute_for(self, tokens: int) -> str:
        """The `compute` of so many tokens; see `LinearMethod.compute_for`."""
        return self.method._plan.compute_for(tokens, self._is_scaled)

    @property
    def _is_scaled(self) -> bool:
        """Whether the checkpoint has a scale of x."""
        return "input_scale" in self.params

    def explain(self, tokens: int | None = None) -> str:
        """Why that kernel; see `LinearMethod.explain`."""
        return self.method.explain(tokens)

    def __repr__(self) -> str:
        return f"<Layer {'+'.join(self.names)}: {self.method!r}>"


def load_layers(
    checkpoint: CheckpointReader,
    parts: Sequence[LayerRecord | Projection],
    *,
    device: Device,
    dtype: Dtype,
    compute: Compute,
) -> Layer:
    """Prepares one linear, or several fused along rows; see `Checkpoint.load`."""
    records = [_as_linear(checkpoint, part) for part in parts]
    first = records[0]
    _refuse_unlike(records)
    names = [record.name for record in records]
    params = _tensors(checkpoint, records)
    try:
        method = LinearMethod(
            first.quant_algo,
            first.shape[1],
            [rows for record in records for rows in record.out_partitions],
            group_size=first.group_size,
            dtype=dtype,
            device=device,
            compute=compute,
            one_input_scale=_shares_input_scale(first.quant_algo)
            and _all_the_same(params.get("input_scale", [])),
            rank=first.rank,
        )
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{', '.join(names)}: {error}") from None
    if method.device != "cpu":
        params = {role: _on_device(method, role, tensors) for role, tensors in params.items()}
    try:
        prepared = method.prepare(params)
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{', '.join(names)}: {error}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{', '.join(names)}: {error}", file=checkpoint.directory) from error
    bias = _fused_bias(checkpoint, records)
    if bias is not None and method.device != "cpu":
        bias = to_device(bias, method.device)
    return Layer(names, method, prepared, bias)


def _tensors(checkpoint: CheckpointReader, records: Sequence[LayerRecord]) -> dict[str, list[NDArray[Any]]]:
    """The tensors of each record by role, biases left out."""
    if len(records) == 1 and records[0].partitions:
        named = records[0].tensors.items()
        return {
            role: _of_parts(checkpoint.tensor(name), records[0]) for role, name in named if role != "bias"
        }
    for record in records:
        if record.partitions:
            message = f"{record.name} has a scale for each of its parts, and cannot be fused with others"
            raise UnsupportedQuantization(message)
    params = {}
    for role in sorted({role for record in records for role in record.tensors} - {"bias"}):
        missing = [record.name for record in records if role not in record.tensors]
        if missing:
            raise CheckpointError(f"{role}: {missing[0]} has none, but another layer fused with it has")
        params[role] = [checkpoint.tensor(record.tensors[role]) for record in records]
    return params


def _of_parts(tensor: NDArray[Any], record: LayerRecord) -> list[NDArray[Any]]:
    """The share of each part of a fused linear in a tensor: its rows, its scale, or the one scale of all."""
    if tensor.shape[:1] == (record.shape[0],):
        return np.split(tensor, np.cumsum(record.partitions)[:-1])
    values = as_float32(tensor).reshape(-1)
    return [
        values[index : index + 1] if values.size > 1 else values for index in range(len(record.partitions))
    ]


def _shares_input_scale(algo: str) -> bool:
    """Whether a linear quantizes all its activations with one scale, the layer's input_scale."""
    facts = ALGORITHMS.get(algo)
    return facts is not None and facts.linear == "e4m3_tensor"


def _all_the_same(scales: Sequence[NDArray[Any]]) -> bool:
    """Whether there are several, of one value."""
    return len(scales) > 1 and all(np.array_equal(scale, scales[0]) for scale in scales)


def _on_device(method: LinearMethod, role: str, tensors: list[NDArray[Any]]) -> list[Any]:
    """The tensors where `prepare` wants them: codes on the device; float scales it reads from the host."""
    spec = method.checkpoint_params.get(role)
    if spec is None or spec.dtype == "float32":
        return list(tensors)
    return [to_device(np.ascontiguousarray(tensor), method.device) for tensor in tensors]


def _as_linear(checkpoint: CheckpointReader, record: LayerRecord | Projection) -> LayerRecord:
    """The record, if it is a linear and nothing that would make it run wrong stands against it."""
    if not isinstance(record, LayerRecord) or record.kind != "linear":
        raise UnsupportedQuantization(f"{record.name}: {_instead(record)}")
    errors = [problem for problem in record.problems if problem.severity == "error"]
    if errors:
        text = "; ".join(f"{problem.code}: {problem.message}" for problem in errors)
        raise CheckpointError(f"{record.name}: {text}", file=checkpoint.directory, tensor=errors[0].tensor)
    if 0 in record.shape:
        message = f"{record.name}: its weight is empty, of shape {list(record.shape)}"
        raise CheckpointError(message, file=checkpoint.directory, tensor=record.tensors["weight"])
    return record


def _instead(record: LayerRecord | Projection) -> str:
    """A hint what to do with a layer that is no linear."""
    if isinstance(record, Projection):
        return (
            f"a projection of {record.shape[0]} stacked experts ({record.quant_algo}), which run together: "
            f"load {record.name.rpartition('.')[0]!r}; dequantize({record.name!r}) reads it"
        )
    if record.kind == "embedding":
        return (
            f"an embedding table ({record.quant_algo}), which is looked up and not multiplied; "
            f"dequantize({record.name!r}) reads it"
        )
    if record.kind == "convolution":
        return (
            f"a convolution ({record.quant_algo}) of shape {list(record.shape)}, which has no method; "
            f"dequantize({record.name!r}) reads it"
        )
    return f"{record.shape[0]} experts ({record.quant_algo}), which are fused with nothing; load them alone"


def _refuse_unlike(records: Sequence[LayerRecord]) -> None:
    """Layers multiplied as one have one format and one input."""

    def refuse(what: str, values: Sequence[object], error: type[ValueError]) -> None:
        if len(set(values)) > 1:
            each = ", ".join(f"{record.name} {value}" for record, value in zip(records, values, strict=True))
            raise error(f"layers fused along rows need the same {what}, got {each}; load them one by one")

    refuse("quant_algo", [record.quant_algo for record in records], UnsupportedQuantization)
    refuse("group_size", [record.group_size for record in records], UnsupportedQuantization)
    refuse("rank", [record.rank for record in records], UnsupportedQuantization)
    refuse("in_features", [record.shape[1] for record in records], ValueError)


def _fused_bias(checkpoint: CheckpointReader, records: Sequence[LayerRecord]) -> NDArray[np.float32] | None:
    """The biases one after the other in float32, zeros for a layer without one; None when none has one."""
    if not any("bias" in record.tensors for record in records):
        return None
    parts = []
    for record in records:
        name = record.tensors.get("bias")
        bias = as_float32(checkpoint.tensor(name)) if name else np.zeros(record.shape[0], np.float32)
        if bias.shape != (record.shape[0],):
            raise CheckpointError(
                f"bias: expected shape [{record.shape[0]}], got {list(bias.shape)}",
                file=checkpoint.directory,
                tensor=name,
            )
        parts.append(bias)
    return np.concatenate(parts)
