"""The public checkpoint: all of the reader, and what is made of its layers."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from moqext.errors import CheckpointError
from moqext.layers.load import Layer, load_layers
from moqext.layers.load_experts import ExpertLayer, load_experts
from moqext.ops.quantize_weights import ScaleSearch
from moqext.ops.spelling import Activation, Compute, Device, Dtype
from moqext.reader.checkpoint_reader import CheckpointReader, Progress
from moqext.reader.dequantize import SCALES_OF_WEIGHT, dequantize_layer
from moqext.reader.files.untrusted import expand_home
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.convert import MAX_SHARD_SIZE, Conversion, convert_checkpoint
from moqext.tools.convert.plan import Experts
from moqext.tools.quantize import Quantization, quantize_checkpoint
from moqext.tools.repair import RepairPlan, plan_repair


class Checkpoint(CheckpointReader):
    """A directory as ModelOpt or a producer of docs/files.md writes it: JSON and safetensors files.

    One file of several can be opened alone; the configuration is that beside it, and nothing is missed then.
    The root of a Diffusers pipeline stands for the component in it that is quantized.

    The weights may be absent, or be there in part; see `problems`. Opening reads the configuration and the
    headers of the files; a tensor's bytes are read when it is asked for. Usable as a context manager, which
    closes it.

    Attributes:
        name: what was opened, as given, with the component and the file.
        directory: the directory; for a model of the Hub where its files are.
        component: the directory of a pipeline that was opened, by its name there; None where none was chosen.
        file: the one file that was opened, of safetensors or an index of such; None for a directory.
        headers_only: whether only headers are there.
        producer: name and version of what wrote the files, as they tell; empty where nothing does.
        config: the quantization configuration, from all files that state one; None when none does. Then the
            tensors alone tell what is quantized, and a problem says so.
        files: the safetensors files in the directory.
        scale_layout, nibbles: what the caller said of the order of block scales and codes.
    """

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
        record = self._record(layer)
        self._refuse_lost(record.name, ("weight", *SCALES_OF_WEIGHT))
        return dequantize_layer(self, record)

    @overload
    def load(
        self,
        layers: str | LayerRecord | Iterable[str | LayerRecord],
        *,
        device: Device = "cpu",
        dtype: Dtype = "bfloat16",
        compute: Compute = "exact",
    ) -> Layer: ...

    @overload
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
    ) -> ExpertLayer: ...

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
        of a container of experts gives an `ExpertLayer`, as `load_experts` does; to type checkers, which do
        not see what a name stands for, the result is a `Layer` unless an option of experts is given.

        Args:
            layers: a name or record, or the names in the order of their rows in y ([q, k, v]).
            device: "cpu" or "cuda:N", or a framework's own object, as `torch.device("cuda", 0)`.
            dtype: of x and y: "bfloat16", "float16" or "float32", or a framework's own object, as
                `torch.bfloat16`.
            compute: "exact" or "auto", "fp8" for NVFP4 and MX weights, "fp4" for NVFP4; see `LinearMethod`.
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
            return self.load_experts(
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
        for record in records:
            self._refuse_lost(record.name)
        return load_layers(self, records, device=device, dtype=dtype, compute=compute)

    def load_experts(
        self,
        container: str | LayerRecord,
        *,
        device: Device = "cpu",
        dtype: Dtype = "bfloat16",
        compute: Compute = "exact",
        top_k: int | None = None,
        activation: Activation | None = None,
        experts: Iterable[int] | None = None,
    ) -> ExpertLayer:
        """A layer of experts made ready to run, however they are stored.

        `y = layer(x, topk_weights, topk_ids)`; arguments and errors are those of `load`.

        Raises:
            CheckpointError: as for `load`, or the layer is no container of experts.
        """
        record = self._record(container)
        if not isinstance(record, LayerRecord) or record.kind != "moe":
            raise CheckpointError(f"{record.name} is no container of experts", file=self.directory)
        self._refuse_lost(record.name)
        return load_experts(
            self,
            record,
            device=device,
            dtype=dtype,
            compute=compute,
            top_k=top_k,
            activation=activation,
            experts=experts,
        )

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
        """Writes the model without quantization, as Transformers loads it, in FP8, or under other names.

        Weights are dequantized, rounded once from float32 to the nearest even, and multiplied with their
        `pre_quant_scale` and low-rank pair where they have one. Plain tensors of 16 bits get the same type,
        wider ones stay. Scales and everything of the KV cache are left out; other files are copied, and
        config.json says nothing of quantization any more. Memory holds a piece of a tensor at a time; the
        files change places with those in `out` when all are whole.

        Args:
            out: the directory to write to, made if it is not there.
            to: "bf16", "fp16" or "fp32"; or "fp8", which is no plain type: weights are requantized with one
                scale for each row (FP8_PER_CHANNEL_PER_TOKEN), for engines without NVFP4. Plain tensors, FP8
                scales of the cache and exclusions stay, and `errors` of the result tells what it cost. Or
                "modelopt" or "compressed-tensors": the same codes and scales under their names, whoever
                wrote them.
            experts: "source": as they are stored here; "stacked" or "unstacked": in one tensor for all
                experts, or in tensors of their own, named as Transformers does; "auto": as Transformers
                loads this model.
            overwrite: whether a checkpoint that is in `out` may be replaced; other files there stay.
            max_shard_size: bytes of tensors in one file.
            progress: called as progress(bytes written, bytes in all, name of the tensor).

        Raises:
            CheckpointError: a problem of severity "error", nothing to convert, codes that stand for no
                number, values too large for the type, experts that cannot be stacked, or too little room.
                An `out` that is not empty, is no directory, has files of this one, lies in it or around it,
                or is being written to. Then `out` has what was in it, and nothing else.
            OSError: it cannot be written.
        """
        return convert_checkpoint(
            self,
            expand_home(out),
            to=to,
            experts=experts,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=progress,
        )

    def quantize(
        self,
        out: str | os.PathLike[str],
        *,
        to: str | None = None,
        rules: Sequence[str | tuple[str, str]] = (),
        exclude: Sequence[str] = (),
        scales: str | os.PathLike[str] | Mapping[str, float] | None = None,
        scale_search: ScaleSearch | None = None,
        kv_cache: Literal["fp8", "nvfp4"] | None = None,
        device: Device = "cpu",
        overwrite: bool = False,
        max_shard_size: int = MAX_SHARD_SIZE,
        progress: Progress | None = None,
    ) -> Quantization:
        """Writes a ModelOpt checkpoint of this unquantized model, bit for bit that of max calibration there.

        Every linear gets codes, experts among them, but for those that ModelOpt leaves out: lm_head, routers,
        vision towers and what is for speculative decoding. Weights that read one input share a second-level
        scale, as there. Other tensors and files are copied; both configurations say what was done. Memory
        holds a piece of a tensor, or an expert. A run that was ended is gone on with by the same call.

        Args:
            out: the directory to write to, made if it is not there.
            to: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8, MXFP4,
                W4A8_MXFP4_FP8 or MXFP8; None quantizes what a rule names.
            rules: ("*.mlp.*", "NVFP4") or "*.mlp.* NVFP4": linears whose names fit get that algorithm, the
                last that fits decides, and "none" leaves them as they are. A pattern without `*` also reaches
                what is left out by default.
            exclude: patterns of linears that stay as they are, or modules all of whose linears do.
            scales: file of `moqext_transformers.calibrate`, or the magnitudes by module, for the input_scale
                of FP8, NVFP4 and W4A8_NVFP4_FP8; "none" writes these without one.
            scale_search: "mse": of scales near that of the largest magnitude the one of the least squared
                error; "4over6": of two for each group of NVFP4. None: ModelOpt's max calibration.
            kv_cache: how engines are to quantize the cache of keys and values. Its scales follow from
                `scales`; without magnitudes of the cache there, none are written, and 1.0 applies.
            device: "cuda:N" quantizes there, with the same bits: four threads read, copy and write meanwhile.
            overwrite: whether a checkpoint that is in `out` may be replaced; other files there stay.
            max_shard_size: bytes of tensors in one file.
            progress: called as progress(bytes written, bytes in all, name of the tensor).

        Raises:
            CheckpointError: weights that are quantized already, are not finite or do not fit the algorithm's
                groups; scales of activations that are wanted and not there; and as for `convert`. Then `out`
                has what was in it, and nothing else.
            ValueError: an algorithm, rule, search, cache or device that there is not.
            RuntimeError: there is no CUDA device, or this build has no CUDA.
            OSError: it cannot be written. What was done stays in a hidden folder of `out`.
        """
        return quantize_checkpoint(
            self,
            expand_home(out),
            to=to,
            rules=rules,
            exclude=exclude,
            scales=scales if scales is None or isinstance(scales, Mapping) else expand_home(scales),
            scale_search=scale_search,
            kv_cache=kv_cache,
            device=device,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=progress,
        )

    def plan_repair(self, *, nan_blocks: Literal["keep", "zero"] = "keep") -> RepairPlan:
        """Finds what can be mended in a damaged checkpoint, and writes nothing yet.

        `plan.changes` lists every change, `plan.left` what stays and why, and `plan.write(out)` writes the
        checkpoint while this one is open. Whatever the data does not decide is left; with an error left,
        nothing is written. Codes of weights stay but where the damage is in them. A checkpoint opened with
        `scale_layout` or `nibbles` is written in ModelOpt's order.

        Args:
            nan_blocks: of blocks whose scale is NaN over codes that stand for NaN: "keep" refuses them,
                since they may have been zeros or too large; "zero" takes them for zeros.

        Raises:
            CheckpointError: one file alone was opened, there are no weights, or a file is malformed.
            ValueError: `nan_blocks` is none of these.
        """
        return plan_repair(self, nan_blocks=nan_blocks)
