"""Checks linears that engines fuse along their rows: their formats, and the scales a kernel would share."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from moqext.algorithms import SECOND_IN_WEIGHT, STATIC_ACTIVATIONS
from moqext.reader.formats.scale_values import Float32, Scales
from moqext.reader.formats.stored import Tensor
from moqext.reader.naming import FUSED_GROUPS, parse_expert_name
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import LayerRecord

_MEMBERS = frozenset(name for group in FUSED_GROUPS for name in group)


def find_fused_problems(
    layers: Mapping[str, LayerRecord], unquantized: Mapping[str, Tensor], scales: Scales
) -> list[Problem]:
    """The problems of q/k/v, gate/up and their like; experts are judged with their group."""
    parents: dict[str, dict[str, LayerRecord | None]] = defaultdict(dict)
    for name in [*layers, *unquantized]:
        parent, _, last = name.rpartition(".")
        if last in _MEMBERS and parse_expert_name(name) is None:
            parents[parent][last] = layers.get(name)
    problems: list[Problem] = []
    for parent, children in parents.items():
        for group in FUSED_GROUPS:
            present = {name: children[name] for name in group if name in children}
            if len(present) > 1 and any(present.values()):
                problems += _check_group(parent, present, scales)
    return problems


def _check_group(parent: str, group: Mapping[str, LayerRecord | None], scales: Scales) -> list[Problem]:
    algos = {record.quant_algo if record else None for record in group.values()}
    group_sizes = {record.group_size for record in group.values() if record and record.group_size}
    if len(algos) > 1 or len(group_sizes) > 1:
        described = [f"{name} {record.format if record else 'unquantized'}" for name, record in group.items()]
        return [make_problem("mixed_fused_formats", ", ".join(described), layer=parent)]
    records = {name: record for name, record in group.items() if record}
    algo = next(iter(records.values())).quant_algo
    problems = []
    roles = [("weight_scale_2", algo in SECOND_IN_WEIGHT), ("input_scale", algo in STATIC_ACTIVATIONS)]
    for role in (role for role, applies in roles if applies):
        values = {name: scales.values(record.tensors.get(role)) for name, record in records.items()}
        known = {name: value for name, value in values.items() if value is not None and value.size == 1}
        ratio = spread(np.array([value.item() for value in known.values()], np.float32))
        if ratio > 1:
            listed = ", ".join(f"{name} {value.item():.4g}" for name, value in known.items())
            message = f"{listed}; they differ by a factor of {ratio:.3g}"
            problems.append(make_problem(f"unequal_{role}", message, layer=parent))
    return problems


def spread(values: Float32) -> float:
    """Largest over smallest of some scales; 1 when there are none, or one is not positive or not finite."""
    if values.size == 0 or not np.isfinite(values).all() or values.min() <= 0:
        return 1.0
    return float(values.max()) / float(values.min())
