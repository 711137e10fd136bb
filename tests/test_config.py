"""Configurations: each shape, each algorithm, mixed precision, and every refusal with its JSON path."""

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moqext
from moqext import ConfigError, QuantConfig, detect
from moqext.reader.config.quant_config import Conflict, Producer

from .work import assert_linear, each

ALGORITHMS = {  # canonical name: (group size where a file says none, other spellings)
    "FP8": (None, []),
    "FP8_PER_CHANNEL_PER_TOKEN": (None, ["fp8_pc_pt"]),
    "FP8_PB_WO": (128, ["fp8_pb_wo", "fp8_pb_real", "FP8_PB", "FP8_BLOCK_SCALES"]),
    "NVFP4": (16, ["nvfp4_static"]),
    "NVFP4_AWQ": (16, []),
    "NVFP4_SVD": (16, ["nvfp4_svdquant"]),
    "W4A16_NVFP4": (16, []),
    "W4A8_NVFP4_FP8": (32, []),
    "MXFP4": (32, ["mxfp4"]),
    "W4A8_MXFP4_FP8": (32, []),
    "MXFP8": (32, []),
    "W4A16_AWQ": (128, ["int4_awq"]),
    "W4A8_AWQ": (128, []),
    "W8A8_SQ_PER_CHANNEL": (None, ["int8_sq"]),
    "W8A16": (None, ["int8_wo"]),
}
SPELLINGS = [
    (spelling, name)
    for name, (_, others) in ALGORITHMS.items()
    for spelling in [name, name.lower(), name.title(), *others, *(other.swapcase() for other in others)]
]
FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOAT4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT = {"name": "modelopt", "version": "0.46.0"}
LAYER = "model.layers.0.mlp.up_proj"


def nested(**fields):
    return {"producer": MODELOPT, "quantization": fields}


def flat(**fields):
    return {"producer": MODELOPT, "quant_method": "modelopt", **fields}


def read(mapping):
    return QuantConfig.from_dict(mapping)


# ------------------------------------------------------------------------------------------------ shapes


def test_shape_a_hf_quant_config():
    config = read(
        nested(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16, exclude_modules=["lm_head"])
    )
    assert (config.quant_algo, config.kv_cache_quant_algo, config.group_size) == ("NVFP4", "FP8", 16)
    assert config.exclude_modules == ("lm_head",)
    assert config.producer == Producer("modelopt", "0.46.0")
    assert config.layer_quant(LAYER) == ("NVFP4", 16, "quant_algo")
    assert config.layer_quant("lm_head") == (None, None, "exclude_modules: lm_head")
    assert (config.conflicts, config.notes, config.quantized_layers, config.quant_method) == (
        (),
        (),
        {},
        None,
    )


def test_shape_b_flat():
    config = read(
        flat(
            config_groups={
                "group_0": {"input_activations": FLOAT4, "weights": FLOAT4, "targets": ["Linear"]}
            },
            ignore=["lm_head", "model.embed_tokens"],
            quant_algo="NVFP4",
            kv_cache_scheme=FLOAT8,
        )
    )
    assert (config.quant_algo, config.kv_cache_quant_algo, config.group_size) == ("NVFP4", "FP8", 16)
    assert config.exclude_modules == ("lm_head", "model.embed_tokens")
    assert config.quant_method == "modelopt"


def test_shape_b_before_quant_method_was_written():
    config = read(
        {"ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": MODELOPT}
    )
    assert (config.quant_algo, config.kv_cache_quant_algo) == ("FP8", "FP8")


def test_shape_c_nested_with_quant_method():
    config = read(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "exclude_modules": ["a"]}}
    )
    assert (config.quant_algo, config.group_size, config.exclude_modules) == ("MXFP8", 32, ("a",))


def test_shape_d_flat_with_inner_names():
    layers = {
        "model.layers.0.mlp": {"quant_algo": "MXFP8"},
        "lm_head": {"quant_algo": "nvfp4", "group_size": 16},
    }
    fields = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "exclude_modules": ["mtp"]}
    config = read({**fields, "quantized_layers": layers, "quant_method": "modelopt"})
    assert config.quantized_layers["model.layers.0.mlp"] == (
        "MXFP8",
        32,
        "quantized_layers: model.layers.0.mlp",
    )
    assert config.quantized_layers["lm_head"][:2] == ("NVFP4", 16)
    assert config.exclude_modules == ("mtp",)
    assert config.group_size is None


def shape_e(**fields):
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "moe_quant_algo": "NVFP4",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
        "producer": MODELOPT,
        **fields,
    }


def test_shape_e_native_fp8_with_requantized_experts():
    config = read(shape_e())
    assert (config.native_algo, config.moe_quant_algo, config.quant_method) == ("FP8_PB_WO", "NVFP4", "fp8")
    assert config.layer_algo("layers.0.ffn.experts.3.w1") == "NVFP4"
    assert config.layer_quant("layers.0.attn.wq_a") == ("FP8_PB_WO", 128, "quant_method: fp8")
    assert config.layer_algo("layers.0.ffn.shared_experts.w1") == "FP8_PB_WO"
    assert config.is_excluded("layers.0.attn.wq_a")  # ModelOpt left it alone, which is all the list says
    assert config.layer_quant("head") == (None, None, "exclude_modules: head")
    assert read(config.to_dict()) == config


def test_shape_f_layer_list_in_a_file_of_its_own(tmp_path):
    layers = {"transformer.layers.0.mlp": {"quant_algo": "W4A8_AWQ", "group_size": 64}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(nested(quant_algo="MIXED_PRECISION")))
    (tmp_path / "quant_cfg.json").write_text(
        json.dumps({"kv_cache_quant_algo": "FP8", "quantized_layers": layers})
    )
    config = QuantConfig.from_pretrained(tmp_path)
    assert config.layer_quant("transformer.layers.0.mlp.fc")[:2] == ("W4A8_AWQ", 64)
    assert config.kv_cache_quant_algo == "FP8"


@pytest.mark.parametrize("activations", [{"input_activations": None}, {}])
def test_shape_g_weight_only_in_disguise(activations):
    groups = {"group_0": {**activations, "weights": {**FLOAT4, "symmetric": True}, "targets": ["Linear"]}}
    config = read(flat(quant_algo="NVFP4", quant_method="modelopt_fp4", group_size=16, config_groups=groups))
    assert config.quant_algo == "W4A16_NVFP4"
    assert "W4A16_NVFP4" in config.notes[0]
    groups["group_1"] = {"input_activations": FLOAT4, "weights": FLOAT4}
    both = read(flat(quant_algo="NVFP4", config_groups=groups))
    assert (both.quant_algo, both.notes) == ("NVFP4", ())


def test_a_whole_config_json_is_unwrapped():
    whole = {"architectures": ["LlamaForCausalLM"], "quantization_config": flat(quant_algo="FP8")}
    assert read(whole).quant_algo == "FP8"
    assert detect(whole) == "modelopt"
    with pytest.raises(ConfigError) as caught:
        read({"quantization_config": flat(quant_algo="FP9")})
    assert caught.value.path == "$.quantization_config.quant_algo"


def test_kv_cache_only():
    for mapping in (
        nested(quant_algo=None, kv_cache_quant_algo="FP8", quantized_layers={}),
        flat(ignore=[], kv_cache_scheme=FLOAT8),
    ):
        config = read(mapping)
        assert (config.quant_algo, config.kv_cache_quant_algo) == (None, "FP8")
        assert config.layer_quant(LAYER) == (None, None, "quant_algo")


def test_nothing_quantized_is_said_explicitly():
    assert read(nested(quant_algo=None, kv_cache_quant_algo=None)).layer_algo(LAYER) is None


def test_mappings_of_every_kind_are_read():
    from types import MappingProxyType

    frozen = MappingProxyType(
        {"quantization": MappingProxyType({"quant_algo": "FP8", "exclude_modules": ("a",)})}
    )
    assert read(frozen).exclude_modules == ("a",)


# -------------------------------------------------------------------------------------------- algorithms


@each("spelling, name", SPELLINGS)
@each("shape", [nested, flat])
def test_algorithms_in_any_spelling(spelling, name, shape):
    config = read(shape(quant_algo=spelling))
    assert (config.quant_algo, config.group_size) == (name, ALGORITHMS[name][0])
    assert config.layer_quant(LAYER) == (name, ALGORITHMS[name][0], "quant_algo")
    mixed = read(shape(quant_algo="mixed_precision", quantized_layers={LAYER: {"quant_algo": spelling}}))
    assert mixed.quant_algo == "MIXED_PRECISION"
    assert mixed.layer_quant(LAYER)[:2] == (name, ALGORITHMS[name][0])
    assert mixed.layer_quant("other") == (None, None, "quantized_layers: not listed")


@pytest.mark.parametrize("name", ["FP8", "INT8", "NVFP4", "NVFP4_AFFINE"])
def test_kv_algorithms(name):
    for text in (name, name.lower()):
        assert read(nested(quant_algo="FP8", kv_cache_quant_algo=text)).kv_cache_quant_algo == name
        assert read(flat(quant_algo="FP8", kv_cache_scheme=text)).kv_cache_quant_algo == name


@pytest.mark.parametrize(
    "scheme, name",
    [
        (FLOAT8, "FP8"),
        (FLOAT4, "NVFP4"),
        ({"type": "int", "num_bits": 8}, "INT8"),
        ("NVFP4", "NVFP4"),
        (None, None),
    ],
)
def test_kv_schemes(scheme, name):
    assert read(flat(quant_algo="FP8", kv_cache_scheme=scheme)).kv_cache_quant_algo == name


def test_kv_fields_of_one_document():
    agree = read(flat(quant_algo="FP8", kv_cache_scheme=FLOAT8, kv_cache_quant_algo="FP8"))
    assert (agree.kv_cache_quant_algo, agree.conflicts) == ("FP8", ())
    affine = read(flat(quant_algo="FP8", kv_cache_scheme=FLOAT4, kv_cache_quant_algo="NVFP4_AFFINE"))
    assert (affine.kv_cache_quant_algo, affine.conflicts) == ("NVFP4_AFFINE", ())
    torn = read(flat(quant_algo="FP8", kv_cache_scheme=FLOAT8, kv_cache_quant_algo="NVFP4"))
    assert torn.kv_cache_quant_algo == "FP8"
    assert torn.conflicts == (Conflict("kv_cache_quant_algo", "FP8", "NVFP4", "", ""),)
    torn = read(nested(quant_algo="FP8", kv_cache_scheme=FLOAT8, kv_cache_quant_algo="NVFP4"))
    assert torn.kv_cache_quant_algo == "NVFP4"


@pytest.mark.parametrize("size", [32, 32.0, "32"])
def test_group_sizes(size):
    assert read(nested(quant_algo="W4A16_NVFP4", group_size=size)).group_size == 32
    assert read(nested(quant_algo="FP8", group_size=size)).group_size is None
    layers = {
        LAYER: {"quant_algo": "W4A16_NVFP4", "group_size": size},
        "b": {"quant_algo": "FP8", "group_size": size},
    }
    mixed = read(nested(quant_algo="MIXED_PRECISION", group_size=16, quantized_layers=layers))
    assert mixed.layer_quant(LAYER).group_size == 32
    assert mixed.layer_quant("b").group_size is None


def test_group_size_from_config_groups():
    weights = {**FLOAT4, "group_size": 32}
    groups = {"group_0": {"input_activations": FLOAT4, "weights": weights}}
    assert read(flat(quant_algo="NVFP4", config_groups=groups)).group_size == 32
    assert read(flat(quant_algo="NVFP4", group_size=16, config_groups=groups)).group_size == 16


def test_groups_of_mixed_precision_may_differ_in_size():
    groups = {str(size): {"weights": {**FLOAT4, "group_size": size}} for size in (16, 32, 128)}
    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 32}}
    config = read(flat(quant_algo="MIXED_PRECISION", config_groups=groups, quantized_layers=layers))
    assert [config.layer_quant(name).group_size for name in "ab"] == [16, 32]
    assert (config.group_size, config.notes) == (None, ())


def test_flags():
    config = read(nested(quant_algo="W4A16_AWQ", group_size=128, has_zero_point=False, pre_quant_scale=True))
    assert (config.has_zero_point, config.pre_quant_scale) == (False, True)
    assert read(nested(quant_algo="W4A16_AWQ")).pre_quant_scale is None


def test_older_exports_list_lm_head_twice():
    assert read(nested(quant_algo="FP8", exclude_modules=["lm_head", "a", "lm_head"])).exclude_modules == (
        "lm_head",
        "a",
    )


@pytest.mark.parametrize("version", ["0.22.1.dev750+g59a703703", "dsv4-nvfp4-experts", "", 7, None])
def test_producer_versions_are_any_text(version):
    mapping = {"producer": {"name": "modelopt", "version": version}, "quantization": {"quant_algo": "FP8"}}
    assert read(mapping).producer == Producer("modelopt", version if isinstance(version, str) else None)
    assert read({"producer": "me", "quantization": {"quant_algo": "FP8"}}).producer == Producer(None, None)


# --------------------------------------------------------------------------------------- mixed precision


def mixed(layers, **fields):
    entries = {
        name: algo if isinstance(algo, dict) else {"quant_algo": algo} for name, algo in layers.items()
    }
    return read(nested(quant_algo="MIXED_PRECISION", quantized_layers=entries, **fields))


ATTENTION = "model.layers.0.self_attn."


def test_layers_by_name_container_and_parts():
    config = mixed(
        {
            "model.layers.0": "FP8",
            "model.layers.0.mlp": "MXFP8",
            "model.layers.0.mlp.down_proj": "NVFP4",
            "model.layers.1.self_attn.q_proj": "FP8",
            "model.layers.1.self_attn.k_proj": "FP8",
            "model.layers.1.self_attn.v_proj": "FP8",
            "model.layers.1.mlp.experts": "NVFP4",
        }
    )
    assert config.layer_quant("model.layers.0.mlp.down_proj").quant_algo == "NVFP4"
    assert config.layer_quant("model.layers.0.mlp.up_proj") == (
        "MXFP8",
        32,
        "quantized_layers: model.layers.0.mlp",
    )
    assert config.layer_quant("model.layers.0.mlp.gate_up_proj").quant_algo == "MXFP8"
    assert config.layer_quant(ATTENTION + "q_proj") == ("FP8", None, "quantized_layers: model.layers.0")
    assert config.layer_algo("model.layers.1.self_attn.qkv_proj") == "FP8"
    assert config.layer_algo("model.layers.1.self_attn.o_proj") is None
    assert config.layer_algo("model.layers.1.mlp.experts.7.up_proj") == "NVFP4"
    assert config.layer_algo("model.layers.1.mlp.experts.gate_up_proj") == "NVFP4"
    assert config.layer_algo("model.layers.1.mlp.experts2.gate_up_proj") is None
    assert config.layer_algo("model.layers.10.mlp.up_proj") is None


@each("listed", ["", "model.", "language_model.", "model.language_model.", "language_model.model."])
@each("asked", ["", "model.", "language_model.", "model.language_model.", "language_model.model."])
def test_prefixes_are_aligned(listed, asked):
    config = mixed({listed + "layers.0.mlp.experts": "NVFP4", listed + "layers.0.self_attn.q_proj": "FP8"})
    assert config.layer_algo(asked + "layers.0.mlp.experts.0.up_proj") == "NVFP4"
    assert config.layer_algo(asked + "layers.0.self_attn.q_proj") == "FP8"
    assert config.layer_algo(asked + "layers.1.self_attn.q_proj") is None


def test_aligned_names_that_disagree_are_not_guessed():
    config = mixed({"model.tower.fc": "FP8", "language_model.tower.fc": "NVFP4"})
    assert config.layer_algo("model.tower.fc") == "FP8"
    assert config.layer_algo("language_model.tower.fc") == "NVFP4"
    assert config.layer_algo("tower.fc") is None


@pytest.mark.parametrize(
    "odd", [{"quant_algo": "NVFP4"}, {"quant_algo": "W4A16_NVFP4", "group_size": 32}, None]
)
def test_parts_that_disagree_are_named(odd):
    layers = {ATTENTION + "q_proj": "W4A16_NVFP4", ATTENTION + "v_proj": "W4A16_NVFP4"}
    if odd is not None:
        layers[ATTENTION + "k_proj"] = odd
    config = mixed(layers)
    found = "k_proj: not quantized" if odd is None else f"k_proj: {odd['quant_algo']} "
    with pytest.raises(ConfigError) as caught:
        config.layer_quant(ATTENTION + "qkv_proj")
    assert caught.value.path == "$.quantization.quantized_layers"
    assert found in str(caught.value)
    assert "q_proj: W4A16_NVFP4 (group size 16)" in str(caught.value)
    assert config.layer_algo(ATTENTION + "qkv_proj", ["q_proj", "v_proj"]) == "W4A16_NVFP4"


def test_shards_are_components_or_whole_names():
    config = mixed({"a.x": "FP8", "a.y": "FP8", "b.z": "NVFP4"})
    assert config.layer_algo("a.fused", shards=("x", "y")) == "FP8"
    assert config.layer_algo("q.fused", shards=["a.x", "a.y"]) == "FP8"
    with pytest.raises(ConfigError, match=r"x: FP8, b\.z: NVFP4"):
        config.layer_algo("a.fused", shards=("x", "b.z"))
    assert config.layer_algo("b.z", shards=("ignored",)) == "NVFP4"  # named itself, so nothing is asked


def test_expert_containers_from_their_experts():
    stem = "language_model.model.layers.3.block_sparse_moe.experts"
    layers = {f"{stem}.{expert}.{name}": "NVFP4" for expert in range(4) for name in ("w1", "w2", "w3")}
    config = mixed(layers)
    assert config.layer_quant(stem)[:2] == ("NVFP4", 16)
    assert config.layer_algo("model.layers.3.block_sparse_moe.experts") == "NVFP4"
    assert config.layer_algo(stem + ".2.w13") == "NVFP4"
    assert config.layer_algo("language_model.model.layers.4.block_sparse_moe.experts") is None
    config = mixed({**layers, f"{stem}.3.w2": "MXFP8"})
    with pytest.raises(ConfigError, match=r"experts\.0\.w1' is NVFP4 .*experts\.3\.w2' is MXFP8"):
        config.layer_quant(stem)


def test_listing_exclusion_and_containers_by_how_closely_they_name_a_layer():
    config = mixed(
        {"a": "FP8", "a.gate_proj": "NVFP4"},
        exclude_modules=["*.gate*", "a.up_proj"],
    )
    assert config.layer_algo("a.gate_proj") == "NVFP4"  # listed by name, whatever a pattern says
    assert config.layer_quant("a.up_proj") == (None, None, "exclude_modules: a.up_proj")
    assert config.layer_quant("a.gate") == (None, None, "exclude_modules: *.gate*")
    assert config.layer_algo("a.down_proj") == "FP8"
    (conflict,) = config.conflicts
    assert conflict.field == "quantized_layers"
    assert "'a.gate_proj': NVFP4" in conflict.chosen
    assert conflict.other == "exclude_modules: '*.gate*'"


def test_layers_may_refine_a_single_algorithm():
    config = read(
        nested(quant_algo="FP8", quantized_layers={"a.b": {"quant_algo": "NVFP4"}, "c": {"quant_algo": None}})
    )
    assert [config.layer_algo(name) for name in ("a.b", "a.c", "c", "c.d")] == ["NVFP4", "FP8", None, None]


def test_sentinels_in_layer_names():
    mark = ".\0backbone.pt_name_sentinel"
    config = mixed({f"lm_head{mark}": "FP8", f"backbone.layers.0.mixer.in_proj{mark}": "NVFP4"})
    assert list(config.quantized_layers) == ["lm_head", "backbone.layers.0.mixer.in_proj"]
    assert config.layer_algo("lm_head") == "FP8"
    with pytest.raises(ConfigError, match="listed a second time, as NVFP4 and not FP8") as caught:
        mixed({"lm_head": "FP8", f"lm_head{mark}": "NVFP4"})
    assert caught.value.path == "$.quantization.quantized_layers['lm_head.\\u0000backbone.pt_name_sentinel']"


# ---------------------------------------------------------------------------------------------- refusals


REFUSALS = [
    (nested(), "$.quantization.quant_algo", "missing; recognised are FP8, "),
    (flat(), "$.quant_algo", "missing"),
    ({"quantization": "FP8"}, "$.quantization", "expected an object, found 'FP8'"),
    ({"quantization": None}, "$.quantization", "expected an object, found null"),
    ({"quantization_config": [1, 2]}, "$.quantization_config", "found a list of 2"),
    (nested(quant_algo="FP16"), "$.quantization.quant_algo", "unknown quantization algorithm 'FP16'"),
    (flat(quant_algo="NVFP4_X"), "$.quant_algo", "unknown quantization algorithm 'NVFP4_X'"),
    (flat(quant_algo=""), "$.quant_algo", "unknown"),
    (flat(quant_algo=8), "$.quant_algo", "expected the name of a quantization algorithm 8"),
    (flat(quant_algo=["FP8"]), "$.quant_algo", "a list of 1"),
    (flat(quant_algo="FP8", moe_quant_algo="x"), "$.moe_quant_algo", "unknown"),
    (
        flat(quant_algo="FP8", kv_cache_scheme="FP9"),
        "$.kv_cache_scheme",
        r"unknown KV-cache algorithm 'FP9'; recognised are FP8, INT8, NVFP4, NVFP4_AFFINE \(in any case\)",
    ),
    (flat(quant_algo="FP8", kv_cache_scheme={"num_bits": 8}), "$.kv_cache_scheme", "float with 8 or 4 bits"),
    (flat(quant_algo="FP8", kv_cache_scheme={"type": "float", "num_bits": 16}), "$.kv_cache_scheme", "float"),
    (flat(quant_algo="FP8", kv_cache_scheme=8), "$.kv_cache_scheme", "found 8"),
    (nested(quant_algo="FP8", kv_cache_quant_algo=8), "$.quantization.kv_cache_quant_algo", "found|expected"),
    (
        nested(quant_algo="FP8", kv_cache_quant_algo="MIXED"),
        "$.quantization.kv_cache_quant_algo",
        "NVFP4_AFFINE",
    ),
    (
        nested(quant_algo="FP8", exclude_modules="lm_head"),
        "$.quantization.exclude_modules",
        "found 'lm_head'",
    ),
    (flat(quant_algo="FP8", ignore={"a": 1}), "$.ignore", "a list of module names"),
    (flat(quant_algo="FP8", ignore=["a", 3]), "$.ignore[1]", "a module name, found 3"),
    (flat(quant_algo="FP8", ignore=["a", None]), "$.ignore[1]", "found null"),
    (flat(quant_algo="NVFP4", group_size=0), "$.group_size", "from 1 to 65536, found 0"),
    (flat(quant_algo="NVFP4", group_size=-16), "$.group_size", "found -16"),
    (flat(quant_algo="NVFP4", group_size=1.5), "$.group_size", r"found 1\.5"),
    (flat(quant_algo="NVFP4", group_size=math.nan), "$.group_size", "found nan"),
    (flat(quant_algo="NVFP4", group_size=math.inf), "$.group_size", "found inf"),
    (flat(quant_algo="NVFP4", group_size=10**400), "$.group_size", r"found 1e\+300"),
    (flat(quant_algo="NVFP4", group_size="16x"), "$.group_size", "found '16x'"),
    (flat(quant_algo="NVFP4", group_size="1" * 30), "$.group_size", "found '1"),
    (flat(quant_algo="NVFP4", group_size=True), "$.group_size", "found true"),
    (flat(quant_algo="NVFP4", group_size=[16]), "$.group_size", "a list of 1"),
    (flat(quant_algo="W4A16_AWQ", pre_quant_scale=1), "$.pre_quant_scale", "true or false, found 1"),
    (flat(quant_algo="W4A16_AWQ", has_zero_point="no"), "$.has_zero_point", "true or false"),
    (flat(quant_algo="NVFP4", config_groups=[]), "$.config_groups", "an object of groups"),
    (flat(quant_algo="NVFP4", config_groups={"g 0": 1}), "$.config_groups['g 0']", "an object, found 1"),
    (
        flat(
            quant_algo="NVFP4", config_groups={"a": {"weights": FLOAT4}, "b": {"weights": {"group_size": 32}}}
        ),
        "$.config_groups.b.weights.group_size",
        "one group size for all groups",
    ),
    (flat(quant_algo="MIXED_PRECISION"), "$.quantized_layers", "needs an object"),
    (
        nested(quant_algo="MIXED_PRECISION", quantized_layers={}),
        "$.quantization.quantized_layers",
        "found none",
    ),
    (flat(quant_algo="MIXED_PRECISION", quantized_layers=["a"]), "$.quantized_layers", "an object of layers"),
    (
        flat(quant_algo="MIXED_PRECISION", quantized_layers={LAYER: "FP8"}),
        f"$.quantized_layers['{LAYER}']",
        "'FP8'",
    ),
    (
        flat(quant_algo="MIXED_PRECISION", quantized_layers={"a": {}}),
        "$.quantized_layers.a.quant_algo",
        "missing",
    ),
    (
        flat(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP7"}}),
        "$.quantized_layers.a.quant_algo",
        "unknown quantization algorithm 'FP7'",
    ),
    (
        flat(quant_algo="FP8", quantized_layers={"a": {"quant_algo": "mixed_precision"}}),
        "$.quantized_layers.a.quant_algo",
        "not the algorithm of a layer",
    ),
    (
        flat(
            quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4", "group_size": "z"}}
        ),
        "$.quantized_layers.a.group_size",
        "found 'z'",
    ),
    (
        nested(quant_algo=None, quantized_layers={"a": {"quant_algo": "FP8"}}),
        "$.quantization.quant_algo",
        "null, but quantized_layers lists 1 layers",
    ),
    (flat(quant_method="gptq", bits=4), "$.quant_method", "'gptq' is not a ModelOpt checkpoint"),
    (flat(quant_method="fp8", weight_block_size=[128, 128]), "$.quant_method", "not a ModelOpt checkpoint"),
    (flat(quant_method=3, quant_algo="FP8"), "$.quant_method", "a string, found 3"),
    (shape_e(weight_block_size=[1, 128]), "$.weight_block_size", r"\[128, 128\]"),
    (shape_e(weight_block_size=None), "$.quant_method", "needs weight_block_size"),
    (flat(quant_algo="FP8", ignore=["\ud800"]), "$.ignore[0]", "lone surrogate"),
    (flat(quant_algo="FP8", extra={1, 2}), "$.extra", "what JSON can hold"),
    (flat(quant_algo="FP8", extra={1: 2}), "$.extra", "expected text as the key"),
    ([], "$", "an object, found a list of 0"),
    ("FP8", "$", "an object"),
]


@each("mapping, path, message", REFUSALS)
def test_refusals_name_the_field(mapping, path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(mapping)
    assert caught.value.path == path
    assert str(caught.value).startswith(path + ": ")
    assert isinstance(caught.value, ValueError)


def test_deep_nesting_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError, match="deeper than 64 levels"):
        read(flat(quant_algo="FP8", extra=value))
    cycle = {}
    cycle["again"] = cycle
    with pytest.raises(ConfigError, match="deeper than 64 levels"):
        read(cycle)
    while value:  # taking it apart in one go would recurse as deeply
        value = value[0]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = """quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules ignore quantized_layers
producer config_groups quant_method weight_block_size moe_quant_algo quantization has_zero_point
quantization_config"""
LIKELY = st.sampled_from(
    ["FP8", "NVFP4", "MIXED_PRECISION", "modelopt", "fp8", 16, ["lm_head"], {"a": {"quant_algo": "FP8"}}]
)
DOCUMENTS = st.dictionaries(st.sampled_from(FIELDS.split()), st.one_of(LIKELY, JSON), max_size=8)


@given(DOCUMENTS, st.booleans())
@settings(max_examples=250)
def test_any_document_is_read_or_refused(document, wrap):
    document = {"quantization": document} if wrap else document
    before = copy.deepcopy(document)
    try:
        config = read(document)
    except ConfigError as error:
        refused = error
    else:
        refused = None
        assert read(config.to_dict()) == config
        twice = QuantConfig([("config.json", "$", document), ("hf_quant_config.json", "$", document)])
        assert twice == config
        assert {conflict.field for conflict in twice.conflicts} == {
            conflict.field for conflict in config.conflicts
        }
        assert config.layer_algo("model.layers.0.mlp.up_proj") is None or config.quant_algo is not None
        detect(document)
    assert refused is None or refused.path.startswith("$")
    assert repr(document) == repr(before)


# --------------------------------------------------------------------------------------- detect, to_dict


FAMILIES = {"FP8": "modelopt", "MXFP8": "modelopt_mxfp8", "MIXED_PRECISION": "modelopt_mixed"}
FAMILIES |= dict.fromkeys(("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "modelopt")
FAMILIES |= {name: "modelopt_fp4" for name in ALGORITHMS if "FP4" in name}
FAMILIES |= dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16"))


@each("spelling, name", [*SPELLINGS, ("mixed_precision", "MIXED_PRECISION")])
def test_detect_by_algorithm(spelling, name):
    family = FAMILIES[name]
    assert detect(flat(quant_algo=spelling)) == family
    assert detect(nested(quant_algo=spelling)) == family
    assert detect({"quant_method": "ModelOpt_fp4", "quantization": {"quant_algo": spelling}}) == family
    assert detect({"quant_library": "modelopt", "quant_algo": spelling}) == family


@each(
    "mapping",
    [
        {},
        {"quant_algo": "FP8"},  # nobody says ModelOpt
        {"quant_method": "fp8", "quant_algo": "FP8", "producer": MODELOPT},
        {"quant_method": "compressed-tensors", "quant_algo": "NVFP4"},
        {"quant_method": 3, "quant_algo": "NVFP4"},
        flat(quant_algo="FP7"),
        flat(quant_algo=None, kv_cache_scheme=FLOAT8),
        flat(),
        {"quant_method": "modelopt", "quantization": []},
    ],
)
def test_detect_claims_nothing_else(mapping):
    assert detect(mapping) is None


@pytest.mark.parametrize("given", ["DIR", Path("DIR")])
def test_detect_of_a_directory_says_what_takes_one(given):
    """The family was None, as for a model that is not ModelOpt's."""
    with pytest.raises(TypeError, match=r"QuantConfig\.from_pretrained and Checkpoint take directories"):
        detect(given)


@pytest.mark.parametrize("given", [3, ["quant_method"], b"{}"])
def test_detect_of_no_mapping_is_a_type_error(given):
    with pytest.raises(TypeError, match="mapping: expected a parsed configuration"):
        detect(given)


def test_detect_of_a_model_without_a_configuration():
    assert detect(None) is None


def test_representations():
    config = read(nested(quant_algo="nvfp4", exclude_modules=["a", "b"]))
    assert (
        repr(config)
        == "QuantConfig(quant_algo='NVFP4', kv_cache_quant_algo=None, group_size=16, exclude_modules=<2>)"
    )
    assert config == read(flat(quant_algo="NVFP4", ignore=["a", "b"], quant_method=None))
    assert config != read(nested(quant_algo="NVFP4", exclude_modules=["a"]))
    assert config != "NVFP4"
    with pytest.raises(TypeError):
        hash(config)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
)
def test_copies_answer_alike(duplicate):
    config = read(
        flat(quant_algo="FP8", kv_cache_scheme=FLOAT8, kv_cache_quant_algo="NVFP4", ignore=["lm_head"])
    )
    twin = duplicate(config)
    assert (twin, twin.conflicts, twin.notes) == (config, config.conflicts, config.notes)
    assert twin.is_excluded("lm_head")


def test_replace_validates():
    config = read(nested(quant_algo="NVFP4", exclude_modules=["a"]))
    assert config.replace(exclude_modules=["b"]).exclude_modules == ("b",)
    with pytest.raises(ConfigError, match="unknown"):
        config.replace(quant_algo="FP7")


def test_public_names():
    assert {"QuantConfig", "LayerQuant", "Conflict", "detect"} <= set(moqext.__all__)


def test_thousands_of_layers_are_read_in_linear_time():
    stem = "language_model.model.layers"

    def ask(count):
        layers = {
            f"{stem}.{layer}.block_sparse_moe.experts.{expert}.{name}": {"quant_algo": "NVFP4"}
            for layer in range(count)
            for expert in range(64)
            for name in ("w1", "w2", "w3")
        }

        def work():
            config = mixed(layers)
            assert all(config.layer_algo(name) == "NVFP4" for name in layers)
            assert config.layer_algo(f"{stem}.{count - 1}.block_sparse_moe.experts") == "NVFP4"

        return work

    assert_linear(ask, 4)


@pytest.mark.parametrize(
    "field, item",
    [
        ("quantized_layers", {"quant_algo": "FP8"}),
        ("config_groups", {"weights": {"type": "float", "num_bits": 4, "group_size": 16}}),
        ("nobody_knows", 1),
    ],
)
def test_objects_of_many_members_are_read_in_linear_time(field, item):
    """Names were looked up among the others one by one: 10^10 comparisons of 10^5 members."""
    # groups that quantize no activations make it weight-only
    expected = {"quantized_layers": "FP8", "config_groups": "W4A16_NVFP4", "nobody_knows": "NVFP4"}[field]

    def ask(size):
        members = {f"model.layers.{i}.experts.{i}.w": item for i in range(size)}

        def work():
            config = read(flat(quant_algo="NVFP4", **{field: members}))
            assert config.layer_algo("model.layers.7.experts.7.w") == expected

        return work

    assert_linear(ask, 1000)
