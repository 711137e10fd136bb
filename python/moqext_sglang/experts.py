"""The experts of a ModelOpt checkpoint in SGLang, by `moqext.MoEMethod`.

SGLang routes, and a layer's own loader finds the rank and the half that a tensor is for. What it is given
beside each tensor is a mark, which it puts into a small tensor of the same experts: it tells what was filled,
wherever SGLang keeps an expert.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from moqext import CheckpointError, MoEMethod, UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext_sglang.hand_back import compute_of, or_sglang
from moqext_sglang.loading import columns_of_a_scale, in_shape
from moqext_sglang.prepared import prepare, restore, settle
from moqext_torch.exchange import NAMED, as_bytes
from moqext_torch.moe_op import ROLES, Description, find_moe_method
from moqext_torch.op import is_plain_call

_ACTIVATIONS = {
    (True, "silu"): "silu",
    (True, "gelu"): "gelu",
    (False, "relu2"): "relu2",
    (False, "silu"): "silu",
}
_NUMBERS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")


class MoqextFusedMoEMethod(FusedMoEMethodBase):
    """The routed experts of a layer: gate and up keep their own scales.

    Args:
        quant_config: the configuration that made it.
        quant_algo: as for `MoEMethod`, like the next two.
        group_size: weights that share a block scale.
        compute: what is multiplied.
        prefix: name of the layer, for messages.
    """

    def __init__(
        self, quant_config: Any, quant_algo: str, group_size: int | None, compute: str, prefix: str
    ) -> None:
        self.quant_config = quant_config
        self.quant_algo = quant_algo
        self.group_size = group_size
        self.compute = compute_of(quant_algo, compute)
        self.prefix = prefix
        self.about: Description
        self.method: MoEMethod
        self.marks: dict[str, torch.nn.Parameter] = {}
        self.prepared: dict[str, torch.Tensor] = {}
        self.factor: float | None = None
        self._input_scales: dict[str, dict[tuple[int, str], float]] = {}  # of all ranks' experts
        self._fresh: set[tuple[str, int]] = set()  # (role, expert) that were loaded since it was prepared

    # ---------------------------------------------------------------------------------------- making it

    @or_sglang
    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Makes the stacks of this rank's experts, in the dtypes of the checkpoint.

        Raises:
            UnsupportedQuantization: the layer, named, does not run here, or not in this way.
        """
        config = layer.moe_runner_config
        self._refuse_ways(layer, config, extra_weight_attrs)
        self._refuse_cuts(layer, intermediate_size_per_partition)
        kind = (bool(config.is_gated), config.activation)
        if kind not in _ACTIVATIONS:
            raise UnsupportedQuantization(
                f"{self.prefix}: no experts with the activation {config.activation}"
            )
        sizes = (num_experts, hidden_size, intermediate_size_per_partition, config.top_k)
        shape = (_ACTIVATIONS[kind], kind[0], False, None, None, None)
        self.about = Description(self.quant_algo, *sizes, *shape, self.group_size, self.compute, None)
        try:
            self.method = find_moe_method(self.about, params_dtype, torch.empty(0).device)
        except (UnsupportedQuantization, ValueError) as error:
            raise UnsupportedQuantization(f"{self.prefix}: {error}") from None
        self.about = self.about._replace(group_size=self.method.group_size)
        for role, spec in self.method.checkpoint_params.items():
            if not role.endswith("_bias"):
                data = torch.empty(spec.shape, dtype=NAMED[spec.dtype])
                layer.register_parameter(role, self._parameter(layer, role, data))

    def _refuse_ways(self, layer: Any, config: Any, extra: Mapping[str, Any]) -> None:
        """Raises where SGLang would use experts in a way that moqext does not know."""
        runner, exchange = get_moe_runner_backend(), get_moe_a2a_backend()
        reasons = {
            f"--moe-runner-backend {runner.value} lays weights out for itself; take auto or triton": not (
                runner.is_auto() or runner.is_triton() or runner.is_marlin()
            ),
            f"--moe-a2a-backend {exchange.value}; take none": not exchange.is_none(),
            "experts with biases": bool(extra.get("with_bias")),
            "experts that one tensor of the checkpoint has together": extra["weight_loader"]
            != layer.weight_loader,
            "results of experts that are not summed": bool(config.no_combine),
        }
        reasons |= {name: getattr(config, name, None) is not None for name in _NUMBERS}
        for reason, holds in reasons.items():
            if holds:
                raise UnsupportedQuantization(
                    f"{self.prefix}: {self.quant_algo} experts do not run with {reason}"
                )

    def _refuse_cuts(self, layer: Any, rows: int) -> None:
        """Raises where ranks would share what has one scale."""
        size = columns_of_a_scale(self.quant_algo, self.group_size)
        if layer.moe_tp_size > 1 and rows % size:
            raise UnsupportedQuantization(
                f"{self.prefix}: {rows} of {rows * layer.moe_tp_size} rows on each of {layer.moe_tp_size} "
                f"ranks, which is no multiple of the {size} that share a scale"
            )

    def _parameter(self, layer: Any, role: str, data: torch.Tensor) -> torch.nn.Parameter:
        """A stack, with SGLang's word for what its scales are of, and its mark."""
        spec = self.method.checkpoint_params[role]
        single = spec.dtype == "float32" and len(spec.shape) < 3 and self._is_single(role)
        halves = 2 if self.about.gated and role.startswith("w13") else 1
        slots = torch.zeros(spec.shape[0], halves, dtype=torch.float32, device="cpu").squeeze(-1)
        mark: Any = torch.nn.Parameter(slots, requires_grad=False)
        mark.quant_method = "tensor"
        self.marks[role] = mark
        param: Any = torch.nn.Parameter(data, requires_grad=False)
        param.quant_method = "tensor" if single else "channel" if data.dim() < 3 else "group"
        param.weight_loader = self._loader(layer, role)
        return param

    def _is_single(self, role: str) -> bool:
        """Whether a float32 stack has one value a matrix."""
        if role.endswith("_weight_scale"):
            return ALGORITHMS[self.quant_algo].scales == "tensor"
        return not role.endswith("pre_quant_scale")

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """There is no runner of SGLang: `apply` is the kernel, with local numbers of experts."""
        self.moe_runner_config = moe_runner_config
        factor = moe_runner_config.routed_scaling_factor
        self.factor = None if factor in (None, 1, 1.0) else float(factor)
        self.runner = None

    # ------------------------------------------------------------------------------------------ loading

    def _loader(self, layer: Any, role: str) -> Callable[..., None]:
        def fill(
            param: Any, loaded: torch.Tensor, weight_name: str, shard_id: str, expert_id: int | None
        ) -> None:
            if expert_id is None or shard_id not in ("w1", "w2", "w3"):
                raise CheckpointError(f"{self.prefix}: {weight_name}: expected a tensor of one expert")
            self.restore_weights_before_loading(layer)
            loaded = as_bytes(loaded) if param.dtype == torch.uint8 else loaded
            name = "weight" if role.endswith("_weight") else "scale"  # what SGLang's loader tells apart
            if role.endswith("input_scale"):
                self._input_scales.setdefault(role, {})[expert_id, shard_id] = loaded.item()
            tensor = (
                loaded.reshape(()) if param.quant_method == "tensor" else in_shape(loaded, param.dim() - 1)
            )
            if role.endswith("pre_quant_scale"):
                self._fill_factors(layer, role, param, tensor, expert_id)
            else:
                layer.weight_loader(param, tensor, name, shard_id, expert_id)
            mark = self.marks[role]
            half = shard_id if mark.dim() > 1 else "w2"
            layer.weight_loader(mark, torch.ones((), device="cpu"), "scale", half, expert_id)
            self._fresh.add((role, expert_id))

        return fill

    def _fill_factors(self, layer: Any, role: str, param: Any, tensor: torch.Tensor, expert: int) -> None:
        """Factors of an expert's input, which gate and up have in common; of down's those of this rank."""
        columns, ranks = param.shape[1], layer.moe_tp_size if role.startswith("w2_") else 1
        if tensor.numel() not in (columns, columns * ranks):
            raise CheckpointError(
                f"{self.prefix}: {role} of expert {expert}: expected {columns * ranks} factors, "
                f"got shape {list(tensor.shape)}"
            )
        shares = tensor.reshape(-1, columns)
        tensor = shares[layer.moe_tp_rank if len(shares) > 1 else 0]
        place: Any = torch.nn.Parameter(
            torch.full((param.shape[0],), -1.0, dtype=torch.float32, device="cpu"), requires_grad=False
        )
        place.quant_method = "tensor"
        layer.weight_loader(place, torch.ones((), device="cpu"), "scale", "w2", expert)
        for number in (place.data > 0).nonzero().flatten().tolist():
            held = param.data[number]
            if (role, expert) in self._fresh and not torch.equal(held.cpu(), tensor.to(held.dtype).cpu()):
                raise CheckpointError(
                    f"{self.prefix}: gate and up of expert {number} have one input, and so one "
                    "pre_quant_scale, but differ in it"
                )
            held.copy_(tensor)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepares what was loaded; does nothing where nothing was since.

        Raises:
            CheckpointError: a slot was never filled, or holds what no intact checkpoint holds.
        """
        if self.prepared and not self._fresh:
            self._settle(layer)  # where restore_weights_before_loading unpacked it, and nothing was loaded
            return
        specs = self.method.checkpoint_params
        given = [
            role
            for role, mark in self.marks.items()
            if specs[role].required or bool(mark.any()) or role in self._input_scales
        ]
        stacks = self._stacks_of_all_ranks if layer.moe_ep_size > 1 else self._stacks
        try:
            self.prepared = prepare(layer, self.method, given, self.prepared, stacks)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        self._settle(layer)
        self._fresh.clear()

    def _settle(self, layer: Any) -> None:
        for stack in ("w13_", "w2_"):
            settle(layer, self.method, self.prepared, stack)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Puts the checkpoint's stacks back where packed ones took their places; as that of linears.

        Raises:
            UnsupportedQuantization: codes that were folded for good, with MOQEXT_SGLANG_COMPUTE=fp8.
        """
        about = self.about
        rows = about.intermediate_size * (2 if about.gated else 1)
        shapes = {
            "w13_": (about.num_experts, rows, about.hidden_size),
            "w2_": (about.num_experts, about.hidden_size, about.intermediate_size),
        }
        try:
            for stack, shape in shapes.items():
                restore(layer, self.method, self.prepared, shape, stack)
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{self.prefix}: {error}") from None

    def _stacks(self, tensors: dict[str, Any]) -> Any:
        """Stacks that know which of their slots are filled."""
        stacks = self.method.adopt(tensors)
        for role, filled in stacks.filled.items():
            filled[...] = np.asarray(self.marks[role].detach().cpu()).reshape(filled.shape) > 0
        return stacks

    def _stacks_of_all_ranks(self, tensors: dict[str, Any]) -> Any:
        """Stacks with the largest activation scale of the layer, as one rank with all experts has it."""
        largest = {role: float(np.max(list(found.values()))) for role, found in self._input_scales.items()}
        scales = {
            role: torch.full_like(tensors[role], value) for role, value in largest.items() if role in tensors
        }
        stacks = self._stacks(tensors | scales)
        for role in scales:
            stacks.filled[role][...] = True
        return stacks

    # ------------------------------------------------------------------------------------------ running

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """Runs the chosen experts of each token, and sums their outputs by weight.

        Args:
            layer: of SGLang.
            dispatch_output: tokens [tokens, hidden_size], with the experts of each and their weights; an
                expert that is negative counts nothing.

        Raises:
            RuntimeError: nothing was prepared.
        """
        if not self.prepared:
            raise RuntimeError(f"{self.prefix}: called before its weights were loaded")
        x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(chosen):
            chosen = chosen.to_standard()
        weights, ids = chosen.topk_weights.float(), chosen.topk_ids
        if self.factor is not None:
            weights = weights * self.factor
        on_input = bool(self.moe_runner_config.apply_router_weight_on_input)
        if torch.compiler.is_compiling() or not (is_plain_call(x) and is_plain_call(weights)):
            tensors = [self.prepared.get(role) for role in ROLES]
            return StandardCombineInput(
                torch.ops.moqext.moe(x, weights, ids, None, on_input, *tensors, *self.about)
            )
        return StandardCombineInput(
            self.method(x, self.prepared, weights, ids, apply_router_weight_on_input=on_input)
        )
