"""The configurations that ModelOpt writes beside a checkpoint, in config.json and hf_quant_config.json."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moqext.algorithms import ALGORITHMS
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.config.quant_config import QuantConfig
from moqext.tools.convert.words import is_raw, name_of

MIXED = "MIXED_PRECISION"


class Format(NamedTuple):
    """How one module is quantized: algorithm, and group size where there is one."""

    algo: str
    group_size: int | None = None

    def entry(self) -> dict[str, Any]:
        """In the words of ModelOpt's files."""
        sized = ALGORITHMS[self.algo].scales == "groups" and not is_raw(self.algo)
        size = {"group_size": self.group_size} if sized else {}
        return {"quant_algo": name_of(self.algo), **size}

    def whole(self) -> dict[str, Any]:
        """The fields of hf_quant_config.json where all modules are so."""
        factors = ALGORITHMS[self.algo].pre_quant_scale and self.group_size is not None
        return self.entry() | ({"has_zero_point": False, "pre_quant_scale": True} if factors else {})

    def group(self, targets: Sequence[str]) -> dict[str, Any]:
        """An entry of `config_groups` in config.json, which engines for other producers' files read."""
        facts = ALGORITHMS[self.algo]
        if (
            is_raw(self.algo)
            or facts.codes not in ("e4m3", "e2m1")
            or facts.pre_quant_scale
            or facts.low_rank
        ):
            return {**self.entry(), "targets": list(targets)}
        grouped = {"group_size": self.group_size} if facts.scales == "groups" else {}
        by_row = {"strategy": "channel"} if facts.scales == "rows" else {}
        weights = _numbers(4 if facts.codes == "e2m1" else 8, **grouped, **by_row)
        if facts.second == "parts" and facts.input_scale is None:
            return {"weights": weights, "targets": list(targets)}  # activations of 16 bits
        alike = facts.second == "parts" or facts.codes == "e4m3"
        activations = _numbers(weights["num_bits"], **grouped) if alike else _numbers(8)
        return {"input_activations": activations, "weights": weights, "targets": list(targets)}

    @property
    def has_group(self) -> bool:
        """Whether ModelOpt writes a group where all modules are so."""
        facts = ALGORITHMS[self.algo]
        plain = not (facts.pre_quant_scale or facts.low_rank)
        return plain and (
            (facts.codes, facts.scales) == ("e4m3", "tensor")
            or (facts.codes, facts.second) == ("e2m1", "parts")
        )


def configurations(
    checkpoint: CheckpointReader,
    quantized: Mapping[str, Format],
    plain: Sequence[str],
    kv_algo: str | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The quantization_config of config.json, and hf_quant_config.json.

    Args:
        checkpoint: the source, whose exclusions stay.
        quantized: modules that have codes in the result, and how they are quantized.
        plain: modules with a matrix that have none; they are excluded by name where no pattern does.
        kv_algo: how the cache is quantized.
    """
    producer = {key: value for key, value in _producer(checkpoint).items() if value}
    return write_documents(quantized, _excluded(checkpoint, quantized, plain), producer, kv_algo)


def write_documents(
    quantized: Mapping[str, Format], excluded: Sequence[str], producer: Mapping[str, Any], kv_algo: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The quantization_config of config.json, and hf_quant_config.json.

    Args:
        quantized: modules that have codes, or containers of such, and how they are quantized.
        excluded: entries of the exclusion list; ModelOpt has none where it lists layers.
        producer: name and version.
        kv_algo: how the cache is quantized.
    """
    formats = dict.fromkeys(quantized.values())
    listed = {module: each.entry() for module, each in quantized.items()} if len(formats) > 1 else {}
    whole = {"quant_algo": MIXED} if listed else next(iter(formats)).whole()
    flat: dict[str, Any] = {"ignore": list(excluded), "quant_algo": whole["quant_algo"]}
    if groups := _groups(quantized, formats):
        flat = {"config_groups": groups, **flat}
    if listed:
        flat["quantized_layers"] = listed
    if kv_algo is not None:
        flat["kv_cache_scheme"] = cache_scheme(kv_algo)
    flat |= {"producer": producer, "quant_method": "modelopt"}
    quantization = {**whole, "kv_cache_quant_algo": kv_algo}
    if excluded or not listed:
        quantization["exclude_modules"] = list(excluded)
    if listed:
        quantization["quantized_layers"] = listed
    return flat, {"producer": producer, "quantization": quantization}


def cache_scheme(kv_algo: str) -> Any:
    """The algorithm of the cache as config.json has it."""
    return {"dynamic": False, "num_bits": 8, "type": "float"} if kv_algo == "FP8" else kv_algo


def _groups(quantized: Mapping[str, Format], formats: Mapping[Format, None]) -> dict[str, Any]:
    """The entries of `config_groups`; none where ModelOpt has none."""
    if len(formats) == 1:
        (only,) = formats
        return {"group_0": only.group(["Linear"])} if only.has_group else {}
    targets = defaultdict(list)
    for module, each in quantized.items():
        targets[each].append(module)
    return {f"group_{number}": each.group(sorted(targets[each])) for number, each in enumerate(formats)}


def _numbers(bits: int, **more: Any) -> dict[str, Any]:
    return {"dynamic": False, "num_bits": bits, "type": "float", **more}


def _producer(checkpoint: CheckpointReader) -> dict[str, str | None]:
    """ModelOpt, which the files are in the form of, and the version that wrote the source if it did."""
    config = checkpoint.config
    if config is None or config.producer.name is None:
        return {"name": "modelopt"}
    if config.producer.name == "modelopt":
        return dict(config.producer._asdict())
    return {"name": "modelopt", "version": f"from {checkpoint.producer}"}


def _excluded(
    checkpoint: CheckpointReader, quantized: Mapping[str, Format], plain: Sequence[str]
) -> list[str]:
    """The exclusions of the source that fit, and what else is plain."""
    listed = checkpoint.config.exclude_modules if checkpoint.config else ()
    entries = [
        entry for entry in listed if not entry.startswith("re:")
    ]  # expressions of others match nothing
    if any(map(_excluder(entries).is_excluded, quantized)):
        entries = [entry for entry in entries if not any(map(_excluder([entry]).is_excluded, quantized))]
    reader = _excluder(entries)
    return sorted({*entries, *(module for module in plain if not reader.is_excluded(module))})


def _excluder(entries: Sequence[str]) -> QuantConfig:
    document: Mapping[str, Any] = {"quant_algo": "FP8", "exclude_modules": list(entries)}
    return QuantConfig.from_dict({"quantization": document, "producer": {"name": "modelopt"}})
