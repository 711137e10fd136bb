"""One checkpoint: its quantization configuration and its tensors, and what follows from the two together."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NoReturn, Self

from numpy.typing import NDArray

from moqext._C import ConfigError
from moqext.errors import CheckpointError
from moqext.reader.config.quant_config import QuantConfig
from moqext.reader.files.config_files import documents as config_documents
from moqext.reader.files.config_files import given_twice, in_directory
from moqext.reader.files.hub import fetch, fetch_headers, hub_name, is_installed
from moqext.reader.files.places import (
    NO_CHECKPOINT,
    find_component,
    instead_of,
    locate,
    stated_component,
)
from moqext.reader.files.tensor_files import TensorFiles, TensorInfo
from moqext.reader.files.untrusted import expand_home, open_file, parse_object, type_name
from moqext.reader.findings.completeness import find_missing_layers
from moqext.reader.findings.find_layers import find_layers
from moqext.reader.formats.layout_marks import mark_layouts
from moqext.reader.formats.layouts import Layout, Layouts, Nibbles, ScaleLayout, check_options, find_layouts
from moqext.reader.formats.scale_values import BLOCK_SCALES_READ, block_scale_bytes
from moqext.reader.naming import KV_ROLES, near_names, parse_tensor_name
from moqext.reader.problems import Problem
from moqext.reader.producers.choose import choose_producer
from moqext.reader.producers.translated_files import TranslatedFiles
from moqext.reader.records import Findings, KVRecord, LayerRecord, Projection

Progress = Callable[[int, int, str], None]
"""Called with what is done, what is to be done in all, and the name of a tensor."""


class CheckpointReader:
    """The configuration, tensors, layers and problems of a checkpoint, for all that is made of them.

    `moqext.Checkpoint` describes the attributes.
    """

    file: Path | None = None
    component: str | None = None
    scale_layout: ScaleLayout | None = None
    nibbles: Nibbles | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        file: str | os.PathLike[str] | None = None,
        component: str | None = None,
        headers_only: bool = False,
        scale_layout: ScaleLayout | None = None,
        nibbles: Nibbles | None = None,
    ) -> None:
        """Opens the directory or the one file, or fetches a model of the Hugging Face Hub first.

        Args:
            directory: a directory, or one safetensors file or index of several; or, where huggingface_hub is
                installed, `org/name` or `org/name@revision`. A leading `~` is the home directory.
            file: the one to read of several in the directory, by its name in it.
            component: the directory in it to open, as "transformer" of a Diffusers pipeline; by default the
                one that is quantized, where `model_index.json` says that the directory is a pipeline.
            headers_only: fetches of a model of the Hub only what `layers()` and `problems` need, the JSON
                files and the headers of the others. Values of scales are not judged then, and no tensor can
                be read.
            scale_layout: how block scales lie where their shape leaves it open, "linear" as ModelOpt writes
                them or "swizzled" in the 128 x 4 order of cuBLAS; None for what the files say.
            nibbles: the half of a byte that holds the even column, "low" as ModelOpt writes it or "high" as
                ComfyUI does; None for what the files say.

        Raises:
            TypeError: `directory` is no path.
            ValueError: `scale_layout` or `nibbles` is none of these.
            CheckpointError: there is no such directory or file, it has several checkpoints below it or
                weights in another form, it cannot be read, or a safetensors file in it is malformed.
            ConfigError: a quantization configuration cannot be understood.
        """
        check_options(scale_layout, nibbles)
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"directory: expected a path or a name on the Hub, got {type(directory)}")
        self.scale_layout, self.nibbles = scale_layout, nibbles
        given = os.fspath(directory)
        self._stand_in: TemporaryDirectory[str] | None = None
        if (model := hub_name(directory)) is not None and is_installed():
            only = None if file is None else os.fspath(file)
            if headers_only:
                self._stand_in = fetch_headers(model, only=only, component=component)
            elif file is None and component is None:
                component = stated_component(fetch(model, configuration_only=True))
            directory = (
                self._stand_in.name if self._stand_in else fetch(model, only=only, component=component)
            )
        if component is None and file is None:
            component = find_component(Path(expand_home(directory)))
        self.component = component
        self.name = os.path.join(given, *(os.fspath(each) for each in (component, file) if each is not None))
        self.directory, self.file = locate(directory, file, component)
        self.headers_only = self._stand_in is not None
        self.files = TensorFiles(self.directory, single=self.file, headers_only=self.headers_only)
        self.config = self._read_config()
        if not self.has_content and (hint := instead_of(self.directory)):
            raise CheckpointError(f"{NO_CHECKPOINT}; {hint}", file=self.name)
        self._findings: dict[tuple[bool, bool], Findings] = {}

    def _read_config(self) -> QuantConfig | None:
        """The configuration; files of another producer are read as ModelOpt's from here on."""
        try:
            documents = list(config_documents(self.directory))
            producer = choose_producer(documents)
            if producer is None:
                return QuantConfig(documents) if documents else None
            self.files = TranslatedFiles(self.files, producer)
            file, path, _ = documents[0]
            names = self.files.tensors.keys() | self.files.named.keys()
            config = QuantConfig([(file, path, producer.document(self.files.tensors, sorted(names)))])
        except ConfigError as error:
            raise in_directory(error, self.name) from None
        config.notes = (*config.notes, *producer.notes())
        return config

    @property
    def producer(self) -> str:
        """Name and version of what wrote the files, as these tell; empty where nothing does."""
        if self.config is not None:
            return " ".join(part for part in self.config.producer if part)
        return self._layouts.producer

    @property
    def has_content(self) -> bool:
        """False where there is no quantization configuration, no safetensors file and no index of such."""
        return self.config is not None or self.files.has_weights or bool(self.files.named)

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
        """The content of config.json; empty when there is no such file.

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
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        for name in ("_by_name", "_layouts", "_lost", "file_problems"):
            other.__dict__.pop(name, None)
        other.files = files
        other._findings = {}
        return other

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and place of every tensor, by name.

        Names are ModelOpt's whoever wrote the files; `files.source` tells what a file has under a name.
        Padded scales have the shape that `tensor` hands them out in, and markers of ComfyUI are left out;
        `files.tensors` has them as they are in the files.
        """
        return self._layouts.tensors

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Weights whose block scales could be swizzled -> how they and the codes lie in the files."""
        return self._layouts.by_module

    @cached_property
    def _layouts(self) -> Layouts:
        return find_layouts(
            self.files,
            scale_layout=self.scale_layout,
            nibbles=self.nibbles,
            headers_only=self.headers_only,
        )

    def tensor(self, name: str, *, raw: bool = False) -> NDArray[Any]:
        """The tensor as an array of its own, read from its file now.

        Swizzled block scales and exchanged nibbles come in the plain order; `files.tensor` has the bytes.

        Args:
            name: in the checkpoint.
            raw: bfloat16 as its bits in uint16 and 8-bit floats as theirs in uint8, whatever is installed.
                Without it they have the types of ml_dtypes where that is installed, so that a program that
                is to run elsewhere, too, asks for `raw`.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read; see `TensorFiles.tensor`.
        """
        return self._layouts.tensor(self.files, name, raw=raw)

    def rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """The part [begin, end) of a tensor along its first axis, as `tensor` hands it out."""
        return self._layouts.rows(self.files, name, begin, end)

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
            self._refuse_lost(name)
            raise CheckpointError(self._why_not_quantized(name), file=self.directory) from None

    def _why_not_quantized(self, name: str) -> str:
        plain = self.tensors.get(f"{name}.weight")
        if plain is not None:
            return f"{name!r} is not quantized: its weight is stored as {plain.dtype}"
        lost = [problem.message for problem in self.files.problems if problem.code == "missing_shard"]
        if lost and not self.files.named:  # no index tells what is in it
            return f"nothing quantized in the files that are there is named {name!r}; {lost[0]}"
        near = near_names(name, self._by_name)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"nothing quantized is named {name!r}{hint}"

    def _refuse_lost(self, name: str, roles: Iterable[str] | None = None) -> None:
        """Refuses what has a tensor, in one of the roles or any, that the index names and no file has."""
        for module, tensors in self._lost.items():
            if module == name or module.startswith(f"{name}."):
                for role, tensor in tensors.items():
                    if roles is None or role in roles:
                        raise self.files.why_absent(tensor)

    @cached_property
    def _lost(self) -> dict[str, dict[str, str]]:
        """Module -> role -> tensor, of those that the index names and no file has, cache scales aside."""
        lost: dict[str, dict[str, str]] = {}
        for tensor in self.files.absent:
            named = parse_tensor_name(tensor)
            if named is not None and named.role not in KV_ROLES:
                lost.setdefault(named.module, {})[named.role] = tensor
        return lost

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
        """Everything wrong or odd: first in the files, then in the layers."""
        return (*self.file_problems, *self.findings().all_problems())

    @cached_property
    def file_problems(self) -> tuple[Problem, ...]:
        """Everything wrong or odd in the files, missing ones first of all."""
        usual = self._layouts.forms
        problems = [
            problem
            for problem in self.files.problems
            if problem.code != "unreadable_dtype" or problem.tensor not in usual
        ]
        if self.file is not None:
            return tuple(problems)
        names = self.files.named.keys() | self.tensors.keys()
        return (*problems, *find_missing_layers(names, self.model_config))

    @property
    def _files_are_whole(self) -> bool:
        """Whether nothing in the files says that there are more: one of several may have been chosen."""
        return self.file is None and all(problem.severity != "error" for problem in self.files.problems)

    def findings(
        self, *, block_scales: bool | None = None, values: bool = True, progress: Progress | None = None
    ) -> Findings:
        """Layers, cache scales and problems together.

        Args:
            block_scales: whether to read the block scales to judge their values, a ninth of an NVFP4
                checkpoint. None reads them where they are at most 256 MiB in all. Single and per-row scales
                are always read.
            values: whether to read scales at all; without them the headers alone are judged, and nothing of
                the files but these is read.
            progress: called as progress(scales read, scales in all, name of the next) where they are read.
        """
        if block_scales is None:
            block_scales = values and block_scale_bytes(self.tensors) <= BLOCK_SCALES_READ
        key = (values, values and block_scales)
        if key not in self._findings:
            read = self.tensor if progress is None else self._told(progress)
            found = find_layers(
                self.tensors,
                self.config,
                read if values and not self.headers_only else None,
                architectures=self.architectures,
                model=self.model_config,
                block_scales=key[1],
                whole=self._files_are_whole,
            )
            is_read = values and not self.headers_only
            self._findings[key] = mark_layouts(found, self._layouts, self.files if is_read else None)
        return self._findings[key]

    def _told(self, progress: Progress) -> Callable[[str], NDArray[Any]]:
        """Reads tensors, telling how many of the scales that was; those that are read again count once."""
        total = sum("scale" in name.rpartition(".")[2] for name in self.tensors)
        read: set[str] = set()

        def tensor(name: str) -> NDArray[Any]:
            progress(min(len(read), total), total, name)
            read.add(name)
            return self.tensor(name)

        return tensor

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

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} has files open: it cannot be copied or pickled; open the directory again")

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.directory)!r}: {len(self.tensors)} tensors>"
