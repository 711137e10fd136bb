"""Finds every quantized layer of a checkpoint, and what is wrong with it.

The tensors of the file headers are sorted into modules by name. The format of each quantized weight is
recognised from its tensors alone (`formats/stored.py`), and set against what the configuration says of the
module. Where both agree the configuration chooses among formats that look alike; where they do not, the
stored tensors decide and a problem record says so. Experts are gathered under their container. Values of
scales are judged when a reader is given.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moqext._C import NAME_LIMIT
from moqext.algorithms import ALGORITHMS
from moqext.reader.config.quant_config import Conflict, QuantConfig
from moqext.reader.findings.decision import (
    ask,
    check_leaked_scales,
    check_leaked_second,
    check_repeats,
)
from moqext.reader.findings.expert_counts import ExpertCounts
from moqext.reader.findings.experts import find_expert_groups, find_stacked_groups
from moqext.reader.findings.fused import find_fused_problems
from moqext.reader.findings.input_scales import mark_outlying_scales, mark_partial_input_scales
from moqext.reader.findings.inventory import Inventory
from moqext.reader.findings.kv_scales import find_kv_scales
from moqext.reader.findings.layer_forms import Forms
from moqext.reader.findings.lost_gates import find_lost_gates
from moqext.reader.findings.siblings import find_missing_linears
from moqext.reader.formats.scale_values import Reader, Scales, check_scales
from moqext.reader.formats.stored import Tensor, is_quantized
from moqext.reader.naming import (
    FUSED_NAMES,
    PREFIXES,
    PROJECTIONS,
    QUANTIZED_HERE,
    is_never_quantized,
    number_order,
    parse_expert_name,
    without_prefix,
)
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import Findings, Kind, LayerRecord

_SCALE_ROLES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "lora_a", "lora_b")


def find_layers(
    tensors: Mapping[str, Tensor],
    config: QuantConfig | None,
    read: Reader | None = None,
    *,
    architectures: Sequence[str] = (),
    model: Mapping[str, Any] | None = None,
    block_scales: bool = True,
    whole: bool = True,
) -> Findings:
    """The quantized layers of a checkpoint, its cache scales, and the problems of all.

    Args:
        tensors: tensor name -> an object with `dtype` (as safetensors spells it) and `shape`.
        config: the quantization configuration, None when the checkpoint has none.
        read: tensor name -> array; only scales are read. None checks names, types and shapes alone.
        architectures: `architectures` of config.json, for what only they tell (gpt-oss interleaves gate and
            up).
        model: what config.json holds: the layers and experts it counts, the rows of q, k and v in a fused
            linear.
        block_scales: False leaves scales of more than 65536 values unread, which is most of the reading.
        whole: False where files are known to be missing, so that linears that are gone are nothing new.
    """
    inventory = Inventory(tensors)
    scales = Scales(tensors, read, block_scales=block_scales)
    forms = Forms(inventory, model or {})
    problems: list[Problem] = []
    layers: dict[str, LayerRecord] = {}
    stacked: dict[str, dict[str, str]] = {}
    unquantized: dict[str, Tensor] = {}
    for module, roles in inventory.modules.items():
        weight = tensors[roles["weight"]] if "weight" in roles else None
        if weight is None:
            problems += _without_weight(module, roles, inventory)
            problems += check_repeats(module, inventory, scales)
        elif not is_quantized(weight):
            unquantized[module] = weight
            problems += _unquantized(module, weight, roles, inventory, config)
            problems += check_repeats(module, inventory, scales)
        elif len(weight.shape) == 3 and not _is_convolution(module, roles["weight"], weight):
            stacked[module] = roles
        else:
            layers[module] = _linear(module, roles, inventory, config, scales, forms)
    layers = mark_partial_input_scales(layers)
    problems += find_fused_problems(layers, unquantized, scales)
    rows = {name: info.shape[0] for name, info in unquantized.items() if info.shape}
    counts = ExpertCounts(inventory.weight_shapes(), rows, model or {})
    written_here = config is not None and QUANTIZED_HERE in (config.producer.version or "")
    groups = find_expert_groups(layers, unquantized, scales, counts, clips=not written_here)
    found, unnamed = find_stacked_groups(stacked, inventory, config, scales, architectures, counts)
    groups += found
    groups = [mark_outlying_scales(group, scales) for group in groups]
    problems += unnamed
    if whole:
        named = {group.name for group in groups}
        for container in counts.present.keys() - named:
            problems += counts.check_stack(container)
        problems += find_missing_linears(_linears(inventory), model or {})
    problems += find_lost_gates(groups, model or {}, architectures)
    kv_algo = None if config is None else config.kv_cache_quant_algo
    kv, kv_problems = find_kv_scales(inventory, kv_algo if tensors else None, scales)
    problems += kv_problems
    problems += _checkpoint_problems(inventory, config, bool(layers or stacked))
    members = {member.name for group in groups for member in group.members}
    records = [record for name, record in layers.items() if name not in members] + groups
    return Findings(tuple(sorted(records, key=lambda record: number_order(record.name))), kv, tuple(problems))


def _linear(
    module: str,
    roles: Mapping[str, str],
    inventory: Inventory,
    config: QuantConfig | None,
    scales: Scales,
    forms: Forms,
) -> LayerRecord:
    """The record of a linear or an embedding."""
    form = forms.find(module, roles)
    decision, problems = forms.decide(module, form, config)
    if leaked := list(check_leaked_scales(module, roles, inventory)):
        sizes = ("group_size_conflict", "partial_scales")
        problems = [problem for problem in problems if problem.code not in sizes] + leaked
    kind: Kind = "linear"  # whatever its name, where it has an activation scale or a bias
    if len(form.stored.shape) > 2:
        kind = "convolution"
    elif form.is_table and roles.keys().isdisjoint(("input_scale", "bias")):
        kind = "embedding"
    judged_here = kind != "embedding" and parse_expert_name(module) is None
    problems += forms.judge(module, roles, form, decision.quant_algo, judged_here)
    if scales.are_read:
        problems += check_scales(module, decision.quant_algo, roles, scales, decision.group_size)
    problems += check_repeats(module, inventory, scales)
    problems += check_leaked_second(module, roles, inventory, scales)
    return LayerRecord(
        name=module,
        kind=kind,
        quant_algo=decision.quant_algo,
        config_algo=decision.config_algo,
        stored_algo=decision.stored_algo,
        rule=decision.rule,
        group_size=decision.group_size,
        shape=tuple(form.stored.shape),
        tensors=dict(roles),
        problems=tuple(problems),
        size=form.size,
        weights=form.weights,
        partitions=form.partitions,
        rank=_rank(decision.quant_algo, roles, inventory),
    )


def _rank(algo: str, roles: Mapping[str, str], inventory: Inventory) -> int | None:
    """The rank of the low-rank pair of a layer, if its algorithm has one."""
    facts = ALGORITHMS.get(algo)
    if facts is None or not facts.low_rank or "lora_a" not in roles:
        return None
    shape = inventory.tensors[roles["lora_a"]].shape
    return shape[0] if len(shape) == 2 else None


def _is_convolution(module: str, tensor: str, weight: Tensor) -> bool:
    """Whether a weight of three dimensions is a convolution's, and none of stacked experts."""
    last = module.rpartition(".")[2]
    return weight.dtype == "F8_E4M3" and last not in PROJECTIONS and tensor.endswith(".weight")


def _scale_roles(roles: Mapping[str, str], inventory: Inventory) -> list[str]:
    """The roles that are scales. A bare `scale` beside no codes is a parameter of a norm, not one of them."""
    return [role for role in _SCALE_ROLES if role in roles and inventory.foreign.get(roles[role]) != "scale"]


def _linears(inventory: Inventory) -> Iterator[str]:
    """Modules with a weight of two or more dimensions, or with what is left of one that lost its weight."""
    for module, roles in inventory.modules.items():
        if "weight" in roles:
            if len(inventory.tensors[roles["weight"]].shape) > 1:
                yield module
        elif "weight_scale" in _scale_roles(roles, inventory):
            yield module


def _without_weight(module: str, roles: Mapping[str, str], inventory: Inventory) -> list[Problem]:
    """Scales without a weight: a lost layer if one is a weight scale, else tensors that belong to nothing."""
    found = _scale_roles(roles, inventory)
    if "weight_scale" in found:
        message = f"{', '.join(found)} without a weight"
        return [make_problem("missing_weight", message, layer=module, tensor=roles["weight_scale"])]
    return [make_problem("unowned_tensor", f"a {role} of no weight", tensor=roles[role]) for role in found]


def _unquantized(
    module: str, weight: Tensor, roles: Mapping[str, str], inventory: Inventory, config: QuantConfig | None
) -> list[Problem]:
    """Problems of a weight that is stored unquantized: scales beside it, a configuration that quantizes it.

    Norms and convolutions are never quantized; embeddings and routers only when something names them. A model
    is saved in 16 bits, so that a float of another size where codes are due may be codes that something cast.
    """
    problems = []
    scales = _scale_roles(roles, inventory)
    wide = weight.dtype not in ("BF16", "F16")
    if scales:
        message = f"{', '.join(scales)} beside a weight stored as {weight.dtype}"
        if wide:
            message += ": ModelOpt's codes are F8_E4M3, U8 or I8"
        code = "dtype_mismatch" if wide else "scales_on_unquantized"
        problems.append(make_problem(code, message, layer=module, tensor=roles[scales[0]]))
    if config is None or len(weight.shape) not in (2, 3) or (len(weight.shape) == 3 and "conv" in module):
        return problems
    asked, disagreement = ask(config, module)
    problems += disagreement
    listed = asked.rule.startswith("quantized_layers")
    if asked.quant_algo is not None and (listed or not is_never_quantized(module)):
        message = f"configured as {asked.quant_algo} ({asked.rule}), stored as {weight.dtype}"
        code = "dtype_mismatch" if wide else "stored_unquantized"
        message += ", which is neither its codes nor the 16 bits of a model" if wide else "; that holds"
        problems.append(make_problem(code, message, layer=module, tensor=roles["weight"]))
    return problems


def _checkpoint_problems(inventory: Inventory, config: QuantConfig | None, quantized: bool) -> list[Problem]:
    problems = []
    if config is None and quantized:
        message = "no quantization configuration; formats are taken from the tensors"
        problems.append(make_problem("no_quant_config", message))
    if config is not None:
        problems += [
            make_problem("config_conflict", _disagreement(conflict)) for conflict in config.conflicts
        ]
        problems += [make_problem("config_note", note) for note in config.notes]
        problems += _missing_modules(inventory, config)
        problems += [
            make_problem("regex_exclusion", f"{entry!r} is read as a name, and no module has it")
            for entry in config.exclude_modules
            if entry.startswith("re:")
        ]
    for name in inventory.too_long:
        message = f"the name has {len(name.encode())} bytes, at most {NAME_LIMIT} are looked at"
        problems.append(make_problem("name_too_long", message, tensor=name))
    for name in inventory.leftovers:
        problems.append(make_problem("leftover_tensor", "inner state of the quantizer", tensor=name))
    for name in inventory.strays:
        info = inventory.tensors[name]
        message = f"{info.dtype} of shape {list(info.shape)}, belongs to no layer that is known"
        problems.append(make_problem("unowned_tensor", message, tensor=name))
    return problems


def _disagreement(conflict: Conflict) -> str:
    chosen = f"{conflict.chosen_file or 'the configuration'} says {conflict.chosen}"
    other = f"{conflict.other_file or 'the configuration'} says {conflict.other}"
    return f"{conflict.field}: {chosen}, {other}; the first holds"


def _missing_modules(inventory: Inventory, config: QuantConfig) -> list[Problem]:
    """The modules that quantized_layers lists and that have no tensor, prefixes and fused names aside."""
    listed = config.quantized_layers
    if not listed or not inventory.tensors:
        return []
    tensors = sorted(inventory.tensors)

    def is_present(module: str) -> bool:
        below = f"{module}."
        at = bisect_left(tensors, below)
        return module in inventory.modules or (at < len(tensors) and tensors[at].startswith(below))

    problems = []
    for key in listed:
        module = without_prefix(key)
        parent, dot, last = module.rpartition(".")
        names = [module, key, *(f"{parent}{dot}{shard}" for shard in FUSED_NAMES.get(last, ()))]
        if not any(is_present(prefix + name) for prefix in ("", *PREFIXES) for name in names):
            message = "listed in quantized_layers, but no tensor belongs to it"
            problems.append(make_problem("listed_module_missing", message, layer=key))
    return problems
