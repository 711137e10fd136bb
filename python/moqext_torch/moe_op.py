"""`torch.ops.moqext.moe`: the call of a layer of experts as an operation of torch.

It takes the prepared tensors of `MoEMethod.prepare` one by one, and finds the method again by its
description; see `moqext_torch.op`.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from moqext import MoEMethod
from moqext_torch.op import register_autograd

_KINDS = ("weight_scale", "output_scale", "fold_scale", "input_scale", "pre_quant_scale", "bias")
CODES = ("w13_weight", "w2_weight")
ROLES = (*CODES, *(f"{stack}_{kind}" for stack in ("w13", "w2") for kind in _KINDS))
"""Every prepared tensor that experts may have, in the order of the operation's arguments."""


class Description(NamedTuple):
    """The arguments of `MoEMethod` that a graph carries; dtype and device are those of x."""

    quant_algo: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: str
    gated: bool
    interleaved: bool
    alpha: float | None
    beta: float | None
    limit: float | None
    group_size: int | None
    compute: str
    global_num_experts: int | None
    batch_invariant: bool = False


_TYPES = {
    str: "str",
    int: "int",
    bool: "bool",
    float | None: "float?",
    int | None: "int?",
}
_TENSORS = [f"Tensor {role}" if role in CODES else f"Tensor? {role}" for role in ROLES]
_OPTIONS = [f"{_TYPES[kind]} {name}" for name, kind in Description.__annotations__.items()]

torch.library.define(
    "moqext::moe",
    "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, bool apply_router_weight_on_input, "
    f"{', '.join(_TENSORS + _OPTIONS)}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@cache
def find_moe_method(about: Description, dtype: torch.dtype, device: torch.device) -> MoEMethod:
    """The one method of a description: layers and the operation share it, and what was tuned in it."""
    options = about._asdict()
    sizes = [options.pop(name) for name in ("quant_algo", "num_experts", "hidden_size", "intermediate_size")]
    return MoEMethod(*sizes, **options, dtype=dtype, device=device)


@torch.library.impl("moqext::moe", ("cpu", "cuda"))
def _run(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    *rest: Any,
) -> torch.Tensor:
    tensors, about = rest[: len(ROLES)], Description(*rest[len(ROLES) :])
    params = {role: tensor for role, tensor in zip(ROLES, tensors, strict=True) if tensor is not None}
    method = find_moe_method(about, x.dtype, x.device)
    return method(
        x.detach() if x.requires_grad else x,
        params,
        topk_weights.detach() if topk_weights.requires_grad else topk_weights,
        topk_ids,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )


@torch.library.register_fake("moqext::moe")
def _shape(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


register_autograd("moe")
