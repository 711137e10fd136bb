"""Finds layers without the activation scale that layers like them have, and experts with one out of scale.

A layer whose algorithm quantizes activations with a stored scale, and that has none, quantizes them by what
it meets: right for a whole checkpoint without calibration, and odd for one layer among calibrated ones.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from statistics import median

from moqext.algorithms import ALGORITHMS, STATIC_ACTIVATIONS
from moqext.reader.formats.scale_values import ABSURD_AMAX, Scales
from moqext.reader.naming import FUSED_GROUPS, PROJECTIONS, name_pattern, parse_expert_name
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import LayerRecord, Projection


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


MAX_SPREAD = 448 / 2**-6
"""Largest over median of the scales of a projection in a layer: beyond, activations of most experts lie among
the subnormals of e4m3 or become zero."""


def mark_outlying_scales(group: LayerRecord, scales: Scales) -> LayerRecord:
    """The record of experts, with a problem where one activation scale dwarfs the others.

    Gate and up have one input, down another. A method with one scale for all experts takes the largest.
    """
    found = tuple(_outlying(group, scales))
    return replace(group, problems=(*group.problems, *found)) if found else group


def _outlying(group: LayerRecord, scales: Scales) -> Iterator[Problem]:
    sides: dict[bool, list[tuple[str, str, float]]] = defaultdict(list)
    parts: tuple[LayerRecord | Projection, ...] = group.members or group.projections
    for part in parts:
        tensor = part.tensors.get("input_scale")
        values = scales.values(tensor) if part.quant_algo in STATIC_ACTIVATIONS else None
        if tensor is None or values is None:
            continue
        is_down = PROJECTIONS.get(part.name.rpartition(".")[2]) == "down"
        # A scale that is absurd by itself has been told of with its linear.
        largest = ABSURD_AMAX / ALGORITHMS[part.quant_algo].input_max
        known = values.ravel().tolist()
        sides[is_down] += [(part.name, tensor, value) for value in known if value <= largest]
    for told in filter(None, sides.values()):
        name, tensor, largest = max(told, key=lambda entry: entry[2])
        middle = median(value for _, _, value in told)
        if middle > 0 and largest > MAX_SPREAD * middle:
            message = (
                f"the activation scale is {largest:.4g}, in the median of the experts {middle:.4g}: with it "
                "activations become zero"
            )
            yield make_problem("absurd_input_scale", f"{name}: {message}", layer=group.name, tensor=tensor)
