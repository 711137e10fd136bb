"""Decoder layers for a Llama of Transformers in which neighbours of linears are fused.

    r = r + d        v = norm(r)              one kernel;
    q, k, v                                   one linear;
    q, k turned by position, k and v cached   one kernel;
    attention                                 torch's;
    o                                         one linear;
    r = r + d        v = norm(r)              one kernel;
    gate, up                                  one linear;
    silu(gate) * up                           one kernel;
    d = down                                  one linear.

A layer hands (r, d) to the next one, which adds them. The kernels are in `benchmarks.llama_triton`;
`TorchNeighbours` does the same in torch, for machines without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class TorchNeighbours:
    """The kernels between linears, in steps rounded as Transformers rounds them."""

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The RMS norm of z = x + more, and z."""
        total = x if more is None else x + more
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(total.dtype), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [..., 2I]."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, places: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Turns q in its place, and writes turned k, and v, to the cache.

        Args:
            qkv: [batch, tokens, heads + 2 * kv_heads, head_dim], contiguous.
            cos: [1, tokens, head_dim], as `sin`.
            sin: of the angles.
            places: integer [tokens]: where the cache gets them, one behind the other.
            keys: [batch, kv_heads, length, head_dim], contiguous, as `values`.
            values: the cache.
        """
        kv_heads = keys.shape[1]
        turned = qkv[:, :, :-kv_heads]
        low, high = turned.chunk(2, -1)
        other = torch.cat((-high, low), -1)
        turned = turned * cos[:, :, None] + other * sin[:, :, None]
        keys.index_copy_(2, places, turned[:, :, -kv_heads:].transpose(1, 2))
        values.index_copy_(2, places, qkv[:, :, -kv_heads:].transpose(1, 2))
        qkv[:, :, : -2 * kv_heads] = turned[:, :, :-kv_heads]


class FusedLayer(nn.Module):
    """A decoder layer in the place of Transformers' own.

    Runs a prompt that fills the cache, or one token at its last place: attention needs no mask then.

    Args:
        layer: Transformers' own layer; its norms are used.
        linears: "qkv", "o", "gate_up" and "down".
        neighbours: `TorchNeighbours`, or another with its functions.
    """

    def __init__(self, layer: Any, linears: dict[str, nn.Module], neighbours: Any) -> None:
        super().__init__()
        self.index = layer.self_attn.layer_idx
        self.head_dim = layer.self_attn.head_dim
        self.input_norm, self.middle_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.linears = nn.ModuleDict(linears)
        self.neighbours = neighbours

    def forward(
        self,
        hidden_states: Tensor | tuple[Tensor, Tensor],
        *,
        position_embeddings: tuple[Tensor, Tensor],
        position_ids: Tensor,
        past_key_values: Any = None,
        cache: Any = None,  # its name from Transformers 5.24 on
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """The two summands of the hidden states [batch, tokens, hidden_size] behind this layer."""
        before, more = hidden_states if isinstance(hidden_states, tuple) else (hidden_states, None)
        x, before = normalize(self.neighbours, self.input_norm, before, more)
        layer = (past_key_values if cache is None else cache).layers[self.index]
        qkv = self.linears["qkv"](x).unflatten(-1, (-1, self.head_dim))
        self.neighbours.rotate(qkv, *position_embeddings, position_ids[0], layer.keys, layer.values)
        queries = qkv[:, :, : -2 * layer.keys.shape[1]].transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            queries, layer.keys, layer.values, is_causal=x.shape[1] > 1, enable_gqa=True
        )
        x, before = normalize(
            self.neighbours, self.middle_norm, before, self.linears["o"](attended.transpose(1, 2).flatten(2))
        )
        return before, self.linears["down"](self.neighbours.silu_and_mul(self.linears["gate_up"](x)))


class FusedNorm(nn.Module):
    """The last norm, of what the last layer handed over."""

    def __init__(self, norm: Any, neighbours: Any) -> None:
        super().__init__()
        self.norm, self.neighbours = norm, neighbours

    def forward(self, hidden_states: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, tokens, hidden_size]."""
        return normalize(self.neighbours, self.norm, *hidden_states)[0]


def normalize(neighbours: Any, norm: Any, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    """`add_norm` with the weight and eps of a norm of Transformers."""
    return neighbours.add_norm(x, more, norm.weight, norm.variance_epsilon)
