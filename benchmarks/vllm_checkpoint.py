"""Checkpoints of a Llama of 8 billion weights as ModelOpt writes them, for engines to load.

Weights are the normal numbers of `benchmarks.llama`, quantized on the device, a file for each layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.layers import E4M3_MAX
from benchmarks.llama import BF16, FP8, INPUT_AMAX, REST, ROLES, SPREAD, Weights, make_config, quantize

GROUPS: dict[str, dict[str, Any]] = {
    "FP8": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}},
    "NVFP4": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}},
}


def quantization_config(quant_algo: str) -> dict[str, Any]:
    """The format as config.json says it: every linear but the head."""
    group = {**GROUPS[quant_algo], "targets": ["Linear"]}
    group["input_activations"] = dict(group["weights"])
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quant_algo": quant_algo,
        "producer": {"name": "modelopt", "version": "0.46.0"},
        "quant_method": "modelopt",
    }


def write(directory: Path, quant_algo: str, device: str, tiny: bool = False) -> None:
    """Writes a checkpoint, nothing where one is.

    Args:
        directory: where to.
        quant_algo: "bfloat16", "FP8" or "NVFP4".
        device: where the weights are made.
        tiny: small sizes, for a test.
    """
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config(tiny)
    weights = Weights(device)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    index: dict[str, str] = {}
    for number, layer in enumerate(model.model.layers):
        tensors = layer_tensors(weights, number, layer, quant_algo)
        _save(directory, f"model-{number + 1:05d}.safetensors", tensors, index)
    _save(directory, "model-rest.safetensors", rest_tensors(weights, model), index)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    text = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    if quant_algo != BF16:
        text["quantization_config"] = quantization_config(quant_algo)
    (directory / "config.json").write_text(json.dumps(text))
    if device == "cuda":
        torch.cuda.empty_cache()  # engines of other processes come next


def layer_tensors(weights: Weights, number: int, layer: nn.Module, quant_algo: str) -> dict[str, Tensor]:
    """The tensors that a decoder layer stores."""
    found: dict[str, Tensor] = {}
    for role, names in ROLES.items():
        for name in names:
            weight = weights.linear(number, name, layer.get_submodule(name))
            stored = {"weight": weight} if quant_algo == BF16 else quantize(weight, quant_algo)
            if quant_algo != BF16:
                # what NVFP4's activations divide by; weight-only kernels have no use for it
                levels = E4M3_MAX if quant_algo == FP8 else E4M3_MAX * 6
                stored["input_scale"] = torch.full((), INPUT_AMAX[role] / levels)
            prefix = f"model.layers.{number}.{name}"
            found |= {
                f"{prefix}.{key}": tensor.reshape(()) if tensor.numel() == 1 else tensor
                for key, tensor in stored.items()
            }
    for offset, name in enumerate(("input_layernorm", "post_attention_layernorm")):
        noise = weights.normal(REST + 2 + 2 * number + offset, *layer.get_submodule(name).weight.shape)
        found[f"model.layers.{number}.{name}.weight"] = 1 + 5 * noise
    return found


def rest_tensors(weights: Weights, model: Any) -> dict[str, Tensor]:
    """Embedding, last norm and head."""
    return {
        "model.embed_tokens.weight": weights.normal(REST, *model.model.embed_tokens.weight.shape) / SPREAD,
        "model.norm.weight": 1 + 5 * weights.normal(REST - 1, *model.model.norm.weight.shape),
        "lm_head.weight": weights.normal(REST + 1, *model.lm_head.weight.shape),
    }


def _save(directory: Path, name: str, tensors: dict[str, Tensor], index: dict[str, str]) -> None:
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, directory / name)
    index |= dict.fromkeys(tensors, name)
