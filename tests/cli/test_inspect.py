"""`python -m moqext inspect`: its text, its JSON, its exit status, large input and broken input."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import moqext
from moqext.__main__ import main
from moqext.reader.advice import ADVICE
from moqext.reader.problems import CODES

from ..svd_files import write_svd, write_svd_experts
from ..work import HANGS, assert_linear


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


HALF = {
    "a shard is missing": "missing_shard",
    "all shards are missing": "missing_shard × 5",
    "a shard is cut": "unreadable_shard",
    "a shard is a pointer of Git LFS": "git lfs pull",
    "the index points to the wrong file": "missing_tensor × 4",
}


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
    assert len(out.splitlines()) < 35


@pytest.mark.parametrize("columns", [80, 200])
def test_every_export_fits_a_terminal_and_no_name_is_cut(inspect, data, monkeypatch, columns):
    monkeypatch.setattr("moqext.cli.text.width", lambda: columns)
    for directory in sorted((data / "exports").iterdir()):
        if directory.is_dir():
            status, out, _ = inspect(directory)
            assert status == 0
            assert max(map(len, out.splitlines())) <= columns, directory
            assert "…" not in out
            joined = "".join(line.strip() for line in out.splitlines())
            with moqext.Checkpoint(directory) as checkpoint:
                for layer in checkpoint.layers():
                    assert re.sub(r"\.[0-9]+\.", ".*.", layer.name) in re.sub(
                        r"\.{[0-9,-]+}\.", ".*.", joined
                    )


def test_a_pipe_has_no_width_that_a_name_could_be_cut_to(inspect, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "model." + "deeply." * 40 + "nested"
    tensors = {
        f"{name}.weight": ("F8_E4M3", [4, 4], bytes(16)),
        f"{name}.weight_scale": ("F32", [], struct.pack("<f", -1)),
        f"{name}_norm.weight": ("BF16", [4], bytes(8)),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for options in ([], ["--layers", "*"], ["--problems"]):
        _, out, _ = inspect(tmp_path, *options)
        assert row(out, f"{name}  ")[0] == name
        assert row(out, f"{name}_norm")[0] == f"{name}_norm.weight"
        assert f"    {name}: the value is negative" in out.splitlines()


def test_what_is_not_quantized_is_listed(inspect, data):
    _, out, _ = inspect(data / "exports" / "fp8_excluded")
    assert row(out, "not quantized") == ["not quantized", "type", "shape", "size"]
    assert row(out, "lm_head.weight") == ["lm_head.weight", "BF16", "32 × 32", "2.05 kB"]
    assert row(out, "model.layers.*.input_layernorm.weight")[1:] == ["× 12", "BF16", "32", "768 B"]
    # Some layers have this projection quantized: the numbers tell which have not.
    assert row(out, "model.layers.{0-1,3,10}.mlp.gate_proj.weight")[1:] == [
        "× 4",
        "BF16",
        "32 × 32",
        "8.19 kB",
    ]
    assert row(out, "all 49") == ["all 49", "44.6 kB"]
    report = json.loads(inspect(data / "exports" / "fp8_excluded", "--json")[1])
    assert len(report["unquantized"]) == 49
    assert {
        "name": "lm_head.weight",
        "dtype": "BF16",
        "shape": [32, 32],
        "bytes": 2048,
    } in report["unquantized"]
    listed = sum(tensor["bytes"] for tensor in report["unquantized"])
    assert listed + report["totals"]["quantized_bytes"] == report["totals"]["bytes"]


def test_what_is_not_quantized_is_selected_like_the_layers(inspect, data):
    _, out, _ = inspect(data / "exports" / "fp8_excluded", "--layers", "model.layers.0.*")
    assert "no quantized layer matches 'model.layers.0.*'" in out
    assert row(out, "model.layers.{0}.mlp.gate_proj.weight")[1] == "× 1"
    report = json.loads(inspect(data / "exports" / "fp8_excluded", "--layers", "lm_head", "--json")[1])
    assert [tensor["name"] for tensor in report["unquantized"]] == ["lm_head.weight"]


@pytest.mark.parametrize(
    "glob, meant",
    [
        ("model.layers.3.mlp.up_porj", "model.layers.3.mlp.up_proj"),
        ("model.layers.99.mlp.up_porj", "model.layers.*.mlp.up_proj"),
        ("*.qproj", "*.q_proj"),
        ("*.mlp.Gate_proj", "*.gate_proj"),
    ],
)
def test_a_misspelt_layer_is_named_as_it_is_spelled(inspect, data, glob, meant):
    _, out, _ = inspect(data / "exports" / "nvfp4_sharded", "--layers", glob)
    assert f"no quantized layer matches {glob!r}; did you mean {meant!r}?" in out
    assert row(inspect(data / "exports" / "nvfp4_sharded", "--layers", meant)[1], "layer")


def test_numbers_tell_the_formats_of_one_kind_apart(inspect, data):
    _, out, _ = inspect(data / "exports" / "mixed_three")
    assert row(out, "model.layers.{0}.mlp.up_proj")[2] == "W4A16_NVFP4 g16"
    assert row(out, "model.layers.{1}.mlp.up_proj")[2] == "FP8_PB_WO"
    assert row(out, "model.layers.*.self_attn.q_proj")[1] == "× 2"


def test_experts_cache_and_the_rest(inspect, data):
    _, out, _ = inspect(data / "exports" / "deepseek_nvfp4")
    assert re.search(r"mlp\.experts +× 1 +NVFP4 g16 +\d+ × \(\d+ × \d+\)", out)
    assert row(out, "model.embed_tokens.weight") == [
        "model.embed_tokens.weight",
        "BF16",
        "32 × 64",
        "4.10 kB",
    ]
    assert "KV cache: FP8, 2 attention modules" in out
    assert re.search(r"k_scale +× 2 +0\.\d+ to 0\.\d+", out)


def test_what_can_only_be_read_is_named(inspect, data, tmp_path, rng):
    svd = write_svd(tmp_path / "svd", rng)
    _, out, _ = inspect(svd)
    assert "not runnable" not in out
    _, out, _ = inspect(write_svd_experts(tmp_path / "experts", rng))
    assert "recognised, not runnable: experts (NVFP4_SVD)\n" in out
    _, out, _ = inspect(data / "exports" / "gpt_oss_nvfp4")
    assert "not runnable" not in out
    _, out, _ = inspect(data / "exports" / "fp8_embedding")
    assert "recognised, not runnable: embedding (FP8)\n" in out
    report = json.loads(inspect(svd, "--json")[1])
    assert report["totals"]["by_algo"]["NVFP4_SVD"]["runnable"] is True
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
    assert "and 5 more; --problems lists all" in out
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


def test_help_and_pages_agree_on_what_strict_means(capsys):
    """Notes fail as well: `--strict` of an export with nothing but a note ends 1, see test_strict."""
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    docs = Path(__file__).parents[2] / "docs"
    for text in (capsys.readouterr().out, *((docs / page).read_text() for page in ("cli.md", "problems.md"))):
        plain = " ".join(text.replace("`", "").split())
        said = [plain[found.end() :][:70] for found in re.finditer(r"--strict\b(?! or|,|\])", plain)]
        assert any("any problem, notes included" in sentence for sentence in said), said
        assert not any("error or warning" in sentence for sentence in said), said


@pytest.mark.parametrize("name", ["nvfp4_sharded", "gpt_oss_mxfp8", "mixtral_nvfp4", "fp8_bias_kvfp8"])
def test_json(inspect, data, name):
    status, out, err = inspect(data / "exports" / name, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert list(report) == [
        "schema",
        "directory",
        "producer",
        "architectures",
        "config",
        "totals",
        "layers",
        "kv_scales",
        "configured",
        "problems",
        "unquantized",
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
        "repair": "no",
        "advice": ADVICE["mixed_fused_formats"],
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


@pytest.mark.parametrize("how, says", HALF.items(), ids=HALF)
def test_half_a_checkpoint_fails(inspect, halved, how, says):
    directory = halved(how)
    status, out, _ = inspect(directory, "--fail-on", "error")
    assert status == 1
    assert says in out
    report = json.loads(inspect(directory, "--json")[1])
    assert "error" in {problem["severity"] for problem in report["problems"]}


def write_shards(directory, count):
    """A checkpoint of experts, 12 linears a file, eight files a layer."""
    weight, scale = ("U8", [16, 8], bytes(128)), ("F8_E4M3", [16, 1], b"\x38" * 16)
    second, inputs = ("F32", [], struct.pack("<f", 0.001)), ("F32", [], struct.pack("<f", 0.003))
    directory.mkdir()
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
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
        write_safetensors(directory / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
    }
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return directory


@pytest.mark.unsanitized  # measures time
def test_hundreds_of_shards_take_time_in_proportion(inspect, tmp_path):
    def read(count):
        directory = write_shards(tmp_path / str(count), count)
        return lambda: inspect(directory, "--fail-on", "warning")

    assert_linear(read, 16)
    status, out, _ = inspect(tmp_path / "256", "--fail-on", "warning")
    assert status == 0
    assert row(out, "model.layers.*.mlp.experts")[:4] == [
        "model.layers.*.mlp.experts",
        "× 32",
        "NVFP4 g16",
        "32 × (16 × 16)",
    ]
    assert "256 files, 12,288 tensors" in out
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
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=HANGS)
    assert b"NVFP4 g16" in done.stdout
    assert done.stderr == b""
