"""One checkpoint: its quantization configuration and its tensors, and what follows from the two together."""

import os
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from moqext.problems import Problem
from moqext.tensor_files import TensorFiles, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moqext.layers import LayerRecord


class Checkpoint:
    """A directory as ModelOpt exports it: config.json and hf_quant_config.json, and safetensors files.

    The weights may be absent, or be there in part; see `problems`. Opening reads the headers of the files;
    a tensor's bytes are mapped when it is asked for. Usable as a context manager, which closes it.

    Attributes:
        directory: the directory.
        files: the safetensors files in it.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Opens the directory.

        Raises:
            CheckpointError: the directory cannot be read, or a file in it is malformed.
        """
        self.directory = Path(directory)
        self.files = TensorFiles(self.directory)

    @cached_property
    def config(self) -> Any:
        """The quantization configuration, from both files.

        Raises:
            ConfigError: it cannot be understood.
        """
        from moqext import QuantConfig

        return QuantConfig.from_pretrained(self.directory)

    @property
    def tensors(self) -> "Mapping[str, TensorInfo]":
        """Type, shape and place of every tensor, by name."""
        return self.files.tensors

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only array that is not copied; see `TensorFiles.tensor`."""
        return self.files.tensor(name)

    def layers(self) -> "tuple[LayerRecord, ...]":
        """One record per quantized linear or group of experts, in the order of their names."""
        return self._found[0]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong or odd: first in the files, then in the layers."""
        return self.files.problems + self._found[1]

    @cached_property
    def _found(self) -> "tuple[tuple[LayerRecord, ...], tuple[Problem, ...]]":
        from moqext.layers import find_layers

        return find_layers(self.config, self.files)

    def close(self) -> None:
        """Forgets the memory maps; arrays that were handed out stay valid."""
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.directory)!r}: {len(self.tensors)} tensors>"
