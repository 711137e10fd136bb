"""`verify`: every genuine checkpoint, and that a wrong layer makes it fail."""

import io
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moqext import Checkpoint, reference
from moqext.__main__ import main
from moqext.tools import verify as moqext_verify
from moqext.tools.verify_row import CALLS, LIMITS, compare, errors_of

from ..svd_files import write_svd, write_svd_experts

RUNNABLE = {
    "llama_fp8_kvfp8": ("FP8", 7),
    "llama_fp8_pc_pt": ("FP8_PER_CHANNEL_PER_TOKEN", 7),
    "llama_fp8_pb_wo": ("FP8_PB_WO", 7),
    "llama_nvfp4_kvfp8": ("NVFP4", 7),
    "llama_w4a16_nvfp4": ("W4A16_NVFP4", 7),
    "llama_w4a8_nvfp4_fp8": ("W4A8_NVFP4_FP8", 7),
    "llama_mxfp8": ("MXFP8", 7),
    "llama_int4_awq": ("W4A16_AWQ", 7),
    "llama_w4a8_awq": ("W4A8_AWQ", 7),
    "llama_int8_sq": ("W8A8_SQ_PER_CHANNEL", 7),
    "llama_w4a8_mxfp4_fp8": ("W4A8_MXFP4_FP8", 7),
    "qwen3moe_fp8": ("FP8", 4 + 1),
    "qwen3moe_nvfp4": ("NVFP4", 4 + 1),
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
        assert 2**-11 < row["rounding_error"] < 2**-8  # half a step of bfloat16 is 2^-9 to 2^-8 of a value
        assert row["rounding_error"] <= row["exact_error"] + 2**-24
        assert row["exact_error"] <= row["rounding_error"] + row["relative_error"] * (1 + 2**-8) + 2**-24
        assert row["run_seconds"] > 0
        assert 1 <= row["calls"] <= CALLS


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4", "auto"])
def test_other_dtypes_and_computes(data, capsys, dtype, compute):
    directory = data / "checkpoints" / "llama_nvfp4_kvfp8"
    status, result = verify(capsys, directory, "--dtype", dtype, "--compute", compute, "--tokens", "40")
    assert status == 0, result
    assert len(result["rows"]) == 7


def test_low_rank_pairs_are_part_of_what_runs(tmp_path, rng, capsys):
    """Experts that have them run one by one, as the linears that they are."""
    for directory, rows in (
        (write_svd(tmp_path / "svd", rng), 1),
        (write_svd_experts(tmp_path / "experts", rng), 9),
    ):
        status, result = verify(capsys, directory)
        assert (status, len(result["rows"])) == (0, rows), result
        assert {row["status"] for row in result["rows"]} == {"ok"}


def test_what_does_not_run_is_reported_as_recognised(data, capsys):
    """A healthy export in an algorithm that a compute does not have: nothing is wrong, and nothing ran."""
    options = (data / "exports" / "w4a16_nvfp4", "--compute", "fp4")
    status, result = verify(capsys, *options)
    assert status == 0
    assert result["good"] is True
    assert {row["status"] for row in result["rows"]} == {"read"}
    assert all("runs with compute" in row["message"] for row in result["rows"])
    totals, layers = result["totals"], len(result["rows"])
    assert totals["ran"] == {"layers": 0, "weights": 0, "share": 0.0}
    assert totals["read"] == {"layers": layers, "weights": totals["weights"], "share": 1.0}
    assert main(["verify", *map(str, options)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"quantized weights: 0 % ran, 100 % could only be read ({layers} layers), 0 % refused" in lines
    assert lines[-1] == "result: nothing is wrong, but nothing could be run"


def test_all_thirteen_checkpoints_are_covered(data):
    names = {path.name for path in (data / "checkpoints").iterdir() if path.is_dir()}
    assert names == set(RUNNABLE)


def test_every_export_passes_or_says_what_is_missing(data, capsys):
    directories = sorted(path for path in (data / "exports").iterdir() if path.is_dir())
    assert directories
    for directory in directories:
        status, result = verify(capsys, directory)
        rows = result["rows"]
        assert {row["status"] for row in rows} <= {"ok", "read"}, directory
        assert status == 0
        for row in rows:
            said = {"linear": "supported are FP8", "embedding": "looked up"}
            said |= {"stacked experts": "lie along its output"}
            assert row["status"] == "ok" or said[row["kind"]] in row["message"], row
        totals = result["totals"]
        assert totals["ran"]["weights"] + totals["read"]["weights"] == totals["weights"]
        assert totals["ran"]["share"] + totals["read"]["share"] == pytest.approx(1)
        assert totals["layers"] == len(rows)
        with Checkpoint(directory) as checkpoint:
            assert totals["weights"] == sum(layer.weights for layer in checkpoint.layers())


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
    assert bad[0]["message"].startswith("weight: a NaN code at row 0, column 5")


def test_the_kernel_is_the_one_of_the_tokens_that_ran(data, capsys, monkeypatch):
    """Not the one that would have run a single token."""
    from moqext.layers.load import Layer

    monkeypatch.setattr(Layer, "backend_for", lambda self, tokens: f"cpu:of_{tokens}")
    _, result = verify(capsys, data / "checkpoints" / "llama_fp8_kvfp8", "--tokens", "5")
    assert {row["kernel"] for row in result["rows"]} == {"cpu:of_5"}


def test_a_wrong_kernel_would_fail(data, capsys, monkeypatch):
    """The comparison itself: one percent off in one layer is outside the limits."""
    from moqext.layers.load import Layer

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
    for line in lines:  # both errors are there, and neither is the zero of a comparison with the rounded
        assert "0.00e+00" not in line
    assert "seed 7" in text
    assert main(["verify", directory, "--layers", "nothing"]) == 2
    output = capsys.readouterr()
    assert "no quantized layer matches 'nothing'; 7 do not, as model.layers.0.mlp.down_proj" in output.err
    assert not output.out
    assert main(["verify", directory, "--layers", "model.layers.0.mlp.up_porj"]) == 2
    assert "did you mean 'model.layers.0.mlp.up_proj'?" in capsys.readouterr().err
    assert main(["verify", directory, "--layers", "lm_head"]) == 2
    assert "no quantized layer matches 'lm_head'; not quantized: lm_head.weight" in capsys.readouterr().err


def test_bad_arguments(data, tmp_path, capsys):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    for option, value, message in (
        ("--tokens", "0", "expected tokens from 1 to 1000000"),
        ("--tokens", "many", "expected tokens from 1 to 1000000, got 'many'"),
        ("--tokens", "99999999999", "expected tokens from 1 to 1000000"),
        ("--seed", "-1", "expected a seed from 0"),
        ("--device", "tpu", 'expected "cpu", "cuda:N" or "auto", got \'tpu\''),
        ("--device", "cuda:x", "got 'cuda:x'"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["verify", str(tmp_path), f"{option}={value}"])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "device, devices, says",
    [
        ("cuda", RuntimeError("no driver"), "no such CUDA device: no driver"),
        ("cuda:7", RuntimeError("no driver"), "no such CUDA device: no driver"),
        ("cuda", [], "no such CUDA device: there is none"),
        ("cuda:1", ["A"], "no such CUDA device: there is cuda:0"),
        ("cuda:7", ["A", "B"], "no such CUDA device: there are cuda:0, cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch, device, devices, says
):
    def listed():
        if isinstance(devices, Exception):
            raise devices
        return [{"index": index, "name": name} for index, name in enumerate(devices)]

    monkeypatch.setattr("moqext._C.cuda_devices", listed)
    monkeypatch.setattr("moqext.cli.verify.open_checkpoint", lambda args: pytest.fail("it was opened"))
    assert main(["verify", str(tmp_path), "--device", device]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"moqext: error: --device {device}: {says}\n"


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    "name, says",
    [
        ("", "expected a directory, got an empty name"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "`hf download nvidia/Llama-3.1-8B-Instruct-FP8"),
        ("model/config.json", "not a directory but a file; give the directory that it lies in, model"),
        ("model/model.safetensors", "model.safetensors: 0 bytes: an empty file"),
        ("cache", "no checkpoint: .*; give the snapshot below it, cache/snapshots/f00d"),
        ("pointers", "model.safetensors: a Git LFS pointer, not the file itself; run `git lfs pull`"),
        ("page", "config.json: .*an HTML page"),
    ],
)
def test_what_is_no_checkpoint_is_told_in_one_line(tmp_path, capsys, monkeypatch, command, name, says):
    # huggingface_hub is not installed
    monkeypatch.setattr("moqext.reader.files.hub.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for directory in ("model", "cache/snapshots/f00d", "pointers", "page"):
        Path(directory).mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        Path("model", file).touch()
    Path("pointers/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 7\n")
    Path("page/config.json").write_text("<!DOCTYPE html><html></html>")
    assert main([command, name]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("moqext: error: ")
    assert re.search(says, output.err)
    assert output.err.count("\n") == 1


def test_comparison_counts_what_it_should():
    expected = np.array([[1.0, -4.0], [0.0, 0.0]])
    assert compare(expected.astype(np.float32), expected) == (0.0, 0.0)
    relative, largest = compare(np.array([[1.0, -3.0], [0.0, 0.0]], np.float32), expected)
    assert relative == pytest.approx(1 / np.sqrt(17))
    assert largest == pytest.approx(0.25)
    nan = np.array([[np.nan, -4.0], [0.0, 0.0]], np.float32)
    assert compare(nan, expected) == (np.inf, np.inf)


def test_errors_before_and_after_rounding():
    """The error of exact outputs is that of the rounding alone; others have more."""
    exact = np.array([[1 + 2**-9, -3.0]])  # halfway between 1 and the number of bfloat16 after it
    rounded = np.array([[1.0, -3.0]], np.float32)
    once = 2**-9 / np.linalg.norm(exact)
    assert errors_of(rounded, exact, "bfloat16") == pytest.approx((once, once))
    found, rounding = errors_of(np.array([[1.0, -3.25]], np.float32), exact, "bfloat16")
    assert rounding == pytest.approx(once)
    assert found == pytest.approx(np.hypot(2**-9, 0.25) / np.linalg.norm(exact))


def test_nothing_to_verify_is_told_in_one_line(data, tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "no checkpoint: neither" in capsys.readouterr().err
    shutil.copy(data / "checkpoints" / "llama_bf16.safetensors", tmp_path / "model.safetensors")
    for given in (tmp_path, tmp_path / "model.safetensors"):
        assert main(["verify", str(given)]) == 2
        assert f"{given}: nothing to verify: no layer is quantized" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(data / "checkpoints" / "llama_fp8_kvfp8" / "hf_quant_config.json", tmp_path)
    assert main(["verify", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert "nothing to verify: the directory has no safetensors files" in output.err
    assert not output.out


HALF = [
    "a shard is missing",
    "all shards are missing",
    "a shard is cut",
    "a shard is a pointer of Git LFS",
    "the index points to the wrong file",
]


@pytest.mark.parametrize("how", HALF)
def test_half_a_checkpoint_is_never_called_right(halved, capsys, how):
    directory = halved(how)
    status, result = verify(capsys, directory)
    assert (status, result["good"]) == (1, False)
    errors = [problem for problem in result["problems"] if problem["severity"] == "error"]
    assert errors
    whole = how == HALF[-1]  # then the tensors are there, in another file
    assert whole or result["totals"]["missing"]["layers"] == (77 if how == "all shards are missing" else 22)
    assert main(["verify", str(directory)]) == 1
    out = capsys.readouterr().out
    for problem in errors:
        assert f"  error    {problem['code']}" in out
        assert problem["message"] in out
    assert whole or "; layers that the index names and no file has: " in out
    assert "\nresult: " in out
    assert "all right" not in out
    # A layer that is asked for may be there in full; the checkpoint is still half a one.
    assert verify(capsys, directory, "--layers", "model.layers.*.mlp.down_proj")[0] == 1


def test_every_error_of_the_checkpoint_is_reported(copied, overwrite, capsys):
    """Errors of what never runs: cache scales, tensors without a weight; layers that run are right."""
    directory = copied("checkpoints/llama_fp8_kvfp8")
    overwrite(directory, "model.layers.0.self_attn.k_proj.k_scale", struct.pack("<f", -1))
    overwrite(directory, "model.layers.0.self_attn.v_proj.v_scale", struct.pack("<f", float("nan")))
    status, result = verify(capsys, directory)
    assert status == 1
    assert {row["status"] for row in result["rows"]} == {"ok"}
    errors = [(p["code"], p["layer"]) for p in result["problems"] if p["severity"] == "error"]
    assert sorted(errors) == [
        ("scale_negative", "model.layers.0.self_attn"),
        ("scale_not_finite", "model.layers.0.self_attn"),
    ]
    assert main(["verify", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "Problems: 2 errors" in out
    assert "    model.layers.0.self_attn: the value is negative" in out
    assert "    model.layers.0.self_attn: the value is NaN or infinite" in out
    assert out.endswith("result: 2 errors of the checkpoint\n")


def test_errors_without_any_quantized_layer_are_problems_not_wrong_usage(tmp_path, capsys):
    content = struct.pack("<f", 0.5)
    header = json.dumps({"a.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
    status, result = verify(capsys, tmp_path)
    assert status == 1
    assert [problem["code"] for problem in result["problems"]] == ["missing_weight"]
    assert result["rows"] == []
    assert result["totals"]["ran"]["share"] is None
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("result: 1 error of the checkpoint\n")


def test_warnings_and_notes_are_counted_and_nothing_is_wrong(data, capsys):
    assert main(["verify", str(data / "exports" / "mixed_in_qkv")]) == 0
    out = capsys.readouterr().out
    assert "Problems: 2 warnings; `inspect` shows those that are no errors" in out
    assert out.endswith("result: all right\n")


@pytest.mark.parametrize(
    "case, tensor, content, says",
    [
        ("exports/fp8_embedding", "model.embed_tokens.weight", b"\x7f", "1 of 2,048 weights are NaN"),
        (
            "exports/gpt_oss_mxfp8",
            "model.layers.0.mlp.experts.down_proj",
            b"\xff",
            "1 of 3,072 weights are NaN",
        ),
    ],
    ids=["embedding", "stacked experts"],
)
def test_what_is_only_read_has_to_be_finite(copied, overwrite, capsys, case, tensor, content, says):
    directory = copied(case)
    overwrite(directory, tensor, content, offset=7)
    status, result = verify(capsys, directory)
    assert status == 1
    (bad,) = [row for row in result["rows"] if row["status"] not in ("ok", "read")]
    assert bad["layer"] == tensor.removesuffix(".weight")
    assert bad["status"] == "failed"
    assert bad["message"].startswith(says)


@pytest.mark.parametrize("case", ["exports/gpt_oss_mxfp8", "exports/fp8_embedding"])
def test_what_is_only_read_is_compared_with_the_reference(data, capsys, monkeypatch, case):
    """A native dequantizer that is off by one bit in one weight is found out."""
    from moqext import ops

    right = ops.dequantize

    def off(*args, **kwargs):
        values = right(*args, **kwargs)
        values.reshape(-1)[3] = np.nextafter(values.reshape(-1)[3], np.float32(np.inf))
        return values

    monkeypatch.setattr(ops, "dequantize", off)
    status, result = verify(capsys, data / case)
    assert status == 1
    for row in result["rows"]:
        if row["status"] != "ok":
            assert row["status"] == "failed"
            assert row["message"].endswith("weights are not what the reference reads")


@pytest.mark.parametrize(
    "algo", ["W4A16_AWQ", "W8A16", "MXFP8", "MXFP4", "NVFP4_SVD", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"]
)
def test_large_weights_are_read_in_pieces(tmp_path, rng, capsys, monkeypatch, algo):
    """A large weight is read in pieces of some rows, whatever its packing."""
    monkeypatch.setattr("moqext.tools.verify.ROWS_AT_ONCE", 128)
    weight = rng.standard_normal((320, 128)).astype(np.float32)
    params = reference.quantize_weight(weight, algo)
    dtypes = {"W8A16": "I8", **dict.fromkeys(("MXFP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"), "F8_E4M3")}
    scales = {"NVFP4_SVD": "F8_E4M3", "MXFP8": "U8", "MXFP4": "U8"}
    spelled = {
        "weight": dtypes.get(algo, "U8"),
        "weight_scale": scales.get(algo, "F32"),
        "weight_scale_2": "F32",
    }
    tensors = {f"a.{role}": (spelled[role], tensor) for role, tensor in params.items()}
    if algo == "NVFP4_SVD":
        tensors["a.svdquant_lora_a"] = ("F32", np.ones((4, 128), np.float32))
        tensors["a.svdquant_lora_b"] = ("F32", np.ones((320, 4), np.float32))
    header, begin = {}, 0
    for name, (dtype, tensor) in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    body = b"".join(tensor.tobytes() for _, tensor in tensors.values())
    (tmp_path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    # Compute "fp4" is for NVFP4: others are only read.
    status, result = verify(capsys, tmp_path, "--compute", "fp4")
    (row,) = result["rows"]
    how = "ok" if algo == "NVFP4_SVD" else "read"
    assert (status, row["status"], row["shape"]) == (0, how, [320, 128]), result
    assert row["quant_algo"] == algo


def test_what_stands_against_stacked_experts_stands_against_each_projection(copied, overwrite, capsys):
    directory = copied("exports/gpt_oss_nvfp4")
    down = "model.layers.0.mlp.experts.down_proj"
    overwrite(directory, f"{down}_weight_scale_2", struct.pack("<f", float("inf")))
    status, result = verify(capsys, directory)
    assert status == 1
    states = {row["layer"]: row["status"] for row in result["rows"] if row["group"]}
    assert states == {down: "error", down.replace("down", "gate_up"): "read"}
    refused = result["totals"]["refused"]
    assert (refused["layers"], refused["weights"]) == (1, 4 * 64 * 48)
    assert f"{refused['share']:.3f}" == f"{4 * 64 * 48 / result['totals']['weights']:.3f}"


def test_experts_share_a_row_and_the_worst_are_named(data, capsys, monkeypatch):
    """Linears of one container, by their names: one row, and below it the ten with the largest errors."""
    from moqext.layers.load import Layer

    run = Layer.__call__
    directory = str(data / "checkpoints" / "qwen3moe_nvfp4")

    def off(self, x, *args):
        y = run(self, x, *args)
        if ".experts." in self.names[0]:
            expert, projection = self.names[0].split(".")[-2:]
            worse = 10 * int(expert) + ["gate_proj", "up_proj", "down_proj"].index(projection) + 1
            y = (y * np.float32(1 + 1e-7 * worse * (1e5 if expert == "3" else 1))).astype(y.dtype)
        return y

    monkeypatch.setattr(Layer, "__call__", off)
    assert main(["verify", directory, "--layers", "*.experts.*", "--dtype", "float32"]) == 1
    out = capsys.readouterr().out
    table, worst, *_ = out.split("\n\n")
    (row,) = [line for line in table.splitlines() if ".experts" in line]
    assert re.match(r"model\.layers\.0\.mlp\.experts × 12  NVFP4 ", row)
    assert " !" in row
    names = [line.split()[0].split("experts.")[1] for line in worst.splitlines()[1:]]
    assert names[:4] == ["3.down_proj", "3.up_proj", "3.gate_proj", "2.down_proj"]
    assert len(names) == 10
    assert [line.endswith("failed") for line in worst.splitlines()[1:]] == [True] * 3 + [False] * 7
    assert "failed: limits are 1e-05 and 1e-05" in out
    assert out.endswith("result: 3 wrong layers\n")
    _, result = verify(capsys, directory, "--layers", "*.experts.*", "--dtype", "float32")
    assert len([row for row in result["rows"] if row["group"] == "model.layers.0.mlp.experts"]) == 12


def test_layers_selects_containers_of_experts(data, capsys):
    directory = data / "checkpoints" / "qwen3moe_nvfp4"
    assert len(verify(capsys, directory, "--layers", "*.experts")[1]["rows"]) == 1
    assert len(verify(capsys, directory, "--layers", "*.experts.2.*")[1]["rows"]) == 3
    stacked = data / "exports" / "gpt_oss_nvfp4"
    assert len(verify(capsys, stacked, "--layers", "*.experts")[1]["rows"]) == 1
    rows = verify(capsys, stacked, "--layers", "*.experts.*")[1]["rows"]
    assert [(row["kind"], row["status"]) for row in rows] == [("stacked experts", "read")] * 2
    assert {row["message"] for row in rows} == {"stacked experts run together, as their container"}


@pytest.fixture
def clock(monkeypatch):
    """Sets how long each call of a layer takes, in seconds, by the clock that verify looks at."""
    from moqext.layers.load import Layer

    run = Layer.__call__
    now = [0.0]

    def set_times(*seconds):
        durations = iter(seconds)

        def call(self, x, *args):
            now[0] += next(durations)
            return run(self, x, *args)

        monkeypatch.setattr(Layer, "__call__", call)
        for module in ("verify", "verify_row"):
            monkeypatch.setattr(f"moqext.tools.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))

    return set_times


def test_the_time_is_the_median_of_several_calls(data, capsys, clock):
    """The first calls may be slow, where a library starts its threads."""
    directory = data / "checkpoints" / "llama_fp8_kvfp8"
    clock(0.05, 0.03, 0.001, 0.002, 0.003)
    (row,) = verify(capsys, directory, "--layers", "*.q_proj")[1]["rows"]
    assert row["calls"] == 5
    assert row["run_seconds"] == pytest.approx(0.003)
    clock(0.05, 0.03, 0.001, 0.002, 0.003)
    assert main(["verify", str(directory), "--layers", "*.q_proj"]) == 0
    out = capsys.readouterr().out
    assert " 3.00 ms\n" in out
    assert "; time: median of 5 calls; seed " in out


def test_slow_layers_are_called_less_often(data, capsys, clock):
    directory = data / "checkpoints" / "llama_fp8_kvfp8"
    clock(0.15, 0.17, 1000.0, 0.001, 0.001, 0.001, 0.001, 0.001)
    rows = verify(capsys, directory, "--layers", "*.self_attn.[kov]_proj")[1]["rows"]
    assert [row["calls"] for row in rows] == [2, 1, 5]
    assert rows[0]["run_seconds"] == pytest.approx(0.16)
    clock(0.15, 0.17, 1000.0, 0.001, 0.001, 0.001, 0.001, 0.001)
    assert main(["verify", str(directory), "--layers", "*.self_attn.[kov]_proj"]) == 0
    assert "; time: median of 1 to 5 calls; seed " in capsys.readouterr().out


def test_what_is_not_quantized_is_listed(data, capsys):
    directory = data / "exports" / "fp8_excluded"
    _, result = verify(capsys, directory)
    with Checkpoint(directory) as checkpoint:
        assert len(result["unquantized"]) == 49
        for tensor in result["unquantized"]:
            info = checkpoint.tensors[tensor["name"]]
            assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == (
                info.dtype,
                list(info.shape),
                info.nbytes,
            )
    assert main(["verify", str(directory)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["not", "quantized", "type", "shape", "size"] in lines
    assert ["lm_head.weight", "BF16", "32", "×", "32", "2.05", "kB"] in lines
    _, result = verify(capsys, directory, "--layers", "model.layers.3.*")
    assert {tensor["name"].split(".")[2] for tensor in result["unquantized"]} == {"3"}


def test_json_keys(data, capsys):
    """The keys of the documentation, in its order."""
    _, result = verify(capsys, data / "checkpoints" / "llama_fp8_kvfp8", "--seed", "1")
    assert list(result) == [
        "schema",
        "directory",
        "seed",
        "tokens",
        "device",
        "dtype",
        "compute",
        "good",
        "totals",
        "rows",
        "problems",
        "unquantized",
    ]
    assert result["schema"] == 3
    assert list(result["totals"]) == ["layers", "weights", "ran", "read", "failed", "refused", "missing"]
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for key in (*result, *result["totals"], *result["rows"][0]):
        assert f"`{key}`" in page, key


def test_interruption_is_no_traceback(data, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("moqext.tools.verify.verify_layer", interrupt)
    assert main(["verify", str(data / "checkpoints" / "llama_fp8_kvfp8")]) == 130
    assert capsys.readouterr().err == "moqext: interrupted\n"


def after(rows, then, monkeypatch):
    """Calls something instead of the row that comes after so many."""
    verified = []

    def verify_layer(*args, **kwargs):
        if len(verified) == rows:
            then()
        verified.append(args)
        return real(*args, **kwargs)

    real = moqext_verify.verify_layer
    monkeypatch.setattr(moqext_verify, "verify_layer", verify_layer)


def interrupt():
    raise KeyboardInterrupt


def test_rows_are_printed_as_they_come(data, monkeypatch):
    """Nothing was written to a pipe before the last layer was done."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    seen = []
    after(2, lambda: seen.extend(written.getvalue().decode().splitlines()), monkeypatch)
    assert main(["verify", str(data / "checkpoints" / "llama_fp8_kvfp8")]) == 0
    assert [line.split()[0] for line in seen if line.startswith("model.")] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
    ]
    assert seen[0].startswith("layer ")
    assert "against those of an independent float64 reference, before any rounding" in seen[1]


def test_an_interrupted_run_keeps_its_rows(data, capsys, monkeypatch):
    after(2, interrupt, monkeypatch)
    assert main(["verify", str(data / "checkpoints" / "llama_fp8_kvfp8")]) == 130
    out, err = capsys.readouterr()
    assert err == "moqext: interrupted after 2 of 7 layers\n"
    assert len([line for line in out.splitlines() if line.startswith("model.layers.0.mlp.")]) == 2
    assert "2 ok on cpu" in out
    assert out.endswith("result: interrupted after 2 of 7 layers\n")


def test_an_interrupted_run_keeps_its_rows_as_json(data, capsys, monkeypatch):
    after(2, interrupt, monkeypatch)
    assert main(["verify", str(data / "checkpoints" / "llama_fp8_kvfp8"), "--json"]) == 130
    result = json.loads(capsys.readouterr().out)
    assert len(result["rows"]) == 2
    assert (result["good"], result["interrupted"]) == (False, "after 2 of 7 layers")


def test_experts_of_an_unfinished_container_are_printed(data, capsys, monkeypatch):
    after(3, interrupt, monkeypatch)
    assert main(["verify", str(data / "checkpoints" / "qwen3moe_nvfp4"), "--layers", "*.experts.*"]) == 130
    assert "mlp.experts × 3 " in capsys.readouterr().out


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
