"""Configurations that name another algorithm than that of the tensors, or none: the tensors decide.

Fields about algorithms, group sizes and exclusions are written anew in every document; all others stay.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from moqext.algorithms import ALGORITHMS
from moqext.errors import CheckpointError
from moqext.reader.problems import Problem
from moqext.tools.convert.configurations import cache_scheme
from moqext.tools.convert.modelopt import describe
from moqext.tools.convert.stored_jobs import records_of
from moqext.tools.repair.draft import Draft

_ALGORITHM = ("algo_conflict", "group_size_conflict")
_LISTS = ("excluded_but_quantized", "unlisted_but_quantized", "stored_unquantized", "regex_exclusion")
"""Problems of lists, which a document that is written anew has no more."""

_FIELDS = ("quant_algo", "group_size", "quantized_layers")
"""Fields about which two documents may disagree, and the tensors tell."""

_REPLACED = (
    *_FIELDS,
    "config_groups",
    "ignore",
    "exclude_modules",
    "modules_to_not_convert",
    "ignored_layers",
    "has_zero_point",
    "pre_quant_scale",
)

_CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")
_NO_DOCUMENT = "no_quant_config"


def repair_algorithms(draft: Draft) -> None:
    """Writes what the tensors are into the configurations that say something else, or into new ones."""
    _announce_cache(draft)
    apart = [each for each in draft.unsolved("config_conflict") if each.message.startswith(_FIELDS)]
    found = [*draft.unsolved(*_ALGORITHM, _NO_DOCUMENT), *apart, *_of_other_formats(draft)]
    if not found:
        return
    try:
        why, made = _undecided(draft), describe(draft.checkpoint)
    except CheckpointError as error:  # codes that belong to no layer, or no layer
        why, made = f"{error.tensor}: {error.reason.removeprefix('cannot be converted: ')}", None
    if why is not None or made is None:
        for problem in found:
            draft.refuse(problem, why or "")
        return
    flat, own = made
    if draft.checkpoint.config is None:
        draft.documents.create(flat, own)
    for file, document, is_inner in draft.documents.quantization():
        fields = own["quantization"] if is_inner else flat
        for name in _REPLACED:
            document.pop(name, None)
        document |= {name: value for name, value in fields.items() if name in _REPLACED}
        draft.documents.mark(file)
    algos = {name: record.quant_algo for name, record in records_of(draft.checkpoint)}
    for problem in [*found, *draft.unsolved("config_conflict", *_LISTS)]:
        if not problem.message.startswith(_CACHE):
            draft.solve(problem, _told(problem, algos, own["quantization"]), _subject(problem))


def _of_other_formats(draft: Draft) -> list[Problem]:
    """The layers that no rule covers and that have another format than the one of the configuration."""
    config = draft.checkpoint.config
    if config is None or config.quantized_layers:
        return []
    formats = {name: (each.quant_algo, each.group_size) for name, each in records_of(draft.checkpoint)}
    usual = (config.quant_algo, config.group_size)
    return [
        problem
        for problem in draft.unsolved("excluded_but_quantized", "unlisted_but_quantized")
        if (found := formats.get(problem.layer or "")) is not None
        and found[0] in ALGORITHMS
        and (found[0] != usual[0] or (None not in (found[1], usual[1]) and found != usual))
    ]


def _undecided(draft: Draft) -> str | None:
    """Why the tensors cannot decide, or the files may not be changed; None where they can."""
    checkpoint, config = draft.checkpoint, draft.checkpoint.config
    if config is None:
        if checkpoint.producer:
            return f"{checkpoint.producer} says it beside the tensors, and expects no configuration"
        if draft.unsolved("foreign_scale_name"):
            return "scales have names of another producer; `moqext convert --to modelopt` writes ModelOpt's"
    elif config.native_algo is not None:
        return "the configuration is of the model's maker, not of ModelOpt"
    elif config.quant_method is not None and not config.quant_method.startswith("modelopt"):
        return f"quant_method {config.quant_method} is not ModelOpt's"
    if draft.documents.has_layer_list:
        return "quant_cfg.json, of exports before 0.27, lists layers besides"
    unknown = [name for name, record in records_of(checkpoint) if record.quant_algo not in ALGORITHMS]
    if unknown:
        return f"the format of {unknown[0]} is not known"
    if lost := draft.unsolved("partial_scales", "missing_scale", "unknown_format", "shape_mismatch"):
        return f"tensors are damaged themselves: {lost[0].code} of {lost[0].layer}"
    return None


def _told(problem: Problem, algos: Mapping[str, str], quantization: Mapping[str, Any]) -> str:
    """The change that ended a problem."""
    if problem.code == _NO_DOCUMENT:
        counts = Counter(algos.values())
        listed = ", ".join(f"{algo} {count} ×" for algo, count in sorted(counts.items()))
        return f"written from the tensors: {listed}"
    if problem.code == "config_conflict":
        return "the tensors decide: one value in every file"
    if problem.code == "regex_exclusion":
        return "left out: plain modules are named instead"
    layer = problem.layer or ""
    if problem.code == "stored_unquantized":
        return "configured as it is stored, unquantized"
    entry = quantization.get("quantized_layers", {}).get(layer, quantization)
    sized = f" with group size {entry['group_size']}" if "group_size" in entry else ""
    return f"configured as {algos.get(layer, entry['quant_algo'])}{sized}"


def _subject(problem: Problem) -> str | None:
    return problem.message.partition(":")[0] if problem.code == "config_conflict" else None


def _announce_cache(draft: Draft) -> None:
    """Ends a conflict of a file that names the cache's algorithm and one that has none, where scales are."""
    config = draft.checkpoint.config
    conflicts = () if config is None else config.conflicts
    said = {algo for each in conflicts if each.field in _CACHE for algo in (each.chosen, each.other)}
    algos = said - {"null", "absent"}
    if len(algos) != 1 or not draft.checkpoint.kv_scales():
        return
    (algo,) = algos
    for file, document, is_inner in draft.documents.quantization():
        document |= {"kv_cache_quant_algo": algo} if is_inner else {"kv_cache_scheme": cache_scheme(algo)}
        draft.documents.mark(file)
    for problem in draft.unsolved("config_conflict"):
        if problem.message.startswith(_CACHE):
            draft.solve(problem, f"{algo} in every file, as scales of the cache are there", _CACHE[0])
