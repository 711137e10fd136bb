"""The experts of a checkpoint, however they are stored, as the stacks that `MoEMethod.prepare` takes.

Every stored form is read as tensors of one expert each, which go to their slots one after the other: a member
of experts stored one by one is such a tensor, and a stack in one tensor is cut, and turned where it lies
[experts, in, out]. NVFP4 codes that lie so are packed along the input, with the even one low, so that turning
the bytes is all it takes. So beside the stacks only one expert's tensor is in memory.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS, BLOCK_SIZES
from moqext.errors import CheckpointError
from moqext.layers.expert_form import find_forms, instead_of_running
from moqext.layers.moe import MoEMethod
from moqext.layers.stacks import ExpertStacks, find_slot
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.config.expert_config import read_expert_config
from moqext.reader.findings.lost_gates import lost_gate
from moqext.reader.formats.scale_values import Float32, decode_scales
from moqext.reader.formats.stored import ceil_div
from moqext.reader.naming import parse_expert_name
from moqext.reader.records import LayerRecord, Projection, role_of

_TILE = (64, 512)
"""Rows and columns of bytes that are turned at once: few enough for the first cache."""


class _Piece(NamedTuple):
    """A tensor of one expert, as `MoEMethod.load` takes it."""

    name: str
    expert: int
    """Number in the container."""
    tensor: NDArray[Any]


def stack_experts(
    checkpoint: CheckpointReader, layer: str | LayerRecord
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The experts of a container in stacks, and what `MoEMethod` has to know of them.

    Stacks that are optional and that the checkpoint does not have are left out; activation scales that some
    experts lack are NaN there.

    Args:
        checkpoint: where they are.
        layer: the container, as a record or by its name.

    Returns:
        The keyword arguments of `MoEMethod` that the stored form and config.json imply, and the stacks of
        `MoEMethod(**options).checkpoint_params`, codes as uint8. `top_k` and `activation` are there where
        config.json says them.

    Raises:
        UnsupportedQuantization: the experts have no method, or are in several formats.
        CheckpointError: nothing quantized has that name, it is no container of experts, a problem of severity
            "error" stands against it, its gates are gone, or its tensors do not fit.
    """
    record = as_experts(checkpoint, layer)
    try:
        forms = find_forms(checkpoint, record)
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{error}; {instead_of_running(record)}") from None
    if len(forms) > 1:
        each = ", ".join(f"{len(form.experts)} x {form.format}" for form in forms)
        raise UnsupportedQuantization(
            f"{record.name}: experts in several formats ({each}) are no one stack; load(...) runs them"
        )
    said = read_expert_config(checkpoint.model_config, checkpoint.architectures, record.name)
    if why := lost_gate(record, checkpoint.layers(), said.activation):
        raise CheckpointError(f"{record.name}: {why}", file=checkpoint.directory)
    known = {"activation": said.activation, "top_k": said.top_k, **said.swiglu}
    options = forms[0].options() | {name: value for name, value in known.items() if value is not None}
    method = MoEMethod(**forms[0].options(), top_k=1)
    stacks = fill_stacks(checkpoint, record, forms[0].experts, method)
    there = {name: stacks[name] for name, filled in stacks.filled.items() if filled.any()}
    for name in there:
        stacks.filled[name][...] = True  # absent activation scales are NaN, which says so
    return options, there


def as_experts(checkpoint: CheckpointReader, layer: str | LayerRecord) -> LayerRecord:
    """The record of a container of experts.

    Raises:
        CheckpointError: nothing quantized has that name, or it is no container of experts.
    """
    record = layer if isinstance(layer, LayerRecord) else checkpoint.layer(layer)
    if not isinstance(record, LayerRecord) or record.kind != "moe":
        raise CheckpointError(f"{record.name} is no container of experts", file=checkpoint.directory)
    return record


def fill_stacks(
    checkpoint: CheckpointReader, record: LayerRecord, experts: Sequence[int], method: MoEMethod
) -> ExpertStacks:
    """Some experts of a container, in this order, in stacks of a method that has as many.

    Raises:
        CheckpointError: a tensor does not fit, or is missing.
    """
    stacks = method.new_params()
    places = {number: place for place, number in enumerate(experts)}
    pieces = _of_members if record.members else _of_projections
    try:
        for piece in pieces(checkpoint, record, places):
            method.load(stacks, piece.name, places[piece.expert], piece.tensor)
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{record.name}: {error}", file=checkpoint.directory) from error
    _check_filled(checkpoint, record, method, stacks)
    return stacks


def read_input_scales(
    checkpoint: CheckpointReader, record: LayerRecord, experts: Collection[int], stack: str
) -> Float32:
    """Every activation scale that these experts have for "w13" or "w2"."""
    pieces = (_of_members if record.members else _of_projections)(checkpoint, record, experts, "input_scale")
    found = [piece.tensor.ravel() for piece in pieces if find_slot(piece.name, True).stack.startswith(stack)]
    return np.concatenate(found) if found else np.empty(0, np.float32)


def _check_filled(
    checkpoint: CheckpointReader, record: LayerRecord, method: MoEMethod, stacks: ExpertStacks
) -> None:
    """Refuses slots that no tensor filled; an activation scale that was not there becomes NaN."""
    specs = method.checkpoint_params
    for name, filled in stacks.filled.items():
        if name.endswith("input_scale"):
            stacks[name][~filled.reshape(stacks[name].shape)] = np.nan
        elif not filled.all() and (filled.any() or specs[name].required):
            expert, half = np.argwhere(~filled)[0]
            part = ("gate", "up")[half] if filled.shape[1] > 1 else name.partition("_")[0]
            raise CheckpointError(
                f"{record.name}: {name}: expert {expert} ({part}) has none, others have",
                file=checkpoint.directory,
            )


# Experts stored one by one


def _of_members(
    checkpoint: CheckpointReader, record: LayerRecord, places: Collection[int], only: str | None = None
) -> Iterator[_Piece]:
    factors: dict[int, set[bool]] = {}
    for member in record.members:
        name = parse_expert_name(member.name)
        if name is None or name.expert not in places:
            continue
        if role_of(member) != "down":
            factors.setdefault(name.expert, set()).add("pre_quant_scale" in member.tensors)
        for role, tensor in member.tensors.items():
            if only in (None, role) and _is_used(role, member.quant_algo):
                value = _read(checkpoint, tensor, role, member.quant_algo)
                yield _Piece(f"{name.projection}.{role}", name.expert, value)
    half = next((number for number, found in factors.items() if len(found) > 1), None)
    if half is not None:
        raise CheckpointError(
            f"{record.name}: expert {half}: one of gate and up has a pre_quant_scale, the other has none",
            file=checkpoint.directory,
        )


def _is_used(role: str, algo: str) -> bool:
    """Whether a method makes use of a tensor; one that it does not is a note of the checkpoint's problems."""
    return role != "input_scale" or ALGORITHMS[algo].input_scale is not None


def _is_codes(role: str, algo: str) -> bool:
    """Whether the bytes of a tensor are kept as they are; all else becomes float32."""
    return role == "weight" or (role == "weight_scale" and ALGORITHMS[algo].scale_dtype != "float32")


def _read(checkpoint: CheckpointReader, tensor: str, role: str, algo: str) -> NDArray[Any]:
    array = checkpoint.tensor(tensor)
    if _is_codes(role, algo):
        return array.view(np.uint8)
    return decode_scales(checkpoint.tensors[tensor].dtype, array)


# Experts stacked in one tensor


def _of_projections(
    checkpoint: CheckpointReader, record: LayerRecord, places: Collection[int], only: str | None = None
) -> Iterator[_Piece]:
    for projection in record.projections:
        last = projection.name.rpartition(".")[2]
        for role, tensor in projection.tensors.items():
            if only not in (None, role) or not _is_used(role, projection.quant_algo):
                continue
            name = f"{last}.{role}"
            if _is_codes(role, projection.quant_algo):
                for expert in places:
                    rows = checkpoint.rows(tensor, expert, expert + 1)[0].view(np.uint8)
                    yield _Piece(name, expert, turned(rows) if projection.transposed else rows)
                continue
            each = _small(checkpoint, projection, role, tensor)
            yield from (_Piece(name, expert, each[expert]) for expert in places)


def turned(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The transpose of a matrix of bytes, contiguous; tile by tile, as NumPy alone is many times slower."""
    rows, columns = codes.shape
    out = np.empty((columns, rows), np.uint8)
    down, across = _TILE
    for row in range(0, rows, down):
        for column in range(0, columns, across):
            tile = np.ascontiguousarray(codes[row : row + down, column : column + across])
            out[column : column + across, row : row + down] = tile.T
    return out


def _small(checkpoint: CheckpointReader, projection: Projection, role: str, tensor: str) -> Float32:
    """Scales, factors and biases of a stack, experts first."""
    values = decode_scales(checkpoint.tensors[tensor].dtype, checkpoint.tensor(tensor))
    experts, rows, columns = projection.shape
    try:
        if role == "bias":
            return values.reshape(experts, rows)
        if role == "pre_quant_scale":
            return np.broadcast_to(values.reshape(-1, columns), (experts, columns))
        if role == "weight_scale" and ALGORITHMS[projection.quant_algo].scales == "blocks":
            return _blocks(projection, values)
        if role == "weight_scale" and ALGORITHMS[projection.quant_algo].scales == "rows":
            return _rows(projection, values)
        return _single(projection, values)
    except ValueError as error:
        message = f"{projection.name}: {role} of shape {list(values.shape)} does not fit the experts"
        raise CheckpointError(message, file=checkpoint.directory, tensor=tensor) from error


def _single(projection: Projection, values: Float32) -> Float32:
    """One value for all, one an expert, or [experts, 2] of gate and up, as [experts, 1] or [experts, 2]."""
    experts = projection.shape[0]
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (experts, 1))
    halves = 2 if projection.role == "gate_up" and values.size == 2 * experts else 1
    return values.reshape(experts, halves)


def _rows(projection: Projection, values: Float32) -> Float32:
    """One value an output, [experts, out], of one for all, one an expert, or one for each output."""
    experts, rows, _ = projection.shape
    if values.size in (1, experts):
        return np.broadcast_to(values.reshape(-1, 1), (experts, rows))
    return values.reshape(experts, rows)


def _blocks(projection: Projection, values: Float32) -> Float32:
    """[experts, blocks of rows, blocks of columns], those of gate before those of up.

    Gate and up in one tensor are blocked as one; no block has rows of both, unless it is the only one.
    """
    size = BLOCK_SIZES[projection.quant_algo]
    experts, rows, columns = projection.shape
    # A scale of the transposed weight with one block one way has its values in this order, too.
    down, across = ceil_div(rows, size), ceil_div(columns, size)
    if values.size in (1, experts) and down * across == 1:
        values = np.broadcast_to(values.reshape(-1, 1, 1), (experts, 1, 1))
    elif projection.transposed:
        values = values.reshape(experts, across, down).swapaxes(1, 2)
    else:
        values = values.reshape(experts, down, across)
    if projection.role != "gate_up" or rows // 2 % size == 0:
        return values
    return np.repeat(values, 2, axis=1)  # one block, of all rows
