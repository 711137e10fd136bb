"""What the tests of vLLM share: genuine checkpoints that its engine runs on a CPU, and made ones."""

import json
from pathlib import Path

import numpy as np

from moqext import reference
from tests.expert_files import Tensors, stored, write_checkpoint

DATA = Path(__file__).resolve().parent / "data"
GENERATED = [  # whose heads vLLM's attention on the CPU knows: of 32 columns
    *("llama_fp8_kvfp8", "llama_fp8_pb_wo", "llama_fp8_pc_pt", "llama_nvfp4_kvfp8", "llama_w4a16_nvfp4"),
    *("llama_w4a8_nvfp4_fp8", "qwen3moe_fp8", "qwen3moe_nvfp4"),
]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_llama(directory, algo, rng, *, hidden, inner, heads, kv_heads, layers=1):
    """A Llama of random weights in one format, heads of 32 columns or more, as ModelOpt writes it."""
    head = hidden // heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (head * kv_heads, hidden),
        "self_attn.v_proj": (head * kv_heads, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: Tensors = {
        "model.embed_tokens.weight": ("F32", rng.standard_normal((64, hidden), np.float32)),
        "model.norm.weight": ("F32", np.ones(hidden, np.float32)),
        "lm_head.weight": ("F32", rng.standard_normal((64, hidden), np.float32)),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ("F32", np.ones(hidden, np.float32))
        for name, shape in shapes.items():
            weight = reference.round_to(rng.standard_normal(shape) / np.sqrt(shape[1]), "bfloat16")
            parts = reference.quantize_weight(weight, algo)
            if algo in ("FP8", "NVFP4"):
                parts["input_scale"] = np.float32(0.01 if algo == "FP8" else 0.002)
            for role, value in parts.items():
                tensors[f"{prefix}.{name}.{role}"] = stored(role, np.asarray(value), algo)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "head_dim": head,
    }
    quantization = {"quant_algo": algo, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    return write_checkpoint(directory, tensors, quantization, **LLAMA, **sizes)


def change(directory, edit):
    """Edits the tensors of a checkpoint of one file: `edit` is given dtypes, shapes and bytes by name."""
    path = Path(directory) / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    meta = header.pop("__metadata__", None)
    tensors = {
        name: (about["dtype"], about["shape"], raw[8 + size :][slice(*about["data_offsets"])])
        for name, about in header.items()
    }
    edit(tensors)
    body, header = b"", {} if meta is None else {"__metadata__": meta}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def multiply(tensors, name, factor):
    """Multiplies a float32 tensor of `change`."""
    dtype, shape, data = tensors[name]
    assert dtype == "F32"
    tensors[name] = (dtype, shape, (np.float32(factor) * np.frombuffer(data, np.float32)).tobytes())
