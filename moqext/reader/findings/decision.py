"""Sets what the configuration says of a layer against what its tensors say, and checks its tensors by role.

The stored tensors decide. The configuration chooses among algorithms that leave the same tensors behind, and
where it names one that the tensors cannot be, a problem record tells.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from moqext._C import ConfigError
from moqext.algorithms import ALGORITHMS, HAS_SECOND, MAY_BE_STATIC, STATIC_ACTIVATIONS, names_where
from moqext.reader.config.quant_config import LayerQuant, QuantConfig
from moqext.reader.findings.inventory import Inventory
from moqext.reader.formats.scale_values import Scales
from moqext.reader.formats.stored import FLOATS, Stored
from moqext.reader.problems import Problem, make_problem

UNKNOWN = "UNKNOWN"
"""Algorithm of a quantized layer that neither the configuration nor the tensors name."""

_LOW_RANK = frozenset(names_where(lambda facts: facts.low_rank))
_OPTIONAL_ROLES: dict[str, frozenset[str]] = {
    "pre_quant_scale": frozenset(names_where(lambda facts: facts.pre_quant_scale)),
    "lora_a": _LOW_RANK,
    "lora_b": _LOW_RANK,
    "weight_scale_2": HAS_SECOND,
}
"""Roles that change the result, and the algorithms that have them."""


class Decision(NamedTuple):
    """The algorithm that holds for a layer, and how it was found; the fields are those of LayerRecord."""

    quant_algo: str
    config_algo: str | None
    stored_algo: str | None
    rule: str
    group_size: int | None


def ask(config: QuantConfig | None, module: str) -> tuple[LayerQuant, list[Problem]]:
    """The configured algorithm of a module and its rule; neither where rules disagree or there are none.

    A name that stands for several modules, as `qkv_proj`, is resolved through them, and they can differ.
    """
    nothing = LayerQuant(None, None, "")
    if config is None:
        return nothing, []
    try:
        return config.layer_quant(module), []
    except ConfigError as error:
        return nothing, [make_problem("ambiguous_rule", str(error), layer=module)]


def decide(module: str, stored: Stored, config: QuantConfig | None) -> tuple[Decision, list[Problem]]:
    """The algorithm of a quantized layer, with the problems of deciding it."""
    asked, problems = ask(config, module)
    configured, wanted, rule = asked
    told = stored.algos[0] if stored.algos else None
    if stored.fault is not None:
        problems.append(make_problem(stored.fault[0], stored.fault[1], layer=module))
    algo = configured if configured in stored.algos else told
    if algo is None:
        algo = configured or UNKNOWN
    elif configured is None and rule and config is not None:
        problems.append(_not_configured(module, algo, rule, config))
    elif configured is not None and algo != configured:
        message = f"configured as {configured} ({rule}), stored as {' or '.join(stored.algos)}"
        problems.append(make_problem("algo_conflict", message, layer=module))
    group_size = _group_size(algo, stored)
    if algo == configured and group_size is not None and wanted not in (None, group_size):
        problems.append(_other_group_size(module, algo, wanted, group_size))
    return Decision(algo, configured, told, rule, group_size), problems


def _other_group_size(module: str, algo: str, wanted: int | None, stored: int) -> Problem:
    """The problem of block scales that are fewer or more than the configuration says.

    Exporters write groups that are larger than an algorithm's own for weights alone.
    """
    facts = ALGORITHMS[algo]
    usual = facts.group_size or stored
    if facts.codes == "e2m1" and facts.input_scale == "expected" and stored > usual >= (wanted or usual):
        message = (
            f"its block scales are of {stored} weights each, and those of {algo} of {usual}: the others "
            "are lost; export it again"
        )
        return make_problem("partial_scales", message, layer=module)
    message = f"configured with group size {wanted}, stored with {stored}; the stored one holds"
    return make_problem("group_size_conflict", message, layer=module)


def check_leaked_scales(module: str, roles: Mapping[str, str], inventory: Inventory) -> Iterator[Problem]:
    """The problem of block scales of which the quantizer's inner state, left in the file, has more."""
    name = f"{module}.weight_quantizer._scale"
    whole, stored = inventory.tensors.get(name), inventory.tensors.get(roles.get("weight_scale", ""))
    if whole is not None and stored is not None and prod(whole.shape) > prod(stored.shape):
        message = (
            f"{prod(stored.shape)} block scales, and {name} has {prod(whole.shape)}: the export dropped "
            "some; put these in their place, or export it again"
        )
        yield make_problem("partial_scales", message, layer=module, tensor=roles["weight_scale"])


def check_leaked_second(
    module: str, roles: Mapping[str, str], inventory: Inventory, scales: Scales
) -> Iterator[Problem]:
    """The problem of a second-level scale that differs from the one in the quantizer's inner state."""
    name = f"{module}.weight_quantizer._double_scale"
    kept = roles.get("weight_scale_2")
    if name in inventory.tensors and kept is not None and scales.are_equal(kept, name) is False:
        message = (
            f"differs from {kept}: before ModelOpt 0.46, exports of compressed weights wrote the block "
            "scales of one beside the other"
        )
        yield make_problem("conflicting_tensors", message, layer=module, tensor=name)


def _group_size(algo: str, stored: Stored) -> int | None:
    """The group size of the tensors; that of the algorithm for one scale [1, 1] of a weight of one block."""
    facts = ALGORITHMS.get(algo)
    if facts is not None and facts.scales in ("tensor", "blocks"):
        return facts.group_size
    return stored.group_size


def _not_configured(module: str, algo: str, rule: str, config: QuantConfig) -> Problem:
    if config.is_excluded(module):
        message = f"excluded ({rule}), yet stored as {algo}; the stored format holds"
        return make_problem("excluded_but_quantized", message, layer=module)
    message = f"no rule of the configuration lists it, yet it is stored as {algo}; the stored format holds"
    return make_problem("unlisted_but_quantized", message, layer=module)


def check_roles(
    module: str, algo: str, roles: Mapping[str, str], inventory: Inventory, *, activations: bool = True
) -> Iterator[Problem]:
    """Problems of the set of tensors of a layer, given its algorithm.

    Args:
        module: the layer.
        algo: its algorithm.
        roles: role -> tensor name.
        inventory: where the tensors are described.
        activations: False when the absence of an activation scale is judged elsewhere, or means nothing.
    """
    for role, algos in _OPTIONAL_ROLES.items():
        if role in roles and algo not in algos and algo != UNKNOWN:
            message = f"{algo} has no {role}, and leaving it out would change the result"
            yield make_problem("unexpected_tensor", message, layer=module, tensor=roles[role])
    for role in ("weight_scale_2", "input_scale", "pre_quant_scale", "bias", "lora_a", "lora_b"):
        if role in roles and (dtype := inventory.tensors[roles[role]].dtype) not in FLOATS:
            message = f"expected a {role} of floats, found {dtype}"
            yield make_problem("dtype_mismatch", message, layer=module, tensor=roles[role])
    if algo in STATIC_ACTIVATIONS:
        if "input_scale" not in roles and activations:
            yield make_problem("missing_input_scale", f"{algo} without input_scale", layer=module)
    elif "input_scale" in roles and algo not in MAY_BE_STATIC and algo != UNKNOWN:
        yield make_problem(
            "unused_input_scale", f"{algo} uses none", layer=module, tensor=roles["input_scale"]
        )
    scale = roles.get("weight_scale", "")
    if scale in inventory.foreign:
        message = f"the weight scale is called {inventory.foreign[scale]}"
        yield make_problem("foreign_scale_name", message, layer=module, tensor=scale)


def check_repeats(module: str, inventory: Inventory, scales: Scales) -> Iterator[Problem]:
    """Problems of tensors that a module has twice, under two names of one role."""
    for kept, other in inventory.repeats.get(module, ()):
        yield from compare_repeated(module, kept, other, scales)


def compare_repeated(layer: str, kept: str, other: str, scales: Scales) -> Iterator[Problem]:
    """The problem of two tensors of one role, of which `kept` counts; none when nothing is to be read."""
    equal = scales.are_equal(kept, other)
    if equal:
        yield make_problem("repeated_scale", f"the same as {kept}", layer=layer, tensor=other)
    elif equal is not None:
        message = f"differs from {kept}, which has the same role"
        yield make_problem("conflicting_tensors", message, layer=layer, tensor=other)


def check_linear_shapes(
    module: str, shape: tuple[int, int], roles: Mapping[str, str], inventory: Inventory, parts: int = 0
) -> Iterator[Problem]:
    """Problems of the shapes of a linear's small tensors, `shape` being (out features, in features).

    A linear of several parts with a scale each may have as many activation scales.
    """
    rows, columns = shape
    expected = {"weight_scale_2": 1, "input_scale": 1, "pre_quant_scale": columns, "bias": rows}
    for role, values in expected.items():
        if role in roles and prod(found := inventory.tensors[roles[role]].shape) != values:
            if role == "input_scale" and parts and tuple(found) == (parts,):
                continue
            message = f"expected {values} value{'s' if values > 1 else ''}, found shape {list(found)}"
            yield make_problem("shape_mismatch", message, layer=module, tensor=roles[role])
    if "lora_a" in roles and "lora_b" in roles:
        a, b = inventory.tensors[roles["lora_a"]].shape, inventory.tensors[roles["lora_b"]].shape
        if len(a) != 2 or len(b) != 2 or a[1] != columns or b != (rows, a[0]):
            message = f"expected [rank, {columns}] and [{rows}, rank], found {list(a)} and {list(b)}"
            yield make_problem("shape_mismatch", message, layer=module, tensor=roles["lora_a"])
    elif "lora_a" in roles or "lora_b" in roles:
        missing = "lora_b" if "lora_a" in roles else "lora_a"
        message = f"{missing}, one half of the low-rank pair, is missing"
        yield make_problem("missing_scale", message, layer=module)
