"""The method of routed experts, by `moqext.MoEMethod`.

"ModelOpt" is in the name of the class because vLLM's loader of experts asks for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.utils import replace_parameter

from moqext import CheckpointError, LayerQuant, MoEMethod, UnsupportedQuantization
from moqext_torch.exchange import NAMED
from moqext_torch.moe_op import CODES, ROLES, Description, find_moe_method
from moqext_vllm.dequantize import expert_weights
from moqext_vllm.dummies import make_up
from moqext_vllm.parameters import (
    as_blocks,
    begin_load,
    end_load,
    find_marked,
    fit_dtype,
    marked,
    note,
    noted,
    was_skipped,
)
from moqext_vllm.routing import Routing, find_routing

ACTIVATIONS = {  # of vLLM: moqext's name, whether there is a gate, whether rows of gate and up take turns
    "silu": ("silu", True, False),
    "gelu": ("gelu", True, False),
    "gelu_tanh": ("gelu_tanh", True, False),
    "relu2": ("relu2", True, False),
    "swigluoai": ("swigluoai", True, True),
    "swigluoai_uninterleave": ("swigluoai", True, False),
    "silu_no_mul": ("silu", False, False),
    "gelu_no_mul": ("gelu", False, False),
    "gelu_tanh_no_mul": ("gelu_tanh", False, False),
    "relu2_no_mul": ("relu2", False, False),
}


class MoqextModelOptMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts of one layer: the checkpoint's stacks as vLLM's parameters, then what moqext makes of them.

    Args:
        quant: how the layer is quantized.
        prefix: its name, for messages.
        compute: as for `moqext.MoEMethod`.
        moe: vLLM's description of the layer.
        batch_invariant: as for `moqext.MoEMethod`.
    """

    def __init__(
        self, quant: LayerQuant, prefix: str, compute: str, moe: Any, batch_invariant: bool = False
    ) -> None:
        super().__init__(moe)
        self.batch_invariant = bool(batch_invariant)
        self.quant = quant
        self.prefix = prefix
        self.compute = compute
        self.method: MoEMethod | None = None
        self.sources: dict[str, str] = {}  # where each prepared tensor stands in the layer
        self.is_prepared = False
        self.about: Description | None = None  # of the method, for a graph
        self.routing: Routing | None = None

    @property
    def is_monolithic(self) -> bool:
        """Whether the method routes, too, as vLLM asks."""
        return self.routing is not None

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: the kernels are not vLLM's."""
        return None

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether the scale of a whole weight is called weight_scale_2, as the loader asks."""
        return "FP4" in str(self.quant.quant_algo)

    @property
    def supports_eplb(self) -> bool:
        """Whether experts may change places: all of their tensors are parameters then, experts first."""
        return True

    def dequantize_weight(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights w13 and w2 of the model's dtype, [experts, rows, columns], for vLLM to quantize anew.

        Raises:
            CheckpointError: a slot was never filled.
            NotImplementedError: the weights were prepared already.
        """
        assert self.method is not None
        if self.is_prepared:
            raise NotImplementedError(
                f"{self.prefix}: the weights are prepared, and no longer the checkpoint's"
            )
        method, dtype = self.method, getattr(torch, self.method.dtype)
        return expert_weights(self._loaded(layer), self.quant, method.gated, method.interleaved, dtype)

    def find_fault(self, layer: Any) -> UnsupportedQuantization | None:
        """Returns the exception that `create_weights` will raise for experts of vLLM's, or None."""
        moe = self.moe
        try:
            self._make_method(
                layer,
                moe.num_local_experts,
                moe.hidden_dim,
                moe.intermediate_size_per_partition,
                layer.params_dtype,
                moe.num_experts,
            )
        except UnsupportedQuantization as error:
            return error
        return None

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Gives the layer a parameter for every stack of tensors that a checkpoint may have.

        Raises:
            UnsupportedQuantization: the experts do not run like this, or not on this device.
        """
        experts = extra_weight_attrs.get("global_num_experts", num_experts)
        method = self._make_method(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, experts
        )
        self.method = method
        self.routing = find_routing(layer, self.moe)
        has_bias = bool(getattr(self.moe, "has_bias", False))
        loader = extra_weight_attrs["weight_loader"]
        for role, spec in method.checkpoint_params.items():
            if role.endswith("_bias") and not has_bias:
                continue
            dtype = params_dtype if role.endswith("_bias") else NAMED[spec.dtype]
            parameter = torch.nn.Parameter(marked(self._shape(role, spec.shape), dtype), requires_grad=False)
            parameter.weight_loader = _in_shape(loader, layer, f"{self.prefix}.{role}")
            if role.endswith("weight_scale") and spec.dtype == "float32" and self._has_rows(role, method):
                parameter.quant_method = "block"  # or the loader takes it for one value
            make_up(role, parameter)
            layer.register_parameter(role, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepares the loaded stacks, again after a reload, into the tensors of the first time.

        Raises:
            CheckpointError: a slot was never filled, or holds what no intact checkpoint holds.
        """
        assert self.method is not None
        if self._is_settled(layer):
            return
        specs = self.method.checkpoint_params
        largest = self._largest_input_scales(layer)  # first of all: no rank waits for one that raised
        given = self._loaded(layer)
        for role, scale in largest.items():
            absent = role not in given
            scales = torch.full(specs[role].shape, scale) if absent else given[role]
            given[role] = torch.where(scales > 0, scales.clamp_min(scale), scales)
        try:
            prepared = self.method.prepare(given, self._room(layer, given))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        self._settle(layer, prepared)
        end_load(layer)
        self.is_prepared = True

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        """The weighted sum of what the chosen experts of this rank give; the runner adds up ranks.

        Shared experts are the runner's, too.
        """
        assert self.method is not None  # vLLM prepares before it runs
        params = {role: getattr(layer, name).data for role, name in self.sources.items()}
        on_input = bool(layer.apply_router_weight_on_input)
        if torch.compiler.is_compiling():  # on the CPU; elsewhere a graph has vLLM's own operation
            tensors = [params.get(role) for role in ROLES]
            return torch.ops.moqext.moe(
                x, topk_weights, topk_ids, layer.expert_map, on_input, *tensors, *(self.about or ())
            )
        return self.method(
            x,
            params,
            topk_weights,
            topk_ids,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=on_input,
        )

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Chooses the experts of each token, and runs them as `apply` does."""
        assert self.routing is not None
        return self.apply(layer, x, *self.routing(router_logits))

    # ------------------------------------------------------------------------------------------------ steps

    def _make_method(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        global_num_experts: int,
    ) -> MoEMethod:
        activation = getattr(layer.activation, "value", layer.activation)
        if activation not in ACTIVATIONS:
            raise UnsupportedQuantization(f"{self.prefix}: moqext has no experts with {activation}")
        name, gated, interleaved = ACTIVATIONS[activation]
        gated = gated and bool(getattr(self.moe, "is_act_and_mul", True))
        options = {
            option: getattr(layer, f"swiglu_{option}", None) if gated else None
            for option in ("alpha", "beta", "limit")
        }
        about = Description(
            str(self.quant.quant_algo),
            num_experts,
            hidden_size,
            intermediate_size,
            top_k=self.moe.experts_per_token,
            activation=name,
            gated=gated,
            interleaved=interleaved,
            group_size=self.quant.group_size,
            compute=self.compute,
            global_num_experts=global_num_experts,
            batch_invariant=self.batch_invariant,
            **options,
        )
        try:
            found = find_moe_method(about, dtype, torch.get_default_device())
        except (UnsupportedQuantization, ValueError) as error:
            split = ""
            if getattr(self.moe, "tp_size", 1) > 1:
                split = f"; tensor parallelism gives each rank {intermediate_size} rows of an expert"
            raise UnsupportedQuantization(f"{self.prefix}: {error}{split}") from error
        group = found.group_size or 1
        if getattr(self.moe, "tp_size", 1) > 1 and intermediate_size % group:
            raise UnsupportedQuantization(
                f"{self.prefix}: tensor parallelism gives each rank {intermediate_size} rows "
                f"of an expert, no multiple of the {group} that share a scale"
            )
        self.about = about._replace(quant_algo=found.quant_algo, group_size=found.group_size)
        return found

    def _largest_input_scales(self, layer: Any) -> dict[str, float]:
        """The largest activation scale of the experts of all ranks, where one serves all experts of a layer.

        Ranks that have experts of their own exchange theirs, so that x is quantized as on one rank.
        """
        assert self.method is not None
        roles = [role for role in ("w13_input_scale", "w2_input_scale") if hasattr(layer, role)]
        roles = [role for role in roles if role in self.method.prepared_params]
        parallel = self.moe.moe_parallel_config
        if not roles or self.compute == "fp4" or not parallel.use_ep or parallel.ep_size == 1:
            return {}
        found = []
        for role in roles:
            scales = getattr(layer, role).data.float().cpu()
            filled = scales.isfinite() & (not (self.is_prepared and was_skipped(getattr(layer, role))))
            found.append(scales.where(filled, torch.zeros(())).max())
        largest = torch.stack(found)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=get_ep_group().cpu_group)
        return {role: scale for role, scale in zip(roles, largest.tolist(), strict=True) if scale > 0}

    def _moves_experts(self) -> bool:
        return bool(self.moe.moe_parallel_config.enable_eplb)

    def _keep(self, layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Keeps a prepared tensor beside the checkpoint's, as a parameter where vLLM moves experts."""
        if not self._moves_experts():
            layer.register_buffer(name, tensor)  # vLLM's reload keeps no other in step
        elif (held := getattr(layer, name, None)) is None:
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            held.data = tensor

    def _has_rows(self, role: str, method: MoEMethod) -> bool:
        """Whether a float scale has a value for rows, not one for all of a weight."""
        shape = method.checkpoint_params[role].shape
        values = shape[1:] if role.startswith("w2") else (shape[1] // (2 if method.gated else 1), *shape[2:])
        return len(values) > 1 or values not in ((), (1,))

    def _shape(self, role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that vLLM's loader wants: columns for the scales of rows, a slot for one half."""
        assert self.method is not None
        if role.endswith("weight_scale") and len(shape) == 2 and self._has_rows(role, self.method):
            return (*shape, 1)
        if role in ("w13_weight_scale", "w13_weight_scale_2") and len(shape) == 1:
            return (*shape, 1)
        if role == "w13_pre_quant_scale" and self.method.gated:
            return (shape[0], 2, shape[1])
        return shape

    def _is_settled(self, layer: Any) -> bool:
        """Whether codes stand packed in the places of the checkpoint's, and nothing was loaded since."""
        assert self.method is not None
        specs = self.method.checkpoint_params
        return any(tuple(getattr(layer, role).shape) != specs[role].shape for role in CODES)

    def _room(self, layer: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors for `prepare` to write: the checkpoint's where bytes stay, those of before at a reload."""
        assert self.method is not None
        room = {}
        for role, spec in self.method.prepared_params.items():
            held = getattr(layer, f"moqext_{role}", None)
            held = None if held is None else held.data
            if not spec.required and role not in given:
                continue
            if role in given and self.method.keeps(role):
                room[role] = given[role]
            elif held is not None and tuple(held.shape) == spec.shape and not held.is_meta:
                room[role] = held
            else:
                room[role] = torch.empty(spec.shape, dtype=NAMED[spec.dtype], device=layer.w2_weight.device)
        return room

    def _settle(self, layer: Any, prepared: Any) -> None:
        """Keeps the prepared stacks: codes in the place of the checkpoint's, all others beside them.

        Block scales that are packed with the codes are freed.
        """
        assert self.method is not None
        specs = self.method.checkpoint_params
        self.sources = {}
        for role, tensor in prepared.items():
            if role in specs and specs[role].dtype != "float32":
                if tensor.data_ptr() != getattr(layer, role).data_ptr():
                    replace_parameter(layer, role, tensor)
                self.sources[role] = role
            else:
                self._keep(layer, f"moqext_{role}", tensor)
                self.sources[role] = f"moqext_{role}"
        for role, spec in specs.items():
            if spec.dtype != "float32" and role not in prepared:
                # vLLM moves a row of each expert's, and cannot tell those of nothing
                shape = (self.method.num_experts, 1) if self._moves_experts() else (0,)
                replace_parameter(layer, role, getattr(layer, role).data.new_zeros(shape))

    def _loaded(self, layer: Any) -> dict[str, torch.Tensor]:
        """The stacks of the checkpoint, without optional ones that it does not have.

        Raises:
            CheckpointError: a slot was never filled.
        """
        assert self.method is not None
        found = {}
        for role, spec in self.method.checkpoint_params.items():
            parameter = getattr(layer, role, None)
            if parameter is None:
                continue
            whole = role == "w13_pre_quant_scale" and self.method.gated  # gate's and up's are the same
            tensor = parameter.data if whole else parameter.data.reshape(spec.shape)
            skipped = self.is_prepared and was_skipped(parameter)
            halves = 2 if role.startswith("w13") and self.method.gated and tensor.dim() > 1 else 1
            if skipped:
                empty = [(expert, half) for expert in range(len(tensor)) for half in range(halves)]
            else:
                filled = noted(parameter)
                filled = filled if halves > 1 else {(expert, 0) for expert, _ in filled}
                empty = [slot for slot in find_marked(tensor, halves) if slot not in filled]
            everything = len(tensor) * halves
            optional_scale = not spec.required and role.endswith("input_scale")
            if empty and not (optional_scale or (not spec.required and len(empty) == everything)):
                expert, half = empty[0]
                which = (" gate", " up")[half] if halves > 1 else ""
                raise CheckpointError(
                    f"{self.prefix}: {role} was never loaded for{which} of expert {expert} "
                    f"({len(empty)} of {everything} slots)"
                )
            if len(empty) < everything:
                found[role] = self._of_one_input(role, tensor) if whole else tensor
        return found

    def _of_one_input(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that meets the one input of gate and up, of a slot for each.

        Raises:
            CheckpointError: they differ.
        """
        gate, up = tensor.unbind(1)
        if not torch.equal(gate, up):
            expert = int((gate != up).any(1).nonzero()[0])
            raise CheckpointError(
                f"{self.prefix}: {role}: expected the same for gate and up, got others in expert {expert}"
            )
        return gate.contiguous()


def _in_shape(weight_loader: Callable[..., Any], layer: Any, name: str) -> Callable[..., Any]:
    """A loader that takes the scales of rows and blocks in every shape that exporters write.

    Args:
        weight_loader: vLLM's.
        layer: the experts.
        name: of layer and role, for messages.
    """
    requantizes = getattr(layer, "_fused_shared_expert_quantizer", None) is not None

    def load(
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        *rest: Any,
        **options: Any,
    ) -> Any:
        expert = layer._map_global_expert_id_to_local_expert_id(expert_id)
        single = loaded_weight.dim() < param.dim() or param.dim() < 2  # or there are several experts in it
        if single and expert < 0:  # at a reload it may come after the layer was prepared, and begins nothing
            return weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, *rest, **options)
        begin_load(param)
        if not requantizes:
            loaded_weight = fit_dtype(param, loaded_weight, f"{name} of expert {expert_id}")
        if getattr(param, "quant_method", None) == "block":
            loaded_weight = loaded_weight[:, None] if loaded_weight.dim() == 1 else as_blocks(loaded_weight)
        if single and name.endswith("pre_quant_scale"):  # vLLM's passes over it
            _load_factors(param.data[expert], loaded_weight, shard_id, layer.moe_config, name)
            result: Any = True
        elif single and name.endswith("w2_weight_scale") and loaded_weight.shape == param.shape[1:]:
            param.data[expert].copy_(loaded_weight)  # vLLM's would split the one column that rows have
            result = True
        else:
            result = weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, *rest, **options)
        if single:
            note(param, (expert, int(shard_id == "w3")))
        return result

    return load


def _load_factors(slots: torch.Tensor, loaded: torch.Tensor, shard_id: str, moe: Any, name: str) -> None:
    """Loads the factors of x of a projection: all of gate's and up's, and this rank's columns of w2's."""
    slot = slots[int(shard_id == "w3")] if slots.dim() == 2 else slots
    ranks, rank = (moe.tp_size, moe.tp_rank) if shard_id == "w2" else (1, 0)
    if loaded.numel() != len(slot) * ranks:
        raise ValueError(f"{name}: expected shape {[len(slot) * ranks]}, got {list(loaded.shape)}")
    slot.copy_(loaded.reshape(-1)[rank * len(slot) :][: len(slot)])
