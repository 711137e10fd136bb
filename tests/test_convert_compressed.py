"""`convert --to compressed-tensors`: the same codes and scales in the form that llm-compressor writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError
from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.matrices import quantized_matrices
from moqext.reader.producers.reciprocal import divisor_of, factor_of

DATA = Path(__file__).parent / "data"
GENUINE = sorted(path.parent for path in DATA.glob("producers/ct_*/config.json"))
REFUSED = {
    "fp8_embedding": "a quantized embedding",
    "gpt_oss_fp8": "experts in one tensor",
    "llama4_nvfp4": "experts in one tensor",
    "llama_int4_awq": "W4A16_AWQ g128",
    "llama_int8_sq": "W8A8_SQ_PER_CHANNEL",
    "nvfp4_bias_kvnvfp4": "a cache in NVFP4",
    "w4a16_nvfp4_group_32": "W4A16_NVFP4 g32",
    "w4a8_nvfp4_fp8": "W4A8_NVFP4_FP8 g32",
}
OWN = [
    path.parent
    for folder in ("exports", "checkpoints")
    for path in sorted(DATA.glob(f"{folder}/*/config.json"))
    if not path.parent.name.startswith(("gpt_oss", "llama4", "llama_w4a8", "llama_int", "nvfp4_kv"))
    and path.parent.name not in REFUSED
]


def name_of(path):
    return path.name


def groups(directory):
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    return config, list(config["config_groups"].values())


@pytest.mark.parametrize("directory", GENUINE, ids=name_of)
def test_its_own_files_come_out_as_they_went_in(directory, tmp_path):
    """Names, shapes and bytes are the same; scales in bfloat16 are float32 of the same value."""
    Checkpoint(directory).convert(tmp_path / "out", to="compressed-tensors")
    with TensorFiles(directory) as before, TensorFiles(tmp_path / "out") as after:
        assert after.tensors.keys() == before.tensors.keys()
        for name, info in before.tensors.items():
            assert after.tensors[name].shape == info.shape, name
            if after.tensors[name].dtype == info.dtype:
                assert after.tensor(name, raw=True).tobytes() == before.tensor(name, raw=True).tobytes(), name
            else:
                assert (info.dtype, after.tensors[name].dtype) == ("BF16", "F32")
                wide = before.tensor(name, raw=True).astype(np.uint32) << 16
                np.testing.assert_array_equal(after.tensor(name).view(np.uint32), wide)
    (old, old_groups), (new, new_groups) = groups(directory), groups(tmp_path / "out")
    assert new["format"] == old["format"]
    assert set(old["ignore"]) <= set(new["ignore"])
    assert (new["kv_cache_scheme"] is None) == (old["kv_cache_scheme"] is None)
    for written in new_groups:
        (genuine,) = [group for group in old_groups if group["format"] == written["format"]]
        for part in ("weights", "input_activations"):
            if directory.name == "ct_mxfp4" and part == "input_activations":
                continue  # no file tells whether MXFP4 quantizes activations
            assert (written[part] is None) == (genuine[part] is None)
            for field, value in (written[part] or {}).items():
                told = genuine[part][field]
                assert told == value, (part, field)


@pytest.mark.parametrize("directory", OWN, ids=name_of)
def test_files_of_modelopt_keep_their_codes(directory, tmp_path):
    source = Checkpoint(directory)
    source.convert(tmp_path / "out", to="compressed-tensors")
    written = Checkpoint(tmp_path / "out")
    assert written.config.producer.name == "compressed-tensors"
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    after = {matrix.name: matrix for matrix in quantized_matrices(written)}
    uncalibrated = directory.name == "nvfp4_uncalibrated"
    for matrix in quantized_matrices(source):
        other = after.pop(matrix.name)
        assert other.quant_algo == ("W4A16_NVFP4" if uncalibrated else matrix.quant_algo)
        assert (
            written.tensor(other.tensor, raw=True).tobytes()
            == source.tensor(matrix.tensor, raw=True).tobytes()
        )
        expected = source.dequantize(matrix.name)
        np.testing.assert_allclose(written.dequantize(matrix.name), expected, rtol=2.5e-7, atol=0)
        for role in ("input_scale",):
            if role in matrix.record.tensors and role in other.record.tensors:
                theirs, ours = (
                    np.asarray(each.checkpoint.tensor(each.record.tensors[role]), np.float32).reshape(-1)
                    for each in (other, matrix)
                )
                np.testing.assert_allclose(theirs, ours, rtol=1.2e-7)
    assert not after
    values = {kv.name: dict(kv.values) for kv in source.kv_scales()}
    assert {kv.name: dict(kv.values) for kv in written.kv_scales()} == values
    assert [p.code for p in written.problems if p.severity == "error"] == []


@pytest.mark.parametrize("name, why", REFUSED.items())
def test_a_layer_without_such_a_form_is_refused_by_name(name, why, tmp_path):
    (directory,) = DATA.glob(f"*/{name}")
    with pytest.raises(CheckpointError, match=f"{why} has no form in compressed-tensors .* --to bf16"):
        Checkpoint(directory).convert(tmp_path / "out", to="compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_a_cache_without_scales_is_not_announced(tmp_path):
    result = Checkpoint(DATA / "exports/fp8_kvcast").convert(tmp_path / "out", to="compressed-tensors")
    assert any("a cache in FP8 is not announced" in note for note in result.notes)
    assert groups(tmp_path / "out")[0]["kv_cache_scheme"] is None


def test_divisors_and_factors_lead_back_to_each_other_within_one_bit(rng):
    for value in rng.uniform(1e-6, 1e-2, 200).astype(np.float32):
        assert abs(factor_of(divisor_of(value)) / np.float64(value) - 1) <= 2.0**-22
