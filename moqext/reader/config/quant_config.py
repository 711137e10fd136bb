"""Quantization configurations: reading them, and asking them about modules.

A configuration comes in seven shapes, from up to three files that may contradict each other. Reading and
matching happen in native code; this module is its documented face.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from moqext import _C
from moqext.reader.files.config_files import documents, fail, with_reader

__all__ = ["Conflict", "LayerQuant", "Producer", "QuantConfig", "detect"]

Family = Literal["modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"]


class LayerQuant(NamedTuple):
    """How one module is quantized: `quant_algo` is None where it is not.

    `rule` names what decided, for example "quantized_layers: model.layers.0.mlp",
    "exclude_modules: lm_head" or "quant_algo".
    """

    quant_algo: str | None
    group_size: int | None
    rule: str


class Conflict(NamedTuple):
    """Two statements that disagree: the one that was followed and the other one.

    The files are names like "config.json", empty where the configuration came from a mapping. Both are the
    same file when it contradicts itself.
    """

    field: str
    chosen: str
    other: str
    chosen_file: str
    other_file: str

    def __str__(self) -> str:
        chosen = f"{self.chosen} of {self.chosen_file}" if self.chosen_file else self.chosen
        other = f"{self.other} of {self.other_file}" if self.other_file else self.other
        return f"{self.field}: {chosen} is followed, against {other}"


class Producer(NamedTuple):
    """The exporter of the checkpoint; the version is any text ("0.46.0", "dsv4-nvfp4-experts")."""

    name: str | None
    version: str | None


class QuantConfig:
    """The quantization of a ModelOpt checkpoint, as its files say; made by the `from_` methods.

    A record to be read, not changed: answers come from its native copy. Copying and pickling work.

    Attributes:
      quant_algo: canonical name of the checkpoint's algorithm, "MIXED_PRECISION", or None (KV cache only).
      kv_cache_quant_algo: "FP8", "INT8", "NVFP4", "NVFP4_AFFINE" or None.
      group_size: elements of K that share a scale; None where the algorithm has no groups. A file that does
        not say means 16 (NVFP4 and its variants), 32 (MX formats, W4A8_NVFP4_FP8) or 128 (INT4, FP8 blocks).
      exclude_modules: entries of the exclusion list, name-reversal markers (a dot, a NUL, a word) cut off.
      quantized_layers: name of a layer, or of a container of layers, to how it is quantized.
      producer: name and version of the exporter, either may be None.
      conflicts: statements that disagree, with the one that was followed.
      notes: how a field was understood where that is not obvious.
      has_zero_point, pre_quant_scale: as written, or None; pre_quant_scale says that such tensors may exist.
      quant_method: as written, or None.
      moe_quant_algo, native_algo: of a checkpoint of which ModelOpt requantized only some layers; the others
        are stored in the format of the model's maker, `native_algo`.
    """

    __slots__ = (
        "_native",
        "conflicts",
        "exclude_modules",
        "group_size",
        "has_zero_point",
        "kv_cache_quant_algo",
        "moe_quant_algo",
        "native_algo",
        "notes",
        "pre_quant_scale",
        "producer",
        "quant_algo",
        "quant_method",
        "quantized_layers",
    )

    quant_algo: str | None
    kv_cache_quant_algo: str | None
    group_size: int | None
    exclude_modules: tuple[str, ...]
    quantized_layers: dict[str, LayerQuant]
    producer: Producer
    conflicts: tuple[Conflict, ...]
    notes: tuple[str, ...]
    has_zero_point: bool | None
    pre_quant_scale: bool | None
    quant_method: str | None
    moe_quant_algo: str | None
    native_algo: str | None

    def __init__(self, documents: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
        """Reads documents (file, JSON path of its root, mapping), the first one deciding.

        Use `from_dict` or `from_pretrained`.
        """
        try:
            self._native = _C.config_parse(documents)
        except _C.ConfigError as error:
            raise with_reader(error, documents) from None
        fields = self._native.fields()
        self.quant_algo = fields["quant_algo"]
        self.kv_cache_quant_algo = fields["kv_cache_quant_algo"]
        self.group_size = fields["group_size"]
        self.exclude_modules = tuple(fields["exclude_modules"])
        self.quantized_layers = {
            name: LayerQuant(algo, size, f"quantized_layers: {name}")
            for name, (algo, size) in fields["quantized_layers"].items()
        }
        self.producer = Producer(fields["producer_name"], fields["producer_version"])
        self.conflicts = tuple(Conflict(*row) for row in fields["conflicts"])
        self.notes = tuple(fields["notes"])
        self.has_zero_point = fields["has_zero_point"]
        self.pre_quant_scale = fields["pre_quant_scale"]
        self.quant_method = fields["quant_method"]
        self.moe_quant_algo = fields["moe_quant_algo"]
        self.native_algo = fields["native_algo"]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> QuantConfig:
        """Reads any shape of configuration: a quantization_config, a hf_quant_config, a whole config.json.

        Names of algorithms are taken in any case and under their known aliases. Fields that vLLM demands and
        genuine files lack may be absent: group_size, kv_cache_quant_algo and exclude_modules of NVFP4 and
        MXFP8, and quant_algo where only the KV cache is quantized.

        Raises ConfigError (a ValueError; `path` is the JSON path of the field, and the message says what was
        found and what is accepted) for: a document or `quantization` that is no object; a quant_method of
        another quantizer; an absent quant_algo without a KV algorithm; an unknown algorithm of the
        checkpoint, of a layer, of the experts or of the KV cache; a group size that is no positive integer;
        an exclusion list that is no list of text; quantized_layers that is no object of objects, lists one
        layer twice with different algorithms, or is empty or absent under MIXED_PRECISION; layers listed
        without an algorithm of the checkpoint.
        """
        return cls([("", "$", mapping)])

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> QuantConfig:
        """Reads config.json, hf_quant_config.json and quant_cfg.json of a checkpoint together.

        A field comes from the first of them that states it: quantization_config of config.json (its own,
        then that of text_config or llm_config), hf_quant_config.json, quant_cfg.json (the layer list of
        exports before 0.27). What a later one says otherwise is in `conflicts`.

        `directory` may be a model of the Hugging Face Hub, `org/name` or `org/name@revision`, where
        huggingface_hub is installed; only these files are fetched.

        Raises ConfigError as `from_dict` does, with the file's name in the message; also for a file that
        cannot be read or is no JSON, a name given twice in one object, or a directory without any
        quantization configuration.
        """
        found = list(documents(directory))
        if not found:
            where = "$.quantization_config"
            raise fail(
                os.fspath(directory), where, "absent from config.json, and there is no hf_quant_config.json"
            )
        return cls(found)

    def layer_algo(self, module: str, shards: Iterable[str] = ()) -> str | None:
        """Returns the canonical algorithm of a module named as in the checkpoint, or None.

        See `layer_quant`.
        """
        return self._native.layer_quant(module, shards)[0]

    def layer_quant(self, module: str, shards: Iterable[str] = ()) -> LayerQuant:
        """Returns how a module named as in the checkpoint is quantized, and which rule decided.

        In this order: the module's own entry in quantized_layers; exclude_modules; the nearest container
        above it in quantized_layers; the checkpoint's algorithm, which MIXED_PRECISION does not have. A fused
        name (qkv_proj, gate_up_proj, w13, fused_qkv_a_proj_with_mqa, fused_qkv_a_proj, in_proj_qkvz,
        in_proj_ba) that nothing names itself has what its parts have; `shards` says which parts there are, as
        last components or whole names. An expert container (`...experts`, or the `moe` that holds stacked
        projections) has what the entries below it have.

        Raises ConfigError where parts or experts disagree, naming them with their algorithms.
        """
        return LayerQuant(*self._native.layer_quant(module, shards))

    def is_excluded(
        self,
        module: str,
        packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
        semantics: Literal["modelopt", "vllm"] = "modelopt",
    ) -> bool:
        """Returns whether exclude_modules covers a module.

        With "modelopt", as the producer means it: an entry without `*` covers the module and everything
        below, in others `*` matches any characters and nothing else is special; the prefixes `model.`,
        `language_model.`, `model.language_model.` and `language_model.model.` may be there or not, on either
        side; of a fused name all parts must agree. With "vllm", exactly what vLLM's own rule answers,
        its substring step and the vision towers that it never quantizes included; only
        `packed_modules_mapping` says which names are fused there.

        Raises ConfigError where only some parts of a fused name are excluded.
        """
        return self._native.is_excluded(module, packed_modules_mapping, semantics)

    def expand_trailing_wildcards(self) -> QuantConfig:
        """Returns a copy whose entries `p*` are split into `p` and `p.*`, as vLLM does before renaming.

        Entries that end in `.*`, and a lone `*`, stay as they are. What p fits stays excluded with its
        subtree, for both meanings of `is_excluded`. What merely begins alike is let go, since the split takes
        `p*` for a module and what is below: `layers.1*` covers `layers.10`, the pair does not.
        """
        entries: list[str] = []
        for entry in self.exclude_modules:
            if entry.endswith("*") and entry != "*" and not entry.endswith(".*"):
                entries += [entry[:-1], entry[:-1] + ".*"]
            else:
                entries.append(entry)
        return self.replace(exclude_modules=entries)

    def replace(self, **fields: Any) -> QuantConfig:
        """Returns a copy with fields of the inner object of `to_dict` replaced, validated like any other."""
        mapping = self.to_dict()
        return QuantConfig.from_dict({**mapping, "quantization": {**mapping["quantization"], **fields}})

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration in the shape of hf_quant_config.json, all names canonical.

        `from_dict` reads it back as an equal configuration.
        """
        inner: dict[str, Any] = {
            "quant_algo": self.quant_algo,
            "kv_cache_quant_algo": self.kv_cache_quant_algo,
            "exclude_modules": list(self.exclude_modules),
        }
        optional = {
            "group_size": self.group_size,
            "has_zero_point": self.has_zero_point,
            "pre_quant_scale": self.pre_quant_scale,
            "moe_quant_algo": self.moe_quant_algo,
        }
        inner.update({name: value for name, value in optional.items() if value is not None})
        if self.quantized_layers:
            inner["quantized_layers"] = {
                name: {"quant_algo": layer.quant_algo}
                | ({} if layer.group_size is None else {"group_size": layer.group_size})
                for name, layer in self.quantized_layers.items()
            }
        if self.native_algo is not None:
            inner["weight_block_size"] = [128, 128]
        outer: dict[str, Any] = {"producer": dict(self.producer._asdict()), "quantization": inner}
        return outer if self.quant_method is None else {"quant_method": self.quant_method, **outer}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.to_dict(), self.conflicts, self.notes)

    def __eq__(self, other: object) -> bool:
        """Equal when everything the files said is equal; conflicts and notes do not count."""
        return self.to_dict() == other.to_dict() if isinstance(other, QuantConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = [f"quant_algo={self.quant_algo!r}", f"kv_cache_quant_algo={self.kv_cache_quant_algo!r}"]
        if self.group_size is not None:
            parts.append(f"group_size={self.group_size}")
        for name, count in (
            ("exclude_modules", len(self.exclude_modules)),
            ("quantized_layers", len(self.quantized_layers)),
            ("conflicts", len(self.conflicts)),
        ):
            if count:
                parts.append(f"{name}=<{count}>")
        return f"QuantConfig({', '.join(parts)})"


def _restore(
    mapping: Mapping[str, Any], conflicts: tuple[Conflict, ...], notes: tuple[str, ...]
) -> QuantConfig:
    config = QuantConfig.from_dict(mapping)
    config.conflicts, config.notes = conflicts, notes
    return config


def detect(mapping: Mapping[str, Any] | None) -> Family | None:
    """Returns the name of the engine method a configuration asks for, or None.

    "modelopt" for FP8 in every scaling, "modelopt_fp4" for every algorithm with "FP4" in its name,
    "modelopt_mxfp8" and "modelopt_mixed"; None for anything else, INT4 and INT8 included. The document must
    say ModelOpt in quant_method, or, lacking that (hf_quant_config.json, exports before 0.35), as producer or
    quant_library. A model in native FP8 of which ModelOpt requantized the experts (quant_method "fp8") is not
    claimed: its engine method is another. vLLM and SGLang differ in claiming FP8_PER_CHANNEL_PER_TOKEN and
    the block formats only where quant_method happens to be exactly "modelopt".

    A model without any configuration, None, is not claimed. Raises TypeError for what is no mapping, such as
    the name of a directory.
    """
    if mapping is None:
        return None
    if not isinstance(mapping, Mapping):
        instead = "; QuantConfig.from_pretrained and Checkpoint take directories"
        raise TypeError(
            f"mapping: expected a parsed configuration, got {type(mapping)}"
            + (instead if isinstance(mapping, (str, os.PathLike)) else "")
        )
    return _C.config_detect(mapping)
