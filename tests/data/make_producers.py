"""Writes tiny checkpoints of other producers than ModelOpt, on a CPU, with what the producers read in them.

usage: python make_producers.py OUTDIR [CASE...]     (`make producers` prepares the environment)

OUTDIR/<case>/                     config.json, model.safetensors
OUTDIR/<case>.values.safetensors   some weights as the producer itself decompresses them
OUTDIR/versions.json               versions, and per case who wrote it and what is special

The `ct_` cases are written by llm-compressor and decompressed by compressed-tensors. No tool writes those of
`fp8_` and `gpt_oss_` on a CPU: codes and scales are drawn here, in the names and shapes of the published
models, and Transformers' own code reads them.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import compressed_tensors
import llmcompressor
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY = 32
SHOWN = ("q_proj", "down_proj", "gate_up_proj")
"""Linears whose values are written, of the first layer and expert."""


def randomize(model):
    """Fills every matrix with normal values whose spread is drawn per tensor."""
    generator = torch.Generator().manual_seed(41)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                spread = 0.06 * 2 ** torch.randn((), generator=generator).item()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.to(torch.bfloat16).eval()


def llama(hidden=64, intermediate=96):
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
    )
    return randomize(transformers.LlamaForCausalLM(config))


def wide():
    """Sizes that are no multiples of 128."""
    return llama(160, 288)


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
    )
    return randomize(transformers.Qwen3MoeForCausalLM(config))


class Case(NamedTuple):
    """A model, the recipe of llm-compressor, and what is special."""

    model: object
    recipe: dict
    about: str
    calibrated: bool = False


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
HEAD = {"targets": ["Linear"], "ignore": ["lm_head"]}


def group(scheme, *targets):
    """A preset for some targets, as one of several groups."""
    found = compressed_tensors.quantization.preset_name_to_scheme(scheme, list(targets))
    return found.model_dump()


CASES = {
    "ct_nvfp4": Case(
        llama, {**HEAD, "scheme": "NVFP4", "kv_cache_scheme": CACHE}, "input_global_scale, FP8 cache", True
    ),
    "ct_nvfp4a16": Case(llama, {**HEAD, "scheme": "NVFP4A16"}, "no activations"),
    "ct_fp8": Case(llama, {**HEAD, "scheme": "FP8"}, "one scale each for weights and activations", True),
    "ct_fp8_dynamic": Case(llama, {**HEAD, "scheme": "FP8_DYNAMIC"}, "scales of rows, [N, 1]"),
    "ct_fp8_block": Case(wide, {**HEAD, "scheme": "FP8_BLOCK"}, "blocks of 128 x 128, odd sizes"),
    "ct_mxfp4": Case(llama, {**HEAD, "scheme": "MXFP4"}, "powers of two, no global scale"),
    "ct_mxfp8": Case(llama, {**HEAD, "scheme": "MXFP8"}, "powers of two"),
    "ct_mixed": Case(
        llama,
        {
            "config_groups": {
                "attention": group("FP8_DYNAMIC", "re:.*self_attn.*_proj$"),
                "mlp": group("NVFP4A16", "re:.*mlp[.](gate|up)_proj$", "model.layers.0.mlp.down_proj"),
            },
            "ignore": ["lm_head", "re:.*self_attn[.]k_proj"],
        },
        "two groups by patterns and names",
    ),
    "ct_qwen3moe": Case(
        qwen3_moe,
        {"targets": ["Linear"], "ignore": ["lm_head", "re:.*mlp.gate$"], "scheme": "NVFP4A16"},
        "experts one by one",
    ),
}


def calibration():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (4, 24), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})


def compress(case, out):
    """A checkpoint as llm-compressor writes it."""
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    options = {"processor": transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")}
    if case.calibrated:
        options |= {"dataset": calibration(), "num_calibration_samples": 4}
    with tempfile.TemporaryDirectory() as folder:
        case.model().save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        oneshot(model=model, recipe=QuantizationModifier(**case.recipe), **options)
        model.save_pretrained(out, save_compressed=True)
    for file in out.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


def decompress(out):
    """Weights as compressed-tensors has them."""
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors = load_file(out / "model.safetensors")
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    values = {}
    for module in sorted(modules):
        if module.rpartition(".")[2] not in SHOWN:
            continue
        own = {
            name[len(module) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{module}.")
        }
        for fields in config["config_groups"].values():
            style = fields.get("format") or config["format"]
            packed = "weight_packed" in own
            if packed == ("pack" in style):
                scheme = QuantizationScheme.model_validate(fields)
                plain = BaseCompressor.get_value_from_registry(style).decompress(own, scheme)
                values[module] = plain["weight"].contiguous()
                break
    return values


# ------------------------------------------------------------------- formats that nothing writes on a CPU


def plain(model, out, quantization):
    """Saves the configuration of a model with what it says of its quantization, and returns its tensors."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        config["quantization_config"] = quantization
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return load_file(Path(folder, "model.safetensors"))


def with_codes(tensors, generator, suffix, scale_shape):
    """The tensors with codes in e4m3 in place of each linear, and a scale of some shape beside them."""
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        drawn = (torch.randn(weight.shape, generator=generator) * 100).clamp(-448, 448)
        tensors[name] = drawn.to(torch.float8_e4m3fn)
        scale = torch.rand(scale_shape(*weight.shape), generator=generator) * 1e-3 + 1e-4
        tensors[f"{name}{suffix}"] = scale
    return tensors


def fp8_blocks(out):
    """Names and shapes of Qwen3-FP8 and DeepSeek-V3."""
    config = transformers.Qwen3Config(
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
    )
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    tensors = plain(randomize(transformers.Qwen3ForCausalLM(config)), out, quantization)
    generator = torch.Generator().manual_seed(3)
    return with_codes(
        tensors, generator, "_scale_inv", lambda rows, columns: (-(-rows // 128), -(-columns // 128))
    )


def fp8_tensor(out):
    """One scale for a weight, activations scaled when the model runs."""
    tensors = plain(llama(), out, {"quant_method": "fp8", "activation_scheme": "dynamic"})
    return with_codes(tensors, torch.Generator().manual_seed(4), "_scale", lambda *_: ())


def gpt_oss_mxfp4(out):
    """Names and shapes of gpt-oss."""
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        dtype=torch.bfloat16,
    )
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    tensors = plain(randomize(transformers.GptOssForCausalLM(config)), out, quantization)
    generator = torch.Generator().manual_seed(5)
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        experts, columns, rows = tensors.pop(name).shape
        blocks = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
        scales = torch.randint(113, 122, blocks[:3], generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = scales
    return tensors


def read_fp8(out):
    """Weights as Transformers dequantizes them, which takes whole blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = load_file(out / "model.safetensors")
    values = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        if scale is not None and module.endswith("q_proj"):
            grid = scale.reshape(1, 1) if scale.dim() == 0 else scale
            values[module] = Fp8Dequantize(None)._dequantize_one(weight, grid, torch.float32)
    return values


def read_gpt_oss(out):
    """Weights as Transformers unpacks them, [E, K, N]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(out / "model.safetensors")
    return {
        name.removesuffix("_blocks"): convert_moe_packed_tensors(
            blocks, tensors[name.replace("_blocks", "_scales")], dtype=torch.bfloat16
        ).contiguous()
        for name, blocks in tensors.items()
        if name.endswith("_blocks")
    }


DRAWN = {
    "fp8_blocks": (fp8_blocks, read_fp8),
    "fp8_tensor": (fp8_tensor, read_fp8),
    "gpt_oss_mxfp4": (gpt_oss_mxfp4, read_gpt_oss),
}


def main(arguments):
    """Writes all cases anew, or only those named."""
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    record = out / "versions.json"
    cases = json.loads(record.read_text())["cases"] if record.exists() else {}
    for name in arguments[1:] or (*CASES, *DRAWN):
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if name in CASES:
            compress(CASES[name], folder)
            values, about = decompress(folder), CASES[name].about
        else:
            make, read = DRAWN[name]
            save_file(make(folder), folder / "model.safetensors", {"format": "pt"})
            values, about = read(folder), make.__doc__
        save_file(values, out / f"{name}.values.safetensors")
        for file in (*folder.iterdir(), out / f"{name}.values.safetensors"):
            file.chmod(0o644)
        cases[name] = {"about": about, "writer": "llm-compressor" if name in CASES else "this script"}
    versions = {
        "llmcompressor": llmcompressor.__version__,
        "compressed_tensors": compressed_tensors.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": dict(sorted(cases.items())),
    }
    record.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
