"""Routing by moqext: one kernel before those of the experts, and none of vLLM's library of experts' kernels.

A method of experts that also routes is "monolithic" in vLLM. Here it is where a layer's routing is one that
`moqext.route` has, and nothing stands between routing and experts: no balancing, which renames experts, no
adapters, no record of who was chosen, no tokens of other ranks.
"""

import logging
from typing import Any, NamedTuple, cast

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context, is_forward_context_available

from moqext.ops.spelling import Scoring
from moqext_torch import route
from moqext_torch.stepping_aside import tell_fusion
from moqext_vllm.settings import runs_ops

logger = logging.getLogger("vllm.moqext")

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
"""Experts of a layer and of a token that `moqext.route` has."""
ORDINARY = {
    "Default",
    "Renormalize",
    "RenormalizeNaive",
    "DeepSeekV3",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
}
"""Names of vLLM for what a layer's attributes say all about; others have functions or tables of their own."""


class Routing(NamedTuple):
    """Arguments of `moqext.route`."""

    top_k: int
    scoring: Scoring
    renormalize: bool
    num_groups: int
    topk_groups: int | None
    correction_bias: torch.Tensor | None
    routed_scaling_factor: float

    def __call__(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [tokens, top_k] and ids of the experts of each token, -1 for tokens that are padding."""
        options = self._asdict()
        bias = self.correction_bias
        options["correction_bias"] = None if bias is None else bias.data
        padding = _find_padding(len(router_logits))
        return route(router_logits, options.pop("top_k"), padding=padding, **options)


def find_routing(layer: Any, moe: Any) -> Routing | None:
    """How moqext routes for a layer, None where vLLM does.

    Args:
        layer: vLLM's experts.
        moe: vLLM's description of them.

    Raises:
        ValueError: MOQEXT_VLLM_OPS says something that nobody knows.
    """
    if not runs_ops():
        return None
    why = _find_unusual(layer, moe)
    if why:
        tell_fusion(logger, "routing and experts", why, getattr(layer, "layer_name", ""))
        return None
    bias, groups = layer.e_score_correction_bias, _count_groups(layer)
    scales = layer.use_grouped_topk or bias is not None  # vLLM's plain router has no use for the factor
    return Routing(
        top_k=layer.top_k,
        scoring=cast(Scoring, layer.scoring_func),
        renormalize=bool(layer.renormalize),
        num_groups=groups,
        topk_groups=layer.topk_group if groups > 1 else None,
        correction_bias=bias,
        routed_scaling_factor=float(layer.routed_scaling_factor) if scales else 1.0,
    )


def _count_groups(layer: Any) -> int:
    groups: int = layer.num_expert_group if layer.use_grouped_topk else 1
    return groups


def _find_unusual(layer: Any, moe: Any) -> str:
    """The reason why moqext does not route for a layer, empty for none."""
    name = getattr(getattr(moe, "routing_method", None), "name", None)
    if name not in ORDINARY:
        return f"the method of routing is {name}"
    if layer.custom_routing_function is not None or getattr(layer, "hash_indices_table", None) is not None:
        return "the model has a function or a table of its own"
    experts, groups = layer.global_num_experts, _count_groups(layer)
    if experts > MOST_EXPERTS or layer.top_k > MOST_CHOSEN:
        return f"{experts} experts, {layer.top_k} for a token"
    if groups > 1 and (experts <= groups or experts % groups or layer.topk_group is None):
        return f"{experts} experts in {groups} groups, of which vLLM makes one"
    return "" if _is_alone(moe) else "balancing, adapters or other ranks come between them"


def _is_alone(moe: Any) -> bool:
    """Whether vLLM does nothing between routing and experts."""
    parallel, config = moe.moe_parallel_config, get_current_vllm_config_or_none()
    records = getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False)
    shares = parallel.enable_eplb or parallel.dp_size > 1 or parallel.pcp_size > 1
    adapts = moe.is_lora_enabled or getattr(moe, "require_decomposed_backend", False)
    return not (records or shares or adapts or parallel.is_sequence_parallel)


def _find_padding(rows: int) -> torch.Tensor | None:
    """Which rows a graph only has because it was captured with as many; one row alone never is."""
    if rows < 2 or not getattr(envs, "VLLM_MOE_SKIP_PADDING", False) or not is_forward_context_available():
        return None
    padding = getattr(get_forward_context(), "is_padding", None)
    return None if padding is None else padding[:rows]
