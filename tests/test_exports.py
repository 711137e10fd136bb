"""Fresh ModelOpt exports (tests/data/exports) against the bf16 models they were made from.

What each module should be is written down here by hand, from the recipes of make_checkpoints.py; it is
compared with what the producer's own quantizers said when the export was made, with the files, and with
what moqext reads. Codes and scales are derived again from the bf16 weights, bit for bit.
"""

import json
import os
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import moqext
from moqext import reference
from moqext.tools.verify import select_weights, verify_checkpoint

from .work import each

EXPORTS = Path(__file__).parent / "data" / "exports"
VERSIONS = json.loads((EXPORTS / "versions.json").read_text())["cases"]
CASES = sorted(VERSIONS)


class Expected(NamedTuple):
    """Algorithms of the configuration, and of each module: the first pattern that fits decides."""

    quant_algo: str
    kv: str | None
    modules: dict[str, str | None]
    group_size: int | None = None


def every(algo, **first):
    """All linears but the routers and lm_head; `first` comes before."""
    return {**first, "*.mlp.gate": None, "*.gate": None, "*router": None, "*_proj*": algo, "*.w[123]": algo}


EXPECTED = {
    "deepseek_nvfp4": Expected("NVFP4", "FP8", every("NVFP4"), 16),
    "fp8_bias_kvfp8": Expected("FP8", "FP8", every("FP8")),
    "fp8_embedding": Expected("FP8", None, {"model.embed_tokens": "FP8", **every("FP8")}),
    "fp8_excluded": Expected(
        "FP8",
        None,
        {
            "model.layers.[01].*": None,
            "model.layers.3.mlp.*": None,
            "model.layers.4.self_attn.[qkv]_proj": None,
            "model.layers.10.mlp.gate_proj": None,
            "model.layers.10.mlp.up_proj": None,
            **every("FP8"),
        },
    ),
    "fp8_kvcast": Expected("FP8", "FP8", every("FP8")),
    "fp8_lm_head": Expected("FP8", None, {"lm_head": "FP8", **every("FP8")}),
    "fp8_pb_real": Expected("FP8_PB_WO", None, every("FP8_PB_WO")),
    "fp8_pb_wo_one_block": Expected("FP8_PB_WO", None, every("FP8_PB_WO")),
    "fp8_pb_wo_unaligned": Expected("FP8_PB_WO", None, every("FP8_PB_WO")),
    "fp8_pc_pt_bias": Expected("FP8_PER_CHANNEL_PER_TOKEN", None, every("FP8_PER_CHANNEL_PER_TOKEN")),
    "fp8_uncalibrated": Expected("FP8", None, every("FP8")),
    "fp8_zero": Expected("FP8", None, every("FP8")),
    "gpt_oss_fp8": Expected("FP8", None, every("FP8")),
    "gpt_oss_mxfp8": Expected("MXFP8", None, every("MXFP8"), 32),
    "gpt_oss_nvfp4": Expected("NVFP4", None, every("NVFP4"), 16),
    "llama4_fp8": Expected("FP8", None, every("FP8")),
    "llama4_nvfp4": Expected("NVFP4", None, every("NVFP4"), 16),
    "mixed_fp8_nvfp4": Expected(
        "MIXED_PRECISION", "FP8", {"model.layers.0.self_attn.*": "FP8", "*.mlp.*": "NVFP4"}
    ),
    "mixed_in_qkv": Expected(
        "MIXED_PRECISION", None, {"*.q_proj": "FP8", "*.k_proj": "NVFP4", "*.mlp.*": "NVFP4"}
    ),
    "mixed_three": Expected(
        "MIXED_PRECISION",
        None,
        {"*.self_attn.*": "FP8", "model.layers.0.mlp.*": "W4A16_NVFP4", "model.layers.1.mlp.*": "FP8_PB_WO"},
    ),
    "mixtral_fp8": Expected("FP8", None, every("FP8")),
    "mixtral_nvfp4": Expected("NVFP4", None, every("NVFP4"), 16),
    "mxfp4": Expected("MXFP4", None, every("MXFP4"), 32),
    "mxfp8": Expected("MXFP8", None, every("MXFP8"), 32),
    "nemotron_h_mixed": Expected(
        "MIXED_PRECISION", None, {"*.experts.*": "NVFP4", "*.in_proj": "FP8", "*.out_proj": "FP8"}
    ),
    "nemotron_h_nvfp4": Expected("NVFP4", None, every("NVFP4"), 16),
    "nvfp4_bias_kvnvfp4": Expected("NVFP4", "NVFP4", every("NVFP4"), 16),
    "nvfp4_kvaffine": Expected("NVFP4", "NVFP4_AFFINE", every("NVFP4"), 16),
    "nvfp4_lm_head": Expected("NVFP4", None, {"lm_head": "NVFP4", **every("NVFP4")}, 16),
    "nvfp4_mlp_only": Expected("NVFP4", None, {"*.mlp.*": "NVFP4"}, 16),
    "nvfp4_sharded": Expected("NVFP4", None, {"model.layers.1.*": None, **every("NVFP4")}, 16),
    "nvfp4_uncalibrated": Expected("NVFP4", None, every("NVFP4"), 16),
    "nvfp4_zero": Expected("NVFP4", None, every("NVFP4"), 16),
    "qwen3moe_mixed": Expected("MIXED_PRECISION", None, {"*.self_attn.*": "FP8", "*.experts.*": "NVFP4"}),
    "w4a16_nvfp4": Expected("W4A16_NVFP4", None, every("W4A16_NVFP4"), 16),
    "w4a16_nvfp4_group_32": Expected("W4A16_NVFP4", None, {"*.mlp.*": "W4A16_NVFP4"}, 32),
    "w4a8_nvfp4_fp8": Expected("W4A8_NVFP4_FP8", None, every("W4A8_NVFP4_FP8"), 32),
}
PRODUCER_NAMES = {  # the producer's constants that are not the canonical name in lower case
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_pb_real": "FP8_PB_WO",
}
SIBLINGS = [  # linears that share their input: the exporter shares second-level scales among them
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
]
LINEARS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
FINDINGS = {  # what the reader has to say, as (code, layer); nothing about all other cases
    "fp8_kvcast": {("kv_scales_absent", None)},
    "fp8_uncalibrated": {("missing_input_scale", f"model.layers.0.{name}") for name in LINEARS},
    "fp8_zero": {("all_zero_layer", f"model.layers.0.self_attn.{name}") for name in ("k_proj", "o_proj")},
    "mixed_in_qkv": {("mixed_fused_formats", f"model.layers.{layer}.self_attn") for layer in (0, 1)},
    "nvfp4_kvaffine": {("kv_bias", "model.layers.0.self_attn")},
    "nvfp4_uncalibrated": {("missing_input_scale", f"model.layers.0.{name}") for name in LINEARS},
    "nvfp4_zero": {("all_zero_layer", "model.layers.0.self_attn.o_proj")},
}
# Nemotron-H: the exclusion list says `backbone.embeddings`, the files `backbone.embedding`.
MISNAMED = {("nemotron_h_nvfp4", "backbone.embedding")}
LOOK_ALIKE = {  # cases whose tensors are also those of another format
    "fp8_pb_wo_one_block": "FP8",
    "mixed_three": "FP8",
    "nvfp4_uncalibrated": "W4A16_NVFP4",
}
RUNNABLE = {
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
}
NO_INPUT_SCALE = {"FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W4A16_NVFP4", "MXFP4", "MXFP8"}


@cache
def export(case):
    return moqext.Checkpoint(EXPORTS / case)


@cache
def original(case):
    """The bf16 weights as float32, by name."""
    safetensors = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("ml_dtypes")
    tensors = safetensors.load_file(EXPORTS / f"{VERSIONS[case]['model']}_bf16.safetensors")
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def weights(case):
    """Modules with a matrix, or a stack of them, mapped to the name of the bf16 tensor."""
    found = {}
    for name, tensor in original(case).items():
        if tensor.ndim >= 2 and "conv1d" not in name:
            found[name.removesuffix(".weight")] = name
    return found


def expected_algo(case, module):
    rules = EXPECTED[case].modules
    return next((algo for pattern, algo in rules.items() if fnmatchcase(module, pattern)), None)


def quantized(case):
    """Modules that should be quantized, with their algorithm; biases of stacked experts are no modules."""
    algos = {module: expected_algo(case, module) for module in weights(case) if not module.endswith("_bias")}
    return {module: algo for module, algo in algos.items() if algo is not None}


def stacked(case, module):
    return original(case)[weights(case)[module]].ndim == 3


def stored(case, module):
    """The module's tensors by role, as the file has them."""
    checkpoint = export(case)
    roles = ["weight_scale", "weight_scale_2", "input_scale"]
    if stacked(case, module):
        names = {"weight": module, **{role: f"{module}_{role}" for role in roles}}
    else:
        names = {role: f"{module}.{role}" for role in ["weight", *roles]}
    return {role: checkpoint.tensor(name) for role, name in names.items() if name in checkpoint.tensors}


def shared_amax(case, module, algo):
    """Largest magnitude over what the exporter gives one scalar scale."""
    tensors = original(case)
    parent, _, last = module.rpartition(".")
    group = next((group for group in SIBLINGS if last in group), (last,))
    members = [f"{parent}.{name}" for name in group if f"{parent}.{name}.weight" in tensors]
    alike = all(expected_algo(case, member) == algo for member in members)
    if not members or not alike or (algo == "FP8" and ".experts." not in module):
        members = [module]
    return max(float(np.abs(tensors[weights(case)[member]]).max()) for member in members)


def compressed_blocks(weight):
    """fp8_pb_real: compressed in the model's dtype, so that scale and quotient are rounded to bf16."""
    rows, columns = weight.shape
    edges = [(0, -rows % 128), (0, -columns % 128)]
    blocks = np.pad(np.abs(weight), edges).reshape(-(-rows // 128), 128, -1, 128).max(axis=(1, 3))
    scale = reference.round_to((blocks / np.float32(448)).astype(np.float64), "bfloat16")
    quotient = weight / scale.repeat(128, axis=0).repeat(128, axis=1)[:rows, :columns]
    codes = reference.encode(reference.round_to(quotient.astype(np.float64), "bfloat16"), "e4m3")
    return {"weight": codes, "weight_scale": scale}


def derived(case, module, algo):
    """Computes what the exporter should have written, from the bf16 weight."""
    weight = original(case)[weights(case)[module]]
    if case == "fp8_pb_real":
        return compressed_blocks(weight)
    if stacked(case, module) and algo == "FP8":  # one scale for all experts; here the quotient stays float32
        scale = np.float32(np.abs(weight).max() / np.float32(448))
        return {"weight": reference.encode(weight / scale, "e4m3"), "weight_scale": np.asarray(scale)}
    options = {"amax": shared_amax(case, module, algo), "group_size": EXPECTED[case].group_size}
    if not stacked(case, module):
        return reference.quantize_weight(weight, algo, **options)
    along_input = algo == "NVFP4"  # the other formats go along the last, the output, axis
    each = [reference.quantize_weight(w.T if along_input else w, algo, **options) for w in weight]
    result = {role: np.stack([one[role] for one in each]) for role in ("weight", "weight_scale")}
    if along_input:
        result = {role: tensor.swapaxes(1, 2) for role, tensor in result.items()}
    return result | ({"weight_scale_2": each[0]["weight_scale_2"]} if algo == "NVFP4" else {})


def bits(tensor):
    """The bytes of a tensor, whatever dtype carries them; an e4m3 NaN loses its sign, which no rule gives."""
    flat = np.ascontiguousarray(tensor).reshape(-1)
    codes = flat.view(np.uint8)
    return np.where(codes == 0xFF, np.uint8(0x7F), codes) if flat.dtype.name == "float8_e4m3fn" else codes


def half_step(weight, algo, params):
    """Largest |code * scale - weight| that rounding to the nearest code allows, element by element.

    e4m3: half of the spacing 2^-3 relative to the power of two below, or of the subnormal spacing 2^-9; the
    quotient of FP8 is rounded to bf16 first (2^-9), and fp8_pb_real keeps its scale in bf16.
    e2m1: half of the gaps 0.5, 1 and 2 between 0, .5, 1, 1.5, 2, 3, 4 and 6. A block scale rounded down to
    e4m3 lets the quotient exceed 6 by one part in 16, which stays below that.
    """
    ones = {**params, "weight": np.full_like(np.asarray(params["weight"]).view(np.uint8), 0x38)}
    if algo.startswith("FP8") or algo == "MXFP8":
        scale = np.abs(reference.dequantize(ones, algo))  # e4m3 0x38 is 1.0
        return np.maximum(np.abs(weight) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-4)
    ones["weight"] = np.full_like(ones["weight"], 0x22)  # twice the nibble of 1.0
    scale = np.abs(reference.dequantize(ones, algo))
    quotient = np.divide(np.abs(weight), scale, out=np.zeros_like(scale), where=scale > 0)
    half = np.select([quotient <= 2, quotient <= 4], [0.25, 0.5], 1.0)
    return half * scale * (1 + 2.0**-20)


def test_every_case_has_an_expectation():
    assert set(EXPECTED) == set(CASES)
    assert {path.name for path in EXPORTS.iterdir() if path.is_dir()} == set(CASES)


@each("case", CASES)
def test_expectation_agrees_with_the_producers_quantizers(case):
    """The producer was asked for each module's format before the export; a container of experts is one."""
    told = {}
    for module, algo in VERSIONS[case]["layers"].items():
        told[module.removeprefix("model.").removeprefix("backbone.")] = PRODUCER_NAMES.get(algo, algo.upper())
    wanted = {}
    for module, algo in quantized(case).items():
        name = module.removeprefix("model.").removeprefix("backbone.")
        name = name.replace("block_sparse_moe", "mlp")
        container = name.split(".experts.")[0] + ".experts" if ".experts." in name else name
        assert wanted.setdefault(container, algo) == algo
    assert wanted == told


@each("case", CASES)
def test_files_hold_what_is_expected(case):
    """Exactly the expected modules are stored with scales; the rest is the bf16 original, bit for bit."""
    checkpoint = export(case)
    with_scales = {name for name in checkpoint.tensors if name.endswith("weight_scale")}
    assert {name[: -len("weight_scale")].rstrip("._") for name in with_scales} == set(quantized(case))
    for name, tensor in original(case).items():
        if name.removesuffix(".weight") not in quantized(case) and name in checkpoint.tensors:
            np.testing.assert_array_equal(reference.as_float32(checkpoint.tensor(name)), tensor, err_msg=name)


@each("case", CASES)
def test_codes_and_scales_follow_from_the_original(case):
    for module, algo in quantized(case).items():
        for role, tensor in derived(case, module, algo).items():
            got = stored(case, module)[role]
            assert got.shape == tensor.shape, f"{module} {role}"
            tensor = tensor.view(got.dtype) if tensor.itemsize == got.itemsize else tensor
            np.testing.assert_array_equal(bits(got), bits(tensor), err_msg=f"{module} {role}")


@each("case", CASES)
def test_dequantized_is_the_original_within_a_step(case):
    for module, algo in quantized(case).items():
        weight, params = original(case)[weights(case)[module]], stored(case, module)
        got = reference.dequantize(params, algo)
        assert got.shape == weight.shape
        excess = np.abs(got.astype(np.float64) - weight) - half_step(weight, algo, params)
        worst = np.unravel_index(excess.argmax(), excess.shape)
        assert excess.max() <= 0, f"{module} ({algo}): {excess.max()} beyond the step at {worst}"


@each("case", CASES)
def test_input_scales(case):
    """Positive and finite wherever the format calibrates its activations and a calibration was run."""
    calibrated = not case.endswith("_uncalibrated")
    for module, algo in quantized(case).items():
        scale = stored(case, module).get("input_scale")
        wanted = calibrated and algo not in NO_INPUT_SCALE and module != "model.embed_tokens"
        assert (scale is not None) == wanted, module
        if scale is not None:
            assert scale.size == 1
            assert 0 < float(scale.reshape(-1)[0]) < np.inf


@each("case", CASES)
def test_kv_scales(case):
    names = [
        name for name in export(case).tensors if name.endswith((".k_scale", ".v_scale", ".k_bias", ".v_bias"))
    ]
    attentions = {name.split(".self_attn.")[0] for name in weights(case) if ".self_attn." in name}
    kinds = set() if EXPECTED[case].kv is None or case == "fp8_kvcast" else {"k_scale", "v_scale"}
    kinds |= {"k_bias", "v_bias"} if EXPECTED[case].kv == "NVFP4_AFFINE" else set()
    wanted = {f"{attention}.self_attn.{kind[0]}_proj.{kind}" for attention in attentions for kind in kinds}
    assert set(names) == wanted


@each("case", CASES)
def test_configuration(case):
    """The two files agree, and every module resolves to what the recipe made it."""
    expected, config = EXPECTED[case], export(case).config
    assert (config.quant_algo, config.kv_cache_quant_algo) == (expected.quant_algo, expected.kv)
    assert config.conflicts == ()
    if expected.group_size is not None:
        assert config.group_size == expected.group_size
    for module in weights(case):
        if not module.endswith("_bias") and (case, module) not in MISNAMED:
            assert config.layer_algo(module) == expected_algo(case, module), module


@each("case", CASES)
def test_records(case):
    """Configuration and tensors, looked at apart, agree on each layer; shapes are those of the bf16 model."""
    found = {}
    for layer in export(case).layers():
        for part in layer.projections or layer.linears():
            found[part.name] = part
        assert layer.config_algo == layer.quant_algo
        assert layer.stored_algo in {layer.quant_algo, LOOK_ALIKE.get(case)}
    assert {name: part.quant_algo for name, part in found.items()} == quantized(case)
    for name, part in found.items():
        shape = original(case)[weights(case)[name]].shape
        assert part.shape == ((shape[0], shape[2], shape[1]) if len(shape) == 3 else shape)


@each("case", CASES)
def test_findings(case):
    assert {(p.code, p.layer) for p in export(case).problems} == FINDINGS.get(case, set())


@each("case", CASES)
def test_dequantize(case):
    """The native result is the reference's, bit for bit; stacked experts come as (experts, out, in)."""
    for module, algo in quantized(case).items():
        wanted = reference.dequantize(stored(case, module), algo, group_size=export(case).config.group_size)
        wanted = wanted.swapaxes(1, 2) if wanted.ndim == 3 else wanted
        np.testing.assert_array_equal(export(case).dequantize(module), wanted, err_msg=module)


@pytest.mark.parametrize("case", ["fp8_bias_kvfp8", "nvfp4_bias_kvnvfp4", "nvfp4_kvaffine", "deepseek_nvfp4"])
def test_kv_records(case):
    for record in export(case).kv_scales():
        assert record.values.keys() >= {"k_scale", "v_scale"}
        for role in ("k_scale", "v_scale"):
            assert record.values[role] == float(export(case).tensor(record.tensors[role]).reshape(-1)[0]) > 0


def verified(case, tokens, **options):
    """Rows of `verify` on a case, with fresh activations."""
    checkpoint = export(case)
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"verify {case} --seed {seed}")
    return list(verify_checkpoint(checkpoint, select_weights(checkpoint), seed, tokens=tokens, **options))


@each("case", CASES)
def test_verify(case):
    """Linears and experts of a runnable algorithm are within the limits; all else is read, none left out."""
    layers = export(case).layers()
    stacked = RUNNABLE - {"MXFP8"}  # whose stacks have groups along their output
    apart = [layer for layer in layers if layer.projections and layer.quant_algo not in stacked]
    names = {layer.name for layer in layers if layer not in apart}
    names |= {part.name for layer in apart for part in layer.projections}
    for row in verified(case, tokens=5, device="cpu", dtype="bfloat16", compute="exact"):
        runs = row.kind in ("linear", "experts") and row.quant_algo in RUNNABLE
        assert row.status == ("ok" if runs else "read"), row
        names.remove(row.layer)
    assert not names


@pytest.mark.parametrize(
    "case", ["fp8_bias_kvfp8", "fp8_pc_pt_bias", "fp8_pb_wo_unaligned", "nvfp4_bias_kvnvfp4"]
)
def test_fused_with_bias(case):
    """Fused q, k, v have the rows of the three alone, and of no input at all the bias remains."""
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    fused = export(case).load(names, dtype="float32")
    biases = np.concatenate([original(case)[f"{name}.bias"] for name in names])
    x = np.zeros((2, fused.in_features), np.float32)
    np.testing.assert_array_equal(fused(x), np.tile(biases, (2, 1)))
    x[1] = np.linspace(-2, 2, fused.in_features)
    alone = [export(case).load(name, dtype="float32")(x) for name in names]
    np.testing.assert_allclose(fused(x), np.concatenate(alone, axis=1), rtol=1e-5, atol=1e-6)


def test_formats_mixed_in_one_group_load_one_by_one():
    checkpoint = export("mixed_in_qkv")
    query, key = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
    with pytest.raises(ValueError, match=r"k_proj.*NVFP4|NVFP4.*k_proj"):
        checkpoint.load([query, key])
    assert checkpoint.load(query).out_features == 64
    assert checkpoint.load(key).out_features == 32
