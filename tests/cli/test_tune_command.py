"""`tune`: every shape of a checkpoint is timed once, what is found is written as it comes, and read again."""

import json

import pytest

import moqext
from moqext.__main__ import main
from moqext.cli import timed_layers, tune
from moqext.layers import tuning

from ..svd_files import QKV, write_svd


@pytest.fixture
def path(tmp_path, monkeypatch):
    file = tmp_path / "tune.json"
    monkeypatch.setenv("MOQEXT_TUNE", str(file))
    return file


def run(data, name, *options):
    return main(["tune", str(data / name), "--device", "cpu", *options])


def test_a_table_a_shape(data, path, capsys):
    assert run(data, "checkpoints/llama_w4a16_nvfp4", "--tokens", "1,3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" shapes on the CPU, bfloat16")
    assert lines[2] == "W4A16_NVFP4, 128 × 256: model.layers.0.mlp.down_proj"
    assert lines[3].split() == ["tokens", "kernel", "time", "gain", "chosen", "without"]
    assert [line.split()[0] for line in lines[4:6]] == ["1", "3"]
    assert lines[4].split()[1].startswith("cpu:")
    assert lines[4].split()[4].endswith("×")
    fused = "W4A16_NVFP4, 128+64+64 × 128: model.layers.0.self_attn.q_proj + "
    assert any(line.startswith(fused) for line in lines)
    assert lines[-1] == f"written to {path}"


def test_layers_of_the_checkpoint_find_it(data, path, capsys):
    name = "checkpoints/qwen3moe_fp8"
    assert run(data, name, "--tokens", "3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["file"], told["device"]) == (1, str(path), "cpu")
    with moqext.Checkpoint(data / name) as checkpoint:
        found = [record for record in checkpoint.layers() if record.kind in ("linear", "moe")]
        assert {record.kind for record in found} == {"linear", "moe"}
        for record in found:
            assert "chosen, tuned" in checkpoint.load(record).explain(3), record.name
            assert "tuned" not in checkpoint.load(record).explain(4)
        qkv = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
        assert "tuned" in checkpoint.load(qkv).explain(3)
    for layer in told["layers"]:
        for row in layer["rows"]:
            assert row.keys() == set(timed_layers.Row._fields)
    keys = [layer["layer"] for layer in told["layers"]]
    assert len(keys) == len(set(keys))
    assert not told["refused"]


@pytest.mark.parametrize("name", ["mxfp8", "int4_awq", "w4a8_awq", "int8_sq", "w4a8_mxfp4_fp8", "fp8_pc_pt"])
def test_every_format_has_times(data, path, capsys, name):
    assert run(data, f"checkpoints/llama_{name}", "--tokens", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["layers"]) >= 4
    assert not told["refused"]


def test_low_rank_layers_have_times(tmp_path, rng, path, capsys):
    write_svd(tmp_path / "svd", rng, layers=QKV)
    assert run(tmp_path, "svd", "--tokens", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["layers"]) == 2  # one alone, and all as one
    assert not told["refused"]


def test_what_does_not_run_is_named(data, path, capsys):
    assert run(data, "exports/w4a16_nvfp4", "--compute", "fp4") == 2
    assert "W4A16_NVFP4" in capsys.readouterr().err
    assert not path.exists()


def test_ctrl_c_loses_one_shape(data, path, capsys, monkeypatch):
    timed = []

    def time_layer(method, *about):
        if timed:
            raise KeyboardInterrupt
        timed.append(method)
        return timed_layers.time_layer(method, *about)

    monkeypatch.setattr(tune, "time_layer", time_layer)
    assert run(data, "checkpoints/llama_w4a16_nvfp4", "--tokens", "1") == 130
    assert f"interrupted after 1 of 6 shapes, which are in {path}" in capsys.readouterr().err
    assert type(timed[0])("W4A16_NVFP4", 256, [128]).explain(1).count("tuned") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "cuda:77"), "cuda:77: no such CUDA device"),
        (("--tokens", ",".join(map(str, range(1, 66)))), "at most 64 numbers"),
    ],
)
def test_wrong_arguments(data, path, capsys, options, message):
    assert run(data, "checkpoints/llama_w4a16_nvfp4", *options) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_cache_is_refused_before_anything_is_timed(data, tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text("{}")
    monkeypatch.setattr(tune, "time_layer", None)
    assert run(data, "checkpoints/llama_w4a16_nvfp4", "--output", str(config)) == 2
    assert "is no cache of moqext tune" in capsys.readouterr().err
    assert config.read_text() == "{}"


def test_output_goes_before_the_variable(data, tmp_path, path, capsys):
    own = tmp_path / "made" / "own.json"
    assert run(data, "checkpoints/llama_w4a16_nvfp4", "--tokens", "1", "--output", str(own)) == 0
    assert not path.exists()
    assert tuning.read(own)["devices"]


def test_without_a_cache_there_is_nothing_to_write_to(data, capsys):
    assert run(data, "checkpoints/llama_w4a16_nvfp4") == 2
    assert "MOQEXT_TUNE=0 and no --output" in capsys.readouterr().err
