"""Models whose own ways of loading and calling differ from those of the Llama family."""

import copy
import json

import numpy as np
import pytest

import moqext
from moqext import reference

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

from transformers.conversion_mapping import register_checkpoint_conversion_mapping  # noqa: E402
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

import moqext_transformers  # noqa: E402
from moqext_torch import QuantLinear  # noqa: E402
from moqext_transformers import quantizer  # noqa: E402

from .test_transformers import error, export  # noqa: E402
from .torch_cases import case_of, filled, random_x  # noqa: E402

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


@torch.no_grad()
def test_a_quantized_head_of_another_task_is_named(rng, tmp_path, monkeypatch):
    model = made(rng, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
    export(tmp_path, model, "FP8", exclude=())
    heard = warnings_of(monkeypatch)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert len(heard) == 1
    assert heard[0].endswith("that are quantized in the checkpoint: lm_head")
    assert torch.isfinite(loaded(IDS).logits).all()


def test_a_quantized_layer_that_the_model_lacks_is_an_error(rng, tmp_path):
    model = made(rng, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
    export(tmp_path, model, "FP8")
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: quantized in the checkpoint, no nn"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.fixture
def conversions():
    """Sets what Transformers does to tensors of Llama while it loads them."""
    yield lambda *changes: register_checkpoint_conversion_mapping("llama", list(changes), overwrite=True)
    register_checkpoint_conversion_mapping("llama", [], overwrite=True)


def test_quantized_tensors_that_transformers_would_split_are_refused(rng, tmp_path, conversions):
    """A transposition of codes would leave their scales where they were."""
    model = made(rng, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
    export(tmp_path, model, "FP8")
    conversions(WeightConverter("o_proj.weight", "o_proj.weight", [Transpose(0, 1)]))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.o_proj\.weight: quantized, and"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_rule_that_renames_weights_alone_takes_their_scales_along(rng, tmp_path, conversions):
    model = made(rng, transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES))
    tensors = export(tmp_path / "a", model, "NVFP4")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS).logits
    renamed = {name.replace("down_proj", "w2"): tensor for name, tensor in tensors.items()}
    safetensors.save_file(renamed, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    conversions(WeightRenaming(r"mlp\.w2\.weight", "mlp.down_proj.weight"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert loaded(IDS).logits.equal(expected)
    loaded.save_pretrained(tmp_path / "b")
    with moqext.Checkpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.tensors.keys() == renamed.keys()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")(IDS).logits.equal(expected)


# ---------------------------------------------------------------------------- embeddings, Conv1D, odd offsets


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("algo", ["NVFP4", "FP8"])
@torch.no_grad()
def test_a_quantized_embedding_is_dequantized(rng, tmp_path, algo, tied):
    """Codes of NVFP4 have half the columns of the table; a head that is tied to it has the same values."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = made(rng, transformers.LlamaForCausalLM, config)
    tensors = export(tmp_path, model, "FP8")
    parts = reference.quantize_weight(tensors.pop("model.embed_tokens.weight").float().numpy(), algo)
    codes = "weight_scale" if algo == "NVFP4" else "weight"
    for role, array in parts.items():
        value = torch.from_numpy(np.array(array))
        tensors[f"model.embed_tokens.{role}"] = value.view(torch.float8_e4m3fn) if role == codes else value
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with moqext.Checkpoint(tmp_path) as checkpoint:
        table = torch.from_numpy(checkpoint.dequantize("model.embed_tokens")).bfloat16()
    assert loaded.model.embed_tokens.weight.equal(table)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.isfinite(loaded(IDS).logits).all()


def export_conv1d(rng, directory, algo):
    """GPT-2 as exporters write it: a Conv1D is a linear there, [out, in]."""
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model = made(rng, transformers.GPT2LMHeadModel, config)
    linears = copy.deepcopy(model)
    for name, module in list(linears.named_modules()):
        if isinstance(module, Conv1D):
            linear = torch.nn.Linear(module.nx, module.nf, dtype=torch.bfloat16)
            linear.weight.data, linear.bias.data = module.weight.T.contiguous(), module.bias.data
            linears.set_submodule(name, linear)
    tensors = export(directory, linears, algo)
    return model, tensors


@torch.no_grad()
def test_conv1d_of_gpt2_becomes_a_linear(rng, tmp_path):
    model, _ = export_conv1d(rng, tmp_path / "a", "W4A16_NVFP4")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert type(loaded.transformer.h[0].attn.c_attn) is QuantLinear
    plain = model.float()
    with moqext.Checkpoint(tmp_path / "a") as checkpoint:
        for layer in checkpoint.layers():
            weight = torch.from_numpy(checkpoint.dequantize(layer))
            plain.get_submodule(layer.name).weight.copy_(weight.T)
    expected = plain(IDS).logits
    assert error(loaded(IDS).logits, expected) <= 1e-5 * 9
    loaded.save_pretrained(tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    assert again(IDS).logits.equal(loaded(IDS).logits)


@torch.no_grad()
def test_conv1d_is_dequantized_where_it_does_not_run(rng, tmp_path):
    export_conv1d(rng, tmp_path, "W4A16_NVFP4")
    loaded = moqext_transformers.from_pretrained(tmp_path, dequantize_unsupported=True, compute="fp4")
    module = loaded.transformer.h[1].mlp.c_fc
    assert isinstance(module, Conv1D)
    with moqext.Checkpoint(tmp_path) as checkpoint:
        weight = torch.from_numpy(checkpoint.dequantize("transformer.h.1.mlp.c_fc"))
        assert module.weight.equal(weight.T.bfloat16())
    square = loaded.transformer.h[1].attn.c_proj
    with moqext.Checkpoint(tmp_path) as checkpoint:
        weight = torch.from_numpy(checkpoint.dequantize("transformer.h.1.attn.c_proj"))
        assert square.weight.equal(weight.T.bfloat16())


def shifted(path):
    """Moves all tensors of a file by one byte, as writers without padding do."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    for tensor in header.values():
        tensor["data_offsets"] = [offset + 1 for offset in tensor["data_offsets"]]
    header["first"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + raw[8 + size :])


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
@torch.no_grad()
def test_tensors_at_odd_offsets_are_copied(rng, tmp_path, algo):
    """Scales, biases and norms, none of which torch or moqext could use where they lie."""
    model = made(rng, transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES))
    export(tmp_path, model, algo)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits
    shifted(tmp_path / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(IDS).logits.equal(expected)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in loaded.parameters())


def test_a_state_dict_at_odd_addresses_is_copied(rng):
    case = case_of(rng, "NVFP4")
    layer = filled(case, bias=torch.ones(40))
    odd = {}
    for role, tensor in layer.state_dict().items():
        room = torch.empty(tensor.nbytes + 1, dtype=torch.uint8)[1:]
        room.copy_(tensor.reshape(-1).view(torch.uint8))
        odd[role] = torch.frombuffer(room.numpy(), dtype=tensor.dtype).reshape(tensor.shape)
    other = filled(case, bias=torch.zeros(40))
    other.load_state_dict(odd, assign=True)
    x = random_x(rng, case, 3)
    assert other(x).equal(layer(x))
