"""The two configurations of a quantized checkpoint, as ModelOpt 0.47 writes them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from moqext import _C
from moqext.algorithms import ALGORITHMS, Algorithm
from moqext.reader.naming import parse_expert_name
from moqext.tools.convert.configurations import cache_scheme
from moqext.tools.convert.words import is_raw, name_of
from moqext.tools.quantize.rules import summarize
from moqext.tools.quantize.weights import Weight

FORMAT_VERSION = "0.47.0"
"""The version of ModelOpt whose files these are."""


def configurations(
    algos: Mapping[str, str], weights: Sequence[Weight], plain: Sequence[str], kv_algo: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The quantization_config of config.json, and hf_quant_config.json.

    Args:
        algos: module -> algorithm of everything that has codes.
        weights: what these are.
        plain: modules with a matrix that has none.
        kv_algo: how the cache is quantized.
    """
    producer = {"name": "modelopt", "version": f"{FORMAT_VERSION}+moqext.{_C.build_info()['version']}"}
    names = set(algos.values())
    quantization: dict[str, Any]
    if len(names) == 1:
        layer = _layer(names.pop())
        excluded = summarize(plain, list(algos))
        quantization = {
            "quant_algo": layer.pop("quant_algo"),
            "kv_cache_quant_algo": kv_algo,
            **layer,
            "exclude_modules": excluded,
        }
        flat: dict[str, Any] = {}
        facts = ALGORITHMS[next(iter(algos.values()))]
        if facts.scales == "tensor" or facts.second == "parts":
            described = _described(facts)
            flat["config_groups"] = {"group_0": {**described, "targets": ["Linear"]}}
        flat["ignore"] = excluded
    else:
        layers = _layers(algos, weights)
        quantization = {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": kv_algo,
            "quantized_layers": layers,
        }
        flat = {"config_groups": _groups(layers), "quantized_layers": layers, "ignore": []}
    if kv_algo is not None:
        flat["kv_cache_scheme"] = cache_scheme(kv_algo)
    flat |= {"quant_algo": quantization["quant_algo"], "producer": producer, "quant_method": "modelopt"}
    return flat, {"producer": producer, "quantization": quantization}


def _layer(quant_algo: str) -> dict[str, Any]:
    facts = ALGORITHMS[quant_algo]
    if is_raw(quant_algo):
        return {"quant_algo": name_of(quant_algo)}
    grouped = {} if facts.group_size is None else {"group_size": facts.group_size}
    return {"quant_algo": quant_algo, **grouped}


def _layers(algos: Mapping[str, str], weights: Sequence[Weight]) -> dict[str, dict[str, Any]]:
    """The layers by name; experts by their container where all of it is alike."""
    containers: dict[str, set[str]] = defaultdict(set)
    for weight in weights:
        containers[_container(weight)].add(algos[weight.module])
    layers = {}
    for weight in weights:
        container = _container(weight)
        name = container if len(containers[container]) == 1 else weight.module
        layers[name] = _layer(algos[weight.module])
    return layers


def _container(weight: Weight) -> str:
    """The container of an expert or a stack; of others the module itself."""
    expert = parse_expert_name(weight.module)
    if expert is not None:
        return expert.container
    return weight.module.rpartition(".")[0] if weight.is_stack else weight.module


def _groups(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`config_groups` of mixed precision: one for each algorithm."""
    names = defaultdict(list)
    for name, layer in layers.items():
        names[layer["quant_algo"]].append(name)
    return {
        f"group_{number}": {**_described(ALGORITHMS[algo.upper()]), "targets": sorted(members)}
        for number, (algo, members) in enumerate(names.items())
    }


def _described(facts: Algorithm) -> dict[str, Any]:
    """A group of `config_groups`, which engines for other producers' files read."""
    if is_raw(facts.name):
        return {"quant_algo": name_of(facts.name)}
    grouped = {"group_size": facts.group_size} if facts.scales == "groups" else {}
    by_row = {"strategy": "channel"} if facts.scales == "rows" else {}
    weights = _numbers(4 if facts.codes == "e2m1" else 8, **grouped, **by_row)
    if facts.second == "parts" and facts.input_scale is None:
        return {"weights": weights}  # activations of 16 bits
    alike = facts.second == "parts" or facts.codes == "e4m3"
    activations = _numbers(weights["num_bits"], **grouped) if alike else _numbers(8)
    return {"input_activations": activations, "weights": weights}


def _numbers(bits: int, **more: Any) -> dict[str, Any]:
    return {"dynamic": False, "num_bits": bits, "type": "float", **more}
