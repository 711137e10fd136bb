"""The method of quantized linears, by `moqext.LinearMethod`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import replace_parameter

from moqext import CheckpointError, LayerQuant, LinearMethod, ParamSpec, UnsupportedQuantization
from moqext.algorithms import ALGORITHMS, BLOCK_SIZES
from moqext_torch.dequantized import weight_of
from moqext_torch.exchange import NAMED
from moqext_torch.op import LOW_RANK, ROLES, find_method, is_plain_call
from moqext_vllm import quantized_input
from moqext_vllm.dequantize import is_identity, linear_weight
from moqext_vllm.parameters import (
    BLOCK,
    OF_INPUT,
    end_load,
    is_marked,
    make_parameter,
    noted,
    slots,
    was_skipped,
)


class MoqextModelOptLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Linears of one layer: the checkpoint's tensors as vLLM's parameters, then what moqext makes of them.

    Args:
        quant: how the layer is quantized.
        prefix: its name, for messages.
        compute: as for `moqext.LinearMethod`.
        fast_accum: as for `moqext.LinearMethod`, where weights are FP8; others have no such sums.
        batch_invariant: as for `moqext.LinearMethod`.
        rank: as for `moqext.LinearMethod`, where there are low-rank pairs.

    Attributes:
        names: the parameters of tensors that the checkpoint calls otherwise than ModelOpt.
    """

    names: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        quant: LayerQuant,
        prefix: str,
        compute: str,
        fast_accum: bool = False,
        batch_invariant: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.quant = quant
        self.prefix = prefix
        self.compute = compute
        self.fast_accum = fast_accum and str(quant.quant_algo).startswith("FP8")
        self.batch_invariant = bool(batch_invariant)
        self.rank = rank if ALGORITHMS[str(quant.quant_algo)].low_rank else None
        self.in_blocks = quant.quant_algo in BLOCK_SIZES
        self.partitions: tuple[int, ...] = ()
        self.in_features = 0
        self.dtype = torch.bfloat16
        self.one_input_scale = False
        self.sources: tuple[str | None, ...] = ()  # where each prepared tensor stands in the layer
        self.method: LinearMethod | None = None
        self.is_new = False  # whether nothing ran since the weights were prepared
        self.coded: LinearMethod | None = None  # for activations that are codes already

    def find_fault(self, layer: Any) -> UnsupportedQuantization | None:
        """Returns the exception that `create_weights` will raise for a layer with its sizes, or None."""
        if not hasattr(layer, "output_partition_sizes"):
            return None
        columns = getattr(layer, "input_size_per_partition", layer.input_size)
        dtype = getattr(layer, "params_dtype", None) or torch.get_default_dtype()
        is_head = isinstance(layer, ParallelLMHead)
        try:
            self._fit(
                columns, layer.output_partition_sizes, layer.input_size, layer.output_size, dtype, is_head
            )
        except UnsupportedQuantization as error:
            return error
        return None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Gives the layer a parameter for every tensor that a checkpoint may have.

        Raises:
            UnsupportedQuantization: the format does not run, or not split like this.
        """
        is_head = isinstance(layer, ParallelLMHead)
        method = self._fit(
            input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, is_head
        )
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        specs = method.checkpoint_params
        if self.in_blocks:
            layer.weight_block_size = [BLOCK, BLOCK]
        loader = extra_weight_attrs["weight_loader"]
        for role, spec in specs.items():
            self._register(layer, role, spec, loader)
        if "input_scale" not in specs:  # exporters write it for formats that have no use for it, too
            spec = specs["weight_scale"]._replace(shape=(len(self.partitions),), dtype="float32")
            self._register(layer, "input_scale", spec, loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepares the loaded tensors, again after a reload, into the tensors of the first time.

        Raises:
            CheckpointError: a slot was never filled, or holds what no intact checkpoint holds.
        """
        given = self._loaded(layer)
        shared = given.get("input_scale")
        self.one_input_scale = (
            len(self.partitions) > 1
            and self.quant.quant_algo == "FP8"
            and shared is not None
            and bool((shared == shared[0]).all())
        )
        method = self._find_method(self._parameter(layer, "weight").device)
        room = self._room(layer, method, given)
        try:
            prepared = method.prepare(given, room)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        self._settle(layer, method, prepared)

    def apply(self, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiplies x [..., in_features] of the model's dtype, or what vLLM holds the codes of one in."""
        tensors = [None if name is None else getattr(layer, name).data for name in self.sources]
        x, out_dtype = quantized_input.read(x, layer, self.coded is not None)
        if torch.compiler.is_compiling() or not is_plain_call(x):
            return torch.ops.moqext.linear(
                x,
                *tensors[: len(ROLES)],
                bias,
                self.quant.quant_algo,
                self.partitions,
                self.quant.group_size,
                self.compute,
                self.one_input_scale,
                out_dtype,
                self.fast_accum,
                *tensors[len(ROLES) :],
                batch_invariant=self.batch_invariant,
            )
        params = _named(tensors)
        if self.is_new:
            self.is_new = out_dtype is None and is_identity(x, self.in_features)
            if self.is_new:  # as vLLM asks for the weight of MLA's kv_b_proj
                return self._weight_of(params, x.dtype).T
        method = self.method if out_dtype is None else self.coded
        assert method is not None  # vLLM prepares before it runs
        return method(x, params, None if bias is None else bias.data)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The weight [rows, columns] of the model's dtype, which vLLM may quantize anew.

        Before the weights were prepared and after.

        Raises:
            CheckpointError: a slot was never filled.
        """
        if self.method is None:
            return linear_weight(self._loaded(layer), self.quant, self.partitions, self.dtype)
        found = [None if name is None else getattr(layer, name).data for name in self.sources]
        return self._weight_of(_named(found), self.dtype)

    # ------------------------------------------------------------------------------------------------ steps

    def _register(self, layer: torch.nn.Module, role: str, spec: ParamSpec, loader: Any) -> None:
        """Gives the layer the parameter of a tensor."""
        name = self.names.get(role, role)
        made = make_parameter(name, spec, self.partitions, loader, self.prefix, self.in_blocks)
        layer.register_parameter(name, made)

    def _parameter(self, layer: torch.nn.Module, role: str) -> torch.nn.Parameter:
        """The parameter of a tensor."""
        found: torch.nn.Parameter = getattr(layer, self.names.get(role, role))
        return found

    def _fit(
        self,
        columns: int,
        partitions: Sequence[int],
        input_size: int,
        output_size: int,
        dtype: torch.dtype,
        is_head: bool,
    ) -> LinearMethod:
        """Takes the sizes of a layer.

        Raises:
            UnsupportedQuantization: the format does not run, or not split like this.
        """
        self.partitions, self.in_features, self.dtype = tuple(partitions), columns, dtype
        try:
            method = self._find_method(torch.get_default_device())
        except UnsupportedQuantization as error:
            shares = ((columns, input_size, "columns"), (sum(partitions), output_size, "rows"))
            split = [f"{own} of {whole} {what}" for own, whole, what in shares if own != whole]
            if not split:
                raise
            text = f"{error}; tensor parallelism gives each rank {' and '.join(split)}"
            raise UnsupportedQuantization(text) from error
        self._refuse_split(method, input_size, output_size, is_head)
        return method

    def _weight_of(self, params: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        assert self.method is not None
        shape = (sum(self.partitions), self.in_features)
        return weight_of(params, shape, self.partitions, self.method.group_size, dtype)

    def _find_method(self, device: torch.device, quantized_input: bool = False) -> LinearMethod:
        try:
            return find_method(
                str(self.quant.quant_algo),
                self.in_features,
                self.partitions,
                self.quant.group_size,
                self.dtype,
                torch.device("cpu") if device.type == "meta" else device,
                self.compute,
                self.one_input_scale,
                quantized_input,
                self.fast_accum,
                self.rank,
                self.batch_invariant,
            )
        except (UnsupportedQuantization, ValueError) as error:
            raise UnsupportedQuantization(f"{self.prefix}: {error}") from error

    def _refuse_split(self, method: LinearMethod, input_size: int, output_size: int, is_head: bool) -> None:
        """Raises where a rank would get part of a block of scales."""
        group = method.group_size or 1
        has_blocks = len(method.checkpoint_params["weight_scale"].shape) == 2
        if has_blocks and input_size != self.in_features and self.in_features % group:
            raise UnsupportedQuantization(
                f"{self.prefix}: tensor parallelism gives each rank {self.in_features} of {input_size} "
                f"columns, no multiple of the {group} that share a scale"
            )
        split = output_size != sum(self.partitions)
        if self.in_blocks and (split or is_head) and any(rows % BLOCK for rows in self.partitions):
            raise UnsupportedQuantization(
                f"{self.prefix}: each rank has {'+'.join(map(str, self.partitions))} rows, no multiples of "
                f"the {BLOCK} that share a scale"
            )
        if self.in_blocks and is_head:
            raise UnsupportedQuantization(f"{self.prefix}: {self.quant.quant_algo} does not run as lm_head")

    def _loaded(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint, without optional ones that it does not have.

        Raises:
            CheckpointError: a slot was never filled.
        """
        found: dict[str, torch.Tensor] = {}
        for role, spec in self._find_method(
            self._parameter(layer, "weight").device
        ).checkpoint_params.items():
            parameter = self._parameter(layer, role)
            tensor, filled = parameter.data, noted(parameter)
            parts = slots(tensor, self.partitions, role)
            skipped = self.method is not None and was_skipped(parameter)
            empty = [
                index
                for index, slot in enumerate(parts)
                if skipped or (index not in filled and is_marked(slot))
            ]
            if not empty:
                tensor = self._of_input(role, parts) if role in OF_INPUT else tensor
                found[role] = tensor.cpu() if spec.dtype == "float32" else tensor
            elif spec.required or len(empty) < len(parts):
                where, name = _of_parts(empty, len(self.partitions)), self.names.get(role, role)
                raise CheckpointError(f"{self.prefix}: {name} was never loaded{where}")
        return found

    def _of_input(self, role: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that meets the one input of fused layers: their pairs, or what all of them have.

        Raises:
            CheckpointError: their factors of x differ.
        """
        if role == "lora_a":
            return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        for index, part in enumerate(parts):
            if not torch.equal(part, parts[0]):
                raise CheckpointError(
                    f"{self.prefix}: {role}: expected the same in all {len(parts)} layers that are fused, "
                    f"got others in part {index} than in part 0"
                )
        return parts[0].reshape(-1)

    def _room(
        self, layer: torch.nn.Module, method: LinearMethod, given: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors for `prepare` to write: the checkpoint's where bytes stay, those of before at a reload."""
        room = {}
        for role, spec in method.prepared_params.items():
            if not spec.required and role not in given:
                continue
            if role in given and method.keeps(role):
                room[role] = given[role]
                continue
            held = getattr(layer, f"moqext_{role}", None)
            if held is not None and tuple(held.shape) == spec.shape and not held.is_meta:
                room[role] = held
            else:
                device = self._parameter(layer, "weight").device
                room[role] = torch.empty(spec.shape, dtype=NAMED[spec.dtype], device=device)
        return room

    def _settle(self, layer: torch.nn.Module, method: LinearMethod, prepared: Any) -> None:
        """Keeps the prepared tensors: codes in the place of the checkpoint's, all others beside them."""
        specs = method.checkpoint_params
        sources: list[str | None] = []
        for role in (*ROLES, *LOW_RANK):
            tensor = prepared.get(role)
            if tensor is None:
                sources.append(None)
            elif role in specs and specs[role].dtype != "float32":
                name = self.names.get(role, role)
                if tensor.data_ptr() != getattr(layer, name).data_ptr():
                    replace_parameter(layer, name, tensor)
                sources.append(name)
            else:
                layer.register_buffer(f"moqext_{role}", tensor)  # vLLM's reload keeps no other in step
                sources.append(f"moqext_{role}")
        end_load(layer)
        self.sources = tuple(sources)
        self.method = method
        self.is_new = True
        one_scale = len(self.partitions) == 1 or self.one_input_scale
        self.coded = None
        if self.quant.quant_algo == "FP8" and one_scale and "input_scale" in prepared:
            device = self._parameter(layer, "weight").device
            self.coded = self._find_method(device, quantized_input=True)
            layer.moqext_code_scale = prepared["input_scale"].view(-1)[:1]
            if len(self.partitions) == 1:
                quantized_input.offer(layer)


def _named(tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Prepared tensors by name, of one for each role there is."""
    roles = zip((*ROLES, *LOW_RANK), tensors, strict=True)
    return {role: tensor for role, tensor in roles if tensor is not None}


def _of_parts(empty: Sequence[int], count: int) -> str:
    """Which of the fused layers, for messages."""
    if count == 1 or len(empty) == count:
        return ""
    return f" for part {', '.join(map(str, empty))} of the {count} fused"


def take_shards(method: type[LinearMethodBase]) -> None:
    """Has vLLM's loaders hand shards of fused layers to a method; they know such methods by name."""
    if hasattr(vllm_linear, "register_weight_loader_v2_supported_method"):
        vllm_linear.register_weight_loader_v2_supported_method(method)
    else:
        vllm_linear.WEIGHT_LOADER_V2_SUPPORTED.append(method.__name__)


take_shards(MoqextModelOptLinearMethod)
