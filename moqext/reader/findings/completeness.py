"""Finds out whether all the layers that config.json counts are there.

A checkpoint whose index was lost, or that was cut between two files, is whole by all that its files say. The
number of hidden layers in config.json is what tells.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from moqext.reader.config.model_config import empty_layers, layer_count
from moqext.reader.naming import is_vision, number_ranges
from moqext.reader.problems import Problem, make_problem

# The container of layers and the number of one, among the first parts of a tensor's name.
_LAYER = re.compile(r"(?P<container>(?:[^.]*\.){0,6}?(?:layers|h|blocks))\.(?P<number>[0-9]{1,6})\.")


def find_missing_layers(names: Iterable[str], model: Mapping[str, Any]) -> list[Problem]:
    """One problem where the decoder of a checkpoint with tensors has fewer layers than config.json counts.

    The decoder is the container of layers with the most tensors, vision towers aside; modules for speculative
    decoding, which some models number on from the last layer, may be there as well. Layers that do
    nothing, as `block_configs` has them, have no tensors.
    """
    count = layer_count(model)
    if count is None:
        return []
    found: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for layer in filter(None, map(_LAYER.match, names)):
        container = layer["container"]
        found[container].add(int(layer["number"]))
        sizes[container] += 1
    text = [container for container in found if not is_vision(container)]
    if not text:
        return []
    decoder = max(text, key=lambda container: sizes[container])
    missing = sorted(set(range(count)) - found[decoder] - empty_layers(model))
    if not missing:
        return []
    message = (
        f"config.json counts {count} hidden layers, {len(missing)} of which have no tensor: "
        f"{decoder}.{number_ranges(missing)}"
    )
    return [make_problem("missing_layers", message)]
