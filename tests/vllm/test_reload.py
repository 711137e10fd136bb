"""Weights that change under a running engine: reloads, other weights of the same shapes, and a trainer's."""

import shutil

import pytest

from tests.vllm_cases import DATA, change, multiply

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

NAMES = ("llama_fp8_kvfp8", "llama_nvfp4_kvfp8", "llama_w4a16_nvfp4", "llama_int4_awq", "llama_int8_sq")
NAMES += ("qwen3moe_nvfp4",)


def rescale(tensors):
    """Changes scales of weights and activations under equal codes; those of fused layers get unequal."""
    for name, (dtype, *_) in list(tensors.items()):
        if dtype != "F32":
            continue
        if name.endswith(("up_proj.weight_scale", "up_proj.weight_scale_2", "v_proj.weight_scale_2")):
            multiply(tensors, name, 3)
        elif name.endswith(("down_proj.weight_scale", "down_proj.weight_scale_2", "o_proj.weight_scale")):
            multiply(tensors, name, 0.5)
        elif name.endswith(("down_proj.input_scale", "k_proj.input_scale")):
            multiply(tensors, name, 2)


@pytest.fixture(scope="module")
def reloaded(engine, tmp_path_factory):
    pairs = []
    for name in NAMES:
        other = tmp_path_factory.mktemp("other") / name
        shutil.copytree(DATA / "checkpoints" / name, other)
        change(other, rescale)
        pairs.append(f"{DATA / 'checkpoints' / name},{other}")
    return dict(zip(NAMES, engine("reload", *pairs), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_reloaded_weights_are_those_that_run(reloaded, name):
    found, in_place = reloaded[name]
    assert found["other alone"] != found["first"]  # or nothing could be seen
    assert found["again"] == found["first"]
    assert found["other"] == found["other alone"]
    assert found["back"] == found["first"]
    assert in_place


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_that_leaves_out_a_part_is_told(reloaded, name):
    kind, message = reloaded[name][0]["lacking"]
    assert kind == "CheckpointError"
    assert "model.layers.0.self_attn.qkv_proj: weight was never loaded for part 1 of the 3" in message
