"""Models whose experts are called, named or gated in a way of their own, loaded by from_pretrained."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

import moqext
from moqext import reference
from moqext.reader.config.expert_config import TOP_K_NAMES

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

import moqext_transformers  # noqa: E402, F401
from moqext_torch import QuantExperts, QuantMoE  # noqa: E402
from moqext_torch.experts import find_experts  # noqa: E402
from moqext_torch.gates import Gate, find_activation, find_gate  # noqa: E402
from moqext_transformers.naming import Names  # noqa: E402

EXPERTS = 6
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {  # (class, configuration, its settings beside those above)
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": 3,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinkerTextModel",
        "Qwen3OmniMoeTextConfig",
        {"num_experts": EXPERTS, "num_experts_per_tok": 3},
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "q_lora_rank": 32,
            "o_lora_rank": 16,
            "o_groups": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
            "sliding_window": 16,
            "swiglu_limit": 0.1,
        },
    ),
    "hy_v4": (
        "HYV4ForCausalLM",
        "HYV4Config",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 3, "swiglu_limit": 0.1},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 3, "swiglu_limit": 0.1},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            "num_hidden_layers": 4,
            "num_layers": 2,
            "n_routed_experts": EXPERTS,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 48,
            "ffn_hidden_size": 64,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}


def made(name, rng):
    """A model of random weights; skips where this version of Transformers has none."""
    kind, config, settings = MODELS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this version of Transformers has no {kind}")
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = getattr(transformers, kind)(getattr(transformers, config)(**SIZES | settings))
    return model.eval()


def apart(tensors):
    """The tensors of a file, with an entry for each projection of each expert."""
    found = {}
    for name, tensor in tensors.items():
        container, _, role = name.rpartition(".")
        if tensor.dim() != 3 or role not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if role == "gate_up_proj" else ("down_proj",)
        for number, expert in enumerate(tensor[:EXPERTS]):
            for part, rows in zip(names, expert.chunk(len(names)), strict=True):
                found[f"{container}.{number}.{part}.weight"] = rows
    without_weights = re.compile(rf"experts\.[{EXPERTS}-9]\.")  # those of LongCat that are the identity
    return {name: tensor for name, tensor in found.items() if not without_weights.search(name)}


def write(directory, model):
    """A model with its routed experts in NVFP4, as exporters name them."""
    model.save_pretrained(directory)
    tensors = {}
    for name, tensor in apart(safetensors.load_file(directory / "model.safetensors")).items():
        module, _, role = name.rpartition(".")
        if ".experts." not in name or role != "weight":
            tensors[name] = tensor.contiguous()
            continue
        for part, array in reference.quantize_weight(tensor.float().numpy(), "NVFP4").items():
            value = torch.from_numpy(np.array(array))
            tensors[f"{module}.{part}"] = value.view(torch.float8_e4m3fn) if part == "weight_scale" else value
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    quantized = sorted(
        {name.partition(".experts.")[0] + ".experts" for name in tensors if "_scale_2" in name}
    )
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            f"{name}.experts*": {"quant_algo": "NVFP4", "group_size": 16} for name in quantized
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dequantize_experts(model, directory):
    """The model with what its experts are in a checkpoint."""
    with moqext.Checkpoint(directory) as ckpt:
        names = Names(model, ckpt)
        for name, module in model.named_modules():
            if name.endswith(".experts") and hasattr(module, "gate_up_proj"):
                parts = {member.name: ckpt.dequantize(member) for member in ckpt.layer(names(name)).members}
                for part, array in parts.items():
                    number, projection = part.split(".")[-2:]
                    weight = torch.from_numpy(np.array(array))
                    if projection in ("down_proj", "w2"):
                        module.down_proj.data[int(number)] = weight
                    else:
                        half = 0 if projection in ("gate_proj", "w1") else 1
                        module.gate_up_proj.data[int(number)].chunk(2)[half].copy_(weight)
    return model


def outputs(model, ids):
    return model(ids, use_cache=False)[0].double()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_with_experts_of_their_own_kind(rng, tmp_path, name):
    """All keys are taken, and logits are those of the model with dequantized experts, in float32."""
    plain = made(name, rng)
    directory = write(tmp_path / "model", plain)
    model, info = type(plain).from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert any(isinstance(module, QuantExperts) for module in model.modules())
    ids = torch.from_numpy(rng.integers(1, 96, (2, 8)))
    expected = outputs(dequantize_experts(plain, directory), ids)
    assert (outputs(model, ids) - expected).norm() <= 1e-5 * expected.norm()


def test_gates_are_told_by_their_values():
    """A function beside a module of the same, clamps, factors and rows in turns; another gate is none."""

    def gate(function, **settings):
        module = SimpleNamespace(**settings)
        module._apply_gate = lambda rows: function(module, rows)
        return find_gate(module)

    def limited(module, rows):
        first, second = rows.chunk(2, -1)
        first, second = first.clamp(max=module.limit), second.clamp(-module.limit, module.limit)
        return torch.nn.functional.silu(first) * second

    def in_turns(module, rows):
        first, second = rows[..., ::2], rows[..., 1::2]
        return first * torch.sigmoid(first * module.swiglu_alpha) * (second + 1)

    def limited_afterwards(module, rows):
        first, second = rows.chunk(2, -1)
        return torch.nn.functional.silu(first).clamp(max=module.limit) * second

    assert find_activation(torch.nn.functional.silu) == find_activation(torch.nn.SiLU()) == "silu"
    assert find_activation(torch.nn.Mish()) is None
    assert gate(limited, limit=3) == Gate(
        {"activation": "silu", "alpha": 1.0, "beta": 0.0, "limit": 3.0}, interleaved=False
    )
    assert gate(in_turns, swiglu_alpha=1.5) == Gate(
        {"activation": "silu", "alpha": 1.5, "beta": 1.0}, interleaved=True
    )
    assert gate(limited_afterwards, limit=float("inf")) == Gate({"activation": "silu"}, interleaved=False)
    assert gate(limited_afterwards, limit=3.0) is None


def test_initializers_of_models_find_the_stacks(rng):
    """They write nothing there: tensors of the replaced module's shapes, without memory."""
    replaced = torch.nn.Module()
    replaced.gate_up_proj = torch.nn.Parameter(torch.ones(2, 32, 16))
    replaced.register_buffer("down_proj_bias", torch.ones(2, 16))
    experts = QuantExperts(QuantMoE("FP8", 2, 16, 16, top_k=1), replaced)
    torch.nn.init.normal_(experts.gate_up_proj)
    assert (experts.gate_up_proj.shape, experts.gate_up_proj.device.type) == ((2, 32, 16), "meta")
    assert experts.down_proj_bias._is_hf_initialized
    assert all(key.startswith("moe.") for key in experts.state_dict())


@pytest.mark.parametrize("setting", TOP_K_NAMES)
def test_every_name_for_experts_of_a_token_is_read(data, setting):
    """The reader's own, in a model's configuration; a list has one value for each layer."""
    module = torch.nn.Module()
    module.config = SimpleNamespace(**{setting: [1, 2]})
    module.down_proj = torch.nn.Parameter(torch.empty(4, 128, 64))
    module.has_gate, module.act_fn = False, torch.nn.functional.silu
    with moqext.Checkpoint(data / "checkpoints" / "qwen3moe_nvfp4") as ckpt:
        record = next(layer for layer in ckpt.layers() if layer.kind == "moe")
        places, _ = find_experts(ckpt, {record.name: (record.name, module)}, [record])
    assert places[record.name].options["top_k"] == 1
