"""Finds experts whose gates are gone, which would run as experts that have none.

Nothing in the tensors of a container tells lost gates from experts made without. config.json does, by the
activation, and so do other layers of the checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moqext.reader.config.expert_config import read_expert_config
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import LayerRecord, is_gated

_WITHOUT_GATE = ("relu2",)
"""Activations of architectures whose experts have no gate; all others multiply by one."""


def find_lost_gates(
    records: Sequence[LayerRecord], model: Mapping[str, Any], architectures: Sequence[str]
) -> list[Problem]:
    """A problem for each container of experts that seems to have lost its gates."""
    problems = []
    for record in records:
        if record.kind == "moe":
            activation = read_expert_config(model, architectures, record.name).activation
            if why := lost_gate(record, records, activation):
                problems.append(make_problem("missing_gate", why, layer=record.name))
    return problems


def lost_gate(record: LayerRecord, records: Iterable[LayerRecord], activation: str | None) -> str:
    """Why experts without a gate should have one; empty for all others.

    Args:
        record: the container of experts.
        records: the layers of the checkpoint.
        activation: the one that config.json names; None to judge by the other layers alone.
    """
    if is_gated(record):
        return ""
    for other in records:
        if other.kind == "moe" and other.name != record.name and is_gated(other):
            return f"no expert has a gate, those of {other.name} have one"
    if activation is not None and activation not in _WITHOUT_GATE:
        return f"no expert has a gate, and the activation of config.json, {activation}, is that of a gate"
    return ""
