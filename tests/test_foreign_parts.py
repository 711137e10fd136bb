"""Parts of a checkpoint in another form than the usual one: read, or no matter of what does not use them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError, UnsupportedQuantization
from moqext.__main__ import main
from moqext.reference import dequantize

from .expert_files import write_checkpoint

N, K = 24, 64
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def codes(rng: Any, *shape: int) -> np.ndarray:
    """E4M3 codes of numbers, none of them NaN."""
    return (rng.integers(0, 0x7F, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)


def fp8(name: str, weight: np.ndarray, scale: np.ndarray) -> dict[str, Any]:
    return {f"{name}.weight": ("F8_E4M3", weight), f"{name}.weight_scale": ("F32", scale)}


def run(directory: Path, *command: str) -> int:
    return main([*command[:1], str(directory), *command[1:]])


def converts(directory: Path, name: str, expected: np.ndarray) -> None:
    """Checks that `convert` writes the expected weight, rounded to bfloat16."""
    with Checkpoint(directory) as source:
        source.convert(directory.with_name("out"))
    with Checkpoint(directory.with_name("out")) as plain:
        bits = plain.tensor(f"{name}.weight", raw=True)
    values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert values.shape == expected.shape
    np.testing.assert_allclose(values, expected, rtol=2**-8)


def test_scales_of_rows_with_an_axis_of_one(rng: Any, tmp_path: Path) -> None:
    weight, scale = codes(rng, N, K), rng.uniform(0.5, 2, N).astype(np.float32)
    directory = write_checkpoint(
        tmp_path / "in", fp8(UP, weight, scale[:, None]), "FP8_PER_CHANNEL_PER_TOKEN"
    )
    expected = dequantize({"weight": weight, "weight_scale": scale}, "FP8_PER_CHANNEL_PER_TOKEN")
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.problems == ()
        assert (
            checkpoint.tensor(f"{UP}.weight_scale").shape
            == checkpoint.tensors[f"{UP}.weight_scale"].shape
            == (N,)
        )
        np.testing.assert_array_equal(checkpoint.rows(f"{UP}.weight_scale", 3, 9), scale[3:9])
        np.testing.assert_array_equal(checkpoint.dequantize(UP), expected)
        layer = checkpoint.load(UP)
    usual = fp8(UP, weight, scale)
    with Checkpoint(write_checkpoint(tmp_path / "usual", usual, "FP8_PER_CHANNEL_PER_TOKEN")) as checkpoint:
        x = rng.integers(0, 0x4000, (3, K), dtype=np.uint16)
        np.testing.assert_array_equal(layer(x), checkpoint.load(UP)(x))
    converts(directory, UP, expected)


def test_codes_of_type_f4(rng: Any, tmp_path: Path) -> None:
    """Two codes in a byte under the format's own name for them."""
    packed, scale = (
        rng.integers(0, 256, (N, K // 2), dtype=np.uint8),
        rng.integers(1, 0x7F, (N, K // 16), dtype=np.uint8),
    )
    tensors = {f"{UP}.weight": ("U8", packed), f"{UP}.weight_scale": ("F8_E4M3", scale)}
    tensors |= {
        f"{UP}.weight_scale_2": ("F32", np.float32(0.01)),
        f"{UP}.input_scale": ("F32", np.float32(0.02)),
    }
    directory = write_checkpoint(tmp_path / "in", tensors, "NVFP4")
    with Checkpoint(directory) as checkpoint:
        expected = checkpoint.dequantize(UP)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[f"{UP}.weight"] |= {"dtype": "F4", "shape": [N, K]}
    text = json.dumps(header).encode().ljust(length + 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.problems == ()
        np.testing.assert_array_equal(checkpoint.dequantize(UP), expected)
        np.testing.assert_array_equal(checkpoint.rows(f"{UP}.weight", 3, 9), packed[3:9])
    assert run(directory, "verify") == 0
    converts(directory, UP, expected)


def test_mxfp4_as_signed_bytes(rng: Any, tmp_path: Path) -> None:
    """A layer that stayed in the format of the model's maker, beside layers that were quantized."""
    packed, scale = (
        rng.integers(-128, 128, (N, K // 2), dtype=np.int8),
        rng.integers(110, 125, (N, K // 32), dtype=np.uint8),
    )
    tensors = {"mtp.0.w1.weight": ("I8", packed), "mtp.0.w1.scale": ("F8_E8M0", scale)}
    tensors |= fp8(UP, codes(rng, N, K), np.float32(0.25)) | {f"{UP}.input_scale": ("F32", np.float32(0.25))}
    directory = write_checkpoint(tmp_path / "in", tensors, {"quant_algo": "FP8", "ignore": ["mtp*"]})
    expected = dequantize({"weight": packed.view(np.uint8), "weight_scale": scale}, "MXFP4")
    with Checkpoint(directory) as checkpoint:
        assert {problem.severity for problem in checkpoint.problems} <= {"note", "warning"}
        assert checkpoint.layer("mtp.0.w1").stored_algo == "MXFP4"
        np.testing.assert_array_equal(checkpoint.dequantize("mtp.0.w1"), expected)
    assert run(directory, "verify") == 0
    converts(directory, "mtp.0.w1", expected)


@pytest.mark.parametrize(
    "shape, scale",
    [((6, 4, 3, 3), ()), ((6, 4, 3, 3), (6, 1, 1, 1)), ((6, 1, 4), (6,)), ((6, 3, 2, 4, 4), (1,))],
    ids=["one scale", "a scale of each channel", "one dimension", "three dimensions"],
)
def test_convolutions_in_fp8_are_read(
    rng: Any, tmp_path: Path, shape: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    name = "visual.conv1"
    weight, scales = codes(rng, *shape), rng.uniform(0.5, 2, scale).astype(np.float32)
    tensors = fp8(name, weight, scales) | fp8(UP, codes(rng, N, K), np.float32(0.25))
    directory = write_checkpoint(tmp_path / "in", tensors, "FP8")
    flat = {
        "weight": weight.reshape(6, -1),
        "weight_scale": scales.reshape(-1) if scales.size > 1 else scales,
    }
    algo = "FP8" if scales.size == 1 else "FP8_PER_CHANNEL_PER_TOKEN"
    expected = dequantize(flat, algo).reshape(shape)
    with Checkpoint(directory) as checkpoint:
        assert not [problem for problem in checkpoint.problems if problem.severity == "error"]
        record = checkpoint.layer(name)
        assert (record.kind, record.shape) == ("convolution", shape)
        np.testing.assert_array_equal(checkpoint.dequantize(name), expected)
        with pytest.raises(UnsupportedQuantization, match="a convolution"):
            checkpoint.load(name)
        checkpoint.convert(tmp_path / "fp8", to="fp8")
    assert run(directory, "verify") == 0
    with Checkpoint(tmp_path / "fp8") as requantized:
        assert requantized.tensors[f"{name}.weight"].dtype == "BF16"
        assert requantized.tensors[f"{name}.weight"].shape == shape
    converts(directory, name, expected)


CACHES = {
    "of each head": np.full(2, 0.25, np.float32),
    "zero": np.float32(0),
    "a matrix": np.ones((2, 2), np.float32),
}


@pytest.mark.parametrize("kind", CACHES)
def test_cache_scales_stop_nothing_that_does_not_use_them(rng: Any, tmp_path: Path, kind: str) -> None:
    weight = codes(rng, N, K)
    tensors = fp8("model.layers.0.self_attn.k_proj", weight, np.float32(0.25))
    tensors |= {f"model.layers.0.self_attn.{role}_scale": ("F32", CACHES[kind]) for role in "kv"}
    directory = write_checkpoint(
        tmp_path / "in", tensors, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    )
    k = "model.layers.0.self_attn.k_proj"
    converts(directory, k, dequantize({"weight": weight, "weight_scale": np.float32(0.25)}, "FP8"))
    with Checkpoint(directory) as checkpoint:
        checkpoint.load(k)
        errors = [problem.code for problem in checkpoint.problems if problem.severity == "error"]
        if kind == "of each head":
            assert errors == []
            assert checkpoint.kv_scales()[0].values == {}
        else:
            assert set(errors) == {"scale_zero" if kind == "zero" else "shape_mismatch"}
            with pytest.raises(CheckpointError, match="cannot be converted"):
                checkpoint.convert(tmp_path / "fp8", to="fp8")


def test_one_scale_of_keys_and_values(rng: Any, tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn"
    tensors = fp8(f"{attention}.k_proj", codes(rng, N, K), np.float32(0.25))
    tensors |= fp8(f"{attention}.v_proj", codes(rng, N, K), np.float32(0.25))
    tensors[f"{attention}.kv_scale"] = ("F32", np.float32(0.5))
    directory = write_checkpoint(
        tmp_path / "in", tensors, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    )
    with Checkpoint(directory) as checkpoint:
        (record,) = checkpoint.kv_scales()
        assert record.values == {"k_scale": 0.5, "v_scale": 0.5}
        assert [problem.code for problem in record.problems] == ["old_kv_scale_name"]


def test_keys_that_are_the_values_have_one_scale(rng: Any, tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn"
    tensors = fp8(f"{attention}.k_proj", codes(rng, N, K), np.float32(0.25))
    tensors[f"{attention}.k_proj.k_scale"] = ("F32", np.float32(0.5))
    directory = write_checkpoint(
        tmp_path / "in", tensors, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    )
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.kv_scales()[0].problems == ()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.altup.correct_output_scale",
        "model.layers.0.router.scale",
        "model.layers.0.router.per_expert_scale",
        "model.layers.0.layer_scalar",
        "model.layers.0.hidden_states_input_scale",
        "visual.blocks.0.ls1.gamma",
        "logit_scale",
        "encoder.layers.0.self_attn.per_dim_scale",
        "layers.0.hc_attn_scale",
    ],
)
def test_parameters_that_are_no_scales_of_quantization(rng: Any, tmp_path: Path, name: str) -> None:
    tensors = fp8(UP, codes(rng, N, K), np.float32(0.25)) | {f"{UP}.input_scale": ("F32", np.float32(0.25))}
    tensors[name] = ("BF16", rng.integers(0, 0x3F80, 8, dtype=np.uint16))
    with Checkpoint(write_checkpoint(tmp_path / "in", tensors, "FP8")) as checkpoint:
        assert checkpoint.problems == ()


@pytest.mark.parametrize(
    "name", ["experts.w13_weight_scale", "model.x.foo_weight_scale", "y_proj_input_scale"]
)
def test_scales_of_no_layer_are_told(rng: Any, tmp_path: Path, name: str) -> None:
    tensors = fp8(UP, codes(rng, N, K), np.float32(0.25)) | {f"{UP}.input_scale": ("F32", np.float32(0.25))}
    tensors[name] = ("F32", np.float32(1))
    with Checkpoint(write_checkpoint(tmp_path / "in", tensors, "FP8")) as checkpoint:
        assert [problem.code for problem in checkpoint.problems] == ["unowned_tensor"]


def test_half_of_the_block_scales_is_no_weight(rng: Any, tmp_path: Path) -> None:
    packed, scale = (
        rng.integers(0, 256, (N, K // 2), dtype=np.uint8),
        rng.integers(1, 0x7F, (N, K // 16), dtype=np.uint8),
    )
    tensors = {f"{UP}.weight": ("U8", packed), f"{UP}.weight_scale": ("F8_E4M3", scale[:, ::2].copy())}
    tensors[f"{UP}.weight_scale_2"] = ("F32", np.float32(0.01))
    directory = write_checkpoint(tmp_path / "in", tensors, "NVFP4")
    with Checkpoint(directory) as checkpoint:
        for use in (checkpoint.dequantize, checkpoint.load):
            with pytest.raises(CheckpointError, match="partial_scales"):
                use(UP)
        with pytest.raises(CheckpointError, match="partial_scales"):
            checkpoint.convert(tmp_path / "out")
    assert run(directory, "verify") == 1
