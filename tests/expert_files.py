"""Checkpoints of experts in every stored form, written from stacks: what a reader of them has to undo."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moqext import reference

Tensors = dict[str, tuple[str, np.ndarray]]
"""Name -> safetensors data type and what carries it."""

CONTAINER = "model.layers.0.mlp.experts"

SINGLE = {
    "gate_proj": {"gate": "gate_proj", "up": "up_proj", "w2": "down_proj"},
    "w1": {"gate": "w1", "up": "w3", "w2": "w2"},
    "gate": {"gate": "gate", "up": "up", "w2": "down"},
}
"""How families name the projections of experts that are stored one by one."""

CODES = ("weight",)


def write_checkpoint(
    directory: Path,
    tensors: Tensors,
    quantization: Any,
    metadata: dict[str, str] | None = None,
    **config: Any,
) -> Path:
    """A directory of one file of those tensors, with metadata in its header, and a config.json."""
    directory.mkdir(exist_ok=True)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    content = bytearray()
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        content += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format asks for, so that tensors are aligned
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(content))
    quantization = {"quant_algo": quantization} if isinstance(quantization, str) else quantization
    document = {"quantization_config": {"quant_method": "modelopt", **quantization}, **config}
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def stored(role: str, value: np.ndarray, algo: str) -> tuple[str, np.ndarray]:
    """A tensor as exporters write it: factors and biases as bfloat16, if that is what they came as."""
    if role == "weight":
        codes = "I8" if value.dtype == np.int8 else "F8_E4M3"
        return ("U8" if "FP4" in algo or "AWQ" in algo else codes), value
    if value.dtype == np.uint16:
        return "BF16", value
    small = "U8" if "MXFP4" in algo else "F8_E4M3"
    return (small if value.dtype == np.uint8 else "F32"), np.asarray(value, value.dtype)


def halves(stacks: dict[str, np.ndarray], gated: bool) -> dict[str, dict[str, np.ndarray]]:
    """Stacks of gate and up that follow each other as "gate", "up" and "w2" apart, by role."""
    parts: dict[str, dict[str, np.ndarray]] = {"gate": {}, "up": {}, "w2": {}}
    for name, stack in stacks.items():
        weight, _, role = name.partition("_")
        if weight == "w2":
            parts["w2"][role] = stack
        elif role == "pre_quant_scale" or not gated:
            parts["gate"][role] = parts["up"][role] = stack
        elif stack.ndim == 2 and stack.shape[1] == 2:
            parts["gate"][role], parts["up"][role] = stack[:, 0], stack[:, 1]
        else:
            parts["gate"][role], parts["up"][role] = np.split(stack, 2, axis=1)
    return parts if gated else {"up": parts["up"], "w2": parts["w2"]}


def single_experts(
    stacks: dict[str, np.ndarray], algo: str, *, gated: bool = True, names: str = "gate_proj"
) -> Tensors:
    """Experts one by one; a scale that is NaN is left out, FP8_PB_WO's scales have the exporter's 4 axes."""
    tensors: Tensors = {}
    for part, roles in halves(stacks, gated).items():
        for role, stack in roles.items():
            for expert, value in enumerate(stack):
                if role == "input_scale" and np.isnan(value):
                    continue
                if algo == "FP8_PB_WO" and role == "weight_scale":
                    value = value.reshape(()) if value.size == 1 else value[:, None, :, None]
                name = f"{CONTAINER}.{expert}.{SINGLE[names][part]}.{role}"
                tensors[name] = stored(role, np.asarray(value), algo)
    return tensors


def dotted_experts(
    stacks: dict[str, np.ndarray], algo: str, container: str = "model.layers.3.moe"
) -> Tensors:
    """Stacks of gate, up and down apart, named as linears (Step-3.5)."""
    names = SINGLE["gate_proj"]
    return {
        f"{container}.{names[part]}.{role}": stored(role, stack, algo)
        for part, roles in halves(stacks, True).items()
        for role, stack in roles.items()
    }


def stacked_experts(stacks: dict[str, np.ndarray], algo: str, *, transposed: bool = True) -> Tensors:
    """gate_up_proj and down_proj with underscores; [experts, in, out] where transposed."""
    tensors: Tensors = {}
    for name, stack in stacks.items():
        weight, _, role = name.partition("_")
        projection = {"w13": "gate_up_proj", "w2": "down_proj"}[weight]
        matrix = role == "weight" or (role == "weight_scale" and stack.ndim == 3)
        value = stack.swapaxes(1, 2) if transposed and matrix else stack
        suffix = "" if role == "weight" else f"_{role}"
        tensors[f"{CONTAINER}.{projection}{suffix}"] = stored(role, value, algo)
    return tensors


def expert_weights(
    stacks: dict[str, np.ndarray], algo: str, gated: bool, group_size: int | None, interleaved: bool = False
) -> dict[str, np.ndarray]:
    """The weights that stacks mean, float32 [E, rows, columns] by "gate", "up" and "w2", by the reference."""
    if interleaved:
        stacks = {name: follow(stack) if name.startswith("w13") else stack for name, stack in stacks.items()}
    found = {}
    for part, roles in halves(stacks, gated).items():
        each = []
        for expert in range(len(stacks["w2_weight"])):
            params = {
                role: np.asarray(roles[role][expert])
                for role in ("weight", "weight_scale", "weight_scale_2")
                if role in roles
            }
            each.append(reference.dequantize(params, algo, group_size=group_size))
        found[part] = np.stack(each)
    return found


def follow(stack: np.ndarray) -> np.ndarray:
    """Rows that take turns as halves that follow each other; [E, 2] are halves already."""
    if stack.ndim < 2 or (stack.ndim == 2 and stack.shape[1] == 2):
        return stack
    return np.concatenate([stack[:, 0::2], stack[:, 1::2]], axis=1)
