"""`torch.ops.moqext.route`: the experts of every token and their weights, as an operation of torch."""

from typing import Any

import torch

from moqext import ops
from moqext.ops.spelling import Scoring
from moqext_torch.op import is_plain_call, register_autograd, wants_gradient

torch.library.define(
    "moqext::route",
    "(Tensor router_logits, int top_k, str scoring, bool renormalize, int num_groups, int? topk_groups, "
    "Tensor? correction_bias, float routed_scaling_factor, Tensor? padding=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring,
    renormalize: bool = False,
    num_groups: int = 1,
    topk_groups: int | None = None,
    correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`moqext.route`: (weights float32 [..., top_k], ids int32 [..., top_k]).

    Raises:
        RuntimeError: a gradient is asked for.
        TypeError, ValueError, BufferError: as there.
    """
    options = (
        *(scoring, renormalize, num_groups, topk_groups, correction_bias, routed_scaling_factor),
        padding,
    )
    watched = torch.compiler.is_compiling() or router_logits.is_meta or not is_plain_call(router_logits)
    if watched or wants_gradient(router_logits, correction_bias):
        return torch.ops.moqext.route(router_logits, top_k, *options)
    return _run(router_logits, top_k, *options)


def _run(
    router_logits: torch.Tensor,
    top_k: int,
    scoring: Scoring,
    renormalize: bool,
    num_groups: int,
    topk_groups: int | None,
    correction_bias: torch.Tensor | None,
    routed_scaling_factor: float,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.route(
        router_logits.detach(),
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        num_groups=num_groups,
        topk_groups=topk_groups,
        correction_bias=None if correction_bias is None else correction_bias.detach(),
        routed_scaling_factor=routed_scaling_factor,
        padding=padding,
    )


torch.library.impl("moqext::route", ("cpu", "cuda"))(_run)


@torch.library.register_fake("moqext::route")
def _shapes(router_logits: torch.Tensor, top_k: int, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*router_logits.shape[:-1], top_k)
    return (
        router_logits.new_empty(shape, dtype=torch.float32),
        router_logits.new_empty(shape, dtype=torch.int32),
    )


register_autograd("route")
