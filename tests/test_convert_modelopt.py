"""`convert --to modelopt`: the same codes and scales under ModelOpt's names, whoever wrote the files."""

import json
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import Checkpoint, CheckpointError
from moqext.reader.matrices import quantized_matrices

DATA = Path(__file__).parent / "data"
FOREIGN = sorted(path.parent for path in DATA.glob("producers/*/config.json"))
OWN = sorted(
    path.parent for folder in ("exports", "checkpoints") for path in DATA.glob(f"{folder}/*/config.json")
)
REAL_BLOCKS = "fp8_pb_real"
"""The export whose scales of blocks have two dimensions, which all others of ModelOpt have in four."""


def name_of(path):
    return path.name


def content(checkpoint, name):
    return checkpoint.tensor(name, raw=True).tobytes()


def quantization(directory):
    own = json.loads((directory / "hf_quant_config.json").read_text())
    return own["quantization"], json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("directory", FOREIGN, ids=name_of)
def test_files_of_others_become_modelopts(directory, tmp_path):
    """Codes stay bit for bit, every layer means what it meant, and the form is that of ModelOpt's exports."""
    source = Checkpoint(directory)
    result = source.convert(tmp_path / "out", to="modelopt")
    written = Checkpoint(tmp_path / "out")
    assert written.config.producer.name == "modelopt"
    assert written.tensors.keys() == source.tensors.keys() == written.files.tensors.keys()
    assert [problem.code for problem in written.problems] == [problem.code for problem in source.problems]
    before = {matrix.name: matrix for matrix in quantized_matrices(source)}
    after = {matrix.name: matrix for matrix in quantized_matrices(written)}
    assert before.keys() == after.keys()
    assert result.dequantized == len(before)
    for name, matrix in before.items():
        assert after[name].quant_algo == matrix.quant_algo
        assert after[name].record.group_size == matrix.record.group_size
        assert content(written, matrix.tensor) == content(source, matrix.tensor)
        np.testing.assert_array_equal(written.dequantize(name), source.dequantize(name), err_msg=name)
        for role in ("weight_scale_2", "input_scale"):
            if role in matrix.record.tensors:
                info = written.tensors[after[name].record.tensors[role]]
                assert (info.dtype, info.shape) == ("F32", ())
    for name, info in source.tensors.items():
        if name.rpartition(".")[2] in ("weight", "bias") and info.dtype == "BF16":
            assert content(written, name) == content(source, name)
    assert set(written.config.exclude_modules) == {*source.config.exclude_modules, "model.embed_tokens"}
    assert [kv.values for kv in written.kv_scales()] == [kv.values for kv in source.kv_scales()]


@pytest.mark.parametrize("directory", OWN, ids=name_of)
def test_files_of_modelopt_stay_what_they_are(directory, tmp_path):
    source = Checkpoint(directory)
    source.convert(tmp_path / "out", to="modelopt")
    written = Checkpoint(tmp_path / "out")
    for name, info in source.tensors.items():
        if "_quantizer" in name:
            continue  # leftovers of the exporter
        new = written.tensors[name]
        assert new.dtype == info.dtype
        if directory.name != REAL_BLOCKS:
            assert new.shape == info.shape
        assert content(written, name) == content(source, name), name
    assert {layer.name: layer.format for layer in written.layers()} == {
        layer.name: layer.format for layer in source.layers()
    }
    own, inline = quantization(tmp_path / "out")
    for found, expected in zip((own, inline), quantization(directory), strict=True):
        for field in (
            "quant_algo",
            "group_size",
            "pre_quant_scale",
            "kv_cache_quant_algo",
            "kv_cache_scheme",
        ):
            spelled = "fp8_pb_wo" if expected.get(field) == "fp8_pb_real" else expected.get(field)
            assert found.get(field) == spelled, field
    listed = quantization(directory)[0].get("quantized_layers", {})
    assert moqext.QuantConfig.from_pretrained(tmp_path / "out").quant_algo == source.config.quant_algo
    assert bool(listed) == ("quantized_layers" in own)


def test_groups_of_config_json_are_written_as_modelopt_writes_them(tmp_path):
    """A group tells engines the size of blocks, which ModelOpt puts nowhere else in config.json."""
    Checkpoint(DATA / "producers/ct_nvfp4").convert(tmp_path / "out", to="modelopt")
    (group,) = quantization(tmp_path / "out")[1]["config_groups"].values()
    (expected,) = quantization(DATA / "exports/nvfp4_mlp_only")[1]["config_groups"].values()
    assert group == expected


def test_a_difference_is_told_where_a_divisor_has_no_exact_reciprocal(tmp_path):
    result = Checkpoint(DATA / "producers/ct_nvfp4").convert(tmp_path / "out", to="modelopt")
    (note,) = result.notes
    assert note.startswith("4 of 7 divisors of weights have no exact reciprocal: weights differ by at most ")
    result = Checkpoint(DATA / "producers/ct_mixed").convert(tmp_path / "mixed", to="modelopt")
    assert result.notes == ()  # all of them are powers of two


def test_a_plain_model_has_nothing_to_write(tmp_path):
    Checkpoint(DATA / "exports/w4a16_nvfp4").convert(tmp_path / "plain", to="bf16")
    with pytest.raises(CheckpointError, match="nothing quantized to write as ModelOpt does"):
        Checkpoint(tmp_path / "plain").convert(tmp_path / "out", to="modelopt")
    with pytest.raises(ValueError, match='expected "auto" or "source" with to=\'modelopt\''):
        Checkpoint(DATA / "exports/w4a16_nvfp4").convert(tmp_path / "out", to="modelopt", experts="stacked")
    assert not (tmp_path / "out").exists()


def test_scales_in_another_order_are_written_in_plain_order(tmp_path):
    """A file with swizzled block scales, as ComfyUI stores them, becomes one that engines read."""
    safetensors = pytest.importorskip("safetensors.numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(7)
    codes, scale, second = moqext.ops.quantize(rng.standard_normal((160, 96)).astype(np.float32), "nvfp4")
    scale = np.asarray(scale).view(np.uint8)
    swizzled = np.asarray(moqext.ops.swizzle_block_scales(scale)).reshape(256, 8)
    tensors = {
        "a.up_proj.weight": np.asarray(codes) << 4 | np.asarray(codes) >> 4,
        "a.up_proj.weight_scale": swizzled.view(ml_dtypes.float8_e4m3fn),
        "a.up_proj.weight_scale_2": np.asarray(second, np.float32),
        "a.up_proj.comfy_quant": np.frombuffer(b'{"format": "nvfp4"}', np.uint8),
    }
    (tmp_path / "in").mkdir()
    safetensors.save_file(tensors, tmp_path / "in/model.safetensors")
    Checkpoint(tmp_path / "in").convert(tmp_path / "out", to="modelopt")
    written = Checkpoint(tmp_path / "out")
    assert written.files.tensors.keys() == tensors.keys() - {"a.up_proj.comfy_quant"}
    np.testing.assert_array_equal(written.files.tensor("a.up_proj.weight"), codes)
    np.testing.assert_array_equal(written.files.tensor("a.up_proj.weight_scale", raw=True), scale)
    assert written.layers()[0].is_plain
