"""A mixture of experts of 30 billion weights, Qwen3-30B-A3B's sizes, handed to vLLM without any files.

Weights are normal numbers, quantized on the device as ModelOpt does and named as it names them: a load format
"moqext_random" of vLLM's gives them to the model's own loader, tensor by tensor. Every engine has the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.layers import E4M3_MAX
from benchmarks.llama import BF16, FP8, INPUT_AMAX, SPREAD, Weights, quantize
from benchmarks.vllm_checkpoint import quantization_config

LOAD_FORMAT = "moqext_random"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
TINY = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
"""Sizes for a test."""
EXPERTS = {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
"""Projections of an expert, and whose inputs theirs are like."""
ATTENTION = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o"}


def write_config(directory: Path, quant_algo: str, tiny: bool = False, layers: int | None = None) -> None:
    """Writes config.json, all that there is of a checkpoint.

    Args:
        directory: where to.
        quant_algo: "bfloat16", "FP8" or "NVFP4".
        tiny: small sizes, for a test.
        layers: how many there are, where they are not those of the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = CONFIG | (TINY if tiny else {})
    if layers:
        text["num_hidden_layers"] = layers
    if quant_algo != BF16:
        quantization = quantization_config(quant_algo)
        quantization["ignore"] = ["lm_head", "model.layers.*.mlp.gate"]
        text["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(text))


def make_tensors(config: dict[str, Any], quant_algo: str, device: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model by name, each made when it is asked for.

    Args:
        config: what config.json says.
        quant_algo: "bfloat16", "FP8" or "NVFP4".
        device: where they are made.
    """
    weights, hidden = Weights(device), config["hidden_size"]
    yield "model.embed_tokens.weight", weights.normal(0, config["vocab_size"], hidden) / SPREAD
    yield "lm_head.weight", weights.normal(1, config["vocab_size"], hidden)
    yield "model.norm.weight", 1 + 5 * weights.normal(2, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(weights, config, layer, quant_algo)


def _layer(
    weights: Weights, config: dict[str, Any], layer: int, quant_algo: str
) -> Iterator[tuple[str, Tensor]]:
    prefix, seeds = f"model.layers.{layer}", iter(range(100 * (layer + 1), 100 * (layer + 2)))
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", 1 + 5 * weights.normal(next(seeds), hidden)
    for name in ("q_norm", "k_norm"):
        yield f"{prefix}.self_attn.{name}.weight", 1 + 5 * weights.normal(next(seeds), head)
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    for name, shape in (shapes | {"o_proj": (hidden, queries)}).items():
        stored = _store(weights.normal(next(seeds), *shape), ATTENTION[name], quant_algo)
        yield from ((f"{prefix}.self_attn.{name}.{role}", tensor) for role, tensor in stored.items())
    experts = config["num_experts"]
    yield f"{prefix}.mlp.gate.weight", weights.normal(next(seeds), experts, hidden)
    for name, like in EXPERTS.items():
        rows, columns = (hidden, inner) if name == "down_proj" else (inner, hidden)
        stored = _store(weights.normal(next(seeds), experts * rows, columns), like, quant_algo)
        for expert in range(experts):
            own = slice(expert * rows, (expert + 1) * rows)
            for role, tensor in stored.items():
                value = tensor[own] if tensor.dim() else tensor
                yield f"{prefix}.mlp.experts.{expert}.{name}.{role}", value


def _store(weight: Tensor, like: str, quant_algo: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint for a weight or a stack of such: one scale of all, block scales by rows."""
    if quant_algo == BF16:
        return {"weight": weight}
    levels = E4M3_MAX if quant_algo == FP8 else E4M3_MAX * 6
    found = quantize(weight, quant_algo) | {"input_scale": torch.full((), INPUT_AMAX[like] / levels)}
    return {role: tensor.reshape(()) if tensor.numel() == 1 else tensor for role, tensor in found.items()}


def register() -> None:
    """Adds the load format to vLLM, in this process."""
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            config = json.loads(Path(model_config.model, "config.json").read_text())
            quant_algo = config.get("quantization_config", {}).get("quant_algo", BF16)
            device = str(next(model.parameters()).device)
            model.load_weights(make_tensors(config, quant_algo, device))

    register_model_loader(LOAD_FORMAT)(RandomLoader)
