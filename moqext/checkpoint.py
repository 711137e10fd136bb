"""One checkpoint: its quantization configuration and its tensors, and what follows from the two together."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from moqext.layers import find_layers
from moqext.problems import Problem
from moqext.records import Findings, KVRecord, LayerRecord
from moqext.scale_values import block_scale_bytes
from moqext.tensor_files import TensorFiles, TensorInfo
from moqext.untrusted import open_file, parse_object

BLOCK_SCALES_READ = 256 << 20
"""Bytes of block scales that are read without being asked to."""


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
        self._findings: dict[bool, Findings] = {}

    @cached_property
    def config(self) -> Any:
        """The quantization configuration, from both files.

        Raises:
            ConfigError: it cannot be understood.
        """
        from moqext import QuantConfig

        return QuantConfig.from_pretrained(self.directory)

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        """`architectures` of config.json; empty when there is no such file or it does not say.

        Raises:
            CheckpointError: config.json cannot be parsed.
        """
        path = self.directory / "config.json"
        if not path.is_file():
            return ()
        with open_file(path) as (file, _):
            named = parse_object(file.read(), path, "the configuration").get("architectures")
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and place of every tensor, by name."""
        return self.files.tensors

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only array that is not copied; see `TensorFiles.tensor`."""
        return self.files.tensor(name)

    def layers(self) -> tuple[LayerRecord, ...]:
        """One record per quantized linear or group of experts, in the order of their names."""
        return self.findings().layers

    def kv_scales(self) -> tuple[KVRecord, ...]:
        """One record per attention that has cache scales, in the order of the files."""
        return self.findings().kv

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong or odd: first in the files, then in the layers."""
        return (*self.files.problems, *self.findings().all_problems())

    def findings(self, *, block_scales: bool | None = None) -> Findings:
        """Layers, cache scales and problems together.

        Args:
            block_scales: whether to read the block scales to judge their values, a ninth of an NVFP4
                checkpoint. None reads them where they are at most 256 MiB in all. Single and per-row scales
                are always read.
        """
        if block_scales is None:
            block_scales = block_scale_bytes(self.tensors) <= BLOCK_SCALES_READ
        if block_scales not in self._findings:
            self._findings[block_scales] = find_layers(
                self.tensors,
                self.config,
                self.tensor,
                architectures=self.architectures,
                block_scales=block_scales,
            )
        return self._findings[block_scales]

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
