"""QuantMoE: the routed experts of a ModelOpt checkpoint as a module of torch.

What it does with its tensors is that of every `PreparedModule`. It does not route: a model's own router says
which experts a token goes to and what their results weigh.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from moqext import (
    Checkpoint,
    CheckpointError,
    LayerRecord,
    MoEMethod,
    Projection,
    UnsupportedQuantization,
    stack_experts,
)
from moqext.layers.expert_form import find_forms
from moqext.ops import unpack_nvfp4, unswizzle_block_scales
from moqext.ops.spelling import Compute
from moqext.reader.naming import PROJECTIONS
from moqext_torch.exchange import NAMED, as_torch, stored_exponents
from moqext_torch.moe_op import CODES, ROLES, Description, find_moe_method
from moqext_torch.op import NO_GRADIENT, is_plain_call
from moqext_torch.prepared import PreparedModule, as_carrier


class QuantMoE(PreparedModule):
    """Routed experts with quantized weights, by `moqext.MoEMethod`: the weighted sum of what each gives.

    Args:
        quant_algo: as for `MoEMethod`, like all arguments down to `group_size`.
        num_experts: experts of this module, E.
        hidden_size: columns of x and y, H.
        intermediate_size: rows of an expert's gate, and of its up, I.
        top_k: experts of a token.
        activation: "silu", "gelu", "gelu_tanh", "relu2" or "swigluoai".
        gated: whether there are a gate and an up, P = 2, or one projection, P = 1.
        interleaved: whether gate and up alternate row by row in the checkpoint's tensors.
        alpha: of the activation, as for `MoEMethod`.
        beta: of the activation, as for `MoEMethod`.
        limit: of the activation, as for `MoEMethod`.
        group_size: weights that share a block scale.
        compute: as for `MoEMethod`.
        global_num_experts: experts of the whole layer, where an `expert_map` tells which are here.
        dtype: of x and y: torch.bfloat16, float16 or float32. Tensors of the checkpoint keep their own.
        device: where the tensors are made; "meta" makes none.
        optional: tensors beside the required ones that the checkpoint has, as "w13_input_scale" and
            "w2_bias". `load_state_dict` adds them by itself.
        batch_invariant: as for `MoEMethod`.

    The tensors are the checkpoint's, stacked as engines keep them, the experts first: `w13_weight`,
    float8_e4m3fn [E, P * I, H] or uint8 [E, P * I, H / 2] with two values of NVFP4 in a byte, the gate's rows
    first; `w2_weight` [E, H, I]; their scales and biases beside them. `MoEMethod.checkpoint_params` lists
    them.

    Raises:
        UnsupportedQuantization, ValueError: as `MoEMethod`.
    """

    CODES = CODES
    ROLES = ROLES
    PARAMETERS: ClassVar[tuple[str, ...]] = CODES

    w13_weight: torch.nn.Parameter
    w2_weight: torch.nn.Parameter

    def __init__(
        self,
        quant_algo: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        activation: str = "silu",
        gated: bool = True,
        interleaved: bool = False,
        alpha: float | None = None,
        beta: float | None = None,
        limit: float | None = None,
        group_size: int | None = None,
        compute: Compute = "exact",
        global_num_experts: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        optional: Iterable[str] = (),
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(dtype)
        sizes = (num_experts, hidden_size, intermediate_size, top_k)
        options = (activation, gated, interleaved, alpha, beta, limit, group_size, compute)
        self.description = Description(quant_algo, *sizes, *options, global_num_experts, batch_invariant)
        about = find_moe_method(self.description, dtype, torch.device("cpu"))
        self.description = self.description._replace(quant_algo=about.quant_algo, group_size=about.group_size)
        specs, wanted = about.checkpoint_params, set(optional)
        if unknown := wanted - specs.keys():
            raise ValueError(f"optional: {about.quant_algo} has no {', '.join(sorted(unknown))}")
        for role, spec in specs.items():
            made = None
            if spec.required or role in wanted:
                kind = dtype if role.endswith("_bias") else NAMED[spec.dtype]
                made = torch.empty(spec.shape, dtype=kind, device=device)
            self._put(role, made)
        self._method = self._find_method()  # refuses devices that experts do not run on

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        name: str | LayerRecord,
        *,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Self:
        """The experts of a checkpoint, loaded and prepared.

        Args:
            checkpoint: where they are stored.
            name: of the container, as "model.layers.0.mlp.experts", or its record.
            device: where they run.
            options: arguments of the class. `top_k` and the activation may be left to config.json.

        Raises:
            UnsupportedQuantization, CheckpointError: as `empty_like`.
            ValueError: config.json does not say what has to be known.
        """
        record = _record_of(checkpoint, name)
        refuse_unfit_experts(checkpoint, record)
        stored, stacks = stack_experts(checkpoint, record)
        options = stored | options
        for option in ("top_k", "activation"):
            if option not in options:
                raise ValueError(f"{record.name}: config.json does not say what {option} is; pass it")
        experts = cls(**options, optional=stacks, device="meta")
        return experts.take(checkpoint, record, stacks, device).prepare()

    @classmethod
    def empty_like(cls, checkpoint: Checkpoint, name: str | LayerRecord, **options: Any) -> Self:
        """A module for the experts of a checkpoint, without their values.

        Args:
            checkpoint: where they are stored.
            name: of the container, or its record.
            options: arguments of the class that the stored form does not tell: `top_k`, and the activation
                with alpha, beta and limit where it is not silu.

        Raises:
            CheckpointError: a problem of severity "error" stands against the experts.
            UnsupportedQuantization: it is no group of experts, or one in several formats, or its algorithm
                does not run.
        """
        record = _record_of(checkpoint, name)
        options = refuse_unfit_experts(checkpoint, record) | options
        wanted = {
            f"{'w2' if role == 'down' else 'w13'}_{kind}"
            for role, kinds in stored_roles(record).items()
            for kind in kinds
        }
        try:
            specs = cls(**options | {"device": "meta"}).method.checkpoint_params
            return cls(**options, optional=specs.keys() & wanted)
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{record.name}: {error}") from None

    def read(self, checkpoint: Checkpoint, record: LayerRecord) -> Self:
        """Takes the tensors of a checkpoint's experts, to where the module is; `prepare` comes after it.

        Args:
            checkpoint: where they are stored.
            record: what they are there.

        Raises:
            CheckpointError: a tensor is missing, or does not fit.
        """
        return self.take(checkpoint, record, stack_experts(checkpoint, record)[1], self._codes.device)

    def take(
        self,
        checkpoint: Checkpoint,
        record: LayerRecord,
        stacks: Mapping[str, Any],
        device: torch.device | str,
    ) -> Self:
        """Takes stacks of NumPy, as `moqext.stack_experts` returns them.

        Args:
            checkpoint: where they are from, for messages, like the next one.
            record: what they are there.
            stacks: by name.
            device: where they go.

        Raises:
            CheckpointError: a stack is missing, or does not fit.
        """
        kinds = {role: NAMED[spec.dtype] for role, spec in self._specs.items()}
        try:
            tensors = {role: as_torch(stack, kinds[role]).to(device) for role, stack in stacks.items()}
            self._take(self._check(tensors))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{record.name}: {error}", file=checkpoint.directory) from error
        return self

    # ------------------------------------------------------------------------------------------- running

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> torch.Tensor:
        """Runs the chosen experts of each token, and sums their outputs by weight; prepares first if need be.

        Args:
            x: [..., hidden_size] of `dtype`.
            topk_weights: float32 [..., top_k].
            topk_ids: int32 or int64 [..., top_k]; one outside of the experts counts nothing.
            expert_map: int32 [global_num_experts], the number here of each expert, -1 where it is elsewhere.
            apply_router_weight_on_input: multiplies x instead of what the expert gives; top_k is 1 then.

        Returns:
            [..., hidden_size] of `dtype`.

        Raises:
            RuntimeError: a gradient is asked for, or the layer is traced before it was prepared.
            ValueError, TypeError: an argument has another shape or dtype.
        """
        if torch.compiler.is_compiling():
            if not self.is_prepared:
                raise RuntimeError("QuantMoE: call prepare() before torch.compile and torch.export")
            return self._dispatch(x, topk_weights, topk_ids, expert_map, apply_router_weight_on_input)
        if not self.is_prepared:
            self.prepare()
        if not (is_plain_call(x) and is_plain_call(topk_weights) and is_plain_call(topk_ids)):
            return self._dispatch(x, topk_weights, topk_ids, expert_map, apply_router_weight_on_input)
        method, w13, w2 = self._call
        if x.requires_grad or topk_weights.requires_grad or w13.requires_grad or w2.requires_grad:
            if torch.is_grad_enabled():
                raise RuntimeError(NO_GRADIENT)
            x, topk_weights = x.detach(), topk_weights.detach()
        return method(
            x,
            self._prepared,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )

    def _dispatch(self, *call: Any) -> torch.Tensor:
        """The call as an operation of torch."""
        tensors = [self._prepared_tensor(role) for role in ROLES]
        return torch.ops.moqext.moe(*call, *tensors, *self.description)

    def tune(self, tokens: Sequence[int], *, save: bool = False) -> list[Any]:
        """Times the kernels for these numbers of tokens; see `MoEMethod.tune`."""
        if not self.is_prepared:
            self.prepare()
        return self.method.tune(tokens, self._prepared, save=save)

    # ------------------------------------------------------------------------ what differs from other modules

    def _find_method(self) -> MoEMethod:
        return self.method_on(torch.device("cpu") if self._codes.is_meta else self._codes.device)

    def method_on(self, device: torch.device) -> MoEMethod:
        """The method that would run these experts on a device.

        Raises:
            UnsupportedQuantization: they do not run there.
        """
        return find_moe_method(self.description, self.dtype, device)

    def _refuse_move(self, like: torch.Tensor) -> None:
        if not like.is_meta:
            find_moe_method(self.description, like.dtype, like.device)

    def _gather(self) -> None:
        super()._gather()
        self._call = (self.method, self.w13_weight, self.w2_weight)

    def _restore(self, stored: dict[str, torch.Tensor]) -> None:
        for stack in ("w13", "w2"):
            codes, scales = f"{stack}_weight", f"{stack}_weight_scale"
            if self._is_freed(scales):
                self._restore_nvfp4(codes, scales, stored)
            if self.description.interleaved and stack == "w13":
                freed = [role for role in (codes, scales) if self._is_freed(role)]
                stored |= {role: _alternating(stored[role]) for role in freed}

    def _restore_nvfp4(self, codes: str, scales: str, stored: dict[str, torch.Tensor]) -> None:
        """Codes and block scales as the checkpoint has them, gate's rows first."""
        about, shape = self.description, self._specs[scales].shape
        group = about.group_size or 16
        if scales not in stored and stored[codes].dim() == 4:  # packed for CUDA
            weight = (*shape[:2], shape[2] * group)
            stored[codes], unpacked = unpack_nvfp4(stored[codes], weight, group)
            stored[scales] = unpacked.view(torch.float8_e4m3fn)
        elif scales not in stored:
            raise RuntimeError(
                f"QuantMoE: {about.quant_algo} prepared with compute={about.compute!r} has the checkpoint's "
                "tensors no more; load the checkpoint again"
            )
        elif about.compute == "fp4" and self.method.device != "cpu":  # swizzled
            halves = 2 if about.gated and codes.startswith("w13") else 1
            parts = stored[scales].chunk(halves, dim=1)
            size = (shape[0], shape[1] // halves, shape[2])
            rows = [unswizzle_block_scales(part.contiguous(), size) for part in parts]
            stored[scales] = torch.cat([as_carrier(part) for part in rows], 1).view(stored[scales].dtype)
        if self._specs[scales].dtype == "float8_e8m0fnu":
            factors = self._prepared[scales.replace("weight_scale", "output_scale")]
            stored[scales] = stored_exponents(stored[scales], factors)

    def _checked(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        spec = self._specs[role]
        if spec.dtype != "float32":
            return self._checked_codes(role, tensor)
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{role}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
        self._refuse_dtype(role, tensor)
        return tensor if role.endswith("_bias") else tensor.float()

    def extra_repr(self) -> str:
        """The line of the layer in print(model)."""
        about = self.description
        group = "" if about.group_size is None else f" g{about.group_size}"
        backend = f", {self.method.backend}" if self.is_prepared else ""
        gate = "" if about.gated else ", not gated"
        sizes = f"{about.num_experts} x {about.hidden_size} -> {about.intermediate_size}, top {about.top_k}"
        bias = getattr(self, "w13_bias", None) is not None
        return (
            f"{sizes}, {about.quant_algo}{group}, {about.activation}{gate}, compute={about.compute}, "
            f"bias={bias}, {str(self.dtype).removeprefix('torch.')}{backend}"
        )


def _record_of(checkpoint: Checkpoint, name: str | LayerRecord) -> Any:
    return name if isinstance(name, (LayerRecord, Projection)) else checkpoint.layer(name)


def refuse_unfit_experts(checkpoint: Checkpoint, record: Any) -> dict[str, Any]:
    """The arguments of `QuantMoE` that the stored form of experts tells.

    Raises:
        CheckpointError: a problem of severity "error" stands against the experts.
        UnsupportedQuantization: it is no group of experts, or no one `MoEMethod` has all of them.
    """
    if not isinstance(record, LayerRecord) or record.kind != "moe":
        raise UnsupportedQuantization(
            f"{record.name}: {record.quant_algo} of shape {list(record.shape)} is no group of experts"
        )
    forms = find_forms(checkpoint, record)
    if len(forms) > 1:
        each = ", ".join(f"{len(form.experts)} x {form.format}" for form in forms)
        raise UnsupportedQuantization(
            f"{record.name}: experts in several formats ({each}) do not run as one module; "
            "Checkpoint.load runs them"
        )
    return forms[0].options()


def stored_roles(record: LayerRecord) -> dict[str, set[str]]:
    """Which tensors a group of experts has of each projection, "gate", "up", "gate_up" or "down"."""
    roles: dict[str, set[str]] = {}
    for member in record.members:
        roles.setdefault(PROJECTIONS[member.name.rpartition(".")[2]], set()).update(member.tensors)
    for projection in record.projections:
        roles.setdefault(projection.role, set()).update(projection.tensors)
    return roles


def _alternating(stack: torch.Tensor) -> torch.Tensor:
    """Gate and up rows one after the other, as the checkpoint has them, of their halves."""
    rows = as_carrier(stack).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return rows.view(stack.dtype)
