"""On a terminal: its width, and colours by severity. In a pipe: neither."""

import re
import subprocess
import sys

import pytest

import moqext
from moqext.cli.progress import Progress

from ..work import HANGS

RED, YELLOW, END = "\x1b[1;31m", "\x1b[33m", "\x1b[0m"


def piped(*arguments, **options):
    command = [sys.executable, "-m", "moqext", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=HANGS, **options
    ).stdout


def words(text):
    return "".join(text.split())


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_fit_and_names_are_whole(terminal, data, command, columns):
    directory = data / "exports" / "deepseek_nvfp4"
    status, out = terminal(command, directory, columns=columns)
    assert status == 0
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    with moqext.Checkpoint(directory) as checkpoint:
        for layer in checkpoint.layers():
            name = re.sub(r"\.[0-9]+\.", ".*.", layer.name) if command == "inspect" else layer.name
            assert name in words(out)


def test_a_pipe_gets_every_name_in_one_line(data):
    out = piped("verify", data / "exports" / "deepseek_nvfp4")
    assert re.search(
        r"^model\.layers\.0\.self_attn\.kv_a_proj_with_mqa +NVFP4 +32 × 64 +cpu:", out, re.MULTILINE
    )
    assert "\x1b" not in out
    assert "…" not in out


def test_severities_are_coloured(terminal, data, copied, overwrite):
    _, out = terminal("inspect", data / "exports" / "mixed_in_qkv")
    assert f"{YELLOW}  warning  mixed_fused_formats × 2{END}\n" in out
    directory = copied("checkpoints/llama_fp8_kvfp8")
    overwrite(directory, "model.layers.0.mlp.up_proj.weight_scale", b"\0\0\xc0\x7f")
    status, out = terminal("inspect", directory, "--fail-on", "error")
    assert status == 1
    assert f"{RED}  error    scale_not_finite{END}\n" in out
    status, out = terminal("verify", directory, columns=200)
    assert status == 1
    (refused,) = [line for line in out.splitlines() if "up_proj" in line and "refused" in line]
    assert refused.startswith(RED)
    assert refused.endswith(END)
    assert out.splitlines()[-1] == f"{RED}result: 1 error of the checkpoint, 1 refused layer{END}"


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}], ids=str)
def test_colours_can_be_refused(terminal, data, variables):
    _, out = terminal("inspect", data / "exports" / "mixed_in_qkv", **variables)
    assert "\x1b" not in out
    assert "  warning  mixed_fused_formats × 2\n" in out


def test_an_empty_no_color_refuses_nothing(terminal, data):
    _, out = terminal("inspect", data / "exports" / "mixed_in_qkv", NO_COLOR="")
    assert YELLOW in out


def test_messages_are_wrapped_not_clipped(terminal, data):
    options = ("verify", data / "exports" / "w4a16_nvfp4", "--compute", "fp4")
    _, out = terminal(*options, columns=50)
    whole = piped(*options)
    assert max(map(len, out.splitlines())) <= 50
    message = next(line for line in whole.splitlines() if "runs with compute" in line)
    assert words(message) in words(out)


def test_the_bar_leaves_nothing_behind(terminal, data):
    directory = data / "checkpoints" / "llama_fp8_kvfp8"
    status, out = terminal("verify", directory, "--layers", "*.q_proj", errors=True, TERM="dumb")
    assert status == 0
    assert "1/1 " in out
    assert out.split("\r\x1b[K")[-1].startswith("layer")


def test_the_bar_says_how_long_it_takes(capsys, monkeypatch):
    now = iter((0.0, 10.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress(quiet=False, what="weights")
    progress(0, 40_000_000, "first", "1/4")
    progress(10_000_000, 40_000_000, "second", "2/4")
    progress.end()
    first, second = capsys.readouterr().err.split("\r\x1b[K")[1:3]
    assert "] 1/4 · 0 % first" in first
    assert "] 2/4 · 25 %, 1 million weights/s, 0:30 left second" in second


def test_inspect_shows_that_it_reads(terminal, data):
    """184,000 tensors took eleven seconds without a sign of life."""
    status, out = terminal("inspect", data / "checkpoints" / "qwen3moe_nvfp4", errors=True)
    assert status == 0
    bar, *_, report = out.split("\r\x1b[K")[1:]  # drawn again after a tenth of a second
    assert re.match(r"\[\.+\] 0 % .*_scale", bar)
    assert "Qwen3MoeForCausalLM" in report
