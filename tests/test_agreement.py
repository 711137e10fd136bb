"""The check of the headers and the loader agree: what is stored loads and dequantizes right, or is an error.

Layers of every format that runs, with their scales in other types, zero or damaged, under unusual names. A
record without an error has to dequantize and run as the reference says; one with an error must not load.
"""

import json
from typing import Any

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError, UnsupportedQuantization, reference

from .linear_cases import ALGOS, assert_within_rounding, random_case, random_x

ROWS, COLUMNS = 160, 288
BYTES = {"F8_E4M3", "F8_E8M0", "U8", "F8_E4M3FNUZ"}


def write(path: Any, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file whose types are named as they are, whatever NumPy calls their carriers."""
    header, content = {}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        content += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def stored(role: str, value: np.ndarray, algo: str) -> tuple[str, np.ndarray]:
    """A tensor as an exporter writes it: data type and array."""
    if role == "weight":
        return ("U8" if "NVFP4" in algo else "F8_E4M3"), value
    return ("F8_E4M3" if value.dtype == np.uint8 else "F32"), value


def powers_of_two(values: np.ndarray) -> np.ndarray:
    """The exponents of the nearest powers of two, as bytes."""
    return np.clip(np.round(np.log2(np.maximum(values, 2.0**-127))) + 127, 0, 254).astype(np.uint8)


CASTS = {
    "F32": lambda values: ("F32", values.astype(np.float32)),
    "F64": lambda values: ("F64", values.astype(np.float64)),
    "F16": lambda values: ("F16", values.astype(np.float16)),
    "BF16": lambda values: ("BF16", reference.encode(values.astype(np.float32), "bfloat16")),
    "E8M0": lambda values: ("F8_E8M0", powers_of_two(values)),
    "U8": lambda values: ("U8", powers_of_two(values)),
    "I32": lambda values: ("I32", np.ones(values.shape, np.int32)),
}


def check(directory: Any, tensors: dict[str, tuple[str, np.ndarray]], algo: str, name: str, rng: Any) -> str:
    """Writes the layer, opens it, and holds what the reader says against what dequantizing and running do.

    Returns "right" or the codes of its errors.
    """
    write(directory / "model.safetensors", {f"{name}.{role}": value for role, value in tensors.items()})
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo}}
    (directory / "hf_quant_config.json").write_text(json.dumps(config))
    with Checkpoint(directory) as checkpoint:
        errors = [problem for problem in checkpoint.problems if problem.severity == "error"]
        if errors:
            with pytest.raises((CheckpointError, UnsupportedQuantization)):
                checkpoint.load(name)
            if {problem.code for problem in errors} & {"lost_scale", "conflicting_tensors", "unknown_format"}:
                with pytest.raises(CheckpointError):
                    checkpoint.dequantize(name)
            return ",".join(sorted({problem.code for problem in errors}))
        record = checkpoint.layer(name)
        assert record.kind == "linear"
        params = {role: checkpoint.tensor(tensor) for role, tensor in record.tensors.items()}
        expected = reference.dequantize(params, record.quant_algo, group_size=record.group_size)
        np.testing.assert_array_equal(checkpoint.dequantize(name), expected)
        x = random_x(rng, (5, COLUMNS), "bfloat16")
        y = checkpoint.load(name)(x)
        options = {"group_size": record.group_size, "out_dtype": "float64"}
        wanted = reference.linear(x, params, record.quant_algo, **options)
        positive = params | {"weight": params["weight"].view(np.uint8) & (0x77 if "NVFP4" in algo else 0x7F)}
        magnitude = reference.linear(np.abs(reference.as_float32(x)), positive, record.quant_algo, **options)
        assert_within_rounding(y, wanted, magnitude + 1e-30, "bfloat16")
        return "right"


def layer(rng: Any, algo: str) -> dict[str, tuple[str, np.ndarray]]:
    part = random_case(rng, algo, COLUMNS, [ROWS]).parts[0]
    return {role: stored(role, np.asarray(value), algo) for role, value in part.items()}


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("cast", CASTS)
def test_scales_in_every_type(rng, tmp_path, algo, cast):
    """128x128 blocks in powers of two are DeepSeek-V4's own; float64 and 16 bits come from tools."""
    floats = ("weight_scale_2", "input_scale") if "NVFP4" in algo else ("weight_scale", "input_scale")
    for role in floats:
        tensors = layer(rng, algo)
        if role not in tensors:
            continue
        tensors[role] = CASTS[cast](tensors[role][1])
        powers = cast in ("E8M0", "U8")
        blocks = algo == "FP8_PB_WO" and role == "weight_scale"
        right = blocks if powers else cast != "I32"
        found = check(tmp_path, tensors, algo, "model.layers.0.mlp.up_proj", rng)
        assert (found == "right") is right, (role, found)


@pytest.mark.parametrize(
    ("algo", "part"),
    [(algo, "all") for algo in ALGOS] + [("FP8_PB_WO", "some"), ("FP8_PER_CHANNEL_PER_TOKEN", "some")],
)
@pytest.mark.parametrize("codes", [0x00, 0x80, 0x7F, "real"])
def test_a_scale_of_zero(rng, tmp_path, algo, codes, part):
    """Over zeros, and over the NaN that exporters make of zero by zero, it means zero; else it is lost."""
    tensors = layer(rng, algo)
    weight = tensors["weight"][1]
    role = "weight_scale_2" if "NVFP4" in algo else "weight_scale"
    scale = tensors[role][1]
    rows = slice(None) if part == "all" else slice(3, 4) if scale.ndim == 1 else slice(0, 128)
    columns = slice(128, 256) if scale.ndim == 2 and part == "some" else slice(None)
    scale[(rows,) if scale.ndim == 1 else (0, 1) if part == "some" else ...] = 0
    if codes != "real" and "NVFP4" in algo:
        weight[:] = 0x77
        tensors["weight_scale"][1][:] = codes
    elif codes != "real":
        weight[rows, columns] = codes
    found = check(tmp_path, tensors, algo, "model.layers.0.mlp.up_proj", rng)
    assert found == ("lost_scale" if codes == "real" else "right")


@pytest.mark.parametrize(("rows", "columns"), [(96, 256), (384, 128), (128, 96)])
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_of_stacked_experts_with_one_block_one_way(rng, tmp_path, rows, columns, turned):
    blocks = (-(-rows // 128), -(-columns // 128))
    codes = rng.integers(0, 0x7F, (3, rows, columns), dtype=np.uint8)
    scale = rng.uniform(0.5, 2, (3, *blocks)).astype(np.float32)
    shape = (3, blocks[1], 1, blocks[0], 1) if turned else (3, blocks[0], 1, blocks[1], 1)
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{base}.{name}"] = ("F8_E4M3", codes)
        tensors[f"{base}.{name}_weight_scale"] = ("F32", scale.reshape(shape))
    write(tmp_path / "model.safetensors", tensors)
    params = {"weight": codes, "weight_scale": scale.reshape(shape)}
    spread = scale.repeat(128, axis=1).repeat(128, axis=2)[:, :rows, :columns]
    expected = reference.decode(codes, "e4m3") * spread
    np.testing.assert_array_equal(reference.dequantize(params, "FP8_PB_WO"), expected)
    with Checkpoint(tmp_path) as checkpoint:
        codes_found = {problem.code for problem in checkpoint.problems}
        assert codes_found <= {"no_quant_config", "shape_mismatch", "missing_input_scale"}
        weight = checkpoint.dequantize(f"{base}.down_proj")
    by_axes = expected if weight.shape == expected.shape else expected.swapaxes(1, 2)
    np.testing.assert_array_equal(weight, by_axes)


def test_deepseek_v4s_own_layers(rng, data, tmp_path):
    """Attention stays as the model's makers stored it: 128x128 blocks under powers of two, called `scale`."""
    config = data / "configs" / "nvidia__DeepSeek-V4-Flash-NVFP4.quantization_config.json"
    text = json.dumps({"quantization_config": json.loads(config.read_text())})
    (tmp_path / "config.json").write_text(text)
    codes = rng.integers(0, 0x7F, (256, 384), dtype=np.uint8)
    scale = rng.integers(110, 130, (2, 3), dtype=np.uint8)
    name = "layers.0.attn.wq_a"
    write(
        tmp_path / "model.safetensors",
        {f"{name}.weight": ("F8_E4M3", codes), f"{name}.scale": ("F8_E8M0", scale)},
    )
    with Checkpoint(tmp_path) as checkpoint:
        assert {problem.code for problem in checkpoint.problems} == {
            "foreign_scale_name",
            "listed_module_missing",
        }
        record = checkpoint.layer(name)
        assert (record.quant_algo, record.config_algo) == ("FP8_PB_WO", "FP8_PB_WO")
        exact = reference.decode(codes, "e4m3") * np.exp2(scale - 127.0).repeat(128, 0).repeat(128, 1)
        np.testing.assert_array_equal(checkpoint.dequantize(name), exact)
        x = random_x(rng, (3, 384), "float32")
        params = {"weight": codes, "weight_scale": np.exp2(scale - 127.0).astype(np.float32)}
        wanted = reference.linear(x, params, "FP8_PB_WO", out_dtype="float64")
        y = checkpoint.load(name, dtype="float32")(x)
        assert np.linalg.norm(y - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_a_lost_scale_of_stacked_experts_is_refused(rng, tmp_path):
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{base}.{name}"] = ("F8_E4M3", np.full((2, 96, 64), 0x38, np.uint8))
        tensors[f"{base}.{name}_weight_scale"] = ("F32", np.float32([1, name == "gate_up_proj"]))
    write(tmp_path / "model.safetensors", tensors)
    with Checkpoint(tmp_path) as checkpoint:
        assert np.isfinite(checkpoint.dequantize(f"{base}.gate_up_proj")).all()
        with pytest.raises(CheckpointError, match="lost_scale"):
            checkpoint.dequantize(f"{base}.down_proj")


@pytest.mark.parametrize("where", ["under a zero block", "beside it"])
def test_nan_codes_of_blocks(rng, tmp_path, where):
    tensors = layer(rng, "FP8_PB_WO")
    tensors["weight_scale"][1][1, 0] = 0
    tensors["weight"][1][128:, :128] = 0xFF
    if where == "beside it":
        tensors["weight"][1][128, 128] = 0xFF
        write(tmp_path / "model.safetensors", {f"a.fc.{role}": value for role, value in tensors.items()})
        with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="NaN code at row 128"):
            checkpoint.load("a.fc")
    else:
        assert check(tmp_path, tensors, "FP8_PB_WO", "a.fc", rng) == "right"


@pytest.mark.parametrize("scale", [0.0, 1e-60, 1e60, -1.0, np.nan])
def test_float64_scales_that_no_float32_is(rng, tmp_path, scale):
    tensors = layer(rng, "FP8")
    tensors["weight_scale"] = ("F64", np.array(scale))
    expected = {1e60: "scale_not_finite", -1.0: "scale_negative"}
    found = check(tmp_path, tensors, "FP8", "a.fc", rng)
    assert found == ("scale_not_finite" if scale != scale else expected.get(scale, "lost_scale"))


@pytest.mark.parametrize(
    "name",
    [
        "embed_out",
        "gpt_neox.embed_out",
        "x_embedder",
        "transformer.context_embedder",
        "patch_embed",
        "lm_head",
    ],
)
@pytest.mark.parametrize("algo", ["FP8", "W4A16_NVFP4"])
def test_linears_with_embed_in_their_name_run(rng, tmp_path, algo, name):
    assert check(tmp_path, layer(rng, algo), algo, name, rng) == "right"


@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "wte", "word_embeddings", "embeddings.position_embedding"]
)
def test_tables_are_read_by_row(rng, tmp_path, name):
    """Tables are dequantized, and refused as linears by kind; beside an activation scale no name counts."""
    tensors = layer(rng, "W4A16_NVFP4")
    write(tmp_path / "model.safetensors", {f"{name}.{role}": value for role, value in tensors.items()})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layer(name).kind == "embedding"
        params = {role: value for role, (_, value) in tensors.items()}
        np.testing.assert_array_equal(
            checkpoint.dequantize(name), reference.dequantize(params, "W4A16_NVFP4")
        )
        with pytest.raises(UnsupportedQuantization, match="embedding"):
            checkpoint.load(name)
    assert check(tmp_path, layer(rng, "NVFP4"), "NVFP4", name, rng) == "right"


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "BOOL"])
@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"])
def test_bytes_that_are_not_modelopts(rng, tmp_path, algo, dtype):
    """ModelOpt's names over another 8-bit format, whose bytes would be read as numbers of twice the size."""
    tensors = layer(rng, algo)
    tensors["weight"] = (dtype, tensors["weight"][1])
    assert check(tmp_path, tensors, algo, "model.layers.0.mlp.up_proj", rng) == "unknown_format"
