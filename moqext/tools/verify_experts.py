"""`verify` of a layer of experts: its weights as they are stored, and its outputs under two routings.

First every expert's weight, as the layer was given it, must be the one that `dequantize` reads, bit for bit:
so a stack that was cut or turned wrongly is found whatever the products are. Then tokens are routed, once so
that every expert has some, and once so that few have nearly all, and outputs are compared with the reference.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import ops, reference
from moqext._C import UnsupportedQuantization
from moqext.errors import CheckpointError
from moqext.layers.load_experts import ExpertLayer, ExpertPart, plan_parts, prepare_part
from moqext.layers.moe import MoEMethod
from moqext.layers.stacks import ExpertStacks
from moqext.ops import to_device
from moqext.ops.spelling import SWIGLU, Compute, DtypeName
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.config.expert_config import read_expert_config
from moqext.reader.findings.lost_gates import lost_gate
from moqext.reader.matrices import matrix_of
from moqext.reader.naming import number_ranges, parse_expert_name
from moqext.reader.records import LayerRecord, Projection, is_gated, role_of
from moqext.reference.experts import expert_params
from moqext.tools.expert_slack import expert_slack, rounds_d, sums_in_cores
from moqext.tools.verify_row import (
    LIMITS,
    Row,
    activations,
    carrier,
    compare,
    errors_of,
    judged,
    reason_of,
    timed_calls,
)

Routing = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Weights and numbers of experts, [T, k]."""

OPTIONS = ("quant_algo", "activation", "gated", "interleaved", *SWIGLU, "group_size", "dtype")
"""Attributes of `MoEMethod` that the reference has as arguments."""


class _Outputs(NamedTuple):
    """Outputs of the layer for all tokens, and the time of each call of the first routing."""

    x: NDArray[Any]
    routing: Routing
    y: NDArray[np.float32]
    seconds: list[float]
    tokens: int
    """Tokens of the first routing."""


def why_not_together(
    checkpoint: CheckpointReader, record: LayerRecord, *, device: str, dtype: DtypeName, compute: Compute
) -> str:
    """Why the experts of a container cannot run as a layer; empty where they can. No tensor is read."""
    try:
        options = _computed(checkpoint, record)
        everyone = range(record.shape[0])
        plan_parts(checkpoint, record, everyone, device=device, dtype=dtype, compute=compute, **options)
    except (UnsupportedQuantization, CheckpointError) as error:
        return reason_of(record.name, error)
    return ""


def _computed(checkpoint: CheckpointReader, record: LayerRecord) -> dict[str, Any]:
    """Options by config.json, or such as the layer may have: kernels are to be verified, not the model."""
    said = read_expert_config(checkpoint.model_config, checkpoint.architectures, record.name)
    activation = said.activation or "silu"
    if not is_gated(record) and activation == "swigluoai":
        activation = "silu"  # which runs; `verify_experts` refuses it
    top_k = min(said.top_k or 2, record.shape[0])
    return {"top_k": top_k, "activation": activation, **said.swiglu}


def verify_experts(
    checkpoint: CheckpointReader,
    record: LayerRecord,
    row: Row,
    rng: np.random.Generator,
    *,
    tokens: int,
    device: str,
    dtype: DtypeName,
    compute: Compute,
) -> Row:
    """The row of a container of experts, from one that says what it is.

    Args:
        checkpoint: Where it is stored.
        record: The container.
        row: Its row, without a verdict.
        rng: Source of the activations and of the routing.
        tokens: Rows of x; as many more as it takes for every expert to have one.
        device: "cpu" or "cuda:N".
        dtype: Of the activations.
        compute: As for `MoEMethod`.
    """
    count = record.shape[0]
    said = read_expert_config(checkpoint.model_config, checkpoint.architectures, record.name)
    if why := lost_gate(record, checkpoint.layers(), said.activation):
        return replace(row, status="failed", message=why)
    try:
        start = time.perf_counter()
        planned = plan_parts(
            checkpoint,
            record,
            range(count),
            device=device,
            dtype=dtype,
            compute=compute,
            **_computed(checkpoint, record),
        )
        read = [prepare_part(checkpoint, record, part) for part in planned]
        layer = ExpertLayer(record.name, [part for part, _ in read], range(count), count)
        prepared = time.perf_counter()
        fault = _misread(checkpoint, record, read)
        if fault:
            return replace(row, status="failed", message=fault)
        outputs = _run(layer, rng, tokens)
    except UnsupportedQuantization as error:  # a row that no kernel holds
        return _only_read(checkpoint, record, row, reason_of(record.name, error))
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        return replace(row, message=reason_of(record.name, error))
    near, expected, exact = _beside_the_reference(layer, read, outputs)
    relative, largest = compare(near, expected)
    exact_error, rounding_error = errors_of(outputs.y, exact, dtype)
    good, fault = judged(relative, largest, dtype)
    wrong = "" if good else _blamed(near, expected, outputs.routing[1], LIMITS[dtype][1])
    return replace(
        row,
        status="ok" if good else "failed",
        kernel=layer.backend_for(outputs.tokens),
        relative_error=relative,
        max_error=largest,
        exact_error=exact_error,
        rounding_error=rounding_error,
        prepare_seconds=prepared - start,
        run_seconds=statistics.median(outputs.seconds),
        calls=len(outputs.seconds),
        message=f"{fault}{wrong}",
    )


def _misread(
    checkpoint: CheckpointReader, record: LayerRecord, read: Sequence[tuple[ExpertPart, ExpertStacks]]
) -> str:
    """Which weight of the stacks is not the checkpoint's; empty for none."""
    members = _by_expert(record)
    for part, stacks in read:
        method = part.method
        there = filled_stacks(stacks)
        for place, number in enumerate(part.experts):
            halves = 2 if method.gated else 1
            w13 = expert_params(there, "w13", place, halves, method.interleaved)
            (w2,) = expert_params(there, "w2", place, 1, False)
            mine = dict(zip(("gate", "up") if method.gated else ("up",), w13, strict=True)) | {"down": w2}
            for role, name, stored in _stored_weights(checkpoint, record, members.get(number, ()), number):
                values = _values(mine[role], method.quant_algo, method.group_size)
                differing = int(np.count_nonzero(~np.equal(values, stored)))
                if differing:
                    return f"{name}, expert {number}: {differing:,} of {stored.size:,} weights are misread"
    return ""


def _only_read(checkpoint: CheckpointReader, record: LayerRecord, row: Row, why: str) -> Row:
    """The row of experts that cannot run: every weight has to be finite."""
    members = _by_expert(record)
    for number in range(record.shape[0]):
        for _, name, weight in _stored_weights(checkpoint, record, members.get(number, ()), number):
            bad = weight.size - int(np.count_nonzero(np.isfinite(weight)))
            if bad:
                message = f"{name}, expert {number}: {bad:,} of {weight.size:,} weights are NaN or infinite"
                return replace(row, status="failed", message=message)
    return replace(row, status="read", message=why)


def filled_stacks(stacks: ExpertStacks) -> dict[str, NDArray[Any]]:
    """The stacks that the checkpoint has."""
    return {name: stacks[name] for name, filled in stacks.filled.items() if filled.any()}


def _values(params: Mapping[str, Any], algo: str, group_size: int | None) -> NDArray[np.float32]:
    scales = {role: params[role] for role in ("weight_scale", "weight_scale_2") if role in params}
    values: NDArray[np.float32] = ops.dequantize(params["weight"], algo, group_size=group_size, **scales)
    return values * params["pre_quant_scale"] if "pre_quant_scale" in params else values


def _by_expert(record: LayerRecord) -> dict[int, list[LayerRecord]]:
    """The linears of each expert, of those stored one by one."""
    members: dict[int, list[LayerRecord]] = {}
    for member in record.members:
        expert = parse_expert_name(member.name)
        if expert is not None:
            members.setdefault(expert.expert, []).append(member)
    return members


def _stored_weights(
    checkpoint: CheckpointReader, record: LayerRecord, members: Iterable[LayerRecord], number: int
) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Role, name and weight [out, in] of each projection of an expert, as the checkpoint has it."""
    for member in members:
        weight = matrix_of(checkpoint, member)
        yield role_of(member), member.name, weight.rows(0, weight.shape[0])
    for projection in record.projections:
        yield from _stored_halves(checkpoint, projection, number)


def _stored_halves(
    checkpoint: CheckpointReader, projection: Projection, number: int
) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    (weight,) = matrix_of(checkpoint, projection).rows(number, number + 1)
    rows = weight.T if projection.transposed else weight
    if projection.role != "gate_up":
        yield projection.role, projection.name, rows
        return
    half = len(rows) // 2
    gate, up = (rows[0::2], rows[1::2]) if projection.interleaved else (rows[:half], rows[half:])
    yield "gate", projection.name, gate
    yield "up", projection.name, up


def all_experts(rng: np.random.Generator, tokens: int, layer: ExpertLayer | MoEMethod) -> Routing:
    """Every expert has as many tokens as any other, one at least."""
    count, top_k = layer.num_experts, layer.top_k
    rows = max(tokens, ceil(count / top_k))
    rounds = [rng.permutation(count) for _ in range(ceil(rows * top_k / count))]
    ids = np.concatenate(rounds)[: rows * top_k].reshape(rows, top_k)
    return _router_weights(rng, ids.shape), ids.astype(np.int32)


def few_experts(rng: np.random.Generator, tokens: int, layer: ExpertLayer | MoEMethod) -> Routing:
    """Half of the slots have the same expert, and the others few."""
    order = rng.permutation(layer.num_experts)
    ids = order[(layer.num_experts * rng.random((tokens, layer.top_k)) ** 4).astype(np.int64)]
    ids[::2, 0] = order[0]
    return _router_weights(rng, ids.shape), ids.astype(np.int32)


def _router_weights(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    weights = rng.random(shape, np.float32) + np.float32(0.05)
    shares: NDArray[np.float32] = weights / weights.sum(axis=1, keepdims=True, dtype=np.float32)
    return shares


def _run(layer: ExpertLayer, rng: np.random.Generator, tokens: int) -> _Outputs:
    method = layer.parts[0].method
    on_device = method.device != "cpu"
    calls: list[tuple[NDArray[Any], Routing, NDArray[np.float32], list[float]]] = []
    for routing in (all_experts(rng, tokens, layer), few_experts(rng, tokens, layer)):
        x = carrier(activations(rng, len(routing[1]), layer.hidden_size), method.dtype)
        there = [to_device(array, method.device) if on_device else array for array in (x, *routing)]
        call = partial(layer, there[0], there[1], there[2])
        calls.append((x, routing, *timed_calls(call, on_device=on_device)))
    first, second = calls
    weights, ids = (np.concatenate(both) for both in zip(first[1], second[1], strict=True))
    x, y = (np.concatenate([first[place], second[place]]) for place in (0, 2))
    return _Outputs(x, (weights, ids), y, first[3], len(first[0]))


def _beside_the_reference(
    layer: ExpertLayer, read: Sequence[tuple[ExpertPart, ExpertStacks]], outputs: _Outputs
) -> tuple[NDArray[Any], NDArray[np.float64], NDArray[np.float64]]:
    """Outputs, the reference's, and those before they are rounded.

    Where outputs differ by more than the limits, they are as near as roundings may be.
    """
    dtype = layer.parts[0].method.dtype
    x, y = reference.as_float32(outputs.x), outputs.y
    exact = _of_reference(layer, read, reference.experts_reference, x, outputs)
    expected = np.asarray(reference.round_to(exact, dtype), np.float64)
    limit, limit_max = LIMITS[dtype]
    relative, largest = compare(y, expected)
    if relative <= limit and largest <= limit_max:
        return y, expected, exact
    slack = _of_reference(layer, read, expert_slack, x, outputs)
    with np.errstate(invalid="ignore"):
        apart = y - expected
        near = expected + np.sign(apart) * np.maximum(np.abs(apart) - slack, 0)
    return np.where(np.isfinite(y) & np.isfinite(expected), near, y), expected, exact


def _of_reference(
    layer: ExpertLayer,
    read: Sequence[tuple[ExpertPart, ExpertStacks]],
    function: Callable[..., NDArray[np.float64]],
    x: NDArray[np.float32],
    outputs: _Outputs,
) -> NDArray[np.float64]:
    """A function of the reference's arguments, summed over the formats of the layer."""
    total = np.zeros(x.shape)
    for part, stacks in read:
        options = {name: getattr(part.method, name) for name in OPTIONS}
        options["compute"] = part.method.compute_for(outputs.tokens)
        if function is expert_slack:
            kernel = part.method.backend_for(outputs.tokens)
            options["in_cores"] = sums_in_cores(kernel)
            options["rounded"] = rounds_d(kernel, part.method.dtype)
        options["expert_map"] = np.full(layer.global_num_experts, -1, np.int32)
        options["expert_map"][list(part.experts)] = np.arange(len(part.experts))
        with np.errstate(invalid="ignore", over="ignore"):  # what is NaN or infinite is so on both sides
            total += function(x, filled_stacks(stacks), *outputs.routing, **options)
    return total


def _blamed(y: NDArray[Any], expected: NDArray[np.float64], ids: NDArray[np.int32], limit: float) -> str:
    """The experts all of whose tokens are wrong, where that is not every one."""
    beyond = np.array([compare(y[t : t + 1], expected[t : t + 1])[1] > limit for t in range(len(ids))])
    there = np.unique(ids).tolist()
    wrong = [number for number in there if beyond[(ids == number).any(axis=1)].all()]
    if not wrong or len(wrong) == len(there):
        return ""
    return f"; every token of experts {number_ranges(wrong)} is beyond them"
