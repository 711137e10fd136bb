"""MoEMethod: a quantized layer of experts as a framework plugs it in.

The steps are those of `LinearMethod`, on stacks of experts: the method says which tensors there are
(`checkpoint_params`), takes them one by one (`load`) or whole, turns them once into the form that kernels
want (`prepare`), and computes (`method(x, prepared, topk_weights, topk_ids)`).
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import _C
from moqext.algorithms import ALGORITHMS
from moqext.layers import tuning
from moqext.layers.expert_scales import unify_input_scales
from moqext.layers.method import PlannedMethod
from moqext.layers.stacks import (
    ExpertStacks,
    adopt_stacks,
    empty_stacks,
    fill_slot,
    filled_slots,
    refuse_unfilled,
)
from moqext.ops.scalars import as_tensor
from moqext.ops.spelling import SWIGLU, Activation, Compute, Device, Dtype, Tensor, device_name, dtype_name
from moqext.variables import check_variables

_OPTIONS = (
    "top_k",
    "activation",
    "gated",
    "interleaved",
    *SWIGLU,
    "global_num_experts",
    "quantized_input",
    "batch_invariant",
)
"""Arguments by name that other methods do not have."""


class MoEMethod(PlannedMethod):
    """A layer of experts, of which each token has top_k.

    With expert e = topk_ids[t, j] and its weight w = topk_weights[t, j],

        u = W13[e] x[t] + b13[e];   g = rounded(act(u));   y[t] = rounded(sum over j of w (W2[e] g + b2[e])).

    Activations x and g are treated as `LinearMethod` of the algorithm treats its own. Sums and `act` are
    float32, g is rounded to `dtype`, and slots are added in their order.

    Args:
        quant_algo: As for `LinearMethod`.
        num_experts: E, those that are here.
        hidden_size: H, of x and y.
        intermediate_size: I, of g.
        top_k: Slots of a token, 1 to 32.
        activation: "silu", "gelu" (by erf), "gelu_tanh" or "relu2" of gate, times up; without a gate of all
            rows. "swigluoai" is silu with alpha 1.702, beta 1 and limit 7.
        gated: W13 has I rows of gate and I of up; else I rows.
        interleaved: In the stacks of the checkpoint rows of gate and up take turns, gate first, instead of
            following each other; `prepare` puts them one behind the other.
        alpha: Of silu with a gate: gate * sigmoid(alpha * gate) * (up + beta); None for the activation's own.
        beta: Of silu with a gate, see `alpha`.
        limit: Of silu with a gate: gate is at most limit, up within -limit and limit.
        group_size: As for `LinearMethod`, like the next three.
        dtype: Of x and y.
        device: As for `LinearMethod`.
        compute: What is multiplied.
        global_num_experts: Of how many experts `topk_ids` tells, where `expert_map` says which are here;
            None for `num_experts`.
        quantized_input: x is codes already, as an engine sends them from device to device: see below.
        batch_invariant: The bits of a row of y depend on no other row of x nor on where others are routed, as
            for `LinearMethod`.

    Tensors of the checkpoint, with P = 2 halves of gated experts, else 1, and experts first:

    - weight: w13 [E, P I, H], fp4 [E, P I, H/2]; w2 [E, H, I], fp4 [E, H, I/2]; AWQ, two rows in one:
      w13 [E, P I/2, H]; w2 [E, H/2, I];
    - weight_scale, FP8: w13 [E, P]; w2 [E];
    - weight_scale, FP8_PER_CHANNEL_PER_TOKEN: w13 [E, P I]; w2 [E, H];
    - weight_scale, FP8_PB_WO: w13 [E, P ceil(I/128), ceil(H/128)]; w2 [E, ceil(H/128), ceil(I/128)];
    - weight_scale, INT8: w13 [E, P I]; w2 [E, H];
    - weight_scale, NVFP4, MXFP4 and MXFP8 (e8m0), AWQ: w13 [E, P I, H/g]; w2 [E, H, I/g];
    - weight_scale_2, NVFP4: w13 [E, P]; w2 [E];
    - input_scale: w13 [E, P]; w2 [E];
    - pre_quant_scale, AWQ, W8A8_SQ_PER_CHANNEL: w13 [E, H]; w2 [E, I];
    - bias: w13 [E, P I]; w2 [E, H].

    Gate and up keep their own scales. Activation scales are one for all experts of a layer where x is
    quantized with a static scale (FP8, W4A8_NVFP4_FP8, W4A8_MXFP4_FP8, W4A8_AWQ, W8A8_SQ_PER_CHANNEL), the
    largest that there is, and one an expert with `compute="fp4"`; experts without one have the largest of the
    others, with a RuntimeWarning. W4A8_MXFP4_FP8 and W8A8_SQ_PER_CHANNEL, where none has one, quantize by
    token.

    With `quantized_input` x is what `ops.quantize` makes of tokens, and `x_scale` the scales that it returns
    beside the codes. y is of `dtype` as always, and has the bits of the same kernel with tokens that it
    quantizes itself:

    - FP8, W4A8_NVFP4_FP8, W4A8_MXFP4_FP8: "fp8_tensor" with scale=w13_input_scale; x e4m3 [..., H], x_scale
      None;
    - FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and MXFP4 as "fp8": "fp8_token"; x e4m3 [..., H], x_scale float32
      [..., 1];
    - FP8_PB_WO: "fp8_group"; x e4m3 [..., H], x_scale float32 [..., ceil(H/128)];
    - NVFP4 as "fp4": "nvfp4" with scale=w13_input_scale; x fp4 [..., H/2], x_scale e4m3 [..., H/16].

    A row of codes is for all experts of its token, so `prepare` gives those of "fp4" one w13_input_scale, the
    largest. Layers that multiply x as it is ("exact" NVFP4), that decide in the call ("auto") or
    whose experts multiply x by a pre_quant_scale of their own take no codes.

    The attributes are the arguments, resolved. Copying and pickling work.

    Raises:
        UnsupportedQuantization: The algorithm, or its combination with `compute` or `device`, has no kernel.
        ValueError: An unknown algorithm or activation; a size, dtype or option that cannot be right.
    """

    __slots__ = ("hidden_size", "intermediate_size", "num_experts", *_OPTIONS)

    _plan: _C.MoEPlan

    def __init__(
        self,
        quant_algo: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        activation: Activation = "silu",
        gated: bool = True,
        interleaved: bool = False,
        alpha: float | None = None,
        beta: float | None = None,
        limit: float | None = None,
        group_size: int | None = None,
        dtype: Dtype = "bfloat16",
        device: Device = "cpu",
        compute: Compute = "exact",
        global_num_experts: int | None = None,
        quantized_input: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        check_variables(stacklevel=2)
        plan = _C.moe_plan(
            quant_algo,
            num_experts,
            hidden_size,
            intermediate_size,
            top_k,
            activation,
            gated,
            group_size,
            dtype_name(dtype),
            device_name(device),
            compute,
            global_num_experts,
            alpha,
            beta,
            limit,
            interleaved,
            quantized_input=quantized_input,
            batch_invariant=batch_invariant,
        )
        super().__init__(plan, compute)
        self.num_experts = int(num_experts)
        self.hidden_size = int(hidden_size)
        self.intermediate_size = int(intermediate_size)
        self.top_k = int(top_k)
        self.activation: Activation = activation
        self.gated = bool(gated)
        self.interleaved = bool(interleaved)
        self.alpha, self.beta, self.limit = alpha, beta, limit
        self.global_num_experts = int(num_experts if global_num_experts is None else global_num_experts)
        self.quantized_input = bool(quantized_input)
        self.batch_invariant = bool(batch_invariant)
        tuning.take(plan, self, self.device)

    # ------------------------------------------------------------------------------------------- stacks

    def new_params(self) -> ExpertStacks:
        """NumPy stacks for all of `checkpoint_params`, to be filled by `load`; codes are raw bytes."""
        return empty_stacks(self.checkpoint_params, self.gated)

    def adopt(self, tensors: Mapping[str, Any]) -> ExpertStacks:
        """Stacks that a framework allocated, to be filled by `load`; no slot counts as filled.

        Args:
            tensors: By the names of `checkpoint_params`, those that are required at least; of the shapes
                and dtypes there, contiguous, each element with memory of its own.

        Raises:
            ValueError: One is missing, unknown, or of another shape.
            TypeError: One is of another dtype.
            BufferError: One cannot be written, or experts, rows or two tensors share memory.
        """
        return adopt_stacks(self.checkpoint_params, self.gated, tensors)

    def load(self, params: ExpertStacks, name: str, expert: int, tensor: Any) -> None:
        """Copies one tensor of a checkpoint to its slot, so that files can be read shard by shard.

        Args:
            params: From `new_params` or `adopt`.
            name: What the checkpoint calls it below the expert: "gate_proj.weight", "w3.weight_scale_2",
                "down_proj.input_scale", "up_proj.bias"; "gate_up_proj.weight" for both halves at once.
            expert: Its number among those that are here.
            tensor: Of any framework, on the host, in the dtype of the slot, codes perhaps as raw uint8; a
                scale is of any float of 16 bits or more, may be a number and have any rank. Scales of
                FP8_PB_WO may be powers of two, as float8_e8m0fnu or its bytes.

        Raises:
            ValueError: There is no such slot, the tensor has another shape, or gate and up have unequal
                factors of their one input (`pre_quant_scale`), whichever of the two came first.
            TypeError: `params` are no stacks of these two functions, or a tensor of another dtype.
        """
        if not isinstance(params, ExpertStacks):
            raise TypeError(f"params: expected what new_params() or adopt() returned, got {type(params)}")
        specs = self.checkpoint_params
        fill_slot(params, specs, name, expert, tensor, gated=self.gated, interleaved=self.interleaved)

    def prepare(self, params: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Turns the stacks of a checkpoint into prepared ones.

        Args:
            params: The stacks of `checkpoint_params` by name. Those of `new_params` and `adopt` have to have
                every slot filled, in a mapping of another type, too; an optional stack that was never filled
                counts as absent, and so do input scales of a layer that quantizes in another way.
            out: Prepared tensors of an earlier call to overwrite, as for `LinearMethod.prepare`; a stack
                whose bytes stay as they are may be that of `params` itself.

        Returns:
            A new dict of tensors of the framework of the weights, or `out`: by `prepared_params`, experts
            first and contiguous, so that experts change places as rows do.

        Raises:
            ValueError: A slot was never filled; an activation scale is absent in all experts and needed;
                else as `LinearMethod.prepare`, with the stack and the expert.
            TypeError, BufferError: As there.
        """
        if not isinstance(params, Mapping):
            raise TypeError(f"params: expected a mapping of names to tensors, got {type(params)}")
        stacks = {name: as_tensor(params[name]) for name in params}
        specs = self.checkpoint_params
        filled = {name: slots for name, slots in filled_slots(params).items() if name in specs}
        refuse_unfilled(filled, specs)
        stacks = {name: tensor for name, tensor in stacks.items() if name not in filled or filled[name].any()}
        given = dict(stacks)
        for name in ("w13_input_scale", "w2_input_scale"):
            if stacks.get(name) is not None:  # has to be right also where no kernel uses it
                stacks[name] = self._input_scales(name, stacks[name], filled.get(name))
            by_token = ALGORITHMS[self.quant_algo].by_token and not self.quantized_input
            if name in self.prepared_params and stacks.get(name) is None and not by_token:
                raise ValueError(
                    f"params[{name!r}]: missing in every expert, and {self.quant_algo} with "
                    f"compute={self.compute!r} quantizes activations with it"
                )
        if self.interleaved and (bias := stacks.get("w13_bias")) is not None:
            values = _C.numbers(bias, "w13_bias", self.device, 2 * self.num_experts * self.intermediate_size)
            stacks["w13_bias"] = np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)
        origins = {name: tensor for name, tensor in given.items() if tensor is not stacks[name]}
        return self._plan.prepare(stacks, out, origins)

    def _input_scales(self, name: str, tensor: Any, filled: NDArray[np.bool_] | None) -> Any:
        """The activation scales that kernels use, None where all experts lack one."""
        shape = (self.num_experts, 2) if self.gated and name.startswith("w13") else (self.num_experts,)
        given = _C.numbers(tensor, name, self.device, prod(shape))
        if given.size == 1:
            given = np.full(shape, given.item(), np.float32)
        elif given.shape == shape[:1]:
            given = np.repeat(given, shape[1] if len(shape) > 1 else 1).reshape(shape)
        elif given.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(given.shape)}")
        if filled is not None:
            given[~filled[: self.num_experts].reshape(shape)] = np.nan
        shared = self.compute != "fp4" or (self.quantized_input and name == "w13_input_scale")
        return unify_input_scales(given, name, per_expert=not shared, stacklevel=4)

    def keeps(self, name: str) -> bool:
        """Whether codes or block scales stay as they are; rows that take turns in the checkpoint do not."""
        return super().keeps(name) and not (self.interleaved and name.startswith("w13_"))

    # --------------------------------------------------------------------------------------------- call

    def __call__(
        self,
        x: Tensor,
        params: Mapping[str, Any],
        topk_weights: Any,
        topk_ids: Any,
        expert_map: Any = None,
        apply_router_weight_on_input: bool = False,
        out: Any = None,
        accumulate: bool = False,
        stream: Any = None,
        *,
        x_scale: Any = None,
    ) -> Tensor:
        """Computes the experts of each token and their weighted sum.

        Args:
            x: [..., hidden_size] of `dtype`, or codes with `quantized_input`, any strides.
            params: What `prepare` returned, of this method or one of the same description.
            topk_weights: float32 [..., top_k], beside x like all that follow.
            topk_ids: int32 or int64 [..., top_k]. A slot whose id is negative or no number of an expert
                counts nothing.
            expert_map: int32 [global_num_experts]: the number of each expert among those that are here, -1
                for one that is elsewhere, whose slots count nothing.
            apply_router_weight_on_input: Weights multiply x, which is then rounded to `dtype`, instead of
                outputs; top_k has to be 1, and x no codes.
            out: [..., hidden_size] of `dtype` with contiguous rows; must not share memory with the rest.
            accumulate: Adds to what `out` holds, as to the output of shared experts, in float32.
            stream: CUDA stream; must be None on the CPU.
            x_scale: Of the codes of x, positive and finite, any strides; None where there are none.

        Returns:
            `out`, or a new tensor of x's own framework. Results do not depend on the number of threads; which
            other tokens are in the batch may change last bits.

        Raises:
            ValueError, TypeError, BufferError: An argument does not fit; nothing was written.
            RuntimeError: x or topk_weights ask for a gradient, which this operation does not have.
        """
        return self._plan.run(  # type: ignore[no-any-return]
            x,
            params,
            topk_weights,
            topk_ids,
            expert_map,
            apply_router_weight_on_input,
            out,
            accumulate,
            stream,
            x_scale,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self.quant_algo, self.num_experts, self.hidden_size, self.intermediate_size)
        shared = ("group_size", "dtype", "device", "compute")
        options = {name: getattr(self, name) for name in (*_OPTIONS, *shared)}
        return _make_method, (sizes, options)

    def __repr__(self) -> str:
        return (
            f"MoEMethod({self.quant_algo!r}, {self.num_experts} experts, {self.hidden_size} -> "
            f"{self.intermediate_size} -> {self.hidden_size}, top_k={self.top_k}, "
            f"activation={self.activation!r}, dtype={self.dtype!r}, device={self.device!r}, "
            f"compute={self.compute!r}, backend={self.backend!r})"
        )


def _make_method(sizes: tuple[str, int, int, int], options: Mapping[str, Any]) -> MoEMethod:
    """The maker of copies and pickles."""
    return MoEMethod(*sizes, **options)
