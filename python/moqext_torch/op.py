"""`torch.ops.moqext.linear`: the call of a linear as an operation that torch.compile and torch.export see.

The operation takes the prepared tensors of `LinearMethod.prepare` one by one, because a graph holds tensors
and plain values only, and finds the method again by its description. In eager mode the way through torch's
dispatcher costs more than a small layer does; `QuantLinear` calls the method itself then. With an `out_dtype`
x is codes, as for a method with `quantized_input`.
"""

from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from moqext import LinearMethod
from moqext_torch.dequantized import weight_of

ROLES = ("weight", "weight_scale", "output_scale", "input_scale", "pre_quant_scale", "fold_scale")
"""The prepared tensors of a linear, in the order of the operation's arguments."""
LOW_RANK = ("lora_a", "lora_b")
"""The prepared tensors that only NVFP4_SVD has: the last arguments."""
PAIR = "weight_quantizer._svdquant_"
"""Part of the names that low-rank pairs have in files, before those of the roles."""

NO_GRADIENT = (
    "moqext's experts, norms and activations have no gradient: call them under torch.no_grad() or "
    "torch.inference_mode(), or pass x.detach(); to train adapters beside linears, load the model by "
    "moqext_transformers.from_pretrained(..., fuse=False)"
)
ONLY_BACKWARD = (
    "moqext linears have gradients of x and of their bias, backward and once, and no others; those of "
    "torch.func neither"
)


_transforms = torch._C._functorch.peek_interpreter_stack


def wants_gradient(*args: Any) -> bool:
    """Whether a gradient of a result would be asked for, backward or forward (`torch.func.jvp`)."""
    return _wants_backward(*args) or _wants_forward(*args)


def _tensors(*args: Any) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _wants_backward(*args: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(*args))


def _wants_forward(*args: Any) -> bool:
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(*args)
    )


def register_autograd(
    name: str, function: type[torch.autograd.Function] | None = None, refusal: str = NO_GRADIENT
) -> None:
    """Has an operation refuse gradients that it has not, and tensors without dense memory.

    Args:
        name: of an operation of moqext that is defined.
        function: the operation with its gradient; None where it has none.
        refusal: what an error says.
    """
    overload = getattr(torch.ops.moqext, name).default

    def run(*args: Any) -> Any:
        wants = _wants_backward(*args)
        if _wants_forward(*args) or (wants and (function is None or _transforms() is not None)):
            raise RuntimeError(refusal)
        for argument, given in zip(overload._schema.arguments, args, strict=False):
            if isinstance(given, torch.Tensor) and (given.is_nested or given.layout != torch.strided):
                kind = "nested" if given.is_nested else given.layout
                raise TypeError(f"{argument.name}: expected a dense tensor in memory, got one that is {kind}")
        if function is not None and wants:
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    torch.library.impl(f"moqext::{name}", "Autograd")(run)


torch.library.define(
    "moqext::linear",
    "(Tensor x, Tensor weight, Tensor? weight_scale, Tensor? output_scale, Tensor? input_scale, "
    "Tensor? pre_quant_scale, Tensor? fold_scale, Tensor? bias, str quant_algo, int[] out_partitions, "
    "int? group_size, str compute, bool one_input_scale, ScalarType? out_dtype=None, bool fast_accum=False, "
    "Tensor? lora_a=None, Tensor? lora_b=None, bool batch_invariant=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@cache
def find_method(
    quant_algo: str,
    in_features: int,
    out_partitions: tuple[int, ...],
    group_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
    compute: Any,
    one_input_scale: bool,
    quantized_input: bool = False,
    fast_accum: bool = False,
    rank: int | None = None,
    batch_invariant: bool = False,
) -> LinearMethod:
    """The one method of a description: layers and the operation share it, and what was tuned in it."""
    return LinearMethod(
        quant_algo,
        in_features,
        out_partitions,
        group_size=group_size,
        dtype=dtype,
        device=device,
        compute=compute,
        fast_accum=fast_accum,
        one_input_scale=one_input_scale,
        quantized_input=quantized_input,
        batch_invariant=batch_invariant,
        rank=rank,
    )


def run_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    pre_quant_scale: torch.Tensor | None,
    fold_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    quant_algo: str,
    out_partitions: list[int],
    group_size: int | None,
    compute: str,
    one_input_scale: bool,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Runs the operation on tensors of the CPU or of CUDA."""
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got shape []")
    tensors = (weight, weight_scale, output_scale, input_scale, pre_quant_scale, fold_scale, lora_a, lora_b)
    roles = (*ROLES, *LOW_RANK)
    params = {role: tensor for role, tensor in zip(roles, tensors, strict=True) if tensor is not None}
    partitions = tuple(out_partitions)
    method = find_method(
        quant_algo,
        x.shape[-1],
        partitions,
        group_size,
        out_dtype or x.dtype,
        x.device,
        compute,
        one_input_scale,
        out_dtype is not None,
        fast_accum,
        None if lora_b is None else lora_b.shape[1],
        batch_invariant,
    )
    return method(x.detach() if x.requires_grad else x, params, bias)


torch.library.impl("moqext::linear", ("cpu", "cuda"))(run_linear)


@torch.library.register_fake("moqext::linear")
def _shape(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    out_partitions = rest[len(ROLES) + 1]  # after the other prepared tensors, bias and quant_algo
    out_dtype = rest[len(ROLES) + 5] if len(rest) > len(ROLES) + 5 else None
    return x.new_empty((*x.shape[:-1], sum(out_partitions)), dtype=out_dtype or x.dtype)


# ---- the gradient ----

torch.library.define(
    "moqext::linear_gradient",
    "(Tensor gradient, Tensor weight, Tensor? weight_scale, Tensor? output_scale, Tensor? pre_quant_scale, "
    "Tensor? lora_a, Tensor? lora_b, int in_features, int[] out_partitions, int? group_size) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_WEIGHT = ("weight", "weight_scale", "output_scale", "pre_quant_scale", *LOW_RANK)
"""The prepared tensors that the weight consists of, in the order of that operation's arguments."""


@torch.library.impl("moqext::linear_gradient", ("cpu", "cuda"))
def _run_gradient(gradient: torch.Tensor, *rest: Any) -> torch.Tensor:
    tensors, (in_features, partitions, group_size) = rest[: len(_WEIGHT)], rest[len(_WEIGHT) :]
    params = {role: tensor for role, tensor in zip(_WEIGHT, tensors, strict=True) if tensor is not None}
    shape = (sum(partitions), in_features)
    return gradient @ weight_of(params, shape, partitions, group_size, gradient.dtype)


@torch.library.register_fake("moqext::linear_gradient")
def _gradient_shape(gradient: torch.Tensor, *rest: Any) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], rest[len(_WEIGHT)]))


class _Linear(torch.autograd.Function):
    """The linear with the gradient of x Wᵀ + bias: that x is quantized counts as the identity."""

    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.moqext.linear.default(*args)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        names = [argument.name for argument in torch.ops.moqext.linear.default._schema.arguments]
        given = dict(zip(names, inputs, strict=False))
        x, bias = given["x"], given["bias"]
        ctx.count, ctx.at = len(inputs), names.index("bias")
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.rest = (x.shape[-1], given["out_partitions"], given["group_size"])
        ctx.save_for_backward(*(given.get(role) for role in _WEIGHT))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None] * ctx.count
        if ctx.needs_input_grad[0]:
            found[0] = torch.ops.moqext.linear_gradient(gradient, *ctx.saved_tensors, *ctx.rest)
        if ctx.needs_input_grad[ctx.at]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            found[ctx.at] = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return tuple(found)


register_autograd("linear", _Linear, ONLY_BACKWARD)
register_autograd("linear_gradient", refusal=ONLY_BACKWARD)

_dispatch_modes = torch._C._len_torch_dispatch_stack
_traced = torch._C._get_tracing_state


def is_plain_call(x: torch.Tensor) -> bool:
    """Whether nothing watches operations, so that a call may go around torch's dispatcher.

    Fake, functional, distributed and traced tensors are subclasses; a dispatch mode, a transform of
    torch.func (vmap, jvp), forward differentiation and torch.jit.trace see ordinary ones.
    """
    return (
        (type(x) is torch.Tensor or type(x) is torch.nn.Parameter)
        and not _dispatch_modes()
        and _transforms() is None
        and _traced() is None
        and forward_ad._current_level < 0
    )
