"""replace_linears: any module, its linears from a checkpoint; nothing changes where the two do not fit."""

import json
import shutil

import numpy as np
import pytest

import moqext

from ..svd_files import LAYER, write_svd

torch = pytest.importorskip("torch", minversion="2.10")

from moqext_torch import QuantLinear, as_torch, replace_linears  # noqa: E402


def put(model, name, module):
    """Places a module under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, torch.nn.Module())
        model = model._modules[part]
    model.add_module(last, module)


class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))


def skeleton(ckpt, tied=False):
    """A model with the modules of a checkpoint, random; the head is the embedding's transpose if tied."""
    model, shapes = torch.nn.Module(), {}
    for layer in ckpt.layers():
        for record in layer.linears():
            shapes[record.name] = record.shape
    for name, info in ckpt.tensors.items():
        if name.endswith(".weight") and name.removesuffix(".weight") not in shapes:
            shapes[name.removesuffix(".weight")] = info.shape
    for name, shape in shapes.items():
        if len(shape) == 1:
            put(model, name, Norm(*shape))
        elif "embed" in name:
            put(model, name, torch.nn.Embedding(*shape))
        else:
            put(model, name, torch.nn.Linear(shape[1], shape[0], bias=f"{name}.bias" in ckpt.tensors))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.to(torch.bfloat16)


def snapshot(model):
    return {name: (type(module), id(module)) for name, module in model.named_modules()}, {
        name: tensor.clone() for name, tensor in model.state_dict().items()
    }


def unchanged(model, before):
    modules, tensors = before
    assert snapshot(model)[0] == modules
    assert all(tensor.equal(tensors[name]) for name, tensor in model.state_dict().items())


@pytest.fixture
def exports(data):
    return data / "exports"


@pytest.mark.parametrize(
    "export",
    ["fp8_bias_kvfp8", "nvfp4_bias_kvnvfp4", "mixed_three", "fp8_excluded", "nvfp4_sharded", "fp8_lm_head"],
)
def test_every_tensor_of_the_checkpoint_is_in_the_model(rng, exports, export):
    with moqext.Checkpoint(exports / export) as ckpt:
        model = skeleton(ckpt)
        assert replace_linears(model, ckpt, load=True) is model
        kv = {name for record in ckpt.kv_scales() for name in record.tensors.values()}
        state = model.state_dict()
        assert state.keys() == ckpt.tensors.keys() - kv
        for name, tensor in state.items():
            assert tensor.equal(as_torch(ckpt.tensor(name))), name
        quantized = {record.name for record in ckpt.layers()}
        modules = dict(model.named_modules())
        assert {name for name, module in modules.items() if isinstance(module, QuantLinear)} == quantized
        for name in quantized:
            layer = ckpt.load(name)
            x = torch.from_numpy(rng.standard_normal((2, layer.in_features), dtype=np.float32)).bfloat16()
            assert modules[name](x).equal(layer(x))


def test_excluded_linears_stay_what_they_are(exports):
    with moqext.Checkpoint(exports / "fp8_excluded") as ckpt:
        model = skeleton(ckpt)
        head = model.lm_head
        before = head.weight.clone()
        replace_linears(model, exports / "fp8_excluded")
    assert model.lm_head is head
    assert head.weight.equal(before)  # load=False
    assert type(model.model.layers._modules["0"].mlp.up_proj) is torch.nn.Linear


def test_tied_heads_stay_tied(exports, tmp_path):
    directory = tmp_path / "tied"
    shutil.copytree(exports / "fp8_bias_kvfp8", directory)
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.save_file(tensors, directory / "model.safetensors")
    with moqext.Checkpoint(exports / "fp8_bias_kvfp8") as ckpt:
        model = skeleton(ckpt, tied=True)
    replace_linears(model, directory, load=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.equal(tensors["model.embed_tokens.weight"])


def test_quantized_embeddings_are_dequantized(exports):
    with moqext.Checkpoint(exports / "fp8_embedding") as ckpt:
        model = skeleton(ckpt)
        replace_linears(model, ckpt)
        table = torch.from_numpy(ckpt.dequantize("model.embed_tokens")).bfloat16()
    assert model.model.embed_tokens.weight.equal(table)


def test_a_table_that_the_model_lacks_is_asked_for_as_one(exports):
    with moqext.Checkpoint(exports / "fp8_embedding") as ckpt:
        model = skeleton(ckpt)
        del model.model.embed_tokens
        with pytest.raises(ValueError, match=r"embed_tokens: quantized .*, no nn\.Embedding in the model"):
            replace_linears(model, ckpt)


def test_arguments_the_wrong_way_round(exports):
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got <class 'str'>"):
        replace_linears(str(exports / "fp8_lm_head"), torch.nn.Linear(8, 8))


def test_convolutions_in_fp8_are_dequantized(rng, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    codes = rng.integers(0, 0x7F, (6, 4, 3, 3), dtype=np.uint8)
    tensors = {
        "conv.weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "conv.bias": torch.arange(6.0).bfloat16(),
    }
    tensors["conv.weight_scale"] = torch.tensor(0.25)
    save_file(tensors, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    model.conv = torch.nn.Conv2d(4, 6, 3, dtype=torch.bfloat16)
    replace_linears(model, tmp_path)
    with moqext.Checkpoint(tmp_path) as ckpt:
        assert model.conv.weight.equal(torch.from_numpy(ckpt.dequantize("conv")).bfloat16())
    assert model.conv.bias.equal(tensors["conv.bias"])
    assert model.conv(torch.ones(1, 4, 3, 3, dtype=torch.bfloat16)).shape == (1, 6, 1, 1)


def test_names_may_differ(exports):
    with moqext.Checkpoint(exports / "nvfp4_mlp_only") as ckpt:
        inner = skeleton(ckpt).model
        replace_linears(inner, ckpt, rename=lambda name: f"model.{name}")
        assert type(inner.layers._modules["0"].mlp.up_proj) is QuantLinear
        one = torch.nn.Linear(*reversed(ckpt.layer("model.layers.0.mlp.up_proj").shape), bias=False)
        with pytest.raises(ValueError, match=r"quantized in the checkpoint, no nn\.Linear in the model"):
            replace_linears(one, ckpt, rename=lambda name: "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("load", [False, True])
def test_a_module_with_several_names_is_replaced_under_all(exports, load):
    """A layer that a model goes through twice, and a linear of its own beside it, would else run both."""
    with moqext.Checkpoint(exports / "nvfp4_mlp_only") as ckpt:
        model = skeleton(ckpt)
        layer = model.model.layers._modules["0"]
        model.model.layers.add_module("again", layer)
        layer.mlp.add_module("up_again", layer.mlp.up_proj)
        model.aliases = torch.nn.ModuleList([layer.mlp.gate_proj])
        rename = {"again": "0", "up_again": "up_proj"}
        replace_linears(
            model,
            ckpt,
            load=load,
            rename=lambda name: ".".join(rename.get(part, part) for part in name.split(".")),
        )
    assert type(layer.mlp.up_proj) is QuantLinear
    assert layer.mlp.up_again is layer.mlp.up_proj
    assert model.aliases[0] is layer.mlp.gate_proj
    assert type(model.aliases[0]) is QuantLinear
    assert model.model.layers.again is layer


def test_options_reach_every_layer(exports):
    with moqext.Checkpoint(exports / "nvfp4_mlp_only") as ckpt:
        with torch.device("meta"):
            model = skeleton(ckpt)
        replace_linears(model, ckpt, compute="fp8", dtype=torch.float16, load=True)
    layer = model.model.layers._modules["0"].mlp.up_proj
    assert (layer.compute, layer.dtype, layer.weight.device.type) == ("fp8", torch.float16, "cpu")
    assert not any(tensor.is_meta for tensor in model.parameters())
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_models_that_do_not_fit_are_told_all_and_stay(exports):
    with moqext.Checkpoint(exports / "fp8_bias_kvfp8") as ckpt:
        model = skeleton(ckpt)
        attention = model.model.layers._modules["0"].self_attn
        del attention.q_proj
        attention.k_proj = torch.nn.Linear(7, 8)
        attention.v_proj = torch.nn.Linear(
            attention.v_proj.in_features, attention.v_proj.out_features, bias=False
        )
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"(?s)q_proj: .*no nn.Linear") as caught:
            replace_linears(model, ckpt)
        text = str(caught.value)
        assert "k_proj: [32, 144] in the checkpoint, [8, 7] in the model" in text
        assert "v_proj: a bias in the checkpoint alone" in text
        unchanged(model, before)


def test_plain_tensors_that_do_not_fit_are_told_and_nothing_changes(exports):
    with moqext.Checkpoint(exports / "fp8_bias_kvfp8") as ckpt:
        model = skeleton(ckpt)
        model.extra = Norm(3)
        del model.model.norm
        model.lm_head = torch.nn.Linear(144, 31, bias=False)
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"(?s)extra.weight: not in the checkpoint") as caught:
            replace_linears(model, ckpt, load=True)
        assert "model.norm.weight: not in the model" in str(caught.value)
        assert "lm_head.weight: [32, 144] in the checkpoint, [31, 144] in the model" in str(caught.value)
        unchanged(model, before)


def test_codes_are_no_values_of_a_plain_tensor(exports, tmp_path):
    """A buffer in one byte: its numbers mean nothing without a scale."""
    safetensors = pytest.importorskip("safetensors.torch")
    directory = tmp_path / "coded"
    shutil.copytree(exports / "fp8_bias_kvfp8", directory)
    tensors = safetensors.load_file(directory / "model.safetensors")
    tensors["model.norm.shift"] = torch.ones(144, dtype=torch.float8_e5m2)
    safetensors.save_file(tensors, directory / "model.safetensors")
    with moqext.Checkpoint(exports / "fp8_bias_kvfp8") as ckpt:
        model = skeleton(ckpt)
    model.model.norm.shift = torch.nn.Parameter(torch.zeros(144))
    words = r"norm\.shift: torch\.float8_e5m2 in the checkpoint, torch\.float32 in the model"
    with pytest.raises(ValueError, match=words):
        replace_linears(model, directory, load=True)


def test_damaged_checkpoints_are_refused_before_anything_changes(exports, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    directory = tmp_path / "damaged"
    shutil.copytree(exports / "nvfp4_mlp_only", directory)
    tensors = safetensors.load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_2"].fill_(float("nan"))
    safetensors.save_file(tensors, directory / "model.safetensors")
    with moqext.Checkpoint(exports / "nvfp4_mlp_only") as ckpt:
        model = skeleton(ckpt)
    before = snapshot(model)
    with pytest.raises(moqext.CheckpointError, match="up_proj: scale_not_finite"):
        replace_linears(model, directory)
    unchanged(model, before)


def test_what_does_not_run_and_modules_of_experts_that_are_none_are_refused_by_name(exports):
    for name, compute, words in (
        ("w4a16_nvfp4", "fp4", "W4A16_NVFP4"),
        ("llama4_nvfp4", "exact", "2 experts .*NVFP4.*, and Linear in the model"),
    ):
        with moqext.Checkpoint(exports / name) as ckpt:
            model = skeleton(ckpt)
            with pytest.raises(moqext.UnsupportedQuantization, match=words):
                replace_linears(model, ckpt, compute=compute)


def test_low_rank_pairs_come_with_their_linears(tmp_path, rng):
    with moqext.Checkpoint(write_svd(tmp_path / "svd", rng)) as ckpt:
        model = replace_linears(skeleton(ckpt), ckpt, load=True)
        layer = model.get_submodule(LAYER)
        assert type(layer) is QuantLinear
        x = torch.from_numpy(rng.standard_normal((3, 128), dtype=np.float32)).bfloat16()
        assert layer(x).equal(ckpt.load(LAYER)(x))


def test_experts_that_the_model_lacks(exports):
    with pytest.raises(ValueError, match=r"feed_forward\.experts: .* no module of experts .*\(none\)"):
        replace_linears(torch.nn.Module(), exports / "llama4_nvfp4")


def test_experts_stored_one_by_one_are_linears(exports):
    with moqext.Checkpoint(exports / "mixtral_nvfp4") as ckpt:
        model = replace_linears(skeleton(ckpt), ckpt, load=True)
        record = next(layer for layer in ckpt.layers() if layer.members).members[0]
        assert type(model.get_submodule(record.name)) is QuantLinear


def test_the_configuration_is_not_asked_for(exports, tmp_path):
    """hf_quant_config.json alone is enough: the reader reads both."""
    directory = tmp_path / "one_file"
    shutil.copytree(exports / "nvfp4_mlp_only", directory)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with moqext.Checkpoint(directory) as ckpt:
        model = replace_linears(skeleton(ckpt), ckpt)
    assert type(model.model.layers._modules["0"].mlp.up_proj) is QuantLinear
