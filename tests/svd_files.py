"""A checkpoint of NVFP4_SVD, which is read and does not run: one linear with its low-rank pair."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moqext import reference

LAYER = "model.layers.0.mlp.up_proj"


def write_svd(directory: Path, rng: Any, rows: int = 64, columns: int = 128) -> Path:
    """Writes config.json and model.safetensors, and returns the directory."""
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    params = reference.quantize_weight(weight, "NVFP4_SVD")
    dtypes = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}
    tensors = {f"{LAYER}.{role}": (dtypes[role], np.asarray(value)) for role, value in params.items()}
    for role, shape in (("lora_a", (4, columns)), ("lora_b", (rows, 4))):
        values = rng.standard_normal(shape).astype(np.float32)
        tensors[f"{LAYER}.weight_quantizer._svdquant_{role}"] = ("F32", values)
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
