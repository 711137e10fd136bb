"""`Checkpoint.convert`: what is written is what `dequantize` says, rounded once, whole or not at all."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import ops
from moqext.reader import matrices
from moqext.reader.files.tensor_files import read_header
from moqext.reader.matrices import quantized_matrices
from moqext.tools.convert import jobs

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors = pytest.importorskip("safetensors.numpy")

DATA = Path(__file__).parent / "data"
GENUINE = sorted(path.parent for path in DATA.glob("*/*/config.json") if path.parent.parent.name != "configs")
CHECKPOINTS = [directory for directory in GENUINE if directory.parent.name == "checkpoints"]
TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def name_of(directory):
    return f"{directory.parent.name}/{directory.name}"


def meant(checkpoint, matrix):
    """The matrix as float32 by the public functions, in the axes of the file; y = x W^T."""
    record = matrix.record
    weight = checkpoint.dequantize(record).astype(np.float32)
    if "lora_a" in record.tensors:
        low = (checkpoint.tensor(record.tensors[role]).astype(np.float32) for role in ("lora_b", "lora_a"))
        weight = weight + np.matmul(*low)
    if "pre_quant_scale" in record.tensors:
        factors = checkpoint.tensor(record.tensors["pre_quant_scale"]).astype(np.float32)
        weight = weight * (factors if factors.ndim < 2 else factors[:, None])
    return weight.swapaxes(-1, -2) if getattr(record, "transposed", False) else weight


def same_bits(got, expected):
    return got.shape == expected.shape and got.tobytes() == np.ascontiguousarray(expected).tobytes()


def write(directory, tensors, quant_algo="NVFP4", **config):
    """A checkpoint of those tensors."""
    directory.mkdir(exist_ok=True)
    safetensors.save_file(
        {name: np.asarray(value) for name, value in tensors.items()}, directory / "model.safetensors"
    )
    quantization = {"quant_algo": quant_algo, "quant_method": "modelopt"}
    (directory / "config.json").write_text(
        json.dumps({"quantization_config": quantization, "dtype": "bfloat16", **config})
    )
    return directory


def nvfp4(rng, name, rows, columns):
    weight = rng.standard_normal((rows, columns), dtype=np.float32)
    codes, scale, second = ops.quantize(weight, "nvfp4")
    return {
        f"{name}.weight": codes,
        f"{name}.weight_scale": np.asarray(scale).view(ml_dtypes.float8_e4m3fn),
        f"{name}.weight_scale_2": np.float32(second),
    }


def as_loaded(directory, values):
    """The axes in which Transformers has a weight: gpt-oss stores those of experts exchanged."""
    exchanged = directory.name == "gpt_oss_mxfp4" and values.ndim == 3
    return np.ascontiguousarray(values.swapaxes(1, 2)) if exchanged else values


@pytest.mark.parametrize(
    "directory, to",
    [(directory, "bf16") for directory in GENUINE]
    + [(directory, to) for directory in CHECKPOINTS for to in ("fp16", "fp32")],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_genuine_checkpoints_bit_for_bit(directory, to, tmp_path, monkeypatch):
    monkeypatch.setattr(matrices, "PIECE_BYTES", 8 << 10)  # several pieces even of these small weights
    monkeypatch.setattr(jobs, "CHUNK", 1 << 10)
    source = moqext.Checkpoint(directory)
    result = source.convert(tmp_path / "out", to=to)
    converted = moqext.Checkpoint(tmp_path / "out")
    assert converted.layers() == ()
    assert converted.config is None
    assert [p for p in converted.problems if p.severity == "error"] == []
    written = set(converted.tensors)
    assert len(written) == result.tensors
    for matrix in quantized_matrices(source):
        expected = as_loaded(directory, meant(source, matrix).astype(TYPES[to]))
        assert same_bits(converted.tensor(matrix.tensor), expected), matrix.name
        written.discard(matrix.tensor)
    for name in written:
        expected = source.tensor(name.replace("backbone.embeddings.", "backbone.embedding."))
        if expected.dtype == ml_dtypes.bfloat16:
            expected = expected.astype(TYPES[to])
        assert same_bits(converted.tensor(name), expected), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    before = json.loads((directory / "config.json").read_text())
    before.pop("quantization_config", None)
    assert config == before | {"dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[to]}
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        p.name
        for p in directory.iterdir()
        if p.suffix not in (".safetensors",) and "quant" not in p.name and "index" not in p.name
    }


@pytest.mark.parametrize("directory", GENUINE, ids=name_of)
def test_transformers_loads_it(directory, tmp_path):
    """No key is missing and none is unexpected, and the model has the values."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    source = moqext.Checkpoint(directory)
    source.convert(tmp_path / "out")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert {kind: keys for kind, keys in told.items() if keys} == {}
    parameters = dict(model.named_parameters())
    checked = 0
    for matrix in quantized_matrices(source):
        parameter = parameters.get(matrix.tensor.replace("backbone.", "model."))
        if parameter is not None:
            expected = as_loaded(directory, meant(source, matrix).astype(ml_dtypes.bfloat16))
            assert same_bits(parameter.detach().view(torch.int16).numpy(), expected), matrix.name
            checked += 1
    assert checked


def test_factors_for_activations_and_the_low_rank_pair_become_part_of_the_weight(rng, tmp_path):
    tensors = nvfp4(rng, "model.layers.0.mlp.up_proj", 96, 64)
    name = "model.layers.0.mlp.up_proj"
    factors = rng.uniform(0.5, 2, 64).astype(ml_dtypes.bfloat16)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((8, 64), (96, 8)))
    tensors |= {
        f"{name}.pre_quant_scale": factors,
        f"{name}.svdquant_lora_a": a,
        f"{name}.svdquant_lora_b": b,
    }
    tensors[f"{name}.input_scale"] = np.float32(0.5)
    source = moqext.Checkpoint(write(tmp_path / "in", tensors, "NVFP4_SVD"))
    source.convert(tmp_path / "out", to="fp32")
    got = moqext.Checkpoint(tmp_path / "out").tensor(f"{name}.weight")
    x = rng.standard_normal((5, 64))
    scaled = x * factors.astype(float)
    expected = scaled @ source.dequantize(name).T.astype(float) + scaled @ a.T.astype(float) @ b.T.astype(
        float
    )
    np.testing.assert_allclose(
        x @ got.T.astype(float), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )


def test_shards_and_index_hold_each_tensor_once(tmp_path, data):
    source = moqext.Checkpoint(data / "exports/nvfp4_sharded")
    result = source.convert(tmp_path / "out", max_shard_size=20_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(result.files)
    assert len(result.files) > 3
    found = {}
    for file in result.files:
        header = read_header(tmp_path / "out" / file)
        assert header.holes == ()
        assert header.metadata == {"format": "pt"}
        for name, info in header.tensors.items():
            assert name not in found
            assert info.begin % 2 == 0
            found[name] = file
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == result.bytes_written


def test_types_wider_than_the_model_stay(rng, tmp_path):
    tensors = nvfp4(rng, "a.up_proj", 32, 32)
    tensors |= {
        "a.gate.e_score_correction_bias": rng.standard_normal(7).astype(np.float32),
        "a.norm.weight": rng.standard_normal(32).astype(ml_dtypes.bfloat16),
        "a.steps": np.arange(3),
        "empty": np.zeros((0, 4), ml_dtypes.bfloat16),
        "one": np.float16(1.5),
    }
    source = moqext.Checkpoint(write(tmp_path / "in", tensors))
    source.convert(tmp_path / "out", to="fp16")
    types = {name: info.dtype for name, info in moqext.Checkpoint(tmp_path / "out").tensors.items()}
    assert types == {
        "a.up_proj.weight": "F16",
        "a.gate.e_score_correction_bias": "F32",
        "a.norm.weight": "F16",
        "a.steps": "I64",
        "empty": "F16",
        "one": "F16",
    }
    whole = {**json.loads((tmp_path / "in/config.json").read_text()), "dtype": "float32"}
    (tmp_path / "in/config.json").write_text(json.dumps(whole))
    moqext.Checkpoint(tmp_path / "in").convert(tmp_path / "wide", to="bf16")
    assert moqext.Checkpoint(tmp_path / "wide").tensors["a.gate.e_score_correction_bias"].dtype == "BF16"


def test_every_type_in_every_config_is_that_of_the_result(tmp_path, rng):
    part = {
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt"},
    }
    source = write(tmp_path / "in", nvfp4(rng, "a.up_proj", 32, 32), text_config=part)
    moqext.Checkpoint(source).convert(tmp_path / "out", to="fp16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {"dtype": "float16", "text_config": {"torch_dtype": "float16"}}


# Experts


@pytest.mark.parametrize(
    "case", ["exports/mixtral_nvfp4", "exports/deepseek_nvfp4", "checkpoints/qwen3moe_nvfp4"]
)
def test_stacked_experts_are_the_single_ones(case, data, tmp_path):
    source = moqext.Checkpoint(data / case)
    source.convert(tmp_path / "out", experts="stacked")
    converted = moqext.Checkpoint(tmp_path / "out")
    groups = [layer for layer in source.layers() if layer.kind == "moe"]
    assert groups
    for group in groups:
        by_role = {}
        for member in group.members:
            by_role.setdefault(moqext.reader.naming.PROJECTIONS[member.name.rpartition(".")[2]], []).append(
                member
            )
        values = {
            role: np.stack([source.dequantize(m).astype(ml_dtypes.bfloat16) for m in members])
            for role, members in by_role.items()
        }
        both = np.concatenate([values["gate"], values["up"]], axis=1)
        assert same_bits(converted.tensor(f"{group.name}.gate_up_proj"), both)
        assert same_bits(converted.tensor(f"{group.name}.down_proj"), values["down"])
    assert not any(f"{group.name}.0" in name for name in converted.tensors)


@pytest.mark.parametrize(
    "case", ["exports/mixtral_nvfp4", "exports/nemotron_h_mixed", "exports/qwen3moe_mixed"]
)
def test_stacked_and_unstacked_again_is_the_same(case, data, tmp_path):
    moqext.Checkpoint(data / case).convert(tmp_path / "plain")
    moqext.Checkpoint(tmp_path / "plain").convert(tmp_path / "stacked", experts="stacked")
    moqext.Checkpoint(tmp_path / "stacked").convert(tmp_path / "single", experts="unstacked")
    plain, single = moqext.Checkpoint(tmp_path / "plain"), moqext.Checkpoint(tmp_path / "single")
    spelled = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    for name in plain.tensors:
        other = name
        for old, new in spelled.items():
            other = other.replace(old, new)
        assert same_bits(single.tensor(other), plain.tensor(name)), name
    assert len(plain.tensors) == len(single.tensors)


@pytest.mark.parametrize("case", ["gpt_oss_nvfp4", "gpt_oss_mxfp8", "llama4_nvfp4", "llama4_fp8"])
def test_single_experts_are_parts_of_the_stack(case, data, tmp_path):
    source = moqext.Checkpoint(data / "exports" / case)
    source.convert(tmp_path / "out", experts="unstacked", to="fp32")
    converted = moqext.Checkpoint(tmp_path / "out")
    for group in (layer for layer in source.layers() if layer.kind == "moe"):
        both, down = (source.dequantize(projection) for projection in group.projections)
        for expert in range(len(both)):
            width = both.shape[1] // 2
            halves = (
                (both[expert, ::2], both[expert, 1::2]) if "gpt" in case else np.split(both[expert], [width])
            )
            for part, values in zip(("gate", "up", "down"), (*halves, down[expert]), strict=True):
                assert same_bits(converted.tensor(f"{group.name}.{expert}.{part}_proj.weight"), values)
            if "gpt" in case:
                bias = source.tensor(f"{group.name}.gate_up_proj_bias")[expert].astype(np.float32)
                assert same_bits(converted.tensor(f"{group.name}.{expert}.up_proj.bias"), bias[1::2])


def test_auto_stacks_where_transformers_wants_it(data, tmp_path):
    source = Path(shutil.copytree(data / "exports/qwen3moe_mixed", tmp_path / "in"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_vl_moe"}))
    moqext.Checkpoint(source).convert(tmp_path / "out")
    assert "model.layers.0.mlp.experts.gate_up_proj" in moqext.Checkpoint(tmp_path / "out").tensors


def tiny_qwen3_vl_moe(transformers):
    text = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 1}
    text |= {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"num_experts": 2, "num_experts_per_tok": 1}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def tiny_granite_moe(transformers):
    config = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config |= {"num_experts_per_tok": 1, "tie_word_embeddings": False}
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**config))


@pytest.mark.parametrize("make", [tiny_qwen3_vl_moe, tiny_granite_moe])
def test_transformers_loads_single_experts_that_auto_stacked(make, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = make(transformers).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved/model.safetensors"
    single = {}
    for name, value in safetensors.load_file(path).items():  # Granite's names for stacks are its own
        name = name.replace(".input_linear.weight", ".experts.gate_up_proj")
        single[name.replace(".output_linear.weight", ".experts.down_proj")] = value
    safetensors.save_file(single, path)
    moqext.Checkpoint(tmp_path / "saved").convert(tmp_path / "single", experts="unstacked")
    moqext.Checkpoint(tmp_path / "single").convert(tmp_path / "out")
    load = type(model).from_pretrained
    _, told = load(tmp_path / "single", dtype=torch.bfloat16, output_loading_info=True)
    assert told["missing_keys"]
    loaded, told = load(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert {kind: keys for kind, keys in told.items() if keys} == {}
    for (name, value), other in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_a_lost_expert_is_refused(data, tmp_path):
    moqext.Checkpoint(data / "exports/mixtral_nvfp4").convert(tmp_path / "plain")
    lost = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    path = tmp_path / "plain/model.safetensors"
    tensors = safetensors.load_file(path)
    del tensors[lost]
    safetensors.save_file(tensors, path)
    with pytest.raises(moqext.CheckpointError, match=r"experts\.1|expert 1 lacks"):
        moqext.Checkpoint(tmp_path / "plain").convert(tmp_path / "out", experts="stacked")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("joint", ["_bias", ".bias"])
def test_biases_are_unstacked_with_their_weights(joint, rng, tmp_path):
    stack, bias = rng.standard_normal((2, 6, 4), np.float32), rng.standard_normal((2, 6), np.float32)
    name = "layers.0.mlp.experts.gate_up_proj"
    source = write(tmp_path / "in", {name: stack, f"{name}{joint}": bias}, None, dtype="float32")
    moqext.Checkpoint(source).convert(tmp_path / "out", to="fp32", experts="unstacked")
    converted = moqext.Checkpoint(tmp_path / "out")
    assert name + joint not in converted.tensors
    for expert in (0, 1):
        for part, rows in (("gate_proj", slice(3)), ("up_proj", slice(3, 6))):
            single = f"layers.0.mlp.experts.{expert}.{part}"
            assert same_bits(converted.tensor(f"{single}.weight"), stack[expert, rows])
            assert same_bits(converted.tensor(f"{single}.bias"), bias[expert, rows])


def test_biases_of_single_experts_are_refused_not_left_over(rng, tmp_path):
    names = [f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("up", "down")]
    tensors = {f"{name}.weight": rng.standard_normal((32, 32)).astype(ml_dtypes.bfloat16) for name in names}
    tensors[f"{names[0]}.bias"] = np.zeros(32, ml_dtypes.bfloat16)
    source = moqext.Checkpoint(write(tmp_path / "in", tensors))
    with pytest.raises(moqext.CheckpointError, match=r"experts\.0\.up_proj\.bias.*biases of single experts"):
        source.convert(tmp_path / "out", experts="stacked")
    assert not (tmp_path / "out").exists()


# FP8


def fp8_matrices(directory):
    """Values of every weight of a conversion to FP8 by its own codes and scales, with NumPy."""
    for matrix in quantized_matrices(directory):
        codes = directory.tensor(matrix.tensor).astype(np.float32)
        scale = directory.tensor(matrix.record.tensors["weight_scale"])
        assert scale.dtype == np.float32
        assert scale.shape == codes.shape[:1]
        yield matrix, codes, scale, codes * scale.reshape(-1, *[1] * (codes.ndim - 1))


@pytest.mark.parametrize("directory", GENUINE, ids=name_of)
def test_fp8_is_what_the_formula_says(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(matrices, "PIECE_BYTES", 8 << 10)
    source = moqext.Checkpoint(directory)
    result = source.convert(tmp_path / "out", to="fp8")
    converted = moqext.Checkpoint(tmp_path / "out")
    errors = {error.layer: error for error in result.errors}
    tables = {layer.name for layer in source.layers() if layer.kind == "embedding"}
    before = {m.tensor: m for m in quantized_matrices(source) if m.name not in tables}
    after = list(fp8_matrices(converted))
    assert {matrix.tensor for matrix, *_ in after} == before.keys()
    for matrix, codes, scale, values in after:
        old = before[matrix.tensor]
        weight = meant(source, old)
        if matrix.name not in errors:
            assert old.quant_algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
            assert same_bits(source.tensor(old.tensor), codes.astype(ml_dtypes.float8_e4m3fn))
            assert same_bits(values.astype(np.float32), weight.astype(np.float32))
            continue
        flat = np.ascontiguousarray(weight, np.float32).reshape(len(weight), -1)
        expected = np.abs(flat).max(1) / np.float32(448)
        expected[expected == 0] = 1
        assert same_bits(scale, expected)
        assert same_bits(
            codes,
            (flat / expected[:, None])
            .astype(ml_dtypes.float8_e4m3fn)
            .astype(np.float32)
            .reshape(codes.shape),
        )
        norm = np.linalg.norm(weight.astype(float))
        relative = np.linalg.norm(values - weight.astype(float)) / norm if norm else 0
        assert errors[matrix.name].relative_error == pytest.approx(relative, rel=1e-4, abs=1e-12)
        assert errors[matrix.name].relative_error < 0.04
    assert [e.relative_error for e in result.errors] == sorted(
        (e.relative_error for e in result.errors), reverse=True
    )


@pytest.mark.parametrize("directory", GENUINE, ids=name_of)
def test_fp8_reads_without_a_problem_and_excludes_what_stays(directory, tmp_path):
    source = moqext.Checkpoint(directory)
    source.convert(tmp_path / "out", to="fp8")
    converted = moqext.Checkpoint(tmp_path / "out")
    found = {p.code for p in converted.problems}
    assert found <= {p.code for p in source.problems} | {"kv_scales_absent"}
    assert not found & {"config_conflict", "algo_conflict", "unlisted_but_quantized", "stored_unquantized"}
    assert {layer.quant_algo for layer in converted.layers()} == {"FP8_PER_CHANNEL_PER_TOKEN"}
    assert converted.config.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN"
    kv = source.config.kv_cache_quant_algo
    assert converted.config.kv_cache_quant_algo == (kv if kv == "FP8" else None)
    assert len(converted.kv_scales()) == (len(source.kv_scales()) if kv == "FP8" else 0)
    for layer in converted.layers():
        assert not converted.config.is_excluded(layer.name)
    for name, info in converted.tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2 and info.dtype != "F8_E4M3":
            assert converted.config.is_excluded(name.removesuffix(".weight")), name
    inline = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert inline["quant_method"] == "modelopt"
    assert inline["ignore"] == own["quantization"]["exclude_modules"]
    assert inline["producer"] == own["producer"]


def test_fp8_runs(data, tmp_path, rng):
    moqext.Checkpoint(data / "checkpoints/llama_nvfp4_kvfp8").convert(tmp_path / "out", to="fp8")
    layer = moqext.Checkpoint(tmp_path / "out").load("model.layers.0.mlp.up_proj", dtype="float32")
    weight = moqext.Checkpoint(data / "checkpoints/llama_nvfp4_kvfp8").dequantize(
        "model.layers.0.mlp.up_proj"
    )
    x = rng.standard_normal((4, weight.shape[1]), dtype=np.float32)
    expected = x @ weight.T
    assert np.linalg.norm(layer(x) - expected) < 0.06 * np.linalg.norm(expected)


# Refusals, and that nothing is left


def test_problems_refuse_before_anything_is_written(data, tmp_path):
    source = Path(shutil.copytree(data / "exports/nvfp4_sharded", tmp_path / "in"))
    for number in (3, 4):
        (source / f"model-0000{number}-of-00005.safetensors").unlink()
    with pytest.raises(moqext.CheckpointError, match=r"cannot be converted: missing_shard.*and \d+ more"):
        moqext.Checkpoint(source).convert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_codes_of_no_layer_are_refused(rng, tmp_path):
    tensors = nvfp4(rng, "a.up_proj", 32, 32) | {"b.table": np.zeros((4, 4), ml_dtypes.float8_e4m3fn)}
    with pytest.raises(moqext.CheckpointError, match=r"b\.table.*codes of type F8_E4M3"):
        moqext.Checkpoint(write(tmp_path / "in", tensors)).convert(tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "told"),
    [(np.nan, "1 of 4,096 codes or scales are NaN"), (448.0, "1 of 4,096 values do not fit")],
)
def test_a_code_that_is_no_number_or_too_large_leaves_nothing_behind(value, told, rng, tmp_path):
    codes = rng.uniform(-1, 1, (64, 64)).astype(ml_dtypes.float8_e4m3fn)
    codes[40, 3] = value
    tensors = {"a.up_proj.weight": codes, "a.up_proj.weight_scale": np.float32(500)}
    source = moqext.Checkpoint(write(tmp_path / "in", tensors, "FP8"))
    with pytest.raises(moqext.CheckpointError, match=rf"a\.up_proj\.weight.*{told}"):
        source.convert(tmp_path / "out", to="fp16")
    assert not (tmp_path / "out").exists()


def test_infinity_stays_and_what_becomes_it_is_counted(rng, tmp_path, monkeypatch):
    """A value that is too large is told beside an infinite one as well, and over all pieces."""
    monkeypatch.setattr(jobs, "CHUNK", 4)
    tensors = nvfp4(rng, "a.up_proj", 32, 32)
    for values, told in (
        ([1, np.inf, np.nan, -np.inf], None),
        ([1e5, np.inf, np.nan, -np.inf, -2e5, 1], "2 of 6 values do not fit into F16, .* 65504; .* 199680"),
    ):
        tensors["mask"] = np.array(values, ml_dtypes.bfloat16)
        source = moqext.Checkpoint(write(tmp_path / "in", tensors))
        if told is None:
            source.convert(tmp_path / "out", to="fp16")
            np.testing.assert_array_equal(moqext.Checkpoint(tmp_path / "out").tensor("mask"), values)
        else:
            with pytest.raises(moqext.CheckpointError, match=f"mask.*{told}"):
                source.convert(tmp_path / "new", to="fp16")


def test_a_float32_beyond_bfloat16_is_refused(tmp_path):
    tensors = {"a.weight": np.full((2, 2), 3.4e38, np.float32)}
    source = moqext.Checkpoint(write(tmp_path / "in", tensors, None, dtype="float32"))
    with pytest.raises(moqext.CheckpointError, match=r"a\.weight.*4 of 4 values do not fit into BF16"):
        source.convert(tmp_path / "out", to="bf16")


@pytest.mark.parametrize("experts", ["stacked", "unstacked"])
def test_plain_experts_that_do_not_fit_are_refused(experts, tmp_path):
    value = np.full((2, 4, 4), 1e5, ml_dtypes.bfloat16)
    names = [f"layers.0.mlp.experts.{e}.down_proj.weight" for e in (0, 1)]
    tensors = dict(zip(names, value, strict=True))
    if experts == "unstacked":
        tensors = {"layers.0.mlp.experts.down_proj": value}
    source = moqext.Checkpoint(write(tmp_path / "in", tensors))
    with pytest.raises(moqext.CheckpointError, match=r"down_proj.*values do not fit into F16"):
        source.convert(tmp_path / "out", to="fp16", experts=experts)


def test_tiny_weights_keep_their_digits_in_fp8(tmp_path):
    """Smaller than 448 times the least float32: their scale is no zero, and their error no NaN."""
    codes = np.full((32, 32), 256, np.float32).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((1, 1), 2**-149, np.float32)
    tensors = {"a.up_proj.weight": codes, "a.up_proj.weight_scale": scale}
    source = moqext.Checkpoint(write(tmp_path / "in", tensors, "FP8_PB_WO"))
    result = source.convert(tmp_path / "out", to="fp8")
    assert [error.relative_error for error in result.errors] == [0]
    after = moqext.Checkpoint(tmp_path / "out").dequantize("a.up_proj")
    np.testing.assert_array_equal(after, source.dequantize("a.up_proj"))
    assert after.max() > 0


def test_a_directory_that_is_not_empty_is_refused_and_overwritten_on_demand(data, tmp_path):
    source = moqext.Checkpoint(data / "exports/fp8_kvcast")
    out = tmp_path / "out"
    moqext.Checkpoint(data / "exports/nvfp4_sharded").convert(out, max_shard_size=40_000)
    (out / "notes.txt").write_text("mine")
    (out / "hf_quant_config.json").write_text("{}")
    with pytest.raises(moqext.CheckpointError, match="not empty"):
        source.convert(out)
    assert len(list(out.glob("*.safetensors"))) > 1
    source.convert(out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == sorted(
        {"config.json", "model.safetensors", "notes.txt"}
        | {p.name for p in (data / "exports/fp8_kvcast").iterdir() if "quant" not in p.name}
    )


@pytest.mark.parametrize("below", ["", "bf16"])
def test_the_source_is_never_written_to(below, data, tmp_path):
    source = Path(shutil.copytree(data / "exports/fp8_kvcast", tmp_path / "in"))
    before = sorted(p.name for p in source.iterdir())
    with pytest.raises(moqext.CheckpointError, match="lies in the checkpoint"):
        moqext.Checkpoint(source).convert(source / below, overwrite=True)
    assert sorted(p.name for p in source.iterdir()) == before


def test_a_failure_on_the_way_leaves_the_old_checkpoint(data, tmp_path):
    out = tmp_path / "out"
    moqext.Checkpoint(data / "exports/fp8_kvcast").convert(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def stop(done, total, name):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moqext.Checkpoint(data / "exports/nvfp4_sharded").convert(out, overwrite=True, progress=stop)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_other_files_come_along_and_other_weights_do_not(data, tmp_path):
    source = Path(shutil.copytree(data / "exports/fp8_kvcast", tmp_path / "in"))
    for name in ("tokenizer.json", "additional_chat_templates/tool.jinja", ".git/HEAD", "modelopt_state.pth"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    result = moqext.Checkpoint(source).convert(tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "out/additional_chat_templates/tool.jinja").exists()
    assert not (tmp_path / "out/.git").exists()
    assert not (tmp_path / "out/modelopt_state.pth").exists()
    assert result.notes[-1] == "files not copied: modelopt_state.pth"


# Weights that no index names


def beside(data, tmp_path, tensors, name="mtp.safetensors"):
    """A copy of a genuine checkpoint with an index, and one more file that it does not name."""
    source = Path(shutil.copytree(data / "exports/nvfp4_sharded", tmp_path / "in"))
    safetensors.save_file(tensors, source / name)
    return source


def test_a_file_that_no_index_names_is_converted_too(data, rng, tmp_path):
    """Quantized modules of it are dequantized as others are."""
    plain = rng.standard_normal((4, 8)).astype(ml_dtypes.bfloat16)
    tensors = {name: np.asarray(value) for name, value in nvfp4(rng, "mtp.0.up_proj", 32, 32).items()}
    source = beside(data, tmp_path, {"mtp.eh_proj.weight": plain, **tensors})
    result = moqext.Checkpoint(source).convert(tmp_path / "out", max_shard_size=20_000)
    assert "mtp.safetensors, which no index names: 4 tensors written too" in result.notes
    converted = moqext.Checkpoint(tmp_path / "out")
    assert same_bits(converted.tensor("mtp.eh_proj.weight"), plain)
    expected = ops.dequantize(
        *list(tensors.values())[:1],
        "NVFP4",
        weight_scale=tensors["mtp.0.up_proj.weight_scale"],
        weight_scale_2=tensors["mtp.0.up_proj.weight_scale_2"],
    )
    assert same_bits(converted.tensor("mtp.0.up_proj.weight"), expected.astype(ml_dtypes.bfloat16))
    assert "mtp.0.up_proj.weight_scale" not in converted.tensors
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert {"mtp.eh_proj.weight", "mtp.0.up_proj.weight"} <= index["weight_map"].keys()


def test_modules_that_are_there_once_more_stay_out(data, tmp_path):
    """No scale of another variant of the model gets beside weights that it does not belong to."""
    other = np.zeros((4, 4), ml_dtypes.bfloat16)
    twice = {"model.norm.weight": other, "lm_head.weight": other, "lm_head.weight_scale": np.float32([1])}
    source = beside(data, tmp_path, twice, "model.fp16.safetensors")
    (source / "original").mkdir()
    for name in ("consolidated.safetensors", "original/consolidated.safetensors"):
        safetensors.save_file({"layers.0.wq.weight": other}, source / name)
    safetensors.save_file({"base.lora_A.weight": other}, source / "adapter_model.safetensors")
    result = moqext.Checkpoint(source).convert(tmp_path / "out")
    moqext.Checkpoint(data / "exports/nvfp4_sharded").convert(tmp_path / "alone")
    alone = moqext.Checkpoint(tmp_path / "alone")
    assert moqext.Checkpoint(tmp_path / "out").tensors.keys() == alone.tensors.keys()
    told = "consolidated.safetensors, model.fp16.safetensors, original/consolidated.safetensors"
    assert result.notes[-1] == f"files not copied: {told}"
    assert (tmp_path / "out/adapter_model.safetensors").exists()


def test_a_file_that_no_index_names_and_that_is_damaged_is_refused(data, tmp_path):
    source = beside(data, tmp_path, {})
    (source / "mtp.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(moqext.CheckpointError, match=r"mtp\.safetensors: a Git LFS pointer"):
        moqext.Checkpoint(source).convert(tmp_path / "out")


WRONG = [{"to": "int8"}, {"experts": "both"}, {"max_shard_size": 0}, {"experts": "stacked", "to": "fp8"}]


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments(argument, data, tmp_path):
    with pytest.raises(ValueError, match=next(iter(argument))):
        moqext.Checkpoint(data / "exports/fp8_kvcast").convert(tmp_path / "out", **argument)
    assert not (tmp_path / "out").exists()


def test_a_tensor_of_a_type_that_the_format_does_not_name_is_refused(rng, tmp_path):
    source = write(tmp_path / "in", {**nvfp4(rng, "a.up_proj", 32, 32), "a.extra": np.zeros(4, np.float32)})
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32","shape":[4]', b'"dtype":"X32","shape":[4]'))
    for to in ("bf16", "modelopt"):
        with pytest.raises(moqext.CheckpointError, match="its type 'X32' is not known"):
            moqext.Checkpoint(source).convert(tmp_path / "out", to=to)
