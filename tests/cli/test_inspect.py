"""`python -m moqext inspect`: its text, its JSON, its exit status, large input and broken input."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time

import pytest

import moqext
from moqext.__main__ import main
from moqext.cli import text
from moqext.naming import number_ranges
from moqext.problems import CODES


@pytest.fixture
def inspect(capsys, monkeypatch):
    """Runs the command in this process: exit status, standard output, standard error."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments):
        status = main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def export(data, tmp_path):
    """A copy of a genuine checkpoint, to be changed."""

    def copy(name):
        target = tmp_path / name
        shutil.copytree(data / "exports" / name, target)
        return target

    return copy


def change_quantization(directory, **changes):
    """Changes hf_quant_config.json, and takes the inline configuration away."""
    path = directory / "hf_quant_config.json"
    document = json.loads(path.read_text())
    document["quantization"].update(changes)
    path.write_text(json.dumps(document))
    path = directory / "config.json"
    document = json.loads(path.read_text())
    document.pop("quantization_config", None)
    path.write_text(json.dumps(document))


def write_safetensors(path, tensors):
    """Writes name -> (type, shape, bytes)."""
    header, begin = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(content)]}
        begin += len(content)
    encoded = json.dumps(header).encode()
    body = b"".join(content for _, _, content in tensors.values())
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


def row(out, start):
    """The cells of the line that starts with a name."""
    (line,) = [line for line in out.splitlines() if line.strip().startswith(start)]
    return re.split(r" {2,}", line.strip())


def test_layers_are_grouped_by_kind(inspect, data):
    status, out, err = inspect(data / "exports" / "nvfp4_sharded")
    assert (status, err) == (0, "")
    assert row(out, "model.layers.*.mlp.down_proj") == [
        "model.layers.*.mlp.down_proj",
        "× 11",
        "NVFP4 g16",
        "32 × 32",
        "6.42 kB",
        "4.56",
    ]
    assert "5 files, 342 tensors" in out
    assert row(out, "all 77")[0] == "all 77"
    assert "KV cache: not quantized" in out
    assert out.endswith("Problems: none\n")
    assert len(out.splitlines()) < 20


def test_every_export_fits_a_terminal(inspect, data):
    for directory in sorted((data / "exports").iterdir()):
        if directory.is_dir():
            status, out, _ = inspect(directory)
            assert status == 0
            header, *lines = out.splitlines()
            assert header == str(directory)
            assert max(map(len, lines)) <= 100, directory


def test_numbers_tell_the_formats_of_one_kind_apart(inspect, data):
    _, out, _ = inspect(data / "exports" / "mixed_three")
    assert row(out, "model.layers.{0}.mlp.up_proj")[2] == "W4A16_NVFP4 g16"
    assert row(out, "model.layers.{1}.mlp.up_proj")[2] == "FP8_PB_WO"
    assert row(out, "model.layers.*.self_attn.q_proj")[1] == "× 2"


def test_experts_cache_and_the_rest(inspect, data):
    _, out, _ = inspect(data / "exports" / "deepseek_nvfp4")
    assert re.search(r"mlp\.experts +× 1 +NVFP4 g16 +\d+ × \(\d+ × \d+\)", out)
    assert re.search(r"not quantized: .* BF16", out)
    assert "KV cache: FP8, 2 attention modules" in out
    assert re.search(r"k_scale +× 2 +0\.\d+ to 0\.\d+", out)


def test_what_can_only_be_read_is_named(inspect, data):
    _, out, _ = inspect(data / "exports" / "mxfp8")
    assert "recognised, not runnable: MXFP8" in out
    report = json.loads(inspect(data / "exports" / "mxfp8", "--json")[1])
    assert report["totals"]["by_algo"]["MXFP8"]["runnable"] is False
    _, out, _ = inspect(data / "exports" / "mixed_three")
    assert "not runnable" not in out
    report = json.loads(inspect(data / "exports" / "mixed_three", "--json")[1])
    assert {algo: row["runnable"] for algo, row in report["totals"]["by_algo"].items()} == {
        "FP8": True,
        "FP8_PB_WO": True,
        "W4A16_NVFP4": True,
    }


def test_problems_by_code(inspect, data):
    _, out, _ = inspect(data / "exports" / "fp8_uncalibrated")
    assert "Problems: 7 notes" in out
    assert "note     missing_input_scale × 7" in out
    assert "and 5 more" in out
    _, every, _ = inspect(data / "exports" / "fp8_uncalibrated", "--problems")
    assert every.count("FP8 without input_scale") == 7
    assert "more" not in every


def test_layers_option_lists_layers_and_members(inspect, data):
    _, out, _ = inspect(data / "exports" / "mixtral_nvfp4", "--layers", "*.experts")
    assert row(out, "model.layers.0.block_sparse_moe.experts")[1] == "NVFP4 g16"
    _, out, _ = inspect(data / "exports" / "mixtral_nvfp4", "--layers", "*.experts.0.w[13]")
    listed = [line.split()[0] for line in out.splitlines() if ".experts." in line]
    assert [name.rpartition(".")[2] for name in listed] == ["w1", "w3"]
    _, out, _ = inspect(data / "exports" / "mixtral_nvfp4", "--layers", "nothing")
    assert "no quantized layer matches" in out


def test_strict(inspect, data, export):
    assert inspect(data / "exports" / "nvfp4_sharded", "--strict")[0] == 0
    assert inspect(data / "exports" / "fp8_uncalibrated", "--strict")[0] == 1, "a note"
    assert inspect(data / "exports" / "fp8_uncalibrated", "--fail-on", "note")[0] == 1
    assert inspect(data / "exports" / "fp8_uncalibrated", "--fail-on", "warning")[0] == 0
    assert inspect(data / "exports" / "mixed_in_qkv", "--fail-on", "warning")[0] == 1
    assert inspect(data / "exports" / "mixed_in_qkv", "--fail-on", "error")[0] == 0
    assert inspect(data / "exports" / "mixed_in_qkv")[0] == 0
    assert inspect(data / "exports" / "mixed_in_qkv", "--strict")[0] == 1, "a warning"
    assert inspect(data / "exports" / "mixed_in_qkv", "--strict", "--json")[0] == 1
    broken = export("nvfp4_sharded")
    (broken / "model-00003-of-00005.safetensors").unlink()
    status, out, _ = inspect(broken, "--strict")
    assert status == 1
    assert "missing_shard" in out


@pytest.mark.parametrize("name", ["nvfp4_sharded", "gpt_oss_mxfp8", "mixtral_nvfp4", "fp8_bias_kvfp8"])
def test_json(inspect, data, name):
    status, out, err = inspect(data / "exports" / name, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert list(report) == [
        "schema",
        "directory",
        "architectures",
        "config",
        "totals",
        "layers",
        "kv_scales",
        "configured",
        "problems",
    ]
    assert report["schema"] == 1
    with moqext.Checkpoint(data / "exports" / name) as checkpoint:
        layers = checkpoint.layers()
        assert [layer["name"] for layer in report["layers"]] == [layer.name for layer in layers]
        for shown, layer in zip(report["layers"], layers, strict=True):
            assert shown["shape"] == list(layer.shape)
            assert shown["tensors"] == dict(layer.tensors)
            assert len(shown.get("members", ())) == len(layer.members)
            assert [p["block_axis"] for p in shown.get("projections", ())] == [
                p.block_axis for p in layer.projections
            ]
        assert report["totals"]["bytes"] == sum(info.end - info.begin for info in checkpoint.tensors.values())
        assert [kv["name"] for kv in report["kv_scales"]] == [kv.name for kv in checkpoint.kv_scales()]
    assert report["config"]["producer"] == {"name": "modelopt", "version": "0.47.0"}
    assert report["totals"]["quantized_bytes"] == sum(layer["bytes"] for layer in report["layers"])


def test_json_of_problems_and_of_some_layers(inspect, data):
    _, out, _ = inspect(data / "exports" / "mixed_in_qkv", "--json", "--layers", "*.q_proj")
    report = json.loads(out)
    assert [layer["name"] for layer in report["layers"]] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert report["problems"][0] == {
        "code": "mixed_fused_formats",
        "severity": CODES["mixed_fused_formats"].severity,
        "layer": "model.layers.0.self_attn",
        "tensor": None,
        "message": report["problems"][0]["message"],
    }


def test_conflicts_are_shown(inspect, export):
    directory = export("fp8_kvcast")
    path = directory / "hf_quant_config.json"
    document = json.loads(path.read_text())
    document["quantization"]["exclude_modules"] = ["lm_head", "model.embed_tokens", "vision"]
    path.write_text(json.dumps(document))
    _, out, _ = inspect(directory)
    assert "warning  config_conflict" in out
    _, out, _ = inspect(directory, "--json")
    (conflict,) = json.loads(out)["config"]["conflicts"]
    assert conflict["chosen_file"] == "config.json"
    assert conflict["other_file"] == "hf_quant_config.json"


def only_json(directory):
    for path in directory.glob("*.safetensors"):
        path.unlink()


def test_index_without_weights(inspect, export):
    directory = export("nvfp4_sharded")
    only_json(directory)
    status, out, _ = inspect(directory)
    assert status == 0
    assert row(out, "model.layers.*.mlp.up_proj") == ["model.layers.*.mlp.up_proj", "× 11", "NVFP4"]
    report = json.loads(inspect(directory, "--json")[1])
    assert report["layers"] == []
    assert len(report["configured"]) == 77
    assert set(report["configured"].values()) == {"NVFP4"}


def test_configuration_alone(inspect, export, data, tmp_path):
    directory = export("mixed_three")
    only_json(directory)
    status, out, _ = inspect(directory, "--fail-on", "warning")
    assert status == 0
    assert row(out, "model.layers.*.self_attn.q_proj") == ["model.layers.*.self_attn.q_proj", "× 2", "FP8"]
    assert "no weights" in out


@pytest.mark.parametrize("which", ["DeepSeek-V3.1-NVFP4", "MiniMax-M2.5-NVFP4", "Llama-3.1-70B-Instruct-FP8"])
def test_published_configurations(inspect, data, tmp_path, which):
    shutil.copy(data / "configs" / f"nvidia__{which}.json", tmp_path / "hf_quant_config.json")
    status, out, err = inspect(tmp_path)
    assert (status, err) == (0, "")
    assert "every other linear" in out
    assert "lm_head" in out
    assert max(map(len, out.splitlines()[1:])) <= 100


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: shutil.rmtree(d),
        lambda d: [path.unlink() for path in list(d.iterdir())],
        lambda d: (d / "model.safetensors").write_bytes(b"\0" * 4),
        lambda d: (d / "config.json").write_text("{"),
        lambda d: change_quantization(d, quant_algo="FP9"),
    ],
    ids=["no directory", "empty", "truncated", "no JSON", "unknown algorithm"],
)
def test_what_cannot_be_read_is_told_in_one_line(inspect, export, spoil):
    directory = export("fp8_kvcast")
    spoil(directory)
    status, out, err = inspect(directory)
    assert (status, out) == (2, "")
    assert err.startswith("moqext: error: ")
    assert err.count("\n") == 1


def test_arguments(inspect, capsys):
    with pytest.raises(SystemExit) as stopped:
        inspect()
    assert stopped.value.code == 2
    assert "directory" in capsys.readouterr().err


@pytest.mark.unsanitized
def test_a_thousand_shards_in_seconds(inspect, tmp_path):
    """12,000 linears of 125 groups of experts in 1,000 files."""
    weight, scale = ("U8", [16, 8], bytes(128)), ("F8_E4M3", [16, 1], b"\x38" * 16)
    second, inputs = ("F32", [], struct.pack("<f", 0.001)), ("F32", [], struct.pack("<f", 0.003))
    weight_map = {}
    for shard in range(1000):
        file = f"model-{shard + 1:05d}-of-01000.safetensors"
        tensors = {}
        for expert in range(4):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                base = f"model.layers.{shard // 8}.mlp.experts.{4 * (shard % 8) + expert}.{projection}"
                tensors |= {
                    f"{base}.weight": weight,
                    f"{base}.weight_scale": scale,
                    f"{base}.weight_scale_2": second,
                    f"{base}.input_scale": inputs,
                }
        write_safetensors(tmp_path / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    start = time.process_time()
    status, out, _ = inspect(tmp_path, "--fail-on", "warning")
    assert time.process_time() - start < 10
    assert status == 0
    assert row(out, "model.layers.*.mlp.experts")[:4] == [
        "model.layers.*.mlp.experts",
        "× 125",
        "NVFP4 g16",
        "32 × (16 × 16)",
    ]
    assert "1,000 files, 48,000 tensors" in out
    assert len(out) < 1000


def test_as_a_program_cut_off_by_its_reader(data):
    """`inspect | head -1` ends without a traceback."""
    command = [sys.executable, "-m", "moqext", "inspect", str(data / "exports" / "fp8_excluded"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        process.wait(60)


def test_names_from_the_file_cannot_command_the_terminal(inspect, tmp_path):
    tensors = {
        f"a\x1b[2J\n.{role}": ("F32", [], struct.pack("<f", 1)) for role in ("weight_scale", "input_scale")
    }
    tensors["a\x1b[2J\n.weight"] = ("F8_E4M3", [4, 4], bytes(16))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    status, out, _ = inspect(tmp_path)
    assert status == 0
    assert "\x1b" not in out
    assert r"a\x1b[2J\n" in out
    assert json.loads(inspect(tmp_path, "--json")[1])["layers"][0]["name"] == "a\x1b[2J\n"


def test_json_has_no_numbers_that_json_has_not(inspect, tmp_path):
    scale = ("F32", [], struct.pack("<f", float("nan")))
    names = ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale")
    write_safetensors(tmp_path / "model.safetensors", dict.fromkeys(names, scale))
    _, out, _ = inspect(tmp_path, "--json")

    def refuse(constant):
        raise AssertionError(constant)

    report = json.loads(out, parse_constant=refuse)
    assert report["kv_scales"][0]["values"] == {"k_scale": None, "v_scale": None}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_locale(data, encoding):
    command = [sys.executable, "-m", "moqext", "inspect", str(data / "exports" / "mixtral_nvfp4")]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert b"NVFP4 g16" in done.stdout
    assert done.stderr == b""


def test_sizes():
    assert [
        text.size(n) for n in (0, 1, 999, 1000, 1004, 9996, 12_345, 999_499, 999_500, 10**12, 10**16)
    ] == [
        "0 B",
        "1 B",
        "999 B",
        "1.00 kB",
        "1.00 kB",
        "10.0 kB",
        "12.3 kB",
        "999 kB",
        "1.00 MB",
        "1.00 TB",
        "10000 TB",
    ]


def test_ranges():
    assert number_ranges([]) == ""
    assert number_ranges([3]) == "3"
    assert number_ranges([5, 1, 2, 3, 9, 8]) == "1-3,5,8-9"


def test_long_names_are_shortened_at_their_beginning():
    lines = text.table([("a" * 80 + ".tail", "x")], "<<", 40)
    assert len(lines[0]) <= 40
    assert lines[0].endswith(".tail  x")
    assert "…" in lines[0]
