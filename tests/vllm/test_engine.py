"""The real engine serves genuine checkpoints through the plug-in that it has found by itself."""

import json
import shutil

import pytest

from tests.vllm.conftest import assert_same, genuine, on_cuda
from tests.vllm_cases import DATA, GENERATED, change, multiply, requantize

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

LOADED = [
    *("fp8_bias_kvfp8", "fp8_excluded", "fp8_kvcast", "fp8_lm_head", "fp8_pb_real", "fp8_pb_wo_one_block"),
    *(
        "fp8_pb_wo_unaligned",
        "fp8_pc_pt_bias",
        "fp8_uncalibrated",
        "fp8_zero",
        "mixed_fp8_nvfp4",
        "mixed_three",
    ),
    *(
        "mixtral_fp8",
        "mixtral_nvfp4",
        "nvfp4_bias_kvnvfp4",
        "nvfp4_lm_head",
        "nvfp4_mlp_only",
        "nvfp4_sharded",
    ),
    *("nvfp4_uncalibrated", "nvfp4_zero", "qwen3moe_mixed", "w4a16_nvfp4", "w4a16_nvfp4_group_32"),
    "w4a8_nvfp4_fp8",
]
MADE = {  # formats without a genuine model of the kind: of what they are made, in which groups
    "W8A16": ("llama_fp8_kvfp8", None),
    "NVFP4_SVD": ("llama_fp8_kvfp8", None),
    "W4A16_AWQ": ("qwen3moe_fp8", 32),
    "W4A8_AWQ": ("qwen3moe_fp8", 32),
    "W8A8_SQ_PER_CHANNEL": ("qwen3moe_fp8", None),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    return {algo: requantize(place / algo, source, algo, group) for algo, (source, group) in MADE.items()}


@pytest.fixture(scope="module")
def served_made(each, made):
    return each("tokens", made)


@pytest.fixture(scope="module")
def expected_made(engine, made):
    return dict(zip(made, engine("reference", *made.values()), strict=True))


@pytest.fixture(scope="module")
def expected(engine):
    found = engine("reference", *(DATA / "checkpoints" / name for name in GENERATED))
    return dict(zip(GENERATED, found, strict=True))


@pytest.fixture(scope="module")
def compared(each):
    return each("layers", genuine(LOADED, "exports"))


@pytest.mark.parametrize("name", GENERATED)
def test_tokens_are_those_of_transformers(served, expected, name):
    tokens, methods = served[name]
    assert methods["MoqextModelOptLinearMethod"] > 0
    assert ("MoqextModelOptMoEMethod" in methods) == name.startswith("qwen3moe")
    assert_same(tokens, expected[name])


@pytest.mark.parametrize("algo", MADE)
def test_tokens_of_made_checkpoints_are_those_of_transformers(served_made, expected_made, algo):
    tokens, methods = served_made[algo]
    assert methods["MoqextModelOptLinearMethod"] > 0
    assert ("MoqextModelOptMoEMethod" in methods) == MADE[algo][0].startswith("qwen3moe")
    assert_same(tokens, expected_made[algo])


@pytest.mark.parametrize("compute", ["exact", "fp8"])
def test_mxfp8_runs_where_it_is_wanted(engine, compute):
    directory = DATA / "checkpoints" / "llama_mxfp8"
    tokens, methods = engine("tokens", directory, MOQEXT_VLLM_FORCE="1", MOQEXT_VLLM_COMPUTE=compute)[0]
    assert methods["MoqextModelOptLinearMethod"] > 0
    assert not any("Marlin" in name or name.startswith("ModelOptMx") for name in methods)
    if compute == "exact":
        assert_same(tokens, engine("reference", directory)[0])


@pytest.mark.parametrize("name", LOADED)
def test_loaded_layers_have_the_bits_of_moqext(compared, name):
    checked, wrong = compared[name]
    assert wrong == []
    assert checked
    assert ("lm_head" in checked) == name.endswith("lm_head")


def test_activations_hand_over_codes(engine, expected):
    pytest.importorskip("vllm.model_executor.layers.fusion.quant_activation")
    tokens, takers, coded, calls = engine("handed_over", DATA / "checkpoints" / "llama_fp8_kvfp8")[0]
    assert_same(tokens, expected["llama_fp8_kvfp8"])
    assert takers > 0
    assert coded == calls / 4  # of the four linears of a layer the one behind the activation


def test_norms_write_codes_beside_their_values(engine, expected):
    directory = DATA / "checkpoints" / "llama_fp8_kvfp8"
    tokens, coded, calls = engine("codes_of_norms", directory, MOQEXT_VLLM_OPS="1")[0]
    assert_same(tokens, expected["llama_fp8_kvfp8"])
    assert coded == 2 * (calls / 4 - 1)  # the two linears of a layer behind norms, after the first time


@pytest.mark.parametrize("how", ["graphs", "compiled"])
@pytest.mark.parametrize("name", ["llama_fp8_kvfp8", "qwen3moe_fp8", "qwen3moe_nvfp4"])
def test_attention_turns_its_heads_by_moqext(engine, expected, name, how):
    directory = DATA / "checkpoints" / name
    tokens, attentions, calls, stored = engine("heads", directory, how, MOQEXT_VLLM_OPS="1")[0]
    assert_same(tokens, expected[name])
    layers = json.loads((DATA / "checkpoints" / name / "config.json").read_text())["num_hidden_layers"]
    assert attentions == layers
    assert (calls > 0) == (on_cuda() or how == "compiled")
    assert (stored > 0) == on_cuda()


def test_routers_have_their_linear_from_moqext(engine, expected):
    import torch

    name = "qwen3moe_nvfp4"
    tokens, classes, calls = engine("gates", DATA / "checkpoints" / name, MOQEXT_VLLM_OPS="1")[0]
    assert_same(tokens, expected[name])
    runs = on_cuda() and torch.cuda.get_device_capability() >= (9, 0)
    assert classes == ["MoqextGateLinear" if runs else "GateLinear"]
    assert (calls > 0) == runs


def test_compiled_norms_write_codes_for_the_linear_behind_them(engine, expected):
    directory = DATA / "checkpoints" / "llama_fp8_kvfp8"
    # vLLM and torch keep graphs on disk, of which the pass has nothing to do.
    fresh = {"VLLM_DISABLE_COMPILE_CACHE": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    tokens, joined, rows = engine("compiled_pairs", directory, MOQEXT_VLLM_OPS="1", **fresh)[0]
    assert_same(tokens, expected["llama_fp8_kvfp8"])
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    assert joined == 2 * layers - 1  # all but the first norm, which has no residual, and the last one
    assert rows
    assert min(rows) > 4


def test_scales_of_the_cache_are_the_checkpoints(engine):
    import moqext

    directory = DATA / "checkpoints" / "llama_nvfp4_kvfp8"
    with moqext.Checkpoint(directory) as checkpoint:
        scales = {record.name: record.values for record in checkpoint.kv_scales()}
    found, again = engine("cache_scales", directory)[0]
    assert found == again
    assert found == {
        f"{name}.attn": [values["k_scale"], values["v_scale"]] for name, values in scales.items()
    }


@pytest.mark.parametrize(
    "name, how, processes",
    [
        ("llama_w4a16_nvfp4", "compiled", "0"),
        ("llama_w4a16_nvfp4", "eager", "1"),
        ("llama_int4_awq", "compiled", "0"),
    ],
)
def test_torch_compile_and_a_process_of_its_own(engine, served, name, how, processes):
    found = engine("plain", DATA / "checkpoints" / name, how, VLLM_ENABLE_V1_MULTIPROCESSING=processes)
    assert found == [served[name][0]]


# -------------------------------------------------------------------------------------- damaged checkpoints


DAMAGES = {
    "missing codes": (
        "llama_nvfp4_kvfp8",
        lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"),
        ["model.layers.0.self_attn.qkv_proj", "weight was never loaded", "part 1 of the 3"],
    ),
    "missing block scales": (
        "llama_nvfp4_kvfp8",
        lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight_scale"),
        ["model.layers.0.mlp.down_proj", "weight_scale was never loaded"],
    ),
    "missing scale": (
        "llama_fp8_kvfp8",
        lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"),
        ["model.layers.0.mlp.gate_up_proj", "weight_scale was never loaded", "part 1 of the 2"],
    ),
    "negative scale": (
        "llama_fp8_kvfp8",
        lambda tensors: multiply(tensors, "model.layers.0.self_attn.o_proj.weight_scale", -1),
        ["model.layers.0.self_attn.o_proj", "weight_scale"],
    ),
    "negative scale of the cache": (
        "llama_fp8_kvfp8",
        lambda tensors: multiply(tensors, "model.layers.0.self_attn.k_proj.k_scale", -1),
        ["model.layers.0.self_attn.attn", "k_scale"],
    ),
    "missing expert": (
        "qwen3moe_nvfp4",
        lambda tensors: tensors.pop("model.layers.0.mlp.experts.2.up_proj.weight"),
        ["model.layers.0.mlp.experts", "w13_weight was never loaded for up of expert 2"],
    ),
}


@pytest.mark.parametrize("name, edit, texts", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused_with_the_name_of_the_layer(engine, tmp_path, name, edit, texts):
    shutil.copytree(DATA / "checkpoints" / name, tmp_path / name)
    change(tmp_path / name, edit)
    kind, message = engine("error", tmp_path / name, MOQEXT_VLLM_CHECK="0")[0]
    assert kind == "CheckpointError"
    for text in texts:
        assert text in message


@pytest.mark.parametrize(
    "name, text",
    [("nvfp4_kvaffine", "NVFP4_AFFINE"), ("mixed_in_qkv", "model.layers.0.self_attn.qkv_proj")],
)
def test_what_does_not_run_is_refused_by_name(engine, name, text):
    assert text in engine("error", DATA / "exports" / name)[0][1]


# ----------------------------------------------------------------------------------------------- the switch


@pytest.mark.parametrize("value, owner", [("1", "moqext_vllm"), ("0", "vllm")])
def test_the_switch(engine, value, owner):
    names = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")
    assert engine("classes", *names, MOQEXT_VLLM=value)[0] == dict.fromkeys(names, owner)
