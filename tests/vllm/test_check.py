"""Faults of a checkpoint as a whole are told before anything is loaded."""

import json
import shutil

import numpy as np
import pytest

from moqext import ops
from tests.vllm_cases import DATA, change

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

GENUINE = sorted(
    path.parent for folder in ("checkpoints", "exports") for path in DATA.glob(f"{folder}/*/config.json")
)
NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(DATA / "checkpoints" / "llama_nvfp4_kvfp8", tmp_path / "damaged")


def check(directory):
    from moqext_vllm.config import MoqextModelOptFp4Config

    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    MoqextModelOptFp4Config.from_config(quantization).maybe_update_config(str(directory))


def test_all_that_is_lost_is_named_at_once(directory):
    def lose(tensors):
        del tensors[f"{NAME}.weight_scale"], tensors["model.layers.0.mlp.up_proj.weight_scale_2"]

    change(directory, lose)
    with pytest.raises(ValueError, match="2 errors:") as raised:
        check(directory)
    for text in ("missing_scale", NAME, "model.layers.0.mlp.up_proj", str(directory)):
        assert text in str(raised.value)


def test_a_file_that_is_gone_is_named(tmp_path):
    directory = shutil.copytree(DATA / "exports" / "nvfp4_sharded", tmp_path / "gone")
    gone = sorted(directory.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match="missing_shard") as raised:
        check(directory)
    assert gone.name in str(raised.value)


def test_scales_in_the_order_of_cublas_are_refused(directory):
    name = "model.layers.0.self_attn.k_proj"  # of 64 rows, which are padded to 128

    def swizzle(tensors):
        dtype, shape, data = tensors[f"{name}.weight_scale"]
        moved = np.asarray(ops.swizzle_block_scales(np.frombuffer(data, np.uint8).reshape(shape).copy()))
        tensors[f"{name}.weight_scale"] = dtype, list(moved.shape), moved.tobytes()

    change(directory, swizzle)
    with pytest.raises(ValueError, match=f"{name} is stored as NVFP4 g16, swizzled"):
        check(directory)


def test_it_can_be_left_out(directory, monkeypatch):
    change(directory, lambda tensors: tensors.pop(f"{NAME}.weight_scale"))
    monkeypatch.setenv("MOQEXT_VLLM_CHECK", "0")
    check(directory)


def test_what_is_no_checkpoint_is_left_to_vllm(tmp_path):
    from moqext_vllm.check import check_checkpoint

    check_checkpoint("organisation/model")
    check_checkpoint(str(tmp_path))


@pytest.mark.parametrize("directory", GENUINE, ids=lambda path: path.name)
def test_genuine_checkpoints_pass(directory):
    from moqext_vllm.check import check_checkpoint

    check_checkpoint(str(directory))


def test_the_engine_asks(engine, directory):
    change(directory, lambda tensors: tensors.pop(f"{NAME}.weight_scale"))
    _, message = engine("error", directory)[0]
    assert f"missing_scale: {NAME}" in message
