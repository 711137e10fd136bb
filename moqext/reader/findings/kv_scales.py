"""Finds the scales of the KV cache, and what is wrong with them.

They are stored beside the attention's linears (`<attention>.k_proj.k_scale`), even where it has no such
linear (MLA, fused qkv), or on the attention itself (`<attention>.k_scale`). In both places they have to be
equal. Older files have one `kv_scale` for both, or an `output_scale` beside each of the two linears. A
quantized cache without any scale is normal: 1.0.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from moqext.reader.findings.decision import compare_repeated
from moqext.reader.findings.inventory import Inventory
from moqext.reader.formats.scale_values import Scales, check_divisor
from moqext.reader.formats.stored import FLOATS
from moqext.reader.naming import attention_of, is_old_cache_name, is_vision, name_pattern
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import KVRecord

_SCALES = ("k_scale", "v_scale", "q_scale")


def find_kv_scales(
    inventory: Inventory, kv_algo: str | None, scales: Scales
) -> tuple[tuple[KVRecord, ...], list[Problem]]:
    """The cache scales by attention, and the problems of the cache as a whole."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    vision: list[str] = []
    for module, roles in inventory.kv.items():
        attention = attention_of(module)
        if is_vision(attention):
            vision += roles.values()
            continue
        for role, tensor in roles.items():
            for each in ("k_scale", "v_scale") if role == "kv_scale" else (role,):
                found[attention][each].append(tensor)
    records = [_record(name, roles, inventory, scales) for name, roles in found.items()]
    problems = [
        make_problem("kv_scale_in_vision", "a vision tower has no cache", tensor=tensor) for tensor in vision
    ]
    problems += _cache_problems(records, kv_algo)
    problems += _partial(records, inventory)
    return tuple(_note_ones(records)), problems


def _usual_first(role: str, tensors: list[str]) -> list[str]:
    """Names of one scale, the exporter's own first: that of keys beside k_proj, of values beside v_proj."""
    return sorted(tensors, key=lambda tensor: (not tensor.endswith(f".{role[0]}_proj.{role}"), tensor))


def _record(name: str, found: Mapping[str, list[str]], inventory: Inventory, scales: Scales) -> KVRecord:
    problems: list[Problem] = []
    values = {}
    roles = {}
    for role, tensors in found.items():
        roles[role], *others = _usual_first(role, tensors)
        for other in others:
            problems += compare_repeated(name, roles[role], other, scales)
    for role in _SCALES:
        if role not in roles:
            continue
        tensor = roles[role]
        info = inventory.tensors[tensor]
        if info.dtype not in FLOATS:
            message = f"expected a {role} of floats, found {info.dtype}"
            problems.append(make_problem("dtype_mismatch", message, layer=name, tensor=tensor))
        elif prod(info.shape) != max(info.shape, default=1):
            message = f"expected one value, found shape {list(info.shape)}"
            problems.append(make_problem("shape_mismatch", message, layer=name, tensor=tensor))
        else:
            problems += _note_heads(name, role, tensor, prod(info.shape))
            if (value := scales.values(tensor)) is not None:
                problems += check_divisor(name, tensor, value)
                if value.size == 1:
                    values[role] = value.item()
    problems += _note_old_names(name, found)
    for here, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        if here in roles and other not in roles and not _has_one_projection(name, inventory):
            message = f"{other} is missing; {here} stands for both"
            problems.append(make_problem("kv_scale_missing", message, layer=name, tensor=roles[here]))
    for role in ("k_bias", "v_bias"):
        if role in roles:
            message = f"an affine cache: {role} is subtracted before quantizing"
            problems.append(make_problem("kv_bias", message, layer=name, tensor=roles[role]))
    return KVRecord(name, roles, tuple(problems), values)


def _note_old_names(name: str, found: Mapping[str, list[str]]) -> list[Problem]:
    """The notes on scales under names that not every engine knows."""
    tensors = dict.fromkeys(tensor for role in _SCALES for tensor in found.get(role, ()))
    message = "ModelOpt's names are those of k_proj.k_scale and v_proj.v_scale"
    return [
        make_problem("old_kv_scale_name", message, layer=name, tensor=tensor)
        for tensor in tensors
        if is_old_cache_name(tensor)
    ]


def _note_heads(name: str, role: str, tensor: str, count: int) -> list[Problem]:
    """The note on a scale that has a value for each head."""
    if count == 1:
        return []
    message = f"{role} has {count} values, one for each head; engines have one for all heads"
    return [make_problem("kv_scales_per_head", message, layer=name, tensor=tensor)]


def _has_one_projection(attention: str, inventory: Inventory) -> bool:
    """Whether the keys of an attention are its values: it has a projection of one and none of the other."""
    return (f"{attention}.k_proj" in inventory.modules) and (f"{attention}.v_proj" not in inventory.modules)


def _cache_problems(records: list[KVRecord], kv_algo: str | None) -> list[Problem]:
    if records and kv_algo is None:
        message = f"cache scales (attention modules: {len(records)}), and no KV algorithm is configured"
        return [make_problem("kv_scales_unannounced", message)]
    if not records and kv_algo is not None:
        message = f"the KV cache is {kv_algo}, and no scale is stored: 1.0 applies"
        return [make_problem("kv_scales_absent", message)]
    return []


def _partial(records: list[KVRecord], inventory: Inventory) -> list[Problem]:
    """Attention modules without scales whose like, by name and by linears, have some."""
    if not records:
        return []
    children: dict[str, set[str]] = defaultdict(set)
    for module in inventory.modules:
        parent, _, last = module.rpartition(".")
        children[parent].add(last)
    kinds = {(name_pattern(record.name), frozenset(children[record.name])) for record in records}
    having = {record.name for record in records}
    patterns = {pattern for pattern, _ in kinds}
    problems = []
    for module, names in children.items():
        if module in having or (pattern := name_pattern(module)) not in patterns:
            continue
        if (pattern, frozenset(names)) in kinds:
            message = "no cache scale, though other attention modules of its kind have them"
            problems.append(make_problem("kv_scales_partial", message, layer=module))
    return problems


def _note_ones(records: list[KVRecord]) -> list[KVRecord]:
    """Adds the note to every record when all scales of the checkpoint are 1.0."""
    values = [value for record in records for value in record.values.values()]
    if not values or any(value != 1.0 for value in values):
        return records
    noted = []
    for record in records:
        message = "every cache scale of the checkpoint is 1.0"
        problem = make_problem("kv_scales_one", message, layer=record.name)
        noted.append(replace(record, problems=(*record.problems, problem)))
    return noted
