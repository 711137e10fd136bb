"""The linears of a ModelOpt checkpoint in SGLang, by `moqext.LinearMethod`."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from moqext import CheckpointError, LinearMethod, UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext_sglang.hand_back import compute_of, or_sglang
from moqext_sglang.loading import BLOCK, Slots, columns_of_a_scale
from moqext_sglang.prepared import prepare, register, restore, settle
from moqext_torch.op import LOW_RANK, ROLES, find_method, is_plain_call


class MoqextLinearMethod(LinearMethodBase):
    """One linear of a model, or several fused along their rows, each with its own scales.

    Args:
        quant_config: the configuration that made it.
        quant_algo: as for `LinearMethod`, like the next two.
        group_size: weights that share a block scale.
        compute: what is multiplied.
        prefix: name of the layer, for messages.
    """

    def __init__(
        self, quant_config: Any, quant_algo: str, group_size: int | None, compute: str, prefix: str
    ) -> None:
        if prefix.rpartition(".")[2] == "kv_b_proj":
            raise UnsupportedQuantization(
                f"{prefix}: SGLang reads the weight of this layer itself, and moqext has it not"
            )
        self.quant_config = quant_config
        self.quant_algo = quant_algo
        self.group_size = group_size
        self.compute = compute_of(quant_algo, compute)
        self.prefix = prefix
        self.method: LinearMethod
        self.slots: Slots
        self.prepared: dict[str, torch.Tensor] = {}

    @or_sglang
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
        """Makes the parameters that the checkpoint has of this layer, under its names and in its dtypes.

        Raises:
            UnsupportedQuantization: the layer does not run, or not cut into such parts.
        """
        self._refuse_cuts(input_size_per_partition, output_partition_sizes, input_size, output_size)
        try:
            self.method = self._find(
                input_size_per_partition, output_partition_sizes, params_dtype, torch.empty(0).device, False
            )
        except (UnsupportedQuantization, ValueError) as error:
            raise UnsupportedQuantization(f"{self.prefix}: {error}") from None
        self.slots = Slots(self.prefix, self.quant_algo, output_partition_sizes)
        load = self._loader(layer, extra_weight_attrs["weight_loader"])
        for role, spec in self.method.checkpoint_params.items():
            register(layer, role, self.slots.parameter(role, spec, load))
        about: Any = layer
        about.logical_widths = list(output_partition_sizes)
        about.input_size_per_partition = input_size_per_partition
        about.output_size_per_partition = sum(output_partition_sizes)
        about.orig_dtype = params_dtype

    def _loader(self, layer: torch.nn.Module, load: Callable[..., None]) -> Callable[..., None]:
        """SGLang's loader of a layer, over the checkpoint's tensors, whether SGLang asked for them or not."""

        def load_unpacked(param: torch.nn.Parameter, *about: Any, **named: Any) -> None:
            self.restore_weights_before_loading(layer)
            load(param, *about, **named)

        return load_unpacked

    def _find(
        self,
        columns: int,
        rows: list[int] | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        one_input_scale: bool,
        rank: int | None = None,
    ) -> LinearMethod:
        return find_method(
            self.quant_algo,
            columns,
            tuple(rows),
            self.group_size,
            dtype,
            device,
            self.compute,
            one_input_scale,
            rank=rank,
        )

    def _refuse_cuts(self, columns: int, rows: list[int], all_columns: int, all_rows: int) -> None:
        """Raises where ranks would share what has one scale."""
        size = columns_of_a_scale(self.quant_algo, self.group_size)
        if columns != all_columns and columns % size:
            raise UnsupportedQuantization(
                f"{self.prefix}: {all_columns} columns on {all_columns // columns} ranks are {columns} each, "
                f"which is no multiple of the {size} that share a scale"
            )
        if ALGORITHMS[self.quant_algo].scales == "blocks" and sum(rows) != all_rows:
            for part in rows:
                if part % BLOCK:
                    raise UnsupportedQuantization(
                        f"{self.prefix}: a part of {part} rows, which is no multiple of the {BLOCK} that "
                        "share a scale"
                    )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepares what was loaded; does nothing where nothing was since.

        Raises:
            CheckpointError: a slot was never filled, or holds what no intact checkpoint holds.
        """
        if self.prepared and not self.slots.fresh:
            # where restore_weights_before_loading unpacked it, and nothing was loaded
            settle(layer, self.method, self.prepared)
            return
        self.restore_weights_before_loading(layer)  # which no loader asks for where a pair alone came
        given = self.slots.given(self.method.checkpoint_params)
        if not self.prepared:
            self._choose(layer, given)
        try:
            self.prepared = prepare(layer, self.method, given, self.prepared)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        settle(layer, self.method, self.prepared)
        self.slots.fresh.clear()

    def _choose(self, layer: Any, given: list[str]) -> None:
        """Parts with one activation scale are multiplied at once on CUDA; low-rank pairs have a rank."""
        alike = ALGORITHMS[self.quant_algo].linear == "e4m3_tensor" and self.slots.parts > 1
        alike = alike and "input_scale" in given and bool((layer.input_scale == layer.input_scale[0]).all())
        about, rank = self.method, self.slots.rank
        if alike or rank != about.rank:
            sizes = (about.in_features, about.out_partitions)
            self.method = self._find(*sizes, layer.orig_dtype, layer.weight.device, alike, rank)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Puts the checkpoint's tensors back where packed ones took their places.

        SGLang 0.5.23 calls it before it loads a second time; older versions do not, so loaders do.

        Raises:
            UnsupportedQuantization: codes that were folded for good, with MOQEXT_SGLANG_COMPUTE=fp8.
        """
        try:
            restore(layer, self.method, self.prepared, (self.method.out_features, self.method.in_features))
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{self.prefix}: {error}") from None

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiplies x [..., in_features].

        Raises:
            RuntimeError: nothing was prepared, or the layer has been given the weight of another one.
        """
        if not self.prepared:
            raise RuntimeError(f"{self.prefix}: called before its weights were loaded")
        if not torch.compiler.is_compiling() and is_plain_call(x):
            weight: Any = layer.weight
            if weight.data_ptr() != self.prepared["weight"].data_ptr():
                raise RuntimeError(f"{self.prefix}: another weight was put in the place of the prepared one")
            return self.method(x, self.prepared, bias)
        about = self.method
        return torch.ops.moqext.linear(
            x,
            *(self.prepared.get(role) for role in ROLES),
            bias,
            about.quant_algo,
            about.out_partitions,
            about.group_size,
            self.compute,
            about.one_input_scale,
            **{role: self.prepared.get(role) for role in LOW_RANK},
        )
