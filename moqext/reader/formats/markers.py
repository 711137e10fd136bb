"""Reads how a file says its layers are stored: markers of ComfyUI, and metadata of safetensors.

ComfyUI has a tensor `<layer>.comfy_quant` of bytes beside each quantized layer, or one entry for all layers,
`_quantization_metadata`, among the metadata of the header. Both hold JSON, for a layer
`{"format": "nvfp4"}`. ModelOpt writes such an entry, too, beside its `quantization_config`; it names the
algorithm then, and says nothing of the order that scales and codes are stored in. Black Forest Labs publishes
FLUX as one file with the entry, for ComfyUI, under the names of its own code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moqext.errors import CheckpointError
from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.files.untrusted import parse_object
from moqext.reader.problems import Problem, make_problem

_MARKER = ".comfy_quant"
_FP8_MARKER = "scaled_fp8"
_METADATA = "_quantization_metadata"
_MODELOPT = "quantization_config"

_FLUX = ("double_blocks.", "single_blocks.")
"""Beginnings of names in FLUX as Black Forest Labs publishes it."""

MAX_MARKER_BYTES = 1 << 16

_READABLE = frozenset(
    (
        "nvfp4",
        "mxfp8",
        "float8_e4m3fn",
        "float8_e4m3fn_rowwise",
        "float8_e4m3fn_blockwise",
        "float8_e5m2",
        "int8",
        "int8_tensorwise",
    )
)
"""Formats of markers whose tensors are told by their types and shapes, block scales and nibbles aside."""


@dataclass
class Markers:
    """Words of a checkpoint about the storage of its layers.

    Attributes:
        formats: module -> the format that a marker, or the metadata that ComfyUI reads, names.
        tensors: names of the tensors that are markers, and no part of the model.
        in_headers: whether entries of headers name formats, and tensors do not.
        problems: what of it cannot be understood.
    """

    formats: dict[str, str] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    in_headers: bool = False

    @property
    def producer(self) -> str:
        """Who writes such markers; empty where there are none."""
        if self.in_headers and any(module.startswith(_FLUX) for module in self.formats):
            return "Black Forest Labs"
        return "ComfyUI" if self.formats or self.tensors else ""


def read_markers(files: TensorFiles, *, headers_only: bool) -> Markers:
    """The markers of the files, and the entries of their headers.

    Args:
        files: of the checkpoint.
        headers_only: whether no tensor can be read; a marker beside packed codes is then one of NVFP4.
    """
    markers = Markers()
    for path, metadata in files.metadata.items():
        _read_metadata(markers, path, metadata)
    markers.in_headers = bool(markers.formats)
    for name, info in files.tensors.items():
        if name.endswith(_MARKER):
            module = name.removesuffix(_MARKER)
            markers.tensors.add(name)
            markers.in_headers = False
            if headers_only:
                weight = files.tensors.get(f"{module}.weight")
                if weight is not None and weight.dtype == "U8":
                    markers.formats[module] = "nvfp4"
            else:
                _take(markers, module, *_read_marker(files, info))
        elif name.rpartition(".")[2] == _FP8_MARKER and info.numel <= 2:
            markers.tensors.add(name)
    return markers


def _read_marker(files: TensorFiles, info: TensorInfo) -> tuple[Any, str]:
    """Content of a marker and its source, or None and why it cannot be read."""
    if info.dtype != "U8" or info.nbytes > MAX_MARKER_BYTES:
        return None, f"{info.name}: expected a few bytes of JSON, found {info.dtype} of {info.nbytes} bytes"
    try:
        return parse_object(files.tensor(info.name).tobytes(), info.file, info.name), info.name
    except CheckpointError as error:
        return None, error.reason


def _take(markers: Markers, module: str, content: Any, source: str) -> None:
    """Notes what is said of one layer."""
    said = {"format": content} if isinstance(content, str) else content
    name = said.get("format") if isinstance(said, Mapping) else None
    if not isinstance(name, str):
        why = source if content is None else f"{source} names no format"
    elif name not in _READABLE:
        why = f"{source} says {name[:40]!r}, a format that is not read here"
    elif said.get("convrot"):
        why = f"{source} says {name!r} of rotated weights, which are not read here"
    else:
        markers.formats[module] = name
        return
    markers.problems.append(make_problem("foreign_layout", why, layer=module))


def _read_metadata(markers: Markers, path: Path, metadata: Mapping[str, str]) -> None:
    """The layers that the header of a file names, unless ModelOpt wrote them."""
    text = metadata.get(_METADATA)
    if text is None or _is_of_modelopt(metadata, path):
        return
    source = f"{path.name}: {_METADATA}"
    try:
        layers = parse_object(text.encode(), path, _METADATA).get("layers")
    except (CheckpointError, UnicodeEncodeError) as error:
        reason = error.reason if isinstance(error, CheckpointError) else "not valid Unicode"
        markers.problems.append(make_problem("foreign_layout", f"{path.name}: {reason}"))
        return
    for module, content in layers.items() if isinstance(layers, dict) else ():
        _take(markers, module, content, source)


def _is_of_modelopt(metadata: Mapping[str, str], path: Path) -> bool:
    """Whether the header has the configuration that ModelOpt writes there."""
    try:
        config = parse_object(metadata.get(_MODELOPT, "").encode(), path, _MODELOPT)
    except (CheckpointError, UnicodeEncodeError):
        return False
    return "quant_algo" in config
