"""moqext_transformers.from_pretrained of checkpoints of other producers (tests/data/producers)."""

import json
import shutil

import pytest

import moqext

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")

import moqext_transformers  # noqa: E402
from moqext_torch import QuantLinear, QuantMoE  # noqa: E402

CASES = {
    "ct_fp8": 0.08,
    "ct_fp8_block": 0.12,
    "ct_fp8_dynamic": 0.08,
    "ct_mixed": 0.08,
    "ct_mxfp4": 1e-2,
    "ct_mxfp8": 1e-2,
    "ct_nvfp4": 1e-2,
    "ct_nvfp4a16": 1e-2,
    "ct_qwen3moe": 2e-2,
    "fp8_blocks": 0.1,
    "fp8_tensor": 0.08,
    "gpt_oss_mxfp4": 1e-2,
}
"""Relative difference of logits from those of the plain model with these weights: FP8 quantizes activations,
which random weights of one layer answer to much; the others differ by rounding to bfloat16 alone."""
TOKENS = torch.arange(1, 25).reshape(2, 12)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def logits(model):
    return model(TOKENS).logits.float()


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_plain_model_does(case, data, tmp_path):
    directory = data / "producers" / case
    moqext.Checkpoint(directory).convert(tmp_path / "plain", to="bf16")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    model, told = moqext_transformers.from_pretrained(
        directory, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {kind: keys for kind, keys in told.items() if keys} == {}
    assert any(isinstance(module, (QuantLinear, QuantMoE)) for module in model.modules())
    expected = logits(plain)
    assert (logits(model) - expected).norm() <= CASES[case] * expected.norm()


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_same_files_in_modelopts_form_do_and_saves_them_so(case, data, tmp_path):
    directory = data / "producers" / case
    moqext.Checkpoint(directory).convert(tmp_path / "converted", to="modelopt")
    converted = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "converted", dtype=torch.bfloat16
    )
    model = moqext_transformers.from_pretrained(directory, dtype=torch.bfloat16)
    assert torch.equal(logits(model), logits(converted))
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    with moqext.Checkpoint(tmp_path / "saved") as saved, moqext.Checkpoint(tmp_path / "converted") as other:
        assert saved.files.tensors.keys() == other.files.tensors.keys()
        assert saved.config.quant_algo == other.config.quant_algo
        codes = [name for name, info in other.tensors.items() if info.dtype in ("U8", "F8_E4M3")]
        for name in codes:
            assert saved.tensor(name, raw=True).tobytes() == other.tensor(name, raw=True).tobytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("case", ["mixtral_fp8", "qwen3moe_nvfp4"])
def test_experts_written_as_compressed_tensors_keep_their_scales(case, data, tmp_path):
    """Transformers' own reader leaves global scales of experts out; reciprocals differ in the last bit."""
    source = next(path for path in data.glob(f"*/{case}") if path.is_dir())
    moqext.Checkpoint(source).convert(tmp_path / "out", to="compressed-tensors")
    model, told = moqext_transformers.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert {kind: keys for kind, keys in told.items() if keys} == {}
    assert any(isinstance(module, QuantMoE) for module in model.modules())
    expected = logits(moqext_transformers.from_pretrained(source, dtype=torch.bfloat16))
    assert (logits(model) - expected).norm() <= 2e-2 * expected.norm()


def test_what_is_not_read_is_refused_before_anything_is_loaded(data, tmp_path):
    shutil.copytree(data / "producers" / "ct_fp8", tmp_path / "it")
    path = tmp_path / "it" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "int"
    path.write_text(json.dumps(config))
    with pytest.raises(moqext.ConfigError, match="8-bit ints are not read here"):
        moqext_transformers.from_pretrained(tmp_path / "it")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    path.write_text(json.dumps(config))
    with pytest.raises(moqext.ConfigError, match="quantized by 'gptq', not by ModelOpt"):
        moqext_transformers.from_pretrained(tmp_path / "it")
