"""Models handed to vLLM without any files: a mixture of experts of 30 billion weights, a Llama of 8 billion.

Their sizes are Qwen3-30B-A3B's and Llama 3.1 8B's. Two load formats of vLLM's make the weights on the device:

    moqext_random  normal numbers, quantized and named as ModelOpt does, go through the model's own loader,
                   tensor by tensor. Every engine has the same, however many ranks share it.
    moqext_filled  each rank fills its own parameters with numbers of that kind: seconds instead of a minute,
                   for engines that are only timed.
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
FILLED = "moqext_filled"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
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
"""Sizes for a test of either model."""
MODELS = {"moe": CONFIG, "llama": LLAMA}
MLP = {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
"""Projections of an expert or of a layer without experts, and whose inputs theirs are like."""
ATTENTION = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o"}


def write_config(
    directory: Path, quant_algo: str, tiny: bool = False, layers: int | None = None, model: str = "moe"
) -> None:
    """Writes config.json, all that there is of a checkpoint.

    Args:
        directory: where to.
        quant_algo: "bfloat16", "FP8" or "NVFP4".
        tiny: small sizes, for a test.
        layers: how many there are, where they are not those of the model.
        model: one of `MODELS`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = MODELS[model] | ({name: TINY[name] for name in TINY if name in MODELS[model]} if tiny else {})
    if layers:
        text["num_hidden_layers"] = layers
    if quant_algo != BF16:
        quantization = quantization_config(quant_algo)
        if "num_experts" in text:
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
    hidden, inner, head = config["hidden_size"], config.get("moe_intermediate_size"), config["head_dim"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", 1 + 5 * weights.normal(next(seeds), hidden)
    for name in ("q_norm", "k_norm") if "num_experts" in config else ():
        yield f"{prefix}.self_attn.{name}.weight", 1 + 5 * weights.normal(next(seeds), head)
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    for name, shape in (shapes | {"o_proj": (hidden, queries)}).items():
        stored = _store(weights.normal(next(seeds), *shape), ATTENTION[name], quant_algo)
        yield from ((f"{prefix}.self_attn.{name}.{role}", tensor) for role, tensor in stored.items())
    experts = config.get("num_experts")
    if experts is None:
        inner = config["intermediate_size"]
    else:
        yield f"{prefix}.mlp.gate.weight", weights.normal(next(seeds), experts, hidden)
    for name, like in MLP.items():
        rows, columns = (hidden, inner) if name == "down_proj" else (inner, hidden)
        stored = _store(weights.normal(next(seeds), (experts or 1) * rows, columns), like, quant_algo)
        if experts is None:
            yield from ((f"{prefix}.mlp.{name}.{role}", tensor) for role, tensor in stored.items())
            continue
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


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fills a parameter of vLLM's with numbers of the kind that a checkpoint has for it.

    Args:
        name: the parameter's, in vLLM's model.
        tensor: its values; scales of a cache keep them.
        generator: of the tensor's device.
    """
    role = name.rpartition(".")[2].removeprefix("w13_").removeprefix("w2_")
    if role in ("k_scale", "v_scale", "q_scale", "prob_scale"):
        return
    if tensor.dtype == torch.uint8:
        tensor.random_(0, 256, generator=generator)
    elif tensor.dtype == torch.float8_e4m3fn:
        # codes of a weight, or the scales of its blocks, which are not negative
        middle, spread = (256.0, 64.0) if role == "weight_scale" else (0.0, E4M3_MAX / 6)
        drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        drawn.normal_(middle, spread, generator=generator)
        lowest = 32.0 if role == "weight_scale" else -E4M3_MAX
        tensor.copy_(drawn.clamp_(lowest, E4M3_MAX))
    elif role == "weight_scale":
        tensor.fill_(6 * SPREAD / E4M3_MAX)
    elif role == "weight_scale_2":
        tensor.fill_(SPREAD / (256 * 3))  # codes of 4 bits are some 3 on average, block scales 256
    elif role == "input_scale":
        tensor.fill_(max(INPUT_AMAX.values()) / E4M3_MAX)
    elif role == "weight_global_scale":  # of compressed-tensors, as the next: they divide
        tensor.fill_(256 * 3 / SPREAD)
    elif role == "input_global_scale":
        tensor.fill_(E4M3_MAX * 6 / max(INPUT_AMAX.values()))
    elif "norm" in name:
        tensor.normal_(1.0, 5 * SPREAD, generator=generator)
    else:
        tensor.normal_(0.0, 1.0 if "embed" in name else SPREAD, generator=generator)


def register() -> None:
    """Adds both load formats to vLLM, in this process and those that it forks."""
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

    class FilledLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            for seed, (name, parameter) in enumerate(model.named_parameters()):
                source = torch.Generator(parameter.device).manual_seed(seed)
                fill(name, parameter.data, source)

    register_model_loader(LOAD_FORMAT)(RandomLoader)
    register_model_loader(FILLED)(FilledLoader)
