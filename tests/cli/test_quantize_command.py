"""`quantize`: what it prints and its exit status; what is written is tests/test_quantize.py's."""

import json
import re

import pytest

import moqext
from moqext.__main__ import main
from moqext.tools.quantize.scales import write_scales

from ..quantize_files import CASES, cache_amax, input_amax, unquantized
from ..work import each

CASE = next(case for case in CASES if case.export == "exports/mixed_fp8_nvfp4")
WEIGHT_ONLY = next(case for case in CASES if case.export == "exports/w4a16_nvfp4")


@pytest.fixture
def source(tmp_path):
    return str(unquantized(WEIGHT_ONLY, tmp_path / "in"))


def test_it_says_what_it_wrote(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert (
        main(["quantize", source, out, "--to", "w4a16_nvfp4", "--exclude", "*.q_proj", "--exclude", "*.x"])
        == 0
    )
    told, err = capsys.readouterr()
    lines = told.splitlines()
    assert re.fullmatch(rf"{out}: 1 file, 24 tensors, \S+ kB, 6 weights W4A16_NVFP4", lines[0])
    assert re.fullmatch(r"\S+ kB read and \S+ kB written in .+, .+B/s read", lines[1])
    assert lines[2] == "'*.x' fits no linear"
    assert lines[3].startswith("model.layers.0.self_attn: linears that engines fuse")
    assert err == ""


def test_json_rules_and_a_file_of_scales(tmp_path, capsys):
    source = str(unquantized(CASE, tmp_path / "in"))
    write_scales(tmp_path / "scales.json", input_amax(CASE) | cache_amax(CASE))
    rules = [argument for rule in CASE.rules for argument in ("--rule", rule)]
    arguments = ["quantize", source, str(tmp_path / "out"), *rules, "--scales", str(tmp_path / "scales.json")]
    assert main([*arguments, "--kv-cache", "fp8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["quantized"] == {"FP8": 4, "NVFP4": 6}
    with moqext.Checkpoint(tmp_path / "out") as made:
        assert made.config.kv_cache_quant_algo == "FP8"
        assert made.kv_scales()
        assert report["bytes_written"] == sum(info.nbytes for info in made.tensors.values())


def test_quiet_says_nothing(source, tmp_path, capsys):
    assert main(["quantize", source, str(tmp_path / "out"), "--to", "MXFP8", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@each("device", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there(device, source, tmp_path, capsys, monkeypatch):
    def none():
        raise RuntimeError("no CUDA device: the driver reports none")

    monkeypatch.setattr("moqext._C.cuda_devices", none)
    assert main(["quantize", source, str(tmp_path / "out"), "--to", "MXFP8", "--device", device]) == 2
    told = f"moqext: error: --device {device}: no such CUDA device: no CUDA device: the driver reports none\n"
    assert capsys.readouterr().err == told
    assert not (tmp_path / "out").exists()


@each(
    "arguments, told",
    [
        ([], "to: expected an algorithm, or a rule with one, of FP8, .*MXFP8"),
        (["--rule", "*.mlp.* none"], "to: expected an algorithm, or a rule with one"),
        (["--to", "NVFP5"], "to: expected one of FP8, .* got 'NVFP5'"),
        (["--to", "INT4_AWQ"], "to: expected one of FP8, .* got 'INT4_AWQ'"),
        (["--rule", "NVFP4"], "rule: expected a pattern and an algorithm, .* got 'NVFP4'"),
        (["--rule", "* FP9"], "rule: expected one of FP8, .* got 'FP9'"),
        (
            ["--to", "FP8"],
            r"FP8 wants scales of activations: moqext_transformers\.calibrate .* --scales none",
        ),
        (["--to", "FP8", "--scales", "nowhere.json"], "nowhere.json: cannot be read|nowhere.json"),
        (["--to", "MXFP8", "--scale-search", "mse"], "scale_search: mse is for FP8_PER.* none of these"),
        (["--to", "MXFP8", "--exclude", "*"], "no linear to quantize is left"),
        (["--rule", "*nowhere* FP8"], r"no linear to quantize is left; '\*nowhere\*.*' fits no linear"),
    ],
)
def test_what_is_refused_is_one_line_and_status_2(arguments, told, source, tmp_path, capsys):
    assert main(["quantize", source, str(tmp_path / "out"), *arguments]) == 2
    err = capsys.readouterr().err
    assert re.search(told, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
