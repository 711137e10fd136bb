"""QuantLinear: a linear of a ModelOpt checkpoint as a module of torch.

The module has the checkpoint's tensors under the checkpoint's names and in its dtypes, so a state dict of the
checkpoint loads into it. `prepare` turns them into what the kernels want: where a prepared tensor has the
place of a stored one (the weight, the block scales of NVFP4), that one is freed; all others stay beside it.
`state_dict` gives the checkpoint's tensors back, prepared or not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Self

import torch

from moqext import (
    Checkpoint,
    CheckpointError,
    LayerRecord,
    LinearMethod,
    ParamSpec,
    Projection,
    UnsupportedQuantization,
)
from moqext.algorithms import ALGORITHMS
from moqext.ops import unpack_nvfp4, unswizzle_block_scales
from moqext.spelling import Compute
from moqext_torch.exchange import NAMED, stored_tensor
from moqext_torch.op import NO_GRADIENT, ROLES, find_method, is_plain_call

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class QuantLinear(torch.nn.Module):
    """y = x Wᵀ + bias with a quantized weight, by `moqext.LinearMethod`.

    Args:
        in_features: columns of the weight.
        out_features: rows; or the rows of each layer fused into this one, which keep their own scales.
        quant_algo: as for `LinearMethod`.
        bias: whether there is one.
        group_size: as for `LinearMethod`.
        compute: as for `LinearMethod`.
        dtype: of x and y: torch.bfloat16, float16 or float32. Tensors of the checkpoint keep their own.
        device: where the tensors are made; "meta" makes none.
        optional: tensors beside the required ones that the checkpoint has: "input_scale", "pre_quant_scale".
            `load_state_dict` adds them by itself.

    The tensors of a layer [N, K] are those of the checkpoint: `weight`, float8_e4m3fn [N, K] or uint8
    [N, K / 2] with two values of NVFP4 in a byte; `weight_scale`, float32, or e4m3 [N, K / group_size];
    `weight_scale_2`, `input_scale`, `pre_quant_scale`, float32; `bias`. `LinearMethod.checkpoint_params`
    lists them.

    Raises:
        UnsupportedQuantization, ValueError: as `LinearMethod`.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    weight_scale: torch.Tensor | None
    prepared_bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        quant_algo: str,
        *,
        bias: bool = False,
        group_size: int | None = None,
        compute: Compute = "exact",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        optional: Iterable[str] = (),
    ) -> None:
        super().__init__()
        partitions = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        about = LinearMethod(
            quant_algo, in_features, partitions, group_size=group_size, dtype=dtype, compute=compute
        )
        self.quant_algo = about.quant_algo
        self.in_features = in_features
        self.out_features = about.out_features
        self.out_partitions = about.out_partitions
        self.group_size = about.group_size
        self.compute = compute
        self.dtype = dtype
        self.one_input_scale = False
        self.is_prepared = False
        self._method: LinearMethod | None = None
        self._prepared: dict[str, torch.Tensor] = {}
        self._call: tuple[LinearMethod, dict[str, torch.Tensor], torch.Tensor | None] | None = None
        for role in (*ROLES[1:], "bias"):
            self._put(f"prepared_{role}", None)
        specs, wanted = about.checkpoint_params, set(optional)
        if unknown := wanted - specs.keys():
            raise ValueError(f"optional: {self.quant_algo} has no {', '.join(sorted(unknown))}")
        for role, spec in specs.items():
            made = None
            if spec.required or role in wanted:
                shape = () if spec.shape == (1,) else spec.shape  # exporters write scalars
                made = torch.empty(shape, dtype=NAMED[spec.dtype], device=device)
            self._put(role, made)
        self._put("bias", torch.empty(self.out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        names: str | LayerRecord | Sequence[str | LayerRecord],
        *,
        compute: Compute = "exact",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A linear of a checkpoint, or several fused along their rows, loaded and prepared.

        Args:
            checkpoint: where it is stored.
            names: as for `Checkpoint.load`.
            compute: as for the class, like the next two.
            dtype: of x and y.
            device: where it runs.

        Raises:
            UnsupportedQuantization, CheckpointError: as `Checkpoint.load`.
        """
        wanted = [names] if isinstance(names, (str, LayerRecord)) else list(names)
        records = [checkpoint.layer(item) if isinstance(item, str) else item for item in wanted]
        layer = cls.empty_like(records, compute=compute, dtype=dtype, device="meta")
        tensors = _read(checkpoint, records, [*layer._specs, "bias"])
        try:
            layer._take(layer._check({role: tensor.to(device) for role, tensor in tensors.items()}))
            layer.prepare()
        except (ValueError, TypeError) as error:
            text = f"{', '.join(record.name for record in records)}: {error}"
            raise CheckpointError(text, file=checkpoint.directory) from error
        return layer

    @classmethod
    def empty_like(cls, records: Sequence[LayerRecord], **options: Any) -> Self:
        """A module for linears of a checkpoint, without their values.

        Args:
            records: from `Checkpoint.layers`; several are fused along their rows.
            options: `compute`, `dtype`, `device` of the class.

        Raises:
            CheckpointError: a problem of severity "error" stands against a layer.
            UnsupportedQuantization: it is no linear, its algorithm does not run, or the layers differ.
        """
        first = records[0]
        for record in records:
            refuse_unfit(record)
            if record.partitions and len(records) > 1:
                raise UnsupportedQuantization(
                    f"{record.name} has a scale for each of its parts, and cannot be fused with others"
                )
            if (record.quant_algo, record.group_size) != (first.quant_algo, first.group_size):
                raise UnsupportedQuantization(
                    f"{first.name} is {first.format}, {record.name} {record.format}: layers fused along rows "
                    "need one format; load them one by one"
                )
        try:
            return cls(
                first.shape[1],
                [rows for record in records for rows in record.out_partitions],
                first.quant_algo,
                bias=any("bias" in record.tensors for record in records),
                group_size=first.group_size,
                optional=[role for role in ("input_scale", "pre_quant_scale") if role in first.tensors],
                **options,
            )
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{first.name}: {error}") from None

    # ------------------------------------------------------------------------------------------- running

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies x [..., in_features] of `dtype`; prepares first where that has not been done.

        Raises:
            RuntimeError: a gradient of x is asked for, or the layer is traced before it was prepared.
            ValueError, TypeError: x has another shape or dtype.
        """
        if torch.compiler.is_compiling():
            if not self.is_prepared:
                raise RuntimeError("QuantLinear: call prepare() before torch.compile and torch.export")
            return self._dispatch(x)
        if not self.is_prepared:
            self.prepare()
        if not is_plain_call(x):
            return self._dispatch(x)
        method, prepared, bias = self._call
        if x.requires_grad or (bias is not None and bias.requires_grad):
            if torch.is_grad_enabled():
                raise RuntimeError(NO_GRADIENT)
            x = x.detach()
        return method(x, prepared, bias)

    def _dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """The call as an operation of torch."""
        bias = self.prepared_bias
        block_scales = self.weight_scale is not None and self.weight_scale.dtype != torch.float32
        return torch.ops.moqext.linear(
            x,
            self.weight,
            self.weight_scale if block_scales else self.prepared_weight_scale,
            self.prepared_output_scale,
            self.prepared_input_scale,
            self.prepared_pre_quant_scale,
            self.prepared_fold_scale,
            self.bias if bias is None else bias,
            self.quant_algo,
            self.out_partitions,
            self.group_size,
            self.compute,
            self.one_input_scale,
        )

    @property
    def method(self) -> LinearMethod:
        """The `moqext.LinearMethod`: layers of one description share it, and what is tuned."""
        if self._method is None:
            self._method = self._find_method(self.one_input_scale)
        return self._method

    def _find_method(self, one_input_scale: bool) -> LinearMethod:
        device = self.weight.device
        return find_method(
            self.quant_algo,
            self.in_features,
            self.out_partitions,
            self.group_size,
            self.dtype,
            torch.device("cpu") if device.type == "meta" else device,
            self.compute,
            one_input_scale,
        )

    def tune(self, tokens: Sequence[int]) -> list[Any]:
        """Times the kernels for these numbers of rows; see `LinearMethod.tune`."""
        if not self.is_prepared:
            self.prepare()
        return self.method.tune(tokens, self._prepared)

    # --------------------------------------------------------------------------------------- preparation

    def prepare(self) -> Self:
        """Turns the checkpoint's tensors into prepared ones, and frees those whose place these take.

        Does nothing where that has been done.

        Raises:
            ValueError: a tensor holds scales or codes that no intact checkpoint holds.
            RuntimeError: the layer is on the meta device.
        """
        if not self.is_prepared:
            if self.weight.device.type == "meta":
                raise RuntimeError("QuantLinear: load the checkpoint's tensors first; the layer is on meta")
            self._prepare(self._check(self.stored_tensors()))
        return self

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prepare(self, given: Mapping[str, torch.Tensor]) -> None:
        """Takes checked tensors of a checkpoint and prepares them; in place where the layer is prepared.

        Nothing of the layer changes before all of them are prepared.
        """
        one_input_scale = self._shares_input_scale(given.get("input_scale"))
        method = self._find_method(one_input_scale)
        roles = {
            role
            for role, spec in method.prepared_params.items()
            if spec.required or given.get(role) is not None
        }
        in_place = one_input_scale == self.one_input_scale and roles == self._prepared.keys()
        out = self._prepared if in_place else self._room(method, roles, given)
        prepared = method.prepare(_arguments(given), out)
        self.one_input_scale, self._method = one_input_scale, method
        self._settle(given, prepared)

    def _shares_input_scale(self, scale: torch.Tensor | None) -> bool:
        """Whether fused layers have one activation scale: CUDA multiplies them at once then."""
        shares = ALGORITHMS[self.quant_algo].linear == "e4m3_tensor" and len(self.out_partitions) > 1
        return bool(shares and scale is not None and (scale == scale.reshape(-1)[0]).all())

    def _room(
        self, method: LinearMethod, roles: Iterable[str], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors for `prepare` to write: the checkpoint's where the prepared ones have their bytes."""
        room = {}
        for role in roles:
            spec = method.prepared_params[role]
            if role in given and self._keeps(method, role):
                room[role] = given[role].contiguous()
            else:
                room[role] = torch.empty(spec.shape, dtype=NAMED[spec.dtype], device=given["weight"].device)
        return room

    def _keeps(self, method: LinearMethod, role: str) -> bool:
        """Whether a prepared tensor has the bytes of the checkpoint's."""
        stored, prepared = method.checkpoint_params[role], method.prepared_params.get(role)
        swizzled = role == "weight_scale" and self.compute == "fp4" and method.device != "cpu"
        return (
            stored.dtype != "float32" and prepared is not None and stored[:2] == prepared[:2] and not swizzled
        )

    def _settle(self, given: Mapping[str, torch.Tensor], prepared: Mapping[str, torch.Tensor]) -> None:
        """Keeps the tensors: prepared ones in the place of the checkpoint's, or under a name of their own."""
        specs = self.method.checkpoint_params
        for role in [*specs, "bias"]:
            freed = role in specs and specs[role].dtype != "float32"
            self._put(role, prepared.get(role) if freed else given.get(role))
        for role in ROLES[1:]:
            freed = role in specs and specs[role].dtype != "float32"
            self._put(f"prepared_{role}", None if freed else prepared.get(role))
        fits = self.bias is None or self.bias.dtype in (self.dtype, torch.float32)
        self._put("prepared_bias", None if fits else self.bias.detach().float())
        self.is_prepared = True
        self._gather()

    def _gather(self) -> None:
        """Finds the prepared tensors by role, wherever they stand, for calls that torch does not see."""
        prepared = {}
        for role in ROLES:
            freed = role in self._specs and self._specs[role].dtype != "float32"
            tensor = getattr(self, role if freed else f"prepared_{role}")
            if tensor is not None:
                prepared[role] = tensor.detach()
        bias = self.bias if self.prepared_bias is None else self.prepared_bias
        self._prepared = prepared
        self._call = (self.method, prepared, bias)

    def _put(self, name: str, tensor: torch.Tensor | None) -> None:
        """Makes a tensor this module's: weight and bias are parameters, all others buffers.

        One of that shape and dtype is overwritten in place, for graphs and references that hold it. None is
        no buffer, which torch.export would miscount.
        """
        held = getattr(self, name, None)
        if tensor is not None and held is not None and _alike(held, tensor):
            held.requires_grad_(False)
            if held.data_ptr() != tensor.data_ptr():
                held.copy_(tensor)
            return
        if name in self._parameters or name in self._buffers or name in self.__dict__:
            delattr(self, name)
        if tensor is None:
            setattr(self, name, None)
        elif name in ("weight", "bias"):
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor, persistent=not name.startswith("prepared_"))

    # ------------------------------------------------------------------------ the checkpoint's tensors

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint that the layer has, by name; made again where they were freed.

        Equal bit for bit to what was loaded but for what means zero: preparing makes codes under a scale of
        zero zeros, and packing for CUDA takes the sign from a block scale of minus zero. Scales that were
        float16 or bfloat16 are float32.

        Raises:
            RuntimeError: NVFP4 prepared with compute="fp8" on the CPU: the codes are folded for good.
        """
        stored = self._stored_as_they_are()
        if not self.is_prepared or self._specs["weight_scale"].dtype == "float32":
            return stored
        if "weight_scale" in stored:
            if not self._keeps(self.method, "weight_scale"):
                swizzled = stored["weight_scale"]
                stored["weight_scale"] = unswizzle_block_scales(swizzled, self._specs["weight_scale"].shape)
        elif stored["weight"].dim() == 3:  # packed for CUDA
            shape = (self.out_features, self.in_features)
            codes, scales = unpack_nvfp4(stored["weight"], shape, self.group_size or 16)
            stored |= {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn)}
        else:
            raise RuntimeError(
                f"QuantLinear: {self.quant_algo} prepared with compute={self.compute!r} on the CPU has the "
                "checkpoint's tensors no more; prepare with compute='exact', or load the checkpoint again"
            )
        return stored

    @property
    def _specs(self) -> dict[str, ParamSpec]:
        return self.method.checkpoint_params

    def _stored_as_they_are(self) -> dict[str, torch.Tensor]:
        """What stands under the names of the checkpoint, prepared or not."""
        roles = [*self._specs, "bias"]
        return {role: getattr(self, role).detach() for role in roles if getattr(self, role) is not None}

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes these, checked before, the checkpoint's tensors, not prepared."""
        self.is_prepared, self._prepared, self._call, self._method = False, {}, None, None
        for role in (*ROLES[1:], "bias"):
            self._put(f"prepared_{role}", None)
        for role in [*self._specs, "bias"]:
            self._put(role, tensors.get(role))

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in the dtypes of this module.

        Raises:
            ValueError: one is missing, unknown or of another shape.
            TypeError: one is of another dtype.
        """
        for role, spec in self._specs.items():
            if spec.required and role not in tensors:
                raise ValueError(f"{role}: missing")
        if self.bias is not None and "bias" not in tensors:
            raise ValueError("bias: missing")
        return {role: self._checked(role, tensor.detach()) for role, tensor in tensors.items()}

    def _checked(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor in the dtype of this module."""
        if role == "bias":
            if tuple(tensor.shape) != (self.out_features,):
                raise ValueError(f"bias: expected shape [{self.out_features}], got {list(tensor.shape)}")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"bias: expected bfloat16, float16 or float32, got {tensor.dtype}")
            return tensor
        spec = self._specs[role]
        dtype = NAMED[spec.dtype]
        if dtype != torch.float32:
            if tuple(tensor.shape) != spec.shape:
                raise ValueError(f"{role}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
            if tensor.dtype not in (dtype, torch.uint8):
                raise TypeError(f"{role}: expected {dtype} or its bytes as uint8, got {tensor.dtype}")
            return tensor.view(dtype)
        if tensor.numel() not in (1, prod(spec.shape)):  # a scalar serves all partitions; ranks differ
            raise ValueError(f"{role}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{role}: expected float32, bfloat16 or float16, got {tensor.dtype}")
        return tensor.float()

    # ------------------------------------------------------------------------------ what torch does with it

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.is_prepared:
            destination.update({prefix + role: tensor for role, tensor in self.stored_tensors().items()})
        else:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes the checkpoint's tensors; a prepared layer is prepared anew, in place."""
        roles = [*self._specs, "bias"]
        own = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
        given = {role: state_dict[own[role]] for role in roles if role in own}
        held = [role for role in roles if getattr(self, role) is not None or role == "weight_scale"]
        if strict:
            unexpected_keys += [key for role, key in own.items() if role not in roles]
            missing_keys += [prefix + role for role in held if role not in given]
        if not given:
            return
        device = next(iter(given.values())).device if self.weight.is_meta else self.weight.device
        copy = not local_metadata.get("assign_to_params_buffers", False)
        try:
            rest = {} if given.keys() >= set(held) else self.stored_tensors()
            tensors = self._check(
                rest | {role: tensor.to(device, copy=copy) for role, tensor in given.items()}
            )
            if self.is_prepared:
                self._prepare(tensors)
            else:
                self._take(tensors)
        except (ValueError, TypeError, RuntimeError, BufferError) as error:
            error_msgs.append(f"{prefix.rstrip('.') or 'QuantLinear'}: {error}")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """`.to`, `.cuda`, `.half` and their like: tensors move, and keep the dtypes of the checkpoint.

        What a dtype changes is that of x and y. A prepared layer is prepared again.

        Raises:
            ValueError: x and y cannot have that dtype.
            RuntimeError: as `stored_tensors`.
        """
        like = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device))
        if like.dtype not in DTYPES:
            raise ValueError(f"QuantLinear: runs in bfloat16, float16 or float32, not in {like.dtype}")
        if self.is_prepared and like.device == self.weight.device and like.dtype == self.dtype:
            for tensor in (*self._stored_as_they_are().values(), *self._prepared.values()):
                fn(_carrier(tensor))  # in place, as share_memory() is
            return self
        tensors = {role: fn(_carrier(t)).view(t.dtype) for role, t in self.stored_tensors().items()}
        again = self.is_prepared and like.device.type != "meta"
        self.dtype = like.dtype
        self._take(tensors)
        return self.prepare() if again else self

    def __getstate__(self) -> dict[str, Any]:
        """Methods are shared by description, not copied; float8 travels as bytes, which pickle can carry."""
        state = {**self.__dict__, "_method": None, "_call": None, "_prepared": {}}
        for store in ("_parameters", "_buffers"):
            state[store] = {name: _as_bytes(tensor) for name, tensor in state[store].items()}
        state["float8_tensors"] = [
            name for name, tensor in (self._parameters | self._buffers).items() if _is_float8(tensor)
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("float8_tensors")
        super().__setstate__(state)
        for name in names:
            store = self._parameters if name in self._parameters else self._buffers
            tensor = store[name].detach().view(torch.float8_e4m3fn)
            store[name] = (
                torch.nn.Parameter(tensor, requires_grad=False) if store is self._parameters else tensor
            )
        if self.is_prepared:
            self._gather()

    def extra_repr(self) -> str:
        """What print(model) shows of the layer."""
        parts = "+".join(map(str, self.out_partitions))
        group = "" if self.group_size is None else f" g{self.group_size}"
        backend = f", {self.method.backend}" if self.is_prepared else ""
        return (
            f"{self.in_features} -> {parts}, {self.quant_algo}{group}, compute={self.compute}, "
            f"bias={self.bias is not None}, {str(self.dtype).removeprefix('torch.')}{backend}"
        )


def refuse_unfit(record: LayerRecord | Projection) -> None:
    """Raises where a record is no linear, or an error stands against it."""
    if not isinstance(record, LayerRecord) or record.kind != "linear":
        raise UnsupportedQuantization(
            f"{record.name}: {record.quant_algo} of shape {list(record.shape)} is no linear"
        )
    errors = [problem for problem in record.problems if problem.severity == "error"]
    if errors:
        text = "; ".join(f"{problem.code}: {problem.message}" for problem in errors)
        raise CheckpointError(f"{record.name}: {text}", tensor=errors[0].tensor)


def _arguments(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `LinearMethod.prepare` is given; it reads float scales from the host."""
    return {
        role: tensor.cpu() if tensor.dtype == torch.float32 else tensor.contiguous()
        for role, tensor in given.items()
        if role != "bias"
    }


def _read(
    checkpoint: Checkpoint, records: Sequence[LayerRecord], roles: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The tensors of linears that their format uses, fused along their rows."""
    fused = {}
    for role in roles:
        if not any(role in record.tensors for record in records):
            continue
        parts = []
        for record in records:
            if role in record.tensors:
                parts.append(stored_tensor(checkpoint, record.tensors[role]))
            elif role == "bias":
                parts.append(torch.zeros(record.shape[0]))
            else:
                raise CheckpointError(f"{role}: {record.name} has none, but another layer fused with it has")
        fused[role] = _fuse(role, parts)
    return fused


def _fuse(role: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of several layers: rows after rows, and a scalar of each."""
    if len(parts) == 1:
        return parts[0]
    if role == "pre_quant_scale":  # of the one input
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise CheckpointError(
                "pre_quant_scale: layers fused along rows need the same; load them one by one"
            )
        return parts[0]
    if role == "bias" and len({part.dtype for part in parts}) > 1:
        parts = [part.float() for part in parts]
    carriers = [_carrier(part.reshape(1) if part.dim() == 0 else part) for part in parts]
    return torch.cat(carriers).view(parts[0].dtype)


def _carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers, which no conversion of floats touches."""
    return tensor.view(_CARRIERS[tensor.element_size()])


def _is_float8(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float8_e4m3fn


def _as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor for a pickle: the bytes of a float8 one, others as they are."""
    return tensor.detach().view(torch.uint8) if _is_float8(tensor) else tensor


def _alike(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor can be overwritten by another."""
    return (held.shape, held.dtype, held.device) == (tensor.shape, tensor.dtype, tensor.device) and not (
        held.is_meta or held.is_inference()
    )
