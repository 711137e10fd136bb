"""Block scales in the 128 x 4 order of cuBLAS and exchanged nibbles: told, read right, refused in doubt."""

import json

import numpy as np
import pytest

import moqext
from moqext import Checkpoint, CheckpointError
from moqext.__main__ import main
from moqext.reader.formats.layout_statistics import explained, limit
from moqext.reference.producer import quantize_weight
from tests.expert_files import write_checkpoint

NAME = "model.layers.0.mlp.down_proj"
PLAIN_ERROR = 0.12
"""Relative error of NVFP4 read right; scales in the wrong order give three times that."""


def weight_of(rng, rows, columns, *outer):
    """A weight whose rows and columns differ in size, as those of real models do."""
    sizes = np.exp(0.5 * rng.standard_normal((*outer, rows, 1)) + 0.3 * rng.standard_normal((columns,)))
    return (0.05 * sizes * rng.standard_normal((*outer, rows, columns))).astype(np.float32)


def swizzled(scale):
    """In the tiles of cuBLAS, by the formula of its manual and not by `ops`."""
    rows, columns = scale.shape[-2:]
    tall, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    whole = np.zeros((*scale.shape[:-2], tall, wide), np.uint8)
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    place = (row // 128 * (wide // 4) + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    whole.reshape(*scale.shape[:-2], -1)[..., place] = scale
    return whole


def stored(weight, *, order="linear", nibbles="low", algo="NVFP4"):
    """The tensors of a linear, as (type, carrier) by role."""
    parts = {role: np.asarray(part) for role, part in quantize_weight(weight, algo).items()}
    codes, scale = parts["weight"].view(np.uint8), parts["weight_scale"].view(np.uint8)
    if nibbles == "high":
        codes = codes >> 4 | codes << 4
    mx = "weight_scale_2" not in parts
    tensors = {
        "weight": ("F8_E4M3" if algo == "MXFP8" else "U8", codes),
        "weight_scale": ("U8" if mx else "F8_E4M3", swizzled(scale) if order == "swizzled" else scale),
    }
    if not mx:
        tensors["weight_scale_2"] = ("F32", np.float32(parts["weight_scale_2"]).reshape(()))
    return tensors


def write(directory, layers, metadata=None, algo="NVFP4", **config):
    tensors = {f"{name}.{role}": value for name, parts in layers.items() for role, value in parts.items()}
    return write_checkpoint(directory, tensors, algo, metadata, **config)


def marker(**content):
    return "U8", np.frombuffer(json.dumps(content).encode(), np.uint8)


def error_of(checkpoint, weight, name=NAME):
    read = checkpoint.dequantize(name)
    return float(np.linalg.norm(read - weight) / np.linalg.norm(weight))


def codes_of(checkpoint):
    return {problem.code for problem in checkpoint.problems}


def test_a_padded_shape_proves_swizzled_scales(tmp_path, rng):
    weight = weight_of(rng, 96, 96)
    with Checkpoint(write(tmp_path, {NAME: stored(weight, order="swizzled")})) as checkpoint:
        assert error_of(checkpoint, weight) < PLAIN_ERROR
        assert checkpoint.layer(NAME).scale_layout == "swizzled"
        assert checkpoint.tensors[f"{NAME}.weight_scale"].shape == (96, 6)
        assert checkpoint.files.tensors[f"{NAME}.weight_scale"].shape == (128, 8)
        found = [problem for problem in checkpoint.problems if problem.code == "swizzled_scales"]
        assert [(problem.severity, problem.layer) for problem in found] == [("note", NAME)]


def test_layers_beside_a_padded_one_are_swizzled_too(tmp_path, rng):
    weight, name = weight_of(rng, 128, 64), "model.layers.0.mlp.up_proj"
    layers = {NAME: stored(weight_of(rng, 96, 96), order="swizzled"), name: stored(weight, order="swizzled")}
    with Checkpoint(write(tmp_path, layers)) as checkpoint:
        assert error_of(checkpoint, weight, name) < PLAIN_ERROR


def test_rows_are_read_across_tiles(tmp_path, rng):
    weight = weight_of(rng, 300, 160)
    with Checkpoint(write(tmp_path, {NAME: stored(weight, order="swizzled")})) as checkpoint:
        scale = f"{NAME}.weight_scale"
        whole = checkpoint.tensor(scale)
        for begin, end in ((0, 300), (5, 5), (127, 129), (250, 300)):
            np.testing.assert_array_equal(checkpoint.rows(scale, begin, end), whole[begin:end])
        with pytest.raises(ValueError, match="rows: expected a part"):
            checkpoint.rows(scale, 0, 301)


def test_values_show_swizzled_scales_that_nothing_tells(tmp_path, rng):
    weight = weight_of(rng, 128, 256)
    directory = write(tmp_path, {NAME: stored(weight, order="swizzled")})
    with Checkpoint(directory) as checkpoint:
        assert "doubtful_scale_layout" in codes_of(checkpoint)
        for use in (checkpoint.dequantize, checkpoint.load):
            with pytest.raises(CheckpointError, match="--scale-layout swizzled"):
                use(NAME)
        with pytest.raises(CheckpointError, match="doubtful_scale_layout"):
            checkpoint.convert(tmp_path / "out")
    with Checkpoint(directory, scale_layout="swizzled") as checkpoint:
        assert "doubtful_scale_layout" not in codes_of(checkpoint)
        assert error_of(checkpoint, weight) < PLAIN_ERROR


def test_a_layer_without_evidence_beside_swizzled_ones_is_doubtful(tmp_path, rng):
    layers = {
        NAME: stored(weight_of(rng, 128, 256), order="swizzled"),
        "model.layers.0.mlp.up_proj": stored(weight_of(rng, 128, 64), order="swizzled"),
    }
    with Checkpoint(write(tmp_path, layers)) as checkpoint:
        doubtful = [each.layer for each in checkpoint.problems if each.code == "doubtful_scale_layout"]
    assert sorted(doubtful) == sorted(layers)


def test_linear_scales_raise_no_doubt(tmp_path, rng):
    alike = rng.standard_normal((256, 512)).astype(np.float32)
    layers = {
        "a.unequal": stored(weight_of(rng, 256, 512)),
        "a.alike": stored(alike),
        "a.constant": stored(np.ones((128, 256), np.float32)),
        "a.zero": stored(np.zeros((128, 256), np.float32)),
        "a.tile": stored(rng.standard_normal((128, 64)).astype(np.float32)),
    }
    with Checkpoint(write(tmp_path, layers)) as checkpoint:
        assert "doubtful_scale_layout" not in codes_of(checkpoint)
        assert {layer.scale_layout for layer in checkpoint.layers()} == {"linear"}


def test_values_without_structure_are_within_the_limit(rng):
    for columns in (8, 16, 64):
        values = rng.standard_normal((128, columns))
        assert abs(explained(values) - explained(rng.permuted(values.ravel()).reshape(128, columns))) < limit(
            128, columns
        )
    assert explained(rng.standard_normal((128, 1)) + rng.standard_normal((1, 16))) > 0.999
    assert explained(np.ones((128, 16))) == 0


@pytest.mark.parametrize("told_by", ["marker", "metadata"])
def test_what_comfyui_writes_is_read_right(tmp_path, rng, told_by):
    weight = weight_of(rng, 128, 256)
    tensors = stored(weight, order="swizzled", nibbles="high")
    metadata = None
    if told_by == "marker":
        tensors["comfy_quant"] = marker(format="nvfp4")
    else:
        metadata = {"_quantization_metadata": json.dumps({"layers": {NAME: {"format": "nvfp4"}}})}
    with Checkpoint(write(tmp_path / "in", {NAME: tensors}, metadata)) as checkpoint:
        assert error_of(checkpoint, weight) < PLAIN_ERROR
        record = checkpoint.layer(NAME)
        assert (record.scale_layout, record.nibbles) == ("swizzled", "high")
        assert {"swizzled_scales", "exchanged_nibbles"} <= codes_of(checkpoint)
        assert not {"unowned_tensor", "doubtful_scale_layout"} & codes_of(checkpoint)
        checkpoint.convert(tmp_path / "out")
    with Checkpoint(tmp_path / "out") as plain:
        assert set(plain.tensors) == {f"{NAME}.weight"}


def test_flux_of_black_forest_labs_is_read_and_named(tmp_path, rng, capsys):
    """One file, metadata, swizzled scales and exchanged nibbles; of some layers no scale of activations."""
    shapes = {"double_blocks.0.img_mlp.0": (256, 128), "single_blocks.0.linear1": (384, 128)}
    weights = {name: weight_of(rng, *shape) for name, shape in shapes.items()}
    layers = {name: stored(each, order="swizzled", nibbles="high") for name, each in weights.items()}
    entries = {"format_version": "1.0", "layers": {name: {"format": "nvfp4"} for name in layers}}
    layers["double_blocks.0.img_attn.qkv"] = {"weight": ("BF16", np.zeros((384, 128), np.uint16))}
    layers["double_blocks.0.img_mlp.0"]["input_scale"] = "F32", np.float32(0.01).reshape(())
    write(tmp_path, layers, {"_quantization_metadata": json.dumps(entries)})
    (tmp_path / "config.json").unlink()
    assert main(["inspect", str(tmp_path / "model.safetensors")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("  Black Forest Labs · 1 file")
    assert any("single_blocks.*.linear1" in line and "NVFP4 g16, swizzled" in line for line in shown)
    with Checkpoint(tmp_path) as checkpoint:
        for name, weight in weights.items():
            assert error_of(checkpoint, weight, name) < PLAIN_ERROR


def test_markers_in_tensors_are_comfyui_s(tmp_path, rng):
    name = "double_blocks.0.img_mlp.0"
    tensors = stored(weight_of(rng, 256, 128), order="swizzled", nibbles="high")
    write(tmp_path, {name: tensors | {"comfy_quant": marker(format="nvfp4")}})
    (tmp_path / "config.json").unlink()
    assert Checkpoint(tmp_path).producer == "ComfyUI"


def test_metadata_of_modelopt_says_nothing_of_the_order(tmp_path, rng):
    weight = weight_of(rng, 128, 256)
    layers = json.dumps({"format_version": "1.0", "layers": {NAME: {"format": "nvfp4"}}})
    metadata = {"_quantization_metadata": layers, "quantization_config": json.dumps({"quant_algo": "NVFP4"})}
    with Checkpoint(write(tmp_path, {NAME: stored(weight)}, metadata)) as checkpoint:
        assert error_of(checkpoint, weight) < PLAIN_ERROR
        assert checkpoint.layer(NAME).is_plain


def test_values_that_contradict_a_marker_are_doubtful(tmp_path, rng):
    tensors = stored(weight_of(rng, 128, 256)) | {"comfy_quant": marker(format="nvfp4")}
    with Checkpoint(write(tmp_path, {NAME: tensors})) as checkpoint:
        assert "doubtful_scale_layout" in codes_of(checkpoint)


def test_swizzled_scales_of_mxfp8(tmp_path, rng):
    weight = weight_of(rng, 128, 512)
    tensors = stored(weight, order="swizzled", algo="MXFP8") | {"comfy_quant": marker(format="mxfp8")}
    with Checkpoint(write(tmp_path, {NAME: tensors}, algo="MXFP8")) as checkpoint:
        assert error_of(checkpoint, weight) < 0.05


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (marker(format="int8_tensorwise", convrot=True), "rotated weights"),
        (marker(format="svdquant_w4a4"), "not read here"),
        (marker(other=1), "names no format"),
        (("U8", np.frombuffer(b"nvfp4", np.uint8)), "not JSON"),
    ],
)
def test_a_marker_of_something_else_is_refused(tmp_path, rng, content, message):
    tensors = stored(weight_of(rng, 128, 256)) | {"comfy_quant": content}
    with Checkpoint(write(tmp_path, {NAME: tensors})) as checkpoint:
        found = [each for each in checkpoint.layer(NAME).problems if each.code == "foreign_layout"]
        assert len(found) == 1
        assert message in found[0].message
        with pytest.raises(CheckpointError, match="foreign_layout"):
            checkpoint.dequantize(NAME)


def test_exchanged_nibbles_are_read_when_told(tmp_path, rng):
    weight = weight_of(rng, 96, 64)
    directory = write(tmp_path, {NAME: stored(weight, nibbles="high")})
    with Checkpoint(directory, nibbles="high") as checkpoint:
        assert error_of(checkpoint, weight) < PLAIN_ERROR


def test_stacked_and_single_experts_are_read_alike(tmp_path, rng):
    container = "model.layers.0.mlp.experts"
    shapes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    weights = {(e, n): weight_of(rng, *shape) for e in range(2) for n, shape in shapes.items()}
    layers = {f"{container}.{e}.{n}": stored(w, order="swizzled") for (e, n), w in weights.items()}
    options = {"num_experts_per_tok": 1, "hidden_act": "silu"}
    single = Checkpoint(write(tmp_path / "one", layers, **options), scale_layout="swizzled")
    plain = {f"{container}.{e}.{n}": stored(w) for (e, n), w in weights.items()}
    linear = Checkpoint(write(tmp_path / "plain", plain, **options))
    stacks = {}
    for name in shapes:
        parts = [stored(weights[e, name], order="swizzled") for e in range(2)]
        for role, (dtype, _) in parts[0].items():
            last = ".weight" if role == "weight" else f".{role}"
            stacks[f"{container}.{name}{last}"] = dtype, np.stack([part[role][1] for part in parts])
    directory = write_checkpoint(tmp_path / "stacked", stacks, "NVFP4", **options)
    stacked = Checkpoint(directory, scale_layout="swizzled")
    x = rng.standard_normal((3, 256)).astype(np.float32)
    ids, shares = np.array([[0], [1], [0]], np.int32), np.ones((3, 1), np.float32)
    expected = linear.load(container, dtype="float32")(x, shares, ids)
    for checkpoint in (single, stacked):
        assert checkpoint.layer(container).scale_layout == "swizzled"
        np.testing.assert_array_equal(checkpoint.load(container, dtype="float32")(x, shares, ids), expected)


def test_options_of_the_commands_decide(tmp_path, rng, capsys):
    directory = write(tmp_path / "in", {NAME: stored(weight_of(rng, 128, 256), order="swizzled")})
    option = ["--scale-layout", "swizzled"]
    assert main(["inspect", str(directory), "--fail-on", "error"]) == 1
    assert main(["inspect", str(directory), "--fail-on", "error", *option]) == 0
    assert "NVFP4 g16, swizzled" in capsys.readouterr().out
    assert main(["verify", str(directory)]) == 1
    assert main(["verify", str(directory), *option]) == 0
    assert main(["convert", str(directory), str(tmp_path / "out")]) == 2
    assert main(["convert", str(directory), str(tmp_path / "out"), *option]) == 0
    against = ["compare", str(directory), str(tmp_path / "out"), "--max-error", "0.01"]
    assert main([*against, *option]) == 0


@pytest.mark.parametrize("option", ["scale_layout", "nibbles"])
def test_an_unknown_option_is_named(tmp_path, option):
    with pytest.raises(ValueError, match=f"{option}: expected None"):
        moqext.Checkpoint(tmp_path, **{option: "blocked"})


def test_scaled_fp8_of_comfyui_is_read(tmp_path, rng):
    weight = weight_of(rng, 64, 64)
    parts = quantize_weight(weight, "FP8")
    tensors = {
        "scaled_fp8": ("F8_E4M3", np.zeros(2, np.uint8)),
        f"{NAME}.weight": ("F8_E4M3", np.asarray(parts["weight"]).view(np.uint8)),
        f"{NAME}.scale_weight": ("F32", np.float32(parts["weight_scale"]).reshape(1)),
        f"{NAME}.scale_input": ("F32", np.ones(1, np.float32)),
    }
    with Checkpoint(write_checkpoint(tmp_path / "in", tensors, "FP8")) as checkpoint:
        assert error_of(checkpoint, weight) < 0.05
        assert codes_of(checkpoint) == {"foreign_scale_name", "uncalibrated_input_scale"}
        checkpoint.convert(tmp_path / "out")
    with Checkpoint(tmp_path / "out") as plain:
        assert set(plain.tensors) == {f"{NAME}.weight"}


def test_a_shape_that_contradicts_a_marker_is_doubtful(tmp_path, rng):
    tensors = stored(weight_of(rng, 96, 96)) | {"comfy_quant": marker(format="nvfp4")}
    with Checkpoint(write(tmp_path, {NAME: tensors})) as checkpoint:
        assert "doubtful_scale_layout" in codes_of(checkpoint)
        with pytest.raises(CheckpointError, match="their shape is that of linear ones"):
            checkpoint.dequantize(NAME)


def test_layers_that_were_not_sampled_go_with_those_that_were(tmp_path, rng, monkeypatch):
    names = [f"model.layers.{number}.mlp.down_proj" for number in range(4)]
    layers = {name: stored(weight_of(rng, 128, 256), order="swizzled") for name in names}
    monkeypatch.setattr("moqext.reader.formats.layout_statistics.SAMPLE_BYTES", 2 * 128 * 16)
    with Checkpoint(write(tmp_path, layers)) as checkpoint:
        doubtful = [each for each in checkpoint.problems if each.code == "doubtful_scale_layout"]
    assert [each.layer for each in doubtful] == names
    assert sum("of the variance" in each.message for each in doubtful) == 2
