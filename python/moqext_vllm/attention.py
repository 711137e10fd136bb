"""Heads of q and k in one kernel of moqext: their norms and the rotary embedding, before attention.

vLLM's models call a kernel for each, which know no programmatic launch; in eager mode and in graphs of the
device without torch.compile that is a tenth of a token's time for small models. Nothing in vLLM stands for
the three together, so the forward of a model's attention is replaced where its source is one of those that
are known here, and its own stays where it is not, in what torch.compile makes, and call by call where the
tensors are others.
"""

import hashlib
import inspect
import sys
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from moqext import ops
from moqext_torch.op import is_plain_call
from moqext_vllm.kv_cache import MoqextKVCacheMethod
from moqext_vllm.settings import runs_ops

MODELS = "vllm.model_executor.models"
CLASSES = (
    ("llama", "LlamaAttention"),
    ("mixtral", "MixtralAttention"),
    ("qwen2_moe", "Qwen2MoeAttention"),
    ("qwen3", "Qwen3Attention"),
    ("qwen3_moe", "Qwen3MoeAttention"),
)
KNOWN = {"78be7f1d53541146": False, "d1f8b9a2bd3c61db": True}
"""Fingerprints of a forward, and whether it norms the heads of q and k."""
WIDTHS = (32, 64, 128, 256)
"""Of heads, that moqext has a kernel for."""


def fingerprint(source: str) -> str:
    """What is the same of two functions that differ in comments, blank lines and indentation only."""
    lines = (line.strip() for line in source.splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def take_over() -> None:
    """Replaces the forward of the classes that are imported and known, once."""
    for module, name in CLASSES:
        found = getattr(sys.modules.get(f"{MODELS}.{module}"), name, None)
        if found is None or "moqext_own_forward" in vars(found):
            continue
        own = found.forward
        try:
            has_norms = KNOWN.get(fingerprint(inspect.getsource(own)))
        except (OSError, TypeError):
            continue
        if has_norms is not None:
            found.moqext_own_forward = own
            found.forward = forward_with_norms if has_norms else forward


def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention without norms of heads."""
    return _run(self, positions, hidden_states, None, None)


def forward_with_norms(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention with norms of the heads of q and k."""
    return _run(self, positions, hidden_states, self.q_norm, self.k_norm)


def _run(
    self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, q_norm: Any, k_norm: Any
) -> torch.Tensor:
    if torch.compiler.is_compiling() or not _is_ours(self, q_norm, k_norm):
        result: torch.Tensor = self.moqext_own_forward(positions, hidden_states)
        return result
    qkv, _ = self.qkv_proj(hidden_states)
    sizes = [self.q_size, self.kv_size, self.kv_size]
    rotary = self.rotary_emb
    if _fits(qkv, positions, q_norm):
        ops.turn_heads(
            qkv,
            positions,
            rotary._match_cos_sin_cache_dtype(qkv),
            self.q_size // rotary.head_size,
            self.kv_size // rotary.head_size,
            q_weight=None if q_norm is None else q_norm.weight.data,
            k_weight=None if k_norm is None else k_norm.weight.data,
            eps=0.0 if q_norm is None else q_norm.variance_epsilon,
        )
        q, k, v = qkv.split(sizes, dim=-1)
    else:
        q, k, v = qkv.split(sizes, dim=-1)
        q, k = (
            part if norm is None else norm(part.unflatten(-1, (-1, rotary.head_size))).flatten(-2)
            for part, norm in ((q, q_norm), (k, k_norm))
        )
        q, k = rotary(positions, q, k)
    output: torch.Tensor = self.o_proj(self.attn(q, k, v))[0]
    return output


def _is_ours(attention: Any, q_norm: Any, k_norm: Any) -> bool:
    """Whether the layer is of a model of moqext and has a rotary embedding and norms of the usual kind."""
    known: bool | None = vars(attention).get("moqext_turns")
    if known is None:
        rotary = attention.rotary_emb
        known = (
            runs_ops()
            and isinstance(getattr(attention.attn, "quant_method", None), MoqextKVCacheMethod)
            and isinstance(rotary, RotaryEmbedding)
            and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
            and rotary.is_neox_style
            and rotary.rotary_dim == rotary.head_size
            and rotary.head_size in WIDTHS
            and not (rotary.use_flashinfer or getattr(rotary, "use_aiter", False))
            and _are_usual(q_norm, k_norm, rotary.head_size)
        )
        attention.moqext_turns = known
    return known


def _are_usual(q_norm: Any, k_norm: Any, width: int) -> bool:
    """Whether there are no norms, or two that differ in their weights only."""
    if q_norm is None or k_norm is None:
        return q_norm is k_norm
    return q_norm.variance_epsilon == k_norm.variance_epsilon and all(
        isinstance(norm, RMSNorm)
        and norm.has_weight
        and norm.variance_size_override is None
        and norm.hidden_size == width
        for norm in (q_norm, k_norm)
    )


def _fits(qkv: torch.Tensor, positions: torch.Tensor, q_norm: Any) -> bool:
    """Whether moqext has a call: what nobody watches, on CUDA, with one position for each row."""
    return (
        qkv.is_cuda
        and is_plain_call(qkv)
        and qkv.dim() == 2
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and (q_norm is None or q_norm.weight.dtype == qkv.dtype)
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and positions.is_contiguous()
    )
