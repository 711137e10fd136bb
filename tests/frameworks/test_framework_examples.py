"""The examples of the framework packages run and print what their heads promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", ["llama_nvfp4_kvfp8", "llama_fp8_kvfp8"])
def test_torch_linear(data, capsys, monkeypatch, checkpoint):
    pytest.importorskip("torch", minversion="2.10")
    text = run(monkeypatch, capsys, "torch_linear.py", data / "checkpoints" / checkpoint)
    assert text.count("QuantLinear(") == 3
    assert text.endswith("compiled equals eager: True\n")
