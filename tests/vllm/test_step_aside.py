"""Layers that moqext does not run, or that vLLM runs better, are vLLM's, by its own methods."""

import logging
import pickle
from types import SimpleNamespace

import pytest

import moqext
from tests.vllm.conftest import assert_same, on_cuda
from tests.vllm_cases import DATA, write_mixed

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

NAME = "model.layers.0.mlp.down_proj"
OURS, OUR_EXPERTS = "MoqextModelOptLinearMethod", "MoqextModelOptMoEMethod"
Q8_0 = {"quant_algo": "Q8_0", "group_size": 32, "block_payload_bytes": 34, "packing": "ggml"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No reason told yet, and methods of vLLM's that look for no kernel."""
    from vllm.model_executor.layers.quantization import modelopt

    from moqext_torch import stepping_aside

    experts = SimpleNamespace(is_monolithic=lambda: False)
    monkeypatch.setattr(stepping_aside, "_said", set())
    monkeypatch.setattr(modelopt, "select_nvfp4_moe_backend", lambda *args, **options: (None, experts))
    monkeypatch.setattr(modelopt, "select_fp8_moe_backend", lambda *args, **options: (None, experts))
    monkeypatch.setattr(modelopt, "is_global_sf_supported_for_nvfp4_backend", lambda backend: False)


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(major, minor)`: takes the machine for one with a GPU of that capability."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    def pretend(*capability):
        found = DeviceCapability(*capability)
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *args, **options: found)

    return pretend


def make_config(quant_algo, layers=None, **fields):
    from moqext_vllm.config import CONFIGS

    document = {"quant_method": "modelopt", "quant_algo": quant_algo, "ignore": ["lm_head"], **fields}
    if layers is not None:
        document["quantized_layers"] = {
            name: {"quant_algo": about} if isinstance(about, str) else about for name, about in layers.items()
        }
    found = [each for each in CONFIGS if each.override_quantization_method(document, None)]
    return (found or CONFIGS)[0].from_config(document)


def sized(cls, columns, rows):
    """A layer of vLLM's as its constructor asks for a method."""
    import torch

    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.input_size = layer.input_size_per_partition = columns
    layer.output_size, layer.output_partition_sizes = rows, [rows]
    layer.params_dtype = torch.bfloat16
    return layer


def linear(columns=256, rows=256):
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return sized(ReplicatedLinear, columns, rows)


def head(columns=256, rows=256):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    layer = sized(ParallelLMHead, columns, rows)
    layer.num_embeddings, layer.org_vocab_size, layer.embedding_dim = rows, rows, columns
    return layer


def experts(**about):
    import torch
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    parallel = FusedMoEParallelConfig.make_no_parallel()
    for name in ("dp_size", "use_ep", "all2all_backend"):
        if name in about:
            setattr(parallel, name, about.pop(name))
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.params_dtype, layer.activation = torch.bfloat16, SimpleNamespace(value="silu")
    sizes = {"num_experts": 4, "num_local_experts": 4, "experts_per_token": 2, "hidden_dim": 64}
    sizes |= {"intermediate_size_per_partition": 64, "tp_size": 1, "is_act_and_mul": True}
    layer.moe_config = SimpleNamespace(
        **sizes | {"is_lora_enabled": False} | about, moe_parallel_config=parallel
    )
    return layer


def chosen(config, layer, prefix=NAME):
    return type(config.get_quant_method(layer, prefix)).__name__


# -------------------------------------------------------------------------- algorithms without a fast kernel


def test_layers_of_mixed_precision_without_a_fast_kernel_are_those_of_vllm(caplog):
    layers = {NAME: "MXFP8", "model.layers.1.mlp.down_proj": "MXFP8", "model.layers.2.mlp.down_proj": "NVFP4"}
    config = pickle.loads(pickle.dumps(make_config("MIXED_PRECISION", layers)))
    with caplog.at_level(logging.INFO, "vllm.moqext"):
        found = [chosen(config, linear(), name) for name in layers]
    assert found == ["ModelOptLinearMethod"] * 2 + [OURS]
    assert [record.getMessage() for record in caplog.records] == [
        f"layers in MXFP8 are left to vLLM (the first is {NAME}): it is not known to be faster in moqext"
    ]
    assert config.runs_neighbours


def test_a_layer_of_tomorrow_is_asked_of_vllm(monkeypatch):
    """`quantized_layers` may name what moqext's reader refuses; other layers are moqext's all the same."""
    from vllm.model_executor.layers.quantization import modelopt_block_quant

    monkeypatch.setattr(modelopt_block_quant, "ModelOptBlockQuantLinearMethod", make_method)
    other = "model.layers.1.mlp.down_proj"
    config = make_config("MIXED_PRECISION", {NAME: Q8_0, other: "FP8", "model.layers.2.mlp": "NVFP7"})
    assert chosen(config, linear()) == "SimpleNamespace"
    assert chosen(config, linear(), other) == OURS
    with pytest.raises(
        moqext.UnsupportedQuantization, match=r"NVFP7: moqext has no .* vLLM says: it would not"
    ):
        chosen(config, linear(), "model.layers.2.mlp.down_proj")


def make_method(**about):
    return SimpleNamespace(create_weights=lambda: None, **about)


def test_names_of_layers_of_tomorrow_are_mapped(monkeypatch):
    from vllm.model_executor.layers.quantization import modelopt_block_quant
    from vllm.model_executor.models.utils import WeightsMapper

    monkeypatch.setattr(modelopt_block_quant, "ModelOptBlockQuantLinearMethod", make_method)
    config = make_config("MIXED_PRECISION", {f"backbone.{NAME}": Q8_0, "backbone.other": "FP8"})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"backbone.": "language_model."}))
    assert chosen(config, linear(), f"language_model.{NAME}") == "SimpleNamespace"
    assert chosen(config, linear(), "language_model.other") == OURS


def test_a_checkpoint_of_tomorrow_is_left_to_vllm_whole(monkeypatch):
    """Where vLLM does not know its algorithm either, both say so."""
    from vllm.model_executor.layers.quantization import modelopt

    with pytest.raises(moqext.ConfigError, match=r"unknown .* 'FP8_NEXT'.*vLLM says: Model"):
        make_config("FP8_NEXT")
    monkeypatch.setattr(modelopt, "QUANT_ALGOS", [*modelopt.QUANT_ALGOS, "FP8_NEXT"])
    monkeypatch.setitem(modelopt.LINEAR_ALGOS, "FP8_NEXT", ("modelopt", "fp8_config"))
    monkeypatch.setattr(
        modelopt, "build_linear_method", lambda config, algo, prefix: SimpleNamespace(of=algo)
    )
    config = pickle.loads(pickle.dumps(make_config("FP8_NEXT", ignore=["lm_head"])))
    assert config.get_quant_method(linear(), NAME).of == "FP8_NEXT"
    assert chosen(config, head(), "lm_head") == "UnquantizedLinearMethod"
    assert not config.runs_neighbours
    config.maybe_update_config(str(DATA / "checkpoints" / "llama_fp8_kvfp8"))


def test_an_algorithm_that_neither_runs_is_refused_with_what_both_say(gpu):
    gpu(7, 5)
    with pytest.raises(moqext.UnsupportedQuantization, match=r"W8A16: .* 7\.5; vLLM says: ModelOpt"):
        make_config("W8A16")


# -------------------------------------------------------------------------------------------- what GPUs have


@pytest.mark.parametrize(
    "capability, quant_algo, ours",
    [
        ((9, 0), "NVFP4", True),
        ((10, 0), "NVFP4", False),
        ((12, 1), "W4A16_NVFP4", False),
        ((10, 0), "FP8", False),
        ((10, 0), "W4A8_NVFP4_FP8", True),  # vLLM has none
        ((7, 5), "NVFP4", False),
        ((8, 0), "NVFP4", False),
        ((8, 9), "FP8", False),
    ],
)
def test_a_gpu_on_which_vllm_is_faster_has_its_methods(gpu, capability, quant_algo, ours):
    gpu(*capability)
    config = make_config(quant_algo)
    assert chosen(config, linear()) == (OURS if ours else "ModelOptLinearMethod")
    assert config.runs_neighbours == ours
    assert type(config).get_min_capability() <= 80
    if quant_algo == "NVFP4":
        assert type(config).get_min_capability() <= 75


def test_force_asks_for_moqext_where_it_runs(gpu, monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config

    monkeypatch.setenv("MOQEXT_VLLM_FORCE", "1")
    gpu(10, 0)
    whole = VllmConfig.__new__(VllmConfig)
    whole.additional_config = {}
    whole.compilation_config = SimpleNamespace(inductor_compile_config={}, custom_ops=[])
    config = make_config("NVFP4")
    with set_current_vllm_config(whole):
        assert chosen(config, linear()) == OURS
    assert whole.additional_config["moqext"]["force"] is True
    gpu(7, 5)
    assert chosen(make_config("NVFP4"), linear()) == "ModelOptLinearMethod"
    monkeypatch.setenv("MOQEXT_VLLM_FORCE", "yes")
    with pytest.raises(ValueError, match="MOQEXT_VLLM_FORCE: expected 0 or 1, got 'yes'"):
        make_config("NVFP4")


def test_neighbours_of_faster_linears_stay_with_vllm(gpu, monkeypatch):
    gpu(10, 0)
    monkeypatch.setattr("moqext_torch.stepping_aside.RAN_ON", 10)
    config = make_config("MIXED_PRECISION", {NAME: "NVFP4", "model.layers.1.mlp.down_proj": "FP8"})
    assert chosen(config, linear(), "model.layers.1.mlp.down_proj") == OURS
    assert chosen(config, linear()) == "ModelOptLinearMethod"
    assert not config.runs_neighbours


def test_norms_ask_who_runs_the_linears(gpu, monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config

    from moqext_vllm.activations import find_config

    whole = VllmConfig.__new__(VllmConfig)
    whole.quant_config = make_config("NVFP4")
    whole.compilation_config = SimpleNamespace(custom_ops=[])
    monkeypatch.setattr("moqext_vllm.activations.runs_ops", lambda: True)
    with set_current_vllm_config(whole):
        assert find_config(SimpleNamespace(name="rms_norm")) is whole
        gpu(10, 0)
        assert find_config(SimpleNamespace(name="rms_norm")) is None


# ------------------------------------------------------------------------------------------- around experts


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "about, forced, ours",
    [
        ({}, False, True),
        ({"is_lora_enabled": True}, False, False),
        ({"is_lora_enabled": True}, True, False),
        ({"dp_size": 2, "use_ep": True}, False, False),
        ({"dp_size": 2, "use_ep": True}, True, True),
        ({"dp_size": 2, "use_ep": True, "all2all_backend": "deepep_low_latency"}, True, False),
        ({"dp_size": 2}, False, True),
    ],
)
def test_experts_that_want_the_modular_kernel_are_those_of_vllm(monkeypatch, about, forced, ours):
    monkeypatch.setenv("MOQEXT_VLLM_FORCE", str(int(forced)))
    found = chosen(make_config("NVFP4"), experts(**about), EXPERTS)
    assert found == (OUR_EXPERTS if ours else "ModelOptNvFp4FusedMoE")


@pytest.mark.parametrize("skips", [False, True])
def test_gathered_tokens_are_not_routed_with_the_mask_of_one_rank(monkeypatch, skips):
    from vllm.platforms import current_platform

    monkeypatch.setenv("MOQEXT_VLLM_FORCE", "1")
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", str(int(skips)))
    config, group = make_config("NVFP4"), experts(dp_size=2, use_ep=True)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    method = config.get_quant_method(group, EXPERTS)
    assert (type(method).__name__ == OUR_EXPERTS) is not skips


def test_elastic_experts_are_those_of_vllm(monkeypatch):
    from moqext_vllm import hand_back

    whole = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    monkeypatch.setattr(hand_back, "get_current_vllm_config_or_none", lambda: whole)
    assert chosen(make_config("NVFP4"), experts(), EXPERTS) == "ModelOptNvFp4FusedMoE"


# ---------------------------------------------------------------------------------------- layer by layer


def test_a_layer_that_moqext_refuses_is_asked_of_vllm():
    assert chosen(make_config("FP8_PB_WO"), head(), "output") == "ModelOptLinearMethod"
    assert chosen(make_config("FP8_PB_WO"), linear()) == OURS


def test_what_neither_runs_keeps_the_reason_of_moqext():
    layer = linear(columns=40)
    method = make_config("NVFP4").get_quant_method(layer, NAME)
    with pytest.raises(moqext.UnsupportedQuantization, match=f"{NAME}: NVFP4: .*40.*; vLLM says: .*16"):
        method.create_weights(layer, 40, [256], 40, 256, layer.params_dtype, weight_loader=None)


# -------------------------------------------------------------------------------------- names of vLLM's model


def test_a_module_without_a_name_has_the_algorithm_of_the_checkpoint():
    """A head without one is the checkpoint's `lm_head`, which its configuration excludes."""
    assert chosen(make_config("NVFP4"), linear(), "") == OURS
    assert chosen(make_config("NVFP4"), head(), "") == "UnquantizedLinearMethod"
    mixed = make_config("MIXED_PRECISION", {NAME: "FP8"})
    assert chosen(mixed, linear(), "") == "UnquantizedLinearMethod"


def test_a_head_of_another_name_is_quantized_if_its_tensors_are():
    """GPT-NeoX calls it `embed_out`, and its configuration excludes that; vLLM's model says `lm_head`."""
    config = make_config("NVFP4", ignore=["embed_out"])
    assert chosen(config, head(), "lm_head") == OURS
    config.maybe_update_config(str(DATA / "exports" / "fp8_excluded"))
    assert chosen(config, head(), "lm_head") == "UnquantizedLinearMethod"
    config.maybe_update_config(str(DATA / "exports" / "nvfp4_lm_head"))
    record = next(each for each in config.stored if each.name == "lm_head")
    assert chosen(config, head(record.shape[1], record.shape[0]), "lm_head") == OURS


def test_the_embedding_of_nemotron_h_is_found():
    """Transformers 5 writes `backbone.embedding`, where vLLM's model knows `backbone.embeddings`."""
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

    config, names = make_config("NVFP4"), ["backbone.embedding.weight", "backbone.embeddings.weight"]
    config.maybe_update_config("organisation/model", hf_config=SimpleNamespace(model_type="nemotron_h"))
    config = pickle.loads(pickle.dumps(config))
    mapper = NemotronHForCausalLM.hf_to_vllm_mapper | config.get_checkpoint_weight_mapper()
    assert mapper.apply_list(names) == ["model.embed_tokens.weight"] * 2
    config.maybe_update_config("organisation/model", hf_config=SimpleNamespace(model_type="mamba"))
    assert config.get_checkpoint_weight_mapper().apply_list(names) == names


def test_a_quantized_embedding_is_refused_by_name():
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    config = make_config("FP8")
    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    config.maybe_update_config(str(DATA / "exports" / "fp8_embedding"))
    (record,) = (each for each in config.stored if each.kind == "embedding")
    object.__setattr__(layer, "embedding_dim", record.shape[1])
    with pytest.raises(moqext.UnsupportedQuantization, match=r"model.embed_tokens: an embedding in FP8"):
        chosen(config, layer, "model.embed_tokens")


# ------------------------------------------------------------------------------------------ genuine tensors


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A genuine checkpoint with attention in NVFP4 and the rest in MXFP8."""
    return write_mixed(tmp_path_factory.mktemp("mixed") / "mixed", "llama_nvfp4_kvfp8", "llama_mxfp8")


def test_a_mixed_checkpoint_passes_the_look_at_its_headers(mixed):
    from moqext_vllm.check import check_checkpoint

    assert check_checkpoint(str(mixed)) == ((), None)
    with moqext.Checkpoint(mixed) as checkpoint:
        assert {record.quant_algo for record in checkpoint.layers()} == {"NVFP4", "MXFP8"}


def test_headers_of_a_checkpoint_of_tomorrow_are_passed_over(tmp_path):
    from moqext_vllm.check import check_checkpoint

    directory = write_mixed(tmp_path / "mixed", "llama_nvfp4_kvfp8", "llama_mxfp8")
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.replace("MXFP8", "Q8_0"))
    assert check_checkpoint(str(directory), has_unknown=True) == (None, None)


@pytest.mark.skipif(on_cuda(), reason="models are built on the CPU, without kernels")
def test_a_mixed_checkpoint_is_loaded_by_both(engine, mixed):
    found, theirs = (engine("parameters", mixed, VLLM_PLUGINS=plugins)[0] for plugins in ("moqext", "none"))
    assert isinstance(found, dict), found
    mlp = {name: about for name, about in found.items() if ".mlp." in name}
    assert {about[2] for about in mlp.values()} == {"torch.float8_e4m3fn", "torch.uint8"}
    assert mlp == {name: theirs[name] for name in mlp}
    assert {name: about[3] for name, about in found.items() if name in theirs} == {
        name: about[3] for name, about in theirs.items()
    }


@pytest.mark.skipif(not on_cuda(), reason="vLLM has kernels for MXFP8 on GPUs")
def test_a_mixed_checkpoint_makes_the_tokens_of_its_weights(engine, mixed, tmp_path):
    with moqext.Checkpoint(mixed) as checkpoint:
        checkpoint.convert(tmp_path / "bf16")
    tokens, methods = engine("tokens", mixed)[0]
    assert methods == {OURS: 2, "MoqextKVCacheMethod": 1}
    assert_same(tokens, engine("reference", tmp_path / "bf16")[0])
