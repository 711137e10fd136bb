"""The experts of each token, from the logits of a router."""

from typing import Any

from moqext import _C
from moqext.ops.spelling import Scoring, Tensor


def route(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring: Scoring,
    renormalize: bool = False,
    num_groups: int = 1,
    topk_groups: int | None = None,
    correction_bias: Any = None,
    routed_scaling_factor: float = 1.0,
    padding: Any = None,
    out: tuple[Tensor, Tensor] | None = None,
    stream: Any = None,
) -> tuple[Tensor, Tensor]:
    """The experts that take each token, and their weights, from the logits of a router.

    A logit x has the score of `scoring`:

    - "softmax": exp(x) / sum of exp over all experts;
    - "topk_softmax": exp(x) / sum of exp over the chosen experts;
    - "sigmoid": 1 / (1 + exp(-x));
    - "sqrtsoftplus": sqrt(log(1 + exp(x))).

    A token's experts are those of the largest logits or, with a correction_bias, of the largest score + bias:
    the best first, of equals the lower index. The weight of each is its score, without the bias; divided by
    their sum with `renormalize` (zeros stay zeros); times routed_scaling_factor. With groups, experts come
    from the topk_groups best of num_groups groups of neighbours: a group counts as its best expert does or,
    with a bias, as the sum of its two best; of equals the lower index.

    Models have these arguments:

    - Mixtral, Qwen3-MoE (norm_topk_prob): scoring="softmax", renormalize=True;
    - Qwen2-MoE, OLMoE: scoring="softmax";
    - DeepSeek-V2: scoring="softmax", num_groups=, topk_groups=, routed_scaling_factor=;
    - gpt-oss: scoring="topk_softmax";
    - Llama-4: scoring="sigmoid", with top_k 1;
    - MiniMax-M2: scoring="sigmoid", renormalize=True, correction_bias=;
    - DeepSeek-V3, Kimi-K2, GLM-4.5, Nemotron-H: as MiniMax-M2, with groups and routed_scaling_factor=;
    - DeepSeek-V4: scoring="sqrtsoftplus", renormalize=True, correction_bias=, routed_scaling_factor=.

    Arithmetic is float32 and laid down operation by operation, exp included, so ids and weights have the bits
    of `moqext.reference.route` on every processor, with any number of threads, and on CUDA devices, where it
    is one kernel; a token's result depends on its own logits alone. Without a bias logits are compared, not
    scores, so that logits that differ are never taken for equals.

    -0 equals +0. A NaN logit (or score + bias) is less than all others, -infinity included: its expert is
    chosen only where there are no others, and has the weight NaN; the other weights are as if it were not
    there. With the softmaxes, +infinity leaves nothing to finite logits, several of them share; where every
    logit is -infinity all are equal.

    Args:
        router_logits: [..., E] of float32, bfloat16 or float16, any strides; a raw uint16 array is bfloat16.
            E is 1 to 1024.
        top_k: experts of a token: 1 to 32, and no more than there are in topk_groups groups.
        scoring: see the list.
        renormalize: divide by the sum of the chosen scores; changes nothing with "topk_softmax".
        num_groups: a divisor of E.
        topk_groups: 1 to num_groups; has to be given where that is not 1.
        correction_bias: [E] of float32, bfloat16 or float16, or None; not with "topk_softmax".
        routed_scaling_factor: positive and finite.
        padding: contiguous bool [...], or None: tokens where it holds have no experts, ids are -1.
        out: contiguous tensors (float32, int32) of the shapes of the results, apart from all others.
        stream: CUDA stream, None for the current one; must be None on the CPU.

    Returns:
        (weights float32 [..., top_k], ids int32 [..., top_k]): `out`, or new tensors of the framework of
        router_logits.

    Raises:
        TypeError: an argument of another kind or dtype.
        ValueError: a number, shape or scoring that is not accepted.
        BufferError: a device that cannot be used, other tensors that are not beside the logits, or an output
            that is read-only or overlaps another tensor.
    """
    return _C.route(
        router_logits,
        top_k,
        scoring,
        renormalize=renormalize,
        num_groups=num_groups,
        topk_groups=topk_groups,
        correction_bias=correction_bias,
        routed_scaling_factor=routed_scaling_factor,
        padding=padding,
        out=out,
        stream=stream,
    )
