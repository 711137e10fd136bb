"""Checkpoints of compressed-tensors, as llm-compressor writes them.

    format                  tensors of a linear [N, K]                            read as
    nvfp4-pack-quantized    weight_packed u8 [N, K/2], weight_scale e4m3,         NVFP4; without activations
                            weight_global_scale g, input_global_scale h           W4A16_NVFP4
    mxfp4-pack-quantized    weight_packed u8 [N, K/2], weight_scale u8 (E8M0)     MXFP4, W4A8_MXFP4_FP8
    mxfp8-quantized         weight e4m3 [N, K], weight_scale u8 (E8M0)            MXFP8
    float-quantized,        weight e4m3 [N, K], weight_scale: one,                FP8
    naive-quantized         [N, 1],                                               FP8_PER_CHANNEL_PER_TOKEN
                            or [N/128, K/128]                                     FP8_PB_WO

Global scales divide: weight = code * weight_scale / g, so weight_scale_2 is 1 / g and input_scale 1 / h. With
one scale for a weight and activations scaled by token, that scale stands for every row. Names come from
`targets` and `ignore`: of modules, of their classes, or patterns after `re:`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.producers.fields import Fields
from moqext.reader.producers.patterns import matcher
from moqext.reader.producers.producer import Change, View, plain_modules

NAME = "compressed-tensors"

_ROLES = {
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}
_DIVISORS: dict[str, Change] = {"weight_global_scale": "divisor", "input_global_scale": "reciprocal"}
_SCALE = ".weight_scale"
_ZERO_POINTS = ("weight_zero_point", "input_zero_point", "output_zero_point")
_CACHE = re.compile(r"(?P<attention>.*)\.(?P<part>[kv])_proj\.output_scale")
"""Cache scales as versions before 0.8 name them."""

_READERS = "vLLM, SGLang, and Transformers with compressed-tensors read it"


class Scheme(NamedTuple):
    """How an entry of `config_groups` quantizes.

    Attributes:
        algo: the algorithm.
        group_size: of its blocks, None for its own.
        by_row: whether one scale of a weight stands for every row.
        otherwise: what the producer and this algorithm do with activations, empty where both do the same.
    """

    algo: str
    group_size: int | None
    by_row: bool
    otherwise: str


@dataclass(frozen=True)
class Group:
    """One entry of `config_groups`.

    Attributes:
        scheme: how it quantizes.
        names: modules that it names.
        patterns: tell whether a module is one of it.
        by_class: whether it names classes of modules.
    """

    scheme: Scheme
    names: frozenset[str]
    patterns: tuple[Callable[[str], bool], ...]
    by_class: bool


class CompressedTensors:
    """The reading of one checkpoint; see `Producer`."""

    def __init__(self, file: str, path: str, document: Mapping[str, Any]) -> None:
        """Reads the configuration.

        Args:
            file: that it is in, for messages.
            path: JSON path of it there.
            document: the quantization_config.
        """
        fields = Fields(file, path, document)
        self._fields = fields
        self._notes: list[str] = []
        self._version = fields.text("version")
        _refuse_changes(fields)
        self._ignored, self._ignored_patterns, _ = self._matchers("ignore", fields.texts("ignore"))
        self._kv_algo = self._cache(fields.inner("kv_cache_scheme"))
        groups = fields.inner("config_groups")
        if groups is None:
            raise fields.wrong("config_groups", "an object", None)
        members = groups.members()
        self._groups = tuple(filter(None, (self._group(name, group) for name, group in members)))
        if not self._groups and self._kv_algo is None:
            raise groups.refused("", "no group quantizes weights")

    # ------------------------------------------------------------------------------------ configuration

    def _group(self, name: str, fields: Fields) -> Group | None:
        """The group, None for one that only quantizes a cache."""
        if fields.inner("weights") is None:
            self._kv_algo = self._kv_algo or self._cache(fields.inner("input_activations"))
            return None
        scheme = read_scheme(fields, fields.text("format") or self._fields.text("format") or "weights")
        if scheme.otherwise:
            self._notes.append(f"{fields.path} {scheme.otherwise}")
        return Group(scheme, *self._matchers(f"config_groups.{name}.targets", fields.texts("targets")))

    def _matchers(
        self, where: str, entries: Iterable[str]
    ) -> tuple[frozenset[str], tuple[Callable[[str], bool], ...], bool]:
        """Names of modules, patterns, and whether there are classes; a class has no dot and begins large."""
        names, patterns, by_class = set(), [], False
        for entry in entries:
            if entry.startswith("re:"):
                found = matcher(entry.removeprefix("re:"))
                if found is None:
                    self._notes.append(f"{where}: {entry[:80]!r} is not followed: its matching has no bound")
                else:
                    patterns.append(found)
            elif "." not in entry and entry[:1].isupper():
                by_class = True
            else:
                names.add(entry)
        return frozenset(names), tuple(patterns), by_class

    def _cache(self, scheme: Fields | None) -> str | None:
        """The algorithm of the cache."""
        if scheme is None:
            return None
        kind, bits = scheme.text("type") or "int", scheme.number("num_bits")
        if bits == 8 and kind in ("float", "int"):
            return "FP8" if kind == "float" else "INT8"
        raise scheme.refused("", f"a cache of {bits} bits of type {kind!r} is not read here; {_READERS}")

    def _group_of(self, module: str) -> Group | None:
        """The group of a module that is quantized: names come before patterns, and these before classes."""
        for told in (
            lambda group: module in group.names,
            lambda group: any(fits(module) for fits in group.patterns),
            lambda group: group.by_class,
        ):
            if (found := next(filter(told, self._groups), None)) is not None:
                return found
        return None

    def _is_ignored(self, module: str) -> bool:
        return module in self._ignored or any(fits(module) for fits in self._ignored_patterns)

    def document(self, tensors: Mapping[str, TensorInfo], names: Collection[str]) -> dict[str, Any]:
        """See `Producer`."""
        excluded = set(self._ignored)
        excluded.update(
            module
            for module in plain_modules(tensors)
            if self._is_ignored(module) or (self._groups and self._group_of(module) is None)
        )
        quantization: dict[str, Any] = {
            "quant_algo": None,
            "kv_cache_quant_algo": self._kv_algo,
            "exclude_modules": sorted(excluded),
        }
        schemes = {group.scheme[:2] for group in self._groups}
        if len(schemes) == 1:
            algo, size = schemes.pop()
            quantization["quant_algo"] = algo
            quantization |= {} if size is None else {"group_size": size}
        elif schemes:
            quantization["quant_algo"] = "MIXED_PRECISION"
            quantization["quantized_layers"] = {
                module: {"quant_algo": group.scheme.algo}
                | ({} if group.scheme.group_size is None else {"group_size": group.scheme.group_size})
                for module, group in self._listed(names).items()
            }
        return {"producer": {"name": NAME, "version": self._version}, "quantization": quantization}

    def _listed(self, names: Collection[str]) -> dict[str, Group]:
        """The quantized modules and their groups; where no tensor has a name, what the targets name."""
        modules = (name.removesuffix(_SCALE) for name in names if name.endswith(_SCALE))
        found = {module: self._group_of(module) for module in modules}
        listed = {module: group for module, group in found.items() if group is not None}
        listed = listed or {name: group for group in self._groups for name in sorted(group.names)}
        return listed or {f"config_groups.{at}": group for at, group in enumerate(self._groups)}

    def notes(self) -> tuple[str, ...]:
        """See `Producer`."""
        return tuple(self._notes)

    # ------------------------------------------------------------------------------------------ tensors

    def rename(self, tensor: str) -> str:
        """See `Producer`."""
        module, dot, role = tensor.rpartition(".")
        if dot and role in _ROLES:
            return f"{module}.{_ROLES[role]}"
        cache = _CACHE.fullmatch(tensor)
        return f"{cache['attention']}.{cache['part']}_scale" if cache else tensor

    def view(self, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> View | None:
        """See `Producer`."""
        module, _, role = info.name.rpartition(".")
        name = self.rename(info.name)
        if role in _ZERO_POINTS:
            return None  # of symmetric formats: zero
        if role in _DIVISORS:
            return View(name, () if info.numel == 1 else info.shape, _DIVISORS[role])
        if role == "weight_scale" and info.numel == 1:
            weight = tensors.get(f"{module}.weight")
            group = self._group_of(module)
            if weight is not None and len(weight.shape) == 2 and group is not None and group.scheme.by_row:
                return View(name, weight.shape[:1], "rows")
        return View(name, info.shape)


def read_scheme(fields: Fields, style: str) -> Scheme:
    """How an entry of `config_groups` with weights quantizes.

    Args:
        fields: the entry.
        style: its format, for messages.

    Raises:
        ConfigError: in a way that is not read here.
    """
    weights = fields.inner("weights")
    if weights is None:
        raise fields.wrong("weights", "an object", None)
    kind, bits = weights.text("type") or "int", weights.number("num_bits") or 8
    odd = "asymmetric " if weights.raw("symmetric") is False else ""
    if kind != "float" or odd:
        raise weights.refused("", f"{style}: {odd}{bits}-bit {kind}s are not read here; {_READERS}")
    strategy = weights.text("strategy") or "tensor"
    scheme = (bits, strategy, _activations(fields.inner("input_activations")))
    if scheme not in _SCHEMES:
        what = f"{bits}-bit floats by {strategy} with activations {scheme[2]}"
        raise fields.refused("", f"{style}: {what} are not read here; {_READERS}")
    algo, by_row = _SCHEMES[scheme]
    block = weights.raw("block_structure")
    if algo == "FP8_PB_WO" and block not in (None, [128, 128], "128x128"):
        raise weights.wrong("block_structure", "[128, 128]", block)
    size = weights.number("group_size") if strategy in ("group", "tensor_group") else None
    return Scheme(algo, size, by_row, _OTHERWISE.get(scheme, ""))


def _refuse_changes(fields: Fields) -> None:
    """Refuses what is done to weights or activations beside quantizing them."""
    sparsity = fields.inner("sparsity_config")
    style = sparsity.text("format") if sparsity is not None else None
    if style not in (None, "dense"):
        raise fields.refused("sparsity_config.format", f"{style!r}, a sparse format, is not read; {_READERS}")
    transforms = fields.inner("transform_config")
    if transforms is not None and transforms.raw("config_groups"):
        raise fields.refused("transform_config", f"transformed weights are not read here; {_READERS}")


_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"

_SCHEMES: dict[tuple[int, str, str], tuple[str, bool]] = {
    (4, "tensor_group", "plain"): ("W4A16_NVFP4", False),
    (4, "tensor_group", "fp4"): ("NVFP4", False),
    (4, "group", "plain"): ("MXFP4", False),
    (4, "group", "fp4"): ("MXFP4", False),
    (4, "group", "fp8 by token"): ("W4A8_MXFP4_FP8", False),
    (4, "group", "fp8 by group"): ("W4A8_MXFP4_FP8", False),
    (8, "tensor", "plain"): ("FP8", False),
    (8, "tensor", "fp8"): ("FP8", False),
    (8, "tensor", "fp8 by token"): (_ROWS, True),
    (8, "channel", "plain"): (_ROWS, False),
    (8, "channel", "fp8"): (_ROWS, False),
    (8, "channel", "fp8 by token"): (_ROWS, False),
    (8, "block", "plain"): ("FP8_PB_WO", False),
    (8, "block", "fp8 by group"): ("FP8_PB_WO", False),
    (8, "group", "plain"): ("MXFP8", False),
    (8, "group", "fp8 by group"): ("MXFP8", False),
}
"""Bits of weights, what shares their scales, activations -> algorithm, whether one scale is that of rows."""

_OTHERWISE = {
    (8, "tensor", "plain"): "leaves activations as they are; here one scale is found for all tokens",
    (8, "channel", "plain"): "leaves activations as they are; here they are quantized by token",
    (8, "block", "plain"): "leaves activations as they are; here they are quantized by groups of 128",
    (8, "channel", "fp8"): "has one scale for activations; here they are quantized by token",
    (4, "group", "fp8 by group"): "quantizes activations by groups; here they are quantized by token",
}
"""Schemes that run with other activations here than with their producer -> what the two do."""


def _activations(inputs: Fields | None) -> str:
    """How activations are quantized, in the words of `_SCHEMES`."""
    if inputs is None:
        return "plain"
    kind, bits = inputs.text("type") or "int", inputs.number("num_bits") or 8
    if kind == "float" and bits == 4:
        return "fp4"
    if kind != "float" or bits != 8:
        return f"of {bits}-bit {kind}s"
    if inputs.text("strategy") in ("group", "tensor_group"):
        return "fp8 by group"
    return "fp8 by token" if inputs.raw("dynamic") else "fp8"
