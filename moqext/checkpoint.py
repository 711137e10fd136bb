"""One checkpoint: its quantization configuration and its tensors, and what follows from the two together."""

import copy
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moqext.completeness import find_missing_layers, layer_count
from moqext.config import QuantConfig
from moqext.config_files import documents as config_documents
from moqext.config_files import given_twice
from moqext.convert import MAX_SHARD_SIZE, Conversion, Progress, convert_checkpoint
from moqext.convert.plan import Experts
from moqext.dequantize import dequantize_layer
from moqext.errors import CheckpointError
from moqext.hub import fetch, fetch_headers, hub_name, is_installed
from moqext.layers import find_layers
from moqext.load import Layer, load_layers
from moqext.load_experts import ExpertLayer, load_experts
from moqext.moe import Activation
from moqext.problems import Problem
from moqext.records import Findings, KVRecord, LayerRecord, Projection
from moqext.scale_values import BLOCK_SCALES_READ, block_scale_bytes
from moqext.spelling import Compute, Device, Dtype
from moqext.tensor_files import TensorFiles, TensorInfo
from moqext.untrusted import directory_fault, open_file, parse_object, type_name


class Checkpoint:
    """A directory as ModelOpt exports it: config.json and hf_quant_config.json, and safetensors files.

    The weights may be absent, or be there in part; see `problems`. Opening reads the configuration and the
    headers of the files; a tensor's bytes are read when it is asked for. Usable as a context manager, which
    closes it.

    Attributes:
        name: what was opened, as given.
        directory: the directory; for a model of the Hub where its files are.
        headers_only: whether only headers are there.
        config: the quantization configuration, from all files that state one; None when none does. Then the
            tensors alone tell what is quantized, and a problem says so.
        files: the safetensors files in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], *, headers_only: bool = False) -> None:
        """Opens the directory, or fetches a model of the Hugging Face Hub first.

        Args:
            directory: a directory; or, where huggingface_hub is installed, `org/name` or `org/name@revision`.
            headers_only: fetches of a model of the Hub only what `layers()` and `problems` need, the JSON
                files and the headers of the others. Values of scales are not judged then, and no tensor can
                be read.

        Raises:
            CheckpointError: there is no such directory, it cannot be read, or a safetensors file in it is
                malformed.
            ConfigError: a quantization configuration cannot be understood.
        """
        self.name = os.fspath(directory)
        self._stand_in: TemporaryDirectory[str] | None = None
        if (model := hub_name(directory)) is not None and is_installed():
            if headers_only:
                self._stand_in = fetch_headers(model)
            directory = self._stand_in.name if self._stand_in else fetch(model)
        if (fault := directory_fault(directory)) is not None:
            raise CheckpointError(fault, file=directory or None)
        self.directory = Path(directory)
        self.headers_only = self._stand_in is not None
        self.files = TensorFiles(self.directory, headers_only=self.headers_only)
        documents = list(config_documents(self.directory))
        self.config: QuantConfig | None = QuantConfig(documents) if documents else None
        self._findings: dict[tuple[bool, bool], Findings] = {}

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        """`architectures` of config.json; empty when there is no such file or it does not say.

        Raises:
            CheckpointError: config.json cannot be parsed.
        """
        named = self.model_config.get("architectures")
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """What config.json holds; nothing when there is no such file.

        Raises:
            CheckpointError: it cannot be parsed, has a name twice in an object, or a `model_type` that is no
                string.
        """
        path = self.directory / "config.json"
        if not path.is_file():
            return {}
        with open_file(path) as (file, _):
            config = parse_object(file.read(), path, "the configuration")
        if (twice := given_twice("$", config)) is not None:
            raise CheckpointError(f"{twice}: given twice in one object", file=path)
        if not isinstance(kind := config.get("model_type"), str | None):
            raise CheckpointError(f"model_type: expected a string, found {type_name(kind)}", file=path)
        return config

    def with_files(self, files: TensorFiles) -> Self:
        """The checkpoint with other tensors: what is found in them is found anew."""
        other = copy.copy(self)
        for name in ("_by_name", "file_problems"):
            other.__dict__.pop(name, None)
        other.files = files
        other._findings = {}
        return other

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and place of every tensor, by name."""
        return self.files.tensors

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor as an array of its own, read from its file now; see `TensorFiles.tensor`."""
        return self.files.tensor(name)

    def layers(self) -> tuple[LayerRecord, ...]:
        """One record per quantized linear or group of experts, in the order of their names."""
        return self.findings().layers

    def layer(self, name: str) -> LayerRecord | Projection:
        """The record of that name: a layer, a member of a group of experts, or a projection of stacked ones.

        Raises:
            CheckpointError: nothing quantized has that name.
            TypeError: it is no name.
        """
        if not isinstance(name, str):
            raise TypeError(f"layer: expected a name or a record, got {type(name)}")
        try:
            return self._by_name[name]
        except KeyError:
            raise CheckpointError(self._why_not_quantized(name), file=self.directory) from None

    def _why_not_quantized(self, name: str) -> str:
        plain = self.tensors.get(f"{name}.weight")
        if plain is not None:
            return f"{name!r} is not quantized: its weight is stored as {plain.dtype}"
        # Comparing takes the product of two lengths, and long names are nobody's slip of the pen.
        known = [known for known in self._by_name if len(known) <= 256] if len(name) <= 256 else []
        near = get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"nothing quantized is named {name!r}{hint}"

    def _record(self, layer: str | LayerRecord | Projection) -> LayerRecord | Projection:
        return layer if isinstance(layer, (LayerRecord, Projection)) else self.layer(layer)

    @cached_property
    def _by_name(self) -> dict[str, LayerRecord | Projection]:
        found: dict[str, LayerRecord | Projection] = {}
        for layer in self.layers():
            found[layer.name] = layer
            found.update((member.name, member) for member in layer.members)
            found.update((projection.name, projection) for projection in layer.projections)
        return found

    def kv_scales(self) -> tuple[KVRecord, ...]:
        """One record per attention that has cache scales, in the order of the files."""
        return self.findings().kv

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong or odd: first in the files, then in the layers."""
        return (*self.file_problems, *self.findings().all_problems())

    @cached_property
    def file_problems(self) -> tuple[Problem, ...]:
        """What is wrong or odd in the files, what is missing among them first of all."""
        names = self.files.named.keys() | self.tensors.keys()
        return (*self.files.problems, *find_missing_layers(names, layer_count(self.model_config)))

    def findings(self, *, block_scales: bool | None = None, values: bool = True) -> Findings:
        """Layers, cache scales and problems together.

        Args:
            block_scales: whether to read the block scales to judge their values, a ninth of an NVFP4
                checkpoint. None reads them where they are at most 256 MiB in all. Single and per-row scales
                are always read.
            values: whether to read scales at all; without them the headers alone are judged, and nothing of
                the files but these is read.
        """
        if block_scales is None:
            block_scales = values and block_scale_bytes(self.tensors) <= BLOCK_SCALES_READ
        key = (values, values and block_scales)
        if key not in self._findings:
            self._findings[key] = find_layers(
                self.tensors,
                self.config,
                self.tensor if values and not self.headers_only else None,
                architectures=self.architectures,
                model=self.model_config,
                block_scales=key[1],
            )
        return self._findings[key]

    def dequantize(self, layer: str | LayerRecord | Projection) -> NDArray[np.float32]:
        """The weight of a layer, exactly what its codes and scales mean.

        What concerns the activations (pre_quant_scale, input_scale) and the low-rank pair of NVFP4_SVD are no
        part of it. A scale of zero over codes that are zero or NaN means a weight of zero.

        Args:
            layer: a linear, an expert's linear, an embedding or one projection of stacked experts, as a
                record or by its name in the checkpoint.

        Returns:
            float32 [out, in]; for stacked experts [experts, out, in], whatever the order in the file.

        Raises:
            CheckpointError: nothing quantized has that name, it is a group with a weight for each expert, its
                tensors are not those of a weight in a known format, a scale is lost, or a tensor is there
                twice with different values.
        """
        return dequantize_layer(self, self._record(layer))

    def load(
        self,
        layers: str | LayerRecord | Iterable[str | LayerRecord],
        *,
        device: Device = "cpu",
        dtype: Dtype = "bfloat16",
        compute: Compute = "exact",
        top_k: int | None = None,
        activation: Activation | None = None,
        experts: Iterable[int] | None = None,
    ) -> Layer | ExpertLayer:
        """A linear made ready to run, several fused along their rows, or a layer of experts: `y = layer(x)`.

        Fused layers keep their own scales, however unequal; they need one algorithm and one input. The name
        of a container of experts, however they are stored, gives an `ExpertLayer`:
        `y = layer(x, topk_weights, topk_ids)`.

        Args:
            layers: a name or record, or the names in the order of their rows in y ([q, k, v]).
            device: "cpu" or "cuda:N", or a framework's own object, as `torch.device("cuda", 0)`.
            dtype: of x and y: "bfloat16", "float16" or "float32", or a framework's own object, as
                `torch.bfloat16`.
            compute: "exact" or "auto", or for NVFP4 weights "fp8" or "fp4"; see `LinearMethod`.
            top_k: of experts, how many a token has; None for what config.json says.
            activation: of experts, see `MoEMethod`; None for what config.json says, with its limit and alpha.
            experts: the numbers of those to load, in the order of their places; None for all. One scale for
                the activations of all experts, as of FP8, is that of all in the container.

        Raises:
            UnsupportedQuantization: the algorithm is recognised but has no method, is different among fused
                layers or within an expert, or the layer is neither a linear nor experts; or config.json names
                an activation that is not among those of `MoEMethod`.
            CheckpointError: nothing quantized has that name, a problem of severity "error" stands against
                the layer, or it has scales or codes that no intact checkpoint holds.
            ValueError: config.json does not say what has to be known of experts, or an option is of experts
                and the layer has none.
        """
        wanted = [layers] if isinstance(layers, (str, bytes, LayerRecord)) else layers
        if not isinstance(wanted, Iterable):
            raise TypeError(f"layers: expected a name, a record or several of them, got {type(wanted)}")
        records = [self._record(item) for item in wanted]
        if not records:
            raise ValueError("layers: expected at least one name, got none")
        if len(records) == 1 and isinstance(first := records[0], LayerRecord) and first.kind == "moe":
            return load_experts(
                self,
                first,
                device=device,
                dtype=dtype,
                compute=compute,
                top_k=top_k,
                activation=activation,
                experts=experts,
            )
        if any(option is not None for option in (top_k, activation, experts)):
            raise ValueError(f"top_k, activation, experts: {records[0].name} is no container of experts")
        return load_layers(self, records, device=device, dtype=dtype, compute=compute)

    def convert(
        self,
        out: str | os.PathLike[str],
        *,
        to: str = "bf16",
        experts: Experts = "auto",
        overwrite: bool = False,
        max_shard_size: int = MAX_SHARD_SIZE,
        progress: Progress | None = None,
    ) -> Conversion:
        """Writes the model without quantization, as Transformers and others load it, or in FP8.

        Weights are dequantized, rounded once from float32 to the nearest even, and multiplied with their
        `pre_quant_scale` and low-rank pair where they have one. Plain tensors of 16 bits get the same type,
        wider ones stay. Scales and everything of the KV cache are left out; other files are copied, and
        config.json says nothing of quantization any more. Memory holds a piece of a tensor at a time; the
        files change places with those in `out` when all are whole.

        Args:
            out: the directory to write to, made if it is not there.
            to: "bf16", "fp16" or "fp32"; or "fp8", which is no plain type: weights are requantized with one
                scale for each row (FP8_PER_CHANNEL_PER_TOKEN), for engines without NVFP4. Plain tensors, FP8
                scales of the cache and exclusions stay, and `errors` of the result tells what it cost.
            experts: "source": as they are stored here; "stacked" or "unstacked": in one tensor for all
                experts, or in tensors of their own, named as Transformers does; "auto": as Transformers
                loads this model.
            overwrite: whether a checkpoint that is in `out` may be replaced; other files there stay.
            max_shard_size: bytes of tensors in one file.
            progress: called as progress(bytes written, bytes in all, name of the tensor).

        Raises:
            CheckpointError: a problem of severity "error", nothing to convert, codes that stand for no
                number, values too large for the type, experts that cannot be stacked, too little room, or an
                `out` that is not empty, is no directory, has files of this one, lies in it or around it, or
                is being written to. What was in `out` is there then, and nothing else.
            OSError: it cannot be written.
        """
        return convert_checkpoint(
            self,
            out,
            to=to,
            experts=experts,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=progress,
        )

    def close(self) -> None:
        """Closes the files; arrays that were handed out stay valid."""
        self.files.close()
        if self._stand_in is not None:
            self._stand_in.cleanup()

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
