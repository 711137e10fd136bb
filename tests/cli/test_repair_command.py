"""`repair`: what it prints and its exit status; what is written is tests/test_repair.py's."""

import json

import pytest

import moqext
from moqext.__main__ import main

from ..damaged import Damaged

NVFP4 = "checkpoints/llama_nvfp4_kvfp8"
K, V = (f"model.layers.0.self_attn.{each}_proj" for each in "kv")


@pytest.fixture
def source(data, tmp_path):
    model = Damaged(data / NVFP4)
    model.rename(f"{K}.k_scale", "model.layers.0.self_attn.kv_scale")
    del model.tensors[f"{V}.v_scale"]
    model.exclude(K)
    return model.save(tmp_path / "in")


@pytest.fixture
def hopeless(data, tmp_path):
    model = Damaged(data / NVFP4)
    model.rename(f"{K}.k_scale", f"{K}.output_scale")
    del model.tensors[f"{V}.weight_scale"]
    return model.save(tmp_path / "hopeless")


REPORT = f"""\
old_kv_scale_name
    model.layers.0.self_attn.kv_scale: written as {K}.k_scale and {V}.v_scale
  excluded_but_quantized
    {K}: '{K}' excluded it, and makes way for names
"""


def test_it_tells_every_change(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["repair", str(source), str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert printed.startswith(f"Repaired: 2 changes\n  {REPORT}{out}: 1 file, 35 tensors, ")
    assert moqext.Checkpoint(out).problems == ()


def test_without_a_target_it_only_tells(source, tmp_path, capsys):
    assert main(["repair", str(source)]) == 0
    assert capsys.readouterr().out == f"To repair: 2 changes\n  {REPORT}"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_nothing_to_repair(data, tmp_path, capsys):
    assert main(["repair", str(data / NVFP4), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out == f"{data / NVFP4}: nothing to repair\n"
    mixed = data / "exports" / "mixed_in_qkv"
    assert main(["repair", str(mixed), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.startswith(f"{mixed}: nothing to repair\nLeft: 2 problems\n")
    assert not (tmp_path / "out").exists()


def test_an_error_that_stays_is_told_with_what_could_be_mended(hopeless, tmp_path, capsys):
    assert main(["repair", str(hopeless), str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("To repair: 1 change\n  old_kv_scale_name\n")
    assert "Left: 1 problem\n  error    missing_scale\n" in out
    assert err == "moqext: error: 1 error cannot be repaired; nothing is written\n"
    assert not (tmp_path / "out").exists()


def test_json(source, hopeless, tmp_path, capsys):
    assert main(["repair", str(source), str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert [change["code"] for change in report["changes"]] == ["old_kv_scale_name", "excluded_but_quantized"]
    assert report["left"] == []
    assert report["written"]["tensors"] == 35
    assert report["written"]["directory"] == str(tmp_path / "out")
    assert main(["repair", str(hopeless), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["written"] is None
    assert [(each["code"], each["reason"]) for each in report["left"]] == [("missing_scale", "")]


def test_a_target_with_files_is_refused(source, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert main(["repair", str(source), str(out), "--quiet"]) == 2
    assert "--overwrite (overwrite=True) replaces the checkpoint in it" in capsys.readouterr().err
    assert main(["repair", str(source), str(out), "--quiet", "--overwrite"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_other_commands_name_it(source, command, capsys):
    main([command, str(source)])
    told = "`moqext repair` mends old_kv_scale_name; where the files tell how: excluded_but_quantized"
    assert told in " ".join(capsys.readouterr().out.split())


def test_other_commands_do_not_name_it_in_vain(data, capsys):
    main(["inspect", str(data / "exports/mixed_in_qkv")])
    assert "moqext repair" not in capsys.readouterr().out
