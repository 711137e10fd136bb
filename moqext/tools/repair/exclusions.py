"""Lists of a configuration that disagree with the tensors: which decide, and so the lists are written anew.

An entry of an exclusion list that covers a quantized module makes way for the names of the plain modules that
it covered besides. In mixed precision `quantized_layers` gets what it lacks and loses what is plain. Nothing
else of the configuration is touched.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moqext._C import ConfigError
from moqext.reader.config.quant_config import QuantConfig
from moqext.reader.formats.stored import recognise
from moqext.reader.naming import is_embedding, parse_expert_name, parse_tensor_name
from moqext.reader.problems import Problem
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.repair.draft import Draft

_LISTS = ("exclude_modules", "ignore", "modules_to_not_convert", "ignored_layers")
"""Names that the exclusion list has."""

_LAYERS = "quantized_layers"
_OVER = ("excluded_but_quantized", "unlisted_but_quantized")
_MAKER = "that list is of the model's maker, not of ModelOpt"


def repair_exclusions(draft: Draft) -> None:
    """Brings the lists in agreement with the tensors, and with each other."""
    config = draft.checkpoint.config
    if config is None:
        return
    layers = draft.unsolved(*_OVER, "stored_unquantized")
    apart = [each for each in draft.unsolved("config_conflict") if "exclude_modules" in each.message]
    patterns = draft.unsolved("regex_exclusion")
    if config.native_algo is not None:
        for problem in (*layers, *apart):
            draft.refuse(problem, _MAKER)
        return
    lists = _Lists(draft, config)
    solved = [problem for problem in layers if lists.take(problem)]
    if not (solved or apart or patterns):
        return
    lists.write()
    for problem in solved:
        draft.solve(problem, lists.told(problem))
    for problem in apart:
        draft.solve(problem, "the tensors decide: one list in every file", "exclude_modules")
    for problem in patterns:
        draft.solve(problem, "left out: plain modules are named instead", "exclude_modules")


@dataclass
class _Lists:
    """The exclusion list and `quantized_layers` as they are going to be."""

    draft: Draft
    config: QuantConfig
    _listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    _unlisted: set[str] = field(default_factory=set)
    _plain: list[str] = field(default_factory=list)
    _refused: list[str] = field(default_factory=list)
    _removed: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sorts the modules with a matrix by how they are stored."""
        checkpoint = self.draft.checkpoint
        self._is_mixed = self.config.quant_algo == "MIXED_PRECISION" or bool(self.config.quantized_layers)
        self._quantized: dict[str, LayerRecord] = {}
        for layer in checkpoint.findings(block_scales=True).layers:
            self._quantized.update((record.name, record) for record in layer.linears())
        self._bare = []
        for name, info in checkpoint.tensors.items():
            named = parse_tensor_name(name)
            is_matrix = named is not None and named.role == "weight" and len(info.shape) in (2, 3)
            if named is None or not is_matrix or name in self.draft.records or is_embedding(named.module):
                continue
            self._bare.append(named.module)

    def take(self, problem: Problem) -> bool:
        """Notes what ends a finding about a layer; False where nothing does."""
        layer = problem.layer or ""
        if problem.code == "stored_unquantized":
            if layer in self.config.quantized_layers:
                self._unlisted.add(layer)
            else:
                self._plain.append(layer)
            return True
        record = self._quantized.get(layer)
        algos = self._algos(record) if record is not None else ()
        if record is None or not algos:
            self.draft.refuse(problem, "its format is not known")
        elif self._is_mixed:
            self._listed[layer] = self._entry(record, algos)
            return True
        elif self.config.quant_algo in algos and record.group_size in (None, self.config.group_size):
            return True
        else:
            configured = self.config.quant_algo or "no algorithm"
            reason = f"the configuration has {configured} for all layers, and this one is {record.format}"
            self.draft.refuse(problem, reason)
        self._refused.append(layer)
        return False

    def told(self, problem: Problem) -> str:
        """The change that ended a finding."""
        layer = problem.layer or ""
        if layer in self._unlisted:
            return f"its entry of {_LAYERS} is left out"
        if problem.code == "stored_unquantized":
            return "excluded by its name"
        entries = [repr(entry) for entry, covered in self._removed.items() if layer in covered]
        what = [f"{', '.join(entries)} excluded it, and makes way for names"] if entries else []
        what += (
            [f"listed in {_LAYERS} as {self._listed[layer]['quant_algo']}"] if layer in self._listed else []
        )
        return "; ".join(what)

    def write(self) -> None:
        """Writes the lists into every document that has them, or into all where none has."""
        targets = self._quantized.keys() - set(self._refused)
        entries = self.config.exclude_modules
        for entry in entries:
            if (covered := _covered([entry], targets)) or entry.startswith("re:"):
                self._removed[entry] = covered
        kept = [entry for entry in entries if entry not in self._removed]
        names = {*self._plain, *_covered(list(self._removed), [*self._bare, *self._refused])}
        excluded = [*kept, *sorted(self._gathered(names - _covered(kept, names)))]
        for document, nested in self._having(*_LISTS):
            keys = [key for key in _LISTS if isinstance(document.get(key), list)]
            for key in keys or ["exclude_modules" if nested else "ignore"]:
                document[key] = excluded
        if self._listed or self._unlisted:
            for document, _ in self._having(_LAYERS):
                layers = document.get(_LAYERS) or {}
                left = {name: layer for name, layer in layers.items() if name not in self._unlisted}
                document[_LAYERS] = left | self._listed

    def _having(self, *keys: str) -> list[tuple[dict[str, Any], bool]]:
        """The documents that have one of the fields, or all, marked as changed; whether each is nested."""
        found = list(self.draft.documents.quantization())
        found = [each for each in found if any(each[1].get(key) is not None for key in keys)] or found
        for file, _, _ in found:
            self.draft.documents.mark(file)
        return [(document, nested) for _, document, nested in found]

    def _algos(self, record: LayerRecord) -> tuple[str, ...]:
        """The algorithms that the tensors of a layer fit, the most telling first."""
        parts: Sequence[LayerRecord | Projection] = record.projections or (record,)
        tensors = self.draft.checkpoint.tensors
        found = [
            recognise({role: tensors[name] for role, name in part.tensors.items()}).algos for part in parts
        ]
        return tuple(algo for algo in found[0] if all(algo in algos for algos in found))

    def _entry(self, record: LayerRecord, algos: Sequence[str]) -> dict[str, Any]:
        """The entry of a layer, in the algorithm that other layers have where that is one of several."""
        used = {layer.quant_algo for layer in self.config.quantized_layers.values()}
        algo = next((algo for algo in algos if algo in used), algos[0])
        size = {} if record.group_size is None else {"group_size": record.group_size}
        return {"quant_algo": algo, **size}

    def _gathered(self, names: Collection[str]) -> set[str]:
        """The names, with containers of experts in place of theirs where all that they hold is plain."""
        partly = {expert.container for name in self._quantized if (expert := parse_expert_name(name))}
        partly |= self._quantized.keys()
        parsed = {name: parse_expert_name(name) for name in names}
        return {
            expert.container if expert is not None and expert.container not in partly else name
            for name, expert in parsed.items()
        }


def _covered(entries: Sequence[str], modules: Collection[str]) -> set[str]:
    """The modules that an exclusion list of these entries covers; fused ones only where all parts are."""
    if not entries:
        return set()
    quantization: Mapping[str, Any] = {"quant_algo": "FP8", "exclude_modules": list(entries)}
    reader = QuantConfig.from_dict({"quantization": quantization, "producer": {"name": "modelopt"}})
    found = set()
    for module in modules:
        try:
            if reader.is_excluded(module):
                found.add(module)
        except ConfigError:
            continue
    return found
