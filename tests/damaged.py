"""A genuine checkpoint in memory, damaged by tests and saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moqext import ops
from moqext.reader.files.tensor_files import TensorFiles
from moqext.tools.convert.writer import TensorSpec, TensorWriter

CONFIGS = ("config.json", "hf_quant_config.json")


class Damaged:
    """Tensors as bytes in their shape, and the configurations; changed by the methods, then saved.

    Attributes:
        tensors: name -> type and array, of bytes where the type has one byte, else of the type's own width.
        configs: file -> document.
        files: tensor -> the file that it is saved in, where not in `model.safetensors`.
        index: whether `save` writes an index of the files; a mapping is written as it is.
    """

    def __init__(self, source: Path) -> None:
        self.tensors: dict[str, tuple[str, np.ndarray]] = {}
        with TensorFiles(source) as files:
            for name, info in files.tensors.items():
                array = files.tensor(name, raw=True)
                self.tensors[name] = (info.dtype, array)
        self.configs = {name: json.loads((source / name).read_text()) for name in CONFIGS}
        self.files: dict[str, str] = {}
        self.index: bool | dict[str, str] = False

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name][1]

    def put(self, name: str, dtype: str, array: Any) -> None:
        self.tensors[name] = (dtype, np.asarray(array))

    def rename(self, old: str, new: str) -> None:
        self.tensors[new] = self.tensors.pop(old)

    def swizzle(self, module: str) -> None:
        """Stores block scales in the order of cuBLAS."""
        name = f"{module}.weight_scale"
        dtype, scales = self.tensors[name]
        self.put(name, dtype, np.asarray(ops.swizzle_block_scales(scales)))

    def exchange(self, module: str) -> None:
        codes = self[f"{module}.weight"]
        self.put(f"{module}.weight", "U8", codes << 4 | codes >> 4)

    def plain(self, module: str, shape: tuple[int, int]) -> None:
        """Stores a linear unquantized, its scales gone."""
        for role in ("weight_scale", "weight_scale_2", "input_scale"):
            self.tensors.pop(f"{module}.{role}", None)
        self.put(f"{module}.weight", "BF16", np.full(shape, 0x3F80, np.uint16))

    def exclude(self, *entries: str) -> None:
        """Adds entries to the exclusion list of both files."""
        self.configs["config.json"]["quantization_config"]["ignore"] += entries
        self.configs["hf_quant_config.json"]["quantization"]["exclude_modules"] += entries

    def save(self, directory: Path) -> Path:
        """Writes it, and returns the directory."""
        directory.mkdir()
        by_file: dict[str, list[str]] = {}
        for name in self.tensors:
            by_file.setdefault(self.files.get(name, "model.safetensors"), []).append(name)
        for file, names in by_file.items():
            specs = [TensorSpec(name, self.tensors[name][0], self[name].shape) for name in names]
            with TensorWriter(directory / file, specs, {"format": "pt"}) as writer:
                for name in names:
                    writer.append(name, self[name])
        if self.index is not False:
            places = {name: file for file, names in by_file.items() for name in names}
            document = {"metadata": {}, "weight_map": places if self.index is True else self.index}
            (directory / "model.safetensors.index.json").write_text(json.dumps(document))
        for name, document in self.configs.items():
            (directory / name).write_text(json.dumps(document))
        (directory / "tokenizer.json").write_text('{"model": {}}')
        return directory
