"""Checkpoints of other producers (tests/data/producers), read as ModelOpt's.

`<case>.values.safetensors` has weights as the producer's own code decompresses them, in its type.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import Checkpoint, CheckpointError, ConfigError, ops
from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.producers.compressed_tensors import CompressedTensors
from moqext.reader.producers.patterns import matcher
from moqext.reader.producers.reciprocal import difference, factor_of
from moqext.tools.verify import select_weights, verify_checkpoint

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors = pytest.importorskip("safetensors.numpy")

ROOT = Path(__file__).parent / "data" / "producers"
CASES = sorted(json.loads((ROOT / "versions.json").read_text())["cases"])

EXPECTED = {
    "ct_fp8": ("FP8", None, set()),
    "ct_fp8_block": ("FP8_PB_WO", None, set()),
    "ct_fp8_dynamic": ("FP8_PER_CHANNEL_PER_TOKEN", None, set()),
    "ct_mixed": ("MIXED_PRECISION", None, {"mixed_fused_formats"}),
    "ct_mxfp4": ("MXFP4", None, set()),
    "ct_mxfp8": ("MXFP8", None, set()),
    "ct_nvfp4": ("NVFP4", "FP8", set()),
    "ct_nvfp4a16": ("W4A16_NVFP4", None, set()),
    "ct_qwen3moe": ("W4A16_NVFP4", None, set()),
    "fp8_blocks": ("FP8_PB_WO", None, set()),
    "fp8_tensor": ("FP8_PER_CHANNEL_PER_TOKEN", None, set()),
    "gpt_oss_mxfp4": ("MXFP4", None, set()),
}
"""Algorithm, that of the cache, codes of problems."""


def write(directory, tensors, quantization, **config):
    """A checkpoint of those tensors."""
    directory.mkdir(exist_ok=True)
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    safetensors.save_file(arrays, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization, **config}))
    return directory


# -------------------------------------------------------------------------------------- genuine files


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_what_its_producer_says(case):
    algo, cache, problems = EXPECTED[case]
    with Checkpoint(ROOT / case) as checkpoint:
        assert (checkpoint.config.quant_algo, checkpoint.config.kv_cache_quant_algo) == (algo, cache)
        assert {problem.code for problem in checkpoint.problems} == problems
        layers = checkpoint.layers()
        assert layers
        assert {layer.quant_algo for layer in layers} == (
            {algo} if algo != "MIXED_PRECISION" else {"FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4"}
        )
        for layer in layers:
            assert layer.config_algo == layer.quant_algo
        assert len(checkpoint.kv_scales()) == (case == "ct_nvfp4")


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_producer_decompresses(case):
    with (
        Checkpoint(ROOT / case) as checkpoint,
        TensorFiles(ROOT, single=ROOT / f"{case}.values.safetensors") as values,
    ):
        assert values.tensors
        for module, info in values.tensors.items():
            ours = checkpoint.dequantize(module)
            if case == "gpt_oss_mxfp4":
                ours = ours.swapaxes(1, 2)  # Transformers has the experts [E, in, out]
            ours = np.ascontiguousarray(ours)
            if info.dtype == "BF16":
                ours = ops.encode(ours, "bf16")
            theirs = values.tensor(module, raw=True)
            np.testing.assert_array_equal(ours.view(theirs.dtype), theirs, err_msg=module)


@pytest.mark.parametrize("case", CASES)
def test_every_layer_runs_as_the_reference_says(case, rng):
    with Checkpoint(ROOT / case) as checkpoint:
        rows = list(verify_checkpoint(checkpoint, select_weights(checkpoint), int(rng.integers(2**32))))
    assert rows
    assert {row.status for row in rows} == {"ok"}


def test_activation_scales_are_the_reciprocals_of_theirs():
    name = "model.layers.0.self_attn.q_proj"
    with Checkpoint(ROOT / "ct_nvfp4") as checkpoint, TensorFiles(ROOT / "ct_nvfp4") as files:
        theirs = files.tensor(f"{name}.input_global_scale")
        assert checkpoint.tensor(f"{name}.input_scale") == np.float32(1) / theirs[0]
        assert checkpoint.tensor(f"{name}.input_scale").shape == ()
        assert checkpoint.files.source(f"{name}.weight").name == f"{name}.weight_packed"
        assert f"{name}.weight_packed" not in checkpoint.tensors


# ----------------------------------------------------------------------------- reciprocals of divisors


def all_weights(divisor, factor):
    """Every product of a code and a scale, as theirs and as ours."""
    codes = np.array([0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[:, None]
    scales = ops.decode(np.arange(1, 127, dtype=np.uint8), "e4m3")
    return codes * (scales / divisor), codes * scales * factor


def test_a_factor_is_the_best_of_its_neighbours(rng):
    replaced = 0
    for amax in ops.decode(ops.encode(rng.uniform(0.01, 3, 400).astype(np.float32), "bf16"), "bf16"):
        divisor = np.float32(2688) / amax
        nearest = np.float32(1) / divisor
        counts = {}
        for factor in (nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(1e9))):
            theirs, ours = all_weights(divisor, factor)
            counts[factor] = np.count_nonzero(ops.encode(theirs, "bf16") != ops.encode(ours, "bf16"))
        chosen = factor_of(divisor)
        told = difference(divisor, chosen)
        assert counts[chosen] == min(counts.values())
        assert (told.share > 0) == (counts[chosen] > 0)
        theirs, ours = all_weights(divisor, chosen)
        assert np.abs(ours / theirs.astype(np.float64) - 1).max() <= told.largest * (1 + 1e-6)
        replaced += chosen != nearest
    assert replaced  # some have a better neighbour


def test_powers_of_two_and_what_is_no_divisor_have_their_reciprocal():
    for divisor in (1.0, 2.0**-20, 4096.0):
        assert factor_of(np.float32(divisor)) == np.float32(1 / divisor)
    assert factor_of(np.float32(0)) == np.inf
    assert factor_of(np.float32(np.inf)) == 0
    assert np.isnan(factor_of(np.float32(np.nan)))


# -------------------------------------------------------------------------------- what a scheme is read as


def args(bits=8, strategy="tensor", **more):
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


TOKEN = args(strategy="token", dynamic=True)
GROUP = args(strategy="group", group_size=128, dynamic=True)
SCHEMES = [
    (args(4, "tensor_group", group_size=16), args(4, "tensor_group", dynamic="local"), "NVFP4", 0),
    (args(4, "tensor_group", group_size=16), None, "W4A16_NVFP4", 0),
    (args(4, "group", group_size=32), args(4, "group", dynamic=True), "MXFP4", 0),
    (args(4, "group", group_size=32), None, "MXFP4", 0),
    (args(4, "group", group_size=32), TOKEN, "W4A8_MXFP4_FP8", 0),
    (args(4, "group", group_size=32), GROUP, "W4A8_MXFP4_FP8", 1),
    (args(), args(dynamic=False), "FP8", 0),
    (args(), None, "FP8", 1),
    (args(), TOKEN, "FP8_PER_CHANNEL_PER_TOKEN", 0),
    (args(), args(dynamic=True), "FP8_PER_CHANNEL_PER_TOKEN", 0),
    (args(strategy="channel"), TOKEN, "FP8_PER_CHANNEL_PER_TOKEN", 0),
    (args(strategy="channel"), None, "FP8_PER_CHANNEL_PER_TOKEN", 1),
    (args(strategy="channel"), args(dynamic=False), "FP8_PER_CHANNEL_PER_TOKEN", 1),
    (args(strategy="block", block_structure=[128, 128]), GROUP, "FP8_PB_WO", 0),
    (args(strategy="block", block_structure=[128, 128]), None, "FP8_PB_WO", 1),
    (args(strategy="group", group_size=32), args(strategy="group", dynamic=True), "MXFP8", 0),
]


def configuration(*groups, **more):
    """A quantization_config; a group is (targets, weights, input_activations)."""
    listed = {
        f"group_{number}": {"targets": targets, "weights": weights, "input_activations": inputs}
        for number, (targets, weights, inputs) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": listed, **more}


def read(document):
    return CompressedTensors("config.json", "$", document).document({}, ())["quantization"]


@pytest.mark.parametrize("weights, inputs, algo, notes", SCHEMES)
def test_a_scheme_has_one_algorithm_and_says_where_it_runs_otherwise(weights, inputs, algo, notes):
    producer = CompressedTensors("config.json", "$", configuration((["Linear"], weights, inputs)))
    assert producer.document({}, ())["quantization"]["quant_algo"] == algo
    assert len(producer.notes()) == notes


@pytest.mark.parametrize(
    "document, says",
    [
        (configuration((["Linear"], {**args(4), "type": "int"}, None)), "4-bit ints are not read here; vLLM"),
        (configuration((["Linear"], args(6, "group"), None)), "6-bit floats by group with activations plain"),
        (configuration((["Linear"], {**args(), "symmetric": False}, None)), "asymmetric 8-bit floats"),
        (configuration((["Linear"], args(), {**args(), "type": "int"})), "activations of 8-bit ints"),
        (
            configuration((["Linear"], args(strategy="block", block_structure=[64, 64]), GROUP)),
            r"block_structure: expected \[128, 128\]",
        ),
        (
            configuration((["Linear"], args(), None), sparsity_config={"format": "sparse-24"}),
            "a sparse format",
        ),
        (
            configuration((["Linear"], args(), None), transform_config={"config_groups": {"R1": {}}}),
            "transformed weights are not read",
        ),
        (configuration((["Linear"], args(), None), kv_cache_scheme=args(4)), "a cache of 4 bits"),
        (configuration(), "no group quantizes weights"),
        ({"quant_method": "compressed-tensors"}, "config_groups: expected an object, found null"),
        (configuration((["Linear"], "FP8", None)), "weights: expected an object, found 'FP8'"),
        (configuration(("Linear", args(), None)), "targets: expected a list of text"),
        (configuration((["Linear"], {**args(), "num_bits": "8"}, None)), "num_bits: expected an integer"),
        (configuration((["Linear"], args(), None), ignore=[3]), "ignore: expected a list of text"),
    ],
)
def test_what_is_not_read_is_refused_by_its_path(tmp_path, document, says):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": document}))
    with pytest.raises(ConfigError, match=says) as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: config.json: $.quantization_config.")


def linears(*names, dtype=np.int8):
    return {f"{name}.weight": np.zeros((4, 4), dtype) for name in names}


def test_names_come_before_patterns_and_patterns_before_classes(tmp_path):
    document = configuration(
        (["Linear"], args(), TOKEN),
        (["re:.*mlp.*"], args(4, "tensor_group", group_size=16), None),
        (["layers.0.mlp.up_proj"], args(strategy="block"), GROUP),
        ignore=["lm_head", "re:.*router"],
    )
    names = ("layers.0.q_proj", "layers.0.mlp.down_proj", "layers.0.mlp.up_proj")
    tensors = {**linears(*names), **linears("layers.0.router", dtype=np.float32)}
    tensors |= {f"{name}.weight_scale": np.float32([1]) for name in names}
    write(tmp_path, tensors, document)
    config = Checkpoint(tmp_path).config
    assert [config.layer_algo(name) for name in names] == [
        "FP8_PER_CHANNEL_PER_TOKEN",
        "W4A16_NVFP4",
        "FP8_PB_WO",
    ]
    assert config.quant_algo == "MIXED_PRECISION"
    assert config.is_excluded("layers.0.router")
    assert config.is_excluded("lm_head")


def test_modules_that_no_target_names_are_excluded(tmp_path):
    tensors = {**linears("layers.0.mlp.up_proj"), **linears("layers.0.q_proj", dtype=np.float32)}
    document = configuration((["re:.*mlp.*"], args(strategy="channel"), TOKEN))
    config = Checkpoint(write(tmp_path, tensors, document)).config
    assert config.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN"
    assert config.exclude_modules == ("layers.0.q_proj",)


def test_a_group_without_weights_is_that_of_the_cache():
    document = configuration((["Linear"], args(), TOKEN), (["LlamaAttention"], None, args()))
    assert read(document)["kv_cache_quant_algo"] == "FP8"
    assert read(configuration((["Linear"], args(), TOKEN)))["kv_cache_quant_algo"] is None
    assert read(configuration(kv_cache_scheme=args()))["quant_algo"] is None


def test_several_groups_without_any_tensor_keep_what_is_known(tmp_path):
    document = configuration((["a.b"], args(), TOKEN), (["re:.*"], args(4, "group", group_size=32), None))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": document}))
    assert Checkpoint(tmp_path).config.layer_algo("a.b") == "FP8_PER_CHANNEL_PER_TOKEN"


# ------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    "pattern, name, fits",
    [
        (".*lm_head", "model.lm_head", True),
        (r".*\.layers\.\d+\.mlp\.(gate|up)_proj$", "model.layers.12.mlp.up_proj", True),
        (r".*\.layers\.\d+\.mlp\.(gate|up)_proj$", "model.layers.12.mlp.down_proj", False),
        ("visual", "visual.blocks.0", True),
        ("visual", "model.visual", False),
        ("^(?!.*mtp).*proj", "model.q_proj", True),
        ("^(?!.*mtp).*proj", "mtp.q_proj", False),
        (".*(self_attn|mlp)?[.]gate$", "layers.0.mlp.gate", True),
        (".*a", "b" * 300 + "a", False),
    ],
)
def test_a_pattern_matches_from_the_beginning(pattern, name, fits):
    assert matcher(pattern)(name) is fits


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a|aa)+b", "(.*a){20}", "(.*)(.*)(.*)(.*)(.*)b", "(a)\\1", "(", "a" * 2000, "(?i)a**"],
)
def test_a_pattern_whose_matching_has_no_bound_is_not_followed(pattern):
    assert matcher(pattern) is None
    document = configuration((["Linear"], args(), TOKEN), ignore=[f"re:{pattern}"])
    assert len(CompressedTensors("config.json", "$", document).notes()) == 1


# ------------------------------------------------------------------------------------------ odd files


NVFP4 = configuration((["Linear"], args(4, "tensor_group", group_size=16), None))


def packed(rng, name, divisor=100.0):
    return {
        f"{name}.weight_packed": rng.integers(0, 256, (32, 16), np.uint8),
        f"{name}.weight_scale": rng.integers(40, 80, (32, 2)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        f"{name}.weight_global_scale": np.float32([divisor]),
    }


@pytest.mark.parametrize(
    "divisor, code", [(0, "scale_not_finite"), (np.inf, "lost_scale"), (-3, "scale_negative")]
)
def test_a_divisor_that_is_none_is_an_error(rng, tmp_path, divisor, code):
    with Checkpoint(write(tmp_path, packed(rng, "a.up_proj", divisor), NVFP4)) as checkpoint:
        assert {problem.code for problem in checkpoint.problems if problem.severity == "error"} == {code}
        with pytest.raises(CheckpointError):
            checkpoint.load("a.up_proj")


def test_a_tensor_keeps_its_name_where_another_has_the_new_one(rng, tmp_path):
    tensors = {**packed(rng, "a.up_proj"), "a.up_proj.weight": np.zeros((32, 32), np.float32)}
    with Checkpoint(write(tmp_path, tensors, NVFP4)) as checkpoint:
        assert checkpoint.tensors["a.up_proj.weight"].dtype == "F32"
        assert checkpoint.tensors["a.up_proj.weight_packed"].dtype == "U8"
        assert {problem.code for problem in checkpoint.problems} >= {
            "unowned_tensor",
            "dtype_mismatch",
        }


def test_parts_and_bytes_of_changed_tensors(rng, tmp_path):
    tensors = {
        "a.q_proj.weight": rng.integers(0, 100, (6, 32), np.uint8).view(ml_dtypes.float8_e4m3fn),
        "a.q_proj.weight_scale": np.float32([0.25]),
        **packed(rng, "a.up_proj"),
    }
    document = configuration(
        (["re:.*q_proj"], args(), TOKEN), (["Linear"], args(4, "tensor_group", group_size=16), None)
    )
    with Checkpoint(write(tmp_path, tensors, document)) as checkpoint:
        files = checkpoint.files
        assert checkpoint.tensor("a.q_proj.weight_scale").tolist() == [0.25] * 6
        assert files.rows("a.q_proj.weight_scale", 2, 5).tolist() == [0.25] * 3
        assert files.raw("a.q_proj.weight_scale", 4, 12).view(np.float32).tolist() == [0.25] * 2
        whole = tensors["a.up_proj.weight_packed"]
        np.testing.assert_array_equal(files.rows("a.up_proj.weight", 3, 9), whole[3:9])
        np.testing.assert_array_equal(files.raw("a.up_proj.weight", 16, 32), whole[1])
        for wrong in (
            lambda: files.rows("a.q_proj.weight_scale", 2, 7),
            lambda: files.raw("a.q_proj.weight_scale", 0, 25),
            lambda: files.rows("a.up_proj.weight_scale_2", 0, 1),
        ):
            with pytest.raises(ValueError, match=r"expected a part of"):
                wrong()
        for ask in (files.tensor, lambda name: files.rows(name, 0, 1), lambda name: files.raw(name, 0, 1)):
            with pytest.raises(CheckpointError, match=r"no such tensor; did you mean a\.up_proj\.weight"):
                ask("a.up_proj.weight_packed")
    with pytest.raises(ValueError, match="closed"):
        files.tensor("a.up_proj.weight")


def test_a_lost_file_is_named_for_a_tensor_under_either_name(rng, tmp_path):
    write(tmp_path, packed(rng, "a.up_proj"), NVFP4)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    places = dict.fromkeys(packed(rng, "a.up_proj"), "model-00001-of-00002.safetensors")
    places |= dict.fromkeys(packed(rng, "a.down_proj"), "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with Checkpoint(tmp_path) as checkpoint:
        assert "a.down_proj.weight" in checkpoint.files.absent
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors"):
            checkpoint.load("a.down_proj")
        checkpoint.load("a.up_proj")


def test_a_cache_scale_of_an_old_version_is_found(rng, tmp_path):
    tensors = packed(rng, "layers.0.self_attn.k_proj")
    tensors |= {f"layers.0.self_attn.{part}_proj.output_scale": np.float32([0.5]) for part in "kv"}
    with Checkpoint(write(tmp_path, tensors, {**NVFP4, "kv_cache_scheme": args()})) as checkpoint:
        (record,) = checkpoint.kv_scales()
        assert record.values == {"k_scale": 0.5, "v_scale": 0.5}


def test_files_that_modelopt_requantized_in_part_are_modelopts():
    path = Path(__file__).parent / "data/configs/nvidia__DeepSeek-V4-Flash-NVFP4.quantization_config.json"
    assert json.loads(path.read_text())["quant_method"] == "fp8"
    assert moqext.QuantConfig.from_dict(json.loads(path.read_text())).moe_quant_algo is not None


# -------------------------------------------------------------------------------------- quant_method fp8


@pytest.mark.parametrize(
    "more, algo",
    [
        ({"weight_block_size": [128, 128]}, "FP8_PB_WO"),
        ({"activation_scheme": "static"}, "FP8"),
        ({"activation_scheme": "dynamic"}, "FP8_PER_CHANNEL_PER_TOKEN"),
        ({}, "FP8_PER_CHANNEL_PER_TOKEN"),
    ],
)
def test_fp8_of_makers_is_one_of_three(tmp_path, more, algo):
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", **more}})
    )
    assert Checkpoint(tmp_path).config.quant_algo == algo


@pytest.mark.parametrize(
    "more, says",
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size: expected \[128, 128\], found '\[64, 64\]'"),
        ({"weight_block_size": "128"}, "weight_block_size: expected a list of integers"),
        ({"fmt": "e5m2"}, "fmt: expected e4m3, found 'e5m2'"),
        ({"activation_scheme": "magic"}, "activation_scheme: expected 'dynamic' or 'static', found 'magic'"),
    ],
)
def test_fp8_of_makers_that_is_not_read(tmp_path, more, says):
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", **more}})
    )
    with pytest.raises(ConfigError, match=says):
        Checkpoint(tmp_path)


def test_stacked_experts_in_native_fp8(rng, tmp_path):
    stack = "model.layers.0.mlp.experts"
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 256, 128), ("down_proj", 128, 128)):
        codes = rng.integers(0, 120, (2, rows, columns)).astype(np.uint8)
        tensors[f"{stack}.{name}"] = codes.view(ml_dtypes.float8_e4m3fn)
        tensors[f"{stack}.{name}_scale_inv"] = rng.uniform(0.1, 1, (2, rows // 128, 1)).astype(np.float32)
    document = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with Checkpoint(write(tmp_path, tensors, document)) as checkpoint:
        (layer,) = checkpoint.layers()
        assert (layer.kind, layer.quant_algo, layer.shape) == ("moe", "FP8_PB_WO", (2, 128, 128))
        scale = np.repeat(tensors[f"{stack}.gate_up_proj_scale_inv"], 128, axis=1)
        expected = tensors[f"{stack}.gate_up_proj"].astype(np.float32) * scale
        np.testing.assert_array_equal(checkpoint.dequantize(f"{stack}.gate_up_proj"), expected)


@pytest.mark.parametrize("document", [5, ["fp8"], "fp8", {"quant_method": ["fp8"]}])
def test_a_configuration_that_is_no_object_is_refused(tmp_path, document):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": document}))
    with pytest.raises(ConfigError, match="quantization_config"):
        Checkpoint(tmp_path)


def test_experts_in_mxfp4_among_linears_in_fp8(rng, tmp_path):
    """DeepSeek-V4: one configuration for both, and the tensors tell which is which."""
    expert, linear = "layers.0.ffn.experts.0.w1", "layers.0.attn.wo"
    codes = rng.integers(-128, 128, (64, 32), dtype=np.int8)
    exponents = rng.integers(118, 124, (64, 2)).astype(np.uint8)
    tensors = {
        f"{expert}.weight": codes,
        f"{expert}.scale": exponents.view(ml_dtypes.float8_e8m0fnu),
        f"{linear}.weight": rng.integers(0, 100, (128, 256), np.uint8).view(ml_dtypes.float8_e4m3fn),
        f"{linear}.scale": np.array([[120, 121]], np.uint8).view(ml_dtypes.float8_e8m0fnu),
    }
    document = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "scale_fmt": "ue8m0"}
    with Checkpoint(write(tmp_path, tensors, document)) as checkpoint:
        assert checkpoint.config.quant_algo == "MIXED_PRECISION"
        assert {problem.code for problem in checkpoint.problems} <= {"foreign_scale_name", "missing_expert"}
        values = ops.dequantize(codes.view(np.uint8), "MXFP4", weight_scale=exponents)
        np.testing.assert_array_equal(checkpoint.dequantize(expert), values)
        scale = np.repeat(np.array([[2.0**-7, 2.0**-6]], np.float32), 128, axis=1)
        expected = tensors[f"{linear}.weight"].astype(np.float32) * scale
        np.testing.assert_array_equal(checkpoint.dequantize(linear), expected)


def test_a_file_beside_the_index_is_converted_under_modelopts_names(rng, tmp_path):
    """A file that no index names, as of layers for speculative decoding, is translated as the others are."""
    source = write(tmp_path / "in", packed(rng, "layers.0.up_proj"), NVFP4)
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(packed(rng, "layers.0.up_proj"), "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    more = packed(rng, "mtp.up_proj")
    safetensors.save_file(more, source / "mtp.safetensors")
    again = packed(rng, "layers.0.up_proj")  # a module that is there already stays out
    safetensors.save_file(again, source / "other.safetensors")
    result = Checkpoint(source).convert(tmp_path / "out", to="modelopt")
    written = Checkpoint(tmp_path / "out")
    assert {layer.name for layer in written.layers()} == {"layers.0.up_proj", "mtp.up_proj"}
    np.testing.assert_array_equal(written.tensor("mtp.up_proj.weight"), more["mtp.up_proj.weight_packed"])
    assert any(note.startswith("mtp.safetensors, which no index names: 3 tensors") for note in result.notes)


def test_an_index_alone_tells_which_module_is_of_which_group(tmp_path):
    with TensorFiles(ROOT / "ct_mixed") as files:
        places = dict.fromkeys(files.tensors, "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text((ROOT / "ct_mixed/config.json").read_text())
    with Checkpoint(tmp_path) as checkpoint, Checkpoint(ROOT / "ct_mixed") as whole:
        assert not checkpoint.tensors
        assert checkpoint.config.quantized_layers == whole.config.quantized_layers
