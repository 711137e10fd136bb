"""QuantLinear: a linear of a ModelOpt checkpoint as a module of torch.

What it does with its tensors is that of every `PreparedModule`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Self

import torch

from moqext import (
    Checkpoint,
    CheckpointError,
    LayerRecord,
    LinearMethod,
    Projection,
    UnsupportedQuantization,
)
from moqext.algorithms import ALGORITHMS
from moqext.ops import unpack_nvfp4, unswizzle_block_scales
from moqext.ops.spelling import Compute
from moqext_torch.dequantized import weight_of
from moqext_torch.exchange import NAMED, stored_exponents, stored_tensor
from moqext_torch.op import LOW_RANK, ROLES, find_method, is_plain_call
from moqext_torch.prepared import DTYPES, PreparedModule, as_carrier

FROZEN = (
    "QuantLinear: the weight is frozen: requires_grad_(False), and train adapters beside it (docs/torch.md)"
)


class QuantLinear(PreparedModule):
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
        rank: as for `LinearMethod`.
        batch_invariant: as for `LinearMethod`.

    The tensors of a layer [N, K] are those of the checkpoint: `weight`, float8_e4m3fn [N, K] or uint8
    [N, K / 2] with two values of NVFP4 in a byte; `weight_scale`, float32, or e4m3 [N, K / group_size],
    of MXFP4 uint8; `weight_scale_2`, `input_scale`, `pre_quant_scale`, `lora_a`, `lora_b`, float32; `bias`.
    `LinearMethod.checkpoint_params` lists them. Files may name a tensor otherwise, as ModelOpt does
    `weight_quantizer._svdquant_lora_a`; `from_checkpoint` knows.

    Raises:
        UnsupportedQuantization, ValueError: as `LinearMethod`.
    """

    CODES = ("weight",)
    ROLES = (*ROLES, *LOW_RANK)
    PARAMETERS = ("weight", "bias")
    EXTRAS = ("bias",)

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
        rank: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(dtype)
        partitions = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        about = LinearMethod(
            quant_algo,
            in_features,
            partitions,
            group_size=group_size,
            dtype=dtype,
            compute=compute,
            batch_invariant=batch_invariant,
            rank=rank,
        )
        self.quant_algo = about.quant_algo
        self.in_features = in_features
        self.out_features = about.out_features
        self.out_partitions = about.out_partitions
        self.group_size = about.group_size
        self.rank = about.rank
        self.compute = compute
        self.batch_invariant = batch_invariant
        self.one_input_scale = False
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
        batch_invariant: bool = False,
    ) -> Self:
        """A linear of a checkpoint, or several fused along their rows, loaded and prepared.

        Args:
            checkpoint: where it is stored.
            names: as for `Checkpoint.load`.
            compute: as for the class, like the next two.
            dtype: of x and y.
            device: where it runs.
            batch_invariant: as for the class.

        Raises:
            UnsupportedQuantization, CheckpointError, ValueError: as `Checkpoint.load`.
            TypeError: `names` has no name or record.
        """
        wanted = [names] if isinstance(names, (str, LayerRecord, Projection)) else names
        if not isinstance(wanted, Iterable):
            raise TypeError(f"names: expected a name, a record or several of them, got {type(wanted)}")
        records = [
            item if isinstance(item, (LayerRecord, Projection)) else checkpoint.layer(item) for item in wanted
        ]
        if not records:
            raise ValueError("names: expected at least one name, got none")
        about = {"compute": compute, "dtype": dtype, "batch_invariant": batch_invariant}
        layer = cls.empty_like(records, device="meta", **about)
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
            options: `compute`, `dtype`, `device`, `batch_invariant` of the class.

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
            if record.rank != first.rank:
                raise UnsupportedQuantization(
                    f"{first.name} has a pair of rank {first.rank}, {record.name} of {record.rank}: layers "
                    "fused along rows need one rank; load them one by one"
                )
        try:
            return cls(
                first.shape[1],
                [rows for record in records for rows in record.out_partitions],
                first.quant_algo,
                bias=any("bias" in record.tensors for record in records),
                group_size=first.group_size,
                optional=[role for role in ("input_scale", "pre_quant_scale") if role in first.tensors],
                rank=first.rank,
                **options,
            )
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{first.name}: {error}") from None

    # ------------------------------------------------------------------------------------------- running

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies x [..., in_features] of `dtype`; prepares first where that has not been done.

        Under `torch.autocast` x may have another floating dtype, and the result has that of autocast.

        It has gradients of x and of the bias: those of x Wᵀ + bias, W dequantized into x's dtype in backward.

        Raises:
            RuntimeError: a gradient of the weight is asked for, or the layer is traced unprepared.
            ValueError, TypeError: x has another shape or dtype.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x)}")
        kind = x.device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and x.dtype in DTYPES:
            with torch.autocast(kind, enabled=False):
                return self.forward(x.to(self.dtype)).to(torch.get_autocast_dtype(kind))
        if torch.compiler.is_compiling():
            if not self.is_prepared:
                raise RuntimeError("QuantLinear: call prepare() before torch.compile and torch.export")
            return self._dispatch(x)
        if not self.is_prepared:
            self.prepare()
        if not is_plain_call(x):
            return self._dispatch(x)
        method, prepared, bias, weight, own = self._call
        if x.requires_grad or weight.requires_grad or (own is not None and own.requires_grad):
            if torch.is_grad_enabled():
                return self._dispatch(x)
            x = x.detach()
        return method(x, prepared, bias)

    def _dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """The call as an operation of torch."""
        if self._codes.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(FROZEN)
        bias = self.prepared_bias
        if bias is not None and self.bias is not None and self.bias.requires_grad:
            bias = self.bias.float()
        block_scales = self.weight_scale is not None and self.weight_scale.dtype != torch.float32
        return torch.ops.moqext.linear(
            x,
            self._codes,
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
            lora_a=self.prepared_lora_a,
            lora_b=self.prepared_lora_b,
            batch_invariant=self.batch_invariant,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [out_features, in_features] that the layer multiplies with, in `dtype` or the layer's.

        `pre_quant_scale` and low-rank pairs are in it. Prepares first where that has not been done.
        """
        self.prepare()
        shape = (self.out_features, self.in_features)
        with torch.no_grad():
            return weight_of(self._prepared, shape, self.out_partitions, self.group_size, dtype or self.dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that PEFT gives to adapters beside the layer."""
        return self.dtype

    @property
    def W_q(self) -> torch.nn.Parameter:
        """The codes. Of a layer that has them by this name PEFT asks `dequantize()` for the weight (DoRA)."""
        return self.weight

    def _find_method(self) -> LinearMethod:
        return self._method_of(self.one_input_scale)

    def _method_for(self, given: Mapping[str, torch.Tensor]) -> LinearMethod:
        return self._method_of(self._shares_input_scale(given.get("input_scale")))

    def _method_of(self, one_input_scale: bool) -> LinearMethod:
        device = self._codes.device
        return find_method(
            self.quant_algo,
            self.in_features,
            self.out_partitions,
            self.group_size,
            self.dtype,
            torch.device("cpu") if device.type == "meta" else device,
            self.compute,
            one_input_scale,
            rank=self.rank,
            batch_invariant=self.batch_invariant,
        )

    def _shares_input_scale(self, scale: torch.Tensor | None) -> bool:
        """Whether fused layers have one activation scale: CUDA multiplies them at once then."""
        shares = ALGORITHMS[self.quant_algo].linear == "e4m3_tensor" and len(self.out_partitions) > 1
        return bool(shares and scale is not None and (scale == scale.reshape(-1)[0]).all())

    def tune(self, tokens: Sequence[int], *, save: bool = False) -> list[Any]:
        """Times the kernels for these numbers of rows; see `LinearMethod.tune`."""
        if not self.is_prepared:
            self.prepare()
        return self.method.tune(tokens, self._prepared, save=save)

    # ------------------------------------------------------------------------ what differs from other modules

    def _settle(self, given: Mapping[str, torch.Tensor], prepared: Mapping[str, torch.Tensor]) -> None:
        self.one_input_scale = self._shares_input_scale(given.get("input_scale"))
        super()._settle(given, prepared)

    def _gather(self) -> None:
        super()._gather()
        fits = self.bias is None or self.bias.dtype in (self.dtype, torch.float32)
        self._put("prepared_bias", None if fits else self.bias.detach().float())
        bias = self.bias if self.prepared_bias is None else self.prepared_bias
        self._call = (self.method, self._prepared, bias, self._codes, self.bias)

    def _restore(self, stored: dict[str, torch.Tensor]) -> None:
        if self._specs["weight_scale"].dtype == "float32":
            return
        if "weight_scale" in stored:
            if self.compute == "fp4" and not self.method.keeps("weight_scale"):
                swizzled = stored["weight_scale"]
                stored["weight_scale"] = unswizzle_block_scales(swizzled, self._specs["weight_scale"].shape)
        elif stored["weight"].dim() == 3:  # packed for CUDA
            shape = (self.out_features, self.in_features)
            codes, scales = unpack_nvfp4(stored["weight"], shape, self.group_size or 16)
            stored |= {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn)}
        else:
            raise RuntimeError(
                f"QuantLinear: {self.quant_algo} prepared with compute={self.compute!r} on "
                f"{self._codes.device.type} has the checkpoint's tensors no more; prepare with "
                "compute='exact', or load the checkpoint again"
            )
        is_mx = self._specs["weight_scale"].dtype == "float8_e8m0fnu"
        if is_mx and "output_scale" in self._prepared:  # of MXFP4: MXFP8 keeps its scales
            factors = self._prepared["output_scale"]
            stored["weight_scale"] = stored_exponents(stored["weight_scale"], factors)

    def _checked(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        if role == "bias":
            if tuple(tensor.shape) != (self.out_features,):
                raise ValueError(f"bias: expected shape [{self.out_features}], got {list(tensor.shape)}")
            self._refuse_dtype(role, tensor)
            return tensor
        spec = self._specs[role]
        if spec.dtype != "float32":
            return self._checked_codes(role, tensor)
        if tensor.numel() not in (1, prod(spec.shape)):  # a scalar serves all partitions; ranks differ
            raise ValueError(f"{role}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
        self._refuse_dtype(role, tensor)
        return tensor.float()

    def extra_repr(self) -> str:
        """The line of the layer in print(model)."""
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
        experts = isinstance(record, Projection) or record.kind == "moe"
        hint = "; QuantMoE.from_checkpoint takes a layer of experts" if experts else ""
        raise UnsupportedQuantization(
            f"{record.name}: {record.quant_algo} of shape {list(record.shape)} is no linear{hint}"
        )
    errors = [problem for problem in record.problems if problem.severity == "error"]
    if errors:
        text = "; ".join(f"{problem.code}: {problem.message}" for problem in errors)
        raise CheckpointError(f"{record.name}: {text}", tensor=errors[0].tensor)


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
    carriers = [as_carrier(part.reshape(1) if part.dim() == 0 else part) for part in parts]
    return torch.cat(carriers).view(parts[0].dtype)
