"""`verify`: every genuine checkpoint, and that a wrong layer makes it fail."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moqext.__main__ import main
from moqext.verify import LIMITS, compare

RUNNABLE = {
    "llama_fp8_kvfp8": ("FP8", 7),
    "llama_fp8_pc_pt": ("FP8_PER_CHANNEL_PER_TOKEN", 7),
    "llama_fp8_pb_wo": ("FP8_PB_WO", 7),
    "llama_nvfp4_kvfp8": ("NVFP4", 7),
    "llama_w4a16_nvfp4": ("W4A16_NVFP4", 7),
    "llama_w4a8_nvfp4_fp8": ("W4A8_NVFP4_FP8", 7),
    "qwen3moe_fp8": ("FP8", 4 + 4 * 3),
    "qwen3moe_nvfp4": ("NVFP4", 4 + 4 * 3),
}
RECOGNISED = {
    "llama_mxfp8": "MXFP8",
    "llama_w4a8_mxfp4_fp8": "W4A8_MXFP4_FP8",
    "llama_int4_awq": "W4A16_AWQ",
    "llama_w4a8_awq": "W4A8_AWQ",
    "llama_int8_sq": "W8A8_SQ_PER_CHANNEL",
}


def verify(capsys, directory, *options):
    status = main(["verify", str(directory), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", RUNNABLE)
def test_every_layer_of_a_runnable_algorithm_passes(data, capsys, case):
    algo, count = RUNNABLE[case]
    status, result = verify(capsys, data / "checkpoints" / case)
    assert status == 0, result
    assert [row["status"] for row in result["rows"]] == ["ok"] * count
    assert {row["quant_algo"] for row in result["rows"]} == {algo}
    for row in result["rows"]:
        assert row["kernel"].startswith("cpu:")
        assert 0 <= row["relative_error"] <= LIMITS["bfloat16"][0]
        assert row["run_seconds"] > 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4", "auto"])
def test_other_dtypes_and_computes(data, capsys, dtype, compute):
    directory = data / "checkpoints" / "llama_nvfp4_kvfp8"
    status, result = verify(capsys, directory, "--dtype", dtype, "--compute", compute, "--tokens", "40")
    assert status == 0, result
    assert len(result["rows"]) == 7


@pytest.mark.parametrize("case", RECOGNISED)
def test_other_algorithms_are_reported_as_recognised(data, capsys, case):
    status, result = verify(capsys, data / "checkpoints" / case)
    assert status == 2
    assert {row["quant_algo"] for row in result["rows"]} == {RECOGNISED[case]}
    for row in result["rows"]:
        assert row["status"] == "unsupported"
        assert "supported are FP8" in row["message"]


def test_all_thirteen_checkpoints_are_covered(data):
    names = {path.name for path in (data / "checkpoints").iterdir() if path.is_dir()}
    assert names == set(RUNNABLE) | set(RECOGNISED)


def test_every_export_passes_or_says_what_is_missing(data, capsys):
    directories = sorted(path for path in (data / "exports").iterdir() if path.is_dir())
    assert directories
    for directory in directories:
        status, result = verify(capsys, directory)
        rows = result["rows"]
        assert {row["status"] for row in rows} <= {"ok", "unsupported"}, directory
        assert status == (0 if any(row["status"] == "ok" for row in rows) else 2)
        for row in rows:
            runs = row["status"] == "ok"
            assert runs or "supported are FP8" in row["message"] or "a layer of kind" in row["message"], row


def test_a_damaged_layer_fails_and_is_named(data, tmp_path, capsys):
    directory = tmp_path / "damaged"
    shutil.copytree(data / "checkpoints" / "llama_fp8_kvfp8", directory)
    path = directory / "model.safetensors"
    blob = bytearray(path.read_bytes())
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    begin = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
    blob[8 + int.from_bytes(blob[:8], "little") + begin + 5] = 0x7F  # a NaN code
    path.write_bytes(blob)
    status, result = verify(capsys, directory)
    assert status == 1
    bad = [row for row in result["rows"] if row["status"] != "ok"]
    assert [row["layer"] for row in bad] == ["model.layers.0.mlp.up_proj"]
    assert "NaN code at row 0, column 5" in bad[0]["message"]


def test_a_wrong_kernel_would_fail(data, capsys, monkeypatch):
    """The comparison itself: one percent off in one layer is outside the limits."""
    from moqext.load import Layer

    run = Layer.__call__

    def off(self, x, *args):
        y = run(self, x, *args)
        if self.names[0].endswith("o_proj"):
            return (y.astype(np.float32) * 1.01).astype(y.dtype)
        return y

    monkeypatch.setattr(Layer, "__call__", off)
    status, result = verify(capsys, data / "checkpoints" / "llama_fp8_kvfp8", "--dtype", "float32")
    assert status == 1
    assert [row["layer"] for row in result["rows"] if row["status"] == "failed"] == [
        "model.layers.0.self_attn.o_proj"
    ]


def test_selection_seed_and_table(data, capsys):
    directory = str(data / "checkpoints" / "llama_fp8_kvfp8")
    assert main(["verify", directory, "--layers", "*.mlp.*", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["layer", "algorithm", "shape", "kernel"]
    assert len([line for line in lines if ".mlp." in line]) == 3
    assert "3 ok on cpu;" in text
    assert "seed 7" in text
    assert main(["verify", directory, "--layers", "nothing"]) == 2
    output = capsys.readouterr()
    assert "no quantized linear matches 'nothing'; 7 do not, as model.layers.0.mlp.down_proj" in output.err
    assert not output.out


def test_bad_arguments(data, tmp_path, capsys):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    for option, value, message in (
        ("--tokens", "0", "expected a positive number"),
        ("--tokens", "many", "expected a positive number of at most 1000000, got 'many'"),
        ("--tokens", "99999999999", "expected a positive number of at most 1000000"),
        ("--seed", "-1", "expected a number from 0"),
        ("--device", "tpu", 'expected "cpu", "cuda:N" or "auto", got \'tpu\''),
        ("--device", "cuda:x", "got 'cuda:x'"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["verify", str(tmp_path), f"{option}={value}"])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    status, result = verify(capsys, data / "checkpoints" / "llama_fp8_kvfp8", "--device", "cuda:7")
    assert status == 2
    assert "on cuda:7" in result["rows"][0]["message"]


def test_comparison_counts_what_it_should():
    expected = np.array([[1.0, -4.0], [0.0, 0.0]])
    assert compare(expected.astype(np.float32), expected) == (0.0, 0.0)
    relative, largest = compare(np.array([[1.0, -3.0], [0.0, 0.0]], np.float32), expected)
    assert relative == pytest.approx(1 / np.sqrt(17))
    assert largest == pytest.approx(0.25)
    nan = np.array([[np.nan, -4.0], [0.0, 0.0]], np.float32)
    assert compare(nan, expected) == (np.inf, np.inf)


def test_nothing_to_verify_is_told_in_one_line(data, tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "no checkpoint: neither" in capsys.readouterr().err
    shutil.copy(data / "checkpoints" / "llama_bf16.safetensors", tmp_path / "model.safetensors")
    assert main(["verify", str(tmp_path)]) == 2
    assert "nothing to run: no linear is quantized" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(data / "checkpoints" / "llama_fp8_kvfp8" / "hf_quant_config.json", tmp_path)
    assert main(["verify", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert "nothing to run: the directory has no safetensors files" in output.err
    assert not output.out


def test_interruption_is_no_traceback(data, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("moqext.verify.verify_layer", interrupt)
    assert main(["verify", str(data / "checkpoints" / "llama_fp8_kvfp8")]) == 130
    assert capsys.readouterr().err == "moqext: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["info"], ["verify", "DIR"], ["inspect", "DIR", "--json"]])
def test_a_full_disk_is_told_in_one_line(data, command):
    directory = str(data / "checkpoints" / "llama_fp8_kvfp8")
    arguments = [directory if word == "DIR" else word for word in command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moqext", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("moqext: error: ")
    assert done.stderr.count("\n") == 1
