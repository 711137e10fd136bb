"""The methods that engines make of a checkpoint's layers, each description once, for `tune` and `bench`.

Headers tell all of it. A linear runs alone, as in plain PyTorch, and fused with its siblings, as engines do;
fused layers of FP8 run as one product or part by part, by their activation scales, and take codes from the
activation before them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext.checkpoint import Checkpoint
from moqext.cli.config_layers import config_layers
from moqext.errors import CheckpointError
from moqext.layers.linear import LinearMethod
from moqext.layers.load_experts import computed_options, plan_parts
from moqext.layers.moe import MoEMethod
from moqext.layers.tuning import Cell, cells_of, layer_key
from moqext.ops.spelling import Compute, Dtype
from moqext.reader.naming import FUSED_GROUPS
from moqext.reader.records import LayerRecord
from moqext.tools.bench import random_params
from moqext.tools.bench_layers import ModelLayer


class Row(NamedTuple):
    """The kernel of a layer and a number of tokens.

    Attributes:
        tokens: rows of x.
        kernel, variant: the fastest, "family:name" and which of its ways.
        seconds: of a call.
        estimated: the kernel that is chosen without the cache.
        estimated_seconds: of a call of that one, None where it was not measured.
    """

    tokens: int
    kernel: str
    variant: int
    seconds: float
    estimated: str
    estimated_seconds: float | None


def find_layers(
    checkpoint: Checkpoint, *, device: str, dtype: Dtype, compute: Compute
) -> tuple[list[ModelLayer], dict[str, str]]:
    """The layers of a checkpoint by their description.

    Args:
        checkpoint: headers are enough.
        device: "cpu" or "cuda:N".
        dtype: of the activations.
        compute: what is multiplied.

    Returns:
        The descriptions, in the order of their first layers, and why a layer has none, by its name.
    """
    options = {"device": device, "dtype": dtype, "compute": compute}
    return _by_description(_candidates(checkpoint, options))


def model_layers(
    checkpoint: Checkpoint, *, device: str, compute: Compute
) -> tuple[list[ModelLayer], dict[str, str]]:
    """Every layer of a checkpoint as a pass runs it, once: linears fused where engines fuse them.

    Linears of FP8 that are fused have one activation scale, as calibrated together.

    Args:
        checkpoint: headers are enough; without, the sizes of config.json.
        device: "cpu" or "cuda:N".
        compute: what is multiplied.

    Returns:
        As `find_layers`.

    Raises:
        CheckpointError: there are no headers, and config.json is of an unknown model.
    """
    if not checkpoint.files.has_weights:
        return _by_description(config_layers(checkpoint, device=device, compute=compute))
    return _by_description(_of_a_pass(checkpoint, {"device": device, "compute": compute}))


def _by_description(
    candidates: Iterable[tuple[str, Iterator[LinearMethod | MoEMethod]]],
) -> tuple[list[ModelLayer], dict[str, str]]:
    found: dict[str, ModelLayer] = {}
    refused: dict[str, str] = {}
    for names, make in candidates:
        try:
            methods = list(make)
        except (UnsupportedQuantization, CheckpointError, ValueError) as error:
            refused[names] = str(error)
            continue
        for method in methods:
            found.setdefault(layer_key(method), ModelLayer(method, [])).names.append(names)
    return list(found.values()), refused


def time_layer(
    method: LinearMethod | MoEMethod, counts: Sequence[int], rng: np.random.Generator
) -> tuple[list[Row], dict[int, Cell]]:
    """Times a layer on random codes and activations, since times do not depend on what is in a checkpoint.

    Args:
        method: of the layer.
        counts: numbers of tokens.
        rng: source of the codes.

    Returns:
        A row for each number, and what the cache keeps of them.
    """
    plan = method._plan
    timings = method.tune(counts, random_params(method, rng))
    rows = []
    for count in counts:
        estimated = min(plan.estimates(count), key=lambda row: row[2])[0]
        measured = [row for row in timings if row.tokens == count]
        best = next(row for row in measured if row.chosen)
        times = [row.seconds for row in measured if (row.kernel, row.variant) == (estimated, 0)]
        rows.append(Row(count, *best[1:4], estimated, times[0] if times else None))
    return rows, cells_of(plan, [row[:4] for row in rows])


def _candidates(
    checkpoint: Checkpoint, options: dict[str, Any]
) -> Iterator[tuple[str, Iterator[LinearMethod | MoEMethod]]]:
    """Layers and fused groups by name, each with what makes its methods."""
    linears = [record for record in checkpoint.layers() if record.kind == "linear"]
    for record in linears:
        yield record.name, _linear_methods([record], options)
    for group in _fused(linears):
        yield " + ".join(record.name for record in group), _linear_methods(group, options)
    for record in checkpoint.layers():
        if record.kind == "moe":
            yield record.name, _expert_methods(checkpoint, record, options)


def _of_a_pass(
    checkpoint: Checkpoint, options: dict[str, Any]
) -> Iterator[tuple[str, Iterator[LinearMethod | MoEMethod]]]:
    """Fused groups in the place of their first member, other linears alone, and experts."""
    linears = [record for record in checkpoint.layers() if record.kind == "linear"]
    groups = {record.name: group for group in _fused(linears) for record in group}
    done: set[str] = set()
    for record in checkpoint.layers():
        if record.kind == "moe":
            yield record.name, _expert_methods(checkpoint, record, options)
        elif record.kind == "linear" and record.name not in done:
            group = groups.get(record.name, [record])
            done.update(member.name for member in group)
            yield " + ".join(member.name for member in group), _one_method(group, options)


def _one_method(records: Sequence[LayerRecord], options: dict[str, Any]) -> Iterator[LinearMethod]:
    """The last but those that take codes: of fused layers with one activation scale."""
    methods = [method for method in _linear_methods(records, options) if not method.quantized_input]
    yield methods[-1]


def _fused(linears: Iterable[LayerRecord]) -> Iterator[list[LayerRecord]]:
    """Siblings that engines run as one linear: of one format and one input."""
    siblings: dict[str, dict[str, LayerRecord]] = defaultdict(dict)
    for record in linears:
        parent, _, last = record.name.rpartition(".")
        siblings[parent][last] = record
    for children in siblings.values():
        for names in FUSED_GROUPS:
            group = [children[name] for name in names if name in children]
            kinds = {(record.quant_algo, record.group_size, record.rank, record.shape[1]) for record in group}
            if len(group) == len(names) and len(kinds) == 1:
                yield group


def _linear_methods(records: Sequence[LayerRecord], options: dict[str, Any]) -> Iterator[LinearMethod]:
    """Every method that an engine may make of a linear or a fused group."""
    first = records[0]
    if 0 in first.shape:
        raise UnsupportedQuantization("its weight is empty")
    partitions = [rows for record in records for rows in record.out_partitions]
    facts = ALGORITHMS.get(first.quant_algo)
    scaled = facts is not None and facts.linear == "e4m3_tensor"
    coded = scaled and facts is not None and not facts.pre_quant_scale
    for one_scale in (False, True) if scaled and len(partitions) > 1 else (False,):
        about = {"group_size": first.group_size, "one_input_scale": one_scale, "rank": first.rank, **options}
        yield LinearMethod(first.quant_algo, first.shape[1], partitions, **about)
        if coded and (one_scale or len(partitions) == 1):
            yield LinearMethod(first.quant_algo, first.shape[1], partitions, quantized_input=True, **about)


def _expert_methods(
    checkpoint: Checkpoint, record: LayerRecord, options: dict[str, Any]
) -> Iterator[MoEMethod]:
    """The method of each format among the experts of a container."""
    about = computed_options(checkpoint, record, None, None)
    for part in plan_parts(checkpoint, record, range(record.shape[0]), **about, **options):
        yield part.method
