"""`convert`: what it prints, its progress and its exit status; what is written is tests/test_convert.py's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moqext
from moqext.__main__ import main
from moqext.cli import progress
from moqext.cli.progress import Progress, clock, draw

from ..work import HANGS


def test_it_says_what_it_wrote(data, tmp_path, capsys):
    assert main(["convert", str(data / "exports/deepseek_nvfp4"), str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: 1 file, 41 tensors, ")
    assert lines[0].endswith(" kB, 28 weights dequantized")
    assert re.fullmatch(r"\S+ kB read and \S+ kB written in .+, .+B/s together", lines[1])
    assert lines[2] == "4 KV-cache scales not written"
    assert err == ""
    assert moqext.Checkpoint(tmp_path / "out").layers() == ()


def test_json(data, tmp_path, capsys):
    arguments = ["convert", str(data / "exports/nvfp4_sharded"), str(tmp_path / "out"), "--json"]
    assert main([*arguments, "--to", "fp32", "--max-shard-size", "0.1 MB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["to"] == "fp32"
    assert len(report["files"]) == 4
    assert report["bytes_written"] == sum(
        info.nbytes for info in moqext.Checkpoint(tmp_path / "out").tensors.values()
    )


def test_quiet_says_nothing(data, tmp_path, capsys):
    assert main(["convert", str(data / "exports/fp8_kvcast"), str(tmp_path / "out"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_directory_that_is_not_empty_is_status_2(data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["convert", str(data / "exports/fp8_kvcast"), str(tmp_path)]) == 2
    assert "is not empty; --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["", "0", "5 parsecs", "-1GB", "GB", "1KK"])
def test_sizes_that_are_none(size, data, tmp_path):
    with pytest.raises(SystemExit):
        main(["convert", str(data), str(tmp_path), "--max-shard-size", size])


def test_a_terminal_gets_a_bar_that_is_wiped(data, tmp_path, terminal):
    status, shown = terminal("convert", data / "exports/nvfp4_sharded", tmp_path / "out", errors=True)
    assert status == 0
    assert re.search(r"\r\x1b\[K\[[#.]+\] \d+ %, .+B/s, 0:00 left ", shown)
    assert "\r\x1b[K" in shown.rpartition("left")[2]


def test_elsewhere_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINES_EVERY", 0.0)
    tell = Progress(quiet=False)
    tell(0, 1_000_000_000, "a")
    capsys.readouterr()
    tell(250_000_000, 1_000_000_000, "a")
    assert re.fullmatch(r"250 MB of 1.00 GB, .+B/s, \d+:\d\d left\n", capsys.readouterr().err)
    Progress(quiet=True)(1, 2, "a")
    assert capsys.readouterr().err == ""


def test_bar_and_clock():
    assert draw(1, 4, 8) == "[##......]"
    assert draw(0, 0, 4) == "[....]"
    assert [clock(seconds) for seconds in (5, 754, 3723)] == ["0:05", "12:34", "1:02:03"]


def test_a_killed_conversion_does_not_look_like_a_checkpoint(data, tmp_path):
    """The process dies in the middle, without any chance to clean up."""
    code = (
        "import moqext, os, signal\n"
        "def die(done, total, name):\n"
        "    if done > total // 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"source = moqext.Checkpoint({str(data / 'exports/nvfp4_sharded')!r})\n"
        f"source.convert({str(tmp_path / 'out')!r}, progress=die)\n"
    )
    root = str(Path(moqext.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.run([sys.executable, "-c", code], env=environment, timeout=HANGS, check=False)
    assert process.returncode == -9
    assert list((tmp_path / "out").glob("*")) == list((tmp_path / "out").glob(".moqext-convert-*")) != []
    moqext.Checkpoint(data / "exports/nvfp4_sharded").convert(tmp_path / "out", overwrite=True)
    assert list((tmp_path / "out").glob(".moqext-convert-*")) == []
