"""Reads from config.json what a checkpoint must hold: layers and their kinds, experts and their width.

Names differ from model to model, and larger models have parts with a configuration of their own. So numbers
are gathered from the whole file but its quantization, and a tensor agrees where one of them fits.
"""

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

_TEXT_MODELS = ("text_config", "llm_config")
_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
_EXPERT_WIDTHS = ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size")
_SHARED_CACHE = re.compile(r"k_eq_v|kv_share|share_kv|(?:^|_)cla(?:_|$)")
_ACTIVATION = re.compile(r"(?:^|_)act(?:ivation)?(?:_|$)")
_LAYER_LIST = re.compile(r"layer|idx|index|indices|block")
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
_FEATURE_DEPTH = 4
_MORE = 8
"""Entries of a list of one for each layer beyond the last: those of layers for speculative decoding."""


def layer_count(model: Mapping[str, Any]) -> int | None:
    """The number of hidden layers of the text model, None where config.json does not say."""
    for holder in _text_models(model):
        count = holder.get("num_hidden_layers")
        if type(count) is int and 0 < count <= MAX_LAYERS:
            return count
    return None


def _text_models(model: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield model
    yield from (part for name in _TEXT_MODELS if isinstance(part := model.get(name), Mapping))


def _members(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every name and value at any depth but below `quantization_config`."""
    pending: list[Any] = [model]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += [inner for inner in item if isinstance(inner, (Mapping, list))]
            continue
        for name, value in item.items():
            if name == "quantization_config":
                continue
            yield name, value
            if isinstance(value, (Mapping, list)):
                pending.append(value)


def _numbers(model: Mapping[str, Any], names: tuple[str, ...]) -> frozenset[int]:
    """The positive numbers under these names, alone or in a list of one for each layer."""
    listed = (value for name, value in _members(model) if name in names)
    found = (number for value in listed for number in (value if isinstance(value, list) else [value]))
    return frozenset(number for number in found if type(number) is int and 0 < number <= MAX_EXPERTS)


def expert_counts(model: Mapping[str, Any]) -> frozenset[int]:
    """The numbers of experts of a layer that config.json names."""
    return _numbers(model, _EXPERT_COUNTS)


def expert_widths(model: Mapping[str, Any]) -> frozenset[int]:
    """The widths that an expert may have, empty where config.json has none of its own for experts."""
    if not _numbers(model, _EXPERT_WIDTHS):
        return frozenset()
    names = {name for name, _ in _members(model) if "intermediate" in name or "ffn" in name}
    return _numbers(model, tuple(names))


def shares_keys_and_values(model: Mapping[str, Any]) -> bool:
    """Whether some layers have no keys or values of their own: k is v, or an earlier layer's are taken."""
    return any(bool(value) and _SHARED_CACHE.search(name) is not None for name, value in _members(model))


def names_activation(model: Mapping[str, Any]) -> bool:
    """Whether config.json names an activation of the feed-forward networks."""
    return any(_ACTIVATION.search(name) is not None for name, _ in _members(model))


def empty_layers(model: Mapping[str, Any]) -> frozenset[int]:
    """Numbers of layers that `block_configs` says do nothing, neither attention nor feed-forward."""
    found = set()
    for holder in _text_models(model):
        blocks = holder.get("block_configs")
        for number, block in enumerate(blocks if isinstance(blocks, list) else []):
            if isinstance(block, Mapping) and all(
                _is_no_op(block.get(part)) for part in ("attention", "ffn")
            ):
                found.add(number)
    return frozenset(found)


def _is_no_op(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("no_op") is True


class LayerKinds:
    """Kinds of layers: those of which config.json says one thing are of one kind."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._count = layer_count(model) or 0
        settings = (setting for holder in _text_models(model) for setting in holder.items())
        self._features = [(name, self._of_layers(name, value)) for name, value in settings]

    def kind(self, number: int) -> Hashable:
        """A value that is equal for layers of one kind."""
        if number >= self._count:
            return ("beyond",)
        return tuple(self._feature(name, value, number) for name, value in self._features)

    def _of_layers(self, name: str, value: Any) -> Any:
        """A list of some layers as the set of their numbers; others as they are."""
        if isinstance(value, list) and len(value) < self._count and _LAYER_LIST.search(name):
            return frozenset(number for number in value if type(number) is int)
        return value

    def _feature(self, name: str, value: Any, number: int) -> Hashable:
        if isinstance(value, frozenset):
            return number in value
        if isinstance(value, list):
            listed = self._count <= len(value) <= self._count + _MORE
            return _hashable(value[number]) if listed else None
        if isinstance(value, str) and len(value) == self._count and "pattern" in name:
            return value[number]
        if type(value) is int and name == "num_kv_shared_layers":
            return number >= self._count - value
        return type(value) is int and name.startswith("first_") and number < value


def _hashable(value: Any, depth: int = 0) -> Hashable:
    if depth == _FEATURE_DEPTH:
        return None
    if isinstance(value, Mapping):
        return tuple((name, _hashable(inner, depth + 1)) for name, inner in value.items())
    if isinstance(value, list):
        return tuple(_hashable(inner, depth + 1) for inner in value)
    return value if isinstance(value, (str, int, float)) else None
