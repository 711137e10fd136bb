"""Finds layers without the activation scale that layers like them have.

A layer whose algorithm quantizes activations with a stored scale, and that has none, quantizes them by what
it meets: right for a whole checkpoint without calibration, and odd for one layer among calibrated ones.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from moqext.algorithms import STATIC_ACTIVATIONS
from moqext.naming import FUSED_GROUPS, name_pattern, parse_expert_name
from moqext.problems import make_problem
from moqext.records import LayerRecord


def mark_partial_input_scales(layers: Mapping[str, LayerRecord]) -> dict[str, LayerRecord]:
    """The records, with a warning in place of the note where others of their kind have the scale.

    Of one kind are layers whose names differ only in numbers, and projections of one input. Experts are
    judged with their group.
    """
    kinds: dict[Hashable, list[LayerRecord]] = defaultdict(list)
    for record in layers.values():
        if record.kind == "linear" and record.quant_algo in STATIC_ACTIVATIONS:
            for kind in _kinds(record):
                kinds[kind].append(record)
    marked = dict(layers)
    for alike in kinds.values():
        having = next((record for record in alike if "input_scale" in record.tensors), None)
        if having is None:
            continue
        for record in alike:
            if "input_scale" not in record.tensors:
                marked[record.name] = _mark(record, having)
    return marked


def _kinds(record: LayerRecord) -> Iterator[Hashable]:
    if parse_expert_name(record.name) is not None:
        return
    yield name_pattern(record.name), record.quant_algo
    parent, _, last = record.name.rpartition(".")
    yield from ((parent, group, record.quant_algo) for group in FUSED_GROUPS if last in group)


def _mark(record: LayerRecord, having: LayerRecord) -> LayerRecord:
    message = f"{record.quant_algo} without input_scale, though {having.name} has one"
    others = [problem for problem in record.problems if problem.code != "missing_input_scale"]
    problem = make_problem("input_scale_partial", message, layer=record.name)
    return replace(record, problems=(*others, problem))
