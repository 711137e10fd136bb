"""`bench DIR`: each layer of a pass once, sums that follow from the rows, and sizes of config.json alone."""

import json
import sys

import numpy as np
import pytest

from moqext import Checkpoint
from moqext.__main__ import main
from moqext.cli.timed_layers import model_layers
from moqext.tools import bench, bench_layers
from moqext.tools.bench_layers import LayerRow, ModelLayer, Times, passes, time_layers

QUICK = ("--tokens", "1,3", "--seconds", "0.001", "--rotate", "1", "--threads", "1")
QKV = " + ".join(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
QWEN = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
    "hidden_act": "silu",
}


@pytest.fixture
def without_torch(monkeypatch):
    """None in place of a module makes an import fail as if it were not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def sized(tmp_path):
    """Writes a directory with config.json alone, in the format of a published configuration file."""

    def write(config, **quantization):
        about = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], **quantization}
        text = json.dumps({"producer": {"name": "modelopt", "version": "0.46.0"}, "quantization": about})
        (tmp_path / "hf_quant_config.json").write_text(text)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def run_json(capsys, directory, *options):
    assert main(["bench", str(directory), *QUICK, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def methods_of(directory):
    with Checkpoint(directory) as checkpoint:
        layers, refused = model_layers(checkpoint, device="cpu", compute="exact")
    assert not refused
    return {layer.names[0]: (len(layer.names), layer.method) for layer in layers}


def test_sums_follow_from_the_rows(data, capsys, without_torch):
    told = run_json(capsys, data / "exports/mixed_three", "--seed", "5")
    assert (told["schema"], told["seed"], told["device"]) == (1, 5, "cpu")
    assert [each["tokens"] for each in told["passes"]] == [1, 3]
    for each in told["passes"]:
        rows = [row for row in told["layers"] if row["tokens"] == each["tokens"]]
        assert each["seconds"] == pytest.approx(sum(len(row["names"]) * row["seconds"] for row in rows))
        assert each["tokens_per_second"] == pytest.approx(each["tokens"] / each["seconds"])
        assert each["torch_ratio"] is each["torch_seconds"] is None
        assert all(row["seconds"] > 0 and row["kernel"].startswith("cpu:") for row in rows)


@pytest.mark.parametrize(
    "name", ["checkpoints/llama_nvfp4_kvfp8", "exports/mixed_in_qkv", "exports/deepseek_nvfp4"]
)
def test_every_layer_is_in_a_pass_once(data, name):
    with Checkpoint(data / name) as checkpoint:
        layers, refused = model_layers(checkpoint, device="cpu", compute="exact")
        names = [part for layer in layers for each in layer.names for part in each.split(" + ")]
        assert sorted([*names, *refused]) == sorted(record.name for record in checkpoint.layers())


def test_fused_layers_of_fp8_have_one_activation_scale(data):
    _, method = methods_of(data / "checkpoints/llama_fp8_kvfp8")[QKV]
    assert method.one_input_scale
    assert len(method.out_partitions) == 3


def test_experts_and_torch(data, capsys):
    pytest.importorskip("torch")
    told = run_json(capsys, data / "checkpoints/qwen3moe_nvfp4")
    experts = [row for row in told["layers"] if len(row["shape"]) == 3]
    assert [(row["shape"], row["tokens"]) for row in experts] == [([4, 128, 64], 1), ([4, 128, 64], 3)]
    for each in told["passes"]:
        rows = [row for row in told["layers"] if row["tokens"] == each["tokens"]]
        spent = sum(len(row["names"]) * row["torch_seconds"] for row in rows)
        assert each["torch_seconds"] == pytest.approx(spent)
        assert each["torch_ratio"] == pytest.approx(spent / each["seconds"])
    assert {weight["name"] for weight in told["unquantized"]} == {
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
    }


def test_experts_of_torch_are_those_of_moqext(rng):
    """The layer that is timed computes one: its outputs are those of a loop over tokens and experts."""
    torch = pytest.importorskip("torch")
    bench_torch = pytest.importorskip("moqext.tools.bench_torch")
    from moqext import MoEMethod

    method = MoEMethod("NVFP4", 8, 64, 48, top_k=2)
    contestant = bench_torch.torch_experts(torch, method, rng, 1)
    if contestant is None:
        pytest.skip("torch has no grouped product")
    values = rng.standard_normal((5, 64)).astype(np.float32)
    x = contestant.activations(values)
    _, w13, w2 = contestant.weights[1]
    expected = torch.zeros(5, 64)
    for token in range(5):
        for expert in x.ids[1 % len(x.ids)][token]:
            gate, up = (w13[expert].float() @ x.x[token].float()).chunk(2)
            expected[token] += 0.5 * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    y = contestant.call(x, contestant.weights[1]).float()
    assert (y - expected).norm() <= 0.02 * expected.norm()


def test_turns_meet_all_experts_alike(rng):
    from moqext import MoEMethod

    method = MoEMethod("NVFP4", 8, 64, 48, top_k=2)
    turns = bench.turns_of(method, 2)
    assert np.bincount(np.concatenate([turn.ravel() for turn in turns])).tolist() == 8 * [1]
    assert np.bincount(bench.turns_of(method, 16)[0].ravel()).tolist() == 8 * [4]
    for tokens in range(1, 6):
        for turn in bench.turns_of(method, tokens):
            assert all(len(set(ids)) == method.top_k for ids in turn.tolist())
    assert len(bench.turns_of(method, 1)) == 4


def test_a_turn_has_as_many_experts_as_tokens_of_chance():
    from moqext import MoEMethod

    method = MoEMethod("NVFP4", 128, 64, 48, top_k=8)
    rng = np.random.default_rng(0)
    drawn = [np.argsort(rng.random((16, 128)), 1)[:, :8] for _ in range(400)]
    mean = np.mean([len(np.unique(ids)) for ids in drawn])
    active = {len(np.unique(ids)) for ids in bench.turns_of(method, 16)}
    assert active == {82}
    assert abs(mean - 82.4) < 3


def test_table(data, capsys, without_torch):
    assert main(["bench", str(data / "checkpoints/qwen3moe_nvfp4"), *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "qwen3moe_nvfp4 on the CPU, 1 thread, bfloat16, random weights; seed " + lines[0].split()[-1]
    )
    assert lines[2] == "1 token"
    assert lines[3].split() == ["layers", "algorithm", "shape", "kernel", "time", "a", "pass"]
    assert lines[4].split()[:2] == ["model.layers.*.mlp.experts", "NVFP4"]
    assert lines[5].startswith("  model.layers.*.self_attn.q_proj + k_proj + v_proj")
    assert lines[7].startswith("  a pass of 1 token: ")
    assert lines[7].endswith(" tokens/s")
    assert lines[-1].startswith("not counted, since not quantized: lm_head.weight, 16.4 kB; ")


def test_a_layer_that_does_not_run_is_told(data, capsys, without_torch):
    assert main(["bench", str(data / "exports/fp8_embedding"), *QUICK]) == 0
    capsys.readouterr()
    assert main(["bench", str(data / "exports/w4a16_nvfp4"), *QUICK, "--compute", "fp4"]) == 2
    assert "W4A16_NVFP4" in capsys.readouterr().err


def test_busy_devices_are_told(data, capsys, monkeypatch, without_torch):
    told = run_json(capsys, data / "checkpoints/llama_nvfp4_kvfp8")
    assert told["calibration"].keys() == {"share", "spread"}
    assert bench_layers.doubt(0.2, "a layer") == ""
    assert bench_layers.doubt(0.4, "a layer").startswith("repeats of a layer lie 40% apart")


# ---- config.json alone ----


def test_sizes_of_config_json(sized):
    found = methods_of(sized(LLAMA))
    assert {
        name: (count, tuple(method.out_partitions), method.in_features)
        for name, (count, method) in found.items()
    } == {
        QKV: (2, (64, 32, 32), 64),
        "model.layers.0.self_attn.o_proj": (2, (64,), 64),
        "model.layers.0.mlp.gate_proj + model.layers.0.mlp.up_proj": (2, (96, 96), 64),
        "model.layers.0.mlp.down_proj": (2, (64,), 96),
    }
    assert all(method.one_input_scale is False for _, method in found.values())


def test_sizes_of_experts(sized, capsys, without_torch):
    directory = sized(QWEN)
    found = methods_of(directory)
    count, experts = found["model.layers.0.mlp.experts"]
    assert (count, experts.num_experts, experts.hidden_size, experts.intermediate_size) == (1, 8, 64, 48)
    assert (experts.top_k, experts.activation) == (2, "silu")
    assert found[QKV][1].out_partitions == (128, 64, 64)
    assert "model.layers.1.mlp.down_proj" in found
    assert main(["bench", str(directory), *QUICK]) == 0
    assert "random weights, sizes of config.json; seed" in capsys.readouterr().out


def test_formats_of_config_json_decide(sized):
    quantized = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.self_attn.k_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.gate_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.up_proj": {"quant_algo": "FP8"},
    }
    found = methods_of(sized(LLAMA, quant_algo="MIXED_PRECISION", quantized_layers=quantized))
    assert {name: method.quant_algo for name, (_, method) in found.items()} == {
        "model.layers.0.self_attn.q_proj": "FP8",
        "model.layers.0.self_attn.k_proj": "NVFP4",
        "model.layers.1.mlp.gate_proj + model.layers.1.mlp.up_proj": "FP8",
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "deepseek_v3"}, "not 'deepseek_v3': get the files, or name the model as org/name"),
        ({"hidden_size": None}, "hidden_size: expected a number from 1 to 16777216"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads: expected a number"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: expected a number from 1 to 10000"),
    ],
)
def test_sizes_that_do_not_follow(sized, capsys, changed, message):
    assert main(["bench", str(sized(LLAMA | changed)), *QUICK]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


# ---- arguments and sums ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shapes", "16x16"), "--shapes: not with DIR: its layers have shapes"),
        (("--algos", "FP8"), "--algos: not with DIR: its layers have formats"),
        (("--plot", "x.svg"), "--plot: not with DIR"),
        (("--device", "cuda:77"), "--device cuda:77: no such CUDA device"),
    ],
)
def test_options_that_say_nothing_of_a_checkpoint(data, capsys, options, message):
    assert main(["bench", str(data / "checkpoints/llama_nvfp4_kvfp8"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--threads", "1"), ("--seconds", "1"), ("--rotate", "1")])
def test_options_that_say_nothing_of_a_device(capsys, monkeypatch, option):
    monkeypatch.setattr("moqext.cli.bench.choose_device", lambda wanted: ("cuda:0", " (a GPU)"))
    assert main(["bench", "--device", "cuda", *option]) == 2
    assert f"{option[0]}: not on a device" in capsys.readouterr().err


def row(tokens, seconds, torch, names=("a",)):
    return LayerRow(names, "FP8", (8, 8), tokens, "cpu:portable", seconds, 0.0, torch)


def test_a_pass_without_torch_for_one_layer_has_no_torch():
    sums = passes([row(1, 1.0, 2.0, ("a", "b")), row(4, 2.0, 5.0), row(1, 0.5, None), row(4, 2.0, 3.0)])
    assert [(each.tokens, each.seconds, each.tokens_per_second) for each in sums] == [
        (1, 2.5, 0.4),
        (4, 4.0, 1.0),
    ]
    assert [each.torch_ratio for each in sums] == [None, 2.0]
    assert [each.torch_tokens_per_second for each in sums] == [None, 0.5]


def test_each_description_is_timed_once(sized):
    asked = []

    def timer(method, counts):
        asked.append(method)
        for count in counts:
            yield Times(count, "cpu:portable", [3.0, 2.0, 4.0], [])

    with Checkpoint(sized(LLAMA)) as checkpoint:
        layers, _ = model_layers(checkpoint, device="cpu", compute="exact")
    done = []
    rows = time_layers(layers, [1, 2], timer, lambda *about: done.append(about))
    assert len(asked) == len(layers) == 4
    assert [about[:2] for about in done] == [(number, 4) for number in range(4)]
    assert [(each.tokens, each.seconds, each.spread) for each in rows] == 4 * [(1, 3.0, 1.0), (2, 3.0, 1.0)]
    assert isinstance(layers[0], ModelLayer)
