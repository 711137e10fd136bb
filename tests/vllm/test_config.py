"""The plug-in's configurations beside vLLM's own: detection, exclusion, and what is read of genuine ones."""

import json
import pickle
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

DATA = Path(__file__).resolve().parent.parent / "data"
GENUINE = sorted(
    path.parent
    for folder in ("checkpoints", "exports")
    for path in (DATA / folder).glob("*/config.json")
    if "quantization_config" in json.loads(path.read_text())
)
RUN_BY_BOTH = {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MODULES = [
    *(f"model.layers.{layer}.{name}" for layer in range(3) for name in ("mlp.gate", "mlp.experts")),
    *(f"model.layers.{layer}.self_attn.{name}" for layer in range(12) for name in ("qkv_proj", "o_proj")),
    *(f"model.layers.{layer}.mlp.{name}" for layer in range(12) for name in ("gate_up_proj", "down_proj")),
    *("lm_head", "model.embed_tokens", "vision_tower.blocks.0.attn.proj"),
]


def quantization(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def is_read_by_both(directory):
    config = quantization(directory)
    return config["quant_algo"].upper() in RUN_BY_BOTH and "AFFINE" not in str(config)


READ_BY_BOTH = [directory for directory in GENUINE if is_read_by_both(directory)]


def ours_and_theirs(name):
    from vllm.model_executor.layers.quantization import modelopt

    from moqext_vllm.config import CONFIGS

    theirs = {
        "modelopt": modelopt.ModelOptFp8Config,
        "modelopt_fp4": modelopt.ModelOptNvFp4Config,
        "modelopt_mixed": modelopt.ModelOptMixedPrecisionConfig,
    }
    return next(config for config in CONFIGS if name == config.NAME), theirs[name]


@pytest.mark.parametrize("directory", GENUINE, ids=lambda path: path.name)
def test_every_family_claims_what_vllm_claims(directory):
    config = quantization(directory)
    for name in ("modelopt", "modelopt_fp4", "modelopt_mixed"):
        ours, theirs = ours_and_theirs(name)
        claim = theirs.override_quantization_method(config, None)
        if config["quant_algo"].upper() in ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"):
            assert ours.override_quantization_method(config, None) == claim
        assert ours.override_quantization_method(None, None) is None


@pytest.mark.parametrize("directory", READ_BY_BOTH, ids=lambda path: path.name)
def test_exclusion_is_that_of_vllm(directory):
    config = quantization(directory)
    name = next(
        name
        for name in ("modelopt_mixed", "modelopt_fp4", "modelopt")
        if name == "modelopt" or ours_and_theirs(name)[0].override_quantization_method(config, None)
    )
    ours, theirs = (cls.from_config(config) for cls in ours_and_theirs(name))
    for each in (ours, theirs):
        each.packed_modules_mapping = PACKED
    if any("\0" in entry for entry in config["ignore"]):  # an exporter's mark, which moqext knows
        assert ours.is_layer_excluded("lm_head")
        assert not theirs.is_layer_excluded("lm_head")
        return
    for module in MODULES:
        vision = "vision_tower" in module  # a step of its own in vLLM
        assert (ours.is_layer_excluded(module)) == (theirs.is_layer_excluded(module) or vision), module


def test_the_modelopt_meaning_is_an_option(monkeypatch):
    from moqext_vllm.config import CONFIGS

    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.1"]}
    far = "model.layers.10.mlp.down_proj"
    assert CONFIGS[0].from_config(config).layer_quant(far) is None
    monkeypatch.setenv("MOQEXT_VLLM_EXCLUSION", "modelopt")
    assert CONFIGS[0].from_config(config).layer_quant(far).quant_algo == "FP8"
    monkeypatch.setenv("MOQEXT_VLLM_EXCLUSION", "other")
    with pytest.raises(ValueError, match="MOQEXT_VLLM_EXCLUSION: expected vllm or modelopt, got 'other'"):
        CONFIGS[0].from_config(config)


def test_sums_of_the_tensor_cores_are_an_option(monkeypatch):
    """Linears in FP8 have such products; weights of others have none."""
    import torch

    from moqext_vllm.config import CONFIGS
    from moqext_vllm.linear import MoqextModelOptLinearMethod

    def method(quant_algo):
        config = {"quant_method": "modelopt", "quant_algo": quant_algo, "ignore": []}
        ours = next(each for each in CONFIGS if each.override_quantization_method(config, None))
        found = ours.from_config(config)
        quant = found.layer_quant("model.layers.0.mlp.down_proj")
        made = MoqextModelOptLinearMethod(quant, "down_proj", found.compute, found.fast_accum)
        made.partitions, made.in_features = (128,), 128
        return made

    def is_fast(quant_algo, **options):
        return method(quant_algo)._find_method(torch.device("cpu"), **options).fast_accum

    assert not is_fast("FP8")
    monkeypatch.setenv("MOQEXT_VLLM_FAST_ACCUM", "1")
    assert is_fast("FP8")
    assert is_fast("FP8", quantized_input=True)
    assert not is_fast("NVFP4")
    monkeypatch.setenv("MOQEXT_VLLM_FAST_ACCUM", "yes")
    with pytest.raises(ValueError, match="MOQEXT_VLLM_FAST_ACCUM: expected 0 or 1, got 'yes'"):
        method("FP8")


def test_names_are_mapped():
    from vllm.model_executor.models.utils import WeightsMapper

    from moqext_vllm.config import CONFIGS

    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["model.visual*", "lm_head"],
        "quantized_layers": {"model.language_model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}},
    }
    ours = CONFIGS[2].from_config(config)
    names = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
    ours.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=names))
    assert ours.layer_quant("language_model.model.layers.0.mlp.down_proj").quant_algo == "FP8"
    assert ours.layer_quant("language_model.model.layers.1.mlp.down_proj") is None
    assert "visual.*" in ours.config.exclude_modules


def test_configurations_are_pickled_to_the_engine():
    from moqext_vllm.config import CONFIGS

    config = CONFIGS[1].from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    )
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is type(config)
    assert again.config == config.config


def test_a_vllm_that_lacks_something_is_left_alone(monkeypatch, caplog):
    from vllm.model_executor.layers import quantization

    from moqext_vllm import plugin

    monkeypatch.setitem(plugin.NEEDED, "vllm.model_executor.layers.linear", ("LinearOfTomorrow",))
    monkeypatch.setitem(plugin.NEEDED, "vllm.not_there", ("x",))
    monkeypatch.setattr(quantization, "register_quantization_config", None)
    assert plugin.find_missing() == ["vllm.model_executor.layers.linear.LinearOfTomorrow", "vllm.not_there"]
    plugin.register()


def test_slots_that_were_never_filled_are_seen(rng):
    import torch

    from moqext_vllm.parameters import is_marked, marked, slots

    for dtype in (torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.bfloat16):
        tensor = marked((6, 8), dtype)
        assert [is_marked(slot) for slot in slots(tensor, [4, 2])] == [True, True]
        codes = torch.from_numpy(rng.integers(0, 0x70, (2, 8)).astype("uint8"))
        tensor[4:] = codes.view(dtype) if dtype.itemsize == 1 else codes.to(dtype)
        assert [is_marked(slot) for slot in slots(tensor, [4, 2])] == [True, False]
    nan = torch.full((2,), float("nan"))
    assert not is_marked(nan)  # a checkpoint's own NaN is no missing tensor
    assert [len(part) for part in slots(torch.zeros(4, 2), [192, 64, 64])] == [2, 1, 1]
    assert [len(part) for part in slots(torch.zeros(3), [192, 64, 64])] == [1, 1, 1]
    assert [len(part) for part in slots(torch.zeros(160, 2), [192, 64, 64])] == [96, 32, 32]
    assert [len(part) for part in slots(torch.zeros(96, 2), [192, 64, 64], "lora_a")] == [32, 32, 32]
