"""`torch.ops.moqext.turn_heads`: heads of q and k made ready for attention in their place."""

from typing import Any

import torch

from moqext import ops
from moqext_torch.op import is_plain_call

torch.library.define(
    "moqext::turn_heads",
    "(Tensor(a!) x, Tensor positions, Tensor table, int q_heads, int k_heads, Tensor? q_weight, "
    "Tensor? k_weight, float eps) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def turn_heads(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q_heads: int,
    k_heads: int,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    **cache: torch.Tensor,
) -> None:
    """`moqext.ops.turn_heads`; as an operation it has no cache, and runs on the CPU as well.

    Raises:
        TypeError, ValueError, BufferError: as there.
    """
    if not cache and (torch.compiler.is_compiling() or not is_plain_call(x)):
        torch.ops.moqext.turn_heads(x, positions, table, q_heads, k_heads, q_weight, k_weight, eps)
        return
    weights: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight}
    ops.turn_heads(x, positions, table, q_heads, k_heads, **weights, eps=eps, **cache)


@torch.library.impl("moqext::turn_heads", "cuda")
def _run(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q_heads: int,
    k_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    ops.turn_heads(x, positions, table, q_heads, k_heads, q_weight=q_weight, k_weight=k_weight, eps=eps)


@torch.library.impl("moqext::turn_heads", "cpu")
def _run_in_steps(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q_heads: int,
    k_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    width = table.shape[1]
    cos, sin = (part.repeat(1, 2)[None] for part in table[positions].split(width // 2, -1))
    begin = 0
    for count, weight in ((q_heads, q_weight), (k_heads, k_weight)):
        part = x[:, begin : begin + count * width].view(1, len(x), count, width)
        value = part if weight is None else ops.rms_norm(part, weight, eps)
        part.copy_(ops.rotary_embedding(value, cos, sin))
        begin += count * width


@torch.library.register_fake("moqext::turn_heads")
def _nothing(*args: Any) -> None:
    pass
