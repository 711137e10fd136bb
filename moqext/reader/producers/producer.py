"""A producer as the reader sees it: its configuration in ModelOpt's words, its tensors under those names.

A producer is one small module with a class of this shape. Everything above the files knows none of them.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.formats.stored import FLOATS, is_quantized

Change = Literal["none", "divisor", "reciprocal", "rows"]


class View(NamedTuple):
    """A tensor of a file as ModelOpt would have stored it.

    Attributes:
        name: ModelOpt's.
        shape: that it is handed out in.
        change: "none" where the bytes stay; "divisor" of a weight, as the factor in float32; "reciprocal" of
            a divisor of activations; "rows" where one value is repeated for each row.
    """

    name: str
    shape: tuple[int, ...]
    change: Change = "none"


class Producer(Protocol):
    """The reading of one checkpoint of another producer."""

    def rename(self, tensor: str) -> str:
        """ModelOpt's name of a tensor, which need not be there; its own where both call it alike."""

    def view(self, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> View | None:
        """A tensor as ModelOpt would have it, None for one that says nothing."""

    def document(self, tensors: Mapping[str, TensorInfo], names: Collection[str]) -> dict[str, Any]:
        """The configuration in the shape of hf_quant_config.json.

        Args:
            tensors: those there are, under ModelOpt's names.
            names: of these and of what only the index names.

        Raises:
            ConfigError: the configuration cannot be understood, or asks for what is not read here.
        """

    def notes(self) -> tuple[str, ...]:
        """Sentences about what of the configuration was understood how."""


def plain_modules(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Modules with a matrix that is not quantized."""
    return [
        module
        for name, info in tensors.items()
        if (module := name.removesuffix(".weight")) != name and len(info.shape) == 2 and info.dtype in FLOATS
    ]


def quantized_modules(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Modules with a matrix of codes."""
    return [
        module
        for name, info in tensors.items()
        if (module := name.removesuffix(".weight")) != name and len(info.shape) == 2 and is_quantized(info)
    ]
