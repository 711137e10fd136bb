"""Layers that moqext does not run, dequantized on request: logits are those of the converted checkpoint."""

import numpy as np
import pytest

import moqext
from moqext import reference

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

import moqext_transformers  # noqa: E402
from moqext_torch import QuantLinear  # noqa: E402

from .test_transformers import copied, error, random_ids, small  # noqa: E402


def converted(directory, out, build=transformers.AutoModelForCausalLM):
    """The model of the same checkpoint without quantization."""
    with moqext.Checkpoint(directory) as checkpoint:
        checkpoint.convert(out, to="fp32")
    return build.from_pretrained(out, dtype=torch.float32)


def assert_dequantized(rng, directory, out, compute="fp4"):
    """No layer quantized, and bit for bit the logits of the converted checkpoint."""
    model = moqext_transformers.from_pretrained(
        directory, dequantize_unsupported=True, dtype=torch.float32, compute=compute
    )
    assert not [module for module in model.modules() if isinstance(module, QuantLinear)]
    ids = random_ids(rng, model, 2, 7)
    with torch.no_grad():
        assert model(ids).logits.equal(converted(directory, out)(ids).logits)
    return model


def test_linears(rng, data, tmp_path):
    plain_copy(rng, tmp_path / "plain", small("qwen2"))

    def quantize(config, tensors):
        as_weights(config, tensors, ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"])

    directory = copied(tmp_path / "plain", tmp_path / "weights", quantize)
    model = assert_dequantized(rng, directory, tmp_path / "out")
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")


def test_experts_in_stacks_of_alternating_rows(rng, data, tmp_path):
    """gpt-oss: gate and up take turns, transposed, with biases; its other linears run."""
    directory = data / "exports" / "gpt_oss_mxfp8"
    model = moqext_transformers.from_pretrained(directory, dequantize_unsupported=True, dtype=torch.float32)
    assert {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    ids = random_ids(rng, model, 2, 7)
    with torch.no_grad():
        expected = converted(directory, tmp_path / "out")(ids).logits
        assert error(model(ids).logits, expected) <= 1e-5 * (4 * model.config.num_hidden_layers + 1)


def as_weights(config, tensors, modules, algo="W4A16_NVFP4"):
    """Puts codes and scales in the place of linears' and experts' plain weights.

    W4A16_NVFP4 and W8A16 do not run with compute "fp4".
    """
    for module in modules:
        weight = tensors.pop(f"{module}.weight").float()
        for role, value in reference.quantize_weight(weight.numpy(), algo).items():
            scale = role == "weight_scale" and "NVFP4" in algo
            tensor = torch.from_numpy(np.atleast_1d(value) if value.ndim else np.array(value))
            tensors[f"{module}.{role}"] = tensor.view(torch.float8_e4m3fn) if scale else tensor
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algo, "ignore": []}


def add_pairs(rng, tensors, modules):
    """Adds low-rank pairs to NVFP4 weights."""
    for module in modules:
        rows, columns = tensors[f"{module}.weight"].shape[0], 2 * tensors[f"{module}.weight"].shape[1]
        for role, shape in (("lora_a", (4, columns)), ("lora_b", (rows, 4))):
            values = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * 0.1).bfloat16()
            tensors[f"{module}.weight_quantizer._svdquant_{role}"] = values


def plain_copy(rng, directory, config):
    """A model of random weights as Transformers saves it: each expert for itself."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def test_experts_one_by_one(rng, tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    plain_copy(rng, tmp_path / "plain", config)

    def quantize(config, tensors):
        """Experts with low-rank pairs, which are part of the weight, do not run."""
        names = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
        as_weights(config, tensors, names, "NVFP4_SVD")
        add_pairs(rng, tensors, names)

    directory = copied(tmp_path / "plain", tmp_path / "svd", quantize)
    with pytest.raises(moqext.UnsupportedQuantization, match="dequantize_unsupported=True"):
        moqext_transformers.from_pretrained(directory)
    assert_dequantized(rng, directory, tmp_path / "out", "exact")


def test_linears_with_low_rank_pairs_run_and_are_saved(rng, tmp_path):
    plain_copy(rng, tmp_path / "plain", small("qwen2"))

    def quantize(config, tensors):
        names = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
        as_weights(config, tensors, names, "NVFP4_SVD")
        add_pairs(rng, tensors, names)

    directory = copied(tmp_path / "plain", tmp_path / "svd", quantize)
    model = moqext_transformers.from_pretrained(directory, dtype=torch.float32)
    assert len([module for module in model.modules() if isinstance(module, QuantLinear)]) >= 8
    ids = random_ids(rng, model, 2, 7)
    with torch.no_grad():
        logits = model(ids).logits
        expected = converted(directory, tmp_path / "out")(ids).logits
        assert error(logits, expected) <= 1e-5 * (4 * model.config.num_hidden_layers + 1)
        model.save_pretrained(tmp_path / "saved")
        again = moqext_transformers.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert again(ids).logits.equal(logits)
    with moqext.Checkpoint(tmp_path / "saved") as checkpoint:
        assert {layer.quant_algo for layer in checkpoint.layers()} == {"NVFP4_SVD"}
        assert {layer.rank for layer in checkpoint.layers()} == {4}


def test_a_head_of_its_own(rng, tmp_path):
    """lm_head is not tied to the embedding, whatever config.json says."""
    plain_copy(rng, tmp_path / "plain", small("qwen2"))

    def quantize(config, tensors):
        tensors["lm_head.weight"] = torch.from_numpy(rng.standard_normal((96, 64), dtype=np.float32))
        as_weights(config, tensors, ["lm_head", "model.layers.0.mlp.up_proj"])

    directory = copied(tmp_path / "plain", tmp_path / "weights", quantize)
    model = moqext_transformers.from_pretrained(
        directory, dequantize_unsupported=True, dtype=torch.float32, compute="fp4"
    )
    with moqext.Checkpoint(directory) as checkpoint:
        for name in ("lm_head", "model.layers.0.mlp.up_proj"):
            weight = torch.from_numpy(checkpoint.dequantize(name))
            assert model.get_submodule(name).weight.equal(weight)
            assert not model.get_submodule(name).weight.requires_grad
    assert model.get_input_embeddings().weight is not model.lm_head.weight


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_layers_that_run_stay_quantized(rng, data, tmp_path):
    """The option reaches from_pretrained of any class in a configuration, too."""

    def change(config, tensors):
        name = "model.layers.0.mlp.down_proj"
        weight = torch.from_numpy(dequantized[name])
        for role in ("weight_scale", "weight_scale_2", "input_scale"):
            tensors.pop(f"{name}.{role}", None)
        tensors[f"{name}.weight"] = weight
        quantization = config["quantization_config"]
        as_weights(config, tensors, [name], "W8A16")
        config["quantization_config"] = quantization

    source, place = data / "exports" / "nvfp4_bias_kvnvfp4", "model.layers.0.mlp.down_proj"
    with moqext.Checkpoint(source) as checkpoint:
        dequantized = {place: checkpoint.dequantize(place)}
    directory = copied(source, tmp_path / "mixed", change)
    refused = r'down_proj: compute "fp4" is for NVFP4 .*convert DIR OUT --to'
    with pytest.raises(moqext.UnsupportedQuantization, match=refused):
        moqext_transformers.from_pretrained(directory, compute="fp4")
    options = moqext_transformers.ModelOptConfig(dequantize_unsupported=True, compute="fp4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=options
    )
    mlp = model.model.layers[0].mlp
    assert type(mlp.down_proj) is torch.nn.Linear
    with moqext.Checkpoint(directory) as checkpoint:
        assert mlp.down_proj.weight.equal(torch.from_numpy(checkpoint.dequantize(place)))
    plain = moqext_transformers.from_pretrained(source, dtype=torch.float32, compute="fp4")
    plain.model.layers[0].mlp.down_proj = mlp.down_proj
    ids = random_ids(rng, model, 2, 5)
    with torch.no_grad():
        assert error(model(ids).logits, plain(ids).logits) <= 1e-6


def test_values_that_the_dtype_does_not_hold_are_refused(rng, tmp_path):
    def enlarge(config, tensors):
        as_weights(config, tensors, ["model.layers.0.mlp.up_proj"])
        tensors["model.layers.0.mlp.up_proj.weight_scale_2"].fill_(
            30.0
        )  # the largest weight is 2688 times that

    plain_copy(rng, tmp_path / "plain", small("qwen2"))
    directory = copied(tmp_path / "plain", tmp_path / "large", enlarge)
    options = {"dequantize_unsupported": True, "compute": "fp4"}
    moqext_transformers.from_pretrained(directory, **options)
    with pytest.raises(moqext.CheckpointError, match=r"mlp\.up_proj: .*does not fit into torch\.float16"):
        moqext_transformers.from_pretrained(directory, dtype=torch.float16, **options)
