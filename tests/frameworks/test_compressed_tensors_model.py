"""Transformers with compressed-tensors makes the same logits of `convert --to compressed-tensors`."""

import pytest

import moqext

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
compressed = pytest.importorskip("compressed_tensors.quantization")
pytest.importorskip("accelerate")

TOKENS = torch.arange(1, 25).reshape(2, 12)
CASES = [
    "checkpoints/llama_fp8_kvfp8",
    "checkpoints/llama_fp8_pb_wo",
    "checkpoints/llama_fp8_pc_pt",
    "checkpoints/llama_mxfp8",
    "checkpoints/llama_nvfp4_kvfp8",
    "checkpoints/llama_w4a16_nvfp4",
    "exports/fp8_bias_kvfp8",
    "exports/mixed_fp8_nvfp4",
    "exports/mxfp4",
]


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def load(directory, dtype, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options)


def compare_weights(directory, tmp_path):
    """Checks that its reading of a directory, without quantized activations, is the plain model of moqext's.

    It makes bfloat16 of codes in 4 bits and of MX formats, and multiplies FP8 in the type of the model.
    """
    with moqext.Checkpoint(directory) as checkpoint:
        fp8 = {layer.quant_algo.startswith("FP8") for layer in checkpoint.layers()}
        to, dtype = ("fp32", torch.float32) if fp8 == {True} else ("bf16", torch.bfloat16)
        checkpoint.convert(tmp_path / "plain", to=to)
    model, told = load(directory, dtype, output_loading_info=True)
    kinds = {kind: keys for kind, keys in told.items() if keys}
    unexpected = kinds.pop("unexpected_keys", ())
    assert not kinds
    assert all(key.endswith((".k_scale", ".v_scale")) for key in unexpected)  # some versions have no place
    assert type(model.config.quantization_config).__name__ == "CompressedTensorsConfig"
    quantized = [module for module in model.modules() if hasattr(module, "quantization_scheme")]
    assert quantized
    if any(module.quantization_scheme.input_activations for module in quantized):
        with_activations = logits(model)
        model.apply(compressed.disable_quantization)
        assert not torch.equal(logits(model), with_activations)
    expected = logits(load(tmp_path / "plain", dtype))
    if len(fp8) == 1:
        assert torch.equal(logits(model), expected)
    else:
        assert (logits(model) - expected).norm() < 0.02 * expected.norm()  # scales of FP8 in bfloat16


@pytest.mark.parametrize("case", CASES)
def test_it_loads_what_is_written_of_modelopts_files(case, data, tmp_path):
    moqext.Checkpoint(data / case).convert(tmp_path / "out", to="compressed-tensors")
    compare_weights(tmp_path / "out", tmp_path)


@pytest.mark.parametrize(
    "to", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W4A16_NVFP4", "MXFP4", "MXFP8"]
)
def test_it_loads_a_model_that_was_quantized_here(to, data, tmp_path):
    moqext.Checkpoint(data / "checkpoints/llama_w4a16_nvfp4").convert(tmp_path / "original")
    with moqext.Checkpoint(tmp_path / "original") as original:
        magnitudes = {name.removesuffix(".weight"): 4.0 for name in original.tensors}
        original.quantize(tmp_path / "quantized", to=to, scales=magnitudes)
    moqext.Checkpoint(tmp_path / "quantized").convert(tmp_path / "out", to="compressed-tensors")
    compare_weights(tmp_path / "out", tmp_path)
