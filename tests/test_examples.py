"""The examples run and print what their heads promise."""

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_layer_errors(data, capsys, monkeypatch):
    arguments = ["layer_errors.py", str(data / "checkpoints" / "llama_nvfp4_kvfp8"), "128"]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(EXAMPLES / "layer_errors.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    for line in lines:
        fp8, fp4 = map(float, re.findall(r"([\d.]+)%", line))
        assert 1 < fp8 < 6, line  # folded weights and E4M3 activations, about 2 % each
        assert fp4 > fp8, line
