"""The reference against genuine exports and the bfloat16 models they were made from."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from moqext import reference
from moqext.reference import dequantize, linear, quantize_weight

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
CASES = {row[0]: row[1] for row in json.loads((CHECKPOINTS / "versions.json").read_text())["cases"]}
ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
SMOOTHED = ("llama_int4_awq", "llama_w4a8_awq", "llama_int8_sq")
UNSMOOTHED = [case for case in CASES if case not in SMOOTHED]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
DTYPES = {"F32": "f4", "BF16": "u2", "F8_E4M3": "u1", "U8": "u1", "I8": "i1"}


def read_safetensors(path):
    """Tensors as the file has them; bfloat16 and FP8 as unsigned carriers."""
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(blob[first:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


class Linear(NamedTuple):
    name: str
    algo: str
    params: dict
    original: np.ndarray
    amax: float | None  # of the group that shares a scale; None: this weight's own
    folded: np.ndarray  # per input column: what the norm before this layer took over from its weight


def original_weight(source, name):
    """The bfloat16 weight before the export, out of the stacked experts where it was there."""
    if f"{name}.weight" in source:
        return reference.as_float32(source[f"{name}.weight"])
    container, expert, projection = name.rsplit(".", 2)
    stacked = "down_proj" if projection == "down_proj" else "gate_up_proj"
    weight = reference.as_float32(source[f"{container}.{stacked}"])[int(expert)]
    gate, up = np.split(weight, 2)
    return {"down_proj": weight, "gate_proj": gate, "up_proj": up}[projection]


def shared_amax(source, name, algo):
    """Largest magnitude of the weights that share this one's scale, where the exporter unifies them."""
    parent, _, leaf = name.rpartition(".")
    group = next((g for g in FUSED if leaf in g), (leaf,))
    if algo == "FP8" and ".experts." not in name:
        return None
    return max(float(np.abs(original_weight(source, f"{parent}.{sibling}")).max()) for sibling in group)


def folded_factor(tensors, name, columns):
    """Smoothing that was folded into the norm before the layer (all norms were 1 in the originals)."""
    layer, _, leaf = name.rpartition(".")
    norms = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    block, _, part = layer.rpartition(".")
    if f"{name}.pre_quant_scale" in tensors or part not in norms or leaf in ("o_proj", "down_proj"):
        return np.ones(columns, np.float32)
    return reference.as_float32(tensors[f"{block}.{norms[part]}.weight"])


@pytest.fixture(scope="module")
def linears():
    """Every quantized linear of a checkpoint, read once."""
    read = {}

    def load(case):
        if case not in read:
            source = read_safetensors(CHECKPOINTS / f"{CASES[case]}_bf16.safetensors")
            tensors = read_safetensors(CHECKPOINTS / case / "model.safetensors")
            config = json.loads((CHECKPOINTS / case / "hf_quant_config.json").read_text())
            algo = config["quantization"]["quant_algo"].upper()
            names = sorted(k.removesuffix(".weight_scale") for k in tensors if k.endswith(".weight_scale"))
            read[case] = [
                Linear(
                    name,
                    algo,
                    {role: tensors[f"{name}.{role}"] for role in ROLES if f"{name}.{role}" in tensors},
                    original_weight(source, name),
                    shared_amax(source, name, algo),
                    folded_factor(tensors, name, original_weight(source, name).shape[1]),
                )
                for name in names
            ]
        return read[case]

    return load


def same_tensor(actual, expected):
    return actual.shape == expected.shape and actual.tobytes() == expected.tobytes()


def test_all_thirteen_checkpoints_are_covered():
    assert len(CASES) == 13
    directories = {path.name for path in CHECKPOINTS.iterdir() if path.is_dir()}
    assert directories == set(CASES)


@pytest.mark.parametrize("case", UNSMOOTHED)
def test_codes_and_scales_follow_from_the_original_bit_for_bit(case, linears):
    assert len(linears(case)) == (16 if case.startswith("qwen") else 7)
    for layer in linears(case):
        derived = quantize_weight(layer.original, layer.algo, amax=layer.amax)
        stored = {role: layer.params[role] for role in ROLES[:3] if role in layer.params}
        assert derived.keys() == stored.keys()
        for role, tensor in derived.items():
            assert same_tensor(tensor, stored[role]), f"{layer.name}.{role}"


def e4m3_half_step(magnitude):
    """Half the distance between E4M3 neighbours around a value counted in scales."""
    return np.ldexp(0.5, np.maximum(np.frexp(magnitude)[1] - 1, -6) - 3)


def e2m1_half_step(magnitude):
    return np.select([magnitude < 2, magnitude < 4], [0.25, 0.5], 1.0)


def scale_of_each_code(params, algo):
    """The factor between every code and its value."""
    rows, columns = params["weight"].shape
    scale = params["weight_scale"]
    if "MXFP" in algo:
        return np.exp2(scale.astype(np.float64) - 127).repeat(32, axis=1)
    if "NVFP4" in algo:
        blocks = reference.decode(scale, "e4m3").astype(np.float64) * params["weight_scale_2"]
        return blocks.repeat(2 * columns // scale.shape[1], axis=1)
    if algo == "FP8_PB_WO":
        grid = scale.reshape(-(-rows // 128), -(-columns // 128))
        return np.kron(grid, np.ones((128, 128)))[:rows, :columns]
    return np.broadcast_to(scale.reshape(-1, 1).astype(np.float64), (rows, columns))


@pytest.mark.parametrize("case", UNSMOOTHED)
def test_dequantized_is_within_half_a_step_of_the_original(case, linears):
    for layer in linears(case):
        weight = dequantize(layer.params, layer.algo)
        scale = scale_of_each_code(layer.params, layer.algo)
        half = e2m1_half_step if "FP4" in layer.algo else e4m3_half_step
        magnitude = np.abs(layer.original) / scale
        # The quotient of a plain FP8 weight was rounded to bfloat16 first, which moves it by up to 2^-9.
        allowed = half(magnitude) + magnitude * (2.0**-8 if layer.algo == "FP8" else 2.0**-20)
        assert (np.abs(weight - layer.original.astype(np.float64)) <= allowed * scale).all(), layer.name


@pytest.mark.parametrize("case", SMOOTHED)
def test_smoothed_weight_is_within_half_a_step_of_the_original(case, linears):
    """The effective weight, times what the norm before the layer took over, against the original."""
    smoothed = 0
    for layer in linears(case):
        smooth = layer.params.get("pre_quant_scale")
        smoothed += smooth is not None
        weight = dequantize(layer.params, layer.algo, effective=True).astype(np.float64) * layer.folded
        stored = dequantize(layer.params, layer.algo).astype(np.float64)
        scale = layer.params["weight_scale"].reshape(weight.shape[0], -1)
        scale = scale.repeat(weight.shape[1] // scale.shape[1], axis=1)
        factor = layer.folded * (1 if smooth is None else reference.as_float32(smooth))
        # Half a step, and bfloat16 rounding of the smoothed weight and of the factor.
        allowed = (scale / 2 + np.abs(stored) * 2.0**-7) * factor * 1.02
        assert (np.abs(weight - layer.original) <= allowed).all(), layer.name
    assert smoothed >= 1


@pytest.mark.parametrize("case", SMOOTHED)
def test_effective_is_stored_times_pre_quant_scale(case, linears):
    for layer in linears(case):
        smooth = layer.params.get("pre_quant_scale", np.array([0x3F80], np.uint16))
        stored = dequantize(layer.params, layer.algo)
        effective = dequantize(layer.params, layer.algo, effective=True)
        np.testing.assert_allclose(effective, stored * reference.as_float32(smooth), rtol=1e-6)
        assert ("pre_quant_scale" not in layer.params) == np.array_equal(stored, effective)


@pytest.mark.parametrize("case", CASES)
def test_linear_of_genuine_layers_stays_near_the_original(case, linears, rng):
    for layer in linears(case)[:4]:
        x = rng.normal(size=(2, 3, layer.original.shape[1])).astype(np.float32)
        if "input_scale" in layer.params:  # stay within what the layer was calibrated for
            nvfp4 = "NVFP4" in layer.algo and "W4A8" not in layer.algo
            limit = 127 if "W8A8" in layer.algo else 2688 if nvfp4 else 448
            smoothed = x * reference.as_float32(layer.params.get("pre_quant_scale", np.float32(1)))
            x *= layer.params["input_scale"] * limit / np.abs(smoothed).max()
        expected = x.astype(np.float64) @ (layer.original.astype(np.float64) / layer.folded).T
        actual = linear(x, layer.params, layer.algo, out_dtype="float64")
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < (0.06 if layer.algo.startswith("FP8") else 0.2), layer.name
