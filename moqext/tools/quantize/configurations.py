"""The two configurations of a quantized checkpoint, as ModelOpt 0.47 writes them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from moqext import _C
from moqext.algorithms import ALGORITHMS
from moqext.reader.naming import QUANTIZED_HERE, parse_expert_name
from moqext.tools.convert.configurations import Format, write_documents
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
    producer = {
        "name": "modelopt",
        "version": f"{FORMAT_VERSION}{QUANTIZED_HERE}{_C.build_info()['version']}",
    }
    formats = {algo: Format(algo, ALGORITHMS[algo].group_size) for algo in algos.values()}
    layers = {name: formats[algo] for name, algo in _layers(algos, weights).items()}
    excluded = summarize(plain, list(algos)) if len(formats) == 1 else []  # what is not listed is plain
    return write_documents(layers, excluded, producer, kv_algo)


def _layers(algos: Mapping[str, str], weights: Sequence[Weight]) -> dict[str, str]:
    """The algorithms by name of a layer; experts by their container where all of it is alike."""
    containers: dict[str, set[str]] = defaultdict(set)
    for weight in weights:
        containers[_container(weight)].add(algos[weight.module])
    layers = {}
    for weight in weights:
        container = _container(weight)
        name = container if len(containers[container]) == 1 else weight.module
        layers[name] = algos[weight.module]
    return layers


def _container(weight: Weight) -> str:
    """The container of an expert or a stack; of others the module itself."""
    expert = parse_expert_name(weight.module)
    if expert is not None:
        return expert.container
    return weight.module.rpartition(".")[0] if weight.is_stack else weight.module
