"""Linears that a file holds fused, with an FP8 scale for each part: each row keeps the scale of its part."""

import json

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError, UnsupportedQuantization, ops, reference
from moqext.tools.verify import select_weights, verify_checkpoint

from .linear_cases import assert_close

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors = pytest.importorskip("safetensors.numpy")

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
QKV, GATE_UP = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
PARTS = {QKV: (64, 32, 32), GATE_UP: (96, 96)}


def fused(rng, name, inputs="one"):
    """Tensors of a fused linear whose parts have scales far apart; `inputs`: how many activation scales."""
    weights = [rng.standard_normal((rows, 64)) * 4.0**i for i, rows in enumerate(PARTS[name])]
    codes, scales = zip(
        *(ops.quantize(weight.astype(np.float32), "fp8_tensor") for weight in weights), strict=True
    )
    static = np.float32(0.02) if inputs == "one" else np.float32([0.02 + 0.01 * i for i in range(len(codes))])
    return {
        f"{name}.weight": np.concatenate([np.asarray(code) for code in codes]).view(ml_dtypes.float8_e4m3fn),
        f"{name}.weight_scale": np.array([float(scale) for scale in scales], np.float32),
        f"{name}.input_scale": static,
    }


def write(directory, tensors, model=MODEL, **config):
    safetensors.save_file(
        {name: np.asarray(value) for name, value in tensors.items()}, directory / "model.safetensors"
    )
    quantization = {"quant_algo": "FP8", "quant_method": "modelopt"}
    (directory / "config.json").write_text(
        json.dumps({"quantization_config": quantization, "dtype": "bfloat16", **model, **config})
    )
    return directory


def expected_weight(tensors, name):
    values = reference.decode(np.asarray(tensors[f"{name}.weight"]).view(np.uint8), "e4m3")
    return values * np.repeat(tensors[f"{name}.weight_scale"], PARTS[name])[:, None]


@pytest.mark.parametrize("inputs", ["one", "each"])
@pytest.mark.parametrize("name", PARTS)
def test_each_part_keeps_its_scale(rng, tmp_path, name, inputs):
    tensors = fused(rng, name, inputs)
    with Checkpoint(write(tmp_path, tensors)) as ckpt:
        assert not [problem for problem in ckpt.problems if problem.severity == "error"]
        record = ckpt.layer(name)
        assert (record.quant_algo, record.partitions) == ("FP8", PARTS[name])
        np.testing.assert_array_equal(ckpt.dequantize(name), expected_weight(tensors, name))
        layer = ckpt.load(name, dtype="float32")
        assert layer.method.out_partitions == PARTS[name]
        x = rng.standard_normal((5, 64)).astype(np.float32)
        y, begin = layer(x), 0
        scales = np.broadcast_to(tensors[f"{name}.input_scale"], len(PARTS[name]))
        for index, rows in enumerate(PARTS[name]):
            params = {
                "weight": np.asarray(tensors[f"{name}.weight"])[begin : begin + rows],
                "weight_scale": tensors[f"{name}.weight_scale"][index : index + 1],
                "input_scale": scales[index : index + 1],
            }
            expected = reference.linear(x, params, "FP8", out_dtype="float64")
            assert_close(y[:, begin : begin + rows], expected, "float32")
            begin += rows


@pytest.mark.parametrize("to", ["bf16", "fp32"])
def test_converted(rng, tmp_path, to):
    tensors = fused(rng, QKV) | fused(rng, GATE_UP)
    (tmp_path / "in").mkdir()
    Checkpoint(write(tmp_path / "in", tensors)).convert(tmp_path / "out", to=to)
    with Checkpoint(tmp_path / "out") as plain:
        for name in PARTS:
            found = plain.tensor(f"{name}.weight").astype(np.float32)
            limit = 2.0**-8 if to == "bf16" else 0
            np.testing.assert_allclose(found, expected_weight(tensors, name), rtol=limit)


@pytest.mark.parametrize("inputs", ["one", "each"])
def test_verified(rng, tmp_path, inputs):
    with Checkpoint(write(tmp_path, fused(rng, QKV, inputs) | fused(rng, GATE_UP, inputs))) as ckpt:
        rows = list(verify_checkpoint(ckpt, select_weights(ckpt), 7))
    assert [row.status for row in rows] == ["ok", "ok"], rows


REFUSED = {
    "heads that are not told": (QKV, {}),
    "heads of another width": (QKV, MODEL | {"head_dim": 8}),
    "heads that are no numbers": (QKV, MODEL | {"num_attention_heads": "4"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_of_unknown_rows_are_refused_by_name(rng, tmp_path, case):
    name, model = REFUSED[case]
    with Checkpoint(write(tmp_path, fused(rng, name), model)) as ckpt:
        problem = next(problem for problem in ckpt.problems if problem.severity == "error")
        assert (problem.code, problem.layer) == ("shape_mismatch", name)
        assert problem.message.startswith("one scale for each of q_proj, k_proj, v_proj, whose rows")
        with pytest.raises(CheckpointError, match="one scale for each of q_proj, k_proj, v_proj"):
            ckpt.load(name)


def test_heads_of_a_text_config(rng, tmp_path):
    with Checkpoint(write(tmp_path, fused(rng, QKV), {"text_config": MODEL})) as ckpt:
        assert ckpt.layer(QKV).partitions == PARTS[QKV]


def test_several_scales_of_what_is_not_fused(rng, tmp_path):
    tensors = {key.replace("qkv_proj", "o_proj"): value for key, value in fused(rng, QKV).items()}
    with Checkpoint(write(tmp_path, tensors)) as ckpt:
        messages = [problem.message for problem in ckpt.problems if problem.code == "shape_mismatch"]
    assert messages[0].startswith("the scale of a weight of [128, 64] has shape [3]; expected [], [128] or")


def test_parts_are_not_fused_again(rng, tmp_path):
    ckpt = Checkpoint(write(tmp_path, fused(rng, QKV) | fused(rng, GATE_UP)))
    with ckpt, pytest.raises(UnsupportedQuantization, match="a scale for each of its parts"):
        ckpt.load([QKV, GATE_UP])


@pytest.mark.parametrize("inputs", ["one", "each"])
def test_in_torch(rng, tmp_path, inputs):
    torch = pytest.importorskip("torch", minversion="2.10")
    moqext_torch = pytest.importorskip("moqext_torch")
    with Checkpoint(write(tmp_path, fused(rng, QKV, inputs))) as ckpt:
        layer = moqext_torch.QuantLinear.from_checkpoint(ckpt, QKV, dtype=torch.float32)
        expected = ckpt.load(QKV, dtype="float32")
    x = rng.standard_normal((3, 64)).astype(np.float32)
    assert layer.out_partitions == PARTS[QKV]
    np.testing.assert_array_equal(layer(torch.from_numpy(x)).numpy(), expected(x))
    assert layer.state_dict()["weight_scale"].shape == (3,)
