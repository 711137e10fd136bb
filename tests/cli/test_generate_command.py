"""`generate` without what it needs, and with wrong arguments: nothing of a framework is imported."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moqext
from moqext.__main__ import main

from ..work import HANGS

ROOT = Path(moqext.__file__).parents[1]
HIDE = """
import importlib.util, sys
import numpy, moqext
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *given: None if name == "torch" else found(name, *given)
from moqext.__main__ import main
sys.exit(main(["generate", "DIR", "--prompt", "a"]))
"""


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--max-new-tokens", "0", "expected a number from 1 to 1000000, got '0'"),
        ("--max-new-tokens", "many", "expected a number from 1 to 1000000, got 'many'"),
        ("--temperature", "-1", "expected a number from 0 to 100, got '-1'"),
        ("--temperature", "nan", "expected a number from 0 to 100, got 'nan'"),
        ("--temperature", "warm", "expected a number from 0 to 100, got 'warm'"),
        ("--seed", "-1", "expected a seed from 0 to 18446744073709551615, got '-1'"),
        ("--device", "tpu", "got 'tpu'"),
    ],
)
def test_bad_arguments(capsys, option, value, message):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "DIR", "--prompt", "a", f"{option}={value}"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_the_package_one_line_says_what_to_install(capsys, monkeypatch):
    def absent(name, *args):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(importlib, "import_module", absent)
    assert main(["generate", "DIR", "--prompt", "a"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("moqext: error: generate needs moqext_transformers, which is installed with")
    assert output.err.count("\n") == 1


def test_without_torch_one_line_says_what_to_install():
    places = os.pathsep.join([str(ROOT), str(Path(__file__).parents[2] / "python")])
    done = subprocess.run(
        [sys.executable, "-c", HIDE],
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("moqext: error: moqext_transformers needs torch")
    assert "pip install" in done.stderr
    assert done.stderr.count("\n") == 1
