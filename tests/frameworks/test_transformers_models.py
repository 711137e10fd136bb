"""Models whose own ways of loading and calling differ from those of the Llama family."""

import pytest

import moqext

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

import moqext_transformers  # noqa: E402, F401
from moqext_torch import QuantLinear  # noqa: E402
from moqext_transformers import quantizer  # noqa: E402

from .test_transformers import error, export  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.arange(3, 11).reshape(2, 4)


def made(rng, build, config):
    """A model of random weights in bfloat16, its ones and zeros of norms and biases moved a little."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = build(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def dequantized(directory, model):
    """The model in float32, its quantized weights those that the file stands for."""
    plain = model.float()
    with moqext.Checkpoint(directory) as checkpoint, torch.no_grad():
        for layer in checkpoint.layers():
            for record in layer.linears():
                weight = torch.from_numpy(checkpoint.dequantize(record))
                plain.get_submodule(record.name).weight.copy_(weight)
    return plain


def warnings_of(monkeypatch):
    """The list that warnings of moqext's quantizer go to."""
    heard = []
    monkeypatch.setattr(quantizer.logger, "warning", heard.append)
    return heard


# ------------------------------------------------------------------ layers that patterns of Transformers name


@torch.no_grad()
def test_layer_46_of_a_longer_glm_is_loaded(rng, tmp_path, monkeypatch):
    """Transformers ignores what it does not know of `model.layers.46`, the MTP layer of shorter models."""
    sizes = SIZES | {"num_hidden_layers": 48, "first_k_dense_replace": 48}
    model = made(rng, transformers.Glm4MoeForCausalLM, transformers.Glm4MoeConfig(**sizes))
    assert any("46" in pattern for pattern in model._keys_to_ignore_on_load_unexpected)
    export(tmp_path, model, "W4A16_NVFP4")
    heard = warnings_of(monkeypatch)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert heard == []
    assert type(loaded.model.layers[46].mlp.down_proj) is QuantLinear
    assert error(loaded(IDS).logits, dequantized(tmp_path, model)(IDS).logits) <= 1e-5 * (4 * 48 + 1)


def test_layers_that_a_model_does_without_are_named(rng, tmp_path, monkeypatch):
    """The MTP layer, in a checkpoint that quantized it too."""
    sizes = SIZES | {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    model = made(rng, transformers.Glm4MoeForCausalLM, transformers.Glm4MoeConfig(**sizes))
    tensors = export(tmp_path, model, "FP8")
    extra = {
        name.replace("layers.0", "layers.46"): tensor.clone()
        for name, tensor in tensors.items()
        if "up_proj" in name
    }
    safetensors.save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    heard = warnings_of(monkeypatch)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(heard) == 1
    assert heard[0].endswith("quantized in the checkpoint: model.layers.46.mlp.up_proj")


def test_a_quantized_head_that_a_base_model_lacks_is_named(rng, tmp_path, monkeypatch):
    model = made(rng, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
    export(tmp_path, model, "FP8", exclude=())
    heard = warnings_of(monkeypatch)
    transformers.AutoModel.from_pretrained(tmp_path)
    assert heard == ["LlamaModel does without layers that are quantized in the checkpoint: lm_head"]


def test_quantized_tensors_that_transformers_would_split_are_refused(rng, tmp_path):
    """HRM stores gate and up in one tensor, which becomes two when it is loaded."""
    model = made(rng, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
    export(tmp_path, model, "FP8")
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    swapped = [WeightConverter("o_proj.weight", "o_proj.weight", [Transpose(0, 1), Transpose(0, 1)])]
    register_checkpoint_conversion_mapping("llama", swapped, overwrite=True)
    try:
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.o_proj\.weight: quantized, and"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)
