"""With MOQEXT_VLLM_COMPRESSED_TENSORS=1 dense layers of compressed-tensors in FP8 and NVFP4 are moqext's."""

import copy
import json
import logging
import pickle
import shutil
from types import SimpleNamespace

import pytest

import moqext
from tests.vllm.conftest import assert_same
from tests.vllm.test_step_aside import chosen, experts, fresh, gpu, head, linear  # noqa: F401
from tests.vllm_cases import DATA, change, multiply

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

ASKED = {"MOQEXT_VLLM_COMPRESSED_TENSORS": "1"}
OURS = "MoqextCompressedTensorsLinearMethod"
NAME = "model.layers.0.mlp.down_proj"
CONVERTED = [
    "llama_fp8_kvfp8",
    "llama_fp8_pb_wo",
    "llama_fp8_pc_pt",
    "llama_nvfp4_kvfp8",
    "llama_w4a16_nvfp4",
]
GENUINE = ["ct_fp8", "ct_fp8_block", "ct_fp8_dynamic", "ct_nvfp4", "ct_nvfp4a16"]
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def quantization(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def one_scale_for_tokens(directory):
    """A genuine checkpoint with one scale for a weight, whose activations are scaled by token."""
    shutil.copytree(DATA / "producers" / "ct_fp8", directory)
    config = json.loads((directory / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] |= {"strategy": "token", "dynamic": True, "observer": None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Directories of what `convert` makes of ModelOpt's checkpoints, by their names."""
    place = tmp_path_factory.mktemp("converted")
    for name in CONVERTED:
        with moqext.Checkpoint(DATA / "checkpoints" / name) as checkpoint:
            checkpoint.convert(place / name, to="compressed-tensors")
    return {name: place / name for name in CONVERTED}


@pytest.fixture(scope="module")
def unequal(converted, tmp_path_factory):
    """Checkpoints whose fused layers have scales that differ by factors."""
    place = tmp_path_factory.mktemp("unequal")
    for name in ("llama_fp8_pc_pt", "llama_w4a16_nvfp4"):
        shutil.copytree(converted[name], place / name)
        change(place / name, rescale)
    return place


def rescale(tensors):
    for name in list(tensors):
        if name.endswith(("v_proj.weight_global_scale", "up_proj.weight_global_scale")):
            multiply(tensors, name, 3)
        if name.endswith(("k_proj.weight_scale", "up_proj.weight_scale")) and tensors[name][0] == "F32":
            multiply(tensors, name, 0.5)


# ------------------------------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def tokens(each, converted, unequal):
    directories = converted | {"unequal": unequal / "llama_w4a16_nvfp4"}
    return each("tokens", directories, **ASKED)


@pytest.mark.parametrize("name", CONVERTED)
def test_tokens_are_those_of_modelopts_form(tokens, served, name):
    found, methods = tokens[name]
    assert found == served[name][0]
    assert methods == {OURS: 4}


def test_fused_layers_keep_scales_that_differ(engine, tokens, converted, unequal, tmp_path):
    with moqext.Checkpoint(unequal / "llama_w4a16_nvfp4") as checkpoint:
        checkpoint.convert(tmp_path / "plain", to="fp32")
    found = tokens["unequal"][0]
    assert found != tokens["llama_w4a16_nvfp4"][0]  # or nothing could be seen
    assert_same(found, engine("reference", tmp_path / "plain")[0])


def test_layers_of_llm_compressor_have_the_bits_of_moqext(engine, tmp_path):
    directories = [DATA / "producers" / name for name in GENUINE]
    directories.append(one_scale_for_tokens(tmp_path / "one_scale"))
    with moqext.Checkpoint(DATA / "exports" / "mixed_fp8_nvfp4") as checkpoint:
        checkpoint.convert(tmp_path / "mixed", to="compressed-tensors")
    directories.append(tmp_path / "mixed")
    for directory, (checked, wrong) in zip(directories, engine("layers", *directories, **ASKED), strict=True):
        assert wrong == [], directory
        assert len(checked) == (6 if directory.name == "mixed" else 4), directory


def test_tokens_of_channels_are_those_of_vllm(engine, converted):
    """Until two are as likely: then either may come, since vLLM multiplies by reciprocals of scales."""
    directory, compared = converted["llama_fp8_pc_pt"], 0
    variables = (ASKED, {"VLLM_PLUGINS": "none"})
    ours, theirs = (engine("two_best", directory, **each)[0] for each in variables)
    for own, other in zip(ours, theirs, strict=True):
        for one, two in zip(own, other, strict=True):
            assert abs(one[1] - two[1]) < 0.03
            compared += 1
            if one[0] != two[0]:
                assert one[:1] + one[2:3] == two[2:3] + two[:1]
                assert one[1] - one[3] < 0.03
                break
    assert compared > 32


def test_reloaded_weights_are_those_that_run(engine, converted, unequal):
    names = ("llama_fp8_pc_pt", "llama_w4a16_nvfp4")
    pairs = [f"{converted[name]},{unequal / name}" for name in names]
    for found, in_place in engine("reload", *pairs, **ASKED):
        assert found["again"] == found["first"] == found["back"]
        assert found["other"] == found["other alone"] != found["first"]
        assert in_place


@pytest.mark.parametrize(
    "name, tensor, about",
    [
        ("llama_w4a16_nvfp4", "mlp.up_proj.weight_global_scale", "gate_up_proj"),
        ("llama_w4a16_nvfp4", "self_attn.k_proj.weight_packed", "qkv_proj"),
        ("llama_fp8_pc_pt", "mlp.down_proj.weight_scale", "down_proj"),
    ],
)
def test_damage_is_refused_with_the_name_of_the_layer(engine, converted, tmp_path, name, tensor, about):
    shutil.copytree(converted[name], tmp_path / name)
    change(tmp_path / name, lambda tensors: tensors.pop(f"model.layers.0.{tensor}"))
    kind, message = engine("error", tmp_path / name, MOQEXT_VLLM_CHECK="0", **ASKED)[0]
    assert kind == "CheckpointError"
    assert f"{about}: {tensor.rpartition('.')[2]} was never loaded" in message


def test_weights_are_made_up(engine, converted, tmp_path):
    for name in ("llama_fp8_kvfp8", "llama_nvfp4_kvfp8"):
        config = json.loads((converted[name] / "config.json").read_text())
        del config["quantization_config"]["kv_cache_scheme"]  # not every CPU has a cache in FP8
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for _, methods, outputs in engine("made_up", *tmp_path.iterdir(), **ASKED):
        assert methods == {OURS: len(outputs)}
        assert all(outputs.values())


@pytest.mark.parametrize("value, owner", [("1", "moqext_vllm"), ("0", "vllm"), ("", "vllm")])
def test_the_switch(engine, value, owner):
    found = engine("classes", "compressed-tensors", MOQEXT_VLLM_COMPRESSED_TENSORS=value)[0]
    assert found == {"compressed-tensors": owner}


# ------------------------------------------------------------------------------------ what is left to vLLM


@pytest.fixture(scope="module")
def documents(converted):
    """Configurations as they are written, by format."""
    names = {"float-quantized": "llama_fp8_kvfp8", "nvfp4-pack-quantized": "llama_w4a16_nvfp4"}
    return {style: quantization(converted[name]) for style, name in names.items()}


@pytest.fixture
def make(documents, monkeypatch):
    """`make(style, edit)`: a configuration, pickled as for another process; kernels are not looked for."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4,
    )

    from moqext_vllm.compressed_tensors import MoqextCompressedTensorsConfig

    monkeypatch.setattr(compressed_tensors_w4a4_nvfp4, "init_nvfp4_linear_kernel", lambda **options: None)

    def made(style="float-quantized", edit=None):
        document = copy.deepcopy(documents[style])
        if edit is not None:
            edit(document, document["config_groups"]["group_0"])
        config = MoqextCompressedTensorsConfig.from_config(document)
        config.packed_modules_mapping = PACKED
        return pickle.loads(pickle.dumps(config))

    settings = VllmConfig()
    settings.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with set_current_vllm_config(settings):
        yield made


def without_activations(document, group):
    group["input_activations"] = None


def with_outputs(document, group):
    group["output_activations"] = dict(group["input_activations"])


def of_another_format(document, group):
    group["format"] = document["format"] = "int-quantized"
    for part in ("weights", "input_activations"):
        group[part]["type"] = "int"


def two_groups(document, group):
    """q and k by channel, v and all others by tensor."""
    other = copy.deepcopy(group)
    other["targets"] = ["re:.*[qk]_proj"]
    other["weights"]["strategy"] = "channel"
    other["input_activations"] |= {"strategy": "token", "dynamic": True}
    document["config_groups"]["group_1"] = other
    group["targets"] = ["re:.*v_proj", "Linear"]


@pytest.mark.parametrize(
    "edit, name, why",
    [
        (without_activations, NAME, "it leaves activations as they are"),
        (with_outputs, NAME, "moqext runs other formats"),
        (of_another_format, NAME, "moqext runs other formats"),
        (two_groups, "model.layers.0.self_attn.qkv_proj", "parts of a fused layer have several schemes"),
    ],
)
def test_other_schemes_are_those_of_vllm(make, caplog, edit, name, why):
    def with_ours(document, group):
        """The head is moqext's in any case, so that some layer is."""
        document["config_groups"]["group_9"] = copy.deepcopy(group) | {"targets": ["lm_head"]}
        document["ignore"] = []
        edit(document, group)

    config = make(edit=with_ours)
    assert chosen(config, head(), "lm_head") == OURS
    with caplog.at_level(logging.INFO, "vllm.moqext"):
        assert chosen(config, linear(), name) == "CompressedTensorsLinearMethod"
    (told,) = (record.getMessage() for record in caplog.records)
    assert f"are left to vLLM (the first is {name}): {why}" in told


def test_excluded_layers_experts_and_caches_are_those_of_vllm(make, monkeypatch):
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    config = make()
    assert chosen(config, linear()) == OURS
    assert chosen(config, linear(), "model.layers.0.self_attn.qkv_proj") == OURS
    assert config.get_quant_method(head(), "lm_head") is None
    assert chosen(config, Attention.__new__(Attention), "x") == "CompressedTensorsKVCacheMethod"
    asked = []
    own = compressed_tensors.CompressedTensorsMoEMethod
    monkeypatch.setattr(own, "get_moe_method", lambda *args, **options: asked.append(options["layer_name"]))
    config.get_quant_method(experts(), "model.layers.0.mlp.experts")
    assert asked == ["model.layers.0.mlp.experts"]


def test_the_whole_checkpoint_is_looked_at_first(make, converted, tmp_path):
    shutil.copytree(converted["llama_w4a16_nvfp4"], tmp_path / "it")
    make("nvfp4-pack-quantized").maybe_update_config(str(tmp_path / "it"))
    change(tmp_path / "it", lambda tensors: tensors.pop(f"{NAME}.weight_global_scale"))
    with pytest.raises(moqext.CheckpointError, match=f"missing_scale: {NAME}"):
        make("nvfp4-pack-quantized").maybe_update_config(str(tmp_path / "it"))


def test_a_layer_that_moqext_refuses_is_that_of_vllm(make):
    def by_blocks(document, group):
        group["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
        group["input_activations"] |= {"strategy": "group", "group_size": 128, "dynamic": True}
        document["ignore"], group["targets"] = [], ["Linear", "lm_head"]

    config = make(edit=by_blocks)
    assert chosen(config, linear()) == OURS
    assert chosen(config, head(), "lm_head") == "CompressedTensorsLinearMethod"


@pytest.mark.parametrize(
    "capability, style, ours",
    [
        ((9, 0), "nvfp4-pack-quantized", True),
        ((10, 0), "nvfp4-pack-quantized", False),
        ((10, 0), "float-quantized", False),
    ],
)
def test_a_gpu_on_which_moqext_never_ran_has_vllms_methods(make, gpu, capability, style, ours):  # noqa: F811
    gpu(*capability)
    config = make(style)
    assert chosen(config, linear()) == (OURS if ours else "CompressedTensorsLinearMethod")
    assert config.runs_neighbours == ours


@pytest.mark.parametrize("asked", [False, True])
def test_rows_depend_on_no_others_where_vllm_asks_for_that(make, monkeypatch, asked):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    assert make().get_quant_method(linear(), NAME).batch_invariant is asked
