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


def assert_dequantized(rng, directory, out):
    """No layer quantized, and bit for bit the logits of the converted checkpoint."""
    model = moqext_transformers.from_pretrained(directory, dequantize_unsupported=True, dtype=torch.float32)
    assert not [module for module in model.modules() if isinstance(module, QuantLinear)]
    ids = random_ids(rng, model, 2, 7)
    with torch.no_grad():
        assert model(ids).logits.equal(converted(directory, out)(ids).logits)
    return model


def test_linears(rng, data, tmp_path):
    model = assert_dequantized(rng, data / "exports" / "mxfp8", tmp_path / "out")
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")


def test_experts_in_stacks_of_alternating_rows(rng, data, tmp_path):
    """gpt-oss: gate and up take turns, transposed, with biases."""
    assert_dequantized(rng, data / "exports" / "gpt_oss_mxfp8", tmp_path / "out")


@pytest.mark.parametrize("name", ["int4_awq", "int8_sq", "w4a8_awq"])
def test_scales_of_the_input_are_part_of_the_weight(rng, data, tmp_path, name):
    """pre_quant_scale of AWQ and SmoothQuant."""
    assert_dequantized(rng, data / "checkpoints" / f"llama_{name}", tmp_path / "out")


def test_the_low_rank_pair_is_part_of_the_weight(rng, data, tmp_path):
    def decompose(config, tensors):
        config["quantization_config"]["quant_algo"] = "NVFP4_SVD"
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape[0], 2 * tensors[name].shape[1]
            module = name.removesuffix(".weight")
            for role, shape in (("lora_a", (4, columns)), ("lora_b", (rows, 4))):
                values = rng.standard_normal(shape, dtype=np.float32)
                tensors[f"{module}.weight_quantizer._svdquant_{role}"] = torch.from_numpy(values).bfloat16()

    source = data / "exports" / "nvfp4_bias_kvnvfp4"
    directory = copied(source, tmp_path / "svd", decompose)
    (directory / "hf_quant_config.json").unlink()
    with moqext.Checkpoint(directory) as checkpoint:
        assert {layer.quant_algo for layer in checkpoint.layers()} == {"NVFP4_SVD"}
    assert_dequantized(rng, directory, tmp_path / "out")


def as_mxfp8(config, tensors, modules):
    """Puts MXFP8 codes and scales in the place of linears' and experts' plain weights."""
    for module in modules:
        found = reference.quantize_weight(tensors.pop(f"{module}.weight").float().numpy(), "MXFP8")
        tensors[f"{module}.weight"] = torch.from_numpy(found["weight"]).view(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = torch.from_numpy(found["weight_scale"])
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}


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
        names = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
        as_mxfp8(config, tensors, names)

    directory = copied(tmp_path / "plain", tmp_path / "mxfp8", quantize)
    with pytest.raises(moqext.UnsupportedQuantization, match="dequantize_unsupported=True"):
        moqext_transformers.from_pretrained(directory)
    assert_dequantized(rng, directory, tmp_path / "out")


def test_a_head_of_its_own(rng, tmp_path):
    """lm_head is not tied to the embedding, whatever config.json says."""
    plain_copy(rng, tmp_path / "plain", small("qwen2"))

    def quantize(config, tensors):
        tensors["lm_head.weight"] = torch.from_numpy(rng.standard_normal((96, 64), dtype=np.float32))
        as_mxfp8(config, tensors, ["lm_head", "model.layers.0.mlp.up_proj"])

    directory = copied(tmp_path / "plain", tmp_path / "mxfp8", quantize)
    model = moqext_transformers.from_pretrained(directory, dequantize_unsupported=True, dtype=torch.float32)
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
        as_mxfp8(config, tensors, [name])
        config["quantization_config"] = quantization

    source = data / "exports" / "nvfp4_bias_kvnvfp4"
    with moqext.Checkpoint(source) as checkpoint:
        dequantized = {"model.layers.0.mlp.down_proj": checkpoint.dequantize("model.layers.0.mlp.down_proj")}
    directory = copied(source, tmp_path / "mixed", change)
    with pytest.raises(
        moqext.UnsupportedQuantization, match=r"down_proj: MXFP8 has no .*convert DIR OUT --to"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(directory)
    options = moqext_transformers.ModelOptConfig(dequantize_unsupported=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=options
    )
    mlp = model.model.layers[0].mlp
    assert type(mlp.down_proj) is torch.nn.Linear
    assert type(mlp.down_proj) is torch.nn.Linear
    ids = random_ids(rng, model, 2, 5)
    with torch.no_grad():
        expected = converted(directory, tmp_path / "out")(ids).logits
        assert error(model(ids).logits, expected) <= 1e-5 * (4 * model.config.num_hidden_layers + 1)


def test_values_that_the_dtype_does_not_hold_are_refused(rng, data, tmp_path):
    def enlarge(config, tensors):
        tensors["model.layers.0.mlp.up_proj.weight_scale"].fill_(127 + 16)  # E8M0: 2^16

    directory = copied(data / "exports" / "mxfp8", tmp_path / "large", enlarge)
    moqext_transformers.from_pretrained(directory, dequantize_unsupported=True)
    with pytest.raises(moqext.CheckpointError, match=r"mlp\.up_proj: .*does not fit into torch\.float16"):
        moqext_transformers.from_pretrained(directory, dequantize_unsupported=True, dtype=torch.float16)
