"""`Checkpoint.quantize`: the files of ModelOpt from the models they were made from, bit for bit."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import moqext
from moqext.algorithms import ALGORITHMS
from moqext.ops.quantize_weights import WRITTEN
from moqext.tools.compare import compare, open_side
from moqext.tools.quantize import quantizers, weights
from moqext.tools.quantize.scales import read_scales

from .quantize_files import CASES, ZEROS, cache_amax, input_amax, unquantized

safetensors = pytest.importorskip("safetensors.numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")
hypothesis = pytest.importorskip("hypothesis")
strategies = pytest.importorskip("hypothesis.strategies")


def without_sentinel(value):
    """A JSON document with the names of the tensors, which the producer did not find back for Nemotron-H."""
    text = json.dumps(value).replace(".\\u0000backbone.pt_name_sentinel", "")
    text = text.replace("backbone.embeddings", "backbone.embedding")
    return json.loads(text)


def quantize(case, tmp_path, **options):
    """Quantizes the original of a case as its options say."""
    source = unquantized(case, tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        options = {
            "to": case.to,
            "rules": case.rules,
            "exclude": case.exclude,
            "scales": input_amax(case) | cache_amax(case) if case.given else "none",
            "kv_cache": case.kv_cache,
        } | options
        return checkpoint.quantize(tmp_path / "out", **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.export)
def test_genuine_exports_bit_for_bit(case, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 8 << 10)  # several pieces even of these small weights
    result = quantize(case, tmp_path)
    genuine, made = moqext.Checkpoint(case.directory), moqext.Checkpoint(tmp_path / "out")
    expected = set(genuine.tensors)
    assert set(made.tensors) == expected
    assert result.tensors == len(expected)
    for name in expected:
        ours, theirs = made.tensors[name], genuine.tensors[name]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert made.tensor(name, raw=True).tobytes() == genuine.tensor(name, raw=True).tobytes(), name
    same_configurations(case.directory, tmp_path / "out")
    assert [problem for problem in made.problems if problem.severity == "error"] == []
    assert sum(result.quantized.values()) == sum(
        len(layer.members) or len(layer.projections) or 1 for layer in genuine.layers()
    )


def same_configurations(genuine, made):
    """Checks that both documents say what those of the export do, but for the version."""
    for name in ("hf_quant_config.json", "config.json"):
        theirs, ours = (json.loads((folder / name).read_text()) for folder in (genuine, made))
        theirs = without_sentinel(theirs)
        inner = theirs.get("quantization") or theirs["quantization_config"]
        own = ours.get("quantization") or ours["quantization_config"]
        for document in (theirs, ours, inner, own):
            document.pop("producer", None)
        for listed in ("exclude_modules", "ignore"):
            if listed in inner:
                assert sorted(own.pop(listed)) == sorted(inner.pop(listed))
        if "config_groups" in inner:
            groups = [sorted(map(json.dumps, each.pop("config_groups").values())) for each in (own, inner)]
            assert groups[0] == groups[1]
        assert ours == theirs


# Linears of other checkpoints


def write(directory, tensors, **config):
    """An unquantized model of those bfloat16 tensors."""
    directory.mkdir(parents=True)
    values = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    safetensors.save_file(values, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return moqext.Checkpoint(directory)


def matrix(rng, *shape):
    return rng.standard_normal(shape, np.float32) * np.float32(0.1)


def stored(checkpoint):
    """Module -> the type of its weight."""
    return {
        name.removesuffix(".weight"): info.dtype
        for name, info in checkpoint.tensors.items()
        if name.endswith(".weight")
    }


def test_what_modelopt_leaves_out_stays_as_it_is(rng, tmp_path):
    plain = (
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.linear_attn.in_proj_a",
        "model.layers.0.linear_attn.in_proj_b",
        "model.layers.0.feed_forward.router",
        "model.layers.2.eh_proj",  # of the layer that predicts further tokens
        "model.visual.blocks.0.attn.qkv",
        "model.multi_modal_projector.linear_1",
        "mtp.layers.0.mlp.up_proj",
    )
    quantized = (
        "model.layers.0.linear_attn.in_proj_qkv",
        *(f"model.layers.0.mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")),
        *(f"model.layers.0.mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
        *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
    tensors = {f"{name}.weight": matrix(rng, 32, 32) for name in (*plain, *quantized)}
    for name in ("mlp.gate", "feed_forward.router"):
        tensors[f"model.layers.0.{name}.weight"] = matrix(rng, 1, 32)  # a row for each expert
    tensors["model.layers.0.mlp.conv.weight"] = matrix(rng, 32, 1, 4)
    tensors["model.norm.weight"] = matrix(rng, 32)
    with write(tmp_path / "in", tensors, num_hidden_layers=2) as source:
        source.quantize(tmp_path / "out", to="MXFP8", rules=["model.layers.1.mlp.up_proj none"])
    with moqext.Checkpoint(tmp_path / "out") as made:
        coded = {name for name, dtype in stored(made).items() if dtype == "F8_E4M3"}
        assert coded == set(quantized) - {"model.layers.1.mlp.up_proj"}
        for name in stored(made):
            assert made.config.is_excluded(name) == (name not in coded) or name == "model.norm", name
        assert {problem.severity for problem in made.problems} <= {"note", "warning"}


def test_the_last_rule_decides_and_exclusions_hold(rng, tmp_path):
    names = [
        f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1, 10) for part in ("gate", "up", "down")
    ]
    with write(tmp_path / "in", {f"{name}.weight": matrix(rng, 32, 32) for name in names}) as source:
        result = source.quantize(
            tmp_path / "out",
            to="mxfp8",
            rules=[
                "*.down_proj MXFP4",
                ("*layers.10.*", "FP8_PER_CHANNEL_PER_TOKEN"),
                "*layers.10.mlp.up* none",
            ],
            exclude=["model.layers.1", "*nothing*"],
        )
    assert result.quantized == {"MXFP8": 2, "MXFP4": 1, "FP8_PER_CHANNEL_PER_TOKEN": 2}
    assert result.notes == (
        "'*nothing*' fits no linear",
        "model.layers.10.mlp: linears that engines fuse, as q, k and v, differ in their algorithms",
    )
    config = moqext.QuantConfig.from_pretrained(tmp_path / "out")
    assert {name: config.layer_algo(name) for name in names} == {
        "model.layers.0.mlp.gate_proj": "MXFP8",
        "model.layers.0.mlp.up_proj": "MXFP8",
        "model.layers.0.mlp.down_proj": "MXFP4",
        "model.layers.1.mlp.gate_proj": None,
        "model.layers.1.mlp.up_proj": None,
        "model.layers.1.mlp.down_proj": None,
        "model.layers.10.mlp.gate_proj": "FP8_PER_CHANNEL_PER_TOKEN",
        "model.layers.10.mlp.up_proj": None,
        "model.layers.10.mlp.down_proj": "FP8_PER_CHANNEL_PER_TOKEN",
    }


def test_brackets_and_question_marks_of_a_pattern_are_letters(rng, tmp_path):
    with write(tmp_path / "in", {"layers.0.up_proj.weight": matrix(rng, 32, 32)}) as source:
        for pattern in ("layers.[0].up_proj", "layers.?.up_proj"):
            with pytest.raises(moqext.CheckpointError, match="no linear to quantize"):
                source.quantize(tmp_path / "out", rules=[f"{pattern} MXFP8"])


def test_only_some_experts_of_a_stack(rng, tmp_path):
    """They are written one by one, so those that stay as they are have tensors of their own, too."""
    stack, down = matrix(rng, 3, 64, 32), matrix(rng, 3, 32, 32)
    tensors = {"layers.0.mlp.experts.gate_up_proj": stack, "layers.0.mlp.experts.down_proj": down}
    with write(tmp_path / "in", tensors, model_type="qwen3_moe") as source:
        source.quantize(
            tmp_path / "out", to="W4A16_NVFP4", exclude=["*.experts.1.*", "*.2.up_proj", "*.down_proj"]
        )
    with moqext.Checkpoint(tmp_path / "out") as made:
        types = stored(made)
        coded = {name.removeprefix("layers.0.mlp.experts.") for name, dtype in types.items() if dtype == "U8"}
        assert coded == {"0.gate_proj", "0.up_proj", "2.gate_proj"}
        assert len(types) == 6
        assert made.tensors["layers.0.mlp.experts.down_proj"].dtype == "BF16"
        kept = made.tensor("layers.0.mlp.experts.1.up_proj.weight").astype(np.float32)
        np.testing.assert_array_equal(kept, stack[1, 32:].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_blocks_of_experts_written_here_are_no_suspects(rng, tmp_path):
    """Gate and up have blocks of their own; a width of no multiple of 128 gave away that others' have not."""
    gates = {
        f"model.layers.0.mlp.experts.{e}.{n}_proj.weight": (48, 128) for e in (0, 1) for n in ("gate", "up")
    }
    shapes = gates | {f"model.layers.0.mlp.experts.{e}.down_proj.weight": (128, 48) for e in (0, 1)}
    tensors = {name: matrix(rng, *shape) for name, shape in shapes.items()}
    with write(tmp_path / "in", tensors, model_type="qwen3_moe") as source:
        source.quantize(tmp_path / "out", to="FP8_PB_WO")
    with moqext.Checkpoint(tmp_path / "out") as made:
        assert "possibly_clipped_blocks" not in [problem.code for problem in made.problems]
        for name, values in tensors.items():
            error = made.dequantize(name.removesuffix(".weight")) - values
            assert np.linalg.norm(error) < 0.04 * np.linalg.norm(values)
    for name in ("config.json", "hf_quant_config.json"):
        file = tmp_path / "out" / name
        file.write_text(file.read_text().replace("+moqext.", "+another."))
    with moqext.Checkpoint(tmp_path / "out") as others:
        assert "possibly_clipped_blocks" in [problem.code for problem in others.problems]


@pytest.mark.parametrize(
    "to", ["FP8", "NVFP4", "MXFP4", "MXFP8", "W4A8_NVFP4_FP8", "FP8_PER_CHANNEL_PER_TOKEN"]
)
def test_stacks_that_stay_stacks_are_what_their_values_say(to, rng, tmp_path):
    stack = matrix(rng, 3, 64, 96)
    tensors = {
        "model.layers.0.feed_forward.experts.gate_up_proj": stack,
        "model.layers.0.feed_forward.experts.down_proj": matrix(rng, 3, 96, 64),
    }
    with write(tmp_path / "in", tensors, model_type="llama4_text") as source:
        source.quantize(tmp_path / "out", to=to, scales="none")
    with moqext.Checkpoint(tmp_path / "out") as made:
        values = made.dequantize("model.layers.0.feed_forward.experts.gate_up_proj").swapaxes(1, 2)
        error = np.linalg.norm(values - stack) / np.linalg.norm(stack)
        assert error < (0.04 if "FP8" in to.removesuffix("_FP8") else 0.16)


def test_zeros_stay_zeros(tmp_path, rng):
    """ModelOpt stores NaN for a weight of zeros by itself."""
    for case in ZEROS:
        (tmp_path / case.export).mkdir(parents=True)
        quantize(case, tmp_path / case.export)
        genuine, made = moqext.Checkpoint(case.directory), moqext.Checkpoint(tmp_path / case.export / "out")
        zeros = 0
        for layer in made.layers():
            values = made.dequantize(layer)
            assert np.isfinite(values).all()
            zeros += not values.any()
            np.testing.assert_array_equal(values, np.nan_to_num(genuine.dequantize(layer)))
        assert zeros == 2
        assert [problem for problem in made.problems if problem.severity != "note"] == []


@pytest.mark.parametrize("search", ["mse", "4over6"])
def test_a_search_brings_weights_nearer_to_the_original(search, tmp_path):
    case = next(case for case in CASES if case.export == "exports/mixtral_nvfp4")
    errors = {}
    for name in (None, search):
        quantize(case, tmp_path / str(name), scale_search=name)
        compared = compare(*(open_side(tmp_path / str(name) / side) for side in ("out", "in")))
        errors[name] = {each.layer: each.relative_error for each in compared.layers}
        made = moqext.Checkpoint(tmp_path / str(name) / "out")
        assert [problem for problem in made.problems if problem.severity != "note"] == []
    assert errors[None].keys() == errors[search].keys()
    assert all(errors[search][layer] <= error for layer, error in errors[None].items())
    assert sum(errors[search].values()) < 0.97 * sum(errors[None].values())


def test_a_search_leaves_algorithms_without_scales_to_try_alone(rng, tmp_path):
    names = ("layers.0.mlp.up_proj", "layers.0.self_attn.o_proj")
    with write(tmp_path / "in", {f"{name}.weight": matrix(rng, 32, 32) for name in names}) as source:
        result = source.quantize(tmp_path / "out", to="MXFP8", rules=["*mlp* MXFP4"], scale_search="mse")
    assert result.notes == ("scales of MXFP8 were not searched for: mse has none to try there",)


@pytest.mark.parametrize("broken", ["layers.0.mlp.up_proj", "layers.0.mlp.experts.gate_up_proj"])
def test_rows_that_are_no_multiple_of_the_group(broken, rng, tmp_path):
    shape = (32, 40) if broken.endswith("mlp.up_proj") else (2, 40, 64)
    tensor = f"{broken}.weight" if len(shape) == 2 else broken
    source = write(tmp_path / "in", {tensor: matrix(rng, *shape)}, model_type="gpt_oss")
    told = rf'{broken}.*: cannot be NVFP4: .* 40 values.*--exclude "{broken}"'
    with pytest.raises(moqext.CheckpointError, match=told):
        source.quantize(tmp_path / "out", to="NVFP4", scales="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "config", "told"),
    [
        (
            {"h.0.attn.c_attn.weight": (32, 96)},
            {"model_type": "gpt2"},
            r"models of type gpt2 store .* \[in, out\]",
        ),
        (
            {"layers.0.experts.down_proj": (2, 128, 128)},
            {"model_type": "llama4_text"},
            r"experts.down_proj': no engine reads FP8_PB_WO of experts that are stacked",
        ),
        (
            {
                "layers.0.mlp.experts.gate_up_proj": (2, 64, 32),
                "layers.0.mlp.experts.gate_up_proj_bias": (2, 64),
            },
            {"model_type": "qwen3_moe"},
            "biases of experts stacked .* have no name",
        ),
    ],
)
def test_models_that_are_refused(tensors, config, told, rng, tmp_path):
    values = {name: matrix(rng, *shape) for name, shape in tensors.items()}
    source = write(tmp_path / "in", values, **config)
    with pytest.raises(moqext.CheckpointError, match=told):
        source.quantize(tmp_path / "out", to="FP8_PB_WO")
    assert not (tmp_path / "out").exists()


# Scales of activations


def test_scales_of_a_mapping_and_of_inputs_that_are_zero(rng, tmp_path):
    names = [f"layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qko"]
    amax = dict.fromkeys(names, 0.0) | {names[0]: 3.0, names[1]: 5.0}
    with write(tmp_path / "in", {f"{name}.weight": matrix(rng, 32, 32) for name in names}) as source:
        source.quantize(tmp_path / "out", to="NVFP4", rules=["layers.1.* FP8"], scales=amax)
    with moqext.Checkpoint(tmp_path / "out") as made:
        got = [float(made.tensor(f"{name}.input_scale")) for name in names]
    shared, nothing = np.float32(5) / np.float32(2688), np.float32(6) / np.float32(2688)
    assert got == [shared, shared, nothing, 1.0, 1.0, 1.0]


def test_a_cache_without_magnitudes_is_announced_without_scales(rng, tmp_path):
    """ModelOpt's presets with a constant magnitude write such files."""
    attention = "model.layers.0.self_attn"
    values = {f"{attention}.{part}_proj.weight": matrix(rng, 32, 32) for part in "qkvo"}
    amax = {f"{attention}.k_cache": 0.0, f"{attention}.v_cache": 2.0, "model.visual.blocks.0.attn.k_cache": 1}
    with write(tmp_path / "in", values) as source:
        without = source.quantize(tmp_path / "without", to="MXFP8", kv_cache="nvfp4")
        source.quantize(tmp_path / "with", to="MXFP8", kv_cache="fp8", scales=amax)
        with pytest.raises(ValueError, match="kv_cache: expected one of fp8, nvfp4, or None, got 'int8'"):
            source.quantize(tmp_path / "other", to="MXFP8", kv_cache="int8")
    assert without.notes == ("scales say nothing of the cache: no scales of it are written, and 1.0 applies",)
    with moqext.Checkpoint(tmp_path / "without") as made:
        assert (made.config.kv_cache_quant_algo, made.kv_scales()) == ("NVFP4", ())
    with moqext.Checkpoint(tmp_path / "with") as made:
        (record,) = made.kv_scales()
        assert record.values == {"k_scale": 1.0, "v_scale": float(np.float32(2) / np.float32(448))}


def test_scales_that_lack_a_linear_are_refused(rng, tmp_path):
    names = ("layers.0.mlp.up_proj", "layers.0.mlp.experts.3.up_proj", "layers.0.mlp.experts.4.down_proj")
    with write(tmp_path / "in", {f"{name}.weight": matrix(rng, 32, 32) for name in names}) as source:
        amax = {"layers.0.mlp.experts.gate_up_proj": 1.0}
        told = r"no amax of the activations of layers\.0\.mlp\.experts\.4\.down_proj and 1 more"
        with pytest.raises(moqext.CheckpointError, match=told):
            source.quantize(tmp_path / "out", to="FP8", scales=amax)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "scales.json"),
        ("[]", "scales.json"),
        ('{"amax": {}}', "is no file of activation scales"),
        ('{"format": "moqext-activations", "version": 2, "amax": {}}', "version: expected 1, found 2"),
        ('{"format": "moqext-activations", "version": 1, "amax": {"a": -1}}', "amax of a: .* got -1"),
        ('{"format": "moqext-activations", "version": 1, "amax": {"a": "1"}}', "amax of a: .* got '1'"),
        ('{"format": "moqext-activations", "version": 1, "amax": {"a": 1e39}}', "amax of a: .* got 1e"),
        ('{"format": "moqext-activations", "version": 1, "amax": {"a": true}}', "amax of a: .* got True"),
    ],
)
def test_files_that_are_no_scales(text, told, tmp_path):
    (tmp_path / "scales.json").write_text(text)
    with pytest.raises(moqext.CheckpointError, match=told):
        read_scales(tmp_path / "scales.json")


def test_query_key_and_value_of_bert_share_their_second_level(rng, tmp_path):
    parent = "encoder.layer.0.attention.self"
    names = [f"{parent}.{part}" for part in ("query", "key", "value")]
    tensors = {f"{name}.weight": matrix(rng, 32, 32) * (1 + place) for place, name in enumerate(names)}
    with write(tmp_path / "in", tensors, model_type="bert") as source:
        source.quantize(tmp_path / "out", to="NVFP4", scales=dict(zip(names, (1.0, 2.0, 3.0), strict=True)))
    with moqext.Checkpoint(tmp_path / "out") as made:
        for role in ("weight_scale_2", "input_scale"):
            assert len({float(made.tensor(f"{name}.{role}")) for name in names}) == 1


# A device


class There:
    """A tensor of a device that is none."""

    def __init__(self, array):
        self.array = np.asarray(array).copy()
        self.shape, self.dtype = self.array.shape, self.array.dtype.name


@pytest.fixture
def pretended(monkeypatch):
    """A device in memory of the host: what passes between the two is counted in bytes."""
    passed = []

    def to_device(x, device):
        passed.append(x.nbytes)
        return There(x)

    def to_host(there, out=None):
        if out is None:
            return there.array.copy()
        out[...] = there.array.view(out.dtype)
        return out

    def made(weight, algo, **options):
        if isinstance(weight, np.ndarray):
            return quantize_weight(weight, algo, **options)
        tensors = quantize_weight(weight.array, algo, **options)
        return {role: x if role == "weight_scale_2" else There(x) for role, x in tensors.items()}

    quantize_weight, weight_amax = quantizers.ops.quantize_weight, quantizers.weight_amax
    monkeypatch.setattr(
        quantizers, "ops", SimpleNamespace(to_device=to_device, to_host=to_host, quantize_weight=made)
    )
    monkeypatch.setattr(quantizers, "weight_amax", lambda there: weight_amax(there.array))
    monkeypatch.setattr("moqext._C.PinnedMemory", lambda nbytes, device: bytearray(nbytes))
    return passed


ON_DEVICE = [
    "exports/fp8_pb_wo_unaligned",
    "exports/fp8_pc_pt_bias",
    "exports/gpt_oss_mxfp8",
    "exports/llama4_fp8",
    "exports/llama4_nvfp4",
    "exports/mixed_three",
    "exports/qwen3moe_mixed",
]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.export in ON_DEVICE], ids=lambda case: case.export
)
def test_batches_of_a_device_are_written_as_pieces_of_the_host(case, tmp_path, monkeypatch, pretended):
    quantize(case, tmp_path)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(weights, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(quantizers, "PIECE_BYTES", 20 << 10)
    monkeypatch.setattr(quantizers, "BATCH_BYTES", 20 << 10)
    quantize(case, tmp_path, device="cuda:0", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected
    assert pretended
    assert max(pretended) <= 40 << 10  # a piece has 128 rows at least


def test_a_weight_is_on_its_way_to_a_device_by_parts_of_the_largest_tensor(rng, tmp_path, pretended):
    """The threads together hold no more than the largest tensor has bytes."""
    tensors = {f"layers.{number}.mlp.up_proj": matrix(rng, 4096, 512) for number in range(6)}
    tensors = {f"{name}.weight": values for name, values in tensors.items()}
    tensors["lm_head.weight"] = matrix(rng, 8192, 1024)
    largest = 2 * 8192 * 1024
    with write(tmp_path / "in", tensors) as source:
        source.quantize(tmp_path / "out", to="MXFP8", device="cuda:0")
    assert sum(pretended) == 2 * 6 * 4096 * 512
    assert max(pretended) * quantizers.WORKERS <= largest


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("algo", ["MXFP8", "W4A16_NVFP4"])
def test_infinite_weights_of_a_device_are_refused_by_name(value, algo, rng, tmp_path, pretended):
    tensors = {f"layers.{number}.up_proj.weight": matrix(rng, 256, 64) for number in range(9)}
    tensors["layers.5.up_proj.weight"][200, 3] = value
    with write(tmp_path / "in", tensors) as source:
        with pytest.raises(moqext.CheckpointError, match=r"layers\.5\.up_proj: a weight is infinite or NaN"):
            source.quantize(tmp_path / "out", to=algo, device="cuda:0")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["tpu", "cuda:x", ""])
def test_a_device_of_no_kind(device, rng, tmp_path):
    tensors = {"layers.0.up_proj.weight": matrix(rng, 256, 64)}
    with write(tmp_path / "in", tensors) as source, pytest.raises(ValueError, match="device: "):
        source.quantize(tmp_path / "out", to="MXFP8", device=device)


# Any sizes

SIZES = strategies.integers(1, 9).map(lambda groups: 32 * groups)
ROWS = strategies.integers(2, 300)
FAMILIES = {  # the container of experts, and gate, up and down of one
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    to=strategies.sampled_from(WRITTEN),
    family=strategies.sampled_from(sorted(FAMILIES)),
    hidden=SIZES,
    inner=SIZES,
    heads=strategies.tuples(ROWS, ROWS, ROWS),
    layers=strategies.integers(1, 3),
    experts=strategies.integers(0, 3),
    seed=strategies.integers(0, 2**32 - 1),
)
def test_whatever_is_written_is_read_back(
    to, family, hidden, inner, heads, layers, experts, seed, tmp_path_factory
):
    """Every linear has the algorithm that was asked for, and values that are near."""
    folder = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(seed)
    shapes = {f"self_attn.{part}_proj": (rows, hidden) for part, rows in zip("qkv", heads, strict=True)}
    container, (gate, up, down) = FAMILIES[family]
    for prefix in [f"{container}.{expert}" for expert in range(experts)] or ["mlp.dense"]:
        shapes |= {f"{prefix}.{gate}": (inner, hidden), f"{prefix}.{up}": (inner, hidden)}
        shapes[f"{prefix}.{down}"] = (hidden, inner)
    tensors = {
        f"model.layers.{layer}.{name}.weight": matrix(rng, *shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    with write(folder / "in", tensors, model_type=family, num_hidden_layers=layers) as source:
        source.quantize(folder / "out", to=to, scales="none")
    with moqext.Checkpoint(folder / "out") as made:
        assert [problem for problem in made.problems if problem.severity == "error"] == []
        for name, values in tensors.items():
            record = made.layer(name.removesuffix(".weight"))
            assert record.quant_algo == to
            weight = values.astype(ml_dtypes.bfloat16).astype(np.float32)
            error = np.linalg.norm(made.dequantize(record) - weight) / np.linalg.norm(weight)
            assert error < (0.06 if ALGORITHMS[to].codes == "e4m3" else 0.3)
