"""The files of a conversion beside its tensors: the configuration, and what is copied as it is."""

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

QUANTIZATION_FILES = ("hf_quant_config.json", "quant_cfg.json")
INDEX_FILE = "model.safetensors.index.json"

_OTHER_WEIGHTS = (".safetensors", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_INDEX = ".safetensors.index.json"
_NESTED = ("text_config", "llm_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """The type of the model by config.json, None where it does not say."""
    parts = [config, *(config[name] for name in _NESTED if isinstance(config.get(name), dict))]
    named = (part.get(key) for part in parts for key in _DTYPE_KEYS)
    return next((name for name in named if isinstance(name, str)), None)


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the model without quantization, in that type; empty where there is none."""
    result = copy.deepcopy(dict(config))
    parts = [result, *(part for part in result.values() if isinstance(part, dict))]
    for part in parts:
        part.pop("quantization_config", None)
        for key in _DTYPE_KEYS:
            if key in part:
                part[key] = dtype
    if result and not any(key in result for key in _DTYPE_KEYS):
        result["torch_dtype"] = dtype  # the name that every version of Transformers reads
    return result


def other_files(source: Path, converted: Collection[Path]) -> tuple[list[Path], list[str]]:
    """Files that are copied as they are (tokenizer, templates, licence, adapters), and those that are not.

    Args:
        source: the directory.
        converted: the files of weights that are converted.

    Returns:
        Files to copy; names of other weights, of links that lead nowhere, and of linked folders. Adapters
        (LoRA) are copied, since they are weights of no layer.
    """
    files, left_out = [], []
    for path in _entries(source):
        name = str(path.relative_to(source))
        if path.name in QUANTIZATION_FILES or name == "config.json" or path in converted:
            continue
        if path.name.endswith(_INDEX):
            continue
        weights = path.name.endswith(_OTHER_WEIGHTS) and not path.name.startswith("adapter_")
        if weights or not path.is_file():
            left_out.append(name)
        else:
            files.append(path)
    return files, left_out


def _entries(directory: Path) -> Iterator[Path]:
    """Files and links below, but not in hidden folders, as version control and download tools make."""
    for path in sorted(directory.iterdir()):
        if not path.is_dir() or path.is_symlink():
            yield path
        elif not path.name.startswith("."):
            yield from _entries(path)
