"""When a plug-in leaves a layer to its engine: what no engine matters for."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from moqext import ConfigError, QuantConfig
from moqext.algorithms import ALGORITHMS, LINEARS

OLDEST = (8, 0)
"""Capability of the oldest GPU that moqext's kernels run on."""
RAN_ON = 9
"""Generation of the GPUs on which moqext's kernels have run (docs/results)."""
FP4_TENSOR_CORES = (10, 0)
"""Capability from which engines multiply FP4 and MX formats as such, and moqext bf16."""

_said: set[tuple[str, str]] = set()


class Reason(NamedTuple):
    """Why a layer is the engine's.

    Attributes:
        why: for people; the same for all layers that it holds for.
        runs: whether moqext runs the layer all the same, where the user or a lack of the engine asks for it.
        fuses: whether the engine joins norms and activations with its own linears.
    """

    why: str
    runs: bool
    fuses: bool = False


class ReadConfig(NamedTuple):
    """A configuration, and what its reader does not know.

    Attributes:
        config: with an algorithm that no layer has for those of unknown ones.
        unknown: their algorithms by the names of their entries in `quantized_layers`.
    """

    config: QuantConfig
    unknown: dict[str, str]

    def algorithm_of(self, quant: Any) -> str:
        """The algorithm of an answer of `config.layer_quant`, as its file names it."""
        return self.unknown.get(quant.rule.partition(": ")[2], str(quant.quant_algo))

    def algorithms(self) -> list[str]:
        """The algorithms that layers may have, as their files name them."""
        found = {self.algorithm_of(layer) for layer in self.config.quantized_layers.values()}
        found.add("MIXED_PRECISION" if self.config.quant_algo is None else self.config.quant_algo)
        return sorted(found - {"MIXED_PRECISION", "None"})


def reason_to_step_aside(
    quant_algo: str, capability: tuple[int, int] | None, compute: str = "exact"
) -> Reason | None:
    """Why layers of an algorithm are the engine's, None where they are moqext's.

    MXFP8 on Hopper is the engine's with `compute="exact"` alone: as FP8 its linears take 0.75 of Marlin's
    time with one token, and less with more (docs/results). All is the engine's on GPUs where nothing has run.

    Args:
        quant_algo: as a configuration names it.
        capability: of the GPU, None on a CPU.
        compute: that the user asks for.
    """
    facts = ALGORITHMS.get(quant_algo)
    if facts is None or facts.linear is None:
        return Reason("moqext has no linear method for it", runs=False)
    is_mxfp8 = (facts.codes, facts.scale_dtype) == ("e4m3", "float8_e8m0fnu")
    folds = is_mxfp8 and compute in ("auto", "fp8") and capability is not None and capability[0] == 9
    if is_mxfp8 and not folds:
        return Reason("it is not known to be faster in moqext", runs=True)
    if capability is None:
        return None
    needed, here = (".".join(map(str, each)) for each in (OLDEST, capability[:2]))
    if capability < OLDEST:
        return Reason(f"moqext's kernels need capability {needed}, and this GPU has {here}", runs=False)
    if capability >= FP4_TENSOR_CORES and (facts.codes == "e2m1" or facts.scale_dtype == "float8_e8m0fnu"):
        return Reason("this GPU has tensor cores for it that moqext does not use", runs=True, fuses=True)
    if capability[0] != RAN_ON:
        return Reason(f"moqext's kernels have never run on a GPU of capability {here}", runs=True)
    return None


def read_config(document: Mapping[str, Any]) -> ReadConfig:
    """Reads a configuration, also one whose `quantized_layers` name algorithms of tomorrow.

    Raises:
        ConfigError: as `QuantConfig.from_dict`, but for algorithms of layers.
    """
    inner = document.get("quantization")
    holder = inner if isinstance(inner, Mapping) else document
    layers = holder.get("quantized_layers")
    if not isinstance(layers, Mapping):
        return ReadConfig(QuantConfig.from_dict(document), {})
    names = {
        name: entry["quant_algo"]
        for name, entry in layers.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("quant_algo"), str)
    }
    strange = {algorithm for algorithm in set(names.values()) if not _is_known(algorithm)}
    unknown = {name: algorithm for name, algorithm in names.items() if algorithm in strange}
    if unknown:
        taken = {algorithm.upper() for algorithm in names.values()}
        free = (name for name in LINEARS if taken.isdisjoint((name, *ALGORITHMS[name].aliases)))
        stand_in = next(free, LINEARS[0])
        stand_ins = {name: {"quant_algo": stand_in} for name in unknown}
        changed = {**holder, "quantized_layers": {**layers, **stand_ins}}
        document = changed if holder is document else {**document, "quantization": changed}
    unmarked = {name.partition(".\0")[0]: algorithm for name, algorithm in unknown.items()}
    return ReadConfig(QuantConfig.from_dict(document), unmarked)


def tell_once(logger: logging.Logger, engine: str, quant_algo: str, why: str, layer: str) -> None:
    """Logs a line for an algorithm and a reason, naming the first layer.

    Args:
        logger: where to.
        engine: its name.
        quant_algo: of the layer.
        why: the reason.
        layer: its name, empty where it has none or the whole checkpoint is meant.
    """
    if (quant_algo, why) not in _said:
        _said.add((quant_algo, why))
        first = f" (the first is {layer})" if layer else ""
        logger.info("layers in %s are left to %s%s: %s", quant_algo, engine, first, why)


def tell_fusion(logger: logging.Logger, what: str, why: str, where: str = "") -> None:
    """Logs a line for something that is not fused and a reason, naming the first place.

    Args:
        logger: where to.
        what: the fusion, in the plural.
        why: the reason.
        where: the module, empty where none has a name.
    """
    if (what, why) not in _said:
        _said.add((what, why))
        first = f" (the first is {where})" if where else ""
        logger.info("%s are not fused%s: %s", what, first, why)


def _is_known(algorithm: str) -> bool:
    """Whether the reader knows an algorithm of a layer, under any of its names."""
    try:
        QuantConfig.from_dict({"quant_method": "modelopt", "quant_algo": algorithm})
    except ConfigError:
        return algorithm.upper() == "MIXED_PRECISION"  # refused by the reader, with the layer's name
    return True
