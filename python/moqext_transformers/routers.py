"""Routers of mixtures of experts: from the logits on in one kernel, where their text is one that is known."""

from typing import Any

import torch

from moqext_torch import QuantExperts, route
from moqext_torch.texts import digest
from moqext_transformers.fused_class import FUSED_DTYPES, Fused, text_of, turn_into

ROUTERS = {"849827e64e0a": True, "3b47be678984": False}
"""softmax, topk, renormalized where the model says so, rounded to the dtype of x (those of Qwen2-MoE,
Qwen3-MoE and OLMoE); or always renormalized and not rounded (Mixtral)."""

BLOCKS = ("21a27c6fb476", "7b1ca88b5a70", "de8f007fdef6", "87832fef4351")
"""Blocks of these models, which hand to their experts alone what a router chose."""

MOST_EXPERTS, MOST_CHOSEN = 1024, 32


class _Router(Fused):
    """A router whose softmax, choice and division are one kernel."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Logits, the weights of the chosen experts, and their numbers (int32)."""
        wants = torch.is_grad_enabled() and (hidden_states.requires_grad or self.weight.requires_grad)
        if wants or hidden_states.dtype not in FUSED_DTYPES:
            return super().forward(hidden_states)
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        renormalize = getattr(self, "norm_topk_prob", True)
        weights, ids = route(logits, self.top_k, scoring="softmax", renormalize=renormalize)
        return logits, weights.to(logits.dtype) if self.rounds else weights, ids


def fuse_router(block: Any) -> bool | str:
    """Gives the router of a block with moqext's experts another forward; whether it did, or why not."""
    if not isinstance(getattr(block, "experts", None), QuantExperts):
        return False
    router = getattr(block, "gate", None)
    if router is None:
        return f"{type(block).__name__} has no router that moqext knows"
    if isinstance(router, Fused) or "forward" in router.__dict__:
        return False
    known = ROUTERS.get(text_of(router))
    if digest(type(block).forward) not in BLOCKS or known is None:
        return f"{type(router).__name__} in {type(block).__name__} is none that moqext knows"
    if len(router.weight) > MOST_EXPERTS or router.top_k > MOST_CHOSEN:
        return f"{len(router.weight)} experts, {router.top_k} for a token"
    turn_into(router, _Router)
    router.rounds = known
    return True
