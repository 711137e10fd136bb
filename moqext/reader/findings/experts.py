"""Gathers experts under their container: those stored one by one, and those stacked in 3-D tensors.

Stacked experts are stored in two orientations, (experts, out, in) and (experts, in, out), and their blocks
lie along either dimension. The axis of the blocks follows from the shapes of weight and scale; the
orientation from the shapes of gate_up and down together, or, where gate and up are stored apart and the
shapes are symmetrical, from the name: a name that ends in `.weight` is a linear's and stores (out, in).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from moqext.algorithms import BLOCK_SIZES, SECOND_IN_WEIGHT, STATIC_ACTIVATIONS
from moqext.reader.config.quant_config import QuantConfig
from moqext.reader.findings.decision import Decision, check_repeats, check_roles, decide
from moqext.reader.findings.expert_counts import ExpertCounts
from moqext.reader.findings.fused import spread
from moqext.reader.findings.inventory import Inventory
from moqext.reader.formats.scale_values import Float32, Scales, check_scales
from moqext.reader.formats.stored import Stored, Tensor, recognise
from moqext.reader.naming import INTERLEAVED_ARCHITECTURES, PROJECTIONS, parse_expert_name
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import LayerRecord, Projection

_ORDER = ("gate_up", "gate", "up", "down")
MIXED = "MIXED_PRECISION"

T = TypeVar("T")


def find_expert_groups(
    layers: Mapping[str, LayerRecord],
    unquantized: Mapping[str, Tensor],
    scales: Scales,
    counts: ExpertCounts,
    *,
    clips: bool,
) -> list[LayerRecord]:
    """One record for each container of experts that are stored one by one and not all unquantized.

    `clips` tells whether the producer may have scaled gate and up in blocks of the two as one weight.
    """
    groups: dict[str, dict[tuple[int, str], LayerRecord]] = defaultdict(dict)
    plain: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for name, record in layers.items():
        if expert := parse_expert_name(name):
            groups[expert.container][expert.expert, expert.projection] = record
    for name in unquantized:
        if (expert := parse_expert_name(name)) and expert.container in groups:
            plain[expert.container].add((expert.expert, expert.projection))
    return [_group(name, experts, plain[name], scales, counts, clips) for name, experts in groups.items()]


def _group(
    name: str,
    experts: Mapping[tuple[int, str], LayerRecord],
    plain: set[tuple[int, str]],
    scales: Scales,
    counts: ExpertCounts,
    clips: bool,
) -> LayerRecord:
    keys = sorted(experts, key=lambda key: (key[0], _rank(key[1]), key[1]))
    members = tuple(experts[key] for key in keys)
    problems = _missing_experts(name, experts.keys() | plain, counts.expected(name))
    problems += _two_of_a_role(name, experts)
    problems += _mixed_formats(name, members, plain)
    shape, misshapen = _group_shape(name, experts)
    problems += misshapen or counts.check_width(name, shape[2])
    problems += _member_input_scales(name, members)
    problems += _clipped(name, experts) if clips else []
    problems += _unequal_gate_up(name, experts, scales)
    return LayerRecord(
        name=name,
        kind="moe",
        quant_algo=_common((member.quant_algo for member in members), MIXED),
        config_algo=_common((member.config_algo for member in members), MIXED),
        stored_algo=_common((member.stored_algo for member in members), MIXED),
        rule=members[0].rule,
        group_size=_common((member.group_size for member in members), None),
        shape=shape,
        tensors={},
        problems=tuple(problems),
        members=members,
        size=sum(member.size for member in members),
        weights=sum(member.weights for member in members),
    )


def _rank(projection: str) -> int:
    role = PROJECTIONS.get(projection)
    return _ORDER.index(role) if role else len(_ORDER)


def _common(values: Iterable[T], otherwise: T) -> T:
    """The value that all have, `otherwise` where they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else otherwise


def _missing_experts(name: str, present: set[tuple[int, str]], count: int) -> list[Problem]:
    """Every expert of `count` has every projection that any expert has."""
    projections = sorted({projection for _, projection in present}, key=_rank)
    missing = count * len(projections) - len(present)  # not listed: names may claim any number
    if not missing:
        return []
    names = (f"{i}.{p}" for i in range(count) for p in projections if (i, p) not in present)
    message = f"{missing} of {count * len(projections)} are missing: {_first(names)}"
    return [make_problem("missing_expert", message, layer=name)]


def _two_of_a_role(name: str, experts: Mapping[tuple[int, str], LayerRecord]) -> list[Problem]:
    """An expert with two projections that are one by their names, as `w1` and `gate_proj`."""
    seen: dict[tuple[int, str], str] = {}
    for index, projection in experts:
        first = seen.setdefault((index, PROJECTIONS.get(projection, projection)), projection)
        if first != projection:
            message = f"expert {index} has both {first} and {projection}"
            tensor = experts[index, projection].tensors["weight"]
            return [make_problem("conflicting_tensors", message, layer=name, tensor=tensor)]
    return []


def _mixed_formats(name: str, members: Sequence[LayerRecord], plain: set[tuple[int, str]]) -> list[Problem]:
    formats: dict[str, int] = defaultdict(int)
    for member in members:
        formats[member.format] += 1
    if plain:
        formats["unquantized"] = len(plain)
    algos = {member.quant_algo for member in members}
    group_sizes = {member.group_size for member in members if member.group_size}
    if len(algos) == 1 and len(group_sizes) < 2 and not plain:
        return []
    described = ", ".join(f"{count} x {algo}" for algo, count in formats.items())
    return [make_problem("mixed_expert_formats", described, layer=name)]


def _group_shape(
    name: str, experts: Mapping[tuple[int, str], LayerRecord]
) -> tuple[tuple[int, int, int], list[Problem]]:
    """(experts, hidden size, intermediate size); every expert has to have the first one's shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    problems = []
    for (index, projection), record in experts.items():
        first = shapes.setdefault(projection, record.shape)
        if record.shape != first:
            message = f"expert {index} has {projection} of {list(record.shape)}, others of {list(first)}"
            tensor = record.tensors["weight"]
            problems.append(make_problem("shape_mismatch", message, layer=name, tensor=tensor))
    count = max(index for index, _ in experts) + 1
    sizes = {  # (hidden size, intermediate size) as each projection has it
        projection: shape if PROJECTIONS.get(projection) == "down" else shape[::-1]
        for projection, shape in shapes.items()
        if len(shape) == 2
    }
    if len(set(sizes.values())) > 1:
        described = ", ".join(f"{projection} {list(shape)}" for projection, shape in shapes.items())
        message = f"{described}: the projections do not fit each other"
        problems.append(make_problem("shape_mismatch", message, layer=name))
    hidden, intermediate = next(iter(sizes.values()), (0, 0))
    return (count, hidden, intermediate), problems


def _member_input_scales(name: str, members: Sequence[LayerRecord]) -> list[Problem]:
    """Activation scales that all experts lack mean one thing, that some lack another."""
    static = [member for member in members if member.quant_algo in STATIC_ACTIVATIONS]
    without = [member for member in static if "input_scale" not in member.tensors]
    if not without:
        return []
    if len(without) == len(static):
        message = f"{static[0].quant_algo} without input_scale in any expert"
        return [make_problem("missing_input_scale", message, layer=name)]
    names = [member.name[len(name) + 1 :] for member in without]
    message = f"{len(without)} of {len(static)} linears lack input_scale: {_first(names)}"
    return [make_problem("missing_expert_input_scale", message, layer=name)]


def _first(names: Iterable[str], count: int = 4) -> str:
    shown = list(islice(names, count + 1))
    return ", ".join(shown[:count]) + (", ..." if len(shown) > count else "")


def _clipped(name: str, experts: Mapping[tuple[int, str], LayerRecord]) -> list[Problem]:
    """Gate and up scaled in blocks as one weight: up then begins inside a block of it."""
    by_role = {PROJECTIONS.get(projection): record for (_, projection), record in experts.items()}
    up = by_role.get("up")
    size = BLOCK_SIZES.get(up.quant_algo) if up is not None and "gate" in by_role else None
    if up is None or size is None or up.shape[0] % size == 0:
        return []
    message = (
        f"the expert width, {up.shape[0]}, is no multiple of {size}: where the producer held gate and up as "
        "one weight, up was clipped and is off by several percent"
    )
    return [make_problem("possibly_clipped_blocks", message, layer=name)]


def _unequal_gate_up(
    name: str, experts: Mapping[tuple[int, str], LayerRecord], scales: Scales
) -> list[Problem]:
    pairs: dict[str, list[Float32]] = {"weight_scale_2": [], "input_scale": []}
    by_role = {(index, PROJECTIONS.get(last)): record for (index, last), record in experts.items()}
    for (index, role), gate in by_role.items():
        up = by_role.get((index, "up")) if role == "gate" else None
        if up is None or gate.quant_algo != up.quant_algo:
            continue
        for scale in _shared_roles(gate.quant_algo):
            of_gate, of_up = (scales.values(record.tensors.get(scale)) for record in (gate, up))
            if of_gate is not None and of_up is not None and of_gate.size == of_up.size == 1:
                pairs[scale].append(np.array([of_gate.item(), of_up.item()], np.float32))
    return _unequal_problems(name, pairs)


def _shared_roles(algo: str) -> list[str]:
    roles = ["weight_scale_2"] if algo in SECOND_IN_WEIGHT else []
    return [*roles, "input_scale"] if algo in STATIC_ACTIVATIONS else roles


def _unequal_problems(name: str, pairs: Mapping[str, Sequence[Float32]]) -> list[Problem]:
    problems = []
    for role, values in pairs.items():
        ratios = [spread(pair) for pair in values]
        unequal = sum(ratio > 1 for ratio in ratios)
        if unequal:
            message = (
                f"gate and up differ in {unequal} of {len(ratios)} experts, by up to {max(ratios):.3g} times"
            )
            problems.append(make_problem(f"unequal_{role}", message, layer=name))
    return problems


class _Stacked(NamedTuple):
    """One stacked projection, before its orientation is known."""

    name: str
    roles: Mapping[str, str]
    stored: Stored
    decision: Decision
    problems: list[Problem]


def find_stacked_groups(
    modules: Mapping[str, Mapping[str, str]],
    inventory: Inventory,
    config: QuantConfig | None,
    scales: Scales,
    architectures: Sequence[str],
    counts: ExpertCounts,
) -> tuple[list[LayerRecord], list[Problem]]:
    """One record per container of 3-D expert tensors, and the problems of other quantized 3-D weights."""
    containers: dict[str, dict[str, _Stacked]] = defaultdict(dict)
    problems: list[Problem] = []
    recognised = _recognise_all(modules, inventory)
    for module, roles in modules.items():
        container, _, last = module.rpartition(".")
        stored = recognised[module]
        if last not in PROJECTIONS or not container:
            shape = list(inventory.tensors[roles["weight"]].shape)
            message = f"a quantized weight of shape {shape} that is no expert projection by its name"
            problems.append(make_problem("unknown_format", message, layer=module, tensor=roles["weight"]))
            continue
        decision, found = decide(module, stored, config)
        found += check_roles(module, decision.quant_algo, roles, inventory)
        found += check_scales(module, decision.quant_algo, roles, scales, decision.group_size)
        found += check_repeats(module, inventory, scales)
        projection = _Stacked(module, roles, stored, decision, found)
        first = containers[container].setdefault(PROJECTIONS[last], projection)
        if first is not projection:
            message = f"also the {PROJECTIONS[last]} projection of {container}, as {first.name} is"
            problems.append(
                make_problem("conflicting_tensors", message, layer=module, tensor=roles["weight"])
            )
    groups = [
        _stacked_group(name, parts, inventory, scales, architectures, counts)
        for name, parts in containers.items()
    ]
    return groups, problems


def _recognise_all(modules: Mapping[str, Mapping[str, str]], inventory: Inventory) -> dict[str, Stored]:
    """The format of each stack, first what all stacks of its container can be."""
    found = {module: recognise(inventory.infos(roles)) for module, roles in modules.items()}
    shared: dict[str, set[str]] = {}
    for module, stored in found.items():
        algos = set(stored.algos)
        container = module.rpartition(".")[0]
        shared[container] = shared.get(container, algos) & algos
    return {
        module: replace(stored, algos=tuple(sorted(stored.algos, key=lambda algo: algo not in common)))
        for module, stored in found.items()
        for common in (shared[module.rpartition(".")[0]],)
    }


def _stacked_group(
    name: str,
    parts: Mapping[str, _Stacked],
    inventory: Inventory,
    scales: Scales,
    architectures: Sequence[str],
    counts: ExpertCounts,
) -> LayerRecord:
    transposed, problems = _orientation(name, parts)
    problems += counts.check_stack(name)
    projections = []
    for role in _ORDER:
        if role in parts:
            projections.append(_projection(role, parts[role], transposed, inventory, architectures))
            problems += parts[role].problems
            problems += _check_stacked_shapes(projections[-1], inventory)
    algos = {projection.quant_algo for projection in projections}
    if len(algos) > 1:
        described = ", ".join(f"{projection.role} {projection.quant_algo}" for projection in projections)
        problems.append(make_problem("mixed_expert_formats", described, layer=name))
    problems += _unequal_stacked(name, projections, scales)
    last = projections[-1]
    experts, rows, columns = last.shape
    shape = (experts, rows, columns) if last.role == "down" else (experts, columns, rows)
    problems += counts.check_width(name, shape[2] if last.role == "down" else 0)
    return LayerRecord(
        name=name,
        kind="moe",
        quant_algo=_common(algos, MIXED),
        config_algo=_common((part.decision.config_algo for part in parts.values()), MIXED),
        stored_algo=_common((part.decision.stored_algo for part in parts.values()), MIXED),
        rule=parts[last.role].decision.rule,
        group_size=_common((projection.group_size for projection in projections), None),
        shape=shape,
        tensors={f"{p.role}.{role}": tensor for p in projections for role, tensor in p.tensors.items()},
        problems=tuple(problems),
        projections=tuple(projections),
        size=sum(inventory.size(part.roles) for part in parts.values()),
        weights=sum(prod(projection.shape) for projection in projections),
    )


def _orientation(name: str, parts: Mapping[str, _Stacked]) -> tuple[bool, list[Problem]]:
    """Whether the file has (experts, in, out), by the shapes if they tell, else by the names."""
    by_name = not next(iter(parts.values())).roles["weight"].endswith(".weight")
    down = parts["down"].stored.shape if "down" in parts else None
    first = next((parts[role].stored.shape for role in ("gate_up", "gate", "up") if role in parts), None)
    if down is None or first is None:
        lost = "down" if down is None else "gate and up"
        return by_name, [make_problem("missing_expert", f"no {lost} projection", layer=name)]
    gated = 2 if "gate_up" in parts else 1
    in_out = first[0] == down[0] and first[1] == down[2] and first[2] == gated * down[1]
    out_in = first[0] == down[0] and first[2] == down[1] and first[1] == gated * down[2]
    if in_out != out_in:
        return in_out, []
    if in_out:
        return by_name, []
    message = f"experts of {list(first)} and {list(down)} fit each other in no orientation"
    return by_name, [make_problem("shape_mismatch", message, layer=name)]


def _projection(
    role: str, part: _Stacked, transposed: bool, inventory: Inventory, architectures: Sequence[str]
) -> Projection:
    experts, rows, columns = part.stored.shape
    axis: Literal["in", "out"] | None = None
    if part.stored.block_axis is not None:
        axis = "in" if (part.stored.block_axis == -2) == transposed else "out"
    by_bias = not architectures and "bias" in part.roles  # gpt-oss alone, which alternates, has biases
    interleaved = role == "gate_up" and (by_bias or not INTERLEAVED_ARCHITECTURES.isdisjoint(architectures))
    return Projection(
        role=role,
        name=part.name,
        quant_algo=part.decision.quant_algo,
        shape=(experts, columns, rows) if transposed else (experts, rows, columns),
        transposed=transposed,
        block_axis=axis,
        group_size=part.decision.group_size,
        interleaved=interleaved,
        tensors=dict(part.roles),
    )


def _check_stacked_shapes(projection: Projection, inventory: Inventory) -> list[Problem]:
    """Scalars come once, once per expert, or, for gate and up in one tensor, twice per expert."""
    experts, rows, columns = projection.shape
    scalars: list[list[int]] = [[], [experts]] + ([[experts, 2]] if projection.role == "gate_up" else [])
    expected = {
        "weight_scale_2": scalars,
        "input_scale": scalars,
        "pre_quant_scale": [[columns], [experts, columns]],
        "bias": [[experts, rows]],
    }
    problems = []
    for role, shapes in expected.items():
        if role in projection.tensors:
            found = inventory.tensors[projection.tensors[role]].shape
            if _without_ones(found) not in map(_without_ones, shapes):
                message = f"expected {' or '.join(map(str, shapes))}, found shape {list(found)}"
                tensor = projection.tensors[role]
                problems.append(make_problem("shape_mismatch", message, layer=projection.name, tensor=tensor))
    return problems


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [extent for extent in shape if extent != 1]


def _unequal_stacked(name: str, projections: Sequence[Projection], scales: Scales) -> list[Problem]:
    by_role = {projection.role: projection for projection in projections}
    experts = projections[0].shape[0]
    pairs: dict[str, list[Float32]] = {}
    for role in _shared_roles(projections[0].quant_algo):
        if "gate_up" in by_role:
            both = scales.values(by_role["gate_up"].tensors.get(role))
            if both is not None and both.size == 2 * experts:
                pairs[role] = list(both.reshape(experts, 2))
        elif "gate" in by_role and "up" in by_role:
            gate, up = (scales.values(by_role[half].tensors.get(role)) for half in ("gate", "up"))
            if gate is not None and up is not None and gate.size == up.size:
                pairs[role] = list(np.stack([gate.ravel(), up.ravel()], axis=1))
    return _unequal_problems(name, pairs)
