"""The names of a model's modules in its checkpoint."""

import re
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from moqext import Checkpoint, LayerRecord


class Names:
    """From the name of a module in a model to its name in a checkpoint, when called.

    Transformers renames tensors of some models when it loads them (`block_sparse_moe` of Mixtral, `backbone`
    of Nemotron-H), and one of the two may be without a head.

    Args:
        model: a model of Transformers.
        checkpoint: where it comes from.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        changes = get_model_conversion_mapping(model)
        self._changes = [change for change in changes if isinstance(change, WeightRenaming)]
        self._converters = [change for change in changes if isinstance(change, WeightConverter)]
        self._prefix = f"{model.base_model_prefix}."
        self._stored = {}
        for name in _modules_of(checkpoint.tensors):
            # Some rules are for `.weight` alone; names of other modules end with their dot.
            ending = ".weight" if f"{name}.weight" in checkpoint.tensors else "."
            self._stored[self.loaded(name + ending).removesuffix(ending)] = name

    def __call__(self, name: str) -> str:
        """A module of the model as the checkpoint calls it; unchanged where that has none like it."""
        for candidate in (name, self._prefix + name, name.removeprefix(self._prefix)):
            if candidate in self._stored:
                return self._stored[candidate]
        return name

    def respelled(self, model: Any) -> dict[str, str]:
        """Tensors that this version of Transformers would not find, as it calls them -> as the model does.

        Some versions have saved the table of Nemotron-H as `backbone.embedding`, which later ones call
        `embeddings`.
        """
        table = "model.embeddings.weight"
        stored = {self.loaded(f"{name}.weight") for name in self._stored.values()}
        spelled = table.replace("embeddings", "embedding")
        known = {name for name, _ in model.named_parameters()}
        wanted = {table, table.removeprefix(self._prefix)}
        return {spelled: table} if spelled in stored and known & wanted and table not in stored else {}

    def without_head(self, name: str) -> str:
        """The name in a model without a head of what has one in the checkpoint."""
        return name.removeprefix(self._prefix)

    def loaded(self, tensor: str) -> str:
        """A tensor of the checkpoint as Transformers calls it when it looks for its place."""
        for change in self._changes:
            tensor, _ = change.rename_source_key(tensor)
        return tensor

    def reaches(self, tensor: str, own: str) -> bool:
        """Whether Transformers finds `own` of the model for a tensor of the checkpoint."""
        return self.loaded(tensor) in (own, self._prefix + own, own.removeprefix(self._prefix))

    def refuse_converted(self, record: LayerRecord) -> None:
        """Raises where Transformers changes more than the names of a layer's tensors when it loads them.

        Raises:
            ValueError: it splits, joins or reorders one of them.
        """
        for tensor in record.tensors.values():
            name = self.loaded(tensor)
            if any(converter.rename_source_key(name)[1] is not None for converter in self._converters):
                raise ValueError(
                    f"{tensor}: quantized, and Transformers splits, joins or reorders it when it loads this "
                    "model; `python -m moqext convert DIR OUT --to bf16` makes a plain tensor of it"
                )


def _modules_of(tensors: Any) -> list[str]:
    """Every module that names of tensors tell of."""
    found: dict[str, None] = {}
    for tensor in tensors:
        found |= dict.fromkeys(tensor[: dot.start()] for dot in re.finditer(r"\.", tensor))
    return list(found)
