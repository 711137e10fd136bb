"""The two configurations of a quantized checkpoint, as ModelOpt 0.47 writes them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from moqext import _C
from moqext.algorithms import ALGORITHMS
from moqext.reader.naming import parse_expert_name
from moqext.tools.quantize.rules import summarize
from moqext.tools.quantize.weights import Weight

FORMAT_VERSION = "0.47.0"
"""The version of ModelOpt whose files these are."""

_SPELLINGS = {"FP8_PB_WO": "fp8_pb_wo", "MXFP4": "mxfp4"}
"""Algorithms that ModelOpt names by a constant of its own."""

_WITHOUT_GROUP_SIZE = ("FP8_PB_WO", "MXFP4")
_DESCRIBED = ("FP8", "NVFP4", "W4A16_NVFP4")
"""Algorithms of a whole checkpoint that `config_groups` describes."""


def configurations(
    algos: Mapping[str, str], weights: Sequence[Weight], plain: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The quantization_config of config.json, and hf_quant_config.json.

    Args:
        algos: module -> algorithm of everything that has codes.
        weights: what these are.
        plain: modules with a matrix that has none.
    """
    producer = {"name": "modelopt", "version": f"{FORMAT_VERSION}+moqext.{_C.build_info()['version']}"}
    names = set(algos.values())
    quantization: dict[str, Any]
    if len(names) == 1:
        layer = _layer(names.pop())
        excluded = summarize(plain, list(algos))
        quantization = {
            "quant_algo": layer.pop("quant_algo"),
            "kv_cache_quant_algo": None,
            **layer,
            "exclude_modules": excluded,
        }
        flat: dict[str, Any] = {}
        if quantization["quant_algo"] in _DESCRIBED:
            described = _described(quantization["quant_algo"], quantization.get("group_size"))
            flat["config_groups"] = {"group_0": {**described, "targets": ["Linear"]}}
        flat["ignore"] = excluded
    else:
        layers = _layers(algos, weights)
        quantization = {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "quantized_layers": layers,
        }
        flat = {"config_groups": _groups(layers), "quantized_layers": layers, "ignore": []}
    flat |= {"quant_algo": quantization["quant_algo"], "producer": producer, "quant_method": "modelopt"}
    return flat, {"producer": producer, "quantization": quantization}


def _layer(quant_algo: str) -> dict[str, Any]:
    layer: dict[str, Any] = {"quant_algo": _SPELLINGS.get(quant_algo, quant_algo)}
    size = ALGORITHMS[quant_algo].group_size
    if size is not None and quant_algo not in _WITHOUT_GROUP_SIZE:
        layer["group_size"] = size
    return layer


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
    """`config_groups` of mixed precision: one for each distinct layer."""
    names = defaultdict(list)
    for name, layer in layers.items():
        names[tuple(sorted(layer.items()))].append(name)
    groups = {}
    for number, (key, members) in enumerate(names.items()):
        layer = dict(key)
        described = _described(str(layer["quant_algo"]), layer.get("group_size"))
        groups[f"group_{number}"] = {**described, "targets": sorted(members)}
    return groups


def _described(quant_algo: str, group_size: int | None) -> dict[str, Any]:
    """A group of `config_groups`, which engines for other producers' files read."""

    def numbers(bits: int, **more: Any) -> dict[str, Any]:
        return {"dynamic": False, "num_bits": bits, "type": "float", **more}

    grouped = {"group_size": group_size}
    described = {
        "FP8": (numbers(8), numbers(8)),
        "FP8_PER_CHANNEL_PER_TOKEN": (numbers(8), numbers(8, strategy="channel")),
        "NVFP4": (numbers(4, **grouped), numbers(4, **grouped)),
        "W4A16_NVFP4": (None, numbers(4, **grouped)),
        "W4A8_NVFP4_FP8": (numbers(8), numbers(4, **grouped)),
        "W4A8_MXFP4_FP8": (numbers(8), numbers(4, **grouped)),
        "MXFP8": (numbers(8, **grouped), numbers(8, **grouped)),
    }.get(quant_algo)
    if described is None:
        return {"quant_algo": quant_algo}
    activations, weights = described
    return {**({"input_activations": activations} if activations else {}), "weights": weights}
