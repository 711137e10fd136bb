"""Shared by the tests of vLLM: genuine checkpoints that its engine runs on a CPU, and made ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import moqext
from moqext import reference
from moqext.algorithms import ALGORITHMS
from tests.expert_files import Tensors, stored, write_checkpoint

DATA = Path(__file__).resolve().parent / "data"
GENERATED = [  # whose heads vLLM's attention on the CPU knows: of 32 columns
    *("llama_fp8_kvfp8", "llama_fp8_pb_wo", "llama_fp8_pc_pt", "llama_nvfp4_kvfp8", "llama_w4a16_nvfp4"),
    *("llama_w4a8_nvfp4_fp8", "llama_int4_awq", "llama_w4a8_awq", "llama_int8_sq"),
    *("qwen3moe_fp8", "qwen3moe_nvfp4"),
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


def in_order(tensors):
    """Wide data types first, as safetensors files have them, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -np.asarray(item[1][1]).itemsize))


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
    return write_checkpoint(directory, in_order(tensors), quantization, **LLAMA, **sizes)


def write_mixed(directory, attention, mlp):
    """A genuine Llama whose attention is of one export and all else of another: both are of one model.

    Args:
        directory: to be made.
        attention: name of the checkpoint that has the linears of attention.
        mlp: of the one that has all others.
    """
    directory.mkdir()
    (directory / "config.json").write_bytes((DATA / "checkpoints" / mlp / "config.json").read_bytes())
    source = DATA / "checkpoints" / mlp / "model.safetensors"
    (directory / "model.safetensors").write_bytes(source.read_bytes())
    with moqext.Checkpoint(DATA / "checkpoints" / attention) as other:
        parts = {
            name: (info.dtype, list(info.shape), other.tensor(name).tobytes())
            for name, info in other.tensors.items()
            if ".self_attn." in name and not name.endswith(("k_scale", "v_scale"))
        }
        algorithms = {".self_attn.": other.config.quant_algo}

    def exchange(tensors):
        whole = {name: about for name, about in tensors.items() if ".self_attn." not in name} | parts
        tensors.clear()  # those of four bytes first, so that all are aligned
        tensors.update(sorted(whole.items(), key=lambda item: item[1][0] != "F32"))

    change(directory, exchange)
    config = json.loads((directory / "config.json").read_text())
    quantization = config["quantization_config"]
    algorithms[".mlp."] = quantization["quant_algo"]
    with moqext.Checkpoint(directory) as checkpoint:
        linears = [
            name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight")
        ]
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": quantization["ignore"],
        "producer": quantization["producer"],
        "quantized_layers": {
            name: {"quant_algo": algorithm}
            for name in linears
            for place, algorithm in algorithms.items()
            if place in name
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


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


def write_deepseek(directory, algo, rng):
    """A DeepSeek-V3 of two small layers, the second with experts.

    Its latent cache is of DeepSeek's own size: vLLM's MLA on the CPU knows no other than 512 + 64 columns.
    """
    hidden, heads, rank, nope, rope, value, latent = 64, 2, 32, 32, 64, 32, 512
    linears = {
        "q_a_proj": (rank, hidden),
        "q_b_proj": (heads * (nope + rope), rank),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    tensors: Tensors = {
        "model.embed_tokens.weight": ("F32", rng.standard_normal((64, hidden), np.float32)),
        "model.norm.weight": ("F32", np.ones(hidden, np.float32)),
        "lm_head.weight": ("F32", rng.standard_normal((64, hidden), np.float32)),
        "model.layers.1.mlp.gate.weight": ("F32", rng.standard_normal((4, hidden), np.float32)),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", rng.random(4, np.float32)),
    }
    shapes = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_a_layernorm": rank, "self_attn.kv_a_layernorm": latent}
        for name, size in norms.items():
            tensors[f"{prefix}.{name}.weight"] = ("F32", np.ones(size, np.float32))
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in linears.items()}
    owners = {"model.layers.0.mlp": 64, "model.layers.1.mlp.shared_experts": 32}
    owners |= {f"model.layers.1.mlp.experts.{expert}": 32 for expert in range(4)}
    for owner, inner in owners.items():
        shapes |= {f"{owner}.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{owner}.down_proj"] = (hidden, inner)
    for name, shape in shapes.items():
        weight = reference.round_to(rng.standard_normal(shape) / np.sqrt(shape[1]), "bfloat16")
        parts = reference.quantize_weight(weight, algo)
        parts["input_scale"] = np.float32(0.0123 if algo == "FP8" else 0.002)
        for role, array in parts.items():
            tensors[f"{name}.{role}"] = stored(role, np.asarray(array), algo)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",  # without it vLLM has no place for e_score_correction_bias
        "scoring_func": "sigmoid",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": rank,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }
    ignore = ["lm_head", "model.layers.1.mlp.gate"]
    quantization = {"quant_algo": algo, "ignore": ignore, "producer": {"name": "modelopt"}}
    return write_checkpoint(directory, in_order(tensors), quantization, **LLAMA | config)


def requantize(directory, source, algo, group_size=None):
    """A genuine checkpoint whose quantized layers are of another format, with all tensors that it may have.

    Args:
        directory: to be made.
        source: name of the checkpoint.
        algo: the format; its factors of x and pairs are in the weights, which stay about what they were.
        group_size: of the format.
    """
    rng, factors = np.random.default_rng(3), {}
    config = json.loads((DATA / "checkpoints" / source / "config.json").read_text())
    facts = ALGORITHMS[algo]
    old = config.pop("quantization_config")
    quantization = {"quant_algo": algo, "ignore": old["ignore"], "producer": old["producer"]}
    quantization |= {} if group_size is None else {"group_size": group_size}
    tensors: Tensors = {}
    with moqext.Checkpoint(DATA / "checkpoints" / source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            layer, _, role = name.rpartition(".")
            is_quantized = f"{layer}.weight_scale" in checkpoint.tensors
            if is_quantized and role == "weight":
                weight = checkpoint.dequantize(layer).astype(np.float64)
                parts: dict[str, Any] = {}
                if facts.pre_quant_scale:
                    columns = weight.shape[1]
                    factor = factors.setdefault(columns, np.exp2(rng.integers(-2, 3, columns)))
                    weight = weight / factor
                    parts["pre_quant_scale"] = reference.encode(factor.astype(np.float32), "bfloat16")
                if facts.low_rank:
                    up, values, down = np.linalg.svd(weight, full_matrices=False)
                    pair = {"lora_a": down[:8], "lora_b": up[:, :8] * values[:8]}
                    weight = weight - pair["lora_b"] @ pair["lora_a"]
                    for part, value in pair.items():
                        name = f"weight_quantizer._svdquant_{part}"
                        parts[name] = reference.encode(value.astype(np.float32), "bfloat16")
                if facts.input_scale and not facts.low_rank:
                    parts["input_scale"] = np.float32(8 / facts.input_max)
                parts |= reference.quantize_weight(weight, algo, group_size=group_size)
                for part, value in parts.items():
                    tensors[f"{layer}.{part}"] = stored(part, np.asarray(value), algo)
            elif not is_quantized and role not in ("k_scale", "v_scale"):
                tensors[name] = (info.dtype, checkpoint.tensor(name))
    return write_checkpoint(directory, in_order(tensors), quantization, **config)
