"""Finds linears that are gone whole, scales and all, by the layers and linears beside them.

Nothing in the files of a checkpoint promises a linear that no tensor belongs to. Layers of one container
tell: one that has all linears of another but a few has lost these, unless the model has such layers. Models
with layers of several kinds are many, so only what no model has is taken for a loss: half of an attention or
of a feed-forward network, a router without its experts, or a layer that is alone among many of its kind.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from moqext.reader.config.model_config import (
    LayerKinds,
    layer_count,
    names_activation,
    shares_keys_and_values,
)
from moqext.reader.findings.expert_counts import ROUTERS
from moqext.reader.naming import FUSED_GROUPS, PROJECTIONS, is_number
from moqext.reader.problems import Problem, make_problem

_CONTAINER = re.compile(r"\w*(?:layers?|blocks?)|h")
_KEYS_AND_VALUES = frozenset(("k_proj", "v_proj"))
_ATTENTION = frozenset(("q_proj", "o_proj", "out_proj", "qkv_proj")) | _KEYS_AND_VALUES
_FEED_FORWARD = frozenset(PROJECTIONS) - {"gate", "up", "down"} | {"fc1", "fc2", "c_fc", "c_proj"}
_USUAL = _ATTENTION | _FEED_FORWARD | frozenset(name for group in FUSED_GROUPS for name in group)
"""Last parts of names of linears that a layer has or has not, whatever the place of the layer."""
_TRIPLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_FORMS = 64
"""Sets of linears, the most frequent ones, that a layer is compared with; with more none is an exception."""

Linears = frozenset[str]
"""Names of linears below a layer, numbers of experts replaced by `*`."""


class _Layers(NamedTuple):
    """Layers of a container that have the same linears and are of one kind."""

    linears: Linears
    kind: Hashable
    numbers: list[int]


def find_missing_linears(linears: Iterable[str], model: Mapping[str, Any]) -> list[Problem]:
    """The problems of linears and experts that must be there and are not.

    Args:
        linears: modules that have a weight of two or more dimensions.
        model: what config.json holds.
    """
    containers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module in linears:
        container, number, rest = _take_apart(module)
        if container:
            containers[container][number].add(rest)
    missing: dict[str, str] = {}
    for container, layers in containers.items():
        for name, reason in _of_container(container, layers, model):
            missing.setdefault(name, reason)
    problems = []
    for name, reason in missing.items():
        code = "missing_expert" if name.endswith("experts") else "missing_linear"
        problems.append(make_problem(code, f"not in the files: {reason}", layer=name))
    return problems


def _take_apart(module: str) -> tuple[str, int, str]:
    """The container of layers, the number of the layer and the rest, numbers in it as `*`."""
    parts = module.split(".")
    for place in range(1, len(parts) - 1):
        if is_number(parts[place]):
            if _CONTAINER.fullmatch(parts[place - 1]) is None:
                break
            rest = ("*" if is_number(part) else part for part in parts[place + 1 :])
            return ".".join(parts[:place]), int(parts[place]), ".".join(rest)
    return "", 0, ""


def _of_container(
    container: str, layers: Mapping[int, set[str]], model: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Names of what is lost from the layers of a container, and how that is known."""
    count = layer_count(model)
    kinds = LayerKinds(model)
    alike: dict[tuple[Linears, Hashable], list[int]] = defaultdict(list)
    for number, linears in layers.items():
        if count is None or number < count:  # layers for speculative decoding may follow, with more in them
            alike[frozenset(linears), kinds.kind(number)].append(number)
    forms = [_Layers(*key, numbers) for key, numbers in alike.items()]
    usual = sorted(forms, key=lambda form: -len(form.numbers))[:_FORMS]
    judge = _Judge(forms, set(layers), model)
    for form in forms:
        for lost, reason in judge.lost(form, usual):
            for number in form.numbers:
                yield f"{container}.{number}.{lost}", reason


class _Judge:
    """Tells what layers lost from what models never have."""

    def __init__(self, forms: list[_Layers], numbers: set[int], model: Mapping[str, Any]) -> None:
        self._forms = forms
        self._ends = {min(numbers), max(numbers)}
        self._shares = not model or shares_keys_and_values(model)
        self._told = bool(model)
        self._gates = not model or names_activation(model)

    def lost(self, form: _Layers, usual: Iterable[_Layers]) -> Iterator[tuple[str, str]]:
        """Names below a layer of that form, experts under their container, and how the loss is known."""
        for name in _torn(form.linears, self._gates):
            yield _whole(name), "the linears beside it are of no use without it"
        richer = [other for other in usual if form.linears < other.linears]
        for other in sorted(richer, key=lambda other: len(other.linears)):
            more = other.linears - form.linears
            found = [name for name in more if self._is_lost(name, more, form)]
            if not found and self._is_alone(form, other, more):
                found = list(more)
            if found:
                reason = f"layer {other.numbers[0]} beside it has it"
                yield from dict.fromkeys((_whole(name), reason) for name in sorted(found))
                return

    def _is_lost(self, name: str, more: Linears, form: _Layers) -> bool:
        """Whether what the layer kept has no use without that linear."""
        parent, _, last = name.rpartition(".")
        if parent.endswith(("experts", "experts.*")) and not _is_shared(parent):
            outer = parent.removesuffix(".*").rpartition(".")[0]
            return any(_join(outer, router) in form.linears for router in ROUTERS)
        for group in (_ATTENTION, _FEED_FORWARD):
            if last in group and any(_join(parent, kept) in form.linears for kept in group):
                gone = {other for other in group if _join(parent, other) in more}
                return not (gone <= _KEYS_AND_VALUES and "v_proj" in gone and self._shares)
        return False

    def _is_alone(self, form: _Layers, other: _Layers, more: Linears) -> bool:
        """Whether such layers are an exception among those of their kind."""
        if form.kind != other.kind or len(self._forms) > _FORMS or any(map(_is_nested, more)):
            return False
        alike = [one for one in self._forms if one.kind == form.kind]
        lacking = sum(len(one.numbers) for one in alike if not one.linears & more)
        having = sum(len(one.numbers) for one in alike if one.linears >= more)
        usual = all(name.rpartition(".")[2] in _USUAL for name in more)
        if not usual:
            return lacking == 1 and having > 1 and self._ends.isdisjoint(form.numbers)
        least = 1 if self._told and not self._is_shared_cache(more) else 2
        return having >= least and lacking <= max(1, having // 8)

    def _is_shared_cache(self, more: Linears) -> bool:
        return self._shares and {name.rpartition(".")[2] for name in more} <= _KEYS_AND_VALUES


def _torn(linears: Linears, gates: bool) -> Iterator[str]:
    """Linears that attention and feed-forward networks lack, told by those that they have.

    Args:
        linears: of a layer.
        gates: whether a `gate_proj` is a gate: TimesFM, which has no activation, names its first linear so.
    """
    children: dict[str, set[str]] = defaultdict(set)
    for name in linears:
        parent, _, last = name.rpartition(".")
        children[parent].add(last)
    for parent, own in children.items():

        def has(name: str, parent: str = parent) -> bool:
            return _join(parent, name) in linears

        if has("q_proj") and has("v_proj") and has("o_proj") and not has("k_proj"):
            yield _join(parent, "k_proj")
        for gate, up, down in _TRIPLES:
            if own - {gate, up, down}:  # the one that lacks may be there under a name of its own
                continue
            if has(gate) and has(up) and not has(down):
                yield _join(parent, down)
            if (
                gates
                and has(gate)
                and has(down)
                and not has(up)
                and (gate != "w1" or parent.endswith("experts.*"))
            ):
                yield _join(parent, up)


def _is_nested(name: str) -> bool:
    """Whether a linear is in a numbered block within the layer, of which stages have different numbers."""
    return "*" in name.split(".") and "experts" not in name


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _is_shared(parent: str) -> bool:
    """Whether a container is one of experts that every token has."""
    return parent.rpartition(".")[2].startswith("shared")


def _whole(name: str) -> str:
    """The container of experts for a projection of all of them, else the name."""
    parent, star, _ = name.partition(".*.")
    if star:
        return parent
    container = name.rpartition(".")[0]
    return container if container.endswith("experts") and not _is_shared(container) else name
