"""Writes tiny genuine ModelOpt exports, on a CPU, next to the bf16 models they were made from.

usage: python make_checkpoints.py OUTDIR [CASE...]     (`make checkpoints` prepares the environment)

OUTDIR/<case>/           what ModelOpt exported: config.json, hf_quant_config.json, *.safetensors[, index]
OUTDIR/<model>_bf16.safetensors   the weights before quantization, under the names of the hub
OUTDIR/versions.json     versions, and per case: model, what is special, and each linear's format as the
                         producer's own quantizers tell it (module names of Transformers, in memory)

Weights are random; each tensor has its own spread, so that no two scales agree by accident. Shapes are
small and odd on purpose: query heads narrower than the hidden size, no multiple of 128.
"""

import copy
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import modelopt
import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.quant_utils import get_quantization_format
from safetensors import safe_open
from safetensors.torch import save_file

VOCABULARY = 32
FP8 = {"num_bits": (4, 3), "axis": None}
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
NVFP4_GROUP_32 = {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (4, 3)}}


# ------------------------------------------------------------------------------------------------ models


def seed_of(name):
    """A seed that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def randomize(model, name):
    """Fills every matrix and bias with normal values whose spread is drawn per tensor."""
    generator = torch.Generator().manual_seed(seed_of(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.06 * 2 ** torch.randn((), generator=generator).item()
            if parameter.dim() >= 2 or key.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.to(torch.bfloat16).eval()


def build(name, kind, config_class=None, **config):
    """A random model of Transformers' class `kind`ForCausalLM with the given configuration."""
    make_config = getattr(transformers, config_class or kind + "Config")
    base = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
    made = make_config(**{**base, "dtype": torch.bfloat16, **config})
    made.architectures = [kind + "ForCausalLM"]
    made.pad_token_id = None
    made._experts_implementation = "eager"
    torch.manual_seed(seed_of(name))  # for what randomize leaves as Transformers draws it
    return randomize(getattr(transformers, kind + "ForCausalLM")(made), name)


def llama(name, hidden, intermediate, layers, heads=6, kv_heads=2, head_dim=16, **config):
    return build(
        name,
        "Llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **config,
    )


def llama_wide():
    """Grouped queries, biases everywhere, every size off the multiples of 128."""
    return llama("llama_wide", 144, 160, 1, attention_bias=True, mlp_bias=True)


def llama_small():
    """One layer, sizes that are multiples of 32."""
    return llama("llama_small", 64, 96, 1, heads=4)


def llama_two():
    """Two layers, sizes that are multiples of 32."""
    return llama("llama_two", 64, 96, 2, heads=4)


def llama_deep():
    """Twelve layers: layer 1 is a prefix of layers 10 and 11."""
    return llama("llama_deep", 32, 32, 12, heads=2, kv_heads=1)


def llama_zero():
    """One linear all zero by itself, one inside a fused group, and zero rows and blocks elsewhere."""
    model = llama("llama_zero", 64, 96, 1, heads=4)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.self_attn.k_proj.weight.zero_()
        layer.mlp.gate_proj.weight[3].zero_()
        layer.mlp.up_proj.weight[:, 16:32].zero_()
    return model


MOE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


def mixtral():
    return build(
        "mixtral", "Mixtral", intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, **MOE
    )


def qwen3moe():
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 48, "head_dim": 16, "decoder_sparse_step": 1}
    return build("qwen3moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, **sizes, **MOE)


def llama4():
    sizes = {"intermediate_size": 48, "intermediate_size_mlp": 96, "head_dim": 16}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    return build("llama4", "Llama4", config_class="Llama4TextConfig", **sizes, **experts, **MOE)


def gpt_oss():
    sizes = {"intermediate_size": 48, "head_dim": 16, "sliding_window": 16, "layer_types": ["full_attention"]}
    return build("gpt_oss", "GptOss", num_local_experts=4, num_experts_per_tok=2, **sizes, **MOE)


def deepseek():
    """Multi-head latent attention, one dense layer and one of experts with a shared expert."""
    attention = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    sizes = {"intermediate_size": 48, "v_head_dim": 16, "topk_group": 1, "first_k_dense_replace": 1}
    base = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return build("deepseek", "DeepseekV3", **attention, **experts, **sizes, **base)


def nemotron_h():
    """Mamba, attention and experts without a gate, one layer each."""
    mamba = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    }
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "n_group": 1}
    sizes = {
        "intermediate_size": 96,
        "head_dim": 16,
        "topk_group": 1,
        "moe_shared_expert_intermediate_size": 48,
    }
    base = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["mamba", "attention", "moe"]
    return build("nemotron_h", "NemotronH", layers_block_type=kinds, **mamba, **experts, **sizes, **base)


# ------------------------------------------------------------------------------------------------- cases


def preset(name, *extra):
    """A preset of ModelOpt with further entries; later ones win."""
    config = copy.deepcopy(getattr(mtq, name))
    config["quant_cfg"] = [*config["quant_cfg"], *copy.deepcopy(list(extra))]
    return config


def cache(name, **constant):
    """The entries of a KV cache preset; with use_constant_amax it leaves no scales in the file."""
    entries = copy.deepcopy(getattr(mtq, name)["quant_cfg"])
    for entry in entries:
        entry["cfg"] = {**entry["cfg"], **constant}
    return entries


def weights(pattern, cfg):
    return {"quantizer_name": f"{pattern}weight_quantizer", "cfg": cfg, "enable": True}


def inputs(pattern, cfg):
    return {"quantizer_name": f"{pattern}input_quantizer", "cfg": cfg, "enable": True}


def both(pattern, cfg):
    return [weights(pattern, cfg), inputs(pattern, cfg)]


def off(pattern):
    return {"quantizer_name": pattern, "enable": False}


NOTHING = [off("*")]


class Case(NamedTuple):
    """One export: the model, ModelOpt's configuration, and what is done besides."""

    model: Callable[[], Any]
    config: dict[str, Any]
    about: str
    calibrated: bool = True
    compressed: bool = False
    shard: str = "10GB"


def mixed(*entries):
    return {"quant_cfg": [*NOTHING, *entries], "algorithm": "max"}


CASES = {
    "fp8_bias_kvfp8": Case(
        llama_wide,
        preset("FP8_DEFAULT_CFG", *cache("FP8_KV_CFG")),
        "biases, grouped queries, FP8 KV with scales",
    ),
    "fp8_pc_pt_bias": Case(llama_wide, preset("FP8_PER_CHANNEL_PER_TOKEN_CFG"), "per row scales, biases"),
    "fp8_pb_wo_unaligned": Case(
        llama_wide, preset("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"), "4-D block scales, no size a multiple of 128"
    ),
    "fp8_pb_real": Case(
        llama_wide,
        preset("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
        "compressed first: 2-D scales",
        compressed=True,
    ),
    "fp8_pb_wo_one_block": Case(
        llama_small, preset("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"), "every weight within one block: 0-d scales"
    ),
    "fp8_uncalibrated": Case(llama_small, preset("FP8_DEFAULT_CFG"), "no input_scale", calibrated=False),
    "fp8_kvcast": Case(
        llama_small,
        preset("FP8_DEFAULT_CFG", *cache("FP8_KV_CFG", use_constant_amax=True)),
        "FP8 KV announced, no KV scales in the file",
    ),
    "fp8_lm_head": Case(
        llama_small, preset("FP8_DEFAULT_CFG", *both("*lm_head*", FP8)), "quantized lm_head, not excluded"
    ),
    "fp8_embedding": Case(
        llama_small, preset("FP8_DEFAULT_CFG", weights("*embed_tokens*", FP8)), "quantized embedding"
    ),
    "fp8_zero": Case(llama_zero, preset("FP8_DEFAULT_CFG"), "all-zero linears"),
    "fp8_excluded": Case(
        llama_deep,
        preset(
            "FP8_DEFAULT_CFG",
            off("*layers.0.*"),
            off("*layers.1.*"),
            off("*layers.3.mlp*"),
            off("*layers.4.self_attn.[qkv]_proj*"),
            off("*layers.10.mlp.gate_proj*"),
            off("*layers.10.mlp.up_proj*"),
        ),
        "layers 0 and 1 excluded, not 10 and 11; parts of 3, 4 and 10",
    ),
    "nvfp4_bias_kvnvfp4": Case(
        llama_wide, preset("NVFP4_DEFAULT_CFG", *cache("NVFP4_KV_CFG")), "biases, grouped queries, NVFP4 KV"
    ),
    "nvfp4_kvaffine": Case(
        llama_small,
        preset("NVFP4_DEFAULT_CFG", *cache("NVFP4_AFFINE_KV_CFG")),
        "NVFP4 KV with k_bias, v_bias",
    ),
    "nvfp4_uncalibrated": Case(llama_small, preset("NVFP4_DEFAULT_CFG"), "no input_scale", calibrated=False),
    "nvfp4_lm_head": Case(
        llama_small, preset("NVFP4_DEFAULT_CFG", *both("*lm_head*", NVFP4)), "quantized lm_head, not excluded"
    ),
    "nvfp4_mlp_only": Case(llama_two, preset("NVFP4_MLP_ONLY_CFG"), "attention excluded by wildcards"),
    "nvfp4_zero": Case(llama_zero, preset("NVFP4_DEFAULT_CFG"), "all-zero linears"),
    "nvfp4_sharded": Case(
        llama_deep,
        preset("NVFP4_DEFAULT_CFG", off("*layers.1.*")),
        "several files and an index",
        shard="12KB",
    ),
    "w4a16_nvfp4": Case(llama_small, preset("W4A16_NVFP4_CFG"), "weight-only"),
    "w4a16_nvfp4_group_32": Case(
        llama_small, mixed(weights("*mlp*", NVFP4_GROUP_32)), "weight-only MLP, groups of 32"
    ),
    "w4a8_nvfp4_fp8": Case(llama_small, preset("W4A8_NVFP4_FP8_CFG"), "groups of 32, FP8 activations"),
    "mxfp8": Case(llama_small, preset("MXFP8_DEFAULT_CFG"), "E8M0 scales"),
    "mxfp4": Case(llama_small, preset("MXFP4_DEFAULT_CFG"), "E8M0 scales, 4 bit"),
    "mixed_fp8_nvfp4": Case(
        llama_two,
        mixed(*both("*layers.0.self_attn*", FP8), *both("*layers.*.mlp*", NVFP4), *cache("FP8_KV_CFG")),
        "FP8 attention in layer 0 alone, NVFP4 MLP, FP8 KV",
    ),
    "mixed_in_qkv": Case(
        llama_two,
        mixed(*both("*q_proj*", FP8), *both("*k_proj*", NVFP4), *both("*mlp*", NVFP4)),
        "query FP8, key NVFP4, value not quantized",
    ),
    "mixed_three": Case(
        llama_two,
        mixed(
            *both("*self_attn*", FP8),
            weights("*layers.0.mlp*", NVFP4),
            weights("*layers.1.mlp*", {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}),
        ),
        "FP8, W4A16_NVFP4 and fp8_pb_wo",
    ),
    "mixtral_fp8": Case(mixtral, preset("FP8_DEFAULT_CFG"), "experts w1, w2, w3"),
    "mixtral_nvfp4": Case(mixtral, preset("NVFP4_DEFAULT_CFG"), "experts w1, w2, w3"),
    "qwen3moe_mixed": Case(
        qwen3moe,
        mixed(*both("*self_attn*", FP8), *both("*mlp.experts*", NVFP4)),
        "FP8 attention, NVFP4 experts",
    ),
    "deepseek_nvfp4": Case(
        deepseek, preset("NVFP4_DEFAULT_CFG", *cache("FP8_KV_CFG")), "latent attention, shared expert, FP8 KV"
    ),
    "nemotron_h_nvfp4": Case(nemotron_h, preset("NVFP4_DEFAULT_CFG"), "name sentinels in the exclusion list"),
    "nemotron_h_mixed": Case(
        nemotron_h,
        mixed(*both("*mixer.experts*", NVFP4), *both("*mixer.in_proj*", FP8), *both("*mixer.out_proj*", FP8)),
        "name sentinels in the layer names",
    ),
    "llama4_fp8": Case(llama4, preset("FP8_DEFAULT_CFG"), "stacked experts"),
    "llama4_nvfp4": Case(llama4, preset("NVFP4_DEFAULT_CFG"), "stacked experts, packed along the input"),
    "gpt_oss_fp8": Case(gpt_oss, preset("FP8_DEFAULT_CFG"), "stacked experts with biases"),
    "gpt_oss_nvfp4": Case(
        gpt_oss, preset("NVFP4_DEFAULT_CFG"), "stacked, interleaved, packed along the input"
    ),
    "gpt_oss_mxfp8": Case(gpt_oss, preset("MXFP8_DEFAULT_CFG"), "stacked, blocks along the output"),
}


# ------------------------------------------------------------------------------------------------ writing


def calibrate(model):
    """Shows the model a few random sequences, the same for every case."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        model(torch.randint(0, VOCABULARY, (2, 12), generator=generator))


def save_original(model, path):
    """Writes the weights under the names save_pretrained gives them, which are the hub's."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder, "model.safetensors"), "pt") as file:
            save_file({key: file.get_tensor(key) for key in file.keys()}, path)  # noqa: SIM118


def formats(model):
    """The producer's own answer: the format of each linear or container of experts with quantized weights."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_quantizer") or name.endswith(".experts"):
            algorithm = get_quantization_format(module)
            if algorithm is not None:
                found[name] = algorithm
    return found


def write(name, case, out):
    """Makes one export, and the bf16 file of its model if it is not there yet."""
    model = case.model()
    original = out / f"{case.model.__name__}_bf16.safetensors"
    if not original.exists():
        save_original(case.model(), original)  # of its own: saving changes the configuration
    shutil.rmtree(out / name, ignore_errors=True)
    with torch.no_grad():
        model = mtq.quantize(model, case.config, calibrate if case.calibrated else None)
        if case.compressed:
            mtq.compress(model)
        layers = formats(model)
        export_hf_checkpoint(model, export_dir=out / name, max_shard_size=case.shard)
    (out / name / "generation_config.json").unlink(missing_ok=True)
    for file in (out / name).iterdir():
        file.chmod(0o644)
    return {"model": case.model.__name__, "about": case.about, "layers": layers}


def main(arguments):
    """Writes all cases anew, or only those named."""
    out = Path(arguments[0])
    named = arguments[1:]
    if not named:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    record = out / "versions.json"
    cases = json.loads(record.read_text())["cases"] if record.exists() else {}
    for name in named or CASES:
        cases[name] = write(name, CASES[name], out)
    versions = {
        "modelopt": modelopt.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": cases,
    }
    record.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
