"""save_pretrained of models with moqext's layers: the configuration says of every tensor what it is."""

import json

import pytest

import moqext

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

import moqext_transformers  # noqa: E402, F401
from moqext_transformers.saving import fitted_config  # noqa: E402

from .test_transformers import export  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE = {"image_size": 28, "patch_size": 14}


def gemma3():
    text = transformers.Gemma3TextConfig(**SIZES)
    vision = transformers.SiglipVisionConfig(**VISION, **SQUARE)
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90
        )
    )


def mistral3():
    text = transformers.MistralConfig(**SIZES)
    vision = transformers.PixtralVisionConfig(**VISION, **SQUARE, head_dim=16)
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=90)
    )


def llava_next():
    text = transformers.LlamaConfig(**SIZES)
    vision = transformers.CLIPVisionConfig(**VISION, **SQUARE, projection_dim=32)
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(text_config=text, vision_config=vision, image_token_index=90)
    )


def internvl():
    text = transformers.Qwen2Config(**SIZES)
    vision = transformers.InternVLVisionConfig(**VISION, image_size=[28, 28], patch_size=[14, 14])
    return transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(text_config=text, vision_config=vision, image_token_id=90)
    )


def save_as_stored(directory, model, algo, exclude, original):
    """Writes a model as exporters do, under the names of its hub or under those that it has in memory."""
    tensors = export(directory, model, algo, exclude)
    if original:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        tensors = revert_weight_conversion(model, tensors)
        names = revert_weight_conversion(model, {f"{name}.weight": torch.zeros(1) for name in exclude})
        config["quantization_config"]["ignore"] = [name.removesuffix(".weight") for name in names]
        path.write_text(json.dumps(config))
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def errors(directory):
    with moqext.Checkpoint(directory) as checkpoint:
        return [str(problem) for problem in checkpoint.problems if problem.severity != "note"]


def assert_saved_and_loaded_again(directory, out, dtype, build):
    """No problem in what is saved, and bit for bit the same logits."""
    model = build.from_pretrained(directory, dtype=dtype)
    model.save_pretrained(out)
    assert not errors(out)
    with moqext.Checkpoint(directory) as before, moqext.Checkpoint(out) as after:
        assert [layer.format for layer in after.layers()] == [layer.format for layer in before.layers()]
        assert not [problem for problem in after.problems if problem.code == "stored_unquantized"]
    again = build.from_pretrained(out, dtype=dtype)
    call = {"input_ids": torch.arange(3, 11).reshape(1, 8)}
    if model.config.is_encoder_decoder:
        call["decoder_input_ids"] = call["input_ids"]
    with torch.no_grad():
        assert again(**call).logits.equal(model(**call).logits)
    return json.loads((out / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("original", [True, False], ids=["names of the hub", "names in memory"])
@pytest.mark.parametrize("make", [gemma3, mistral3, llava_next, internvl])
def test_vision_language_models_are_saved_and_loaded_again(rng, tmp_path, make, original):
    """In float32, as what else is there may be taken for codes."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = make().to(torch.bfloat16)
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "language_model" not in name
    ]
    save_as_stored(tmp_path / "a", model, "W4A16_NVFP4", plain, original)
    assert_saved_and_loaded_again(tmp_path / "a", tmp_path / "b", torch.float32, type(model))


def test_names_of_the_model_are_excluded_too(rng, tmp_path):
    """save_original_format=False keeps them: here the file has `vision_model`, the model `vision_tower`."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = internvl().to(torch.bfloat16)
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "language_model" not in name
    ]
    save_as_stored(tmp_path / "a", model, "W4A16_NVFP4", plain, original=True)
    loaded = type(model).from_pretrained(tmp_path / "a", dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "b", save_original_format=False)
    assert not errors(tmp_path / "b")


def forget(directory):
    """Exporters list what they chose not to quantize, and not what they cannot quantize."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = []
    path.write_text(json.dumps(config))


def test_linears_that_no_list_names_are_excluded_when_saved(rng, tmp_path):
    """Linears of Falcon's own class, which exporters pass over."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = transformers.FalconConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False
    )
    model = transformers.FalconForCausalLM(config).to(torch.bfloat16)
    plain = [name for name, module in model.named_modules() if "self_attention" in name]
    export(tmp_path / "a", model, "FP8", [*plain, "lm_head"])
    forget(tmp_path / "a")
    saved = assert_saved_and_loaded_again(tmp_path / "a", tmp_path / "b", torch.float32, type(model))
    assert {f"transformer.h.{number}.self_attention" for number in (0, 1)} <= set(saved["ignore"])


def test_tables_in_float32_are_excluded_when_saved(rng, tmp_path):
    """BART's `shared`, which is no embedding by its name."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = transformers.BartConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).to(torch.bfloat16)
    tensors = export(tmp_path / "a", model, "W4A16_NVFP4")
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"):
        del tensors[name]
    safetensors.save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    forget(tmp_path / "a")
    saved = assert_saved_and_loaded_again(tmp_path / "a", tmp_path / "b", torch.float32, type(model))
    assert "model.shared" in saved["ignore"]


# ------------------------------------------------------------------------------------- the lists themselves

FLOAT, CODES = torch.empty(2, 2, device="meta"), torch.empty(2, 2, dtype=torch.uint8, device="meta")


def fitted(fields, tensors, formats, renamed=None, stored=None):
    return fitted_config({"quant_method": "modelopt"} | fields, stored, [tensors], formats, renamed or {})


def test_an_entry_that_a_quantized_layer_contradicts_is_dropped():
    tensors = {"a.q.weight": CODES, "a.k.weight": FLOAT, "b.v.weight": FLOAT}
    fields = fitted({"quant_algo": "NVFP4", "ignore": ["a", "b"]}, tensors, {"a.q": ("NVFP4", 16)})
    assert fields["ignore"] == ["b", "a.k"]


def test_layers_that_are_called_otherwise_now_are_listed_by_their_names():
    listed = {"old.q": {"quant_algo": "FP8"}, "lost.k": {"quant_algo": "NVFP4", "group_size": 16}}
    tensors = {"new.q.weight": CODES, "new.k.weight": CODES}
    formats = {"new.q": ("FP8", None), "new.k": ("NVFP4", 16)}
    fields = fitted(
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}, tensors, formats, {"old.q": "new.q"}
    )
    assert fields["quantized_layers"]["new.q"] == {"quant_algo": "FP8"}
    assert fields["quantized_layers"]["new.k"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert "old.q" not in fields["quantized_layers"]
    assert "ignore" not in fields


def test_a_configuration_that_needs_no_other_file_is_saved():
    """config.json of old exporters says MIXED_PRECISION, and another file has the layers."""
    whole = moqext.QuantConfig.from_dict(
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.q": {"quant_algo": "FP8"}}}
    )
    tensors, formats = {"a.q.weight": CODES}, {"a.q": ("FP8", None)}
    fields = fitted({"quant_algo": "MIXED_PRECISION"}, tensors, formats, stored=whole)
    assert moqext.QuantConfig.from_dict(fields).layer_algo("a.q") == "FP8"


def test_lists_in_an_inner_object_are_changed_there():
    tensors = {"a.q.weight": CODES, "a.k.weight": FLOAT}
    inner = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    fields = fitted({"quantization": inner}, tensors, {"a.q": ("FP8", None)})
    assert fields["quantization"]["exclude_modules"] == ["lm_head", "a.k"]
    assert inner["exclude_modules"] == ["lm_head"]


def test_numbered_layers_are_not_excluded_as_a_whole():
    """An engine that looks for an entry within a name would exclude layers.10 with layers.1."""
    tensors = {"layers.1.up.weight": FLOAT, "layers.10.up.weight": CODES}
    fields = fitted({"quant_algo": "FP8"}, tensors, {"layers.10.up": ("FP8", None)})
    assert fields["ignore"] == ["layers.1.up"]


def test_a_wide_entry_is_not_made_where_it_would_fit_quantized_layers():
    """`towers` is plain, and `model.towers`, which readers take for the same, is not."""
    tensors = {"towers.a.weight": FLOAT, "model.towers.b.weight": CODES}
    fields = fitted({"quant_algo": "FP8"}, tensors, {"model.towers.b": ("FP8", None)})
    assert fields["ignore"] == ["towers.a"]
