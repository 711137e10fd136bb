"""The layers found in every genuine checkpoint, export and manifest, and in layouts that few write."""

import json
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moqext
from moqext.reader.findings.find_layers import find_layers
from moqext.reader.formats.stored import recognise
from moqext.reader.naming import parse_expert_name, parse_tensor_name

from .work import each

DATA = Path(__file__).parent / "data"

# Contents of each: quantized layers by kind, attention modules with cache scales, and every problem. Formats
# are those that the names of the cases and the presets in versions.json say; counts are those of the models.
EXPECTED: dict[str, tuple[str, int, dict[str, int]]] = {
    "checkpoints/llama_fp8_kvfp8": ("linear x7 FP8", 1, {}),
    "checkpoints/llama_fp8_pb_wo": ("linear x7 FP8_PB_WO g128", 0, {}),
    "checkpoints/llama_fp8_pc_pt": ("linear x7 FP8_PER_CHANNEL_PER_TOKEN", 0, {}),
    "checkpoints/llama_int4_awq": ("linear x7 W4A16_AWQ g128", 0, {}),
    "checkpoints/llama_int8_sq": ("linear x7 W8A8_SQ_PER_CHANNEL", 0, {}),
    "checkpoints/llama_mxfp8": ("linear x7 MXFP8 g32", 0, {}),
    "checkpoints/llama_nvfp4_kvfp8": ("linear x7 NVFP4 g16", 1, {}),
    "checkpoints/llama_w4a16_nvfp4": ("linear x7 W4A16_NVFP4 g16", 0, {}),
    "checkpoints/llama_w4a8_awq": ("linear x7 W4A8_AWQ g128", 0, {}),
    "checkpoints/llama_w4a8_mxfp4_fp8": ("linear x7 W4A8_MXFP4_FP8 g32", 0, {}),
    "checkpoints/llama_w4a8_nvfp4_fp8": ("linear x7 W4A8_NVFP4_FP8 g32", 0, {}),
    "checkpoints/qwen3moe_fp8": ("moe x1 FP8; linear x4 FP8", 0, {}),
    "checkpoints/qwen3moe_nvfp4": ("moe x1 NVFP4 g16; linear x4 NVFP4 g16", 0, {}),
    "exports/deepseek_nvfp4": ("linear x16 NVFP4 g16; moe x1 NVFP4 g16", 2, {}),
    "exports/fp8_bias_kvfp8": ("linear x7 FP8", 1, {}),
    "exports/fp8_embedding": ("embedding x1 FP8; linear x7 FP8", 0, {}),
    "exports/fp8_excluded": ("linear x62 FP8", 0, {}),
    "exports/fp8_kvcast": ("linear x7 FP8", 0, {"kv_scales_absent": 1}),
    "exports/fp8_lm_head": ("linear x8 FP8", 0, {}),
    "exports/fp8_pb_real": ("linear x7 FP8_PB_WO g128", 0, {}),
    "exports/fp8_pb_wo_one_block": ("linear x7 FP8_PB_WO g128", 0, {}),
    "exports/fp8_pb_wo_unaligned": ("linear x7 FP8_PB_WO g128", 0, {}),
    "exports/fp8_pc_pt_bias": ("linear x7 FP8_PER_CHANNEL_PER_TOKEN", 0, {}),
    "exports/fp8_uncalibrated": ("linear x7 FP8", 0, {"missing_input_scale": 7}),
    "exports/fp8_zero": ("linear x7 FP8", 0, {"all_zero_layer": 2}),
    "exports/gpt_oss_fp8": ("moe x1 FP8; linear x4 FP8", 0, {}),
    "exports/gpt_oss_mxfp8": ("moe x1 MXFP8 g32; linear x4 MXFP8 g32", 0, {}),
    "exports/gpt_oss_nvfp4": ("moe x1 NVFP4 g16; linear x4 NVFP4 g16", 0, {}),
    "exports/llama4_fp8": ("moe x1 FP8; linear x7 FP8", 0, {}),
    "exports/llama4_nvfp4": ("moe x1 NVFP4 g16; linear x7 NVFP4 g16", 0, {}),
    "exports/mixed_fp8_nvfp4": ("linear x6 NVFP4 g16; linear x4 FP8", 2, {}),
    "exports/mixed_in_qkv": ("linear x8 NVFP4 g16; linear x2 FP8", 0, {"mixed_fused_formats": 2}),
    "exports/mixed_three": ("linear x3 W4A16_NVFP4 g16; linear x8 FP8; linear x3 FP8_PB_WO g128", 0, {}),
    "exports/mixtral_fp8": ("moe x1 FP8; linear x4 FP8", 0, {}),
    "exports/mixtral_nvfp4": ("moe x1 NVFP4 g16; linear x4 NVFP4 g16", 0, {}),
    "exports/mxfp4": ("linear x7 MXFP4 g32", 0, {}),
    "exports/mxfp8": ("linear x7 MXFP8 g32", 0, {}),
    "exports/nemotron_h_mixed": ("linear x2 FP8; moe x1 NVFP4 g16", 0, {}),
    "exports/nemotron_h_nvfp4": ("linear x8 NVFP4 g16; moe x1 NVFP4 g16", 0, {}),
    "exports/nvfp4_bias_kvnvfp4": ("linear x7 NVFP4 g16", 1, {}),
    "exports/nvfp4_kvaffine": ("linear x7 NVFP4 g16", 1, {"kv_bias": 2}),
    "exports/nvfp4_lm_head": ("linear x8 NVFP4 g16", 0, {}),
    "exports/nvfp4_mlp_only": ("linear x6 NVFP4 g16", 0, {}),
    "exports/nvfp4_sharded": ("linear x77 NVFP4 g16", 0, {}),
    "exports/nvfp4_uncalibrated": ("linear x7 NVFP4 g16", 0, {"missing_input_scale": 7}),
    "exports/nvfp4_zero": ("linear x7 NVFP4 g16", 0, {"all_zero_layer": 1}),
    "exports/qwen3moe_mixed": ("moe x1 NVFP4 g16; linear x4 FP8", 0, {}),
    "exports/w4a16_nvfp4": ("linear x7 W4A16_NVFP4 g16", 0, {}),
    "exports/w4a16_nvfp4_group_32": ("linear x3 W4A16_NVFP4 g32", 0, {}),
    "exports/w4a8_nvfp4_fp8": ("linear x7 W4A8_NVFP4_FP8 g32", 0, {}),
    "manifests/compress_FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": ("linear x14 FP8_PB_WO g128", 0, {}),
    "manifests/compress_FP8_DEFAULT_CFG": ("linear x14 FP8", 0, {}),
    "manifests/deepseekv3_FP8_DEFAULT_CFG": ("linear x16 FP8; moe x1 FP8", 0, {}),
    "manifests/gptoss_NVFP4_DEFAULT_CFG": ("moe x2 NVFP4 g16; linear x8 NVFP4 g16", 2, {}),
    "manifests/kvcast": ("linear x14 FP8", 0, {"kv_scales_absent": 1}),
    "manifests/llama4_FP8_DEFAULT_CFG": ("moe x2 FP8; linear x14 FP8", 0, {}),
    "manifests/llama_fp8": ("linear x14 FP8", 0, {}),
    "manifests/llama_fp8_kvfp8": ("linear x14 FP8", 2, {}),
    "manifests/llama_fp8_pb_wo": ("linear x14 FP8_PB_WO g128", 0, {}),
    "manifests/llama_fp8_pc_pt": ("linear x14 FP8_PER_CHANNEL_PER_TOKEN", 0, {}),
    "manifests/llama_int4_awq": ("linear x14 W4A16_AWQ g128", 0, {}),
    "manifests/llama_int4_wo": ("linear x14 W4A16_AWQ g128", 0, {}),
    "manifests/llama_int8": ("linear x14 W8A8_SQ_PER_CHANNEL", 0, {}),
    "manifests/llama_int8_sq": ("linear x14 W8A8_SQ_PER_CHANNEL", 0, {}),
    "manifests/llama_int8_wo": ("linear x14 W8A16", 0, {}),
    "manifests/llama_mxfp4": ("linear x14 MXFP4 g32", 0, {}),
    "manifests/llama_mxfp8": ("linear x14 MXFP8 g32", 0, {}),
    "manifests/llama_nvfp4": ("linear x14 NVFP4 g16", 0, {}),
    "manifests/llama_nvfp4_4o6": ("linear x14 NVFP4 g16", 0, {}),
    "manifests/llama_nvfp4_awq": ("linear x14 NVFP4_AWQ g16", 0, {}),
    "manifests/llama_nvfp4_kvfp8": ("linear x14 NVFP4 g16", 2, {}),
    "manifests/llama_nvfp4_kvnvfp4": ("linear x14 NVFP4 g16", 2, {}),
    "manifests/llama_nvfp4_mlp_only": ("linear x6 NVFP4 g16", 0, {}),
    "manifests/llama_nvfp4_mse": ("linear x14 NVFP4 g16", 0, {}),
    "manifests/llama_nvfp4_omlp": ("linear x8 NVFP4 g16", 0, {}),
    "manifests/llama_w4a16_nvfp4": ("linear x14 W4A16_NVFP4 g16", 0, {}),
    "manifests/llama_w4a8_awq": ("linear x14 W4A8_AWQ g128", 0, {}),
    "manifests/llama_w4a8_mxfp4_fp8": ("linear x14 W4A8_MXFP4_FP8 g32", 0, {}),
    "manifests/llama_w4a8_nvfp4_fp8": ("linear x14 W4A8_NVFP4_FP8 g32", 0, {}),
    "manifests/mix_mixtral": ("moe x2 NVFP4 g16; linear x8 FP8", 0, {}),
    "manifests/mix_qwen3moe": ("moe x2 NVFP4 g16; linear x8 FP8", 0, {}),
    "manifests/mixed": ("linear x3 NVFP4 g16; linear x8 FP8", 0, {}),
    "manifests/mixtral_FP8_DEFAULT_CFG": ("moe x2 FP8; linear x8 FP8", 0, {}),
    "manifests/nocal": ("linear x14 FP8", 0, {"missing_input_scale": 14}),
    "manifests/pb_unaligned": ("linear x7 FP8_PB_WO g128", 0, {}),
    "manifests/qwen2moe_NVFP4_DEFAULT_CFG": ("moe x2 NVFP4 g16; linear x14 NVFP4 g16", 2, {}),
    "manifests/qwen3moe_FP8_DEFAULT_CFG": ("moe x2 FP8; linear x8 FP8", 0, {}),
    "manifests/qwen3moe_NVFP4_DEFAULT_CFG": ("moe x2 NVFP4 g16; linear x8 NVFP4 g16", 2, {}),
    "manifests/uncal_FP8_DEFAULT_CFG": ("moe x2 FP8; linear x8 FP8", 0, {}),
    "manifests/wc_alllayers": ("linear x36 FP8", 0, {}),
    "manifests/wc_l0l1": ("linear x70 FP8", 0, {}),
    "manifests/wc_qkv": ("linear x48 FP8", 0, {}),
    "manifests/zero": ("linear x7 NVFP4 g16", 0, {}),
}


class Info(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def infos(**tensors):
    return {name: Info(dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}


def config_of(algo="FP8", **fields):
    return moqext.QuantConfig.from_dict({"quantization": {"quant_algo": algo, **fields}})


def manifest(name):
    document = json.loads((DATA / f"{name}.json").read_text())
    tensors = {key: Info(dtype, tuple(shape)) for key, (dtype, shape) in document["tensors"].items()}
    return tensors, document


def findings_of(name):
    if name.startswith("manifests/"):
        tensors, document = manifest(name)
        config = moqext.QuantConfig.from_dict(document["hf_quant_config"])
        return find_layers(tensors, config, architectures=document["config.json:architectures"])
    with moqext.Checkpoint(DATA / name) as checkpoint:
        return checkpoint.findings()


def codes(findings):
    return Counter(problem.code for problem in findings.all_problems())


@each("name", EXPECTED)
def test_genuine(name):
    layers, caches, problems = EXPECTED[name]
    findings = findings_of(name)
    kinds = Counter((layer.kind, layer.quant_algo, layer.group_size) for layer in findings.layers)
    found = "; ".join(
        f"{kind} x{count} {algo}" + (f" g{group}" if group else "")
        for (kind, algo, group), count in kinds.items()
    )
    assert found == layers
    assert len(findings.kv) == caches
    assert codes(findings) == problems


def test_nothing_genuine_is_left_out():
    directories = {
        f"{kind}/{path.name}"
        for kind in ("checkpoints", "exports")
        for path in (DATA / kind).iterdir()
        if path.is_dir()
    }
    manifests = {f"manifests/{path.stem}" for path in (DATA / "manifests").iterdir()}
    assert directories | manifests == set(EXPECTED)


@each("name", [name for name in EXPECTED if name.startswith("manifests/")])
def test_both_configurations_find_the_same(name):
    """config.json and hf_quant_config.json of one export lead to the same records."""
    tensors, document = manifest(name)
    from_file = find_layers(tensors, moqext.QuantConfig.from_dict(document["hf_quant_config"]))
    inline = find_layers(tensors, moqext.QuantConfig.from_dict(document["config.json:quantization_config"]))

    def summary(findings):
        return [(layer.name, layer.quant_algo, layer.group_size, layer.shape) for layer in findings.layers]

    assert summary(from_file) == summary(inline)
    assert codes(from_file) == codes(inline)


FORMATS = {
    "fp8": "FP8",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_pb_wo": "FP8_PB_WO",
    "fp8_pb_real": "FP8_PB_WO",
    "nvfp4": "NVFP4",
    "w4a16_nvfp4": "W4A16_NVFP4",
    "w4a8_nvfp4_fp8": "W4A8_NVFP4_FP8",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
}
VERSIONS = json.loads((DATA / "exports" / "versions.json").read_text())["cases"]


def module_of(name):
    """The module by the names that the producer's own quantizers go by in memory."""
    name = name.replace("backbone.", "model.").replace(".block_sparse_moe.", ".mlp.")
    return name.replace("embeddings", "embed_tokens")


@each("case", VERSIONS)
def test_formats_are_those_of_the_producer(case):
    """The producer told each module's format from its own quantizers, before anything was written."""
    told = {module_of(name): FORMATS[algo] for name, algo in VERSIONS[case]["layers"].items()}
    found = {module_of(layer.name): layer.quant_algo for layer in findings_of(f"exports/{case}").layers}
    assert found == told


@each("name", [name for name in EXPECTED if not name.startswith("manifests/")])
def test_every_tensor_has_one_place(name):
    """Each tensor that is not plain bf16 belongs to exactly one record, and the sizes are theirs."""
    with moqext.Checkpoint(DATA / name) as checkpoint:
        findings = checkpoint.findings()
        owners = Counter()
        for layer in findings.layers:
            total = 0
            for linear in layer.linears():
                owners.update(linear.tensors.values())
                total += sum(checkpoint.tensor(tensor).nbytes for tensor in linear.tensors.values())
            assert layer.size == total
        for kv in findings.kv:
            owners.update(kv.tensors.values())
        assert set(owners.values()) == {1}
        others = [
            key for key, info in checkpoint.tensors.items() if info.dtype != "BF16" and key not in owners
        ]
        assert [
            key
            for key in others
            if "A_log" not in key and not key.endswith(("dt_bias", ".D", "e_score_correction_bias"))
        ] == []


def test_experts_one_by_one(data):
    with moqext.Checkpoint(data / "exports" / "mixtral_nvfp4") as checkpoint:
        (group,) = [layer for layer in checkpoint.layers() if layer.kind == "moe"]
        assert group.name == "model.layers.0.block_sparse_moe.experts"
        experts, hidden, intermediate = group.shape
        names = [member.name[len(group.name) + 1 :] for member in group.members]
        assert names == [f"{i}.{projection}" for i in range(experts) for projection in ("w1", "w3", "w2")]
        for member in group.members:
            expected = (hidden, intermediate) if member.name.endswith("w2") else (intermediate, hidden)
            assert member.shape == expected
            assert set(member.tensors) == {"weight", "weight_scale", "weight_scale_2", "input_scale"}
        assert group.tensors == {}
        assert list(group.linears()) == list(group.members)
        assert group.weights == 3 * experts * hidden * intermediate


@pytest.mark.parametrize(
    "case, axis",
    [("llama4_nvfp4", "in"), ("llama4_fp8", None), ("gpt_oss_nvfp4", "in"), ("gpt_oss_mxfp8", "out")],
)
def test_stacked_experts(data, case, axis):
    config = json.loads((data / "exports" / case / "config.json").read_text())
    with moqext.Checkpoint(data / "exports" / case) as checkpoint:
        (group,) = [layer for layer in checkpoint.layers() if layer.kind == "moe"]
    experts, hidden, width = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    assert group.shape == (experts, hidden, width)
    assert [projection.role for projection in group.projections] == ["gate_up", "down"]
    gate_up, down = group.projections
    assert gate_up.shape == (experts, 2 * width, hidden)
    assert down.shape == (experts, hidden, width)
    for projection in group.projections:
        assert projection.transposed
        assert projection.block_axis == axis
        assert projection.tensors["weight"] == projection.name
    assert gate_up.interleaved == case.startswith("gpt_oss")
    assert not down.interleaved
    assert group.tensors["gate_up.weight"] == gate_up.name
    assert group.tensors["down.weight_scale"] == f"{down.name}_weight_scale"


E, H, W = 4, 96, 64  # experts, hidden size, expert width


@each(
    "algo, gate_up, scale, axis, group",
    [
        ("NVFP4", ("U8", (E, H // 2, 2 * W)), ("F8_E4M3", (E, H // 16, 2 * W)), "in", 16),
        ("W4A16_NVFP4", ("U8", (E, H // 2, 2 * W)), ("F8_E4M3", (E, H // 32, 2 * W)), "in", 32),
        ("W4A8_NVFP4_FP8", ("U8", (E, H, W)), ("F8_E4M3", (E, H, 2 * W // 32)), "out", 32),
        ("MXFP4", ("U8", (E, H, W)), ("U8", (E, H, 2 * W // 32)), "out", 32),
        ("MXFP8", ("F8_E4M3", (E, H, 2 * W)), ("U8", (E, H, 2 * W // 32)), "out", 32),
        ("FP8", ("F8_E4M3", (E, H, 2 * W)), ("F32", ()), None, None),
        ("FP8", ("F8_E4M3", (E, H, 2 * W)), ("F32", (E,)), None, None),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("F8_E4M3", (E, H, 2 * W)), ("F32", (E,)), None, None),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("F8_E4M3", (E, H, 2 * W)), ("F32", (E, 2 * W)), None, None),
    ],
)
def test_both_packings_of_stacked_experts(algo, gate_up, scale, axis, group):
    def down(shape):
        """The shape of down's tensor: hidden and width change places, one width for two."""
        swap = {H: W, H // 2: W // 2, H // 16: W // 16, H // 32: W // 32}
        back = {2 * W: H, W: H // 2, 2 * W // 32: H // 32}
        if len(shape) == 3:
            return (shape[0], swap[shape[1]], back[shape[2]])
        return tuple(back[n] if n != E else n for n in shape)

    base = "model.layers.0.mlp.experts"
    tensors = {
        f"{base}.gate_up_proj": gate_up,
        f"{base}.gate_up_proj_weight_scale": scale,
        f"{base}.down_proj": (gate_up[0], down(gate_up[1])),
        f"{base}.down_proj_weight_scale": (scale[0], down(scale[1])),
    }
    if scale[0] == "F8_E4M3":
        tensors |= {f"{base}.{name}_proj_weight_scale_2": ("F32", (E,)) for name in ("gate_up", "down")}
    if algo in ("NVFP4", "W4A8_NVFP4_FP8", "FP8"):
        tensors |= {f"{base}.{name}_proj_input_scale": ("F32", ()) for name in ("gate_up", "down")}
    findings = find_layers(infos(**tensors), config_of(algo, group_size=group or 16))
    assert codes(findings) == {}
    (layer,) = findings.layers
    assert (layer.quant_algo, layer.group_size, layer.shape) == (algo, group, (E, H, W))
    assert [projection.shape for projection in layer.projections] == [(E, 2 * W, H), (E, H, W)]
    assert [projection.block_axis for projection in layer.projections] == [axis, axis]


def test_stacked_experts_with_dots():
    """Step 3.5: a linear's names on 3-D tensors, packed along the input, gate and up apart and unequal."""
    shapes = {"gate_proj": (W, H), "up_proj": (W, H), "down_proj": (H, W)}
    tensors, values = {}, {}
    for name, (rows, columns) in shapes.items():
        base = f"model.layers.3.moe.{name}"
        tensors[f"{base}.weight"] = ("U8", (E, rows, columns // 2))
        tensors[f"{base}.weight_scale"] = ("F8_E4M3", (E, rows, columns // 16))
        tensors[f"{base}.weight_scale_2"] = tensors[f"{base}.input_scale"] = ("F32", (E,))
        values[f"{base}.weight_scale"] = np.full((E, rows, columns // 16), 0x38, np.uint8)
        values[f"{base}.weight_scale_2"] = np.full(E, 0.001, np.float32)
        values[f"{base}.input_scale"] = np.full(E, 0.003, np.float32)
    values["model.layers.3.moe.up_proj.weight_scale_2"][2] = 0.0049
    tensors["model.layers.3.moe.gate.weight"] = ("F32", (E, H))
    config = config_of("NVFP4", group_size=16, exclude_modules=["model.layers.3.moe.gate"])
    findings = find_layers(infos(**tensors), config, values.__getitem__)
    (layer,) = findings.layers
    assert (layer.name, layer.shape, layer.group_size) == ("model.layers.3.moe", (E, H, W), 16)
    assert [(p.role, p.shape, p.transposed, p.block_axis) for p in layer.projections] == [
        ("gate", (E, W, H), False, "in"),
        ("up", (E, W, H), False, "in"),
        ("down", (E, H, W), False, "in"),
    ]
    (problem,) = findings.all_problems()
    assert problem.code == "unequal_weight_scale_2"
    assert "1 of 4 experts, by up to 4.9 times" in problem.message


def test_second_level_scale_per_half():
    """A fused layout with one second-level scale for gate and one for up, (E, 2)."""
    base = "model.layers.0.mlp.experts"
    tensors = {
        f"{base}.gate_up_proj": ("U8", (E, 2 * W, H // 2)),
        f"{base}.gate_up_proj_scale": ("F8_E4M3", (E, 2 * W, H // 16)),
        f"{base}.gate_up_proj_scale_2": ("F32", (E, 2)),
        f"{base}.gate_up_proj_input_scale": ("F32", ()),
        f"{base}.down_proj": ("U8", (E, H, W // 2)),
        f"{base}.down_proj_scale": ("F8_E4M3", (E, H, W // 16)),
        f"{base}.down_proj_scale_2": ("F32", (E,)),
        f"{base}.down_proj_input_scale": ("F32", ()),
    }
    findings = find_layers(infos(**tensors), config_of("NVFP4", group_size=16))
    assert codes(findings) == {"foreign_scale_name": 2}
    (layer,) = findings.layers
    assert layer.shape == (E, H, W)
    assert [projection.transposed for projection in layer.projections] == [False, False]


def test_container_of_a_mixed_configuration_covers_stacked_experts():
    base = "model.layers.0.feed_forward.experts"
    tensors = {}
    for name, shape in (("gate_up_proj", (E, H, 2 * W)), ("down_proj", (E, W, H))):
        tensors[f"{base}.{name}"] = ("F8_E4M3", shape)
        tensors[f"{base}.{name}_weight_scale"] = tensors[f"{base}.{name}_input_scale"] = ("F32", ())
    config = config_of("MIXED_PRECISION", quantized_layers={base: {"quant_algo": "FP8"}})
    findings = find_layers(infos(**tensors), config)
    assert codes(findings) == {}
    (layer,) = findings.layers
    assert (layer.config_algo, layer.stored_algo) == ("FP8", "FP8")
    assert base in layer.rule


def stacked(**extra):
    """The tensors of stacked FP8 experts, (experts, in, out)."""
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for name, shape in (("gate_up_proj", (E, H, 2 * W)), ("down_proj", (E, W, H))):
        tensors[f"{base}.{name}"] = ("F8_E4M3", shape)
        tensors[f"{base}.{name}_weight_scale"] = tensors[f"{base}.{name}_input_scale"] = ("F32", ())
    return tensors | {f"{base}.{name}": value for name, value in extra.items()}


@pytest.mark.parametrize(
    "architectures, biases, interleaved",
    [
        ((), False, False),
        ((), True, True),
        (("GptOssForCausalLM",), True, True),
        (("GptOssForCausalLM",), False, True),
        (("OtherForCausalLM",), True, False),
    ],
)
def test_interleaving_is_the_architecture_s_or_shown_by_biases(architectures, biases, interleaved):
    extra = {"gate_up_proj_bias": ("BF16", (E, 2 * W)), "down_proj_bias": ("BF16", (E, H))} if biases else {}
    findings = find_layers(infos(**stacked(**extra)), config_of("FP8"), architectures=architectures)
    assert codes(findings) == {}
    gate_up, down = findings.layers[0].projections
    assert (gate_up.interleaved, down.interleaved) == (interleaved, False)


def test_one_zero_expert_among_stacked_ones():
    """NaN block scales belong to an expert whose second-level scale is 0; anywhere else they are damage."""
    base = "model.layers.0.mlp.experts"
    tensors, values = {}, {}
    for name, rows, columns in (("gate_up_proj", H, 2 * W), ("down_proj", W, H)):
        tensors[f"{base}.{name}"] = ("U8", (E, rows // 2, columns))
        tensors[f"{base}.{name}_weight_scale"] = ("F8_E4M3", (E, rows // 16, columns))
        tensors[f"{base}.{name}_weight_scale_2"] = ("F32", (E,))
        values[f"{base}.{name}"] = np.full((E, rows // 2, columns), 0x77, np.uint8)
        values[f"{base}.{name}_weight_scale"] = np.full((E, rows // 16, columns), 0x38, np.uint8)
        values[f"{base}.{name}_weight_scale_2"] = np.full(E, 0.001, np.float32)
    values[f"{base}.down_proj_weight_scale_2"][2] = 0
    values[f"{base}.down_proj_weight_scale"][2] = 0x7F
    config = config_of("W4A16_NVFP4", group_size=16)
    (problem,) = find_layers(infos(**tensors), config, values.__getitem__).all_problems()
    assert (problem.code, problem.tensor) == ("zero_blocks", f"{base}.down_proj_weight_scale_2")
    values[f"{base}.down_proj_weight_scale"][1, 0, 0] = 0x7F
    assert codes(find_layers(infos(**tensors), config, values.__getitem__)) == {
        "zero_blocks": 1,
        "scale_not_finite": 1,
    }
    values[f"{base}.down_proj_weight_scale_2"][3] = 0
    assert codes(find_layers(infos(**tensors), config, values.__getitem__)) == {
        "lost_scale": 1,
        "scale_not_finite": 1,
    }


def test_square_blocks_of_stacked_experts():
    """One block one way cannot have been scaled the wrong way round; several each way were."""
    base = "model.layers.0.mlp.experts"
    tensors = {
        f"{base}.gate_up_proj": ("F8_E4M3", (E, 96, 256)),
        f"{base}.gate_up_proj_weight_scale": ("F32", (E, 2, 1, 1, 1)),
        f"{base}.down_proj": ("F8_E4M3", (E, 128, 96)),
        f"{base}.down_proj_weight_scale": ("F32", (E, 1, 1, 1, 1)),
    }
    findings = find_layers(infos(**tensors), config_of("FP8_PB_WO"))
    assert codes(findings) == {}
    assert (findings.layers[0].quant_algo, findings.layers[0].group_size) == ("FP8_PB_WO", 128)
    tensors[f"{base}.gate_up_proj"] = ("F8_E4M3", (E, 192, 256))
    tensors[f"{base}.gate_up_proj_weight_scale"] = ("F32", (E, 2, 1, 2, 1))
    tensors[f"{base}.down_proj"] = ("F8_E4M3", (E, 128, 192))
    tensors[f"{base}.down_proj_weight_scale"] = ("F32", (E, 2, 1, 1, 1))
    assert codes(find_layers(infos(**tensors), config_of("FP8_PB_WO"))) == {"clipped_blocks": 1}


def test_embeddings_stored_unquantized_are_told_of_only_when_listed():
    tensors = infos(
        **{"model.embed_tokens.weight": ("BF16", (64, 32)), "model.fc.weight": ("BF16", (64, 32))}
    )
    assert codes(find_layers(tensors, config_of("FP8", exclude_modules=["model.fc"]))) == {}
    listed = {"model.embed_tokens": {"quant_algo": "FP8"}}
    findings = find_layers(tensors, config_of("MIXED_PRECISION", quantized_layers=listed))
    (problem,) = findings.all_problems()
    assert (problem.code, problem.layer) == ("stored_unquantized", "model.embed_tokens")


@pytest.mark.parametrize(
    "names", [("weight_scale", "weight_scale_inv"), ("weight_scale_inv", "weight_scale")]
)
def test_of_two_spellings_the_usual_one_counts(names):
    tensors = {"a.fc.weight": ("F8_E4M3", (256, 256))} | {f"a.fc.{name}": ("F32", (2, 2)) for name in names}
    values = {f"a.fc.{name}": np.ones((2, 2), np.float32) for name in names}
    findings = find_layers(infos(**tensors), config_of("FP8_PB_WO"), values.__getitem__)
    (layer,) = findings.layers
    assert layer.tensors["weight_scale"] == "a.fc.weight_scale"
    (problem,) = findings.all_problems()
    assert (problem.code, problem.tensor) == ("repeated_scale", "a.fc.weight_scale_inv")
    values[f"a.fc.{names[0]}"][1, 0] = 2
    (problem,) = find_layers(infos(**tensors), config_of("FP8_PB_WO"), values.__getitem__).all_problems()
    assert (problem.code, problem.tensor) == ("conflicting_tensors", "a.fc.weight_scale_inv")


def test_mxfp4_with_and_without_activation_scale():
    tensors = {"a.fc.weight": ("U8", (64, 32)), "a.fc.weight_scale": ("U8", (64, 2))}
    assert (
        recognise({"weight": Info("U8", (64, 32)), "weight_scale": Info("U8", (64, 2))}).algos[0] == "MXFP4"
    )
    tensors["a.fc.input_scale"] = ("F32", ())
    findings = find_layers(infos(**tensors), config_of("W4A8_MXFP4_FP8"))
    assert findings.layers[0].stored_algo == "W4A8_MXFP4_FP8"
    assert codes(findings) == {}
    assert codes(find_layers(infos(**tensors), config_of("MXFP4"))) == {"unused_input_scale": 1}


@pytest.mark.parametrize(
    "listed", ["model.layers.0.attn.qkv_proj", "language_model.layers.0.attn", "layers.0.attn.q_proj"]
)
def test_listed_modules_go_by_fused_names_and_other_prefixes(listed):
    tensors = {}
    for name in "qkv":
        base = f"model.layers.0.attn.{name}_proj"
        tensors[f"{base}.weight"] = ("F8_E4M3", (64, 32))
        tensors[f"{base}.weight_scale"] = tensors[f"{base}.input_scale"] = ("F32", ())
    config = config_of("MIXED_PRECISION", quantized_layers={listed: {"quant_algo": "FP8"}})
    assert "listed_module_missing" not in codes(find_layers(infos(**tensors), config))
    config = config_of("MIXED_PRECISION", quantized_layers={listed.replace("0", "1"): {"quant_algo": "FP8"}})
    assert codes(find_layers(infos(**tensors), config))["listed_module_missing"] == 1


def test_svdquant_pair_under_its_leaked_names():
    base = "model.layers.0.mlp.down_proj"
    tensors = {
        f"{base}.weight": ("U8", (H, W // 2)),
        f"{base}.weight_scale": ("F8_E4M3", (H, W // 16)),
        f"{base}.weight_scale_2": ("F32", ()),
        f"{base}.input_scale": ("F32", ()),
        f"{base}.pre_quant_scale": ("BF16", (W,)),
        f"{base}.weight_quantizer._svdquant_lora_a": ("BF16", (32, W)),
        f"{base}.weight_quantizer._svdquant_lora_b": ("BF16", (H, 32)),
    }
    findings = find_layers(infos(**tensors), config_of("NVFP4_SVD", group_size=16))
    assert codes(findings) == {}
    (layer,) = findings.layers
    assert (layer.quant_algo, layer.stored_algo) == ("NVFP4_SVD", "NVFP4_SVD")
    assert {"lora_a", "lora_b", "pre_quant_scale"} < set(layer.tensors)


def test_native_block_fp8_beside_modelopt_experts():
    """DeepSeek V4: its maker's block FP8 has a `scale` of powers of two; that of a norm does not count."""
    tensors = {
        "layers.0.attn.wq_a.weight": ("F8_E4M3", (256, 384)),
        "layers.0.attn.wq_a.scale": ("F8_E8M0", (2, 3)),
        "layers.0.attn.norm.weight": ("BF16", (384,)),
        "layers.0.attn.norm.scale": ("F32", (384,)),
    }
    findings = find_layers(infos(**tensors), None)
    (layer,) = findings.layers
    assert (layer.stored_algo, layer.group_size) == ("FP8_PB_WO", 128)
    assert codes(findings) == {"no_quant_config": 1, "foreign_scale_name": 1}


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"),
        ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"),
        ("model.layers.0.self_attn.qkv_proj.k_scale", "model.layers.0.self_attn.qkv_proj.v_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_cache_scales_by_attention(names, shape):
    findings = find_layers(
        infos(**dict.fromkeys(names, ("F32", shape))),
        config_of(None, kv_cache_quant_algo="FP8"),
        lambda name: np.full(shape, 0.25 if "k_scale" in name else 0.5, np.float32),
    )
    (kv,) = findings.kv
    assert kv.name == "model.layers.0.self_attn"
    assert kv.tensors == {"k_scale": names[0], "v_scale": names[1]}
    assert kv.values == {"k_scale": 0.25, "v_scale": 0.5}
    assert codes(findings) == ({"old_kv_scale_name": 2} if "qkv_proj" in names[0] else {})


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "MXFP8", "W4A16_AWQ"])
def test_formats_that_look_alike_keep_their_evidence(algo):
    """The tensors of FP8 stay FP8, whatever the configuration names."""
    tensors = {
        "a.fc.weight": ("F8_E4M3", (256, 256)),
        "a.fc.weight_scale": ("F32", ()),
        "a.fc.input_scale": ("F32", ()),
    }
    (layer,) = find_layers(infos(**tensors), config_of(algo)).layers
    assert (layer.config_algo, layer.stored_algo, layer.quant_algo) == (algo, "FP8", "FP8")


def test_one_block_is_told_apart_by_the_configuration():
    tensors = {"a.fc.weight": ("F8_E4M3", (128, 128)), "a.fc.weight_scale": ("F32", ())}
    found = {algo: find_layers(infos(**tensors), config_of(algo)).layers[0] for algo in ("FP8", "FP8_PB_WO")}
    assert {algo: layer.quant_algo for algo, layer in found.items()} == {
        "FP8": "FP8",
        "FP8_PB_WO": "FP8_PB_WO",
    }
    tensors["a.fc.weight"] = ("F8_E4M3", (129, 128))
    (layer,) = find_layers(infos(**tensors), config_of("FP8_PB_WO")).layers
    assert layer.quant_algo == "FP8"


def test_awq_evidence():
    """A factor on the activations makes NVFP4 to NVFP4_AWQ, and nothing else it can be."""
    tensors = {
        "weight": Info("U8", (64, 64)),
        "weight_scale": Info("F8_E4M3", (64, 8)),
        "weight_scale_2": Info("F32", ()),
    }
    assert recognise(tensors).algos == ("W4A16_NVFP4", "NVFP4", "NVFP4_AWQ")
    assert recognise(tensors | {"pre_quant_scale": Info("BF16", (128,))}).algos == ("NVFP4_AWQ",)


def test_names():
    for name, expected in {
        "model.layers.0.mlp.up_proj.weight_scale_2": ("model.layers.0.mlp.up_proj", "weight_scale_2"),
        "lm_head.weight": ("lm_head", "weight"),
        "a.experts.gate_up_proj_bias": ("a.experts.gate_up_proj", "bias"),
        "a.experts.down_proj": ("a.experts.down_proj", "weight"),
        "a.fc.weight_quantizer._double_scale": ("a.fc", "leftover"),
        "a.fc.svdquant_lora_b": ("a.fc", "lora_b"),
        "a.fc.weight_quantizer._svdquant_lora_b": ("a.fc", "lora_b"),
    }.items():
        named = parse_tensor_name(name)
        assert (named.module, named.role) == expected
    for other in ("model.layers.0.self_attn.sinks", "weight", "weight_scale", ".weight", ""):
        assert parse_tensor_name(other) is None
    assert parse_expert_name("model.layers.0.mlp.experts.17.up_proj") == (
        "model.layers.0.mlp.experts",
        17,
        "up_proj",
    )
    for other in (
        "model.layers.0.mlp.shared_experts.up_proj",
        "model.layers.0.mlp.up_proj",
        "a.shared_experts.0.up_proj",
    ):
        assert parse_expert_name(other) is None


@pytest.mark.parametrize(
    "container, gate, up, down",
    [
        ("model.layers.3.block_sparse_moe.experts", "w1", "w3", "w2"),
        ("model.layers.3.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ("model.language_model.layers.3.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ("language_model.model.layers.3.block_sparse_moe.experts", "gate", "up", "down"),
        ("backbone.layers.3.mixer.experts", None, "up_proj", "down_proj"),
        ("layers.3.ffn.experts", "w1", "w3", "w2"),
    ],
)
def test_names_of_experts(container, gate, up, down):
    """Each architecture's names; the router, the shared expert and a dense layer stay outside."""
    tensors = {}
    for index in (1, 0, 10, *range(2, 10)):
        for name, shape in ((down, (H, W)), (up, (W, H)), (gate, (W, H))):
            if name is not None:
                base = f"{container}.{index}.{name}"
                tensors[f"{base}.weight"] = ("F8_E4M3", shape)
                tensors[f"{base}.weight_scale"] = tensors[f"{base}.input_scale"] = ("F32", ())
    parent = container.rpartition(".")[0]
    for module in (f"{parent}.shared_experts.{up}", f"{parent}.{down}"):
        tensors[f"{module}.weight"] = ("F8_E4M3", (W, H))
        tensors[f"{module}.weight_scale"] = tensors[f"{module}.input_scale"] = ("F32", ())
    tensors[f"{parent}.gate.weight"] = ("BF16", (11, H))
    findings = find_layers(infos(**tensors), config_of("FP8", exclude_modules=[f"{parent}.gate"]))
    assert codes(findings) == {}
    group, *others = sorted(findings.layers, key=lambda layer: layer.kind == "linear")
    assert (group.kind, group.name, group.shape, group.quant_algo) == ("moe", container, (11, H, W), "FP8")
    order = [name for name in (gate, up, down) if name is not None]
    assert [member.name for member in group.members] == [
        f"{container}.{index}.{name}" for index in range(11) for name in order
    ]
    assert {layer.kind for layer in others} == {"linear"}
    assert len(others) == 2


def test_experts_may_claim_any_number():
    """A name claims the last expert's number: what is missing is counted, not listed."""
    name = "model.layers.0.mlp.experts.999999.up_proj"
    tensors = {
        f"{name}.weight": ("F8_E4M3", (8, 8)),
        f"{name}.weight_scale": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }
    findings = find_layers(infos(**tensors), config_of("FP8"))
    (problem,) = findings.all_problems()
    assert problem.code == "missing_expert"
    assert problem.message.startswith("999999 of 1000000 are missing: 0.up_proj, 1.up_proj")


def test_order_of_layers():
    """Numbers in names sort by value."""
    tensors = {}
    for i in (10, 2, 1):
        tensors[f"model.layers.{i}.fc.weight"] = ("F8_E4M3", (8, 8))
        tensors[f"model.layers.{i}.fc.weight_scale"] = tensors[f"model.layers.{i}.fc.input_scale"] = (
            "F32",
            (),
        )
    assert [layer.name.split(".")[2] for layer in find_layers(infos(**tensors), config_of()).layers] == [
        "1",
        "2",
        "10",
    ]


def test_block_scales_are_left_unread_on_request(data):
    """Large scales are read only when asked to; small ones always are."""
    from moqext.reader.formats.scale_values import FEW

    rows = FEW // 4 + 16
    tensors = {
        "a.fc.weight": ("U8", (rows, 32)),
        "a.fc.weight_scale": ("F8_E4M3", (rows, 4)),
        "a.fc.weight_scale_2": ("F32", ()),
    }
    asked = []

    def read(name):
        asked.append(name)
        return np.float32(0.01) if name.endswith("_2") else np.full((rows, 4), 0x7F, np.uint8)

    config = config_of("W4A16_NVFP4", group_size=16)
    assert codes(find_layers(infos(**tensors), config, read, block_scales=False)) == {}
    assert asked == ["a.fc.weight_scale_2"]
    assert codes(find_layers(infos(**tensors), config, read)) == {"scale_not_finite": 1}


def test_an_empty_directory_has_no_layers():
    config = config_of("FP8", kv_cache_quant_algo="FP8")
    assert find_layers({}, config) == ((), (), ())


PROJECTION = st.sampled_from(
    ["q_proj", "k_proj", "up_proj", "gate_proj", "down_proj", "w1", "w2", "embed_tokens"]
)
MODULE = st.one_of(
    st.builds("model.layers.{}.{}".format, st.integers(0, 2), PROJECTION),
    st.builds("model.experts.{}.{}".format, st.integers(0, 2), PROJECTION),
    st.builds("model.moe.{}".format, PROJECTION),
)
ROLE = st.sampled_from(
    [
        *("weight", "weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale", "pre_quant_scale"),
        *("bias", "k_scale", "v_scale", "k_bias", "scale", "svdquant_lora_a", "svdquant_lora_b"),
        *("weight_quantizer._scale", "weight_quantizer._svdquant_lora_a"),
    ]
)
STACKED = st.sampled_from(
    [
        f"model.experts.{name}{role}"
        for name in ("gate_up_proj", "gate_proj", "down_proj")
        for role in ("", "_weight_scale", "_weight_scale_2", "_scale_2", "_input_scale", "_bias")
    ]
)
NAME = st.one_of(st.builds("{}.{}".format, MODULE, ROLE), STACKED, st.text(max_size=8))
DTYPE = st.sampled_from(
    ["F32", "BF16", "F16", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "F4", "BOOL"]
)
SIZES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 96, 129]), max_size=5)
SHAPE = SIZES.map(tuple).filter(lambda shape: math.prod(shape) <= 1 << 20)  # what is read is made in memory
CARRIERS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@settings(max_examples=150)
@given(
    tensors=st.dictionaries(NAME, st.builds(Info, DTYPE, SHAPE), max_size=14),
    algo=st.sampled_from(["FP8", "NVFP4", "FP8_PB_WO", "MXFP8", "W4A16_AWQ", None]),
    fill=st.integers(0, 255),
)
def test_any_tensors_make_records_and_problems(tensors, algo, fill):
    """Whatever names, types, shapes and bytes a file has: no exception, and nothing gets lost."""

    def read(name):
        dtype, shape = tensors[name]
        carrier = np.dtype(CARRIERS.get(dtype, np.uint8))
        return np.frombuffer(bytes([fill]) * (carrier.itemsize * int(np.prod(shape))), carrier).reshape(shape)

    config = config_of(algo, kv_cache_quant_algo="FP8") if algo else None
    findings = find_layers(tensors, config, read)
    placed = {
        name for layer in findings.layers for linear in layer.linears() for name in linear.tensors.values()
    }
    placed |= {problem.tensor for problem in findings.all_problems()}
    for name, info in tensors.items():
        named = parse_tensor_name(name)
        if info.dtype in ("U8", "I8", "F8_E4M3") and (named is None or named.role == "weight"):
            assert name in placed, "a tensor of codes that no record and no problem tells of"


def test_scales_further_apart_than_float32_counts_are_compared_in_silence() -> None:
    """Their quotient overflowed float32, and whoever read the file got a warning of NumPy's."""
    from moqext.reader.findings.fused import spread

    far = np.array([np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spread(far) == float(far[0]) / float(far[1])
