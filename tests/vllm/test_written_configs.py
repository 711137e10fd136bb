"""vLLM's own classes of configurations read what `quantize` and `convert --to compressed-tensors` write."""

import json
from types import SimpleNamespace

import pytest

import moqext
from tests.vllm_cases import DATA

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

ATTENTION = "model.layers.0.self_attn"
CLASSES = {
    "FP8": "ModelOptFp8Config",
    "FP8_PER_CHANNEL_PER_TOKEN": "ModelOptFp8Config",
    "FP8_PB_WO": "ModelOptFp8Config",
    "NVFP4": "ModelOptNvFp4Config",
    "W4A16_NVFP4": "ModelOptNvFp4Config",
    "MXFP8": "ModelOptMxFp8Config",
    "MIXED_PRECISION": "ModelOptMixedPrecisionConfig",
}
SCHEMES = {
    "FP8": "CompressedTensorsW8A8Fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "CompressedTensorsW8A8Fp8",
    "FP8_PB_WO": "CompressedTensorsW8A8Fp8",
    "MXFP8": "CompressedTensorsW8A8Mxfp8",
    "NVFP4": "find a kernel that can implement the NVFP4 linear layer",
    "W4A16_NVFP4": "Marlin FP4 not available",
    "MXFP4": "find a kernel that can implement the MXFP4 linear layer",
}
"""Algorithm -> the class of the scheme, or what a CPU lacks for the one that was chosen."""
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """`written(algorithm)`: the directory of a model that was quantized so, with a cache in FP8."""
    place = tmp_path_factory.mktemp("written")
    moqext.Checkpoint(DATA / "checkpoints/llama_w4a16_nvfp4").convert(place / "original")

    def write(algo):
        out = place / algo
        mixed = {"rules": ["*mlp* NVFP4", "*self_attn* FP8"]}
        with moqext.Checkpoint(place / "original") as original:
            scales = {name.removesuffix(".weight"): 4.0 for name in original.tensors}
            scales |= {f"{ATTENTION}.k_cache": 3.0, f"{ATTENTION}.v_cache": 5.0}
            options = mixed if algo == "MIXED_PRECISION" else {"to": algo}
            original.quantize(out, scales=scales, kv_cache="fp8", overwrite=True, **options)
        return out

    return write


def quantization(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("algo", CLASSES)
def test_its_class_for_modelopt_reads_what_is_quantized_here(algo, written):
    from vllm.model_executor.layers.quantization import modelopt

    document = quantization(written(algo))
    families = [getattr(modelopt, name) for name in dict.fromkeys(CLASSES.values())]
    claims = [each.__name__ for each in families if each.override_quantization_method(document, None)]
    assert (claims or ["ModelOptFp8Config"]) == [CLASSES[algo]]
    config = getattr(modelopt, CLASSES[algo]).from_config(document)
    config.packed_modules_mapping = PACKED
    layers = (f"{ATTENTION}.qkv_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj")
    assert not any(map(config.is_layer_excluded, layers))
    if algo == "MIXED_PRECISION":
        formats = [config._resolve_quant_algo(layer) for layer in layers]
        assert formats == ["FP8", "NVFP4", "NVFP4"]
        assert config._resolve_quant_algo("lm_head") is None
    else:
        assert config.is_layer_excluded("lm_head")
    cache = [getattr(config, name, None) for name in ("kv_cache_quant_algo", "kv_cache_quant_method")]
    assert "FP8" in cache


@pytest.mark.parametrize("algo", SCHEMES)
def test_its_class_for_compressed_tensors_reads_what_is_converted_here(algo, written, tmp_path):
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    moqext.Checkpoint(written(algo)).convert(tmp_path / "out", to="compressed-tensors")
    config = compressed_tensors.CompressedTensorsConfig.from_config(quantization(tmp_path / "out"))
    config.packed_modules_mapping = PACKED
    assert config.kv_cache_scheme["num_bits"] == 8
    settings = VllmConfig()
    settings.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with set_current_vllm_config(settings):
        layer = torch.nn.Linear(4, 4)
        if SCHEMES[algo].startswith("Compressed"):
            scheme = config.get_scheme(layer, f"{ATTENTION}.qkv_proj")
            assert type(scheme).__name__ == SCHEMES[algo]
        else:
            with pytest.raises(ValueError, match=SCHEMES[algo]):
                config.get_scheme(layer, f"{ATTENTION}.qkv_proj")
        assert compressed_tensors.should_ignore_layer("lm_head", config.ignore, PACKED)
