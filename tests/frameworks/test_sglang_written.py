"""SGLang's own classes of configurations read what `quantize` writes."""

import json

import pytest

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.layers.quantization import modelopt_quant  # noqa: E402

import moqext  # noqa: E402

pytestmark = pytest.mark.sglang
ATTENTION = "model.layers.0.self_attn"
CLASSES = {
    "FP8": "ModelOptFp8Config",
    "NVFP4": "ModelOptFp4Config",
    "W4A16_NVFP4": "ModelOptFp4Config",
    "MIXED_PRECISION": "ModelOptMixedPrecisionConfig",
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.mark.parametrize("algo", CLASSES)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_its_class_reads_both_documents(algo, file, data, tmp_path):
    moqext.Checkpoint(data / "checkpoints/llama_w4a16_nvfp4").convert(tmp_path / "original")
    with moqext.Checkpoint(tmp_path / "original") as original:
        scales = {name.removesuffix(".weight"): 4.0 for name in original.tensors}
        scales |= {f"{ATTENTION}.k_cache": 3.0, f"{ATTENTION}.v_cache": 5.0}
        mixed = {"rules": ["*mlp* NVFP4", "*self_attn* FP8"]}
        options = mixed if algo == "MIXED_PRECISION" else {"to": algo}
        original.quantize(tmp_path / "out", scales=scales, kv_cache="fp8", **options)
    document = json.loads((tmp_path / "out" / file).read_text())
    document = document.get("quantization_config", document) | {"packed_modules_mapping": PACKED}
    config = getattr(modelopt_quant, CLASSES[algo]).from_config(document)
    assert config.kv_cache_quant_algo == "FP8"
    layers = (f"{ATTENTION}.qkv_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj")
    assert not any(map(config.is_layer_excluded, layers))
    if algo == "MIXED_PRECISION":
        assert [config._resolve_quant_algo(layer) for layer in layers] == ["FP8", "NVFP4", "NVFP4"]
        assert config._resolve_quant_algo("lm_head") is None
    else:
        assert config.is_layer_excluded("lm_head")
        assert getattr(config, "is_w4a16", False) == (algo == "W4A16_NVFP4")
        assert getattr(config, "group_size", 16) == 16
