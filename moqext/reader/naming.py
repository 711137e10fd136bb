"""How tensors are named in checkpoints: which layer a name belongs to, and in which role.

Two conventions exist. A linear layer, and an expert stored by itself, has `<module>.<role>`
(`model.layers.0.mlp.experts.3.up_proj.weight_scale`). Experts stored stacked in one 3-D tensor have
`<container>.<projection>` for the weight and `<container>.<projection>_<role>` for the rest (Llama 4,
gpt-oss: `model.layers.0.mlp.experts.gate_up_proj_weight_scale`), or dots and `.weight` like a linear
(Step 3.5: `model.layers.3.moe.up_proj.weight`).

    model                             container of the experts      projections
    Mixtral, MiniMax-M2/M3:           block_sparse_moe.experts.<E>  w1 (gate), w3 (up), w2 (down)
    Qwen, DeepSeek V2/V3, GLM, Kimi:  mlp.experts.<E>               gate_proj, up_proj, down_proj
    Granite:                          block_sparse_moe.experts.<E>  gate, up, down
    DeepSeek V4:                      ffn.experts.<E>               w1, w3, w2
    Nemotron-H (not gated):           mixer.experts.<E>             up_proj, down_proj
    Llama 4:                          feed_forward.experts          gate_up_proj, down_proj (3-D)
    gpt-oss:                          mlp.experts                   gate_up_proj, down_proj (3-D, alternating)
    Step 3.5, 3.7:                    moe                           gate_proj, up_proj, down_proj (3-D, dots)

Prefixes, fused names and the names of expert containers and projections are those of csrc/core/names.c.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

from moqext import _C

Role = Literal[
    "weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "bias", "lora_a", "lora_b",
    "k_scale", "v_scale", "q_scale", "kv_scale", "k_bias", "v_bias", "leftover",
]  # fmt: skip

_ROLES: dict[str, Role] = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_inv": "weight_scale",
    "scale": "weight_scale",
    "scale_weight": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
    "scale_input": "input_scale",
    "pre_quant_scale": "pre_quant_scale",
    "bias": "bias",
    "svdquant_lora_a": "lora_a",
    "svdquant_lora_b": "lora_b",
    "k_scale": "k_scale",
    "v_scale": "v_scale",
    "q_scale": "q_scale",
    "kv_scale": "kv_scale",
    "kv_cache_scaling_factor": "kv_scale",
    "k_bias": "k_bias",
    "v_bias": "v_bias",
}
_OLD_CACHE_ROLES: dict[tuple[str, str], Role] = {
    ("k_proj", "output_scale"): "k_scale",
    ("v_proj", "output_scale"): "v_scale",
}
"""Names of a linear and of a scale of its output, as of compressed-tensors before 0.6 -> role."""
KV_ROLES = frozenset(("k_scale", "v_scale", "q_scale", "kv_scale", "k_bias", "v_bias"))

_NAMES = _C.names()

PREFIXES: tuple[str, ...] = _NAMES["prefixes"]
"""Beginnings of names that a file and its configuration need not share, the longer ones first."""

PROJECTIONS: dict[str, str] = {name: role for name, role, _ in _NAMES["projections"]}
"""Last part of an expert projection's name -> "gate_up", "gate", "up" or "down"."""

_STACKED_NAMES = "|".join(name for name, _, stacks in _NAMES["projections"] if stacks)
_STACKED = re.compile(
    rf"(?P<module>.+\.(?:{_STACKED_NAMES}))_"
    r"(?P<role>weight_scale_inv|weight_scale_2|weight_scale|scale_2|scale|input_scale|pre_quant_scale|bias)"
)
_STACKED_ROLES: dict[str, Role] = {**_ROLES, "scale": "weight_scale", "scale_2": "weight_scale_2"}
_EXPERTS = rf"(?!{_NAMES['shared_experts_head']})[a-z_]*{_NAMES['experts_tail']}"
_STACKED_WEIGHT = re.compile(rf"(?:.*\.)?{_EXPERTS}\.(?:{_STACKED_NAMES})")

_EXPERT = re.compile(rf"(?P<container>.*?(?:^|\.){_EXPERTS})\.(?P<index>0|[1-9][0-9]{{0,5}})")

FUSED_GROUPS: tuple[tuple[str, ...], ...] = tuple(parts for parts, _ in _NAMES["fused"])
"""Linears of one parent that read the same input and that engines stack along their rows."""

FUSED_NAMES: dict[str, tuple[str, ...]] = {name: parts for parts, names in _NAMES["fused"] for name in names}
"""Names that engines give to fused groups; hand-edited configurations use them."""

QUANTIZED_HERE = "+moqext."
"""Part of the version of the exporter, in configurations that `quantize` wrote."""

INTERLEAVED_ARCHITECTURES = frozenset(("GptOssForCausalLM",))
"""Architectures whose gate_up_proj alternates gate and up instead of putting one after the other."""

_VISION = re.compile(r"(?:^|\.)(?:visual|vision\w*|vit\w*|image_encoder)(?:\.|$)")
_EMBEDDING = re.compile(r"\w*embeddings?|embed(?:_tokens\w*|_in|_positions)?|wte|wpe")
_ROUTERS = ("gate", "router")
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,6}(?![^.])")
_WORD = re.compile(r"\w+")
_COMPARED_LENGTH, _COMPARED_KINDS, _COMPARED_ALIKE = 256, 5000, 500
"""Letters of a name, kinds of names, and names of one kind that a misspelt name is compared with."""
_ATTENTION_CHILD = re.compile(r"(?P<attention>.+)\.(?:q_proj|k_proj|v_proj|qkv_proj|kv_b_proj)")


class Named(NamedTuple):
    """A tensor name taken apart."""

    module: str
    role: Role
    part: str
    """The part of the name that told the role, as spelled in the file."""


class ExpertName(NamedTuple):
    """The name of one projection of one expert taken apart."""

    container: str
    expert: int
    projection: str


def parse_tensor_name(name: str) -> Named | None:
    """The module and role of a tensor, or None for a tensor that plays no role in a quantized layer.

    Roles that the exporter leaks from its inner state come back as "leftover", except the low-rank pair of
    SVDQuant, which is part of the layer whatever its name.
    """
    module, _, last = name.rpartition(".")
    role = _ROLES.get(last)
    if role is None and last == "output_scale":
        role = _OLD_CACHE_ROLES.get((module.rpartition(".")[2], last))
    if role is not None and module:
        return Named(module, role, last)
    if "quantizer" in name:
        outer, _, inner = name.partition("_quantizer.")
        owner = outer.rpartition(".")[0]
        leaked = _ROLES.get(inner.lstrip("_"), "leftover") if "lora" in inner else "leftover"
        return Named(owner, leaked, name[len(owner) + 1 :])
    if match := _STACKED.fullmatch(name):
        return Named(match["module"], _STACKED_ROLES[match["role"]], match["role"])
    if _STACKED_WEIGHT.fullmatch(name):
        return Named(name, "weight", "")
    return None


def parse_expert_name(module: str) -> ExpertName | None:
    """The parts of the module name of one expert's linear, or None for any other module."""
    parent, _, projection = module.rpartition(".")
    expert = _parse_expert(parent)
    if expert is None or not (projection in PROJECTIONS or _WORD.fullmatch(projection)):
        return None
    return ExpertName(*expert, projection)


@lru_cache(maxsize=1 << 14)
def _parse_expert(parent: str) -> tuple[str, int] | None:
    """The container and the number of an expert; the finders of layers ask a dozen times for each."""
    match = _EXPERT.fullmatch(parent)
    return (match["container"], int(match["index"])) if match else None


def without_prefix(module: str) -> str:
    """The name without the first of `PREFIXES` that it begins with."""
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix)), "")
    return module[len(prefix) :]


def attention_of(module: str) -> str:
    """The attention module that a cache scale belongs to: the module itself, or the parent of its k_proj."""
    match = _ATTENTION_CHILD.fullmatch(module)
    return match["attention"] if match else module


def is_old_cache_name(tensor: str) -> bool:
    """Whether a cache scale has a name that earlier exporters or other tools gave it."""
    module, _, last = tensor.rpartition(".")
    return last in ("kv_scale", "kv_cache_scaling_factor", "output_scale") or module.endswith(".qkv_proj")


def is_embedding(module: str) -> bool:
    """Whether the module is an embedding table by its name; `embed_out` and `x_embedder` are linears."""
    return _EMBEDDING.fullmatch(module.rpartition(".")[2]) is not None


def is_never_quantized(module: str) -> bool:
    """Whether the module is one that exporters leave as it is, listed or not: what embeds, and routers."""
    parent, _, last = module.rpartition(".")
    if is_embedding(module) or ("embed" in last and _WORD.fullmatch(last) is not None):
        return True
    return last.endswith(_ROUTERS) or parent.endswith(".router")


def is_vision(module: str) -> bool:
    """Whether the module is part of a vision tower by its name."""
    return _VISION.search(module) is not None


def name_pattern(module: str) -> str:
    """The name with every numeric part replaced by `*`: modules of one kind in different layers share it."""
    return ".".join("*" if is_number(part) else part for part in module.split("."))


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the known names that are spelled much like this one, the nearest first.

    Kinds of names are compared before names: a checkpoint has a hundred thousand of these.
    """
    if len(name) > _COMPARED_LENGTH:  # the time is the product of two lengths
        return []
    kinds: dict[str, list[str]] = {}
    for each in known:
        if len(each) <= _COMPARED_LENGTH:
            kinds.setdefault(name_pattern(each), []).append(each)
    numbers = [part for part in name.split(".") if is_number(part)]
    candidates: list[str] = []
    for kind in get_close_matches(name_pattern(name), list(islice(kinds, _COMPARED_KINDS)), n=3, cutoff=0.8):
        own = iter(numbers)
        filled = ".".join(next(own, "0") if part == "*" else part for part in kind.split("."))
        alike = kinds[kind]
        candidates += [filled] if filled in alike else alike[:_COMPARED_ALIKE]
    return get_close_matches(name, candidates, n=3)


def number_order(name: str) -> str:
    """A text that sorts as the name does when its numeric parts count by value, and before words.

    One text, since a list of the parts takes hundreds of times the name where those are thousands.
    """
    return _NUMBER.sub(lambda number: "\0" + number[0].zfill(6), name).replace(".", "\1")


def is_number(part: str) -> bool:
    """Whether a part of a name counts layers or experts."""
    return len(part) <= 6 and part.isascii() and part.isdigit()


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, runs as first and last: "0-3,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
