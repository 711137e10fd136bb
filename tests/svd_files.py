"""Checkpoints of NVFP4_SVD: linears, or experts one by one, with their low-rank pairs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moqext import reference

LAYER = "model.layers.0.mlp.up_proj"
ATTENTION = "model.layers.0.self_attn"
QKV = [f"{ATTENTION}.{name}_proj" for name in "qkv"]
EXPERTS = "model.layers.0.mlp.experts"


def write_svd(
    directory: Path,
    rng: Any,
    rows: int = 64,
    columns: int = 128,
    layers: Sequence[str] = (LAYER,),
    ranks: Sequence[int] = (4,),
) -> Path:
    """Writes config.json and model.safetensors, and returns the directory.

    All layers have the factors of one input; ranks take turns.
    """
    dtypes = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}
    smooth = reference.encode(np.exp2(rng.uniform(-2, 2, columns)).astype(np.float32), "bfloat16")
    tensors = {}
    for index, layer in enumerate(layers):
        weight = rng.standard_normal((rows, columns)).astype(np.float32)
        params = reference.quantize_weight(weight, "NVFP4_SVD")
        tensors |= {f"{layer}.{role}": (dtypes[role], np.asarray(value)) for role, value in params.items()}
        tensors[f"{layer}.pre_quant_scale"] = ("BF16", smooth)
        rank = ranks[index % len(ranks)]
        for role, shape in (("lora_a", (rank, columns)), ("lora_b", (rows, rank))):
            values = rng.standard_normal(shape).astype(np.float32)
            name = f"{layer}.weight_quantizer._svdquant_{role}"
            tensors[name] = ("BF16", reference.encode(values, "bfloat16"))
    header, begin = {}, 0
    for name, (dtype, value) in tensors.items():
        end = begin + value.nbytes
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    body = b"".join(value.tobytes() for _, value in tensors.values())
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD", "ignore": []}
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return directory


def write_svd_experts(directory: Path, rng: Any) -> Path:
    """Experts whose gate, up and down have as many rows as columns."""
    names = [f"{EXPERTS}.{expert}.{role}_proj" for expert in range(3) for role in ("gate", "up", "down")]
    return write_svd(directory, rng, 64, 64, names)
